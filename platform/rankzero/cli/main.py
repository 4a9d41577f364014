"""The command line. A verb's module is imported when it is called, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import os
import re
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rankzero import __version__
from rankzero.cli.verbs import FOR_CLUSTERS, TRAINING_VERBS, VERBS
from rankzero.errors import FAILED, FINISHED, USAGE, UserError
from rankzero.launch import output
from rankzero.mlflow_store.patience import A_DAY, WAIT
from rankzero.run_store.location import root_of

# `doctor` says it as one of its checks.
_WITHOUT_STORE = ("init", "config", "completion", "doctor", "relocate")
_SUMMARY = 13
"""The column of the verbs' summaries in `rankzero --help`."""
_START = """\
RankZero trains PyTorch models, tracked in MLflow. Most people begin with:

  rankzero init my_experiment.py     write an experiment that trains at once
  rankzero train my_experiment.py    train it; lr=0.01 changes a setting
  rankzero ui                        look at the runs in MLflow

`rankzero --help` lists all {} verbs, and `rankzero train --help` the options of one."""


def command() -> NoReturn:
    """Run one command and exit with its code."""
    output.open_closed_streams()
    if os.getpid() == 1:
        # Linux drops a signal for which the first process of a container has no handler.
        signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))
    code = main()
    if "triton" in sys.modules:
        # It takes frozen objects for leaks, and prints thirty lines about them at its end.
        gc.unfreeze()
    else:
        # With PyTorch imported, the interpreter would walk its objects for a third of a second.
        gc.freeze()
    # It takes a sixth of a second more to shut down. A SIGUSR1 would kill a finished command.
    ignored = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    try:
        sys.stdout.flush()
    except OSError:  # a full disk, to which Python would write again, and exit with 120
        _drop_output()
        # A training is more than its output. That of others is what somebody wants.
        code = code or (FINISHED if sys.argv[1:2] in (["train"], ["resume"]) else FAILED)
    sys.exit(code)


def _drop_output() -> None:
    """Lead what is left to print to nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    output.escape_unencodable()
    if not words:
        print(_START.format(len(VERBS)))
        return USAGE
    try:
        output.refuse_paths_in_ascii(words)
        arguments = parse(words)  # imports the verb's module, during which Ctrl-C may come
        if arguments.verb in TRAINING_VERBS:
            from rankzero.cli.display.terminal import warn_if_interrupt_is_ignored

            warn_if_interrupt_is_ignored()
        if arguments.verb not in _WITHOUT_STORE:
            from rankzero.catalog import moved

            if note := moved.note(arguments.dir):
                print(f"note: {note}", file=sys.stderr, flush=True)
        if "wait_delivery" in arguments:
            # In the environment, for the recorder and the courier. Offline, nothing is delivered.
            waits = arguments.wait_delivery is not None and not arguments.offline
            os.environ[WAIT] = str(arguments.wait_delivery) if waits else ""
            from rankzero.redaction.text import NOTIFY

            os.environ[NOTIFY] = arguments.notify or ""
        return int(_function("run", arguments.verb)(arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # The reader of our output has gone, as in `rankzero runs | head`. Python would try to flush
        # the rest into the broken pipe when it exits.
        _drop_output()
        return FAILED
    except Exception as error:  # any error is printed in one line
        if "--debug" in words:
            raise
        return _report(error)


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the words of a command line; only the module of its verb is imported."""
    if words[:1] not in ([verb] for verb in VERBS):
        _top_parser().parse_known_args(words[:1])  # --help and --version end here
        raise UserError(_no_verb(words[0]))
    verb = words[0]
    # The words after it are options of Slurm's own programs.
    end = words.index("--") if verb in FOR_CLUSTERS and "--" in words else len(words)
    words, after = words[:end], words[end + 1 :]
    # argparse would take a word after --wait-delivery, or --wait, for its seconds.
    rest = [re.sub("^--wait[a-z-]*$", rf"\g<0>={A_DAY}", word) for word in words[1:]]
    while "--sort" in rest[:-1]:
        # argparse would take the -key of `--sort -key` for an option.
        at = rest.index("--sort")
        rest[at : at + 2] = [f"--sort={rest[at + 1]}"]
    # Intermixed: options may stand between key=value words.
    parser = parser_of(verb)
    arguments, unknown = parser.parse_known_intermixed_args(rest)
    if unknown:
        parser.error(_no_option(unknown, parser, takes_settings="settings" in arguments))
    arguments.verb, arguments.words, arguments.after = verb, words[1:], after
    return arguments


def parser_of(verb: str) -> argparse.ArgumentParser:
    """Return the parser of one verb's words."""
    summary = VERBS[verb].summary
    parser = _Parser(
        prog=f"rankzero {verb}",
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=_Formatter,
        epilog=f"example:\n  {VERBS[verb].example}",
    )
    _function("add_arguments", verb)(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    parser.add_argument(
        "--dir",
        type=Path,
        default=root_of(None),
        help="the folder of the embedded store and the runs (default: $RANKZERO_DIR or ./mlruns)",
    )
    return parser


def _function(name: str, verb: str) -> Callable[[Any], Any]:
    """Return `add_arguments` or `run` of a verb."""
    module = importlib.import_module(VERBS[verb].module or f"rankzero.cli.commands.{verb}")
    found: Callable[[Any], Any] = getattr(module, name + VERBS[verb].suffix)
    return found


class _Formatter(argparse.HelpFormatter):
    """Wraps help between words, and never within an option, a path or a command."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrapped(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        found = []
        for line in text.splitlines():
            if line.startswith("  rankzero "):  # people copy the example
                found.append(" \\\n".join(_wrapped(line, width - 2, "    ")))
            else:
                # The summary of a verb stays in its column.
                hanging = " " * _SUMMARY if line.startswith("  ") else ""
                found += _wrapped(line, width, hanging) or [""]
        return indent + f"\n{indent}".join(found)


def _wrapped(text: str, width: int, hanging: str = "") -> list[str]:
    words: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, width, subsequent_indent=hanging, **words)


def _top_parser() -> argparse.ArgumentParser:
    verbs = "".join(f"  {name:{_SUMMARY - 3}} {verb.summary}\n" for name, verb in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="rankzero",
        description="Tracked PyTorch training: run experiments, browse them in MLflow.",
        formatter_class=_Formatter,
        epilog=f"verbs:\n{verbs}\n`rankzero VERB --help` shows a verb's options. "
        "Exit codes: 0 finished, 1 failed, 2 usage, 74 finished but not delivered, "
        "75 stopped but resumable.",
    )
    parser.add_argument("--version", action="version", version=f"rankzero {__version__}")
    parser.add_argument("verb", nargs="?", metavar="VERB", help="one of the verbs below")
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise UserError with an example of the verb, and not the list of all its options."""
        raise UserError(f"{message}\n{self.epilog}\n`{self.prog} --help` shows every option")


def _no_verb(word: str) -> str:
    if word.endswith(".py"):
        return f"{word!r} is no verb: write rankzero train {shlex.quote(word)}"
    # Not the default of 0.6: `tune` is no `prune`, which deletes.
    near = difflib.get_close_matches(word, VERBS, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]!r}?" if near else "`rankzero --help` lists them"
    return f"{word!r} is no verb; {hint}"


def _no_option(words: Sequence[str], parser: argparse.ArgumentParser, takes_settings: bool) -> str:
    """Return what to write for options, or other words, that a verb does not have."""
    option, _, value = words[0].partition("=")
    # `_actions` is private. It is what argcomplete, shtab and sphinx-argparse read, too.
    known = [name for action in parser._actions for name in action.option_strings]
    near = difflib.get_close_matches(option, known, n=1, cutoff=0.8)
    if near:
        return f"there is no option {option}; did you mean {near[0]}?"
    if not (takes_settings and option.startswith("--")):
        return f"{option!r} is one word too many, or an option that does not exist"
    from rankzero.config import flatten
    from rankzero.experiment import Experiment

    # The file is not loaded, so its own settings are not known.
    key = option.lstrip("-").replace("-", "_")
    keys = [name for name in flatten(Experiment()) if f".{name}".endswith(f".{key}")]
    if not keys:
        return f"there is no option {option}; `rankzero config EXP` lists the settings, key=value"
    following = [word for word in words[1:2] if not word.startswith("-")]
    written = value or "".join(following) or "…"
    return f"there is no option {option}; write {min(keys, key=len)}={written}"


def _report(error: Exception) -> int:
    """Print one message about an error; return the exit code."""
    from rankzero.config import ConfigError
    from rankzero.errors import RunFailed
    from rankzero.launch.failures import reason
    from rankzero.redaction.text import url_without_secrets

    if isinstance(error, (UserError, ConfigError, RunFailed)):
        print(f"error: {url_without_secrets(str(error))}", file=sys.stderr)
        return FAILED if isinstance(error, RunFailed) else USAGE
    text = url_without_secrets(reason(error))
    print(f"error: {text}\n(--debug shows the traceback)", file=sys.stderr)
    return FAILED

"""The command line. A verb's module is imported when it is called, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rankzero import __version__
from rankzero.cli.verbs import TRAINING_VERBS, VERBS
from rankzero.errors import FAILED, USAGE
from rankzero.launch import output
from rankzero.mlflow_store.patience import A_DAY, WAIT
from rankzero.run_store.location import root_of


def command() -> NoReturn:
    """Run one command and exit with its code."""
    code = main()
    # With PyTorch imported the interpreter takes a third of a second to shut down. A SIGUSR1 in
    # that time would kill a finished command.
    ignored = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    output.escape_unencodable()
    try:
        arguments = parse(words)  # imports the verb's module, during which Ctrl-C may come
        if arguments.verb in TRAINING_VERBS:
            from rankzero.cli.display.terminal import warn_if_interrupt_is_ignored

            warn_if_interrupt_is_ignored()
        if "wait_delivery" in arguments:
            # In the environment, for the recorder and the courier. Offline, nothing is delivered.
            waits = arguments.wait_delivery is not None and not arguments.offline
            os.environ[WAIT] = str(arguments.wait_delivery) if waits else ""
        return int(_function("run", arguments.verb)(arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # The reader of our output has gone, as in `rankzero runs | head`. Python would try to flush
        # the rest into the broken pipe when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:  # any error is printed in one line
        if "--debug" in words:
            raise
        return _report(error)


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the words of a command line; only the module of its verb is imported."""
    verb = _top_parser().parse_args(words[:1]).verb
    # argparse would take a word after --wait-delivery for its seconds.
    rest = [f"{word}={A_DAY}" if word == "--wait-delivery" else word for word in words[1:]]
    while "--sort" in rest[:-1]:
        # argparse would take the -key of `--sort -key` for an option.
        at = rest.index("--sort")
        rest[at : at + 2] = [f"--sort={rest[at + 1]}"]
    # Intermixed: options may stand between key=value words.
    arguments = parser_of(verb).parse_intermixed_args(rest)
    arguments.verb = verb
    return arguments


def parser_of(verb: str) -> argparse.ArgumentParser:
    """Return the parser of one verb's words."""
    summary = VERBS[verb].summary
    parser = argparse.ArgumentParser(
        prog=f"rankzero {verb}",
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # people copy the example
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


def _top_parser() -> argparse.ArgumentParser:
    verbs = "".join(f"  {name:10} {verb.summary}\n" for name, verb in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="rankzero",
        description="Tracked PyTorch training: run experiments, browse them in MLflow.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"verbs:\n{verbs}\n`rankzero VERB --help` shows a verb's options. "
        "Exit codes: 0 finished, 1 failed, 2 usage, 74 finished but not delivered, "
        "75 stopped but resumable.",
    )
    parser.add_argument("--version", action="version", version=f"rankzero {__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="one of the verbs below")
    return parser


def _report(error: Exception) -> int:
    """Print one message about an error; return the exit code."""
    from rankzero.config import ConfigError
    from rankzero.errors import RunFailed, UserError
    from rankzero.launch.failures import reason
    from rankzero.redaction.text import url_without_secrets

    if isinstance(error, (UserError, ConfigError, RunFailed)):
        print(f"error: {url_without_secrets(str(error))}", file=sys.stderr)
        return FAILED if isinstance(error, RunFailed) else USAGE
    text = url_without_secrets(reason(error))
    print(f"error: {text}\n(--debug shows the traceback)", file=sys.stderr)
    return FAILED

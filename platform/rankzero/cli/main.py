"""The command line: one verb a file, imported when it is called for. ``--help`` imports nothing heavy."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from rankzero import __version__
from rankzero.cli.verbs import VERBS
from rankzero.errors import FAILED, USAGE
from rankzero.launch import output
from rankzero.run_store.location import root_of

AFTER_MINUS = ("--sort",)  # options whose value may begin with a minus


def command() -> NoReturn:
    """Run one command and exit with its code, whatever signal comes while the interpreter shuts down.

    That takes a third of a second once PyTorch is imported, in which SIGUSR1, say, would be the end of a finished run.
    """
    code = main()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 finished, 1 failed, 2 usage, 75 stopped but resumable."""
    words = list(sys.argv[1:] if argv is None else argv)
    output.take_anything()
    try:
        arguments = parse(words)  # imports the verb's module: Ctrl-C may come amid that
        return int(
            importlib.import_module(f"rankzero.cli.commands.{arguments.verb}").run(arguments)
        )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # the reader of our output has gone, as in `rankzero runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if "--debug" in words:
            raise
        return _report(error)


def parse(words: list[str]) -> argparse.Namespace:
    """Read the words; only the module of the verb that is called is imported."""
    verb = _top_parser().parse_args(words[:1]).verb
    words = list(_with_their_values(words[1:]))
    arguments = parser_of(verb).parse_intermixed_args(
        words
    )  # options may stand between key=value words
    arguments.verb = verb
    return arguments


def parser_of(verb: str) -> argparse.ArgumentParser:
    """Return the parser of one verb's words."""
    what = VERBS[verb].summary
    parser = argparse.ArgumentParser(
        prog=f"rankzero {verb}",
        description=what[0].upper() + what[1:] + ".",
        formatter_class=_Help,
        epilog=f"example:\n  {VERBS[verb].example}",
    )
    importlib.import_module(f"rankzero.cli.commands.{verb}").add_arguments(parser)
    _add_common(parser)
    return parser


class _Help(argparse.HelpFormatter):
    """Wraps everything but the example, which people copy."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("example:") else super()._fill_text(text, width, indent)


def _with_their_values(words: Sequence[str]) -> Iterator[str]:
    """Yield the words, ``--sort -key`` as ``--sort=-key``: argparse would take the value for an option."""
    waiting = ""
    for word in words:
        if waiting or word not in AFTER_MINUS:
            yield waiting + word
            waiting = ""
        else:
            waiting = word + "="
    if waiting:
        yield waiting.rstrip("=")


def _top_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankzero",
        description="Tracked PyTorch training: run experiments, browse them in MLflow.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="verbs:\n"
        + "".join(f"  {name:10} {verb.summary}\n" for name, verb in VERBS.items())
        + "\n`rankzero VERB --help` tells more. Exit codes: 0 finished, 1 failed, 2 usage, 75 stopped but resumable.",
    )
    parser.add_argument("--version", action="version", version=f"rankzero {__version__}")
    parser.add_argument(
        "verb", choices=VERBS, metavar="VERB", help="what to do, one of the verbs below"
    )
    return parser


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    command.add_argument(
        "--dir",
        type=Path,
        default=root_of(None),
        help="the folder of the embedded store and of the runs (default: $RANKZERO_DIR or ./mlruns)",
    )


def _report(error: Exception) -> int:
    """Say what went wrong in one message; return the exit code."""
    from rankzero.config import ConfigError
    from rankzero.errors import RunFailed, UserError
    from rankzero.redaction.text import url_without_secrets

    if isinstance(error, (UserError, ConfigError, RunFailed)):
        print(f"error: {url_without_secrets(str(error))}", file=sys.stderr)
        return FAILED if isinstance(error, RunFailed) else USAGE
    from rankzero.launch.failures import reason

    print(
        f"error: {url_without_secrets(reason(error))}\n(--debug shows the traceback)",
        file=sys.stderr,
    )
    return FAILED

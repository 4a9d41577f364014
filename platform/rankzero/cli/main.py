"""The command line: one verb a file, imported when it is called for. ``--help`` imports nothing heavy."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rankzero import __version__

FINISHED, FAILED, USAGE, RESUMABLE = 0, 1, 2, 75  # 75 is sysexits' EX_TEMPFAIL: stopped, try again

VERBS = {
    "train": "run an experiment, tracked",
    "resume": "go on with a run, in the same MLflow run",
    "search": "find the configuration that reaches the quality bar in the least time",
    "probe": "measure samples/s and memory, batch size x precision",
    "compare": "train the same work under several strategies, and compare",
    "profile": "see where the time of a step goes",
    "report": "show a search's verdict again",
    "config": "show an experiment's settings and every legal key",
    "runs": "list runs",
    "ui": "open the MLflow UI on the embedded store",
    "sync": "deliver to MLflow what a run's recorder left",
    "doctor": "check this machine, or tell what became of a run",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 finished, 1 failed, 2 usage, 75 stopped but resumable."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parse(words)
    try:
        return int(importlib.import_module(f"rankzero.cli.{arguments.verb}").run(arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # the reader of our output has gone, as in `rankzero runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if arguments.debug:
            raise
        return _report(error)


def _parse(words: list[str]) -> argparse.Namespace:
    """Read the words; only the module of the verb that is called is imported."""
    verb = _top_parser().parse_args(words[:1]).verb
    parser = argparse.ArgumentParser(prog=f"rankzero {verb}", description=VERBS[verb].capitalize() + ".")
    importlib.import_module(f"rankzero.cli.{verb}").add_arguments(parser)
    _add_common(parser)
    arguments = parser.parse_intermixed_args(words[1:])  # options may stand between key=value words
    arguments.verb = verb
    return arguments


def _top_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankzero",
        description="Tracked PyTorch training: run experiments, browse them in MLflow.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="verbs:\n"
        + "".join(f"  {verb:8} {summary}\n" for verb, summary in VERBS.items())
        + "\n`rankzero VERB --help` tells more. Exit codes: 0 finished, 1 failed, 2 usage, 75 stopped but resumable.",
    )
    parser.add_argument("--version", action="version", version=f"rankzero {__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="what to do, one of the verbs below")
    return parser


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    command.add_argument(
        "--dir",
        type=Path,
        default=Path(os.environ.get("RANKZERO_DIR", "mlruns")),
        help="the folder of the embedded store and of the runs (default: $RANKZERO_DIR or ./mlruns)",
    )


def _report(error: Exception) -> int:
    """Say what went wrong in one message; return the exit code."""
    from rankzero.config import ConfigError
    from rankzero.errors import RunFailed, UserError
    from rankzero.tracking.secrecy import url_without_secrets

    if isinstance(error, (UserError, ConfigError, RunFailed)):
        print(f"error: {url_without_secrets(str(error))}", file=sys.stderr)
        return FAILED if isinstance(error, RunFailed) else USAGE
    from rankzero.train.failure import reason

    print(f"error: {url_without_secrets(reason(error))}\n(--debug shows the traceback)", file=sys.stderr)
    return FAILED

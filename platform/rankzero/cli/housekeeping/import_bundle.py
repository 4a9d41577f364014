"""``rankzero import FILE``: a run that `rankzero export --bundle` wrote, into this store."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rankzero.cli.display.live import command
from rankzero.errors import FINISHED
from rankzero.housekeeping import bundle
from rankzero.mlflow_store import uris
from rankzero.run_store.location import is_offline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="the bundle")
    store = "the store that gets the run (default: $MLFLOW_TRACKING_URI or the embedded store)"
    parser.add_argument("--tracking-uri", help=store)


def run(arguments: argparse.Namespace) -> int:
    uri = uris.resolve_tracking_uri(arguments.tracking_uri, os.environ, arguments.dir)
    folder = bundle.read(
        arguments.file,
        arguments.dir / "runs",
        uri,
        offline=is_offline(),
        notice=lambda text: print(text, file=sys.stderr),
    )
    again = command(arguments.dir, "report", folder.path.name)
    print(f"{folder.path.name} is imported: {again}")
    return FINISHED

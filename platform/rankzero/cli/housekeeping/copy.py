"""``rankzero copy RUN --to URI``: a whole run into another MLflow, such as a team's server."""

from __future__ import annotations

import argparse
import os
import sys

from rankzero.cli import options
from rankzero.cli.housekeeping.export import print_left_out
from rankzero.errors import FINISHED
from rankzero.housekeeping import bundle
from rankzero.mlflow_store import named_runs, uris
from rankzero.redaction.text import url_without_secrets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run(parser)
    store = "the MLflow that gets the run, as http://server:5000"
    parser.add_argument("--to", metavar="URI", required=True, help=store)


def run(arguments: argparse.Namespace) -> int:
    folder = named_runs.require(arguments.dir / "runs", arguments.run_name)
    uri = uris.resolve_tracking_uri(arguments.to, os.environ, arguments.dir)
    print_left_out(folder)
    run_id = bundle.copy(folder, uri, lambda text: print(text, file=sys.stderr))
    place = url_without_secrets(uri)
    print(f"{folder.path.name} is in {place}, too: its id there is {run_id}")
    return FINISHED

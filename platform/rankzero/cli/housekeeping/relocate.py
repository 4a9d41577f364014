"""``rankzero relocate``: a store that was moved or copied finds its artifacts where it is now."""

from __future__ import annotations

import argparse

from rankzero.errors import FINISHED
from rankzero.housekeeping import relocation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: ``--dir`` names the store."""


def run(arguments: argparse.Namespace) -> int:
    found = relocation.relocate(arguments.dir)
    if not found.places:
        print(f"{arguments.dir} is where its paths lead: nothing to do")
        return FINISHED
    counts = f"{found.runs} runs and {found.paths} paths in MLflow"
    print(f"{arguments.dir} has its own place now, for {counts}")
    for place in found.places:
        print(f"before: {place}" + (" (still there, and unchanged)" if place.exists() else ""))
    return FINISHED

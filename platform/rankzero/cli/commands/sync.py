"""``rankzero sync [RUN]``: deliver to MLflow what dead or discouraged recorders left."""

from __future__ import annotations

import argparse

from rankzero.catalog import lookup
from rankzero.catalog.summary import Summary
from rankzero.errors import FAILED, FINISHED
from rankzero.run_store import claims, delivery_state
from rankzero.run_store.folder import FolderGone, RunFolder
from rankzero.run_store.names import InvalidRunFolder
from rankzero.tracking import sync


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="a run's name or MLflow id (default: all that wait)"
    )


def run(arguments: argparse.Namespace) -> int:
    runs, broken = arguments.dir / "runs", list[str]()
    if arguments.run:
        waiting = [lookup.require(runs, arguments.run)]
    else:
        waiting = [one.folder for one in lookup.listed(runs, broken.append) if _waits(one)]
    for text in broken:
        print(f"passed over: {text}")
    if not waiting:
        print(f"nothing {'else ' if broken else ''}waits: everything is in MLflow")
    return max([FAILED if broken else FINISHED, *map(_deliver, waiting)])


def _waits(one: Summary) -> bool:
    """Tell whether something of a run is not in MLflow: events, its end, its model, pictures; perhaps on their way."""
    late = one.undelivered or one.status == "DIED" or one.folder.late_model.exists()
    return late or delivery_state.glance(delivery_state.path_of(one.folder, 0)).undrawn


def _deliver(folder: RunFolder) -> int:
    from rankzero.training.checkpoints import best_model

    name = folder.path.name
    try:
        result = sync.deliver(folder)
    except (FolderGone, InvalidRunFolder) as error:
        print(f"{name}: {error}")
        return FAILED
    if result.pending:
        print(
            f"{name}: {result.delivered:,} values delivered, the rest not: {result.error or 'no answer'}; "
            f"try again later: rankzero sync {name}"
        )
        return FAILED
    if lookup.last_end(folder) is None and not claims.writer_lives(folder):
        print(
            f"{name}: its recorder lives, and is to write its end: try again later: rankzero sync {name}"
        )
        return FAILED
    lacks = f", but for its figures: rankzero sync {name}" if result.undrawn else ""
    print(f"{name}: complete, {result.delivered:,} values in MLflow{lacks}")
    for line in result.trouble:
        print(f"  {line}")
    ended = lookup.last_end(folder)
    if ended is not None and ended.status == "FINISHED":
        best_model.in_new_process(folder, lambda text: print(f"{name}: {text}"))
    return FINISHED

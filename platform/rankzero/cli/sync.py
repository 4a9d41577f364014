"""``rankzero sync [RUN]``: deliver to MLflow what dead or discouraged recorders left."""

from __future__ import annotations

import argparse

from rankzero.exit_codes import FAILED, FINISHED
from rankzero.tracking import catalog, progress, sync
from rankzero.tracking.folder import FolderGone, RunFolder
from rankzero.tracking.names import BrokenRun
from rankzero.tracking.summary import Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run's name or MLflow id (default: all that wait)")


def run(arguments: argparse.Namespace) -> int:
    runs = arguments.dir / "runs"
    if arguments.run:
        waiting = [catalog.require(runs, arguments.run)]
    else:
        waiting = [
            one.folder for one in catalog.listed(runs, told=lambda text: print(f"passed over: {text}")) if _waits(one)
        ]
    if not waiting:
        print("nothing waits: everything is in MLflow")
    return max([_deliver(folder) for folder in waiting], default=FINISHED)


def _waits(one: Summary) -> bool:
    """Tell whether something of a run is not in MLflow: events, its end, pictures, which its courier may be at."""
    return one.undelivered or one.status == "DIED" or progress.glance(progress.path_of(one.folder, 0)).undrawn


def _deliver(folder: RunFolder) -> int:
    from rankzero.train import export

    name = folder.path.name
    try:
        result = sync.deliver(folder)
    except (FolderGone, BrokenRun) as error:
        print(f"{name}: {error}")
        return FAILED
    if result.pending:
        print(
            f"{name}: {result.delivered:,} values delivered, the rest not: {result.error or 'no answer'}; "
            f"try again later: rankzero sync {name}"
        )
        return FAILED
    lacks = f", but for its figures: rankzero sync {name}" if result.undrawn else ""
    print(f"{name}: complete, {result.delivered:,} values in MLflow{lacks}")
    for line in result.trouble:
        print(f"  {line}")
    ended = catalog.last_end(folder)
    if ended is not None and ended.status == "FINISHED":
        export.in_new_process(folder, lambda text: print(f"{name}: {text}"))
    return FINISHED

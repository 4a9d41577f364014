"""A seeded campaign of faults against the real command.     make torture [ARGS="--faults 500 --seed 7"]

Each scenario hurts a real training (two ranks, MLflow) at random moments, then asks what users are promised: nothing
lost, no corrupt restore, no wrong status, no hang, no orphan. The folder of a scenario that broke a promise is kept.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import platform
import re
import shutil
import sqlite3
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rankzero.tracking.mlflow import Tracker
from torture import curves, promises, room
from torture.curves import Curves
from torture.fuzzing import Fuzzed, fuzz
from torture.ground import CROWD, FIRST, Broken, Ground, Turn
from torture.scenarios import SCENARIOS
from torture.scenarios.training import SETTINGS, TINY
from torture.servers import Server

PROMISES = ("lost", "corrupt", "wrong", "wrong status", "hang", "orphan")
"""What a broken promise is called: the first word of what `Broken` says."""
FOLDERS = re.compile(r"(?:(?<![\w.:/])|(?<=sqlite:///))/(?:[^\s/'\"]+/)+")
"""What stands before the last name of an absolute path."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What one scenario came to."""

    scenario: str
    seed: int
    faults: list[str]
    seconds: float
    broken: str | None
    """The promise that did not hold."""


@dataclasses.dataclass(frozen=True)
class Field:
    """What all scenarios of a campaign share."""

    folder: Path
    store: Path
    """An MLflow database without a run: a copy is quicker than a new one."""
    server: str
    """An MLflow server's address."""
    reference: Curves
    """The metrics of a training that nobody disturbed."""
    crowd: int = CROWD
    """How many runs a crowd is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; return 1 where a promise was broken."""
    options = _parse(arguments)
    with prepared(options.crowd) as field:
        results = []
        for result in campaign(field, options.seed, options.faults, options.minutes, options.only):
            results.append(result)
            print(_line(result, results), flush=True)
    fuzzed = fuzz(options.fuzz) if options.fuzz else None
    print(summary(results) + (f"\n{fuzzed.line}" if fuzzed else ""))
    if options.report:
        Path(options.report).write_text(json.dumps(report(results, options.seed, fuzzed), indent=1) + "\n")
    if fuzzed is not None and not fuzzed.passed:
        print(fuzzed.output)
        return 1
    return 1 if any(result.broken for result in results) else 0


def campaign(field: Field, seed: int, faults: int, minutes: float | None, only: Sequence[str] = ()) -> Iterator[Result]:
    """Yield the results of one scenario after the other, until so many faults or minutes are reached."""
    names = list(only or SCENARIOS)
    began, injected, number = time.monotonic(), 0, 0
    while injected < faults and (minutes is None or time.monotonic() - began < 60 * minutes):
        result = tried(field, names[number % len(names)], seed + number, Turn(seed, number // len(names)))
        injected, number = injected + len(result.faults), number + 1
        yield result


def tried(field: Field, scenario: str, seed: int, turn: Turn = FIRST) -> Result:
    """Run one scenario in a folder of its own."""
    folder = field.folder / f"{seed}-{scenario.replace(' ', '-')}"
    folder.mkdir()
    ground = Ground(folder, seed, field.store, field.crowd, turn)
    ground.environ["TORTURE_SERVER"] = field.server
    began, broken = time.monotonic(), None
    try:
        SCENARIOS[scenario](ground, field.reference)
        promises.nothing_is_left(ground)
    except Broken as error:
        broken = str(error)
    except Exception:
        broken = f"error: {traceback.format_exc()}"
    ground.clean_up()
    if broken is None:
        shutil.rmtree(folder, ignore_errors=True)
    return Result(scenario, seed, ground.faults, time.monotonic() - began, broken)


@contextlib.contextmanager
def prepared(crowd: int = CROWD) -> Iterator[Field]:
    """Make what all scenarios share: an empty store, a server, the undisturbed losses."""
    folder = Path(tempfile.mkdtemp(prefix="rankzero-torture-"))
    store = folder / "empty.db"
    Tracker(f"sqlite:///{store}").list_runs()
    with contextlib.closing(sqlite3.connect(store)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # all of it into the one file
    with Server(folder / "server", store) as server:
        ground = Ground(folder / "reference", 0, store)
        ground.run("train", TINY, *SETTINGS)
        run = ground.the_run()
        assert run is not None
        yield Field(folder, store, server.uri, curves.latest(run), crowd)
    with contextlib.suppress(OSError):
        shutil.rmtree(folder / "reference")
        shutil.rmtree(folder / "server")


def summary(results: Sequence[Result]) -> str:
    """Return the campaign in a table: by scenario, faults tried and what broke."""
    lines = [f"{'scenario':<22}{'times':>6}{'faults':>8}{'broken':>8}"]
    for name in dict.fromkeys(result.scenario for result in results):
        mine = [result for result in results if result.scenario == name]
        faults, broken = sum(len(one.faults) for one in mine), sum(one.broken is not None for one in mine)
        lines.append(f"{name:<22}{len(mine):>6}{faults:>8}{broken:>8}")
    return "\n".join([*lines, verdict(results)])


def verdict(results: Sequence[Result]) -> str:
    """Return the campaign in a line. A fault has survived where its scenario broke no promise."""
    faults = [fault for result in results for fault in result.faults]
    survived = sum(len(result.faults) for result in results if result.broken is None)
    broken = collections.Counter(result.broken.partition(":")[0] for result in results if result.broken)
    told = ", ".join(f"{kind} {broken.pop(kind, 0)}" for kind in PROMISES)
    other = f", other {broken.total()}" if broken else ""
    return f"faults tried {len(faults)} over {len(set(faults))} kinds; survived {survived}; {told}{other}"


def report(results: Sequence[Result], seed: int, fuzzed: Fuzzed | None = None) -> dict[str, object]:
    """Return what is kept of a campaign."""
    return {
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.system()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "verdict": verdict(results),
        "fuzz": fuzzed and fuzzed.line,
        "faults": sum(len(result.faults) for result in results),
        "by_fault": dict(collections.Counter(fault for result in results for fault in result.faults).most_common()),
        "scenarios": [
            {**dataclasses.asdict(result), "broken": result.broken and without_folders(result.broken)}
            for result in results
        ],
    }


def without_folders(text: str) -> str:
    """Return the text with the last name of every path alone: a report is read where nobody knows the machine."""
    return FOLDERS.sub("", text)


def _line(result: Result, results: Sequence[Result]) -> str:
    faults = sum(len(one.faults) for one in results)
    mark = "ok" if result.broken is None else f"BROKEN {result.broken}"
    took = f"{result.seconds:5.0f} s  {len(result.faults):>3} faults"
    return f"{faults:>5}  {result.scenario:<20} seed {result.seed:<6} {took}  {mark}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=100, help="how many to inject (default: 100, about ten minutes)")
    parser.add_argument("--minutes", type=float, help="stop after so long; with --faults 1000000, for hours of it")
    parser.add_argument("--only", nargs="*", choices=list(SCENARIOS), default=[], help="these scenarios")
    parser.add_argument("--crowd", type=int, default=CROWD, help="how many runs at once are a crowd (%(default)s)")
    parser.add_argument("--fuzz", type=int, default=0, help="then so many cases for each fuzz test (default: none)")
    parser.add_argument("--report", help="a file for the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    room.enter(sys.argv[1:])
    sys.exit(main())

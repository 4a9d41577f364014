"""A seeded campaign of faults against the real command.     make torture [ARGS="--faults 50 --seed 7"]

Each scenario hurts a real training (two ranks, MLflow) at random moments, then asks what users are promised: nothing
lost, no corrupt restore, no wrong status, no hang, no orphan. What it tries of its variants goes round from one time to
the next. The folder of a scenario that broke a promise is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from rankzero.mlflow_store.client import MlflowRuns
from torture import curves, promises, room
from torture.board import Board
from torture.curves import Curves
from torture.fuzzing import fuzz
from torture.ground import CROWD, FIRST, Broken, Ground, NotRun, Turn
from torture.results import Result, report, summary
from torture.scenarios import SCENARIOS
from torture.scenarios.training import SETTINGS, TINY
from torture.servers import Server

ALONE = ("crowd",)
"""Scenarios that leave no processor time for another beside them: what ends in time elsewhere would not."""
LEAST_CROWD, RUN_BYTES = 6, 900 << 20
"""A run, with its launcher, recorder and courier, takes three quarters of a gigabyte."""


@dataclasses.dataclass(frozen=True)
class SharedSetup:
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
    words = sys.argv[1:] if arguments is None else list(arguments)
    options, began = _parse(words), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="rankzero-torture-board-"))
    parts = [_start_part(words, folder) for _ in range(options.parallel)]
    codes = [part.wait() for part in parts]
    results, minutes = Board(folder).results(), (time.monotonic() - began) / 60
    fuzzed = fuzz(options.fuzz) if options.fuzz else None
    print(summary(results) + (f"\n{fuzzed.line}" if fuzzed else ""))
    if options.report:
        told = report(results, options.seed, fuzzed) | {
            "minutes": round(minutes, 1),
            "side_by_side": options.parallel,
        }
        Path(options.report).write_text(json.dumps(told, indent=1) + "\n")
    if fuzzed is not None and not fuzzed.passed:
        print(fuzzed.output)
    shutil.rmtree(folder)
    return int(
        any(codes)
        or any(one.broken for one in results)
        or (fuzzed is not None and not fuzzed.passed)
    )


def _start_part(words: Sequence[str], board: Path) -> subprocess.Popen[bytes]:
    """Start a part of a campaign, which enters a room of its own: what is left there is one scenario's."""
    return subprocess.Popen(
        [sys.executable, "-m", "torture.campaign", *words, "--board", str(board)]
    )


def take_part(arguments: Sequence[str]) -> None:
    """Try the scenarios that nobody has taken, until there are so many faults, or the time is over."""
    options = _parse(arguments)
    if (
        signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    ):  # as under nohup: commands would take it for their users' wish
        signal.signal(signal.SIGHUP, lambda *_: None)
    if not room.is_mine():
        print(room.UNCHECKED, flush=True)
    with shared_setup(options.crowd) as setup:
        board, names = Board(options.board), options.only or list(SCENARIOS)
        until = time.monotonic() + 60 * options.minutes
        while (
            board.injected() < options.faults
            and time.monotonic() < until
            and not _all_omitted(board, names)
        ):
            number = board.take()
            turn = Turn(options.seed, number // len(names))
            scenario = names[number % len(names)]
            with board.room(alone=scenario in ALONE):
                result = run_scenario(setup, scenario, options.seed + number, turn)
            board.put(number, result)
            print(_line(result, board.injected()), flush=True)


def _all_omitted(board: Board, names: Sequence[str]) -> bool:
    """Tell whether this machine allows none of the scenarios: there will never be a fault."""
    return set(names) == {result.scenario for result in board.results() if result.not_run}


def run_scenario(setup: SharedSetup, scenario: str, seed: int, turn: Turn = FIRST) -> Result:
    """Run one scenario in a folder of its own."""
    folder = setup.folder / f"{seed}-{scenario.replace(' ', '-')}"
    folder.mkdir()
    ground = Ground(folder, seed, setup.store, setup.crowd, turn)
    ground.environ["TORTURE_SERVER"] = setup.server
    began, broken, not_run = time.monotonic(), None, None
    try:
        SCENARIOS[scenario](ground, setup.reference)
        promises.nothing_is_left(ground)
        promises.no_traceback_is_printed(ground)
    except Broken as error:
        broken = str(error)
    except NotRun as error:
        not_run = str(error)
    except Exception:
        broken = f"error: {traceback.format_exc()}"
    ground.clean_up()
    if broken is None:
        shutil.rmtree(folder, ignore_errors=True)
    unchecked = [] if room.is_mine() else [room.UNCHECKED]
    seconds = time.monotonic() - began
    leaving = {"idling": ground.idling, "leaving": ground.leaving}
    return Result(scenario, seed, ground.faults, seconds, broken, not_run, unchecked, **leaving)


@contextlib.contextmanager
def shared_setup(crowd: int = CROWD) -> Iterator[SharedSetup]:
    """Make what all scenarios share: an empty store, a server, the undisturbed losses."""
    folder = Path(tempfile.mkdtemp(prefix="rankzero-torture-"))
    store = folder / "empty.db"
    MlflowRuns(f"sqlite:///{store}")
    with contextlib.closing(sqlite3.connect(store)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # all of it into the one file
    with Server(folder / "server", store) as server:
        ground = Ground(folder / "reference", 0, store)
        ground.run("train", TINY, *SETTINGS)
        run = ground.the_run()
        assert run is not None
        yield SharedSetup(folder, store, server.uri, curves.latest(run), crowd)
    with contextlib.suppress(OSError):
        shutil.rmtree(folder / "reference")
        shutil.rmtree(folder / "server")


def _line(result: Result, faults: int) -> str:
    mark = f"not run: {result.not_run}" if result.not_run else "ok"
    mark = f"BROKEN {result.broken}" if result.broken else mark
    took = f"{result.seconds:5.0f} s  {len(result.faults):>3} faults"
    return f"{faults:>5}  {result.scenario:<20} seed {result.seed:<6} {took}  {mark}"


def _bearable() -> int:
    """Return how many runs at once the memory bears."""
    return max(LEAST_CROWD, min(CROWD, psutil.virtual_memory().available // RUN_BYTES))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--faults", type=int, default=500, help="how many to inject (default: 500, most of an hour)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop after so long; with --faults 1000000, for hours of it",
    )
    parser.add_argument(
        "--parallel", type=int, default=2, help="how many scenarios side by side (%(default)s)"
    )
    parser.add_argument(
        "--only", nargs="*", choices=list(SCENARIOS), default=[], help="these scenarios"
    )
    parser.add_argument(
        "--crowd",
        type=int,
        default=_bearable(),
        help=f"how many runs at once are a crowd (up to {CROWD}: %(default)s)",
    )
    parser.add_argument(
        "--fuzz", type=int, default=0, help="then so many cases for each fuzz test (default: none)"
    )
    parser.add_argument("--report", help="a file for the results")
    parser.add_argument("--board", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if "--board" in sys.argv:
        room.enter(sys.argv[1:])
        take_part(sys.argv[1:])
    else:
        sys.exit(main())

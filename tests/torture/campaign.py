"""Run a seeded campaign of faults against the real command.

    make torture [ARGS="--faults 50 --seed 7"]

Each scenario injects faults into a real training (two ranks, MLflow) at random moments. Then it
checks the promises to users: nothing lost, no corrupt restore, no wrong status, no hang, no orphan.
A scenario that runs again takes its next variants. The folder of a scenario that broke a promise is
kept.
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

# These scenarios use all processor time, so another one at the same time would miss its deadlines.
ALONE = ("crowd",)
# A run, with its launcher, recorder and courier, takes three quarters of a gigabyte.
LEAST_CROWD, RUN_BYTES = 12, 900 << 20


@dataclasses.dataclass(frozen=True)
class SharedSetup:
    """Things that all scenarios of a campaign share."""

    folder: Path
    store: Path
    """An MLflow database without a run. To copy it is quicker than to create one."""
    server: str
    """The address of an MLflow server."""
    reference: Curves
    """The metrics of an undisturbed training."""
    crowd: int = CROWD
    """Number of runs in the crowd scenario."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign. Return 1 if a promise was broken, else 0."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options, began = _parse(words), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="rankzero-torture-board-"))
    parts = [_start_part(words, folder) for _ in range(options.parallel)]
    codes = [part.wait() for part in parts]
    results, minutes = Board(folder).results(), (time.monotonic() - began) / 60
    fuzzed = fuzz(options.fuzz) if options.fuzz else None
    print(summary(results) + (f"\n{fuzzed.line}" if fuzzed else ""))
    if options.report:
        content = report(results, options.seed, fuzzed) | {
            "minutes": round(minutes, 1),
            "side_by_side": options.parallel,
        }
        Path(options.report).write_text(json.dumps(content, indent=1) + "\n")
    if fuzzed is not None and not fuzzed.passed:
        print(fuzzed.output)
    shutil.rmtree(folder)
    return int(
        any(codes)
        or any(one.broken for one in results)
        or (fuzzed is not None and not fuzzed.passed)
    )


def _start_part(words: Sequence[str], board: Path) -> subprocess.Popen[bytes]:
    """Start a process that runs scenarios, one after the other, in namespaces of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "torture.campaign", *words, "--board", str(board)]
    )


def take_part(arguments: Sequence[str]) -> None:
    """Run scenarios that no other process has taken, until enough faults or minutes have passed."""
    options = _parse(arguments)
    # The commands would inherit ignored signals that the scenarios send: SIGHUP under nohup, and
    # SIGINT in a script's background job.
    for ignored in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, lambda *_: None)
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
    """Return whether this machine allows none of the scenarios, so that no fault can occur."""
    return set(names) == {result.scenario for result in board.results() if result.not_run}


def run_scenario(setup: SharedSetup, scenario: str, seed: int, turn: Turn = FIRST) -> Result:
    """Run one scenario in its own folder, and return its result."""
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
    """Yield an empty store, a server, and the metrics of an undisturbed training."""
    folder = Path(tempfile.mkdtemp(prefix="rankzero-torture-"))
    store = folder / "empty.db"
    MlflowRuns(f"sqlite:///{store}")
    with contextlib.closing(sqlite3.connect(store)) as database:
        # Moves everything into the one file that scenarios copy.
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
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
    """Return how many simultaneous runs fit into the free memory."""
    return max(LEAST_CROWD, min(CROWD, psutil.virtual_memory().available // RUN_BYTES))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--faults", type=int, default=500, help="faults to inject (default: 500, most of an hour)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop after this time; use --faults 1000000 for a campaign of hours",
    )
    parser.add_argument(
        "--parallel", type=int, default=2, help="scenarios at the same time (default: %(default)s)"
    )
    parser.add_argument(
        "--only", nargs="*", choices=list(SCENARIOS), default=[], help="run only these scenarios"
    )
    parser.add_argument(
        "--crowd",
        type=int,
        default=_bearable(),
        help=f"simultaneous runs of the crowd, up to {CROWD} (default: %(default)s)",
    )
    parser.add_argument(
        "--fuzz",
        type=int,
        default=0,
        help="then try this many cases of each fuzz test (default: 0)",
    )
    parser.add_argument("--report", help="write the results to this file")
    parser.add_argument("--board", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if "--board" in sys.argv:
        room.enter(sys.argv[1:])
        take_part(sys.argv[1:])
    else:
        sys.exit(main())

"""Faults inside a rank: an exception, no memory, a hang, a clock that jumps."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

from torture import promises
from torture.ground import Ground
from torture.promises import Curves
from torture.scenarios.training import (
    CLOCK,
    EVERY,
    SETTINGS,
    STEPS,
    ends,
    finished_without_sync,
    is_consistent,
    the_run,
)

RANK_FAULTS = tuple(
    itertools.product(("raise", "nan", "memory", "exit", "segfault", "hang"), (0, 1))
)
RANK_FAULTS_EACH = 3
# Until daylight saving time changes, in the middle of a training.
CHANGE_SECONDS = 10.0
WATCHERS = ("launcher", "recorder", "courier")
# Its sitecustomize.py makes the clocks of these processes jump.
SITE = Path(__file__).parents[1] / "clock"


def failing_ranks(ground: Ground, reference: Curves) -> None:
    """One rank fails at a random step, three times: the run is FAILED, and a resume finishes it."""
    words: tuple[object, ...] = (
        "train",
        CLOCK,
        *SETTINGS,
        "train.limits.oom=fail",
        "train.limits.hang_minutes=0.1",
    )
    for fault, rank in itertools.islice(
        ground.turn.of(RANK_FAULTS, RANK_FAULTS_EACH), RANK_FAULTS_EACH
    ):
        _fails(ground, reference, words, fault, rank)
        words = ("resume", "run")
    ground.run(*words)
    finished_without_sync(ground, reference)


def _fails(
    ground: Ground, reference: Curves, words: tuple[object, ...], fault: str, rank: int
) -> None:
    """Run an attempt in which a rank fails, and check that nothing before it is lost or wrong."""
    begun = ground.the_run()
    at = 0 if begun is None else promises.checkpoints_are_intact(begun)
    step = ground.random.randrange(EVERY + 1, STEPS // RANK_FAULTS_EACH)
    ground.environ["TORTURE_RANK"] = f"{fault} {rank} {step}"
    ends(ground.start(*words), 1)
    del ground.environ["TORTURE_RANK"]
    ground.note_fault(f"{fault} on rank {rank}")
    promises.no_process_is_left(ground)
    promises.delivered_without_sync(the_run(ground))
    is_consistent(ground, reference, ("FAILED",), spoiled=at + step if fault == "nan" else None)


def jumping_clock(ground: Ground, reference: Curves) -> None:
    """Clocks jump by hours, forth and back: on ranks, in the recorder, courier and command.

    Meanwhile daylight saving time begins or ends.
    """
    saving = ground.next_of(("begins", "ends"))
    ground.environ["TZ"] = _timezone(saving)
    ground.environ["TORTURE_CLOCK"] = " ".join(
        f"{rank}:{_step(ground)}:{_hours(ground):.0f}" for rank in (-1, 0, 1)
    )
    marks = ground.folder / "jumped"
    marks.mkdir()
    ground.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SITE), ground.environ.get("PYTHONPATH")))),
        "TORTURE_JUMPED": str(marks),
        "TORTURE_JUMPS": " ".join(
            f"{who}:{ground.random.uniform(0.5, 8.0)}:{_hours(ground)}" for who in WATCHERS * 2
        ),
    }
    ground.run("train", CLOCK, *SETTINGS, "step_seconds=0.05")
    del ground.environ["TORTURE_JUMPS"]
    for path in sorted(marks.iterdir()):
        ground.note_fault(f"clock of {path.name.partition('-')[0]} jumps")
    for who in ("both ranks", "rank 0", "rank 1"):
        ground.note_fault(f"clock of {who} jumps")
    ground.note_fault(f"daylight saving time {saving}")
    finished_without_sync(ground, reference)


def _timezone(saving: str) -> str:
    """Return a time zone in which daylight saving time begins or ends in a few seconds."""
    # The rule of an end is in daylight saving time, an hour ahead of UTC.
    soon = time.time() + CHANGE_SECONDS + (3600 if saving == "ends" else 0)
    now, other = (_rule(moment) for moment in (soon, soon + 30 * 86400))
    begin, end = (now, other) if saving == "begins" else (other, now)
    return f"TST0TDT-1,{begin},{end}"


def _rule(moment: float) -> str:
    """Return a moment of the year as POSIX writes it in a time zone. It ignores leap years."""
    date = time.gmtime(moment)
    return f"J{min(date.tm_yday, 365)}/{date.tm_hour}:{date.tm_min}:{date.tm_sec}"


def _step(ground: Ground) -> int:
    return ground.random.randrange(1, STEPS)


def _hours(ground: Ground) -> float:
    return ground.random.uniform(-1e5, 1e5)

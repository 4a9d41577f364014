"""What happens inside of a rank: it raises, has no memory, hangs, its clock jumps."""

from __future__ import annotations

import itertools

from torture import promises
from torture.ground import Ground
from torture.promises import Curves
from torture.scenarios.training import (
    CLOCK,
    EVERY,
    SETTINGS,
    STEPS,
    ends,
    finished_by_itself,
    stands,
    the_run,
)

HURTS = tuple(itertools.product(("raise", "nan", "memory", "exit", "segfault", "hang"), (0, 1)))
HURTS_EACH = 3


def hurt_ranks(ground: Ground, reference: Curves) -> None:
    """One rank raises, has no memory, is NaN, at a random step: the run has failed, and goes on without that."""
    words: tuple[object, ...] = ("train", CLOCK, *SETTINGS, "train.oom=fail", "train.hang_minutes=0.1")
    for what, rank in itertools.islice(ground.turn.of(HURTS, HURTS_EACH), HURTS_EACH):
        _fails(ground, reference, words, what, rank)
        words = ("resume", "run")
    ground.run(*words)
    finished_by_itself(ground, reference)


def _fails(ground: Ground, reference: Curves, words: tuple[object, ...], what: str, rank: int) -> None:
    """Begin an attempt, or go on, and have a rank hurt: it has failed, and nothing before that is lost or wrong."""
    begun = ground.the_run()
    at = 0 if begun is None else promises.checkpoints_are_intact(begun)
    step = ground.random.randrange(EVERY + 1, STEPS // HURTS_EACH)
    ground.environ["TORTURE_RANK"] = f"{what} {rank} {step}"
    ends(ground.start(*words), 1)
    del ground.environ["TORTURE_RANK"]
    ground.hurt(f"{what} on rank {rank}")
    promises.nobody_is_left(ground)
    promises.arrived_by_itself(the_run(ground))
    stands(ground, reference, ("FAILED",), spoiled=at + step if what == "nan" else None)


def jumping_clock(ground: Ground, reference: Curves) -> None:
    """The clock jumps by hours, forwards and backwards, on one rank or on both."""
    jumps = ground.random.randrange(1, 5)
    ground.environ["TORTURE_CLOCK"] = " ".join(
        f"{ground.random.randrange(-1, 2)}:{ground.random.randrange(1, STEPS)}:{ground.random.uniform(-1e5, 1e5):.0f}"
        for _ in range(jumps)
    )
    for _ in range(jumps):
        ground.hurt("clock jumps")
    ground.run("train", CLOCK, *SETTINGS)
    finished_by_itself(ground, reference)

"""What happens inside of a rank: it raises, has no memory, hangs, its clock jumps."""

from __future__ import annotations

from torture import promises
from torture.ground import Ground
from torture.promises import Curves
from torture.scenarios.training import CLOCK, SETTINGS, STEPS, ends, finished, goes_on


def hurt_ranks(ground: Ground, reference: Curves) -> None:
    """One rank raises, has no memory, is NaN, at a random step: the run has failed, and goes on without that."""
    what = ground.random.choice(("raise", "nan", "memory", "exit", "segfault", "hang"))
    rank, step = ground.random.randrange(2), ground.random.randrange(1, STEPS)
    ground.environ["TORTURE_RANK"] = f"{what} {rank} {step}"
    ground.hurt(f"{what} on rank {rank}")
    command = ground.start("train", CLOCK, *SETTINGS, "train.oom=fail", "train.hang_minutes=0.1")
    ends(command, 1)
    del ground.environ["TORTURE_RANK"]
    promises.nobody_is_left(ground)
    goes_on(ground, reference, ("FAILED",))


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
    finished(ground, reference)

"""Which samples, in which order, on which rank: pure arithmetic. And how they get to the device.

The global batch of a step depends on the seed and the step alone. Ranks and micro-batches cut
it up, so one process and eight see the same batches, and resuming is arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rankzero.errors import UserError
from rankzero.experiment import Train

GOLDEN = (
    0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads consecutive integers (Knuth; splitmix64)
)
MASK = (1 << 64) - 1
MOST_NAMED = 8  # ranks, in a message


@dataclasses.dataclass(frozen=True)
class BatchOrder:
    """How a data set is cut into steps. All counts are samples; `batch_size` is over all ranks."""

    samples: int
    batch_size: int
    micro_batch: int
    world_size: int
    seed: int

    @property
    def accumulation(self) -> int:
        """Micro-batches per step and rank."""
        return self.batch_size // (self.micro_batch * self.world_size)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in the data set; what is left over changes with each epoch's order."""
        return self.samples // self.batch_size

    def epoch(self, step: int) -> int:
        """Return the epoch that `step` (0-based) belongs to."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> Tensor:
        """Return the indices of the whole batch of `step`, over all ranks: [batch size]."""
        start = step % self.steps_per_epoch * self.batch_size
        return order(self.seed, self.epoch(step), self.samples)[start : start + self.batch_size]

    def micro_batches(self, step: int, rank: int) -> Tensor:
        """Return `rank`'s indices for `step`: [accumulation, micro-batch]."""
        return self.batch(step).view(self.accumulation, self.world_size, self.micro_batch)[:, rank]

    def iter_micro_batches(
        self, rank: int, first_step: int, total_steps: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (epoch, indices) of every micro-batch of `rank` from `first_step` on.

        The same as `micro_batches` step by step, but an epoch is cut up at once: a few microseconds a step.
        """
        step = first_step
        while step < total_steps:
            epoch, position = divmod(step, self.steps_per_epoch)
            steps = min(self.steps_per_epoch - position, total_steps - step)
            whole = order(self.seed, epoch, self.samples)[position * self.batch_size :][
                : steps * self.batch_size
            ]
            mine = whole.view(-1, self.world_size, self.micro_batch)[:, rank]
            for indices in mine.contiguous().unbind():
                yield epoch, indices
            step += steps


def make_batch_order(train: Train, samples: int, world_size: int) -> BatchOrder:
    """Cut `samples` as `train` asks for so many parts. Raises UserError where that cannot be."""
    micro_batch = micro_batch_size(train, world_size)
    if samples < train.batch_size:
        raise UserError(
            f"the training set has {samples} samples, fewer than one batch: set train.batch_size to at most {samples}"
        )
    if train.strategy == "pp":  # its micro-batches are its own affair
        micro_batch = train.batch_size
    return BatchOrder(samples, train.batch_size, micro_batch, world_size, train.seed)


def check_same_lengths(what: str, lengths: Sequence[int]) -> None:
    """Raise UserError, naming ranks and lengths, where a data set is not as long on each rank as on the others."""
    if len(set(lengths)) == 1:
        return
    by_length = {
        length: [rank for rank, found in enumerate(lengths) if found == length]
        for length in lengths
    }
    told = "; ".join(f"{length} samples on {_ranks(ranks)}" for length, ranks in by_length.items())
    raise UserError(
        f"data() returned {what} sets of different lengths: {told}. Every rank must see the whole of the same data, "
        "which are divided among the ranks for you: do not divide them in data(), and look for files that one machine "
        "or process lacks"
    )


def micro_batch_size(train: Train, world_size: int) -> int:
    """Return the micro-batch. Raises UserError, naming the nearest sizes, where the batch does not come out even."""
    micro_batch = max(1, train.micro_batch or train.batch_size // world_size)
    whole = micro_batch * world_size if train.micro_batch else world_size
    if train.batch_size % whole:
        raise UserError(_uneven(train, world_size, whole))
    return micro_batch


@functools.lru_cache(maxsize=2)
def order(seed: int, epoch: int, samples: int) -> Tensor:
    """Return the order of `epoch`: a permutation of range(samples) that depends on nothing else."""
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(samples, generator=generator)


def shard(samples: int, batch_size: int, rank: int, world_size: int) -> Iterator[Tensor]:
    """Yield `rank`'s share of range(samples) in batches, the last one ragged: each sample once, on one rank."""
    mine = torch.arange(samples)[rank::world_size]
    yield from mine.split(batch_size) if len(mine) else ()


def most_batches(samples: int, batch_size: int, world_size: int) -> int:
    """Return how many batches `shard` makes for the rank that has most."""
    most_samples = math.ceil(samples / world_size)
    return math.ceil(most_samples / batch_size)


def mix(*numbers: int) -> int:
    """Return a 63-bit seed that differs wherever any of `numbers` does (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state ^ number) + GOLDEN & MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state >> 1


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"


def _uneven(train: Train, world_size: int, whole: int) -> str:
    below = train.batch_size // whole * whole
    near = " or ".join(str(size) for size in (below, below + whole) if size)
    asked = f"{world_size} processes"
    if train.micro_batch:
        asked += f" x train.micro_batch={train.micro_batch}"
    return f"train.batch_size={train.batch_size} cannot be cut evenly for {asked}: use {near}"

"""Which samples a rank trains on, in which order: pure arithmetic.

The batch of a step depends on the seed and the step alone, also if the experiment chooses it. Ranks
and micro-batches divide it, so one process and eight see the same batches, and a resume only
computes where to continue.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rankzero.errors import UserError
from rankzero.experiment import Train

Choose = Callable[[int, torch.Generator], Sequence[Sequence[int]] | None]
"""Returns the batches of an epoch, or None."""
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads consecutive integers (Knuth)
_MOST_NAMED = 8  # ranks, in a message
_LOOKED_AHEAD = 1000  # epochs; a probe has steps without end


@dataclasses.dataclass(frozen=True)
class BatchOrder:
    """How a data set is divided into steps. Counts are samples. `batch_size` is over all ranks."""

    samples: int
    batch_size: int
    micro_batch: int
    world_size: int
    seed: int
    lists: Callable[[int], list[Tensor]] | None = None
    """Returns the batches of an epoch, where the experiment chooses them. They differ in size."""
    epoch_steps: int | None = None
    """Steps of an epoch, where they do not follow from `samples`."""
    rest: int = 0
    """Samples of an epoch's last batch, if it is smaller than the others (`train.drop_last`)."""

    @functools.cached_property  # each step asks for it
    def accumulation(self) -> int:
        """Micro-batches per step and rank."""
        return self.batch_size // (self.micro_batch * self.world_size)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in the data set. Without `rest`, epochs leave out other samples each."""
        return self.epoch_steps or self.samples // self.batch_size + (self.rest > 0)

    @property
    def _rest_parts(self) -> int:
        """Micro-batches of `rest` over all ranks. Every rank has equally many."""
        return math.ceil(self.rest / (self.micro_batch * self.world_size)) * self.world_size

    @property
    def list_count(self) -> int:
        """Lists that the experiment chooses in an epoch; 0 where it chooses none."""
        return self.steps_per_epoch if self.lists else 0

    def lists_before(self, step: int) -> list[int]:
        """Return a fingerprint of the lists of a finished step's epoch; empty without lists."""
        if self.lists is None:
            return []
        return _fingerprint(self.lists, max(0, step - 1) // self.steps_per_epoch)

    @property
    def mean_batch_size(self) -> float:
        """Samples of a step, over all ranks: the mean of the first epoch."""
        return self.samples_of(self.steps_per_epoch, self.steps_per_epoch) / self.steps_per_epoch

    def samples_of(self, last_step: int, steps: int) -> int:
        """Return the samples of the `steps` steps up to `last_step`, over all ranks."""
        size = self.steps_per_epoch
        if self.lists is None:
            epochs = last_step // size - (last_step - steps) // size
            missing = self.batch_size - self.rest if self.rest else 0
            return steps * self.batch_size - epochs * missing
        places = (divmod(step, size) for step in range(last_step - steps, last_step))
        return sum(len(self.lists(epoch)[position]) for epoch, position in places)

    def weights(self, step: int, rank: int) -> Sequence[float]:
        """Return the weight of each micro-batch of `rank` in the mean over the step's samples.

        It is 1 if all are equally large, and 0 if the rank only keeps the others company.
        """
        if not self.rest or (step + 1) % self.steps_per_epoch:
            return (1.0,) * self.accumulation
        parts = self._rest_parts
        sizes = [self.rest // parts + (part < self.rest % parts) for part in range(parts)]
        return [size * parts / self.rest for size in sizes[rank :: self.world_size]]

    def micro_batches_before(self, step: int) -> int:
        """Return the micro-batches of a rank in the steps before `step`."""
        found = step * self.accumulation
        if self.rest:
            shorter = self.accumulation - self._rest_parts // self.world_size
            found -= step // self.steps_per_epoch * shorter
        return found

    def iter_micro_batches(
        self, rank: int, first_step: int, total_steps: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (draw, indices) of every micro-batch of `rank` from `first_step` on.

        A sample that is drawn twice has another `draw`: its epoch, or the step if the experiment
        chooses the batches.
        """
        if self.lists is not None:
            for step in range(first_step, total_steps):
                epoch, position = divmod(step, self.steps_per_epoch)
                parts = self.lists(epoch)[position].view(self.accumulation, self.world_size, -1)
                for micro_batch in parts[:, rank]:
                    yield step, micro_batch
            return
        step = first_step
        while step < total_steps:
            epoch, position = divmod(step, self.steps_per_epoch)
            steps = min(self.steps_per_epoch - position, total_steps - step)
            start = position * self.batch_size
            indices = permutation(self.seed, epoch, self.samples)
            indices = indices[start : start + steps * self.batch_size]
            whole = indices[: len(indices) // self.batch_size * self.batch_size]
            # Dividing a whole epoch at once costs a few microseconds a step.
            mine = whole.view(-1, self.world_size, self.micro_batch)[:, rank]
            for micro_batch in mine.contiguous().unbind():
                yield epoch, micro_batch
            rest = indices[len(whole) :]
            if len(rest):
                for part in rest.tensor_split(self._rest_parts)[rank :: self.world_size]:
                    # Ranks exchange gradients, so one without a sample computes one for nothing.
                    yield epoch, part if len(part) else rest[:1]
            step += steps

    def iter_copies(self, rank: int, first_step: int) -> Iterator[list[int]]:
        """Yield how often each sample of a micro-batch came before in the list of its step.

        Without end, and an empty list where no sample repeats.
        """
        if self.lists is None:
            yield from itertools.repeat([])
            return
        for step in itertools.count(first_step):
            epoch, position = divmod(step, self.steps_per_epoch)
            copies = _copies(self.lists(epoch)[position])
            parts = self.accumulation * self.world_size
            size = len(copies) // parts
            for part in range(rank, parts, self.world_size):
                yield copies[part * size : (part + 1) * size]


def _copies(indices: Tensor) -> list[int]:
    ordered, places = indices.sort(stable=True)
    is_again = ordered[1:] == ordered[:-1]
    if not is_again.any():
        return []
    numbers = torch.arange(len(ordered))
    begins = numbers.clone()
    begins[1:][is_again] = 0  # each sample's first place is the highest begin so far
    return torch.empty_like(numbers).scatter_(0, places, numbers - begins.cummax(0).values).tolist()


def make_batch_order(
    train: Train, samples: int, world_size: int, choose: Choose | None = None
) -> BatchOrder:
    """Divide `samples` as `train` says among `world_size` parts. Raises UserError if impossible.

    `choose`: returns an epoch's batches as lists of indices, or None where `train` decides.
    """
    order = _even_batches(train, samples, world_size)
    if choose is not None and _chooses(choose, order, train):
        if train.strategy == "pp":
            raise UserError(
                "train.strategy=pp takes batches of one size: batches() needs train.strategy=ddp"
            )
        _refuse_rest(train, "batches() chooses all samples of an epoch")
        lists = _chosen_lists(order, choose)
        return dataclasses.replace(order, lists=lists, epoch_steps=len(lists(0)))
    if not order.steps_per_epoch:
        raise UserError(
            f"the training set has {samples} samples, fewer than one batch: "
            f"set train.batch_size to at most {samples}, or train.drop_last=false"
        )
    return order


def _refuse_rest(train: Train, reason: str) -> None:
    if not train.drop_last:
        raise UserError(f"{reason}, so train.drop_last=false does not fit: leave it out")


def _chooses(choose: Choose, order: BatchOrder, train: Train) -> bool:
    """Return whether `choose` returns batches. Raises UserError if it does not begin at epoch 0."""
    usual_steps = max(1, order.steps_per_epoch)
    epochs = math.ceil(train.steps / usual_steps) if train.steps else train.epochs or 1
    epochs = min(epochs, _LOOKED_AHEAD)
    first = next((e for e in range(epochs) if choose(e, torch.Generator()) is not None), None)
    if first:
        raise UserError(
            f"batches() returned None for epoch 0, and lists for epoch {first}: return lists for "
            "every epoch, or None for every epoch"
        )
    return first == 0


def make_stream_order(train: Train, samples: int, world_size: int) -> BatchOrder:
    """Return how a stream of `samples` (0: unknown) is cut into steps. Raises UserError.

    Without a length, the whole training is one epoch.
    """
    _refuse_rest(train, "the training set is a stream, which has no order of its own")
    steps = samples // train.batch_size or train.steps
    if steps is None:
        raise UserError(
            "the training set is a stream without a length, or shorter than one batch: "
            "set train.steps"
        )
    return dataclasses.replace(_even_batches(train, samples, world_size), epoch_steps=steps)


def _chosen_lists(order: BatchOrder, choose: Choose) -> Callable[[int], list[Tensor]]:
    """Return a function of the epoch that checks what `choose` returns. It raises UserError."""
    parts, first = order.accumulation * order.world_size, 0

    @functools.lru_cache(maxsize=2)
    def lists(epoch: int) -> list[Tensor]:
        nonlocal first
        generator = torch.Generator().manual_seed(mix(order.seed, epoch))
        chosen = choose(epoch, generator)
        found = [
            torch.as_tensor(one, dtype=torch.int64) for one in (() if chosen is None else chosen)
        ]
        if not found or (first and len(found) != first):
            expected = f"{first}, as for epoch 0" if first else "at least one"
            raise UserError(
                f"batches() returned {len(found)} lists for epoch {epoch}, not {expected}: every "
                "epoch needs the same number of steps"
            )
        first = first or len(found)
        for place, one in enumerate(found):
            if one.dim() != 1 or not len(one) or len(one) % parts:
                raise UserError(
                    f"batches() returned a list of {one.numel()} samples (epoch {epoch}, number "
                    f"{place}), which cannot be divided evenly among {order.world_size} processes "
                    f"x {order.accumulation} micro-batches: make each length a multiple of {parts}"
                )
        every = torch.cat(found)
        if int(every.min()) < 0 or int(every.max()) >= order.samples:
            wrong = every[(every < 0) | (every >= order.samples)][0]
            raise UserError(
                f"batches() returned the index {int(wrong)} (epoch {epoch}), but the training set "
                f"has {order.samples} samples, from 0 to {order.samples - 1}"
            )
        return found

    lists(0)  # the later epochs are compared with it
    return lists


def _even_batches(train: Train, samples: int, world_size: int) -> BatchOrder:
    micro_batch = micro_batch_size(train, world_size)
    # A pipeline divides its batches itself.
    if train.strategy == "pp":
        micro_batch = train.batch_size
    rest = 0 if train.drop_last else samples % train.batch_size
    return BatchOrder(samples, train.batch_size, micro_batch, world_size, train.seed, rest=rest)


def micro_batch_size(train: Train, world_size: int) -> int:
    """Return the samples of a micro-batch.

    Raises UserError, which names what can be divided, if the batch cannot be divided evenly.
    """
    micro_batch = max(1, train.micro_batch or train.batch_size // world_size)
    divisor = micro_batch * world_size if train.micro_batch else world_size
    if train.batch_size % divisor:
        below = train.batch_size // divisor * divisor
        near = " or ".join(str(size) for size in (below, below + divisor) if size)
        parts = f"{world_size} process{'es' * (world_size > 1)}"
        count = _divisor(train.batch_size, world_size)
        fits = f"train.micro_batch={_divisor(train.batch_size // count, micro_batch)}"
        other = f"a number of processes such as {count}"  # a resume cannot change the batch
        if train.micro_batch:
            parts += f" x train.micro_batch={train.micro_batch}"
            other = fits if count == world_size else f"{other} with {fits}"
        raise UserError(
            f"train.batch_size={train.batch_size} cannot be divided evenly among {parts}: "
            f"use train.batch_size={near}, or {other}"
        )
    return micro_batch


def _divisor(number: int, most: int) -> int:
    """Return the greatest divisor of a number, of those that are not above `most`."""
    return next(count for count in range(most, 0, -1) if not number % count)


def check_same_lengths(name: str, lengths: Sequence[int], method: str = "data()") -> None:
    """Raise UserError, which names the ranks, if a data set's length differs between ranks."""
    if len(set(lengths)) == 1:
        return
    found = []
    for length in dict.fromkeys(lengths):
        ranks = [rank for rank, other in enumerate(lengths) if other == length]
        more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
        named = ", ".join(map(str, ranks[:_MOST_NAMED]))
        found.append(f"{length} samples on rank{'s' * (len(ranks) > 1)} {named}{more}")
    raise UserError(
        f"{method} returned {name} sets of different lengths: {'; '.join(found)}. Every rank must "
        "return the whole data set, because RankZero divides it among the ranks: do not divide it "
        f"in {method}, and look for files that one machine or process lacks"
    )


@functools.lru_cache(maxsize=1)  # each checkpoint asks for it, and a million samples take 0.1 s
def _fingerprint(lists: Callable[[int], list[Tensor]], epoch: int) -> list[int]:
    """Return two integers that differ, almost certainly, if the lists of an epoch do."""
    found = lists(epoch)
    every = torch.cat([*found, torch.tensor([len(one) for one in found])])
    return [len(every), int((every * torch.arange(1, len(every) + 1)).sum())]


@functools.lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, samples: int) -> Tensor:
    """Return the order of `epoch`: a permutation of range(samples) that depends on nothing else."""
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(samples, generator=generator)


def shard(samples: int, batch_size: int, rank: int, world_size: int) -> Iterator[Tensor]:
    """Yield `rank`'s share of range(samples) in batches, of which the last may be smaller.

    Each sample is in the share of exactly one rank.
    """
    mine = torch.arange(samples)[rank::world_size]
    yield from mine.split(batch_size) if len(mine) else ()


def mix(*numbers: int) -> int:
    """Return a 63-bit seed that differs if any of `numbers` does (splitmix64)."""
    return functools.reduce(mix_in, numbers, 0) >> 1


def mix_in(state: int, number: int) -> int:
    """Return the 64-bit state of a mix after one more number."""
    state = (state ^ number) + _GOLDEN & _MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
    return state ^ state >> 31

"""Batches of an epoch, for `Experiment.batches`: by weight, by length.

    def batches(self, data, epoch, generator):
        return by_length(data.lengths, generator, batch_size=self.train.batch_size)

Each function returns one list of indices for each step, and the same number of lists with any
generator. So the position of a step follows from its number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rankzero.errors import UserError

_NOISE = 0.1
"""By how much a length is changed before samples are sorted, so that epochs differ."""


def weighted(
    weights: Sequence[float], generator: Any, *, batch_size: int, samples: int | None = None
) -> list[list[int]]:
    """Return batches of indices drawn with these weights, with replacement.

    `weights`: one for each sample, such as 1 / (samples of its class). `samples`: how many an epoch
    draws; as many as there are weights unless set.
    """
    import torch

    chances = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    if not bool((chances >= 0).all()) or not 0 < float(chances.sum()) < math.inf:
        raise UserError("the weights must be finite and at least 0, and one of them above 0")
    # A uniform number falls into one part of the sum. torch.multinomial takes only 2**24 weights.
    sums = chances.cumsum(0)
    steps = _whole_batches(samples or len(chances), batch_size)
    drawn = torch.rand(steps * batch_size, dtype=torch.float64, generator=generator) * sums[-1]
    last = int(chances.nonzero()[-1])
    indices = torch.searchsorted(sums, drawn, right=True).clamp_(max=last)
    return [part.tolist() for part in indices.split(batch_size)]


def by_length(
    lengths: Sequence[int],
    generator: Any,
    *,
    batch_size: int | None = None,
    tokens: int | None = None,
    multiple_of: int = 1,
) -> list[list[int]]:
    """Return batches of samples of similar length, in a random order.

    Set one of `batch_size` and `tokens`. With `tokens`, a batch has as many samples as fit if each
    is padded to the longest: short samples make large batches. `multiple_of` divides the size of
    each batch: set it to the number of processes times the micro-batches of a step, or to a
    multiple of that. After an out-of-memory error, a step has twice as many micro-batches.
    """
    import torch

    if (batch_size is None) == (tokens is None):
        raise UserError("by_length() takes one of batch_size and tokens")
    given = torch.as_tensor(lengths, dtype=torch.float64, device="cpu")
    noise = torch.rand(len(given), dtype=torch.float64, generator=generator)
    if batch_size is not None:
        steps = _whole_batches(len(given), batch_size)
        order = (given * (1 + _NOISE * (2 * noise - 1))).argsort()
        # Each epoch leaves out other samples of the remainder.
        first = int(torch.randint(len(given) - steps * batch_size + 1, (1,), generator=generator))
        found = list(order[first : first + steps * batch_size].split(batch_size))
    else:
        # The sizes follow from the sorted lengths alone. Only equal lengths change places. So the
        # shortest samples are the remainder.
        order = noise.argsort()
        order = order[given[order].argsort(stable=True)]
        sizes = _sizes(given[order].tolist(), tokens or 0, multiple_of)
        found = list(order[len(order) - sum(sizes) :].split(sizes))
    return [found[place].tolist() for place in torch.randperm(len(found), generator=generator)]


def _sizes(lengths: Sequence[float], tokens: int, multiple_of: int) -> list[int]:
    """Return the size of each batch of these sorted lengths. The first of them may be left out."""
    sizes, start = [], len(lengths) % multiple_of
    while start < len(lengths):
        size = multiple_of
        while start + size + multiple_of <= len(lengths) and (
            (size + multiple_of) * lengths[start + size + multiple_of - 1] <= tokens
        ):
            size += multiple_of
        if size * lengths[start + size - 1] > tokens:
            raise UserError(
                f"by_length(): {multiple_of} samples of length {lengths[start + size - 1]:g} have "
                f"more than {tokens} tokens: raise tokens, or leave out such samples"
            )
        sizes.append(size)
        start += size
    if not sizes:
        raise UserError(f"by_length(): {len(lengths)} samples are fewer than one batch")
    return sizes


def _whole_batches(samples: int, batch_size: int) -> int:
    if samples < batch_size:
        raise UserError(f"{samples} samples are fewer than one batch: lower the batch size")
    return samples // batch_size

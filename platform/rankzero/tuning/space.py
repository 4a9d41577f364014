"""What a search may change, as data: batch size, precision and learning rate, and what the experiment adds. Pure.

The learning rate is searched as a factor of what a scaling rule makes of the user's own: with batch size B,

    lr = factor * lr_reference * (B / B_reference) ** exponent

exponent 1 for SGD (Goyal et al. 2017), 1/2 for adaptive optimizers (Malladi et al. 2022). So a trial with another
batch size starts where a sensible person would, and a searcher that knows nothing of batch sizes compares like with
like.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rankzero.config import ConfigError, flatten, override
from rankzero.experiment import Choice, Experiment, Integer, LogUniform, Range, Uniform

BATCH, PRECISION, LR = "train.batch_size", "train.precision", "lr"
BATCH_INDEX, FACTOR = "batch_index", "lr_factor"
FACTORS = LogUniform(0.25, 4.0)
MOST_DOUBLINGS = 5  # up or down from the user's own batch size


@dataclasses.dataclass(frozen=True)
class Space:
    """The configurations that a search may try, around the user's own."""

    reference: Experiment
    batch_sizes: tuple[int, ...]
    """Ascending; the reference's is one of them."""
    precisions: tuple[str, ...]
    factors: LogUniform
    lr_exponent: float
    extras: Mapping[str, Range]
    """What the experiment adds, by dotted key."""

    def parameters(self) -> dict[str, Range]:
        """Return what a sampler draws: ordered numbers where there is an order."""
        found: dict[str, Range] = {}
        if len(self.batch_sizes) > 1:
            found[BATCH_INDEX] = Integer(0, len(self.batch_sizes) - 1)
        if len(self.precisions) > 1:
            found[PRECISION] = Choice(*self.precisions)
        if self.factors.low < self.factors.high:
            found[FACTOR] = self.factors
        return {**found, **self.extras}

    def experiment(self, parameters: Mapping[str, Any]) -> Experiment:
        """Return the configuration that drawn `parameters` mean; what is not drawn is the reference's.

        As many samples are trained on as in the reference: fewer steps of a larger batch.
        """
        known = flatten(self.reference)
        batch_size = (
            self.batch_sizes[int(parameters[BATCH_INDEX])]
            if BATCH_INDEX in parameters
            else known[BATCH]
        )
        settings = {
            key: value for key, value in parameters.items() if key not in (BATCH_INDEX, FACTOR)
        }
        lr = float(parameters.get(FACTOR, 1.0)) * self.scaled_lr(batch_size)
        return override(self.reference, {**settings, LR: lr, **self._rescaled(batch_size)})

    def reference_parameters(self) -> dict[str, Any]:
        """Return the parameters that mean the reference itself."""
        known = flatten(self.reference)
        ours = {
            BATCH_INDEX: self.batch_sizes.index(known[BATCH]),
            PRECISION: known[PRECISION],
            FACTOR: 1.0,
        }
        return {name: ours[name] if name in ours else known[name] for name in self.parameters()}

    def neighbours(self, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the parameters that are one step away.

        Half and twice the learning rate, the next batch sizes, and of the experiment's own options, where those are
        numbers, the next.
        """
        found: list[dict[str, Any]] = []
        if FACTOR in parameters and FACTOR in self.parameters():
            tried = [parameters[FACTOR] * 2.0, parameters[FACTOR] / 2.0]
            inside = [factor for factor in tried if self.factors.low <= factor <= self.factors.high]
            found += [{**parameters, FACTOR: factor} for factor in inside]
        if BATCH_INDEX in parameters:
            near = [parameters[BATCH_INDEX] + 1, parameters[BATCH_INDEX] - 1]
            found += [
                {**parameters, BATCH_INDEX: index}
                for index in near
                if 0 <= index < len(self.batch_sizes)
            ]
        for key, range_ in self.extras.items():
            found += [
                {**parameters, key: option} for option in _beside(parameters.get(key), range_)
            ]
        return found

    def scaled_lr(self, batch_size: int) -> float:
        """Return the learning rate that the scaling rule gives to a batch size."""
        known = flatten(self.reference)
        ratio: float = batch_size / known[BATCH]
        return float(known[LR]) * math.pow(ratio, self.lr_exponent)

    def _rescaled(self, batch_size: int) -> dict[str, Any]:
        """Return what counts steps, for another batch size: the same number of samples each."""
        train = self.reference.train
        ratio = train.batch_size / batch_size
        counts = {
            "steps": train.steps,
            "eval_every": train.eval_every,
            "warmup_steps": train.warmup_steps or None,
        }
        changed = {
            f"train.{name}": max(1, round(count * ratio)) for name, count in counts.items() if count
        }
        return {
            **changed,
            BATCH: batch_size,
            "train.micro_batch": None if ratio != 1 else train.micro_batch,
        }


def make_space(
    reference: Experiment,
    world_size: int,
    lr_exponent: float,
    precisions: Sequence[str] = ("fp32",),
    samples: float = math.inf,
) -> Space:
    """Return the space around `reference`. Raises ConfigError for a range that cannot be.

    `precisions`: those that the device can compute in; the reference's and the experiment's own choice come first.
    `samples`: in the training set: a batch is half of it at most, so that an epoch has two steps.
    """
    ranges = dict(type(reference).search)
    known = flatten(reference)
    for key, range_ in ranges.items():
        check_range(reference, key, range_)
    batch = ranges.pop(BATCH, None)
    precision = ranges.pop(PRECISION, None)
    lr = ranges.pop(LR, None)
    return Space(
        reference=reference,
        batch_sizes=_batch_sizes(known[BATCH], batch, world_size, samples),
        precisions=_with_first(
            known[PRECISION], precision.options if isinstance(precision, Choice) else precisions
        ),
        factors=_factors(known[LR], lr),
        lr_exponent=lr_exponent,
        extras=ranges,
    )


def narrowed(space: Space, batch_sizes: Sequence[int], precisions: Sequence[str]) -> Space:
    """Return the space with only those batch sizes and precisions, and the reference's, which always stay."""
    known = flatten(space.reference)
    return dataclasses.replace(
        space,
        batch_sizes=tuple(
            sorted(
                {known[BATCH], *(size for size in space.batch_sizes if size in set(batch_sizes))}
            )
        ),
        precisions=_with_first(
            known[PRECISION], [name for name in space.precisions if name in set(precisions)]
        ),
    )


def check_range(reference: Experiment, key: str, range_: Range) -> None:
    """Raise ConfigError where the range is empty, upside down, or holds what the setting cannot be."""
    match range_:
        case Choice(options):
            if not options:
                raise ConfigError(f"search[{key!r}]: Choice() has no options: name at least one")
            values = list(options)
        case Uniform(low, high) | LogUniform(low, high) | Integer(low, high):
            if not low <= high or not all(map(math.isfinite, (low, high))):
                raise ConfigError(
                    f"search[{key!r}]: the lower bound {low} is above the upper bound {high}: swap them"
                )
            if isinstance(range_, LogUniform) and low <= 0:
                raise ConfigError(
                    f"search[{key!r}]: LogUniform needs a lower bound above 0, got {low}"
                )
            values = [low, high]
        case _:
            raise ConfigError(
                f"search[{key!r}]: expected Choice, Uniform, LogUniform or Integer, got {type(range_).__name__}"
            )
    for value in values:
        override(reference, {key: value})


def _batch_sizes(
    own: int, chosen: Range | None, world_size: int, samples: float
) -> tuple[int, ...]:
    if isinstance(chosen, Choice):
        sizes = {int(size) for size in chosen.options}
    else:
        low, high = (chosen.low, chosen.high) if chosen is not None else (0, math.inf)
        powers = range(-MOST_DOUBLINGS, MOST_DOUBLINGS + 1)
        sizes = {int(own * 2.0**power) for power in powers if (own * 2.0**power).is_integer()}
        sizes = {size for size in sizes if low <= size <= high}
    fitting = {size for size in sizes if 0 < size <= samples / 2 and size % world_size == 0}
    return tuple(sorted({own, *fitting}))


def _beside(value: Any, range_: Range) -> list[Any]:
    """Return the options next to one, where there is an order."""
    if not isinstance(range_, Choice) or not all(
        type(option) in (int, float) for option in range_.options
    ):
        return []
    options = sorted(range_.options)
    place = options.index(value) if value in options else -2
    return [
        options[near] for near in (place + 1, place - 1) if place >= 0 and 0 <= near < len(options)
    ]


def _factors(own: float, chosen: Range | None) -> LogUniform:
    """Return the factors that keep the reference's batch size within the experiment's own range of learning rates."""
    match chosen:
        case Uniform(low, high) | LogUniform(low, high) if low > 0 and own > 0:
            return LogUniform(min(1.0, low / own), max(1.0, high / own))
        case Choice(options) if own > 0 and min(options) > 0:
            return LogUniform(min(1.0, min(options) / own), max(1.0, max(options) / own))
        case _:
            return FACTORS


def _with_first(own: str, others: Sequence[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([own, *map(str, others)]))

"""The configurations that a search may try: batch size, precision, learning rate, own ranges. Pure.

The learning rate is searched as a factor of a scaling rule's. With batch size B,

    lr = factor * lr_reference * (B / B_reference) ** exponent

The exponent is 1 for SGD (Goyal et al. 2017) and 1/2 for adaptive optimizers (Malladi et al. 2022).
So a trial with another batch size starts at a sensible learning rate, and a sampler that models
each parameter by itself compares like with like.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rankzero import ranks
from rankzero.config import ConfigError, flatten, override, values
from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.search_ranges import Choice, Integer, LogUniform, Range, Uniform

BATCH, PRECISION, LR = "train.batch_size", "train.precision", "lr"
SEED = "train.seed"
_TO_REPEAT = {"fold", "split", "seed"}  # words in the names of settings that choose the data
BATCH_INDEX, FACTOR, SPEED = "batch_index", "lr_factor", "speed settings"
DEVICES = "number of devices"
"""On a CPU, devices are processes. No setting of the user's can have this name."""
_NO_SETTINGS = (BATCH_INDEX, FACTOR, SPEED, DEVICES)
_MICRO_BATCH, _STRATEGY = "train.micro_batch", "train.strategy"
IN_STEPS = ("train.steps", "train.eval_every", "train.warmup_steps")
"""Settings that count the steps of the user's own batch size."""
SCALED = (*IN_STEPS, _MICRO_BATCH)
"""Settings that a trial scales by its batch size."""
_ROUNDED = (BATCH, *IN_STEPS)
_FACTORS = LogUniform(1 / 32, 32.0)  # three decades: a guess may be far off
_WIDE_STEP, _SHORT_WAY, _EDGE = 4.0, 1.2, 1.5  # ratios of learning rates
_ALONE = (
    f"no trial has another {BATCH} than yours: a range in `search` has powers of two times it, and "
    "Choice has any size"
)
_MOST_DOUBLINGS = 5  # up or down from the user's own batch size


@dataclasses.dataclass(frozen=True)
class Space:
    """The configurations that a search may try, around the user's own."""

    reference: Experiment
    batch_sizes: tuple[int, ...]
    """Ascending; the reference's is one of them."""
    precisions: tuple[str, ...]
    factors: LogUniform | Choice
    """Those of the learning rate; a choice of the user's keeps its options."""
    lr_exponent: float
    extras: Mapping[str, Range]
    """The experiment's own ranges, by dotted key."""
    devices: tuple[int, ...] = (1,)
    """The numbers of devices of a trial; the reference has the first."""
    samples: float = math.inf
    """In the training set."""
    machines: int = 1
    """The machines of a trial, which have its devices in equal parts."""
    device: str = ""
    """The kind of device that this process's trials have."""
    knobs: tuple[str, ...] = ()
    """The knobs of speed that the probe decides."""
    speed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The settings that it decided on. All trials but the reference have them."""
    micro_batches: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The largest micro-batch that fits, by row of the probe map, where larger ones do not."""

    def __str__(self) -> str:
        batch = "-".join(map(str, sorted({self.batch_sizes[0], self.batch_sizes[-1]})))
        parts = [f"batch {batch}", "/".join(self.precisions)]
        if len(set(ends(self.factors))) > 1:
            sign = "/" if isinstance(self.factors, Choice) else "-"
            factors = sign.join(f"{factor:g}" for factor in ends(self.factors))
            parts.append(f"lr {factors} x scaled (exponent {self.lr_exponent:g})")
        if len(self.devices) > 1:
            parts.append(f"{'/'.join(map(str, self.devices))} devices")
        speed = [settings_text(self.speed)] if self.speed else []
        return ", ".join([*parts, *self.extras, *speed])

    def warnings(self) -> list[str]:
        """Return why the winner might only be lucky, and what is not as the user asked for."""
        own, parts = type(self.reference).search.get(BATCH), math.lcm(*self.devices)
        sizes = own.options if isinstance(own, Choice) else ()
        lost = ", ".join(str(size) for size in sizes if size % parts and size <= self.samples / 2)
        found = [
            f"the search chooses {key}: if that decides which data are used, the easiest data "
            f"win. Leave it out of `search`; `rankzero repeat EXP --over {key}=…` trains on each"
            for key in self.extras
            if _TO_REPEAT & set(re.split(r"[._]", key.lower()))
        ]
        counts = "/".join(map(str, self.devices))
        left_out = f"no trial has {BATCH}={lost}, which cannot be divided among {counts} devices"
        large = [size for size in sizes if size > self.samples / 2 and size not in self.batch_sizes]
        too_large = f"no trial has {BATCH}={', '.join(map(str, large))}, which is more than half "
        too_large += f"of the {self.samples:.0f} training samples"
        size = self.experiment(self.reference_parameters()).train.micro_batch
        changed = f"your own batch does not fit the memory: {_MICRO_BATCH}={size} accumulates it"
        is_own = size == self.reference.train.micro_batch
        is_alone = isinstance(own, Integer | Uniform | LogUniform) and len(self.batch_sizes) == 1
        several = ((left_out, lost), (too_large, large), (changed, not is_own), (_ALONE, is_alone))
        return [*found, *(text for text, holds in several if holds)]

    def check_reference(self) -> None:
        """Raise UserError if the reference has a value that its range cannot draw."""
        for key, own in flatten(self.reference).items():
            if (chosen := self.extras.get(key)) is not None:
                _check_own(key, own, chosen)

    def parameters(self) -> dict[str, Range]:
        """Return the parameters that a sampler draws."""
        found: dict[str, Range] = {}
        # An index, and not a choice of batch sizes: a sampler shall know that they have an order.
        if len(self.batch_sizes) > 1:
            found[BATCH_INDEX] = Integer(0, len(self.batch_sizes) - 1)
        if len(self.precisions) > 1:
            found[PRECISION] = Choice(*self.precisions)
        if len(set(ends(self.factors))) > 1:
            found[FACTOR] = self.factors
        if len(self.devices) > 1:
            found[DEVICES] = Choice(*self.devices)
        # It has one value, and marks the trials. The reference lacks it.
        if self.speed:
            found[SPEED] = Choice(settings_text(self.speed))
        return {**found, **self.extras}

    @property
    def is_drawn(self) -> bool:
        """Return whether a sampler has something to draw."""
        return bool(set(self.parameters()) - {SPEED})

    def sped_up(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return these parameters with the settings of speed."""
        return {**parameters, **({SPEED: settings_text(self.speed)} if self.speed else {})}

    def devices_of(self, parameters: Mapping[str, Any]) -> int:
        """Return how many devices a trial with these parameters has."""
        return int(parameters.get(DEVICES, self.devices[0]))

    def on(self, devices: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return these parameters on so many devices."""
        return {**parameters, **({DEVICES: devices} if len(self.devices) > 1 else {})}

    def experiment(self, parameters: Mapping[str, Any]) -> Experiment:
        """Return the configuration of drawn `parameters`; the reference has the other settings.

        It trains on as many samples as the reference: a larger batch takes fewer steps. It has a
        smaller micro-batch if the probe showed that the memory needs one. So has the reference.
        """
        train = self.reference.train
        batch_size = train.batch_size
        if BATCH_INDEX in parameters:
            batch_size = self.batch_sizes[int(parameters[BATCH_INDEX])]
        ratio = train.batch_size / batch_size
        drawn = {key: value for key, value in parameters.items() if key not in _NO_SETTINGS}
        known = {**flatten(self.reference), **drawn}
        speed = self.speed if SPEED in parameters else {}
        settings = {
            **drawn,
            **speed,
            # The range of a number of steps is one for the user's own batch size.
            **{key: max(1, round(known[key] * ratio)) for key in IN_STEPS if known[key]},
            BATCH: batch_size,
            LR: float(parameters.get(FACTOR, 1.0)) * self.scaled_lr(batch_size),
        }
        # The user's micro-batch need not divide another batch, and neither need a drawn one.
        devices = self.devices_of(parameters)
        share = batch_size // ranks.shards(known[_STRATEGY], devices)
        most = known[_MICRO_BATCH]
        fitting = self.micro_batches.get(row_name(devices, known[PRECISION]))
        most = fitting if fitting and fitting < (most or share) else most
        # The probe measured this one with the other settings of speed, which may save memory.
        most = speed.get(_MICRO_BATCH, most)
        if (ratio, devices, most) != (1, self.devices[0], train.micro_batch):
            settings[_MICRO_BATCH] = dividing(share, most)
        return override(self.reference, settings)

    def reference_parameters(self) -> dict[str, Any]:
        """Return the parameters of the reference itself."""
        known = flatten(self.reference)
        own = {**known, BATCH_INDEX: self.batch_sizes.index(known[BATCH]), FACTOR: 1.0}
        own[DEVICES] = self.devices[0]
        return {name: own[name] for name in self.parameters() if name != SPEED}

    def neighbours(self, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the parameters with the next batch size, and then all `changes`.

        After them come the same parameters on all other numbers of devices, which show what each
        number is worth.
        """
        found = _stepped(parameters, BATCH_INDEX, range(len(self.batch_sizes)))
        others = (one for one in self.devices if one != self.devices_of(parameters))
        return [*found, *self.changes(parameters), *(self.on(one, parameters) for one in others)]

    def changes(self, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the parameters with the next option of one of the experiment's own choices.

        Only choices of numbers have an order.
        """
        found = []
        for key, range_ in self.extras.items():
            # A bool has a number's operators, and no order that means anything.
            if isinstance(range_, Choice) and {type(one) for one in range_.options} <= {int, float}:
                found += _stepped(parameters, key, sorted(range_.options))
        return found

    def further_lrs(
        self, parameters: Mapping[str, Any], tried: Sequence[float], step: float = _WIDE_STEP
    ) -> list[dict[str, Any]]:
        """Return the parameters with learning rates beyond those that were tried, in the range.

        `tried`: the factors of all trials, ascending. `step`: the ratio to the new learning rates.
        """
        own = float(parameters.get(FACTOR, math.nan))
        match self.factors:
            case Choice(options):
                up = min((one for one in options if one > own), default=own)
                down = max((one for one in options if one < own), default=own)
            case LogUniform(low, high):
                up, down = min(own * step, high), max(own / step, low)
        found = [up] if up > _SHORT_WAY * own and (not tried or tried[-1] <= own) else []
        found += [down] if own > _SHORT_WAY * down and (not tried or tried[0] >= own) else []
        return [{**parameters, FACTOR: factor} for factor in found]

    def nearest_factor(self, factor: float) -> float:
        """Return the factor that a trial may have and that is nearest to this one, by ratio."""
        match self.factors:
            case Choice(options):
                size = math.log(max(factor, 1e-9))
                return float(min(options, key=lambda one: abs(math.log(one) - size)))
            case LogUniform(low, high):
                return min(max(factor, low), high)

    def closer_lrs(
        self, parameters: Mapping[str, Any], tried: Sequence[float]
    ) -> list[dict[str, Any]]:
        """Return the parameters with the learning rates half-way, by ratio, to those next to it.

        `tried`: the factors of all trials, ascending. A choice has none between its options.
        """
        if isinstance(self.factors, Choice):
            return []
        own = float(parameters.get(FACTOR, math.nan))
        first, last = bisect.bisect_left(tried, own), bisect.bisect_right(tried, own)
        both = [*tried[last : last + 1], *tried[max(0, first - 1) : first]]
        near = [one for one in both if max(one / own, own / one) > _WIDE_STEP / 2 + 0.5]
        return [{**parameters, FACTOR: math.sqrt(own * one)} for one in near]

    def at_edge(self, parameters: Mapping[str, Any]) -> list[str]:
        """Return the keys of the numbers that lie at an edge of their range."""
        found = []
        # A trial from before its range was added to `search` lacks the parameter.
        ranges = ((name, one) for name, one in self.parameters().items() if name in parameters)
        for name, range_ in ranges:
            match range_:
                case LogUniform(low, high):
                    value = float(parameters[name])
                    edge = min(value / low, high / value) < min(_EDGE, (high / low) ** 0.1)
                case Uniform(low, high):
                    value = float(parameters[name])
                    edge = min(value - low, high - value) < 0.05 * (high - low)
                case Integer(low, high) if name != BATCH_INDEX:
                    edge = parameters[name] in (low, high) and high - low > 1
                case _:
                    edge = False
            if edge:
                found.append(LR if name == FACTOR else name)
        return found

    def scaled_lr(self, batch_size: int) -> float:
        """Return the learning rate of the scaling rule for a batch size."""
        ratio = batch_size / self.reference.train.batch_size
        return self.reference.lr * math.pow(ratio, self.lr_exponent)


def _stepped(
    parameters: Mapping[str, Any], name: str, options: Sequence[Any]
) -> list[dict[str, Any]]:
    """Return the parameters with the options next to their own one."""
    if parameters.get(name) not in options:
        return []
    place = options.index(parameters[name])
    near = (place + 1, place - 1)
    return [{**parameters, name: options[one]} for one in near if 0 <= one < len(options)]


def make_space(
    reference: Experiment,
    world_size: int,
    lr_exponent: float,
    precisions: Sequence[str] = ("fp32",),
    samples: float = math.inf,
    more: Sequence[int] = (),
) -> Space:
    """Return the space around `reference`. Raises ConfigError for an invalid range.

    `precisions`: those that the device computes fast in. The experiment's own choice replaces them.
    `samples`: in the training set. A batch is at most half of them: an epoch has two steps. `more`:
    other numbers of devices. Every batch can be divided among each.
    """
    ranges = dict(type(reference).search)
    for key, range_ in ranges.items():
        _check_range(reference, key, range_)
    batch = ranges.pop(BATCH, None)
    precision = ranges.pop(PRECISION, None)
    lr = ranges.pop(LR, None)
    devices = (world_size, *more)
    if isinstance(precision, Choice):
        precisions = [str(option) for option in precision.options]
    return Space(
        reference=reference,
        batch_sizes=_batch_sizes(reference.train.batch_size, batch, math.lcm(*devices), samples),
        precisions=tuple(dict.fromkeys([reference.train.precision, *precisions])),
        factors=_lr_factors(reference.lr, lr),
        lr_exponent=lr_exponent,
        extras=ranges,
        devices=devices,
        samples=samples,
    )


def narrowed(space: Space, batch_sizes: Sequence[int], precisions: Sequence[str]) -> Space:
    """Return the space with only those batch sizes and precisions, and always the reference's."""
    train = space.reference.train
    sizes = {train.batch_size, *(set(space.batch_sizes) & set(batch_sizes))}
    left = [name for name in space.precisions if name in precisions]
    return dataclasses.replace(
        space,
        batch_sizes=tuple(sorted(sizes)),
        precisions=tuple(dict.fromkeys([train.precision, *left])),
    )


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return settings as people say them: ``batch 512, bf16, lr 0.006, workers 2, compile``."""
    names, texts = {BATCH: "batch", PRECISION: ""}, []
    for key, value in settings.items():
        if key == DEVICES:
            texts.append(devices_text(value))
            continue
        name = names.get(key, key.removeprefix("train."))
        if isinstance(value, bool) and key.startswith("train."):
            texts.append(name if value else f"no {name}")
            continue
        # A line break would end the comment that the text stands in.
        text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
        texts.append(f"{name} {text}".strip())
    return ", ".join(texts)


def row_name(devices: int, precision: str) -> str:
    """Return the name of a row of the probe map: ``4 x bf16``."""
    return f"{devices} x {precision}"


def devices_text(count: int) -> str:
    """Return ``1 device`` or ``4 devices``."""
    return f"{count} device{'s' if count > 1 else ''}"


def only(space: Space, keys: Collection[str]) -> Space:
    """Return the space that varies batch size, precision and learning rate only if in `keys`."""
    train = space.reference.train
    return dataclasses.replace(
        space,
        batch_sizes=space.batch_sizes if BATCH in keys else (train.batch_size,),
        precisions=space.precisions if PRECISION in keys else (train.precision,),
        factors=space.factors if LR in keys else LogUniform(1.0, 1.0),
    )


def dividing(share: int, most: int | None) -> int | None:
    """Return the largest micro-batch up to `most` that divides a device's share of a batch."""
    if most is None:
        return None
    return max(size for size in range(1, min(most, share) + 1) if share % size == 0)


def _check_range(reference: Experiment, key: str, range_: Range) -> None:
    """Raise ConfigError for a range that is empty, upside down, or has values of a wrong type."""
    problem = ""
    match range_:
        case _ if key == SEED:
            problem = (
                "a search would choose the luckiest seed. Leave it out; `rankzero repeat EXP "
                "--seeds 3` trains the result on several seeds"
            )
        case _ if key in _NO_SETTINGS:
            problem = "the search has a parameter of this name: give your setting another one"
        case Choice(options):
            problem = "" if options else "Choice() has no options: name at least one"
        case LogUniform(low, _) if low <= 0:
            problem = f"LogUniform needs a lower bound above 0, got {low}"
        case Uniform(low, high) | LogUniform(low, high) | Integer(low, high):
            if not -math.inf < low <= high < math.inf:
                problem = f"the lower bound {low} is above the upper bound {high}: swap them"
        case _:
            raise ConfigError(
                f"search[{key!r}]: expected Choice, Uniform, LogUniform or Integer, "
                f"got {type(range_).__name__}"
            )
    if problem:
        raise ConfigError(f"search[{key!r}]: {problem}")
    _check_values(reference, key, range_)


def _check_values(reference: Experiment, key: str, range_: Range) -> None:
    """Raise ConfigError if the setting cannot have the values of its range."""
    # Overriding checks the key, the type, and the setting's own limits.
    for value in ends(range_):
        override(reference, {key: value})
    # The ends may be integers by chance. The batch size and numbers of steps are rounded.
    if isinstance(range_, Uniform | LogUniform) and key not in _ROUNDED:
        try:
            override(reference, {key: math.nextafter(range_.low, range_.high)})
        except ConfigError as error:
            name, both = type(range_).__name__, f"{range_.low}, {range_.high}"
            raise ConfigError(
                f"search[{key!r}]: {name} draws real numbers, and {error}: use Integer({both})"
            ) from error


def _check_own(key: str, own: Any, range_: Range) -> None:
    """Raise UserError if no trial can have the user's own value.

    One that is only above or below a range of numbers is fine: the reference has it nevertheless.
    """
    texts = [values.render(end) for end in ends(range_)]
    name, problem, instead = type(range_).__name__, "", f"use Choice({own!r}, …)"
    match range_:
        case Choice(options):
            if own not in options:
                problem = f"is not one of the choices {', '.join(texts)}"
                instead = "add it to Choice"
        case _ if not isinstance(own, int | float) or not math.isfinite(own):
            problem = f"is no finite number, and {name} draws numbers"
        case Integer() if own != int(own):
            problem = "is no integer, and Integer draws integers"
        case LogUniform() if own <= 0:
            problem, instead = "has no logarithm", f"use Uniform(0, {texts[-1]})"
        case _ if range_.low == range_.high != own:
            problem = f"is not {texts[0]}, which is all that {name}({', '.join(texts)}) has"
    if problem:
        raise UserError(
            f"search[{key!r}]: your own value {values.render(own)} {problem}: {instead}, or give "
            f"{key}={texts[0]}"
        )


def ends(range_: Range) -> Sequence[Any]:
    """Return a range's bounds, or all options of a choice."""
    return range_.options if isinstance(range_, Choice) else (range_.low, range_.high)


def _batch_sizes(own: int, chosen: Range | None, divisor: int, samples: float) -> tuple[int, ...]:
    if isinstance(chosen, Choice):
        sizes = {int(size) for size in chosen.options}
    else:
        low, high = (chosen.low, chosen.high) if chosen is not None else (0, math.inf)
        doubled = (own * 2.0**power for power in range(-_MOST_DOUBLINGS, _MOST_DOUBLINGS + 1))
        sizes = {int(size) for size in doubled if size.is_integer() and low <= size <= high}
    # Ranks share a batch equally. The user's own size always stays, as the reference.
    fitting = {size for size in sizes if 0 < size <= samples / 2 and size % divisor == 0}
    return tuple(sorted({own, *fitting}))


def _lr_factors(own: float, chosen: Range | None) -> LogUniform | Choice:
    """Return the factors that keep the reference's batch size in the experiment's own lr range."""
    if own <= 0 and chosen is not None:
        raise ConfigError(
            f"search['lr']: your own lr is {own}, and a search multiplies it: give another lr"
        )
    if chosen is None:
        return _FACTORS if own > 0 else LogUniform(1.0, 1.0)
    low, high = min(ends(chosen)) / own, max(ends(chosen)) / own
    if isinstance(chosen, Choice):
        if low <= 0:
            raise ConfigError("search['lr']: every option of Choice must be above 0")
        return Choice(*sorted({1.0, *(option / own for option in chosen.options)}))
    # The reference's own factor, 1, is always inside.
    return LogUniform(min(1.0, low if low > 0 else _FACTORS.low), max(1.0, high))

"""Which settings only change the speed, and how the probe decides them. Pure.

Each value is measured alone, against the user's own settings. Then the good values are measured
again and added one by one, so a value that does not go with another one is left out. A block of the
settings before comes before and after each value: a machine that slows down favours neither.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal

from rankzero import ranks
from rankzero.confidence import student_t
from rankzero.experiment import Train
from rankzero.tuning.probe.grid import Cell, ProbeResult
from rankzero.tuning.space import settings_text
from rankzero.tuning.trials.describe import ExperimentDescription

Settings = Mapping[str, Any]
Decision = Literal[
    "kept",
    "no gain",
    "does not pay",
    "not chosen",
    "no time",
    "refused",
    "out of memory",
    "failed",
]
LEAST_GAIN = 0.02
"""A smaller gain is not worth another setting. A wait below this share of a step is no cause."""
EFFECT_COLUMNS = ("knob", "samples/s", "95 % interval", "decision")
EXACT = ("ddp", "zero1", "fsdp")
"""Strategies that compute the same from the same samples."""
# A model that takes long to build takes it for each value. A search trains dozens of runs.
_PART_OF_A_RUN, _LEAST_SECONDS = 0.5, 120.0
_PLAN = 1  # raised when the order of the measurements changes: older ones are not read then


@dataclasses.dataclass(frozen=True)
class Subject:
    """The user's own settings, the model and the machine: they decide which values a knob has."""

    train: Train
    described: ExperimentDescription

    @property
    def run_samples(self) -> int:
        """Return the samples of one of the user's runs."""
        if self.train.steps:
            return self.train.steps * self.train.batch_size
        return (self.train.epochs or 1) * self.described.samples


@dataclasses.dataclass(frozen=True)
class Value:
    """One value of a knob: the settings that it changes, or why it is not measured."""

    knob: str
    settings: Settings
    refusal: str = ""


@dataclasses.dataclass(frozen=True)
class Effect:
    """The effect of one value of a knob: ratios of samples/s, with a 95 % interval."""

    knob: str
    settings: Settings
    decision: Decision
    gain: float = math.nan
    low: float = math.nan
    high: float = math.nan
    reason: str = ""

    @property
    def name(self) -> str:
        """Return the value as people say it: ``workers 2``."""
        return settings_text(self.settings) or self.knob

    def row(self) -> list[str]:
        """Return the texts of `EFFECT_COLUMNS`."""
        gain, interval = "", ""
        if math.isfinite(self.gain):
            gain = f"{self.gain - 1:+.1%}"
            interval = f"{self.low - 1:+.1%} to {self.high - 1:+.1%}"
        decision = f"{self.decision}: {self.reason}" if self.reason else self.decision
        return [self.name, gain, interval, decision]


def values(knob: str, subject: Subject, knee: ProbeResult) -> list[Value]:
    """Return the values of a knob to try at the knee, at least one, the cheapest first."""
    key, train, found = f"train.{knob}", subject.train, list[Any]()
    share = knee.batch_size // ranks.shards(train.strategy, subject.described.processes)
    if reason := _refusal(knob, subject, knee):
        return [Value(knob, {}, reason)]
    match knob:
        case "workers":
            found = _workers(subject, knee)
        case "recompute" if knee.micro_batch < share:
            # The memory that it saves is for a larger micro-batch.
            return [Value(knob, {key: not train.recompute, "train.micro_batch": share})]
        case "compile" | "channels_last" | "recompute":
            found = [not getattr(train, knob)]
        case "strategy":
            found = [name for name in EXACT if name != train.strategy]
        case "ddp.bucket_mb":
            found = [size for size in (5.0, 50.0) if size != train.ddp.bucket_mb]
        case "micro_batch":
            found = [knee.micro_batch // part for part in (2, 4) if knee.micro_batch % part == 0]
    nothing = [Value(knob, {}, "there is no other value to try")]
    return [Value(knob, {key: value}) for value in found] or nothing


def _refusal(knob: str, subject: Subject, knee: ProbeResult) -> str:
    """Return why no value of a knob is worth measuring, or nothing."""
    strategy, waits = subject.train.strategy, knee.communication_fraction
    described, processes = subject.described, subject.described.processes
    is_divided = processes > 1 and strategy in EXACT
    reasons = {
        "workers": "" if described.loads else "the data are tensors in memory",
        "channels_last": "" if described.images else "the model has no convolutions over images",
        "strategy": "" if is_divided else f"{processes} x {strategy} has no equal",
        "ddp.bucket_mb": "" if waits >= LEAST_GAIN else f"a step waits {waits:.1%} for gradients",
        "micro_batch": "the model normalizes over a micro-batch" if described.batch_norm else "",
    }
    if knob == "ddp.bucket_mb" and not (is_divided and strategy != "fsdp"):
        return f"{processes} x {strategy} has no buckets"
    if knob == "micro_batch" and strategy not in (*EXACT, "single"):
        return f"train.strategy={strategy} divides batches by itself"
    return reasons.get(knob, "")


def _workers(subject: Subject, knee: ProbeResult) -> list[int]:
    # None means as many as training leaves cores; see training/data/processes.py.
    each = subject.described.cores // subject.described.processes
    own = subject.train.workers
    own = max(0, min(8, each - 1)) if own is None else own
    found = [own // 2] if own else []
    # More of them can only gain what a step waits for data.
    if knee.data_wait_fraction >= LEAST_GAIN:
        found += [count for count in (1, 2, 4, 8, 16) if own < count <= max(2, each)]
    return found


def decided(found: Sequence[Effect]) -> dict[str, Any]:
    """Return the settings that were kept."""
    kept = (one for one in found if one.decision == "kept")
    return {key: value for one in kept for key, value in one.settings.items()}


def replay(
    knobs: Sequence[str], subject: Subject, knee: ProbeResult, measured: Sequence[ProbeResult]
) -> tuple[Cell | None, list[Effect]]:
    """Return the next cell to measure, or None and the effect of each of the knobs' values."""
    tried = [value for knob in knobs for value in values(knob, subject, knee)]
    what = (_PLAN, knee.batch_size, knee.micro_batch, knee.precision, tried)
    plan = hashlib.sha256(repr(what).encode()).hexdigest()[:8]
    run_seconds = subject.run_samples / knee.samples_per_second
    limit = max(_LEAST_SECONDS, _PART_OF_A_RUN * run_seconds)
    steps = _plan(tried, subject.run_samples, limit)
    left = [block for block in measured if block.plan == plan]
    try:
        wanted = next(steps)
        while found := [place for place, one in enumerate(left) if one.settings == wanted]:
            block = left.pop(found[0])
            # A value that failed again was measured after all others, by a later command.
            if block.status == "ok":
                del left[: found[0]]
            wanted = steps.send(block)
    except StopIteration as end:
        return None, end.value
    return Cell(knee.batch_size, knee.micro_batch, knee.precision, dict(wanted), plan), []


_Blocks = tuple[ProbeResult, ProbeResult, ProbeResult]  # without a value, with it, without it
_Steps = Generator[Settings, ProbeResult, Any]


def _plan(tried: Sequence[Value], samples: float, limit: float) -> _Steps:
    """Yield settings to measure, receive their measurements, and return the effects.

    Begin no value after `limit` seconds. Each value alone gets a half of them.
    """
    if all(one.refusal for one in tried):
        return [_effect(one, None, [], samples) for one in tried]
    before = yield {}
    if before.status != "ok":
        lost = (before, before, before)
        return [_effect(one, None if one.refusal else lost, [], samples) for one in tried]
    alone: list[_Blocks | None] = []
    spent = before.seconds
    for one in tried:
        is_left_out = one.refusal or spent > limit / 2
        alone.append(None if is_left_out else (yield from _blocks(one, {}, before)))
        if alone[-1]:
            before = alone[-1][2]
            spent += sum(block.seconds for block in alone[-1][1:])
    pairs = [_pair(one) for one in alone if one]
    found = [_effect(one, blocks, pairs, samples) for one, blocks in zip(tried, alone, strict=True)]
    ranked, current = _ranked(found), dict[str, Any]()
    for places in ranked:
        for place in places:
            rest: Decision = "no time" if spent > limit else "not chosen"
            found[place] = dataclasses.replace(found[place], decision=rest)
        # The next value of a knob is for the case that the best was only lucky.
        for place in places if spent <= limit else []:
            if before.settings != current:
                before = yield current
                spent += before.seconds
            blocks = yield from _blocks(tried[place], current, before)
            pairs.append(_pair(blocks))
            # Set-up costs were paid by the first measurement: compiled code is kept.
            found[place] = _effect(tried[place], blocks, pairs, math.inf)
            before = blocks[2]
            spent += sum(block.seconds for block in blocks[1:])
            if found[place].decision == "kept":
                current |= tried[place].settings
                break
    return found


def _blocks(value: Value, current: Settings, before: ProbeResult) -> _Steps:
    """Measure a value, and the settings without it once more."""
    block = yield {**current, **value.settings}
    return before, block, (yield current) if block.status == "ok" else before


def _pair(blocks: _Blocks) -> float:
    """Return how much two blocks of the same settings differ, as a logarithm."""
    first, _, last = blocks
    return _log(last) - _log(first)


def _log(block: ProbeResult) -> float:
    return math.log(block.samples_per_second) if block.status == "ok" else math.nan


def _effect(value: Value, blocks: _Blocks | None, pairs: Sequence[float], samples: float) -> Effect:
    """Return the effect of a value. `pairs`: all that `_pair` returned so far."""
    if blocks is None:
        unmeasured: Decision = "refused" if value.refusal else "no time"
        return Effect(value.knob, value.settings, unmeasured, reason=value.refusal)
    for one in (blocks[1], blocks[0], blocks[2]):
        if one.status != "ok":
            return Effect(value.knob, value.settings, one.status, reason=one.reason)
    before, block, after = blocks
    gain = _log(block) - (_log(before) + _log(after)) / 2
    # An interval within a block does not show what differs between two blocks, but pairs do.
    within = math.hypot(before.relative_half_width, after.relative_half_width) / 2
    half = max(math.hypot(block.relative_half_width, within), _between(pairs))
    saved = samples / before.samples_per_second * -math.expm1(-gain)
    setup = block.setup_seconds - before.setup_seconds
    if gain <= half or gain < math.log1p(LEAST_GAIN):
        decision: Decision = "no gain"
    else:
        decision = "does not pay" if saved < setup else "kept"
    reason = f"{setup:.0f} s longer to start" if decision == "does not pay" else ""
    low, high = math.exp(gain - half), math.exp(gain + half)
    return Effect(value.knob, value.settings, decision, math.exp(gain), low, high, reason)


def _between(pairs: Sequence[float]) -> float:
    """Return half the 95 % interval of an effect, by the noise between blocks; 0 if unknown."""
    # 0: a value failed, so that its pair is one block.
    known = [pair for pair in pairs if pair and math.isfinite(pair)]
    if len(known) < 2:
        return 0.0
    variance = math.fsum(pair**2 for pair in known) / len(known) / 2  # of one block
    return student_t(len(known)) * math.sqrt(1.5 * variance)


def _ranked(found: Sequence[Effect]) -> list[list[int]]:
    """Return the places of each knob's kept values, the largest gain first.

    The first value that the best one does not surely beat comes first: it is cheaper.
    """
    by_knob: dict[str, list[int]] = {}
    # Only these have a gain: NaN has no order.
    kept = [place for place, one in enumerate(found) if one.decision == "kept"]
    for place in sorted(kept, key=lambda place: -found[place].gain):
        by_knob.setdefault(found[place].knob, []).append(place)
    for places in by_knob.values():
        least = found[places[0]].low
        cheapest = min(place for place in places if found[place].high >= least)
        places.sort(key=lambda place: place != cheapest)
    return list(by_knob.values())

"""The cost of a training to the target, and what is worth its price. Pure.

The cost is seconds x devices x the price of a device. The knee is the configuration with the least
product of time and cost: up to it, 1 % more cost buys at least 1 % more speed (Eager, Zahorjan and
Lazowska 1989, "Speedup versus efficiency in parallel systems").
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from rankzero.confidence import pooled_deviation, student_t
from rankzero.scalars import shown
from rankzero.tuning.next_trial import front
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.probe.scaling import SCALING_COLUMNS, Scaling, scaling
from rankzero.tuning.space import Space, devices_text
from rankzero.tuning.trial import Trial
from rankzero.tuning.verdict.confirm import Stored, by_trial
from rankzero.tuning.verdict.decide import costs_of

_COLUMNS = ("trial", "devices", "seconds to target", "cost to target", "new seeds", "best for")


@dataclasses.dataclass(frozen=True)
class PricedTrial:
    """A configuration that reached the target: its time and its cost, with 95 % intervals."""

    trial: int
    devices: int
    seconds: float
    """Confirmed: the geometric mean over the new seeds."""
    cost: float
    seeds: int = 0
    """The new seeds on which it is confirmed; 0: a trial alone."""
    spread: float = math.nan
    """The factor from the mean to the interval's ends, of the time as of the cost."""

    @property
    def row(self) -> list[str]:
        """Return the texts of the table's columns but the last."""
        seconds, cost = (_interval(one, self.spread) for one in (self.seconds, self.cost))
        return [str(self.trial), str(self.devices), seconds, cost, str(self.seeds or "")]


def priced(
    trials: Sequence[Trial], space: Space, stored: Stored, price: float
) -> list[PricedTrial]:
    """Return what reached the target: of each confirmed trial the new seeds, else the trial.

    `price`: of one device for an hour. `stored`: the confirmations. A configuration that missed the
    target on half of the new seeds is left out.
    """
    runs_of = by_trial(stored)
    logs = {
        number: [math.log(max(cost, 1e-9)) for cost in costs_of(runs)]
        for number, runs in runs_of.items()
    }
    # Pooled, as for the verdict: three runs of one configuration hardly show the noise.
    reached = {
        number: [math.log(run.value) for run in runs if run.value]
        for number, runs in runs_of.items()
    }
    noise, freedom = pooled_deviation(list(reached.values()))
    found = []
    for trial in trials:
        own, half = logs.get(trial.number, []), math.nan
        seconds = trial.value if trial.feasible and trial.number not in logs else None
        if own:
            seconds = math.exp(statistics.fmean(own))
            # A run that missed the target takes much longer.
            is_reliable = len(own) == len(reached[trial.number])
            deviation = noise if is_reliable else max(noise, statistics.stdev(own))
            half = student_t(freedom) * deviation / math.sqrt(len(own)) if freedom else math.nan
        if seconds:
            devices = space.devices_of(trial.parameters)
            cost = seconds * devices * price / 3600
            found.append(
                PricedTrial(trial.number, devices, seconds, cost, len(own), math.exp(half))
            )
    return found


def recommended(found: Sequence[PricedTrial], winner: int) -> dict[str, PricedTrial]:
    """Return the fastest, the knee and the cheapest, of the confirmed ones if there are any.

    `winner`: the trial of the verdict. It is the fastest as far as the runs can show, unless one
    on other devices is as fast and costs less.
    """
    sure = [one for one in found if one.seeds] or found
    if not sure:
        return {}
    own = min(sure, key=lambda one: (one.trial != winner, one.seconds, one.cost))
    # On as many devices, only noise is faster or cheaper than the winner.
    able = [own, *(one for one in sure if one.devices != own.devices)]
    fastest = min((one for one in able if one.seconds <= own.seconds), key=_by_cost)
    able = [fastest, *(one for one in able if one.seconds > fastest.seconds)]
    knee = min(able, key=lambda one: (one.seconds * one.cost, one.cost))
    return {"fastest": fastest, "knee": knee, "cheapest": min(able, key=_by_cost)}


@dataclasses.dataclass(frozen=True)
class DeviceResult:
    """The result of a search about numbers of devices and their cost."""

    price: float | None
    """A device for an hour costs this."""
    found: Sequence[PricedTrial]
    best: Mapping[str, PricedTrial]
    """The recommendations by name."""
    curve: Scaling | None

    def sentences(self) -> list[str]:
        """Return the recommendations and the scaling curve as sentences."""
        texts = []
        if self.best:
            by_trial = {one.trial: one for one in self.best.values()}
            parts = [
                f"{' and '.join(self._names(one).rsplit(', ', 1))} {shown(one.seconds, 3)} s "
                f"and {shown(one.cost, 3)} on {devices_text(one.devices)} (trial {number})"
                for number, one in by_trial.items()
            ]
            texts = [f"To the target, at {self.price:g} per device-hour: {'; '.join(parts)}."]
            fast, cheap = self.best["fastest"], self.best["cheapest"]
            if fast.devices != cheap.devices:
                # Both ratios are of the same two times.
                spread = math.exp(math.hypot(math.log(fast.spread), math.log(cheap.spread)))
                cost = _interval(fast.cost / cheap.cost, spread, 2, "x")
                speed = _interval(cheap.seconds / fast.seconds, spread, 2, "x")
                texts.append(
                    f"{devices_text(fast.devices)}: {cost} the cost for {speed} the speed of "
                    f"{devices_text(cheap.devices)}."
                )
        return [*texts, *([self.curve.sentence()] if self.curve else [])]

    def tables(self) -> list[tuple[str, Sequence[str], list[list[str]]]]:
        """Return file name, columns and rows of each table: the front, and the scaling curve."""
        shown = {one.trial: one for one in [*front(self.found, time_and_cost), *self.best.values()]}
        ranked = sorted(shown.values(), key=time_and_cost)
        priced = [[*one.row, self._names(one)] for one in ranked]
        scaled = [one.row for one in self.curve.points] if self.curve else []
        tables = ("cost.json", _COLUMNS, priced), ("scaling.json", SCALING_COLUMNS, scaled)
        return [table for table in tables if table[2]]

    def _names(self, wanted: PricedTrial) -> str:
        return ", ".join(name for name, one in self.best.items() if one.trial == wanted.trial)


def device_result(
    trials: Sequence[Trial],
    space: Space,
    stored: Stored,
    price: float | None,
    winner: int,
    measured: Sequence[ProbeResult],
) -> DeviceResult:
    """Return what the trials, their confirmations and the probe's cells show."""
    found = [] if price is None else priced(trials, space, stored, price)
    return DeviceResult(price, found, recommended(found, winner), scaling(measured))


def _interval(value: float, spread: float, digits: int = 3, unit: str = "") -> str:
    """Return a value with its interval, if that is known: ``2.5x (2.3 to 2.7)``."""
    ends = (shown(one, digits) for one in (value / spread, value * spread))
    known = f" ({' to '.join(ends)})" if math.isfinite(spread) else ""
    return f"{shown(value, digits)}{unit}{known}"


def _by_cost(one: PricedTrial) -> tuple[float, float]:
    return one.cost, one.seconds


def time_and_cost(one: PricedTrial) -> tuple[float, float]:
    """Return what the front is of."""
    return one.seconds, one.cost

"""Which configuration is the sweet spot, and how sure: arithmetic on confirmed runs. Pure.

Every contestant, the user's own configuration among them, was trained anew on the same new seeds. Effects are
differences of mean logarithms (of differences, for a quality), with one variance pooled over all contestants. A
challenger beats the user's own if it is better by Student's t at 5 %, Bonferroni's over all and over two looks: where
it is too close to call, the nearest one and the user's own are trained once more as often. Equals have no winner.
The sweet region is whatever lies within one standard error of the best (Breiman's rule), 3 % at least.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rankzero.confidence import pooled_deviation, student_t
from rankzero.experiment import Goal
from rankzero.tuning.objective import Name

LOOKS = 2  # how often a verdict may be asked for
FLOOR = 0.03  # a gain below this is not worth another configuration, however sure it is


@dataclasses.dataclass(frozen=True)
class ConfirmationRun:
    """One confirmation: a configuration trained on a new seed."""

    seed: int
    value: float | None
    """As the objective has it, to be minimised; None: the quality was not reached."""
    quality: float | None
    samples_per_second: float | None = None
    memory_bytes: float | None = None
    joules: float | None = None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration and its confirmations."""

    trial: int
    settings: Mapping[str, Any]
    batch_size: int
    runs: tuple[ConfirmationRun, ...]

    @property
    def reached(self) -> bool:
        """Tell whether the quality was reached on every seed."""
        return bool(self.runs) and all(run.value is not None for run in self.runs)

    @property
    def values(self) -> list[float]:
        return [run.value for run in self.runs if run.value is not None]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a search found."""

    objective: Name
    reference: Candidate
    winner: Candidate
    """What is handed out: the reference itself where nothing beats it."""
    beaten: bool
    """Whether the winner beats the reference beyond the noise."""
    region: tuple[int, ...]
    """The trials that are as good as the best, as far as can be told."""
    gain: float | None
    """Of the winner (of the best challenger, where none wins) over the reference: a ratio of times or speeds, or a
    difference of quality."""
    gain_low: float | None
    gain_high: float | None
    noise: float
    """The floor below which a gain is taken for noise, as `gain` counts: 0.03 is 3 %."""
    nearest: int | None = None
    """The challenger that `gain` is of."""


def decide(
    objective: Name, goal: Goal, reference: Candidate, challengers: Sequence[Candidate]
) -> Verdict:
    """Choose among confirmed contestants. A challenger that missed the quality on any seed is out."""
    able = [one for one in challengers if one.reached]
    scale = _Scale(objective, [reference, *able], sure=1 - 0.05 / LOOKS / max(1, len(able)))
    noise = scale.floor(reference, min(able, key=scale.mean, default=reference))
    if not able:
        return Verdict(
            objective, reference, reference, False, (reference.trial,), None, None, None, noise
        )
    best = min([*able, *([reference] if reference.reached else [])], key=scale.mean)
    region = [one for one in able if scale.mean(one) <= scale.mean(best) + scale.near(one, best)]
    if not reference.reached:
        return Verdict(
            objective,
            reference,
            min(region, key=_modesty),
            True,
            _trials(region),
            None,
            None,
            None,
            noise,
        )
    better = [
        one
        for one in region
        if scale.mean(reference) - scale.mean(one) > scale.floor(reference, one)
    ]
    chosen = min(better, key=_modesty) if better else reference
    nearest = chosen if better else min(able, key=scale.mean)
    effect, width = (
        scale.mean(reference) - scale.mean(nearest),
        scale.width(reference, nearest, 0.975),
    )
    gain, low, high = (
        _gain(objective, found) for found in (effect, effect - width, effect + width)
    )
    members = region if better else [*region, reference]
    floor = _gain(objective, scale.floor(reference, nearest)) - _unit(objective)
    return Verdict(
        objective,
        reference,
        chosen,
        bool(better),
        _trials(members),
        gain,
        low,
        high,
        floor,
        nearest.trial,
    )


def finalists(verdict: Verdict) -> tuple[int, ...]:
    """Return the trials that more seeds would tell apart: the reference and the nearest. None where it is clear.

    Clear is also what would not be worth it if it were sure.
    """
    gain, worth = (
        verdict.gain,
        _gain(verdict.objective, FLOOR if verdict.objective != "quality" else 0.0),
    )
    if verdict.beaten or verdict.nearest is None or gain is None or gain <= worth:
        return ()
    return verdict.reference.trial, verdict.nearest


class _Scale:
    """Means and uncertainties of contestants, on the scale where effects add up."""

    def __init__(self, objective: Name, contestants: Sequence[Candidate], sure: float) -> None:
        self._scores = {
            one.trial: [_score(objective, value) for value in one.values] for one in contestants
        }
        self._deviation, self._freedom = pooled_deviation(list(self._scores.values()))
        self._worth, self._sure = (FLOOR if objective != "quality" else 0.0), sure

    def mean(self, one: Candidate) -> float:
        return statistics.fmean(self._scores[one.trial]) if self._scores[one.trial] else math.inf

    def floor(self, one: Candidate, other: Candidate) -> float:
        """Return the difference from which on one is better than the other for sure, and it matters."""
        return max(self._worth, self.width(one, other, self._sure))

    def near(self, one: Candidate, other: Candidate) -> float:
        """Return the difference up to which both are as good, as far as can be told: one standard error."""
        return max(self._worth, self._error(one, other))

    def width(self, one: Candidate, other: Candidate, probability: float) -> float:
        """Return the quantile of the difference of two means."""
        if not self._freedom:
            return math.inf  # one run each: nothing is known of the noise
        return student_t(self._freedom, probability) * self._error(one, other)

    def _error(self, one: Candidate, other: Candidate) -> float:
        runs = [max(1, len(self._scores[found.trial])) for found in (one, other)]
        return self._deviation * math.sqrt(sum(1 / count for count in runs))


def _modesty(contestant: Candidate) -> tuple[float, float, int]:
    """Order by least memory, then least energy, then the smallest batch."""
    return (
        median([run.memory_bytes for run in contestant.runs]),
        median([run.joules for run in contestant.runs]),
        contestant.batch_size,
    )


def median(values: Sequence[float | None]) -> float:
    """Return the median of what is known; 0 where nothing is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0


def _score(objective: Name, value: float) -> float:
    """Return the value on a scale where effects add up: logarithms of times and speeds."""
    match objective:
        case "time-to-target":
            return math.log(max(value, 1e-9))
        case "throughput":
            return -math.log(max(-value, 1e-9))
        case "quality":
            return value


def _gain(objective: Name, effect: float) -> float:
    return effect if objective == "quality" else math.exp(effect)


def _unit(objective: Name) -> float:
    return 0.0 if objective == "quality" else 1.0


def _trials(contestants: Sequence[Candidate]) -> tuple[int, ...]:
    return tuple(sorted(one.trial for one in contestants))

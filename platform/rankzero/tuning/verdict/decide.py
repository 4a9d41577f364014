"""Decide which configuration is the sweet spot, and how sure that is, from confirmed runs. Pure.

Every candidate, the user's own configuration included, was trained on the same new seeds. Effects
are differences of mean logarithms (for `quality`, of means), with one variance pooled over all
candidates. A challenger beats the reference if it is better by Student's t at 5 %, with
Bonferroni's correction for the number of challengers and for two looks. If the first look decides
nothing, the reference, the nearest challenger and the unreliable ones that may win are trained on
as many seeds again.

A training that misses the target is trained again. So it counts with the cost of the whole training
and of one that reaches the target. A configuration that misses it on half of the seeds is out. The
winner may miss it on other seeds, if it missed none here. So the stated gain is less, by what that
costs at the share of misses among the challengers' runs, but never below 1x for a sure winner.

The sweet region is everything within one standard error of the best (Breiman's rule), or within
3 %. The cheapest configuration of the region wins.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rankzero.confidence import pooled_deviation, student_t
from rankzero.tuning.objective import TO_TARGET, Name

LOOKS = 2
"""How often a search may ask for a verdict."""
_FLOOR = 0.03  # a smaller gain is not worth another configuration, however sure it is


@dataclasses.dataclass(frozen=True)
class ConfirmationRun:
    """A configuration trained on one new seed. The study stores these fields."""

    trial: int
    seed: int
    value: float | None
    """The objective's, to be minimised. None: the quality was not reached."""
    quality: float | None
    samples_per_second: float | None = None
    memory_bytes: float | None = None
    joules: float | None = None
    is_timed: bool = True
    """Whether `value` depends on the machine's speed."""
    lost: float | None = None
    """The cost of the training, in the unit of `value`, if the run missed the quality."""
    whole: float | None = None
    """The cost of all its steps, in that unit, if it is known."""
    diverged: bool = False


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration and its confirmation runs."""

    trial: int
    settings: Mapping[str, Any]
    batch_size: int
    runs: tuple[ConfirmationRun, ...]
    devices: int = 1

    @property
    def reached(self) -> bool:
        """Return whether every run reached the quality."""
        return bool(self.runs) and len(self.values) == len(self.runs)

    @property
    def values(self) -> list[float]:
        """Return the values of the runs that reached the quality."""
        return [run.value for run in self.runs if run.value is not None]

    @property
    def share(self) -> float:
        """Return the share of the runs that reached the quality."""
        return len(self.values) / max(1, len(self.runs))

    @property
    def costs(self) -> list[float]:
        """Return what each run costs until the quality is reached, or nothing. As `costs_of`."""
        return costs_of(self.runs)


def costs_of(runs: Sequence[ConfirmationRun]) -> list[float]:
    """Return what each run of a configuration costs until the quality is reached.

    A run that missed it also costs a further one that reaches it. Nothing if most runs missed it,
    or if it is not known what they cost.
    """
    values = [run.value for run in runs if run.value is not None]
    lost = [run.lost for run in runs if run.value is None]
    if not lost:
        return values
    if len(values) <= len(lost) or None in lost:
        return []
    usual = statistics.geometric_mean(values)
    return [*values, *(cost + usual for cost in lost if cost is not None)]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a search."""

    objective: Name
    reference: Candidate
    winner: Candidate
    """The reference itself if nothing beats it, or reaches the quality more often."""
    beaten: bool
    """Whether the winner beats the reference by more than the noise."""
    region: tuple[int, ...]
    """The trials that are as good as the best, as far as the runs can show."""
    noise: float
    """A smaller gain counts as noise: 0.03 is 3 %, for `quality` a difference of 0.03."""
    gain: float | None = None
    """The winner's (without one: the nearest challenger's) over the reference. A ratio of times
    or speeds, or a difference of qualities. Less than measured, because the best was lucky, too."""
    gain_low: float | None = None
    gain_high: float | None = None

    @property
    def has_sweet_spot(self) -> bool:
        """Return whether the winner is worth training with: it reached the quality once, or won."""
        return self.beaten or bool(self.winner.values)


def decide(
    objective: Name,
    reference: Candidate,
    challengers: Sequence[Candidate],
    *,
    is_own_target: bool = False,
) -> Verdict:
    """Choose among confirmed candidates. A challenger without `costs` is out.

    If all of them are, and the reference missed the quality once, the one that reached it on most
    seeds is left. `is_own_target`: the quality is what the reference reached on its first seed.
    """
    able = [one for one in challengers if one.costs]
    if not able and not reference.reached and objective != "quality":
        return _most_reliable(objective, reference, challengers)
    scale = _Scale(objective, [reference, *able], sure=1 - 0.05 / LOOKS / max(1, len(able)))
    better = [one for one in able if _beats(one, reference, scale, is_own_target)]
    is_tested = _is_tested(reference, is_own_target)
    rivals = better or [*able, *([reference] if is_tested else [])]
    best = min(rivals, key=scale.mean, default=reference)
    region = [
        one for one in better or able if scale.mean(one) <= scale.mean(best) + scale.near(one, best)
    ]
    winner = min(region, key=lambda one: (*_cost(one), scale.mean(one))) if better else reference
    nearest = winner if better else min(able, key=scale.mean, default=reference)
    gains = list[float]()
    if able and is_tested:
        # On other numbers of devices, one may be slower because it was chosen for its cost.
        alike = [one for one in able if one.devices == nearest.devices]
        effects = scale.effect(reference, nearest, alike, _share_of_misses(able))
        gains = [_gain(objective, one) for one in effects]
    return Verdict(
        objective,
        reference,
        winner,
        bool(better),
        tuple(sorted(one.trial for one in (region if better else [*region, reference]))),
        _gain(objective, scale.floor(reference, nearest)) - _gain(objective, 0.0),
        *gains,
    )


class _Share(NamedTuple):
    """A share of seeds, and how far off it may be at 95 %."""

    mean: float
    error: float


def _share_of_misses(candidates: Sequence[Candidate]) -> _Share:
    """Return the share of other seeds on which one of these misses the quality.

    Few seeds may show no miss, so it has Jeffreys' prior (Jeffreys 1946): a beta distribution.
    """
    runs = [run for one in candidates for run in one.runs]
    missed = 0.5 + sum(run.value is None and run.lost is not None for run in runs)
    both = missed + 0.5 + sum(run.value is not None for run in runs)
    mean = missed / both
    return _Share(mean, 1.96 * math.sqrt(mean * (1 - mean) / (both + 1)))


def _is_tested(reference: Candidate, is_own_target: bool) -> bool:
    """Return whether the reference reaches the quality often enough to be compared with.

    The `costs` of its runs may be unknown: a crash has none, and neither has a speed. A quality
    that it reached on one seed is one that it misses on half of the others. See decision 70.
    """
    return reference.share > 0.5 or (is_own_target and bool(reference.values))


def _beats(one: Candidate, reference: Candidate, scale: _Scale, is_own_target: bool) -> bool:
    """Return whether a challenger is surely better, or reaches what the reference does not."""
    if _is_tested(reference, is_own_target):
        return scale.mean(reference) - scale.mean(one) > scale.floor(reference, one)
    # It has `costs`, so it reached the quality on more seeds than the reference.
    return one.reached or not is_own_target


def _most_reliable(
    objective: Name, reference: Candidate, challengers: Sequence[Candidate]
) -> Verdict:
    def order(one: Candidate) -> tuple[float, float]:
        scores = [_score(objective, value) for value in one.values] or [math.inf]
        return -one.share, statistics.fmean(scores)

    # The first of equals: the reference.
    winner = min([reference, *challengers], key=order)
    return Verdict(objective, reference, winner, beaten=False, region=(), noise=math.inf)


def detectable(noise: float, seeds: int, challengers: int) -> float:
    """Return the least gain that a first look can show if runs of one configuration vary so much.

    Both are relative: 0.05 is 5 %.
    """
    freedom, sure = (challengers + 1) * (seeds - 1), 1 - 0.05 / LOOKS / max(1, challengers)
    return math.expm1(max(_FLOOR, student_t(freedom, sure) * noise * math.sqrt(2 / seeds)))


def second_look(
    objective: Name,
    reference: Candidate,
    challengers: Sequence[Candidate],
    *,
    is_own_target: bool = False,
) -> list[Candidate]:
    """Return the challengers that more seeds may show to be better, the most promising first.

    The nearest is enough of the reliable ones. A clear verdict needs none. As `decide`.
    """
    first = decide(objective, reference, challengers, is_own_target=is_own_target)
    if first.beaten or not _is_tested(reference, is_own_target):
        return []
    able = list[tuple[Candidate, Candidate]]()
    for one in challengers:
        # If it reached the quality on as many seeds again.
        usual = statistics.fmean(one.values) if one.values else None
        more = (dataclasses.replace(run, value=usual) for run in one.runs)
        lucky = dataclasses.replace(one, runs=(*one.runs, *more))
        if lucky.costs:
            able.append((one, lucky))
    scale = _Scale(objective, [reference, *(lucky for _, lucky in able)], sure=1.0)
    worth = scale.mean(reference) - _worth(objective)
    hopeful = sorted((one for one, _ in able if scale.mean(one) < worth), key=scale.mean)
    nearest = next((one for one in hopeful if one.reached), None)
    return [one for one in hopeful if not one.reached or one is nearest]


def median(values: Sequence[float | None]) -> float:
    """Return the median of the known values, or 0 without any."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0


class _Scale:
    """Means and uncertainties of candidates, on the scale on which effects add up."""

    def __init__(self, objective: Name, candidates: Sequence[Candidate], sure: float) -> None:
        self._scores = {
            one.trial: [_score(objective, value) for value in one.costs or one.values]
            for one in candidates
        }
        # Pooled, because three runs of one candidate hardly show the noise. One candidate that
        # misses the quality must not hide what the others differ by, so its missed runs are out.
        reached = [[_score(objective, value) for value in one.values] for one in candidates]
        self._deviation, self._freedom = pooled_deviation(reached)
        self._unreliable = {one.trial for one in candidates if one.costs and not one.reached}
        self._worth, self._sure = _worth(objective), sure

    def mean(self, one: Candidate) -> float:
        return statistics.fmean(self._scores[one.trial]) if self._scores[one.trial] else math.inf

    def shrunk(self, one: Candidate, chosen_from: Sequence[Candidate]) -> float:
        """Return the mean, moved towards that of all candidates it was chosen from.

        The best of several was lucky, too (the winner's curse). Empirical Bayes: the share of the
        candidates' variance that is noise is how far their means are moved (Efron & Morris 1975).
        """
        means = [self.mean(other) for other in chosen_from]
        middle, noise = statistics.fmean(means), self._error(one, one) ** 2 / 2
        if len(means) < 2 or self.mean(one) > middle or not noise:
            return self.mean(one)
        share = noise / max(noise, statistics.variance(means))
        return middle + (1 - share) * (self.mean(one) - middle)

    def effect(
        self, own: Candidate, other: Candidate, chosen_from: Sequence[Candidate], misses: _Share
    ) -> tuple[float, float, float]:
        """Return how much better the other one is, and the ends of the 95 % interval.

        `misses`: the share of other seeds on which it misses the quality. It may take all of a
        gain, but makes nothing worse than the reference: how many seeds miss is a guess.
        """
        most = self.mean(own) - self.shrunk(other, chosen_from)
        width, loss = self.width(own, other, 0.975), self.loss(other)
        effect = max(most - misses.mean * loss, min(most, 0.0))
        low = effect - math.hypot(width, misses.error * loss)
        return effect, max(low, min(most - width, 0.0)), most + width

    def loss(self, one: Candidate) -> float:
        """Return what a miss on another seed adds to the score of one that missed none.

        0 if its runs show what its misses cost, or if it is not known what a whole training costs.
        """
        wholes = [run.whole for run in one.runs if run.whole is not None]
        if not one.reached or not wholes:
            return 0.0
        return math.log1p(statistics.fmean(wholes) / math.exp(self.mean(one)))

    def floor(self, one: Candidate, other: Candidate) -> float:
        """Return the difference above which one is surely better, and enough to matter."""
        return max(self._worth, self.width(one, other, self._sure))

    def near(self, one: Candidate, other: Candidate) -> float:
        """Return the difference up to which both count as equal: one standard error."""
        runs = [max(1, len(self._scores[found.trial])) for found in (one, other)]
        return max(self._worth, self._deviation * math.sqrt(sum(1 / count for count in runs)))

    def width(self, one: Candidate, other: Candidate, probability: float) -> float:
        """Return the quantile of the difference of two means."""
        # With one run each, nothing is known of the noise.
        if not self._freedom:
            return math.inf
        return student_t(self._freedom, probability) * self._error(one, other)

    def _error(self, one: Candidate, other: Candidate) -> float:
        squares = 0.0
        for trial in (one.trial, other.trial):
            scores, deviation = self._scores[trial], self._deviation
            if trial in self._unreliable:
                deviation = max(deviation, statistics.stdev(scores))
            squares += deviation**2 / max(1, len(scores))
        return math.sqrt(squares)


def _cost(candidate: Candidate) -> tuple[float, ...]:
    """Return the order among equals: the most reliable, then the cheapest.

    That is: fewest devices, least memory, energy, and batch size. The faster one of a tie wins.
    """
    return (
        len(candidate.runs) - len(candidate.values),
        candidate.devices,
        median([run.memory_bytes for run in candidate.runs]),
        median([run.joules for run in candidate.runs]),
        candidate.batch_size,
    )


def _score(objective: Name, value: float) -> float:
    """Return the value on a scale on which effects add up: logarithms of times and speeds."""
    if objective == "quality":
        return value
    # Speeds are negated, because the search minimises.
    logarithm = math.log(max(abs(value), 1e-9))
    return logarithm if objective in TO_TARGET else -logarithm


def _worth(objective: Name) -> float:
    """Return the least difference that matters, on the same scale."""
    return 0.0 if objective == "quality" else _FLOOR


def _gain(objective: Name, effect: float) -> float:
    return effect if objective == "quality" else math.exp(effect)

"""Which configuration is the sweet spot, and how sure: arithmetic on confirmed runs, and a sentence. Pure.

Every contestant, the user's own configuration among them, was trained anew on the same new seeds. Effects are
differences of mean logarithms (of differences, for a quality), with one variance pooled over all contestants. A
challenger beats the user's own if it is better by Student's t at 5 %, Bonferroni's over all: equals have no winner.
The sweet region is whatever lies within one standard error of the best (Breiman's rule), 3 % at least.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rankzero.experiment import Goal
from rankzero.intervals import pooled_deviation, student_t
from rankzero.search.objective import Name

FLOOR = 0.03  # a gain below this is not worth another configuration, however sure it is


@dataclasses.dataclass(frozen=True)
class Run:
    """One confirmation: a configuration trained on a new seed."""

    seed: int
    value: float | None
    """As the objective has it, to be minimised; None: the quality was not reached."""
    quality: float | None
    samples_per_second: float | None = None
    memory_bytes: float | None = None
    joules: float | None = None


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A configuration and its confirmations."""

    trial: int
    settings: Mapping[str, Any]
    batch_size: int
    runs: tuple[Run, ...]

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
    reference: Contestant
    winner: Contestant
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


def decide(objective: Name, goal: Goal, reference: Contestant, challengers: Sequence[Contestant]) -> Verdict:
    """Choose among confirmed contestants. A challenger that missed the quality on any seed is out."""
    able = [one for one in challengers if one.reached]
    scored = {one.trial: [_score(objective, value) for value in one.values] for one in (reference, *able)}
    deviation, freedom = pooled_deviation([scored[one.trial] for one in (reference, *able)])
    runs = len(reference.runs)
    surely = _width(deviation, freedom, runs, 1 - 0.05 / max(1, len(able)))  # one-sided: is a challenger better?
    width = _width(deviation, freedom, runs, 0.975)
    floor = max(FLOOR if objective != "quality" else 0.0, surely)
    if not able:
        return Verdict(objective, reference, reference, False, (reference.trial,), None, None, None, floor)
    means = {trial: statistics.fmean(scores) for trial, scores in scored.items() if scores}
    lowest = min(means[one.trial] for one in (*able, *([reference] if reference.reached else [])))
    near = max(FLOOR if objective != "quality" else 0.0, deviation * math.sqrt(2 / max(1, runs)))
    region = [one for one in able if means[one.trial] <= lowest + near]
    if not reference.reached:
        return Verdict(objective, reference, min(region, key=_modesty), True, _trials(region), None, None, None, floor)
    better = [one for one in region if means[reference.trial] - means[one.trial] > floor]
    chosen = min(better, key=_modesty) if better else reference
    nearest = chosen if better else min(able, key=lambda one: means[one.trial])
    effect = means[reference.trial] - means[nearest.trial]
    gain, low, high = (_gain(objective, found) for found in (effect, effect - width, effect + width))
    members = region if better else [*region, reference]
    noise = _gain(objective, floor) - _unit(objective)
    return Verdict(objective, reference, chosen, bool(better), _trials(members), gain, low, high, noise)


def sentence(
    verdict: Verdict,
    goal: Goal,
    target: float | None,
    search_seconds: float,
    closest: tuple[int, float] | None = None,
) -> str:
    """Return the verdict in words, every number in it measured. `closest`: the trial of the best quality, and that."""
    reference, winner = verdict.reference, verdict.winner
    if closest is not None and not winner.reached and verdict.objective != "quality":
        trial, quality = closest
        return (
            f"No configuration reached {_quality(goal, target)}: trial {trial} came closest with "
            f"{_quality(goal, quality)}. The search took {_duration(search_seconds)}. "
            "Train longer, or lower the target."
        )
    seeds = len(winner.runs)
    confirmed = (
        f"Confirmed on {seeds} new seeds." if seeds > 1 else "No other came close enough to be worth confirming."
    )
    took = f"The search took {_duration(search_seconds)}"
    if not verdict.beaten:
        noise = f" beyond the noise of {verdict.noise:.0%}" if math.isfinite(verdict.noise) else ""
        return (
            f"Nothing beats your own configuration{noise}: keep it. "
            f"It {_does(verdict.objective, reference, goal, target)}. {confirmed} {took}."
        )
    speed = _ratio(winner, reference)
    gain = "" if speed is None else f"; {speed:.2g}x the samples/s"
    first = f"Your configuration {_does(verdict.objective, reference, goal, target)}. "
    does = _does(verdict.objective, winner, goal, target)
    if verdict.objective == "time-to-target" and reference.reached:
        does = does.replace(_quality(goal, target), "it")
    second = f"The sweet spot {does}: {described(winner)}{gain}. {confirmed} "
    return first + second + took + _pays(verdict, search_seconds) + "."


def described(contestant: Contestant) -> str:
    """Return what is special about a configuration: ``batch 512, bf16, lr 0.006``."""
    names = {"train.batch_size": "batch", "train.precision": "", "lr": "lr"}
    ordered = sorted(
        contestant.settings, key=lambda key: (key not in names, list(names).index(key) if key in names else 0)
    )
    return ", ".join(f"{names.get(key, key)} {_short(contestant.settings[key])}".strip() for key in ordered)


def _modesty(contestant: Contestant) -> tuple[float, float, int]:
    """Order by least memory, then least energy, then the smallest batch."""
    return (_median([run.memory_bytes for run in contestant.runs]),
            _median([run.joules for run in contestant.runs]), contestant.batch_size)  # fmt: skip


def _median(values: Sequence[float | None]) -> float:
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


def _width(deviation: float, freedom: int, runs: int, probability: float) -> float:
    """Return the quantile of a difference of two means."""
    if not freedom:
        return math.inf  # one run each: nothing is known of the noise
    return student_t(freedom, probability) * deviation * math.sqrt(2 / max(1, runs))


def _gain(objective: Name, effect: float) -> float:
    return effect if objective == "quality" else math.exp(effect)


def _unit(objective: Name) -> float:
    return 0.0 if objective == "quality" else 1.0


def _trials(contestants: Sequence[Contestant]) -> tuple[int, ...]:
    return tuple(sorted(one.trial for one in contestants))


def _does(objective: Name, contestant: Contestant, goal: Goal, target: float | None) -> str:
    values = contestant.values
    match objective:
        case "time-to-target":
            if not contestant.reached:
                return (
                    f"does not reliably reach {_quality(goal, target)} ({len(values)} of {len(contestant.runs)} seeds)"
                )
            spread = f" ({_seconds(min(values))}-{_seconds(max(values))})" if len(values) > 1 else ""
            return f"reaches {_quality(goal, target)} in {_seconds(statistics.median(values))} s{spread}"
        case "throughput":
            return f"trains {statistics.median([-value for value in values] or [0.0]):,.0f} samples/s"
        case "quality":
            found = [run.quality for run in contestant.runs if run.quality is not None]
            return f"reaches {_quality(goal, statistics.median(found) if found else None)}"


def _quality(goal: Goal, value: float | None) -> str:
    if value is None:
        return f"no {goal.metric}"
    share = "accuracy" in goal.metric and 0 <= value <= 1
    return f"{value:.1%} {goal.metric}" if share else f"{goal.metric} {value:.4g}"


def _ratio(one: Contestant, other: Contestant) -> float | None:
    speeds = [_median([run.samples_per_second for run in each.runs]) for each in (one, other)]
    return speeds[0] / speeds[1] if all(speeds) else None


def _pays(verdict: Verdict, search_seconds: float) -> str:
    if verdict.objective != "time-to-target" or not verdict.reference.reached:
        return ""
    saved = statistics.median(verdict.reference.values) - statistics.median(verdict.winner.values)
    return f" and pays for itself after {math.ceil(search_seconds / saved):,} runs" if saved > 0 else ""


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)

"""A verdict in words. Pure."""

from __future__ import annotations

import math
import statistics
from typing import Any

from rankzero.experiment import Goal
from rankzero.tuning.objective import Name
from rankzero.tuning.verdict.decide import Candidate, Verdict, median


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
        f"Confirmed on {seeds} new seeds."
        if seeds > 1
        else "No other came close enough to be worth confirming."
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


def described(contestant: Candidate) -> str:
    """Return what is special about a configuration: ``batch 512, bf16, lr 0.006``."""
    names = {"train.batch_size": "batch", "train.precision": "", "lr": "lr"}
    ordered = sorted(
        contestant.settings,
        key=lambda key: (key not in names, list(names).index(key) if key in names else 0),
    )
    return ", ".join(
        f"{names.get(key, key)} {_short(contestant.settings[key])}".strip() for key in ordered
    )


def _does(objective: Name, contestant: Candidate, goal: Goal, target: float | None) -> str:
    values = contestant.values
    match objective:
        case "time-to-target":
            if not contestant.reached:
                return f"does not reliably reach {_quality(goal, target)} ({len(values)} of {len(contestant.runs)} seeds)"
            spread = (
                f" ({_seconds(min(values))}-{_seconds(max(values))})" if len(values) > 1 else ""
            )
            return f"reaches {_quality(goal, target)} in {_seconds(statistics.median(values))} s{spread}"
        case "throughput":
            return (
                f"trains {statistics.median([-value for value in values] or [0.0]):,.0f} samples/s"
            )
        case "quality":
            found = [run.quality for run in contestant.runs if run.quality is not None]
            return f"reaches {_quality(goal, statistics.median(found) if found else None)}"


def _quality(goal: Goal, value: float | None) -> str:
    if value is None:
        return f"no {goal.metric}"
    share = "accuracy" in goal.metric and 0 <= value <= 1
    return f"{value:.1%} {goal.metric}" if share else f"{goal.metric} {value:.4g}"


def _ratio(one: Candidate, other: Candidate) -> float | None:
    speeds = [median([run.samples_per_second for run in each.runs]) for each in (one, other)]
    return speeds[0] / speeds[1] if all(speeds) else None


def _pays(verdict: Verdict, search_seconds: float) -> str:
    if verdict.objective != "time-to-target" or not verdict.reference.reached:
        return ""
    saved = statistics.median(verdict.reference.values) - statistics.median(verdict.winner.values)
    return (
        f" and pays for itself after {math.ceil(search_seconds / saved):,} runs"
        if saved > 0
        else ""
    )


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)

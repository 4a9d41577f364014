"""A verdict as sentences, every number in it measured. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rankzero.experiment import Goal
from rankzero.scalars import shown
from rankzero.tuning.objective import TO_TARGET, Name
from rankzero.tuning.space import settings_text
from rankzero.tuning.verdict.decide import Candidate, Verdict, median


def sentence(
    verdict: Verdict,
    goal: Goal,
    target: float | None,
    search_seconds: float,
    closest: tuple[int, float] | None = None,
    *,
    edges: Sequence[str] = (),
    disturbed: int = 0,
    mixed: Sequence[int] = (),
) -> str:
    """Return the verdict as sentences.

    `closest`: the trial with the best quality, and that quality. `edges`: the winner's numbers that
    lie at an edge of their range. `disturbed`: the rounds that were trained again. `mixed`: the
    seeds that two sessions trained.
    """
    reference, winner = verdict.reference, verdict.winner
    minutes, short = search_seconds / 60, search_seconds < 90
    took = f"The search took {f'{search_seconds:.0f} s' if short else f'{minutes:.0f} min'}"
    if closest is None and not winner.reached:
        return (
            f"No configuration has a value of {goal.metric}. {took}. The trials have the reasons."
        )
    # Without a region, nobody reached the quality often enough to be compared.
    if closest is not None and not winner.costs and not verdict.region:
        found = _most_often(verdict, goal, target, edges, closest)
        return f"No configuration reached {found}. {took}. Train longer, or lower the target."
    confirmed = _confirmed(verdict, disturbed, mixed)
    own = _performance(verdict.objective, reference, goal, target)
    if not verdict.beaten:
        noise = f" beyond the noise of {_noise(verdict, goal)}"
        noise = noise if math.isfinite(verdict.noise) else ""
        return (
            f"Nothing beats your own configuration{noise}: keep it. It {own}. {confirmed} {took}."
        )
    found = _performance(verdict.objective, winner, goal, target)
    if verdict.objective in TO_TARGET and reference.costs:
        found = found.replace(_quality(goal, target), "it")
        saved = statistics.fmean(reference.costs) * (1 - 1 / (verdict.gain or 1))
        if saved > 0 and verdict.objective == "time-to-target":
            took += f" and pays for itself after {math.ceil(search_seconds / saved):,} runs"
    if edges:
        confirmed = f"At the edge of its range: {', '.join(edges)}. Search from there. {confirmed}"
    return (
        f"Your configuration {own}. The sweet spot {found}: {settings_text(winner.settings)}"
        f"{_gains(verdict)}. {confirmed} {took}."
    )


def different_devices(names: Sequence[str]) -> str:
    """Return the sentences about times of several kinds of device."""
    return (
        f"Trainings ran on {' and '.join(names)}: their times do not compare. For one kind, give "
        "--new and `-- --constraint NAME` (Slurm) or `-- accelerator_type=NAME` (Ray)."
    )


def _most_often(
    verdict: Verdict,
    goal: Goal,
    target: float | None,
    edges: Sequence[str],
    closest: tuple[int, float],
) -> str:
    """Return the target, and which configuration reached it most often or came closest."""
    reference, winner = verdict.reference, verdict.winner
    if not winner.values:
        trial, quality = closest
        return (
            f"{_quality(goal, target)}: trial {trial} came closest with {_quality(goal, quality)}"
        )
    seeds = f"{len(winner.values)} of {len(winner.runs)}{_in_time(verdict.objective, winner)}"
    own = "" if winner is reference else f", your own on {len(reference.values)}"
    edge = f". At the edge of its range: {', '.join(edges)}" if edges else ""
    return (
        f"{_quality(goal, target)} on every seed: {settings_text(winner.settings)} did on "
        f"{seeds}{own}{edge}"
    )


def _noise(verdict: Verdict, goal: Goal) -> str:
    noise = verdict.noise
    if verdict.objective == "quality":
        # A difference of metrics, and small next to them, whether they are shares or not.
        values = [run.quality for run in verdict.reference.runs]
        return f"{_number(goal, noise, median(values))} in {goal.metric}"
    # Two seeds on a busy machine can give an interval of any width.
    return f"{noise:.0%}" if noise <= 10 else "more than 1000%"


def _confirmed(verdict: Verdict, disturbed: int, mixed: Sequence[int]) -> str:
    runs = verdict.winner.runs
    if len(runs) <= 1:
        return "No other came close enough to be worth confirming."
    text = f"Confirmed on {len(runs)} new seeds."
    if any(run.seed in mixed and run.is_timed for run in (*runs, *verdict.reference.runs)):
        text += " Some were trained in another session: the machine's speed may have changed in "
        text += "between."
    if disturbed:
        rounds = "1 round" if disturbed == 1 else f"{disturbed} rounds"
        text += f" The search trained {rounds} again, because the machine's speed changed."
    return text


def _gains(verdict: Verdict) -> str:
    """Return what the winner gains in the objective, with the interval."""
    gain, low, high = verdict.gain, verdict.gain_low, verdict.gain_high
    what = {"energy": "the energy", "throughput": "the samples/s", "tokens": "the tokens/s"}
    if verdict.objective == "quality" or not gain:
        return ""
    if verdict.objective == "energy":
        gain, low, high = 1 / gain, high and 1 / high, low and 1 / low
    text = f"; {shown(gain, 2)}x {what.get(verdict.objective, 'as fast')}"
    # With one run each, nothing is known of the noise.
    if low and high and math.isfinite(high):
        text += f" ({shown(low, 2)} to {shown(high, 2)})"
    return text


def _performance(name: Name, candidate: Candidate, goal: Goal, target: float | None) -> str:
    values, runs = candidate.values, candidate.runs
    match name:
        case "time-to-target" | "energy":
            wanted = _quality(goal, target)
            if not candidate.costs:
                bad = sum(run.diverged for run in runs)
                seeds = f"{len(values)} of {len(runs)} seeds{f'; diverged on {bad}' if bad else ''}"
                return f"does not reliably reach {wanted} ({seeds})"
            if candidate.reached:
                return f"reaches {wanted}{_in_time(name, candidate)}"
            cost = shown(statistics.fmean(candidate.costs), 2)
            unit = "s" if name == "time-to-target" else "J"
            return (
                f"reaches {wanted} on {len(values)} of {len(runs)} seeds"
                f"{_in_time(name, candidate)}, {cost} {unit} if one that misses it is trained again"
            )
        case "throughput" | "tokens":
            if not values:
                return f"trains to {'its end' if target is None else 'the target'} on no seed"
            speeds = [-value for value in values]
            unit = "tokens" if name == "tokens" else "samples"
            return f"trains {shown(statistics.median(speeds))} {unit}/s"
        case "quality":
            found = [run.quality for run in runs if run.quality is not None]
            return f"reaches {_quality(goal, statistics.median(found) if found else None)}"


def _in_time(name: Name, candidate: Candidate) -> str:
    """Return the time, or the energy, of the runs that reached the quality."""
    if name not in TO_TARGET:
        return ""
    values = candidate.values
    spread = f" ({shown(min(values), 2)}-{shown(max(values), 2)})"
    cost = shown(statistics.median(values), 2)
    cost = f" in {cost} s" if name == "time-to-target" else f" with {cost} J"
    return f"{cost}{spread if len(values) > 1 else ''}"


def _quality(goal: Goal, value: float | None) -> str:
    if value is None:
        return f"no {goal.metric}"
    text = _number(goal, value, value)
    return f"{text} {goal.metric}" if text.endswith("%") else f"{goal.metric} {text}"


def _number(goal: Goal, number: float, quality: float) -> str:
    """Return a number in the unit of the goal's metric, which may be this `quality`."""
    is_share = "accuracy" in goal.metric and 0 <= quality <= 1
    return f"{shown(100 * number)}%" if is_share else shown(number)

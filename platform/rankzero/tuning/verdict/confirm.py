"""Confirmation: the best and the reference trained again on new seeds, in turns, and a verdict by what is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rankzero.config import flatten, override
from rankzero.experiment import Experiment
from rankzero.tuning.next_trial import reference_trial
from rankzero.tuning.objective import Objective
from rankzero.tuning.space import BATCH_INDEX, FACTOR, PRECISION, Space
from rankzero.tuning.trial import Trial
from rankzero.tuning.trials.follower import TrialResult
from rankzero.tuning.verdict.decide import Candidate, ConfirmationRun, Verdict, decide

NEW_SEED = 1000  # confirmations start here, so that no trial's seed is among theirs
Kept = Sequence[Mapping[str, Any]]
"""Stored confirmations: the fields of `Run`, and the trial's number."""


@dataclasses.dataclass(frozen=True)
class ConfirmationJob:
    """A contestant's run on one new seed."""

    trial: Trial
    seed: int


def turns(
    contestants: Sequence[Trial], first_seed: int, rounds: range, kept: Kept
) -> Iterator[ConfirmationJob]:
    """Yield what is to be trained: each round all contestants on one seed, in another order; nothing that is kept.

    None always goes first, or behind the same other.
    """
    known = {(one["trial"], one["seed"]) for one in kept}
    for number in rounds:
        seed, first = first_seed + NEW_SEED + number, number % max(1, len(contestants))
        for trial in [*contestants[first:], *contestants[:first]]:
            if (trial.number, seed) not in known:
                yield ConfirmationJob(trial, seed)


def configured(space: Space, turn: ConfirmationJob) -> Experiment:
    """Return the configuration of a turn."""
    return override(space.experiment(turn.trial.parameters), {"train.seed": turn.seed})


def run_of(found: TrialResult, objective: Objective, seed: int) -> ConfirmationRun:
    """Return what a run on a new seed says; its value is None where the quality was not reached."""
    facts, curve = found.curve.peaks, found.curve
    reached = found.state == "COMPLETE" and objective.gap(curve) <= 0
    memory = [
        value
        for name, value in facts.items()
        if "gpu" in name and name.endswith("memory_usage_megabytes")
    ]
    return ConfirmationRun(
        seed=seed,
        value=found.value if reached else None,
        quality=curve.best,
        samples_per_second=curve.samples_per_second,
        memory_bytes=max(memory, default=0.0) * 1e6 or None,
        joules=curve.joules,
    )


def stored(trial: Trial, run: ConfirmationRun) -> dict[str, Any]:
    """Return a run as it is kept."""
    return {"trial": trial.number, **dataclasses.asdict(run)}


def by_trial(kept: Kept) -> dict[int, list[ConfirmationRun]]:
    """Return the stored confirmations by trial."""
    found: dict[int, list[ConfirmationRun]] = {}
    for one in kept:
        found.setdefault(one["trial"], []).append(
            ConfirmationRun(**{name: one[name] for name in one if name != "trial"})
        )
    return found


def verdict_of(trials: Sequence[Trial], space: Space, objective: Objective, kept: Kept) -> Verdict:
    """Decide by what is stored."""
    known = {trial.number: trial for trial in trials}
    reference = reference_trial(trials, space)
    assert reference is not None
    contestants = {
        number: contestant(space, known[number], runs) for number, runs in by_trial(kept).items()
    }
    own = contestants.pop(reference.number, None) or contestant(
        space, reference, [as_run(reference, objective)]
    )
    return decide(objective.name, objective.goal, own, list(contestants.values()))


def as_run(trial: Trial, objective: Objective) -> ConfirmationRun:
    """Return a trial of the search as if it were a confirmation: where there is nothing to confirm."""
    facts = trial.facts
    value = trial.value if trial.feasible else None
    return ConfirmationRun(0, value, facts.get("best"), facts.get("samples_per_second"))


def contestant(space: Space, trial: Trial, runs: Sequence[ConfirmationRun]) -> Candidate:
    """Return a trial with its confirmations, and what is special about it."""
    settings = flatten(space.experiment(trial.parameters))
    searched = {"train.batch_size": BATCH_INDEX, "train.precision": PRECISION, "lr": FACTOR}
    keys = [key for key, name in searched.items() if name in space.parameters() or key == "lr"]
    shown = {key: settings[key] for key in [*keys, *space.extras]}
    return Candidate(trial.number, shown, settings["train.batch_size"], tuple(runs))

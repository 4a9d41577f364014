"""Confirmation: the best trials and the reference are trained again, on new seeds, in turns."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rankzero.config import flatten
from rankzero.experiment import Train
from rankzero.scalars import shown
from rankzero.tuning.agreement import SPACE
from rankzero.tuning.next_trial import reference_trial
from rankzero.tuning.objective import MEMORY, Objective
from rankzero.tuning.space import BATCH_INDEX, DEVICES, FACTOR, PRECISION, SPEED, Space
from rankzero.tuning.trial import Trial, Trials
from rankzero.tuning.trials.follower import DIVERGED, TrialResult
from rankzero.tuning.verdict.decide import Candidate, ConfirmationRun

NEW_SEED = 1000
"""Added to the experiment's seed: no trial has used a confirmation's seed."""
CLEARLY_WORSE = 2.0
"""Times the best: so long is a configuration trained again that missed the quality before."""
MISSED = 4.0
"""Times the steps of its trial: so long is one trained again, at most, that reached the quality."""
_FEWEST_ROUNDS = 3  # to know what is usual
_DISTURBANCE, _MUCH = 0.05, 4.0  # relative; times the usual disturbance
CONFIRMATIONS, DISTURBED, MIXED = "confirmations", "disturbed", "mixed"
"""Facts of a study: the confirmation runs, the seeds of those that were trained again because the
machine's speed changed, and the seeds of those that two sessions trained."""
REPLACEMENTS = "replacements"
"""A fact of a study: the numbers of the rounds that replaced those of `DISTURBED`, in its order."""
Stored = Sequence[Mapping[str, Any]]
"""Confirmations as the study stores them: the fields of `ConfirmationRun`."""


def missing_runs(
    candidates: Sequence[Trial], first_seed: int, rounds: Sequence[int], stored: Stored
) -> Iterator[tuple[Trial, int]]:
    """Yield the trials and seeds that are not stored yet: in each round all candidates on one seed.

    The order rotates, so that no candidate always comes first, or after the same other one: a
    machine that warms up or gets busy shall not favour one of them.
    """
    known = {(run["trial"], run["seed"]) for run in stored}
    for number in rounds:
        seed, first = first_seed + NEW_SEED + number, number % max(1, len(candidates))
        for trial in [*candidates[first:], *candidates[:first]]:
            if (trial.number, seed) not in known:
                yield trial, seed


def sound_round(number: int, first_seed: int, facts: Mapping[str, Any]) -> int:
    """Return the round that counts instead of this one, if the machine's speed spoiled it."""
    # A study of an older version has no numbers of replacements.
    for seed, other in zip(facts.get(DISTURBED, []), facts.get(REPLACEMENTS, []), strict=False):
        if number == seed - first_seed - NEW_SEED:
            number = other
    return number


def factor_to_lead(
    first: float | None, mean: float | None, seeds: int, best: float | None
) -> float:
    """Return how many times the `first` seed's value the next one may have, for the trial to lead.

    `mean`: the geometric mean of the `seeds` so far. `best`: what the mean is to be below, if any.
    """
    if best is None or not first or not mean:
        return MISSED
    return max(CLEARLY_WORSE, best * (best / mean) ** seeds / first)


def sound(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a study's confirmations without the rounds that were trained again."""
    replaced = facts.get(DISTURBED, [])
    return [run for run in facts.get(CONFIRMATIONS, []) if run["seed"] not in replaced]


def as_run(
    trial: int, seed: int, result: TrialResult, objective: Objective, train: Train
) -> ConfirmationRun:
    """Return a training on a new seed as a confirmation. No value: it missed the quality."""
    curve = result.curve
    reached = result.state == "COMPLETE" and objective.gap(curve) <= 0
    lost = None
    # Nobody would repeat one that failed.
    if not reached and result.state != "FAIL" and not result.constraints.get(MEMORY):
        # The search stopped one that is PRUNED. A user's own training would go on to its end.
        lost = objective.cost(curve, is_whole=result.state == "PRUNED")
    # Nobody knows which step would be its last.
    ends_early = train.patience is not None or train.limits.max_minutes is not None
    return ConfirmationRun(
        trial=trial,
        seed=seed,
        value=result.value if reached else None,
        quality=curve.best,
        samples_per_second=curve.samples_per_second,
        memory_bytes=(curve.memory_megabytes or 0.0) * 1e6 or None,
        joules=curve.joules,
        is_timed=objective.is_timed(curve),
        lost=lost,
        whole=None if ends_early else objective.cost(curve, is_whole=True),
        diverged=result.diverged,
    )


def by_trial(stored: Stored) -> dict[int, list[ConfirmationRun]]:
    """Return the stored confirmations by trial."""
    found: dict[int, list[ConfirmationRun]] = {}
    known = {field.name for field in dataclasses.fields(ConfirmationRun)}
    for fields in stored:
        # A newer version of RankZero may have stored more.
        run = ConfirmationRun(**{name: value for name, value in fields.items() if name in known})
        found.setdefault(run.trial, []).append(run)
    return found


def rows(facts: Mapping[str, Any]) -> list[list[str]]:
    """Return each trial that a study confirmed, and its values on new seeds, as texts."""
    # An older version stored no settings.
    began_with = facts.get(SPACE, {}).get("settings", {})
    is_quality = began_with.get("--objective") == "quality"

    def text(run: ConfirmationRun) -> str:
        if run.value is None or run.quality is None:
            return "diverged" if run.diverged else "missed"
        # Speeds are negated, and qualities if they are to be high.
        return shown(run.quality if is_quality else abs(run.value))

    found = by_trial(sound(facts))
    return [[str(number), ", ".join(map(text, runs))] for number, runs in found.items()]


def whole_rounds(trials: Sequence[int], stored: Stored) -> list[Mapping[str, Any]]:
    """Return the confirmations of the rounds in which all these trials were trained."""
    known = {(run["seed"], run["trial"]) for run in stored}
    return [run for run in stored if all((run["seed"], one) in known for one in trials)]


def disturbed(stored: Stored) -> list[int]:
    """Return the seeds of the rounds that a change of the machine's speed spoiled, the worst first.

    A configuration's samples/s do not depend on the seed. The whole machine may be slower in one
    round than in another: all candidates bear it alike. In a disturbed round, it was slower for
    some of them. No round is spoiled whose values do not depend on time.
    """
    speeds = {(run["seed"], run["trial"]): run["samples_per_second"] for run in stored}
    by_seed: dict[int, dict[int, float]] = {}
    for (seed, trial), speed in speeds.items():
        if speed:
            by_seed.setdefault(seed, {})[trial] = math.log(speed)
    trials = set.intersection(*map(set, by_seed.values())) if by_seed else set()
    if len(by_seed) < _FEWEST_ROUNDS or len(trials) < 2:
        return []
    level = {seed: statistics.median(logs[one] for one in trials) for seed, logs in by_seed.items()}
    usual = {
        one: statistics.median(logs[one] - level[seed] for seed, logs in by_seed.items())
        for one in trials
    }
    worst = {
        seed: max(abs(logs[one] - level[seed] - usual[one]) for one in trials)
        for seed, logs in by_seed.items()
    }
    limit = max(_DISTURBANCE, _MUCH * statistics.median(worst.values()))
    timed = {run["seed"] for run in stored if run.get("is_timed", True)}
    found = [seed for seed in worst if worst[seed] > limit and seed in timed]
    return sorted(found, key=lambda one: -worst[one])


def candidates_of(
    trials: Trials, space: Space, stored: Stored, seeds: int
) -> tuple[Candidate, list[Candidate]]:
    """Return the reference and the challengers. The reference must be among the trials.

    A challenger without runs on so many `seeds` is of a session that was interrupted: left out.
    """
    confirmed = by_trial(stored)
    reference = reference_trial(trials, space)
    assert reference is not None
    # Without challengers there was nothing to confirm, so the reference's trial is its only run.
    facts, value = reference.facts, reference.value if reference.feasible else None
    speed = facts.get("samples_per_second")
    diverged = bool(facts.get(DIVERGED))
    alone = ConfirmationRun(reference.number, 0, value, facts.get("best"), speed, diverged=diverged)
    confirmed.setdefault(reference.number, [alone])
    own, *challengers = (
        _candidate(space, trial, runs)
        for trial in (reference, *trials)
        if (runs := confirmed.pop(trial.number, ())) and (trial is reference or len(runs) >= seeds)
    )
    return own, challengers


def _candidate(space: Space, trial: Trial, runs: Sequence[ConfirmationRun]) -> Candidate:
    """Return a trial with its confirmations, and the settings that were searched."""
    # The learning rate is shown even if it was not searched: it scales with the batch size.
    devices = space.devices_of(trial.parameters)
    settings = {**flatten(space.experiment(trial.parameters)), DEVICES: devices}
    parameter_of = {"train.batch_size": BATCH_INDEX, "train.precision": PRECISION, "lr": FACTOR}
    parameter_of[DEVICES], searched = DEVICES, space.parameters()
    keys = [key for key, name in parameter_of.items() if name in searched or key == "lr"]
    speed = space.speed if SPEED in trial.parameters else ()
    shown = {key: settings[key] for key in [*keys, *space.extras, *speed]}
    return Candidate(trial.number, shown, settings["train.batch_size"], tuple(runs), devices)

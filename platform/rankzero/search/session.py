"""One search from beginning to end, or from where it was interrupted: reference, trials, confirmation, verdict."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankzero.config import flatten, override
from rankzero.errors import RunFailed
from rankzero.experiment import Experiment
from rankzero.search import controller
from rankzero.search.controller import Followed, Say
from rankzero.search.launcher import Launcher
from rankzero.search.objective import Name, Objective, bar
from rankzero.search.space import BATCH_INDEX, FACTOR, PRECISION, Space
from rankzero.search.study import RUNGS, Study, Trial
from rankzero.search.verdict import Contestant, Run, Verdict, decide

CONFIRMATIONS = "confirmations"
CLOSE, NEAR = 0.1, 0.5  # relative
REPEAT, MOST_REPEATS = "same_as", 50
NEW_SEED = 1000  # confirmations start here, so that no trial's seed is among theirs


@dataclasses.dataclass(frozen=True)
class Options:
    """How to search."""

    objective: Name = "time-to-target"
    minutes: float | None = None
    trials: int | None = 20
    """In all, the reference included."""
    tolerance: float = 0.01
    trial_minutes: float | None = None
    challengers: int = 3
    """How many of the best are confirmed."""
    seeds: int = 3
    silence_seconds: float = 300.0


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search leaves."""

    verdict: Verdict
    target: float | None
    seconds: float
    """What it has taken, all its parts together."""


class Session:
    """A search under way. `already_seconds`: what was spent on it before, the probe map for instance."""

    def __init__(
        self, study: Study, space: Space, launcher: Launcher, options: Options, say: Say,
        clock: Callable[[], float] = time.monotonic, already_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        self._study, self._space, self._launcher, self._options, self._say = study, space, launcher, options, say
        self._clock, self._started = clock, clock()
        self._guesses: list[Mapping[str, Any]] = []
        self._repeats = 0
        self._spent = float(study.facts.get("seconds", 0.0)) + already_seconds

    def run(self, guesses: Sequence[Mapping[str, Any]] = ()) -> Found:
        """Search until the budget is spent, confirm, decide. `guesses`: parameters to try right after the reference."""
        for number in self._study.recover():
            self._say(f"trial {number} was interrupted: it is tried again")
        try:
            objective = self._reference()
            self._guesses = list(guesses)
            while self._may_go_on():
                self._trial(objective)
            if self._options.minutes is not None and len(self._ended()) < 2:
                raise RunFailed(self._too_short())
            confirmed = self._confirm(objective)
        finally:
            self._study.note("seconds", self.seconds)
        return Found(self._decide(objective, confirmed), objective.target, self.seconds)

    @property
    def seconds(self) -> float:
        """Return what the search has taken so far, earlier sittings included."""
        return self._spent + self._clock() - self._started

    def _reference(self) -> Objective:
        """Train the user's own configuration first; return the objective, its bar known."""
        own = self._space.reference.goal
        first = Objective(self._options.objective, own, own.target, self._options.trial_minutes)
        if reference_trial(self._study.trials(), self._space) is not None:
            return dataclasses.replace(first, target=self._study.facts.get("target"))
        number, _ = self._study.ask(self._space.reference_parameters())
        label = f"{self._study.name}-{number:03d}"
        watched = first if self._sets_its_own_bar() else dataclasses.replace(first, name="throughput")
        began = self._clock()
        found = self._run(watched, self._space.reference, label)
        self._study.note("reference_seconds", self._clock() - began)
        target = bar(own, self._options.objective, found.curve, self._options.tolerance)
        objective = dataclasses.replace(first, target=target)
        found = controller.classify(found.curve, objective, "")
        self._tell(number, found, self._space.reference, label)
        if found.state != "COMPLETE":
            raise RunFailed(
                f"your own configuration did not train to its end, so there is nothing to compare with: {found.reason}"
            )
        self._study.note("target", target)
        return objective

    def _sets_its_own_bar(self) -> bool:
        """Tell whether the objective says by itself when the reference may stop."""
        goal = self._space.reference.goal
        return self._options.objective == "quality" or (
            self._options.objective == "time-to-target" and goal.target is not None
        )

    def _trial(self, objective: Objective) -> None:
        number, parameters = self._study.ask(self._planned())
        before = self._same(number, parameters)
        if before is not None:
            self._repeats += 1
            self._study.tell(number, before.state, before.value, before.constraints,
                             {**before.facts, REPEAT: before.number})  # fmt: skip
            return
        self._repeats = 0
        label = f"{self._study.name}-{number:03d}"
        experiment = self._space.experiment(parameters)
        try:
            found = self._run(objective, experiment, label, number, pruned=parameters not in self._guesses)
        except BaseException:
            self._study.tell(number, "FAIL", None, {}, {"run": label, "reason": "the search was interrupted"})
            self._study.abandon(number)
            raise
        self._tell(number, found, experiment, label)

    def _planned(self) -> Mapping[str, Any] | None:
        """Return what comes before the sampler's draws; None where it is the sampler's turn.

        What was interrupted, then the guesses, then the neighbours of each new best. It follows from the trials alone,
        so an interrupted search goes on as if it had not been.
        """
        ended = self._ended()
        abandoned = [self._study.trials()[number] for number in self._study.facts.get("abandoned", ())]
        plan = [*(trial.parameters for trial in abandoned), *self._guesses]
        best = math.inf
        for trial in ended:
            if trial.feasible and _value(trial) < best:
                best = _value(trial)
                plan += self._space.neighbours(trial.parameters) if trial is not ended[0] else []
        tried = [trial.parameters for trial in ended]
        return next((parameters for parameters in plan if parameters not in tried), None)

    def _same(self, number: int, parameters: Mapping[str, Any]) -> Trial | None:
        """Return an earlier trial of the same configuration that has an answer: nothing is trained twice."""
        found = (trial for trial in self._study.trials() if trial.number != number and trial.parameters == parameters)
        return next((trial for trial in found if trial.state in ("COMPLETE", "PRUNED")), None)

    def _run(
        self, objective: Objective, experiment: Experiment, label: str, number: int | None = None, pruned: bool = False
    ) -> Followed:
        """Run one configuration; `number`: as a trial that may be stopped; `pruned`: by comparison with others, too."""
        configured = override(experiment, {**objective.settings(), **controller.OF_A_TRIAL})
        return controller.follow(
            self._launcher.start(configured, label),
            objective,
            report=_never
            if number is None or not pruned
            else lambda rung, value: self._study.report(number, rung, value),
            best=None if number is None else controller.best_value(self._study),
            rung_seconds=self._rung_seconds(),
            silence_seconds=self._options.silence_seconds,
        )

    def _tell(self, number: int, found: Followed, experiment: Experiment, label: str) -> None:
        facts = controller.facts(found, experiment, label)
        self._study.tell(number, found.state, found.value, found.constraints, facts)
        self._say(_line(number, found, facts))

    def _rung_seconds(self) -> float:
        reference = reference_trial(self._study.trials(), self._space)
        return 0.0 if reference is None else float(reference.facts["train_seconds"]) / RUNGS

    def _may_go_on(self) -> bool:
        if self._repeats >= MOST_REPEATS:
            return False  # all there is has been tried
        if self._options.trials is not None and len(self._ended()) >= self._options.trials:
            return False
        if self._options.minutes is None:
            return True
        return self.seconds + self._confirmation_seconds() < 60 * self._options.minutes

    def _ended(self) -> list[Trial]:
        """Return the trials that have ended, without those that are tried again."""
        abandoned = self._study.facts.get("abandoned", ())
        ended = [trial for trial in self._study.trials() if trial.state in ("COMPLETE", "PRUNED", "FAIL")]
        return [trial for trial in ended if trial.number not in abandoned and REPEAT not in trial.facts]

    def _too_short(self) -> str:
        own, seeds = float(self._study.facts.get("reference_seconds", 0.0)), self._options.seeds
        return (
            f"--minutes {self._options.minutes:g} is too short: your own configuration alone takes {own:.0f} s, and is "
            f"trained {seeds} times more to confirm; give at least {(2 + seeds) * own / 30:.1f}"
        )

    def _confirmation_seconds(self) -> float:
        """Return what confirming will take, by the wall time of the reference and of the best."""
        contestants = 1 + min(self._options.challengers, len(self._best()))
        return contestants * self._options.seeds * 1.2 * float(self._study.facts.get("reference_seconds", 0.0))

    def _best(self) -> list[Trial]:
        """Return the challengers: the best feasible trials that may be better than the reference, each once."""
        ranked = sorted((trial for trial in self._study.trials() if trial.feasible), key=_value)
        reference = reference_trial(ranked, self._space)
        unlike = {repr(sorted(trial.parameters.items())): trial for trial in reversed(ranked)}
        found = [trial for trial in unlike.values() if reference is None or trial.parameters != reference.parameters]
        if reference is not None:
            worst = worth_confirming(_value(reference), _value(ranked[0]))
            found = [trial for trial in found if _value(trial) <= worst]
        return sorted(found, key=_value)[: self._options.challengers]

    def _confirm(self, objective: Objective) -> dict[int, list[Run]]:
        """Train the best and the reference on new seeds, in turns; what an interrupted search has done stays done."""
        reference = reference_trial(self._study.trials(), self._space)
        assert reference is not None
        contestants = [reference, *self._best()] if self._best() else []
        kept: list[dict[str, Any]] = list(self._study.facts.get(CONFIRMATIONS, []))
        for turn in range(self._options.seeds):
            for trial in rotated(contestants, turn):
                seed = self._space.reference.train.seed + NEW_SEED + turn
                if any(one["trial"] == trial.number and one["seed"] == seed for one in kept):
                    continue
                kept.append({"trial": trial.number, **dataclasses.asdict(self._confirmation(objective, trial, seed))})
                self._study.note(CONFIRMATIONS, kept)
        return runs_by_trial(kept)

    def _confirmation(self, objective: Objective, trial: Trial, seed: int) -> Run:
        label = f"{self._study.name}-confirm-{trial.number:03d}-{seed}"
        experiment = override(self._space.experiment(trial.parameters), {"train.seed": seed})
        found = self._run(objective, experiment, label)
        run = confirmation(found, objective, seed)
        shown = "missed the quality" if run.value is None else f"{abs(run.value):.4g}"
        self._say(f"confirm  trial {trial.number} on seed {seed}: {shown}")
        return run

    def _decide(self, objective: Objective, confirmed: Mapping[int, Sequence[Run]]) -> Verdict:
        return verdict_of(self._study, self._space, objective, confirmed)


def rotated(contestants: Sequence[Trial], turn: int) -> list[Trial]:
    """Return the contestants in another order each turn: none always goes first, or behind the same other."""
    first = turn % max(1, len(contestants))
    return [*contestants[first:], *contestants[:first]]


def _value(trial: Trial) -> float:
    return math.inf if trial.value is None else trial.value


def worth_confirming(reference: float, best: float) -> float:
    """Return the highest value that a trial may have and be worth a confirmation.

    A little worse than the reference, which luck may have done; and not far from the best. Values are times, negated
    speeds or negated qualities.
    """
    return min(reference + CLOSE * abs(reference), best + NEAR * abs(best))


def reference_trial(trials: Sequence[Trial], space: Space) -> Trial | None:
    """Return the completed trial of the user's own configuration."""
    wanted = space.reference_parameters()
    return next((trial for trial in trials if trial.state == "COMPLETE" and trial.parameters == wanted), None)


def confirmation(found: Followed, objective: Objective, seed: int) -> Run:
    """Return what a run on a new seed says; its value is None where the quality was not reached."""
    facts, curve = found.curve.peaks, found.curve
    reached = found.state == "COMPLETE" and objective.gap(curve) <= 0
    memory = [value for name, value in facts.items() if "gpu" in name and name.endswith("memory_usage_megabytes")]
    return Run(
        seed=seed,
        value=found.value if reached else None,
        quality=curve.best,
        samples_per_second=curve.samples_per_second,
        memory_bytes=max(memory, default=0.0) * 1e6 or None,
        joules=facts.get("system/gpu_energy_joules", facts.get("system/gpu_0_energy_joules")),
    )


def runs_by_trial(kept: Sequence[Mapping[str, Any]]) -> dict[int, list[Run]]:
    """Return the stored confirmations by trial."""
    found: dict[int, list[Run]] = {}
    for one in kept:
        found.setdefault(one["trial"], []).append(Run(**{name: one[name] for name in one if name != "trial"}))
    return found


def verdict_of(study: Study, space: Space, objective: Objective, confirmed: Mapping[int, Sequence[Run]]) -> Verdict:
    """Decide by what is stored."""
    trials = {trial.number: trial for trial in study.trials()}
    reference = reference_trial(list(trials.values()), space)
    assert reference is not None
    contestants = {number: contestant(space, trials[number], runs) for number, runs in confirmed.items()}
    own = contestants.pop(reference.number, None) or contestant(space, reference, [as_run(reference, objective)])
    return decide(objective.name, objective.goal, own, list(contestants.values()))


def as_run(trial: Trial, objective: Objective) -> Run:
    """Return a trial of the search as if it were a confirmation: where there is nothing to confirm."""
    facts = trial.facts
    value = trial.value if trial.feasible else None
    return Run(0, value, facts.get("best"), facts.get("samples_per_second"))


def contestant(space: Space, trial: Trial, runs: Sequence[Run]) -> Contestant:
    settings = flatten(space.experiment(trial.parameters))
    searched = {"train.batch_size": BATCH_INDEX, "train.precision": PRECISION, "lr": FACTOR}
    keys = [key for key, name in searched.items() if name in space.parameters() or key == "lr"]
    shown = {key: settings[key] for key in [*keys, *space.extras]}
    return Contestant(trial.number, shown, settings["train.batch_size"], tuple(runs))


def guesses(space: Space) -> list[dict[str, Any]]:
    """Return what to try right after the reference: twice and four times its batch size, as the scaling rule has it."""
    own = space.reference_parameters()
    if BATCH_INDEX not in own:
        return []
    last = len(space.batch_sizes) - 1
    return [{**own, BATCH_INDEX: own[BATCH_INDEX] + more} for more in (1, 2) if own[BATCH_INDEX] + more <= last]


def _never(_rung: int, _value: float) -> bool:
    return False


def _line(number: int, found: Followed, facts: Mapping[str, Any]) -> str:
    what = f"batch {facts['batch_size']}, {facts['precision']}, lr {facts['lr']:.2g}"
    speed = f"  {facts['samples_per_second']:,.0f} samples/s" if "samples_per_second" in facts else ""
    best = f"  best {facts['best']:.4g}" if "best" in facts else ""
    value = "" if found.value is None else f"  value {found.value:.4g}"
    return f"trial {number:3}  {what:34} {found.state.lower():9}{value}{best}{speed}  {found.reason}"

"""One search from beginning to end, or from where it was interrupted: reference, trials, confirmation, verdict."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankzero.config import override
from rankzero.errors import RunFailed
from rankzero.experiment import Experiment
from rankzero.tuning import next_trial
from rankzero.tuning.budget import REFERENCE_SECONDS, Budget, SearchOptions
from rankzero.tuning.objective import Objective, bar
from rankzero.tuning.space import Space
from rankzero.tuning.study import RUNGS, Study
from rankzero.tuning.trial import Trial
from rankzero.tuning.trials import follower
from rankzero.tuning.trials.follower import Say, StopRules, TrialResult
from rankzero.tuning.trials.launcher import Launcher
from rankzero.tuning.trials.pool import TrialJob, TrialPool, in_turn
from rankzero.tuning.verdict import confirm
from rankzero.tuning.verdict.confirm import ConfirmationJob
from rankzero.tuning.verdict.decide import LOOKS, Verdict, finalists

CONFIRMATIONS, TARGET = "confirmations", "target"
MOST_REPEATS = 50  # in a row: all there is has been tried
LOOK_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search leaves."""

    verdict: Verdict
    target: float | None
    seconds: float
    """What it has taken, all its parts together."""


class Session:
    """A search under way. `already_seconds`: what was spent on it before, the probe map for instance."""

    def __init__(
        self,
        study: Study,
        space: Space,
        launchers: Sequence[Launcher],
        options: SearchOptions,
        say: Say,
        clock: Callable[[], float] = time.monotonic,
        already_seconds: float = 0.0,
    ) -> None:
        self._study, self._space, self._crew, self._options, self._say = (
            study,
            space,
            TrialPool(launchers),
            options,
            say,
        )
        self._clock, self._budget = (
            clock,
            Budget(study, space, options, clock, already_seconds, len(launchers)),
        )
        self._guesses: Sequence[Mapping[str, Any]] = ()
        self._repeats = 0

    def run(self, guesses: Sequence[Mapping[str, Any]] = ()) -> SearchResult:
        """Search until the budget is spent, confirm, decide. `guesses`: parameters to try right after the reference."""
        self._recover()
        try:
            objective = self._reference()
            while True:
                self._search(objective, guesses)
                self._await_helpers()
                if not self._may_go_on():  # else some of them died, and left trials
                    break
            if (reason := self._budget.too_short()) is not None:
                raise RunFailed(reason)
            self._confirm(objective)
        finally:
            self._budget.keep()
        return SearchResult(self._verdict(objective), objective.target, self._budget.seconds)

    def help(self, guesses: Sequence[Mapping[str, Any]] = ()) -> None:
        """Do trials of a study that another process leads, once that has trained the reference."""
        self._recover()
        self._search(self._objective(), guesses)

    def _recover(self) -> None:
        for number in self._study.recover():
            self._say(f"trial {number} was interrupted: it is tried again")

    def _objective(self) -> Objective:
        """Return the objective; its bar is known once the reference has been trained."""
        own, options = self._space.reference.goal, self._options
        return Objective(
            options.objective, own, self._study.facts.get(TARGET, own.target), options.trial_minutes
        )

    # -- the reference

    def _reference(self) -> Objective:
        """Train the user's own configuration first; return the objective, its bar known."""
        if next_trial.reference_trial(self._study.trials(), self._space) is None:
            self._crew.work(in_turn([self._reference_job()]))
            reference = next_trial.reference_trial(self._study.trials(), self._space)
            if reference is None:
                raise RunFailed(
                    "your own configuration did not train to its end, so there is nothing to compare with: "
                    f"{self._study.trials()[-1].facts.get('reason')}"
                )
        return self._objective()

    def _reference_job(self) -> TrialJob:
        number, _ = self._study.ask(self._space.reference_parameters())
        objective, began = self._objective(), self._clock()
        watched = (
            objective
            if self._sets_its_own_bar()
            else dataclasses.replace(objective, name="throughput")
        )

        def done(found: TrialResult) -> None:
            self._study.note(REFERENCE_SECONDS, self._clock() - began)
            target = bar(objective.goal, objective.name, found.curve, self._options.tolerance)
            judged = follower.classify(
                found.curve, dataclasses.replace(objective, target=target), ""
            )
            if judged.state == "COMPLETE":
                self._study.note(TARGET, target)
            self._tell(number, judged, self._space.reference)

        return self._job(
            self._space.reference,
            self._label(number),
            watched,
            done,
            functools.partial(self._abandon, number),
        )

    def _sets_its_own_bar(self) -> bool:
        """Tell whether the objective says by itself when the reference may stop."""
        goal = self._space.reference.goal
        return self._options.objective == "quality" or (
            self._options.objective == "time-to-target" and goal.target is not None
        )

    # -- trials

    def _search(self, objective: Objective, guesses: Sequence[Mapping[str, Any]]) -> None:
        self._guesses = guesses
        self._crew.work(functools.partial(self._next_trial, objective))

    def _next_trial(self, objective: Objective) -> TrialJob | None:
        while self._may_go_on():
            number, parameters = self._study.ask(
                next_trial.upcoming(
                    self._study.trials(), self._study.abandoned, self._guesses, self._space
                )
            )
            if self._budget.is_spent_before(number):
                self._abandon(number, "other processes had the last trials")
                continue
            before = next_trial.same(self._study.trials(), number)
            if before is None:
                self._repeats = 0
                return self._trial_job(objective, number, parameters)
            self._repeats += 1
            self._copy(number, before)
        return None

    def _may_go_on(self) -> bool:
        return self._repeats < MOST_REPEATS and self._budget.allows_a_trial()

    def _trial_job(
        self, objective: Objective, number: int, parameters: Mapping[str, Any]
    ) -> TrialJob:
        experiment = self._space.experiment(parameters)
        report = (
            None if parameters in self._guesses else functools.partial(self._study.report, number)
        )
        return self._job(
            experiment,
            self._label(number),
            objective,
            lambda found: self._tell(number, found, experiment),
            functools.partial(self._abandon, number),
            report=report,
            best=follower.best_value(self._study),
        )

    def _copy(self, number: int, before: Trial) -> None:
        """End a trial with the answer that another one gave; without one where that is not known yet."""
        known = before.state in ("COMPLETE", "PRUNED")
        self._study.tell(
            number,
            before.state if known else "FAIL",
            before.value,
            before.constraints,
            {**(before.facts if known else {}), next_trial.REPEAT: before.number},
        )

    def _job(
        self,
        experiment: Experiment,
        label: str,
        objective: Objective,
        done: Callable[[TrialResult], None],
        interrupted: Callable[[], None] = lambda: None,
        **terms: Any,
    ) -> TrialJob:
        experiment = override(experiment, {**objective.settings(), **follower.OF_A_TRIAL})
        found = StopRules(
            rung_seconds=self._rung_seconds(),
            silence_seconds=self._options.silence_seconds,
            **terms,
        )
        return TrialJob(experiment, label, objective, found, done, interrupted)

    def _tell(self, number: int, found: TrialResult, experiment: Experiment) -> None:
        facts = follower.facts(found, experiment, self._label(number))
        self._study.tell(number, found.state, found.value, found.constraints, facts)
        self._say(_line(number, found, facts))

    def _abandon(self, number: int, reason: str = "the search was interrupted") -> None:
        self._study.tell(number, "FAIL", None, {}, {"run": self._label(number), "reason": reason})
        self._study.abandon(number)

    def _label(self, number: int) -> str:
        return f"{self._study.name}-{number:03d}"

    def _rung_seconds(self) -> float:
        reference = next_trial.reference_trial(self._study.trials(), self._space)
        return 0.0 if reference is None else float(reference.facts["train_seconds"]) / RUNGS

    def _await_helpers(self) -> None:
        """Wait for the trials of other processes; what those leave that died is abandoned."""
        told = False
        while next_trial.running(self._study.trials()):
            if not told:
                self._say("other processes are still at their trials: waiting for them")
            told = True
            self._study.recover()
            time.sleep(LOOK_SECONDS)

    # -- confirmation

    def _challengers(self) -> list[Trial]:
        return next_trial.challengers(self._study.trials(), self._space, self._options.challengers)

    def _confirm(self, objective: Objective) -> None:
        """Train the best and the reference on new seeds, in turns; twice as often where that is too close to call."""
        reference, seeds = (
            next_trial.reference_trial(self._study.trials(), self._space),
            self._options.seeds,
        )
        contestants = [found for found in (reference, *self._challengers()) if found is not None]
        for look in range(LOOKS):
            if len(contestants) < 2:
                return
            rounds = range(look * seeds, (look + 1) * seeds)
            todo = confirm.turns(
                contestants, self._space.reference.train.seed, rounds, self._kept()
            )
            self._crew.work(in_turn(self._turn_job(objective, turn) for turn in todo))
            left = finalists(self._verdict(objective))
            contestants = [trial for trial in contestants if trial.number in left]
            if not self._budget.allows(contestants):
                return

    def _turn_job(self, objective: Objective, turn: ConfirmationJob) -> TrialJob:
        def done(found: TrialResult) -> None:
            run = confirm.run_of(found, objective, turn.seed)
            self._study.note(CONFIRMATIONS, [*self._kept(), confirm.stored(turn.trial, run)])
            shown = "missed the quality" if run.value is None else f"{abs(run.value):.4g}"
            self._say(f"confirm  trial {turn.trial.number} on seed {turn.seed}: {shown}")

        label = f"{self._study.name}-confirm-{turn.trial.number:03d}-{turn.seed}"
        return self._job(confirm.configured(self._space, turn), label, objective, done)

    def _kept(self) -> list[dict[str, Any]]:
        return list(self._study.facts.get(CONFIRMATIONS, []))

    def _verdict(self, objective: Objective) -> Verdict:
        return confirm.verdict_of(self._study.trials(), self._space, objective, self._kept())


def _line(number: int, found: TrialResult, facts: Mapping[str, Any]) -> str:
    what = f"batch {facts['batch_size']}, {facts['precision']}, lr {facts['lr']:.2g}"
    speed = (
        f"  {facts['samples_per_second']:,.0f} samples/s" if "samples_per_second" in facts else ""
    )
    best = f"  best {facts['best']:.4g}" if "best" in facts else ""
    value = "" if found.value is None else f"  value {found.value:.4g}"
    return (
        f"trial {number:3}  {what:34} {found.state.lower():9}{value}{best}{speed}  {found.reason}"
    )

"""A search from start to verdict, or from where it was interrupted.

It trains the reference (the user's own configuration), then trials, then confirms the best.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankzero.config import flatten, override
from rankzero.config.renamed import with_new_names
from rankzero.errors import RunFailed, UserError
from rankzero.scalars import shown
from rankzero.tuning import members, next_trial
from rankzero.tuning.budget import REFERENCE_SECONDS, Budget
from rankzero.tuning.learning_curve import LearningCurve
from rankzero.tuning.objective import TO_TARGET, Objective, target_quality
from rankzero.tuning.options import SearchOptions
from rankzero.tuning.places.remote_host import RemoteHost
from rankzero.tuning.space import SCALED, Space, devices_text, settings_text
from rankzero.tuning.study import FIRST_RUNG, RUNGS, Study
from rankzero.tuning.trial import REPEAT, TRAINED, Trial
from rankzero.tuning.trials import follower
from rankzero.tuning.trials.follower import TrialJob, TrialPool, TrialResult
from rankzero.tuning.trials.launcher import TrainLauncher
from rankzero.tuning.verdict import confirm
from rankzero.tuning.verdict.confirm import CONFIRMATIONS, DISTURBED, MIXED
from rankzero.tuning.verdict.decide import LOOKS, Verdict, decide, second_look
from rankzero.tuning.verdict.sentence import different_devices

FIRST, EARLIER = "first", "earlier"
"""Facts of a study: the parameters to try first, and the best ones of an earlier study."""
TARGET = "target"
"""A fact of a study: the quality that trials must reach."""
DEVICE_KINDS = "device_kinds"
"""A fact of a study: the kinds of device whose times it has, that of the reference first."""
_TRIALS_ENDED = "trials_ended"
"""A fact of a study: the leader that starts no trials any more, and wants none of helpers."""
_MOST_REPEATS = 50  # draws of known configurations in a row, before the space counts as exhausted
_MOST_LOSSES = 2  # of a configuration's trial, or confirmation run, that is tried again
_LOST = "lost"
"""A fact of an abandoned trial: its host process died."""
_POLL_SECONDS = 1.0
_SLACK, _LEAST_SLACK, _DEVIATIONS = 1.5, 1.1, 3.0
"""A trial is stopped at so many times the value of the best, as long as the noise is not known;
later at the least of these, or after so many deviations of the noise."""
_SEEDS_TO_LEAD = 3
"""On so many seeds a trial is trained before it is the best."""


def first_guesses(study: Study) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what a study's processes try first: its guesses, and the best of an earlier study."""
    # A study of an older version has the older names of settings.
    facts = study.facts.get(FIRST, ()), study.facts.get(EARLIER, ())
    first, earlier = ([with_new_names(parameters) for parameters in fact] for fact in facts)
    return first, earlier


class Session:
    """One process's part in a search.

    `notify`: prints a line. `already_seconds`: spent before, on the probe map for instance.
    """

    def __init__(
        self,
        study: Study,
        space: Space,
        launchers: Sequence[TrainLauncher],
        options: SearchOptions,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        already_seconds: float = 0.0,
    ) -> None:
        self._study, self._space, self._options, self._notify = study, space, options, notify
        self._pool = TrialPool(launchers, options.silence_seconds, option="--silence-seconds")
        # Each may have another machine, so one of them confirms.
        self._is_spread = any(isinstance(one.host, RemoteHost) for one in launchers)
        self._clock, count = clock, len(launchers)
        self._budget = Budget(study, space, options, clock, already_seconds, count, self._is_spread)
        self._guesses, self._earlier = first_guesses(study)
        self._repeats, self._losses = 0, Counter[str]()
        self._abandoned = 0
        """How many trials were known to be abandoned at the last look."""
        self._earlier_seeds = {run["seed"] for run in self._confirmations()}
        self._checks = deque[TrialJob]()
        """Trainings on other seeds of trials that would be the best."""

    def run(self) -> Verdict:
        """Search until the budget is spent, confirm, decide. Raises RunFailed."""
        self._recover()
        try:
            # Time that was spent counts also if nobody can store it at the end: SIGKILL.
            self._budget.keep()
            self._train_reference()
            self._notify(self._budget.outlook())
            while True:
                self._pool.run(self._next_job)
                self._study.note(_TRIALS_ENDED, self._study.members.own_name)
                self._await_helpers()
                # A helper that died left its trial, so there may be one more to do.
                if not self._allows_a_trial():
                    break
                self._study.note(_TRIALS_ENDED, "")
            if self._repeats >= _MOST_REPEATS and self._space.is_drawn:
                self._notify("no further trial: the sampler draws only known configurations")
            if (problem := self._budget.too_short()) is not None:
                raise RunFailed(problem)
            self._confirm()
        finally:
            # Also after Ctrl-C: the time that was spent counts when the search resumes.
            self._budget.keep()
        confirmed = confirm.sound(self._study.facts)
        trials, seeds = self._study.trials(), self._options.seeds
        found = confirm.candidates_of(trials, self._space, confirmed, seeds)
        return decide(self._objective.name, *found, is_own_target=self._is_own_target)

    def help(self) -> None:
        """Do trials of a study that another process leads and has trained the reference of."""
        self._budget.follow()
        self._recover()
        self._pool.run(self._next_job)

    def _recover(self) -> None:
        for number in self._study.recover():
            self._notify(f"trial {number} was interrupted: it is tried again")

    @property
    def _objective(self) -> Objective:
        """Return the objective. Its target may be unknown until the reference has been trained."""
        goal, options = self._space.reference.goal, self._options
        target = self._study.facts.get(TARGET, goal.target)
        return Objective(options.objective, goal, target, options.trial_minutes)

    @property
    def _is_own_target(self) -> bool:
        """Return whether the quality to reach is what the reference reached on its first seed."""
        name, goal = self._options.objective, self._space.reference.goal
        return name != "quality" and (name not in TO_TARGET or goal.target is None)

    # -- the reference

    def _reference(self) -> Trial | None:
        return next_trial.reference_trial(self._study.trials(), self._space)

    def _train_reference(self) -> None:
        """Train the user's own configuration once. Raises RunFailed if that fails."""
        while self._reference() is None:
            self._pool.run_all([self._reference_job()])
            last = self._study.trials()[-1]
            if self._reference() is None and not last.abandoned:
                text = "your own configuration did not train to its end, so there is nothing to "
                text += f"compare with: {last.facts.get('reason')}"
                if last.state == "PRUNED":
                    text += ". With a goal.target, a search continues without it"
                raise RunFailed(text)
        own, goal = self._reference(), self._space.reference.goal
        is_blind = own is not None and own.state == "COMPLETE" and "best" not in own.facts
        # Another configuration may reach a target of the user's.
        if is_blind and goal.target is None:
            raise RunFailed(
                f"{goal.metric} was NaN in every evaluation of your own configuration, so there is "
                "nothing to compare with"
            )

    def _reference_job(self) -> TrialJob:
        own = self._space.reference_parameters()
        number = self._study.ask(own)
        reference, began = self._space.experiment(own), self._clock()
        # A reference that sets the target is trained to its end.
        objective = dataclasses.replace(self._objective, target=reference.goal.target)

        def ended(result: TrialResult | None) -> None:
            if result is not None and not result.was_lost:
                self._note_device(result)
                self._study.note(REFERENCE_SECONDS, self._clock() - began)
                if result.state == "PRUNED" and reference.goal.target is not None:
                    is_quality = objective.name == "quality"
                    self._study.note(TARGET, None if is_quality else reference.goal.target)
                if result.curve.is_finished:
                    target = target_quality(objective, result.curve, self._options.tolerance)
                    self._study.note(TARGET, target)
                    result = follower.complete(result.curve, self._objective)
            self._end(number, result)

        devices = self._space.devices[0]
        return TrialJob(reference, self._label(number), objective, ended, processes=devices)

    # -- trials

    def _next_job(self) -> TrialJob | None:
        """Return the next training of a trial, or None if none may start now."""
        return self._checks.popleft() if self._checks else self._next_trial()

    def _next_trial(self) -> TrialJob | None:
        """Ask for the next trial; return its job, or None if none may start now."""
        while self._allows_a_trial():
            planned = self._planned()
            if planned is None and not self._space.is_drawn:
                self._repeats = _MOST_REPEATS
                return None
            number = self._study.ask(planned)
            # Asked again now that the leader can see this trial: it waits, or it has ended them.
            if self._budget.is_spent_before(number) or self._is_too_late():
                self._abandon(number, "other processes had the last trials")
                continue
            # The sampler may draw a known configuration again. Nothing is trained twice.
            twin = next_trial.twin(self._study.known, number)
            if twin is None:
                self._repeats = 0
                return self._trial_job(number, is_planned=planned is not None)
            # A twin that still runs has no result to copy. Then this trial counts for nothing.
            self._repeats += 1
            known = twin.state in ("COMPLETE", "PRUNED")
            facts = {**(twin.facts if known else {}), REPEAT: twin.number}
            state = twin.state if known else "FAIL"
            self._study.tell(number, state, twin.value, twin.constraints, facts)
        return None

    def _planned(self) -> Mapping[str, Any] | None:
        """Return the parameters to try next, or None if the sampler shall draw them."""
        trials = self._study.known
        if self._options.sampler == "grid":
            return next_trial.interrupted(trials, self._space)
        is_speed = self._options.objective in ("throughput", "tokens")
        return next_trial.upcoming(
            trials, self._guesses, self._space, earlier=self._earlier, is_speed=is_speed
        )

    def _allows_a_trial(self) -> bool:
        if self._is_too_late() or not self._budget.allows_a_trial():
            return False
        # A trial that was abandoned since is tried again, also if all others are known.
        if (abandoned := len(self._study.known.abandoned)) != self._abandoned:
            self._abandoned, self._repeats = abandoned, 0
        return self._repeats < _MOST_REPEATS

    def _is_too_late(self) -> bool:
        """Return whether this process helps a leader that has ended the trials."""
        # Another leader may continue a study, with more trials.
        facts = {} if self._study.members.leads else self._study.facts
        return bool(facts.get(_TRIALS_ENDED)) and facts[_TRIALS_ENDED] == facts.get(members.LEADER)

    def _trial_job(self, number: int, *, is_planned: bool) -> TrialJob:
        trials = self._study.known
        parameters = trials[number].parameters
        experiment, objective = self._space.experiment(parameters), self._objective
        devices = self._space.devices_of(parameters)
        best = next_trial.time_to_beat(trials, self._space, devices)
        noise = next_trial.noise(trials)
        slack = _SLACK if noise is None else max(_LEAST_SLACK, math.exp(_DEVIATIONS * noise))
        nearest, batch_size = next_trial.nearest_curve(trials)
        step_ratio = experiment.train.batch_size / batch_size
        # A planned trial is trained to its end, unless it cannot win. Early on, a larger batch or a
        # lower learning rate is always worse than the trials that it is to be compared with.
        reference, reported = next_trial.reference_trial(trials, self._space), 0
        # Without a reference there is no common time to compare at.
        whole = reference is not None and reference.state == "COMPLETE"
        seconds = float(reference.facts["train_seconds"]) if reference and whole else 0.0
        rung_seconds = seconds / RUNGS or math.inf

        def why_prune(curve: LearningCurve) -> str:
            nonlocal reported
            if best is not None and objective.cannot_beat(curve, best, slack):
                text = f"cannot beat the best, {objective.text(best)}, any more"
                where = f"after {shown(best, 3)} s on {devices_text(devices)}"
                several = len(self._space.devices) > 1
                return f"neither the fastest nor the cheapest {where}" if several else text
            # Rungs are training time. Steps of different batch sizes are no common measure.
            rung = int(curve.seconds / rung_seconds)
            if rung <= reported or not curve.points:
                return ""
            reported = rung
            if rung >= FIRST_RUNG and objective.is_worse(curve, nearest, step_ratio):
                return "further from the quality than the best at the same training time"
            # After as much time, more devices have trained on more samples: no common measure.
            if is_planned or devices != self._space.devices[0]:
                return ""
            is_worse = self._study.report(number, rung, objective.progress(curve))
            return "worse than others at the same training time" if is_worse else ""

        def ended(result: TrialResult | None) -> None:
            self._train_again_or_end(number, [result] if result else [])

        return TrialJob(experiment, self._label(number), objective, ended, why_prune, devices)

    def _train_again_or_end(self, number: int, results: Sequence[TrialResult]) -> None:
        """Let a trial that would be the best train on another seed, or end it.

        `results`: of each seed; none if it was interrupted. A trial that is best by luck would stop
        all later ones too early, and be confirmed in place of better ones.
        """
        if results:
            self._note_device(results[-1])
        # Other processes may have found a better one, or may have taken this one for dead.
        trials, objective = self._study.trials(), self._objective
        parameters = trials[number].parameters
        devices = self._space.devices_of(parameters)
        best = next_trial.time_to_beat(trials, self._space, devices)
        result = follower.combined(results) if results else None
        is_over = trials[number].has_ended or len(results) == _SEEDS_TO_LEAD
        if (
            result is None
            or is_over
            or not (objective.is_uncertain(result.curve) and result.leads(best))
            or not self._budget.leaves_time()
        ):
            self._end(number, result, len(results))
            return

        # By steps: this may run on another machine.
        first = results[0]
        most_steps = first.curve.step * confirm.factor_to_lead(
            first.value, result.value, len(results), best
        )
        seed = self._space.reference.train.seed + len(results)

        def why_prune(curve: LearningCurve) -> str:
            return f"not as fast on seed {seed}" if curve.step > most_steps else ""

        def ended(more: TrialResult | None) -> None:
            if more is not None and more.state == "FAIL":
                # That may be the machine's fault, and the seeds before have a result.
                self._end(number, result, len(results))
                return
            self._train_again_or_end(number, [*results, more] if more else [])

        other = override(self._space.experiment(parameters), {"train.seed": seed})
        label = f"{self._label(number)}-seed{seed}"
        self._checks.append(TrialJob(other, label, objective, ended, why_prune, devices))

    def _end(self, number: int, result: TrialResult | None, seeds: int = 1) -> None:
        """Write a trial's result into the study, and print it. None: it was interrupted."""
        if result is None:
            self._abandon(number, "the search was interrupted")
            return
        parameters = self._study.known[number].parameters
        lost = [one for one in self._study.known.alike(parameters) if _LOST in one.facts]
        if result.was_lost and len(lost) < _MOST_LOSSES:
            self._notify(f"trial {number} was lost with its host process: it is tried again")
            self._abandon(number, "its host process died", {_LOST: True})
            return
        experiment = self._space.experiment(parameters)
        devices = self._space.devices_of(parameters)
        facts = follower.facts(result, experiment, self._label(number), devices)
        facts[next_trial.SEEDS] = seeds
        settings = flatten(experiment)
        if scaled := {key: settings[key] for key in SCALED if key in parameters}:
            facts[TRAINED] = scaled
        self._study.tell(number, result.state, result.value, result.constraints, facts)
        self._budget.keep()
        trial = self._study.known[number]
        what = f"batch {facts['batch_size']}, {facts['precision']}, lr {facts['lr']:.2g}"
        what = ", ".join(filter(None, (what, settings_text(trial.own))))
        what += f", {devices_text(devices)}" if len(self._space.devices) > 1 else ""
        line = f"trial {number:3}  {what:34} {follower.state_text(trial).lower():9}"
        if result.value is not None and trial.feasible:
            line += f"  value {self._objective.text(result.value)}"
        line += f"  best {shown(facts['best'])}" if "best" in facts else ""
        if "samples_per_second" in facts:
            line += f"  {shown(facts['samples_per_second'])} samples/s"
        self._notify(f"{line}  {result.reason}")

    def _note_device(self, result: TrialResult) -> None:
        """Note the kind of device of a timed training, and print it if it is another one."""
        device, known = result.curve.device, self._study.facts.get(DEVICE_KINDS, [])
        is_timed = result.state != "FAIL" and self._objective.is_timed(result.curve)
        if is_timed and device and device not in known:
            self._study.note(DEVICE_KINDS, [*known, device])
            if known:
                self._notify(different_devices([*known, device]))

    def _abandon(self, number: int, reason: str, facts: Mapping[str, Any] | None = None) -> None:
        facts = {"run": self._label(number), "reason": reason, **(facts or {})}
        self._study.tell(number, "FAIL", None, {}, facts)
        self._study.abandon(number)

    def _label(self, number: int) -> str:
        return f"{self._study.name}-t{number:02d}"

    def _await_helpers(self) -> None:
        """Wait for the trials of other processes. Abandon those of processes that died."""
        if next_trial.running(self._study.trials()):
            self._notify("other processes still run trials: waiting for them")
        while next_trial.running(self._study.trials()):
            self._study.recover()
            time.sleep(_POLL_SECONDS)

    # -- confirmation

    def _confirm(self) -> None:
        """Train the best trials and the reference on new seeds; twice as many if it is close."""
        trials, space, seeds = self._study.trials(), self._space, self._options.seeds
        reference = next_trial.reference_trial(trials, space)
        challengers = next_trial.challengers(trials, space, self._options.challengers)
        members.require_lead(self._study)
        if reference is None or not challengers:
            return
        if self._is_spread:
            self._pool.keep_one()
        challengers = self._that_fit(reference, challengers)
        self._train_rounds([reference, *challengers], range(seeds))
        self._repeat_disturbed([reference, *challengers])
        members.require_lead(self._study)
        group = self._second_look(reference)
        if group:
            self._train_rounds(group, range(seeds, LOOKS * seeds))
        if reference in group:
            self._repeat_disturbed(group)

    def _that_fit(self, reference: Trial, challengers: list[Trial]) -> list[Trial]:
        """Return the challengers that there is time to confirm: one at least, the best first.

        Those with a run on a new seed stay, so that a search that was killed confirms the same.
        """
        first_seed, known = self._space.reference.train.seed, self._confirmations()
        begun = {run["trial"] for run in known}

        def missing(some: list[Trial]) -> list[Trial]:
            rounds = range(self._options.seeds)
            runs = confirm.missing_runs([reference, *some], first_seed, rounds, known)
            return [trial for trial, _ in runs]

        least = missing(challengers[:1])
        while len(challengers) > 1 and challengers[-1].number not in begun:
            if self._budget.allows_runs(missing(challengers), over=0.1, least=least):
                break
            challengers = challengers[:-1]
        return challengers

    def _second_look(self, reference: Trial) -> list[Trial]:
        """Return the trials that get as many seeds again, as far as there is time for them.

        The first look alone decides, so that a search that was killed continues with the same ones.
        """
        seeds, first_seed = self._options.seeds, self._space.reference.train.seed
        later = range(seeds, LOOKS * seeds)
        stored = [
            run
            for run in confirm.sound(self._study.facts)
            if run["seed"] - first_seed - confirm.NEW_SEED not in later
        ]
        trials = self._study.trials()
        candidates = confirm.candidates_of(trials, self._space, stored, seeds)
        own = self._is_own_target
        found = second_look(self._objective.name, *candidates, is_own_target=own)
        all_of_them = [trials[one.trial] for one in found]
        # A challenger's own runs show whether it is reliable. Those of a slow reference take many
        # times as long.
        unreliable = [trials[one.trial] for one in found if not one.reached]
        for others, group in ((all_of_them, [reference]), (unreliable, [])):
            for count in range(len(others), 0, -1):
                wanted = [*group, *others[:count]]
                missing = confirm.missing_runs(wanted, first_seed, later, self._confirmations())
                if self._budget.allows_runs([trial for trial, _ in missing]):
                    return wanted
        return []

    def _train_rounds(self, candidates: Sequence[Trial], rounds: Sequence[int]) -> None:
        first_seed, facts = self._space.reference.train.seed, self._study.facts
        # A challenger may be new in this session: its run of a spoiled round would not count.
        rounds = [confirm.sound_round(one, first_seed, facts) for one in rounds]
        # Runs that are lost with their host process are missing again.
        while missing := list(
            confirm.missing_runs(candidates, first_seed, rounds, self._confirmations())
        ):
            mixed = {seed for _, seed in missing if seed in self._earlier_seeds}
            if new := mixed.difference(known := self._study.facts.get(MIXED, [])):
                self._study.note(MIXED, [*known, *sorted(new)])
            self._pool.run_all(self._confirmation_job(*run) for run in missing)

    def _repeat_disturbed(self, candidates: Sequence[Trial]) -> None:
        """Train another round for each in which the machine's speed changed, if there is time."""
        facts = self._study.facts
        known = list(facts.get(DISTURBED, []))
        # A round that was interrupted shows nothing. It gets its other runs if it is needed.
        whole = confirm.whole_rounds([one.number for one in candidates], confirm.sound(facts))
        seeds = [seed for seed in confirm.disturbed(whole) if seed not in known]
        for seed in seeds[: max(0, self._options.seeds - len(known))]:
            if not self._budget.allows_runs(candidates):
                return
            known.append(seed)
            self._notify(f"the machine's speed changed in the round of seed {seed}: again")
            number = LOOKS * self._options.seeds + len(known) - 1
            self._train_rounds(candidates, [number])
            replacements = self._study.facts.get(confirm.REPLACEMENTS, [])[: len(known) - 1]
            if len(replacements) == len(known) - 1:
                self._study.note(confirm.REPLACEMENTS, [*replacements, number])
            # Only now: a search that is killed in between keeps the old round until it has this.
            self._study.note(DISTURBED, known)

    def _confirmation_job(self, trial: Trial, seed: int) -> TrialJob:
        objective = self._objective
        label = f"{self._study.name}-confirm-{trial.number}-seed{seed}"

        def ended(result: TrialResult | None) -> None:
            # Nothing is stored of an interrupted run, so a later start trains it again.
            if result is None:
                return
            # One that was trained to its end missed nothing, although its energy is not known.
            unmeasured = result.state == "FAIL" and result.curve.is_finished
            if (result.was_lost or unmeasured) and self._losses[label] < _MOST_LOSSES:
                self._losses[label] += 1
                what = "was not measured" if unmeasured else "was lost with its host process"
                self._notify(f"{label} {what}: it is trained again")
                return
            if unmeasured:
                raise UserError(f"{label} was not measured: {result.reason}")
            members.require_lead(self._study)
            self._note_device(result)
            run = confirm.as_run(trial.number, seed, result, objective, self._space.reference.train)
            self._study.note(CONFIRMATIONS, [*self._confirmations(), dataclasses.asdict(run)])
            self._budget.keep()
            value = "" if run.value is None else objective.text(run.value)
            missed = "diverged" if run.diverged else "missed the quality"
            self._notify(f"confirm  trial {trial.number} on seed {seed}: {value or missed}")

        best = next_trial.best_value(self._study.trials())
        steps = [point[0] for point in trial.facts.get("curve", ())] if trial.feasible else []
        is_to_target = objective.name in TO_TARGET and steps
        most_steps = confirm.MISSED * steps[-1] if is_to_target else math.inf

        def why_prune(curve: LearningCurve) -> str:
            # It missed the quality in its whole trial, so it need not be trained to its end again.
            late = not trial.feasible and objective.cannot_beat(curve, best, confirm.CLEARLY_WORSE)
            # By steps, because the trial may be another machine's.
            late = late or curve.step > most_steps
            return f"does not reach the quality in {shown(curve.seconds, 3)} s" if late else ""

        experiment = override(self._space.experiment(trial.parameters), {"train.seed": seed})
        devices = self._space.devices_of(trial.parameters)
        return TrialJob(experiment, label, objective, ended, why_prune, devices)

    def _confirmations(self) -> list[dict[str, Any]]:
        return list(self._study.facts.get(CONFIRMATIONS, []))

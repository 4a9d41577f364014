"""How much a search may still spend: a number of trials, or minutes, the confirmation included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rankzero.tuning import next_trial
from rankzero.tuning.objective import TO_TARGET
from rankzero.tuning.options import SearchOptions
from rankzero.tuning.space import Space
from rankzero.tuning.study import Study
from rankzero.tuning.trial import Trial
from rankzero.tuning.verdict import confirm
from rankzero.tuning.verdict.decide import detectable

SECONDS, REFERENCE_SECONDS = "seconds", "reference_seconds"
"""Facts of a study: the seconds that it took so far, and those of its first trial as a whole."""
_USUAL_NOISE = 0.05  # of runs of one configuration, relative
_MARGIN = 1.1  # on estimates of the confirmation's time


class Budget:
    """The time and the trials of a search.

    `already_seconds`: spent before, for instance on the probe map. `side_by_side`: trials at once.
    `is_spread`: confirmation runs follow each other.
    """

    def __init__(
        self,
        study: Study,
        space: Space,
        options: SearchOptions,
        clock: Callable[[], float],
        already_seconds: float,
        side_by_side: int,
        is_spread: bool = False,
    ) -> None:
        self._study, self._space, self._options = study, space, options
        self._most_trials = math.inf if options.trials is None else options.trials
        self._most_seconds = math.inf if options.minutes is None else 60 * options.minutes
        self._side_by_side = side_by_side
        self._confirmed_at_once = 1 if is_spread else side_by_side
        self._clock, self._started = clock, clock()
        self._kept = float(study.facts.get(SECONDS, 0.0))
        self._spent, self._follows = self._kept + already_seconds, False

    def follow(self) -> None:
        """Count the leader's time from now on, as a helper does: it may join late."""
        self._follows = True

    @property
    def seconds(self) -> float:
        """Return the seconds of the search so far, those before an interruption included."""
        if self._follows and (kept := float(self._study.facts.get(SECONDS, 0.0))) != self._kept:
            # The leader keeps its time with each trial. In between, this process's clock counts.
            self._kept, self._spent, self._started = kept, kept, self._clock()
        return self._spent + self._clock() - self._started

    def keep(self) -> None:
        """Write the spent time into the study, so that a later start continues from it."""
        # A helper's time is part of the leader's.
        if not self._follows:
            self._study.note(SECONDS, self.seconds)

    def allows_a_trial(self) -> bool:
        """Return whether another trial may start. Trials of other processes that run count."""
        return len(self._study.trials().taken) < self._most_trials and self.leaves_time()

    def leaves_time(self) -> bool:
        """Return whether there is more time than the confirmation will take."""
        if self._options.minutes is None:
            return True
        # If trials missed the quality on some seed, challengers will, too.
        uneven = next_trial.is_uneven(self._study.known) and self._options.objective in TO_TARGET
        kept = self._reserve(self._confirmation_seconds(misses=uneven))
        return self.seconds + kept < self._most_seconds

    def _reserve(self, confirmation: float) -> float:
        # Trials come first: they find faster challengers. One is confirmed in any case, others as
        # far as time allows.
        return max(min(confirmation, self._most_seconds / 2), self._confirmation_seconds(most=1))

    def is_spent_before(self, number: int) -> bool:
        """Return whether the trials before this one used up the budget.

        Several processes may ask for the last trial at the same time.
        """
        trials = self._study.known
        later = trials.taken.intersection(range(number, len(trials)))
        return len(trials.taken) - len(later) >= self._most_trials

    def allows_runs(
        self, trials: Sequence[Trial], over: float = 0.0, least: Sequence[Trial] = ()
    ) -> bool:
        """Return whether there is time to train each of these on a new seed.

        `over`: the share of the search's time by which the cautious estimate may exceed it.
        `least`: these are trained in any case, so what ends no later costs no time.
        """
        free = (1 + over) * self._most_seconds - self.seconds
        found, needed = (self._together(self._each_seconds(one)) for one in (trials, least))
        return found < free or 0 < found <= needed

    def outlook(self) -> str:
        """Return what is left to do and what it can show, once the reference is trained."""
        options, own = self._options, float(self._study.facts.get(REFERENCE_SECONDS, 0.0))
        confirmation = self._reserve(self._confirmation_seconds(in_full=True))
        trials = max(0.0, self._most_trials - len(self._study.known.taken))
        if own > 0 and math.isfinite(self._most_seconds):
            free = max(0.0, self._most_seconds - self.seconds - confirmation)
            trials = min(trials, self._side_by_side * free / own)
        # Trials that lead are trained more often, and others are stopped before their end.
        about, count = "about " if options.minutes else "", f"{trials:.0f}"
        plural = "" if count == "1" else "s"
        gain = detectable(_USUAL_NOISE, options.seeds, options.challengers)
        text = (
            f"plan   {about}{count} trial{plural} of up to {own:.0f} s, "
            f"then up to {confirmation:.0f} s to confirm at most {options.challengers} of them on "
            f"{options.seeds} seeds"
        )
        # The gain of `quality` is a difference of metrics: no usual noise is known.
        if options.objective == "quality":
            return text
        text += f": it can show gains above {gain:.0%} if runs vary by {_USUAL_NOISE:.0%}"
        return text + self._rounding()

    def _rounding(self) -> str:
        """Return a warning if the reference reached the target as soon as it was evaluated."""
        trials = self._study.known
        reference = next_trial.reference_trial(trials, self._space)
        curve = reference.facts.get("curve", []) if reference and reference.feasible else []
        if self._options.objective not in TO_TARGET or len(curve) != 1 or curve[0][0] < 2:
            return ""
        return (
            ". Yours reached the target at its first evaluation, so a faster start cannot show: "
            f"set train.eval_every={max(1, curve[0][0] // 10)} and give --new"
        )

    def too_short(self) -> str | None:
        """Return an error message if the budget did not suffice for a second trial, or None."""
        # If there is time, nothing is left to try.
        is_over = self._options.minutes is not None and not self.allows_a_trial()
        if not is_over or len(next_trial.ended(self._study.known)) >= 2:
            return None
        own = float(self._study.facts.get(REFERENCE_SECONDS, 0.0))
        confirmation = self._confirmation_seconds()
        # Rounded up: exactly so many minutes would be too few by a hair.
        least = math.ceil((self.seconds + own + confirmation) / 6 + 1) / 10
        return (
            f"--minutes {self._options.minutes:g} is too short for a second trial: the search has "
            f"taken {self.seconds:.0f} s, your own configuration {own:.0f} s of them, and "
            f"confirming a better one takes about {confirmation:.0f} s: give at least "
            f"--minutes {least:g}"
        )

    def _confirmation_seconds(
        self, *, in_full: bool = False, misses: bool = False, most: int | None = None
    ) -> float:
        """Return its estimated seconds. `misses`: challengers miss the quality on every seed.

        `most`: challengers, by default the option's.
        """
        trials = self._study.known
        reference = next_trial.reference_trial(trials, self._space)
        if reference is None:
            return 0.0
        most = self._options.challengers if most is None else min(most, self._options.challengers)
        found = [reference, *next_trial.challengers(trials, self._space, most)]
        # Challengers that are still to be found will be about as fast as the fastest known trial.
        # As long as there is none, one will do: a bad guess must not use up the budget.
        missing = 1 + most - len(found) if in_full or len(found) > 1 else min(1, most)
        found += [min(found, key=_train_seconds)] * missing
        each = self._each_seconds(found)
        for index, one in enumerate(found[1:] if misses else (), 1):
            usual, whole = _train_seconds(one), float(one.facts.get("whole_seconds", math.inf))
            each[index] += max(0.0, min(confirm.MISSED * usual, whole) - usual)
        return self._together(each * self._options.seeds)

    def _together(self, each: Sequence[float]) -> float:
        """Return the estimated seconds of runs that are started at once, from those of each."""
        return _MARGIN * max(*each, sum(each) / self._confirmed_at_once, 0.0)

    def _each_seconds(self, candidates: Sequence[Trial]) -> list[float]:
        """Return the estimated seconds to train each of these on a new seed."""
        trials = self._study.known
        reference = next_trial.reference_trial(trials, self._space)
        own = 0.0 if reference is None else _train_seconds(reference)
        # A run costs more than its steps: starting and evaluating. The reference shows how much.
        fixed = max(0.0, float(self._study.facts.get(REFERENCE_SECONDS, 0.0)) - own)
        best = next_trial.best_value(trials)
        # A trial that missed the quality is stopped early in its confirmation.
        is_time = self._options.objective == "time-to-target"
        late = confirm.CLEARLY_WORSE * best if is_time and best is not None else math.inf
        return [
            fixed + (_train_seconds(one) if one.feasible else min(late, _train_seconds(one)))
            for one in candidates
        ]


def _train_seconds(trial: Trial) -> float:
    return float(trial.facts.get("train_seconds", 0.0))

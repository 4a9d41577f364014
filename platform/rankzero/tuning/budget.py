"""How much a search may still spend: a number of trials, or minutes, the confirmation included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rankzero.tuning import next_trial
from rankzero.tuning.options import SearchOptions
from rankzero.tuning.space import Space
from rankzero.tuning.study import Study
from rankzero.tuning.trial import Trial

SECONDS, REFERENCE_SECONDS = "seconds", "reference_seconds"
"""Facts of a study: the seconds that it took so far, and those of its first trial as a whole."""
_MARGIN = 1.1  # on estimates of the confirmation's time


class Budget:
    """The time and the trials of a search.

    `already_seconds`: spent before, for instance on the probe map. `side_by_side`: trials at once.
    """

    def __init__(
        self,
        study: Study,
        space: Space,
        options: SearchOptions,
        clock: Callable[[], float],
        already_seconds: float,
        side_by_side: int,
    ) -> None:
        self._study, self._space, self._options = study, space, options
        self._most_trials = math.inf if options.trials is None else options.trials
        self._most_seconds = math.inf if options.minutes is None else 60 * options.minutes
        self._side_by_side = side_by_side
        self._clock, self._started = clock, clock()
        self._spent = float(study.facts.get(SECONDS, 0.0)) + already_seconds

    @property
    def seconds(self) -> float:
        """Return the seconds of the search so far, those before an interruption included."""
        return self._spent + self._clock() - self._started

    def keep(self) -> None:
        """Write the spent time into the study, so that a later start continues from it."""
        self._study.note(SECONDS, self.seconds)

    def allows_a_trial(self) -> bool:
        """Return whether another trial may start. Trials of other processes that run count."""
        trials = self._study.trials()
        is_one_left = len(next_trial.taken(trials)) < self._most_trials
        # The time of the confirmation is kept free.
        return is_one_left and self._fits(self._confirmation_seconds(trials))

    def is_spent_before(self, number: int) -> bool:
        """Return whether the trials before this one used up the budget.

        Several processes may ask for the last trial at the same time.
        """
        taken = next_trial.taken(self._study.trials())
        return sum(trial.number < number for trial in taken) >= self._most_trials

    def allows_another_round(self, candidates: Sequence[Trial]) -> bool:
        """Return whether there is time to train these on as many new seeds again."""
        return self._fits(self._seconds_of(candidates))

    def too_short(self) -> str | None:
        """Return an error message if the budget did not suffice for a second trial, or None."""
        tried = next_trial.ended(self._study.trials())
        if self._options.minutes is None or len(tried) >= 2:
            return None
        own, seeds = float(self._study.facts.get(REFERENCE_SECONDS, 0.0)), self._options.seeds
        return (
            f"--minutes {self._options.minutes:g} is too short: your own configuration alone takes "
            f"{own:.0f} s, and the confirmation trains it {seeds} times more: give at least "
            f"{(2 + seeds) * own / 30:.1f}"
        )

    def _fits(self, seconds: float) -> bool:
        return self.seconds + seconds < self._most_seconds

    def _confirmation_seconds(self, trials: Sequence[Trial]) -> float:
        """Return the estimated seconds of the confirmation, future challengers included."""
        reference = next_trial.reference_trial(trials, self._space)
        if reference is None:
            return 0.0
        found = [reference, *next_trial.challengers(trials, self._space, self._options.challengers)]
        # Challengers that are still to be found will be about as fast as the fastest known trial.
        missing = 1 + self._options.challengers - len(found)
        return self._seconds_of([*found, *[min(found, key=_train_seconds)] * missing])

    def _seconds_of(self, candidates: Sequence[Trial]) -> float:
        """Return the estimated seconds to train these on all seeds."""
        reference = next_trial.reference_trial(self._study.trials(), self._space)
        own = 0.0 if reference is None else _train_seconds(reference)
        # A run costs more than its steps: starting and evaluating. The reference shows how much.
        fixed = max(0.0, float(self._study.facts.get(REFERENCE_SECONDS, 0.0)) - own)
        each = sum(fixed + _train_seconds(trial) for trial in candidates)
        return _MARGIN * self._options.seeds * each / self._side_by_side


def _train_seconds(trial: Trial) -> float:
    return float(trial.facts.get("train_seconds", 0.0))

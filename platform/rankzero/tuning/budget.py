"""What a search may spend: a number of trials, or minutes, the confirmation included."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from rankzero.tuning import next_trial
from rankzero.tuning.objective import Name
from rankzero.tuning.space import Space
from rankzero.tuning.study import Study
from rankzero.tuning.trial import Trial

MARGIN = 1.1  # of estimates of what confirming takes
SECONDS, REFERENCE_SECONDS = "seconds", "reference_seconds"
"""Facts of a study: what it took so far, and its first trial by the clock."""


@dataclasses.dataclass(frozen=True)
class SearchOptions:
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


class Budget:
    """A search's time and trials.

    `already_seconds`: what was spent on it before, the probe map for instance; `side_by_side`: trials at a time.
    """

    def __init__(
        self,
        study: Study,
        space: Space,
        options: SearchOptions,
        clock: Callable[[], float] = time.monotonic,
        already_seconds: float = 0.0,
        side_by_side: int = 1,
    ) -> None:
        self._side_by_side = side_by_side
        self._study, self._space, self._options = study, space, options
        self._clock, self._started = clock, clock()
        self._spent = float(study.facts.get(SECONDS, 0.0)) + already_seconds

    @property
    def seconds(self) -> float:
        """Return what the search has taken so far, earlier sittings included."""
        return self._spent + self._clock() - self._started

    def keep(self) -> None:
        """Write down what was spent."""
        self._study.note(SECONDS, self.seconds)

    def allows_a_trial(self) -> bool:
        """Tell whether another trial may start: what confirming will take is put by."""
        trials = self._study.trials()
        taken = len(next_trial.ended(trials, self._study.abandoned)) + len(
            next_trial.running(trials)
        )
        if self._options.trials is not None and taken >= self._options.trials:
            return False
        return self._fits(self._to_confirm(trials))

    def is_spent_before(self, number: int) -> bool:
        """Tell whether the trials before this one are all that may be: several processes asked for the last at once."""
        if self._options.trials is None:
            return False
        trials = self._study.trials()
        known = [*next_trial.ended(trials, self._study.abandoned), *next_trial.running(trials)]
        return sum(trial.number < number for trial in known) >= self._options.trials

    def allows(self, contestants: Sequence[Trial]) -> bool:
        """Tell whether there is time to train these on as many seeds again."""
        return self._fits(self._seconds_of(contestants))

    def too_short(self) -> str | None:
        """Return what is wrong with the budget where it did not even suffice for a second trial."""
        tried = next_trial.ended(self._study.trials(), self._study.abandoned)
        if self._options.minutes is None or len(tried) >= 2:
            return None
        own, seeds = float(self._study.facts.get(REFERENCE_SECONDS, 0.0)), self._options.seeds
        return (
            f"--minutes {self._options.minutes:g} is too short: your own configuration alone takes {own:.0f} s, and is "
            f"trained {seeds} times more to confirm; give at least {(2 + seeds) * own / 30:.1f}"
        )

    def _fits(self, seconds: float) -> bool:
        return self._options.minutes is None or self.seconds + seconds < 60 * self._options.minutes

    def _to_confirm(self, trials: Sequence[Trial]) -> float:
        """Return what confirming the reference and the challengers will take, those yet to be found included."""
        reference = next_trial.reference_trial(trials, self._space)
        if reference is None or self._options.minutes is None:
            return 0.0
        found = [reference, *next_trial.challengers(trials, self._space, self._options.challengers)]
        missing = 1 + self._options.challengers - len(found)
        return self._seconds_of([*found, *[min(found, key=_train_seconds)] * missing])

    def _seconds_of(self, contestants: Sequence[Trial]) -> float:
        """Return what training them on all seeds takes; a run's cost besides its steps is taken from the reference."""
        reference = next_trial.reference_trial(self._study.trials(), self._space)
        own = 0.0 if reference is None else _train_seconds(reference)
        fixed = max(0.0, float(self._study.facts.get(REFERENCE_SECONDS, 0.0)) - own)
        each = sum(fixed + _train_seconds(trial) for trial in contestants)
        return MARGIN * self._options.seeds * each / self._side_by_side


def _train_seconds(trial: Trial) -> float:
    return float(trial.facts.get("train_seconds", 0.0))

"""A trial as the study has it, and all trials with what a search asks of them."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

from rankzero.tuning.space import BATCH_INDEX, DEVICES, FACTOR, PRECISION, SCALED, SPEED

State = Literal["COMPLETE", "PRUNED", "FAIL", "RUNNING", "WAITING"]
REPEAT = "same_as"
"""A fact of a trial: the number of the trial that it copied its result from."""
TRAINED = "trained"
"""A fact of a trial: the settings that its batch size scales, as it was trained."""
VALUES = "values"
"""A fact of a trial: its values on each seed, if it was trained on several."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trial of a study."""

    number: int
    state: State
    parameters: Mapping[str, Any]
    value: float | None
    constraints: Mapping[str, float]
    facts: Mapping[str, Any]
    """The search's attributes of it: run, seconds, quality, samples/s, why it ended."""
    abandoned: bool = False
    """Whether it was interrupted: it counts as if it had never been, and is tried again."""

    @property
    def feasible(self) -> bool:
        """Return whether the trial is complete and violates no constraint."""
        return self.state == "COMPLETE" and all(
            violation <= 0 for violation in self.constraints.values()
        )

    @property
    def own(self) -> dict[str, Any]:
        """Return the settings that the experiment's own `search` varied, or a knob added."""
        # A trial trains with other values of SCALED than were drawn.
        known = (BATCH_INDEX, DEVICES, FACTOR, PRECISION, SPEED, *SCALED)
        found = {name: value for name, value in self.parameters.items() if name not in known}
        return {**found, **self.facts.get(TRAINED, {})}

    @property
    def rank(self) -> float:
        """Return its value to sort by: infinite for a trial without one."""
        return math.inf if self.value is None else self.value

    @property
    def has_ended(self) -> bool:
        """Return whether it has ended, in whatever way."""
        return self.state in ("COMPLETE", "PRUNED", "FAIL")

    @property
    def counts(self) -> bool:
        """Return whether it has a result of its own, or failed."""
        return self.has_ended and not self.abandoned and REPEAT not in self.facts


class Trials(Sequence[Trial]):
    """All trials of a study, by number.

    A search asks for each trial what all others have shown. So no answer takes longer if there are
    more of them.
    """

    def __init__(self, trials: Iterable[Trial] = ()) -> None:
        self._trials: list[Trial] = []
        self._alike: dict[Hashable, set[int]] = {}
        self._complete: list[tuple[bool, float, int]] = []
        self.open, self.taken, self.abandoned = set[int](), set[int](), set[int]()
        """Numbers: of trials that have not ended, that the budget pays for, that are abandoned."""
        self.factors: list[float] = []
        """The factors of the learning rate of the taken trials, ascending."""
        self.values: dict[int, Sequence[float]] = {}
        """The values of the trials that were trained on several seeds, by number."""
        self.fastest: dict[int | None, Trial] = {}
        """The best feasible trial on each number of devices. None: the search varies none."""
        for trial in trials:
            self.put(trial)

    def __len__(self) -> int:
        return len(self._trials)

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._trials)

    @overload
    def __getitem__(self, index: int) -> Trial: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Trial]: ...
    def __getitem__(self, index: int | slice) -> Trial | Sequence[Trial]:
        return self._trials[index]

    def put(self, trial: Trial) -> None:
        """Add the next trial, or replace what was known of it."""
        number = trial.number
        if number == len(self._trials):
            self._trials.append(trial)
            self.open.add(number)
        else:
            self._forget(self._trials[number])
            self._trials[number] = trial
        self._alike.setdefault(_key(trial.parameters), set()).add(number)
        if trial.abandoned:
            self.abandoned.add(number)
        if trial.has_ended:
            self.open.discard(number)
        if trial.counts or trial.state == "RUNNING":
            self.taken.add(number)
            if FACTOR in trial.parameters:
                bisect.insort(self.factors, float(trial.parameters[FACTOR]))
        if trial.counts and VALUES in trial.facts:
            self.values[number] = trial.facts[VALUES]
        if trial.state == "COMPLETE":
            bisect.insort(self._complete, _order(trial))
        if trial.feasible:
            devices = trial.parameters.get(DEVICES)
            best = self.fastest.get(devices, trial)
            self.fastest[devices] = min(best, trial, key=lambda one: one.rank)

    def _forget(self, trial: Trial) -> None:
        self._alike[_key(trial.parameters)].remove(trial.number)
        self.values.pop(trial.number, None)
        if trial.number in self.taken:
            self.taken.remove(trial.number)
            if FACTOR in trial.parameters:
                factor = float(trial.parameters[FACTOR])
                del self.factors[bisect.bisect_left(self.factors, factor)]
        if trial.state == "COMPLETE":
            del self._complete[bisect.bisect_left(self._complete, _order(trial))]

    def alike(self, parameters: Mapping[str, Any]) -> list[Trial]:
        """Return the trials with these parameters, by number."""
        return [self[number] for number in sorted(self._alike.get(_key(parameters), ()))]

    def is_taken(self, parameters: Mapping[str, Any]) -> bool:
        """Return whether the budget pays for a trial with these parameters."""
        return not self.taken.isdisjoint(self._alike.get(_key(parameters), ()))

    def ranked(self) -> Iterator[Trial]:
        """Yield the complete trials: the feasible ones first, of each kind the best first."""
        return (self[number] for _, _, number in self._complete)

    def misses(self) -> Iterator[Trial]:
        """Yield the complete trials that are not feasible, the best value first."""
        first = bisect.bisect_left(self._complete, (True,))
        return (self[self._complete[at][2]] for at in range(first, len(self._complete)))


def _order(trial: Trial) -> tuple[bool, float, int]:
    return not trial.feasible, trial.rank, trial.number


def _key(value: Any) -> Hashable:
    """Return what is equal for equal parameters. A choice among lists is stored as lists."""
    if isinstance(value, Mapping):
        return frozenset((name, _key(one)) for name, one in value.items())
    return tuple(map(_key, value)) if isinstance(value, list | tuple) else value

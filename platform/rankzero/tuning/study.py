"""The study: Optuna decides what to try and when to stop a trial, and stores both.

Only this file, study_store.py and reports/optuna_figures.py import Optuna. The study has a store
of its own, never MLflow's. The sampler of each trial gets the study's seed plus the trial's number
as its seed, so an interrupted study continues with the draws that it would have made.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from rankzero.config.renamed import with_new_names
from rankzero.errors import UserError
from rankzero.redaction.text import url_without_secrets
from rankzero.search_ranges import Choice, Integer, LogUniform, Range, Uniform
from rankzero.tuning.members import MEMBER, Members
from rankzero.tuning.objective import MEMORY, QUALITY
from rankzero.tuning.options import Pruner, Sampler
from rankzero.tuning.store_locks import journal_of
from rankzero.tuning.study_store import one_transaction, open_store
from rankzero.tuning.trial import REPEAT, State, Trial, Trials

# Trials are compared each twelfth of the reference's training time, from a quarter on. Before
# that, a warm-up or a large batch's few first steps say little.
RUNGS, FIRST_RUNG = 12, 3
_STARTUP_TRIALS = 6  # drawn at random, or given, before the sampler's model is used
_LARGEST_SEED = 0xFFFFFFFF  # of NumPy's random numbers, which samplers draw with
_GRID_POINTS = 5  # of a range that is not a list
_MOST_INTEGERS = 100  # of a range that a grid has all integers of
_DRAWING_SECONDS = 60.0  # at most, from a trial's creation until its owner's name is stored
OWNER = "owner"
"""The attribute of a trial that names the process that runs it."""
_ABANDONED, _ABANDONED_LIST = "abandoned ", "abandoned"  # older versions stored one list


class Study:
    """An open study. Several processes, on several machines, may share one."""

    def __init__(
        self,
        study: optuna.Study,
        store: optuna.storages.BaseStorage,
        url: str,
        sampler: Sampler,
        seed: int,
    ) -> None:
        self._study, self._store, self._sampler, self._seed = study, store, sampler, seed
        self.name: str = study.study_name
        self.members = Members(self.name, url)
        self._distributions: dict[str, BaseDistribution] = {}
        self.known = Trials()
        """All trials as of the last look at the database, and what this process did since."""
        self._open: dict[int, optuna.Trial] = {}
        """The trials of this process."""
        # By this process's clock: another machine's may differ.
        self._ownerless_since: dict[int, float] = {}

    def draw_from(self, space: Mapping[str, Range]) -> None:
        """Set the ranges that trials are drawn from. All processes must set the same ones."""
        self._distributions = {name: _distribution(range_) for name, range_ in space.items()}

    def ask(self, parameters: Mapping[str, Any] | None = None) -> int:
        """Start the next trial; return its number.

        Without parameters, the sampler draws them, seeded by the number of known trials.
        """
        while True:
            # Another process may take this one for dead, and end the trial while it is drawn.
            with contextlib.suppress(UpdateFinishedTrialError):
                self._study.sampler = self._next_sampler(parameters)
                # The reference has no settings of speed, so it lacks that parameter.
                names = self._distributions if parameters is None else parameters
                trial = self._study.ask(
                    {name: one for name, one in self._distributions.items() if name in names}
                )
                trial.set_user_attr(OWNER, self.members.own_name)
                self._open[trial.number] = trial
                self.trials()
                return trial.number

    def _next_sampler(self, parameters: Mapping[str, Any] | None) -> optuna.samplers.BaseSampler:
        if parameters is None:
            seed = self._seed + len(self.known) - len(self.known.abandoned)
            sampler = _make_sampler(self._sampler, seed, self._distributions)
            if self._sampler != "gp":
                return sampler
            parameters = _drawn(sampler, self.known, self._distributions)
        return _fixed(_as_stored(dict(parameters)))

    def report(self, number: int, resource: int, value: float) -> bool:
        """Report a trial's progress at a common resource; return whether to prune the trial."""
        trial = self._open[number]
        try:
            trial.report(value, resource)
        except UpdateFinishedTrialError:
            # Other processes took this one for dead, and try the same configuration again.
            return True
        # By all trials that the database has, those of other processes included.
        return bool(trial.should_prune())

    def tell(
        self,
        number: int,
        state: State,
        value: float | None,
        constraints: Mapping[str, float],
        facts: Mapping[str, Any],
    ) -> None:
        """End a trial. `constraints`: the same keys for every COMPLETE or PRUNED trial.

        Does nothing if other processes took this one for dead: they have abandoned the trial.
        """
        trial, ended = self._open.pop(number), None
        with contextlib.suppress(UpdateFinishedTrialError), one_transaction(self._store):
            for name, fact in facts.items():
                trial.set_user_attr(name, fact)
            for key, violation in constraints.items():
                trial.set_constraint(key, violation)
            # `tell` calls the sampler. The grid's would stop a loop of Optuna's own, and raise
            # because there is none. The other samplers have nothing to do here.
            self._study.sampler = optuna.samplers.RandomSampler()
            value = value if state == "COMPLETE" else None
            ended = self._study.tell(trial, value, TrialState[state])
        if ended is not None:
            self.known.put(_trial(ended, is_abandoned=False))

    def note(self, name: str, fact: Any) -> None:
        """Store a fact about the study as a whole."""
        self._study.set_user_attr(name, fact)

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts that `note` stored."""
        return dict(self._study.user_attrs)

    def trials(self) -> Trials:
        """Look at the database; return all trials, by number: `known`."""
        stored, known = self._study.get_trials(deepcopy=False), self.known
        # Read after the trials: an interrupted trial ends first, and is abandoned then.
        abandoned = {number for number in self.abandoned if number < len(stored)}
        # A trial that has ended does not change any more, unless it is abandoned.
        changed = known.open | (known.abandoned ^ abandoned) | {*range(len(known), len(stored))}
        for number in sorted(changed):
            known.put(_trial(stored[number], number in abandoned))
        return known

    def untried_cells(self) -> list[dict[str, Any]]:
        """Return the cells of the grid over the ranges that no ended trial has. All are finite."""
        grid = {name: _grid_points(found) for name, found in self._distributions.items()}
        tried = [one.parameters for one in self.trials() if one.has_ended and not one.abandoned]
        cells = (dict(zip(grid, one, strict=True)) for one in itertools.product(*grid.values()))
        return [cell for cell in cells if not any(_equal(cell, one) for one in tried)]

    def recover(self) -> list[int]:
        """Abandon the trials of dead processes; return their numbers."""
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        others = [trial for trial in running if trial.number not in self._open]
        found = list[int]()
        for number in [trial.number for trial in others if not self._may_have_owner(trial)]:
            # Another process may recover the same trial at this moment.
            with contextlib.suppress(UpdateFinishedTrialError):
                self._study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
            # The owner may have ended its trial just before it left. Then it has a result.
            if self._study.get_trials(deepcopy=False)[number].state is TrialState.FAIL:
                self.abandon(number)
                found.append(number)
        return found

    def _may_have_owner(self, trial: optuna.trial.FrozenTrial) -> bool:
        if OWNER in trial.user_attrs:
            return self.members.is_alive(trial.user_attrs[OWNER])
        # The owner's name is stored a moment after the trial.
        now = time.monotonic()
        return now - self._ownerless_since.setdefault(trial.number, now) < _DRAWING_SECONDS

    @property
    def abandoned(self) -> list[int]:
        """Return the numbers of the trials that were interrupted, in order."""
        facts = self.facts
        numbers = (int(key.removeprefix(_ABANDONED)) for key in facts if key.startswith(_ABANDONED))
        return sorted({*numbers, *facts.get(_ABANDONED_LIST, ())})

    def abandon(self, number: int) -> None:
        """Note that a trial was interrupted: a process shall try its configuration again."""
        # One fact for each trial: processes that write one list at the same time would lose some.
        self.note(f"{_ABANDONED}{number}", True)


def open_study(storage: str, name: str, *, sampler: Sampler, pruner: Pruner, seed: int) -> Study:
    """Open the study of this name, or create it, as a member. Raises UserError."""
    with open_store(storage) as store:
        study = optuna.create_study(
            storage=store,
            study_name=name,
            direction="minimize",
            load_if_exists=True,
            pruner=_make_pruner(pruner),
        )
        found = Study(study, store, storage, sampler, seed)
        found.members.join()
        found.note(f"{MEMBER}{found.members.own_name}", time.time())
    return found


def find_study(storage: str, name: str) -> Study:
    """Open a study to read it. Raises UserError, with the names of the studies that exist."""
    journal = journal_of(storage)
    if journal is not None and not journal.exists():
        raise UserError(f"there is no file {journal}")  # Optuna would create it.
    with open_store(storage) as store:
        names = optuna.get_all_study_names(store)
        if name not in names:
            known = f"there are {', '.join(sorted(names))}" if names else "there are none yet"
            raise UserError(
                f"no study is called {name!r} in {url_without_secrets(storage)}; {known}"
            )
        return _loaded(store, storage, name)


def decided_studies(storage: str, facts: Mapping[str, Any], verdict: str) -> list[str]:
    """Return the studies with these facts and one called `verdict`, by name, the newest last."""
    with open_store(storage) as store:
        return [
            one.study_name
            for one in store.get_all_studies()
            if verdict in one.user_attrs and all(one.user_attrs.get(k) == facts[k] for k in facts)
        ]


def _loaded(store: optuna.storages.BaseStorage, url: str, name: str) -> Study:
    return Study(optuna.load_study(study_name=name, storage=store), store, url, "random", 0)


def delete_study(storage: str, name: str) -> None:
    """Delete a study with its trials, if there is one. Raises UserError while it is searched."""
    with open_store(storage) as store:
        if name not in optuna.get_all_study_names(store):
            return
        study = _loaded(store, storage, name)
        known = [key.removeprefix(MEMBER) for key in study.facts if key.startswith(MEMBER)]
        with contextlib.closing(study.members) as members:
            if any(map(members.is_alive, known)):
                raise UserError(f"processes still search the study {name}: stop them first")
        optuna.delete_study(study_name=name, storage=store)


def _trial(stored: optuna.trial.FrozenTrial, is_abandoned: bool) -> Trial:
    is_complete = stored.state is TrialState.COMPLETE
    return Trial(
        number=stored.number,
        state=cast("State", stored.state.name),
        parameters=with_new_names(stored.params),
        # A pruned trial's value is its last report, which no objective has.
        value=stored.value if is_complete else None,
        constraints=dict(stored.constraints),
        facts=dict(stored.user_attrs),
        abandoned=is_abandoned,
    )


def _distribution(range_: Range) -> BaseDistribution:
    match range_:
        case Choice(options):
            return CategoricalDistribution([_as_stored(option) for option in options])
        case Uniform(low, high):
            return FloatDistribution(low, high)
        case LogUniform(low, high):
            return FloatDistribution(low, high, log=True)
        case Integer(low, high):
            return IntDistribution(low, high)


def _as_stored(value: Any) -> Any:
    """Return the value as a database returns it, which has lists for tuples.

    Optuna refuses a choice among tuples in a study that has them as lists.
    """
    if isinstance(value, dict):
        return {name: _as_stored(one) for name, one in value.items()}
    return [_as_stored(one) for one in value] if isinstance(value, list | tuple) else value


def _make_sampler(
    name: Sampler, seed: int, distributions: Mapping[str, BaseDistribution]
) -> optuna.samplers.BaseSampler:
    seed &= _LARGEST_SEED
    match name:
        case "tpe":
            return optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)
        case "gp":
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)
        case "random":
            return optuna.samplers.RandomSampler(seed=seed)
        case "grid":
            grid = {key: _grid_points(found) for key, found in distributions.items()}
            # One seed for all trials: the order must stay, because the study stores what is done.
            with warnings.catch_warnings():
                # It warns of a choice among lists, and stores it as JSON.
                warnings.simplefilter("ignore", UserWarning)
                return optuna.samplers.GridSampler(grid, seed=0)


def _drawn(
    sampler: optuna.samplers.BaseSampler, trials: Trials, space: dict[str, BaseDistribution]
) -> dict[str, Any]:
    """Return what the sampler draws if all ended trials without a value have the worst one."""
    # Optuna's Gaussian process ignores such trials, and would draw one of them again and again.
    study = optuna.create_study(sampler=sampler)
    worst = max((one.value for one in trials if one.value is not None), default=0.0)
    for one in trials:
        # A copy of a running trial has no result, and the reference may lack parameters.
        is_left_out = one.abandoned or (REPEAT in one.facts and one.state == "FAIL")
        if not is_left_out and space.keys() <= one.parameters.keys():
            known = optuna.trial.create_trial(
                state=TrialState.COMPLETE if one.has_ended else TrialState.RUNNING,
                value=worst if one.has_ended and one.value is None else one.value,
                params={name: _within(space[name], one.parameters[name]) for name in space},
                distributions=space,
                constraints={QUALITY: 1.0, MEMORY: 0.0, **one.constraints},
            )
            study.add_trial(known)
    return study.ask(space).params


def _within(found: BaseDistribution, value: Any) -> Any:
    """Return the value in its range, or the nearest end: the user's own may lie outside."""
    if isinstance(found, FloatDistribution | IntDistribution):
        return min(max(found.low, value), found.high)
    return value


def _fixed(parameters: Mapping[str, Any]) -> optuna.samplers.BaseSampler:
    """Return a sampler that draws these parameters."""
    # Not Optuna's queue of trials: two processes may get the same trial of SQLite's queue.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental, for years
        rest = optuna.samplers.RandomSampler()
        return optuna.samplers.PartialFixedSampler(dict(parameters), rest)


def _make_pruner(name: Pruner) -> optuna.pruners.BasePruner:
    """Return a pruner. Its resource is the rung that `Study.report` gets."""
    first = FIRST_RUNG
    match name:
        case "asha":
            return optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=3)
        case "hyperband":
            return optuna.pruners.HyperbandPruner(first, max_resource=RUNGS, reduction_factor=2)
        case "median":
            return optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=first)
        case "none":
            return optuna.pruners.NopPruner()


def _grid_points(found: BaseDistribution) -> Sequence[Any]:
    parts = [step / (_GRID_POINTS - 1) for step in range(_GRID_POINTS)]
    match found:
        case CategoricalDistribution():
            return found.choices
        case IntDistribution(low=low, high=high):
            several = [round(low + (high - low) * part) for part in parts]
            return range(low, high + 1) if high - low < _MOST_INTEGERS else several
        case FloatDistribution(low=low, high=high, log=True):
            return [low * (high / low) ** part for part in parts]
        case FloatDistribution(low=low, high=high):
            return [low + (high - low) * part for part in parts]
        case _:
            raise TypeError(type(found).__name__)


def _equal(cell: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two cells are one. A range's points are computed, so they may be a bit off."""
    return all(
        value == other[name]
        or ({type(value), type(other[name])} == {float} and math.isclose(value, other[name]))
        for name, value in cell.items()
        if name in other
    )

"""Optuna, and the only file that imports it: what to try next, when to stop trying, everything on disk.

The study lives in a database of its own, never MLflow's. Each trial is drawn by a sampler seeded with the study's seed
and the trial's number, so a study that was interrupted goes on with what it would have drawn without.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState

from rankzero.config.renamed import with_new_names
from rankzero.errors import UserError
from rankzero.experiment import Choice, Integer, LogUniform, Range, Uniform
from rankzero.mlflow_store.uris import require_plain
from rankzero.redaction.text import text_without_secrets, url_without_secrets
from rankzero.tuning import members
from rankzero.tuning.trial import State, Trial

SAMPLERS = ("tpe", "gp", "random", "grid")
PRUNERS = ("asha", "hyperband", "median", "none")
# Trials are compared each twelfth of the reference's training time, from a quarter on: before that, a warm-up
# or a large batch's few first steps say little.
RUNGS, FIRST_RUNG = 12, 3
STARTUP_TRIALS = 6  # drawn at random, those given included, before the sampler's model is trusted
ASKING_SECONDS = (
    60.0  # from a trial's first trace in the database until its owner's name is there, at most
)
GRID_POINTS = 5  # of a range that is not a list
OWNER, ABANDONED = "owner", "abandoned "
ABANDONED_BEFORE = "abandoned"  # a list, in studies of older versions


class Study:
    """A study that is open. Several processes, on several machines, may share one."""

    def __init__(self, study: optuna.Study, sampler: str, seed: int) -> None:
        self._study, self._sampler, self._seed = study, sampler, seed
        self._distributions: dict[str, BaseDistribution] = {}
        self._open: dict[int, optuna.Trial] = {}
        self._ownerless: dict[int, float] = {}
        """Trials that are being drawn -> when they were first seen, by this process's clock: others' may differ."""
        self.members = members.Members(self)

    @property
    def name(self) -> str:
        return str(self._study.study_name)

    def draw_from(self, space: Mapping[str, Range]) -> None:
        """Set the ranges that trials are drawn from: before the first `ask`, the same in all processes."""
        self._distributions = {name: distribution(range_) for name, range_ in space.items()}

    def ask(self, parameters: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Return the next trial's number and parameters: these, or what the sampler draws."""
        while True:
            with contextlib.suppress(
                optuna.exceptions.UpdateFinishedTrialError
            ):  # others took this process for dead
                return self._asked(parameters)

    def _asked(self, parameters: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
        self._study.sampler = self._drawing() if parameters is None else given(parameters)
        trial = self._study.ask(self._distributions)
        trial.set_user_attr(OWNER, members.name())
        self._open[trial.number] = trial
        return trial.number, dict(trial.params)

    def _drawing(self) -> optuna.samplers.BaseSampler:
        drawn = len(self._study.get_trials(deepcopy=False)) - len(self.abandoned)
        return make_sampler(self._sampler, self._seed + drawn, self._distributions)

    def report(self, number: int, resource: int, value: float) -> bool:
        """Note a trial's progress at a common resource; return whether it should be pruned."""
        trial = self._open[number]
        try:
            trial.report(value, resource)
        except optuna.exceptions.UpdateFinishedTrialError:
            return True  # others took this process for dead, and try the same again
        return bool(trial.should_prune())

    def tell(
        self,
        number: int,
        state: State,
        value: float | None,
        constraints: Mapping[str, float],
        facts: Mapping[str, Any],
    ) -> None:
        """End a trial. `constraints`: the same keys for every trial that is COMPLETE or PRUNED.

        Nothing happens where others took this process for dead: the trial is abandoned, and tried again.
        """
        trial = self._open.pop(number)
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            self._tell(trial, state, value, constraints, facts)

    def _tell(
        self,
        trial: optuna.Trial,
        state: State,
        value: float | None,
        constraints: Mapping[str, float],
        facts: Mapping[str, Any],
    ) -> None:
        for name, fact in facts.items():
            trial.set_user_attr(name, fact)
        for key, violation in constraints.items():
            trial.set_constraint(key, violation)
        # The grid's sampler would stop a loop that is not Optuna's, and raise; the others have nothing to do here.
        self._study.sampler = optuna.samplers.RandomSampler()
        self._study.tell(trial, value if state == "COMPLETE" else None, TrialState[state])

    def note(self, name: str, fact: Any) -> None:
        """Keep a fact about the study as a whole."""
        self._study.set_user_attr(name, fact)

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self._study.user_attrs)

    def trials(self) -> list[Trial]:
        """Return all trials, by number."""
        return [_trial(found) for found in self._study.get_trials(deepcopy=False)]

    def recover(self) -> list[int]:
        """Fail the trials of dead processes, and return their numbers: they are abandoned."""
        dead = [
            found
            for found in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if found.number not in self._open and not self._is_being_done(found)
        ]
        for found in dead:
            with contextlib.suppress(
                optuna.exceptions.UpdateFinishedTrialError
            ):  # another process does this, too
                self._study.tell(found.number, state=TrialState.FAIL, skip_if_finished=True)
            self.abandon(found.number)
        return [found.number for found in dead]

    def _is_being_done(self, found: optuna.trial.FrozenTrial) -> bool:
        """Tell whether somebody is at a trial; whose it is, is known a moment after it is there."""
        if OWNER in found.user_attrs:
            return self.members.live(found.user_attrs[OWNER])
        return (
            time.monotonic() - self._ownerless.setdefault(found.number, time.monotonic())
            < ASKING_SECONDS
        )

    @property
    def abandoned(self) -> list[int]:
        """Return the trials that count as if they had never been, by number."""
        facts = self.facts
        told = (int(name.removeprefix(ABANDONED)) for name in facts if name.startswith(ABANDONED))
        return sorted({*told, *facts.get(ABANDONED_BEFORE, ())})

    def abandon(self, number: int) -> None:
        """Note that a trial was interrupted: it is to be tried again, as if it had never been.

        A fact for each, so that processes that note this at the same time lose none.
        """
        self.note(f"{ABANDONED}{number}", True)

    def importances(self) -> dict[str, float]:
        """Return how much of the value's variance each parameter explains; empty where that cannot be said."""
        with contextlib.suppress(
            Exception
        ):  # too few trials, or all alike: as many exceptions as evaluators
            return dict(optuna.importance.get_param_importances(self._study))
        return {}


def default_storage(root: Path) -> str:
    """Return the URL of the embedded database of studies. Raises TrackingError where a URL would mean another."""
    path = root.absolute() / "studies.db"
    require_plain(path)
    return f"sqlite:///{path}"


def open_study(storage: str, name: str, *, sampler: str, pruner: str, seed: int) -> Study:
    """Open the study of this name, made where there is none. Raises UserError where the storage cannot be used."""
    with _told(storage):
        study = optuna.create_study(
            storage=_storage(storage),
            study_name=name,
            direction="minimize",
            load_if_exists=True,
            pruner=make_pruner(pruner),
        )
    return Study(study, sampler, seed)


def find_study(storage: str, name: str) -> Study:
    """Open a study to read it. Raises UserError, naming those there are."""
    with _told(storage):
        names = optuna.get_all_study_names(_storage(storage))
        if name not in names:
            known = f"there are {', '.join(sorted(names))}" if names else "there are none yet"
            raise UserError(
                f"no study is called {name!r} in {url_without_secrets(storage)}; {known}"
            )
        return Study(optuna.load_study(study_name=name, storage=_storage(storage)), "random", 0)


def distribution(range_: Range) -> BaseDistribution:
    """Return Optuna's word for a range."""
    match range_:
        case Choice(options):
            return CategoricalDistribution(options)
        case Uniform(low, high):
            return FloatDistribution(low, high)
        case LogUniform(low, high):
            return FloatDistribution(low, high, log=True)
        case Integer(low, high):
            return IntDistribution(low, high)


def make_sampler(
    name: str, seed: int, distributions: Mapping[str, BaseDistribution]
) -> optuna.samplers.BaseSampler:
    """Return a sampler; `random` and the start of the others draw uniformly."""
    match name:
        case "tpe":
            return optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
        case "gp":
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
        case "random":
            return optuna.samplers.RandomSampler(seed=seed)
        case "grid":
            return optuna.samplers.GridSampler(
                {key: _grid(found) for key, found in distributions.items()}, seed=0
            )  # one order for all trials: it remembers by the study what is done
        case _:
            raise UserError(f"no sampler is called {name!r}: choose {' | '.join(SAMPLERS)}")


def given(parameters: Mapping[str, Any]) -> optuna.samplers.BaseSampler:
    """Return what draws these. Not Optuna's queue: of SQLite's, two processes may get the same trial."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental, for years
        return optuna.samplers.PartialFixedSampler(
            dict(parameters), optuna.samplers.RandomSampler()
        )


def make_pruner(name: str) -> optuna.pruners.BasePruner:
    """Return a pruner; its resource is one of `Study.report`'s."""
    match name:
        case "asha":
            return optuna.pruners.SuccessiveHalvingPruner(
                min_resource=FIRST_RUNG, reduction_factor=3
            )
        case "hyperband":
            return optuna.pruners.HyperbandPruner(
                min_resource=FIRST_RUNG, max_resource=RUNGS, reduction_factor=2
            )
        case "median":
            return optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=FIRST_RUNG)
        case "none":
            return optuna.pruners.NopPruner()
        case _:
            raise UserError(f"no pruner is called {name!r}: choose {' | '.join(PRUNERS)}")


def _grid(found: BaseDistribution) -> Sequence[Any]:
    match found:
        case CategoricalDistribution():
            return list(found.choices)
        case IntDistribution():
            return list(range(found.low, found.high + 1, found.step))
        case FloatDistribution(low=low, high=high) if found.log and low > 0:
            return [low * (high / low) ** (i / (GRID_POINTS - 1)) for i in range(GRID_POINTS)]
        case FloatDistribution(low=low, high=high):
            return [low + (high - low) * i / (GRID_POINTS - 1) for i in range(GRID_POINTS)]
        case _:
            raise TypeError(type(found).__name__)


def _storage(url: str) -> optuna.storages.RDBStorage:
    timeout = {"connect_args": {"timeout": 30}} if url.startswith("sqlite") else {}
    return optuna.storages.RDBStorage(url, engine_kwargs=timeout)


@contextlib.contextmanager
def _told(storage: str) -> Iterator[None]:
    """Turn what a locked, foreign or unreachable database raises into one message."""
    optuna.logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UserError:
        raise
    except Exception as error:  # sqlalchemy's, alembic's, Optuna's own: there is no common root
        first = (str(error).splitlines() or [repr(error)])[0]
        raise UserError(
            f"the study database {url_without_secrets(storage)} cannot be used: {text_without_secrets(first)}; "
            "nothing was changed. Choose another with --storage (it must not be MLflow's)"
        ) from error


def _trial(found: optuna.trial.FrozenTrial) -> Trial:
    state: Any = found.state.name
    return Trial(
        found.number,
        state,
        with_new_names(found.params),
        found.value if found.state is TrialState.COMPLETE else None,
        dict(found.constraints),
        dict(found.user_attrs),
    )

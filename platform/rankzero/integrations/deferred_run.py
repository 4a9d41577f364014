"""A run that starts when a framework logs first, for the adapters."""

from __future__ import annotations

import functools
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any

from rankzero.errors import UserError
from rankzero.experiment import Goal
from rankzero.integrations.own_loop.logged_files import text_name
from rankzero.integrations.own_loop.process_end import Stopped
from rankzero.integrations.own_loop.track import track
from rankzero.integrations.own_loop.tracked_run import OPEN, TrackedRun

_Place = tuple[int, list[str]]
"""A thread, and the names of the functions on its stack."""


class DeferredRun:
    """A `TrackedRun` that collects its params until it starts. Safe on every rank.

    `options`: those of `rankzero.track`.
    """

    def __init__(self, experiment: str, **options: Any) -> None:
        self._experiment, self._options = experiment, options
        self._params: dict[str, Any] = {}
        self._run: TrackedRun | None = None
        self._pid = 0
        """The process that began the run."""
        self._has_trained = False
        self.ahead = 0
        """By how much the steps of the run are ahead of those that the framework counts."""
        self.next_ahead: int | None = None
        """The same for the next training, if it continues a checkpoint that has the number."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs to continue the run as a new attempt."""
        # One process writes a run: from now on, the process that is spawned with the copy.
        moves = get_spawning_popen() is not None and not _loads_data()
        if moves:
            self.end()
        options = self._options if self._run is None else {**self._options, "name": self._run.name}
        state = {**vars(self), "_options": options, "_run": None}
        # A strategy spawns processes to train there, or to test.
        self._has_trained |= moves
        return state

    @property
    def has_trained(self) -> bool:
        """Whether this process has begun a training, or one that it has started."""
        return self._has_trained or (self._run is not None and self._run.was_elsewhere)

    @property
    def is_over(self) -> bool:
        """Whether the newest training has ended."""
        return self.has_trained and not (self._run is not None and self._run.trains)

    @property
    def goal(self) -> Goal:
        """The run's goal."""
        return self._options.get("goal") or Goal()

    def add_params(self, params: Mapping[str, Any]) -> None:
        """Add params, also to a run that has started."""
        self._params |= dict(params)
        if self._run is not None:
            self._run.log_params(params)

    @property
    def name(self) -> str | None:
        """The run's name, which starts it if it has not started; None on other ranks than 0."""
        return (self._run or self.begin()).name

    @property
    def has_begun(self) -> bool:
        """Whether the run has started, be it that it has ended since."""
        return self._run is not None

    def begin(self) -> TrackedRun:
        """Return the run, started if it has not started, and as a new attempt if it has ended."""
        if self._run is None:
            self._run = track(self._experiment, self._params, **self._options)
            self._run.is_owned, self._pid = True, os.getpid()
        self._run.reopen()
        return self._run

    def begin_training(self, step: int = 0, call: object = None) -> TrackedRun:
        """Return the run as `begin` does, for a training that continues from the step.

        A second training that begins at step 0 counts on from the steps of the first. Otherwise its
        metrics would have two values at a step. `call`: what all callbacks of one call of the
        framework share.

        Raises UserError in a fork of the process that has the run open: everything would be lost.
        """
        self.end_unreported()
        stack = traceback.walk_stack(sys._getframe())
        place = threading.get_ident(), [frame.f_code.co_name for frame, _ in stack]
        for other in list(OPEN.values()):
            if other is not self._run:
                other.end_left(place, call)
        run = self.begin()
        run.end_left = functools.partial(self._end_left, place, call)
        if run.name is not None and self._pid != os.getpid() and not run.reopen():
            raise UserError(
                f"{run.name} is open in process {self._pid}, which forked this one: call the run's "
                "finish() before the training, which continues it"
            )
        ahead, self.next_ahead = self.next_ahead, None
        if self.has_trained and step == 0:
            # The newest step may be that of a fold, or an epoch.
            self.ahead = run.highest_step
        elif ahead is not None:
            self.ahead = ahead
        self._has_trained = run.trains = True
        return run

    def _end_left(self, place: _Place, call: object, new_place: _Place, new_call: object) -> None:
        """End a training of this thread whose exception was caught, or what came after one."""
        # Another thread may be within its training.
        if new_place[0] != place[0]:
            return
        # A training within another one has the functions of both on its stack. Two callbacks in one
        # call have the same ones.
        if new_place == place and (call is None or new_call is not call):
            self.end_unreported()
            # Its framework reports no end, and without a call two may be callbacks of one training.
            if call is not None and self._run is not None and self._run.trains:
                self.end(Stopped("a later training"))
        self.end_if_over()

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics at the framework's step. A text becomes an artifact in ``text/``."""
        at = None if step is None else step + self.ahead
        self.begin().log(self._numbers(values, at), at)

    def _numbers(self, values: Mapping[str, Any], at: int | None) -> dict[str, Any]:
        """Return the values without the texts, which become artifacts."""
        for name, value in values.items():
            if isinstance(value, str):
                self.begin().log_text(value, text_name(name, at))
        return {name: value for name, value in values.items() if not isinstance(value, str)}

    def evaluated(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log validation metrics at the framework's step, or as `final` ones."""
        metrics, step = self.final(metrics, step)
        at = step + self.ahead
        self.begin().evaluated(self._numbers(metrics, at), at)

    def final(self, metrics: Mapping[str, Any], step: int) -> tuple[Mapping[str, Any], int]:
        """Return metrics and their step, under ``final/`` if a training before evaluated the step.

        They may be those of the best weights, and the first value of a step counts.
        """
        run = self.begin()
        if run.trains or (step and not self.has_trained):
            return metrics, step
        # Another Trainer, and another process, count from 0.
        step = step or run.highest_step - self.ahead
        if (at := step + self.ahead) and run.had(metrics, at):
            metrics = {f"final/{name}": value for name, value in metrics.items()}
        return metrics, step

    def checkpoint(
        self, state_dict: Mapping[str, Any], step: int, metrics: Mapping[str, Any]
    ) -> None:
        """Keep a checkpoint of the framework's step."""
        self.begin().checkpoint(state_dict, step + self.ahead, metrics)

    def end(self, error: BaseException | None = None) -> None:
        """End the run, or its newest attempt: FINISHED, or as `error` demands."""
        if self._run is not None:
            self._run.finish(error)

    def end_if_over(self) -> None:
        """End the attempt of what came after a training, such as an evaluation."""
        if self.is_over:
            self.end()

    def end_unreported(self) -> None:
        """End a training whose end the framework has not reported, since it raised an exception."""
        if self._run is not None and self._run.unless_ended is not None:
            self._run.finish(self._run.unless_ended)


def _loads_data() -> bool:
    """Return whether a `DataLoader` spawns the process. Its data set may hold the trainer."""
    frames = traceback.walk_stack(sys._getframe())
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in frames)
    return any(module.startswith(("torch.utils.data.", "torchdata.")) for module in modules)

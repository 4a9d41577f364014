"""Reports of the training: the metrics of every step, and the speed, about once a second."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rankzero.events import Event, Noticed, StepsLogged
from rankzero.metric_names import DATA_WAIT, SPEED, STEP_SECONDS
from rankzero.training.job import State, TrainingContext
from rankzero.training.metrics.derived import derived_columns
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.metrics.window import (
    WindowStats,
    check_names,
    metrics_checksum,
    reduce_window,
    refuse_differing,
)
from rankzero.training.optimization.optimizers import learning_rates
from rankzero.training.stop import LONGEST_WINDOW, StopCode, next_interval


class Reporter:
    """Collects steps in windows of about a second, and reports each window.

    `train.log_every` is the number of steps between reports of the speed. `data_wait`: returns this
    rank's seconds of waiting for data since its last call.
    """

    def __init__(
        self,
        job: TrainingContext,
        state: State,
        totals: RunTotals,
        data_wait: Callable[[], float],
    ) -> None:
        self._job, self._state, self._totals, self._data_wait = job, state, totals, data_wait
        # Each metric's values since the last report: 0-d, and [2] or [2, n] of a `Ratio`. They stay
        # on the device.
        self._columns: dict[str, list[Tensor]] = {}
        # The number of columns: each step compares with it, and saves a call.
        self._count = 0
        self._is_compared = False
        # The first window is one step: nobody knows yet how long a step takes.
        self._interval = 1
        self._unreported_speed: WindowStats | None = None
        # The suspended seconds of this process until this window.
        self._suspended_before = 0.0
        # Those of a step in the last window without a suspension.
        self._step_seconds = math.inf

    def start_window(self) -> None:
        """Start the clock of the next window on all ranks at once. Collective.

        An evaluation or a checkpoint before it does not count.
        """
        self._times: list[float] = []
        # Else the others' next step waits for rank 0's checkpoint, and they seem to compute slowly.
        self._job.world.all(True)
        self._start = self._job.world.now()
        self._suspended_before = self._job.suspended()

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add one step's metrics, which stay on the device."""
        if not self._columns:
            # Each turn has a loss of its own.
            first = () if self._job.experiment.turns else ("loss",)
            self._columns = {name: [] for name in (*first, *metrics)}
            self._count = len(self._columns)
        try:
            for name, column in self._columns.items():
                column.append(metrics[name])
            is_same = len(metrics) == self._count
        except KeyError:
            is_same = False
        if not is_same:
            check_names(metrics.keys(), self._columns.keys())
        self._times.append(time.time())

    @property
    def is_full(self) -> bool:
        """Whether the window has as many steps as fit into about a second."""
        return len(self._times) >= self._interval

    def report(self, stop_code: StopCode, *, actions_due: bool) -> tuple[WindowStats, list[Event]]:
        """Return what every rank knows of the window now, and the events to emit. Collective.

        `stop_code`: this rank's. `actions_due`: an evaluation or a checkpoint follows, whose time
        must not enter the speed of the steps before it.
        """
        job, state = self._job, self._state
        # All ranks know of any rank's suspension, so all choose the same next interval.
        window = self._reduced(stop_code).without_suspension(self._step_seconds)
        if not window.suspended_seconds:
            self._step_seconds = window.step_seconds
        self._columns = {name: [] for name in self._columns}
        steps = range(state.step - window.steps + 1, state.step + 1)
        derived = derived_columns(job.experiment, window.values, window.quotients)
        values = {**window.values, **derived}
        columns = {f"train/{name}": column for name, column in values.items()}
        events: list[Event] = [StepsLogged(list(steps), self._times, columns)]

        # Values are reported with each window, the speed once a `log_every`, as a mean over
        # windows.
        speed = window
        if self._unreported_speed is not None:
            speed = self._unreported_speed.and_then(window)
        log_every = job.experiment.train.log_every
        steps_left = (log_every or 0) - speed.steps
        if steps_left > 0 and not (actions_due or window.stop_code) and window.is_finite:
            self._unreported_speed = speed
        else:
            samples = job.batch_order.samples_of(state.step, speed.steps)
            rates = job.work_meter.rates(speed.tokens, speed.seconds)
            if seconds := speed.suspended_seconds:
                text = f"the job stood still for {seconds:.0f} s or more: its times leave it out"
                events.append(Noticed(time.time(), text))
            self._totals.add(speed, samples, rates, was_suspended=seconds > 0)
            events.append(self._speed_event(speed, samples, rates))
            self._unreported_speed, steps_left = None, log_every or LONGEST_WINDOW
        # A window is short even if `log_every` is large: the ranks learn of a request to stop only
        # with a report.
        self._interval = next_interval(self._interval, window.step_seconds, steps_left)
        return window, events

    def _reduced(self, stop_code: StopCode) -> WindowStats:
        """Return the window over all ranks. Collective. Raises UserError as `refuse_differing`."""
        job = self._job
        seconds = job.world.now() - self._start
        # Once, because `add` refuses others later. The sum over ranks adds by position.
        if not self._is_compared:
            shapes = {name: column[0].shape for name, column in self._columns.items()}
            if differing := job.world.ranks_that_differ(torch.tensor([metrics_checksum(shapes)])):
                refuse_differing(job.world, shapes, differing[0], 0)
            self._is_compared = True
        window = reduce_window(
            job.world,
            self._columns,
            stop_code,
            seconds,
            self._data_wait(),
            job.forward_timer.read(),
            job.work_meter.read(),
            suspended_seconds=job.suspended() - self._suspended_before,
        )
        if not job.experiment.turns:
            return window
        losses = (window.values[f"{turn}/loss"] for turn in dict.fromkeys(job.experiment.turns))
        total = [sum(values) for values in zip(*losses, strict=True)]
        return dataclasses.replace(window, values={"loss": total, **window.values})

    def _speed_event(
        self, speed: WindowStats, samples: int, rates: Mapping[str, float]
    ) -> StepsLogged:
        values = {
            **{name: [lr] for name, lr in learning_rates(self._state.optimizer).items()},
            SPEED: [samples / speed.seconds],
            **{f"throughput/{name}": [rate] for name, rate in rates.items()},
            STEP_SECONDS: [speed.step_seconds],
            DATA_WAIT: [speed.data_wait_seconds / speed.seconds],
        }
        return StepsLogged([self._state.step], [self._times[-1]], values)

"""A run that starts when a framework logs first, for the adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankzero.integrations.own_loop.track import track
from rankzero.integrations.own_loop.tracked_run import TrackedRun


class DeferredRun:
    """A `TrackedRun` that collects its params until it starts. Safe on every rank.

    `options`: those of `rankzero.track`.
    """

    def __init__(self, experiment: str, **options: Any) -> None:
        self._experiment, self._options = experiment, options
        self._params: dict[str, Any] = {}
        self._run: TrackedRun | None = None
        self._has_trained = False
        self.offset = 0
        """Add it to the framework's steps."""

    def add_params(self, params: Mapping[str, Any]) -> None:
        """Add params, also to a run that has started."""
        self._params |= dict(params)
        if self._run is not None:
            self._run.log_params(params)

    @property
    def name(self) -> str | None:
        """The run's name; None before it starts, and on other ranks than 0."""
        return None if self._run is None else self._run.name

    def begin(self) -> TrackedRun:
        """Return the run, started if it has not started, and as a new attempt if it has ended."""
        if self._run is None:
            self._run = track(self._experiment, self._params, **self._options)
        self._run.reopen()
        return self._run

    def begin_training(self, step: int = 0) -> TrackedRun:
        """Return the run as `begin` does, for a training that continues from the step.

        A second training that begins at step 0 counts on from the steps of the first. Otherwise its
        metrics would have two values at a step.
        """
        self.end_unreported()
        run = self.begin()
        self.offset = run.step if self._has_trained and step == 0 else 0
        self._has_trained = True
        return run

    def end(self, error: BaseException | None = None) -> None:
        """End the run, or its newest attempt: FINISHED, or as `error` demands."""
        if self._run is not None:
            self._run.finish(error)

    def end_unreported(self) -> None:
        """End a training whose end the framework has not reported, since it raised an exception."""
        if self._run is not None and self._run.unless_ended is not None:
            self._run.finish(self._run.unless_ended)

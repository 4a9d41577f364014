"""A run that starts when a framework logs first, and that ends with the process at the latest."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from typing import Any

from rankzero.integrations.tracked_run import TrackedRun, track


class DeferredRun:
    """A `TrackedRun` that collects its params until it starts. Safe on every rank.

    `options`: those of `rankzero.track`. If nobody ends the run, the end of the process does: as
    FINISHED, or as FAILED with the exception that nobody caught.
    """

    def __init__(self, experiment: str, **options: Any) -> None:
        self._experiment, self._options = experiment, options
        self.unless_ended: BaseException | None = None
        """The error to assume instead of FINISHED, while a framework has yet to report an end."""
        self._params: dict[str, Any] = {}
        self._run: TrackedRun | None = None
        self._ended = False

    def add_params(self, params: Mapping[str, Any]) -> None:
        """Add params. A run that has started ignores them."""
        if self._run is None:
            self._params |= dict(params)

    @property
    def name(self) -> str | None:
        """The run's name; None before it starts, and on other ranks than 0."""
        return None if self._run is None else self._run.name

    def begin(self) -> TrackedRun:
        """Start the run if it has not started, and return it."""
        if self._run is None:
            self._run = track(self._experiment, self._params, **self._options)
            self._run.__enter__()
            # A script that just ends must not leave a run that seems to be running.
            atexit.register(self.end_unreported)
        return self._run

    def end(self, error: BaseException | None = None) -> None:
        """End the run: FINISHED, or as `error` demands. The first call counts."""
        if self._run is not None and not self._ended:
            self._ended = True
            atexit.unregister(self.end_unreported)
            self._run.__exit__(None if error is None else type(error), error, None)

    def end_unreported(self) -> None:
        """End a run whose end the framework has not reported."""
        # Python keeps the uncaught exception here: last_exc from 3.12 on, last_value before.
        uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self.end(uncaught or self.unless_ended)

"""A run that begins with the first thing to say, and ends with the process at the latest."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from typing import Any

from rankzero.integrations.tracked_run import TrackedRun, track


class DeferredRun:
    """A `TrackedRun` whose params are collected until it begins. Safe on every rank.

    `options`: those of `rankzero.track`. A script that ends without saying so ends the run: FINISHED, or FAILED with
    the exception that nobody caught. `unless_said`: what a framework that always says how it ends was stopped by,
    where it did not.
    """

    def __init__(
        self, experiment: str, unless_said: BaseException | None = None, **options: Any
    ) -> None:
        self._experiment, self._options, self._unless_said = experiment, options, unless_said
        self._params: dict[str, Any] = {}
        self._run: TrackedRun | None = None
        self._over = False

    def params(self, more: Mapping[str, Any]) -> None:
        """Add params; once the run has begun, they cannot be added any more."""
        if self._run is None:
            self._params |= dict(more)

    @property
    def begun(self) -> bool:
        return self._run is not None

    @property
    def run(self) -> TrackedRun:
        """Return the run, begun now where it was not."""
        if self._run is None:
            self._run = track(self._experiment, self._params, **self._options)
            self._run.__enter__()
            atexit.register(self.give_up)
        return self._run

    def end(self, error: BaseException | None = None) -> None:
        """End the run: FINISHED, or as `error` has it. The first word counts."""
        if self._run is not None and not self._over:
            self._over = True
            atexit.unregister(self.give_up)
            self._run.__exit__(None if error is None else type(error), error, None)

    def give_up(self) -> None:
        """End the run, whose end nobody will say any more."""
        self.end(
            getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or self._unless_said
        )

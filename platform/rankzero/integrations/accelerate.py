"""Accelerate: a tracker, for ``Accelerator(log_with=RankZeroTracker("my-experiment"))``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankzero.integrations.deferred_run import DeferredRun
from rankzero.integrations.tracked_run import TrackedRun

try:
    from accelerate.tracking import GeneralTracker
except ImportError as error:
    raise ImportError(
        "rankzero.integrations.accelerate needs it: pip install rankzero[accelerate]"
    ) from error


class RankZeroTracker(GeneralTracker):
    """Sends what `Accelerator.log` gets to MLflow. `options`: those of `rankzero.track` (goal, tracking_uri…)."""

    name = "rankzero"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, experiment: str = "accelerate", **options: Any) -> None:
        self._late = DeferredRun(experiment, **options)
        super().__init__()

    @property
    def tracker(self) -> TrackedRun:
        """The run, for `checkpoint` and `evaluated`."""
        return self._late.run

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the config of `init_trackers` as params, and begin."""
        self._late.params(values)
        assert self._late.run is not None

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Log metrics; tensors stay on their device until the report."""
        self._late.run.log(values, step or 0)

    def finish(self) -> None:
        """End the run: what `end_training` calls."""
        self._late.end()

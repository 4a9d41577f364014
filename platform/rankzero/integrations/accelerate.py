"""A tracker for Accelerate: ``Accelerator(log_with=RankZeroTracker("my-experiment"))``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankzero.integrations.deferred_run import DeferredRun
from rankzero.integrations.own_loop.tracked_run import TrackedRun

try:
    from accelerate.tracking import GeneralTracker
except ImportError as error:
    raise ImportError("Accelerate is missing: pip install rankzero[accelerate]") from error


class RankZeroTracker(GeneralTracker):
    """Sends the metrics of `Accelerator.log` to MLflow. `options`: those of `rankzero.track`."""

    name = "rankzero"
    requires_logging_directory = False
    # Accelerate then calls the tracker on the main process alone.
    main_process_only = True

    def __init__(self, experiment: str = "accelerate", **options: Any) -> None:
        self._run = DeferredRun(experiment, **options)
        self._is_new = True
        super().__init__()

    @property
    def tracker(self) -> TrackedRun:
        """The run, for `checkpoint` and `evaluated`. Starts it."""
        return self._run.begin()

    def start(self) -> None:
        """Note that a training begins. `init_trackers` calls it, also a second time."""
        self._is_new = True

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Start the run, with the config of `init_trackers` as params."""
        self._run.add_params(values)
        self._run.begin()

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Log metrics. Tensors stay on their device until the run reads them."""
        run = self._run.begin()
        if step is not None and self._is_new:
            # Accelerate does not tell whether the steps of a second training go on.
            self._run.begin_training(0 if step <= run.step else step)
            self._is_new = False
        run.log(values, None if step is None else step + self._run.offset)

    def finish(self) -> None:
        """End the run. `Accelerator.end_training` calls it."""
        self._run.end()

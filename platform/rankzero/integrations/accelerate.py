"""A tracker for Accelerate. Its import registers the name ``rankzero``.

    accelerator = Accelerator(log_with="rankzero")
    accelerator.init_trackers("my-experiment", config, {"rankzero": {"goal": Goal("val/loss")}})

Or ``Accelerator(log_with=RankZeroTracker("my-experiment"))``. Accelerate gives the name of
`init_trackers` only to a tracker that it creates itself.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any

from rankzero.integrations.deferred_run import DeferredRun
from rankzero.integrations.own_loop.tracked_run import TrackedRun

try:
    from accelerate import Accelerator, tracking
    from accelerate.tracking import GeneralTracker
except ImportError as error:
    raise ImportError("Accelerate is missing: pip install rankzero[accelerate]") from error


class RankZeroTracker(GeneralTracker):
    """Sends the metrics of `Accelerator.log` to MLflow. `options`: those of `rankzero.track`.

    It has the methods of the run too: `log_figure`, `log_artifact`, `checkpoint` …
    """

    name = "rankzero"
    requires_logging_directory = False
    # Accelerate then calls the tracker on the main process alone.
    main_process_only = True

    def __init__(self, experiment: str, **options: Any) -> None:
        self._run = DeferredRun(experiment, **options)
        self._is_new = True
        self._accelerator: weakref.ref[Accelerator] | None = None
        super().__init__()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in a spawned process has, such as a data set's."""
        return {**vars(self), "_accelerator": None}

    @property
    def tracker(self) -> TrackedRun:
        """The run. Starts it."""
        return self._run.begin()

    def __getattr__(self, name: str) -> Any:
        """Return a method of the run, which starts it."""
        if name.startswith("_") or not hasattr(TrackedRun, name):
            raise AttributeError(f"neither RankZeroTracker nor its run has {name!r}")
        return getattr(self._run.begin(), name)

    def start(self) -> None:
        """Note that a training begins. `init_trackers` calls it, also a second time."""
        self._is_new = True
        # Accelerate keeps the trackers of earlier calls, which would log this training, too.
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, Accelerator):
            self._accelerator = weakref.ref(caller)
            count = len(caller.log_with)
            earlier, newest = caller.trackers[:-count], caller.trackers[-count:]
            mine = [one for one in earlier if isinstance(one, RankZeroTracker)]
            caller.trackers = [*(one for one in earlier if one not in mine), *newest]
            for one in mine:
                one._run.end()

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Start the run, with the config of `init_trackers` as params."""
        self._run.add_params(values)
        self._run.begin()

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Log metrics and texts. Tensors stay on their device until the run reads them.

        The run judges each value of the goal's metric when it reads it.
        """
        if step is not None and self._is_new:
            # Accelerate does not tell whether the steps of a second training go on.
            begins = step <= self._run.begin().highest_step
            self._run.next_ahead = 0
            self._run.begin_training(0 if begins else step, self._accelerator)
            self._is_new = False
        if self._run.goal.metric in values:
            self._run.begin().judge_logged()
        self._run.log(values, step)

    def finish(self) -> None:
        """End the run. `Accelerator.end_training` calls it."""
        self._run.end()


if hasattr(tracking, "register_tracker_class"):  # Accelerate 1.15
    tracking.register_tracker_class(RankZeroTracker)

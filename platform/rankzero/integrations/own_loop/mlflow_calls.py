"""User code's own calls of mlflow, such as `mlflow.log_metric`, in a tracked run."""

from __future__ import annotations

import os
import sys
from typing import Any


def enter(tracking_uri: str, experiment_id: str, run_id: str) -> None:
    """Make the run this thread's active run of mlflow. Raises whatever mlflow raises."""
    import mlflow  # The user's, as it is: our client's settings would change their timeouts.

    active = mlflow.active_run()
    if active is not None and active.info.run_id == run_id:
        return
    # mlflow sets variables, too. They would send later runs in another `folder` to this store, and
    # give programs that use another store the id of this one's experiment.
    names = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID")
    before = {name: os.environ.get(name) for name in names}
    try:
        mlflow.set_tracking_uri(tracking_uri)
        # It refuses a run of another experiment than the active one.
        mlflow.set_experiment(experiment_id=experiment_id)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    # The recorder samples already. Nested: another active run stays below it.
    mlflow.start_run(run_id, nested=True, log_system_metrics=False)


def leave(run_id: str) -> None:
    """Make the run inactive, if it is this thread's active run. Raises whatever mlflow raises."""
    mlflow: Any = sys.modules["mlflow"]
    active = mlflow.active_run()
    if active is not None and active.info.run_id == run_id:
        # The courier sets the status of the end, with its time.
        mlflow.end_run("RUNNING")

"""Runs and checkpoints as MLflow has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mlflow.entities import LoggedModel, Run

from rankzero import scalars
from rankzero.metric_names import SPEED, WHOLE_RUN
from rankzero.mlflow_store.uris import TrackingError


class OpenRun(NamedTuple):
    """A run to write to; `marks`: metric -> highest step that MLflow has."""

    run_id: str
    experiment_id: str
    marks: dict[str, int]

    @classmethod
    def of(cls, run: Run) -> OpenRun:
        """Return MLflow's run as a record. Raises TrackingError if MLflow did not answer."""
        # Run.data.metrics has the values without their steps.
        marks = {metric.key: metric.step for metric in run.to_proto().data.metrics}
        run_id = require_id(run.info.run_id, "run")
        return cls(run_id, require_id(run.info.experiment_id, "experiment"), marks)


class RemoteCheckpoint(NamedTuple):
    """A checkpoint as MLflow knows it; `status` is READY once all of it is uploaded."""

    step: int
    model_id: str
    status: str
    best: bool
    tags: Mapping[str, str]

    @classmethod
    def of(cls, model: LoggedModel) -> RemoteCheckpoint:
        """Return a logged model of the type checkpoint as a record."""
        step, best = int(model.tags["rankzero.step"]), model.tags.get("rankzero.best") == "true"
        return cls(step, model.model_id, str(model.status), best, model.tags)


class RunRecord(NamedTuple):
    """A run to look at, as MLflow has it."""

    name: str
    run_id: str
    experiment_id: str
    status: str
    start_time: float
    goal: str | None
    best: float | None
    samples_per_second: float | None
    metrics: Mapping[str, float]
    params: Mapping[str, str]
    tags: Mapping[str, str]

    @classmethod
    def of(cls, run: Run) -> RunRecord:
        """Return MLflow's run as a record."""
        tags, metrics = run.data.tags, run.data.metrics
        goal = tags.get("rankzero.goal")
        best = scalars.number(tags.get("rankzero.best"))
        return cls(
            name=run.info.run_name,
            run_id=run.info.run_id,
            experiment_id=run.info.experiment_id,
            status=run.info.status,
            start_time=run.info.start_time / 1000,
            goal=goal,
            best=best if best is not None or goal is None else metrics.get(goal),
            samples_per_second=metrics.get(f"{WHOLE_RUN}/samples_per_second", metrics.get(SPEED)),
            metrics=metrics,
            params=run.data.params,
            tags=tags,
        )


def require_id(identifier: str, what: str) -> str:
    """Return the id that an answer gives. Raises TrackingError without one."""
    # For MLflow's client, the answer "{}" is a run or an experiment whose fields are empty.
    if not identifier:
        raise TrackingError(
            f"the server answered without the {what}'s id: is it MLflow's, at the right address?"
        )
    return str(identifier)

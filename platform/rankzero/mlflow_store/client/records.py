"""Runs and checkpoints as MLflow has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mlflow.entities import LoggedModel, Run

from rankzero.mlflow_store.uris import TrackingError


class RunRecord(NamedTuple):
    """A run as MLflow has it; `marks`: metric -> highest step."""

    run_id: str
    experiment_id: str
    name: str
    status: str
    marks: Mapping[str, int]
    metrics: Mapping[str, float]
    params: Mapping[str, str]
    tags: Mapping[str, str]

    @classmethod
    def of(cls, run: Run) -> RunRecord:
        """Return MLflow's run as a record. Raises TrackingError if MLflow did not answer."""
        info, data = run.info, run.data
        return cls(
            run_id=require_id(info.run_id, "run"),
            experiment_id=require_id(info.experiment_id, "experiment"),
            name=info.run_name,
            status=info.status,
            # `data.metrics` has the values without their steps.
            marks={metric.key: metric.step for metric in run.to_proto().data.metrics},
            metrics=data.metrics,
            params=data.params,
            tags=data.tags,
        )


class RemoteCheckpoint(NamedTuple):
    """A checkpoint as MLflow knows it; `status` is READY once all of it is uploaded."""

    step: int
    model_id: str
    status: str
    best: bool

    @classmethod
    def of(cls, model: LoggedModel) -> RemoteCheckpoint:
        """Return a logged model of the type checkpoint as a record."""
        step, best = int(model.tags["rankzero.step"]), model.tags.get("rankzero.best") == "true"
        return cls(step, model.model_id, str(model.status), best)


def require_id(identifier: str, what: str) -> str:
    """Return the id that an answer gives. Raises TrackingError without one."""
    # For MLflow's client, the answer "{}" is a run or an experiment whose fields are empty.
    if not identifier:
        raise TrackingError(
            f"the server answered without the {what}'s id: is it MLflow's, at the right address?"
        )
    return str(identifier)

"""`RankZeroHandler` in the place of Ignite's WandBLogger and MLflowLogger, and its handlers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import mlflow.tracking
from mlflow import MlflowClient

from frameworks.contracts import recorded
from rankzero.integrations.ignite import OptimizerParamsHandler, OutputHandler, RankZeroHandler

_MESSAGE = "wants the other logger's class in the error"
_NAMES = "MLflow's logger joins names by a space, \"tag output\"; W&B's, as RankZero, by a slash"

NOT_APPLICABLE = {
    r"test_no_(wandb|mlflow)_client|test_wandb_getattr": "the other logger's client",
    r"wrong_logger_type": _MESSAGE,
    r"test_(wandb|mlflow)_logger.*test_optimizer_params_handler_wrong_setup": _MESSAGE,
    r"test_mlflow.*test_(output_handler|optimizer_params|mlflow_bad_metric_name)": _NAMES,
    r"test_base.*_wrong_setup": "tests a handler of Ignite, no logger",
    r"test_base.*non_torch_optimizers": "wants the suite's handler to return what it logs",
}


class InMlflow(RankZeroHandler):
    """The adapter with MLflowLogger's argument. Its runs are in MLflow once they have ended."""

    def __init__(self, tracking_uri: str) -> None:
        super().__init__(folder=tracking_uri, offline=False)
        assert self.run.folder is not None
        self.folder = self.run.folder
        run_id = recorded.id_in_mlflow(self.folder)
        assert self.run.mlflow() == run_id

    def close(self) -> None:
        super().close()
        recorded.deliver_rest(self.folder)


def _client(tracking_uri: str) -> MlflowClient:
    """Return a client of the store that the adapter makes in a folder."""
    return MlflowClient(f"sqlite:///{Path(tracking_uri) / 'mlflow.db'}")


mlflow.tracking.MlflowClient = _client  # type: ignore[assignment]


def adapt(module: ModuleType) -> None:
    """Replace the loggers and the handlers of a module."""
    module.__dict__.update(
        DummyLogger=RankZeroHandler,
        DummyOutputHandler=OutputHandler,
        WandBLogger=RankZeroHandler,
        MLflowLogger=InMlflow,
        OutputHandler=OutputHandler,
        OptimizerParamsHandler=OptimizerParamsHandler,
    )


def check(folder: Path) -> None:
    """The suite reads what the adapter recorded."""

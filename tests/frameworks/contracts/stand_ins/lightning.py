"""`RankZeroLogger` in the place of Lightning's CSVLogger and TensorBoardLogger."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch.loggers as loggers
import yaml
from lightning.pytorch.utilities import rank_zero_only

from frameworks.contracts import recorded
from rankzero.integrations.lightning import RankZeroLogger

_SERVICE = "the tests of another service's client, which they replace by a mock"
_FOLDERS = "the folders version_0, version_1 … are the other logger's: a run has a name"
_FORMAT = "the file's format and flushing are the other logger's"
_NONE = "tests no logger"

NOT_APPLICABLE = {
    r"test_(comet|litlogger|mlflow|wandb)\.py": _SERVICE,
    r"\[(Comet|MLFlow|Wandb)Logger\]": "another logger's case",
    r"CustomLoggerWithoutExperiment": "a logger of the suite",
    r"test_logger_with_prefix_all|test_logger_default_name": _SERVICE,
    r"logger_reset_correctly|dummy?logger|dummyexperiment|scan_checkpoints|test_version$": _NONE,
    r"test_np_sanitization": "the suite's logger overrides what is tested",
    r"versioning|test_named_version|test_tensorboard_named_version|_no_name|_log_sub_dir": _FOLDERS,
    r"hparams_reload|hparams_to_yaml_once": "Trainer.log_dir knows two loggers of its own by class",
    r"remotefs|flush_n_steps|reset_after_save|test_append_|test_tensorboard_finalize": _FORMAT,
    r"log_graph_warning": "RankZero logs no graph",
}


class StandIn(RankZeroLogger):
    """The adapter with the arguments of Lightning's loggers, and with CSVLogger's files to read."""

    def __init__(
        self, save_dir: Any = None, name: str = "lightning_logs", prefix: str = "", **_: Any
    ) -> None:
        # A run needs an experiment, where a folder may do without a name.
        super().__init__(name or "lightning", prefix=prefix, folder=save_dir)

    @property
    def log_dir(self) -> str:
        """Write what the run's journal holds as CSVLogger's files, and return their folder."""
        run = self.experiment
        _ = run.step  # flushes
        assert run.folder is not None
        params, rows = recorded.read(run.folder)
        groups = {name.split(".")[0]: value for name, value in params.items()}
        (run.folder / "hparams.yaml").write_text(yaml.safe_dump(groups))
        names = ["step", *dict.fromkeys(name for row in rows.values() for name in row)]
        with (run.folder / "metrics.csv").open("w") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows({"step": step, **row} for step, row in rows.items())
        return str(run.folder)


class Custom(StandIn):
    """The adapter with what the suite's own logger notes."""

    metrics_logged: Mapping[str, Any] = {}
    hparams_logged: object = None
    after_save_checkpoint_called = False

    @rank_zero_only
    def log_hyperparams(self, params: object = None, *_: Any, **__: Any) -> None:
        super().log_hyperparams(params)
        self.hparams_logged = params

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        self.metrics_logged = metrics

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        self.finalized_status = status

    def after_save_checkpoint(self, checkpoint_callback: object) -> None:
        self.after_save_checkpoint_called = True


# Before the suite is imported, which takes them as parameters of its tests.
for module in (loggers, loggers.csv_logs, loggers.tensorboard):
    for replaced in ("CSVLogger", "TensorBoardLogger"):
        if hasattr(module, replaced):
            setattr(module, replaced, StandIn)


def adapt(module: ModuleType) -> None:
    """Replace the suite's own logger."""
    if Path(str(module.__file__)).name == "test_logger.py":
        module.__dict__["CustomLogger"] = Custom


def check(folder: Path) -> None:
    """The suite reads what the adapter recorded."""

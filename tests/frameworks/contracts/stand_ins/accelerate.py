"""`RankZeroTracker` in the place of Accelerate's MLflowTracker and of the suite's own trackers."""

from __future__ import annotations

import csv
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlflow
from accelerate import tracking

from frameworks.contracts import recorded
from rankzero.integrations.accelerate import RankZeroTracker

_SERVICE = "reads the files of another service's client"

NOT_APPLICABLE = {
    r"TensorBoardTrackingTest|WandBTracking|Comet|ClearML|SwanLab|DVCLive": _SERVICE,
    r"_(tensorboard|wandb|trackio|comet_ml|aim|clearml|dvclive|swanlab)_deferred_init": _SERVICE,
    r"test_nested_run_env_var": "MLFLOW_NESTED_RUN is read by MLflow's own tracker",
    r"test_log_accepts_extra_kwargs": "the training process never calls mlflow, which is mocked",
    r"does_not_mutate_input": "a long param is shortened; the test wants it to be lost",
    r"test_register_invalid_class_raises": "tests no tracker",
    r"test_register_requires_logging_directory": "the adapter requires no logging directory",
}


class InMlflow(RankZeroTracker):
    """The adapter with MLflowTracker's arguments. Its runs are in MLflow once they have ended."""

    def __init__(self, experiment_name: str, logging_dir: str) -> None:
        # The suite's own store is one of files, which MLflow no longer supports.
        self.uri = f"sqlite:///{logging_dir}/mlflow.db"
        super().__init__(experiment_name, folder=logging_dir, tracking_uri=self.uri, offline=False)

    @property
    def active_run(self) -> Any:
        assert self.tracker.folder is not None
        run_id = recorded.id_in_mlflow(self.tracker.folder)
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def finish(self) -> None:
        folder = self.tracker.folder
        assert folder is not None
        super().finish()
        recorded.deliver_rest(folder)
        mlflow.set_tracking_uri(self.uri)


class InCsv(RankZeroTracker):
    """The adapter. `finish` writes what its journal holds as the suite's tracker does."""

    name = "my_custom_tracker"
    columns: list[str]

    def __init__(self, dir: str) -> None:
        self.file = Path(dir) / "log.csv"
        super().__init__("contracts", folder=dir)

    def finish(self) -> None:
        run = self.tracker
        super().finish()
        assert run.folder is not None
        params, rows = recorded.read(run.folder)
        with self.file.open("w") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            if params:
                writer.writerow(params)
            for row in rows.values():
                plain = {name: str(value).removesuffix(".0") for name, value in row.items()}
                writer.writerow(plain)


class Registered(RankZeroTracker):
    """The adapter under another name, with what the suite's tracker keeps in memory."""

    name = "my_registered_tracker"

    @property
    def config(self) -> dict[str, Any]:
        return self._recorded().params

    @property
    def values(self) -> dict[str, float | str]:
        return self._recorded().rows[0]

    def _recorded(self) -> recorded.Recorded:
        assert self.tracker.folder is not None
        return recorded.read(self.tracker.folder)


tracking.MLflowTracker = InMlflow


def adapt(module: ModuleType) -> None:
    """Replace the suite's own trackers."""
    InCsv.columns = module.MyCustomTracker._col_names
    module.__dict__.update(MyCustomTracker=InCsv, MyRegisteredTracker=Registered)


def check(folder: Path) -> None:
    """The suite reads what the adapter recorded."""

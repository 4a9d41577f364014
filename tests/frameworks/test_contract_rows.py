"""What the frameworks ask of their loggers and trackers, as their own tests state it.

`make test-contracts` runs those tests themselves. These here need no suite.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from frameworks.contracts import recorded
from frameworks.examples import needs, run
from rankzero.events import Noticed
from rankzero.run_store.journal import read_all
from support.paths import TESTS

pytestmark = pytest.mark.filterwarnings("ignore")  # each framework warns of something


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANKZERO_OFFLINE", "1")
    for name in ("RANK", "WORLD_SIZE", "MLFLOW_TRACKING_URI", "RANKZERO_DIR"):
        monkeypatch.delenv(name, raising=False)


def only_run() -> Path:
    (found,) = Path("mlruns/runs").iterdir()
    return found


def notes(folder: Path) -> list[str]:
    return [event.text for event in read_all(folder / "events.jsonl") if isinstance(event, Noticed)]


@dataclasses.dataclass
class Hparams:
    lr: float = 0.1


def test_lightnings_logger_has_a_prefix_and_takes_hyperparameters_at_any_time() -> None:
    needs("lightning")
    from rankzero.integrations.lightning import RankZeroLogger

    logger = RankZeroLogger(prefix="tmp")
    logger.log_hyperparams()
    logger.log_hyperparams(None)
    logger.log_metrics({"test": 1.0, "epoch": 0}, step=2)
    logger.log_hyperparams(Hparams())
    logger.log_hyperparams({"late": 1}, {"hp_metric": 0.5})
    logger.finalize("finished")  # as Slurm's requeue reports it
    params, rows = recorded.read(only_run())
    assert params == {"lr": 0.1, "late": 1}
    assert rows == {2: {"tmp-test": 1.0, "tmp-hp_metric": 0.5}}
    assert recorded.ends(only_run()) == [("FINISHED", "finished")]


def test_lightnings_logger_reports_the_exception_itself() -> None:
    needs("lightning")
    from rankzero.integrations.lightning import RankZeroLogger

    logger = RankZeroLogger()
    logger.log_metrics({"loss": 1.0}, 1)
    try:
        raise ValueError("broken on purpose")
    except ValueError:
        logger.finalize("failed")
    assert recorded.ends(only_run()) == [("FAILED", "ValueError: broken on purpose")]


def test_lightnings_other_ranks_have_its_dummy_experiment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs("lightning")
    from lightning.pytorch.loggers.logger import DummyExperiment
    from lightning.pytorch.utilities import rank_zero_only

    from rankzero.integrations.lightning import RankZeroLogger

    logger = RankZeroLogger()
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert isinstance(logger.experiment, DummyExperiment)
    assert not Path("mlruns").exists()


def test_lightnings_checkpoints_lie_below_the_runs_name_and_a_validation_continues_it() -> None:
    needs("lightning")
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from rankzero.integrations.lightning import RankZeroCallback, RankZeroLogger

    class Model(BoringModel):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.step(batch))

    logger = RankZeroLogger("paths")
    trainer = Trainer(
        max_steps=2,
        limit_val_batches=1,
        logger=logger,
        callbacks=[RankZeroCallback(logger, checkpoints=False)],
        accelerator="cpu",
        enable_progress_bar=False,
    )
    trainer.fit(Model())
    trainer.validate(Model())
    name = only_run().name
    assert logger.version == name
    assert (
        list(Path("paths", name, "checkpoints").glob("*.ckpt"))
        and len(recorded.ends(only_run())) == 2
    )
    assert "val/loss" in recorded.read(only_run()).rows[2]


def test_accelerates_project_name_is_the_experiment() -> None:
    needs("accelerate")
    from accelerate import Accelerator, tracking

    from rankzero.integrations.accelerate import RankZeroTracker

    if not hasattr(tracking, "register_tracker_class"):
        pytest.skip("Accelerate before 1.15 registers no trackers")
    accelerator = Accelerator(log_with="rankzero", cpu=True)
    config = {"lr": 0.1}
    accelerator.init_trackers("my-project", config, {"rankzero": {"name": "r1"}})
    accelerator.end_training()
    assert isinstance(accelerator.get_tracker("rankzero"), RankZeroTracker)
    assert json.loads(Path("mlruns/runs/r1/run.json").read_text())["experiment"] == "my-project"
    assert recorded.read(Path("mlruns/runs/r1")).params == config == {"lr": 0.1}


def test_accelerates_values_without_a_step_count_on_and_texts_are_artifacts() -> None:
    needs("accelerate")
    from accelerate import Accelerator

    from rankzero.integrations.accelerate import RankZeroTracker

    accelerator = Accelerator(log_with=RankZeroTracker("mine"), cpu=True)
    accelerator.init_trackers("mine")
    accelerator.log({"loss": 0.4, "text": "first"})
    accelerator.log({"loss": 0.3})
    accelerator.log({"loss": 0.2, "text": "third"}, step=3)
    accelerator.end_training()
    rows = recorded.read(only_run()).rows
    assert rows == {0: {"loss": 0.4}, 1: {"loss": 0.3}, 3: {"loss": 0.2, "text": "third"}}
    assert (only_run() / "artifacts/text/text.md").read_text() == "first"


def test_accelerates_tracker_has_the_methods_of_its_run_and_no_others() -> None:
    needs("accelerate")
    from rankzero.integrations.accelerate import RankZeroTracker

    tracker = RankZeroTracker("mine")
    assert not hasattr(tracker, "log_everything") and not Path("mlruns").exists()
    tracker.log_dict({"a": 1}, "a.json")
    tracker.finish()
    assert (only_run() / "artifacts/a.json").exists()

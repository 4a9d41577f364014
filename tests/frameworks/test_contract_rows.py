"""What the frameworks ask of their loggers and trackers, as their own tests state it.

`make test-contracts` runs those tests themselves. These here need no suite.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from frameworks.contracts import recorded
from frameworks.examples import needs, run
from rankzero.events import Noticed
from support.paths import TESTS
from support.runs import of_kind

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
    return [event.text for event in of_kind(folder, Noticed)]


def assert_failed(reason: str) -> None:
    """Assert that the only run failed, with this reason and its place."""
    [(status, found)] = recorded.ends(only_run())
    assert status == "FAILED" and found.startswith(f"{reason} (") and "test_contract_rows" in found


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
    assert_failed("ValueError: broken on purpose")


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


def test_lightnings_training_forgets_the_checkpoint_that_a_validation_has_loaded() -> None:
    needs("lightning")
    from lightning.pytorch import LightningModule, Trainer

    from rankzero.integrations.lightning import RankZeroCallback, RankZeroLogger

    callback = RankZeroCallback(logger := RankZeroLogger())
    callback.load_state_dict({"ahead": 12})
    callback.setup(Trainer(logger=logger, accelerator="cpu"), LightningModule(), "fit")
    assert logger.deferred_run.next_ahead is None


@pytest.mark.parametrize("rank", [0, 1])
def test_lightnings_logger_keeps_no_trainer_after_the_training(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("lightning")
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities import rank_zero_only

    from rankzero.integrations.lightning import RankZeroLogger

    logger = RankZeroLogger()
    logger.trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    logger.finalize("success")
    assert logger.trainer is None


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


def test_each_call_of_accelerates_init_trackers_begins_a_run_of_its_own() -> None:
    needs("accelerate")
    from accelerate import Accelerator

    from rankzero.integrations.accelerate import RankZeroTracker

    accelerator = Accelerator(log_with=RankZeroTracker("cv", name="r0"), cpu=True)
    for fold in range(2):
        # As `log_with="rankzero"` does in Accelerate 1.15, with a name for each fold.
        accelerator.log_with = [RankZeroTracker("cv", name=f"r{fold}")]
        accelerator.init_trackers("cv", {"fold": fold})
        accelerator.log({"loss": float(fold)}, step=1)
        assert accelerator.get_tracker("rankzero").tracker.name == f"r{fold}"
    pickle.loads(pickle.dumps(accelerator.get_tracker("rankzero")))  # as a data set has it
    accelerator.end_training()
    for fold in range(2):
        run = Path("mlruns/runs", f"r{fold}")
        assert recorded.read(run) == ({"fold": fold}, {1: {"loss": float(fold)}})
        assert [status for status, _ in recorded.ends(run)] == ["FINISHED"]


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


def test_ignites_trainer_may_output_a_sequence_or_nothing() -> None:
    needs("ignite")
    from ignite.engine import Engine

    from rankzero.integrations.ignite import RankZeroHandler

    outputs = [(0.5, torch.tensor(0.25), torch.zeros(2)), None, {"loss": 0.5, "y": torch.ones(3)}]
    trainer = Engine(lambda engine, batch: outputs[batch])
    RankZeroHandler().attach(trainer)
    trainer.run(range(3))
    rows = recorded.read(only_run()).rows
    assert rows == {1: {"train/output/0": 0.5, "train/output/1": 0.25}, 3: {"train/loss": 0.5}}
    assert [note.split()[0] for note in notes(only_run())] == ["train/output/2", "train/y"]


def test_ignites_handler_is_a_logger_that_ends_with_its_block() -> None:
    needs("ignite")
    from ignite.engine import Engine, Events
    from ignite.handlers import global_step_from_engine
    from ignite.metrics import Average

    from rankzero.integrations.ignite import RankZeroHandler

    trainer, evaluator = (Engine(lambda engine, batch: float(batch)) for _ in range(2))
    Average().attach(evaluator, "mean")
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run([3.0]))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    with RankZeroHandler() as logger:
        every = Events.ITERATION_COMPLETED(every=2)
        logger.attach_output_handler(
            trainer, every, tag="train", output_transform=lambda loss: {"loss": loss}
        )
        logger.attach_opt_params_handler(trainer, Events.EPOCH_STARTED, optimizer)
        logger.attach_output_handler(
            evaluator,
            Events.COMPLETED,
            tag="val",
            metric_names="all",
            global_step_transform=global_step_from_engine(trainer),
        )
        trainer.run(range(4), max_epochs=2)
    rows = recorded.read(only_run()).rows
    logged = {
        (step, name): value
        for step, row in rows.items()
        for name, value in row.items()
        if name != "train/loss"
    }
    assert logged == {(n, name): v for n in (1, 2) for name, v in VALUES.items()}
    assert [step for step, row in rows.items() if "train/loss" in row] == [2, 4, 6, 8]
    assert recorded.ends(only_run()) == [("FINISHED", "finished")]


VALUES = {"lr/group_0": 0.5, "val/mean": 3.0}


@pytest.mark.parametrize("first", [True, False])
def test_ignites_other_handlers_of_an_exception_decide_if_it_is_raised(first: bool) -> None:
    needs("ignite")
    from ignite.engine import Engine, Events

    from rankzero.integrations.ignite import RankZeroHandler

    def fail(_engine: object, _batch: object) -> None:
        raise ValueError("odd batch")

    trainer, logger, got = Engine(fail), RankZeroHandler(), list[object]()
    if not first:
        logger.attach(trainer)
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda _, error: got.append(error))
    if first:
        logger.attach(trainer)
    trainer.run([0])
    assert [type(one) for one in got] == [ValueError]
    assert_failed("ValueError: odd batch")
    alone = Engine(fail)
    RankZeroHandler().attach(alone)
    with pytest.raises(ValueError, match="odd batch"):
        alone.run([0])


def test_ignites_block_that_raises_fails_the_run() -> None:
    needs("ignite")
    from rankzero.integrations.ignite import RankZeroHandler

    with pytest.raises(ValueError, match="broken on purpose"), RankZeroHandler() as logger:
        logger.log({"loss": 1.0}, 1)
        raise ValueError("broken on purpose")
    assert_failed("ValueError: broken on purpose")


class Model(torch.nn.Linear):
    def forward(self, x: Any, labels: Any) -> dict[str, torch.Tensor]:
        return {"loss": (super().forward(x) - labels).pow(2).mean()}


def test_transformers_evaluation_without_a_training_has_its_arguments() -> None:
    needs("transformers")
    from transformers import Trainer, TrainingArguments

    from rankzero.integrations.transformers import RankZeroCallback

    data: Any = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 4
    arguments = TrainingArguments("out", report_to="none", use_cpu=True, seed=7)
    trainer = Trainer(Model(2, 1), arguments, None, data, data, callbacks=[RankZeroCallback()])
    trainer.evaluate()
    params, rows = recorded.read(only_run())
    assert params["seed"] == 7 and "val/loss" in rows[0] and "train/epoch" not in rows[0]


def test_transformers_evaluation_after_a_training_logs_no_value_again() -> None:
    needs("transformers")
    from transformers import Trainer, TrainingArguments

    from rankzero.integrations.transformers import RankZeroCallback

    data: Any = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 4
    arguments = TrainingArguments("out", report_to="none", use_cpu=True, max_steps=1)
    trainer = Trainer(Model(2, 1), arguments, None, data, data, callbacks=[RankZeroCallback()])
    trainer.train()
    trainer.evaluate()
    assert "val/loss" in recorded.read(only_run()).rows[1]
    assert not [note for note in notes(only_run()) if "earlier attempt" in note]


def test_transformers_searches_that_choose_at_the_same_moment_take_other_runs() -> None:
    needs("transformers")
    from transformers import TrainerState

    from rankzero.integrations.transformers import RankZeroCallback

    workers = [RankZeroCallback(name="r") for _ in range(2)]
    for one in workers:  # Neither run has begun.
        one._next_run(TrainerState(is_hyper_param_search=True))
    assert [one._run.name for one in workers] == ["r-1", "r-2"]


def test_suite_that_cannot_be_had_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    code, output = run(
        "-m",
        tmp_path,
        "frameworks.contracts",
        "ignite",
        "--suite",
        "ignite=nowhere",
        PYTHONPATH=str(TESTS),
    )
    assert code == 1 and "nowhere" in output, output

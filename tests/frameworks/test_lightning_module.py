"""A `LightningModule` through every command that takes an experiment, with the real Lightning."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameworks.examples import needs
from rankzero.events import Evaluated
from rankzero.mlflow_store.client import RunRecord
from support.commands import Command, events, losses, new_store, rankzero
from support.stores import list_runs

__all__ = ["new_store", "rankzero"]  # fixtures

HERE = Path(__file__).parent
MODULE, PLAIN = HERE / "lit_lines.py", HERE / "plain_lines.py"


@pytest.fixture(autouse=True)
def lightning(rankzero: Command) -> None:
    needs("lightning")
    rankzero.environ["PYTHONPATH"] = str(HERE)


def ran(rankzero: Command, *words: object) -> str:
    code, output = rankzero(*words)
    assert code == 0, output
    return output


def in_mlflow(rankzero: Command) -> dict[str, RunRecord]:
    return {run.name: run for run in list_runs(f"sqlite:///{rankzero.folder}/mlruns/mlflow.db")}


def test_module_trains_like_the_equal_plain_experiment(rankzero: Command) -> None:
    ran(rankzero, "train", MODULE, "--nproc", 2)
    ran(rankzero, "train", PLAIN, "--nproc", 2)
    module, plain = rankzero.runs
    # Not to the last bit: PyTorch's schedulers get each learning rate from the one before, and ours
    # from the step.
    assert len(losses(plain)) == 27 and losses(module) == pytest.approx(losses(plain), rel=1e-6)
    evaluations = [
        [event.metrics for event in events(run) if isinstance(event, Evaluated)]
        for run in (module, plain)
    ]
    assert (
        evaluations[0] == [pytest.approx(one, rel=1e-6) for one in evaluations[1]]
        and len(evaluations[0]) == 3
    )
    found = in_mlflow(rankzero)[module.path.name]
    assert (
        found.status == "FINISHED"
        and found.params["width"] == "8"
        and found.params["train.batch_size"] == "32"
    )
    assert any(folder.name == "best_model.json" for folder in module.path.iterdir()), (
        "the module itself was logged"
    )


def test_resume_reaches_the_same_losses(rankzero: Command) -> None:
    ran(rankzero, "train", MODULE, "train.limits.max_minutes=none", "width=4")
    whole = losses(rankzero.runs[0])
    stopped = rankzero.start(
        "train", MODULE, "width=4", "train.checkpoints.save_every=1", "--run-name", "stopped"
    )
    rankzero.wait_for_step(3, "stopped")
    stopped.terminate()
    assert stopped.wait(60) == 75
    ran(rankzero, "resume", "stopped")
    assert losses(rankzero.runs[-1]) == whole


@pytest.mark.timeout(240)
def test_compare_and_search_take_a_module(rankzero: Command) -> None:
    ran(
        rankzero,
        "compare",
        MODULE,
        "--strategies",
        "single,ddp,zero1,fsdp",
        "--nproc",
        "1,2",
        "train.epochs=4",
    )
    ran(rankzero, "search", MODULE, "--trials", 3, "--nproc", 2)
    runs = in_mlflow(rankzero)
    children = [run for run in runs.values() if "mlflow.parentRunId" in run.tags]
    assert {run.params["train.strategy"] for run in children} == {"single", "ddp", "zero1", "fsdp"}
    assert {run.status for run in runs.values()} <= {"FINISHED", "KILLED"}
    assert len({run.params["lr"] for run in children}) > 1, (
        "the search's trials have learning rates of their own"
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "def on_train_epoch_end(self): pass",
            "Other defines on_train_epoch_end, which RankZero's loop does not call",
        ),
        ("automatic_optimization = False", "the module optimizes by hand"),
        (
            "def training_step(self, batch, batch_idx): self.trainer.strategy",
            "the module reads trainer.strategy",
        ),
        ("def training_step(self, batch, batch_idx): pass", "training_step must return the loss"),
        ("def __init__(self, width: int = 3): pass", "Other.__init__ has no learning rate"),
    ],
)
def test_features_of_lightnings_trainer_are_refused(
    rankzero: Command, body: str, says: str
) -> None:
    file = rankzero.folder / "other.py"
    file.write_text(f"""
from lightning.pytorch import LightningModule
from lit_lines import Lines
from tests_data import points
class Other(Lines):
    {body}
def data():
    return points(100), points(50)
""")
    code, output = rankzero("train", file, "train.batch_size=20")
    assert code in (1, 2) and says in output and "Traceback" not in output, output


def test_module_without_data_is_refused(rankzero: Command) -> None:
    file = rankzero.folder / "other.py"
    file.write_text(
        "from lightning.pytorch import LightningModule\nclass Lit(LightningModule):\n    pass\n"
    )
    code, output = rankzero("train", file)
    assert (
        code in (1, 2)
        and "Lit has no data: add a LightningDataModule or a function data() to its file" in output
    )

"""`rankzero resume` of a finished run: what trains further, and what would train nothing."""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path

import pytest

from rankzero import ConfigError, Experiment, Train, config, experiment_file
from rankzero.cli import launch_run
from rankzero.cli.commands import resume
from rankzero.errors import UserError
from rankzero.launch.machines import ALONE, Machines
from rankzero.launch.request import keep_for_helper, with_changes, write_config
from rankzero.run_store import run_locks
from rankzero.run_store.folder import RunFolder
from rankzero.training.checkpoints import best_model
from support.checkpoints import save_steps
from support.commands import TINY, Command, last_end, losses
from support.runs import append, ended, make_folder, started, steps


@pytest.mark.timeout(200)
def test_report_of_a_run_in_steps_suggests_what_trains_further(rankzero: Command) -> None:
    rankzero.succeed("train", TINY, "train.steps=6", "--run-name", "r", "--offline")
    (run,) = rankzero.runs
    suggested = re.search(r"rankzero (resume r .*)", rankzero("report", "r")[1])
    assert suggested is not None and suggested[1] == "resume r train.steps=12"
    for change, says in (
        ("train.epochs=20", "train.epochs=20 changes nothing, because train.steps=6 decides"),
        ("train.steps=6", "r has finished with step 6 (best val"),
        ("lr=0.1", "pass a later end, such as train.steps=12"),
        ("train.steps=12 train.drop_last=false", "train.drop_last decides the order of the data"),
    ):
        code, output = rankzero("resume", "r", *change.split(), "--offline")
        assert code == 2 and says in output, output
    assert last_end(run).status == "FINISHED", "a refused resume leaves the run as it was"
    code, output = rankzero(*suggested[1].split(), "--offline")
    assert code == 0 and max(losses(run)) == 12, output
    code, output = rankzero("resume", "r", "train.steps=none", "train.epochs=3", "--offline")
    assert code == 0 and max(losses(run)) == 3 * (200 // 32), output
    code, output = rankzero("resume", "r", "train.epochs=3", "--offline")
    assert code == 2 and "such as train.epochs=6" in output, output
    newest = max(run.checkpoints.iterdir())
    (newest / "state.pt").write_bytes(b"damaged")
    output = rankzero("resume", "r", "--offline")[1]
    assert newest.name in output and "nothing is left" not in output


@pytest.mark.timeout(200)
def test_a_resume_on_other_data_says_so(rankzero: Command) -> None:
    rankzero.succeed("train", TINY, "train.steps=6", "--run-name", "r", "--offline")
    code, output = rankzero("resume", "r", "train.steps=8", "--offline")
    assert code == 0 and "other data" not in output, output
    code, output = rankzero("resume", "r", "train.steps=10", "augment=true", "--offline")
    assert code == 0 and "other data than in the attempt before (training): " in output, output
    assert "before and after step 8 may not be comparable" in " ".join(output.split()), output


def test_a_setting_that_the_file_has_no_more_is_named_with_two_ways_on(rankzero: Command) -> None:
    (file := rankzero.folder / "net.py").write_text(TINY.read_text())
    rankzero.succeed("train", file, "train.steps=6", "--run-name", "r", "--offline")
    file.write_text(TINY.read_text().replace("dropout", "rate"))
    (run,) = rankzero.runs
    again = ("resume", "r", "train.steps=12", "--offline")
    code, output = rankzero(*again)
    assert code == 2 and "config.yaml has 'dropout', which net.py has no more" in output, output
    run.config.write_text(run.config.read_text().replace("dropout:", "rate:"))
    code, output = rankzero(*again)
    assert code == 0 and max(losses(run)) == 12, output


MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    made = TensorDataset(torch.rand(64, 8), torch.zeros(64, dtype=torch.long))
    return made, made

class LightningModule(nn.Module):
    automatic_optimization = True
    def prepare_data(self): ...
    def setup(self, stage): ...

LightningModule.__module__ = "lightning.pytorch.core.module"

class Net(LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.net = nn.Linear(8, 2)
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
HOOK = "    def training_epoch_end(self, outputs): ...\n"


def test_a_hook_that_nothing_calls_refuses_new_runs_and_no_old_one(rankzero: Command) -> None:
    (file := rankzero.folder / "net.py").write_text(MODULE)
    settings = ("goal.metric=val/loss", "goal.mode=min", "train.batch_size=32")
    own = ("train", file, "--offline", *settings)
    rankzero.succeed(*own, "--name", "old", "train.steps=4")
    # As a run of a version that did not look for this hook.
    file.write_text(MODULE + HOOK)
    code, output = rankzero(*own, "--name", "new", "train.steps=4")
    assert code == 2 and "error: Net defines training_epoch_end, which" in output, output
    code, output = rankzero("resume", "old", "--offline", "train.steps=6")
    assert code == 0 and "note: Net defines training_epoch_end, which" in output, output
    assert "for new runs only" in output, output
    rankzero.succeed(*own, "--name", "old", "--resume-if-there", "train.steps=8")
    (folder,) = rankzero.runs
    assert max(losses(folder)) == 8
    assert {*best_model.load_best(folder).state_dict()} == {"module.net.weight", "module.net.bias"}


def test_steps_decide_unless_they_are_unset() -> None:
    stepped = Experiment(train=Train(steps=100))
    with pytest.raises(ConfigError, match=r"train\.steps=100 decides"):
        with_changes(stepped, {"train.epochs": "20"})
    assert with_changes(stepped, {"train.epochs": "20", "train.steps": "none"}).train.steps is None
    # A program that passes both, as `rankzero.train(Digits(train=Train(steps=9)))` does.
    both = with_changes(Experiment(), {"train.epochs": "10", "train.steps": "9"})
    assert both.train.steps == 9


def test_a_stop_at_no_target_is_refused_where_it_is_asked_for() -> None:
    asked = {"train.limits.stop_at_target": "true"}
    with pytest.raises(ConfigError, match=r"changes nothing, because goal\.target is none"):
        with_changes(Experiment(), asked)
    aimed = with_changes(Experiment(), {**asked, "goal.target": "0.5"})
    assert aimed.train.limits.stop_at_target
    assert not with_changes(aimed, {"goal.target": "none"}).goal.target, "an older run may have it"
    own = Experiment(train=Train(limits=Train.Limits(stop_at_target=True)))
    assert with_changes(own, asked) == own, "a program passes what the experiment has by itself"


def test_a_launch_that_never_began_leaves_the_settings_of_the_attempt_before(
    resumable: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the same command would find nothing left to train."""
    launched = list[launch_run.LaunchPlan]()
    monkeypatch.setattr(launch_run, "run", launched.append)
    for _ in range(2):
        resume.continue_run(resumable, words(resumable, "train.epochs=40"), ALONE)
    assert [plan.experiment.train.epochs for plan in launched] == [40, 40]


def test_a_refused_command_leaves_the_run_the_file_of_its_experiment(
    resumable: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (moved := tmp_path / "elsewhere.py").write_text(TINY.read_text())
    monkeypatch.setattr(launch_run, "run", lambda _: 0)

    def resume_with(*settings: str) -> str | None:
        asked = words(resumable, *settings, experiment=str(moved))
        with contextlib.suppress(UserError):
            resume.continue_run(resumable, asked, ALONE)
        return resumable.identity.experiment_file

    assert resume_with() == str(TINY), "nothing is left to train"
    run_locks.claim(resumable, 0)
    append(resumable, started(2))
    assert resume_with("train.epochs=40") == str(TINY), "it still trains"
    append(resumable, ended())
    assert resume_with("train.epochs=40") == str(moved)


@pytest.fixture
def resumable(tmp_path: Path) -> RunFolder:
    """A run that has finished, with a checkpoint."""
    folder = make_folder(tmp_path, experiment_file=str(TINY))
    tiny = experiment_file.load(str(TINY))()
    write_config(folder, config.override(tiny, {"train.epochs": 20}))
    save_steps(folder.path, {3: 0.5})
    append(folder, started(), steps(1, 3), ended())
    return folder


def words(folder: RunFolder, *settings: str, experiment: str | None = None) -> argparse.Namespace:
    own = {"dir": folder.root, "run_name": folder.path.name, "offline": True}
    return argparse.Namespace(
        **own, experiment=experiment, settings=settings, nproc=None, max_restarts=0
    )


@pytest.mark.parametrize(("machines", "nproc"), [(Machines(2, 2), 4), (Machines(1, 2), None)])
def test_a_range_of_machines_keeps_the_default_number_of_processes(
    machines: Machines, nproc: int | None
) -> None:
    arguments = argparse.Namespace(nproc=None)
    resume._set_processes(8, arguments, machines)
    assert arguments.nproc == nproc


def test_a_helping_machine_resumes_with_the_settings_and_the_processes_of_before(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path, experiment_file=str(TINY))
    trained = config.override(experiment_file.load(str(TINY))(), {"train.batch_size": 96})
    keep_for_helper(folder, trained, 12)
    own = {"experiment": None, "dir": tmp_path}
    arguments = argparse.Namespace(nproc=None, settings=["lr=0.5"], **own)
    found = resume._of_helper(folder, arguments, Machines(2, 2))
    assert (found.train.batch_size, config.flatten(found)["lr"]) == (96, 0.5)
    assert arguments.nproc == 6
    append(folder, started())
    keep_for_helper(folder, trained, 3)  # a shared disk: rank 0's files stay
    assert folder.processes.read_text() == "12"

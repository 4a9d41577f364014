"""Lightning's adapter: stops, names and steps that scripts of Lightning's users have."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameworks.examples import SECONDS, needs, run
from frameworks.lightning_script import fitted, points
from rankzero.events import (
    ArtifactLogged,
    CheckpointSaved,
    Evaluated,
    Noticed,
    RunEnded,
    RunStarted,
    StepsLogged,
)
from rankzero.run_store.journal import read_all

pytestmark = pytest.mark.timeout(2 * SECONDS)


def test_training_that_sigterm_stopped_is_killed(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "import os, signal",
        "class Stopped(Model):",
        "    def training_step(self, batch, batch_idx):",
        "        if batch_idx == 3:",
        "            os.kill(os.getpid(), signal.SIGTERM)",
        "        return super().training_step(batch, batch_idx)",
        "fit(Stopped)",
    )
    ends = [(one.status, one.reason) for one in events if isinstance(one, RunEnded)]
    assert ends == [("KILLED", "stopped by SIGTERM")]
    assert [*points(events)["train/loss"]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("way", "devices", "steps", "counts"),
    # Without a mean over ranks, the callback has the same loss of more steps.
    [("on_step", 1, 12, False), ("on_step", 2, 12, True), ("on_epoch", 1, 2, True)],
)
def test_loss_that_the_module_logs_itself_counts_if_it_is_a_mean(
    way: str, devices: int, steps: int, counts: bool, tmp_path: Path
) -> None:
    ways = {"on_step": way == "on_step", "on_epoch": way == "on_epoch"}
    events = fitted(
        tmp_path,
        "class Own(Model):",
        "    def by_hand(self, loss):",
        # As a mean over two ranks would be.
        f"        self.log('train/loss', 100 + loss.detach(), sync_dist=True, **{ways})",
        "        return loss",
        f"fit(Own, devices={devices}, strategy={'ddp' if devices > 1 else 'auto'!r})",
    )
    losses = points(events)["train/loss"]
    assert len(losses) == steps
    assert (min(losses.values()) > 100, max(losses.values()) > 100) == (counts, counts)


@pytest.mark.parametrize("is_mean", [False, True])
def test_validation_metrics_of_one_rank_are_named(is_mean: bool, tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "class Ranked(Model):",
        "    def validation_step(self, batch, batch_idx):",
        f"        self.log('val_rank', float(self.global_rank), sync_dist={is_mean})",
        "fit(Ranked, epochs=1, devices=2, strategy='ddp')",
    )
    assert [*points(events)["val/rank"].values()] == [0.5 if is_mean else 0.0]
    assert any("sync_dist" in one.text for one in events if isinstance(one, Noticed)) != is_mean


def test_validation_within_an_accumulated_step_is_of_the_step_before(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "class Counting(Model):",
        "    def validation_step(self, batch, batch_idx):",
        # How many steps of the optimizer the weights have seen.
        "        self.log('val/steps', float(self.trainer.global_step))",
        "fit(Counting, epochs=1, accumulate_grad_batches=4, val_check_interval=3)",
    )
    # Six batches are two steps: of four batches, and of two.
    assert points(events)["val/steps"] == {0: 0.0, 2: 2.0}
    assert [one.step for one in events if isinstance(one, Evaluated)] == [0, 2]


def test_second_training_that_is_resumed_keeps_its_steps(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "logger = RankZeroLogger('steps', name='r1', offline=True)",
        "fit(Model, 1, logger=logger)",
        "tuned = fit(Model, 1, logger=logger)",
        "fit(Model, 2, tuned.checkpoint_callback.last_model_path, logger=logger)",
        # As another process does, with the checkpoint of the third training.
        "logger = RankZeroLogger('steps', name='r1', offline=True)",
        "fit(Model, 3, tuned.checkpoint_callback.last_model_path, logger=logger)",
    )
    rows = [one for one in events if isinstance(one, StepsLogged) and "train/loss" in one.metrics]
    assert [step for one in rows for step in one.steps] == [*range(1, 25)]


def test_version_on_another_rank_starts_no_run(tmp_path: Path) -> None:
    needs("lightning")
    lines = [
        "from pathlib import Path",
        "from rankzero.integrations.lightning import RankZeroLogger",
        "logger = RankZeroLogger('mine', offline=True)",
        "assert (logger.version, logger.save_dir) == (None, None)",
        "assert not Path('mlruns').exists()",
    ]
    (tmp_path / "script.py").write_text("\n".join(lines))
    # As under Lightning's launcher, which sets no RANK.
    code, output = run("script.py", tmp_path, LOCAL_RANK="1", WORLD_SIZE="2")
    assert code == 0, output


CLI = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
if __name__ == "__main__":
    LightningCLI(BoringModel, BoringDataModule)
"""
CONFIG = """
trainer:
  max_epochs: 1
  limit_train_batches: 3
  limit_val_batches: 1
  accelerator: cpu
  enable_progress_bar: false
  logger:
    class_path: rankzero.integrations.lightning.RankZeroLogger
    init_args: {experiment: cli}
    dict_kwargs: {name: r1, offline: true}
  callbacks:
    - class_path: rankzero.integrations.lightning.RankZeroCallback
"""


def test_lightnings_command_line_trains_with_logger_and_callback(tmp_path: Path) -> None:
    needs("jsonargparse")
    (tmp_path / "script.py").write_text(CLI)
    (tmp_path / "given.yaml").write_text(CONFIG)
    folder = tmp_path / "mlruns/runs/r1"
    for more in ([], ["--trainer.max_epochs=2", "--ckpt_path=last"]):
        code, output = run("script.py", tmp_path, "fit", "--config", "given.yaml", *more)
        assert code == 0, output
        (folder / "lightning/config_2.yaml").touch()  # its predecessor was deleted
    assert not (folder / "lightning/config_2.yaml").read_bytes()
    for file, epochs in (("config_1.yaml", 1), ("config.yaml", 2)):
        assert f"max_epochs: {epochs}" in (folder / "lightning" / file).read_text()
    events = list(read_all(folder / "events.jsonl"))
    assert [*points(events)["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [one.status for one in events if isinstance(one, RunEnded)] == ["FINISHED"] * 2
    assert [*(folder / "lightning").rglob("*.ckpt")]


def test_lightnings_files_lie_below_the_trainers_folder(tmp_path: Path) -> None:
    lines = [
        "assert RankZeroLogger('steps', name='r1', offline=True).save_dir is None",
        # Databricks' experiments begin with a slash.
        "assert RankZeroLogger('/Users/me').name == 'Users/me'",
        "assert RankZeroLogger('../x').name == 'x'",
        "try: Trainer(callbacks=[RankZeroCallback()], logger=False, max_steps=1).fit(Model())",
        "except Exception as error: assert 'finds no logger' in str(error), error",
        "else: raise AssertionError('no error')",
    ]
    fitted(tmp_path, *lines)


def test_validation_of_the_best_weights_after_the_training_is_kept(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "class Falling(Model):",
        "    def validation_step(self, batch, batch_idx):",
        "        self.log('val_loss', 1.0 if self.trainer.state.fn == 'fit' else 0.5)",
        "trainer = fit(Falling)",
        "trainer.validate(ckpt_path='best')",
    )
    assert not [one.text for one in events if isinstance(one, Noticed)]
    found = points(events)
    for name in ("val/loss", "val_loss"):
        assert found[name] == {6: 1.0, 12: 1.0} and found[f"final/{name}"] == {12: 0.5}


def test_checkpoints_that_a_thread_writes_are_logged_at_the_end(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "import time",
        "from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO",
        "class Slow(TorchCheckpointIO):",
        "    def save_checkpoint(self, *args, **options):",
        "        time.sleep(0.5)",
        "        super().save_checkpoint(*args, **options)",
        "logger = RankZeroLogger('steps', name='r1', offline=True, log_checkpoints=True)",
        "callbacks = [ModelCheckpoint('saved', save_top_k=-1)]",
        "plugins = [AsyncCheckpointIO(Slow())]",
        "trained(Model, 2, None, logger, callbacks, plugins=plugins)",
    )
    assert not [one.text for one in events if isinstance(one, Noticed)]
    kept = tmp_path / "mlruns/runs/r1/artifacts/checkpoints"
    sizes = {path.name: path.stat().st_size for path in kept.iterdir()}
    assert sizes == {one.name: one.stat().st_size for one in (tmp_path / "saved").iterdir()}
    assert len(sizes) == 2


def test_checkpoints_that_lightning_has_replaced_are_logged_once_or_not(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "from lightning.pytorch.plugins.io import AsyncCheckpointIO",
        "logger = RankZeroLogger('steps', name='r1', offline=True, log_checkpoints=True)",
        "saves = ModelCheckpoint('saved', monitor='train/mine', mode='max', save_last=True)",
        "callbacks = [RankZeroCallback(logger, checkpoints=False), saves]",
        # The logger alone does not learn then that a thread writes.
        "options = {'plugins': [AsyncCheckpointIO()], 'enable_autolog_hparams': False}",
        "trained(Model, 3, None, logger, callbacks, **options)",
    )
    assert not [one.text for one in events if isinstance(one, Noticed)]
    kept = sorted(one.name for one in (tmp_path / "saved").iterdir())
    copies = (tmp_path / "mlruns/runs/r1/artifacts/checkpoints").iterdir()
    assert sorted(one.name for one in copies) == kept and len(kept) == 2
    assert sum(isinstance(one, ArtifactLogged) for one in events) == 2


def test_fork_of_a_process_with_an_open_run_trains_to_its_end(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "logger = RankZeroLogger('steps', name='r1', offline=True)",
        "logger.experiment.set_tags({'team': 'a'})",
        "trained(Model, 1, None, logger, [], strategy='ddp_notebook', devices=2)",
    )
    assert [one.status for one in events if isinstance(one, RunEnded)] == ["FINISHED"]


TESTED = (
    "class Tested(Model):",
    "    def test_step(self, batch, batch_idx):",
    "        self.log('test/loss', 1.0)",
)


def test_test_in_a_fork_of_its_own_has_the_last_steps_number(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        *TESTED,
        "logger = RankZeroLogger('steps', name='r1', offline=True)",
        "logger.experiment.finish()",
        "fork = {'strategy': 'ddp_notebook', 'devices': 2}",
        "trainer = trained(Tested, 1, None, logger, [RankZeroCallback(logger)], **fork)",
        "trainer.test(Tested())",
    )
    assert [*points(events)["test/loss"]] == [6]


def test_hyperparameter_without_a_text_costs_only_itself(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "class Odd:",
        "    def __str__(self): raise RuntimeError('gone')",
        "    __repr__ = __str__",
        "logger = RankZeroLogger('steps', name='r1', offline=True)",
        "logger.log_hyperparams({'odd': Odd(), 'width': 4})",
        "logger.finalize('success')",
    )
    (note,) = (one.text for one in events if isinstance(one, Noticed))
    (start,) = (one for one in events if isinstance(one, RunStarted))
    assert "odd" in note and start.params["width"] == "4"


def test_logger_without_its_callback_counts_on_in_a_second_training(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "logger = RankZeroLogger('steps', name='r1', offline=True)",
        "for _ in range(2):",
        "    trainer = trained(Model, 1, None, logger, [])",
        "    trainer.validate(Model())",
    )
    assert not [one.text for one in events if isinstance(one, Noticed)]
    found = points(events)
    # The steps begin at 0. Six of them are a training, and the validation is at the next.
    assert [*found["train/mine"]] == [*range(6), *range(7, 13)]
    assert [*found["val/loss"]] == [5, 6, 12, 13]


@pytest.mark.parametrize("callbacks", ["[]", "[RankZeroCallback(logger)]"])
def test_test_by_another_trainer_has_the_last_steps_number(callbacks: str, tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        *TESTED,
        "logger = RankZeroLogger('steps', name='r1', offline=True)",
        f"trained(Tested, 1, None, logger, {callbacks})",
        "Trainer(logger=logger, accelerator='cpu', enable_progress_bar=False).test(Tested())",
    )
    (step,) = points(events)["test/loss"]
    assert step == max(points(events)["train/mine"])


@pytest.mark.parametrize("accumulated", [1, 2])
def test_learning_rate_has_the_number_of_the_step_that_it_is_used_in(
    accumulated: int, tmp_path: Path
) -> None:
    events = fitted(
        tmp_path,
        "from lightning.pytorch.callbacks import LearningRateMonitor",
        "class Scheduled(Model):",
        "    def configure_optimizers(self):",
        "        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)",
        "        halves = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)",
        "        return [optimizer], [{'scheduler': halves, 'interval': 'step'}]",
        f"options = {{'accumulate_grad_batches': {accumulated}}}",
        "fit(Scheduled, 2, others=[LearningRateMonitor()], **options)",
    )
    rates = points(events)["lr-SGD"]
    assert rates == {step: 0.5 ** (step - 1) for step in range(1, 12 // accumulated + 1)}


def test_checkpoints_are_kept_under_rays_strategy_and_missed_aloud_under_others(
    tmp_path: Path,
) -> None:
    events = fitted(
        tmp_path,
        "from lightning.pytorch.strategies import DDPStrategy",
        "class RayDDPStrategy(DDPStrategy): pass",
        "class Divided(DDPStrategy): pass",
        "logger = RankZeroLogger('steps', name='r1', offline=True)",
        "for kind in (RayDDPStrategy, Divided):",
        "    strategy = kind(process_group_backend='gloo')",
        "    fit(Model, 1, logger=logger, devices=1, strategy=strategy)",
    )
    assert sum(isinstance(one, CheckpointSaved) for one in events) == 1
    (note,) = (one.text for one in events if isinstance(one, Noticed))
    assert note.startswith("Divided may divide the model: the run keeps no checkpoints; use")


def test_nothing_of_an_epoch_counts_in_the_next_one(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "class Valued(Model):",
        # The first epoch ends without a validation, and with the loss of one batch, 5, left over.
        "    def on_train_batch_start(self, batch, batch_idx):",
        "        return -1 if (self.current_epoch, batch_idx) == (0, 5) else None",
        "    def by_hand(self, loss):",
        "        epoch = 1.0 + self.current_epoch",
        "        self.log('value_loss', epoch, on_step=False, on_epoch=True)",
        "        return loss",
        "fit(Valued, accumulate_grad_batches=4)",
    )
    assert points(events)["value_loss"] == {1: 1.0, 3: 2.0}
    assert points(events)["train/loss"] == {1: 2.5, 2: 7.5, 3: 10.5}
    assert not [one.text for one in events if isinstance(one, Noticed)]


def test_checkpoint_has_the_averaged_weights_that_were_validated(tmp_path: Path) -> None:
    fitted(
        tmp_path,
        "from lightning.pytorch.callbacks import EMAWeightAveraging",
        "fit(Model, 1, others=[EMAWeightAveraging(decay=0.5)])",
        "from rankzero import track",
        "kept = track('steps', name='r1', offline=True).latest()['model']",
        "averages = torch.load('saved/last.ckpt', weights_only=False)['state_dict']",
        "assert all(torch.equal(kept[name], averages[name]) for name in averages)",
    )

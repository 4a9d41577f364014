"""A module learns from the loop where its training is."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from rankzero import Train, config, experiment_file
from rankzero.errors import UserError
from rankzero.experiment import is_outdated
from rankzero.launch.request import refuse_new
from rankzero.lightning_module import ignored_hooks
from rankzero.lightning_module.experiment import adopt
from rankzero.lightning_module.steps_and_log import TrainerStub
from support.training import Trainer, tiny


class Module(nn.Module):
    """Has what RankZero uses of a LightningModule."""

    automatic_optimization = True
    trainer: Any

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Linear(8, 2)

    def prepare_data(self) -> None: ...

    def setup(self, stage: str) -> None: ...

    def log(self, name: str, value: Any) -> None:
        """Replaced by RankZero."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("index", batch_idx)
        self.log("step", self.trainer.global_step)
        self.log("epoch", self.trainer.current_epoch)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_a_module_knows_its_step_and_epoch(train: Trainer) -> None:
    experiment = adopt(Module, [], {"data": tiny().data})
    settings = {"train.batch_size": 50, "train.epochs": 2, "train.mlflow.log_pictures": False}
    trained = train(config.override(experiment(), settings))
    assert list(trained.series("train/step").values()) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert list(trained.series("train/epoch").values()) == [0, 0, 0, 0, 1, 1, 1, 1]
    last = trained.totals.last_metrics
    assert (last["val/step"], last["val/epoch"]) == (8, 1)


class Indexed(Module):
    """Keeps the index of each batch, and what an epoch has."""

    seen: ClassVar[list[tuple[str, int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(("train" if self.training else "val", batch_idx))
        assert batch_idx < self.trainer.num_training_batches or not self.training
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("micro_batch", "per_epoch"), [(50, 4), (25, 8)])
def test_the_batch_index_counts_within_an_epoch_and_an_evaluation(
    train: Trainer, micro_batch: int, per_epoch: int
) -> None:
    Indexed.seen.clear()
    experiment = adopt(Indexed, [], {"data": tiny().data})
    settings = {
        "train.batch_size": 50,
        "train.micro_batch": micro_batch,
        "train.eval_batch": 10,
        "train.epochs": 2,
        "train.mlflow.log_pictures": False,
    }
    train(config.override(experiment(), settings))
    indices = {kind: [i for one, i in Indexed.seen if one == kind] for kind in ("train", "val")}
    assert indices["train"] == [*range(per_epoch)] * 2
    # The check for values that are no means runs the last batch again.
    count = len(tiny().data()[1]) // 10
    assert indices["val"][:count] == [*range(count)] and indices["val"].count(0) == 2


def test_the_stub_of_the_trainer_counts_batches_as_lightning_does() -> None:
    train = Train(batch_size=40, micro_batch=10, epochs=3, drop_last=False)
    stub = TrainerStub(train)
    assert stub.world_size == 1
    with pytest.raises(UserError, match=r"trainer\.max_steps is read while the data are made"):
        _ = stub.max_steps
    stub.count_steps(95)
    # Two steps of four batches, and one of two: of 10 and 5 samples.
    assert (stub.steps_per_epoch, stub.num_training_batches) == (3, 10)
    assert (stub.accumulate_grad_batches, stub.max_steps, stub.max_epochs) == (4, 9, 3)
    whole = TrainerStub(Train(batch_size=40, epochs=3, drop_last=True))
    whole.count_steps(95)
    assert (whole.accumulate_grad_batches, whole.num_training_batches) == (1, 2)


@pytest.mark.parametrize("file", ["lightning_mnist", "torch_utils", "lightning_mnist.model"])
def test_a_hook_in_a_file_named_like_a_framework_is_refused(file: str) -> None:
    def on_train_epoch_end(_: Any) -> None: ...

    names = {"__module__": file, "on_train_epoch_end": on_train_epoch_end}
    with pytest.raises(UserError, match="Mine defines on_train_epoch_end"):
        refuse_new(adopt(type("Mine", (Module,), names), [], {"data": tiny().data}), {})


@pytest.mark.parametrize("file", ["torch.nn.modules", "lightning.pytorch.core", "lightning_fabric"])
def test_a_hook_of_a_frameworks_own_class_is_not_refused(file: str) -> None:
    base = type("Base", (Module,), {"__module__": file, "on_train_epoch_end": lambda _: None})
    refuse_new(adopt(type("Mine", (base,), {}), [], {"data": tiny().data}), {})


class Late(Module):
    """Makes its layers when it knows the trainer."""

    calls: ClassVar[list[str]] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}, {self.trainer.max_steps} steps")
        self.net = nn.Linear(8, 2, bias=False)


def test_the_module_that_is_trained_is_prepared_and_set_up(train: Trainer) -> None:
    Late.calls.clear()
    experiment = adopt(Late, [], {"data": tiny().data})
    settings = {"train.batch_size": 50, "train.epochs": 1, "train.mlflow.log_pictures": False}
    trained = train(config.override(experiment(), settings))
    assert Late.calls[:2] == ["prepare_data", "setup fit, 4 steps"]
    assert {*trained.state.model.state_dict()} == {"module.net.weight"}


@pytest.mark.parametrize(
    "hook",
    [
        "configure_callbacks",
        "on_save_checkpoint",
        "on_load_checkpoint",
        "on_train_end",
        "training_epoch_end",
        "validation_epoch_end",
    ],
)
def test_a_hook_that_would_lose_something_is_refused(hook: str) -> None:
    with pytest.raises(UserError, match=f"Mine defines {hook}, which RankZero's loop does not"):
        refuse_new(
            adopt(type("Mine", (Module,), {hook: lambda *_: None}), [], {"data": tiny().data}), {}
        )


@pytest.mark.parametrize("hook", ["state_dict", "load_state_dict"])
def test_a_state_of_the_data_is_refused_and_one_of_the_module_is_not(hook: str) -> None:
    mine = type("Mine", (Module,), {hook: lambda *_: {}})
    refuse_new(adopt(mine, [], {"data": tiny().data}), {})
    with pytest.raises(UserError, match=f"Samples defines {hook}, which RankZero's loop does not"):
        refuse_new(adopt(mine, [type("Samples", (), {hook: lambda *_: {}})], {}), {})


class OwnLoaders(Module):
    """Reads the ranks where it makes its data, as a data module may."""

    def setup(self, stage: str) -> None:
        self.share = 64 // self.trainer.world_size

    def train_dataloader(self) -> Any:
        return DataLoader(tiny().data()[0], batch_size=self.share)

    def val_dataloader(self) -> Any:
        return DataLoader(tiny().data()[1], batch_size=self.share)


def test_data_are_made_with_the_ranks_known() -> None:
    data_module = type("Samples", (OwnLoaders,), {})
    for experiment in (adopt(OwnLoaders, [], {}), adopt(Module, [data_module], {})):
        assert len(experiment().data()[0]) == len(tiny().data()[0])


class Sized(Module):
    """Has a batch size of its own, and a loader with another."""

    def __init__(self, lr: float = 0.1, batch_size: int = 32) -> None:
        super().__init__(lr)

    def train_dataloader(self) -> Any:
        return DataLoader(tiny().data()[0], batch_size=8)

    def val_dataloader(self) -> Any:
        return DataLoader(tiny().data()[1])


def test_the_batch_size_of_a_module_is_the_default_also_with_train_in_the_file() -> None:
    names = {"data": tiny().data}
    for given, size in ((Train(epochs=1), 32), (Train(batch_size=64), 64)):
        assert adopt(Sized, [], {**names, "train": given})().train.batch_size == size


def test_a_loaders_batch_size_that_the_run_ignores_is_noticed() -> None:
    for size, note in ((32, "the training loader has batch_size=8, the run 32"), (8, "")):
        experiment = config.override(adopt(Sized, [], {})(), {"train.batch_size": size})
        assert experiment._loader_note == note.replace("run ", "run train.batch_size=")  # type: ignore[attr-defined]


class Images:
    """A data module with arguments that its module has, too."""

    def __init__(self, size: int = 224, batch_size: int = 128) -> None: ...


@pytest.mark.parametrize(("size", "text"), [(224, ""), (32, "size is 32 in Net and 224 in Images")])
def test_arguments_of_a_module_and_its_data_module_must_have_one_default(
    size: int, text: str
) -> None:
    class Net(Module):
        def __init__(self, lr: float = 0.1, size: int = size, batch_size: int = 32) -> None: ...

    experiment = adopt(Net, [Images], {})
    assert experiment().train.batch_size == 128
    assert ignored_hooks(experiment).partition(":")[0] == text


class Awkward(Module):
    """Has arguments with names that an experiment has, too."""

    def __init__(
        self,
        learning_rate: float = 0.1,
        lambda_: float = 0.5,
        data: str = "a",
        source: str = "b",
        turns: int = 1,
        train: bool = True,
        goal: str = "c",
        search: str = "d",
        extra: Any = None,
    ) -> None:
        super().__init__(learning_rate)
        self.got = (lambda_, data, source, turns, train, goal, search, extra)


def test_each_argument_gets_its_own_setting_and_no_object_of_the_experiment() -> None:
    experiment = adopt(Awkward, [], {"data": tiny().data})
    own = (True, "c", "d", None)
    assert experiment().model().module.got == (0.5, "a", "b", 1, *own)
    settings = {"lambda": 0.25, "data": "A", "source": "B", "turns": 2, "lr": 0.3}
    module = config.override(experiment(), settings).model().module
    assert module.got == (0.25, "A", "B", 2, *own) and module.lr == 0.3


PARTS = """
from lightning_like import LightningModule
from support.training import tiny

data = tiny().data

class Backbone(LightningModule):
    def __init__(self, width):
        super().__init__()

class Net(LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
    def training_step(self, batch, batch_idx): ...
"""
OTHER = """
class Other(Net.__mro__[1]):
    def training_step(self, batch, batch_idx): ...
    def on_train_epoch_end(self): ...
"""


@pytest.mark.parametrize(("other", "name"), [("", ""), (OTHER, ":Net")])
def test_only_the_module_that_is_asked_for_must_fit_the_loop(
    other: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = type("LightningModule", (nn.Module,), {"training_step": lambda *_: None})
    base.training_step.__module__ = base.__module__ = "lightning.pytorch.core.module"
    like: Any = types.ModuleType("lightning_like")
    like.LightningModule = base
    monkeypatch.setitem(sys.modules, "lightning_like", like)
    file = tmp_path / f"parts_{len(name)}.py"
    file.write_text(PARTS + other)
    assert experiment_file.load(f"{file}{name}").__name__ == "Net"
    if other:
        with pytest.raises(UserError, match=r"name one, .*:Net or .*:Other"):
            experiment_file.load(str(file))
    file.write_text(PARTS + "# edited")
    assert is_outdated(experiment_file.load(f"{file}{name}"))

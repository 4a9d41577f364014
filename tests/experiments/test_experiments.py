"""The example experiments load, train on fake data, and name missing data."""

from __future__ import annotations

import errno
import fcntl
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from rankzero import Experiment, UserError, flatten, from_yaml, override, to_yaml
from rankzero.config.values import render
from rankzero.experiment_file import load
from support.paths import EXPERIMENTS

FOLDER = EXPERIMENTS
FILES = ["digits.py", "mnist.py", "cifar10.py"]
SMALL = {
    "mnist.py": {"data": "fake", "fake_samples": "64"},
    "cifar10.py": {"data": "fake", "fake_samples": "64"},
}


@pytest.fixture(autouse=True)
def imports_left_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test import the files afresh: they go by short names such as `mnist`."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in set(sys.modules) - before if "." not in name]:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == FOLDER:
            del sys.modules[name]


def experiment(file: str) -> Experiment:
    return override(load(str(FOLDER / file))(), SMALL.get(file, {}))


@pytest.mark.parametrize("file", FILES)
def test_settings_survive_text_and_yaml(file: str) -> None:
    config = override(experiment(file), {"lr": 0.0123, "train.steps": 7})
    assert from_yaml(type(config), to_yaml(config)) == config
    assert (
        override(type(config)(), {key: render(value) for key, value in flatten(config).items()})
        == config
    )


@pytest.mark.parametrize("file", FILES)
def test_search_space_names_settings(file: str) -> None:
    config = experiment(file)
    assert config.search and set(config.search) <= set(flatten(config))


@pytest.mark.parametrize("file", FILES)
def test_experiment_can_take_a_step(file: str) -> None:
    config = experiment(file)
    train, val = config.data()
    model = config.model()
    optimizer = config.optimizer(model)
    batch = default_collate([train[index] for index in range(4)])
    measured = config.measure(model, batch)
    measured["loss"].backward()
    optimizer.step()
    assert len(train) > len(val) > 0
    assert set(measured) == {"loss", "accuracy"}
    assert all(value.shape == () and value.isfinite() for value in measured.values())
    assert model(batch[0]).shape == (4, 10)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_fake_digits_have_the_shape_of_real_ones() -> None:
    pixels, label = experiment("mnist.py").data()[0][0]
    assert (pixels.shape, pixels.dtype, label.dtype) == ((784,), torch.float32, torch.int64)


def test_images_are_augmented_for_training_only() -> None:
    train, val = experiment("cifar10.py").data()
    assert (train[0][0].shape, train[0][0].dtype) == ((3, 32, 32), torch.float32)
    assert not torch.equal(
        torch.stack([train[0][0] for _ in range(8)]), train[0][0].expand(8, -1, -1, -1)
    )
    assert torch.equal(val[0][0], val[0][0])


def test_resnet_has_the_stem_for_small_images() -> None:
    model = experiment("cifar10.py").model()
    assert model.conv1.stride == (1, 1) and model.conv1.weight.is_contiguous(
        memory_format=torch.channels_last
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962


def test_labels_are_smoothed_in_training_only() -> None:
    config = experiment("cifar10.py")

    class Sure(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[100.0] + 9 * [0.0]]).expand(len(images), 10)

    batch = torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)
    assert config.measure(Sure().eval(), batch)["loss"] == 0
    assert config.measure(Sure().train(), batch)["loss"] > 1


@pytest.mark.parametrize(
    ("file", "folder"), [("mnist.py", "MNIST/raw"), ("cifar10.py", "cifar-10-batches-py")]
)
def test_missing_data_error_names_the_folder(
    file: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise URLError("no route to host")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    with pytest.raises(UserError) as raised:
        override(experiment(file), {"data": "real"}).data()
    message = str(raised.value)
    assert (
        f"{tmp_path}/data/{folder}" in message
        and "(no route to host)" in message
        and "data=fake" in message
    )


class Downloads:
    """A data set as torchvision's are: there once someone has downloaded it."""

    there = False
    times = 0

    def __init__(self, root: Path, download: bool, train: bool) -> None:
        if download:
            Downloads.there, Downloads.times = True, Downloads.times + 1
        if not Downloads.there:
            raise RuntimeError("Dataset not found")


def test_existing_data_is_not_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment("mnist.py")  # puts the folder of vision_data.py on the path
    from vision_data import downloaded

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Downloads, "there", False)
    monkeypatch.setattr(Downloads, "times", 0)
    for _ in range(3):
        downloaded(Downloads, train=True)
    assert Downloads.times == 1


def test_data_is_found_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    experiment("mnist.py")  # puts the folder of vision_data.py on the path
    from vision_data import downloaded

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Downloads, "there", True)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert isinstance(downloaded(Downloads, train=True), Downloads)


def test_digits_reach_their_target_in_an_own_loop() -> None:
    torch.manual_seed(0)
    digits = experiment("digits.py")
    train, val = digits.data()
    model = digits.model()
    optimizer = digits.optimizer(model)
    loader = DataLoader(train, 64, shuffle=True, collate_fn=digits.collate)
    total = 6 * len(loader)
    for step in range(total):
        if step % len(loader) == 0:
            batches = iter(loader)
        for group in optimizer.param_groups:
            group["lr"] = digits.lr * digits.schedule(step, total)
        optimizer.zero_grad()
        digits.measure(model.train(), next(batches))["loss"].backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = float(digits.measure(model.eval(), val[:])["accuracy"])
    assert digits.goal.reached(accuracy)

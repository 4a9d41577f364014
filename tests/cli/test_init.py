"""`rankzero init`: a file that trains as it is, and never replaces one."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

import pytest
from torch import nn

from rankzero import config, experiment_file
from rankzero.cli.init import TEMPLATES
from rankzero.cli.main import main
from support.training import Trainer


class StandIn(nn.Module):
    """Has what RankZero uses of a LightningModule."""

    automatic_optimization = True

    def prepare_data(self) -> None: ...

    def setup(self, stage: str) -> None: ...


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning, or a stand-in where it is not installed."""
    if importlib.util.find_spec("lightning") is None:
        package, found = types.ModuleType("lightning"), types.ModuleType("lightning.pytorch")
        base = type("LightningModule", (StandIn,), {"__module__": found.__name__})
        package.__spec__ = importlib.machinery.ModuleSpec("lightning", None)
        monkeypatch.setattr(found, "LightningModule", base, raising=False)
        monkeypatch.setitem(sys.modules, "lightning", package)
        monkeypatch.setitem(sys.modules, "lightning.pytorch", found)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.usefixtures("lightning")
def test_a_template_trains(template: str, tmp_path: Path, train: Trainer) -> None:
    path = tmp_path / "new folder" / f"my_{template}-try.py"
    assert main(["init", str(path), "--template", template]) == 0
    experiment = experiment_file.load(str(path))
    assert experiment.__name__ == f"My{template.capitalize()}Try"
    assert f"rankzero train {path.name}" in path.read_text()
    short = config.override(experiment(), {"train.epochs": 1, "train.steps": 2})
    assert train(short, tmp_path / "run").state.step == 2


def test_template_of_a_package_that_is_missing_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main(["init", str(tmp_path / "mine.py"), "--template", "lightning"]) == 0
    assert "pip install 'rankzero[lightning]'" in capsys.readouterr().out


def test_no_file_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text("mine")
    for name, says in (
        ("mine.py", "exists already"),
        ("mine", "write mine.py"),
        ("torch.py", "hide the module 'torch'"),
        ("__main__.py", "hide the module '__main__'"),
        ("mine.py/x.py", "mine.py exists already"),
        ("/proc/none/x.py", "cannot write"),
    ):
        assert main(["init", str(tmp_path / name)]) == 2
        assert says in capsys.readouterr().err
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("stem", "name"),
    [("experiment", "MyExperiment"), ("vision", "Vision"), ("1st", "My1st"), ("none", "MyNone")],
)
def test_a_class_has_a_name_of_its_own(
    stem: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine" / f"{stem}.py"
    assert main(["init", f"mine/{stem}.py"]) == 0
    assert f"rankzero train mine/{stem}.py " in path.read_text()
    assert experiment_file.load(str(path)).__name__ == name

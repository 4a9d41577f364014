"""The examples train and resume on one and two processes, in search and in compare."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from rankzero import UserError, experiment_file
from support.commands import Command
from support.paths import EXPERIMENTS
from support.two_ranks import Case, launched, seen

GOALS = {
    "finetune.py": "val/accuracy",
    "gan.py": "val/distance",
    "gpt.py": "val/perplexity",
    "lengths.py": "val/accuracy",
    "stream.py": "val/accuracy",
    "tabular.py": "val/auroc",
    "unet.py": "val/iou",
}
SMALL: dict[str, dict[str, Any]] = {
    "finetune.py": {"pretrain_epochs": 0, "frozen_epochs": 1, "train.batch_size": 50},
    "gan.py": {"width": 8, "samples": 256},
    "gpt.py": {"width": 16, "layers": 1, "context": 32, "train.eval_batch": 128},
    "lengths.py": {"width": 4, "step_words": 640},
    "stream.py": {"width": 2, "train.workers": 0},
    "tabular.py": {},
    "unet.py": {"width": 2, "samples": 32, "train.batch_size": 8},
}
STEPS = {"train.steps": 4, "train.eval_every": 2, "train.log_every": 1}


def cases(folder: Path) -> list[Case]:
    shards = {"stream.py": {"folder": str(folder / "shards")}}
    return [
        Case(
            f"{file}{name}",
            {**STEPS, **settings, **shards.get(file, {})},
            stop_at,
            file=EXPERIMENTS / file,
        )
        for file, settings in SMALL.items()
        for name, stop_at in (("", None), ("-again", 2))
    ]


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    return launched(folder, 1, cases(folder))


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    return launched(folder, 2, cases(folder))


@pytest.mark.parametrize("file", SMALL)
@pytest.mark.parametrize("processes", [pytest.param("on_one", marks=pytest.mark.slow), "on_two"])
def test_a_resume_trains_as_if_nothing_had_happened(
    processes: str, file: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(processes)
    straight, again = seen(folder, file), seen(folder, f"{file}-again")
    assert 0 < again["begun"][1] < 4 and again["ends"][-1][1] == 4
    assert (again["losses"], again["evaluated"]) == (straight["losses"], straight["evaluated"])
    assert math.isfinite(straight["evaluated"]["4"][GOALS[file]])


def test_two_processes_train_the_gpt_like_one(on_one: Path, on_two: Path) -> None:
    one, two = seen(on_one, "gpt.py"), seen(on_two, "gpt.py")
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert two["evaluated"]["4"] == pytest.approx(one["evaluated"]["4"], rel=1e-4)


@pytest.mark.parametrize("file", ["*.py", "tutorials/*.py"])
def test_the_documented_commands_train_on_two_four_and_eight_gpus(file: str) -> None:
    for path in sorted(EXPERIMENTS.glob(file)):
        if "rankzero train" in path.read_text():
            train = experiment_file.load(str(path))().train
            assert all(train.batch_size % ranks == 0 for ranks in (2, 4, 8)), path


def test_ranks_of_two_machines_with_one_pid_write_the_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, save = list[str](), torch.save

    def saved(samples: object, path: Path) -> None:
        names.append(path.name)
        save(samples, path)

    monkeypatch.setattr(torch, "save", saved)
    stream = experiment_file.load(str(EXPERIMENTS / "stream.py"))(folder=str(tmp_path))
    for _ in range(2):
        stream.data()
    assert len(set(names)) == len(names) > 2


def test_weights_of_imagenet_get_images_with_its_mean_and_spread() -> None:
    kind = experiment_file.load(str(EXPERIMENTS / "finetune.py"))
    images, own = (kind(weights=weights).data()[0].tensors[0] for weights in ("DEFAULT", None))
    assert images[:, 0] == pytest.approx((own[:, 0] - 0.485) / 0.229, abs=1e-5)


def test_a_copied_gpt_says_that_it_has_no_text(tmp_path: Path) -> None:
    (tmp_path / "gpt.py").write_text((EXPERIMENTS / "gpt.py").read_text())
    with pytest.raises(UserError, match="no pages in"):
        experiment_file.load(str(tmp_path / "gpt.py"))().data()


def test_padding_does_not_change_what_a_reader_says() -> None:
    reader = experiment_file.load(str(EXPERIMENTS / "lengths.py"))(width=8).model().eval()
    short = torch.tensor([[5, 3, 8]])
    alone, padded = reader(short), reader(torch.nn.functional.pad(short, (0, 30)))
    assert alone.detach() == pytest.approx(padded.detach(), abs=1e-6)


def words(file: str, *, without: Collection[str] = ()) -> list[str]:
    """Return the settings of a short run, as a command takes them."""
    settings = {**SMALL[file], **STEPS, "train.mlflow.log_model": "false"}
    return [f"{key}={value}" for key, value in settings.items() if key not in without]


@pytest.mark.slow
@pytest.mark.parametrize("file", SMALL)
def test_an_example_in_a_search(rankzero: Command, file: str) -> None:
    path = EXPERIMENTS / file
    # The search draws these, and its reference must lie in their ranges.
    drawn = experiment_file.load(str(path)).search
    code, output = rankzero(
        *("search", path, "--nproc", 2, "--trials", 2, "--no-probe", *words(file, without=drawn))
    )
    assert code == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("file", SMALL)
def test_an_example_in_a_comparison(rankzero: Command, file: str) -> None:
    code, output = rankzero(
        *("compare", EXPERIMENTS / file, "--strategies", "single,ddp", "--nproc", "1,2"),
        *words(file),
    )
    assert code == 0 and "not run" not in output, output

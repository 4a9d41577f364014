"""Pictures are captured at evaluations, and nothing else changes."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from torch import nn

from rankzero import config, experiment_file
from rankzero.events import Evaluated, Event, PicturesTaken
from rankzero.experiment import Experiment
from rankzero.ranks import Ranks
from rankzero.run_store import picture_files
from rankzero.run_store.folder import RunFolder
from rankzero.tracking.run_log import RunLog
from rankzero.training.build import build
from rankzero.training.distributed.world import World
from rankzero.training.loop import fit
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.sample_images.capture import (
    MIN_SECONDS,
    ImageCapture,
    caught,
)
from rankzero.training.sample_images.mistakes import classified
from rankzero.training.sample_images.user_images import class_names
from rankzero.training.stop import StopRequest
from rankzero.training.worker import _image_capture
from support.paths import FIXTURES

PICTURED = FIXTURES / "pictured.py"
CPU = torch.device("cpu")


@dataclasses.dataclass
class Shown:
    """The results of a training with pictures."""

    events: list[Event]
    notices: list[str]
    folder: Path
    weights: list[torch.Tensor]

    @property
    def taken(self) -> list[PicturesTaken]:
        return [event for event in self.events if isinstance(event, PicturesTaken)]

    def arrays(self, number: int) -> dict[str, Any]:
        return picture_files.read(self.folder / self.taken[number].path)

    def metrics(self) -> list[tuple[int, dict[str, float]]]:
        return [
            (event.step, dict(event.metrics))
            for event in self.events
            if isinstance(event, Evaluated)
        ]


def pictured(cls: str = "Pictured", **changes: Any) -> Experiment:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return config.override(experiment_file.load(f"{PICTURED}:{cls}")(), named)


def run(experiment: Experiment, folder: Path, watch: bool = True) -> Shown:
    job, state = build(experiment, World(Ranks(), torch.device("cpu")))
    events: list[Event] = []
    notices: list[str] = []
    own = experiment.pictures if type(experiment).pictures is not Experiment.pictures else None
    (shown,) = job.val_loaders.values()
    names = class_names(shown.dataset)
    folder.mkdir(exist_ok=True)
    capture = ImageCapture(
        folder / "pictures",
        total=shown.samples,
        classes=names,
        own=own,
        notice=notices.append,
    )
    if watch:
        job = dataclasses.replace(job, image_capture=capture)
    fit(job, state, events.append, StopRequest(), None, RunTotals())
    return Shown(
        events, notices, folder, [one.detach().clone() for one in state.model.parameters()]
    )


def test_embeddings_are_not_taken_for_scores(tmp_path: Path) -> None:
    embeddings = torch.rand(4, 128)
    assert classified((X, Y), embeddings, 10) is None and classified((X, Y), OUT, 2) is not None
    capture, model = (
        ImageCapture(tmp_path / "pictures", classes=["a", "b", "c"]),
        nn.Linear(75, 128),
    )
    with capture.watching(model) as see:
        model(X.flatten(1))
        see((X, Y), 4)
    assert capture.take(1, model, CPU, contextlib.nullcontext()) is None


X, Y, OUT = torch.rand(4, 3, 5, 5), torch.tensor([0, 1, 0, 1]), torch.rand(4, 2)


def test_pictures_change_no_metric_no_weight_and_no_random_number(tmp_path: Path) -> None:
    bare = run(pictured(), tmp_path / "bare", watch=False)
    after = torch.rand(3)
    shown = run(pictured("Showing"), tmp_path / "shown")
    assert torch.equal(torch.rand(3), after)
    assert shown.taken and not bare.taken and not shown.notices
    assert shown.metrics() == bare.metrics()
    assert all(
        torch.equal(one, other) for one, other in zip(shown.weights, bare.weights, strict=True)
    )


def test_pictures_of_the_first_and_last_evaluation_have_class_names(
    tmp_path: Path,
) -> None:
    shown = run(pictured(), tmp_path)
    assert [event.step for event in shown.taken] == [3, 12]
    first, last = shown.arrays(0), shown.arrays(1)
    assert first["classes"].tolist() == ["dark", "middling", "bright"]
    assert (
        first["batch"].shape == (16, 6, 6, 1)
        and first["batch"].dtype == np.uint8
        and "batch" not in last
    )
    assert last["confusion"].sum() == last["samples"] == last["total"] == 45
    accuracy = dict(shown.metrics())[12]["val/accuracy"]
    assert last["confusion"].trace() / 45 == pytest.approx(accuracy) and last["wrong"] == round(
        45 * (1 - accuracy)
    )


def test_outputs_of_a_compiled_model_are_caught(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    model.compile(backend="eager")
    outputs: list[torch.Tensor] = []
    x = torch.rand(4, 3)
    before = model(x)
    with caught(model, outputs):
        seen = model(x)
        assert outputs[0] is seen and torch.equal(seen, before)
        model(x), model(x)
    model(x)
    assert len(outputs) == 2, "no more than are needed are kept, and none afterwards"


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.*:DeprecationWarning", "ignore:`torch.jit.*:FutureWarning"
)
def test_model_without_hooks_is_evaluated_without_pictures(tmp_path: Path) -> None:
    notices: list[str] = []
    capture = ImageCapture(tmp_path / "pictures", notice=notices.append)
    model = torch.jit.script(nn.Linear(3, 2))
    for _ in range(2):
        with capture.watching(model) as see:
            model(torch.rand(4, 3))
            see((X[:4], Y), 4)
        assert capture.take(1, model, CPU, contextlib.nullcontext()) is None
    (notice,) = notices
    assert notice.startswith("no more pictures: ") and not (tmp_path / "pictures").exists()


def test_hook_is_removed_after_a_failed_evaluation(tmp_path: Path) -> None:
    notices: list[str] = []
    capture, model = ImageCapture(tmp_path / "pictures", notice=notices.append), nn.Linear(3, 2)
    with pytest.raises(KeyError), capture.watching(model):
        raise KeyError("measure() is wrong")
    assert not model._forward_hooks and not notices


def test_model_that_is_called_twice_has_no_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = pictured()
    once = type(experiment).measure

    def twice(self: Any, model: Any, batch: Any) -> Any:
        model(batch[0])
        return once(self, model, batch)

    monkeypatch.setattr(type(experiment), "measure", twice)
    shown = run(experiment, tmp_path)
    assert "confusion" not in shown.arrays(0) and len(shown.taken) == 1 and not shown.notices


def test_own_pictures_are_kept_as_bytes(tmp_path: Path) -> None:
    found = run(pictured("Showing", channels=3), tmp_path).arrays(0)
    assert found["own_names"].tolist() == ["input", "grey ramp/x"]
    assert found["own_0"].shape == (6, 6, 3) and found["own_1"].shape == (8, 8, 1)


@pytest.mark.parametrize(
    ("own", "says"), [("raises", "no such picture"), ("odd", r"'odd': an image has the shape")]
)
def test_failing_own_pictures_are_reported_once(tmp_path: Path, own: str, says: str) -> None:
    shown = run(pictured("Showing", own=own), tmp_path)
    (notice,) = shown.notices
    assert says.replace("'", "") in notice.replace("'", "") and len(shown.metrics()) == 4
    assert [event.step for event in shown.taken] == [3, 12]


@pytest.mark.parametrize(("own", "rank"), [("figure", 0), ("figures", 0), ("figure", 1)])
def test_figures_are_closed_on_every_rank(tmp_path: Path, own: str, rank: int) -> None:
    pyplot.close("all")
    experiment = pictured("Showing", own=own)
    model = experiment.model()
    capture = ImageCapture(None if rank else tmp_path / "pictures", own=experiment.pictures)
    with capture.watching(model) as see:
        see((X, Y), 4)
    event = capture.take(0, model, CPU, contextlib.nullcontext())
    assert pyplot.get_fignums() == [] and (event is not None) == (own == "figure" and rank == 0)


def test_full_disk_ends_the_pictures_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(picture_files, "write", full)
    shown = run(pictured(), tmp_path)
    assert len(shown.metrics()) == 4 and not shown.taken
    assert shown.notices == ["no more pictures: OSError: [Errno 28] No space left on device"]


def test_pictures_of_new_bests_are_rare() -> None:
    capture = ImageCapture()
    assert capture.due(better=False, last=False, seconds=0.5), "the first evaluation"
    assert not capture.due(better=True, last=False, seconds=MIN_SECONDS)
    assert not capture.due(better=False, last=False, seconds=50.0)
    assert capture.due(better=True, last=False, seconds=50.0)
    assert capture.due(better=False, last=True, seconds=50.1)
    day = [capture.due(better=True, last=False, seconds=float(at)) for at in range(60, 86400, 5)]
    assert 50 < sum(day) < 120


def test_only_rank_0_reads_class_names() -> None:
    job, _ = build(pictured(), World(Ranks(), torch.device("cpu")))
    log = RunLog(RunFolder(Path("x")), None, 1, None)
    found = [
        _image_capture(
            dataclasses.replace(job, world=World(Ranks(rank=rank), torch.device("cpu"))), log
        )._classes
        for rank in (0, 1)
    ]
    assert found == [["dark", "middling", "bright"], []]


def test_the_first_training_batch_is_kept_as_it_was(tmp_path: Path) -> None:
    capture = ImageCapture(tmp_path / "pictures")
    first, second = ((torch.full((20, 1, 2, 2), value), torch.arange(20)) for value in (0.0, 1.0))
    capture.see_training_batch(first)
    first[0].add_(9.0)
    capture.see_training_batch(second)
    assert capture._training_batch is not None
    images, labels = capture._training_batch
    assert len(images) == 16 and not images.any() and labels.tolist() == list(range(16))

"""Pictures at evaluations: what is counted, what is shown, when; and that nothing else changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset

from rankzero import config, experiment_file
from rankzero.events import Evaluated, Event, PicturesTaken
from rankzero.experiment import Experiment
from rankzero.ranks import Ranks
from rankzero.run_store import picture_files
from rankzero.run_store.folder import RunFolder
from rankzero.tracking.run_log import RunLog
from rankzero.training import evaluation
from rankzero.training.distributed.world import World
from rankzero.training.loop import fit
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.sample_images import mistakes as module
from rankzero.training.sample_images.capture import (
    _COMPILED_CALL,
    MIN_SECONDS,
    ImageCapture,
    caught,
)
from rankzero.training.sample_images.mistakes import (
    ClassifiedBatch,
    Mistakes,
    classified,
    small,
)
from rankzero.training.sample_images.user_images import (
    MAX_CLASSES,
    MAX_NAME_BYTES,
    MAX_PIXELS,
    as_bytes,
    class_names,
    images_of,
)
from rankzero.training.stop import Stop
from rankzero.training.worker import _gallery, build
from support.paths import FIXTURES

PICTURED = FIXTURES / "pictured.py"


@dataclasses.dataclass
class Shown:
    """What a training with pictures left."""

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
    names = class_names(job.val_loader.dataset)
    folder.mkdir(exist_ok=True)
    gallery = ImageCapture(
        folder / "pictures",
        total=job.val_loader.samples,
        classes=names,
        own=own,
        notice=notices.append,
    )
    if watch:
        job = dataclasses.replace(job, image_capture=gallery)
    fit(job, state, events.append, Stop(), None, RunTotals())
    return Shown(
        events, notices, folder, [one.detach().clone() for one in state.model.parameters()]
    )


def a_batch(samples: int, classes: int, seed: int) -> ClassifiedBatch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(samples, 1, 4, 4, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    return ClassifiedBatch(images, labels, torch.randn(samples, classes, generator=generator))


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    classes=st.integers(2, 7),
    seed=st.integers(0, 999),
)
def test_confusions_are_numpys_and_the_mistakes_are_the_hardest(
    sizes: list[int], classes: int, seed: int
) -> None:
    batches = [a_batch(size, classes, seed + number) for number, size in enumerate(sizes)]
    seen = Mistakes()
    for batch in batches:
        seen.add(batch)
    found = seen.read()
    assert found is not None
    labels = torch.cat([batch.labels for batch in batches])
    output = torch.cat([batch.output for batch in batches])
    predicted = output.argmax(1)
    pairs = (labels * classes + predicted).numpy()
    assert (found["confusion"].flatten() == np.bincount(pairs, minlength=classes**2)).all()
    losses = cross_entropy(output, labels, reduction="none")
    wrong = (predicted != labels).nonzero().flatten()
    hardest = wrong[losses[wrong].argsort(descending=True)][: module.MAX_SHOWN]
    assert found["mistakes_true"].tolist() == labels[hardest].tolist()
    assert found["mistakes_predicted"].tolist() == predicted[hardest].tolist()
    assert (
        len(found["mistakes"]) == len(hardest)
        and found["wrong"] == len(wrong)
        and found["samples"] == sum(sizes)
    )


def test_few_samples_wait_and_only_the_first_are_used() -> None:
    seen = Mistakes(max_samples=100, fold_rows=16)
    for seed in range(30):
        seen.add(a_batch(10, 3, seed))
        assert seen._waiting_rows < 16
    found = seen.read()
    assert (
        found is not None and found["confusion"].sum() == found["samples"] == 100 and found["cut"]
    )


def sized(seed: int, channels: int, height: int, width: int) -> ClassifiedBatch:
    batch = a_batch(5, 3, seed)
    return batch._replace(images=torch.rand(5, channels, height, width) + 1)


def test_images_of_different_sizes_are_shown_beside_each_other() -> None:
    seen = Mistakes()
    sizes = [(1, 4, 4), (1, 4, 4), (1, 9, 4), (3, 2, 12), (3, 300, 100), (1, 4, 4)]
    for seed, size in enumerate(sizes):
        seen.add(sized(seed, *size))
    found = seen.read()
    assert found is not None and found["confusion"].sum() == found["samples"] == 30
    assert found["mistakes"].shape == (module.MAX_SHOWN, 128, 43, 3)
    whole = found["mistakes"].reshape(module.MAX_SHOWN, -1)
    assert (whole.min(1) == 0).all() and (whole.max(1) == 255).all(), (
        "a frame is no brighter or darker than its image"
    )


def test_outputs_of_different_widths_are_told_before_a_device_stumbles_over_them() -> None:
    seen = Mistakes()
    seen.add(a_batch(5, 3, 0))
    with pytest.raises(ValueError, match="3 columns and 4"):
        seen.add(a_batch(5, 4, 0))


def test_outputs_that_the_next_call_overwrites_are_kept_as_they_were() -> None:
    place = torch.tensor(
        [[2.0, 1.0]] * 4
    )  # where a model compiled with CUDA graphs puts every output
    kept = classified((X, Y), place)
    place.copy_(torch.tensor([[0.0, 9.0]] * 4))
    assert kept is not None and (kept.output.argmax(1) == 0).all()


def test_embeddings_are_not_taken_for_scores_where_classes_are_known(tmp_path: Path) -> None:
    embeddings = torch.rand(4, 128)
    assert classified((X, Y), embeddings, 10) is None and classified((X, Y), OUT, 2) is not None
    gallery, model = (
        ImageCapture(tmp_path / "pictures", classes=["a", "b", "c"]),
        nn.Linear(75, 128),
    )
    with gallery.watching(model) as see:
        model(X.flatten(1))
        see((X, Y), 4)
    assert gallery.take(1, {}) is None


@pytest.mark.parametrize("label", [-100, 3])
def test_labels_that_are_no_classes_give_no_pictures(label: int) -> None:
    batch = a_batch(8, 3, 0)
    batch.labels[2] = label
    seen = Mistakes()
    seen.add(batch)
    assert seen.read() is None


def test_outputs_that_are_no_numbers_do_no_harm() -> None:
    batch = a_batch(8, 3, 0)
    batch.output[1:4] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    batch.images[:] = float("nan")
    seen = Mistakes()
    seen.add(batch)
    found = seen.read()
    assert found is not None and found["confusion"].sum() == 8 and found["mistakes"].max() == 0


def test_many_classes_have_mistakes_and_no_table() -> None:
    seen = Mistakes()
    seen.add(a_batch(20, module.MAX_CLASSES + 1, 0))
    found = seen.read()
    assert (
        found is not None
        and "confusion" not in found
        and len(found["mistakes"]) == module.MAX_SHOWN
    )


def test_large_images_are_made_small() -> None:
    assert small(torch.rand(2, 3, 512, 256)).shape == (
        2,
        3,
        module.MAX_PIXELS,
        module.MAX_PIXELS // 2,
    )
    assert small(torch.rand(2, 1, 8, 8)).shape == (2, 1, 8, 8)


X, Y, OUT = torch.rand(4, 3, 5, 5), torch.tensor([0, 1, 0, 1]), torch.rand(4, 2)


@pytest.mark.parametrize(
    ("batch", "output"),
    [
        ((X, Y), OUT[:, :1]),
        ((X, Y), OUT.flatten()),
        ((X, Y), OUT[:2]),
        ((X, Y), OUT.long()),
        ((X, Y), {"logits": OUT}),
        ((X, Y.float()), OUT),
        ((X, Y > 0), OUT),
        ((X, Y.view(2, 2)), OUT),
        ((X, Y[:3]), OUT),
        ((X.flatten(1), Y), OUT),
        ((X[:, :2], Y), OUT),
        ((X.byte(), Y), OUT),
        ((X[:0], Y[:0]), OUT[:0]),
        ((X, Y, Y), OUT),
        ({"x": X, "y": Y}, OUT),
        (X, OUT),
        (None, None),
    ],
)
def test_what_is_no_batch_of_labelled_images_is_left_alone(batch: Any, output: Any) -> None:
    assert classified((X, Y), OUT) is not None
    assert classified(batch, output) is None


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


def test_the_first_evaluation_and_the_last_are_shown_with_the_names_of_classes(
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


def test_compiled_call_attribute_exists() -> None:
    """Private to torch: `caught` replaces it to see the outputs of a compiled model."""
    model = nn.Linear(3, 2)
    assert getattr(model, _COMPILED_CALL) is None
    model.compile(backend="eager")
    assert callable(getattr(model, _COMPILED_CALL))


def test_a_compiled_model_is_watched_too(tmp_path: Path) -> None:
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
def test_a_model_that_takes_no_hook_is_evaluated_all_the_same(tmp_path: Path) -> None:
    notices: list[str] = []
    gallery = ImageCapture(tmp_path / "pictures", notice=notices.append)
    model = torch.jit.script(nn.Linear(3, 2))
    for _ in range(2):
        with gallery.watching(model) as see:
            model(torch.rand(4, 3))
            see((X[:4], Y), 4)
        assert gallery.take(1, {}) is None
    (notice,) = notices
    assert notice.startswith("no more pictures: ") and not (tmp_path / "pictures").exists()


def test_an_evaluation_that_fails_is_watched_no_longer(tmp_path: Path) -> None:
    notices: list[str] = []
    gallery, model = ImageCapture(tmp_path / "pictures", notice=notices.append), nn.Linear(3, 2)
    with pytest.raises(KeyError), gallery.watching(model):
        raise KeyError("measure() is wrong")
    assert not model._forward_hooks and not notices


def test_a_model_that_is_called_twice_has_no_one_answer(
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
def test_own_pictures_that_fail_are_told_once_and_cost_nothing_else(
    tmp_path: Path, own: str, says: str
) -> None:
    shown = run(pictured("Showing", own=own), tmp_path)
    (notice,) = shown.notices
    assert says.replace("'", "") in notice.replace("'", "") and len(shown.metrics()) == 4
    assert [event.step for event in shown.taken] == [3, 12]


@pytest.mark.parametrize(("own", "rank"), [("figure", 0), ("figures", 0), ("figure", 1)])
def test_figures_are_closed_on_every_rank(tmp_path: Path, own: str, rank: int) -> None:
    pyplot.close("all")
    experiment = pictured("Showing", own=own)
    job, state = build(experiment, World(Ranks(), torch.device("cpu")))
    gallery = ImageCapture(tmp_path / "pictures", own=experiment.pictures)
    gallery.first_batch = X, Y
    job = dataclasses.replace(
        job, image_capture=gallery, world=World(Ranks(rank=rank), torch.device("cpu"))
    )
    events: list[Event] = []
    evaluation.show(job, state, better=True, last=True, seconds=1.0, emit=events.append)
    assert pyplot.get_fignums() == [] and len(events) == (own == "figure" and rank == 0)


def test_a_full_disk_ends_the_pictures_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(picture_files, "write", full)
    shown = run(pictured(), tmp_path)
    assert len(shown.metrics()) == 4 and not shown.taken
    assert shown.notices == ["no more pictures: OSError: [Errno 28] No space left on device"]


def test_pictures_of_new_bests_come_now_and_then() -> None:
    gallery = ImageCapture()
    assert gallery.due(better=False, last=False, seconds=0.5), "the first evaluation"
    assert not gallery.due(better=True, last=False, seconds=MIN_SECONDS)
    assert not gallery.due(better=False, last=False, seconds=50.0)
    assert gallery.due(better=True, last=False, seconds=50.0)
    assert gallery.due(better=False, last=True, seconds=50.1)
    day = [gallery.due(better=True, last=False, seconds=float(at)) for at in range(60, 86400, 5)]
    assert 50 < sum(day) < 120


def test_class_names_are_found_in_what_a_subset_is_of() -> None:
    inner = TensorDataset(X, Y)
    assert class_names(Subset(inner, [0])) == []
    inner.classes = ("cat", "dog")  # type: ignore[attr-defined]
    assert class_names(Subset(Subset(inner, [0, 1]), [0])) == ["cat", "dog"]
    looped = Subset(inner, [0])
    looped.dataset = looped
    assert class_names(looped) == []


class Lazy(TensorDataset):
    """Reads all of its labels when it is asked for its classes."""

    asked = 0

    @property
    def classes(self) -> list[str]:
        Lazy.asked += 1
        return ["a"]


def test_names_of_classes_are_taken_only_where_they_lie() -> None:
    Lazy.asked = 0
    assert class_names(Subset(Lazy(X, Y), [0])) == [] and Lazy.asked == 0
    inner = TensorDataset(X, Y)
    inner.classes = [("tench", "Tinca tinca"), ("goldfish",), "shark"]  # type: ignore[attr-defined]
    assert class_names(inner) == ["tench", "goldfish", "shark"]
    inner.classes = ["x"] * (MAX_CLASSES + 1)  # type: ignore[attr-defined]
    assert class_names(inner) == []


def test_only_rank_0_looks_for_names_of_classes() -> None:
    job, _ = build(pictured(), World(Ranks(), torch.device("cpu")))
    log = RunLog(RunFolder(Path("x")), None, 1, None)
    found = [
        _gallery(
            dataclasses.replace(job, world=World(Ranks(rank=rank), torch.device("cpu"))), log
        )._classes
        for rank in (0, 1)
    ]
    assert found == [["dark", "middling", "bright"], []]


def test_names_of_own_pictures_are_cut_by_bytes_and_stay_apart() -> None:
    keys = ["é" * 100, "é" * 101, "é" * 30, 1, "1", "a\ud800"]
    found = list(images_of(dict.fromkeys(keys, X[0])))
    assert found == ["é" * 30, "é" * 28 + " (2)", "é" * 28 + " (3)", "1", "1 (2)", "a?"]
    assert all(len(name.encode()) <= MAX_NAME_BYTES for name in found)


def images() -> dict[str, tuple[Any, tuple[int, ...]]]:
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(2, 1))
    figure.subplots()
    return {
        "tensor": (torch.rand(3, 5, 7), (5, 7, 3)),
        "bytes": (torch.zeros(5, 7, dtype=torch.uint8), (5, 7, 1)),
        "half": (torch.rand(1, 5, 7).bfloat16(), (5, 7, 1)),
        "array": (np.random.default_rng(0).normal(size=(5, 7, 3)), (5, 7, 3)),
        "mask": (np.ones((5, 7), bool), (5, 7, 1)),
        "pil": (Image.new("L", (7, 5)), (5, 7, 3)),
        "figure": (figure, (120, 240, 3)),
        "huge": (torch.zeros(5000, 10), (1667, 4, 1)),
    }


@pytest.mark.parametrize("name", list(images()))
def test_every_kind_of_image_becomes_bytes(name: str) -> None:
    image, shape = images()[name]
    found = as_bytes(image)
    assert found.shape == shape and found.dtype == np.uint8


def test_an_image_that_no_memory_would_hold_is_thinned_before_it_is_copied() -> None:
    found = as_bytes(np.broadcast_to(np.float32(0.5), (1_000_000, 1_000_000)))
    assert max(found.shape) <= MAX_PIXELS and (found == 128).all()


@pytest.mark.parametrize(
    "odd", ["a path", None, torch.zeros(2, 2, 2, 2), np.zeros((5, 5, 2)), np.array([["a"]])]
)
def test_what_is_no_image_is_said(odd: Any) -> None:
    with pytest.raises(ValueError, match=r"is no tensor|shape|numbers"):
        as_bytes(odd)


def test_the_first_training_batch_is_kept_as_it_was(tmp_path: Path) -> None:
    capture = ImageCapture(tmp_path / "pictures")
    first, second = ((torch.full((20, 1, 2, 2), value), torch.arange(20)) for value in (0.0, 1.0))
    capture.see_training_batch(first)
    first[0].add_(9.0)
    capture.see_training_batch(second)
    assert capture._training_batch is not None
    images, labels = capture._training_batch
    assert len(images) == 16 and not images.any() and labels.tolist() == list(range(16))

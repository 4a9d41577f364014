"""Evaluations: several validation sets, and equal batches for a measure with collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset, default_collate

from rankzero import experiment_file
from rankzero.config import override
from rankzero.errors import UserError
from rankzero.events import Evaluated
from rankzero.experiment import Goal
from rankzero.launch import failures
from rankzero.ranks import Ranks
from rankzero.ratio import Ratio
from rankzero.run_store import checkpoint_files
from rankzero.training.data import sets
from rankzero.training.data.stream import length_of
from rankzero.training.distributed.world import World
from rankzero.training.evaluation import evaluate_goal
from rankzero.training.stop import StopCode, StopRequest
from support.paths import FIXTURES
from support.training import Trained, Trainer, tiny

Tiny: Any = type(tiny())


class Several(Tiny):
    goal = Goal("val/far/accuracy", "max")
    draws: bool = False
    has_f1: bool = True

    def data(self) -> Any:
        train, near = super().data()
        return train, {"near": near, "far": tiny(augment=True).data()[0]}

    def measure(self, model: Any, batch: Any) -> Any:
        luck = {"luck": torch.rand(())} if self.draws and not model.training else {}
        f1 = {"f1": torch.tensor(0.5)} if self.has_f1 else {}
        return {**super().measure(model, batch), **luck, **f1}


def several(**changes: Any) -> Any:
    settings = {"train.steps": 10, "train.eval_every": 5, **changes}
    return override(Several(), {key.replace("__", "."): value for key, value in settings.items()})


def unvalidated(**changes: Any) -> Any:
    """Return an experiment without a validation set, of two epochs of six steps."""
    made = experiment_file.load(str(FIXTURES / "unvalidated.py"))()
    changes = {"train__epochs": 2, "train__log_every": 1, **changes}
    return override(made, {key.replace("__", "."): value for key, value in changes.items()})


class Differing(World):
    """A world whose rank 1 has other parameters."""

    def __init__(self) -> None:
        super().__init__(Ranks(), torch.device("cpu"))

    def ranks_that_differ(self, values: torch.Tensor) -> list[int]:
        del values
        return [1]


def evaluated(trained: Trained) -> list[Evaluated]:
    return [event for event in trained.events if isinstance(event, Evaluated)]


def test_each_validation_set_has_metrics_of_its_own(train: Trainer) -> None:
    trained = train(several(train__micro_batch=8))
    *_, last = evaluated(trained)
    x, y = trained.job.experiment.data()[1]["near"].tensors
    with torch.no_grad():
        loss = cross_entropy(trained.state.model.eval()(x), y)
    assert last.metrics["val/near/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert set(last.metrics) == {
        f"val/{name}/{metric}" for name in ("near", "far") for metric in ("loss", "accuracy", "f1")
    }
    assert trained.state.best == max(e.metrics["val/far/accuracy"] for e in evaluated(trained))


class Skipping(Tiny):
    """Skips broken samples, of which some batches consist."""

    goal = Goal("val/loss", "min")
    is_stream: bool = False

    def data(self) -> Any:
        train, _ = super().data()
        good, broken = [train[number] for number in range(4)], [(None, 0)] * 2
        samples = [*good[:2], *broken, *good[2:]]
        return train, Samples(samples) if self.is_stream else samples

    def collate(self, samples: Any) -> Any:
        found = [one for one in samples if one[0] is not None]
        return default_collate(found) if found else None

    def measure(self, model: Any, batch: Any) -> Any:
        if batch is None:
            return {"loss": Ratio(torch.zeros(()), 0)}
        x, y = batch
        return {"loss": Ratio(cross_entropy(model(x), y, reduction="sum"), len(y))}


class Samples(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


@pytest.mark.parametrize(
    ("is_stream", "strategy"), [(False, "single"), (True, "single"), (False, "fsdp")]
)
def test_a_batch_that_is_none_does_not_end_an_evaluation(
    train: Trainer, is_stream: bool, strategy: str
) -> None:
    settings = {"train.steps": 1, "train.eval_batch": 2, "train.strategy": strategy}
    trained = train(override(Skipping(), {**settings, "is_stream": is_stream}))
    (found,) = evaluated(trained)
    x, y = default_collate([trained.job.experiment.data()[0][number] for number in range(4)])
    with torch.no_grad():
        loss = cross_entropy(trained.state.model.eval()(x), y).item()
    assert found.metrics["val/loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("stop_at", [None, 8])
def test_without_a_validation_set_the_last_checkpoint_is_the_result(
    train: Trainer, tmp_path: Path, stop_at: int | None
) -> None:
    if stop_at is not None:
        train(unvalidated(), tmp_path, stop_at=stop_at)
    trained = train(unvalidated(), tmp_path)
    assert not evaluated(trained) and trained.state.step == 12 and trained.state.best is None
    best = checkpoint_files.best(tmp_path / "checkpoints", trained.job.experiment.goal)
    assert best is not None and checkpoint_files.read_manifest(best).step == 12
    with pytest.raises(UserError, match="the parameters of rank 1 differ"):
        evaluate_goal(
            dataclasses.replace(trained.job, world=Differing()), trained.state, StopRequest()
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"goal__metric": "val/accuracy"},
        {"train__eval_every": 5},
        {"train__patience": 2},
        {"train__schedule": "plateau"},
        {"train__limits__stop_at_target": True},
    ],
)
def test_what_needs_a_validation_set_is_refused_without_one(changes: dict[str, Any]) -> None:
    (key,) = changes
    setting = {"goal__metric": "goal"}.get(key, key.replace("__", "."))
    with pytest.raises(UserError, match=f"no validation set, .* need one: {setting}"):
        sets.load(unvalidated(**changes))


def test_a_goal_of_no_set_is_refused_before_the_training(train: Trainer) -> None:
    with pytest.raises(UserError, match="to val/near/accuracy or val/far/accuracy"):
        train(several(goal__metric="val/accuracy"))
    with pytest.raises(UserError, match=r"goal is 'val/near/f1'.*'val/near/accuracy'"):
        train(several(goal__metric="val/near/f1", has_f1=False))


def test_a_run_without_its_goal_has_a_checkpoint_to_resume(train: Trainer, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"draws": True, "dropout": 0.3, "goal__metric": "val/near/f1"}
    straight = train(several(**changes), tmp_path / "straight")
    for _ in range(2):  # also after a resume that mended nothing
        with pytest.raises(UserError, match=r"set goal\.metric"):
            train(several(**changes, has_f1=False), tmp_path / "parts")
    second = train(several(**changes), tmp_path / "parts")
    assert min(second.series("train/loss")) == 6, "no step is trained again"
    assert [one.metrics for one in evaluated(second)] == [
        one.metrics for one in evaluated(straight)
    ]


class Collective(Tiny):
    def measure(self, model: Any, batch: Any) -> Any:
        if not model.training:
            raise RuntimeError("/gloo/pair.cc: Connection closed by peer")
        return super().measure(model, batch)


def test_a_rank_lost_in_an_evaluation_without_lockstep_names_it(
    train: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError) as lost:
        train(override(Collective(), {"train.steps": 1}), tmp_path)
    assert "write lockstep = True" in failures.reason(lost.value)


@pytest.mark.parametrize("stop_at", [5, 10])
def test_an_interrupted_evaluation_of_several_sets_is_repeated_exactly(
    train: Trainer, tmp_path: Path, stop_at: int
) -> None:
    experiment = several(draws=True, train__micro_batch=1, dropout=0.3, train__log_every=1)
    straight = train(experiment, tmp_path / "straight")
    first = train(experiment, tmp_path / "parts", stop_at=stop_at, min_evaluation_seconds=0.0)
    assert first.stopped == StopCode.SIGTERM and first.state.evaluation_pending
    second = train(experiment, tmp_path / "parts")
    seen = {event.step: event.metrics for event in (*evaluated(first), *evaluated(second))}
    assert seen == {event.step: event.metrics for event in evaluated(straight)}
    assert {**first.series("train/loss"), **second.series("train/loss")} == straight.series(
        "train/loss"
    )


@pytest.mark.parametrize(
    ("validation", "says"),
    [
        ({}, "mapping of validation sets none"),
        ({"near": [1], "far": []}, "validation/near set 1 and validation/far set 0"),
        ({"a/b": [1]}, "called 'a/b': use a name without '/'"),
        (5, "must return two data sets"),
        (list(tiny().data()), "several validation sets are a mapping {name: set}"),
    ],
)
def test_unusable_validation_sets_get_one_message(validation: Any, says: str) -> None:
    class Odd(Tiny):
        def data(self) -> Any:
            return [1], validation

    with pytest.raises(UserError, match=says):
        sets.load(Odd())


def test_arrays_in_place_of_a_data_set_are_refused() -> None:
    class Odd(Tiny):
        def data(self) -> Any:
            train, _ = super().data()
            return train.tensors, train.tensors

    with pytest.raises(UserError, match=r"a tuple of 2 arrays .*TensorDataset\(x, y\)"):
        sets.load(Odd())
    assert length_of((torch.zeros(3), torch.zeros(3), torch.zeros(3))) == 3, "its samples"


def test_a_dictionary_with_numbers_is_one_data_set() -> None:
    data = {0: "a", 1: "b"}
    assert sets.by_group("val", data) == {"val": data}
    assert sets.context("val/near") == "validation/near" and sets.context("test") == "test"

"""The test set: evaluated once, on the best checkpoint, and without any influence."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from rankzero.config import override
from rankzero.errors import UserError
from rankzero.events import Evaluated
from rankzero.ranks import Ranks
from rankzero.training import final_test
from rankzero.training.build import build
from rankzero.training.checkpoints import best_model, restore
from rankzero.training.distributed.world import World
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.stop import EvaluationInterrupted, StopCode, StopRequest
from support.training import ALONE, Trained, Trainer, tiny, weights

Tiny: Any = type(tiny())


class HeldOut(Tiny):
    returned: str = "one"

    def test(self) -> Any:
        torch.rand(3)
        _, held_out = tiny().data()
        odd: dict[str, Any] = {"many": {"a": held_out, "b": held_out}, "none": None, "empty": []}
        return {"one": held_out, "number": 5, **odd}[self.returned]

    def measure(self, model: Any, batch: Any) -> Any:
        luck = {"luck": torch.rand(())} if not model.training else {}
        return {**super().measure(model, batch), **luck}


def experiment(**changes: Any) -> Any:
    # So high a learning rate that the last evaluation is not the best.
    settings = {"train.steps": 30, "train.eval_every": 2, "lr": 2.0, **changes}
    return override(HeldOut(), {key.replace("__", "."): value for key, value in settings.items()})


def evaluated(trained: Trained, folder: Path, notices: list[str]) -> Evaluated:
    test_sets = final_test.load_sets(trained.job.experiment, ALONE)
    return final_test.evaluate_best(
        trained.job, trained.state, test_sets, folder, StopRequest(), notices.append
    )


def test_a_goal_that_was_never_a_number_lacks_no_checkpoint(train: Trainer, tmp_path: Path) -> None:
    class Constant(HeldOut):
        def measure(self, model: Any, batch: Any) -> Any:
            r2 = torch.tensor(0.0 if model.training else torch.nan)
            return {**super().measure(model, batch), "r2": r2}

    settings = {"train.steps": 4, "train.eval_every": 2, "goal.metric": "val/r2"}
    trained = train(override(Constant(), settings))
    notices: list[str] = []
    found = evaluated(trained, tmp_path / "checkpoints", notices)
    assert (found.step, notices) == (4, [])


class Versioned(nn.Linear):
    """Refuses a state of another version, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version") != 2:
            raise ValueError(f"version should be 2 instead of {metadata.get('version')}")
        super()._load_from_state_dict(state, prefix, metadata, *rest)  # type: ignore[no-untyped-call]


class WithVersions(HeldOut):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Sequential(Versioned(8, 2)))


@pytest.mark.parametrize(
    ("strategy", "ema"), [("single", None), ("single", 0.5), ("fsdp", None), ("fsdp", 0.5)]
)
def test_a_model_whose_modules_have_versions_is_resumed_and_tested(
    train: Trainer, tmp_path: Path, strategy: str, ema: float | None
) -> None:
    settings = {"train.steps": 6, "train.eval_every": 3, "train.ema": ema}
    made = override(WithVersions(), {**settings, "train.strategy": strategy})
    train(made, tmp_path, stop_at=3)
    trained = train(made, tmp_path)
    assert evaluated(trained, tmp_path / "checkpoints", []).step in (3, 6)
    name = "model" if ema is None else "ema"
    saved = restore.load(tmp_path / "checkpoints/step_00000006")[name]
    assert hasattr(saved, "_metadata") == (strategy == "single")
    loaded = best_model._load_model(made, tmp_path / "checkpoints/step_00000006").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())


@pytest.mark.parametrize("ema", [None, 0.5])
def test_the_best_checkpoint_is_tested_and_nothing_changes(
    train: Trainer, tmp_path: Path, ema: float | None
) -> None:
    trained = train(experiment(train__patience=5, train__ema=ema))
    notices: list[str] = []
    best, step = trained.state.best, trained.state.step
    found = evaluated(trained, tmp_path / "checkpoints", notices)
    evaluations = {e.step: e.metrics for e in trained.events if isinstance(e, Evaluated)}
    assert evaluations[found.step]["val/accuracy"] == best and found.step < step
    model = trained.job.experiment.model()
    saved = restore.load(tmp_path / f"checkpoints/step_{found.step:08d}")
    model.load_state_dict(saved.get("ema", saved["model"]))
    x, y = tiny().data()[1].tensors
    with torch.no_grad():
        loss = cross_entropy(model.eval()(x), y).item()
    assert found.metrics["test/loss"] == pytest.approx(loss, rel=1e-5) and not found.best
    assert (trained.state.best, trained.state.step, notices) == (best, step, [])
    again = train(trained.job.experiment)
    assert evaluated(again, tmp_path / "checkpoints", notices).metrics == found.metrics


def test_the_best_average_is_tested_also_without_train_ema(train: Trainer, tmp_path: Path) -> None:
    # With the second, the best checkpoint is also the last.
    settings = {"lr": 0.01, "goal__metric": "val/loss", "goal__mode": "min"}
    for changes in ({}, settings):
        folder = tmp_path / f"{len(changes)}"
        averaged = train(experiment(train__ema=0.9, **changes), folder)
        expected = evaluated(averaged, folder / "checkpoints", [])
        job, state = build(experiment(**changes), ALONE)
        restore.newest(folder / "checkpoints", job, state, lambda text: None)
        found = evaluated(
            Trained(job, state, [], RunTotals(), StopCode.NONE), folder / "checkpoints", []
        )
        assert (found.step == 30) == bool(changes)
        assert found.step == expected.step and found.metrics == expected.metrics


def test_a_run_without_the_best_checkpoint_reports_what_it_tests(
    train: Trainer, tmp_path: Path
) -> None:
    notices: list[str] = []
    trained = train(experiment(train__checkpoints__save_every=0), tmp_path / "none")
    assert evaluated(trained, tmp_path / "none/checkpoints", notices).step == 30
    trained = train(experiment(train__checkpoints__keep=0), tmp_path / "last")
    assert evaluated(trained, tmp_path / "last/checkpoints", notices).step == 30
    assert "keeps no checkpoint" in notices[0] and "best evaluation has no" in notices[1]


def test_a_test_set_that_draws_does_not_change_the_training(train: Trainer, tmp_path: Path) -> None:
    one = train(experiment(dropout=0.3), tmp_path / "one")
    two = train(experiment(dropout=0.3, train__test=False), tmp_path / "two")
    state = torch.get_rng_state()
    assert list(final_test.load_sets(one.job.experiment, ALONE)) == ["test"]
    assert torch.equal(state, torch.get_rng_state())
    assert final_test.load_sets(two.job.experiment, ALONE) == {}
    assert all(map(torch.equal, weights(one), weights(two)))


def test_a_stop_interrupts_the_test(train: Trainer, tmp_path: Path) -> None:
    trained = train(experiment(train__micro_batch=1))
    stop = StopRequest(min_evaluation_seconds=0.0)
    stop.request(StopCode.SIGTERM)
    test_sets = final_test.load_sets(trained.job.experiment, ALONE)
    with pytest.raises(EvaluationInterrupted):
        final_test.evaluate_best(
            trained.job, trained.state, test_sets, tmp_path / "checkpoints", stop, pytest.fail
        )


@dataclasses.dataclass(frozen=True)
class FirstOfTwo(World):
    """A rank and another one, which has data sets of the names `other`."""

    other: Sequence[str] = ()

    def ranks_that_differ(self, values: torch.Tensor) -> list[int]:
        return [1] if values.item() != zlib.crc32(json.dumps(self.other).encode()) else []


def test_a_test_set_on_one_rank_only_is_refused() -> None:
    world = FirstOfTwo(Ranks(), torch.device("cpu"))
    assert final_test.load_sets(experiment(returned="none"), world) == {}
    with pytest.raises(UserError, match="other names on rank 1 than on rank 0, which has test:"):
        final_test.load_sets(experiment(returned="one"), world)
    world = dataclasses.replace(world, other=["test"])
    with pytest.raises(UserError, match="other names on rank 1 than on rank 0, which has none:"):
        final_test.load_sets(experiment(returned="none"), world)


def test_several_test_sets_and_unusable_ones() -> None:
    assert list(final_test.load_sets(experiment(returned="many"), ALONE)) == ["test/a", "test/b"]
    assert final_test.load_sets(experiment(returned="none"), ALONE) == {}
    for returned, says in (("number", "must return a data set"), ("empty", "for test: return")):
        with pytest.raises(UserError, match=says):
            final_test.load_sets(experiment(returned=returned), ALONE)

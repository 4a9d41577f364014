"""The loop: its arithmetic, the order of its actions, and how it ends."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as Wrapped
from torch.utils.data import IterableDataset

from rankzero.config import override
from rankzero.errors import NotFinite, UserError
from rankzero.events import CheckpointSaved, Evaluated, Noticed, StepsLogged
from rankzero.ranks import Ranks
from rankzero.ratio import Ratio
from rankzero.run_store import checkpoint_files
from rankzero.training.build import build
from rankzero.training.checkpoints import restore
from rankzero.training.data.order import permutation
from rankzero.training.distributed.world import World
from rankzero.training.periodic import state_dict
from rankzero.training.stop import StopCode
from support.training import Trainer, tiny, weights
from torture.damage import malicious


def test_four_micro_batches_of_8_train_like_a_batch_of_32(train: Trainer, tmp_path: Path) -> None:
    whole = train(tiny(train__steps=10), tmp_path / "whole")
    parts = train(tiny(train__steps=10, train__micro_batch=8), tmp_path / "parts")
    assert parts.job.batch_order.accumulation == 4
    for one, other in zip(weights(whole), weights(parts), strict=True):
        torch.testing.assert_close(one, other)
    assert parts.series("train/loss") == pytest.approx(whole.series("train/loss"), rel=1e-5)


@pytest.mark.parametrize(("first", "says"), [(True, "did not return"), (False, "returned")])
def test_all_micro_batches_of_a_step_return_the_same_metrics(
    train: Trainer, first: bool, says: str
) -> None:
    class Sometimes(type(tiny())):  # type: ignore[misc]
        calls = itertools.count()

        def measure(self, model: Any, batch: Any) -> Any:
            values = super().measure(model, batch)
            if (next(self.calls) == 0) == first:
                values["extra"] = values["loss"].detach()
            return values

    with pytest.raises(UserError, match=f"{says} 'extra', which it .*: return the same keys"):
        train(override(Sometimes(), {"train.steps": 2, "train.micro_batch": 8}))


def test_a_notice_names_a_stream_that_each_process_reads_in_another_order(train: Trainer) -> None:
    class Unseeded(type(tiny())):  # type: ignore[misc]
        def data(self) -> Any:
            class Drawn(IterableDataset[Any]):
                def __iter__(self) -> Iterator[Any]:
                    own = np.random.default_rng()
                    return ((own.random(8, np.float32), 0) for _ in range(64))

            return Drawn(), super().data()[1]

    settings = {"train.epochs": None, "train.steps": 4, "train.eval_every": 2, "train.workers": 2}
    events = train(override(Unseeded(), settings)).events
    (text,) = [event.text for event in events if isinstance(event, Noticed)]
    assert "other first samples" in text


def test_smaller_last_batch_trains_as_one(train: Trainer, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"train__batch_size": 30, "train__drop_last": False}
    settings |= {"train__epochs": 2, "train__log_every": 1}
    whole = train(tiny(**settings), tmp_path / "whole")
    parts = train(tiny(**settings, train__micro_batch=3), tmp_path / "parts")
    assert whole.state.step == 14
    assert parts.series("train/loss") == pytest.approx(whole.series("train/loss"), rel=1e-5)
    assert parts.series("train/accuracy") == pytest.approx(whole.series("train/accuracy"))
    # The same steps as PyTorch's own.
    experiment, order = whole.job.experiment, whole.job.batch_order
    (x, y), model = experiment.data()[0].tensors, build(experiment, whole.job.world)[1].model
    optimizer = experiment.optimizer(model)
    for epoch in range(2):
        for rows in permutation(order.seed, epoch, 200).split(30):
            optimizer.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    for one, other in zip(weights(whole), model.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach())
    speed = whole.series("throughput/samples_per_second")
    seconds = whole.series("throughput/step_seconds")
    samples = [speed[step] * seconds[step] for step in range(1, 15)]
    assert samples == pytest.approx(([30] * 6 + [20]) * 2)


@pytest.mark.parametrize("stop_at", [6, 7, 8])
def test_resume_around_a_smaller_last_batch(train: Trainer, tmp_path: Path, stop_at: int) -> None:
    settings = {"train__batch_size": 30, "train__micro_batch": 3, "train__drop_last": False}
    experiment = tiny(**settings, train__steps=15, train__log_every=1, augment=True, dropout=0.3)
    straight = train(experiment, tmp_path / "straight")
    train(experiment, tmp_path / "parts", stop_at=stop_at)
    again = train(experiment, tmp_path / "parts")
    assert again.series("train/loss").items() <= straight.series("train/loss").items()
    for one, other in zip(weights(straight), weights(again), strict=True):
        assert torch.equal(one, other)
    other = tiny(**settings | {"train__drop_last": True}, train__steps=20, augment=True)
    with pytest.raises(UserError, match=r"train.drop_last\): 20, now it is 0"):
        train(other, tmp_path / "parts")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dropout": 0.3},
        {"augment": True, "dropout": 0.3, "train__micro_batch": 8},
        {"train__precision": "bf16"},
        {"train__schedule": "one_cycle"},
    ],
)
def test_a_resumed_training_is_bit_for_bit_the_uninterrupted_one(
    train: Trainer, tmp_path: Path, settings: dict[str, object]
) -> None:
    experiment = tiny(train__steps=20, train__log_every=1, train__eval_every=5, **settings)
    straight = train(experiment, tmp_path / "straight")
    first = train(experiment, tmp_path / "parts", stop_at=9)
    second = train(experiment, tmp_path / "parts")
    assert first.state.step == 10 and first.stopped == StopCode.SIGTERM
    assert second.state.step == 20
    assert list(second.series("train/loss")) == list(range(11, 21)), (
        "what the first had trained was trained again"
    )
    for one, other in zip(weights(straight), weights(second), strict=True):
        assert torch.equal(one, other)
    assert {**first.series("train/loss"), **second.series("train/loss")} == straight.series(
        "train/loss"
    )
    for one, other in zip(
        straight.state.optimizer.state.values(), second.state.optimizer.state.values(), strict=True
    ):
        assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])


def test_every_step_is_logged_once(train: Trainer) -> None:
    trained = train(tiny(train__steps=17, train__log_every=5, train__eval_every=7))
    assert list(trained.series("train/loss")) == list(range(1, 18))
    assert sorted(trained.series("lr")) == [5, 7, 12, 14, 17]


def test_every_step_keeps_its_own_values(train: Trainer, tmp_path: Path) -> None:
    class InOnePlace(type(tiny())):  # type: ignore[misc]
        """Returns each loss in the same memory, as a model in a CUDA graph does."""

        place = torch.zeros(())

        def measure(self, model: Any, batch: Any) -> Any:
            values = super().measure(model, batch)
            self.place.copy_(values["loss"].detach())
            values["loss"].data = self.place
            return values

    plain = train(tiny(train__steps=17), tmp_path / "plain")
    graph = train(override(InOnePlace(), {"train.steps": 17}), tmp_path / "graph")
    assert graph.series("train/loss") == plain.series("train/loss")


class Watched(type(tiny())):  # type: ignore[misc]
    """Returns what later steps write, each with a copy of its value."""

    def model(self) -> nn.Module:
        model = super().model()
        model.scale = nn.Parameter(torch.ones(()))
        model.pair = nn.Parameter(torch.ones(2))
        model.register_buffer("mean", torch.zeros(()))
        model.kept = torch.zeros(())
        return model

    def measure(self, model: Any, batch: Any) -> dict[str, Tensor]:
        found = super().measure(model, batch)
        found["loss"] = found["loss"] * model.scale + model.pair.prod()
        model.mean.data.lerp_(batch[0].mean(), 0.1)
        model.kept.copy_(found["loss"].detach())
        own = {"scale": model.scale, "value": model.scale.data, "part": model.pair[0]}
        own |= {"mean": model.mean, "kept": model.kept}
        return {**found, **own, **{f"{name} then": one.detach() * 1 for name, one in own.items()}}


@pytest.mark.parametrize("micro_batch", [32, 8])
def test_a_parameter_as_a_metric_has_the_value_of_its_step(
    train: Trainer, micro_batch: int
) -> None:
    trained = train(Watched(**vars(tiny(train__steps=12, train__micro_batch=micro_batch))))
    for name in ("scale", "value", "part", "mean", "kept"):
        values = trained.series(f"train/{name}")
        assert values == trained.series(f"train/{name} then"), name
        assert len(set(values.values())) == 12, name


def test_evaluation_is_the_mean_over_every_sample(train: Trainer) -> None:
    trained = train(
        tiny(train__steps=5, train__micro_batch=8)
    )  # 51 validation samples: six batches of 8, one of 3
    _, validation = trained.job.experiment.data()
    x, y = validation.tensors
    model = trained.state.model.eval()
    with torch.no_grad():
        logits = model(x)
    (event,) = [event for event in trained.events if isinstance(event, Evaluated)]
    assert event.metrics["val/loss"] == pytest.approx(cross_entropy(logits, y).item(), rel=1e-5)
    assert event.metrics["val/accuracy"] == pytest.approx(
        (logits.argmax(-1) == y).double().mean().item()
    )


def test_evaluation_comes_before_the_checkpoint_and_each_happens_once(train: Trainer) -> None:
    trained = train(
        tiny(
            train__steps=10,
            train__eval_every=5,
            train__checkpoints__save_every=5,
            train__checkpoints__keep=9,
        )
    )
    saved = [event for event in trained.events if isinstance(event, CheckpointSaved)]
    assert [event.step for event in saved] == [5, 10]
    assert all("val/accuracy" in event.metrics for event in saved)
    assert [event.step for event in trained.events if isinstance(event, Evaluated)] == [5, 10]


def test_checkpoints_between_evaluations_carry_no_metrics(train: Trainer) -> None:
    trained = train(tiny(train__steps=10, train__eval_every=10, train__checkpoints__save_every=4))
    saved = [event for event in trained.events if isinstance(event, CheckpointSaved)]
    assert [(event.step, bool(event.metrics)) for event in saved] == [
        (4, False),
        (8, False),
        (10, True),
    ]


def test_the_best_weights_are_saved_whatever_save_every_is(train: Trainer) -> None:
    every = {"train__eval_every": 4, "train__checkpoints__save_every": 9}
    trained = train(tiny(train__steps=12, train__checkpoints__keep=9, **every))
    best = [event.step for event in trained.events if isinstance(event, Evaluated) and event.best]
    saved = [event.step for event in trained.events if isinstance(event, CheckpointSaved)]
    assert 4 in best and saved == sorted({*best, 9, 12})


def test_a_stop_ends_at_the_next_report_with_a_checkpoint(train: Trainer, tmp_path: Path) -> None:
    trained = train(tiny(train__steps=50, train__log_every=3), stop_at=3)
    path, _ = checkpoint_files.newest_intact(tmp_path / "checkpoints")
    assert path is not None and checkpoint_files.read_manifest(path).step == trained.state.step
    # A slow machine makes the windows shorter than the three steps.
    assert 3 < trained.state.step <= 6


def test_a_checkpoint_that_cannot_be_written_is_reported_during_the_training(
    train: Trainer, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    trained = train(
        tiny(
            train__steps=9,
            train__eval_every=9,
            train__checkpoints__save_every=3,
            train__log_every=1,
        )
    )
    told = [index for index, event in enumerate(trained.events) if isinstance(event, Noticed)]
    assert len(told) == 3 and "could not be written" in str(trained.events[told[0]])
    logged = [index for index, event in enumerate(trained.events) if isinstance(event, StepsLogged)]
    assert told[0] < logged[-1]


def test_a_stop_takes_about_a_second_whatever_log_every_is(train: Trainer, tmp_path: Path) -> None:
    slow = tiny(train__steps=50, train__log_every=40, train__eval_every=50, step_seconds=0.3)
    stopped = train(slow, stop_at=2)
    # The request comes while one window is reported, and counts at the end of the next. Three steps
    # take about a second.
    assert stopped.stopped == StopCode.SIGTERM and stopped.state.step <= 2 + 2 * 3
    path, _ = checkpoint_files.newest_intact(tmp_path / "checkpoints")
    assert path is not None and checkpoint_files.read_manifest(path).step == stopped.state.step
    assert sorted(stopped.series("lr")) == [stopped.state.step]


def test_slow_steps_are_logged_at_once_and_their_speed_every_log_every_steps(
    train: Trainer, tmp_path: Path
) -> None:
    slow = train(
        tiny(train__steps=12, train__log_every=5, train__eval_every=12, step_seconds=0.3),
        tmp_path / "slow",
    )
    fast = train(tiny(train__steps=12, train__log_every=5, train__eval_every=12), tmp_path / "fast")
    told = [
        len(event.steps)
        for event in slow.events
        if isinstance(event, StepsLogged) and "lr" not in event.metrics
    ]
    assert max(told) <= 3 and sum(told) == 12
    assert slow.series("train/loss") == fast.series("train/loss")
    assert sorted(slow.series("lr")) == sorted(fast.series("lr")) == [5, 10, 12]
    assert all(0.3 < seconds < 3 for seconds in slow.series("throughput/step_seconds").values())
    assert slow.totals.steps == 12


def test_the_learning_rate_is_warmed_up(train: Trainer) -> None:
    trained = train(tiny(train__steps=6, train__warmup_steps=4, train__log_every=1, lr=1.0))
    assert list(trained.series("lr").values()) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_clipping_bounds_the_step(train: Trainer, tmp_path: Path) -> None:
    before = weights(train(tiny(train__steps=1, lr=1e-30), tmp_path / "still"))
    trained = train(
        tiny(train__steps=1, train__clip=1e-3, momentum=0.0, lr=1.0), tmp_path / "clipped"
    )
    moved = (
        sum(
            float((one - other).norm() ** 2)
            for one, other in zip(before, weights(trained), strict=True)
        )
        ** 0.5
    )
    assert 0 < moved <= 1.01e-3


def test_a_nan_loss_ends_the_run(train: Trainer) -> None:
    with pytest.raises(NotFinite, match="lower lr"):
        train(tiny(fail="nan"))


@pytest.mark.parametrize(
    ("fail", "error", "says"),
    [
        ("no loss", UserError, "key 'loss'"),
        ("measure", KeyError, "no such measure"),
        ("data", OSError, "no such data"),
        ("model", ZeroDivisionError, "no such model"),
    ],
)
def test_errors_in_the_experiment_are_raised_unchanged(
    train: Trainer, fail: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        train(tiny(fail=fail))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (None, "returned NoneType: return a torch.nn.Module"),
        (torch.nn.Linear, "returned the class Linear: return a torch.nn.Module"),
        (Wrapped.__new__(Wrapped), "returned a DistributedDataParallel: return its .module"),
        (torch.nn.Linear(8, 2).requires_grad_(False), "measure().*has no gradient: compute it"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(train: Trainer, made: Any, says: str) -> None:
    class Mistaken(type(tiny())):  # type: ignore[misc]
        def model(self) -> Any:
            return made

    with pytest.raises(UserError, match=says):
        train(Mistaken())


@pytest.mark.parametrize("is_ratio", [False, True])
def test_a_detached_loss_is_refused(train: Trainer, is_ratio: bool) -> None:
    class Detached(type(tiny())):  # type: ignore[misc]
        def measure(self, model: Any, batch: Any) -> Any:
            loss = super().measure(model, batch)["loss"].detach()
            return {"loss": Ratio(loss, 1) if is_ratio else loss}

    with pytest.raises(UserError, match=r"measure\(\)\['loss'\] has no gradient: compute it"):
        train(Detached())


def test_a_goal_that_is_not_measured_is_refused(train: Trainer) -> None:
    with pytest.raises(UserError, match=r"set goal\.metric"):
        train(tiny(goal__metric="val/f1", train__steps=2))


class Sampled(type(tiny())):  # type: ignore[misc]
    """Draws its batches while they are read: from `random`, or from a generator of its own."""

    own: bool = False

    def batches(self, data: Any, epoch: int, generator: Any) -> Any:
        draw = random.Random().sample if self.own else random.sample
        return (draw(range(len(data)), 32) for _ in range(6))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("stop_at", [6, 8])  # of six steps an epoch
def test_a_resume_names_batches_that_are_others_than_before(
    train: Trainer, tmp_path: Path, own: bool, stop_at: int
) -> None:
    experiment = Sampled(**{**vars(tiny(train__steps=12, train__log_every=1)), "own": own})
    straight = train(experiment, tmp_path / "straight")
    stopped = train(experiment, tmp_path / "parts", stop_at=stop_at)
    job, state = build(experiment, stopped.job.world)
    notices: list[str] = []
    restore.newest(tmp_path / "parts" / "checkpoints", job, state, notices.append)
    if own:
        assert len(notices) == 1 and "batches() returned other lists than before" in notices[0]
        assert "a setting that it reads has changed" in notices[0]
        return
    assert not notices
    again = train(experiment, tmp_path / "parts")
    for one, other in zip(weights(straight), weights(again), strict=True):
        assert torch.equal(one, other)


def test_another_batch_size_cannot_resume(train: Trainer) -> None:
    train(tiny(train__steps=5))
    with pytest.raises(UserError, match="start a new run"):
        train(tiny(train__steps=9, train__batch_size=16))


def test_a_stream_of_another_length_resumes_with_a_notice(train: Trainer, tmp_path: Path) -> None:
    class Sized(IterableDataset[Any]):
        length = 64

        def __len__(self) -> int:
            return self.length

        def __iter__(self) -> Iterator[Any]:
            return ((torch.ones(8), 0) for _ in range(64))

    class Streaming(type(tiny())):  # type: ignore[misc]
        def data(self) -> Any:
            return Sized(), super().data()[1]

    experiment = override(Streaming(), {"train.epochs": 1, "train.workers": 0})
    stopped = train(experiment, tmp_path)
    Sized.length = 128
    job, state = build(experiment, stopped.job.world)
    notices: list[str] = []
    restore.newest(tmp_path / "checkpoints", job, state, notices.append)
    assert "had 64 samples, now it has 128: train.epochs, the sch" in notices[0] and state.step == 2


def test_another_model_cannot_resume(train: Trainer) -> None:
    train(tiny(train__steps=5))
    with pytest.raises(UserError, match=r"^step_00000005: .* does not fit"):
        train(tiny(train__steps=9, width=8))


def test_a_checkpoint_that_would_execute_code_is_refused_by_name(
    train: Trainer, tmp_path: Path
) -> None:
    train(tiny(train__steps=5))
    malicious(tmp_path / "checkpoints/step_00000005", random.Random(1), tmp_path / "executed")
    with pytest.raises(
        UserError, match=r"step_00000005 holds more than tensors .* refused; .* delete this one"
    ):
        train(tiny(train__steps=9))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("dropped", "says"), [("randoms", "holds no randoms"), ("optimizer", "does not fit")]
)
def test_an_incomplete_checkpoint_is_refused_with_a_message(
    train: Trainer, dropped: str, says: str
) -> None:
    trained = train(tiny(train__steps=2))
    whole = state_dict(trained.job, trained.state)
    del whole[dropped]
    with pytest.raises(UserError, match=says):
        restore.apply(whole, trained.job, trained.state)


def test_a_required_checkpoint_must_exist(train: Trainer, tmp_path: Path) -> None:
    trained = train(tiny(train__steps=1, train__checkpoints__save_every=0))
    with pytest.raises(UserError, match="no intact checkpoint where rank 0 runs"):
        restore.newest(tmp_path / "none", trained.job, trained.state, pytest.fail, required=True)


def test_the_clock_is_read_after_the_device_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: seconds.append(seconds.pop() + 3.0)
    )
    assert World(Ranks(), torch.device("cuda", 0), lambda: seconds[0]).now() == 3.0
    assert World(Ranks(), torch.device("cpu"), lambda: seconds[0]).now() == 3.0, "it waited"


def test_a_windows_seconds_include_the_devices_work(
    train: Trainer,
) -> None:
    ticks = itertools.count(0.0, 0.006)
    trained = train(
        tiny(train__steps=6, train__log_every=2, train__eval_every=6), clock=lambda: next(ticks)
    )
    assert list(trained.series("throughput/step_seconds").values()) == pytest.approx(
        [0.006, 0.003, 0.003]
    ), "two windows, then one"


class Counting(torch.optim.SGD):
    """Stores what it learns among its options, as some optimizers do."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self.param_groups[0]["taken"] = 0

    def step(self, *words: Any) -> None:  # type: ignore[override]
        super().step(*words)
        self.param_groups[0]["taken"] += 1


def test_a_changed_optimizer_option_is_used_and_learned_options_are_kept(
    train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tiny(train__steps=5)
    monkeypatch.setattr(
        type(first),
        "optimizer",
        lambda self, model: Counting(model.parameters(), lr=self.lr, momentum=self.momentum),
    )
    train(first)
    (group,) = train(tiny(train__steps=8, momentum=0.5)).state.optimizer.param_groups
    assert group["momentum"] == 0.5 and group["taken"] == 8
    (group,) = train(tiny(train__steps=9, momentum=0.5)).state.optimizer.param_groups
    assert group["momentum"] == 0.5 and group["taken"] == 9


def test_gradients_that_model_leaves_enter_no_step(train: Trainer, tmp_path: Path) -> None:
    class Pretrained(type(tiny())):  # type: ignore[misc]
        def model(self) -> Any:
            model = super().model()
            sum(parameter.sum() for parameter in model.parameters()).backward()
            return model

    plain = tiny(train__steps=2)
    found = train(Pretrained(**vars(plain)), tmp_path / "pretrained")
    expected = train(plain, tmp_path / "plain")
    assert all(map(torch.equal, weights(found), weights(expected)))

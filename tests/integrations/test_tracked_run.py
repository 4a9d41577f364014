"""`rankzero.track` for loops of one's own: values, steps, checkpoints, ends, and other ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import random
import subprocess
import sys
import threading
import time
import tracemalloc
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import attrs
import numpy as np
import pydantic
import pytest
import torch
from torch.distributed.tensor import DTensor

import rankzero
from rankzero import Goal
from rankzero.events import (
    ArtifactLogged,
    CheckpointSaved,
    Evaluated,
    Event,
    Noticed,
    ParamsLogged,
    PicturesTaken,
    RunEnded,
    RunStarted,
    StepsLogged,
    TagsSet,
    encode_line,
)
from rankzero.integrations.deferred_run import DeferredRun
from rankzero.integrations.own_loop import values
from rankzero.integrations.own_loop.attempt import Attempt, _consume, command
from rankzero.integrations.own_loop.metric_history import MetricHistory
from rankzero.integrations.own_loop.null_run import NullTrackedRun
from rankzero.integrations.own_loop.params import params_of
from rankzero.integrations.own_loop.tracked_run import TrackedRun
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store import checkpoint_files, delivery_state
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.journal import Journal, read_all
from rankzero.tracking import delivery_status
from rankzero.tracking.run_log import RunLog
from rankzero.training.checkpoints import restore
from support.commands import wait_until
from support.runs import of_kind


class NoRecorder:
    def close(self) -> None:
        """Nothing was started."""


def unrecorded(goal: Goal | None = None, patience: float = 30.0, **options: Any) -> TrackedRun:
    """Return a run as `rankzero.track` makes it, but without a recorder. The same run each time."""
    place = Path("mlruns").absolute()
    identity = Identity("r1", "0" * 32, "mine", f"sqlite:///{place}/mlflow.db")
    folder = RunFolder.open_or_create(place / "runs", identity)

    def open_log(_: Identity) -> RunLog:
        attempt = len(of_kind(folder.path, RunStarted)) + 1
        return RunLog(folder, Journal(folder.events), attempt, NoRecorder(), patience)

    return TrackedRun(open_log, identity, goal or Goal(), **options)


def journal(run: TrackedRun) -> list[Any]:
    assert run.folder is not None
    return list(read_all(run.folder / "events.jsonl"))


def rows(events: Iterable[Any]) -> list[tuple[int, dict[str, float]]]:
    """Return (step, metrics) of each call of `log`."""
    return [
        (step, {name: column[index] for name, column in event.metrics.items()})
        for event in events
        if isinstance(event, StepsLogged) and event.metrics
        for index, step in enumerate(event.steps)
    ]


def test_loop_is_tracked_to_the_end_in_mlflow() -> None:
    model = torch.nn.Linear(2, 1)
    with rankzero.track(
        "mine", {"lr": 0.1, "net": {"width": 3}}, goal=Goal("val/loss"), name="r1"
    ) as run:
        for step in range(1, 6):
            loss = torch.tensor(float(step))
            run.log({"train/loss": loss, "other": step * 2}, step=step)
            loss.zero_()  # what is logged is the value at the time
        run.checkpoint(model.state_dict(), step=5, metrics={"val/loss": torch.tensor(0.5)})
        run.log_param("late", 1)
        run.log_params({"lr": 0.2})
        run.set_tag("team", "a")
        run.log_metric("other", 12, step=6)
        run.log_text("hello", "notes/a.txt")
        run.log_image(torch.rand(8, 8), key="sample")
    assert run.folder is not None
    folder = RunFolder(run.folder)
    events = list(read_all(folder.events))
    assert [(step, metrics["train/loss"]) for step, metrics in rows(events)[:5]] == [
        (n, float(n)) for n in range(1, 6)
    ]
    # A thread writes the checkpoint, so its event comes at any time before the end.
    assert [type(one) for one in events if not isinstance(one, (StepsLogged, CheckpointSaved))] == [
        RunStarted,
        Evaluated,
        ParamsLogged,
        ParamsLogged,
        TagsSet,
        ArtifactLogged,
        PicturesTaken,
        RunEnded,
    ]
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [5]
    assert torch.equal(restore.load(folder.checkpoints / "step_00000005")["weight"], model.weight)
    delivery = delivery_status.wait(folder)
    assert delivery.done and delivery.run_id == run.id
    found = MlflowRuns(folder.identity.tracking_uri).find_run("r1")
    assert found.status == "FINISHED" and found.run_id == run.id
    assert found.params["net.width"] == "3" and found.metrics["train/loss"] == 5.0
    assert (found.params["late"], found.params["lr"]) == ("1", "0.1")
    assert (found.tags["team"], found.tags["rankzero.param.lr"]) == ("a", "0.2")
    store = MlflowRuns(folder.identity.tracking_uri)
    for name, content in (("notes/a.txt", b"hello"), ("pictures/sample.png", b"PNG")):
        assert content in store.download_artifact(found.run_id, name, Path()).read_bytes()


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (RuntimeError("boom"), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(3), "FAILED"),
        (SystemExit(0), "FINISHED"),
    ],
)
def test_leaving_the_block_sets_the_status(raised: BaseException, status: str) -> None:
    with pytest.raises(type(raised)), unrecorded() as run:
        raise raised
    (end,) = of_kind(run.folder, RunEnded)
    assert end.status == status
    assert ("boom" in str(end.error)) == isinstance(raised, RuntimeError)


def test_other_ranks_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with rankzero.track("mine") as run:
        run.log({"loss": torch.tensor(1.0)}, step=1)
        assert not run.evaluated({"val/loss": 0.5}, step=1)
        run.checkpoint({}, step=1)
    adapter = DeferredRun("mine")
    for _ in range(2):
        adapter.begin_training().log({"loss": 1.0})
    assert run.name is None and run.folder is None and not Path("mlruns").exists()


def test_other_ranks_have_all_methods() -> None:
    public = {name for name in vars(TrackedRun) if not name.startswith("_")}
    assert public - set(vars(NullTrackedRun)) == {"disown"}, "no fork leaves a run to its parent"


@dataclasses.dataclass
class Settings:
    lr: float = 0.1
    sizes: tuple[int, ...] = (1, 2)


def test_configs_become_params() -> None:
    assert params_of(None) == {}
    assert params_of({"a": {"b": 1}, "c": None}) == {"a.b": "1", "c": "none"}
    assert params_of(Settings()) == {"lr": "0.1", "sizes": "[1, 2]"}
    nested = Namespace(lr=0.1, model=Settings(), extra={"n": SimpleNamespace(deep=1)})
    assert params_of(nested) == {
        "lr": "0.1",
        "model.lr": "0.1",
        "model.sizes": "[1, 2]",
        "extra.n.deep": "1",
    }
    empty = {"aug": {}, "sched": [], "opt": {"groups": Namespace(), "lr": 1}}
    assert params_of(empty) == {"aug": "{}", "sched": "[]", "opt.groups": "{}", "opt.lr": "1"}
    assert params_of({}) == params_of(Namespace()) == {}
    for config in (More, More(), Fields(0.1, 1), Pair(0.1, 1), Converted(), Answers(), Model()):
        assert params_of(config) == {"lr": "0.1", "epochs": "1"}
    assert params_of({"sizes": (np.int64(3), Path("a"))}) == {"sizes": '["3", "a"]'}
    assert params_of({"best": torch.tensor(0.5), "w": torch.zeros(1)}) == {
        "best": "0.5",
        "w": "tensor([0.])",
    }
    assert params_of({"net": Fields(0.1, 1)}) == {"net.lr": "0.1", "net.epochs": "1"}
    with pytest.raises(rankzero.ConfigError, match="a dataclass or an object with attributes"):
        params_of(3)
    with pytest.raises(rankzero.ConfigError, match="cannot be read: KeyError"):
        params_of(Missing())


class ClassOfSettings:
    lr = 0.1

    def method(self) -> None:
        """A method is no setting."""

    @property
    def computed(self) -> float:
        raise AssertionError("a property may cost much")


class More(ClassOfSettings):
    epochs = 1


@attrs.define
class Fields:
    lr: float
    epochs: int


class Pair(NamedTuple):
    lr: float
    epochs: int


class Converted:
    """As ml_collections.ConfigDict."""

    def __init__(self, **settings: Any) -> None:
        self._fields = settings or {"lr": 0.1, "epochs": 1}

    def to_dict(self) -> dict[str, Any]:
        return self._fields


class Answers:
    """Has any attribute, and a method that needs an argument."""

    def __init__(self) -> None:
        self.lr, self.epochs = 0.1, 1

    def __getattr__(self, name: str) -> Any:
        return self.__dict__.get(name)

    def to_dict(self, flat: bool) -> None:
        """Return no mapping."""


class Model(pydantic.BaseModel):
    lr: float = 0.1
    epochs: int = 1


def test_config_without_a_readable_attribute_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    with rankzero.track("mine", Nameless(), name="r1", offline=True):
        pass
    assert "the config Nameless has no attributes to log" in capsys.readouterr().out


class Missing(dict[str, Any]):
    """As OmegaConf's mappings, in which a value may be missing."""

    def items(self) -> Any:
        raise KeyError("lr")


def test_refused_config_leaves_no_run() -> None:
    with pytest.raises(rankzero.ConfigError):
        rankzero.track("mine", 3)
    # The settings in the place of the experiment's name is a common slip.
    settings: Any = {"lr": 0.1}
    with pytest.raises(rankzero.ConfigError, match="experiment: must be a text such as 'digits'"):
        rankzero.track(settings)
    number: Any = 5
    with pytest.raises(rankzero.ConfigError, match="name: must be a text such as 'digits', got 5"):
        rankzero.track("mine", name=number)
    text: Any = "val/acc"
    for keep in (-1, text):
        with pytest.raises(rankzero.ConfigError, match=rf"keep: must be an int .* got {keep!r};"):
            rankzero.track("mine", keep=keep)
    with pytest.raises(
        rankzero.ConfigError, match=r"goal: must be a Goal such as .* got 'val/acc'"
    ):
        rankzero.track("mine", goal=text)
    assert not Path("mlruns").exists()


def test_value_that_is_not_a_number_is_logged_as_nan_with_one_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with unrecorded() as run:
        for step in (1, 2):
            odd = {"text": "x", "many": torch.ones(3), "array": np.ones(2), "none": None}
            run.log({**odd, "good": np.float32(1)}, step=step)
            run.log(None, step=step)  # type: ignore[arg-type]
            run.evaluated([("loss", 1.0)], step=step)  # type: ignore[arg-type]
        run.checkpoint({}, step=2, metrics=0.5)  # type: ignore[arg-type]
    logged = rows(journal(run))
    assert len(logged) == 2
    for _, metrics in logged:
        assert metrics["good"] == 1.0
        assert all(math.isnan(metrics[name]) for name in ("text", "many", "array", "none"))
    told = capsys.readouterr().out
    odd_words = ("an array of shape (2,)", "a tensor of shape (3,)", "'x'", "'None'")
    for words in (*odd_words, "but NoneType has none"):
        assert told.count(words) == 1


def test_array_of_one_number_is_that_number(capsys: pytest.CaptureFixture[str]) -> None:
    """NumPy converts only arrays without dimensions."""
    with unrecorded(Goal("accuracy", "max")) as run:
        run.log({"flat": np.array([1.5]), "text": "2.5"}, step=np.array([3]))  # type: ignore[arg-type]
        assert run.evaluated({"accuracy": np.array([[0.5]])}, step=3)
        run.checkpoint({}, step=4, metrics={"accuracy": np.array([0.75])})
    assert rows(journal(run)) == [(3, {"flat": 1.5, "text": 2.5})]
    evaluations = [one.metrics for one in of_kind(run.folder, Evaluated)]
    assert evaluations == [{"accuracy": 0.5}, {"accuracy": 0.75}]
    assert "is not a number" not in capsys.readouterr().out


def test_each_value_that_becomes_nan_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    odd = {"none": None, "date": np.datetime64("2020"), "big": 10**400, "two": torch.ones(2)}
    real = {"nan": math.nan, "tensor": torch.tensor(math.nan), "array": np.array([np.nan])}
    with unrecorded() as run:
        for step in (1, 2):
            run.log({**odd, **real}, step=step)
            run.evaluated({f"val/{name}": value for name, value in (odd | real).items()}, step)
            run.checkpoint({}, step, {f"test/{name}": value for name, value in odd.items()})
    printed = capsys.readouterr().out
    assert printed.count("is not a number") == 3 * len(odd)
    for name in odd:
        for prefix in ("", "val/", "test/"):
            assert printed.count(f" {prefix}{name} is not a number but ") == 1


def test_continued_run_remembers_its_best_value() -> None:
    for value, best in ((0.9, True), (0.5, False), (0.95, True)):
        with unrecorded(Goal("val/accuracy", "max")) as run:
            assert run.evaluated({"val/accuracy": value}, step=1) is best
    ends = of_kind(run.folder, RunEnded)
    assert [event.metrics["best"] for event in ends] == [0.9, 0.9, 0.95]


def test_continued_run_with_another_goal_compares_under_that_goal() -> None:
    with unrecorded(Goal("val/loss", "min")) as run:
        for step, (loss, accuracy) in enumerate([(0.9, 0.5), (math.inf, 0.9), (0.8, 0.8)], 1):
            run.evaluated({"val/loss": loss, "val/accuracy": accuracy}, step)
    with unrecorded(Goal("val/accuracy", "max")) as run:
        assert not run.evaluated({"val/accuracy": 0.85}, step=4)
        assert run.evaluated({"val/accuracy": 0.95}, step=5)


def test_continued_run_keeps_its_goal_and_its_checkpoints() -> None:
    options: list[dict[str, Any]] = [{"goal": Goal("acc", "max", 0.95), "keep": 2}, {}, {}]
    values = iter([0.5, 0.9, 0.8, 0.7, 0.6])
    for count, given in zip((3, 1, 1), options, strict=True):
        with rankzero.track("mine", name="r1", offline=True, **given) as run:
            for _ in range(count):
                run.checkpoint({"x": 1}, run.step + 1, {"acc": next(values)})
    kept = checkpoint_files.by_step((run.folder or Path()) / "checkpoints")
    assert [path.name for path in kept] == ["step_00000002", "step_00000003", "step_00000005"]
    starts = of_kind(run.folder, RunStarted)
    assert [one.params["goal.target"] for one in starts] == ["0.95"] * 3


def test_goal_in_the_users_config_is_none_of_the_continued_run() -> None:
    config = {"goal": {"metric": "reward", "mode": "max", "target": 1.0}}
    for _ in range(2):
        with rankzero.track("mine", config, name="r1", offline=True) as run:
            assert run._goal == Goal()


def test_run_of_an_older_version_keeps_its_goal_and_its_checkpoints() -> None:
    """Its journal says of no run how many checkpoints it keeps."""
    with rankzero.track("mine", name="r1", goal=Goal("acc", "max"), keep=3, offline=True) as run:
        for step, accuracy in enumerate([0.9, 0.8, 0.7, 0.1], 1):
            run.checkpoint({"x": 1}, step, {"acc": accuracy})
    assert run.folder is not None
    events = journal(run)
    for key in ("rankzero.keep", "rankzero.goal"):
        del events[0].environment[key]
    (run.folder / "events.jsonl").write_bytes(b"".join(map(encode_line, events)))
    with rankzero.track("mine", name="r1", offline=True) as run:
        run.checkpoint({"x": 1}, 5, {"acc": 0.2})
    kept = checkpoint_files.by_step(run.folder / "checkpoints")
    assert [path.name[-1] for path in kept] == ["1", "2", "3", "5"]


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "a/b", ""])
def test_name_that_names_no_folder_is_refused_at_once(name: str) -> None:
    with pytest.raises(rankzero.UserError, match="a run's name may have"):
        rankzero.track("mine", name=name, offline=True)


def test_goal_of_an_own_loop_may_have_any_name() -> None:
    with unrecorded(Goal("accuracy", "max"), keep=1) as run:
        assert run.evaluated({"accuracy": 0.5}, step=1)
        for step, value in ((2, 0.9), (3, 0.7)):
            run.checkpoint({"x": torch.zeros(1)}, step, {"accuracy": value})
    (end,) = of_kind(run.folder, RunEnded)
    assert end.metrics["best"] == 0.9
    kept = checkpoint_files.by_step((run.folder or Path()) / "checkpoints")
    assert [path.name for path in kept] == ["step_00000002", "step_00000003"]


def test_best_checkpoint_stays_without_its_metrics_given_again() -> None:
    with unrecorded(Goal("val/acc", "max"), keep=1) as run:
        for step, value in ((1, 0.5), (2, 0.9), (3, 0.7)):
            run.evaluated({"val/acc": value}, step)
            run.checkpoint({"x": 1}, step)
    kept = checkpoint_files.by_step((run.folder or Path()) / "checkpoints")
    assert [path.name for path in kept] == ["step_00000002", "step_00000003"]
    assert checkpoint_files.read_manifest(kept[0]).metrics == {"val/acc": 0.9}


def test_continued_run_improves_on_an_infinite_value() -> None:
    for value in (math.inf, 2.0):
        with unrecorded(Goal("val/loss", "min")) as run:
            assert run.evaluated({"val/loss": value}, step=1)


def test_written_checkpoint_is_logged_before_the_next_one() -> None:
    with unrecorded(flush_rows=1) as run:
        run.checkpoint({"x": torch.zeros(1)}, step=1)
        run._attempt.checkpoints._pending.result()
        run.log({"loss": 1.0}, step=2)
        assert of_kind(run.folder, CheckpointSaved)


def test_checkpoint_that_cannot_be_written_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with unrecorded(patience=0.0) as run:
        assert run.folder is not None
        (run.folder / "checkpoints").write_text("in the way")
        for step in (1, 2):
            run.checkpoint({"x": torch.zeros(1)}, step=step)
    assert capsys.readouterr().out.count("could not be written") == 2
    (end,) = of_kind(run.folder, RunEnded)
    assert end.status == "FAILED" and "the checkpoint of step 2 could not" in end.reason


def test_odd_steps_and_names_do_not_affect_other_values(capsys: pytest.CaptureFixture[str]) -> None:
    moving = np.array(5)
    with unrecorded() as run:
        odd = (np.int64(1), torch.tensor(2), 3.0, np.float32(4), moving)
        for step in (*odd, "six", None, 2.5, 2**70, 0):
            run.log({("a", 1): 1.0, 2: step}, step=step)  # type: ignore[arg-type, dict-item]
        moving += 90
        run.checkpoint({"x": torch.zeros(1)}, step=np.int64(8), metrics={"val/loss": 1.0})  # type: ignore[arg-type]
    events = journal(run)
    logged = rows(events)
    assert [step for step, _ in logged] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert {name for _, metrics in logged for name in metrics} == {"('a', 1)", "2"}
    assert [metrics["2"] for _, metrics in logged][:5] == [1, 2, 3, 4, 5]
    assert [one.step for one in events if isinstance(one, (Evaluated, CheckpointSaved))] == [8, 8]
    assert isinstance(events[-1], RunEnded) and events[-1].status == "FINISHED"
    printed = capsys.readouterr().out
    assert printed.count("a step must be an integer, not 'six': it counts as 6") == 1
    assert printed.count("go back from 9 to 0") == 2


def test_unreadable_tensors_do_not_hide_the_users_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on a GPU after an assertion of the device: whatever asks it raises."""
    with pytest.raises(ValueError, match="mine"), unrecorded() as run:
        run.log({"lost": torch.zeros((), device="meta"), "kept": 3.0}, step=1)
        raise ValueError("mine")
    assert [*map(type, journal(run))].count(Noticed) == 1
    (logged,), (end,) = of_kind(run.folder, StepsLogged), of_kind(run.folder, RunEnded)
    assert logged.metrics["kept"] == [3.0] and math.isnan(logged.metrics["lost"][0])
    assert end.status == "FAILED" and end.reason.startswith("ValueError: mine (")
    assert "values logged on meta that cannot be read are NaN" in capsys.readouterr().out


class StopsOnce:
    """As a tensor on a GPU: the user presses Ctrl-C while its first read waits."""

    __array__, stops = None, True

    def __float__(self) -> float:
        if self.stops:
            self.stops = False
            raise KeyboardInterrupt
        return 2.0


@pytest.mark.parametrize("flush_rows", [3, 500])
def test_ctrl_c_while_values_are_read_loses_none(flush_rows: int) -> None:
    value = StopsOnce()
    with pytest.raises(KeyboardInterrupt), unrecorded(flush_rows=flush_rows) as run:
        for _ in range(3):
            run.log({"loss": value})
    assert rows(journal(run)) == [(step, {"loss": 2.0}) for step in range(3)]
    assert journal(run)[-1].status == "KILLED"


class Meter:
    """As people write one: it goes on counting after it is logged."""

    average = 1.0

    def __float__(self) -> float:
        return self.average


def test_value_that_changes_later_is_logged_as_it_was() -> None:
    meter, tensor, array = Meter(), torch.tensor(1.0), np.array(1.0)
    with unrecorded() as run:
        run.log({"meter": meter, "tensor": tensor, "array": array}, step=1)
        meter.average = 9.0
        tensor += 8
        array += 8
    assert rows(journal(run)) == [(1, {"meter": 1.0, "tensor": 1.0, "array": 1.0})]


class Variable:
    """Stands for a variable of TensorFlow, or, without `read_value`, of Keras."""

    def __init__(self, value: float) -> None:
        self.now = value

    def __float__(self) -> float:
        return self.now

    def __array__(self) -> Any:
        return np.asarray(self.now)

    def assign(self, value: float) -> None:
        self.now = value


class TensorFlowVariable(Variable):
    def read_value(self) -> Any:
        return np.float32(self.now)


@pytest.mark.parametrize("kind", [Variable, TensorFlowVariable])
def test_variable_that_is_assigned_later_is_logged_as_it_was(kind: type[Variable]) -> None:
    variable = kind(0.25)
    kept = values.snapshot(variable)
    variable.assign(0.5)
    assert values.to_float(kept) == 0.25


def test_tensor_is_read_at_once_on_the_cpu_only() -> None:
    """A copy costs twice as much, and nothing waits for the CPU."""
    assert type(values.snapshot(torch.tensor([2.0], requires_grad=True))) is float
    elsewhere = values.snapshot(torch.zeros((), device="meta"))
    assert isinstance(elsewhere, torch.Tensor) and elsewhere.is_meta


def test_odd_tensor_does_not_affect_others_on_its_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with unrecorded() as run:
        run.log({"odd": torch.tensor(1j), "kept": torch.tensor(3.0)}, step=1)
    (logged,) = of_kind(run.folder, StepsLogged)
    assert logged.metrics["kept"] == [3.0] and math.isnan(logged.metrics["odd"][0])
    assert capsys.readouterr().out.count("a complex number") == 1
    told: list[str] = []
    tensors = [torch.zeros(()).as_subclass(Unread), torch.tensor(3.0)]
    odd, kept = values.to_floats(tensors, told.append)
    assert math.isnan(odd) and kept == 3.0
    assert len(told) == 1 and "there is no such device" in told[0]


def test_values_of_a_gpu_are_read_after_the_streams_that_copied_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[str] = []

    class Side:
        def synchronize(self) -> None:
            waited.append("side")

    side = Side()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: side)
    kept = [values.snapshot(torch.tensor(2.0).as_subclass(OnGpu)) for _ in range(2)]
    assert values.to_floats([torch.tensor(1.0), 3], print) == [1.0, 3.0] and not waited
    assert values.to_floats(kept, print) == [2.0, 2.0]
    assert waited == ["side"], "once for all values, and for no other stream"
    assert values.to_floats(kept, print) == [2.0, 2.0] and waited == ["side"]

    class ReadMeanwhile(OnGpu):
        def clone(self) -> Any:  # type: ignore[override]
            values.to_floats(kept, print)  # as if another thread read
            return super().clone()

    late = values.snapshot(torch.tensor(2.0).as_subclass(ReadMeanwhile))
    waited.clear()
    assert values.to_floats([late], print) == [2.0] and waited == ["side"]


def test_stream_of_a_value_is_kept_while_another_thread_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, waited = list[Any](), list[str]()

    class Side:
        def synchronize(self) -> None:
            waited.append("side")

        def __hash__(self) -> int:
            if len(kept) == 1:  # as if it read while this stream is noted
                values.to_floats([kept.pop()], print)
            return 1

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Side())
    kept.append(values.snapshot(torch.tensor(2.0).as_subclass(OnGpu)))
    last = values.snapshot(torch.tensor(2.0).as_subclass(OnGpu))
    assert values.to_floats([last], print) == [2.0]
    assert waited == ["side", "side"]


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)
    is_cuda, is_cpu = True, False


class Unread(torch.Tensor):
    """A tensor that cannot be read."""

    def reshape(self, *_: object) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError("there is no such device")

    def __float__(self) -> float:
        raise RuntimeError("there is no such device")


class Spread:
    """As a DTensor: whoever reads it waits for all ranks."""

    def __init__(self) -> None:
        self.read = False

    def full_tensor(self) -> torch.Tensor:
        self.read = True
        raise AssertionError("a collective that rank 0 alone would enter")

    detach = double = tolist = __float__ = full_tensor


def test_dtensor_is_never_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert hasattr(DTensor, "full_tensor"), "that is how they are told apart"
    spread = Spread()
    with unrecorded() as run:
        run.log({"grad_norm": spread, "kept": 3.0}, step=1)
        run.checkpoint({"x": torch.zeros(1)}, step=1, metrics={"val/norm": spread})
    assert not spread.read
    logged = of_kind(run.folder, StepsLogged)[0]
    assert logged.metrics["kept"] == [3.0] and math.isnan(logged.metrics["grad_norm"][0])
    printed = capsys.readouterr().out
    for name in ("grad_norm", "val/norm"):
        assert printed.count(f"{name} is not a number but 'a DTensor") == 1


class Point(NamedTuple):
    x: torch.Tensor


def test_named_tuples_in_a_state_are_saved_as_plain_values() -> None:
    with unrecorded() as run:
        run.checkpoint({"at": Point(torch.ones(2)), "shape": torch.Size([2])}, step=1)
    assert run.folder is not None
    path, problems = checkpoint_files.newest_intact(run.folder / "checkpoints")
    assert path is not None and not problems
    assert torch.equal(restore.load(path)["at"][0], torch.ones(2))


def test_checkpoint_that_could_not_be_loaded_again_is_refused_with_its_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    odd: list[Any] = [
        {"scores": [1.0, range(3)]},
        {"at": {3: object()}},
        {"change": lambda: None},
        {"args": Namespace(lr=0.1)},
    ]
    with unrecorded() as run:
        for step, state in enumerate(odd, 1):
            for at in (2 * step, 2 * step + 1):
                run.checkpoint({"optimizer": state}, step=at)
        run.checkpoint({"dtype": torch.bfloat16, "size": (1, 2), "name": "x"}, step=10)
    (kept,) = ((run.folder or Path()) / "checkpoints").iterdir()
    assert kept.name == "step_00000010" and restore.load(kept)
    printed = capsys.readouterr().out
    kinds = (
        "scores.1 is a builtins.range",
        "at.3 is a builtins.object",
        "change is",
        "args is a argparse",
    )
    for key in kinds:
        assert printed.count(f"optimizer.{key}") == 1, printed


def test_copy_of_what_holds_a_run_has_the_same_run() -> None:
    with unrecorded() as run:
        assert copy.deepcopy({"run": run})["run"] is run


def test_run_goes_on_after_its_end_as_a_new_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    run = unrecorded()
    run.log({"train/loss": 1.0}, step=5)
    run.finish()
    run.finish()
    run.log({"train/loss": 9.0, "test/loss": 2.0}, step=5)
    run.finish(ValueError("in the second"))
    events = journal(run)
    kinds = [type(one) for one in events if not isinstance(one, (StepsLogged, Noticed))]
    assert kinds == [RunStarted, RunEnded] * 2
    assert [one.attempt for one in of_kind(run.folder, RunStarted)] == [1, 2]
    assert [one.status for one in of_kind(run.folder, RunEnded)] == ["FINISHED", "FAILED"]
    assert "step 5 of train/loss is not above those of an earlier" in capsys.readouterr().out


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_error_without_a_text_ends_the_run_too() -> None:
    run = unrecorded()
    run.finish(Unprintable())
    (end,) = of_kind(run.folder, RunEnded)
    assert (end.status, end.reason) == ("FAILED", "Unprintable: without a text")


def test_reason_of_an_error_of_a_loading_process_is_one_line() -> None:
    with pytest.raises(ValueError), unrecorded() as run:
        raise ValueError("Caught it in\nOriginal Traceback (…):\n  …\nValueError: bad file")
    (end,) = of_kind(run.folder, RunEnded)
    assert end.reason.startswith(f"ValueError: bad file ({__file__}, line ")


def test_run_that_cannot_go_on_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    run = unrecorded()
    run.finish()
    (Path(run.folder or "") / "events.jsonl").unlink()
    (Path(run.folder or "") / "events.jsonl").mkdir()
    for _ in range(2):
        run.log({"loss": 1.0})
        assert not run.evaluated({"val/loss": 1.0})
        run.checkpoint({})
    printed = capsys.readouterr().out
    assert printed.count("is logged after the end of r1 is lost") == 1 and "directory" in printed


def test_run_that_cannot_go_on_is_not_tried_at_each_value() -> None:
    first, tries = unrecorded(), list[int]()
    first.finish()

    def open_log(_: Identity) -> RunLog:
        tries.append(1)
        if len(tries) > 1:
            raise OSError("full")
        return RunLog(RunFolder(first.folder or Path()), None, 2, NoRecorder())

    run = TrackedRun(open_log, RunFolder(first.folder or Path()).identity, Goal())
    run.finish()
    for step in range(100):
        run.log({"loss": 1.0}, step)
    assert len(tries) == 2


def test_metric_has_one_value_at_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    with unrecorded(Goal("val/loss")) as run:
        run.log({"val/loss": 0.5}, step=1)
        assert run.evaluated({"val/loss": 0.5}, step=1)
        run.checkpoint({"x": 1}, step=1, metrics={"val/loss": 0.5, "val/acc": 0.25})
        run.log({"val/loss": 0.75}, step=1)
    assert capsys.readouterr().out.count("val/loss was logged twice at step 1") == 1
    (row,), (first, second) = of_kind(run.folder, StepsLogged), of_kind(run.folder, Evaluated)
    # One time, one point: MLflow keeps points that are equal once.
    assert first.time == second.time == row.times[0] and first.best
    assert first.metrics == {"val/loss": 0.5} and second.metrics == {"val/acc": 0.25}
    (saved,) = of_kind(run.folder, CheckpointSaved)
    assert saved.best and saved.metrics == {"val/loss": 0.5, "val/acc": 0.25}


def test_metric_has_one_value_at_a_step_that_is_logged_again_later(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with unrecorded() as run:
        for step, loss in [(1, 1.0), (2, 0.5), (3, 0.25), (1, 99.0), (9, 0.1), (2, 98.0), (5, 0.2)]:
            run.log({"loss": loss}, step)
        run.log({"loss": 0.05})
    logged = [(1, 1.0), (2, 0.5), (3, 0.25), (9, 0.1), (5, 0.2), (10, 0.05)]
    assert rows(journal(run)) == [(step, {"loss": loss}) for step, loss in logged]
    printed = capsys.readouterr().out
    assert printed.count("go back from 3 to 1, which has a value") == 1
    assert printed.count("the steps of loss go back from 9 to 5") == 1


def test_evaluation_of_an_earlier_step_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    with unrecorded(Goal("val/loss")) as run:
        assert run.evaluated({"val/loss": 0.25}, 10)
        assert not run.evaluated({"val/loss": 0.5}, 20)
        run.checkpoint({"x": 1}, 10, {"val/loss": 0.25, "val/acc": 0.75})
        assert "twice" not in capsys.readouterr().out
        assert run.evaluated({"val/loss": 0.125}, 10), "what it has logged there is the best"
    assert capsys.readouterr().out.count("val/loss was logged twice at step 10") == 1
    evaluations = of_kind(run.folder, Evaluated)
    assert [(one.step, one.metrics) for one in evaluations] == [
        (10, {"val/loss": 0.25}),
        (20, {"val/loss": 0.5}),
        (10, {"val/acc": 0.75}),
    ]
    (saved,) = of_kind(run.folder, CheckpointSaved)
    assert saved.best and saved.metrics == {"val/loss": 0.25, "val/acc": 0.75}


@pytest.mark.parametrize("first", [0, 3])
def test_evaluations_count_steps_by_themselves(first: int) -> None:
    if first:
        with unrecorded() as run:
            run.evaluated({"val/loss": 4.0}, first - 1)
    with unrecorded(keep=2) as run:
        run.log({"val/acc": 0.5})
        run.evaluated({"val/acc": 0.5})
        losses = (2.0, 3.0, 1.0, 1.0)
        answers = [run.evaluated({"val/loss": loss}) for loss in losses]
    assert answers == [True, False, True, False]
    evaluations = of_kind(run.folder, Evaluated)[first > 0 :]
    found = [(one.step, *one.metrics.items()) for one in evaluations]
    expected = [(step, ("val/loss", loss)) for step, loss in enumerate(losses, first)]
    assert found == [(max(first - 1, 0), ("val/acc", 0.5)), *expected]


@pytest.mark.parametrize("evaluates", ["first", "last", "never"])
def test_checkpoints_count_steps_by_themselves(evaluates: str) -> None:
    for attempt in range(2):
        with unrecorded() as run:
            for loss in (2.0, 1.0, 3.0):
                if evaluates == "first":
                    run.evaluated({"val/loss": loss})
                run.checkpoint({"x": 1}, metrics={"val/loss": loss})
                if evaluates == "last":
                    assert run.evaluated({"val/loss": loss}) is (attempt == 0 and loss < 3.0)
            run.checkpoint({"x": 1})
    assert [one.step for one in of_kind(run.folder, Evaluated)] == [*range(6)]
    kept = checkpoint_files.by_step((run.folder or Path()) / "checkpoints")
    assert [path.name[-1] for path in kept] == ["1", "5"]


def test_logged_values_of_the_goal_are_judged_if_an_adapter_asks_for_it() -> None:
    with unrecorded(Goal("val/score", "max")) as run:
        run.log({"val/score": 9.0}, 0)
        assert run.step == 0
        run.judge_logged()
        for epoch, score in enumerate((0.5, 0.25, 0.75, 0.5, 0.125), 1):
            run.log({"val/score": score, "loss": 1.0}, epoch)
    found = [(one.step, one.best) for one in of_kind(run.folder, Evaluated)]
    assert found == [(3, True), (5, False)]
    end = journal(run)[-1].metrics
    assert (end["best"], end["val/score"]) == (0.75, 0.125)


def test_goal_that_no_evaluation_has_is_noted_once() -> None:
    with unrecorded(Goal("val/enrgy")) as run:
        for step in (1, 2):
            run.evaluated({"val/energy": 0.5}, step=step)
        assert not of_kind(run.folder, Noticed), "the goal may follow"
        for step in (3, 4):
            run.checkpoint({}, step, {"val/energy": 0.5})
    (note,) = [one.text for one in of_kind(run.folder, Noticed)]
    assert "'val/enrgy'" in note and "['val/energy']" in note


def test_logged_value_of_the_goal_whose_step_goes_back_is_judged() -> None:
    with unrecorded(Goal("val/score", "max")) as run:
        run.judge_logged()
        for step, score in ((2, 0.25), (1, 0.5)):
            run.log({"val/score": score}, step)
    found = [(one.step, one.best) for one in of_kind(run.folder, Evaluated)]
    assert found == [(1, True)] and journal(run)[-1].metrics["best"] == 0.5
    assert not [one for one in of_kind(run.folder, Noticed) if "again" in one.text]


def taken(history: MetricHistory, step: int) -> list[Event]:
    history.take((step, 0.0, {"loss": 0.5}))
    history.drain(events := list[Event]())
    return events


def test_a_row_that_is_taken_again_after_ctrl_c_has_the_same_step() -> None:
    class Interrupted(dict[str, float]):
        def items(self) -> Any:
            yield from super().items()
            raise KeyboardInterrupt

    history, moment = MetricHistory(Goal(), 1, lambda *_: None), time.time()
    with pytest.raises(KeyboardInterrupt):
        history.take((None, moment, Interrupted(loss=0.5)))
    history.take((None, moment, {"loss": 0.5}))
    history.drain(events := list[Any]())
    assert [event.metrics for event in events] == [{"loss": [0.5]}]


@pytest.mark.parametrize("kind", ["even", "odd", "back"])
def test_steps_of_a_metric_need_little_memory(kind: str) -> None:
    history = MetricHistory(Goal(), 1, lambda *_: None)
    steps = {
        "even": range(0, 300_000, 10),
        "odd": [step * step for step in range(30_000)],
        "back": range(30_000, 0, -1),
    }[kind]
    tracemalloc.start()
    for step in steps:
        taken(history, step)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < (4_000 if kind == "even" else 4_000_000)
    assert not taken(history, steps[-1])


def test_each_step_is_known_whatever_the_order() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        history = MetricHistory(Goal(), 1, lambda *_: None)
        known = set[int]()
        for _ in range(300):
            step = draw.choice([history.step + draw.choice([1, 1, 10]), draw.randrange(-50, 400)])
            assert bool(taken(history, step)) == (step not in known), (seed, step)
            known.add(step)


@pytest.mark.parametrize("leaves", [True, False])
def test_signal_at_any_line_of_a_flush_loses_no_value(leaves: bool) -> None:
    """Its handler uses the run, as for a last checkpoint, and leaves or returns."""
    run, line, step = unrecorded(), 0, 0
    parts = Attempt._flush.__code__, _consume.__code__
    parts += MetricHistory.take.__code__, MetricHistory.drain.__code__

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal line
        if frame.f_code in parts and event == "line":
            line -= 1
            if line == 0:
                sys.settrace(None)
                assert run.step >= step
                logged = [at for at, _ in rows(journal(run))]
                assert set(logged) >= {*range(1, step + 1)}, "before the checkpoint"
                if leaves:
                    raise SystemExit
        return trace

    for at in itertools.count(1):
        for _ in range(3):
            run.log({"loss": 0.5, "lr": 0.1}, step := step + 1)
        line = at
        sys.settrace(trace)
        with contextlib.suppress(SystemExit):
            run._attempt.flush()
        sys.settrace(None)
        if line > 0:
            break
    run.finish()
    found = [(at, name) for at, row in rows(journal(run)) for name in row]
    assert {*found} == {(n, name) for n in range(1, step + 1) for name in ("loss", "lr")}
    assert at > 50 and len(found) < 2 * len({*found})


class Nameless:
    """As a lazy object whose source is gone."""

    def __str__(self) -> str:
        raise RuntimeError("gone")


class Listless(dict[str, float]):
    def items(self) -> Any:
        raise RuntimeError("gone")


class Odd:
    items = 3


def test_what_has_no_name_costs_only_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with unrecorded() as run:
        for step in (1, 2):
            run.log({Nameless(): 1.0, "loss": 0.5}, step)  # type: ignore[dict-item]
            for odd in (Listless(loss=1.0), Odd()):
                run.log(odd, step)  # type: ignore[arg-type]
                run.checkpoint({"x": 1}, step, odd)  # type: ignore[arg-type]
                assert not run.evaluated(odd, step)  # type: ignore[arg-type]
            run.evaluated({Nameless(): 1.0, "val/loss": 0.5}, step)  # type: ignore[dict-item]
            run.evaluated({"val/more": 0.5}, Nameless())  # type: ignore[arg-type]
            run.log({"lost": Nameless()}, step)
    logged = [(step, metrics) for step, metrics in rows(journal(run)) if "lost" not in metrics]
    assert logged == [(1, {"loss": 0.5}), (2, {"loss": 0.5})]
    evaluations = [one.metrics for one in of_kind(run.folder, Evaluated)]
    assert evaluations == [{"val/loss": 0.5}, {"val/more": 0.5}] * 2
    printed = capsys.readouterr().out
    assert printed.count("the metric of type Nameless is not logged: RuntimeError: gone") == 1
    assert printed.count("Listless cannot give them: RuntimeError: gone") == 1


def test_keys_of_one_name_are_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"a.b": 1, "a": {"b": 2}, "bad": Nameless()}
    with rankzero.track("mine", config, name="r1", offline=True) as run:
        for step in (1, 2):
            run.log({1: 4.0, "1": 5.0}, step)  # type: ignore[dict-item]
        run.log_params({"c.d": 1, "c": {"d": 2}})
    assert rows(journal(run)) == [(1, {"1": 5.0}), (2, {"1": 5.0})]
    (start,) = of_kind(run.folder, RunStarted)
    assert start.params == {"a.b": "2"}
    printed = capsys.readouterr().out
    assert printed.count("the param bad is not logged: RuntimeError: gone") == 1
    for name in ("param a.b", "param c.d", "metric 1"):
        assert printed.count(f"several keys are the {name}: the last counts") == 1


def test_steps_count_by_themselves() -> None:
    for _ in range(2):
        with unrecorded() as run:
            for _ in range(2):
                run.log({"a": 1.0})
                run.log({"b": 2.0})
            run.evaluated({"val/loss": 1.0})
    logged = [(step, *metrics) for step, metrics in rows(journal(run))]
    assert sorted(logged) == [(step, name) for step in range(4) for name in "ab"]
    assert [one.step for one in of_kind(run.folder, Evaluated)] == [1, 3]


def test_values_reach_the_journal_without_another_call() -> None:
    with unrecorded() as run:
        for step in (1, 2):
            run.log({"loss": 1.0, "acc": np.float32(0.5)}, step)
            wait_until(
                lambda step=step: rows(journal(run))[-1:] == [(step, {"loss": 1.0, "acc": 0.5})]
            )
        flushers = [one for one in threading.enumerate() if one.name == "flusher"]
        assert len(flushers) == 1, "a row starts no thread of its own"
        run.log({"loss": 1.0})
        on_device = torch.ones((), device="meta")
        run.log({"loss": 1.0}, on_device)  # type: ignore[arg-type]
        run.log({"on_device": on_device}, 4)
        time.sleep(2.5)
        assert len(rows(journal(run))) == 3, (
            "another thread would break the capture of a CUDA graph"
        )
    wait_until(lambda: not flushers[0].is_alive())


def test_checkpoint_reaches_the_journal_without_another_call() -> None:
    with unrecorded() as run:
        run.checkpoint({"x": torch.zeros(1)}, step=1)
        wait_until(lambda: of_kind(run.folder, CheckpointSaved))


class OnDevice:
    """A value that stands for one on a GPU, which only the loop's own thread may read."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(0.5)

    def __float__(self) -> float:
        return 0.5


def test_checkpoint_is_logged_while_values_wait_on_a_gpu() -> None:
    with unrecorded() as run:
        run.checkpoint({"x": torch.zeros(1)}, step=1)
        run.log({"loss": OnDevice()}, step=2)
        wait_until(lambda: of_kind(run.folder, CheckpointSaved))
    assert rows(journal(run)) == [(2, {"loss": 0.5})] and not of_kind(run.folder, Noticed)


def test_threads_that_log_at_once_lose_nothing() -> None:
    with unrecorded(flush_rows=3) as run:

        def work(number: int) -> None:
            for step in range(400):
                run.log({f"loss_{number}": float(step)}, step)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    steps: dict[str, list[int]] = {}
    for step, metrics in rows(journal(run)):
        for name in metrics:
            steps.setdefault(name, []).append(step)
    assert steps == {f"loss_{number}": list(range(400)) for number in range(4)}


def test_log_costs_a_training_microseconds() -> None:
    with unrecorded() as run:
        start = time.thread_time()  # Others use the machine.
        for step in range(4000):
            run.log({"train/loss": 1.5}, step)
        # All calls count: eight of them flush.
        assert (time.thread_time() - start) / 4000 < 20e-6


def test_track_and_what_it_logs_import_nothing_heavy(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LIGHT], cwd=tmp_path, check=True)


LIGHT = """
import sys, rankzero
with rankzero.track("mine", {"lr": 0.1}, offline=True) as run:
    run.log({"loss": 1.0})
    run.evaluated({"val/loss": 1.0})
    run.set_tag("team", "a")
    run.log_text("hello", "a.txt")
loaded = {"torch", "mlflow", "optuna", "numpy", "pandas"} & set(sys.modules)
assert not loaded, loaded
"""


def test_run_of_another_experiment_continues_there_with_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rankzero.track("first", name="mine", offline=True).finish()
    rankzero.track("first", name="mine", offline=True).finish()
    assert "of the experiment" not in capsys.readouterr().out
    run = rankzero.track("second", name="mine", offline=True)
    run.finish()
    assert run.folder is not None and RunFolder(run.folder).identity.experiment == "first"
    assert "mine is a run of the experiment 'first'" in capsys.readouterr().out


def test_run_of_another_store_continues_there_with_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for server in ("http://u:p@a:1", "http://u:q@a:1", "http://b:2"):
        assert "of the store" not in capsys.readouterr().out
        rankzero.track("mine", name="r1", tracking_uri=server, offline=True).finish()
    assert "r1 is a run of the store 'http://a:1': it continues" in capsys.readouterr().out


def test_second_process_cannot_write_the_same_run() -> None:
    """The second process changes nothing. After the first, the run can be continued."""
    with subprocess.Popen(
        [sys.executable, "-c", BESIDE], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as beside:
        assert beside.stdout is not None and beside.stdin is not None
        assert beside.stdout.readline() == b"open\n"
        with pytest.raises(
            rankzero.UserError, match=rf"process {beside.pid} is writing r1: stop it"
        ):
            rankzero.track("mine", name="r1", offline=True)
        beside.stdin.write(b"on\n")
        beside.stdin.flush()
        assert beside.stdout.readline() == b"ended\n"
        with rankzero.track("mine", name="r1", offline=True) as run:
            run.log({"loss": 2.0}, step=2)
        beside.stdin.close()
    assert [type(event) for event in journal(run)] == [RunStarted, StepsLogged, RunEnded] * 2


BESIDE = """
import sys, rankzero
with rankzero.track("mine", name="r1", offline=True) as run:
    run.log({"loss": 1.0}, step=1)
    print("open", flush=True)
    sys.stdin.readline()
print("ended", flush=True)
sys.stdin.readline()
"""


def test_the_id_waits_longer_for_a_slow_import_than_for_an_mlflow_that_fails() -> None:
    run = unrecorded()
    assert run.folder is not None
    path, found = delivery_state.path_of(RunFolder(run.folder), 0), list[str | None]()

    def save(run_id: str | None = None, error: str | None = None) -> None:
        retries = delivery_state.Retries(failures=1, error=error)  # it may be an earlier attempt's
        delivery_state.save(path, delivery_state.DeliveryState(run_id=run_id, retries=retries))

    save(error="refused")
    run._attempt.begun -= 21.0
    assert run.id is None
    save()
    asking = threading.Thread(target=lambda: found.append(run.id))
    asking.start()
    asking.join(0.3)
    assert asking.is_alive()
    save(run_id="abc")
    asking.join(10.0)
    assert found == ["abc"]
    save()
    run._attempt.begun -= 40.0
    assert run.id is None


def test_command_of_a_run_has_its_module_and_torchrun() -> None:
    argv = ["/x/pkg/__main__.py", "--lr", "1"]
    main = SimpleNamespace(__spec__=SimpleNamespace(name="pkg.__main__", origin=argv[0]))
    assert command(argv, {}, main) == ["python", "-m", "pkg", "--lr", "1"]
    launched = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    launched |= {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0"}
    words = ["torchrun", "--nnodes=1", "--nproc-per-node=2"]
    assert command(argv, launched, main) == [*words, "-m", "pkg", "--lr", "1"]
    # A profiler runs another file, and its own module stays the main one.
    assert command(["x.py"], launched, main) == [*words, "x.py"]
    assert command(["x.py"], {}, main) == ["x.py"]


def test_attempt_that_a_later_call_of_track_takes_over_has_not_finished() -> None:
    rankzero.track("mine", name="r1", offline=True)  # as a cell whose training has failed
    with rankzero.track("mine", name="r1", offline=True) as run:
        run.log({"loss": 1.0})
    ends = [(one.status, one.reason) for one in of_kind(run.folder, RunEnded)]
    assert ends == [("KILLED", "stopped by a later attempt"), ("FINISHED", "finished")]

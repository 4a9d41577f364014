"""What a user writes, how it is loaded, and the schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero import Experiment, Goal, Train, UserError, override
from rankzero.experiment_file import load
from rankzero.schedule import factor


class Base(Experiment):
    goal = Goal("val/accuracy", "max", target=0.9)
    train = Train(epochs=3)
    width: int = 8


class Derived(Base):
    depth: int = 2
    width = 16


def test_what_a_class_sets_without_an_annotation_is_a_field() -> None:
    assert Base().goal == Goal("val/accuracy", "max", 0.9)
    assert override(Base(), {"goal.target": "0.95"}).goal.target == 0.95
    assert Derived().width == 16 and Derived().depth == 2 and Derived().train.epochs == 3


def test_a_field_without_a_default_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Broken\.width needs a default"):
        type("Broken", (Experiment,), {"__annotations__": {"width": int}})


def test_what_is_not_written_is_told() -> None:
    for method, words in (("data", ()), ("model", ()), ("measure", (None, None))):
        with pytest.raises(NotImplementedError, match=f"Base must define {method}"):
            getattr(Base(), method)(*words)


@pytest.mark.parametrize(
    "wrong", [{"epochs": None}, {"batch_size": 0}, {"clip": 0.0}, {"workers": -1}, {"max_minutes": -1.0}]
)
def test_a_training_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Train(**wrong)


@pytest.mark.parametrize("metric", ["accuracy", "train/loss"])
def test_a_goal_is_a_validation_metric(metric: str) -> None:
    with pytest.raises(ValueError, match="validation metric"):
        Goal(metric)


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_better_is_strict_and_follows_the_mode(one: float, other: float) -> None:
    assert Goal(mode="max").better(one, other) == (one > other) == Goal(mode="min").better(other, one)
    assert not Goal().better(float("nan"), other)
    assert Goal().better(one, None)


def test_a_target_is_reached_or_not() -> None:
    assert Goal("val/a", "max", 0.9).reached(0.9) and not Goal("val/a", "max", 0.9).reached(0.89)
    assert Goal("val/a", "min", 0.1).reached(0.05) and not Goal("val/a", "min", 0.1).reached(None)
    assert not Goal("val/a", "max").reached(1.0)


EXPERIMENT = "from rankzero import Experiment\nclass {name}(Experiment):\n    width: int = 1\n"


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_only_experiment_of_a_file_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, "exp_one.py", EXPERIMENT.format(name="One"))
    assert load(str(path)).__name__ == "One"
    assert load(f"{path}:One") is load(str(path))


def test_of_several_experiments_one_must_be_named(tmp_path: Path) -> None:
    text = EXPERIMENT.format(name="One") + "class Two(Experiment):\n    pass\n"
    path = written(tmp_path, "exp_two.py", text)
    with pytest.raises(UserError, match=r"exp_two\.py:One or exp_two\.py:Two"):
        load(str(path))
    assert load(f"{path}:Two").__name__ == "Two"
    with pytest.raises(UserError, match="has no experiment 'Three'"):
        load(f"{path}:Three")


def test_a_base_class_does_not_stand_in_the_way(tmp_path: Path) -> None:
    path = written(tmp_path, "exp_base.py", EXPERIMENT.format(name="One") + "class Two(One):\n    pass\n")
    assert load(str(path)).__name__ == "Two"


def test_a_file_named_as_a_loaded_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rename the file"):
        load(str(written(tmp_path, "json.py", EXPERIMENT.format(name="One"))))


schedules = st.sampled_from(["constant", "linear", "cosine", "one_cycle"])


@given(schedules, st.integers(1, 2000), st.data())
def test_a_learning_rate_stays_within_its_base(schedule: str, total: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, total))
    step = data.draw(st.integers(0, total - 1))
    assert 0 < factor(schedule, step, total, warmup) <= 1


@given(schedules, st.integers(2, 200))
def test_the_warm_up_rises(schedule: str, warmup: int) -> None:
    rises = [factor(schedule, step, 1000, warmup) for step in range(warmup)]
    assert rises == sorted(set(rises)) and rises[-1] < 1


def test_the_schedules_end_low_and_one_cycle_peaks_early() -> None:
    for schedule in ("linear", "cosine", "one_cycle"):
        assert factor(schedule, 999, 1000) < 0.01
    one_cycle = [factor("one_cycle", step, 1000) for step in range(1000)]
    assert one_cycle.index(max(one_cycle)) == 300 and one_cycle[0] == pytest.approx(0.04)

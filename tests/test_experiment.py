"""Experiments: fields that are settings, and the errors for wrong ones."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero import (
    Choice,
    ConfigError,
    Experiment,
    Goal,
    Train,
    flatten,
    from_yaml,
    override,
    to_yaml,
)
from rankzero.config import rendered


@dataclasses.dataclass(frozen=True)
class Ema:
    decay: float = 0.999


class Base(Experiment):
    goal = Goal("val/accuracy", "max", target=0.9)
    train = Train(epochs=3)
    width: int = 8
    data_: Literal["real", "fake"] = "real"


class Derived(Base):
    depth: int = 2
    width = 16
    ema: Ema = Ema()
    search: Mapping[str, Choice] = {"depth": Choice(1, 2)}

    def data(self) -> tuple[str, str]:
        return self.data_, self.data_


def test_an_inherited_field_has_the_type_of_the_nearest_base() -> None:
    class Wider(Base):
        lr: float | None = None  # type: ignore[assignment]

    class Given(Wider):
        lr = 0.5

    assert override(Given(), {"lr": "none"}).lr is None


def test_inherited_field_needs_no_annotation() -> None:
    assert Base().goal == Goal("val/accuracy", "max", 0.9)
    assert override(Base(), {"goal.target": "0.95"}).goal.target == 0.95
    assert Derived().width == 16 and Derived().depth == 2 and Derived().train.epochs == 3


def test_mixin_in_front_of_its_base_gives_values() -> None:
    class Big:
        width: int = 512
        train = Train(epochs=90)

    class BigBase(Big, Base):
        pass

    assert BigBase().width == 512 and BigBase().train.epochs == 90
    assert BigBase(width=3).width == 3 and Base().width == 8


def test_two_fields_with_one_key_are_refused() -> None:
    for names, key in ((("lr_",), "lr"), (("x_", "x__"), "x")):
        fields = {"__annotations__": dict.fromkeys(names, float), **dict.fromkeys(names, 7.0)}
        with pytest.raises(TypeError, match=f"two settings with the key {key}: rename one"):
            type("Twice", (Experiment,), fields)


def test_an_inherited_field_may_have_a_type_that_its_module_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("has_only_rankzero")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    base = f"import rankzero\nfrom {__name__} import Base\n"
    text = "class D(Base):\n goal = rankzero.Goal('val/loss')\n data_ = 'fake'\n"
    exec(base + text, vars(module))  # noqa: S102
    assert flatten(module.D())["goal.metric"] == "val/loss"
    with pytest.raises(ConfigError, match=r"real \| fake"):
        override(module.D(), {"data": "other"})


def test_base_class_keeps_its_defaults_and_fields() -> None:
    assert (
        Base().width == 8
        and "depth" not in flatten(Base())
        and flatten(Derived())["ema.decay"] == 0.999
    )


def test_search_space_is_not_a_setting() -> None:
    assert (
        "search" not in flatten(Derived())
        and Derived.search["depth"] == Choice(1, 2)
        and not Base.search
    )


def test_setting_may_share_its_name_with_a_method() -> None:
    assert override(Derived(), {"data": "fake"}).data() == ("fake", "fake")


def test_experiment_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="set width=VALUE"):
        Base().width = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="a functools"):
        Base().scaler = 3  # type: ignore[attr-defined]


trains = st.builds(
    Train,
    epochs=st.integers(1, 99),
    steps=st.none() | st.integers(1, 10**9),
    clip=st.none() | st.floats(min_value=1e-300, allow_nan=False),
    schedule=st.sampled_from(["constant", "linear", "cosine", "one_cycle"]),
    compile=st.booleans(),
)
experiments = st.builds(
    Derived,
    train=trains,
    lr=st.floats(allow_nan=False),
    depth=st.integers(),
    data_=st.sampled_from(["real", "fake"]),
)


@given(experiments)
def test_experiment_survives_yaml_and_text(experiment: Derived) -> None:
    assert from_yaml(Derived, to_yaml(experiment)) == experiment
    assert override(Derived(), rendered(experiment)) == experiment


def test_field_without_a_default_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Broken\.width needs a default"):
        type("Broken", (Experiment,), {"__annotations__": {"width": int}})


@pytest.mark.parametrize(
    ("name", "kind", "default"),
    [("tokens", int, 512), ("frozen", bool, True), ("metrics", str, "f1"), ("model", str, "vit")],
)
def test_a_setting_with_the_name_of_a_method_is_refused(name: str, kind: Any, default: Any) -> None:
    says = rf"Broken\.{name}: {name} is a method of Experiment: rename the setting to {name}_,"
    for typed in ({name: kind}, {}):
        with pytest.raises(TypeError, match=says):
            type("Broken", (Experiment,), {"__annotations__": typed, name: default})
    renamed = type(
        "Mended", (Experiment,), {"__annotations__": {f"{name}_": kind}, f"{name}_": default}
    )
    assert flatten(renamed())[name] == default


@pytest.mark.parametrize("kind", [property, functools.cached_property, lambda method: method])
def test_a_property_or_a_method_with_the_name_of_a_setting_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"Broken\.lr: lr is a setting, .* in schedule\(\)"):
        type("Broken", (Experiment,), {"lr": kind(lambda self: 0.1)})


def test_a_class_attribute_of_experiment_is_no_setting() -> None:
    with pytest.raises(TypeError, match=r"lockstep is no setting: write lockstep = … without"):
        type("Broken", (Experiment,), {"__annotations__": {"lockstep": bool}, "lockstep": True})
    assert type("Mended", (Experiment,), {"lockstep": True, "turns": ("a", "b")})().lockstep  # type: ignore[attr-defined]


def test_an_own_method_with_the_name_of_a_new_one_is_refused() -> None:
    def metrics(self: Any, out: Any, y: Any) -> float:
        return 0.0

    says = r"Broken\.metrics: metrics is .* called as metrics\(self\), but its .* \(self: .*out"
    with pytest.raises(TypeError, match=says):
        type("Broken", (Experiment,), {"metrics": metrics})

    class Fitting(Experiment):
        def batches(self, *_: Any) -> None:
            return None

        def derive(self, values: Any, more: int = 0) -> Any:
            return {}

        @staticmethod
        def tokens(batch: Any) -> int:  # type: ignore[override]
            return len(batch)

    assert Fitting().tokens([1, 2]) == 2


class Way(enum.Enum):
    UP = "up"


@pytest.mark.parametrize(
    "annotation",
    [Path, list[int], Any, Ema | None, tuple[Path, ...], dict[str, int], bytes, Literal[Way.UP]],
)
def test_type_without_a_text_form_is_refused(annotation: Any) -> None:
    with pytest.raises(TypeError, match=r"Broken\.it: a setting cannot have the type .*; use int,"):
        type("Broken", (Experiment,), {"__annotations__": {"it": annotation}, "it": None})


def test_missing_factory_is_named() -> None:
    for method, words in (("data", ()), ("model", ()), ("measure", (None, None))):
        with pytest.raises(NotImplementedError, match=f"Base must define {method}"):
            getattr(Base(), method)(*words)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": None},
        {"batch_size": 0},
        {"batch_size": "32"},
        {"clip": 0.0},
        {"workers": -1},
        {"seed": -1},
    ],
)
def test_impossible_train_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Train(**wrong)


def test_train_and_goal_of_another_kind_are_refused_by_name() -> None:
    wrong: dict[str, Any] = {"train": {"steps": 3}}
    with pytest.raises(ConfigError, match=r"^train: must be a Train .* got \{'steps': 3\}"):
        Experiment(**wrong)
    for name, value in (("goal", "val/accuracy"), ("train", {"steps": 3})):
        with pytest.raises(ConfigError, match=f"^{name}: must be a {name.title()} such as"):
            type("Wrong", (Experiment,), {name: value, "__module__": __name__})


@pytest.mark.parametrize("metric", ["accuracy", "train/loss"])
def test_goal_of_an_experiment_must_be_a_validation_metric(metric: str) -> None:
    with pytest.raises(ValueError, match=r"goal.metric: must be a validation metric"):
        Experiment(goal=Goal(metric))
    with pytest.raises(ConfigError, match=r"^goal.metric: must be a validation metric"):
        override(Experiment(), {"goal.metric": metric})
    with pytest.raises(ValueError, match="metric: must be a name"):
        Goal("")


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_better_is_strict_and_follows_the_mode(one: float, other: float) -> None:
    differs = not math.isclose(one, other, rel_tol=1e-6)
    assert Goal(mode="max").better(one, other) == (one > other and differs)
    assert Goal(mode="min").better(other, one) == (one > other and differs)
    assert not Goal().better(float("nan"), other)
    assert Goal().better(one, None)


def test_reached_compares_with_the_target() -> None:
    assert Goal("val/a", "max", 0.9).reached(0.9) and not Goal("val/a", "max", 0.9).reached(0.89)
    assert Goal("val/a", "min", 0.1).reached(0.05) and not Goal("val/a", "min", 0.1).reached(None)
    assert not Goal("val/a", "max").reached(1.0)


def test_a_value_that_differs_by_rounding_is_a_tie_and_reaches_the_target() -> None:
    # 9 of 10 in single precision, whose sum depends on the number of processes.
    most, least = Goal("val/a", "max", 0.9), Goal("val/a", "min", 0.1)
    assert most.reached(0.8999999761581421) and least.reached(0.10000000149011612)
    assert not most.reached(0.89999) and not least.reached(0.10001)
    assert not most.better(0.9, 0.8999999761581421) and not most.better(0.8999999761581421, 0.9)
    assert most.better(0.90001, 0.9)

"""The search space: drawn parameters become a configuration; the reference is always in it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero import Choice, ConfigError, Experiment, Integer, LogUniform, Train, Uniform, flatten
from rankzero.config import override
from rankzero.errors import UserError
from rankzero.search_ranges import Range
from rankzero.tuning.space import (
    BATCH,
    BATCH_INDEX,
    DEVICES,
    FACTOR,
    PRECISION,
    make_space,
    narrowed,
    settings_text,
)


class Plain(Experiment):
    train: Train = Train(batch_size=64, epochs=4, warmup_steps=10, eval_every=100)
    lr: float = 0.1
    width: int = 32
    search = {"width": Choice(16, 32, 64)}


def searching(**ranges: Range) -> Experiment:
    cls: Any = type(
        "Searching",
        (Plain,),
        {"search": {key.replace("__", "."): found for key, found in ranges.items()}},
    )
    found: Experiment = cls()
    return found


@given(
    st.integers(0, 9),
    st.floats(0.25, 4.0),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from([1, 2, 4]),
)
def test_drawn_parameters_become_settings(
    power: int, factor: float, width: int, exponent: float, world: int
) -> None:
    space = make_space(Plain(), world, exponent, ("fp32", "bf16"))
    power = min(power, len(space.batch_sizes) - 1)
    found = flatten(
        space.experiment({BATCH_INDEX: power, FACTOR: factor, PRECISION: "bf16", "width": width})
    )
    batch = space.batch_sizes[power]
    assert (found[BATCH], found["width"], found[PRECISION]) == (batch, width, "bf16")
    assert batch % world == 0
    assert found["lr"] == pytest.approx(0.1 * factor * (batch / 64) ** exponent)
    assert found["train.epochs"] == 4  # as many samples
    assert found["train.eval_every"] == pytest.approx(100 * 64 / batch, abs=0.5, rel=0.01)


@given(st.integers(1, 8), st.sampled_from([0.5, 1.0]))
def test_the_references_parameters_give_the_reference(world: int, exponent: float) -> None:
    reference = Plain()
    space = make_space(reference, world, exponent)
    assert space.experiment(space.reference_parameters()) == reference
    assert set(space.reference_parameters()) == set(space.parameters())
    assert 64 in space.batch_sizes and list(space.batch_sizes) == sorted(set(space.batch_sizes))


def test_the_micro_batch_that_the_probe_chose_divides_each_batch() -> None:
    space = make_space(Plain(), 2, 1.0)
    space = dataclasses.replace(space, speed={"train.micro_batch": 24, "train.compile": True})
    for index, batch in enumerate(space.batch_sizes):
        train = space.experiment(space.sped_up({BATCH_INDEX: index})).train
        assert train.compile and train.micro_batch is not None
        assert train.micro_batch <= 24 and batch % (2 * train.micro_batch) == 0
    assert space.experiment(space.reference_parameters()) == Plain()


def test_the_micro_batch_that_the_probe_chose_may_be_the_whole_batch_of_all_ranks() -> None:
    space = make_space(override(Plain(), {"train.strategy": "tp"}), 2, 0.5)
    space = dataclasses.replace(space, speed={"train.recompute": True, "train.micro_batch": 64})
    assert space.experiment(space.sped_up({})).train.micro_batch == 64


def test_settings_as_people_say_them() -> None:
    found = {BATCH: 512, PRECISION: "bf16", "lr": 0.006, "train.workers": 2, "train.compile": True}
    assert settings_text(found) == "batch 512, bf16, lr 0.006, workers 2, compile"
    found = {"train.compile": False, "train.ddp.bucket_mb": 50.0, "width": 16, "beta2": 0.999}
    assert settings_text(found) == "no compile, ddp.bucket_mb 50, width 16, beta2 0.999"
    assert settings_text({"deep": True}) == "deep True"


def test_a_larger_batch_takes_fewer_steps() -> None:
    class InSteps(Experiment):
        train: Train = Train(batch_size=64, steps=1000)

    space = make_space(InSteps(), 1, 0.5)
    found = space.experiment({BATCH_INDEX: space.batch_sizes.index(256)})
    assert found.train.steps == 250


def test_the_experiments_own_ranges_replace_the_defaults() -> None:
    space = make_space(
        searching(
            train__batch_size=Choice(32, 128),
            lr=LogUniform(0.01, 0.2),
            train__precision=Choice("fp16"),
        ),
        2,
        1.0,
        ("fp32", "tf32"),
    )
    assert space.batch_sizes == (32, 64, 128)
    assert space.precisions == ("fp32", "fp16")
    assert space.factors == LogUniform(pytest.approx(0.1), pytest.approx(2.0))
    assert not space.extras


def test_a_narrowed_space_keeps_the_reference() -> None:
    space = narrowed(make_space(Plain(), 1, 1.0, ("fp32", "bf16")), [256], ["bf16"])
    assert space.batch_sizes == (64, 256) and space.precisions == ("fp32", "bf16")
    assert BATCH_INDEX not in narrowed(space, [], []).parameters()


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"width": Choice()}, "no options"),
        ({"width": Integer(5, 4)}, "above the upper bound 4: swap"),
        ({"lr": LogUniform(0.0, 1.0)}, "above 0"),
        ({"lr": Uniform(0.0, math.inf)}, "swap"),
        ({"widht": Choice(1)}, "did you mean 'width'"),
        ({"width": Choice("wide")}, "expected int"),
        ({"train__precision": Choice("fp8")}, "expected fp32"),
        ({"width": (1, 2)}, "expected Choice, Uniform"),
        (
            {"width": Uniform(16, 64)},
            r"real numbers, and width: expected int.*use Integer\(16, 64\)",
        ),
        (
            {"width": LogUniform(16, 64)},
            r"real numbers, and width: expected int.*use Integer\(16, 64\)",
        ),
        ({"lr_factor": Choice(0.1, 0.2)}, "the search has a parameter of this name"),
        ({"batch_index": Integer(0, 3)}, "the search has a parameter of this name"),
    ],
)
def test_an_invalid_range_raises(ranges: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_space(searching(**ranges), 1, 1.0)


def test_neighbours_are_one_step_away_in_one_direction() -> None:
    class Wide(Plain):
        search = {
            "train.batch_size": Choice(32, 64, 128),
            "width": Choice(16, 64, 32),
            "kind": Choice("a", "b"),
        }
        width: int = 32
        kind: str = "a"

    space = make_space(Wide(), 1, 1.0)
    own = space.reference_parameters()
    found = space.neighbours(own)
    changed = [
        {name: value for name, value in near.items() if value != own[name]} for near in found
    ]
    assert changed == [{BATCH_INDEX: 2}, {BATCH_INDEX: 0}, {"width": 64}, {"width": 16}]
    edge = {**own, BATCH_INDEX: 2, "width": 64}
    assert all(near[BATCH_INDEX] <= 2 and near["width"] <= 64 for near in space.neighbours(edge))
    assert len(space.neighbours(edge)) == 2


def test_learning_rates_go_beyond_what_was_tried_and_then_close_in() -> None:
    space = make_space(Plain(), 1, 1.0)
    own = space.reference_parameters()

    def further(factor: float, *tried: float) -> list[float]:
        near = {**own, FACTOR: factor}
        return [one[FACTOR] for one in space.further_lrs(near, sorted([factor, *tried]))]

    def closer(factor: float, *tried: float) -> list[float]:
        near = {**own, FACTOR: factor}
        return [one[FACTOR] for one in space.closer_lrs(near, sorted([factor, *tried]))]

    assert further(1.0) == [4.0, 0.25] and further(1.0, 4.0) == [0.25]
    assert further(16.0, 1.0) == [32.0] and further(32.0, 1.0) == [], "the range ends there"
    assert closer(1.0) == [] and closer(4.0, 1.0, 16.0) == [8.0, 2.0]
    assert closer(4.0, 2.0, 8.0) == [], "near enough"

    fixed = make_space(searching(lr=Choice(0.1)), 1, 1.0)
    assert FACTOR not in fixed.parameters()
    alone = fixed.reference_parameters()
    assert fixed.further_lrs(alone, []) == fixed.closer_lrs(alone, []) == []


def test_a_choice_of_learning_rates_stays_one() -> None:
    space = make_space(searching(lr=Choice(1.0, 0.01)), 1, 1.0)
    factors = Choice(pytest.approx(0.1), 1.0, pytest.approx(10.0))
    assert space.parameters()[FACTOR] == factors and "lr 0.1/1/10 x scaled" in str(space)
    low, own, high = space.factors.options  # type: ignore[union-attr]
    trial = space.reference_parameters()
    assert [one[FACTOR] for one in space.further_lrs(trial, [own])] == [high, low]
    assert space.further_lrs({**trial, FACTOR: high}, [own, high]) == []
    assert space.closer_lrs(trial, [low, own, high]) == []
    assert [space.nearest_factor(factor) for factor in (0.0, 0.2, 2.0, 99.0)] == [
        low,
        low,
        own,
        high,
    ]
    with pytest.raises(ConfigError, match="must be above 0"):
        make_space(searching(lr=Choice(0.0, 0.1)), 1, 1.0)


def test_a_number_at_the_edge_of_its_range_is_named() -> None:
    class Ranges(Plain):
        dropout: float = 0.1
        depth: int = 3
        search = {"dropout": Uniform(0.0, 0.5), "depth": Integer(2, 8)}

    space = make_space(Ranges(), 1, 1.0)
    inside = {**space.reference_parameters(), FACTOR: 20.0}
    assert space.at_edge(inside) == []
    assert space.at_edge({**inside, FACTOR: 1 / 30}) == ["lr"]
    assert space.at_edge({**inside, "dropout": 0.49, "depth": 8}) == ["dropout", "depth"]


def test_a_trial_from_before_its_range_was_added_has_no_edge_there() -> None:
    space = make_space(searching(width=Integer(16, 64)), 1, 1.0)
    assert space.at_edge({FACTOR: 1.0}) == []


def test_a_learning_rate_of_0_is_not_searched() -> None:
    zero = override(Plain(), {"lr": 0.0})
    assert FACTOR not in make_space(zero, 1, 1.0).parameters()
    with pytest.raises(ConfigError, match="a search multiplies it"):
        make_space(override(searching(lr=Uniform(0.1, 0.2)), {"lr": 0.0}), 1, 1.0)


def test_a_range_from_0_keeps_its_upper_end() -> None:
    assert make_space(searching(lr=Uniform(0.0, 0.2)), 1, 1.0).factors == LogUniform(1 / 32, 2.0)


def test_a_seed_is_not_searched_and_a_fold_gets_a_warning() -> None:
    with pytest.raises(ConfigError, match=r"luckiest seed.*rankzero repeat EXP --seeds 3"):
        make_space(searching(train__seed=Choice(0, 1)), 1, 0.5)

    class Folded(Plain):
        fold: int = 0
        data_seed: int = 0
        folds: int = 5
        search = {"fold": Choice(0, 1), "data_seed": Integer(0, 9), "folds": Choice(5, 10)}

    warnings = make_space(Folded(), 1, 0.5).warnings()
    assert ["--over fold=" in warnings[0], "--over data_seed=" in warnings[1]] == [True, True]
    assert len(warnings) == 2 and make_space(Plain(), 1, 0.5).warnings() == []


def test_a_reference_outside_of_its_choices_gets_one_message() -> None:
    class Outside(Plain):
        width: int = 2
        search = {"width": Choice(16, 32, 64), "train.batch_size": Choice(32), "lr": Choice(0.5)}

    message = (
        "search['width']: your own value 2 is not one of the choices 16, 32, 64: add it to "
        "Choice, or give width=16"
    )
    with pytest.raises(UserError) as caught:
        make_space(Outside(), 1, 0.5).check_reference()
    assert str(caught.value) == message
    # The batch size and the learning rate are added to the space by themselves.
    make_space(override(Outside(), {"width": 16}), 1, 0.5).check_reference()


@pytest.mark.parametrize(
    ("range_", "changes", "message"),
    [
        (
            Uniform(0.5, 2.0),
            {},
            "your own value none is no finite number, and Uniform draws numbers: use "
            "Choice(None, …), or give clip=0.5",
        ),
        (
            LogUniform(0.5, 2.0),
            {"clip": 0.0},
            "your own value 0.0 has no logarithm: use Uniform(0, 2.0), or give clip=0.5",
        ),
        (
            Integer(1, 4),
            {"clip": 1.5},
            "your own value 1.5 is no integer, and Integer draws integers: use Choice(1.5, …), or "
            "give clip=1",
        ),
        (
            Uniform(0.5, 0.5),
            {"clip": 1.0},
            "your own value 1.0 is not 0.5, which is all that Uniform(0.5, 0.5) has: use "
            "Choice(1.0, …), or give clip=0.5",
        ),
    ],
)
def test_a_reference_that_its_range_cannot_draw_gets_one_message(
    range_: Range, changes: dict[str, Any], message: str
) -> None:
    class Clipped(Plain):
        clip: float | None = None
        search = {"clip": range_}

    with pytest.raises(UserError) as caught:
        make_space(override(Clipped(), changes), 1, 0.5).check_reference()
    assert str(caught.value) == f"search['clip']: {message}"
    # Optuna stores a value that is above or below the range.
    if range_ != Uniform(0.5, 0.5):
        make_space(override(Clipped(), {"clip": 7}), 1, 0.5).check_reference()


def test_drawn_numbers_of_steps_are_scaled_as_the_references_are() -> None:
    class InSteps(Experiment):
        train: Train = Train(batch_size=64, steps=1000, warmup_steps=10, micro_batch=16)
        search = {
            "train.steps": Choice(1000, 2000),
            "train.warmup_steps": Integer(0, 100),
            "train.eval_every": Choice(None, 200),
            "train.micro_batch": Choice(None, 16, 24),
        }

    space = make_space(InSteps(), 1, 0.5)
    drawn = {"train.steps": 2000, "train.warmup_steps": 100, "train.eval_every": 200}
    own = space.experiment({**space.reference_parameters(), **drawn}).train
    assert (own.steps, own.warmup_steps, own.eval_every, own.micro_batch) == (2000, 100, 200, 16)
    twice = {**drawn, BATCH_INDEX: space.batch_sizes.index(128), "train.micro_batch": 24}
    found = space.experiment(twice).train
    assert (found.steps, found.warmup_steps, found.eval_every) == (1000, 50, 100)
    assert found.micro_batch == 16, "the largest up to 24 that divides the batch"
    found = space.experiment({**twice, "train.warmup_steps": 0, "train.micro_batch": None}).train
    assert (found.warmup_steps, found.micro_batch) == (0, None)


def test_a_range_of_real_numbers_is_fine_for_what_is_rounded() -> None:
    class Ranges(Plain):
        clip: float = 1.0
        search = {
            "train.warmup_steps": Uniform(1, 9),
            "train.batch_size": LogUniform(32, 128),
            "clip": Uniform(1, 2),
        }

    space = make_space(Ranges(), 1, 0.5)
    assert space.experiment({"train.warmup_steps": 2.6, "clip": 1.5}).train.warmup_steps == 3


def test_other_batches_keep_the_users_micro_batch_as_far_as_it_divides_them() -> None:
    space = make_space(override(Plain(), {"train.micro_batch": 12, BATCH: 24}), 1, 0.5, more=(2, 3))
    for index, size in enumerate(space.batch_sizes):
        for devices in space.devices:
            drawn = space.on(devices, {BATCH_INDEX: index})
            train = space.experiment(drawn).train
            assert train.micro_batch is not None and train.micro_batch <= 12
            assert train.batch_size == size and size % (devices * train.micro_batch) == 0
    assert space.experiment(space.reference_parameters()).train.micro_batch == 12
    largest = space.experiment({BATCH_INDEX: len(space.batch_sizes) - 1}).train
    assert (largest.batch_size, largest.micro_batch) == (768, 12)


@pytest.mark.parametrize("strategy", ["tp", "pp"])
def test_a_micro_batch_is_of_the_whole_batch_where_all_ranks_have_it(strategy: str) -> None:
    own = override(Plain(), {"train.micro_batch": 64, "train.strategy": strategy})
    space = make_space(own, 4, 0.5)
    for size, found in ((32, 32), (128, 64)):
        index = space.batch_sizes.index(size)
        assert space.experiment({BATCH_INDEX: index}).train.micro_batch == found


def test_a_drawn_micro_batch_divides_the_users_own_batch() -> None:
    space = make_space(searching(train__micro_batch=Integer(8, 64)), 1, 0.5)
    own = {BATCH_INDEX: space.batch_sizes.index(64), FACTOR: 1.0}
    found = [space.experiment({**own, "train.micro_batch": size}).train for size in (8, 37, 64)]
    assert [train.micro_batch for train in found] == [8, 32, 64]


def test_an_own_setting_called_devices_is_searched() -> None:
    class Racks(Plain):
        devices: int = 2
        search = {"devices": Choice(2, 3)}

    space = make_space(Racks(), 1, 0.5)
    assert space.devices_of({"devices": 3}) == 1
    assert flatten(space.experiment({"devices": 3}))["devices"] == 3
    both = make_space(Racks(), 1, 0.5, more=(2,)).parameters()
    assert both["devices"] == Choice(2, 3) and both[DEVICES] == Choice(1, 2)


def test_a_batch_of_more_than_half_of_the_samples_is_named() -> None:
    batches = searching(train__batch_size=Choice(32, 64, 512, 1024))
    space = make_space(batches, 1, 0.5, samples=1000)
    assert 512 not in space.batch_sizes
    assert space.warnings() == [
        "no trial has train.batch_size=512, 1024, which is more than half of the 1000 training "
        "samples"
    ]


def test_a_range_without_another_batch_is_named() -> None:
    (text,) = make_space(searching(train__batch_size=Integer(33, 63)), 1, 0.5).warnings()
    assert "no trial has another train.batch_size than yours" in text and "Choice" in text


def test_a_batch_that_cannot_be_divided_among_each_number_of_devices_is_named() -> None:
    batches = searching(train__batch_size=Choice(32, 64, 96, 128))
    three = make_space(override(batches, {BATCH: 96}), 1, 0.5, more=(3,))
    assert three.batch_sizes == (96,)
    (text,) = three.warnings()
    assert text.startswith("no trial has train.batch_size=32, 64, 128, which cannot be")
    few = make_space(override(batches, {BATCH: 96}), 1, 0.5, samples=200, more=(3,)).warnings()
    assert [text.partition(" which")[0] for text in few] == [
        "no trial has train.batch_size=32, 64,",
        "no trial has train.batch_size=128,",
    ]
    assert make_space(batches, 1, 0.5).warnings() == []

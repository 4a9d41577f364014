"""The best configurations of an earlier study in the space of a new one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero import Choice, Experiment, Goal, Integer, Train, Uniform
from rankzero.tuning.next_trial import challengers, from_earlier, leading, upcoming
from rankzero.tuning.space import BATCH_INDEX, FACTOR, PRECISION, make_space
from rankzero.tuning.trial import REPEAT, Trial, Trials


class Mine(Experiment):
    search = {"width": Choice(8, 16), "dropout": Uniform(0.0, 0.5)}
    train: Train = Train(batch_size=32, epochs=20)
    goal: Goal = Goal("val/accuracy", "max", target=0.9)
    lr: float = 0.01
    width: int = 8
    dropout: float = 0.1


SPACE = make_space(Mine(), 1, 0.5, ("fp32", "bf16"), samples=1000)


class Wide(Mine):
    search = {"width": Choice(8, 16, 32)}


WIDE = make_space(Wide(), 1, 0.5, samples=1000)


def trial(number: int, value: float, batch: int = 64, lr: float = 0.02, **more: Any) -> Trial:
    facts = {"batch_size": batch, "lr": lr, "precision": more.pop("precision", "fp32")}
    quality = more.pop("quality", 0.0)
    facts |= {REPEAT: 0} if more.pop("is_copy", False) else {}
    return Trial(number, "COMPLETE", more, value, {"quality": quality}, facts)


def test_the_best_come_in_order_without_copies_misses_and_the_reference() -> None:
    earlier = Trials(
        [
            trial(0, 9.0, 32, 0.01),
            trial(1, 3.0, 64, precision="bf16", width=16),
            trial(2, 3.0, 64, is_copy=True),
            trial(3, 1.0, 64, quality=0.1),
            trial(4, 2.0, 128),
            trial(5, 2.5, 128),
            trial(6, 4.0, 256, width=17, dropout=0.9),
        ]
    )
    found = from_earlier(SPACE, earlier)
    chosen = [SPACE.experiment(one) for one in found]
    assert [(one.train.batch_size, one.lr) for one in chosen] == [
        (128, pytest.approx(0.02)),
        (64, pytest.approx(0.02)),
        (256, pytest.approx(0.02)),
    ]
    assert [one[PRECISION] for one in found] == ["fp32", "bf16", "fp32"]
    # What is no longer in the ranges is the reference's.
    assert [(one["width"], one["dropout"]) for one in found] == [(8, 0.1), (16, 0.1), (8, 0.1)]
    assert from_earlier(SPACE, earlier, winner=6)[0] == found[2]
    # If nothing beat a reference that missed the quality, that is the winner.
    assert from_earlier(SPACE, earlier, winner=3) == found
    assert from_earlier(SPACE, Trials([trial(0, 9.0, 32, 0.01)])) == []


def completed(*found: tuple[int, float, float]) -> Trials:
    """Return trials of these indices of the batch size, factors and values."""
    own = SPACE.reference_parameters()
    return Trials(
        Trial(number, "COMPLETE", {**own, BATCH_INDEX: index, FACTOR: factor}, value, {}, {})
        for number, (index, factor, value) in enumerate(found)
    )


def test_challengers_that_are_alike_are_confirmed_last() -> None:
    """Otherwise all of them may miss the quality on the same new seed."""
    first, other = (3, 2.0, 5.0), (4, 2.0, 6.0)
    trials = completed(first, (3, 2.5, 5.1), (3, 1.1, 5.2), other, (3, 4.0, 7.0), (1, 2.0, 50.0))
    chosen = [[one.number for one in challengers(trials, SPACE, most)] for most in (3, 5)]
    # The last one is far too slow.
    assert chosen == [[0, 3, 4], [0, 3, 4, 1, 2]]


def planned(*misses: Trial) -> list[Any]:
    """Return the next six trials after a slow one that reached the quality and these misses."""
    reached = trial(0, 9.0, **{BATCH_INDEX: 1, FACTOR: 1.0}, width=8)
    tried = [*misses, *(trial(8, 99.0, quality=0.9, **{FACTOR: one}) for one in (0.1, 10.0))]
    known = Trials(dataclasses.replace(one, number=at) for at, one in enumerate([reached, *tried]))
    found = list[Any]()
    for _ in range(6):
        parameters = upcoming(known, [], WIDE)
        if parameters is None:
            break
        found.append((parameters[BATCH_INDEX], parameters["width"]))
        known.put(Trial(len(known), "PRUNED", parameters, None, {"quality": 1.0}, {}))
    return found


def test_a_fast_trial_that_missed_the_quality_gets_other_settings_first() -> None:
    ours = {BATCH_INDEX: 4, FACTOR: 1.0, "width": 16}
    assert planned()[:2] == [(2, 8), (0, 8)]
    assert planned(trial(1, 3.0, quality=0.1, **ours))[:3] == [(4, 32), (4, 8), (2, 8)]
    nearest = trial(1, 4.0, quality=0.05, **{**ours, BATCH_INDEX: 3})
    both = planned(trial(2, 3.0, quality=0.1, **ours), nearest)
    assert both[:4] == [(3, 32), (3, 8), (4, 32), (4, 8)]
    # One is hardly faster than the best, one is too far from the quality.
    for one in (trial(1, 6.5, quality=0.1, **ours), trial(1, 3.0, quality=0.3, **ours)):
        assert planned(one)[:2] == [(2, 8), (0, 8)]


def test_without_a_hit_the_search_follows_the_nearest_miss_and_not_the_fastest() -> None:
    own = {**SPACE.reference_parameters(), FACTOR: 1.0}
    near = trial(1, 4.66, quality=0.9887, **{**own, FACTOR: 8.0})
    misses = [trial(0, 1.54, quality=0.9944, **own), near]
    trials = Trials([*misses, trial(2, 1.53, quality=0.9946, **{**own, FACTOR: 0.125})])
    assert leading(trials) == near
    following = upcoming(trials, [], SPACE)
    assert following is not None and following[FACTOR] > 8.0
    trials.put(trial(3, 9.0, quality=0.0, **own))
    assert leading(trials) == trials[3], "any hit is nearer"


def test_a_challenger_may_be_like_the_reference() -> None:
    index = SPACE.reference_parameters()[BATCH_INDEX]
    trials = completed((index, 1.0, 10.0), (index, 1.2, 7.5), (index, 1.25, 7.6))
    assert [one.number for one in challengers(trials, SPACE, 3)] == [1, 2]


class Chosen(Mine):
    search = {"train.clip": Choice(None, 1.0), "betas": Choice((0.9, 0.999), (0.8, 0.9))}
    betas: tuple[float, float] = (0.9, 0.999)


def test_a_choice_keeps_its_own_form_and_needs_a_value_of_the_earlier_study() -> None:
    space = make_space(Chosen(), 1, 0.5, samples=1000)
    varied = {"train.clip": 1.0, "betas": [0.8, 0.9]}  # as JSON has it
    (found,) = from_earlier(space, Trials([trial(0, 1.0, **varied)]))
    assert found["betas"] == (0.8, 0.9) and found["train.clip"] == 1.0
    (found,) = from_earlier(space, Trials([trial(0, 1.0)]))
    assert found["betas"] == (0.9, 0.999) and found["train.clip"] is None


class Stepped(Mine):
    search = {"train.steps": Integer(100, 4000)}
    train: Train = Train(batch_size=64, steps=1000)


def test_searched_steps_belong_to_the_earlier_batch_size() -> None:
    space, earlier = make_space(Stepped(), 1, 0.5), Trials([trial(0, 1.0, **{"train.steps": 800})])
    assert from_earlier(space, earlier, None, 32)[0]["train.steps"] == 400
    assert from_earlier(space, earlier)[0]["train.steps"] == 800, "an older study has no settings"
    # As many samples as before, on the same batch size.
    (found,) = from_earlier(space, earlier, None, 32)
    assert space.experiment(found).train.batch_size * space.experiment(found).train.steps == 25600


@given(st.integers(1, 10**6), st.floats(1e-9, 1e3))
def test_every_earlier_trial_has_a_place_in_the_space(batch: int, lr: float) -> None:
    found = from_earlier(SPACE, Trials([trial(0, 1.0, batch, lr)]))
    for parameters in found:
        assert 0 <= parameters[BATCH_INDEX] < len(SPACE.batch_sizes)
        assert SPACE.factors.low <= parameters[FACTOR] <= SPACE.factors.high
        assert set(parameters) == set(SPACE.parameters())

"""Helpers for `Experiment.batches`."""

from __future__ import annotations

import math

import pytest
import torch

from rankzero.batches import by_length, weighted
from rankzero.errors import UserError

LENGTHS = [1 + (7 * number) % 90 for number in range(500)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_weighted_batches_balance_rare_samples() -> None:
    weights = [0.0] + [1 / 900] * 900 + [1 / 99] * 99 + [0.0]
    drawn = weighted(weights, seeded(0), batch_size=10, samples=5000)
    assert [len(one) for one in drawn] == [10] * 500
    flat = [index for one in drawn for index in one]
    assert min(flat) >= 1 and max(flat) <= 999
    assert sum(index > 900 for index in flat) == pytest.approx(2500, abs=150)
    assert drawn != weighted(weights, seeded(1), batch_size=10, samples=5000)
    assert drawn == weighted(weights, seeded(0), batch_size=10, samples=5000)
    assert len(weighted(weights, seeded(0), batch_size=10)) == 100


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]])
def test_weights_that_cannot_be_drawn_from_are_refused(weights: list[float]) -> None:
    with pytest.raises(UserError, match="finite and at least 0, and one of them above 0"):
        weighted(weights, seeded(0), batch_size=1)


@pytest.mark.parametrize(
    "options", [{"batch_size": 16}, {"tokens": 400}, {"tokens": 400, "multiple_of": 4}]
)
def test_batches_by_length_pad_little(options: dict[str, int]) -> None:
    epochs = [by_length(LENGTHS, seeded(seed), **options) for seed in range(3)]
    assert len({len(epoch) for epoch in epochs}) == 1 and epochs[0] != epochs[1]
    for epoch in epochs:
        flat = [index for batch in epoch for index in batch]
        assert len(set(flat)) == len(flat) >= 480
        padded = sum(len(batch) * max(LENGTHS[i] for i in batch) for batch in epoch)
        assert padded < 1.15 * sum(LENGTHS[i] for i in flat)
        longest = [max(LENGTHS[i] for i in batch) for batch in epoch]
        assert longest != sorted(longest), "the order of batches is not random"
        for batch in epoch:
            if "tokens" in options:
                assert len(batch) * max(LENGTHS[i] for i in batch) <= 400
                assert len(batch) % options.get("multiple_of", 1) == 0
            else:
                assert len(batch) == 16


def test_the_shortest_samples_are_left_out_if_batches_need_a_multiple() -> None:
    lengths = [9, 1, 5, 7, 8, 2, 6]
    for seed in range(3):
        (batch,) = by_length(lengths, seeded(seed), tokens=40, multiple_of=4)
        assert sorted(lengths[index] for index in batch) == [6, 7, 8, 9]


def test_batches_by_length_are_refused_where_they_cannot_be_made() -> None:
    with pytest.raises(UserError, match="one of batch_size and tokens"):
        by_length(LENGTHS, seeded(0))
    with pytest.raises(UserError, match="2 samples of length 9 have more than 10 tokens"):
        by_length([1, 1, 9, 9], seeded(0), tokens=10, multiple_of=2)
    with pytest.raises(UserError, match="fewer than one batch"):
        by_length([1, 2], seeded(0), batch_size=3)
    with pytest.raises(UserError, match="3 samples are fewer than one batch"):
        by_length([1, 1, 1], seeded(0), tokens=10, multiple_of=4)

"""Which samples a rank trains on, in which order."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankzero.errors import UserError
from rankzero.experiment import Train
from rankzero.training.data.order import (
    BatchOrder,
    Choose,
    check_same_lengths,
    make_batch_order,
    make_stream_order,
    mix,
    permutation,
    shard,
)

plans = st.builds(
    lambda micro, accumulation, world, more, seed: BatchOrder(
        samples=micro * accumulation * world * more + more // 2,
        batch_size=micro * accumulation * world,
        micro_batch=micro,
        world_size=world,
        seed=seed,
    ),
    *[st.integers(1, 5)] * 4,
    st.integers(0, 2**40),
)


def batch(plan: BatchOrder, step: int) -> torch.Tensor:
    """Return the indices of a step's whole batch, straight from the definition."""
    epoch, position = divmod(step, plan.steps_per_epoch)
    start = position * plan.batch_size
    return permutation(plan.seed, epoch, plan.samples)[start : start + plan.batch_size]


def micro_batches(plan: BatchOrder, step: int, rank: int) -> list[list[int]]:
    """Return `rank`'s indices of one step, straight from the definition."""
    return batch(plan, step).view(-1, plan.world_size, plan.micro_batch)[:, rank].tolist()


@given(plans, st.integers(0, 50))
def test_the_ranks_micro_batches_are_the_global_batch(plan: BatchOrder, step: int) -> None:
    ranks = [list(plan.iter_micro_batches(r, step, step + 1)) for r in range(plan.world_size)]
    assert all(len(found) == plan.accumulation for found in ranks)
    indices = [index for found in ranks for _, micro in found for index in micro.tolist()]
    assert sorted(indices) == sorted(batch(plan, step).tolist())


@given(plans, st.integers(0, 20), st.integers(0, 20))
def test_micro_batches_are_the_same_step_by_step_and_by_epoch(
    plan: BatchOrder, first: int, more: int
) -> None:
    for rank in range(plan.world_size):
        expected = [
            (step // plan.steps_per_epoch, indices)
            for step in range(first, first + more)
            for indices in micro_batches(plan, step, rank)
        ]
        found = plan.iter_micro_batches(rank, first, first + more)
        assert [(epoch, indices.tolist()) for epoch, indices in found] == expected


@given(plans)
def test_an_epoch_sees_no_sample_twice(plan: BatchOrder) -> None:
    steps = range(plan.steps_per_epoch)
    seen = torch.cat([batch(plan, step) for step in steps]).tolist()
    assert len(set(seen)) == len(seen) == plan.steps_per_epoch * plan.batch_size
    epochs = {epoch for epoch, _ in plan.iter_micro_batches(0, 0, plan.steps_per_epoch)}
    assert epochs == {0}


@given(plans, st.integers(0, 50))
def test_the_global_batch_does_not_depend_on_the_ranks(plan: BatchOrder, step: int) -> None:
    alone = BatchOrder(plan.samples, plan.batch_size, plan.batch_size, 1, plan.seed)
    ((_, indices),) = alone.iter_micro_batches(0, step, step + 1)
    assert indices.tolist() == batch(plan, step).tolist()


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5))
def test_shards_cover_every_sample_once(samples: int, batch_size: int, world_size: int) -> None:
    shards = [
        batch
        for rank in range(world_size)
        for batch in shard(samples, batch_size, rank, world_size)
    ]
    assert sorted(index for batch in shards for index in batch.tolist()) == list(range(samples))


rests = st.builds(
    lambda plan, rest: dataclasses.replace(
        plan,
        samples=plan.samples // plan.batch_size * plan.batch_size + min(rest, plan.batch_size - 1),
        rest=min(rest, plan.batch_size - 1),
    ),
    plans,
    st.integers(0, 60),
)


@given(rests, st.integers(0, 3), st.integers(0, 20))
def test_a_smaller_last_batch_is_divided_among_the_ranks(
    plan: BatchOrder, epoch: int, more: int
) -> None:
    last = (epoch + 1) * plan.steps_per_epoch - 1
    found: list[int] = []
    weights: list[float] = []
    for rank in range(plan.world_size):
        mine = list(plan.iter_micro_batches(rank, last, last + 1))
        mine_weights = plan.weights(last, rank)
        assert len(mine) == len(mine_weights) == len(plan.weights(last, 0))
        for (number, indices), weight in zip(mine, mine_weights, strict=True):
            assert number == epoch and 1 <= len(indices) <= plan.micro_batch
            found += indices.tolist() if weight else []
        weights += mine_weights
    size = plan.rest or plan.batch_size
    # The weights are those of a mean over the samples.
    assert sum(weights) == pytest.approx(len(weights))
    expected = (
        permutation(plan.seed, epoch, plan.samples)[-size:] if plan.rest else batch(plan, last)
    )
    assert sorted(found) == sorted(expected.tolist())
    counted = [
        sum(1 for _ in plan.iter_micro_batches(0, 0, step))
        for step in range(plan.steps_per_epoch + more)
    ]
    assert counted == [plan.micro_batches_before(step) for step in range(len(counted))]


@given(rests, st.integers(0, 30), st.integers(0, 30))
def test_samples_are_counted(plan: BatchOrder, first: int, steps: int) -> None:
    last = plan.steps_per_epoch - 1
    sizes = [
        plan.rest if plan.rest and step % plan.steps_per_epoch == last else plan.batch_size
        for step in range(first, first + steps)
    ]
    assert plan.samples_of(first + steps, steps) == sum(sizes)
    if plan.rest:
        assert plan.mean_batch_size * plan.steps_per_epoch == pytest.approx(plan.samples)


def test_the_rest_of_an_epoch_is_trained_if_wanted() -> None:
    keeps = Train(batch_size=64, drop_last=False)
    order = make_batch_order(keeps, 100, 2)
    assert (order.rest, order.steps_per_epoch) == (36, 2)
    assert make_batch_order(keeps, 50, 2).steps_per_epoch == 1, "a set smaller than one batch"
    with pytest.raises(UserError, match=r"batches\(\) chooses .*train.drop_last=false"):
        make_batch_order(keeps, 100, 2, lambda *_: [[0, 1]])
    with pytest.raises(UserError, match=r"is a stream, .*train.drop_last=false"):
        make_stream_order(keeps, 100, 2)


def test_epochs_differ_and_repeat() -> None:
    first, second = permutation(0, 0, 100), permutation(0, 1, 100)
    assert not torch.equal(first, second)
    permutation.cache_clear()
    assert torch.equal(permutation(0, 0, 100), first)


@given(
    st.lists(st.integers(0, 2**63), min_size=1, max_size=3),
    st.lists(st.integers(0, 2**63), min_size=1, max_size=3),
)
def test_mixed_seeds_differ(one: list[int], other: list[int]) -> None:
    assert 0 <= mix(*one) < 2**63
    assert (mix(*one) == mix(*other)) == (one == other)


def test_a_batch_that_cannot_be_divided_names_the_nearest_sizes() -> None:
    with pytest.raises(UserError, match=r"use train\.batch_size=99 or 102"):
        make_batch_order(Train(batch_size=100), 1000, world_size=3)
    says = r"micro_batch=8: use train\.batch_size=16 or 32, or train\.micro_batch=5$"
    with pytest.raises(UserError, match=says):
        make_batch_order(Train(batch_size=20, micro_batch=8), 1000, world_size=2)
    with pytest.raises(UserError, match=r"use train\.batch_size=30 or 33, or .* such as 2$"):
        make_batch_order(Train(batch_size=32), 1000, world_size=3)
    with pytest.raises(UserError, match=r"or .* such as 2 with train\.micro_batch=5$"):
        make_batch_order(Train(batch_size=20, micro_batch=8), 100, 3)
    with pytest.raises(UserError, match=r"at most 50, or train\.drop_last=false"):
        make_batch_order(Train(batch_size=64), 50, world_size=1)


def test_accumulation_follows_from_batch_and_micro_batch() -> None:
    assert make_batch_order(Train(batch_size=32, micro_batch=8), 100, 1).accumulation == 4
    assert make_batch_order(Train(batch_size=32, micro_batch=8), 100, 2).accumulation == 2
    assert make_batch_order(Train(batch_size=32), 100, 2).micro_batch == 16


def test_data_of_different_lengths_are_refused_by_rank() -> None:
    check_same_lengths("training", [5, 5, 5])
    with pytest.raises(
        UserError, match=r"5 samples on ranks 0, 2; 4 samples on rank 1\. Every rank must return"
    ):
        check_same_lengths("training", [5, 4, 5])
    with pytest.raises(UserError, match=r"9 samples on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 91 more"):
        check_same_lengths("validation", [1] + [9] * 99)


def lists_of(sizes: list[int], samples: int = 40) -> Choose:
    """Return a function that chooses batches of these sizes, other ones in each epoch."""

    def choose(epoch: int, generator: torch.Generator) -> list[list[int]]:
        order = torch.randperm(samples, generator=generator)[: sum(sizes)]
        return [part.tolist() for part in order.split(sizes)]

    return choose


def test_chosen_batches_are_divided_among_ranks_and_micro_batches() -> None:
    """The sizes differ. A resume in the second epoch computes where to continue."""
    choose = lists_of([4, 12, 8])
    train = Train(batch_size=8, micro_batch=2, seed=3)
    order = make_batch_order(train, 40, 2, choose)
    assert order.steps_per_epoch == order.list_count == 3 and order.mean_batch_size == 8
    every = [list(order.iter_micro_batches(rank, 0, 7)) for rank in (0, 1)]
    for step in range(7):
        epoch, position = divmod(step, 3)
        generator = torch.Generator().manual_seed(mix(3, epoch))
        mine = [one for rank in (0, 1) for one in every[rank][2 * step : 2 * step + 2]]
        assert {draw for draw, _ in mine} == {step}
        assert len({len(indices) for _, indices in mine}) == 1
        found = sorted(index for _, indices in mine for index in indices.tolist())
        assert found == sorted(choose(epoch, generator)[position])
    later = list(order.iter_micro_batches(1, 4, 7))
    assert [one.tolist() for _, one in later] == [one.tolist() for _, one in every[1][8:]]
    assert [order.samples_of(last, 2) for last in (2, 3, 4)] == [16, 20, 12]
    assert BatchOrder(40, 8, 2, 2, 3).samples_of(9, 4) == 32


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_chosen_batches_may_be_one_matrix(kind: Any) -> None:
    rows = [[3, 1], [0, 2]]
    order = make_batch_order(Train(batch_size=2), 4, 1, lambda *_: kind(rows))
    assert [indices.tolist() for _, indices in order.iter_micro_batches(0, 0, 2)] == rows


def test_an_experiment_that_chooses_nothing_has_the_usual_order() -> None:
    assert make_batch_order(Train(), 1000, 2, lambda *_: None) == make_batch_order(Train(), 1000, 2)


def test_a_training_without_an_end_asks_for_the_first_1000_epochs_only() -> None:
    asked = []
    make_batch_order(Train(steps=10**9), 1000, 2, lambda epoch, _: asked.append(epoch))
    assert asked == list(range(1000))


@pytest.mark.parametrize("length", [{"epochs": 4}, {"steps": 16, "epochs": 1}])
def test_batches_that_are_chosen_from_a_later_epoch_on_are_refused(length: Any) -> None:
    """Nobody would call `batches` again."""
    train = Train(batch_size=8, **length)

    def choose(epoch: int, generator: torch.Generator) -> Any:
        return [[0] * 8] * 5 if epoch == 3 else None

    with pytest.raises(UserError, match=r"None for epoch 0, and lists for epoch 3: return lists"):
        make_batch_order(train, 40, 2, choose)


@pytest.mark.parametrize(
    ("sizes", "later", "message"),
    [
        ([4, 6], [4, 6], r"a list of 6 samples \(epoch 0, number 1\).* a multiple of 4$"),
        ([4, 8], [4], r"returned 1 lists for epoch 1, not 2, as for epoch 0"),
        ([4, 8], [4, 6], r"a list of 6 samples \(epoch 1, number 1\)"),
        ([], [], r"returned 0 lists for epoch 0, not at least one"),
        ([4, 0], [4, 0], r"a list of 0 samples"),
    ],
)
def test_chosen_batches_that_do_not_fit_are_refused(
    sizes: list[int], later: list[int], message: str
) -> None:
    train = Train(batch_size=8, micro_batch=2)
    with pytest.raises(UserError, match=message):
        order = make_batch_order(
            train, 40, 2, lambda epoch, g: lists_of(later if epoch else sizes)(epoch, g)
        )
        list(order.iter_micro_batches(0, 0, 4))


def test_an_index_outside_of_the_training_set_is_refused() -> None:
    with pytest.raises(UserError, match=r"the index 41 \(epoch 0\).* from 0 to 39"):
        make_batch_order(Train(batch_size=2), 40, 1, lambda *_: [[0, 41]])
    with pytest.raises(UserError, match="the index -1"):
        make_batch_order(Train(batch_size=2), 40, 1, lambda *_: [[0, -1]])


def test_a_pipeline_takes_no_chosen_batches() -> None:
    with pytest.raises(UserError, match=r"pp takes batches of one size.*train\.strategy=ddp"):
        make_batch_order(Train(batch_size=4, strategy="pp"), 40, 2, lists_of([4]))


def test_fingerprints_of_other_batches_differ() -> None:
    def found(*lists: list[int]) -> list[int]:
        chosen = [torch.tensor(one) for one in lists]
        return BatchOrder(4, 2, 2, 1, 3, lambda _: chosen, epoch_steps=1).lists_before(0)

    for other in ([[1], [2, 3]], [[2, 1], [3]], [[1, 2]]):
        assert found([1, 2], [3]) != found(*other)


def test_lists_are_read_once_an_epoch_for_all_its_checkpoints() -> None:
    asked: list[int] = []

    def lists(epoch: int) -> list[torch.Tensor]:
        asked.append(epoch)
        return [torch.tensor([epoch, 1]), torch.tensor([2, 3])]

    order = BatchOrder(4, 2, 2, 1, 3, lists, epoch_steps=2)
    found = [order.lists_before(step) for step in (0, 1, 2, 3, 4)]
    assert asked == [0, 1] and found[0] == found[2] != found[3]

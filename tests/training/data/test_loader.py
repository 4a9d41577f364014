"""From data set to device: seeded augmentation, gathered and loaded batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from rankzero.experiment import Experiment, Train
from rankzero.launch.failures import DescribedError
from rankzero.training.data.batch import samples_in
from rankzero.training.data.loader import BatchLoader, copied_ahead
from rankzero.training.data.order import BatchOrder, make_batch_order

CPU = torch.device("cpu")


class Noise(Dataset[Tensor]):
    """Each item is its index and three kinds of randomness."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(
            [index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64
        )


def feed(dataset: Any, workers: int = 0) -> BatchLoader:
    return BatchLoader(dataset, CPU, seed=3, workers=workers, collate=default_collate)


def drawn(
    workers: int, world_size: int, micro_batch: int, first_step: int = 0
) -> dict[tuple[int, int], list[float]]:
    """Return each item's values by (step, index), over all ranks."""
    plan = BatchOrder(
        samples=20, batch_size=8, micro_batch=micro_batch, world_size=world_size, seed=3
    )
    found = {}
    for rank in range(world_size):
        batches = feed(Noise(), workers).train_batches(plan, rank, first_step, 5)
        for step in range(first_step, 5):
            for _ in range(plan.accumulation):
                for row in next(batches).tolist():
                    found[step, int(row[0])] = row[1:]
    return found


def test_a_samples_augmentation_is_the_same_on_any_rank_or_worker() -> None:
    alone = drawn(workers=0, world_size=1, micro_batch=8)
    assert len(alone) == 40 and len({tuple(values) for values in alone.values()}) == 40
    assert drawn(workers=0, world_size=2, micro_batch=2) == alone
    assert drawn(workers=2, world_size=1, micro_batch=4) == alone
    later = drawn(workers=0, world_size=1, micro_batch=8, first_step=3)
    assert later == {key: value for key, value in alone.items() if key[0] >= 3}


def repeated(workers: int, world_size: int, micro_batch: int) -> list[list[float]]:
    """Return what a step of [3, 3, 5, 3, 5, 7, 3, 9] loads."""
    train, batch = Train(batch_size=8, micro_batch=micro_batch, seed=3), [3, 3, 5, 3, 5, 7, 3, 9]
    plan = make_batch_order(train, 20, world_size, lambda *_: [batch[::-1], batch])
    loaded = [
        list(feed(Noise(), workers).train_batches(plan, rank, 1, 2)) for rank in range(world_size)
    ]
    parts = [one for micro_batches in zip(*loaded, strict=True) for one in micro_batches]
    rows: list[list[float]] = torch.cat(parts).tolist()
    assert [row[0] for row in rows] == batch
    return rows


def test_each_copy_of_a_sample_in_a_step_has_an_augmentation_of_its_own() -> None:
    alone = repeated(workers=0, world_size=1, micro_batch=8)
    assert len({row[1] for row in alone}) == len({row[3] for row in alone}) == 8
    assert repeated(workers=0, world_size=2, micro_batch=2) == alone
    assert repeated(workers=2, world_size=1, micro_batch=4) == alone
    # First copies draw as in a step without a second one.
    plan = make_batch_order(
        Train(batch_size=4, seed=3), 20, 1, lambda *_: [[0, 1, 2, 4], [3, 5, 7, 9]]
    )
    (once,) = feed(Noise()).train_batches(plan, 0, 1, 2)
    assert once.tolist() == [alone[place] for place in (0, 2, 5, 7)]


class Resampled(Noise):
    """A data set that draws in each epoch what it adds."""

    draws: Any = None
    epoch, shift = -1, 0.0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.shift = epoch, self.draws()

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.epoch, self.shift])


@pytest.mark.parametrize("choose", [None, lambda *_: [[0, 1, 2, 3], [4, 5, 6, 7]]])
@pytest.mark.parametrize("draw", [lambda: torch.rand(()).item(), np.random.rand])
def test_a_training_set_knows_its_epoch_in_each_process(choose: Any, draw: Any) -> None:
    dataset = Resampled()
    dataset.draws = draw
    plan = make_batch_order(Train(batch_size=4, seed=3), 8, 1, choose)
    found = {
        (workers, first): torch.cat(list(feed(dataset, workers).train_batches(plan, 0, first, 6)))
        for workers in (0, 2)
        for first in (0, 3)
    }
    whole = found[0, 0]
    assert whole[:, 0].tolist() == [0.0] * 8 + [1.0] * 8 + [2.0] * 8
    assert len(set(whole[:, 1].tolist())) == 3
    assert torch.equal(found[2, 0], whole)
    assert torch.equal(found[0, 3], whole[12:]) and torch.equal(found[2, 3], whole[12:])
    part = feed(Subset(Subset(dataset, range(8)), range(8))).train_batches(plan, 0, 0, 6)
    assert torch.equal(torch.cat(list(part))[:, 0], whole[:, 0]), "a part of it"


def test_loading_draws_no_numbers_from_the_models_generator() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    next(feed(Noise()).train_batches(BatchOrder(20, 8, 8, 1, 3), 0, 0, 1))
    assert torch.equal(torch.rand(3), expected)


def test_a_tensor_data_set_is_gathered_batch_by_batch() -> None:
    dataset = TensorDataset(torch.arange(20.0), torch.arange(20))
    plan = BatchOrder(20, 8, 4, 2, 0)
    for rank in (0, 1):
        x, y = next(feed(dataset).train_batches(plan, rank, 0, 1))
        ((_, indices),) = plan.iter_micro_batches(rank, 0, 1)
        assert x.tolist() == y.tolist() == indices.tolist()


def test_a_large_tensor_data_set_stays_on_the_device_where_it_is() -> None:
    meta = torch.device("meta")  # from which no tensor can be copied
    large = TensorDataset(torch.empty(2, 1 << 28, device=meta))
    loader = BatchLoader(large, meta, seed=0, workers=0, collate=default_collate)
    assert loader._tensors is not None and loader._tensors[0] is large.tensors[0]
    mixed = TensorDataset(torch.empty(2, device=meta), torch.empty(1).expand(2, 1 << 28))
    with pytest.raises(NotImplementedError):  # it is gathered on the host
        BatchLoader(mixed, meta, seed=0, workers=0, collate=default_collate)


def test_an_overridden_collate_is_used_for_tensors_too() -> None:
    class Shifted(Experiment):
        def collate(self, samples: list[Any]) -> Any:
            return torch.stack([value + 100 for (value,) in samples])

    def first(experiment: Experiment) -> Any:
        mine = BatchLoader(
            TensorDataset(torch.arange(20)), CPU, seed=3, workers=0, collate=experiment.collate
        )
        return next(mine.train_batches(BatchOrder(20, 8, 8, 1, 3), 0, 0, 1))

    plain = first(Experiment())
    assert isinstance(plain, list) and torch.equal(first(Shifted()), plain[0] + 100)


@pytest.mark.parametrize("dataset", [TensorDataset(torch.arange(11)), Noise()])
def test_each_evaluation_sees_every_sample_once(dataset: Any) -> None:
    mine = feed(dataset)
    for _ in range(2):
        seen = (
            [batch for rank in (0, 1, 2) for batch in mine.eval_batches(2, rank, 3)]
            if dataset.__class__ is not Noise
            else list(mine.eval_batches(3, 0, 1))
        )
        assert sum(samples for _, samples in seen) == len(dataset)
        assert [samples_in(batch) for batch, _ in seen] == [samples for _, samples in seen]


def test_batched_access_of_a_data_set_is_used() -> None:
    class Batched(Noise):
        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            return [torch.tensor([index, 0.0, 0.0, 0.0]) for index in indices]

    batch = next(feed(Batched()).train_batches(BatchOrder(20, 8, 8, 1, 3), 0, 0, 1))
    assert batch[:, 1:].abs().sum() == 0 and len(batch) == 8


def test_batched_access_augments_each_sample_with_its_own_seed() -> None:
    part = Subset(Subset(Noise(), range(20)), range(20))  # as random_split makes them

    class Batched(Noise):
        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            return [self[index] for index in indices]

    def rows(dataset: Any, batch_size: int) -> dict[int, list[float]]:
        batches = feed(dataset).train_batches(
            BatchOrder(20, batch_size, batch_size, 1, 3), 0, 0, 20 // batch_size
        )
        return {int(row[0]): row[1:] for batch in batches for row in batch.tolist()}

    assert rows(part, 10) == rows(Noise(), 10) == rows(part, 5)
    assert rows(Batched(), 10) == rows(Noise(), 10) == rows(Batched(), 5)


def test_an_error_says_that_batched_access_which_draws_gets_one_index() -> None:
    class Padded(Noise):
        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            longest = max(indices)
            return [torch.rand(longest + 1) for _ in indices]

    batches = feed(Padded()).train_batches(BatchOrder(20, 8, 8, 1, 3), 0, 0, 1)
    with pytest.raises(DescribedError) as raised:
        next(batches)
    assert "of the training set; its __getitems__ draws, so" in raised.value.failure.reason


def drawn_by_collate(
    workers: int, rank: int = 0, world_size: int = 1, first_step: int = 0
) -> list[list[float]]:
    """Return what collate draws for each micro-batch, as MixUp does."""

    def collate(samples: list[Tensor]) -> Tensor:
        return torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])

    loader = BatchLoader(Noise(), CPU, seed=3, workers=workers, collate=collate)
    batches = loader.train_batches(BatchOrder(20, 8, 2, world_size, 3), rank, first_step, 6)
    return [batch.tolist() for batch in batches]


def test_what_collate_draws_depends_on_the_seed_and_the_micro_batch() -> None:
    alone = drawn_by_collate(workers=0)
    assert len(alone) == 24 and len({tuple(values) for values in alone}) == 24
    assert drawn_by_collate(workers=1) == alone == drawn_by_collate(workers=2)
    assert drawn_by_collate(workers=1, first_step=2) == alone[8:]
    halves = [drawn_by_collate(workers=0, rank=rank, world_size=2) for rank in (0, 1)]
    assert halves[0] == alone[:12] and not set(map(tuple, halves[1])) & set(map(tuple, alone))


def test_collate_may_ask_whether_it_trains() -> None:
    class Asking(Experiment):
        def collate(self, samples: list[Any], training: bool) -> Any:
            return len(samples), training

    loader = BatchLoader(list(range(20)), CPU, seed=3, workers=0, collate=Asking().collate)
    assert next(loader.train_batches(BatchOrder(20, 8, 8, 1, 3), 0, 0, 1)) == (8, True)
    assert next(loader.eval_batches(8, 0, 1)) == ((8, False), 8)


def test_samples_are_counted_by_indices_and_not_by_rows() -> None:
    """The first tensor of a batch may have nodes or tokens in its rows."""

    def collate(items: list[Tensor]) -> dict[str, Tensor]:
        return {"tokens": torch.cat(items), "lengths": torch.tensor([len(item) for item in items])}

    mine = BatchLoader(Noise(), CPU, seed=3, workers=0, collate=collate)
    assert [(len(batch["tokens"]), samples) for batch, samples in mine.eval_batches(8, 0, 1)] == [
        (32, 8),
        (32, 8),
        (16, 4),
    ]


@given(st.lists(st.integers(1, 5), max_size=12), st.integers(1, 5))
def test_indices_copied_ahead_are_those_of_each_batch(sizes: list[int], ahead: int) -> None:
    batches = [torch.arange(size) + 10 * number for number, size in enumerate(sizes)]
    drawn = list[int]()

    def draw() -> Iterator[Tensor]:
        for number, batch in enumerate(batches):
            drawn.append(number)
            yield batch

    for number, found in enumerate(copied_ahead(draw(), CPU, ahead)):
        assert torch.equal(found, batches[number])
        # Batches that the experiment chooses are drawn one at a time, with `ahead` 1.
        assert len(drawn) - number <= ahead
    assert len(drawn) == len(batches)

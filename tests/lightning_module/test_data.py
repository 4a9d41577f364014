"""The data sets of Lightning's hooks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from rankzero.errors import UserError
from rankzero.lightning_module import data
from rankzero.training.data.samples import batch_maker

SAMPLES: Any = [1, 2, 3, 4]


class Hooks:
    """Has a data module's hooks, of which `val_dataloader` is Lightning's own."""

    def prepare_data(self) -> None: ...

    def setup(self, stage: str) -> None: ...

    def train_dataloader(self) -> Any:
        return DataLoader([1, 2])  # type: ignore[arg-type]

    def val_dataloader(self) -> Any: ...


Hooks.val_dataloader.__module__ = "lightning.pytorch.core.hooks"


def test_a_validation_loader_that_is_set_on_the_object_counts() -> None:
    source: Any = Hooks()
    assert data.from_hooks(source).val is None
    source.val_dataloader = lambda: DataLoader([3])  # type: ignore[arg-type]
    assert data.from_hooks(source).val == [3]


def mixed(samples: list[int]) -> list[int]:
    return [sum(samples)] * len(samples)


def test_each_loader_keeps_its_own_collate_fn() -> None:
    source: Any = Hooks()
    source.train_dataloader = lambda: DataLoader(SAMPLES, collate_fn=mixed)
    source.val_dataloader = lambda: DataLoader(SAMPLES, collate_fn=list)
    found = pickle.loads(pickle.dumps(data.from_hooks(source).collate))
    made = {
        training: batch_maker(found, 0, 0, training=training).make(0, [1, 2], lambda _: None)
        for training in (True, False)
    }
    assert made == {True: [3, 3], False: [1, 2]}
    source.val_dataloader = source.train_dataloader
    assert data.from_hooks(source).collate is mixed


class Longest(BatchSampler):
    """Stands for a batch sampler that buckets by length."""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_sampler": Longest(SequentialSampler(SAMPLES), 2, False)}, "has a Longest"),
        ({"batch_sampler": BatchSampler([3, 0], 2, False)}, "has a list"),
        ({"sampler": [3, 0]}, "has a list"),
        (
            {"sampler": RandomSampler(SAMPLES, replacement=True)},
            "has a RandomSampler that draws 4 of 4",
        ),
        ({"sampler": RandomSampler(SAMPLES, num_samples=2)}, r"has a \w+ that draws 2 of 4"),
        ({"sampler": SequentialSampler([0, 1])}, r"has a \w+ that draws 2 of 4"),
        ({"batch_size": None}, "has batch_size=None"),
    ],
)
def test_a_loader_whose_order_would_be_lost_is_refused(options: Any, says: str) -> None:
    source: Any = Hooks()
    source.train_dataloader = lambda: DataLoader(SAMPLES, **options)
    with pytest.raises(UserError, match=f"Hooks.train_dataloader {says}"):
        data.from_hooks(source)


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": RandomSampler(SAMPLES, num_samples=4)},
        {"batch_sampler": BatchSampler(RandomSampler(SAMPLES), 2, True)},
    ],
)
def test_a_loader_that_shuffles_gives_its_data_set(options: Any) -> None:
    source: Any = Hooks()
    source.train_dataloader = lambda: DataLoader(SAMPLES, **options)
    assert data.from_hooks(source).train == SAMPLES

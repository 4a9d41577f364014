"""From data set to device: seeded augmentation, gathered and loaded batches."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import UserDict
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from rankzero.experiment import Experiment
from rankzero.training.data.batch import rows_of, samples_in, to_device
from rankzero.training.data.loader import BatchLoader, loader_workers
from rankzero.training.data.order import BatchOrder
from support.paths import SUPPORT

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


def test_a_subset_augments_each_sample_with_its_own_seed() -> None:
    part = Subset(Subset(Noise(), range(20)), range(20))  # as random_split makes them

    def rows(dataset: Any, batch_size: int) -> dict[int, list[float]]:
        batches = feed(dataset).train_batches(
            BatchOrder(20, batch_size, batch_size, 1, 3), 0, 0, 20 // batch_size
        )
        return {int(row[0]): row[1:] for batch in batches for row in batch.tolist()}

    assert rows(part, 10) == rows(Noise(), 10) == rows(part, 5)


def test_nested_batches_are_moved_and_counted() -> None:
    batch = {"x": [torch.zeros(4, 2), "text"], "y": (torch.zeros(4),)}
    assert samples_in(batch) == 4
    moved = to_device(batch, CPU)
    assert moved["x"][1] == "text" and isinstance(moved["y"], tuple)
    assert samples_in("nothing") == 0


class Encoded(UserDict[str, Any]):
    """A mapping that is no dict, as tokenizers make them."""


class Graph:
    """No tensor, but can be moved as one."""

    def __init__(self, device: str = "nowhere") -> None:
        self.device = device

    def to(self, device: torch.device) -> Graph:
        return Graph(device.type)


def test_objects_with_a_method_to_are_moved() -> None:
    meta = torch.device("meta")
    encoded = Encoded(ids=torch.zeros(3, 2), graph=Graph(), texts=["a"])
    moved = to_device(encoded, meta)
    assert (
        isinstance(moved, Encoded)
        and moved["ids"].device == meta
        and moved["graph"].device == "meta"
    )
    assert encoded["ids"].device == CPU and moved["texts"] == ["a"]
    assert rows_of(encoded, torch.tensor([2]))["ids"].shape == (1, 2) and samples_in(encoded) == 3
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert to_device(packed, CPU).data.tolist() == [1.0, 1.0, 1.0]


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


def test_loading_processes_use_the_cores_that_training_leaves() -> None:
    assert [loader_workers(None, ranks, cores=16) for ranks in (1, 2, 4, 16)] == [8, 7, 3, 0]
    assert loader_workers(5, 16, cores=16) == 5


@pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])
def test_loading_processes_end_with_a_killed_rank(method: str) -> None:
    """A fork server is their parent, as in a rank of ours, and lives on as long as they do."""
    program = SUPPORT / "loading.py"
    with subprocess.Popen([sys.executable, program, method], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        loading = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
        assert len(loading) == 2
        rank.kill()
    _, alive = psutil.wait_procs(loading, timeout=20)
    for one in alive:
        one.kill()
    assert not alive

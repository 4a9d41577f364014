"""From data set to device: whole batches out of tensors in memory, or a `DataLoader`.

A sample's random augmentation depends on the seed, the epoch and the sample's index alone: the
same on one rank or many, with or without loader processes, before and after a resume.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from rankzero.experiment import Experiment
from rankzero.telemetry.host import usable_cores
from rankzero.training.data.batch import to_device
from rankzero.training.data.order import BatchOrder, mix, shard

RESIDENT_BYTES = (
    1 << 30
)  # a tensor data set up to this size is copied to the GPU once, and gathered there
MOST_WORKERS = 8
EVALUATION_WORKERS = 2
Collate = Callable[[list[Any]], Any]
Key = tuple[int, int]  # (epoch, index)


class BatchLoader:
    """A data set on its way to `device`, for one rank.

    `workers`: loading processes; None: as many as the cores allow, none for a TensorDataset, which is
    gathered in memory where `collate` is PyTorch's own way.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        *,
        seed: int,
        workers: int | None,
        collate: Collate,
        local_world_size: int = 1,
    ) -> None:
        self.device = device
        self.dataset = dataset
        """As the experiment made it."""
        self.samples = len(dataset)
        self._tensors = _tensors(dataset, device) if stacks(collate) else None
        self._dataset = SeededDataset(dataset, seed)
        self._collate = collate
        self._workers = loader_workers(workers, local_world_size)
        self._evaluation: DataLoader[Any] | None = None

    def train_batches(
        self, plan: BatchOrder, rank: int, first_step: int, total_steps: int
    ) -> Iterator[Any]:
        """Yield `rank`'s micro-batches of all steps from `first_step` on, on the device."""
        keys = plan.iter_micro_batches(rank, first_step, total_steps)
        if self._tensors is not None:
            return self._gather(keys, self._tensors)
        return self._load(self._loader(keys, self._workers))

    def eval_batches(
        self, batch_size: int, rank: int, world_size: int
    ) -> Iterator[tuple[Any, int]]:
        """Yield `rank`'s share of the data set once, on the device, with each batch's number of samples."""
        keys = [(0, indices) for indices in shard(self.samples, batch_size, rank, world_size)]
        return zip(self._evaluated(keys), [len(indices) for _, indices in keys], strict=True)

    def _evaluated(self, keys: Sequence[tuple[int, Tensor]]) -> Iterator[Any]:
        if self._tensors is not None:
            return self._gather(keys, self._tensors)
        if self._evaluation is None:  # kept, so that its processes start once
            self._evaluation = self._loader(
                keys, min(self._workers, EVALUATION_WORKERS), persistent=True
            )
        return self._load(self._evaluation)

    def _gather(
        self, keys: Iterable[tuple[int, Tensor]], tensors: Sequence[Tensor]
    ) -> Iterator[Any]:
        home = tensors[0].device
        on_cpu, moves = home.type == "cpu", home != self.device
        for _, indices in keys:
            here = indices if on_cpu else indices.pin_memory().to(home, non_blocking=True)
            batch = [_rows(tensor, here, pinned=moves) for tensor in tensors]
            yield to_device(batch, self.device) if moves else batch

    def _loader(
        self, keys: Iterable[tuple[int, Tensor]], workers: int, *, persistent: bool = False
    ) -> DataLoader[Any]:
        return DataLoader(
            self._dataset,
            batch_sampler=_EpochBatchSampler(keys),
            num_workers=workers,
            collate_fn=self._collate,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=4 if workers else None,
            persistent_workers=persistent and workers > 0,
            worker_init_fn=_end_with_rank,
            generator=torch.Generator(),  # its own: starting an iterator would draw from the model's
        )

    def _load(self, loader: DataLoader[Any]) -> Iterator[Any]:
        for batch in loader:
            yield to_device(batch, self.device)


def _end_with_rank(_worker: int) -> None:
    """See to it that a loading process does not outlive its rank, however that dies.

    PyTorch watches the parent: of a process from a fork server that is the server, which lives on with it.
    """
    rank = multiprocessing.parent_process()
    if rank is not None:
        threading.Thread(target=_follow, args=(rank,), name="rank", daemon=True).start()


def _follow(rank: Any) -> None:
    rank.join()
    os._exit(1)


class SeededDataset(Dataset[Any]):
    """A map-style data set keyed by (epoch, index), each item drawn under a seed of its own."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed, self._batched = dataset, seed, has_batched_access(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        with _own_randomness():
            if self._batched:
                _seed_all(mix(self._seed, *keys[0]))
                return list(self._dataset.__getitems__([index for _, index in keys]))
            return [self._item(*key) for key in keys]

    def _item(self, epoch: int, index: int) -> Any:
        _seed_all(mix(self._seed, epoch, index))
        return self._dataset[index]


def has_batched_access(dataset: Any) -> bool:
    """Tell whether a data set makes whole batches itself; a Subset only passes on what it is a part of."""
    while getattr(type(dataset), "__getitems__", None) is Subset.__getitems__:
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def stacks(collate: Collate) -> bool:
    """Tell whether a batch is PyTorch's own: the same as gathering its rows."""
    return collate is default_collate or getattr(collate, "__func__", None) is Experiment.collate


def loader_workers(asked: int | None, local_world_size: int) -> int:
    """Return how many loading processes each rank gets: the cores that training leaves, at most 8."""
    if asked is not None:
        return asked
    cores = len(usable_cores())
    return max(0, min(MOST_WORKERS, cores // local_world_size - 1))


class _EpochBatchSampler:
    """The batch sampler: turns (epoch, indices) into the keys of `SeededDataset`."""

    def __init__(self, keys: Iterable[tuple[int, Tensor]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[list[Key]]:
        for epoch, indices in self._keys:
            yield [(epoch, index) for index in indices.tolist()]


def _tensors(dataset: Any, device: torch.device) -> list[Tensor] | None:
    if type(dataset) is not TensorDataset:
        return None
    size = sum(tensor.nbytes for tensor in dataset.tensors)
    home = device if size <= RESIDENT_BYTES else torch.device("cpu")
    return [tensor.to(home) for tensor in dataset.tensors]


def _rows(tensor: Tensor, indices: Tensor, pinned: bool) -> Tensor:
    """Return rows of a tensor, `pinned` for a GPU to read them by itself: else copying would wait for it."""
    if not pinned:
        return tensor.index_select(0, indices)
    rows = torch.empty((len(indices), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, indices, out=rows)


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """Leave this process's generators as they were: the model's dropout draws from them too."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])

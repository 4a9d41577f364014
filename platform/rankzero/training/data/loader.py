"""From data set to device: batches gathered from tensors in memory, or loaded by a `DataLoader`.

A sample's random augmentation depends on the seed, the epoch and the sample's index alone. It is
the same on one rank or many, with or without loading processes, before and after a resume.
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

# A tensor data set of up to this size is copied to the GPU once, and batches are gathered there.
RESIDENT_BYTES = 1 << 30
MOST_WORKERS = 8
EVALUATION_WORKERS = 2
Collate = Callable[[list[Any]], Any]
Key = tuple[int, int]
"""Epoch and index of a sample."""


class BatchLoader:
    """One rank's batches of a data set, on `device`.

    `workers`: loading processes, or None for as many as the cores allow. A TensorDataset needs
    none: it is gathered in memory if `collate` is PyTorch's default.
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
        """As the experiment returned it."""
        self.samples = len(dataset)
        self._seeded = _SeededDataset(dataset, seed)
        self._collate = collate
        self._workers = loader_workers(workers, local_world_size, len(usable_cores()))
        self._evaluation: DataLoader[Any] | None = None
        # Only the default collate makes of single samples what gathering their rows does.
        method = getattr(collate, "__func__", None)
        is_default = collate is default_collate or method is Experiment.collate
        self._tensors: list[Tensor] | None = None
        if is_default and type(dataset) is TensorDataset:
            size = sum(tensor.nbytes for tensor in dataset.tensors)
            home = device if size <= RESIDENT_BYTES else torch.device("cpu")
            self._tensors = [tensor.to(home) for tensor in dataset.tensors]

    def train_batches(
        self, order: BatchOrder, rank: int, first_step: int, total_steps: int
    ) -> Iterator[Any]:
        """Yield `rank`'s micro-batches of all steps from `first_step` on, on the device."""
        keys = order.iter_micro_batches(rank, first_step, total_steps)
        if self._tensors is not None:
            return self._gather(keys, self._tensors)
        return self._load(self._data_loader(keys, self._workers))

    def eval_batches(
        self, batch_size: int, rank: int, world_size: int, *, lockstep: bool = False
    ) -> Iterator[tuple[Any, int]]:
        """Yield `rank`'s share of the data set once, on the device: batches and their samples.

        `lockstep`: leave out samples until every rank has equally many.
        """
        samples = self.samples - (self.samples % world_size if lockstep else 0)
        keys = [(0, indices) for indices in shard(samples, batch_size, rank, world_size)]
        if self._tensors is not None:
            batches = self._gather(keys, self._tensors)
        else:
            # Keep the loader, so that its processes start once and not with every evaluation.
            if self._evaluation is None:
                workers = min(self._workers, EVALUATION_WORKERS)
                self._evaluation = self._data_loader(keys, workers, persistent=True)
            batches = self._load(self._evaluation)
        return zip(batches, [len(indices) for _, indices in keys], strict=True)

    def _gather(
        self, keys: Iterable[tuple[int, Tensor]], tensors: Sequence[Tensor]
    ) -> Iterator[Any]:
        home = tensors[0].device
        on_cpu, must_move = home.type == "cpu", home != self.device
        for _, indices in keys:
            if not must_move:
                if not on_cpu:
                    indices = indices.pin_memory().to(home, non_blocking=True)
                yield [tensor.index_select(0, indices) for tensor in tensors]
                continue
            # A GPU copies from pinned memory by itself. From other memory the host would wait.
            batch = [
                torch.empty((len(indices), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
                for tensor in tensors
            ]
            for tensor, rows in zip(tensors, batch, strict=True):
                torch.index_select(tensor, 0, indices, out=rows)
            yield to_device(batch, self.device)

    def _data_loader(
        self, keys: Iterable[tuple[int, Tensor]], workers: int, *, persistent: bool = False
    ) -> DataLoader[Any]:
        return DataLoader(
            self._seeded,
            batch_sampler=_EpochBatchSampler(keys),
            num_workers=workers,
            collate_fn=self._collate,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=4 if workers else None,
            persistent_workers=persistent and workers > 0,
            worker_init_fn=_end_with_rank,
            # Without a generator of its own, starting to iterate draws a number from the model's.
            generator=torch.Generator(),
        )

    def _load(self, loader: DataLoader[Any]) -> Iterator[Any]:
        for batch in loader:
            yield to_device(batch, self.device)


def loader_workers(wanted: int | None, local_world_size: int, cores: int) -> int:
    """Return how many loading processes each rank gets: `wanted`, or what training leaves."""
    if wanted is not None:
        return wanted
    return max(0, min(MOST_WORKERS, cores // local_world_size - 1))


def _end_with_rank(_worker: int) -> None:
    """End this loading process when its rank ends, however the rank ends."""
    # PyTorch watches the parent process. If a fork server started this one, its parent is that
    # server, which lives as long as this process does.
    rank = multiprocessing.parent_process()
    if rank is None:
        return

    def follow() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=follow, name="rank", daemon=True).start()


class _SeededDataset(Dataset[Any]):
    """A map-style data set with keys (epoch, index), each item drawn with a seed of its own."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        # A Subset has batched access in any case, and only passes it on to what it is a part of.
        inner = dataset
        while getattr(type(inner), "__getitems__", None) is Subset.__getitems__:
            inner = inner.dataset
        self._is_batched = hasattr(inner, "__getitems__")

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        with _preserved_rng():
            if self._is_batched:
                _seed_cpu(mix(self._seed, *keys[0]))
                return list(self._dataset.__getitems__([index for _, index in keys]))
            items = []
            for epoch, index in keys:
                _seed_cpu(mix(self._seed, epoch, index))
                items.append(self._dataset[index])
            return items


class _EpochBatchSampler:
    """Turns (epoch, indices) of a batch into the keys of `_SeededDataset`."""

    def __init__(self, keys: Iterable[tuple[int, Tensor]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[list[Key]]:
        for epoch, indices in self._keys:
            yield [(epoch, index) for index in indices.tolist()]


def _seed_cpu(seed: int) -> None:
    # torch.manual_seed would also seed the GPUs, from which the model draws.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def _preserved_rng() -> Iterator[None]:
    """Restore this process's generators after the block: the model draws from them too."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])

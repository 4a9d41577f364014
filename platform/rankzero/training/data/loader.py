"""From data set to device: batches gathered from tensors in memory, or loaded by a `DataLoader`.

A sample's random augmentation depends on the seed, the epoch, the sample's index, and which copy in
its step it is. It is the same on one rank or many, with or without loading processes, before and
after a resume.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from rankzero.experiment import Experiment
from rankzero.training.data import processes
from rankzero.training.data.device_copy import DeviceCopier
from rankzero.training.data.draws import SeededDraws
from rankzero.training.data.order import BatchOrder, mix, mix_in, shard
from rankzero.training.data.samples import BatchMaker, Collate, batch_maker

# A tensor data set of up to this size is copied to the GPU once, and batches are gathered there.
_RESIDENT_BYTES = 1 << 30
EVALUATION_WORKERS = 2
# Indices of samples that are copied to the GPU at once, and the batches that they are of.
_INDICES_AHEAD, _BATCHES_AHEAD = 1 << 16, 1 << 10
_ALONE = (
    "; its __getitems__ draws, so it is given one index at a time: do in collate() what needs the "
    "whole batch"
)
Key = tuple[int, int, list[int], list[int]]
"""A batch: its number from the start of the run, its draw, and its samples: their indices and
copies, as `BatchOrder.iter_copies` yields them."""


def in_memory(dataset: Any, collate: Collate) -> bool:
    """Return whether batches are gathered from tensors, and no samples are loaded."""
    # Only the default collate makes of single samples what gathering their rows does.
    method = getattr(collate, "__func__", None)
    is_default = collate is default_collate or method is Experiment.collate
    return is_default and type(dataset) is TensorDataset


class BatchLoader:
    """One rank's batches of a data set, on `device`.

    `workers`: loading processes. A TensorDataset needs none: it is gathered in memory if `collate`
    is PyTorch's default.
    """

    def __init__(
        self, dataset: Any, device: torch.device, *, seed: int, workers: int, collate: Collate
    ) -> None:
        self.device, self.dataset, self.samples = device, dataset, len(dataset)
        self._seed, self._workers, self._collate = seed, workers, collate
        self._evaluation: DataLoader[Any] | None = None
        self._tensors: list[Tensor] | None = None
        if in_memory(dataset, collate):
            size = sum(tensor.nbytes for tensor in dataset.tensors)
            is_there = all(tensor.device == device for tensor in dataset.tensors)
            home = device if is_there or size <= _RESIDENT_BYTES else torch.device("cpu")
            self._tensors = [tensor.to(home) for tensor in dataset.tensors]

    def train_batches(
        self, order: BatchOrder, rank: int, first_step: int, total_steps: int
    ) -> Iterator[Any]:
        """Yield `rank`'s micro-batches of all steps from `first_step` on, on the device."""
        keys = order.iter_micro_batches(rank, first_step, total_steps)
        if self._tensors is not None:
            # The experiment chooses an epoch's batches when the epoch begins, and not before.
            ahead = min(_BATCHES_AHEAD, max(1, _INDICES_AHEAD // order.micro_batch))
            return self._gather(keys, self._tensors, 1 if order.lists is not None else ahead)
        maker = batch_maker(self._collate, self._seed, rank, training=True)
        loader = processes.make_loader(
            _SeededBatches(self.dataset, self._seed, maker, order.list_count),
            self.device,
            self._workers,
            keys=_numbered(
                keys, order.micro_batches_before(first_step), order.iter_copies(rank, first_step)
            ),
        )
        # A generator would hold a batch on the device while the next one is copied there.
        return map(operator.itemgetter(0), processes.load(loader, self.device))

    def eval_batches(
        self, batch_size: int, rank: int, world_size: int, *, lockstep: bool = False
    ) -> Iterator[tuple[Any, int]]:
        """Yield `rank`'s share of the data set once, on the device: batches and their samples.

        `lockstep`: leave out samples until every rank has equally many.
        """
        samples = self.samples - (self.samples % world_size if lockstep else 0)
        keys = [(0, indices) for indices in shard(samples, batch_size, rank, world_size)]
        if self._tensors is not None:
            return zip(self._gather(keys, self._tensors), (len(i) for _, i in keys), strict=True)
        # Keep the loader, so that its processes start once and not with every evaluation.
        if self._evaluation is None:
            maker = batch_maker(self._collate, self._seed, rank, training=False)
            self._evaluation = processes.make_loader(
                _SeededBatches(self.dataset, self._seed, maker),
                self.device,
                min(self._workers, EVALUATION_WORKERS),
                keys=list(_numbered(keys, 0)),
                persistent=True,
            )
        return processes.load(self._evaluation, self.device)

    def _gather(
        self, keys: Iterable[tuple[int, Tensor]], tensors: Sequence[Tensor], ahead: int = 1
    ) -> Iterator[Any]:
        home = tensors[0].device
        batches: Iterator[Tensor] = map(operator.itemgetter(1), keys)
        if home == self.device:
            if home.type != "cpu":
                batches = copied_ahead(batches, home, ahead)
            for indices in batches:
                yield [tensor.index_select(0, indices) for tensor in tensors]
            return
        copy = DeviceCopier(self.device)
        for indices in batches:
            # A GPU copies from pinned memory by itself. From other memory the host would wait.
            batch = [
                torch.empty((len(indices), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
                for tensor in tensors
            ]
            for tensor, rows in zip(tensors, batch, strict=True):
                torch.index_select(tensor, 0, indices, out=rows)
            yield copy(batch)


def copied_ahead(indices: Iterable[Tensor], device: torch.device, ahead: int) -> Iterator[Tensor]:
    """Yield `indices` on `device`, copied for `ahead` batches at once.

    They are copied on the stream that is current at the first of these batches. A copy costs the
    host as much as several small kernels, and the step of a small model is made of small kernels.
    """
    batches = iter(indices)
    while chunk := list(itertools.islice(batches, ahead)):
        joined = torch.cat(chunk)
        if device.type == "cuda":
            joined = joined.pin_memory()
        yield from joined.to(device, non_blocking=True).split([len(one) for one in chunk])


class _SeededBatches(Dataset[Any]):
    """The batches of a map-style data set, by key, each item drawn with a seed of its own.

    `draws_per_epoch`: 0 if a key has the epoch as its draw.
    """

    def __init__(
        self, dataset: Any, seed: int, maker: BatchMaker, draws_per_epoch: int = 0
    ) -> None:
        self._dataset, self._seed, self._maker = dataset, seed, maker
        self._draws = SeededDraws()
        self._draws_per_epoch = draws_per_epoch
        self._epoch: int | None = None
        self._with_epochs = _with_epochs(dataset) if maker.training else None
        # A Subset has batched access in any case, and only passes it on to what it is a part of.
        inner = dataset
        while getattr(type(inner), "__getitems__", None) is Subset.__getitems__:
            inner = inner.dataset
        self._is_batched = self._is_whole = hasattr(inner, "__getitems__")

    def __getitem__(self, key: Key) -> Any:
        """Return a batch and its samples, or the Failure of the user's code."""
        epoch = key[1] // self._draws_per_epoch if self._draws_per_epoch else key[1]
        found = self._draws.run(functools.partial(self._load, epoch, *key))
        # The batch may be loaded twice, with another seed for what set_epoch() draws.
        self._epoch = epoch
        return found

    def _load(
        self, epoch: int, number: int, draw: int, indices: list[int], copies: list[int]
    ) -> Any:
        samples: list[Any] = []
        mixed = mix_in(mix_in(0, self._seed), draw)
        try:
            if self._with_epochs is not None and epoch != self._epoch:
                self._draws.seed(mix(self._seed, epoch))
                self._with_epochs.set_epoch(epoch)
            if self._is_whole:
                samples = self._at_once(mix_in(mixed, indices[0]) >> 1, indices)
            if not samples:
                seeds = [mix_in(mixed, index) for index in indices]
                for place, copy in enumerate(copies):
                    seeds[place] = mix_in(seeds[place], copy) if copy else seeds[place]
                for index, seed in zip(indices, seeds, strict=True):
                    self._draws.seed(seed >> 1)
                    if self._is_batched:
                        samples += self._dataset.__getitems__([index])
                    else:
                        samples.append(self._dataset[index])
            return self._maker.make(number, samples, self._draws.seed), len(indices)
        except Exception as error:
            which = ", ".join(map(str, indices[:8])) + ", …" * (len(indices) > 8)
            where = f"collate() of samples {which}"
            if self._is_whole and not samples:
                where = f"samples {which}"
            elif len(samples) < len(indices):
                where = f"sample {indices[len(samples)]}"
            note = _ALONE if self._is_batched and not self._is_whole else ""
            return self._maker.failure(error, where, note)

    def _at_once(self, seed: int, indices: list[int]) -> list[Any]:
        """Return a batch's samples, or none if the data set draws: each needs a seed of its own."""
        self._draws.seed(seed)
        # A draw from another generator than these has the batch loaded again.
        marks = [(each, each.mark()) for each in self._draws.seeded]
        found = list(self._dataset.__getitems__(indices))
        self._is_whole = all(each.mark() == mark for each, mark in marks)
        return found if self._is_whole else []


def _with_epochs(dataset: Any) -> Any:
    """Return the data set that `set_epoch` is called of: the set, or what it is a subset of."""
    while not hasattr(dataset, "set_epoch") and isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset if hasattr(dataset, "set_epoch") else None


def _numbered(
    keys: Iterable[tuple[int, Tensor]], first: int, copies: Iterable[list[int]] | None = None
) -> Iterator[Key]:
    with_copies = zip(keys, copies or itertools.repeat([]), strict=False)
    for number, ((epoch, indices), copied) in enumerate(with_copies, first):
        yield number, epoch, indices.tolist(), copied

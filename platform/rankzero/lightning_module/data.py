"""The data sets of a `LightningDataModule`, or of a module's own loaders."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from rankzero.errors import UserError

LIGHTNINGS_OWN = ("lightning.", "pytorch_lightning.")


@dataclasses.dataclass(frozen=True)
class LoadedData:
    """What a run needs of its loaders: RankZero makes its own, for its data order."""

    train: Any
    val: Any
    collate: Any


def from_hooks(source: Any) -> LoadedData:
    """Prepare and set up a data module, or a module with loaders of its own, and return its data sets.

    `prepare_data` runs on one process of a machine at a time. Raises UserError for loaders whose order or whose
    number RankZero's loop would not keep.
    """
    with _one_at_a_time(type(source).__qualname__):
        source.prepare_data()
    source.setup("fit")
    train, val = _loader(source, "train_dataloader"), _loader(source, "val_dataloader")
    return LoadedData(train.dataset, val.dataset, train.collate_fn)


def from_pair(pair: Any) -> LoadedData:
    """Return what a plain ``data()`` beside the module gave."""
    try:
        train, val = pair
    except (TypeError, ValueError) as error:
        raise UserError(
            f"data() must return two map-style data sets (training, validation): {error}"
        ) from error
    return LoadedData(train, val, default_collate)


def has_loaders(cls: type[Any]) -> bool:
    """Tell whether a class brings a `train_dataloader` of its own."""
    return not cls.train_dataloader.__module__.startswith(LIGHTNINGS_OWN)


def _loader(source: Any, name: str) -> DataLoader[Any]:
    found, where = getattr(source, name)(), f"{type(source).__name__}.{name}"
    if isinstance(found, (list, tuple)) and len(found) == 1:
        found = found[0]
    if not isinstance(found, DataLoader):
        raise UserError(f"{where} must return one torch DataLoader, got {type(found).__name__}")
    if isinstance(found.dataset, IterableDataset):
        raise UserError(
            f"{where}: an IterableDataset has no order that can be resumed; use a map-style data set"
        )
    if type(found.sampler) not in (RandomSampler, SequentialSampler):
        raise UserError(
            f"{where} has a {type(found.sampler).__name__}: RankZero draws each epoch's order itself; put what the "
            "sampler does into the data set"
        )
    return found


@contextlib.contextmanager
def _one_at_a_time(name: str) -> Iterator[None]:
    """Keep the machine's other processes of the same user out of the block."""
    key = hashlib.sha256(f"{os.getuid()} {Path.cwd()} {name}".encode()).hexdigest()[:16]
    with (Path(tempfile.gettempdir()) / f"rankzero-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

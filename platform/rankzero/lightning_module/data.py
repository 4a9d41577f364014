"""The data sets of a `LightningDataModule`, of a module's loaders, or of a function ``data()``."""

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

_LIGHTNING = ("lightning.", "pytorch_lightning.")


@dataclasses.dataclass(frozen=True)
class LoadedData:
    """What a run takes from Lightning's loaders. RankZero makes its own, for its data order."""

    train: Any
    val: Any
    collate: Any


def from_hooks(source: Any) -> LoadedData:
    """Prepare and set up a data module, or a module with its own loaders, and return its data sets.

    Raises UserError for loaders whose order or number RankZero's loop would not keep.
    """
    # Two processes that prepare at once would download into the same files.
    with _one_at_a_time(type(source).__qualname__):
        source.prepare_data()
    source.setup("fit")
    train, val = _loader(source, "train_dataloader"), _loader(source, "val_dataloader")
    return LoadedData(train.dataset, val.dataset, train.collate_fn)


def from_pair(pair: Any) -> LoadedData:
    """Return the data sets of the result of a plain function ``data()``."""
    try:
        train, val = pair
    except (TypeError, ValueError) as error:
        raise UserError(
            f"data() must return two map-style data sets (training, validation): {error}"
        ) from error
    return LoadedData(train, val, default_collate)


def has_loaders(cls: type[Any]) -> bool:
    """Return whether a class defines its own `train_dataloader`."""
    return not cls.train_dataloader.__module__.startswith(_LIGHTNING)


def _loader(source: Any, name: str) -> DataLoader[Any]:
    found, where = getattr(source, name)(), f"{type(source).__name__}.{name}"
    # Lightning allows a list of validation loaders.
    if isinstance(found, (list, tuple)) and len(found) == 1:
        found = found[0]
    if not isinstance(found, DataLoader):
        raise UserError(f"{where} must return one torch DataLoader, got {type(found).__name__}")
    if isinstance(found.dataset, IterableDataset):
        raise UserError(
            f"{where}: an IterableDataset has no order that can be resumed; use a map-style data "
            "set"
        )
    if type(found.sampler) not in (RandomSampler, SequentialSampler):
        raise UserError(
            f"{where} has a {type(found.sampler).__name__}: RankZero draws the order of each epoch "
            "itself; let the data set do what the sampler does"
        )
    return found


@contextlib.contextmanager
def _one_at_a_time(name: str) -> Iterator[None]:
    """Let one process of this user and machine at a time into the block."""
    # The lock is in the temporary folder: the working directory may be read-only, or on a disk
    # without locks.
    key = hashlib.sha256(f"{os.getuid()} {Path.cwd()} {name}".encode()).hexdigest()[:16]
    with (Path(tempfile.gettempdir()) / f"rankzero-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

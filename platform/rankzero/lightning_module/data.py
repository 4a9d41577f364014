"""The data sets of a `LightningDataModule`, of a module's loaders, or of a function ``data()``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from rankzero.errors import UserError
from rankzero.run_store import lock_files

# As long as a rank waits for another that loads its data.
_PREPARE_SECONDS = 30 * 60.0
_LIGHTNING = ("lightning.", "pytorch_lightning.")


@dataclasses.dataclass(frozen=True)
class LoadedData:
    """The parts of Lightning's loaders that a run takes. RankZero makes its own loaders."""

    train: Any
    val: Any
    """None without a validation set."""
    collate: Callable[..., Any]
    """As `Experiment.collate`: it may ask whether it trains."""
    batch_size: int | None = None
    """The training loader's, which the run does not take. None without a loader."""


def from_hooks(source: Any) -> LoadedData:
    """Prepare and set up a data module, or a module with its own loaders, and return its data sets.

    Raises UserError for loaders whose order or number RankZero's loop would not keep.
    """
    prepare(source)
    source.setup("fit")
    train = _loader(source, "train_dataloader")
    if source.val_dataloader.__module__.startswith(_LIGHTNING):
        return LoadedData(train.dataset, None, train.collate_fn, train.batch_size)
    val = _loader(source, "val_dataloader")
    # A single function may be PyTorch's default, which needs no loading processes for tensors.
    both: Callable[..., Any] = functools.partial(_collate, train.collate_fn, val.collate_fn)
    collate = train.collate_fn if train.collate_fn == val.collate_fn else both
    return LoadedData(train.dataset, val.dataset, collate, train.batch_size)


def _collate(
    train: Callable[..., Any], val: Callable[..., Any], samples: list[Any], training: bool
) -> Any:
    return train(samples) if training else val(samples)


def prepare(source: Any) -> None:
    """Let a module or a data module prepare its files, if its class does so.

    Raises UserError if another process takes too long.
    """
    if source.prepare_data.__module__.startswith(_LIGHTNING):
        return
    # Two processes that prepare at once would download into the same files.
    with one_at_a_time(type(source).__qualname__):
        source.prepare_data()


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
        why = "an IterableDataset has no order that can be resumed"
        raise UserError(f"{where}: {why}; use a map-style data set")
    _refuse_own_order(found, where)
    return found


def _refuse_own_order(loader: DataLoader[Any], where: str) -> None:
    """Raise UserError if a loader's batches differ from those that RankZero draws instead."""
    draws = "RankZero draws the order of each epoch itself"
    if loader.batch_sampler is None:
        raise UserError(
            f"{where} has batch_size=None: RankZero makes the batches itself; let the data set "
            "return single samples, and pass a batch size"
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise UserError(
            f"{where} has a {type(loader.batch_sampler).__name__}: {draws}; pass batch_size instead"
        )
    # A loader with a batch sampler of the user's has a default sampler that does nothing.
    sampler: Any = loader.batch_sampler.sampler
    if type(sampler) not in (RandomSampler, SequentialSampler):
        raise UserError(
            f"{where} has a {type(sampler).__name__}: {draws}; let the data set do what the "
            "sampler does"
        )
    count, samples = len(sampler), len(loader.dataset)  # type: ignore[arg-type]
    if getattr(sampler, "replacement", False) or count != samples:
        raise UserError(
            f"{where} has a {type(sampler).__name__} that draws {count} of {samples} samples, or "
            f"some of them twice: {draws}, with each sample once; let the data set do what the "
            "sampler does"
        )


@contextlib.contextmanager
def one_at_a_time(
    name: str, temporary: Path | None = None, seconds: float = _PREPARE_SECONDS
) -> Iterator[None]:
    """Let one process of this user and machine at a time into the block.

    `temporary`: the shared temporary folder. Raises UserError after `seconds` of waiting.
    """
    # The lock is in the temporary folder: the working directory may be read-only, or on a disk
    # without locks. There other users can take any name, so the lock is in a folder of this user.
    folder = lock_files.own_temporary_folder(temporary)
    if folder is None:
        print(
            "note: another user has taken your folder's name in the temporary folder, so processes "
            "of yours may prepare data at the same time: set TMPDIR to a folder of your own",
            flush=True,
        )
        yield
        return
    key = hashlib.sha256(f"{Path.cwd()} {name}".encode()).hexdigest()[:16]
    with lock_files.lock(folder / f"prepare-{key}.lock", seconds=seconds) as is_alone:
        if not is_alone:
            raise UserError(
                f"another process of yours has been preparing the data of {name} for "
                f"{seconds / 60:.0f} minutes: wait until it has ended, or stop it"
            )
        yield

"""A batch is whatever `collate` makes of samples: moved to a device, cut into rows, counted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor in it on `device`, and whatever else has a method ``to``."""
    return _changed(
        batch,
        lambda tensor: tensor.to(device, non_blocking=True),
        lambda other: _moved(other, device),
    )


def rows_of(batch: Any, rows: Tensor) -> Any:
    """Return some samples of a batch: those rows of every tensor in it."""
    return _changed(batch, lambda tensor: tensor.index_select(0, rows), lambda other: other)


def samples_in(batch: Any) -> int:
    """Return the length of the first tensor found in `batch`: its samples, where every tensor has them in rows."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    values = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, (list, tuple))
        else ()
    )
    return next((count for count in map(samples_in, values) if count), 0)


def _changed(
    batch: Any, change: Callable[[Tensor], Tensor], change_other: Callable[[Any], Any]
) -> Any:
    """Return `batch` with its tensors changed, in lists, tuples, mappings; and others that could be moved."""

    def changed(value: Any) -> Any:
        return _changed(value, change, change_other)

    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return _like(batch, {key: changed(value) for key, value in batch.items()})
    if callable(getattr(batch, "to", None)):  # a PackedSequence is a tuple, too
        return change_other(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(changed, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(changed, batch))
    return batch


def _like(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return the same kind of mapping with other values; a dict where it cannot be changed."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return values
    other = copy.copy(mapping)
    other.update(values)
    return other


def _moved(value: Any, device: torch.device) -> Any:
    try:
        return value.to(device, non_blocking=True)
    except TypeError:  # not everybody's takes that
        return value.to(device)

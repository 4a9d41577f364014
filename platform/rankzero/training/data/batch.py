"""Batches, as `collate` makes them: trees of tensors.

A tree is a list, a tuple, a mapping, a dataclass, an attrs class, or an object with a method
``to``, as PyTorch Geometric's batches have it. Any other object is passed on as it is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from rankzero.errors import UserError


def to_device(
    batch: Any, device: torch.device, copy_tensor: Callable[[Tensor], Tensor] | None = None
) -> Any:
    """Return `batch` with every tensor, and every other object that has ``to``, on `device`.

    `copy_tensor` copies a tensor there, if given.
    """

    def move(value: Any) -> Any:
        try:
            return value.to(device, non_blocking=True)
        except TypeError:
            # Not every class with a method ``to`` knows this argument.
            return value.to(device)

    return map_tensors(batch, copy_tensor or move, move)


def channels_last(batch: Any) -> Any:
    """Return `batch` with its 4-d tensors of floats, such as images, stored channels last."""

    def stored(tensor: Tensor) -> Tensor:
        if tensor.dim() == 4 and tensor.is_floating_point():
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    return map_tensors(batch, stored)


def rows_of(batch: Any, rows: Tensor) -> Any:
    """Return the samples of `batch` at `rows`: those rows of every tensor.

    Raises UserError for an object that only its own class can divide.
    """

    def refuse(value: Any) -> Any:
        raise UserError(
            f"train.strategy=pp divides batches by rows, and cannot divide a "
            f"{type(value).__name__}: return tensors from collate(), or use train.strategy=ddp"
        )

    return map_tensors(batch, lambda tensor: tensor.index_select(0, rows), refuse)


def samples_in(batch: Any) -> int:
    """Return the length of the first tensor in `batch`, or 0 if there is none.

    It also looks into objects that have ``to``, which `map_tensors` hands on whole.
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    values: Any = batch if isinstance(batch, (list, tuple)) else ()
    if isinstance(batch, Mapping):
        values = batch.values()
    elif names := _field_names(batch):
        values = [getattr(batch, name) for name in names]
    return next((count for count in map(samples_in, values) if count), 0)


def map_tensors(
    batch: Any,
    change: Callable[[Tensor], Any],
    change_other: Callable[[Any], Any] = lambda other: other,
) -> Any:
    """Return `batch` with its tensors changed, and its other objects that have a method ``to``."""

    def changed(value: Any) -> Any:
        return map_tensors(value, change, change_other)

    if isinstance(batch, Tensor):
        return change(batch)
    # A TensorDict is a mapping, and a PackedSequence is a tuple, so this comes first. The `to` of a
    # BatchEncoding, a UserDict, leaves out other objects.
    if callable(getattr(batch, "to", None)) and not isinstance(batch, (dict, UserDict)):
        return change_other(batch)
    if isinstance(batch, Mapping):
        values = {key: changed(value) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return values
        # Keep the class, such as a tokenizer's BatchEncoding, with its other attributes.
        other = copy.copy(batch)
        other.update(values)
        return other
    if isinstance(batch, (list, tuple)):
        is_named = hasattr(batch, "_fields")
        return type(batch)(*map(changed, batch)) if is_named else type(batch)(map(changed, batch))
    if names := _field_names(batch):
        # A copy runs no `__init__`, which may want other arguments than the fields.
        other = copy.copy(batch)
        for name in names:
            # The class may be frozen.
            object.__setattr__(other, name, changed(getattr(batch, name)))
        return other
    return batch


def _field_names(batch: Any) -> list[str]:
    """Return the fields of an instance of a dataclass or an attrs class; of others, nothing."""
    kind = type(batch)
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return [field.name for field in getattr(kind, "__attrs_attrs__", ())]

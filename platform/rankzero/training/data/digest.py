"""Describe a run's data sets: a name, and a digest that is the same for the same data.

The digest reads what a data set holds in its attributes: tensors, arrays, lists of files and
labels, also of the data sets it is made of. If it holds nothing of the kind, its type, length and
settings count. No sample is read: that would open files that loading processes then inherit, and
draw random numbers. So a digest takes milliseconds for data of any size, and augmentation does not
change it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from rankzero.events import DataDescribed
from rankzero.redaction.text import text_without_secrets
from rankzero.training.data.stream import length_of

# Changing any of these numbers changes the digests of data that have not changed.
ROWS = 64  # of each array or list
INDICES = 4096  # of a subset
_ROW_VALUES = 4096  # of each row, spread over it
_MAPPED_VALUES = 256  # of each row of a memory-mapped file: each may be a page to read
_DEEPEST = 6  # data sets in data sets
_PLAIN = (str, bytes, int, float, bool, type(None))
_GENERIC = (TensorDataset, Subset, ConcatDataset)


def describe(dataset: Any, context: str, experiment_file: str) -> DataDescribed:
    """Return what a data set is. Raises nothing: the least it returns is a type and a length.

    `context`: its use, such as ``training``.
    """
    inner = _innermost(dataset)
    name = type(inner).__name__
    if isinstance(inner, _GENERIC):
        name = Path(experiment_file.partition(".py")[0]).name
    root = dict(_attributes(inner)).get("root")
    is_local = isinstance(root, (str, Path)) and bool(str(root))
    source = str(root) if is_local else experiment_file
    if is_local and "://" not in source:
        source = str(Path(source).absolute())
    length = length_of(dataset)
    # MLflow takes streams of one type and one digest for the same data.
    about = f"{context} {name} {Path(source).name}"  # without folders, as in compute()
    use = hashlib.sha256(about.encode()).hexdigest()[:16]
    digest, how = compute(dataset) if length else (use, "its use, its source")
    return DataDescribed(
        time.time(),
        context,
        name,
        digest,
        how,
        "local" if is_local else "code",
        text_without_secrets(source),
        length,
        _columns(dataset) if length else {},
    )


def compute(dataset: Any) -> tuple[str, str]:
    """Return a digest of 16 characters, and of what it was computed."""
    found, how = [_kind(dataset)], "its type"
    # A user's class may run any code when its attributes are read.
    with contextlib.suppress(Exception):
        names: list[str] = []
        contents = list(_contents(dataset, names, 0))
        if names:
            found, how = contents, f"up to {ROWS} rows of {', '.join(dict.fromkeys(names))}"
        else:
            known = (
                (name, _portable(value))
                for name, value in _attributes(_innermost(dataset))
                if name[:1] != "_" and isinstance(value, (str, int, float, bool, Path))
            )
            settings = [  # A name without its folder: where data lie does not matter.
                (name, value.rpartition("/")[2] if isinstance(value, str) else value)
                for name, value in known
            ]
            found = [*contents, repr(settings).encode()]
            how = "its type, its length" + "".join(f", {name}" for name, _ in settings)
    return hashlib.sha256(b"\0".join(found)).hexdigest()[:16], how[:200]


def _innermost(dataset: Any) -> Any:
    """Return the data set inside of parts and wrappers, as far as each holds exactly one."""
    for _ in range(_DEEPEST):
        inner = [value for _, value in _attributes(dataset) if isinstance(value, Dataset)]
        if isinstance(dataset, TensorDataset) or len(inner) != 1:
            break
        dataset = inner[0]
    return dataset


def _contents(dataset: Any, names: list[str], depth: int) -> Iterator[bytes]:
    """Yield what the data set holds. Append the names of the attributes read to `names`."""
    # Two data sets may hold each other.
    if depth > _DEEPEST:
        return
    if isinstance(dataset, Subset):
        # Evenly spaced, and the same for a list and a tensor.
        indices: Any = dataset.indices
        places = _spaced(len(indices), INDICES)
        is_array = isinstance(indices, (Tensor, np.ndarray))
        picked = (
            indices[places].tolist() if is_array else [_portable(indices[one]) for one in places]
        )
        yield from (b"subset", repr((len(indices), picked)).encode())
        yield from _contents(dataset.dataset, names, depth + 1)
        return
    if isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _contents(part, names, depth + 1)
        return
    count = len(dataset)
    yield from (_kind(dataset), str(count).encode())
    for name, value in _attributes(dataset):
        if isinstance(value, Dataset):
            yield from _contents(value, names, depth + 1)
        elif name == "tensors" and isinstance(dataset, TensorDataset):
            names.append("its tensors")
            yield from (_packed(tensor) for tensor in value)
        elif _has_entry_per_sample(value, count):
            names.append(name)
            yield from (name.encode(), _packed(value))


def _attributes(dataset: Any) -> list[tuple[str, Any]]:
    return sorted(vars(dataset).items()) if hasattr(dataset, "__dict__") else []


def _kind(dataset: Any) -> bytes:
    return type(dataset).__qualname__.encode()


def _has_entry_per_sample(value: Any, count: int) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        # The bytes of an array of objects are addresses, which differ from run to run.
        has_objects = getattr(value.dtype, "hasobject", False)
        return bool(value.ndim) and len(value) == count and not has_objects
    return isinstance(value, (list, tuple)) and len(value) == count > 0 and _is_plain(value[0])


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= ROWS and all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, Path, np.generic))


def _packed(values: Any) -> bytes:
    """Return the shape and evenly spaced rows of an array or list, and copy nothing else."""
    if isinstance(values, Tensor):
        picked = values.detach()[_spaced_index(values.shape, _ROW_VALUES)].cpu().contiguous()
        head = f"{values.dtype} {tuple(values.shape)}"
        return head.encode() + bytes(picked.view(torch.uint8).numpy())
    if isinstance(values, np.ndarray):
        most = _MAPPED_VALUES if isinstance(values, np.memmap) else _ROW_VALUES
        gathered = values[_spaced_index(values.shape, most)]
        return f"torch.{values.dtype} {values.shape}".encode() + bytes(gathered.tobytes())
    rows = [_portable(values[row]) for row in _spaced(len(values), ROWS)]
    return repr((len(values), rows)).encode()


def _spaced_index(shape: Sequence[int], most: int) -> tuple[Any, ...]:
    """Return an index of spaced rows, and of at most `most` spaced values in each.

    An index, and no view: it gathers the same values from strided memory.
    """
    rows, size = np.array(_spaced(shape[0], ROWS), np.int64)[:, None], math.prod(shape[1:])
    steps = np.arange(0, size, max(1, -(-size // most)))
    if size and len(shape) > 1:
        return (rows, *np.unravel_index(steps, tuple(shape[1:])))
    return (rows, *[steps] * (len(shape) - 1))


def _portable(value: Any) -> Any:
    """Return a list's entry as it is on every machine: a path without the folders above its own."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_portable, value))
    if isinstance(value, Path) or (isinstance(value, str) and "/" in value):
        return "/".join(Path(value).parts[-2:])
    return value.item() if isinstance(value, (np.generic, Tensor)) else value


def _spaced(count: int, most: int) -> list[int]:
    """Return at most `most` numbers of range(count), evenly spaced, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [number * (count - 1) // (most - 1) for number in range(most)]


def _columns(dataset: Any) -> dict[str, str]:
    """Return the types and shapes in a sample, by name, as far as attributes show them."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    arrays: dict[str, Any]
    if isinstance(dataset, TensorDataset):
        arrays = {str(number): tensor for number, tensor in enumerate(dataset.tensors)}
    else:
        arrays = {
            name: value
            for name, value in _attributes(dataset)
            if isinstance(value, (Tensor, np.ndarray))
            and _has_entry_per_sample(value, len(dataset))
        }
    return {
        name: f"{str(array.dtype).removeprefix('torch.')}{list(array.shape[1:]) or ''}"
        for name, array in arrays.items()
    }

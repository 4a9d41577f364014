"""What a run's data are: a name, a digest that is the same for the same data, and how it was made.

A digest is made of what a data set holds, as far as that can be seen without reading samples: tensors, arrays, lists
of files and labels, also of the data sets that it is made of; where nothing is seen, of its type, its length and its
settings. No sample is ever read: that would open files that loading processes then inherit, and draw random numbers.
It takes milliseconds however large the data are, and augmentation does not change it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from rankzero.events import DataDescribed
from rankzero.redaction.text import text_without_secrets

ROWS = 64  # of each array or list
ROW_VALUES = 4096  # of each row, spread over it
MAPPED_VALUES = 256  # of each row of a file in memory: each may be a page to read
INDICES = 4096  # of a subset
DEEPEST = 6  # data sets in data sets
PLAIN = (str, bytes, int, float, bool, type(None))
GENERIC = (TensorDataset, Subset, ConcatDataset)
Contents = list[bytes]


def describe(
    dataset: Any, context: Literal["training", "validation"], experiment_file: str
) -> DataDescribed:
    """Return what a data set is; of one that cannot be looked into, its type and its length. Raises nothing."""
    inner = innermost(dataset)
    name = (
        Path(experiment_file.partition(".py")[0]).name
        if isinstance(inner, GENERIC)
        else type(inner).__name__
    )
    digest, how = fingerprint(dataset)
    root = dict(_attributes(inner)).get("root")
    local = isinstance(root, (str, Path)) and bool(str(root))
    source = (
        str(Path(str(root)).absolute()) if local and "://" not in str(root) else str(root or "")
    )
    return DataDescribed(
        time.time(),
        context,
        name,
        digest,
        how,
        "local" if local else "code",
        text_without_secrets(source if local else experiment_file),
        len(dataset),
        _columns(dataset),
    )


def fingerprint(dataset: Any) -> tuple[str, str]:
    """Return a digest of 16 characters, and how it was made."""
    ways: Sequence[Callable[[Any], tuple[Contents, str] | None]] = (_of_contents, _of_facts)
    for way in ways:
        found = None
        with contextlib.suppress(Exception):  # a user's class may do anything when it is looked at
            found = way(dataset)
        if found is not None:
            return hashlib.sha256(b"\0".join(found[0])).hexdigest()[:16], found[1]
    return hashlib.sha256(_kind(dataset)).hexdigest()[:16], "its type"


def innermost(dataset: Any) -> Any:
    """Return the data set that a part or a wrapper is of, where it is of one."""
    for _ in range(DEEPEST):
        inner = [value for _, value in _attributes(dataset) if isinstance(value, Dataset)]
        if isinstance(dataset, TensorDataset) or len(inner) != 1:
            break
        dataset = inner[0]
    return dataset


def _of_contents(dataset: Any) -> tuple[Contents, str] | None:
    seen: list[str] = []
    found = list(_contents(dataset, seen, 0))
    if not seen:
        return None
    return found, f"up to {ROWS} rows of {', '.join(dict.fromkeys(seen))}"[:200]


def _contents(dataset: Any, seen: list[str], depth: int) -> Iterator[bytes]:
    """Yield what the data set holds; the names of what was seen go to `seen`."""
    if depth > DEEPEST:
        return
    if isinstance(dataset, Subset):
        yield from (b"subset", _indices(dataset.indices))
        yield from _contents(dataset.dataset, seen, depth + 1)
        return
    if isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _contents(part, seen, depth + 1)
        return
    count = len(dataset)
    yield from (_kind(dataset), str(count).encode())
    for name, value in _attributes(dataset):
        if isinstance(value, Dataset):
            yield from _contents(value, seen, depth + 1)
        elif name == "tensors" and isinstance(dataset, TensorDataset):
            seen.append("its tensors")
            yield from (_packed(tensor) for tensor in value)
        elif _holds(value, count):
            seen.append(name)
            yield from (name.encode(), _packed(value))


def _attributes(dataset: Any) -> list[tuple[str, Any]]:
    return sorted(vars(dataset).items()) if hasattr(dataset, "__dict__") else []


def _holds(value: Any, count: int) -> bool:
    """Tell whether an attribute has an entry for each sample."""
    if isinstance(value, (Tensor, np.ndarray)):
        return (
            bool(value.ndim)
            and len(value) == count
            and not getattr(value.dtype, "hasobject", False)
        )
    return isinstance(value, (list, tuple)) and len(value) == count > 0 and _is_plain(value[0])


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= ROWS and all(map(_is_plain, value))
    return isinstance(value, (*PLAIN, Path, np.generic))


def _packed(values: Any) -> bytes:
    """Return the shape and evenly spaced rows of an array or a list, as bytes. Only what is returned is copied."""
    if isinstance(values, Tensor):
        picked = values.detach()[_places(values.shape, ROW_VALUES)].cpu().contiguous()
        return f"{values.dtype} {tuple(values.shape)}".encode() + bytes(
            picked.view(torch.uint8).numpy()
        )
    if isinstance(values, np.ndarray):
        gathered = values[
            _places(values.shape, MAPPED_VALUES if isinstance(values, np.memmap) else ROW_VALUES)
        ]
        return f"torch.{values.dtype} {values.shape}".encode() + bytes(gathered.tobytes())
    return repr((len(values), [_said(values[row]) for row in spaced(len(values), ROWS)])).encode()


def _places(shape: Sequence[int], most: int) -> tuple[Any, ...]:
    """Return an index of spaced rows' spaced values, `most` of each: a gather, however the array lies in memory."""
    rows, size = np.array(spaced(shape[0], ROWS), np.int64)[:, None], math.prod(shape[1:])
    steps = np.arange(0, size, max(1, -(-size // most)))
    columns = (
        np.unravel_index(steps, tuple(shape[1:]))
        if size and len(shape) > 1
        else [steps] * (len(shape) - 1)
    )
    return (rows, *columns)


def _indices(indices: Any) -> bytes:
    """Return evenly spaced ones of a subset's indices, the same for a list and a tensor."""
    places = spaced(len(indices), INDICES)
    arrays = isinstance(indices, (Tensor, np.ndarray))
    picked = indices[places].tolist() if arrays else [_said(indices[place]) for place in places]
    return repr((len(indices), picked)).encode()


def _said(value: Any) -> Any:
    """Return an entry of a list as it is on every machine: of a path, only its end."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_said, value))
    if isinstance(value, Path) or (isinstance(value, str) and "/" in value):
        return "/".join(Path(value).parts[-2:])
    return value.item() if isinstance(value, (np.generic, Tensor)) else value


def spaced(count: int, most: int) -> list[int]:
    """Return at most `most` of range(count), evenly spaced, both ends among them."""
    if count <= most:
        return list(range(count))
    return [number * (count - 1) // (most - 1) for number in range(most)]


def _of_facts(dataset: Any) -> tuple[Contents, str]:
    """Return what the data set's parts are, and the settings of the one that it is of in the end."""
    plain = [
        (name, _said(value))
        for name, value in _attributes(innermost(dataset))
        if name[:1] != "_" and isinstance(value, (str, int, float, bool, Path))
    ]
    facts = [
        (name, value.rpartition("/")[2] if isinstance(value, str) else value)
        for name, value in plain
    ]
    how = "its type, its length" + "".join(f", {name}" for name, _ in facts)
    return [*_contents(dataset, [], 0), repr(facts).encode()], how[:200]


def _kind(dataset: Any) -> bytes:
    return type(dataset).__qualname__.encode()


def _columns(dataset: Any) -> dict[str, str]:
    """Return what a sample is made of, by name, where it can be seen without reading one."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    pairs: list[tuple[str, Any]]
    if isinstance(dataset, TensorDataset):
        pairs = [(str(number), tensor) for number, tensor in enumerate(dataset.tensors)]
    else:
        arrays = [
            (name, value)
            for name, value in _attributes(dataset)
            if isinstance(value, (Tensor, np.ndarray))
        ]
        pairs = [(name, array) for name, array in arrays if _holds(array, len(dataset))]
    return {
        name: f"{str(array.dtype).removeprefix('torch.')}{list(array.shape[1:]) or ''}"
        for name, array in pairs
    }

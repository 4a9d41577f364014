"""What people log from loops of their own, as numbers. Imports no torch, and asks a device once for all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

NAN = float("nan")
SPREAD = "a DTensor, which all ranks must read together: log its full_tensor()"


def kept(value: Any) -> Any:
    """Return a tensor's own copy (the loop may overwrite it), a number as it is, of anything else what it is."""
    try:
        if hasattr(value, "full_tensor"):
            return SPREAD
        if hasattr(value, "is_complex") and value.is_complex():
            return "a complex number"
        if hasattr(value, "detach"):
            return (
                value.detach().clone()
                if value.numel() == 1
                else f"a tensor of shape {tuple(value.shape)}"
            )
        if hasattr(value, "__array__") and hasattr(value, "copy"):
            return (
                value.copy()
                if getattr(value, "size", 1) == 1
                else f"an array of shape {tuple(value.shape)}"
            )
        return (
            value if hasattr(value, "__float__") or hasattr(value, "__index__") else str(value)[:80]
        )
    except Exception as error:  # on a GPU that has failed, nothing can be copied: the loop will hear of that by itself
        return f"{type(error).__name__}: {error}"[:80]


def numbers(values: list[Any], failed: Callable[[str], None]) -> list[float]:
    """Return the values as floats, with one host sync for all PyTorch tensors of a device.

    Those that cannot be read, as of a device that does not answer, are NaN, and `failed` is told.
    """
    torch = sys.modules.get("torch")
    found: list[float] = [NAN] * len(values)
    groups: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        if torch is not None and isinstance(value, torch.Tensor):
            groups.setdefault(value.device, []).append(index)
        else:
            found[index] = number(value)
    for device, indices in groups.items():
        tensors = [values[index] for index in indices]
        try:
            column = _column(tensors)
        except Exception as error:
            failed(
                f"what cannot be read of what was logged on {device} is NaN: {type(error).__name__}: {error}"
            )
            column = [number(one) for one in tensors]
        for index, read in zip(indices, column, strict=True):
            found[index] = read
    return found


def _column(tensors: Iterable[Any]) -> list[float]:
    column: list[float] = (
        sys.modules["torch"].stack([one.reshape(()).double() for one in tensors]).tolist()
    )
    return column


def whole(value: Any) -> int | None:
    """Return the whole number that NumPy, PyTorch or a user means; None for anything else, or past MLflow's 64 bits."""
    read = number(value)
    if not read.is_integer() or abs(read) >= 2**63:
        return None
    return value if type(value) is int else int(read)


def number(value: Any) -> float:
    """Return the value as a float; NaN for what is none."""
    try:
        return (
            NAN if hasattr(value, "full_tensor") else float(value)
        )  # of such one, rank 0 would wait for the others
    except Exception:  # whatever a user's type raises: telemetry cannot kill a run
        return NAN

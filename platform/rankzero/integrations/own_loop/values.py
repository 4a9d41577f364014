"""Numbers out of what people log from their own loops. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rankzero.launch.failures import reason

T = TypeVar("T")
Tell = Callable[[str, str], None]
_NAN = float("nan")
_WRITTEN = dict[Any, set[Any]]()
"""The streams of each GPU on which values were copied that nobody has read yet. Not all streams:
one may wait for what another rank sends only after this one has logged."""
_SHARDED = "a DTensor, which all ranks must read together: log its full_tensor()"


def snapshot(value: Any) -> Any:
    """Return a copy of a single value, a number as it is, and a text for anything else.

    The loop may overwrite what it logged. The copy stays on its device, so nothing waits. On the
    CPU nothing would wait anyway: such a tensor is read at once, at half of a copy's cost.
    """
    if type(value) is float or type(value) is int:  # the usual ones, at a third of the cost
        return value
    try:
        if hasattr(value, "full_tensor"):
            return _SHARDED
        if hasattr(value, "is_complex") and value.is_complex():
            return "a complex number"
        if hasattr(value, "detach"):
            copied: Any = f"a tensor of shape {tuple(value.shape)}"
            if value.numel() == 1:
                copied = value.item() if value.is_cpu else value.detach().clone()
            if value.is_cuda:  # Only now: another thread that reads forgets what it has awaited.
                stream = sys.modules["torch"].cuda.current_stream(value.device)
                _WRITTEN.setdefault(value.device, set()).add(stream)
            return copied
        if hasattr(value, "__array__") and hasattr(value, "copy"):
            single = getattr(value, "size", 1) == 1
            return value.copy() if single else f"an array of shape {tuple(value.shape)}"
        # TensorFlow's variables change in place, and its tensors never. Both may be on a GPU.
        value = value.read_value() if hasattr(value, "read_value") else value
        is_number = hasattr(value, "__float__") or hasattr(value, "__index__")
        # A meter goes on counting, and so does a variable of Keras.
        never_changes = hasattr(value, "__array__") and not hasattr(value, "assign")
        number = value if never_changes or not is_number else float(value)
        return number if is_number else str(value)[:80]
    except Exception as error:  # A failed GPU copies nothing, and the loop will fail by itself.
        return reason(error)[:80]


def is_on_host(value: Any) -> bool:
    """Return whether a value of `snapshot` is surely in the host's memory."""
    is_plain = value is None or isinstance(value, (int, float, str))
    return is_plain or type(value).__module__ == "numpy"


def to_floats(values: list[Any], notice: Callable[[str], None]) -> list[float]:
    """Return the values as floats, with one host sync for all PyTorch tensors of a device.

    A value that cannot be read becomes NaN. If a device does not answer, `notice` gets the reason.
    """
    torch = sys.modules.get("torch")
    floats: list[float] = [_NAN] * len(values)
    by_device: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        if torch is not None and isinstance(value, torch.Tensor):
            by_device.setdefault(value.device, []).append(index)
        else:
            floats[index] = to_float(value)
    for device, indices in by_device.items():
        tensors = [values[index] for index in indices]
        try:
            assert torch is not None
            # The loop may have copied them on another stream than this thread reads on.
            for stream in tuple(streams := _WRITTEN.get(device, set())):
                streams.discard(stream)  # Another thread may add it at any time.
                stream.synchronize()
            column = torch.stack([t.reshape(()).double() for t in tensors]).tolist()
        except Exception as error:  # One odd tensor, or a failed device.
            notice(f"values logged on {device} that cannot be read are NaN: {reason(error)}")
            column = [to_float(tensor) for tensor in tensors]
        for index, value in zip(indices, column, strict=True):
            floats[index] = value
    return floats


def to_float(value: Any) -> float:
    """Return the value as a float, or NaN if it is not a number."""
    found = _read(value)
    return _NAN if found is None else found


def is_number(value: Any) -> bool:
    """Return whether `to_float` reads the value. A tensor of `snapshot` always counts as one."""
    # Reading it once more could wait for a GPU.
    is_tensor = hasattr(value, "detach")
    return is_tensor or (not isinstance(value, str) and _read(value) is not None)


def _read(value: Any) -> float | None:
    try:
        # Reading a DTensor is a collective: rank 0 would wait for the others.
        if hasattr(value, "full_tensor"):
            return _NAN
        # NumPy converts only arrays without dimensions.
        if getattr(value, "ndim", 0) and hasattr(value, "reshape"):
            value = value.reshape(())
        return float(value)
    except Exception:  # A user's type may raise anything.
        return None


def plain_value(value: Any) -> Any:
    """Return the numbers of an array or a tensor, and a text for anything else."""
    is_read = hasattr(value, "tolist") and not hasattr(value, "full_tensor")
    return value.tolist() if is_read and not isinstance(value, type) else str(value)


def pairs_of(entries: Any, kind: str, tell: Tell) -> list[tuple[Any, Any]]:
    """Return what a mapping has, and nothing for anything else, with a note. Raises nothing."""
    try:
        if hasattr(entries, "items"):
            return [(key, value) for key, value in entries.items()]
        why = "has none"
    except Exception as error:  # A user's type may raise anything.
        why = f"cannot give them: {reason(error)}"
    tell(kind, f"{kind}s have names, but {type(entries).__name__} {why}: not logged")
    return []


def read_pairs(
    pairs: Iterable[tuple[Any, Any]], read: Callable[[Any], T], kind: str, tell: Tell
) -> dict[str, T]:
    """Return the values by name, each as `read` returns it. Raises nothing.

    `tell` gets each one that cannot be read, and each name that several keys have.
    """
    found: dict[str, T] = {}
    for key, value in pairs:
        try:
            name, result = str(key), read(value)
        except Exception as error:  # A user's type may raise anything.
            lost = f"the {kind} {shown(key, str)}"
            tell(lost, f"{lost} is not logged: {reason(error)}")
            continue
        if name in found:
            tell(f"{kind} {name} keys", f"several keys are the {kind} {name}: the last counts")
        found[name] = result
    return found


def shown(value: Any, show: Callable[[Any], str] = repr) -> str:
    """Return the beginning of what `show` returns, or the value's type. Raises nothing."""
    try:
        return show(value)[:80]
    except Exception:  # A user's type may raise anything.
        return f"of type {type(value).__name__}"

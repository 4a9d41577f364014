"""Copies a training state to host memory, in buffers that all checkpoints share."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy
import torch
from torch import Tensor

from rankzero.errors import UserError
from rankzero.training.checkpoints.host_memory import HostMemory

_PATH = "rankzero.path"
"""The only key of the dict that is a path in a checkpoint."""
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
# A subclass, such as an enumeration, may have a `__str__` of its own.
_CONVERSIONS: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}


@dataclasses.dataclass(frozen=True)
class PendingCopy:
    """A state whose tensors may still be on their way to the host."""

    state: Any
    arrived: Sequence[torch.cuda.Event]
    """One for each GPU that holds a part of the state."""

    def wait(self) -> Any:
        """Return the state after all copies have arrived. The writer thread calls this."""
        for event in self.arrived:
            event.synchronize()
        return self.state


class HostCopier:
    """Copies states into host buffers.

    It copies GPU tensors into pinned buffers on the current stream of their GPU. So `copy` only
    enqueues, and later kernels of the stream cannot overwrite what is still being copied.
    """

    def __init__(self) -> None:
        # Buffers are kept because fresh memory would cost a page fault for every 4 KiB.
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._memory: HostMemory | None = None
        self._loadable: set[type] = {Tensor}

    def copy(self, state: Any) -> PendingCopy:
        """Return `state` with every tensor copied. The copy is valid until the next call.

        Raises UserError for a value that could not be loaded again.
        """
        gpus, used = set[torch.device](), dict[tuple[Any, ...], Tensor]()
        # CUDA refuses where the host is short of memory. This memory goes before each buffer is
        # allocated when it is needed.
        if self._memory is not None and not self._memory.lock():
            self._memory = None

        def copy_tensor(tensor: Tensor, path: tuple[Any, ...]) -> Tensor:
            source, buffer = tensor.detach(), self._buffers.get(path)
            on_gpu = source.device.type == "cuda"
            if on_gpu:
                gpus.add(source.device)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = self._new_buffer(source)
                # One of a class that wraps tensors. Each class is checked once: it may be large.
                if type(buffer) not in self._loadable:
                    _require_loadable(buffer, path)
                    self._loadable.add(type(buffer))
            used[path] = buffer
            return buffer.copy_(_plain_tensor(source), non_blocking=on_gpu)

        copied = _map_tensors(state, copy_tensor, ())
        self._buffers = used  # A key may change with each checkpoint.
        # An event on one GPU's stream does not wait for the copies of another GPU.
        return PendingCopy(copied, [torch.cuda.current_stream(gpu).record_event() for gpu in gpus])

    def prepare(self, size: int, is_hurried: Callable[[], bool], *, for_gpu: bool) -> None:
        """Make memory on the host ready for the first `copy`: `room_for` all of its tensors.

        Another thread may call it, but not during a `copy`. It ends early, after a piece, once
        `is_hurried` returns True.
        """
        memory = HostMemory(size, for_gpu=for_gpu)
        memory.touch(is_hurried)
        self._memory = memory

    def close(self) -> None:
        """Give page-locked memory back, once the last copy has arrived. The copy stays valid."""
        if self._memory is not None:
            self._memory.unlock()

    def _new_buffer(self, source: Tensor) -> Tensor:
        buffer = None if self._memory is None else self._memory.take(source)
        if buffer is not None:
            return buffer
        # CUDA refuses to lock pages where the host is short of them, and calls it "out of memory".
        # The launcher would halve the micro-batch. A copy into other memory is slower.
        on_gpu = source.device.type == "cuda"
        with contextlib.suppress(RuntimeError):
            return _plain_tensor(torch.empty_like(source, device="cpu", pin_memory=on_gpu))
        return _plain_tensor(torch.empty_like(source, device="cpu"))


def _plain_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor of a subclass, such as MONAI's, as a plain one.

    weights_only loading refuses other classes. One that wraps tensors stays as it is.
    """
    wraps = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor if wraps or type(tensor) is Tensor else tensor.as_subclass(Tensor)


def _map_tensors(
    value: Any, change: Callable[[Tensor, tuple[Any, ...]], Tensor], path: tuple[Any, ...]
) -> Any:
    if isinstance(value, Tensor):
        return change(value, path)
    if isinstance(value, dict):
        copied: dict[Any, Any] = {}
        for original, item in value.items():
            key = plain(original)
            _require_loadable(key, (*path, key))
            copied[key] = _map_tensors(item, change, (*path, key))
        versions = getattr(value, "_metadata", None)
        if isinstance(versions, dict):
            # That of a model. A module may refuse, or convert, a state without its version.
            copied = collections.OrderedDict(copied)
            vars(copied)["_metadata"] = _map_tensors(versions, change, (*path, "_metadata"))
        return copied
    if isinstance(value, (list, tuple)):
        items = [_map_tensors(item, change, (*path, index)) for index, item in enumerate(value)]
        # A named tuple becomes a plain one, because weights_only loading refuses its class.
        return items if isinstance(value, list) else tuple(items)
    # Not one of a library, such as "s3://…": this machine's paths have other texts.
    if isinstance(value, PurePath) and type(value).__module__.partition(".")[0] == "pathlib":
        return {_PATH: str(value)}
    value = plain(value)
    _require_loadable(value, path)
    return value


def with_paths(value: Any) -> Any:
    """Return a loaded state with its paths, which a checkpoint has as dicts."""
    if isinstance(value, dict):
        if [*value] == [_PATH] and isinstance(value[_PATH], str):
            return Path(value[_PATH])
        # A dict stays the same one, with the `_metadata` of a model.
        value.update([(key, with_paths(item)) for key, item in value.items()])
    elif type(value) in (list, tuple):
        return type(value)(map(with_paths, value))
    return value


def plain(value: Any) -> Any:
    """Return a number or text of NumPy, or of a subclass, as Python's own type.

    weights_only loading refuses the others. Any other value is returned as it is.
    """
    if isinstance(value, numpy.generic):
        value = value.item()
    if type(value) not in _PLAIN:
        for kind, convert in _CONVERSIONS.items():
            if isinstance(value, kind):
                return convert(value)
    return value


def _require_loadable(value: Any, path: tuple[Any, ...]) -> None:
    """Raise UserError if weights_only loading would refuse a checkpoint because of this value."""
    if type(value) in _PLAIN:
        return
    key, content = ".".join(map(str, path)), io.BytesIO()
    is_spread = isinstance(value, Tensor) and hasattr(value, "full_tensor")
    if is_spread and value.device_mesh.size() > 1:
        raise UserError(
            f"{key} is a DTensor, of which rank 0 would save its own part: gather it on every rank "
            "with get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), "
            "from torch.distributed.checkpoint.state_dict"
        )
    try:
        torch.save(value, content)
        torch.load(io.BytesIO(content.getbuffer()), weights_only=True)
    except Exception as error:  # pickling runs the value's own code
        raise UserError(
            f"{key} is a {type(value).__module__}.{type(value).__qualname__}, which could not be "
            "loaded again: make it a tensor, a number, a text, a path, or a list or dict of them"
        ) from error

"""Copies a training state to host memory, in buffers that all checkpoints share."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from rankzero.errors import UserError
from rankzero.training.checkpoints.pinned_memory import Kind, PinnedMemory

_PIECE_BYTES = 16 << 20
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
        self._spare: dict[Kind, list[Tensor]] = collections.defaultdict(list)
        self._pinned: PinnedMemory | None = None

    def copy(self, state: Any) -> PendingCopy:
        """Return `state` with every tensor copied. The copy is valid until the next call.

        Raises UserError for a value that could not be loaded again.
        """
        gpus: set[torch.device] = set()
        if self._pinned is not None and not self._pinned.is_locked:
            self._use_pinned_memory(self._pinned)

        def copy_tensor(tensor: Tensor, path: tuple[Any, ...]) -> Tensor:
            source, buffer = tensor.detach(), self._buffers.get(path)
            on_gpu = source.device.type == "cuda"
            if on_gpu:
                gpus.add(source.device)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                kind = kind_of(source)
                if kind is not None and self._spare[kind]:
                    buffer = self._spare[kind].pop()
                else:
                    buffer = _plain_tensor(_empty_on_host(source))
                self._buffers[path] = buffer
            return buffer.copy_(_plain_tensor(source), non_blocking=on_gpu)

        copied = _map_tensors(state, copy_tensor, ())
        self._spare.clear()
        # An event on one GPU's stream does not wait for the copies of another GPU.
        return PendingCopy(copied, [torch.cuda.current_stream(gpu).record_event() for gpu in gpus])

    def prepare(self, kinds: Iterable[Kind], is_hurried: Callable[[], bool]) -> None:
        """Make buffers on the host for the first `copy`, and touch their memory.

        Another thread may call it, but not during a `copy`. It ends early, after a piece, once
        `is_hurried` returns True.
        """
        on_host, on_gpu = list[Kind](), list[Kind]()
        for kind in kinds:
            (on_gpu if kind.device == "cuda" else on_host).append(kind)
        if on_gpu:
            memory = PinnedMemory(on_gpu)
            memory.touch(is_hurried)
            self._pinned = memory
        for kind in on_host:
            buffer = torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype)
            self._spare[kind].append(buffer)
            for start in range(0, buffer.nbytes, _PIECE_BYTES):
                if is_hurried():
                    return
                size = min(_PIECE_BYTES, buffer.nbytes - start)
                # Without Python's lock, and without PyTorch's threads, which the training needs.
                ctypes.memset(buffer.data_ptr() + start, 0, size)

    def close(self) -> None:
        """Give page-locked memory back, once the last copy has arrived. The copy stays valid."""
        if self._pinned is not None:
            self._pinned.unlock()
            self._pinned = None

    def _use_pinned_memory(self, memory: PinnedMemory) -> None:
        if memory.lock():
            for kind, buffer in zip(memory.kinds, memory.tensors(), strict=True):
                self._spare[kind].append(buffer)
        else:
            # CUDA refuses where the host is short of memory. This memory goes before each buffer is
            # allocated when it is needed.
            self._pinned = None


def _empty_on_host(source: Tensor) -> Tensor:
    # CUDA refuses to lock pages where the host is short of them, and calls it "out of memory". The
    # launcher would halve the micro-batch. A copy into other memory is slower.
    with contextlib.suppress(RuntimeError):
        return torch.empty_like(source, device="cpu", pin_memory=source.device.type == "cuda")
    return torch.empty_like(source, device="cpu")


def _plain_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor of a subclass, such as MONAI's, as a plain one.

    weights_only loading refuses other classes. One that wraps tensors stays as it is.
    """
    wraps = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor if wraps or type(tensor) is Tensor else tensor.as_subclass(Tensor)


def kind_of(tensor: Tensor) -> Kind | None:
    """Return the kind of a tensor without gaps, on the host or a GPU, or None for any other."""
    where = tensor.device.type
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and where in ("cpu", "cuda")
    if not is_plain or tensor.layout is not torch.strided:
        return None
    formats = (torch.contiguous_format, *((torch.channels_last,) if tensor.dim() == 4 else ()))
    if not any(tensor.is_contiguous(memory_format=one) for one in formats):
        return None
    return Kind(tensor.shape, tensor.stride(), tensor.dtype, where)


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
    value = plain(value)
    _require_loadable(value, path)
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
    content = io.BytesIO()
    try:
        torch.save(value, content)
        torch.load(io.BytesIO(content.getbuffer()), weights_only=True)
    except Exception as error:  # pickling runs the value's own code
        key = ".".join(map(str, path))
        raise UserError(
            f"{key} is a {type(value).__module__}.{type(value).__qualname__}, which could not be "
            "loaded again: make it a tensor, a number, a text, or a list or dict of them"
        ) from error

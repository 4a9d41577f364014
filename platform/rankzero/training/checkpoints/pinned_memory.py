"""Page-locked memory for the copies of a GPU's tensors, made ready in two parts.

CUDA's own allocation of 1.5 GB takes 0.9 s (H100), most of it to get fresh pages. Here a thread
touches the pages, and CUDA locks them at the first copy. CUDA must not lock them in the thread:
that would break a CUDA graph which the training captures meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_PIECE_BYTES = 16 << 20
_ALIGNMENT = 256


class Kind(NamedTuple):
    """The properties that a buffer shares with the tensor that is copied to it. No gaps."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    """The type of the tensor's device; the buffer is on the host."""


class PinnedMemory:
    """Memory on the host for tensors of these kinds."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.kinds = kinds
        sizes = [math.prod(kind.shape) * kind.dtype.itemsize for kind in kinds]
        self._offsets, end = list[int](), 0
        for size in sizes:
            self._offsets.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._memory = mmap.mmap(-1, max(end, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Fewer page faults; and a loading process must not copy what the GPU writes to.
        for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(AttributeError, OSError):
                self._memory.madvise(getattr(mmap, name))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.is_locked = False

    def touch(self, is_hurried: Callable[[], bool]) -> None:
        """Touch the pages. Any thread may call it. Ends after a piece once `is_hurried`."""
        for start in range(0, len(self._memory), _PIECE_BYTES):
            if is_hurried():
                return
            size = min(_PIECE_BYTES, len(self._memory) - start)
            # Without Python's lock, and without PyTorch's threads, which the training needs.
            ctypes.memset(self._address + start, 0, size)

    def lock(self) -> bool:
        """Lock the pages for CUDA. Return whether that worked. Not during a graph's capture."""
        status = torch.cuda.cudart().cudaHostRegister(self._address, len(self._memory), 0)
        self.is_locked = int(status) == 0
        if not self.is_locked:
            # The next kernel would report this error as its own.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
        return self.is_locked

    def unlock(self) -> None:
        """Undo `lock`, once the GPU has written what was copied. Tensors stay valid."""
        if self.is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._address)
        self.is_locked = False

    def tensors(self) -> Iterator[Tensor]:
        """Yield a tensor in this memory for each kind, in order. Each has a storage of its own."""
        for (shape, stride, dtype, _), offset in zip(self.kinds, self._offsets, strict=True):
            count = math.prod(shape)
            if not count:
                yield torch.empty_strided(shape, stride, dtype=dtype)
                continue
            flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
            yield flat.as_strided(shape, stride)

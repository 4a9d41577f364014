"""Memory on the host for the first copies of a training's tensors, made ready in two parts.

CUDA's own allocation of 1.5 GB takes 0.9 s (H100), most of it to get fresh pages. Here a thread
touches the pages, and CUDA locks them at the first copy. CUDA must not lock them in the thread:
that would break a CUDA graph which the training captures meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

_PIECE_BYTES = 16 << 20
_ALIGNMENT = 256


class HostMemory:
    """Memory for copies of tensors, page-locked if some of these are on a GPU."""

    def __init__(self, size: int, *, for_gpu: bool) -> None:
        self._memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A loading process must not copy what is written here. The kernel may need long for huge
        # pages, which have fewer faults, so only the state of a GPU gets them.
        for name in ("MADV_DONTFORK", *(("MADV_HUGEPAGE",) if for_gpu else ())):
            with contextlib.suppress(AttributeError, OSError):
                self._memory.madvise(getattr(mmap, name))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._for_gpu, self._is_locked = for_gpu, False
        self._taken = 0

    def touch(self, is_hurried: Callable[[], bool]) -> None:
        """Touch the pages. Any thread may call it. Ends after a piece once `is_hurried`."""
        for start in range(0, len(self._memory), _PIECE_BYTES):
            if is_hurried():
                return
            size = min(_PIECE_BYTES, len(self._memory) - start)
            # Without Python's lock, and without PyTorch's threads, which the training needs.
            ctypes.memset(self._address + start, 0, size)

    def lock(self) -> bool:
        """Lock the pages for CUDA if a GPU needs it. Return False if CUDA refuses.

        Not during a graph's capture.
        """
        if self._is_locked or not self._for_gpu:
            return True
        status = torch.cuda.cudart().cudaHostRegister(self._address, len(self._memory), 0)
        self._is_locked = int(status) == 0
        if not self._is_locked:
            # The next kernel would report this error as its own.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
        return self._is_locked

    def unlock(self) -> None:
        """Undo `lock`, once the GPU has written what was copied. Tensors stay valid."""
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._address)
        self._is_locked = False

    def take(self, source: Tensor) -> Tensor | None:
        """Return a tensor of the form of `source` in memory that no other has, or None.

        It has a storage of its own.
        """
        size, count, start = room_for(source), source.numel(), self._taken
        if not size or start + size > len(self._memory):
            return None
        self._taken += size
        flat = torch.frombuffer(self._memory, dtype=source.dtype, count=count, offset=start)
        return flat.as_strided(source.shape, source.stride())


def room_for(source: Tensor) -> int:
    """Return the bytes that `HostMemory.take` needs: 0 for a tensor with gaps, or of a subclass."""
    is_plain = type(source) in (Tensor, torch.nn.Parameter) and source.layout is torch.strided
    if not is_plain or source.device.type not in ("cpu", "cuda"):
        return 0
    formats = (torch.contiguous_format, *((torch.channels_last,) if source.dim() == 4 else ()))
    if not any(source.is_contiguous(memory_format=one) for one in formats):
        return 0
    return -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT

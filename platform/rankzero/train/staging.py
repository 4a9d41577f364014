"""Copies of a state on the host, in buffers that are kept: what a checkpoint costs the training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Staged:
    """A state on its way to the host."""

    state: Any
    arrived: torch.cuda.Event | None

    def wait(self) -> Any:
        """Return the state once every copy has arrived; for the writer thread."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.state


class Staging:
    """Host buffers, reused from copy to copy: fresh memory would cost a page fault every 4 KiB.

    GPU tensors are copied into pinned buffers on the current stream: the call only enqueues,
    and later kernels of the stream cannot overwrite what is still being copied.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._on_gpu = False

    def copy(self, state: Any) -> Staged:
        """Return `state` with every tensor copied. The copy is valid until the next call."""
        self._on_gpu = False
        copied = _map_tensors(state, self._copy, ())
        arrived = None
        if self._on_gpu:
            arrived = torch.cuda.Event()
            arrived.record()
        return Staged(copied, arrived)

    def _copy(self, tensor: Tensor, path: tuple[Any, ...]) -> Tensor:
        source = tensor.detach()
        on_gpu = source.device.type == "cuda"
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty_like(source, device="cpu", pin_memory=on_gpu)
            self._buffers[path] = buffer
        self._on_gpu |= on_gpu
        return buffer.copy_(source, non_blocking=on_gpu)


def _map_tensors(value: Any, change: Callable[[Tensor, tuple[Any, ...]], Tensor], path: tuple[Any, ...]) -> Any:
    if isinstance(value, Tensor):
        return change(value, path)
    if isinstance(value, dict):
        return {key: _map_tensors(item, change, (*path, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(item, change, (*path, index)) for index, item in enumerate(value))
    return value

"""Copies of a state on the host, in buffers that are kept: what a checkpoint costs the training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class PendingCopy:
    """A state on its way to the host."""

    state: Any
    arrived: Sequence[torch.cuda.Event]
    """One for each GPU that has a part of the state."""

    def wait(self) -> Any:
        """Return the state once every copy has arrived; for the writer thread."""
        for event in self.arrived:
            event.synchronize()
        return self.state


class HostCopier:
    """Host buffers, reused from copy to copy: fresh memory would cost a page fault every 4 KiB.

    GPU tensors are copied into pinned buffers on the current stream of their GPU: the call only
    enqueues, and later kernels of the stream cannot overwrite what is still being copied.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._gpus: set[torch.device] = set()

    def copy(self, state: Any) -> PendingCopy:
        """Return `state` with every tensor copied. The copy is valid until the next call."""
        self._gpus = set()
        copied = _map_tensors(state, self._copy, ())
        return PendingCopy(copied, recorded(self._gpus))

    def _copy(self, tensor: Tensor, path: tuple[Any, ...]) -> Tensor:
        source = tensor.detach()
        on_gpu = source.device.type == "cuda"
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty_like(source, device="cpu", pin_memory=on_gpu)
            self._buffers[path] = buffer
        if on_gpu:
            self._gpus.add(source.device)
        return buffer.copy_(source, non_blocking=on_gpu)


def recorded(gpus: Iterable[torch.device]) -> list[torch.cuda.Event]:
    """Return an event for each GPU, behind what its current stream was given: one says nothing of another GPU's."""
    events = []
    for gpu in gpus:
        with torch.cuda.device(gpu):
            events.append(torch.cuda.Event())
            events[-1].record(torch.cuda.current_stream(gpu))
    return events


def _map_tensors(
    value: Any, change: Callable[[Tensor, tuple[Any, ...]], Tensor], path: tuple[Any, ...]
) -> Any:
    if isinstance(value, Tensor):
        return change(value, path)
    if isinstance(value, dict):
        return {key: _map_tensors(item, change, (*path, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_map_tensors(item, change, (*path, index)) for index, item in enumerate(value)]
        return (
            items if isinstance(value, list) else tuple(items)
        )  # a named one could not be loaded as plain values
    return value

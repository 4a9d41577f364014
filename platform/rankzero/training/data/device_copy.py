"""Copies of batches to a GPU that run while the GPU still computes the step before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rankzero.training.data.batch import to_device

# Below this, the events cost the host more than the GPU waits for the copy.
STAGED_BYTES = 1 << 20


class DeviceCopier:
    """Copies batches to `device`, in the order of the steps. One thread may use it.

    A copy on the stream of the kernels would begin after the kernels of all steps before. So a
    large tensor is copied on a stream of its own to a stage on the GPU, and from there by the
    stream of the kernels, at the speed of the GPU's memory. The stages take the memory of one
    batch, however far the host is ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._stages: list[Tensor] = []
        self._is_free: torch.cuda.Event | None = None
        """The stream of the kernels has taken the last batch from the stages."""

    def __call__(self, batch: Any) -> Any:
        """Return `batch` with its tensors on the device, for the device's current stream."""
        copies = self._copies
        if copies is None:
            return to_device(batch, self._device)
        kernels, count = torch.cuda.current_stream(self._device), 0

        def copy(tensor: Tensor) -> Tensor:
            nonlocal count
            if not is_staged(tensor):
                return tensor.to(self._device, non_blocking=True)
            count += 1
            stage = self._stage(count - 1, tensor, kernels, copies)
            with torch.cuda.stream(copies):
                stage.copy_(tensor, non_blocking=True)
            kernels.wait_stream(copies)
            return stage.clone()

        if self._is_free is not None:
            copies.wait_event(self._is_free)
        moved = to_device(batch, self._device, copy)
        if count:
            # Not earlier: a GPU copies one after the other, and this step's kernels would wait
            # with this batch's small tensors for the next batch's large ones.
            self._is_free = kernels.record_event()
        return moved

    def _stage(self, index: int, tensor: Tensor, kernels: Any, copies: Any) -> Tensor:
        """Return memory for `tensor` on the device, which `copies` may write to."""
        if index == len(self._stages):
            self._stages.append(torch.empty(0, dtype=torch.uint8, device=self._device))
        if self._stages[index].nbytes < tensor.nbytes:
            self._stages[index] = torch.empty(tensor.nbytes, dtype=torch.uint8, device=self._device)
            # Kernels may still use what was in this memory before.
            copies.wait_stream(kernels)
        return self._stages[index][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def is_staged(tensor: Tensor) -> bool:
    """Return whether a copy of the tensor's bytes is a copy of the tensor, and takes long."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.nbytes >= STAGED_BYTES
        and not tensor.requires_grad
        and tensor.is_contiguous()
        # The host waits for a copy from other memory, in any case.
        and tensor.is_pinned()
    )

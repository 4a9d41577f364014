"""Copies of metrics whose memory is written again, such as a parameter's, or is a part of much."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor, nn

_LARGE = 1 << 16  # bytes; a window of a thousand steps may keep as much of each metric


def is_part_of_much(value: Tensor) -> bool:
    """Return whether a tensor keeps much more memory than its own, as `logits[0, 0]` does."""
    # A sparse tensor is never a view.
    is_strided = value.layout is torch.strided
    return is_strided and value.untyped_storage().nbytes() > max(_LARGE, value.nbytes)


class MetricCopies:
    """Copies what `measure` returned where a later step writes into the same memory.

    The first step decides which metrics these are. Without any, `are_due` is False from then on.
    """

    def __init__(self) -> None:
        self.are_due = True
        self._names: Set[str] | None = None

    def of(self, metrics: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Return the metrics of a step of `model`, some of them copied."""
        if self._names is None:
            self._names = _overwritten(metrics, model)
            self.are_due = bool(self._names)
        return {
            name: value.clone() if name in self._names else value for name, value in metrics.items()
        }


def _overwritten(metrics: Mapping[str, Tensor], model: nn.Module) -> Set[str]:
    """Return the metrics that are parameters, buffers, or tensors that were written in place."""
    own = {_address(one) for one in (*model.parameters(), *model.buffers())} - {0}
    return {
        name
        for name, value in metrics.items()
        if value.is_inference() or value._version or _address(value) in own
    }


def _address(tensor: Tensor) -> int:
    """Return where a tensor's memory begins, or 0 if it has none: a sparse one, for example."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    try:
        return local.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):
        return 0

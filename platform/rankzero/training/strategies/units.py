"""The units of a model: parts that are gathered, compiled or recomputed one at a time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from rankzero.errors import UserError


def units(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the items of the outermost `nn.Sequential`s and `nn.ModuleList`s with parameters."""
    has_items = isinstance(model, (nn.Sequential, nn.ModuleList))
    for child in model.children():
        # Nobody calls a list within a list, only its items.
        if not has_items or type(child).forward is nn.Module.forward:
            yield from units(child)
        elif any(True for _ in child.parameters()):
            yield child


def recompute(model: nn.Module, *, compiled: bool) -> None:
    """Let each unit keep its inputs only, and compute the rest again during the backward.

    The names of the model's weights stay. Raises UserError for a model without units.
    """
    parts = list(units(model))
    if not parts:
        raise UserError(
            "train.recompute works on the items of nn.Sequential and nn.ModuleList, and the model "
            "has none: put its layers into one, or set train.recompute=false"
        )
    for part in parts:
        # A compiled forward repeats no change of a buffer, and takes no such context.
        has_buffers = not compiled and any(True for _ in part.buffers())
        contexts = {"context_fn": functools.partial(_contexts, part)} if has_buffers else {}
        # Not a function that closes over `part`: a deep copy of the model would call the original.
        part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False, **contexts)


def _contexts(part: nn.Module) -> tuple[Any, Any]:
    return contextlib.nullcontext(), _kept_buffers(part)


@contextlib.contextmanager
def _kept_buffers(part: nn.Module) -> Iterator[None]:
    """Set the buffers back, so that running statistics count each batch once."""
    before = [(buffer, buffer.clone()) for buffer in part.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            # `data`: otherwise autograd refuses the buffers that a normalization has saved.
            buffer.data.copy_(value)

"""How many parameters a model has, as tags of its run."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import is_lazy

# A tag has room for some thousand characters.
_MOST_MODULES = 50


def tags(model: nn.Module) -> dict[str, str]:
    """Return the number of all, of the trainable, and of each top-level module's parameters."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    children = list(model.named_children())
    modules = {name: _count(child.parameters()) for name, child in children[:_MOST_MODULES]}
    if own := _count(model.parameters(recurse=False)):
        modules["(model)"] = own
    if rest := children[_MOST_MODULES:]:
        modules[f"({len(rest)} more)"] = sum(_count(child.parameters()) for _, child in rest)
    shown = ", ".join(f"{name}: {count:,}" for name, count in modules.items() if count)
    return {
        "rankzero.parameters": str(_count(model.parameters())),
        "rankzero.parameters.trainable": str(_count(trainable)),
        "rankzero.parameters.by_module": shown,
    }


def _count(parameters: Iterable[nn.Parameter]) -> int:
    # A lazy parameter gets its size in the first forward.
    return sum(parameter.numel() for parameter in parameters if not is_lazy(parameter))

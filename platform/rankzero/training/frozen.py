"""What is not trained: the experiment's helpers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from rankzero.errors import UserError
from rankzero.experiment import Experiment


def helpers(experiment: Experiment, device: torch.device) -> Mapping[str, nn.Module]:
    """Return the experiment's helpers on `device`, in evaluation mode and without gradients."""
    found = dict(experiment.helpers())
    for name, module in found.items():
        if not isinstance(module, nn.Module):
            raise UserError(
                f"helpers() must return {{name: torch.nn.Module}}, but {name!r} is a "
                f"{type(module).__name__}"
            )
        module.to(device).eval().requires_grad_(False)
    return MappingProxyType(found)

"""`Ratio`: a metric that is a sum divided by a sum, such as a loss per token.

def measure(self, model, batch):
    …
    return {"loss": Ratio(losses[mask].sum(), mask.sum())}
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Ratio:
    """A value of `measure`: both parts are added over batches and ranks, and divided once.

    The numerator is a tensor, 0-d or 1-d. The denominator is a tensor of the same shape, a 0-d
    tensor or a number. The value of vectors is the mean of the quotients, without those whose
    denominator is 0: the mean IoU of classes, for example.
    """

    numerator: Any
    denominator: Any

    def detach(self) -> Any:
        """Return numerator and denominator as one tensor, [2] or [2, n], without a gradient."""
        import torch

        numerator, denominator = self.numerator.detach().float(), self.denominator
        if not isinstance(denominator, torch.Tensor):
            # A copy from the host would wait for the device, `full_like` does not.
            denominator = torch.full_like(numerator, denominator)
        return torch.stack([numerator, denominator.detach().float().expand_as(numerator)])

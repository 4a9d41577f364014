"""The digits with noise, for the recorded table. The noise makes a run need many epochs.

The goal is the validation loss, because it falls smoothly. An accuracy on 360 images jumps, and the
time to a target accuracy would jump, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rankzero import Goal, Train

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

from digits import Digits

NOISE = 0.5  # standard deviation. A pixel is between 0 and 1.


class NoisyDigits(Digits):
    train: Train = Train(epochs=12, batch_size=32, schedule="constant")
    lr: float = 1e-3
    goal: Goal = Goal("val/loss", "min", target=0.3)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        if model.training:
            images = images + NOISE * torch.randn_like(images)
        return {"loss": cross_entropy(model(images), labels)}

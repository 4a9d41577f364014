"""Segmentation: a U-Net finds discs, squares and stripes in noise. Its result is the mean IoU.

rankzero train experiments/unet.py
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import TensorDataset

from rankzero import Choice, Experiment, Goal, Ratio, Train

SIDE, CLASSES = 24, 4  # Class 0 is the background.


def shapes(count: int, seed: int) -> TensorDataset:
    """Return noisy images [count, 1, SIDE, SIDE] and the class of each pixel."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    masks = torch.zeros(count, SIDE, SIDE, dtype=torch.long)
    for mask in masks:
        for kind in range(1, CLASSES):
            left, top = torch.randint(6, SIDE - 6, (2,), generator=generator)
            size = torch.randint(3, 7, (), generator=generator)
            across, down = (x - left).abs(), (y - top).abs()
            disc = across**2 + down**2 <= size**2
            square = (across < size) & (down < size)
            stripe = (across < 2) & (down < 2 * size)
            mask[[disc, square, stripe][kind - 1]] = kind
    noise = torch.randn(count, 1, SIDE, SIDE, generator=generator)
    return TensorDataset((masks > 0).float().unsqueeze(1) + 0.5 * noise, masks)


def double(inputs: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Two steps down, two steps up, and a short cut from each step down to its step up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2 = double(1, width), double(width, 2 * width)
        self.bottom = double(2 * width, 4 * width)
        self.up2, self.up1 = double(6 * width, 2 * width), double(3 * width, width)
        self.smaller, self.larger = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        full = self.down1(images)
        half = self.down2(self.smaller(full))
        quarter = self.bottom(self.smaller(half))
        half = self.up2(torch.cat([half, self.larger(quarter)], 1))
        return self.head(self.up1(torch.cat([full, self.larger(half)], 1)))


class Shapes(Experiment):
    train: Train = Train(epochs=8, batch_size=16, schedule="one_cycle")
    lr: float = 1e-2
    width: int = 8
    samples: int = 480
    goal = Goal("val/iou", "max", target=0.7)
    search = {"width": Choice(4, 8, 16)}

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return shapes(self.samples, seed=1), shapes(self.samples // 4, seed=2)

    def model(self) -> nn.Module:
        return UNet(self.width)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        images, masks = batch
        logits = model(images)
        guess, truth = (one_hot(one, CLASSES).bool() for one in (logits.argmax(1), masks))
        # One number for each class: RankZero adds them over all images, and divides at the end.
        both, either = ((guess & truth).sum((0, 1, 2)), (guess | truth).sum((0, 1, 2)))
        return {"loss": cross_entropy(logits, masks), "iou": Ratio(both, either)}

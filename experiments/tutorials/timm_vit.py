"""A vision transformer with the recipe of timm: MixUp, CutMix, random erasing, averaged weights.

From huggingface/pytorch-image-models, train.py (aa4b585, 2026-08-08, Apache-2.0), in own words,
with the options of a usual recipe for vision transformers. Data: scikit-learn's digits.

rankzero train experiments/tutorials/timm_vit.py
"""

from collections.abc import Sequence
from typing import Any

from digit_images import digits
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset, default_collate
from torchvision.models import VisionTransformer
from torchvision.transforms import v2

from rankzero import Choice, Experiment, Goal, Train

SIDE, CLASSES = 32, 10
AUGMENT = v2.Compose([v2.RandomAffine(10, (0.1, 0.1), (0.9, 1.1)), v2.RandomErasing(0.25)])


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.data[index]
        return AUGMENT(image), label


class TimmVit(Experiment):
    train: Train = Train(
        epochs=100,
        batch_size=128,
        schedule="cosine",
        warmup_steps=55,  # Five epochs.
        clip=1.0,
        ema=0.999,
    )
    lr: float = 1e-3
    weight_decay: float = 0.05
    smoothing: float = 0.1
    mixup: float = 0.8
    cutmix: float = 1.0
    width: int = 96
    layers: int = 4
    goal = Goal("val/accuracy", "max")
    search = {"width": Choice(48, 96, 192)}

    def data(self) -> tuple[Augmented, TensorDataset]:
        train, val = digits(SIDE)
        return Augmented(train), val

    def collate(self, samples: Sequence[Any], training: bool) -> tuple[Tensor, Tensor]:
        images, labels = default_collate(samples)
        images = images.expand(-1, 3, -1, -1)
        if not training:
            return images, labels
        mixes = (
            v2.MixUp(alpha=self.mixup, num_classes=CLASSES),
            v2.CutMix(alpha=self.cutmix, num_classes=CLASSES),
        )
        return v2.RandomChoice(mixes)(images, labels)

    def model(self) -> nn.Module:
        heads = self.width // 32 or 1
        model = VisionTransformer(
            SIDE, 8, self.layers, heads, self.width, 4 * self.width, num_classes=CLASSES
        )
        # torchvision begins with a head of zeros, timm does not.
        nn.init.trunc_normal_(model.heads.head.weight, std=0.02)
        return model

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        """Return AdamW that decays matrices only."""
        names = dict(model.named_parameters())
        exempt = ("class_token", "encoder.pos_embedding")
        decayed = [p for name, p in names.items() if p.ndim > 1 and name not in exempt]
        rest = [p for name, p in names.items() if p.ndim <= 1 or name in exempt]
        groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0, "name": "rest"}]
        return optim.AdamW(groups, self.lr, weight_decay=self.weight_decay)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(2 * images - 1)
        if model.training:  # The labels are mixed.
            return {"loss": cross_entropy(logits, labels, label_smoothing=self.smoothing)}
        accuracy = (logits.argmax(-1) == labels).float().mean()
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy}

"""CIFAR-10 with a ResNet-18 for 32x32 images.

rankzero train experiments/cifar10.py
rankzero train experiments/cifar10.py data=fake      # noise instead of a download, for speed work
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torchvision.datasets import CIFAR10, FakeData
from torchvision.models import resnet18
from torchvision.transforms import v2
from vision_data import downloaded

from rankzero import Experiment, Goal, LogUniform, Train

# Mean and standard deviation of each channel of the training set.
MEAN, SPREAD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
SHAPE = (3, 32, 32)

AS_TENSOR = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, SPREAD)]
AUGMENT = v2.Compose(
    [v2.RandomCrop(32, padding=4, padding_mode="reflect"), v2.RandomHorizontalFlip(), *AS_TENSOR]
)
PLAIN = v2.Compose(AS_TENSOR)


class Cifar10(Experiment):
    train: Train = Train(epochs=30, batch_size=512, schedule="one_cycle", clip=5.0)
    lr: float = 0.4
    momentum: float = 0.9
    weight_decay: float = 5e-4
    label_smoothing: float = 0.1
    data_: Literal["real", "fake"] = "real"
    fake_samples: int = 2048
    goal = Goal("val/accuracy", "max", target=0.94)
    search = {"weight_decay": LogUniform(1e-4, 2e-3)}

    def data(self) -> tuple[Any, Any]:
        if self.data_ == "fake":
            return (
                FakeData(self.fake_samples, SHAPE, 10, AUGMENT),
                FakeData(self.fake_samples // 8, SHAPE, 10, PLAIN),
            )
        return downloaded(CIFAR10, train=True, transform=AUGMENT), downloaded(
            CIFAR10, train=False, transform=PLAIN
        )

    def model(self) -> nn.Module:
        """Return torchvision's ResNet-18 with a stem for small images."""
        model = resnet18(num_classes=10)
        # The original stem is for 224 x 224 images: it would leave 8 x 8 pixels of these.
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
        # Tensor cores compute convolutions faster with the channels last.
        return model.to(memory_format=torch.channels_last)

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.SGD(
            model.parameters(),
            self.lr,
            self.momentum,
            weight_decay=self.weight_decay,
            nesterov=True,
        )

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(images.contiguous(memory_format=torch.channels_last))
        # Validation measures the plain loss, so that runs with another smoothing can be compared.
        smoothing = self.label_smoothing if model.training else 0.0
        return {
            "loss": cross_entropy(logits, labels, label_smoothing=smoothing),
            "accuracy": (logits.argmax(-1) == labels).float().mean(),
        }

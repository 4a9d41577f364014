"""Experiments of the benchmarks: the same data, model and order, tracked and bare."""

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

from rankzero import Experiment, Goal, Train


def noise(samples: int, *shape: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, *shape, generator=generator),
        torch.randint(10, (samples,), generator=generator),
    )


class Workload(Experiment):
    lr: float = 0.01
    goal = Goal("val/loss", "min")

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), self.lr, momentum=0.9, fused=True)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": cross_entropy(model(x), y)}


class Mlp(Workload):
    """An MLP of 64-128-10 at a global batch of 64. A step is nearly all overhead."""

    train: Train = Train(batch_size=64)

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return noise(6400, 64), noise(64, 64)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Convnet(Workload):
    """A small convnet on 32x32 images, with about 15 ms of arithmetic a step."""

    train: Train = Train(batch_size=64)

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return noise(1280, 3, 32, 32), noise(64, 3, 32, 32)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, 10),
        )


class Wide(Convnet):
    """A convnet that is bound by arithmetic, with about 100 ms a step on one core."""

    train: Train = Train(batch_size=128)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(1024, 10),
        )


class Crops(Dataset[tuple[Tensor, Tensor]]):
    """Images, each cropped and flipped at random when it is loaded."""

    def __init__(self) -> None:
        self._images, self._labels = noise(1280, 3, 32, 32).tensors

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        top, left, flips = torch.randint(0, 9, (3,)).tolist()
        image = pad(self._images[index], (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
        return image.flip(-1) if flips % 2 else image, self._labels[index]


class Augmented(Convnet):
    """The convnet over a map-style data set with augmentation."""

    def data(self) -> tuple[Any, Any]:
        return Crops(), noise(64, 3, 32, 32)


class CausalModel(nn.Module):
    """Two transformer layers of width 64 over 256 symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 256)

    def forward(self, symbols: Tensor) -> Tensor:
        """Return the logits of each next symbol: (batch, length, 256)."""
        mask = nn.Transformer.generate_square_subsequent_mask(symbols.shape[1])
        logits: Tensor = self.head(self.layers(self.embedding(symbols), mask=mask, is_causal=True))
        return logits


class LanguageModel(Workload):
    """A small language model over 64 symbols a sample, in memory."""

    train: Train = Train(batch_size=32)

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        generator = torch.Generator().manual_seed(0)
        texts = torch.randint(256, (1024, 65), generator=generator)
        return TensorDataset(texts), TensorDataset(texts[:32])

    def model(self) -> nn.Module:
        return CausalModel()

    def measure(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        (texts,) = batch
        logits = model(texts[:, :-1])
        return {"loss": cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())}


class Zero1(LanguageModel):
    """The language model under AdamW, whose state the ranks divide."""

    train: Train = Train(batch_size=32, strategy="zero1")

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.AdamW(model.parameters(), self.lr, fused=True)


class Fsdp(Zero1):
    """The same, with weights and gradients divided, too."""

    train: Train = Train(batch_size=32, strategy="fsdp")


class Pipelined(Convnet):
    """The convnet, half of its layers on each rank."""

    train: Train = Train(batch_size=64, strategy="pp")

    def split_points(self) -> list[str]:
        return ["3"]


class Sentences(Dataset[Tensor]):
    """Sentences of 8 to 64 symbols."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(8, 65, (count,), generator=generator).tolist()
        self._texts = [torch.randint(1, 256, (one,), generator=generator) for one in lengths]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Tensor:
        return self._texts[index]


class Lengths(LanguageModel):
    """The language model over sentences of different lengths, padded by `collate`."""

    def data(self) -> tuple[Any, Any]:
        return Sentences(1024), Sentences(32)

    def collate(self, samples: list[Tensor]) -> list[Tensor]:
        return [pad_sequence(samples, batch_first=True)]


class ManyMetrics(Mlp):
    """The MLP with `count` metrics a step."""

    count: int = 1

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        loss = cross_entropy(model(x), y)
        return {"loss": loss} | {f"metric_{one}": loss.detach() for one in range(1, self.count)}

"""The first example of PyTorch: a convnet on handwritten digits, with Adadelta and StepLR.

From pytorch/examples, mnist/main.py (77f55b9, 2025-08-25, BSD-3-Clause), in own words.
Data: scikit-learn's digits instead of MNIST.

rankzero train experiments/tutorials/mnist_convnet.py
"""

from digit_images import digits
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from rankzero import Experiment, Goal, Progress, Train

MEAN, SPREAD = 0.305, 0.346


class MnistConvnet(Experiment):
    train: Train = Train(epochs=14, batch_size=64, eval_batch=1000, seed=1)
    lr: float = 1.0
    gamma: float = 0.7
    goal = Goal("val/accuracy", "max")

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return digits()

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.Adadelta(model.parameters(), self.lr)

    def schedule(self, step: int, total_steps: int, at: Progress) -> float:
        """Decay after each epoch, as StepLR does."""
        return self.gamma**at.epoch

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        logits = model((images - MEAN) / SPREAD)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy}

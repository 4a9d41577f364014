"""The same as lit_lines.py, as a plain experiment."""

from tests_data import points
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import random_split

from rankzero import Experiment, Goal, Train


class Lines(Experiment):
    train: Train = Train(epochs=3, batch_size=32, schedule="cosine")
    goal = Goal("val/acc", "max", target=0.9)
    lr: float = 1e-2
    width: int = 8
    samples: int = 400

    def data(self):
        return random_split(points(self.samples), [0.75, 0.25])

    def model(self):
        return nn.Sequential(nn.Linear(2, self.width), nn.ReLU(), nn.Linear(self.width, 2))

    def measure(self, model, batch):
        inputs, labels = batch
        outputs = model(inputs)
        return {
            "loss": cross_entropy(outputs, labels),
            "acc": (outputs.argmax(-1) == labels).float().mean(),
        }

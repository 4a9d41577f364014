"""A small classification whose arithmetic is exact, so that every processor computes the same bits.

Inputs, weights, gradients and the learning rate are multiples of powers of two below 24 bits.
float32 then rounds nowhere, and the order of a sum does not matter. This holds for the defaults.
"""

import time

import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

from rankzero import Choice, Experiment, Goal, Train


def samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, (count, 8), generator=generator) / 4
    return TensorDataset(x, (x.sum(1) > 0).float() * 2 - 1)


class Exact(Experiment):
    train: Train = Train(epochs=8, batch_size=32, log_every=4, log_model=False, pictures=False)
    goal = Goal("val/accuracy", "max", target=0.8)
    lr: float = 0.0625
    momentum: float = 1.0  # exact, and the optimizer has a state that a checkpoint must keep
    inputs: int = 8
    step_seconds: float = 0.0
    fail_at: int = 0
    search = {"inputs": Choice(4, 8)}

    def data(self):
        print("256 samples to train, 64 to validate", flush=True)
        return samples(256, 1), samples(64, 2)

    def model(self):
        layer = nn.Linear(self.inputs, 1)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_((parameter * 64).round() / 64)
        return layer

    def optimizer(self, model):
        return optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)

    def measure(self, model, batch):
        x, y = batch
        if model.training:
            time.sleep(self.step_seconds)
            # A resumed run draws the same noise only if it restores the random stream.
            x = x + torch.randint(-1, 2, x.shape) / 4
        if self.fail_at and not model.training:
            raise KeyError("no such measure")
        margin = y * model(x[:, : self.inputs]).squeeze(1)
        return {"loss": (1 - margin).relu().mean(), "accuracy": (margin > 0).float().mean()}

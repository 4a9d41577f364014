"""A time series: two layers of LSTM continue sine waves.

From pytorch/examples, time_sequence_prediction (77f55b9, 2025-08-25, BSD-3-Clause), in own words.
The data is the same. The optimizer is Adam instead of L-BFGS.

rankzero train experiments/tutorials/sine_waves.py
"""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from rankzero import Experiment, Goal, Train

WAVES, PERIOD = 100, 20


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 51, num_layers=2, batch_first=True)
        self.linear = nn.Linear(51, 1)

    def forward(self, waves: Tensor, future: int = 0) -> Tensor:
        """Return the next value of each place [n, places], and `future` values more."""
        hidden, state = self.lstm(waves.unsqueeze(-1))
        found = [self.linear(hidden)]
        for _ in range(future):
            hidden, state = self.lstm(found[-1][:, -1:], state)
            found.append(self.linear(hidden))
        return torch.cat(found, 1).squeeze(-1)


class SineWaves(Experiment):
    train: Train = Train(steps=300, batch_size=WAVES - 4, eval_every=20)
    lr: float = 1e-2
    length: int = 1000
    future: int = 1000
    goal = Goal("val/loss", "min")

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        shifts = np.random.default_rng(2).integers(-4 * PERIOD, 4 * PERIOD, (WAVES, 1))
        waves = torch.from_numpy(np.sin((np.arange(self.length) + shifts) / PERIOD))
        return TensorDataset(waves[4:]), TensorDataset(waves[:4])

    def model(self) -> nn.Module:
        return Sequence().double()

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.Adam(model.parameters(), self.lr)

    def measure(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        (waves,) = batch
        return {"loss": mse_loss(model(waves[:, :-1]), waves[:, 1:])}

    def pictures(self, model: Any, batch: list[Tensor]) -> dict[str, plt.Figure]:
        (waves,) = batch
        figure, axes = plt.subplots(figsize=(15, 5))
        for wave in model(waves[:, :-1], self.future).cpu():
            (line,) = axes.plot(wave[: self.length - 1])
            steps = range(self.length - 1, len(wave))
            axes.plot(steps, wave[self.length - 1 :], ":", color=line.get_color())
        return {"future": figure}

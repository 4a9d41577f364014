"""`train.ema`: a moving average of the weights, which is evaluated, kept as the best and exported.

    average = decay * average + (1 - decay) * weights        after each step
    decay   = min(train.ema, (1 + step) / (10 + step))       so that the first weights fade soon

The training continues with its own weights. Buffers, such as running statistics, are not averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rankzero.training.data.batch import map_tensors
from rankzero.training.strategies.base import Strategy


class AveragedWeights:
    """The averages of this rank's weights, or of its parts of them, on the device."""

    def __init__(self, strategy: Strategy, decay: float) -> None:
        self._strategy, self._decay = strategy, decay
        self._averages = [weight.clone() for weight in self._floating()]
        # FSDP moves its parts in the first forward, so the first update looks them up.
        self._weights: list[Tensor] = []

    def _floating(self) -> list[Tensor]:
        found = self._strategy.weights()
        return [weight for weight in found if weight.is_floating_point() or weight.is_complex()]

    def update(self, step: int) -> None:
        """Move the averages towards the weights after step number `step`, which counts from 1."""
        if not self._weights:
            self._weights = self._floating()
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._averages, self._weights, 1 - decay)

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Exchange the model's weights for their averages inside the block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        # In place, because kernels, buckets and compiled code know the weights by their memory.
        for weight, average in zip(self._floating(), self._averages, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def state(self) -> dict[str, Any]:
        """Return the whole averaged model on rank 0. Elsewhere: anything. Collective."""
        with self.in_model():
            # Copied, because the model's own tensors get the training's weights back.
            found: dict[str, Any] = map_tensors(dict(self._strategy.model_state()), Tensor.clone)
        return found

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take the averages of a checkpoint. It overwrites the model. Collective."""
        self._strategy.load_model(saved)
        self.restart()

    def restart(self) -> None:
        """Start the averages at the model's weights."""
        for weight, average in zip(self._floating(), self._averages, strict=True):
            average.copy_(weight)

"""`train.ema`: a moving average of the weights, which is evaluated, kept as the best and exported.

    average = decay * average + (1 - decay) * weights        after each step
    decay   = min(train.ema, (1 + step) / (10 + step))       so that the first weights fade soon

The training continues with its own weights. Buffers, such as running statistics, are not averaged.
The averages of weights in bf16 or fp16 are in fp32: a half would round each small step away.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankzero.training.data.batch import map_tensors
from rankzero.training.strategies.base import Strategy

_HALVES = (torch.bfloat16, torch.float16)
# fp16 has no exponents for what rounding takes away. Scaled, that is at most the number itself.
_SCALE = 2.0**11


class AveragedWeights:
    """The averages of this rank's weights, or of its parts of them, on the device.

    `model`: the whole one, on every rank.
    """

    def __init__(self, strategy: Strategy, model: nn.Module, decay: float) -> None:
        self._strategy, self._decay = strategy, decay
        self._has_halves = any(one.dtype in _HALVES for one in model.parameters())
        self._averages: list[Tensor] = []
        # A lazy module has no weights before its first forward.
        if not any(map(nn.parameter.is_lazy, model.parameters())):
            self.restart()
        # FSDP moves its parts in the first forward, so the first update looks them up.
        self._weights: list[Tensor] = []

    def _floating(self) -> list[Tensor]:
        found = self._strategy.weights()
        return [weight for weight in found if weight.is_floating_point() or weight.is_complex()]

    def update(self, step: int) -> None:
        """Move the averages towards the weights after step number `step`, which counts from 1."""
        if not self._weights:
            self._weights = self._floating()
            if not self._averages:
                self.restart()
        decay = min(self._decay, (1 + step) / (10 + step))
        weights = self._weights
        if self._has_halves:
            weights = [one.to(a.dtype) for one, a in zip(weights, self._averages, strict=True)]
        torch._foreach_lerp_(self._averages, weights, 1 - decay)

    def in_model(self) -> contextlib.AbstractContextManager[None]:
        """Exchange the model's weights for their averages inside the block."""
        return self._exchanged(self._averages)

    @contextlib.contextmanager
    def _exchanged(self, values: Sequence[Tensor]) -> Iterator[None]:
        # An average in fp32 of a half is copied, and stays as it is.
        fitting = [one.to(old.dtype) for old, one in zip(self._floating(), values, strict=True)]
        self._exchange(fitting)
        try:
            yield
        finally:
            self._exchange(fitting)

    def _exchange(self, values: Sequence[Tensor]) -> None:
        # In place, because kernels, buckets and compiled code know the weights by their memory.
        for weight, value in zip(self._floating(), values, strict=True):
            kept = weight.clone()
            weight.copy_(value)
            value.copy_(kept)

    def state(self) -> dict[str, Any]:
        """Return a checkpoint's averages on rank 0. Elsewhere: anything. Collective.

        ``ema`` is the whole averaged model. With halves, ``ema_rests`` are two models of halves,
        scaled, that are added to it to get the averages in fp32.
        """
        found, values = [self._state_of(self._averages)], self._averages
        # A strategy gathers weights as the model has them. fp32 has the digits of three bf16.
        for _ in range(2 if self._has_halves else 0):
            values = [
                (a - a.to(weight.dtype)) * _SCALE if weight.dtype in _HALVES else a
                for weight, a in zip(self._floating(), values, strict=True)
            ]
            rest = self._state_of(values).items()
            found.append({k: v for k, v in rest if getattr(v, "dtype", None) in _HALVES})
        return {"ema": found[0], "ema_rests": found[1:]}

    def _state_of(self, values: Sequence[Tensor]) -> dict[str, Any]:
        with self._exchanged(values):
            # Copied, because the model's own tensors get the training's weights back.
            found: dict[str, Any] = map_tensors(self._strategy.model_state(), Tensor.clone)
        return found

    def load(self, saved: dict[str, Any], rests: Sequence[Mapping[str, Any]] = ()) -> None:
        """Take the averages of a checkpoint. It overwrites the model. Collective.

        `rests`: none in a checkpoint of an older version.
        """
        self._strategy.load_model(saved)
        self.restart()
        for number, rest in enumerate(rests, 1):
            # A copy keeps the versions of the modules' states.
            whole = copy.copy(saved)
            whole.update(rest)
            self._strategy.load_model(whole)
            for weight, average in zip(self._floating(), self._averages, strict=True):
                if weight.dtype in _HALVES:
                    average.add_(weight, alpha=_SCALE**-number)

    def restart(self) -> None:
        """Start the averages at the model's weights."""
        if not self._averages:
            self._averages = [
                weight.float() if weight.dtype in _HALVES else weight.clone()
                for weight in self._floating()
            ]
        for weight, average in zip(self._floating(), self._averages, strict=True):
            average.copy_(weight)

"""An optimizer that averages the weights itself, as those of schedulefree do.

Its ``eval()`` puts the averages into the model, and its ``train()`` the weights of the next step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rankzero.training.data.batch import map_tensors
from rankzero.training.optimization.joint_optimizer import parts_of
from rankzero.training.strategies.base import Strategy


def switching(optimizer: Optimizer) -> list[Any]:
    """Return the parts of an optimizer that exchange weights in ``train()`` and ``eval()``."""
    return [one for one in parts_of(optimizer) if hasattr(one, "train") and hasattr(one, "eval")]


class OptimizerAverage:
    """The averages of an optimizer, in the place of `AveragedWeights`.

    The optimizer is in its ``train()`` mode, but for the block of `in_model`.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy, self._parts = strategy, switching(strategy.optimizer)
        self._loaded: Mapping[str, Any] | None = None
        for part in self._parts:
            part.train()
            # It looks for a state of each parameter, and a look creates an empty one. PyTorch would
            # take the states for complete.
            for parameter in [key for key, state in part.state.items() if not state]:
                del part.state[parameter]

    def update(self, step: int) -> None:  # noqa: ARG002
        """Forget what `load` took. The optimizer has made its step."""
        self._loaded = None

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Exchange the model's weights for their averages inside the block. Collective."""
        kept, loaded = [weight.clone() for weight in self._strategy.weights()], self._loaded
        if loaded is not None:
            self._strategy.load_model(loaded)
        for part in self._parts if loaded is None else ():
            part.eval()
        try:
            yield
        finally:
            weights = self._strategy.weights()
            for part in self._parts if loaded is None else ():
                part.train()
            # `train()` computes them again, and would round.
            for weight, value in zip(weights, kept, strict=True):
                weight.copy_(value)

    def state(self) -> dict[str, Any]:
        """Return a checkpoint's averages on rank 0. Elsewhere: anything. Collective."""
        with self.in_model():
            return {"ema": map_tensors(self._strategy.model_state(), Tensor.clone)}

    def load(self, saved: dict[str, Any], rests: Sequence[Mapping[str, Any]] = ()) -> None:  # noqa: ARG002
        """Take the averages of a checkpoint until the next step."""
        self._loaded = saved

    def restart(self) -> None:
        """Do nothing: the optimizer's own state has the averages."""

"""What a strategy is: how a step's work is divided among the processes. The loop knows nothing else of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rankzero.errors import UserError
from rankzero.training.distributed.world import World
from rankzero.training.metrics.window import check_metrics

Metrics = dict[str, Tensor]
Measure = Callable[[Any, Any], Mapping[str, Any]]
"""The user's ``measure(model, batch)``."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Whose samples a rank trains on: part `rank` of `size`. Ranks with the same part see the same samples."""

    rank: int
    size: int


@dataclasses.dataclass(frozen=True)
class MicroBatchStep:
    """How a micro-batch is computed."""

    measure: Measure
    autocast: contextlib.AbstractContextManager[Any]
    scaler: torch.amp.GradScaler | None
    accumulation: int
    """Micro-batches of a step: each counts for so much less."""


class Strategy(Protocol):
    """A model made ready on this rank. All ranks call all methods, in the same order."""

    @property
    def model(self) -> nn.Module:
        """What evaluation calls, and what a checkpoint is made of; this rank's part where the model is divided."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def shard(self) -> Shard: ...

    @property
    def lockstep(self) -> bool:
        """Whether a forward is a collective: then all ranks must take the same number of them."""

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """Keep gradients local inside the block: all but the last micro-batch of a step."""

    def forward_backward(self, how: MicroBatchStep, batch: Any) -> Metrics:
        """Add a micro-batch's share of the gradients; return its metrics, detached."""

    def forward_metrics(self, how: MicroBatchStep, batch: Any) -> Mapping[str, Any] | None:
        """Return an evaluation batch's metrics; None where another rank has them. Without gradients."""

    def sync_buffers(self) -> None:
        """Give every rank rank 0's buffers (running statistics), which a checkpoint has."""

    def clip(self, norm: float) -> None:
        """Scale all gradients so that their norm, over all ranks' parts, is at most `norm`."""

    def checksum(self) -> Tensor:
        """Return numbers that are the same on every rank as long as the replicas are."""

    def state(self) -> dict[str, Any]:
        """Return {"model", "optimizer"}, whole, on rank 0; anything elsewhere. A collective."""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Set the model and the optimizer to a whole state, the same on every rank. A collective."""

    def without_communication(self) -> Strategy | None:
        """Return the same work without talking to others, to see what that costs; None where there is no such thing."""


def backward(how: MicroBatchStep, replica: nn.Module, batch: Any) -> Metrics:
    """Measure one micro-batch and add its share of the gradients; return its metrics, detached."""
    with how.autocast:
        values = how.measure(replica, batch)
    loss = loss_of(values)
    try:
        if how.accumulation > 1:
            loss = loss / how.accumulation
        (loss if how.scaler is None else how.scaler.scale(loss)).backward()
        return {name: value.detach() for name, value in values.items()}
    except (AttributeError, TypeError, RuntimeError):
        check_metrics(
            values
        )  # says what to change, where the error comes of what measure() returned
        raise


def loss_of(values: object) -> Any:
    """Return the loss. Raises UserError where `measure` returned none."""
    if not isinstance(values, Mapping) or "loss" not in values:
        shown = (
            f"the keys {sorted(values)}" if isinstance(values, Mapping) else type(values).__name__
        )
        raise UserError(f"measure() must return a mapping with the key 'loss', got {shown}")
    return values["loss"]


def total_norm_factor(
    norm: float, world: World, *, parts: list[Tensor], whole: list[Tensor]
) -> Tensor:
    """Return what gradients are multiplied by so that their norm is at most `norm`. A collective.

    `parts`: gradients of weights that no other rank has; `whole`: those that all ranks have alike. The same as
    torch.nn.utils.clip_grad_norm_ makes of the whole model.
    """
    total = (world.sum(_squares(parts, world)) + _squares(whole, world)).sqrt()
    return (norm / (total + 1e-6)).clamp(max=1.0)


def _squares(tensors: list[Tensor], world: World) -> Tensor:
    if not tensors:
        return torch.zeros((), device=world.device)
    return torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]).square().sum()


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return one 64-bit number per tensor, from its bits: equal replicas give equal numbers."""
    return torch.stack([_bits(tensor.detach()).sum(dtype=torch.int64) for tensor in tensors])


_INTEGERS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_INTEGERS[real.element_size()])

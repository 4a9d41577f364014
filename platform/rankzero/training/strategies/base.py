"""The interface of a strategy: how a step's work is divided among processes.

The training loop uses nothing else of a strategy. Each strategy is a class with these methods.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rankzero.errors import UserError
from rankzero.ratio import Ratio
from rankzero.training.distributed.world import World
from rankzero.training.metrics.window import check_metrics

Metrics = dict[str, Tensor]
Measure = Callable[[Any, Any], Mapping[str, Any]]
"""The user's ``measure(model, batch)``."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """The samples that a rank trains on: part `rank` of `size`."""

    rank: int
    size: int


@dataclasses.dataclass(frozen=True)
class MicroBatchStep:
    """How a micro-batch is computed."""

    measure: Measure
    autocast: contextlib.AbstractContextManager[Any]
    scaler: torch.amp.GradScaler | None
    accumulation: int
    """Micro-batches of a step."""
    samples: int = 1
    """A micro-batch's. A `Ratio`'s gradients are divided by it first: fp16 overflows early."""
    weight: float = 1.0
    """The micro-batch's, in the mean over the step. A `Ratio` has its own; 0 counts nothing."""
    has_backward: bool = True
    """Whether there are gradients to compute: not in a turn that trains no parameter."""

    def forward(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return what the user's `measure` returns for a batch."""
        with self.autocast:
            return self.measure(model, batch)

    def forward_backward(self, model: nn.Module, batch: Any) -> Metrics:
        """Add a micro-batch's share of the gradients, and return its metrics, detached.

        If the loss is a `Ratio`, the gradients are those of the numerator until `divide_gradients`.
        Raises UserError if `measure` returned no loss, or values that are no metrics.
        """
        with self.autocast:
            values = self.measure(model, batch)
        try:
            # Copies: a CUDA graph's next step writes into the same memory, the optimizer writes
            # parameters, and FSDP frees them in the backward. `data` costs no call.
            found = {
                name: value.data.clone() if type(value) is Tensor else value.detach().clone()
                for name, value in values.items()
            }
            loss = values["loss"]
            if type(loss) is Ratio:
                loss = loss.numerator / self.samples * (self.weight > 0)
            elif self.weight != 1:
                loss = loss * self.weight
            if self.accumulation > 1:
                loss = loss / self.accumulation
            if self.has_backward:
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if self.weight == 1:
                return found
            shares = float(self.weight > 0), self.weight
            return {name: value * shares[value.dim() == 0] for name, value in found.items()}
        except (AttributeError, LookupError, TypeError, RuntimeError):
            # Checked only now, because the check costs time. It raises a UserError if the values
            # are at fault.
            check_metrics(values)
            _check_trains(values["loss"])
            raise


def _check_trains(loss: Any) -> None:
    """Raise UserError for a loss without a gradient."""
    if not (loss.numerator if isinstance(loss, Ratio) else loss).requires_grad:
        raise UserError(
            "measure()['loss'] has no gradient: compute it from the output of the model that "
            "measure() gets, without detach(), argmax() or no_grad(), and let model() return a "
            "model with parameters that are not frozen"
        )


class Strategy(Protocol):
    """A model made ready on this rank. All ranks call all methods, in the same order."""

    @property
    def model(self) -> nn.Module:
        """The model for evaluation and checkpoints, or this rank's part of it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's parameters."""

    @property
    def shard(self) -> Shard:
        """The samples of this rank. Ranks with the same shard see the same samples."""

    @property
    def lockstep(self) -> bool:
        """Whether a forward is a collective, so all ranks must run the same number of them."""

    def train_only(self, names: Collection[str]) -> None:
        """Train the parameters with these names, and no others, from the next step on.

        Raises UserError if the strategy cannot.
        """

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """Keep gradients local inside the block: for all but a step's last micro-batch."""

    def forward_backward(self, how: MicroBatchStep, batch: Any) -> Metrics:
        """Add a micro-batch's share of the gradients, and return its metrics, detached."""

    def forward_metrics(self, how: MicroBatchStep, batch: Any) -> Mapping[str, Any] | None:
        """Return an evaluation batch's metrics, or None if another rank has them."""

    def sync_buffers(self) -> None:
        """Give every rank the buffers of rank 0 (running statistics), as a checkpoint has them."""

    def average_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """After a turn of `optimizer`: average its gradients over the ranks. Collective."""

    def clip(self, norm: float) -> Tensor:
        """Scale all gradients so that the norm over all ranks' parts is at most `norm`.

        Return the norm of before. With `norm` infinite, change nothing.
        """

    def checksum(self) -> Tensor:
        """Return int64 numbers that are equal on all ranks while the replicas are."""

    def weights(self) -> list[Tensor]:
        """Return this rank's weights, or its parts of them, as plain tensors in their memory."""

    def model_state(self) -> dict[str, Any]:
        """Return the state of the full model on rank 0. Elsewhere: anything."""

    def load_model(self, saved: Mapping[str, Any]) -> None:
        """Set the model to what `model_state` returned, the same on every rank."""

    def state(self) -> dict[str, Any]:
        """Return {"model", "optimizer"} of the full model on rank 0. Elsewhere: anything."""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Set the model and the optimizer to what `state` returned, the same on every rank."""


def set_trained(model: nn.Module, names: Collection[str]) -> None:
    """Let the parameters with these names have gradients, and no others."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


def with_versions(saved: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a copy of a model's state dict that has the version of each module's state.

    A module may take a state without its version for an old one, and convert or refuse it. If
    `saved` has none, as that of a divided model, they are those of `model`.
    """
    versions = getattr(saved, "_metadata", None)
    if versions is None:
        modules = model.named_modules(remove_duplicate=False)
        versions = {name: {"version": module._version} for name, module in modules}
    found = collections.OrderedDict(saved)
    vars(found)["_metadata"] = versions
    return found


def divide_gradients(model: nn.Module, loss: Tensor, samples: int, world: World) -> None:
    """Divide the gradients of a step by the denominator of its loss, a `Ratio`. Collective.

    `loss`: the two parts [2], each a mean over this rank's micro-batches of so many `samples`.
    """
    # Every strategy averages gradients over micro-batches and ranks. With the denominator averaged
    # likewise, their quotient is that of the sums. The host does not wait for it.
    total = world.sum(loss[1].clone())
    # Without a denominator there is no gradient. Infinity times 0 would make every weight NaN.
    factor = torch.where(total == 0, 0.0, samples * world.size / total)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    # A part of a gradient is a DTensor, which has `to_local`.
    local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    torch._foreach_mul_(local, factor)


def clip(world: World, norm: float, *, parts: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
    """Scale gradients to a norm of at most `norm`. Return the norm of before. Collective.

    `parts`: gradients that only this rank has. `whole`: gradients that are equal on all ranks.
    """
    # Without gradients PyTorch's norm is on the host, and the host would wait for its copy.
    mine, same = (
        nn.utils.get_total_norm(one) if one else torch.zeros((), device=world.device)
        for one in (parts, whole)
    )
    total = (world.sum(mine.square()) + same.square()).sqrt()
    # The formula of torch.nn.utils.clip_grad_norm_ on the whole model, also its 1e-6. So all
    # strategies take the same step.
    if norm < math.inf and (parts or whole):
        factor = (norm / (total + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([*parts, *whole], factor)
    return total


_INTEGERS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of each tensor's bits as integers: equal replicas give equal sums."""
    # Integers, because a sum of floats depends on the order of its terms, and NaN differs from NaN.
    sums = []
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        bits = real.detach().view(_INTEGERS[real.element_size()])
        sums.append(bits.sum(dtype=torch.int64))
    return torch.stack(sums)

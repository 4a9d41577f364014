"""Each process has a part of every weight: fully sharded data parallel (ZeRO-3), and tensor parallel.

Weights are DTensors. A checkpoint has the whole of them, gathered by torch.distributed.checkpoint, under the names that
the model itself would have: any number of processes can load it, and so can a plain model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.training import optimizers
from rankzero.training.distributed.world import World
from rankzero.training.strategies import parameter_names, shared_weights
from rankzero.training.strategies.base import (
    Metrics,
    MicroBatchStep,
    Shard,
    Strategy,
    backward,
    checksum,
    total_norm_factor,
)

GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
SCATTERED = StateDictOptions(full_state_dict=True)


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A model whose weights are spread over the ranks."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    shard: Shard
    world: World
    lockstep: bool = True

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return (
            _without_reduction(self.model)
            if isinstance(self.model, FSDPModule)
            else contextlib.nullcontext()
        )

    def forward_backward(self, how: MicroBatchStep, batch: Any) -> Metrics:
        return backward(how, self.model, batch)

    def forward_metrics(self, how: MicroBatchStep, batch: Any) -> Mapping[str, Any]:
        with how.autocast:
            return how.measure(self.model, batch)

    def sync_buffers(self) -> None:
        self.world.broadcast_buffers(self.model)

    def clip(self, norm: float) -> None:
        for p in self.model.parameters():
            p.grad = _summed(p.grad)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        parts = [_local(gradient) for gradient in gradients if _is_part(gradient)]
        whole = [_local(gradient) for gradient in gradients if not _is_part(gradient)]
        factor = total_norm_factor(norm, self.world, parts=parts, whole=whole)
        for gradient in gradients:
            _local(gradient).mul_(factor)

    def checksum(self) -> Tensor:
        """Return numbers for the weights that every rank has whole; those in parts have no replicas."""
        whole = [p for p in self.model.parameters() if not isinstance(p, DTensor)]
        return checksum(whole) if whole else torch.zeros(1, dtype=torch.int64)

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model, options=GATHERED),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=GATHERED),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        set_model_state_dict(self.model, saved["model"], options=SCATTERED)
        named = parameter_names.by_name(
            saved["optimizer"], parameter_names.order(self.model, self.optimizer)
        )
        set_optimizer_state_dict(self.model, self.optimizer, named, options=SCATTERED)

    def without_communication(self) -> Strategy | None:
        return None


def fsdp(experiment: Experiment, model: nn.Module, world: World) -> Sharded:
    """Make the model ready for fully sharded data parallel: parameters, gradients and optimizer state in parts.

    Units that are gathered, and compiled, together: the items of the outermost `nn.Sequential` or `nn.ModuleList`s,
    and the rest, with which stays what shares a weight with something outside of it.
    """
    parts = shared_weights.unshared(list(units(model)), model) if world.is_distributed else []
    for part in (parts or [model]) if experiment.train.compile else ():
        part.compile()  # each by itself: around them, parameters come and go
    if world.is_distributed:
        mesh = init_device_mesh(world.device.type, (world.size,))
        for unit in [*parts, model]:
            fully_shard(unit, mesh=mesh)  # moves it to the device, too
    model.to(world.device)
    return Sharded(
        model, optimizers.of(experiment, model), Shard(world.ranks.rank, world.size), world
    )


def tensor_parallel(experiment: Experiment, model: nn.Module, world: World) -> Sharded:
    """Make the model ready for tensor parallel, by the experiment's `parallelize()`. All ranks see the same samples.

    Raises UserError without a plan, where it parts a weight that two modules share, and with fp16, whose loss scaler
    knows no mixture of whole and divided weights.
    """
    plan = experiment.parallelize()
    if not plan:
        raise UserError(
            "train.strategy=tp needs the experiment to say how its layers are divided: def parallelize(self): return "
            "{'layer.name': ColwiseParallel(), …}, as torch.distributed.tensor.parallel.parallelize_module takes it"
        )
    if experiment.train.precision == "fp16":
        raise UserError("train.strategy=tp does not do fp16: use bf16")
    missing = [name for name in plan if name not in dict(model.named_modules())]
    if missing:
        raise UserError(f"parallelize() names {missing[0]!r}, which the model does not have")
    tied = shared_weights.shared(model)
    if world.is_distributed:
        parallelize_module(model, init_device_mesh(world.device.type, (world.size,)), dict(plan))
    shared_weights.check_together(model, tied, "tp")
    model.to(world.device)
    return Sharded(model, optimizers.one_by_one(experiment.optimizer(model)), Shard(0, 1), world)


def units(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts that are worth gathering by themselves: the items of the outermost containers."""
    children = list(model.children())
    if isinstance(model, (nn.Sequential, nn.ModuleList)):
        yield from (child for child in children if any(True for _ in child.parameters()))
        return
    for child in children:
        yield from units(child)


@contextlib.contextmanager
def _without_reduction(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _summed(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient of which each rank has a summand (a norm's, under SequenceParallel) as the sum."""
    if not isinstance(gradient, DTensor) or not any(
        placement.is_partial() for placement in gradient.placements
    ):
        return gradient
    return gradient.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in gradient.placements]
    )


def _is_part(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(
        placement.is_shard() for placement in tensor.placements
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

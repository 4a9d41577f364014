"""Strategies under which each process has a part of every weight, as a DTensor.

    fsdp  torch.distributed.fsdp.fully_shard: parameters, gradients, optimizer state (ZeRO-3)
    tp    torch.distributed.tensor.parallel.parallelize_module, by the experiment's `parallelize()`

A checkpoint has the whole weights under the model's own names, gathered by
torch.distributed.checkpoint. So any number of processes can load it, and so can a plain model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
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
from rankzero.training.distributed.world import World
from rankzero.training.optimization import optimizers
from rankzero.training.strategies import parameter_names, shared_weights
from rankzero.training.strategies.base import (
    Metrics,
    MicroBatchStep,
    Shard,
    checksum,
    clip,
    set_trained,
    with_versions,
)
from rankzero.training.strategies.units import units
from rankzero.training.strategy_check import NO_PLAN

_GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SCATTER = StateDictOptions(full_state_dict=True)


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A model whose weights are divided among the ranks."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    shard: Shard
    world: World
    lockstep: bool = True

    def train_only(self, names: Collection[str]) -> None:
        self._reshard()
        set_trained(self.model, names)

    def _reshard(self) -> None:
        """Free what an evaluation left gathered, so that the parameters are this rank's parts."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        fsdp = self.model if isinstance(self.model, FSDPModule) else None
        if fsdp is not None:
            fsdp.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            if fsdp is not None:
                fsdp.set_requires_gradient_sync(True)

    def forward_backward(self, how: MicroBatchStep, batch: Any) -> Metrics:
        try:
            return how.forward_backward(self.model, batch)
        except AssertionError as error:
            # FSDP looks at the types in the first forward.
            if "uniform original parameter dtype" not in str(error):
                raise
            raise UserError(
                f"train.strategy=fsdp cannot divide the model: {error}; use ddp"
            ) from error

    def forward_metrics(self, how: MicroBatchStep, batch: Any) -> Mapping[str, Any]:
        return how.forward(self.model, batch)

    def sync_buffers(self) -> None:
        self.world.broadcast_buffers(self.model)

    def average_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the backward has done it."""

    def clip(self, norm: float) -> Tensor:
        for p in self.model.parameters():
            # Under SequenceParallel, each rank has a summand of a normalization's gradient.
            if isinstance(p.grad, DTensor) and any(at.is_partial() for at in p.grad.placements):
                summed = [Replicate() if at.is_partial() else at for at in p.grad.placements]
                p.grad = p.grad.redistribute(placements=summed)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        # The norm needs the parts of all ranks, but each whole gradient only once.
        parts = [_local(gradient) for gradient in gradients if _is_part(gradient)]
        whole = [_local(gradient) for gradient in gradients if not _is_part(gradient)]
        return clip(self.world, norm, parts=parts, whole=whole)

    def checksum(self) -> Tensor:
        """Return numbers for the whole weights. Those in parts have no replicas."""
        whole = [p for p in self.model.parameters() if not isinstance(p, DTensor)]
        return checksum(whole) if whole else torch.zeros(1, dtype=torch.int64)

    def weights(self) -> list[Tensor]:
        self._reshard()
        return [_local(parameter.detach()) for parameter in self.model.parameters()]

    def model_state(self) -> dict[str, Any]:
        return get_model_state_dict(self.model, options=_GATHER)

    def load_model(self, saved: Mapping[str, Any]) -> None:
        set_model_state_dict(self.model, with_versions(saved, self.model), options=_SCATTER)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model_state(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=_GATHER),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        # A checkpoint of a replicated model has numbers instead of names.
        names = parameter_names.order(self.model, self.optimizer)
        named = parameter_names.by_name(saved["optimizer"], names)
        # Plain SGD has none, and PyTorch would fail.
        if named["state"]:
            # PyTorch loads the state of parameters with gradients, and wants it for each of them.
            trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
            set_trained(self.model, named["state"])
            set_optimizer_state_dict(self.model, self.optimizer, named, options=_SCATTER)
            set_trained(self.model, trained)
        # PyTorch has let the optimizer step, at lr 0, which may change the weights.
        self.load_model(saved["model"])


def fsdp(experiment: Experiment, model: nn.Module, world: World) -> Sharded:
    """Shard the model: parameters, gradients and optimizer state.

    The units that are gathered, and compiled, together are the items of the outermost
    `nn.Sequential`s and `nn.ModuleList`s. The rest of the model is one more unit. Raises UserError
    for a parameter without dimensions.
    """
    # A unit that shares a weight with another part stays with the rest.
    parts = list(shared_weights.unshared(units(model), model)) if world.is_distributed else []
    if experiment.train.compile:
        # Each unit by itself, because parameters are gathered and freed between units. Only its
        # `forward`: `part.compile()` includes FSDP's hooks, and dynamo then compiles nothing.
        # Dynamo counts the graphs of all parts with the same code together, up to two limits.
        limits = torch._dynamo.config
        for limit in ("recompile_limit", "accumulated_recompile_limit"):
            setattr(limits, limit, max(getattr(limits, limit), 4 * len(parts)))
        for part in parts or [model]:
            # Two sizes of batches take turns. Code for any size would change the bits.
            is_dynamic = None if experiment.train.drop_last else False
            part.forward = torch.compile(part.forward, dynamic=is_dynamic)
    if world.is_distributed:
        if scalars := [name for name, p in model.named_parameters() if not p.ndim]:
            raise UserError(
                f"train.strategy=fsdp cannot divide {scalars[0]}, a parameter without dimensions: "
                "give it one, as torch.ones(1) has, or use ddp"
            )
        mesh = init_device_mesh(world.device.type, (world.size,))
        for unit in [*parts, model]:
            fully_shard(unit, mesh=mesh)  # also moves it to the device
    model.to(world.device)
    shard = Shard(world.ranks.rank, world.size)
    return Sharded(model, optimizers.of(experiment, model), shard, world)


def tensor_parallel(experiment: Experiment, model: nn.Module, world: World) -> Sharded:
    """Divide the model by the experiment's `parallelize()`. All ranks see the same samples.

    Raises UserError if the plan divides a tied weight.
    """
    if not (plan := experiment.parallelize()):
        raise UserError(NO_PLAN)
    missing = [name for name in plan if name not in dict(model.named_modules())]
    if missing:
        raise UserError(f"parallelize() names {missing[0]!r}, which the model does not have")
    tied = shared_weights.shared(model)
    if world.is_distributed:
        parallelize_module(model, init_device_mesh(world.device.type, (world.size,)), dict(plan))
    # `parallelize_module` replaces a weight in each module by itself.
    shared_weights.check_together(model, tied, "tp")
    model.to(world.device)
    optimizer = optimizers.of(experiment, model, fuse=False)
    # Kernels for many parameters refuse a mixture of DTensors and plain tensors.
    for group in optimizer.param_groups:
        group.update({name: False for name in ("foreach", "fused") if name in group})
    return Sharded(model, optimizer, Shard(0, 1), world)


def _is_part(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(p.is_shard() for p in tensor.placements)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""Every process has the whole model: one process, DataParallel, DDP, and DDP with a divided optimizer (ZeRO-1)."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rankzero.errors import UserError
from rankzero.experiment import Experiment, Train
from rankzero.training import optimizers
from rankzero.training.distributed.world import World
from rankzero.training.strategies import parameter_names
from rankzero.training.strategies.base import (
    Metrics,
    MicroBatchStep,
    Shard,
    Strategy,
    backward,
    checksum,
)

KINDS = ("cuda", "cpu")  # of devices, whose number formats may be set


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A whole model on every rank; gradients are averaged as they are made."""

    model: nn.Module
    replica: nn.Module
    """`model`, wrapped so that gradients are averaged."""
    optimizer: torch.optim.Optimizer
    shard: Shard
    world: World
    lockstep: bool = False

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return (
            self.replica.no_sync()
            if isinstance(self.replica, DistributedDataParallel)
            else contextlib.nullcontext()
        )

    def forward_backward(self, how: MicroBatchStep, batch: Any) -> Metrics:
        return backward(how, self.replica, batch)

    def forward_metrics(self, how: MicroBatchStep, batch: Any) -> Mapping[str, Any]:
        with how.autocast:
            return how.measure(self.model, batch)

    def sync_buffers(self) -> None:
        self.world.broadcast_buffers(self.model)

    def clip(self, norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def checksum(self) -> Tensor:
        return checksum(list(self.model.parameters()))

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": _whole(self.optimizer, self.world)}

    def load(self, saved: Mapping[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        names = parameter_names.order(self.model, self.optimizer)
        self.optimizer.load_state_dict(parameter_names.by_number(saved["optimizer"], names))

    def without_communication(self) -> Strategy | None:
        return dataclasses.replace(self, replica=self.model)


def single(experiment: Experiment, model: nn.Module, world: World) -> Replicated:
    """Make one process's model ready. Raises UserError with several processes."""
    if world.is_distributed:
        raise UserError(
            f"train.strategy=single is one process, not {world.size}: give --nproc 1, or use ddp"
        )
    return Replicated(model, model, optimizers.of(experiment, model), Shard(0, 1), world)


def data_parallel(experiment: Experiment, model: nn.Module, world: World) -> Replicated:
    """Make the model ready for torch.nn.DataParallel: one process, a thread for each GPU that it sees.

    Raises UserError with several processes, and without GPUs, where PyTorch has no such thing.
    """
    if world.device.type != "cuda":
        raise UserError(
            "train.strategy=dp divides a batch among GPUs, and there is none: use ddp, which runs on CPUs, too"
        )
    if world.is_distributed:
        raise UserError(
            f"train.strategy=dp is one process for all GPUs, not {world.size}: give --nproc 1, or use ddp"
        )
    return Replicated(
        model, SameFormat(model), optimizers.of(experiment, model), Shard(0, 1), world
    )


class SameFormat(DataParallel[Any]):
    """DataParallel whose threads compute in the caller's number format: PyTorch tells them only that there is one."""

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each replica on its input; PyTorch's hook."""
        found: list[Any] = super().parallel_apply(
            [_in_callers_format(replica) for replica in replicas], inputs, kwargs
        )
        return found


def _in_callers_format(replica: Callable[..., Any]) -> Callable[..., Any]:
    formats = [
        torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in KINDS
    ]

    def call(*inputs: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for one in formats:
                stack.enter_context(one)
            return replica(*inputs, **kwargs)

    return call


def ddp(experiment: Experiment, model: nn.Module, world: World) -> Replicated:
    """Make the model ready for DistributedDataParallel: a process for each device."""
    optimizer = optimizers.of(experiment, model)
    shard = Shard(world.ranks.rank, world.size)
    return Replicated(model, _wrapped(model, world, experiment.train), optimizer, shard, world)


def zero1(experiment: Experiment, model: nn.Module, world: World) -> Replicated:
    """Make the model ready for DDP with the optimizer's state divided among the ranks (ZeRO-1).

    Raises UserError for an optimizer that is no class of its own arguments alone.
    """
    if not world.is_distributed:
        return ddp(experiment, model, world)
    optimizer = _divided(optimizers.of(experiment, model))
    shard = Shard(world.ranks.rank, world.size)
    return Replicated(model, _wrapped(model, world, experiment.train), optimizer, shard, world)


def _wrapped(model: nn.Module, world: World, train: Train) -> nn.Module:
    if not world.is_distributed or not any(p.requires_grad for p in model.parameters()):
        return model
    replica = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=train.ddp.static_graph,
        bucket_cap_mb=train.ddp.bucket_mb,
    )
    if train.ddp.compression == "bf16":
        replica.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return replica


def _divided(optimizer: torch.optim.Optimizer) -> ZeroRedundancyOptimizer:
    """Return the same optimizer, each rank with the state of a part of the parameters."""
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in known}
    try:
        return ZeroRedundancyOptimizer(
            optimizer.param_groups, kind, parameters_as_bucket_view=False, **settings
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"train.strategy=zero1 cannot divide {kind.__name__}: {error}; use ddp or fsdp"
        ) from error


def _whole(optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    """Return the optimizer's state, all ranks' parts together on rank 0."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        if (
            world.device.type == "cuda"
        ):  # it copies to the host without waiting, and nobody else would
            torch.cuda.current_stream(world.device).synchronize()
        return optimizer.state_dict() if world.ranks.first else {}
    return optimizer.state_dict()

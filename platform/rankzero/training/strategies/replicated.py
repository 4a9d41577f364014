"""Strategies under which every process has the whole model.

single  one process
dp      torch.nn.DataParallel: one process, a thread for each GPU
ddp     torch.nn.parallel.DistributedDataParallel: a process for each GPU
zero1   DDP, and torch.distributed.optim.ZeroRedundancyOptimizer divides the optimizer's state
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rankzero.errors import UserError
from rankzero.experiment import Experiment, Train
from rankzero.training.distributed import torch_compat
from rankzero.training.distributed.world import World
from rankzero.training.optimization import optimizers
from rankzero.training.optimization.joint_optimizer import JointOptimizer, parts_of
from rankzero.training.optimization.optimizer_average import switching
from rankzero.training.strategies import parameter_names
from rankzero.training.strategies.base import (
    Metrics,
    MicroBatchStep,
    Shard,
    checksum,
    set_trained,
    with_versions,
)

_PLAIN = (bool, int, float, str, type(None))


@dataclasses.dataclass
class Replicated:
    """The whole model on every rank. DDP averages the gradients during the backward."""

    model: nn.Module
    replica: nn.Module
    """`model`, in the wrapper that averages gradients, if there is one."""
    optimizer: torch.optim.Optimizer
    shard: Shard
    world: World
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    """Returns the model in its wrapper."""
    lockstep: bool = False

    def __post_init__(self) -> None:
        self._wrapped = _trained(self.model)
        """The names of the parameters that DDP averages: it numbers them when it wraps."""

    def train_only(self, names: Collection[str]) -> None:
        set_trained(self.model, names)
        # DDP averages what had gradients when it wrapped the model.
        if isinstance(self.replica, DistributedDataParallel):
            torch_compat.release(self.replica)
        self.replica, self._wrapped = self.wrap(self.model), _trained(self.model)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        # DDP with a static graph expects each backward to average, and fails without. An average
        # that takes part in the next one stays as it is, so the step's gradients are the same.
        if isinstance(self.replica, DistributedDataParallel) and not self.replica.static_graph:
            return self.replica.no_sync()
        return contextlib.nullcontext()

    def forward_backward(self, how: MicroBatchStep, batch: Any) -> Metrics:
        try:
            return how.forward_backward(self.replica, batch)
        except RuntimeError as error:
            # DDP says so in the next forward, and advises a setting that RankZero does not have.
            if "finished reduction in the prior iteration" not in str(error):
                raise
            names = ", ".join(_without_gradient(self._wrapped, str(error)))
            is_static = getattr(self.replica, "static_graph", False)
            static = "" if is_static else "set train.ddp.static_graph=true if it never gets one; "
            raise UserError(
                f"a parameter got no gradient in the last step{names and f' ({names})'}, and DDP "
                "waits for all of them: freeze it in model() with requires_grad_(False); "
                f"{static}or, if only some batches use it, add 0 * p.sum() to the loss"
            ) from error

    def forward_metrics(self, how: MicroBatchStep, batch: Any) -> Mapping[str, Any]:
        return how.forward(self.model, batch)

    def sync_buffers(self) -> None:
        self.world.broadcast_buffers(self.model)

    def average_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [p for p in trained if p.requires_grad]
        if self.replica is not self.model or not self.world.is_distributed or not trained:
            return
        # A parameter may have a gradient on some ranks only: these have 1 in `found`.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        has = [p.grad is not None for p in trained]
        # A copy from the host would wait for the device.
        found = gradients[0].new_ones(len(has)) if all(has) else gradients[0].new_tensor(has)
        averages = self.world.sum(torch.cat([*(one.flatten() for one in gradients), found]))
        averages /= self.world.size
        *parts, found = averages.split([*(one.numel() for one in gradients), len(trained)])
        for p, one, part, ranks in zip(trained, gradients, parts, found, strict=True):
            one.copy_(part.view_as(one))
            # The host waits for the device only if a gradient is missing.
            if p.grad is None and ranks > 0:
                p.grad = one

    def clip(self, norm: float) -> Tensor:
        # After the backward, every rank has all gradients, so this needs no communication.
        parameters = list(self.model.parameters())
        total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if norm < math.inf:
            nn.utils.clip_grads_with_norm_(parameters, norm, total)
        # Without a gradient, PyTorch's is on the host.
        return total.to(self.world.device)

    def checksum(self) -> Tensor:
        return checksum(list(self.model.parameters()))

    def weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]

    def model_state(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_model(self, saved: Mapping[str, Any]) -> None:
        self.model.load_state_dict(with_versions(saved, self.model))

    def state(self) -> dict[str, Any]:
        parts = parts_of(self.optimizer)
        # Not by class: its import takes half a second, and only zero1 has it.
        divided: list[Any] = [part for part in parts if hasattr(part, "consolidate_state_dict")]
        if divided:
            with torch_compat.no_foreign_objects():
                for part in divided:
                    part.consolidate_state_dict(to=0)
            if not self.world.ranks.first:
                return {}
            if self.world.device.type == "cuda":
                # It copies to the host without waiting for the copies.
                torch.cuda.current_stream(self.world.device).synchronize()
        return {"model": self.model_state(), "optimizer": self.optimizer.state_dict()}

    def load(self, saved: Mapping[str, Any]) -> None:
        self.load_model(saved["model"])
        # A checkpoint of a sharded model has names instead of numbers.
        names = parameter_names.order(self.model, self.optimizer)
        numbered = parameter_names.by_number(saved["optimizer"], names)
        self.optimizer.load_state_dict(numbered)
        for part in parts_of(self.optimizer):
            if hasattr(part, "consolidate_state_dict"):
                # ZeRO's own optimizer has the states. These are copies that nothing reads.
                part.state.clear()
        optimizers.keep_types(self.optimizer, numbered, [saved["model"].get(one) for one in names])


def _trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _without_gradient(wrapped: Sequence[str], text: str) -> list[str]:
    """Return the names of the parameters whose numbers are in DDP's error."""
    # With TORCH_DISTRIBUTED_DEBUG, it also has names after words that are nearly the same.
    found = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", text)
    numbers = map(int, found[1].split()) if found else ()
    return [wrapped[number] for number in numbers if number < len(wrapped)]


def single(experiment: Experiment, model: nn.Module, world: World) -> Replicated:
    """Use the model as it is."""
    return Replicated(model, model, optimizers.of(experiment, model), Shard(0, 1), world)


def data_parallel(experiment: Experiment, model: nn.Module, world: World) -> Replicated:
    """Wrap the model in DataParallel."""
    optimizer, wrap = optimizers.of(experiment, model), AutocastDataParallel
    return Replicated(model, wrap(model), optimizer, Shard(0, 1), world, wrap)


class AutocastDataParallel(DataParallel[Any]):
    """DataParallel whose threads use the caller's autocast dtype."""

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each replica on its input, in a thread; DataParallel.forward calls this."""
        # PyTorch hands down to its threads whether autocast is on, but not the dtype. So it is read
        # here, in the caller's thread.
        formats = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in ("cuda", "cpu")
        ]

        def call(replica: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for kind, dtype, is_enabled in formats:
                    stack.enter_context(torch.autocast(kind, dtype, is_enabled))
                return replica(*args, **kwargs)

        calls = [functools.partial(call, replica) for replica in replicas]
        outputs: list[Any] = super().parallel_apply(calls, inputs, kwargs)
        return outputs


def ddp(experiment: Experiment, model: nn.Module, world: World) -> Replicated:
    """Wrap the model in DistributedDataParallel, unless the experiment has turns."""
    train, optimizer = experiment.train, optimizers.of(experiment, model)
    if experiment.turns and train.ddp != Train.DDP():
        raise UserError(
            "train.ddp is for steps with one backward, and the experiment has turns: leave the "
            "settings of train.ddp out"
        )

    def wrap(model: nn.Module) -> nn.Module:
        # DDP refuses a model without parameters to train. It also wants a gradient for each of them
        # after each forward, and a turn may have several forwards, of a part of the model.
        has_one_backward = not experiment.turns and any(p.requires_grad for p in model.parameters())
        if not world.is_distributed or not has_one_backward:
            return model
        replica = torch_compat.ddp_class()(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            static_graph=train.ddp.static_graph,
            bucket_cap_mb=train.ddp.bucket_mb,
        )
        if train.ddp.compression == "bf16":
            replica.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return replica

    shard = Shard(world.ranks.rank, world.size)
    return Replicated(model, wrap(model), optimizer, shard, world, wrap)


def zero1(experiment: Experiment, model: nn.Module, world: World) -> Replicated:
    """Wrap the model in DDP, and divide the optimizer's state among the ranks (ZeRO-1).

    Raises UserError for parameters of several types, and if the optimizer has hooks, or arguments
    that are not in its `defaults`.
    """
    whole = ddp(experiment, model, world)
    if not world.is_distributed:
        return whole
    optimizer = whole.optimizer
    if isinstance(optimizer, JointOptimizer):
        parts = {name: _divided(part) for name, part in optimizer.parts.items()}
        return dataclasses.replace(whole, optimizer=JointOptimizer(parts))
    return dataclasses.replace(whole, optimizer=_divided(optimizer))


def _divided(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer with its state divided among the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind = type(optimizer)
    if switching(optimizer):
        raise UserError(
            f"train.strategy=zero1 cannot divide {kind.__name__}, which averages the weights "
            "itself: use ddp or fsdp"
        )
    parameters = inspect.signature(kind).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in parameters}
    try:
        divided = ZeroRedundancyOptimizer(optimizer.param_groups, kind, **settings)
    except (TypeError, ValueError) as error:
        # A ValueError names parameters of several types, which fsdp may refuse, too.
        instead = "ddp" if isinstance(error, ValueError) else "ddp or fsdp"
        raise UserError(
            f"train.strategy=zero1 cannot divide {kind.__name__}: {error}; use {instead}"
        ) from error
    _refuse_others(vars(optimizer), vars(divided.optim), kind.__name__)
    return divided


def _refuse_others(mine: Mapping[str, Any], other: Mapping[str, Any], kind: str) -> None:
    """Raise UserError for hooks and plain settings that the `other` optimizer has not."""
    there = _settings(other)
    if lost := [name for name, text in _settings(mine).items() if there.get(name) != text]:
        raise UserError(
            f"train.strategy=zero1 cannot divide {kind}: it makes one for each rank from the "
            f"optimizer's `defaults`, which have no {', '.join(lost)}; use ddp or fsdp"
        )


def _settings(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of plain values, and of the number of hooks. Objects may not be settings."""
    found = {name: len(one) if name.endswith("_hooks") else one for name, one in values.items()}
    return {
        name: repr(one)
        for name, one in found.items()
        if all(isinstance(part, _PLAIN) for part in (one if isinstance(one, tuple) else (one,)))
    }

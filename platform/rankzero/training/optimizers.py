"""The optimizers PyTorch can run as one kernel, run so; their options, when a run goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_map

from rankzero.experiment import Experiment


def of(experiment: Experiment, model: nn.Module) -> Optimizer:
    """Return the experiment's optimizer of `model`, fused where that changes nothing else."""
    return fused(experiment.optimizer(model), model, experiment.train.precision)


def fused(optimizer: Optimizer, model: nn.Module, precision: str) -> Optimizer:
    """Return `optimizer` of `model` in its fused form, where PyTorch has one and the user left the choice open.

    Only PyTorch's own classes with `fused=None`, as they are made: before their first step, without hooks. Not where
    gradients are sparse: fused forms do not take them. Not SGD with momentum under fp16: where the first step
    overflows, as a new loss scaler risks, the fused kernel leaves the momentum as memory was (seen with PyTorch 2.15).
    """
    if (
        precision == "fp16"
        and isinstance(optimizer, SGD)
        and any(group["momentum"] for group in optimizer.param_groups)
    ):
        return optimizer
    if (
        not type(optimizer).__module__.startswith("torch.optim")
        or optimizer.state
        or _has_hooks(optimizer)
    ):
        return optimizer
    if any(getattr(module, "sparse", False) is True for module in model.modules()):
        return optimizer
    if any(
        group.get("fused", False) is not None or group.get("foreach") or group.get("differentiable")
        for group in optimizer.param_groups
    ):
        return optimizer
    with contextlib.suppress(
        RuntimeError, ValueError, TypeError
    ):  # this device or number format has no fused form
        return _rebuilt(optimizer)
    return optimizer


def _has_hooks(optimizer: Optimizer) -> bool:
    """Tell whether the user hung something on the optimizer, which another would not have."""
    own = vars(optimizer)
    return "step" in own or any(own[name] for name in own if name.endswith("_hooks"))


def _rebuilt(optimizer: Optimizer) -> Optimizer:
    constructor: Any = type(optimizer)
    groups = [{**group, "fused": True} for group in optimizer.param_groups]
    rebuilt: Optimizer = constructor(groups, lr=optimizer.defaults["lr"], fused=True)
    return rebuilt


def one_by_one(optimizer: Optimizer) -> Optimizer:
    """Return `optimizer` so that it takes one parameter after the other: its kernels for many refuse a mixture."""
    for group in optimizer.param_groups:
        group.update({name: False for name in ("foreach", "fused") if name in group})
    return optimizer


def options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return each group's options, without the learning rate, which the schedule has."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in optimizer.param_groups
    ]


def as_values(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return options as values that nothing changes any more."""
    values: list[dict[str, Any]] = tree_map(
        lambda value: value.tolist() if isinstance(value, Tensor) else value, found
    )
    return values


def change_options(
    optimizer: Optimizer, now: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]
) -> None:
    """Set the options that differ between `then` and `now`, both as the experiment makes them.

    The others keep what a checkpoint had: some optimizers keep what they learn among their options.
    """
    for group, mine, before in zip(optimizer.param_groups, now, then, strict=True):
        (values,) = as_values([dict(mine)])
        group.update(
            {
                name: mine[name]
                for name in mine
                if name not in before or values[name] != before[name]
            }
        )


def place_steps(optimizer: Optimizer) -> None:
    """Put the counts of steps that a checkpoint had where the optimizer's kernels look for them.

    On the parameter's device where they are fused or captured, else on the host: PyTorch leaves them where the file was
    read, and a fused kernel refuses them there; one by one, each would be a wait for the device.
    """
    inner = getattr(optimizer, "optim", None)
    inner = (
        inner if isinstance(inner, Optimizer) else optimizer
    )  # ZeRO keeps the optimizer proper inside
    for group, own in zip(optimizer.param_groups, inner.param_groups, strict=True):
        if "fused" in group or "capturable" in group:
            _place_steps_of(
                inner, own["params"], bool(group.get("fused") or group.get("capturable"))
            )


def _place_steps_of(optimizer: Optimizer, parameters: Sequence[Tensor], on_device: bool) -> None:
    for parameter in parameters:
        state = optimizer.state.get(parameter) or {}
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device if on_device else "cpu")

"""Optimizers: fused where PyTorch can, their learning rates, and their options after a resume."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.training.data.batch import map_tensors
from rankzero.training.optimization import joint_optimizer
from rankzero.training.optimization.joint_optimizer import JointOptimizer


def of(experiment: Experiment, model: nn.Module, *, fuse: bool = True) -> Optimizer:
    """Return the experiment's optimizer of `model`, fused if that changes nothing else.

    Several optimizers become a JointOptimizer. Parameters that a single one lacks are frozen.
    Raises UserError if several do not divide the model's parameters among them, if one has none of
    them, or others, or if one needs a closure.
    """
    made = experiment.optimizer(model)
    for one in made.values() if isinstance(made, Mapping) else (made,):
        _check_steps_alone(one)
    if experiment.turns:
        joint_optimizer.check_turns(experiment, made)
    if isinstance(made, Mapping):
        joint_optimizer.check(made, model)
        for one in made.values():
            _refuse_others(one, model)
        parts = {name: fused(one, model) if fuse else one for name, one in made.items()}
        return JointOptimizer(parts)
    _freeze_others(made, model)
    _refuse_others(made, model)
    return fused(made, model) if fuse else made


def _freeze_others(optimizer: Optimizer, model: nn.Module) -> None:
    """Freeze what `optimizer` lacks. Nothing would clear those gradients, and a norm has them."""
    mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if trainable and mine.isdisjoint(trainable):
        raise UserError(
            "optimizer() returned an optimizer without a parameter of the model: build it from the "
            "parameters of the model that optimizer() is given"
        )
    # A lazy module refuses the call for parameters that have no shape yet.
    for parameter in trainable:
        if parameter not in mine:
            parameter.requires_grad_(False)


def _refuse_others(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise UserError for a parameter that `model` does not have.

    No checkpoint would have it, each rank would train its own, and no clipping would count it.
    """
    own = set(model.parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in own:
                raise UserError(
                    f"optimizer() has a parameter of shape {list(parameter.shape)} that is not in "
                    "the model: make its module a part of what model() returns, so that "
                    "checkpoints and all ranks have it"
                )


def _check_steps_alone(optimizer: Any) -> None:
    """Raise UserError if it is no optimizer, or if its step or its learning rate is its own."""
    if not hasattr(optimizer, "param_groups"):
        raise UserError(
            f"optimizer() returned {_named(optimizer)}: return a torch.optim.Optimizer, or {{name: "
            "optimizer}. The learning rates are those of train.schedule or schedule()"
        )
    step = getattr(optimizer, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if step else None
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"optimizer() returned {type(optimizer).__name__}, and a step of it needs a closure, "
            "which it calls several times: RankZero calls measure() once a step. Use another "
            "optimizer, or keep your own loop with rankzero.track"
        )
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise UserError(
            f"optimizer() returned {type(optimizer).__name__} without a learning rate, which "
            "train.schedule or schedule() multiplies: pass lr=…, and to Transformers' Adafactor "
            "relative_step=False"
        )


def fused(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """Return `optimizer` in its fused form, or unchanged if that could change more than the speed.

    The user must have left the choice open, with ``fused=None``.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or optimizer.state:
        return optimizer
    groups, own = optimizer.param_groups, vars(optimizer)
    # The rebuilt optimizer would lack the user's hooks and replaced methods.
    has_hooks = "step" in own or any(own[name] for name in own if name.endswith("_hooks"))
    is_chosen = any(
        group.get("fused", False) is not None or group.get("foreach") or group.get("differentiable")
        for group in groups
    )
    # Fused kernels take no sparse gradients.
    is_sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    # PyTorch has no fused SGD for parameters that are divided among ranks, which are DTensors.
    is_divided = any(hasattr(parameter, "to_local") for parameter in model.parameters())
    is_damped = any(group.get("dampening") for group in groups)
    is_unfit_sgd = isinstance(optimizer, SGD) and (is_divided or is_damped)
    if has_hooks or is_chosen or is_sparse or is_unfit_sgd:
        return optimizer
    constructor: Any = type(optimizer)
    # Some devices have no fused form, and lazy parameters no strides yet.
    with contextlib.suppress(RuntimeError, ValueError, TypeError):
        if not all(_is_dense(one) for group in groups for one in group["params"]):
            return optimizer
        fused_groups = [{**group, "fused": True} for group in groups]
        rebuilt: Optimizer = constructor(fused_groups, lr=optimizer.defaults["lr"], fused=True)
        return rebuilt
    return optimizer


def _is_dense(parameter: Tensor) -> bool:
    # Kernels on the CPU take the elements by their place in memory, as real numbers.
    dense = torch.empty_like(parameter, device="meta")
    return parameter.is_floating_point() and parameter.stride() == dense.stride()


def set_lr(
    optimizer: Optimizer,
    base_lrs: Sequence[float],
    factors: float | Sequence[float] | Mapping[str, float],
) -> None:
    """Set every group's learning rate to its base times the factor, or times its own factor.

    Raises UserError if the number of factors is not the number of groups, or of optimizers.
    """
    # The usual single factor comes first: this runs in each step.
    if isinstance(factors, float):
        rates = [base * factors for base in base_lrs]
    else:
        each = _by_group(optimizer, factors)
        rates = [base * factor for base, factor in zip(base_lrs, each, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        # A compiled or captured step reads the learning rate from a tensor, which must stay.
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _by_group(
    optimizer: Optimizer, factors: float | Sequence[float] | Mapping[str, float]
) -> Sequence[float]:
    groups = len(optimizer.param_groups)
    if isinstance(factors, Mapping):
        parts = optimizer.parts if isinstance(optimizer, JointOptimizer) else {}
        if sorted(factors) != sorted(parts):
            raise UserError(
                f"schedule() returned factors for {', '.join(factors)}, but optimizer() returns "
                f"{', '.join(parts) or 'one optimizer'}: return one factor for each optimizer"
            )
        return [factors[name] for name, part in parts.items() for _ in part.param_groups]
    # An array or a tensor is no Sequence. One of a single number is a factor for all groups.
    values: Any = factors
    if getattr(values, "ndim", 0):
        values = values.tolist() if len(values) != 1 else values[0]
    if not isinstance(values, Sequence):
        try:
            return [float(values)] * groups
        except TypeError as error:
            raise UserError(
                f"schedule() returned {_named(values)}: return one float, or one for each group"
            ) from error
    if len(values) != groups:
        raise UserError(
            f"schedule() returned {len(values)} factors, but the optimizer has {groups} parameter "
            "groups: return one float, or one for each group"
        )
    return values


def _named(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """Return each group's learning rate: ``lr``, then ``lr/<name>``, or ``lr/1`` without a name.

    With several optimizers, ``lr`` is that of the first, and ``lr/<optimizer>`` that of each.
    """
    if isinstance(optimizer, JointOptimizer):
        every = {name: learning_rates(part) for name, part in optimizer.parts.items()}
        named = {
            f"lr/{part}{name.removeprefix('lr')}": lr
            for part, rates in every.items()
            for name, lr in rates.items()
        }
        return {"lr": next(iter(named.values())), **named}
    first, *others = optimizer.param_groups
    named = {f"lr/{group.get('name', i)}": group["lr"] for i, group in enumerate(others, 1)}
    return {name: float(lr) for name, lr in {"lr": first["lr"], **named}.items()}


def options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return each group's options but the learning rate, which the schedule sets."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in optimizer.param_groups
    ]


def as_values(options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return options as plain values: a later step changes no tensor among them."""
    values: list[dict[str, Any]] = map_tensors(options, Tensor.tolist)
    return values


def change_options(
    optimizer: Optimizer, now: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]
) -> None:
    """Set the options that the user has changed since the checkpoint was saved.

    `now` and `then` are the options as the experiment creates them.
    """
    # The others keep the checkpoint's values: some optimizers store what they learn among their
    # options.
    for group, mine, before in zip(optimizer.param_groups, now, then, strict=True):
        (values,) = as_values([dict(mine)])
        changed = [name for name in mine if name not in before or values[name] != before[name]]
        group.update({name: mine[name] for name in changed})


def keep_types(
    optimizer: Optimizer, saved: Mapping[str, Any], weights: Sequence[Tensor | None]
) -> None:
    """Give each loaded state the number format that it was saved in.

    PyTorch casts it to that of its parameter. `saved`: by the parameters' numbers. `weights`: the
    checkpoint's; where a parameter has another format than its weight, its state follows.
    """
    states = optimizer.state  # which several optimizers make anew at each look
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, (parameter, weight) in enumerate(zip(every, weights, strict=True)):
        state, before = states.get(parameter) or {}, saved["state"].get(number) or {}
        if weight is None or weight.dtype != parameter.dtype:
            continue
        for name, value in state.items():
            was = before.get(name)
            # A fused kernel reads the step count in a format of its own.
            if name != "step" and isinstance(was, Tensor) and was.dtype != value.dtype:
                state[name] = was.to(value.device, copy=True)


def place_states(optimizer: Optimizer) -> None:
    """Give the states the device and the layout that the kernels read, and SGD its momentum."""
    for part in joint_optimizer.parts_of(optimizer):
        # ZeroRedundancyOptimizer holds the real optimizer as `optim`.
        inner = getattr(part, "optim", None)
        inner = inner if isinstance(inner, Optimizer) else part
        for group, own in zip(part.param_groups, inner.param_groups, strict=True):
            if "fused" not in group and "capturable" not in group:
                continue
            # PyTorch leaves the counts on the CPU, where a fused kernel refuses them. Other kernels
            # read them on the CPU: on a GPU, each read would wait for the device.
            on_device = bool(group.get("fused") or group.get("capturable"))
            # A class of the user's may take a state that it did not make for one of its own.
            if type(inner) is SGD and group.get("fused"):
                _begin_momentum(group, own["params"], inner)
            for parameter in own["params"]:
                state = inner.state.get(parameter) or {}
                for name, value in state.items():
                    if name in ("step", "mu_product") and isinstance(value, Tensor):
                        state[name] = value.to(parameter.device if on_device else "cpu")
                    elif isinstance(value, Tensor) and value.shape == parameter.shape:
                        state[name] = _in_layout_of(parameter, value)


def _begin_momentum(group: Mapping[str, Any], parameters: Sequence[Tensor], sgd: Optimizer) -> None:
    # The fused SGD fails if only some parameters have a momentum. If its first step overflows
    # under a loss scaler, it leaves uninitialised memory there (both seen with PyTorch 2.15). With
    # zeros, the first step has the same bits as without, unless there is dampening.
    # One that is lazy now could not have zeros at the first step, so then none has.
    if not group["momentum"] or group["dampening"] or any(map(is_lazy, parameters)):
        return
    for parameter in parameters:
        if parameter.requires_grad:
            sgd.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def _in_layout_of(parameter: Tensor, value: Tensor) -> Tensor:
    # A resume may change train.channels_last. Fused kernels refuse another layout, or misread it.
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)

"""How a step's work is divided among processes: one module for each group of strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.training.data.batch import channels_last
from rankzero.training.distributed.world import World
from rankzero.training.strategies.base import Measure, Strategy

_SAME_SAMPLES = ("tp", "pp")
"""Strategies under which all ranks see the same samples."""


def shards(name: str, world_size: int) -> int:
    """Return the number of parts that a batch is divided into."""
    return 1 if name in _SAME_SAMPLES else world_size


def processes(name: str, gpus: int) -> int:
    """Return the default number of processes on a machine with this many GPUs."""
    return 1 if name in ("single", "dp") else max(1, gpus)


def layout(name: str, world_size: int) -> str:
    """Return which random streams the ranks have. Checkpoints record it.

    If it is equal before and after a resume, a saved stream belongs to the same rank.
    """
    return f"{name if name in _SAME_SAMPLES and world_size > 1 else 'data'} x {world_size}"


def build(
    experiment: Experiment,
    model: nn.Module,
    world: World,
    measure: Measure,
    example: Callable[[], Any],
) -> Strategy:
    """Make `model`, which is on the host, ready under ``train.strategy``. A collective.

    `measure`, `example`: the first step's, and what returns a micro-batch. Strategies that trace
    the model call them. Raises UserError if the
    strategy does not fit the experiment or the number of processes.
    """
    # Each strategy imports its own part of torch.distributed, which takes time.
    train = experiment.train
    if train.compile and train.strategy in ("dp", "tp", "pp"):
        _refuse("compile", train.strategy)
    if train.recompute:
        if train.strategy in ("dp", "pp"):
            _refuse("recompute", train.strategy)
        from rankzero.training.strategies import units

        units.recompute(model, compiled=train.compile)
    if train.channels_last:
        if train.strategy in ("fsdp", "tp", "pp"):
            _refuse("channels_last", train.strategy)
        model.to(memory_format=torch.channels_last)
        model.register_forward_pre_hook(_channels_last, with_kwargs=True)
    match train.strategy:
        case "single" | "dp" | "ddp" | "zero1":
            from rankzero.training.strategies import replicated

            make = {
                "single": replicated.single,
                "dp": replicated.data_parallel,
                "ddp": replicated.ddp,
                "zero1": replicated.zero1,
            }[train.strategy]
            if train.compile:
                model.compile()
            return make(experiment, model.to(world.device), world)
        # A model that is divided is moved in parts: all of it need not fit into a GPU's memory.
        case "fsdp":
            from rankzero.training.strategies import sharded

            return sharded.fsdp(experiment, model, world)
        case "tp":
            from rankzero.training.strategies import sharded

            return sharded.tensor_parallel(experiment, model, world)
        case "pp":
            return _pipeline(experiment, model, world, measure, example)


def _channels_last(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return channels_last((args, kwargs))


def _refuse(setting: str, strategy: str) -> NoReturn:
    raise UserError(
        f"train.{setting} and train.strategy={strategy} do not go together: set "
        f"train.{setting}=false"
    )


def _pipeline(
    experiment: Experiment,
    model: nn.Module,
    world: World,
    measure: Measure,
    example: Callable[[], Any],
) -> Strategy:
    from rankzero.training.optimization import optimizers
    from rankzero.training.strategies import parameter_names, replicated, stages
    from rankzero.training.strategies.pipeline import Pipeline, micro_batches

    train = experiment.train
    if train.precision == "fp16":
        raise UserError("train.strategy=pp does not do fp16: use bf16")
    if train.eval_batch is not None and train.eval_batch > train.batch_size:
        raise UserError(
            f"train.eval_batch={train.eval_batch}: train.strategy=pp evaluates batches of at most "
            f"train.batch_size={train.batch_size} samples, so set it to that or less"
        )
    if not world.is_distributed:
        return replicated.single(experiment, model.to(world.device), world)
    whole = experiment.optimizer(model)
    if isinstance(whole, Mapping):
        raise UserError(
            f"train.strategy=pp takes one optimizer, and optimizer() returned {len(whole)}: return "
            "one, or use ddp or fsdp"
        )
    names = parameter_names.order(model, whole)
    size = train.batch_size // micro_batches(train, world.size)

    def micro_batch() -> Tensor:
        return stages.input_of(measure, example())[:size]

    stage = stages.make_stage(
        model, experiment.split_points(), world.ranks.rank, world.size, world.device, micro_batch
    )
    return Pipeline(stage, optimizers.of(experiment, stage.submod), names, train, world)

"""How a step's work is divided among processes: a room for each way, one interface, chosen by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.training.distributed.world import World
from rankzero.training.strategies.base import Strategy

SAME_SAMPLES = ("tp", "pp")
"""Strategies under which all ranks see the same samples."""


def shards(name: str, world_size: int) -> int:
    """Return into how many parts a batch is cut under a strategy."""
    return 1 if name in SAME_SAMPLES else world_size


def processes(name: str, gpus: int) -> int:
    """Return how many processes a machine with so many GPUs runs under a strategy, unless the user says."""
    return 1 if name in ("single", "dp") else max(1, gpus)


def layout(name: str, world_size: int) -> str:
    """Return whose random streams the ranks have: where it is the same, a saved stream is the same rank's."""
    return f"{name if name in SAME_SAMPLES and world_size > 1 else 'data'} x {world_size}"


def build(
    experiment: Experiment, model: nn.Module, world: World, example: Callable[[], Any]
) -> Strategy:
    """Make `model`, which is on the host, ready under ``train.strategy`` on this rank's device. All ranks call it.

    A model that is divided is moved in parts: the whole of it need not fit, unless it is traced.
    `example`: a micro-batch, for those that trace the model. Raises UserError where the strategy cannot be had.
    """
    train = experiment.train
    if train.compile and train.strategy in ("dp", "tp", "pp"):
        raise UserError(
            f"train.compile and train.strategy={train.strategy} do not go together: set train.compile=false"
        )
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
        case "fsdp":
            from rankzero.training.strategies import sharded

            return sharded.fsdp(experiment, model, world)
        case "tp":
            from rankzero.training.strategies import sharded

            return sharded.tensor_parallel(experiment, model, world)
        case "pp":
            return _pipeline(experiment, model, world, example)


def _pipeline(
    experiment: Experiment, model: nn.Module, world: World, example: Callable[[], Any]
) -> Strategy:
    from rankzero.training import optimizers
    from rankzero.training.strategies import parameter_names, replicated, stages
    from rankzero.training.strategies.pipeline import Pipeline, micro_batches

    train = experiment.train
    if train.precision == "fp16":
        raise UserError("train.strategy=pp does not do fp16: use bf16")
    if not world.is_distributed:
        return replicated.single(experiment, model.to(world.device), world)
    names = parameter_names.order(model, experiment.optimizer(model))
    size = train.batch_size // micro_batches(train, world.size)

    def micro_batch() -> Tensor:
        return stages.given_to(experiment.measure, example())[:size]

    stage = stages.make_stage(
        model, experiment.split_points(), world.ranks.rank, world.size, world.device, micro_batch
    )
    return Pipeline(stage, optimizers.of(experiment, stage.submod), names, train, world)

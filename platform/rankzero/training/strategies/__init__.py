"""How a step's work is divided among processes: one module for each group of strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from rankzero.experiment import Experiment
from rankzero.ranks import SAME_SAMPLES
from rankzero.training import strategy_check
from rankzero.training.data.batch import channels_last
from rankzero.training.distributed.world import World
from rankzero.training.strategies.base import Measure, Strategy
from rankzero.training.strategies.compiled_call import compile_whole


def layout(name: str, world_size: int) -> str:
    """Return which random streams the ranks have. Checkpoints record it.

    If it is equal before and after a resume, a saved stream belongs to the same rank.
    """
    return f"{name if name in SAME_SAMPLES and world_size > 1 else 'data'} x {world_size}"


def build(
    experiment: Experiment,
    model: nn.Module,
    world: World,
    measure: Measure,
    example: Callable[[], Any],
) -> Strategy:
    """Make `model`, which is on the host, ready under ``train.strategy``. A collective.

    `measure`, `example`: the first step's, and what returns a micro-batch. Strategies that trace
    the model call them. Raises UserError if the strategy does not fit the experiment or the number
    of processes.
    """
    train = experiment.train
    strategy_check.check(experiment, world.size, on_gpu=world.device.type == "cuda")
    # Each strategy imports its own part of torch.distributed, which takes time.
    if train.recompute:
        from rankzero.training.strategies import units

        units.recompute(model, compiled=train.compile)
    if train.channels_last:
        # Module.to would also convert 5-d weights, which have no such layout.
        for one in (*model.parameters(), *model.buffers()):
            one.data = channels_last(one.data)
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
                # Two sizes of batches take turns. Code for any size would change the bits.
                compile_whole(model, dynamic=None if train.drop_last else False)
            return make(experiment, model.to(world.device), world)
        # A model that is divided is moved in parts: all of it need not fit into a GPU's memory.
        case "fsdp" | "tp":
            from rankzero.training.strategies import sharded

            divide = sharded.fsdp if train.strategy == "fsdp" else sharded.tensor_parallel
            return divide(experiment, model, world)
        case "pp":
            from rankzero.training.strategies import pipeline

            return pipeline.build(experiment, model, world, measure, example)


def _channels_last(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return channels_last((args, kwargs))

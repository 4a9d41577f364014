"""How a step's work is divided among processes: one module for each group of strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.ranks import SAME_SAMPLES
from rankzero.training.data.batch import channels_last
from rankzero.training.distributed.world import World
from rankzero.training.strategies.base import Measure, Strategy
from rankzero.training.strategies.compiled_call import compile_whole

_REFUSED = (
    ("compile", "true", "false", ("dp", "tp", "pp")),
    ("recompute", "true", "false", ("dp", "pp")),
    ("channels_last", "true", "false", ("fsdp", "tp", "pp")),
    # A pipeline takes batches of one size.
    ("drop_last", "false", "true", ("pp",)),
    # The loss scaler refuses a mixture of plain tensors and DTensors.
    ("precision", "fp16", "bf16", SAME_SAMPLES),
)
"""Settings, their values that these strategies do not take, and what to set."""
NO_PLAN = (
    "train.strategy=tp needs the experiment to say how its layers are divided: def "
    "parallelize(self): return {'layer.name': ColwiseParallel(), …}, as "
    "torch.distributed.tensor.parallel.parallelize_module takes it"
)


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
    check(experiment, world.size, on_gpu=world.device.type == "cuda")
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


def check(experiment: Experiment, processes: int, *, on_gpu: bool) -> None:
    """Raise UserError if the strategy cannot train the experiment in so many processes."""
    train, strategy = experiment.train, experiment.train.strategy
    for setting, value, instead, refusing in _REFUSED:
        if strategy in refusing and str(getattr(train, setting)).lower() == value:
            raise UserError(
                f"train.{setting}={value} and train.strategy={strategy} do not go together: set "
                f"train.{setting}={instead}"
            )
    if strategy == "dp" and not on_gpu:
        raise UserError(
            "train.strategy=dp divides a batch among GPUs, and there is none: use ddp, which runs "
            "on CPUs, too"
        )
    if strategy in ("single", "dp") and processes > 1:
        raise UserError(
            f"train.strategy={strategy} is one process, not {processes}: give --nproc 1 on one "
            "machine, or use ddp"
        )
    # Only a rank may call it: the plan may ask the process group, or for what `model()` has made.
    if strategy == "tp" and type(experiment).parallelize is Experiment.parallelize:
        raise UserError(NO_PLAN)


def _channels_last(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return channels_last((args, kwargs))

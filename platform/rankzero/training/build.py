"""Build a training from an experiment: data, model, strategy and state, on this rank's device."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rankzero import ranks
from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.telemetry.host import core_count
from rankzero.training import malloc, parameter_counts, rng, strategies
from rankzero.training.data import processes, sets, stream
from rankzero.training.data.order import BatchOrder
from rankzero.training.data.stream import Loader
from rankzero.training.distributed import device, torch_compat
from rankzero.training.distributed.world import World
from rankzero.training.job import State, TrainingContext
from rankzero.training.metrics import work_meter
from rankzero.training.metrics.stateful import without_stateful
from rankzero.training.metrics.straggler import ForwardTimer
from rankzero.training.metrics.window import check_metrics
from rankzero.training.optimization import frozen, precision
from rankzero.training.optimization.averaged_weights import AveragedWeights
from rankzero.training.optimization.frozen import FrozenParts
from rankzero.training.optimization.optimizer_average import OptimizerAverage, switching
from rankzero.training.optimization.optimizers import as_values, options, place_states
from rankzero.training.strategies.base import Strategy
from rankzero.training_position import Progress, measure_at


def build(
    experiment: Experiment, world: World, data: tuple[Any, Mapping[str, Any]] | None = None
) -> tuple[TrainingContext, State]:
    """Build what the experiment describes, on this rank's device. Collective.

    `data`: what `sets.load` returned before, to use it again.
    """
    amp = _set_up_process(experiment, world)
    train_set, val_sets = data or sets.load(experiment)
    order = _batch_order(experiment, world, train_set, val_sets)
    model_randoms = rng.state(torch.device("cpu"))
    # On the CPU: a strategy moves this rank's part.
    model = model_of(experiment)
    trainable = [name for name, one in model.named_parameters() if one.requires_grad]
    make_loader = _loader_factory(experiment, world)
    train_loader = make_loader(train_set)
    example_batch = functools.partial(_example_batch, train_loader, order)
    total = experiment.train.steps or (experiment.train.epochs or 0) * order.steps_per_epoch
    # After the model, so that its weights do not depend on the helpers.
    start = Progress(0, total, 0, True, frozen.helpers(experiment, world.device))
    timer = _forward_timer(experiment, world)
    meter = work_meter.of(experiment, timer.measure, model, world, start)
    strategy = strategies.build(
        experiment, model, world, measure_at(experiment.measure, start), example_batch
    )
    # From here on, ranks with other samples draw other numbers, for dropout.
    rng.seed_all(experiment.train.seed, 1 + strategy.shard.rank)
    job = TrainingContext(
        experiment,
        world,
        order,
        total,
        amp,
        strategy,
        train_loader,
        {group: make_loader(one) for group, one in val_sets.items()},
        make_loader,
        timer,
        FrozenParts(experiment, model),
        work_meter=meter,
        helpers=start.helpers,
        model_tags=parameter_counts.tags(model),
        model_randoms=model_randoms,
        left_out=[name for name in trainable if not model.get_parameter(name).requires_grad],
    )
    state = _initial_state(strategy, model, experiment.train.ema)
    job.frozen_parts.begin(0, strategy)
    place_states(strategy.optimizer)
    malloc.keep_freed_memory()
    return job, state


def model_of(experiment: Experiment) -> nn.Module:
    """Return the experiment's new model. Raises UserError if it is none, or in DDP already."""
    model = experiment.model()
    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise UserError(f"model() returned {found}: return a torch.nn.Module, such as `return net`")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UserError(
            "model() returned a DistributedDataParallel: return its .module, because "
            "train.strategy wraps it"
        )
    # A pretraining within model() leaves gradients.
    model.zero_grad()
    return model


def _set_up_process(experiment: Experiment, world: World) -> precision.Precision:
    """Set what holds for the whole process: determinism, threads, number formats, seeds."""
    train = experiment.train
    if train.deterministic:
        # cuBLAS has two reproducible settings. The other one may be slower, this one takes 24 MiB.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    device.set_threads(world.ranks)
    torch_compat.keep_compiled_code_private()
    # Under fsdp, the gradient of a weight that is used twice would come after its reduction, and
    # enter the next step (seen with PyTorch 2.15).
    amp = precision.set_up(train.precision, world.device, keeps_casts=train.strategy != "fsdp")
    rng.seed_all(train.seed)
    return amp


def _batch_order(
    experiment: Experiment, world: World, train_set: Any, val_sets: Mapping[str, Any]
) -> BatchOrder:
    """Return the order, after a check that all ranks have the same data. Collective."""
    named = {sets.context(group): one for group, one in val_sets.items()}
    sets.check_same(world, "data()", {"training": train_set, **named}, experiment.train)
    shards = ranks.shards(experiment.train.strategy, world.size)
    return sets.batch_order(experiment, world, train_set, shards)


def _loader_factory(experiment: Experiment, world: World) -> Callable[[Any], Loader]:
    train = experiment.train
    return functools.partial(
        stream.make_loader,
        device=world.device,
        ranks=ranks.shards(train.strategy, world.size),
        seed=train.seed,
        workers=processes.loader_workers(train.workers, world.ranks.local_world_size, core_count()),
        collate=experiment.collate,
    )


def _example_batch(loader: Loader, order: BatchOrder) -> Any:
    # Only a pipeline calls this, because it traces the model. Other strategies must not pay for
    # loading processes that start and end for one batch.
    with stream.at_its_place(loader.dataset):
        (batch,) = itertools.islice(loader.train_batches(order, 0, 0, 1), 1)
    return batch


def _initial_state(strategy: Strategy, model: nn.Module, ema: float | None) -> State:
    average: AveragedWeights | OptimizerAverage | None = None
    if ema is not None:
        average = AveragedWeights(strategy, model, ema)
    if parts := switching(strategy.optimizer):
        if ema is not None:
            raise UserError(
                f"train.ema={ema}, and {type(parts[0]).__name__} averages the weights itself: "
                "leave train.ema out"
            )
        average = OptimizerAverage(strategy)
    return State(
        strategy.model,
        strategy.optimizer,
        [float(group["lr"]) for group in strategy.optimizer.param_groups],
        as_values(options(strategy.optimizer)),
        average,
    )


def _forward_timer(experiment: Experiment, world: World) -> ForwardTimer:
    stateful = experiment.metrics().keys()
    return ForwardTimer(
        world.device,
        without_stateful(experiment.measure, stateful),
        functools.partial(check_metrics, stateful=stateful),
    )

"""Validation: means over every sample of all ranks, and whether they are the best so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rankzero.errors import UserError
from rankzero.events import Emit
from rankzero.training import rng
from rankzero.training.data.order import most_batches
from rankzero.training.job import State, TrainingContext, arithmetic
from rankzero.training.metrics.window import EvaluationMeans
from rankzero.training.sample_images.user_images import close_figures, images_of
from rankzero.training.stop import EvaluationInterrupted, Stop, StopPoll


def evaluation(job: TrainingContext, state: State, stop: Stop) -> tuple[dict[str, float], bool]:
    """Evaluate, compare the replicas, and tell whether the goal metric is the best so far. Raises Left."""
    unlike = job.world.ranks_that_differ(job.strategy.checksum())
    if unlike:
        raise UserError(
            f"the parameters of rank {', '.join(map(str, unlike))} are not rank 0's after step {state.step}: something "
            "changes the model on one rank only, such as a write to a parameter outside the optimizer"
        )
    metrics, goal = evaluate(job, state, stop), job.experiment.goal
    if goal.metric not in metrics:
        raise UserError(
            f"the goal is {goal.metric!r}, but measure() returns {sorted(metrics)}: set goal.metric"
        )
    better = goal.better(metrics[goal.metric], state.best)
    if better:
        state.best = metrics[goal.metric]
    return metrics, better


def evaluate(job: TrainingContext, state: State, stop: Stop) -> dict[str, float]:
    """Return ``val/<metric>`` means over every validation sample of all ranks. A collective.

    Raises Left where a stop has it left, with the random states of before: it can begin anew.
    """
    strategy, how, means = job.strategy, arithmetic(job), EvaluationMeans(job.world)
    strategy.sync_buffers()  # running statistics differ by rank; rank 0's are the checkpoint's
    before = rng.state(job.world.device)  # `measure` may draw
    state.model.eval()
    interruption = StopPoll(job.world, stop)
    try:
        with torch.no_grad(), job.image_capture.watching(state.model) as see:
            for batch, samples in validation_batches(job):
                interruption.check()
                values = None if batch is None else strategy.forward_metrics(how, batch)
                job.beat()
                if values is not None:
                    means.add(values, samples)
                    see(batch, samples)
    except EvaluationInterrupted:
        job.image_capture.forget()
        rng.restore(before, job.world.device)
        raise
    finally:
        state.model.train()
    return {f"val/{name}": value for name, value in means.reduce().items()}


def validation_batches(job: TrainingContext) -> Iterator[tuple[Any, int]]:
    """Yield this rank's validation batches and how many samples each counts for: as many on every rank.

    A rank that has run out gets None for 0 samples, or its last again for 0 where a forward is a collective.
    """
    shard, batch_size = job.strategy.shard, job.batch_order.micro_batch
    batch, count = None, 0
    for batch, samples in job.val_loader.eval_batches(batch_size, shard.rank, shard.size):
        count += 1
        yield batch, samples
    if job.strategy.lockstep and batch is None:
        raise UserError(
            "the validation set has fewer samples than there are processes: give it more, or use ddp"
        )
    for _ in range(count, most_batches(job.val_loader.samples, batch_size, shard.size)):
        yield (batch if job.strategy.lockstep else None), 0


def show(
    job: TrainingContext, state: State, *, better: bool, last: bool, seconds: float, emit: Emit
) -> None:
    """Take pictures of the evaluation that has just been, where they are due; `seconds` of training so far.

    A collective where the experiment has pictures of its own.
    """
    gallery = job.image_capture
    if not gallery.due(better, last, seconds):
        gallery.forget()
        return
    taken = gallery.take(state.step, _own_pictures(job, state))
    if taken is not None:
        emit(taken)


def _own_pictures(job: TrainingContext, state: State) -> Mapping[str, Any]:
    """Return the experiment's own images, on rank 0. Other ranks call it too: a forward may need them all."""
    own, batch, device = job.image_capture.own, job.image_capture.first_batch, job.world.device
    if own is None or batch is None:
        return {}
    before, returned = rng.state(device), None
    state.model.eval()
    try:
        with torch.no_grad(), job.precision.autocast:
            returned = own(state.model, batch)
        return images_of(returned) if job.world.ranks.first else {}
    except Exception as error:  # what is only to be looked at ends no run
        job.image_capture.complain(f"pictures() failed: {type(error).__name__}: {error}")
        return {}
    finally:
        close_figures(returned)
        state.model.train()
        rng.restore(before, device)

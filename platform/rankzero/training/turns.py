"""A step in turns: each optimizer steps on a loss of its own, as in a GAN or an actor and a critic.

    turns = ("discriminator", "generator")

In each turn, `measure` gets `at.turn` and the same samples. All gradients are added up, those of
the other optimizers are dropped, and one optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rankzero.training.job import State, TrainingContext
from rankzero.training.optimization.gradients import accumulate, apply_gradients
from rankzero.training.optimization.joint_optimizer import JointOptimizer
from rankzero.training.optimization.optimizers import set_lr


def train_step(
    job: TrainingContext, state: State, batches: Iterator[Any]
) -> tuple[dict[str, Tensor], float]:
    """Let each optimizer step once. Return metrics and seconds as `loop.train_step`. Collective.

    A turn's metrics have its name in front: ``generator/loss``.
    """
    set_lr(state.optimizer, state.base_lrs, job.experiment.schedule(state.step, job.total_steps))
    begun = time.perf_counter()
    micro_batches = [next(batches) for _ in range(job.batch_order.accumulation)]
    data_wait = time.perf_counter() - begun
    metrics: dict[str, Tensor] = {}
    parts = state.optimizer.parts if isinstance(state.optimizer, JointOptimizer) else {}
    for turn in job.experiment.turns:
        metrics |= _take_turn(job, state, parts, turn, micro_batches)
    if job.precision.scaler is not None:
        job.precision.scaler.update()
    if state.average is not None:
        state.average.update(state.step + 1)
    return metrics, data_wait


def _take_turn(
    job: TrainingContext,
    state: State,
    parts: Mapping[str, Optimizer],
    turn: str,
    batches: list[Any],
) -> dict[str, Tensor]:
    how = job.micro_batch_step(state.step, training=True, turn=turn)
    metrics, _ = accumulate(job, how, iter(batches))
    for name, part in parts.items():
        if name != turn:
            part.zero_grad(set_to_none=True)
    job.strategy.average_gradients(parts[turn])
    norm = apply_gradients(job, parts[turn])
    parts[turn].zero_grad(set_to_none=True)
    if norm is not None:
        metrics["gradient_norm"] = norm
    return {f"{turn}/{name}": value for name, value in metrics.items()}

"""The gradients of a step: added up over micro-batches, clipped, and used."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rankzero.training.job import TrainingContext
from rankzero.training.strategies.base import MicroBatchStep, divide_gradients


def accumulate(
    job: TrainingContext, how: MicroBatchStep, batches: Iterator[Any]
) -> tuple[dict[str, Tensor], float]:
    """Add up the gradients of a step. Return its metrics, and the seconds of waiting for data.

    Collective.
    """
    strategy = job.strategy
    metrics: dict[str, Tensor] = {}
    data_wait = 0.0
    for index in range(how.accumulation):
        begun = time.perf_counter()
        batch = next(batches)
        data_wait += time.perf_counter() - begun
        job.beat()
        job.image_capture.see_training_batch(batch)
        # Ranks average their gradients once a step, during the last backward.
        is_last = index == how.accumulation - 1
        with contextlib.nullcontext() if is_last else strategy.no_sync():
            values = strategy.forward_backward(how, batch)
        if how.accumulation > 1:
            values = {
                name: v / how.accumulation + metrics.get(name, 0.0) for name, v in values.items()
            }
        metrics = values
    if metrics["loss"].dim():
        # A Ratio: only now is its whole denominator known.
        divide_gradients(strategy.model, metrics["loss"], how.samples, job.world)
    return metrics, data_wait


def apply_gradients(job: TrainingContext, optimizer: Optimizer) -> Tensor | None:
    """Clip the gradients, and let `optimizer` step. Return their norm if it is logged."""
    train, scaler, norm = job.experiment.train, job.precision.scaler, None
    if train.clip is not None or train.log_gradient_norm:
        # The norm is bounded in true units, so the loss scale must go first.
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = job.strategy.clip(train.clip or math.inf)
    if scaler is None:
        optimizer.step()
    elif any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        # The scaler skips the step if a gradient overflowed.
        scaler.step(optimizer)
    return norm if train.log_gradient_norm else None

"""Plans the next launch after a device ran out of memory: the same batch, in smaller pieces."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rankzero import config
from rankzero.launch import failures
from rankzero.launch.request import OUT_OF_MEMORY

if TYPE_CHECKING:
    from rankzero.cli.launch_run import LaunchPlan


def with_half_the_micro_batch(plan: LaunchPlan) -> LaunchPlan | None:
    """Return a plan with half the micro-batch if a device ran out of memory, or None."""
    from rankzero.training import strategies
    from rankzero.training.data.order import micro_batch_size

    train, topology = plan.experiment.train, plan.topology
    first = failures.first(plan.folder.failures)
    if first is None or first.kind is not failures.FailureKind.OUT_OF_MEMORY:
        return None
    # With several machines, only one of them knows why the ranks ended.
    if train.limits.oom == "fail" or topology.nodes > 1 or train.strategy == "pp":
        return None
    size = micro_batch_size(train, strategies.shards(train.strategy, topology.processes))
    if size % 2:
        return None
    halved = f"{plan.tags.get(OUT_OF_MEMORY, f'micro-batch {size}')} -> {size // 2}"
    # An evaluation may be what needs the memory.
    smaller = train.eval_batch and max(1, train.eval_batch // 2)
    changes = {"train.micro_batch": size // 2, "train.eval_batch": smaller}
    experiment = config.override(plan.experiment, changes)
    return dataclasses.replace(plan, experiment=experiment, tags={OUT_OF_MEMORY: halved})

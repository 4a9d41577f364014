"""After a device ran out of memory: the same batch, in smaller pieces."""

from __future__ import annotations

from rankzero import config
from rankzero.experiment import Experiment
from rankzero.launch import failures
from rankzero.launch.agent import Topology
from rankzero.run_store.folder import RunFolder


def with_half_the_micro_batch(
    experiment: Experiment, topology: Topology, folder: RunFolder
) -> tuple[int, Experiment] | None:
    """Return the micro-batch that was too large and an experiment with half of it.

    None if the attempt failed for another reason, or if the micro-batch cannot be halved.
    """
    from rankzero.training import strategies
    from rankzero.training.data.order import micro_batch_size

    train = experiment.train
    first = failures.first(folder.failures)
    if first is None or first.kind is not failures.FailureKind.OUT_OF_MEMORY:
        return None
    # With several machines, only one of them knows why the ranks ended.
    if train.limits.oom == "fail" or topology.nodes > 1 or train.strategy == "pp":
        return None
    size = micro_batch_size(train, strategies.shards(train.strategy, topology.processes))
    if size % 2:
        return None
    # An evaluation may be what needs the memory.
    smaller = train.eval_batch and max(1, train.eval_batch // 2)
    changes = {"train.micro_batch": size // 2, "train.eval_batch": smaller}
    return size, config.override(experiment, changes)

"""Name the limit of a run's speed: data, compute, communication, or one slow rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rankzero.reporting.run_facts import Facts
from rankzero.scalars import number

# The share of the training time from which waiting for data limits the speed.
_DATA_BOUND = 0.1
# Percent. Below it, a GPU waits for something else than data: launches or communication.
_BUSY_GPU = 70.0


def limited_by(facts: Facts, wait: float) -> str:
    """Return what limited the speed, as far as the metrics of every run show it."""
    busy = facts.gpu_means.get("utilization_percentage")
    if wait >= _DATA_BOUND:
        return "data: load faster (`train.workers`), or keep the data set in memory"
    if busy is not None and busy < _BUSY_GPU:
        return (
            "neither data nor arithmetic: `rankzero profile` shows whether it is communication "
            "or small steps"
        )
    # Ranks that wait for each other keep a GPU busy, so its utilization does not show it.
    if facts.params.get("world_size", "1") == "1":
        return "compute"
    return "compute or communication: `rankzero profile` shows which"


def straggler(metrics: Mapping[str, float]) -> str | None:
    """Return which rank held up the others, by a run's results, or None."""
    rank = number(metrics.get("straggler_rank"))
    ratio = number(metrics.get("straggler_forward_ratio"))
    wait = number(metrics.get("straggler_data_wait_fraction"))
    if rank is None:
        return None
    did = (
        f"waits for its data {wait:.0%} of the time"
        if wait
        else f"computes {ratio or 1:.1f}x as long as the others"
    )
    return f"rank {rank:.0f} {did}"

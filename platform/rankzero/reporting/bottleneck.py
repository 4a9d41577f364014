"""Decides what limited the speed of a run: data, compute or neither. Pure."""

from __future__ import annotations

from rankzero.reporting.run_facts import Facts

# The share of the training time from which waiting for data limits the speed.
_DATA_BOUND = 0.1
# Percent. Below it, a GPU waits for something else than data: launches or communication.
_BUSY_GPU = 70.0


def bottleneck(facts: Facts, wait: float) -> str:
    """Return what limited the speed, as far as the metrics of every run show it."""
    busy = facts.gpu_means.get("utilization_percentage")
    if wait >= _DATA_BOUND:
        return "data: load faster (`train.workers`), or keep the data set in memory"
    if busy is not None and busy < _BUSY_GPU:
        return (
            "neither data nor arithmetic: `rankzero profile` shows whether it is communication "
            "or small steps"
        )
    if facts.params.get("world_size", "1") == "1":
        return "compute"
    return "compute or communication: `rankzero profile` shows which"

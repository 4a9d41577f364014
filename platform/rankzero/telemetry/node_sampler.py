"""One node's system metrics under MLflow's names: what to sample, how to average, when to publish."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankzero.telemetry.host import HostSampler
from rankzero.telemetry.nvml import GpuSampler

SAMPLE_SECONDS = 1.0

# Counters since the start; their last value says it all.
_CUMULATIVE = ("_energy_joules", "network_receive_megabytes", "network_transmit_megabytes")


class NodeSampler:
    """Samples the GPUs that the job uses and the host; make it, use it and close it in one process.

    `gpus`: UUIDs in the order of the job's CUDA ordinals, as torch or NVML spells them; an
    empty sequence: the job uses none; None: take what CUDA_VISIBLE_DEVICES leaves.
    `folder`: its disk is watched. `process`: the pid at the root of the job's process tree.
    """

    def __init__(
        self,
        gpus: Sequence[str] | None,
        node: int,
        node_count: int,
        *,
        folder: Path = Path(os.sep),
        process: int | None = None,
    ) -> None:
        self._prefix = f"system/node_{node}/" if node_count > 1 else "system/"
        self._gpus = GpuSampler(gpus, os.environ)
        self._host = HostSampler(folder, process)
        self.notices = self._gpus.notices
        """What a person should hear once, in order; grows when something changes (a GPU is lost)."""

    def describe(self) -> dict[str, str]:
        """Return what each ordinal is, ``{"gpu_0": "NVIDIA H200, GPU-…, index 3"}``, for the run's tags."""
        return self._gpus.describe()

    def sample(self) -> dict[str, float]:
        """Return this moment's readings by full metric name; never raises."""
        try:
            readings = self._host.sample() | self._gpus.sample()
        except Exception as error:  # telemetry cannot kill a run; what went wrong is said once
            self._say(f"no system metrics: {error!r}")
            return {}
        return {self._prefix + name: value for name, value in readings.items()}

    def _say(self, notice: str) -> None:
        if notice not in self.notices:
            self.notices.append(notice)

    def close(self) -> None:
        """Let go of the driver; never raises, and may be called twice."""
        self._gpus.close()


def publish_interval(elapsed_seconds: float) -> float:
    """Return how long the next published mean covers, in seconds.

    Short while the run is young, so that a trial of ten seconds has a curve; long later, so
    that a week's run stays within what a chart can show.
    """
    if elapsed_seconds < 60:
        return 2.0
    return 5.0 if elapsed_seconds < 600 else 10.0


def mean_of(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each metric's mean over the samples that have it; of a counter, its last value."""
    columns: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.items():
            columns.setdefault(name, []).append(value)
    return {
        name: values[-1] if name.endswith(_CUMULATIVE) else _mean(values)
        for name, values in columns.items()
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

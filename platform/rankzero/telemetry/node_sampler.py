"""One node's system metrics under MLflow's names: what to sample, how to average, how often."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankzero.telemetry.host import HostSampler
from rankzero.telemetry.nvml import GpuSampler

SAMPLE_SECONDS = 1.0

# Counters since the start: their last value is the result.
_CUMULATIVE = ("_energy_joules", "network_receive_megabytes", "network_transmit_megabytes")


class NodeSampler:
    """Samples the job's GPUs and the host. Use it in the process that creates it.

    `gpus`: UUIDs in the order of the job's CUDA ordinals, as torch or NVML spells them. An empty
    sequence means no GPU, None those that CUDA_VISIBLE_DEVICES leaves. `folder`: any path on the
    disk to watch. `process`: the pid at the root of the job's process tree.
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
        """Messages for the user, in order. The list grows, for example when a GPU is lost."""

    def sample(self) -> dict[str, float]:
        """Return the present readings by metric name; never raises."""
        try:
            readings = self._host.sample() | self._gpus.sample()
        except Exception as error:
            # Telemetry must not end a run. The user gets one message.
            notice = f"no system metrics: {error!r}"
            if notice not in self.notices:
                self.notices.append(notice)
            return {}
        return {self._prefix + name: value for name, value in readings.items()}

    def close(self) -> None:
        """Release the driver. Never raises, also not the second time."""
        self._gpus.close()


def publish_interval(elapsed_seconds: float) -> float:
    """Return the seconds that the next published mean covers."""
    # A trial of ten seconds needs a curve, and a chart of a week's run has a limited width.
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
        name: values[-1] if name.endswith(_CUMULATIVE) else sum(values) / len(values)
        for name, values in columns.items()
    }

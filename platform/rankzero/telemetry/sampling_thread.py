"""One node's system metrics under MLflow's names, and a thread that samples them.

The thread appends means and notices to the node's journal.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rankzero.events import Noticed, SystemSampled
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import Journal, read
from rankzero.telemetry.host import HostSampler
from rankzero.telemetry.nvml import GpuSampler

SAMPLE_SECONDS = 1.0

# Counters since the start: their last value is the result.
_CUMULATIVE = ("_energy_joules", "network_receive_megabytes", "network_transmit_megabytes")
# The first interval is short, so that a run of five seconds has values.
_FIRST_SECONDS = 1.0
_TAIL_BYTES = 1 << 16

log = logging.getLogger("rankzero.recorder")


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


class SamplingThread:
    """A thread that samples from its creation until `stop`."""

    def __init__(
        self,
        folder: RunFolder,
        gpus: Sequence[str] | None,
        node: int,
        node_count: int,
        process: int,
        make_sampler: Callable[..., NodeSampler] = NodeSampler,
    ) -> None:
        self._path, self._has_gpus = folder.system(node), bool(gpus)
        self._make_sampler = functools.partial(
            make_sampler, gpus, node, node_count, folder=folder.path, process=process
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            # The system has no thread left.
            self._give_up(error)

    def stop(self) -> None:
        """Publish the samples of the current interval, and end; may be called twice."""
        self._stop.set()
        if self._thread.is_alive():
            # A driver that hangs must not hold up the recorder.
            self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            self._sample()
        except Exception as error:
            # A run without system metrics is still a run.
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        log.error("sampling ended", exc_info=error)
        text = f"no more system metrics of this machine: {type(error).__name__}: {error}"
        # The disk may be what failed.
        with contextlib.suppress(OSError):
            journal = Journal(self._path)
            _report(journal, [text])
            journal.close()

    def _sample(self) -> None:
        # The driver is opened in this thread, because that may hang.
        sampler, journal = self._make_sampler(), Journal(self._path)
        # A last line that lacks only its newline becomes readable now, and its number is taken.
        journal.flush()
        number = _next_sample(self._path)
        start = published = time.monotonic()
        # A job that names no GPU needs no notice about a missing driver.
        reported = 0 if self._has_gpus else len(sampler.notices)
        interval, samples, stopped = _FIRST_SECONDS, [sampler.sample()], False
        while not stopped:
            stopped = self._stop.wait(SAMPLE_SECONDS)
            samples.append(sampler.sample())
            _report(journal, sampler.notices[reported:])
            reported, now = len(sampler.notices), time.monotonic()
            if stopped or now - published >= interval - SAMPLE_SECONDS / 2:
                if metrics := mean_of(samples):
                    journal(SystemSampled(time.time(), number, metrics))
                number, published, samples = number + 1, now, []
                interval = publish_interval(now - start)
        journal.close()
        sampler.close()


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


def _next_sample(path: Path) -> int:
    """Return the number after the last sample of earlier attempts."""
    size = path.stat().st_size if path.exists() else 0
    events, _ = read(path, max(0, size - _TAIL_BYTES), 2 * _TAIL_BYTES)
    numbers = [event.sample for event in events if isinstance(event, SystemSampled)]
    return numbers[-1] + 1 if numbers else 0


def _report(journal: Journal, notices: Sequence[str]) -> None:
    for notice in notices:
        log.warning("%s", notice)
        journal(Noticed(time.time(), notice))

"""Samples a node in a thread and appends the means to the node's journal, with what went wrong, each once."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankzero.events import Noticed, SystemSampled
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import Journal, read
from rankzero.telemetry.node_sampler import SAMPLE_SECONDS, NodeSampler, mean_of, publish_interval

FIRST_SECONDS = 1.0  # a run of five seconds has values, too
TAIL_BYTES = 1 << 16

log = logging.getLogger("rankzero.recorder")


class SamplingThread:
    """A thread that samples from now until `stop`."""

    def __init__(
        self,
        folder: RunFolder,
        gpus: Sequence[str] | None,
        node: int,
        node_count: int,
        process: int,
    ) -> None:
        self._folder, self._node = folder, node
        self._arguments = (gpus, node, node_count, process)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:  # the system has no thread to give
            self._give_up(error)

    def stop(self) -> None:
        """Publish what there is of the current interval, and end; may be called twice."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(
                timeout=10
            )  # a driver that hangs must not keep the recorder from its delivery

    def _run(self) -> None:
        try:
            self._sample()
        except Exception as error:  # without system metrics a run is still a run
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        log.error("sampling ended", exc_info=error)
        self._say(f"no more system metrics of this machine: {type(error).__name__}: {error}")

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the disk is what failed, and may be full
            journal = Journal(self._folder.system(self._node))
            _tell(journal, [text], 0)
            journal.close()

    def _sample(self) -> None:
        gpus, node, node_count, process = self._arguments
        sampler = NodeSampler(gpus, node, node_count, folder=self._folder.path, process=process)
        journal = Journal(self._folder.system(node))
        number = next_sample(self._folder.system(node))
        start = published = time.monotonic()
        told = (
            0 if gpus else len(sampler.notices)
        )  # no driver is no news to a job that names no GPU
        interval, samples = FIRST_SECONDS, [sampler.sample()]
        while not self._stop.wait(SAMPLE_SECONDS):
            samples.append(sampler.sample())
            told = _tell(journal, sampler.notices, told)
            now = time.monotonic()
            if now - published >= interval - SAMPLE_SECONDS / 2:
                _publish(journal, number, samples)
                number, published, samples, interval = (
                    number + 1,
                    now,
                    [],
                    publish_interval(now - start),
                )
        samples.append(sampler.sample())
        _publish(journal, number, samples)
        _tell(journal, sampler.notices, told)
        journal.close()
        sampler.close()


def next_sample(path: Path) -> int:
    """Return the number after the last sample of earlier attempts."""
    size = path.stat().st_size if path.exists() else 0
    events, _ = read(path, max(0, size - TAIL_BYTES), 2 * TAIL_BYTES)
    numbers = [event.sample for event in events if isinstance(event, SystemSampled)]
    return numbers[-1] + 1 if numbers else 0


def _tell(journal: Journal, notices: Sequence[str], told: int) -> int:
    """Say the notices after the first `told`, for the run's page; return how many are told now."""
    for notice in notices[told:]:
        log.warning("%s", notice)
        journal(Noticed(time.time(), notice))
    return len(notices)


def _publish(journal: Journal, number: int, samples: Sequence[Mapping[str, float]]) -> None:
    metrics = mean_of(samples)
    if metrics:
        journal(SystemSampled(time.time(), number, metrics))

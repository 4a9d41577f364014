"""A thread that samples a node, and appends means and notices to the node's journal."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rankzero.events import Noticed, SystemSampled
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import Journal, read
from rankzero.telemetry.node_sampler import SAMPLE_SECONDS, NodeSampler, mean_of, publish_interval

# The first interval is short, so that a run of five seconds has values.
_FIRST_SECONDS = 1.0
_TAIL_BYTES = 1 << 16

log = logging.getLogger("rankzero.recorder")


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
            reported = len(sampler.notices)
            now = time.monotonic()
            if stopped or now - published >= interval - SAMPLE_SECONDS / 2:
                if metrics := mean_of(samples):
                    journal(SystemSampled(time.time(), number, metrics))
                number, published, samples = number + 1, now, []
                interval = publish_interval(now - start)
        journal.close()
        sampler.close()


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

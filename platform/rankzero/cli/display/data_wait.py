"""What the person who watches a run should be told to change: data that comes too late. Pure."""

from __future__ import annotations

import collections
import statistics

from rankzero.events import Event, RunStarted, StepsLogged
from rankzero.metric_names import DATA_WAIT

TOO_MUCH = 0.2
"""Waiting a fifth of the time: what faster loading would gain is then more than noise."""
SKIPPED_WINDOWS = 2  # loaders start up
WATCHED_SECONDS = 5.0
MOST_WORKERS = 8


class DataWait:
    """Watches a run's windows, and says once an attempt what to do about ranks that wait for their data.

    `workers`: the setting ``train.workers``; `processes`: on this machine, which has so many `cores`.
    """

    def __init__(self, workers: int | None, processes: int, cores: int) -> None:
        self._workers, self._processes, self._cores = workers, processes, cores
        self._windows: collections.deque[tuple[float, float]] = collections.deque()
        self._told = False

    def __call__(self, event: Event) -> str | None:
        """Take an event; return the advice when it is time to give it."""
        if isinstance(event, RunStarted):
            self._windows.clear()
            self._told = False
        if not isinstance(event, StepsLogged) or DATA_WAIT not in event.metrics or self._told:
            return None
        self._windows.append((event.times[-1], event.metrics[DATA_WAIT][-1]))
        seen = list(self._windows)[SKIPPED_WINDOWS:]
        if not seen or seen[-1][0] - seen[0][0] < WATCHED_SECONDS:
            return None
        waiting = statistics.median(fraction for _, fraction in seen)
        self._windows.popleft()
        if waiting <= TOO_MUCH:
            return None
        self._told = True
        return f"training waits for data {waiting:.0%} of the time: {remedy(self._workers, self._processes, self._cores)}"


def remedy(workers: int | None, processes: int, cores: int) -> str:
    """Return what makes loading faster: more loading processes while there are cores for them, else less to load."""
    fair = min(MOST_WORKERS, max(0, cores // processes - 1))
    now = fair if workers is None else workers
    if now < fair:
        return f"set train.workers={fair} (now {now}; {cores} cores, {processes} ranks)"
    return (
        f"no core is left for more than train.workers={now} ({cores} cores, {processes} ranks); do less per sample, or "
        "let data() return prepared samples as a TensorDataset, which needs no loading"
    )

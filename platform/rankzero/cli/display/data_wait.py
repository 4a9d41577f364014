"""Advice for a run whose ranks wait for their data. Pure."""

from __future__ import annotations

import collections
import statistics

from rankzero.events import Event, RunStarted, StepsLogged
from rankzero.metric_names import DATA_WAIT

# A fifth of the time: with less, what faster loading would gain is lost in noise.
_TOO_MUCH = 0.2
_SKIPPED_WINDOWS = 2  # loaders are starting
_WATCHED_SECONDS = 5.0


class DataWait:
    """Watches a run's windows; advises once per attempt if its ranks wait for data.

    `workers`: the loading processes of each rank. `processes` and `cores`: of this machine.
    """

    def __init__(self, workers: int, processes: int, cores: int) -> None:
        self._workers, self._processes, self._cores = workers, processes, cores
        self._windows: collections.deque[tuple[float, float]] = collections.deque()
        self._advised = False

    def __call__(self, event: Event) -> str | None:
        """Take an event; return the advice when it is due, else None."""
        if isinstance(event, RunStarted):
            self._windows.clear()
            self._advised = False
        if not isinstance(event, StepsLogged) or DATA_WAIT not in event.metrics or self._advised:
            return None
        self._windows.append((event.times[-1], event.metrics[DATA_WAIT][-1]))
        seen = list(self._windows)[_SKIPPED_WINDOWS:]
        if not seen or seen[-1][0] - seen[0][0] < _WATCHED_SECONDS:
            return None
        # The median ignores single windows, such as the one after an evaluation.
        waiting = statistics.median(fraction for _, fraction in seen)
        self._windows.popleft()
        if waiting <= _TOO_MUCH:
            return None
        self._advised = True
        what = remedy(self._workers, self._processes, self._cores)
        return f"training waits for data {waiting:.0%} of the time: {what}"


def remedy(workers: int, processes: int, cores: int) -> str:
    """Return how to load faster: with more workers while there are cores, else with less work."""
    free = cores // processes - 1
    here = f"{cores} cores, {processes} rank{'s' * (processes > 1)}"
    if workers < free:
        return f"set train.workers={min(free, 2 * max(workers, 4))} (now {workers}; {here})"
    return (
        f"all cores are in use with train.workers={workers} ({here}); do less per sample, or let "
        "data() return prepared samples as a TensorDataset, which needs no loading"
    )

"""Start trials on the code path of `rankzero train`, and follow their journals.

The search imports this module, so it imports no PyTorch: a host process has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from rankzero.catalog import lookup
from rankzero.events import Event
from rankzero.experiment import Experiment
from rankzero.launch import failures
from rankzero.launch.agent import Topology
from rankzero.launch.failures import Failure, FailureKind
from rankzero.launch.request import JobRequest, make_folder, request_for, write_config
from rankzero.launch.signals import unblocks_itself
from rankzero.run_store import run_locks
from rankzero.run_store.attempt import append_run_ended, sync_pictures
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read
from rankzero.tuning.trials.host import Host

_TICK_SECONDS = 0.05
_STOP_SECONDS = 30.0  # for a trial to stop at the end of a step
_END_SECONDS = 10.0  # for a trial's recorder to write the end of a rank that was killed


@unblocks_itself
def train(request: JobRequest) -> str:
    """Train as `rankzero train` does; the entry point of every rank of a trial."""
    # Here, in the rank: it imports PyTorch.
    from rankzero.training import worker

    return worker.main(request)


@dataclasses.dataclass(frozen=True)
class TrainLauncher:
    """Starts each trial in new processes, which a host forks from a server that has PyTorch."""

    host: Host
    study: RunFolder
    """The run that the trials are children of."""
    topology: Topology
    """The processes of each trial."""
    environment: Mapping[str, str]

    def start(
        self, experiment: Experiment, name: str, processes: int | None = None
    ) -> LaunchedTrial:
        """Start a run of `experiment`, called `name`, on so many processes instead."""
        runs = self.study.path.parent
        # A trial of an interrupted search keeps its name, so a repeated one gets the next.
        names = itertools.chain([name], (f"{name}-{count}" for count in itertools.count(2)))
        name = next(free for free in names if not (runs / free).exists())
        folder = make_folder(runs, self.study.identity.child(name))
        write_config(folder, experiment)
        # The study's courier delivers the runs that are listed here.
        self.study.add_child(name)
        request = request_for(folder, experiment, self.environment, is_trial=True)
        count = processes or self.topology.processes
        topology = dataclasses.replace(self.topology, processes=count)
        self.host.run(train, topology, request, folder.path / "logs", folder.path)
        return LaunchedTrial(folder, self.host)


class LaunchedTrial:
    """A trial that a host runs: a journal that grows, and a message at its end."""

    def __init__(self, folder: RunFolder, host: Host) -> None:
        self._folder, self._host = folder, host
        self._offsets: dict[Path, int] = {}
        self.has_ended = False
        """Whether all its processes have ended."""
        self._stop_by, self._beat = 0.0, 0

    def new_events(self) -> list[Event]:
        """Return the events since the last call. Does not wait."""
        found: list[Event] = []
        for path in (self._folder.system(0), self._folder.events):
            events, self._offsets[path] = read(path, self._offsets.get(path, 0))
            found += events
        # Asked only when the journal is read to its end, so that no event is lost.
        if not found and not self.has_ended:
            self.has_ended = self._host.has_ended()
        return found

    @property
    def has_beat(self) -> bool:
        """Whether it wrote since the last look that it makes progress, as in an evaluation."""
        before = self._beat
        with contextlib.suppress(FileNotFoundError):
            self._beat = self._folder.beat.stat().st_mtime_ns
        return self._beat != before

    @property
    def handles(self) -> Sequence[Connection | int]:
        """Return what `multiprocessing.connection.wait` waits on for the trial's end."""
        return self._host.handles

    @property
    def is_starting(self) -> bool:
        """Return whether its host still waits for its machine, so that nothing can happen yet."""
        return self._host.is_starting

    @property
    def was_lost(self) -> bool:
        """Return whether its host process died, so that the trial shows nothing."""
        return self._host.was_lost

    @property
    def failure(self) -> FailureKind | None:
        """Return why the trial failed, or None if no rank wrote a failure."""
        first = failures.first(self._folder.failures)
        return None if first is None else first.kind

    def prune(self, reason: str) -> None:
        """Ask all ranks to stop at the same step. The run ends as KILLED, with this reason."""
        # Written first: without the file, the signal asks the ranks to stop, as for any run.
        self._folder.pruned.write_text(reason, encoding="utf-8")
        self._host.signal(signal.SIGUSR2, [self._folder.pruned])

    def stop(self) -> None:
        """Ask all ranks to stop, as Ctrl-C does."""
        self._stop_by = time.monotonic() + _STOP_SECONDS
        self._host.signal(signal.SIGTERM)

    def kill(self, reason: str) -> None:
        """End all ranks at once. The run ends as FAILED, with this reason."""
        # The ranks get no chance to write why. The recorder reads the reason from this file.
        failure = Failure(time.time(), -1, reason, "", FailureKind.HANG)
        failures.write(failure, self._folder.failures)
        self._host.signal(signal.SIGQUIT, [self._folder.failures])

    def give_up(self) -> None:
        """End the host, which does not end the trial."""
        self._host.close()
        # A host that was closed counts as lost.
        self.has_ended = self._host.has_ended()

    def close(self) -> None:
        """End the trial if it still runs, and wait until its journal has an end."""
        if not self.has_ended and self.is_starting:
            # Nothing has begun, and its host may wait in a queue.
            self.give_up()
        seconds = max(0.0, self._stop_by - time.monotonic()) if self._stop_by else _STOP_SECONDS
        self.has_ended = self.has_ended or self._host.has_ended(seconds)
        if not self.has_ended:
            self.kill("did not stop when asked to")
            self.has_ended = self._host.has_ended(_STOP_SECONDS)
        # A lost host sends no end.
        if not self.was_lost:
            await_end(self._folder)
        # If the recorder has died too, write it here.
        sync_pictures(self._folder)
        with run_locks.exclusive_end(self._folder):
            if lookup.last_end(self._folder) is None:
                if self._stop_by and self.failure is None:
                    why = "stopped with its search before it began"
                    append_run_ended(self._folder, 0.0, why, status="KILLED")
                else:
                    append_run_ended(self._folder, 0.0)


def await_end(folder: RunFolder) -> None:
    """Wait until a run's journal has an end. A killed rank 0 wrote none, so its recorder does."""
    deadline = time.monotonic() + _END_SECONDS
    while folder.events.exists() and lookup.last_end(folder) is None:
        if time.monotonic() >= deadline:
            return
        time.sleep(_TICK_SECONDS)

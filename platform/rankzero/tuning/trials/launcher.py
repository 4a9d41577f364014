"""Starts trials by the very path of `train`, and follows their journals. Imports no PyTorch: see `host`."""

from __future__ import annotations

import itertools
import secrets
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rankzero.catalog import lookup
from rankzero.events import Event
from rankzero.experiment import Experiment
from rankzero.launch import agent, failures
from rankzero.launch.failures import Failure, FailureKind
from rankzero.launch.request import make_folder, request_for, write_config
from rankzero.run_store import claims
from rankzero.run_store.attempt import append_run_ended
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.journal import read
from rankzero.tuning.trials.host_process import Host

TICK_SECONDS = 0.05
STOP_SECONDS = 30.0  # what a trial gets to stop at the end of a step
END_SECONDS = 10.0  # what a trial's recorder gets to say how a rank that was killed has ended


class Running(Protocol):
    """A trial that was started."""

    name: str

    def news(self) -> list[Event]:
        """Return the events since the last call, after a moment's wait where there are none."""

    @property
    def over(self) -> bool:
        """Tell whether all processes of the trial have ended."""

    @property
    def failure(self) -> FailureKind | None:
        """Return why the trial failed, or None if no rank wrote a failure."""

    def prune(self, reason: str) -> None:
        """Ask all ranks to stop at the same step; the run ends as KILLED, with this reason."""

    def stop(self) -> None:
        """Ask all ranks to stop, as Ctrl-C does."""

    def kill(self, reason: str) -> None:
        """End all ranks at once; the run ends as FAILED with this reason."""

    def close(self) -> None:
        """Leave nothing behind; the trial must be over or is ended now."""


class Launcher(Protocol):
    """Starts trials."""

    def start(self, experiment: Experiment, name: str) -> Running:
        """Start a run of `experiment`, called `name`."""


class TrainLauncher:
    """The real launcher: fresh processes for every trial, forked from a server that has PyTorch loaded.

    `study`: the run whose children the trials are. `nodes`: the processes of each trial.
    """

    def __init__(
        self, host: Host, study: RunFolder, nodes: agent.Topology, environment: Mapping[str, str]
    ) -> None:
        self._host, self._study, self._nodes, self._environment = host, study, nodes, environment

    def start(self, experiment: Experiment, name: str) -> RunningTrial:
        identity, runs = self._study.identity, self._study.path.parent
        name = _free(runs, name)
        folder = make_folder(
            runs,
            Identity(
                name=name,
                uuid=secrets.token_hex(16),
                experiment=identity.experiment,
                tracking_uri=identity.tracking_uri,
                artifact_root=identity.artifact_root,
                experiment_file=identity.experiment_file,
                project_dir=identity.project_dir,
                parent=identity.name,
                parent_uuid=identity.parent_uuid,
            ),
        )
        write_config(folder, experiment)
        self._study.add_child(name)
        request = request_for(folder, experiment, self._environment)
        self._host.run("rankzero.training.worker:main", self._nodes, request, folder.path / "logs")
        return RunningTrial(folder, self._host)


def _free(runs: Path, name: str) -> str:
    """Return the name, or the next like it: what an interrupted search began keeps its own."""
    names = itertools.chain([name], (f"{name}-{count}" for count in itertools.count(2)))
    return next(found for found in names if not (runs / found).exists())


class RunningTrial:
    """The trial that a host runs: a journal that grows, and a message at the end."""

    def __init__(self, folder: RunFolder, host: Host) -> None:
        self.name = folder.path.name
        self._folder, self._host, self._over = folder, host, False
        self._offsets: dict[Path, int] = {}

    def news(self) -> list[Event]:
        found: list[Event] = []
        for path in (self._folder.system(0), self._folder.events):
            events, self._offsets[path] = read(path, self._offsets.get(path, 0))
            found += events
        if not found and not self._over:
            self._over = self._host.over(TICK_SECONDS)
        return found

    @property
    def over(self) -> bool:
        return self._over

    @property
    def failure(self) -> FailureKind | None:
        first = failures.first(self._folder.failures)
        return None if first is None else first.kind

    def prune(self, reason: str) -> None:
        self._folder.pruned.write_text(reason, encoding="utf-8")
        self._host.signal(signal.SIGUSR2)

    def stop(self) -> None:
        self._host.signal(signal.SIGTERM)

    def kill(self, reason: str) -> None:
        """End all ranks at once. The word that is left here is what the run's recorder gives as the reason."""
        failure = Failure(time.time(), -1, reason, "", FailureKind.HANG)
        failures.write(failure, self._folder.failures)
        self._host.signal(signal.SIGQUIT)

    def close(self) -> None:
        self._over = self._over or self._host.over(STOP_SECONDS)
        if not self._over:
            self.kill("did not stop when asked to")
            self._over = self._host.over(STOP_SECONDS)
        self._wait_for_the_end()

    def _wait_for_the_end(self) -> None:
        """Give the recorder a moment to say what a rank 0 that was killed could not; where it is dead, say it."""
        deadline = time.monotonic() + END_SECONDS
        while self._folder.events.exists() and not self._ended() and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)
        with claims.exclusive_end(self._folder):
            if not self._ended():
                append_run_ended(self._folder, 0.0)

    def _ended(self) -> bool:
        return lookup.last_end(self._folder) is not None

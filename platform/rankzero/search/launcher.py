"""Starts trials by the very path of `train`, and follows their journals. Imports no PyTorch: see `trial_process`."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rankzero.events import Event
from rankzero.experiment import Experiment
from rankzero.search import trial_process
from rankzero.tracking import catalog, incumbent
from rankzero.tracking.attempt import say_end
from rankzero.tracking.journal import Identity, RunFolder, read, write_atomically
from rankzero.train import launch
from rankzero.train.request import make_folder, request_for, write_config

TICK_SECONDS = 0.05
END_SECONDS = 10.0  # what a trial's recorder gets to say how a rank that was killed has ended


class Running(Protocol):
    """A trial that was started."""

    name: str

    def news(self) -> list[Event]:
        """Return the events since the last call, after a moment's wait where there are none."""

    @property
    def over(self) -> bool:
        """Tell whether all processes of the trial have ended."""

    def prune(self) -> None:
        """Ask all ranks to stop at the same step; the run ends as KILLED."""

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

    `identity`: the study's run; its trials are children of it. `nodes`: the processes of each trial.
    """

    def __init__(
        self, study: RunFolder, nodes: launch.Nodes, environment: Mapping[str, str], libraries: Sequence[str] = ()
    ) -> None:
        self._study, self._nodes, self._environment = study, nodes, environment
        launch.warm_up([*libraries, "torch.distributed.elastic.agent.server.local_elastic_agent"])

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
            ),
        )
        write_config(folder, experiment)
        self._study.add_child(name)
        return RunningTrial(folder, self._nodes, experiment, self._environment)


def _free(runs: Path, name: str) -> str:
    """Return the name, or the next like it: what an interrupted search began keeps its own."""
    names = itertools.chain([name], (f"{name}-{count}" for count in itertools.count(2)))
    return next(found for found in names if not (runs / found).exists())


class RunningTrial:
    """A trial as the launching process sees it: a child process and a journal that grows."""

    def __init__(
        self, folder: RunFolder, nodes: launch.Nodes, experiment: Experiment, environment: Mapping[str, str]
    ) -> None:
        self.name = folder.path.name
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        request = request_for(folder, experiment, environment)
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(
            target=trial_process.main, args=(nodes, request, str(folder.path / "logs")), name=self.name
        )
        self._process.start()

    def news(self) -> list[Event]:
        found: list[Event] = []
        for path in (self._folder.system(0), self._folder.events):
            events, self._offsets[path] = read(path, self._offsets.get(path, 0))
            found += events
        if not found:
            time.sleep(TICK_SECONDS)
        return found

    @property
    def over(self) -> bool:
        return not self._process.is_alive()

    def prune(self) -> None:
        self._signal(signal.SIGUSR2)

    def stop(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self, reason: str) -> None:
        """End all ranks at once. The word that is left here is what the run's recorder gives as the reason."""
        word = {"time": time.time(), "rank": -1, "reason": reason, "error": ""}
        self._folder.failures.mkdir(exist_ok=True)
        write_atomically(self._folder.failures / "rank_-1.json", json.dumps(word))
        self._signal(signal.SIGQUIT)

    def close(self) -> None:
        if self._process.is_alive():
            self._signal(signal.SIGQUIT)
            self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._wait_for_the_end()
        self._process.close()

    def _wait_for_the_end(self) -> None:
        """Give the recorder a moment to say what a rank 0 that was killed could not; where it is dead, say it."""
        deadline = time.monotonic() + END_SECONDS
        while self._folder.events.exists() and not self._ended() and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)
        with incumbent.turn(self._folder):
            if not self._ended():
                say_end(self._folder, 0.0)

    def _ended(self) -> bool:
        return catalog.last_end(self._folder) is not None

    def _signal(self, number: signal.Signals) -> None:
        pid = self._process.pid
        if pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

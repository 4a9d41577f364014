"""A host's end on its own machine: ``python -m rankzero.tuning.places.node``.

Slurm's srun, or an actor of Ray, starts it, and connects its input and output with the search. It
runs trials in a folder of its own, and sends what changes there. It ends with its input.

A host of several machines has one on each. The search's messages reach all of them, and each runs
its part of a trial. The ranks meet on the first machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rankzero import experiment_file
from rankzero.errors import RunFailed, UserError
from rankzero.launch import machines
from rankzero.launch.agent import Topology
from rankzero.launch.machines import Machines
from rankzero.launch.request import JobRequest
from rankzero.run_store import run_locks
from rankzero.run_store.folder import RunFolder
from rankzero.tuning.places import mirror
from rankzero.tuning.places.messages import Ended, Lines, Message, Run, Signal, Start, Started
from rankzero.tuning.places.mirror import Mirror
from rankzero.tuning.trials.describe import ExperimentDescription, Question
from rankzero.tuning.trials.host_process import LocalHost
from rankzero.tuning.trials.launcher import await_end

_LOOK_SECONDS = 0.25  # from one look at a trial's folder to the next
_TICK_SECONDS, _RECORDER_SECONDS = 0.02, 5.0


class _Node:
    """Serves one search, with a host process of this machine."""

    def __init__(self, lines: Lines, host: LocalHost, folder: Path, here: Machines) -> None:
        self._lines, self._host, self._folder, self._machines = lines, host, folder, here
        self._number = here.number or 0
        self._trial: tuple[Path, Mirror] | None = None
        self._trials = 0

    def serve(self) -> None:
        """Do what the search asks for. Raises EOFError at its end."""
        while True:
            handles = self._host.handles if self._trial else ()
            wait([self._lines.reading, *handles], _LOOK_SECONDS if self._trial else None)
            for message in self._lines.receive():
                self.do(message)
            if self._trial:
                self._look(*self._trial)

    def _look(self, folder: Path, changed: Mirror) -> None:
        """Send what has changed in the trial's folder, and whether the trial has ended."""
        has_ended = self._host.has_ended()
        if has_ended:
            await_end(RunFolder(folder))
            _await_last_sample(RunFolder(folder), self._number)
        for change in changed.changes():
            self._lines.send(change)
        if has_ended:
            self._trial = None
            self._lines.send(Ended(self._host.was_lost))
            # The search has all of it, and this host may run thousands of trials.
            shutil.rmtree(folder, ignore_errors=True)

    def do(self, message: Message) -> None:
        """Do what one message asks for."""
        if isinstance(message, Question):
            if self._number == 0:
                self._lines.send(self._described(message))
        elif isinstance(message, Run):
            folder = self._folder / message.folder.name
            logs = message.logs.relative_to(message.folder)
            # Logs of earlier trainings are of the first machine.
            known = {
                name: content
                for name, content in message.files.items()
                if self._number == 0 or not Path(name).is_relative_to(logs)
            }
            mirror.write_all(known, folder)
            self._trial = folder, Mirror(folder, self._number, str(logs))
            request = _moved(message.request, message.folder.parent, self._folder)
            topology = self._topology(message.topology)
            self._host.run(message.entry, topology, request, folder / logs, folder)
        elif isinstance(message, Signal) and self._trial:
            mirror.write_all(message.files, self._trial[0])
            self._host.signal(message.number)

    def _topology(self, asked: Topology) -> Topology:
        """Return this machine's part of a trial's processes, and where they meet the others."""
        if self._machines.alone:
            return asked
        # All machines count alike. Ranks of a trial must not join those of the last one.
        self._trials += 1
        here = machines.meet(self._machines.of_part(self._trials))
        return dataclasses.replace(asked, processes=asked.processes // here.most, machines=here)

    def _described(self, asked: Question) -> ExperimentDescription | Exception:
        try:
            experiment_file.split(asked.reference)
        except UserError as error:
            return UserError(
                f"on {socket.gethostname()}: {error}. Keep the project on a disk that all machines "
                "share, or at the same path on each"
            )
        try:
            return self._host.describe(asked)
        except (UserError, RunFailed) as error:
            return error


def _await_last_sample(folder: RunFolder, number: int) -> None:
    """Wait until the recorder of this machine has ended. It may begin after a short trial."""
    until = time.monotonic() + _RECORDER_SECONDS
    while run_locks.latest(folder, number) and time.monotonic() < until:
        lives = run_locks.has_live_recorder(folder, number)
        if run_locks.has_announced(folder, number) and not lives:
            return
        time.sleep(_TICK_SECONDS)


def _moved(request: Any, old: Path, new: Path) -> Any:
    """Return a request whose paths below `old` are below `new`."""
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        if isinstance(value, (str, Path)) and Path(value).is_relative_to(old):
            moved[field.name] = type(value)(new / Path(value).relative_to(old))
    if isinstance(request, JobRequest):
        # The search's courier delivers the run. One of this machine would do so again.
        moved["offline"] = True
        moved["environment"] = {**request.environment, "rankzero.host": socket.gethostname()}
    return dataclasses.replace(request, **moved)


def _machines() -> Machines:
    """Return the machines of this host, with this one's number. Raises UserError."""
    parser = argparse.ArgumentParser(prog="node")
    parser.add_argument("--machines", type=int, default=1, dest="count")
    # Those of Slurm are in the variables of its step. An actor of Ray may have them, too.
    parser.add_argument("--first", help="an address of the first machine")
    parser.add_argument("--job", default="")
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--slurm", action="store_true")
    given = parser.parse_args()
    if given.slurm:
        names = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"
        found = [os.environ.get(name) for name in names]
        if found != [str(given.count)] * 2:
            raise UserError(
                f"srun started {found[0]} tasks on {found[1]} machines, and a trial has "
                f"{given.count}: leave out -n and -N, and give --nnodes"
            )
        return machines.of_slurm(os.environ) or Machines()
    count, number = given.count, given.number
    return Machines(count, count, given.first, given.job, None, number=number)


def _connection(number: int) -> Lines:
    """Return this process's standard input and output. Nobody else gets them from now on."""
    reading, writing = os.dup(0), os.dup(1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    # Output of the user's code is no message.
    os.dup2(2, 1)
    return Lines(reading, writing, number)


def main() -> None:
    """Serve the search at the other end of this process's standard input and output."""
    # So that the folder is removed and the ranks end.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    try:
        here = _machines()
        machines.meet(here)  # called for its check
    except UserError as error:
        sys.exit(f"{socket.gethostname()}: {error}")
    lines = _connection(here.number or 0)
    with contextlib.suppress(EOFError, BrokenPipeError):
        first, *others = lines.receive(None)
        assert isinstance(first, Start)
        lines.send(Started(socket.gethostname(), version("rankzero")))
        with (
            tempfile.TemporaryDirectory(prefix="rankzero-node-") as folder,
            contextlib.closing(LocalHost(first.libraries, alone=here.alone)) as host,
        ):
            node = _Node(lines, host, Path(folder), here)
            for message in others:
                node.do(message)
            node.serve()


if __name__ == "__main__":
    main()

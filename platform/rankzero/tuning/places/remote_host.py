"""The search's end of a host on other machines, which a command of the cluster starts there.

    search ── standard input and output of srun ──▶ places.node ── pipe ──▶ host process ──▶ ranks
                                                └─▶ places.node on the trial's next machine …

A trial's folder comes over while it grows. The search, its courier and `rankzero runs` read it as
if the trial ran here. No shared disk is needed but for the user's own code and data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from rankzero.errors import RunFailed, UserError
from rankzero.launch.agent import Topology
from rankzero.tuning.places import mirror
from rankzero.tuning.places.messages import (
    Change,
    Ended,
    Lines,
    Message,
    Run,
    Signal,
    Start,
    Started,
)
from rankzero.tuning.trials.describe import ExperimentDescription, Question

_PATIENCE_SECONDS = 5.0  # before the user is told what the search waits for
_END_SECONDS = 15.0  # for the host and the cluster's command to end by themselves
_CANCEL_SECONDS = 2.0
_LAST_SECONDS = 90.0  # from the end of a trial on one machine to its end on the last one
# With them srun would not pass on whole lines as they are.
_CHANGE_LINES = ("SLURM_LABELIO", "SLURM_UNBUFFEREDIO")
_MOST_ERROR_BYTES = 2000
# Seconds before each further start on a cluster that has started this host before. A cluster may
# take five minutes to see that a machine is gone, and choose it again until then.
_RESTART_SECONDS = (5.0, 30.0, 60.0, 120.0, 240.0)


class RemoteHost:
    """A host that `command` starts on other machines once it is needed, and again if it is lost.

    `place`: the cluster, for people. `notify`: prints a line. `machines`: how many it starts; they
    train each trial together. `restart_seconds`: if it does not start, but the command has started
    a host before, it waits for so long before each further try. `last_seconds`: from the end of a
    trial on one machine to that on the last one; after that, the host is lost.
    """

    _known_to_start: ClassVar[set[tuple[str, ...]]] = set()

    def __init__(
        self,
        command: Sequence[str],
        libraries: Sequence[str],
        place: str,
        notify: Callable[[str], None],
        machines: int = 1,
        restart_seconds: Sequence[float] = _RESTART_SECONDS,
        last_seconds: float = _LAST_SECONDS,
    ) -> None:
        self._command, self._libraries = tuple(command), tuple(libraries)
        self._place, self._notify, self._machines = place, notify, machines
        self._missing, self._training = 0, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._began_waiting: float | None = None
        self._restart_seconds, self._last_seconds = tuple(restart_seconds), last_seconds
        self._waits, self._start_at = list[float](), math.inf
        self._trial: Run | None = None
        self._lost_at, self.was_lost = math.inf, False

    def describe(self, asked: Question) -> ExperimentDescription:
        """Return the description of the experiment in a file. Raises UserError, RunFailed."""
        path = str(Path(asked.reference).absolute())
        self._send(dataclasses.replace(asked, reference=path, machines=self._machines))
        while True:
            for message in self._receive(_PATIENCE_SECONDS):
                self._take(message)
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, ExperimentDescription):
                    return message

    def run(
        self,
        entry: Callable[[Any], str],
        topology: Topology,
        request: Any,
        logs: Path,
        folder: Path,
        prefix: str = "",
    ) -> None:
        """Have every rank run `entry(request)`; return at once. See `has_ended`.

        `prefix`: of the names of all that the ranks read in `folder`.
        """
        self.was_lost, self._training = False, self._machines
        self._waits, self._lost_at = list(self._restart_seconds), math.inf
        known = mirror.contents(folder, prefix)
        self._trial = Run(entry, topology, request, logs, folder, known)
        self._send(self._trial)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Return whether the trial has ended, after at most `seconds`. True once for each trial.

        Raises RunFailed if the command ends before its host has started, unless it may start again.
        """
        deadline = time.monotonic() + seconds
        while self._process is not None or self.is_starting:
            if self._process is None and not self._starts_again(deadline):
                return False
            was_starting = self.is_starting
            try:
                messages = self._receive(max(0.0, deadline - time.monotonic()))
            except RunFailed as error:
                if not was_starting:
                    self._notify(f"a host of {self._place} is lost: {error}")
                    break
                if self._command not in self._known_to_start or not self._waits:
                    raise
                wait, self._missing = self._waits.pop(0), self._machines
                self._start_at = time.monotonic() + wait
                self._notify(f"{self._place} starts no host, tried again in {wait:.0f} s: {error}")
                continue
            for message in messages:
                self._take(message)
            if not self._training:
                return True
            if time.monotonic() >= self._lost_at:
                text = "trained on without the others: see node_1 and the like in its logs"
                self._notify(f"one of {self._machines} machines of {self._place} {text}")
                self._end()
                break
            if time.monotonic() >= deadline:
                return False
        self.was_lost = True
        return True

    def _starts_again(self, deadline: float) -> bool:
        """Wait until the next start, but not after `deadline`; return whether it has begun."""
        time.sleep(max(0.0, min(self._start_at, deadline) - time.monotonic()))
        if time.monotonic() < self._start_at:
            return False
        assert self._trial is not None
        self._send(self._trial)
        return True

    @property
    def is_starting(self) -> bool:
        """Whether it still waits for one of its machines."""
        return self._missing > 0

    @property
    def handles(self) -> Sequence[int]:
        """Return what `multiprocessing.connection.wait` waits on for news of the trial."""
        return [] if self._process is None else [self._lines.reading]

    def signal(self, number: signal.Signals, written: Sequence[Path] = ()) -> None:
        """Send a signal, and the files or folders from which the trial learns why."""
        if self._process is None or self._trial is None:
            return
        folder, files = self._trial.folder, dict[str, bytes]()
        for path in written:
            files |= mirror.contents(folder, str(path.relative_to(folder)))
        with contextlib.suppress(OSError):  # `has_ended` reports a lost host
            self._lines.send(Signal(number, files))

    def close(self) -> None:
        """End the host, and the trial that it runs."""
        if self._process is not None:
            self._end()
        self._missing = 0

    def _send(self, message: Message) -> None:
        if self._process is None:
            self._start()
        # If the host died between two trials, `has_ended` reports the next one as lost.
        with contextlib.suppress(OSError):
            self._lines.send(message)

    def _receive(self, seconds: float) -> Sequence[Message]:
        """Return the host's messages, after at most `seconds`.

        Raises RunFailed, with the cluster's own words, if the host is gone.
        """
        try:
            messages = self._lines.receive(seconds)
        except EOFError:
            process = self._process
            assert process is not None
            words = self._end() or "it printed no reason"
            ended = f"{shlex.join(self._command)} ended with {process.returncode}"
            raise RunFailed(f"{ended}: {words}") from None
        since = self._began_waiting
        if not messages and since and time.monotonic() - since >= _PATIENCE_SECONDS:
            self._notify(f"waiting for a machine of {self._place}")
            self._began_waiting = None
        return messages

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - It lives as long as the command.
        # A command that waits in a queue does not read its input, so it would outlive the search.
        setpriv = shutil.which("setpriv")
        with_search = () if setpriv is None else (setpriv, "--pdeathsig", "TERM")
        with theirs:
            self._process = subprocess.Popen(
                (*with_search, *self._command),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                env={key: text for key, text in os.environ.items() if key not in _CHANGE_LINES},
                # Ctrl-C in the terminal reaches the search alone, which stops its trials.
                start_new_session=True,
            )
        self._lines = Lines(self._socket.fileno(), self._socket.fileno())
        self._missing, self._began_waiting = self._machines, time.monotonic()
        self._send(Start(self._libraries))

    def _take(self, message: Message) -> None:
        if isinstance(message, Started):
            self._missing -= 1
            self._began_waiting = self._began_waiting if self._missing else None
            if not self._missing:
                self._known_to_start.add(self._command)
            own = version("rankzero")
            if message.version != own:
                raise UserError(
                    f"{message.machine} has RankZero {message.version}, and this machine "
                    f"{own}: install the same version on both"
                )
        elif isinstance(message, Change):
            assert self._trial is not None
            mirror.apply(message, self._trial.folder)
        elif isinstance(message, Ended):
            self._training -= 1
            self._lost_at = time.monotonic() + self._last_seconds
            self.was_lost |= message.was_lost

    def _end(self) -> str:
        """Close the connection, upon which the host ends; end the command if that lasts.

        Returns the last words of the command, and so of the cluster.
        """
        process = self._process
        assert process is not None
        self._socket.close()
        if self.is_starting:
            process.terminate()  # In a queue it does not read its input.
        try:
            for end in (process.terminate, process.kill):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
                    break
                end()
        finally:
            if process.poll() is None:
                # Ctrl-C came while it waited. srun needs a moment to cancel its job.
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_CANCEL_SECONDS)
            process.kill()
            process.wait()
            self._process = None
        self._missing, self._began_waiting = 0, None
        with self._errors as errors:
            errors.seek(0)
            return errors.read()[-_MOST_ERROR_BYTES:].decode(errors="replace").strip()

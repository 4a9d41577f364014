"""The folder, commands and random choices of one scenario."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from rankzero.catalog.lookup import folders
from rankzero.run_store.folder import RunFolder
from torture.room import shared_memory

T = TypeVar("T")
U = TypeVar("U")
# An environment variable that every process of a scenario inherits.
MARK = "RANKZERO_TORTURE"
# A command that takes longer has hung.
DEADLINE_SECONDS = 240.0
# Seconds that recorders and couriers may keep running after their command has ended. A courier on a
# busy machine takes a minute to start.
ORPHAN_SECONDS = 120.0
# Seconds that all other processes may keep running. The most measured was six, at a load of ten.
LEAVE_SECONDS = 30.0
DELIVERERS = ("rankzero.tracking.recorder", "rankzero.tracking.courier")
# Seconds that a command waits for MLflow at its end, in all.
GRACE_SECONDS = 5.0
# Number of runs in the crowd scenario.
CROWD = 20


class Broken(Exception):
    """A promise that did not hold. The message begins with its kind."""


class NotRun(Exception):
    """A scenario that this machine does not allow. The message has the reason."""


@dataclasses.dataclass
class Command:
    """A started command."""

    process: subprocess.Popen[str]
    output: Path
    ended: float = 0.0
    """The time at which `wait` saw its end, in seconds since the epoch; 0 before."""
    began: float = dataclasses.field(default_factory=time.monotonic)
    deadline_seconds: float = DEADLINE_SECONDS

    def wait(self) -> int:
        """Wait for the end and return the exit code. Raises Broken if the command hangs."""
        try:
            code = self.process.wait(self.deadline_seconds)
            self.ended = self.ended or time.time()
            return code
        except subprocess.TimeoutExpired:
            raise Broken(
                f"hang: no end after {self.deadline_seconds:.0f} s: {self.tail()}"
            ) from None

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def busy(self) -> bool:
        """Return whether it runs. Raises Broken if it hangs, so a loop over this always ends."""
        if self.running and time.monotonic() - self.began > self.deadline_seconds:
            raise Broken(f"hang: still running after {self.deadline_seconds:.0f} s: {self.tail()}")
        return self.running

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-600:]


@dataclasses.dataclass(frozen=True)
class Turn:
    """Takes the variants of a scenario in turn, so that a campaign tries all of them."""

    seed: int = 0
    """The campaign's seed, which gives the order of all variants."""
    number: int = 0
    """How often the scenario ran before."""

    def of(self, choices: Sequence[T], each: int = 1) -> Iterator[T]:
        """Yield the choices in a cycle. A turn takes `each` of them, the next turn continues."""
        order = random.Random(self.seed).sample(choices, len(choices))
        return itertools.islice(itertools.cycle(order), self.number * each % len(order), None)

    def pair(self, choices: Sequence[T], others: Sequence[U]) -> tuple[T, U]:
        """Return one of each, so that in the end every choice meets every other."""
        # Both cycle. After each common multiple of their lengths, the second skips one ahead.
        # Otherwise six moments would always meet the same of two processes.
        behind = dataclasses.replace(
            self, number=self.number + self.number // math.lcm(len(choices), len(others))
        )
        return next(self.of(choices)), next(behind.of(others))


FIRST = Turn()


class Ground:
    """A folder, the commands that run in it, and the random choices of one scenario.

    `empty`: an MLflow database without a run. The embedded store starts as a copy of it.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        empty: Path,
        crowd: int = CROWD,
        turn: Turn = FIRST,
    ) -> None:
        self.folder, self.random, self.empty, self.crowd = folder, random.Random(seed), empty, crowd
        self.seed, self.turn = seed, turn
        self.shared_memory = shared_memory()
        self.mark = secrets.token_hex(8)
        self.faults: list[str] = []
        self.spoiled: set[int] = set()
        """Steps that MLflow keeps with values that the scenario made wrong."""
        self.power_cut = False
        """Whether the power failed, so that MLflow may have steps that the journal lost."""
        self.idling = self.leaving = 0.0
        """Most seconds until the processes had ended: those with nothing to deliver, and all."""
        self.environ = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("MLFLOW_", "RANKZERO_"))
            },
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "RANKZERO_DELIVERY_GRACE_SECONDS": f"{GRACE_SECONDS:g}",
            "TORTURE_EVALUATING": str(self.evaluating),
            MARK: self.mark,
        }
        self.runs_folder.mkdir(parents=True, exist_ok=True)
        self.database.write_bytes(empty.read_bytes())

    @property
    def runs_folder(self) -> Path:
        return self.folder / "mlruns" / "runs"

    @property
    def evaluating(self) -> Path:
        """A file that a rank touches when it begins a slow evaluation."""
        return self.folder / "evaluating"

    @property
    def database(self) -> Path:
        """The file of the embedded store."""
        return self.folder / "mlruns" / "mlflow.db"

    @property
    def store(self) -> str:
        """The URI of the embedded store."""
        return f"sqlite:///{self.database}"

    def next_of(self, choices: Sequence[T]) -> T:
        """Return the choice whose turn it is in the campaign."""
        return next(self.turn.of(choices))

    def next_pair(self, choices: Sequence[T], others: Sequence[U]) -> tuple[T, U]:
        """Return the pair whose turn it is. In the end, every choice meets every other."""
        return self.turn.pair(choices, others)

    def note_fault(self, name: str) -> None:
        """Count a fault that was injected."""
        self.faults.append(name)

    def start(self, *words: object, inside: Sequence[str] = ()) -> Command:
        """Start a command; `inside`: words before it, which run it in other namespaces."""
        output = self.folder / f"output-{len(list(self.folder.glob('output-*')))}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*inside, sys.executable, "-m", "rankzero", *map(str, words)],
                cwd=self.folder,
                env=self.environ,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return Command(process, output)

    def run(self, *words: object, code: int | None = 0, inside: Sequence[str] = ()) -> Command:
        """Run a command to its end. Raises Broken unless its exit code is `code` (None: any)."""
        command = self.start(*words, inside=inside)
        found = command.wait()
        if code is not None and found != code:
            raise Broken(
                f"wrong status: {' '.join(map(str, words))} ended with {found}: {command.tail()}"
            )
        return command

    def processes(self) -> list[psutil.Process]:
        """Return the running processes that this scenario's commands started."""
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def idlers(self) -> list[psutil.Process]:
        """Return the running processes of this scenario that have nothing to deliver."""
        return [process for process in self.processes() if not _delivers(process)]

    def roles(self, among: Sequence[psutil.Process] | None = None) -> dict[str, psutil.Process]:
        """Return the running processes by role. `among`: these processes only.

        The roles are launcher, server, rank 0, other rank, data worker, recorder and courier. If
        several have one role, it returns one.
        """
        found: dict[str, psutil.Process] = {}
        first = self._first_rank()
        for process in self.processes() if among is None else among:
            with contextlib.suppress(psutil.Error):
                role = _role(process, first)
                if role is not None:
                    found[role] = process
        return found

    def _first_rank(self) -> int | None:
        run = self.the_run()
        try:
            return (
                None
                if run is None
                else int(json.loads((run.path / "recorder.json").read_text())["pid"])
            )
        except (OSError, ValueError, KeyError):
            return None

    def the_run(self, name: str | None = None) -> RunFolder | None:
        return next(
            (one for one in folders(self.runs_folder) if name in (None, one.path.name)), None
        )

    def clean_up(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _is_mine(self, process: psutil.Process) -> bool:
        """Return whether a process belongs to this scenario."""
        # A process with another environment has no mark, but it works in the scenario's folder.
        with contextlib.suppress(psutil.Error):
            marked = process.environ().get(MARK) == self.mark
            mine = marked or Path(process.cwd()).is_relative_to(self.folder)
            return mine and process.status() != psutil.STATUS_ZOMBIE
        return False


def _delivers(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word in DELIVERERS for word in process.cmdline())
    return True  # it has ended meanwhile


def _role(process: psutil.Process, first_rank: int | None) -> str | None:
    """Return the role of a process in its training, or None for another process."""
    above = [one.name() for one in process.parents()]
    if _is_rank(process.name()) and "forkserver" in above[:1]:
        return "rank 0" if process.pid == first_rank else "other rank"
    if process.name() == "forkserver":
        return None if "forkserver" in above[:1] else "server"  # a fork that is no rank yet
    words = " ".join(process.cmdline())
    for module, role in (
        ("tracking.recorder", "recorder"),
        ("tracking.courier", "courier"),
        ("-m rankzero", "data worker" if any(map(_is_rank, above)) else "launcher"),
    ):
        if module in words:
            return role
    # A rank's own fork server, or a data worker that was forked from it.
    return "data worker" if any(map(_is_rank, above)) else None


def _is_rank(name: str) -> bool:
    """Return whether it is the name of a rank, or of what a rank forked."""
    return name.startswith("rank-")


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Wait until `condition` is true. Return whether that happened in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False

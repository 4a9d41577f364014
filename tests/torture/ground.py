"""A place for one scenario: runs that are hurt, and what must be true of them afterwards."""

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
from rankzero.launch.agent import PRELOAD
from rankzero.run_store.folder import RunFolder
from torture.room import shared_memory

T = TypeVar("T")
U = TypeVar("U")
MARK = "RANKZERO_TORTURE"
"""An environment variable that every process of a scenario inherits."""
DEADLINE_SECONDS = 240.0
"""A command that takes longer has hung."""
ORPHAN_SECONDS = 120.0
"""What who delivers gets to leave after its command has ended: a courier on a busy machine takes a minute to begin."""
LEAVE_SECONDS = 30.0
"""What everybody else gets: six were seen at a load of ten."""
DELIVERERS = ("rankzero.tracking.recorder", "rankzero.tracking.courier")
GRACE_SECONDS = 5.0
"""What the end of a command waits for MLflow, in all."""
CROWD = 20
"""How many runs a crowd is."""
FORKED = PRELOAD[-1]
"""What the server has loaded that ranks are forked from, as its command and theirs say."""


class Broken(Exception):
    """A promise that did not hold; the message says which."""


class NotRun(Exception):
    """What this machine does not allow to be tried; the message says why."""


@dataclasses.dataclass
class Command:
    """A command that was started, and is there to be hurt."""

    process: subprocess.Popen[str]
    output: Path
    ended: float = 0.0
    """When it was seen to have ended, as the clock says."""
    began: float = dataclasses.field(default_factory=time.monotonic)

    def wait(self) -> int:
        """Return its exit code. Raises Broken where it hangs."""
        try:
            code = self.process.wait(DEADLINE_SECONDS)
            self.ended = self.ended or time.time()
            return code
        except subprocess.TimeoutExpired:
            raise Broken(f"hang: no end after {DEADLINE_SECONDS:.0f} s: {self.tail()}") from None

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def busy(self) -> bool:
        """Tell whether it runs, for loops that hurt it until it ends. Raises Broken where that takes too long."""
        if self.running and time.monotonic() - self.began > DEADLINE_SECONDS:
            raise Broken(f"hang: it runs for {DEADLINE_SECONDS:.0f} s by now: {self.tail()}")
        return self.running

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-600:]


@dataclasses.dataclass(frozen=True)
class Turn:
    """Which time it is that a campaign tries a scenario: its variants are gone round, whatever else is random."""

    seed: int = 0
    """The campaign's: the order of all variants."""
    number: int = 0
    """How often the scenario was tried before."""

    def of(self, choices: Sequence[T], each: int = 1) -> Iterator[T]:
        """Yield the choices for ever, all of them before one again; every turn draws `each`, and the next goes on."""
        order = random.Random(self.seed).sample(choices, len(choices))
        return itertools.islice(itertools.cycle(order), self.number * each % len(order), None)

    def pair(self, choices: Sequence[T], others: Sequence[U]) -> tuple[T, U]:
        """Return one of each: both go round, and once all of both was had, the others are one ahead of before.

        With the same number for both, six moments would always meet the same of two processes.
        """
        behind = dataclasses.replace(
            self, number=self.number + self.number // math.lcm(len(choices), len(others))
        )
        return next(self.of(choices)), next(behind.of(others))


FIRST = Turn()


class Ground:
    """A folder, the commands that run in it, and the random choices of one scenario.

    `empty`: an MLflow database without a run, of which the embedded store is a copy.
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
        self.turn = turn
        self.shared_memory = shared_memory()
        self.mark = secrets.token_hex(8)
        self.faults: list[str] = []
        self.idling = self.leaving = 0.0
        """The longest that those took to leave who had nothing to deliver, and all of them."""
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
        """What a rank touches when it begins an evaluation that takes a while."""
        return self.folder / "evaluating"

    @property
    def database(self) -> Path:
        """The embedded store's."""
        return self.folder / "mlruns" / "mlflow.db"

    @property
    def store(self) -> str:
        """The embedded store's address."""
        return f"sqlite:///{self.database}"

    def next_of(self, choices: Sequence[T]) -> T:
        """Return the choice whose turn it is in the campaign."""
        return next(self.turn.of(choices))

    def next_pair(self, choices: Sequence[T], others: Sequence[U]) -> tuple[T, U]:
        """Return the two whose turn it is together: in the end, each of these met each of those."""
        return self.turn.pair(choices, others)

    def note_fault(self, what: str) -> None:
        """Note a fault that was injected."""
        self.faults.append(what)

    def start(self, *words: object) -> Command:
        output = self.folder / f"output-{len(list(self.folder.glob('output-*')))}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "rankzero", *map(str, words)],
                cwd=self.folder,
                env=self.environ,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return Command(process, output)

    def run(self, *words: object, code: int | None = 0) -> Command:
        """Run a command to its end. Raises Broken where its exit code is not `code` (None: any)."""
        command = self.start(*words)
        found = command.wait()
        if code is not None and found != code:
            raise Broken(
                f"wrong status: {' '.join(map(str, words))} ended with {found}: {command.tail()}"
            )
        return command

    def processes(self) -> list[psutil.Process]:
        """Return the processes that this scenario's commands started and that still run."""
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def idlers(self) -> list[psutil.Process]:
        """Return those of them that have nothing to deliver."""
        return [process for process in self.processes() if not _delivers(process)]

    def roles(self) -> dict[str, psutil.Process]:
        """Return a training's processes by what they are.

        These are launcher, server, rank 0, other rank, data worker, recorder, courier.
        """
        found: dict[str, psutil.Process] = {}
        first = self._first_rank()
        for process in self.processes():
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
        """Tell by the mark; where a process has another environment, by the folder that it works in."""
        with contextlib.suppress(psutil.Error):
            marked = process.environ().get(MARK) == self.mark
            mine = marked or Path(process.cwd()).is_relative_to(self.folder)
            return mine and process.status() != psutil.STATUS_ZOMBIE
        return False


def _delivers(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word in DELIVERERS for word in process.cmdline())
    return True  # gone by now


def _role(process: psutil.Process, first_rank: int | None) -> str | None:
    """Return what a process is in its training; forks look like the server that they were forked from."""
    words = " ".join(process.cmdline())
    for module, role in (
        ("tracking.recorder", "recorder"),
        ("tracking.courier", "courier"),
        ("-m rankzero", "launcher"),
    ):
        if module in words:
            return role
    if "forkserver" not in words:
        return None
    generations = len(list(itertools.takewhile(_is_forked, process.parents())))
    if (
        FORKED not in words
    ):  # a server that a rank has of its own, and the data workers that are its forks
        return "data worker" if generations else None
    if generations != 1:
        return "data worker" if generations else "server"
    return "rank 0" if process.pid == first_rank else "other rank"


def _is_forked(process: psutil.Process) -> bool:
    """Tell whether this is the server that ranks are forked from, or one of its forks, which look like it."""
    return "forkserver" in " ".join(process.cmdline())


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Wait until a callable says yes; tell whether it did."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False

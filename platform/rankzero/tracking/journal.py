"""The run folder and its journals: append events, read them, follow them.

The journal on disk is the truth about a run. Each file has one writer, which appends whole
lines; what a killed writer leaves of a last line is skipped by readers and closed off by
the next writer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rankzero.events import CheckpointSaved, Event, RunEnded, RunStarted, StepsLogged, decode, encode
from rankzero.tracking import names
from rankzero.tracking.secrecy import url_without_secrets

EVENTS, CHILDREN = "events.jsonl", "children.txt"
READ_BYTES = 1 << 20  # what a reader holds in memory at a time
MOST_WAITING_BYTES = 64 << 20  # what a writer holds while it cannot write
STEPS_SECONDS = 0.5  # between writes of steps: a run that reports each step does not pay a write for each


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a run is called and where it goes; written once, before anything happens."""

    name: str
    uuid: str
    experiment: str
    """The MLflow experiment."""
    tracking_uri: str
    artifact_root: str | None = None
    """Where a new MLflow experiment keeps its artifacts; none: the server decides."""
    experiment_file: str | None = None
    """The user's file, ``path.py`` or ``path.py:Class``, absolute."""
    project_dir: str | None = None
    """The folder that the run was started in."""
    parent: str | None = None
    """The run that this one belongs to (a trial's study), by name: its folder lies beside; its courier serves both."""
    parent_uuid: str | None = None
    """The run to show this one below, where another process delivers that: a study that it leads."""
    parent_run_id: str | None = None
    mlflow_run_id: str | None = None
    """The MLflow run to go on with, where it is known from elsewhere (a resume on a new machine)."""


def read_identity(path: Path) -> Identity:
    """Read a ``run.json``. Raises BrokenRun: a name in it becomes a folder's, so it is not believed unseen."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        identity = Identity(**fields)
        odd = [key for key, value in fields.items() if not isinstance(value, (str, type(None)))]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise names.BrokenRun(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    folders = [name for name in (identity.name, identity.parent or identity.name) if not names.is_plain(name)]
    if odd or folders:
        raise names.BrokenRun(f"{path} is none that rankzero wrote: {', '.join([*odd, *map(repr, folders)])[:200]}")
    return identity


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """One run's folder, ``mlruns/runs/<name>``, and the names of what lies in it."""

    path: Path

    @classmethod
    def create(cls, runs: Path, identity: Identity) -> RunFolder:
        """Make the folder and write the identity. Raises UserError, FileExistsError, PermissionError."""
        folder = cls(_place(runs, identity))
        folder.path.mkdir(parents=True)
        folder.write_identity(identity)
        return folder

    @classmethod
    def open_or_create(cls, runs: Path, identity: Identity) -> RunFolder:
        """Open the run's folder, or make it. Raises UserError, PermissionError."""
        folder = cls(_place(runs, identity))
        if not (folder.path / "run.json").exists():
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.write_identity(identity)
        return folder

    def write_identity(self, identity: Identity) -> None:
        """Write down what the run is called; for its owner alone where the tracking URI holds a password."""
        text = json.dumps(dataclasses.asdict(identity), indent=2)
        write_atomically(self.path / "run.json", text, private=url_without_secrets(text) != text)

    @property
    def identity(self) -> Identity:
        """What the run is called. Raises BrokenRun where `run.json` is none that we wrote."""
        return read_identity(self.path / "run.json")

    @property
    def events(self) -> Path:
        return self.path / EVENTS

    @property
    def config(self) -> Path:
        """The settings, whole; `artifacts` has them under the same name without secrets."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def pictures(self) -> Path:
        """What pictures are drawn from, until MLflow has them."""
        return self.path / "pictures"

    @property
    def failures(self) -> Path:
        """Where a failing rank says why: ``rank_<r>.json`` with time, reason and error."""
        return self.path / "failures"

    @property
    def pruned(self) -> Path:
        """Where a search says why it stops the run."""
        return self.path / "pruned.txt"

    @property
    def artifacts(self) -> Path:
        """Files that the recorder uploads to the run as they are (the dirty diff, logs)."""
        return self.path / "artifacts"

    @property
    def description(self) -> Path:
        """Markdown for the run's page, in the place of the usual report; there need not be one."""
        return self.path / "description.md"

    @property
    def children(self) -> list[RunFolder]:
        """The runs that belong to this one (a study's trials), in the order in which they were begun."""
        try:
            found = (self.path / CHILDREN).read_text(errors="replace").split()
        except OSError:
            return []
        return [RunFolder(self.path.parent / name) for name in found if names.is_plain(name)]

    def add_child(self, name: str) -> None:
        """Note that the run `name`, in a folder beside this one, belongs to it."""
        with (self.path / CHILDREN).open("a") as file:
            file.write(name + "\n")

    def all_events(self) -> Iterator[Event]:
        """Yield every event of the run, those of the nodes' samples last."""
        for path in (self.events, *sorted(self.path.glob("system-node_*.jsonl"))):
            yield from read_all(path)

    def system(self, node: int) -> Path:
        return self.path / f"system-node_{node}.jsonl"


class Journal:
    """Appends events to a file; a `Hook`.

    Events are handed to the operating system at once, so they survive the death of the process; of
    StepsLogged only those a while after the last, others wait in memory for the next event or `flush`.
    RunStarted, CheckpointSaved and RunEnded are also synced to the disk. While the disk is
    full, lines wait in memory, and the next event tries again; past `MOST_WAITING_BYTES` it raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._waiting = bytearray() if _ends_with_newline(path) else bytearray(b"\n")
        self._steps_written = 0.0

    def __call__(self, event: Event) -> None:
        self._waiting += (encode(event) + "\n").encode()
        if self._is_due(event):
            self._write()
        if isinstance(event, (RunStarted, CheckpointSaved, RunEnded)):
            with contextlib.suppress(OSError):  # network file systems tell of a full disk here; the journal goes on
                os.fsync(self._descriptor)

    def flush(self) -> None:
        """Hand what waits in memory to the operating system."""
        self._write()

    def close(self) -> None:
        """Write what waits, and close the file. Raises OSError where something stays unwritten."""
        try:
            self._drain()
        finally:
            os.close(self._descriptor)

    def _is_due(self, event: Event) -> bool:
        """Tell whether to write now. What ends at the same time, as the events of one window do, goes together."""
        if not isinstance(event, StepsLogged) or not event.times:
            return True
        since = event.times[-1] - self._steps_written
        if 0 < since < STEPS_SECONDS:
            return False
        self._steps_written = event.times[-1]
        return True

    def _write(self) -> None:
        try:
            self._drain()
        except OSError:
            if len(self._waiting) > MOST_WAITING_BYTES:
                raise

    def _drain(self) -> None:
        while self._waiting:
            written = os.write(self._descriptor, self._waiting)
            del self._waiting[:written]


class Taken(NamedTuple):
    """What a piece of a journal holds: its events, the offset behind it, and how many of its lines are no events."""

    events: list[Event]
    offset: int
    foreign: int = 0


def take(path: Path, offset: int = 0, limit_bytes: int = READ_BYTES) -> Taken:
    """Return what stands after `offset`: about `limit_bytes` at most, but always a whole line.

    A line that is no event (torn by the death of its writer, or somebody else's) is passed over and counted.
    """
    lines, behind = _lines(path, offset, limit_bytes)
    events, foreign = [], 0
    for line in lines:
        try:
            events.append(decode(line))
        except ValueError:
            foreign += bool(line.strip())
    return Taken(events, behind, foreign)


def read(path: Path, offset: int = 0, limit_bytes: int = READ_BYTES) -> tuple[list[Event], int]:
    """Return the events after `offset` and the offset behind them; ([], offset) when there is nothing new."""
    taken = take(path, offset, limit_bytes)
    return taken.events, taken.offset


def read_all(path: Path) -> Iterator[Event]:
    """Yield every event that the file holds now."""
    offset = 0
    while True:
        events, behind = read(path, offset)
        yield from events
        if behind == offset:
            return
        offset = behind


def new_name(stem: str) -> str:
    """Return a run name that sorts by time: ``digits-20261121-093005-3fa1c8``. A hundred in one second still differ."""
    return f"{names.made_plain(stem)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def write_atomically(path: Path, text: str, private: bool = False) -> None:
    """Replace `path` by `text` in one step: readers see the old file or the new one.

    `private`: its owner alone may read it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _place(runs: Path, identity: Identity) -> Path:
    """Return where the run's folder lies. Raises UserError for names that are no folder's."""
    if not names.is_plain(identity.name):
        names.checked_run(identity.name)
    names.check_experiment(identity.experiment)
    return (runs / identity.name).absolute()


def _lines(path: Path, offset: int, limit_bytes: int) -> tuple[list[str], int]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return [], offset
    with file:
        file.seek(offset)
        chunk = file.read(limit_bytes)
        if b"\n" not in chunk and len(chunk) == limit_bytes:
            chunk += file.readline()
        whole = chunk[: chunk.rfind(b"\n") + 1]
    return whole.decode("utf-8", errors="replace").split("\n"), offset + len(whole)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"

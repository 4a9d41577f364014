"""A run's identity, and the folder that holds everything of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from rankzero.errors import UserError
from rankzero.events import Event
from rankzero.redaction.text import url_without_secrets
from rankzero.run_store import disk, lock_files, names, symlinks
from rankzero.run_store.journal import read_all
from rankzero.run_store.location import make_root

EVENTS, _CHILDREN = "events.jsonl", "children.txt"
_CREATION_SECONDS = 5.0  # for another process to write the identity


class FolderGone(UserError):
    """A run's folder was moved or deleted while something was done with it."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """A run's names and places. Written once, before anything else."""

    name: str
    uuid: str
    experiment: str
    """The MLflow experiment."""
    tracking_uri: str
    artifact_root: str | None = None
    """The artifact folder of a new MLflow experiment. None: the server decides."""
    experiment_file: str | None = None
    """The user's file, ``path.py`` or ``path.py:Class``, absolute."""
    project_dir: str | None = None
    """The folder that the run was started in."""
    parent: str | None = None
    """Name of the run that this one belongs to (a study, a repeat). Its courier delivers both."""
    parent_uuid: str | None = None
    """The run to show this one below if a process elsewhere delivers that (a shared study)."""
    parent_run_id: str | None = None
    mlflow_run_id: str | None = None
    """The MLflow run to continue, if it is known from elsewhere (a resume on a new machine)."""

    def child(self, name: str) -> Identity:
        """Return the identity of a new run that this run's courier delivers."""
        return dataclasses.replace(
            self,
            name=name,
            uuid=secrets.token_hex(16),
            parent=self.name,
            # These name this run in MLflow, and the run above it.
            mlflow_run_id=None,
            parent_run_id=None,
        )


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """One run's folder, ``mlruns/runs/<name>``, and the names of its files."""

    path: Path

    @classmethod
    def create(cls, runs: Path, identity: Identity) -> RunFolder:
        """Create the folder with its identity. Raises UserError, FileExistsError, OSError.

        It takes over a folder that a command left which was stopped before its run had begun.
        """
        folder = cls(_place(runs, identity))
        _make(folder.path)
        symlinks.refuse(folder.path)
        with lock_files.lock(folder.path / "attempt.lock", seconds=_CREATION_SECONDS) as is_free:
            if not is_free or (folder.path / "run.json").exists() or folder.has_begun:
                raise FileExistsError(folder.path)
            folder.write_identity(identity)
        return folder

    @classmethod
    def open_or_create(cls, runs: Path, identity: Identity) -> RunFolder:
        """Open the run's folder, or create it. Raises UserError, InvalidRunFolder, OSError.

        A machine that helps with another's run replaces the identity that its own command wrote.
        """
        folder = cls(_place(runs, identity))
        symlinks.refuse(folder.path)
        known = (folder.path / "run.json").exists()
        if not known or not (folder.events.exists() or folder.identity.uuid == identity.uuid):
            _make(folder.path)
            folder.write_identity(identity)
        return folder

    def write_identity(self, identity: Identity) -> None:
        """Write run.json, readable for its owner alone if the tracking URI holds a password."""
        text = json.dumps(dataclasses.asdict(identity), indent=2)
        write_atomically(self.path / "run.json", text, private=url_without_secrets(text) != text)
        # The entry of a new folder. Without it, a power loss takes the synced files in it away.
        for parent in self.path.parents[:2]:
            disk.sync(parent)

    @property
    def identity(self) -> Identity:
        """The run's identity. Raises InvalidRunFolder if RankZero did not write `run.json`."""
        path = self.path / "run.json"
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            identity = Identity(**fields)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise names.InvalidRunFolder(
                f"{path} cannot be read: {type(error).__name__}: {error}"
            ) from error
        odd = [key for key, value in fields.items() if not isinstance(value, str | None)]
        # They become names of folders.
        given = identity.name, identity.parent or identity.name
        odd += [repr(name) for name in given if not names.is_plain(name)]
        if odd:
            raise names.InvalidRunFolder(
                f"{path} was not written by RankZero (unexpected: {', '.join(odd)[:200]}): "
                "remove the folder or restore it"
            )
        return identity

    @property
    def events(self) -> Path:
        return self.path / EVENTS

    @property
    def is_elsewhere(self) -> bool:
        """Whether only a helping machine's part of the run is here, and rank 0's elsewhere."""
        nodes = self.path.glob("system-node_*.jsonl")
        return not self.events.exists() and any(path.name != self.system(0).name for path in nodes)

    @property
    def has_begun(self) -> bool:
        """Whether a part of a training is here: a journal, samples or a checkpoint."""
        parts = (*self.checkpoints.glob("step_*"), *self.path.glob("system-node_*.jsonl"))
        return self.events.exists() or bool(parts)

    @property
    def config(self) -> Path:
        """The settings with their secrets. `artifacts` has a redacted file of the same name."""
        return self.path / "config.yaml"

    @property
    def processes(self) -> Path:
        """A file with the number of ranks, on a machine that helps and keeps no checkpoints."""
        return self.path / "processes.txt"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def models(self) -> Path:
        """Models that a program logs, in MLflow's layout."""
        return self.path / "models"

    @property
    def root(self) -> Path:
        """The folder of the store that the run is in: ``mlruns``."""
        return self.path.parent.parent

    @property
    def pictures(self) -> Path:
        """The arrays that pictures are drawn from, until MLflow has the pictures."""
        return self.path / "pictures"

    @property
    def failures(self) -> Path:
        """The folder in which a failing rank writes ``rank_<r>.json``: time, reason and error."""
        return self.path / "failures"

    @property
    def pruned(self) -> Path:
        """The file in which a search writes why it stops the run."""
        return self.path / "pruned.txt"

    @property
    def beat(self) -> Path:
        """The file that a trial's rank 0 writes every few seconds while it makes progress."""
        return self.path / "beat.txt"

    @property
    def deleted(self) -> Path:
        """A file that exists if the run is deleted, and the embedded store does not say it."""
        return self.path / "deleted.txt"

    @property
    def artifacts(self) -> Path:
        """Files that the courier uploads as they are (the diff, logs)."""
        return self.path / "artifacts"

    @property
    def late_model(self) -> Path:
        """A file that exists if there was no time to log the best model."""
        return self.path / "best_model.late"

    @property
    def logged_model(self) -> Path:
        """A file: which step's model is logged, under which id, and the attempt's end by then."""
        return self.path / "best_model.json"

    @property
    def description(self) -> Path:
        """Optional Markdown for the run's page, instead of the usual report."""
        return self.path / "description.md"

    @property
    def children(self) -> list[RunFolder]:
        """The runs that belong to this one (a study's trials), oldest first."""
        try:
            found = (self.path / _CHILDREN).read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            return []
        return [RunFolder(self.path.parent / name) for name in found if names.is_plain(name)]

    def add_child(self, name: str) -> None:
        """Note that the run `name`, in the same parent folder, belongs to this one."""
        path = self.path / _CHILDREN
        with open(path, "a", encoding="utf-8", opener=symlinks.no_follow) as file:
            # A line that a power loss cut does not swallow this one.
            file.write(f"\n{name}\n")
        disk.sync_all([path], self.path)

    def all_events(self) -> Iterator[Event]:
        """Yield every event of the run, the nodes' samples last."""
        for path in (self.events, *sorted(self.path.glob("system-node_*.jsonl"))):
            yield from read_all(path)

    def system(self, node: int) -> Path:
        return self.path / f"system-node_{node}.jsonl"


def is_hidden_artifact(path: Path) -> bool:
    """Return whether an artifact is not one yet: its name begins with a dot while it is written."""
    # torch.distributed.checkpoint calls a file so, and reads no checkpoint without it.
    return path.name.startswith(".") and path.name != ".metadata"


def write_atomically(path: Path, text: str, private: bool = False) -> None:
    """Replace `path` by `text` in one step: readers see the old file or the new one.

    After the return, a power loss does not undo it. Only its owner may read a `private` one.
    """
    # Its own for each writer. Pods that share the folder have equal process ids.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.write(text)
            # Without it, a crash of the machine may leave an empty file under the final name.
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    disk.sync(path.parent)


def _make(folder: Path) -> None:
    make_root(folder.parent.parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UserError(
            f"{error.filename} is no folder, or a link to one that is gone: mount that disk, or "
            "choose another folder with RANKZERO_DIR"
        ) from None


def _place(runs: Path, identity: Identity) -> Path:
    """Return the path of the run's folder. Raises UserError for illegal names."""
    if not names.is_plain(identity.name):
        names.checked_run(identity.name)
    names.check_experiment(identity.experiment)
    return (runs / identity.name).absolute()

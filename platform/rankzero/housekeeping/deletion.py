"""Delete runs, bring them back, and free their disk. docs/decisions/0042 has the reasons.

A deleted run is whole: MLflow and this disk keep all of it until `free`. Each function finishes
what a killed call began.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rankzero.catalog import command_lines, deleted, lookup
from rankzero.errors import UserError
from rankzero.mlflow_store import uris
from rankzero.run_store import delivery_state, lock_files, names, removal, run_locks
from rankzero.run_store.attempt import is_written, sole_launcher
from rankzero.run_store.folder import RunFolder, write_atomically
from rankzero.tracking import delivery_status
from rankzero.tracking.open_run import connect, origin, other_attempt, refuse_older
from rankzero.tuning.options import STUDIES, default_storage

if TYPE_CHECKING:
    from rankzero.mlflow_store.client.deletion import MlflowDeletion


def parts(folder: RunFolder) -> list[RunFolder]:
    """Return a run and its children, which go where it goes."""
    # A list from elsewhere may name any run. Only the run itself says whose child it is.
    own, name = [folder], folder.path.name
    for one in dict.fromkeys(folder.children):
        with contextlib.suppress(names.InvalidRunFolder):
            own += [one] if one.identity.parent == name else []
    return own


def _never_begun(folder: RunFolder) -> list[RunFolder]:
    """Return the children that no launch has begun. They have settings and logs, and no identity.

    A list from elsewhere may name any folder. A child's name begins with its run's.
    """
    return [
        one
        for one in dict.fromkeys(folder.children)
        if one.path.name.startswith(f"{folder.path.name}-")
        and one.path.is_dir()
        and not (one.path.is_symlink() or (one.path / "run.json").exists() or one.has_begun)
    ]


@dataclasses.dataclass
class Housekeeper:
    """Deletes and frees runs. It asks each tracking store once for what concerns all runs."""

    discard_undelivered: bool = False
    """Whether what MLflow lacks may be lost."""
    _stores: dict[str, MlflowDeletion] = dataclasses.field(default_factory=dict, init=False)

    def obstacle(self, folder: RunFolder) -> str | None:
        """Return why this run stays, or None."""
        if links := [one.path.name for one in parts(folder) if one.path.is_symlink()]:
            return f"the folder {links[0]} is a link: delete the folder that it leads to yourself"
        name = folder.identity.name
        if name != folder.path.name:
            return f"its folder is a copy of {name}, or was renamed: MLflow has one run for both"
        if place := origin(folder):
            command = command_lines.line(folder.root, "relocate")
            return f"its store was moved or copied from {place}: {command}, or delete it there"
        with alone(folder) as unused:
            return self._loss(folder) if unused else "it runs, or its delivery does"

    def _loss(self, folder: RunFolder) -> str | None:
        """Return what nobody could bring back if the run was erased, or None."""
        lacks = _undelivered(folder)
        if lacks and not self.discard_undelivered:
            command = command_lines.line(folder.root, "sync", folder.path.name)
            return f"MLflow lacks {lacks}: {command}, or --discard-undelivered"
        known = [(one, *self._in_mlflow(one)) for one in parts(folder)]
        versions = list[str]()
        for store in {one for _, one, _ in known if one is not None}:
            versions += store.registered([run_id for _, one, run_id in known if one is store])
        if versions:
            return f"its files are registered as {', '.join(versions)}: delete that version first"
        return next((why for found in known if (why := _continued(*found))), None)

    def bytes(self, folder: RunFolder) -> int:
        """Return what `free` frees here: of the run, its children, and MLflow's local files."""
        places = [one.path for one in parts(folder)]
        for store, run_id in map(self._in_mlflow, parts(folder)):
            if store is not None and store.is_local:
                places += store.places(run_id)
        return removal.size(places)

    def delete(self, folder: RunFolder) -> None:
        """Delete a run and its children, restorable until `free`.

        Raises UserError if somebody uses it, or resumed it since its `obstacle` was asked for.
        """
        with alone(folder) as unused:
            why = self._loss(folder) if unused else "another process uses it"
            if why is not None:
                raise UserError(why)
            # The run last: until then the same call finds it, and continues.
            for one in reversed(parts(folder)):
                store, run_id = self._in_mlflow(one)
                if store is not None:
                    store.delete(run_id)
                if one == folder and run_id not in deleted.read_store(folder.path.parent).runs:
                    mark(folder)

    def restore(self, folder: RunFolder) -> None:
        """Bring a deleted run and its children back.

        Raises UserError if MLflow erased it, or if `free` or a delivery uses it now.
        """
        with alone(folder) as unused:
            if not (unused or is_written(folder) or run_locks.has_live_recorder(folder)):
                raise UserError(f"another process erases or delivers {folder.path.name}: try again")
            for one in reversed(parts(folder)):
                store, run_id = self._in_mlflow(one)
                if store is None or store.restore(run_id):
                    one.deleted.unlink(missing_ok=True)
                elif one == folder:
                    command = command_lines.line(folder.root, "prune", "--deleted")
                    raise UserError(
                        f"MLflow has erased {folder.path.name}; its folder {folder.path} stays "
                        f"until `{command}`"
                    )

    def free(self, folder: RunFolder) -> bool:
        """Erase a deleted run and its children, here and in a local store.

        Return False if somebody has restored the run. Raises UserError if somebody uses it.
        """
        with alone(folder) as unused:
            store, run_id = self._in_mlflow(folder)
            is_active = store is not None and store.is_active(run_id)
            # Somebody may have restored or registered it since the question was asked.
            if unused and (is_active or not deleted.is_hidden(folder)):
                folder.deleted.unlink(missing_ok=True)
                return False
            why = self._loss(folder) if unused else "another process uses it"
            if why is not None:
                raise UserError(why)
            # From now on it is deleted, also where MLflow does not know it any more.
            mark(folder)
            _forget_study(folder)
            # The run last: until then it has its children, and another call finds all of them.
            left = [removal.remove(one) for one in _never_begun(folder)]
            for one in reversed(parts(folder)):
                store, run_id = self._in_mlflow(one)
                if store is not None:
                    # On a server, somebody may have deleted the run alone.
                    (store.erase if store.is_local else store.delete)(run_id)
                left.append(removal.remove(one))
        removal.erase(left)
        return True

    def changed_on_servers(
        self, folders: Iterable[RunFolder]
    ) -> tuple[set[str], dict[str, Exception]]:
        """Return the names of runs that somebody deleted, or restored, on their server.

        Their marks do not say so yet. Also the errors of stores that do not answer, by their URIs:
        each is asked once, and costs nothing of the others.
        """
        changed, errors = set[str](), dict[str, Exception]()
        gone: dict[str, set[str]] = {}
        for folder in folders:
            uri = folder.identity.tracking_uri
            # A list sees what the embedded store has.
            if uri in errors or uri == uris.default_tracking_uri(folder.root):
                continue
            try:
                changed |= {folder.path.name} if self._is_changed(folder, uri, gone) else set()
            except Exception as error:  # MLflow fails in many ways
                errors[uri] = error
        return changed, errors

    def _is_changed(self, folder: RunFolder, uri: str, gone: dict[str, set[str]]) -> bool:
        store, run_id = self._in_mlflow(folder)
        if store is None or folder.deleted.exists():
            return store is not None and store.is_active(run_id)
        if uri not in gone:
            gone[uri] = store.deleted()
        return run_id in gone[uri]

    def _in_mlflow(self, folder: RunFolder) -> tuple[MlflowDeletion | None, str]:
        """Return the run's store, or None if its MLflow never had the run, and the run's id."""
        run_id, uri = lookup.mlflow_id(folder), folder.identity.tracking_uri
        path = uris.sqlite_path(uri)
        # A database that is gone would be made anew.
        if run_id is None or (path is not None and not path.exists()):
            return None, ""
        if uri not in self._stores:
            self._stores[uri] = connect(uri).deletion
        return self._stores[uri], run_id


def _continued(folder: RunFolder, store: MlflowDeletion | None, run_id: str) -> str | None:
    """Return which machine has continued the run since, or None."""
    # Processes that share an embedded store share the run's folder, with its locks.
    if store is None or store.is_local:
        return None
    run = store.record(run_id)
    try:
        refuse_older(folder, None if run is None else other_attempt(folder, run))
    except uris.RunContinued as continued:
        return f"{continued}: delete it there, or in MLflow"
    return None


def mark(folder: RunFolder) -> None:
    """Mark a run as deleted, for lists."""
    if not folder.deleted.exists():
        write_atomically(folder.deleted, time.strftime("%Y-%m-%d %H:%M:%S\n"))


def _forget_study(folder: RunFolder) -> None:
    """Delete a search's study, or else the same command would continue it without its trials."""
    database = folder.root / STUDIES
    if folder.children and database.exists():
        # The import of Optuna takes a second.
        from rankzero.tuning.study import delete_study

        delete_study(default_storage(database.parent), folder.path.name)


@contextlib.contextmanager
def alone(folder: RunFolder) -> Iterator[bool]:
    """Yield whether no process launches, writes or delivers the run or a child, nor can begin."""
    # Two files for each child. A long search has more than a process may open at first.
    lock_files.allow_many_files()
    with contextlib.ExitStack() as locks:

        def take(one: RunFolder) -> bool:
            try:
                locks.enter_context(sole_launcher(one, machines=1))
            except UserError:
                return False
            nodes = delivery_state.nodes(one)
            held = [locks.enter_context(run_locks.lock(one, node)) for node in nodes]
            return all(held) and not (is_written(one) or run_locks.has_live_recorder(one))

        yield all(map(take, parts(folder)))


def _undelivered(folder: RunFolder) -> str:
    """Return what MLflow lacks of a run and its children, in words."""
    found = delivery_status.combined_status(folder)
    late = ["the best model"] if any(one.late_model.exists() for one in parts(folder)) else []
    for one in parts(folder):
        late += [f"samples of node {node}" for node in delivery_state.late_nodes(one)]
    # The machine of rank 0 delivers the rest.
    if folder.is_elsewhere or not (found.pending or late or found.run_id is None):
        return ", ".join(late)
    return ", ".join([*found.lacks, *late]) or "the whole run"

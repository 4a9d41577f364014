"""The runs on this disk: find one by its name or MLflow id, list all."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rankzero.catalog import command_lines, deleted, summary, summary_cache
from rankzero.catalog.summary import Summary
from rankzero.catalog.summary_cache import SummaryCache
from rankzero.errors import UserError
from rankzero.events import RunEnded, RunStarted
from rankzero.run_store import delivery_state, names, symlinks
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import newest_start, read

log = logging.getLogger(__name__)

_IDENTITY = "run.json"


def folders(runs: Path) -> list[RunFolder]:
    """Return the folders of all runs."""
    return [RunFolder(Path(entry.path)) for entry in _entries(runs) if _is_run(entry)]


def find(
    runs: Path,
    name_or_id: str,
    *,
    among_deleted: bool = False,
    ids: Sequence[str] = (),
    strict: bool = False,
) -> RunFolder | None:
    """Return the folder of the run with this name or MLflow run id, or None without one.

    The name may be the folder's, or the one that a user gave the run in the embedded store. Raises
    UserError if several runs have that name there or if the run is deleted, and InvalidRunFolder if
    a link leads out of the folder. With `among_deleted`, the run must be deleted. `ids`: those of
    the runs that have the name on a server. `strict`: a folder's name must not be another run's
    there. Not for commands that a scheduler repeats, which name the folder that they made.
    """
    if names.is_plain(name_or_id) and (runs / name_or_id / _IDENTITY).exists():
        same = [RunFolder(runs / name_or_id)]
        if strict:
            _refuse_another(same[0], among_deleted)
    else:
        known = listed(runs, among_deleted=among_deleted)
        # A copy of a folder has the same id: the newer one is used.
        same = [run.folder for run in known if run.mlflow_run_id == name_or_id][:1]
        same = same or [run.folder for run in known if run.shown_name == name_or_id]
        if not same:
            by_id = {run.mlflow_run_id: run.folder for run in reversed(known)}
            same = [by_id[one] for one in ids if one in by_id]
    if len(same) > 1:
        raise UserError(
            f"{len(same)} runs have the name {names.shown(name_or_id)} in MLflow: give one of "
            f"the folders' names, {', '.join(folder.path.name for folder in same)}"
        )
    if not same:
        return None
    symlinks.refuse(same[0].path)
    if deleted.is_hidden(same[0]) != among_deleted:
        name = same[0].path.name
        command = command_lines.line(runs.parent, "delete", "--restore", name)
        back = f"is deleted: `{command}` brings it back"
        raise UserError(f"{name} {'is not deleted' if among_deleted else back}")
    return same[0]


def _refuse_another(folder: RunFolder, among_deleted: bool) -> None:
    """Raise UserError if lists show the folder's name for another run. A person may mean either."""
    runs, name, own = folder.path.parent, folder.path.name, mlflow_id(folder)
    given = deleted.read_store(runs).runs
    ids = [one for one, known_as in given.items() if known_as == name and one != own]
    # A list of thousands of runs takes long. Seldom is there an id, which may be of no folder here.
    known = listed(runs, among_deleted=among_deleted) if ids else ()
    if others := [one.mlflow_run_id for one in known if one.mlflow_run_id in ids]:
        either = " or ".join(one for one in (own, *others) if one)
        raise UserError(
            f"another run has the name {name} in MLflow: give the MLflow run id, {either}, or "
            "rename one of them there"
        )


def require(runs: Path, name_or_id: str, *, among_deleted: bool = False) -> RunFolder:
    """Return the run's folder. Raises UserError with the newest runs' names without one."""
    found = find(runs, name_or_id, among_deleted=among_deleted, strict=True)
    if found is None:
        newest = [run.name for run in listed(runs, among_deleted=among_deleted)[:3]]
        known = f"the newest are {', '.join(newest)}" if newest else f"there are no runs in {runs}"
        raise UserError(f"no run is called {names.shown(name_or_id)}; {known}")
    return found


def mlflow_id(folder: RunFolder) -> str | None:
    """Return the run's id in MLflow, or None if it is not there yet."""
    with contextlib.suppress(names.InvalidRunFolder):
        state = delivery_state.load(delivery_state.path_of(folder, 0))
        return state.run_id or folder.identity.mlflow_run_id
    return None


def shown_names(folders: Sequence[RunFolder]) -> list[str]:
    """Return the runs' names in the embedded store, if it has any, else their folders'.

    The folder's name follows in brackets if several of the runs have one name.
    """
    stores = {runs: deleted.read_store(runs).runs for runs in {one.path.parent for one in folders}}
    known = [stores[one.path.parent].get(mlflow_id(one)) or one.path.name for one in folders]
    return [
        names.printable(f"{name} ({folder.path.name})" if known.count(name) > 1 else name)
        for name, folder in zip(known, folders, strict=True)
    ]


def last_end(folder: RunFolder) -> RunEnded | None:
    """Return the newest attempt's end, or None if it has none."""
    return summary.last_end(summary.newest_events(folder.events))


def journal_bytes(folder: RunFolder) -> int | None:
    """Return the size of the run's journal, or None without one."""
    with contextlib.suppress(OSError):
        return folder.events.stat().st_size
    return None


def attempt_started(folder: RunFolder, since: int | None) -> bool:
    """Return whether an attempt's start or end was written since `journal_bytes` was `since`."""
    if since is None:
        return folder.events.exists()
    return any(isinstance(event, (RunStarted, RunEnded)) for event in read(folder.events, since)[0])


def ended_in_set_up(folder: RunFolder) -> bool:
    """Return whether the newest attempt ended before its first batch: its steps are unknown."""
    newest = newest_start(folder.events)
    return newest is not None and newest.total_steps is None


def listed(
    runs: Path,
    on_invalid: Callable[[str], object] = log.debug,
    spare_lines: int = 1000,
    *,
    among_deleted: bool = False,
) -> list[Summary]:
    """Return the summaries of all runs that are not deleted, or of the others; the newest first.

    Calls `on_invalid` with a message for each folder that cannot be read as a run. The
    cache may have `spare_lines` that are outdated.
    """
    cache, found, store = SummaryCache(runs), list[Summary](), deleted.read_store(runs)
    for entry in _entries(runs):
        signature = summary_cache.signature(entry.path)
        run = cache.find(entry.name, entry.path, signature)
        if run is None:
            if not _is_run(entry):
                continue
            try:
                read_now = summary.read_summary(RunFolder(Path(entry.path)))
            except names.InvalidRunFolder as error:
                on_invalid(str(error))
                continue
            run = read_now._replace(mlflow_name=_name_in(store, read_now))
            cache.keep(run, entry.name, signature)
        found.append(run)
    cache.save(len(found), spare_lines)
    found = _completed(found, store, among_deleted)
    return sorted(found, key=lambda run: -run.started)


def _completed(runs: list[Summary], store: deleted.StoreRows, among_deleted: bool) -> list[Summary]:
    """Return the runs that are deleted or are not, with what other places know of them."""
    is_deleted = deleted.is_deleted
    gone = {
        _name(run)
        for run in runs
        if is_deleted(run.path, run.mlflow_run_id, store) and not run.lives
    }
    of_children: Counter[str] = Counter()
    for run in runs:
        if run.parent is not None:
            of_children[run.parent] += run.bytes
    if gone or among_deleted:
        runs = [
            run
            for run in runs
            if among_deleted == (not run.lives and not gone.isdisjoint((_name(run), run.parent)))
        ]
    parents = {_name(run): _name_in(store, run) for run in runs if _name(run) in of_children}
    return [_as_shown(run, _name_in(store, run), parents, of_children) for run in runs]


def _as_shown(
    run: Summary, in_mlflow: str | None, parents: Mapping[str, str | None], children: Counter[str]
) -> Summary:
    # Few of many runs have children, a parent, or another name than when they were kept.
    size, parent = run.bytes + children.get(_name(run), 0), parents.get(run.parent or "")
    if (in_mlflow, size, parent) == (run.mlflow_name, run.bytes, run.parent_mlflow_name):
        return run
    return run._replace(mlflow_name=in_mlflow, bytes=size, parent_mlflow_name=parent)


def _name_in(store: deleted.StoreRows, run: Summary) -> str | None:
    return store.runs.get(run.mlflow_run_id) or None


def _name(run: Summary) -> str:
    # `Path` would take ten times as long.
    return run.path.rpartition("/")[2]


def _entries(runs: Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(runs) as entries:
        return list(entries)
    return []


def _is_run(entry: os.DirEntry[str]) -> bool:
    return os.path.exists(f"{entry.path}/{_IDENTITY}")  # noqa: PTH110 - thousands of them

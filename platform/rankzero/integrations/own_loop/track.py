"""`rankzero.track`: the same tracking for a training loop of your own, or another framework's.

    with rankzero.track("my-experiment", config) as run:  # on every rank; only rank 0 writes
        run.log({"loss": loss}, step=i)  # a tensor stays on its device
        run.checkpoint(state_dict, step=i, metrics={"val/loss": v})

Without ``with``, `TrackedRun.finish` ends the run, or the end of the process does. Imports no torch
until `checkpoint` is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import sys
from collections.abc import Iterator
from multiprocessing.process import current_process
from pathlib import Path

from rankzero import ranks
from rankzero.catalog import deleted
from rankzero.config import ConfigError
from rankzero.errors import UserError
from rankzero.experiment import Goal
from rankzero.integrations.own_loop.null_run import NullTrackedRun
from rankzero.integrations.own_loop.params import params_of
from rankzero.integrations.own_loop.process_end import Stopped
from rankzero.integrations.own_loop.tracked_run import OPEN, TrackedRun, left_open
from rankzero.mlflow_store import drivers, uris
from rankzero.redaction.text import settings_without_secrets, url_without_secrets
from rankzero.reporting.run_facts import goal_of
from rankzero.run_store import checkpoint_files, names, provenance
from rankzero.run_store.attempt import take_over
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.journal import newest_start
from rankzero.run_store.location import is_offline, root_of
from rankzero.run_store.spoken_names import new_name
from rankzero.tracking.run_log import RunLog


def track(
    experiment: str,
    config: object = None,
    *,
    name: str | None = None,
    goal: Goal | None = None,
    keep: int | None = None,
    tracking_uri: str | None = None,
    folder: str | Path | None = None,
    offline: bool | None = None,
) -> TrackedRun:
    """Begin a run. Call it on every rank; only rank 0 writes.

    A ``with`` block ends it, or `TrackedRun.finish`, or the end of the process.

    `config`: the run's params: a mapping, dataclass, `argparse.Namespace`, or any such object.
    `name`: the run's name; an existing run is continued.
    `goal`: the metric that decides which checkpoint is best (default: the lowest val/loss).
    `keep`: the best checkpoints that are kept, in addition to the last (default: 1). A continued
    run has the goal and `keep` that it had.
    `folder`: that of the embedded store and of the runs (default: $RANKZERO_DIR or ./mlruns).
    `offline`: only record; ``rankzero sync NAME`` delivers later (default: $RANKZERO_OFFLINE).

    An initialised process group determines the rank, otherwise RANK and WORLD_SIZE do, or what the
    launcher sets. So under ``torch.multiprocessing.spawn``, initialise the group first.

    Raises ConfigError, TrackingError if the store cannot be used, and UserError if another process
    writes that run. The methods of the run never raise, except `TrackedRun.latest`.
    """
    mine = _detected_ranks()
    if not mine.first or _only_imports():
        return NullTrackedRun()
    # A wrong config must fail before anything is on the disk.
    _check(keep, experiment=experiment, name="" if name is None else name)
    root, offline = root_of(folder).absolute(), is_offline(offline)
    if name is not None and (goal is None or keep is None):
        had = _known(root / "runs", name)
        goal, keep = goal or had[0], had[1] if keep is None else keep
    params, notes = _params(config, goal)
    uri = _store(tracking_uri, root, experiment, offline=offline)
    identity = _identity(experiment, name, uri, root / "runs")
    run = TrackedRun(
        functools.partial(_open_log, root / "runs", mine, offline=offline),
        *(identity, goal or Goal(), 1 if keep is None else keep, params),
        offline=offline,
        named=name is not None,
    )
    for about, text in (*notes, *_notes(run, identity, root / "runs" / identity.name)):
        run.tell(about, text)
    return run


def _only_imports() -> bool:
    """Return whether this process imports the script for multiprocessing."""
    # Python's own guard reads it, too. It is True during this import alone.
    return getattr(current_process(), "_inheriting", False)


def _notes(run: TrackedRun, asked: Identity, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the notes on a run's place, and on another run that is open, for its `tell`."""
    known = RunFolder(folder).identity
    places = {"experiment": (known.experiment, asked.experiment)}
    places["store"] = _store_of(known), _store_of(asked)
    for kind, (has, other) in places.items():
        if has != other:
            text = f"{run.name} is a run of the {kind} {has!r}: it continues there"
            yield kind, f"{text}, and {other!r} gets nothing of it; another name begins a run there"
    if len(others := left_open(run)) == 1:  # A sweep needs no note for each run.
        text = f"{others[0]} is still open, and ends as this process does unless you end it"
        yield "open", f"{text}: with a `with` block or finish()"


def _store_of(identity: Identity) -> str:
    """Return the store's address. A database has one, whatever links lead to it."""
    database = uris.sqlite_path(identity.tracking_uri)
    return str(database.resolve()) if database else url_without_secrets(identity.tracking_uri)


def _check(keep: object, **texts: object) -> None:
    if keep is not None and (type(keep) is not int or keep < 0):
        raise ConfigError(f"keep: must be an int from 0 on, got {keep!r}; a high one keeps all")
    for key, value in texts.items():
        if not isinstance(value, str):
            raise ConfigError(f"{key}: must be a text such as 'digits', got {value!r}")


def _known(runs: Path, name: str) -> tuple[Goal | None, int | None]:
    """Return the goal and the number of kept checkpoints of a run, as far as its journal says."""
    if not names.is_plain(name):
        names.checked_run(name)  # It says why not.
    folder = RunFolder(runs / name)
    start = newest_start(folder.events)
    # Under the defaults, a continued run would delete its best checkpoints.
    if start is None:
        return None, None
    if (keep := start.environment.get(provenance.KEEP, "")).isdecimal():
        # The params may have a goal of the user's own config.
        goal = start.environment.get(provenance.GOAL)
        return None if goal is None else Goal(*json.loads(goal)), int(keep)
    # RankZero wrote a goal to the params alone. A user's own config seldom has all its fields.
    former = goal_of(start.params) if "goal.target" in start.params else None
    return former, max(1, len(checkpoint_files.known(folder.path / "checkpoints")) - 1)


def _params(config: object, goal: Goal | None) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the params of a run, and the notes on them for `TrackedRun.tell`."""
    if not isinstance(goal, Goal | None):
        raise ConfigError(f"goal: must be a Goal such as Goal('val/loss', 'min'), got {goal!r}")
    notes = list[tuple[str, str]]()
    goals = {} if goal is None else {f"goal.{k}": value for k, value in params_of(goal).items()}
    params = {**params_of(config, lambda *note: notes.append(note)), **goals}
    return settings_without_secrets(params), notes


def _store(tracking_uri: str | None, root: Path, experiment: str, *, offline: bool) -> str:
    """Return the URI of the store, which can be used unless the run is offline."""
    uri = uris.resolve_tracking_uri(tracking_uri, os.environ, root)
    if not offline:
        uris.prepare_store(uri)
        drivers.require_place(uri, uris.artifact_root(uri), experiment)
    return uri


def _identity(experiment: str, name: str | None, uri: str, runs: Path) -> Identity:
    """Return the identity of a run. Without a `name`, creates the folder of a new one."""
    if name is not None and deleted.is_hidden(RunFolder(runs / name)):
        raise UserError(
            f"the run {name!r} is deleted: `rankzero delete --restore {name}`, or choose another"
        )
    identity = Identity(
        name or "",
        secrets.token_hex(16),
        experiment,
        uri,
        uris.artifact_root(uri),
        project_dir=str(Path.cwd()),
    )
    while name is None:
        identity = dataclasses.replace(identity, name=new_name(runs))
        # Another run may have drawn the same name at the same moment.
        with contextlib.suppress(FileExistsError):
            RunFolder.create(runs, identity)
            break
    return identity


def _open_log(runs: Path, mine: ranks.Ranks, identity: Identity, *, offline: bool) -> RunLog:
    folder = RunFolder.open_or_create(runs, identity)
    # As in a notebook, where a cell is run again. Two objects would write one journal.
    if (left := OPEN.get(folder.path)) is not None:
        # A copy of an adapter takes the run over.
        left.finish(None if left.is_owned else Stopped("a later attempt"))
    take_over(folder)
    return RunLog.open(runs, identity, mine, gpu_uuids=None, offline=offline)


def _detected_ranks() -> ranks.Ranks:
    launched = ranks.detect()
    # A program that has not imported torch has no process group. Importing it here costs seconds.
    if "torch.distributed" not in sys.modules:
        return launched
    from rankzero.training.distributed.world import process_group_ranks

    group = process_group_ranks()
    if group is None or (group.rank, group.world_size) == (launched.rank, launched.world_size):
        return launched  # The launcher's variables also know the node.
    # A process that spawns its ranks itself is one task to its launcher, so the group knows better.
    return group

"""``rankzero sync [RUN]``: deliver to MLflow what is not there yet."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Collection

from rankzero import config
from rankzero.catalog import command_lines, lookup
from rankzero.catalog.summary import Summary
from rankzero.errors import FAILED, FINISHED, UserError
from rankzero.mlflow_store import named_runs
from rankzero.mlflow_store.patience import GRACE_SECONDS
from rankzero.run_store import delivery_state, run_locks
from rankzero.run_store.attempt import is_written
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import delivery_status, sync


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = "a run's name or MLflow id (default: all incomplete runs)"
    parser.add_argument("run", metavar="RUN", nargs="?", help=which)


def run(arguments: argparse.Namespace) -> int:
    runs, broken = arguments.dir / "runs", list[str]()
    if arguments.run:
        incomplete = [named_runs.require(runs, arguments.run)]
    else:
        late = [run for run in lookup.listed(runs, broken.append) if _lacks(run)]
        # A child waits for its parent's run in MLflow, and goes with it.
        known = {run.folder.path.name for run in late}
        incomplete = [run.folder for run in late if run.parent not in known]
    for text in broken:
        print(f"skipped: {text}")
    if not incomplete:
        print(f"nothing {'else ' if broken else ''}to deliver: everything is in MLflow")
    away = set[str]()
    is_named = bool(arguments.run)
    codes = [deliver(one, away, is_named=is_named, seconds=GRACE_SECONDS) for one in incomplete]
    return max([FAILED if broken else FINISHED, *codes])


def _lacks(run: Summary) -> bool:
    """Return whether MLflow lacks events, the end, the best model or a page update of a run."""
    late = run.undelivered or run.status == "DIED"
    state = delivery_state.load(delivery_state.path_of(run.folder, 0))
    return late or state.queue.page_update_waits


def deliver(folder: RunFolder, away: set[str], *, is_named: bool, seconds: float) -> int:
    """Deliver a run and print how it stands; return the exit code.

    It gives up `seconds` after the last progress. A server that is `away` gets one try.
    """
    name, uri = folder.path.name, folder.identity.tracking_uri
    # To wait for it could take days, and hold up the other runs.
    if run_locks.is_recording(folder) and is_written(folder):
        print(f"{name}: still trains, and {_why_gone(folder) or 'another process delivers it'}")
        return FINISHED
    try:
        parts = {one: delivery_status.status(one).pending for one in (folder, *folder.children)}
        result = sync.deliver(folder, patience=sync.ONE_TRY_SECONDS if uri in away else seconds)
    except (UserError, OSError) as error:
        print(f"{name}: {error}")
        return FAILED
    # `pending` counts what MLflow refused to take for now, not what it rejected for good.
    again = command_lines.line(folder.root, "sync", name)
    late_nodes = delivery_state.late_nodes(folder)
    gone = {one: why for one in parts if (why := _why_gone(one))}
    if gone and not any(_waits(one) for one in parts if one not in gone):
        print(f"{name}: {next(iter(gone.values()))}")
        # A scheduled sync of all runs must not fail until somebody frees the disk.
        return max(FAILED if is_named else FINISHED, _log_models(folder, gone))
    if result.pending or late_nodes:
        why = result.error or "no answer" + "".join(f", samples of node {n}" for n in late_nodes)
        done = f"{result.delivered:,} values delivered, the rest failed"
        print(f"{name}: {done}: {why}; try again later: {again}")
        away |= {uri for one, before in parts.items() if sync.is_away(one, before)}
        return FAILED
    # If only a helper's part is here, the end is on another machine's disk.
    is_open = lookup.last_end(folder) is None and not folder.is_elsewhere
    if is_open and not run_locks.writer_lives(folder):
        why = "its recorder is alive and must write the run's end first"
        print(f"{name}: {why}; try again later: {again}")
        return FAILED
    lacks, stands = "", "still trains" if is_open else "complete"
    if result.page_update_waits:
        lacks = f" except for the latest problems on its page: {again}"
    print(f"{name}: {stands}, {result.delivered:,} values in MLflow{lacks}")
    for line in result.trouble:
        print(f"  {line}")
    return _log_models(folder)


def _log_models(folder: RunFolder, gone: Collection[RunFolder] = ()) -> int:
    """Log the best models that MLflow lacks, and return the exit code."""
    # A parent has no model of its own, and the trials of a search keep none.
    late = [child for child in folder.children if child.late_model.exists()]
    models = [one for one in (late if folder.children else [folder]) if one not in gone]
    for one in models:
        if _lacks_model(one):
            # Imports PyTorch.
            from rankzero.training.checkpoints import best_model

            # In a process of its own, because it runs the user's code.
            best_model.log_best(one, lambda text: print(f"{folder.path.name}: {text}"))
        else:
            with contextlib.suppress(OSError):
                one.late_model.unlink(missing_ok=True)
    return FAILED if any(one.late_model.exists() for one in models) else FINISHED


def _why_gone(folder: RunFolder) -> str | None:
    """Return the error of a run that was deleted in MLflow, which lacks something of it."""
    paths = (delivery_state.path_of(folder, node) for node in delivery_state.nodes(folder))
    tried = (delivery_state.load(path).retries for path in paths)
    return next((one.error for one in tried if one.gone), None)


def _waits(folder: RunFolder) -> bool:
    return bool(delivery_status.status(folder).pending or delivery_state.late_nodes(folder))


def _lacks_model(folder: RunFolder) -> bool:
    """Return whether the best model is still to be logged, also where a full disk took no note."""
    # A program's own run, such as one of `rankzero.track`.
    if folder.identity.experiment_file is None:
        return False
    # Without a mark, only an attempt that finished has a model to log.
    ended, is_late = lookup.last_end(folder), folder.late_model.exists()
    if not is_late and (ended is None or ended.status != "FINISHED"):
        return False
    try:
        settings = config.read_file(folder.config)
    except config.ConfigError:
        return is_late
    saves = is_late or settings.get("train.checkpoints.save_every") != 0
    if settings.get("train.mlflow.log_model") is False or not saves:
        return False
    # An attempt that ended later may have a better model. Older versions did not note the end.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        logged = json.loads(folder.logged_model.read_text(encoding="utf-8"))
        return is_late or ended is None or logged["ended"] != ended.time
    return True

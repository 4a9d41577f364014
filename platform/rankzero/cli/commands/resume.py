"""``rankzero resume RUN [key=value…]``: continue from the newest intact checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import time
from pathlib import Path

from rankzero import config, experiment_file
from rankzero.catalog import lookup
from rankzero.cli import launch_run, options
from rankzero.errors import UserError
from rankzero.events import CheckpointSaved
from rankzero.experiment import Experiment, Train
from rankzero.launch import agent
from rankzero.launch.machines import Machines
from rankzero.launch.request import (
    restart_line,
    takes_more,
    with_changes,
    with_saved,
    write_config,
)
from rankzero.lightning_module import ignored_hooks
from rankzero.mlflow_store import uris
from rankzero.redaction.text import line_without_secrets, url_without_secrets
from rankzero.reporting import run_facts
from rankzero.reporting.reproduce import longer
from rankzero.reporting.run_facts import Facts
from rankzero.run_store import checkpoint_files, run_locks
from rankzero.run_store.attempt import is_written, sole_launcher
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from rankzero.run_store.location import may_be_foreign
from rankzero.tracking import open_run, sync

RECORDER_SECONDS = 10.0  # for a live recorder to write how the previous attempt ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run(parser, elsewhere=True)
    changes = "settings to change, such as train.epochs=20 or train.steps=2000"
    parser.add_argument("settings", metavar="key=value", nargs="*", default=[], help=changes)
    moved = "the experiment's file, if it has moved"
    parser.add_argument("--experiment", metavar="EXP", help=moved)
    options.add_processes(parser, default="as many as before")
    options.add_machines(parser)
    options.add_delivery(parser)


class NothingLeft(UserError):
    """The run has finished."""


def run(arguments: argparse.Namespace) -> int:
    folder, machines = _folder(arguments), options.machines_of(arguments)
    agent.warm_up(alone=machines.alone)
    return continue_run(folder, arguments, machines)


def begun(arguments: argparse.Namespace, machines: Machines) -> RunFolder | None:
    """Return the folder of the run called ``--name``, here or on a server, or None without one.

    Raises UserError without a name, and if the server cannot be asked.
    """
    options.refuse_unnamed_resume(arguments)
    found = lookup.find(arguments.dir / "runs", arguments.run_name) or _of_server(arguments)
    # Another machine creates the folder when both start.
    is_new = found and not (found.events.exists() or lookup.mlflow_id(found))
    if found is None or (is_new and not machines.alone):
        return None
    _await_other_machine(found, machines)
    return found


def continue_run(
    folder: RunFolder,
    arguments: argparse.Namespace,
    machines: Machines,
    given: Experiment | None = None,
) -> int:
    """Launch the next attempt of a run; return the exit code. Raises NothingLeft.

    `given`: the experiment, if the command may also start the run. A run without a checkpoint then
    begins again, with it.
    """
    name, offline = folder.path.name, arguments.offline
    lives, checkpoint = takes_more(folder, machines), None
    with sole_launcher(folder, machines.most):
        if is_written(folder) and not lives:
            raise UserError(f"{name} is still training: stop it first, or wait until it has ended")
        has_it = folder.events.exists() or lookup.mlflow_id(folder)
        joins = lives or not (machines.alone or has_it)
        if joins:
            experiment = _of_helper(folder, arguments, machines)
        else:
            # Without a checkpoint, the recorded settings may be what failed.
            again = given if _may_begin_again(folder) else None
            experiment = again or _experiment(folder, arguments)
            checkpoint = _newest_checkpoint(folder, offline, required=given is None)
            if checkpoint is not None:
                before = checkpoint_files.read_manifest(checkpoint).world_size
                _set_processes(before, arguments, machines)
                if again:
                    experiment = _experiment(folder, arguments)
        topology = launch_run.topology_of(arguments, experiment, machines)
        # Only now: a command that is refused leaves the run as it was.
        _keep(folder, experiment, arguments.experiment)
        if not joins:
            if not offline:
                open_run.require_home(folder)
                uris.prepare_store(folder.identity.tracking_uri)
            # Now, so that `rankzero runs` does not close the run while its ranks start.
            if folder.events.exists():
                sync.close_if_dead(folder, RECORDER_SECONDS)
        plan = launch_run.LaunchPlan(
            folder,
            experiment,
            topology,
            tags=options.tags_of(arguments) if given else {},
            resumes=given is None or checkpoint is not None,
            offline=offline,
        )
        return launch_run.run(plan)


def _folder(arguments: argparse.Namespace) -> RunFolder:
    """Return the run's folder, downloaded from MLflow if it is not on this disk."""
    runs = arguments.dir / "runs"
    found = lookup.find(runs, arguments.run_name)
    if found is None:
        if arguments.offline:
            raise UserError(
                f"{arguments.run_name} is not in {runs}, and offline nothing is downloaded from "
                "MLflow: resume without --offline"
            )
        from rankzero.housekeeping import download

        uri = options.store_of_absent_run(arguments)
        print(f"{arguments.run_name} is not on this disk: looking in {url_without_secrets(uri)}")
        found = download.run_folder(runs, uri, arguments.run_name)
    return found


def _keep(folder: RunFolder, experiment: Experiment, reference: str | None) -> None:
    """Let the run's folder name the file that the experiment is in now, and have settings."""
    identity = folder.identity
    if reference and (file := options.absolute(reference)) != identity.experiment_file:
        folder.write_identity(dataclasses.replace(identity, experiment_file=file))
    # Rank 0 replaces them: a launch that is stopped before that leaves the run's as they were.
    if not folder.config.exists():
        write_config(folder, experiment)


def _of_server(arguments: argparse.Namespace) -> RunFolder | None:
    """Return the folder of a run that a server has and this disk has not, or None."""
    uri = uris.resolve_tracking_uri(arguments.tracking_uri, os.environ, arguments.dir)
    if arguments.offline or uri == uris.default_tracking_uri(arguments.dir):
        return None
    from rankzero.housekeeping import download
    from rankzero.mlflow_store.client import MlflowRuns

    try:
        run = MlflowRuns(uri).find_run(arguments.run_name, options.experiment_name(arguments))
    except uris.NoSuchRun:
        return None
    place = url_without_secrets(uri)
    print(f"{arguments.run_name} is not on this disk, and continues from {place}")
    return download.run_folder(arguments.dir / "runs", uri, run.run_id)


def _await_other_machine(folder: RunFolder, machines: Machines) -> None:
    """Wait while another machine may write the run, for as long as one counts as alive.

    A run that takes more machines is not waited for.
    """
    last, until = run_locks.latest(folder, 0), time.monotonic() + run_locks.ABANDONED_SECONDS
    if last is None or run_locks.is_local(last) or not is_written(folder):
        return
    if takes_more(folder, machines):
        return
    print(f"waiting for the last attempt, on {last.host}: it has not written its end", flush=True)
    while is_written(folder) and time.monotonic() < until and not takes_more(folder, machines):
        time.sleep(1.0)


def class_of(folder: RunFolder, store_folder: Path, moved: str | None = None) -> type[Experiment]:
    """Return the class of a run's experiment, from the file `moved` if given. Raises UserError."""
    reference = options.absolute(moved) if moved else folder.identity.experiment_file
    if reference is None:
        raise UserError(
            f"{folder.path.name} does not record an experiment file in this folder: pass "
            "--experiment FILE; a run of rankzero.track is continued by your own program, with "
            f"name={folder.path.name!r} and run.latest(), or its framework's own checkpoint"
        )
    # A downloaded run may come from anyone: code next to it must not run on this machine.
    if may_be_foreign(reference, store_folder):
        raise UserError(
            f"{reference} is among the runs, and code from there is not executed: pass "
            "--experiment FILE"
        )
    try:
        return experiment_file.load(reference)
    except UserError as error:
        if moved:
            raise
        raise UserError(f"{error}; if the file has moved, pass --experiment FILE") from error


def _of_helper(folder: RunFolder, arguments: argparse.Namespace, machines: Machines) -> Experiment:
    """Return the settings for a machine that helps another, whose settings all ranks use."""
    changes = config.parse_assignments(arguments.settings)
    experiment = class_of(folder, arguments.dir, arguments.experiment)()
    # Earlier versions kept neither there.
    if folder.config.exists():
        experiment = with_saved(experiment, folder, changes)
    with contextlib.suppress(OSError, ValueError):
        _set_processes(int(folder.processes.read_text(encoding="utf-8")), arguments, machines)
    return with_changes(experiment, changes)


def _may_begin_again(folder: RunFolder) -> bool:
    if not folder.config.exists():
        # One that was killed as it started has not written its settings. A study has none.
        return not folder.events.exists()
    ended = lookup.last_end(folder)
    return ended is None or ended.status != "FINISHED"


def _experiment(folder: RunFolder, arguments: argparse.Namespace) -> Experiment:
    cls = class_of(folder, arguments.dir, arguments.experiment)
    if ignored := ignored_hooks(cls):
        print(f"note: {ignored}. Do so for new runs only: this one continues as it began")
    changes = config.parse_assignments(arguments.settings)
    saved = with_saved(cls(), folder, changes)
    changed = with_changes(saved, changes)
    ended = lookup.last_end(folder)
    if ended is not None and ended.status == "FINISHED":
        facts = run_facts.fold(read_all(folder.events))
        # The time limit of an attempt leaves steps that the next one trains.
        further = config.flatten(changed) != config.flatten(saved) or run_facts.is_limited(facts)
        is_over = not further or _total_steps(saved.train, changed.train, facts) <= facts.steps
        # A damaged last checkpoint leaves the steps since the one before it.
        _, damaged = checkpoint_files.newest_intact(folder.checkpoints)
        if is_over and not damaged:
            raise NothingLeft(
                f"{folder.path.name} has finished with step {facts.steps:,} ({ended.reason}), "
                "so nothing is left to train: pass a later end, such as "
                f"{longer(config.rendered(saved))}"
            )
    # A checkpoint holds the position in the data's order, which these settings determine.
    for key in ("train.batch_size", "train.drop_last", "train.seed"):
        if config.flatten(changed)[key] != config.flatten(saved)[key]:
            raise UserError(f"{key} decides the order of the data: to change it, start a new run")
    return changed


def _total_steps(saved: Train, changed: Train, facts: Facts) -> float:
    """Return the steps of the run with the changed settings, or infinity if they are not known."""
    if changed.steps is not None:
        return changed.steps
    if saved.steps is None and saved.epochs and facts.total_steps:
        return facts.total_steps / saved.epochs * (changed.epochs or 0)
    return math.inf


def _set_processes(before: int | None, arguments: argparse.Namespace, machines: Machines) -> None:
    """Set --nproc to the previous attempt's number of processes, unless the user or the GPUs do.

    Nor for MIN:MAX machines: nobody knows how many of them trained.
    """
    import torch

    # The same number of processes sums gradients in the same order, so results stay identical.
    count = machines.most
    if arguments.nproc is not None or before is None or machines.least < count or before % count:
        return
    processes, gpus = before // count, torch.cuda.device_count()
    if 0 < gpus < processes:
        print(
            f"note: {before} processes trained before, and this machine has {gpus} GPUs: results "
            "will not be bit for bit the same"
        )
        return
    arguments.nproc = processes


def _newest_checkpoint(folder: RunFolder, offline: bool, *, required: bool) -> Path | None:
    """Return the newest intact checkpoint, here or in MLflow. Raises UserError if `required`."""
    path, problems = checkpoint_files.newest_intact(folder.checkpoints)
    for problem in problems:
        print(f"note: {problem}")
    if path is None and lookup.mlflow_id(folder) and not offline:
        from rankzero.housekeeping import download

        print("no intact checkpoint on this disk: looking in MLflow")
        path, more = download.newest_checkpoint(folder)
        for problem in more:
            print(f"note: {problem}")
        problems = [*more, *problems]
    elif path is not None and not offline:
        path = _newer_elsewhere(folder, path)
    if path is None and not required:
        print(f"note: {folder.path.name} has no checkpoint: it begins again")
    elif path is None:
        name, found = folder.path.name, "".join(f"\n  {problem}" for problem in problems)
        raise UserError(
            f"{name} has no checkpoint to continue from, here or in MLflow:"
            f"{found or f' {restart_line(folder)} begins it again'}"
        )
    return path


def _newer_elsewhere(folder: RunFolder, path: Path) -> Path:
    """Return a newer checkpoint, of another machine or damaged here, from MLflow, else `path`."""
    uri = folder.identity.tracking_uri
    if uris.sqlite_path(uri) is not None or lookup.mlflow_id(folder) is None:
        return path
    from rankzero.housekeeping import download

    newest = _left_behind(folder, path)
    try:
        newer, problems = download.newest_checkpoint(folder, after=newest)
    # A server that is away must not hold up a run whose checkpoint is here.
    except Exception as error:
        why = line_without_secrets(f"{type(error).__name__}: {error}")
        problems, newer = [f"MLflow cannot be asked for a newer checkpoint: {why}"], None
    for problem in problems:
        print(f"note: {problem}")
    if newer is not None:
        print(f"{newer.name} comes from MLflow: the newest intact one on this disk is {path.name}")
    return newer or path


def _left_behind(folder: RunFolder, path: Path) -> int:
    """Return the newest step that the run does not take from MLflow. At least that of `path`."""
    here = checkpoint_files.read_manifest(path).step
    saved = [one for one in read_all(folder.events) if isinstance(one, CheckpointSaved)]
    # The run has left those that it saved before `path`, to continue from an older one. A person
    # deleted one that was saved here and is gone, for the same.
    later = [*itertools.takewhile(lambda one: one.step != here, reversed(saved))]
    gone = [one for one in later if not (folder.path / one.path).exists()]
    left = [*saved[: len(saved) - len(later)], *gone]
    return max([here, *(one.step for one in left)])

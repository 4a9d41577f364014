"""``rankzero resume RUN [key=value…]``: go on from the newest intact checkpoint, in the same MLflow run."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from rankzero import config, experiment_file
from rankzero.catalog import lookup
from rankzero.cli import launch_run
from rankzero.cli.commands.train import add_launch_arguments, add_offline_argument
from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.launch import agent
from rankzero.launch.request import with_secrets, write_config
from rankzero.mlflow_store import uris
from rankzero.run_store import checkpoint_files
from rankzero.run_store.attempt import is_written, sole_launcher
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import sync

CLOSE_SECONDS = 10.0  # for a recorder that lives to say how the attempt before ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_name", metavar="RUN", help="the run's name or its MLflow run id")
    parser.add_argument(
        "settings",
        metavar="key=value",
        nargs="*",
        help="settings to change, such as train.epochs=20",
    )
    parser.add_argument(
        "--experiment", metavar="EXP", help="the experiment's file, where it has moved"
    )
    parser.add_argument(
        "--tracking-uri", help="where the run is tracked, if it is not on this disk"
    )
    add_launch_arguments(parser, processes="as many as before")
    add_offline_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    agent.warm_up()
    folder = _folder(arguments)
    with sole_launcher(folder, arguments.nnodes):
        return _resumed(folder, arguments)


def _resumed(folder: RunFolder, arguments: argparse.Namespace) -> int:
    if is_written(folder):
        raise UserError(f"{folder.path.name} is training still: stop it first, or wait for its end")
    joins = arguments.nnodes > 1 and not folder.events.exists() and not lookup.mlflow_id(folder)
    experiment = _told(folder, arguments) if joins else _experiment(folder, arguments)
    if not joins:
        _as_many_processes(_require_checkpoint(folder, arguments.offline), arguments)
    topology = launch_run.topology_of(arguments, experiment.train)
    if not joins:
        if not arguments.offline:
            uris.prepare_store(folder.identity.tracking_uri)
        if folder.events.exists():  # now: not by who looks at the run while its ranks start
            sync.close_if_dead(folder, CLOSE_SECONDS)
        write_config(folder, experiment)
    return launch_run.run(
        launch_run.LaunchPlan(
            folder,
            experiment,
            topology,
            arguments.dir,
            sys.argv,
            resumes=True,
            offline=arguments.offline,
        )
    )


def _folder(arguments: argparse.Namespace) -> RunFolder:
    """Return the run's folder, made from what MLflow has of the run where it is not on this disk."""
    runs = arguments.dir / "runs"
    found = lookup.find(runs, arguments.run_name)
    if found is None:
        if arguments.offline:
            raise UserError(
                f"{arguments.run_name} is not in {runs}, and offline nothing is fetched from MLflow: "
                "resume without --offline"
            )
        uri = uris.resolve_tracking_uri(arguments.tracking_uri, os.environ, arguments.dir)
        if (
            uri == uris.default_tracking_uri(arguments.dir)
            and not (arguments.dir / uris.DATABASE).exists()
        ):
            return lookup.require(
                runs, arguments.run_name
            )  # nowhere else to look: says which runs there are
        found = _fetched(runs, uri, arguments.run_name)
    if arguments.experiment:
        path, cls = experiment_file.split(arguments.experiment)
        moved = dataclasses.replace(
            found.identity, experiment_file=f"{path}:{cls}" if cls else str(path)
        )
        found.write_identity(moved)
    return found


def _fetched(runs: Path, uri: str, name: str) -> RunFolder:
    from rankzero.tracking import download

    print(f"{name} is not on this disk: looking in {uri}")
    return download.run_folder(runs, uri, name)


def _class(folder: RunFolder, store_folder: Path) -> type[Experiment]:
    reference = folder.identity.experiment_file
    if reference is None:
        raise UserError(
            f"{folder.path.name} names no experiment's file in this folder: say which it is, --experiment EXP; "
            "a run of your own program goes on in that"
        )
    if Path(reference).resolve().is_relative_to(store_folder.resolve()):
        raise UserError(
            f"{reference} lies among the runs: what came with a run is not executed; say --experiment EXP"
        )
    try:
        return experiment_file.load(reference)
    except UserError as error:
        raise UserError(f"{error}; if the file has moved, say where: --experiment EXP") from error


def _told(folder: RunFolder, arguments: argparse.Namespace) -> Experiment:
    """Return what this machine was told, which helps another with its run: that one's settings count."""
    return config.override(
        _class(folder, arguments.dir)(), config.parse_assignments(arguments.settings)
    )


def _experiment(folder: RunFolder, arguments: argparse.Namespace) -> Experiment:
    cls = _class(folder, arguments.dir)
    changes = config.parse_assignments(arguments.settings)
    saved = config.override(cls(), with_secrets(config.read_file(folder.config), changes))
    ended = lookup.last_end(folder)
    if ended is not None and ended.status == "FINISHED" and not arguments.settings:
        raise UserError(
            f"{folder.path.name} has finished: to train it further, say how far, such as train.epochs="
            f"{2 * (saved.train.epochs or 1)}"
        )
    changed = config.override(saved, changes)
    for key in ("train.batch_size", "train.seed"):
        if config.flatten(changed)[key] != config.flatten(saved)[key]:
            raise UserError(
                f"{key} decides the order of the data and cannot change within a run: start a new run"
            )
    return changed


def _as_many_processes(checkpoint_path: Path, arguments: argparse.Namespace) -> None:
    """Let the run go on with as many processes as before, unless the user said how many or there are fewer GPUs."""
    from rankzero.training.distributed.device import gpu_count

    before = checkpoint_files.read_manifest(checkpoint_path).world_size
    if arguments.nproc is not None or before is None or before % arguments.nnodes:
        return
    processes, gpus = before // arguments.nnodes, gpu_count()
    if 0 < gpus < processes:
        print(
            f"note: {before} processes trained before, and this machine shows {gpus} GPUs: not bit for bit the same"
        )
        return
    arguments.nproc = processes


def _require_checkpoint(folder: RunFolder, offline: bool) -> Path:
    """Return the newest intact checkpoint, fetched from MLflow where there is none here. Raises UserError."""
    path, problems = checkpoint_files.newest_intact(folder.checkpoints)
    for problem in problems:
        print(f"note: {problem}")
    if path is None and lookup.mlflow_id(folder) and not offline:
        from rankzero.tracking import download

        print("no intact checkpoint on this disk: looking in MLflow")
        path, more = download.newest_checkpoint(folder)
        for problem in more:
            print(f"note: {problem}")
        problems = [*more, *problems]
    if path is None:
        found = "".join(f"\n  {problem}" for problem in problems) or " start it anew"
        raise UserError(
            f"{folder.path.name} has no checkpoint to go on from, here or in MLflow:{found}"
        )
    return path

"""``rankzero train EXP [--nproc N] [key=value…]``: run an experiment, tracked."""

from __future__ import annotations

import argparse
from pathlib import Path

from rankzero import config, experiment_file
from rankzero.cli import launch_run, options
from rankzero.cli.commands import resume, sync
from rankzero.cli.display import delivery_notes
from rankzero.cli.submit import clusters
from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.launch import agent
from rankzero.launch.machines import ALONE, Machines
from rankzero.launch.request import (
    make_folder,
    refuse_new,
    with_changes,
    with_secrets,
    write_config,
)
from rankzero.mlflow_store import named_runs
from rankzero.mlflow_store.patience import patience
from rankzero.run_store.attempt import sole_launcher


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_training(parser)
    clusters.add_clusters(parser)


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add all options but where the training runs."""
    options.add_experiment(parser, "settings to change; see `rankzero config`")
    options.add_start_and_name(parser)
    options.add_processes(parser)
    options.add_machines(parser)
    options.add_new_run(parser)
    there = "continue the run of this --name from its newest checkpoint, if it has begun"
    parser.add_argument("--resume-if-there", action="store_true", help=there)
    # For rankzero.train, which draws the progress itself in a notebook.
    parser.add_argument("--no-progress", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    clusters.become(arguments, clusters.one_task_per_machine(arguments.after))
    machines = options.machines_of(arguments)
    experiment = experiment_of(arguments, machines)
    known = resume.begun(arguments, machines) if arguments.resume_if_there else None
    if known is not None:
        try:
            return resume.continue_run(known, arguments, machines, experiment)
        except resume.NothingLeft as error:
            print(f"note: {error}")
            if delivery_notes.exit_code(known) and not arguments.offline:
                sync.deliver(known, set(), is_named=True, seconds=patience().seconds)
            return delivery_notes.exit_code(known)
    refuse_new(type(experiment), config.parse_assignments(arguments.settings))
    topology = launch_run.topology_of(arguments, experiment, machines)
    identity = options.identity_for(arguments, options.run_name(arguments))
    folder = make_folder(arguments.dir / "runs", identity, machines=machines)
    joined = folder.identity.uuid != identity.uuid
    with sole_launcher(folder, machines.most):
        # The machine that created the folder writes the settings that all ranks use.
        if not (joined and folder.config.exists()):
            write_config(folder, experiment)
        plan = launch_run.LaunchPlan(
            folder,
            experiment,
            topology,
            tags=options.tags_of(arguments),
            offline=arguments.offline,
            shows_progress=not arguments.no_progress,
        )
        return launch_run.run(plan)


def experiment_of(arguments: argparse.Namespace, machines: Machines = ALONE) -> Experiment:
    """Return the experiment with the settings of ``--from`` and of the command line.

    It starts the server that workers are forked from.
    """
    path, _ = experiment_file.split(arguments.experiment)
    settings = config.parse_assignments(arguments.settings)
    # Before the user's code, which may start threads. Code with a mistake is refused at once.
    if (libraries := launch_run.libraries_of(path)) is not None:
        agent.warm_up(libraries, alone=machines.alone)
    experiment = experiment_file.load(arguments.experiment)()
    if arguments.start is None:
        return with_changes(experiment, settings)
    places = [Path(arguments.start)]
    if not places[0].is_file() and (
        folder := named_runs.find(arguments.dir / "runs", arguments.start)
    ):
        places = [folder.artifacts / "sweet_spot.yaml", folder.config]
    for saved in places:
        if saved.is_file():
            start = config.override(experiment, with_secrets(config.read_file(saved), settings))
            return with_changes(start, settings)
    if len(places) > 1:
        raise UserError(
            f"--from {arguments.start}: neither sweet_spot.yaml nor config.yaml is in "
            f"{places[1].parent}. A study has a sweet spot once a configuration reached its target"
        )
    raise UserError(
        f"--from {arguments.start} is not a file, nor in {arguments.dir} a run, or a study with a "
        "sweet spot"
    )

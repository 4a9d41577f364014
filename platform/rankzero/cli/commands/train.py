"""``rankzero train EXP [--nproc N] [key=value…]``: run an experiment, tracked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from rankzero import config, experiment_file
from rankzero.cli import launch_run, options
from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.launch import agent
from rankzero.launch.request import make_folder, with_changes, with_secrets, write_config
from rankzero.mlflow_store import uris
from rankzero.run_store import names
from rankzero.run_store.attempt import sole_launcher
from rankzero.run_store.folder import RunFolder, new_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    options.add_experiment(parser, "settings to change; see `rankzero config`")
    options.add_start(parser)
    options.add_processes(parser)
    options.add_machines(parser)
    options.add_new_run(parser)
    options.add_run_name(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    path, _ = experiment_file.split(arguments.experiment)
    # First of all: the server imports PyTorch while this process reads the experiment.
    agent.warm_up(launch_run.libraries_of(path))
    settings = config.parse_assignments(arguments.settings)
    experiment = with_changes(start_of(arguments, settings), settings)
    topology = launch_run.topology_of(arguments, experiment.train)
    name = arguments.run_name
    name = new_name(path.stem) if name is None else names.checked_run(name)
    identity = options.identity_for(arguments, name)
    if not arguments.offline:
        uris.prepare_store(identity.tracking_uri)
    folder = make_folder(arguments.dir / "runs", identity, machines=topology.nodes)
    joined = folder.identity.uuid != identity.uuid
    with sole_launcher(folder, topology.nodes):
        # The machine that created the folder writes the settings that all ranks use.
        if not joined:
            write_config(folder, experiment)
        offline = arguments.offline
        plan = launch_run.LaunchPlan(
            folder, experiment, topology, arguments.dir, sys.argv, joined=joined, offline=offline
        )
        return launch_run.run(plan)


def start_of(arguments: argparse.Namespace, settings: Mapping[str, str]) -> Experiment:
    """Return the experiment with its default settings, or with those of ``--from``."""
    cls = experiment_file.load(arguments.experiment)
    if arguments.start is None:
        return cls()
    folder = RunFolder(arguments.dir / "runs" / arguments.start)
    for path in (Path(arguments.start), folder.artifacts / "sweet_spot.yaml", folder.config):
        if path.is_file():
            return config.override(cls(), with_secrets(config.read_file(path), settings))
    raise UserError(
        f"--from {arguments.start} is not a file, nor in {arguments.dir} a run, or a study with a "
        "sweet spot"
    )

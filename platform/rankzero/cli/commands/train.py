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
    parser.add_argument(
        "--from",
        dest="start",
        metavar="FILE",
        help="start from these settings: a file such as sweet_spot.yaml, a study or a run",
    )
    add_launch_arguments(parser)
    options.add_new_run(parser)
    parser.add_argument("--run-name", help="the run's name (default: the file's name and the time)")


def add_launch_arguments(
    parser: argparse.ArgumentParser,
    processes: str = "one per GPU; 1 without, or under single and dp",
) -> None:
    """Add the options for where processes run; `processes`: their default number, in words."""
    add = parser.add_argument_group("processes (torchrun's options)").add_argument
    nproc = f"processes on this machine (default: {processes})"
    add("--nproc", "--nproc-per-node", type=int, dest="nproc", help=nproc)
    add("--nnodes", type=int, default=1, help="machines; run the same command on each")
    add("--rdzv-endpoint", help="host:port of the first machine, the same on each")
    add("--rdzv-id", default="rankzero", help="the job's name, the same on each machine")
    restarts = "how often failed processes restart from the newest checkpoint (default: 0)"
    add("--max-restarts", type=int, default=0, help=restarts)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    path, _ = experiment_file.split(arguments.experiment)
    # First of all: the server imports PyTorch while this process reads the experiment.
    agent.warm_up(launch_run.libraries_of(path))
    settings = config.parse_assignments(arguments.settings)
    experiment = with_changes(_start(arguments, settings), settings)
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


def _start(arguments: argparse.Namespace, settings: Mapping[str, str]) -> Experiment:
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

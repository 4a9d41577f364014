"""``--slurm`` and ``--ray``. `train` and `repeat` run the same command on a cluster with them."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from rankzero.cli import options
from rankzero.errors import UserError
from rankzero.launch.machines import OF_TORCHRUN
from rankzero.tuning.places import ray_actor


def add_clusters(parser: argparse.ArgumentParser) -> None:
    """Add ``--slurm`` and ``--ray``."""
    group = parser.add_mutually_exclusive_group()
    to = "on Slurm's machines, until the end; the words after -- are options of srun"
    group.add_argument("--slurm", action="store_true", help=to)
    to = "on machines of the Ray cluster at ADDRESS, or auto; the words after -- are options of an "
    group.add_argument("--ray", metavar="ADDRESS", help=f"{to}actor, such as num_cpus=4")


def become(
    arguments: argparse.Namespace, own: Sequence[str], *, kind: str = "", known: str = ""
) -> None:
    """With ``--slurm`` or ``--ray``, replace this process by one that runs the same command there.

    `own`: options of srun, before those of the user. `kind`: the beginning of a new run's name.
    `known`: the name of a repeat that the command's words continue. Raises UserError without Slurm
    or Ray.
    """
    if arguments.ray is None and not arguments.slurm:
        if arguments.after:
            raise UserError("the words after -- are for a cluster: give --slurm or --ray, too")
        return
    machines, words = _without_cluster(arguments)
    options.refuse_unnamed_resume(arguments)
    if not known:
        options.check_settings(arguments)
    name = known or options.run_name(arguments, kind)
    # All machines must use one name, and each would invent another.
    words += [] if known or arguments.run_name else ["--name", name]
    program = _program(arguments, own, name, machines, ["-m", "rankzero", arguments.verb, *words])
    environ = {key: value for key, value in os.environ.items() if not key.startswith(OF_TORCHRUN)}
    sys.stdout.flush()
    # It gets the signals and the terminal, and its exit code is the command's.
    os.execve(program[0], program, environ)  # noqa: S606 - a list of words, no shell in between


def _without_cluster(arguments: argparse.Namespace) -> tuple[int, list[str]]:
    """Return how many machines Ray is to give, and the command's words but for the cluster's.

    Raises UserError for words that choose machines.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--slurm", action="store_true")
    parser.add_argument("--ray")
    parser.add_argument("--nnodes", default="1")
    # Not from torchrun's variables, which stay behind.
    found, words = parser.parse_known_args(arguments.words)
    chosen = any(word.startswith("--rdzv-e") for word in words)
    if arguments.slurm and (chosen or any(word.startswith("--nn") for word in arguments.words)):
        raise UserError("srun knows the machines: give it their number, -- --nodes 2")
    if chosen or not found.nnodes.isdecimal():
        raise UserError("Ray chooses the machines: give --ray their number only, --nnodes 2")
    return max(1, int(found.nnodes)), words


def _program(
    arguments: argparse.Namespace, own: Sequence[str], name: str, machines: int, same: list[str]
) -> list[str]:
    """Return the words of srun, or of what drives Ray's actors, that run Python with `same`."""
    if arguments.ray is not None:
        processes = arguments.nproc or 1
        return ray_actor.command(arguments.ray, arguments.after, processes, machines, same)
    if (srun := shutil.which("srun")) is None:
        raise UserError("this machine has no srun: run this on a machine of the Slurm cluster")
    cores = [f"--cpus-per-task={arguments.nproc}"] if arguments.nproc else []
    chosen = [f"--job-name={name}", *cores, *own, *arguments.after]
    return [srun, *chosen, sys.executable, "-P", *same]


def one_task_per_machine(own: Sequence[str]) -> list[str]:
    """Return the options of srun for one command on each machine of the job or allocation.

    `own`: the user's options of srun, which may ask for fewer machines than the allocation has.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nodes", "-N", default=os.environ.get("SLURM_JOB_NUM_NODES", ""))
    # A salloc with --ntasks sets the number of tasks, too.
    machines = parser.parse_known_args(own)[0].nodes
    tasks = [f"--ntasks={machines}"] if machines.isdecimal() else []
    return ["--ntasks-per-node=1", "--kill-on-bad-exit=0", *tasks]

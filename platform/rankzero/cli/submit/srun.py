"""``rankzero train --slurm`` and ``repeat --slurm``: the same command on Slurm's machines."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from rankzero.cli import options
from rankzero.errors import UserError
from rankzero.launch.machines import OF_TORCHRUN


def add_clusters(parser: argparse.ArgumentParser) -> None:
    """Add ``--slurm`` and ``--ray``."""
    group = parser.add_mutually_exclusive_group()
    to = "on Slurm's machines, until the end; the words after -- are options of srun"
    group.add_argument("--slurm", action="store_true", help=to)
    to = "on machines of the Ray cluster at ADDRESS, or auto; the words after -- are options of an "
    group.add_argument("--ray", metavar="ADDRESS", help=f"{to}actor")


def become(
    arguments: argparse.Namespace, own: Sequence[str], *, kind: str = "", known: str = ""
) -> None:
    """With ``--slurm``, replace this process by srun, which runs the same command.

    `own`: options of srun, before those of the user. `kind`: the beginning of a new run's name.
    `known`: the name of a repeat that the command's words continue. Raises UserError without Slurm.
    """
    if not arguments.slurm:
        if arguments.after:
            raise UserError("the words after -- are for a cluster: give --slurm or --ray, too")
        return
    options.refuse_unnamed_resume(arguments)
    if not known:
        options.check_settings(arguments)
    name = known or options.run_name(arguments, kind)
    words = command(arguments, name, own, named=bool(known or arguments.run_name))
    environ = {key: value for key, value in os.environ.items() if not key.startswith(OF_TORCHRUN)}
    sys.stdout.flush()
    # srun gets the signals and the terminal, and its exit code is the command's.
    os.execve(words[0], words, environ)  # noqa: S606 - a list of words, no shell in between


def command(
    arguments: argparse.Namespace, name: str, own: Sequence[str], *, named: bool
) -> list[str]:
    """Return the words of srun that run the command of `arguments`. Raises UserError."""
    if (srun := shutil.which("srun")) is None:
        raise UserError("this machine has no srun: run this on a machine of the Slurm cluster")
    # Not from torchrun's variables, which stay behind.
    if any(word.startswith(("--nn", "--rdzv-e")) for word in arguments.words):
        raise UserError("srun knows the machines: give it their number, -- --nodes 2")
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--slurm", action="store_true")
    _, words = parser.parse_known_args(arguments.words)
    # All machines must use one name, and each would invent another.
    words += [] if named else ["--name", name]
    cores = [f"--cpus-per-task={arguments.nproc}"] if arguments.nproc else []
    chosen = [f"--job-name={name}", *cores, *own, *arguments.after]
    return [srun, *chosen, sys.executable, "-P", "-m", "rankzero", arguments.verb, *words]


def one_task_per_machine(own: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the options of srun for one command on each machine of the job or allocation.

    `own`: the user's options of srun, which may ask for fewer machines than the allocation has.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nodes", "-N", default=environ.get("SLURM_JOB_NUM_NODES", ""))
    # A salloc with --ntasks sets the number of tasks, too.
    machines = parser.parse_known_args(own)[0].nodes
    tasks = [f"--ntasks={machines}"] if machines.isdecimal() else []
    return ["--ntasks-per-node=1", "--kill-on-bad-exit=0", *tasks]

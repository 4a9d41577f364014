"""``rankzero train --ray`` and ``repeat --ray``: the same command on machines of a Ray cluster."""

from __future__ import annotations

import argparse
import os
import sys

from rankzero.cli import options
from rankzero.errors import UserError
from rankzero.launch.machines import OF_TORCHRUN
from rankzero.tuning.places import ray_actor


def become(arguments: argparse.Namespace, *, kind: str = "", known: str = "") -> None:
    """With ``--ray``, replace this process by one that runs the same command in actors.

    `kind`: the beginning of a new run's name. `known`: the name of a repeat that the command's
    words continue. Raises UserError without Ray.
    """
    if arguments.ray is None:
        return
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--ray")
    parser.add_argument("--nnodes", default="1")
    found, words = parser.parse_known_args(arguments.words)
    if not found.nnodes.isdecimal() or any(word.startswith("--rdzv-e") for word in words):
        raise UserError("Ray chooses the machines: give --ray their number only, --nnodes 2")
    options.refuse_unnamed_resume(arguments)
    if not known:
        options.check_settings(arguments)
    if not (known or arguments.run_name):
        # All machines must use one name, and each would invent another.
        words += ["--name", options.run_name(arguments, kind)]
    same = ["-m", "rankzero", arguments.verb, *words]
    machines, processes = max(1, int(found.nnodes)), arguments.nproc or 1
    program = ray_actor.command(arguments.ray, arguments.after, processes, machines, same)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(OF_TORCHRUN)}
    sys.stdout.flush()
    # Its exit code is the command's.
    os.execve(program[0], program, environ)  # noqa: S606 - a list of words, no shell in between

"""Hosts as jobs of Slurm, or as steps of the allocation that the search runs in.

A host of several machines is one job, so Slurm starts all of it or nothing.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from rankzero.errors import UserError

# An allocation with GPUs has at least one of them.
_GPUS = ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")


def command(
    options: Sequence[str],
    processes: int,
    parallel: int = 1,
    machines: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """Return the command that starts a host. Raises UserError on a machine without Slurm.

    `options`: of srun. `processes`: of each trial on each of its `machines`, with a core and a GPU
    for each by default. `parallel`: the hosts that share an allocation.
    """
    if (srun := shutil.which("srun")) is None:
        raise UserError("this machine has no srun: search on a machine of the Slurm cluster")
    step = _part(processes, parallel * machines, environ) if "SLURM_JOB_ID" in environ else []
    own = [f"--nodes={machines}", f"--ntasks={machines}", f"--cpus-per-task={processes}"]
    own += ["--job-name=rankzero-trials", "--kill-on-bad-exit=1"]
    program = ["-P", "-m", "rankzero.tuning.places.node", f"--machines={machines}", "--slurm"]
    if taken := sorted({"-l", "--label", "-u", "--unbuffered"} & set(options)):
        raise UserError(f"{taken[0]} changes the lines that srun passes on: leave it out")
    # Slurm takes the last of two equal options, so the user's are last.
    return [srun, *own, *step, *options, sys.executable, *program]


def _part(processes: int, tasks: int, environ: Mapping[str, str]) -> list[str]:
    """Return the options for a part of the allocation.

    By default a step takes all cores, GPUs and memory of its machine, and the others wait.
    """
    found = ["--exact"]
    if any(name in environ for name in _GPUS):
        found.append(f"--gpus-per-node={processes}")
    memory, machines = environ.get("SLURM_MEM_PER_NODE", ""), environ.get("SLURM_JOB_NUM_NODES")
    if memory.isdecimal():
        on_each = math.ceil(tasks / int(machines or 1))
        found.append(f"--mem={int(memory) // on_each}")
    return found

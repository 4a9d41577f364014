"""Hosts as jobs of Slurm, or as steps of the allocation that the search runs in."""

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
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """Return the command that starts a host. Raises UserError on a machine without Slurm.

    `options`: of srun. `processes`: of each trial, with a core and a GPU for each by default.
    `parallel`: the hosts that share an allocation.
    """
    if (srun := shutil.which("srun")) is None:
        raise UserError("this machine has no srun: search on a machine of the Slurm cluster")
    step = _part(processes, parallel, environ) if "SLURM_JOB_ID" in environ else []
    own = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={processes}", "--job-name=rankzero-trials"]
    # Slurm takes the last of two equal options, so the user's are last.
    return [srun, *own, *step, *options, sys.executable, "-m", "rankzero.tuning.places.node"]


def _part(processes: int, parallel: int, environ: Mapping[str, str]) -> list[str]:
    """Return the options for a part of the allocation.

    By default a step takes all cores, GPUs and memory of its machine, and the others wait.
    """
    found = ["--exact"]
    if any(name in environ for name in _GPUS):
        found.append(f"--gpus-per-node={processes}")
    memory, machines = environ.get("SLURM_MEM_PER_NODE", ""), environ.get("SLURM_JOB_NUM_NODES")
    if memory.isdecimal():
        hosts = math.ceil(parallel / int(machines or 1))
        found.append(f"--mem={int(memory) // hosts}")
    return found

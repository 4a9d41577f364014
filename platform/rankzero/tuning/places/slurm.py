"""Hosts as jobs of Slurm, or as steps of the allocation that the search runs in."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from rankzero.errors import UserError


def command(
    options: Sequence[str], processes: int, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the command that starts a host. Raises UserError on a machine without Slurm.

    `options`: of srun. `processes`: of each trial, a processor core for each by default.
    """
    if (srun := shutil.which("srun")) is None:
        raise UserError("this machine has no srun: search on a machine of the Slurm cluster")
    # In an allocation the hosts divide it: without the option, each would take all of it.
    step = ["--exact"] if "SLURM_JOB_ID" in environ else []
    own = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={processes}", "--job-name=rankzero-trials"]
    # Slurm takes the last of two equal options, so the user's are last.
    return [srun, *own, *step, *options, sys.executable, "-m", "rankzero.tuning.places.node"]

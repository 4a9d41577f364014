"""The script of a Slurm job, and its submission."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rankzero.errors import RESUMABLE, UserError

# A step signals the command on each machine, which saves a checkpoint and ends.
_SCRIPT = r"""#!/bin/sh
# Written by `rankzero submit`. Slurm queues the job again if it stops with a new checkpoint.
#SBATCH --job-name={name}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@120
#SBATCH {options}

saved() {{ ls {checkpoints} 2>/dev/null; }}
before=$(saved)
# torchrun's variables in the shell that submitted, which Slurm passes on, are not of this job.
unset $(env | sed -n 's/^\(PET_[A-Z_]*\)=.*/\1/p')
srun --kill-on-bad-exit=0 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} \
    {command}
code=$?
if [ "$code" -eq {resumable} ] && [ "$(saved)" != "$before" ]; then
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" -eq {resumable} ]; then
    echo "stopped without a new checkpoint, so not queued again: give the job more --time" >&2
fi
exit "$code"
"""


def script(name: str, words: Sequence[str], options: Sequence[str], root: Path) -> str:
    """Return the job's script. `words`: of `rankzero train`. `options`: of sbatch.

    `root`: the absolute folder of the runs. A job may have another folder and other variables than
    the shell that submits it.
    """
    return _SCRIPT.format(
        name=shlex.quote(name),
        options=shlex.join(options),
        checkpoints=shlex.quote(str(root / "runs" / name / "checkpoints")),
        command=shlex.join(
            [sys.executable, "-P", "-m", "rankzero", "train", *words, "--dir", str(root)]
        ),
        resumable=RESUMABLE,
    ).replace("#SBATCH \n", "")


def submit(text: str) -> str:
    """Give a job's script to sbatch; return the job's number. Raises UserError if it refuses."""
    if (sbatch := shutil.which("sbatch")) is None:
        raise UserError("this machine has no sbatch: submit on a machine of the Slurm cluster")
    done = subprocess.run(
        [sbatch, "--parsable"], input=text, text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise UserError(f"sbatch refused the job: {done.stderr.strip()}")
    return done.stdout.split(";")[0].strip()

"""``rankzero submit --slurm EXP [key=value…] -- SBATCH OPTIONS``: queue a training as a job."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rankzero import config, experiment_file
from rankzero.cli import options
from rankzero.cli.commands import train
from rankzero.errors import FINISHED, RESUMABLE, UserError
from rankzero.launch.request import with_changes

_OWN = ("--slurm", "--dry-run")
# A step signals the command on each machine, which saves a checkpoint and ends.
_SCRIPT = """\
#!/bin/sh
# Written by `rankzero submit`. Slurm queues the job again if it stops with a new checkpoint.
#SBATCH --job-name={name}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@120
#SBATCH {options}

saved() {{ ls {checkpoints} 2>/dev/null; }}
before=$(saved)
srun --kill-on-bad-exit=0 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} \\
    {command}
code=$?
if [ "$code" -eq {resumable} ] && [ "$(saved)" != "$before" ]; then
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" -eq {resumable} ]; then
    echo "stopped without a new checkpoint, so not queued again: give the job more --time" >&2
fi
exit "$code"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    to = "as a job of Slurm; the words after -- are options of sbatch"
    parser.add_argument("--slurm", action="store_true", help=to)
    parser.add_argument("--dry-run", action="store_true", help="print the job's script only")
    train.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.slurm:
        raise UserError("say where the job shall run: rankzero submit --slurm EXP")
    if arguments.nnodes is not None or arguments.rdzv_endpoint:
        raise UserError("a job knows its machines: give sbatch their number, -- --nodes 2")
    # A mistake would otherwise appear only when the job begins, which may take days.
    changes = config.parse_assignments(arguments.settings)
    with_changes(experiment_file.load(arguments.experiment)(), changes)
    name = options.run_name(arguments)
    words = [word for word in arguments.words if word not in _OWN]
    words += [] if arguments.run_name else ["--name", name]
    words += [] if arguments.resume_if_there else ["--resume-if-there"]
    checkpoints = arguments.dir.absolute() / "runs" / name / "checkpoints"
    script = slurm_script(name, words, arguments.after, checkpoints)
    if arguments.dry_run:
        print(script, end="")
        return FINISHED
    if (sbatch := shutil.which("sbatch")) is None:
        raise UserError("this machine has no sbatch: submit on a machine of the Slurm cluster")
    done = subprocess.run(
        [sbatch, "--parsable"], input=script, text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise UserError(f"sbatch refused the job: {done.stderr.strip()}")
    job = done.stdout.split(";")[0].strip()
    print(f"{name} is job {job}: squeue --job {job} shows its state, slurm-{job}.out its output")
    return FINISHED


def slurm_script(name: str, words: Sequence[str], options: Sequence[str], checkpoints: Path) -> str:
    """Return the job's script. `words`: of `rankzero train`. `options`: of sbatch."""
    return _SCRIPT.format(
        name=shlex.quote(name),
        options=shlex.join(options),
        checkpoints=shlex.quote(str(checkpoints)),
        command=shlex.join([sys.executable, "-m", "rankzero", "train", *words]),
        resumable=RESUMABLE,
    ).replace("#SBATCH \n", "")

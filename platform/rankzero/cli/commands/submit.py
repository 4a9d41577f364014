"""``rankzero submit --slurm|--kubernetes EXP [key=value…]``: a training as a cluster's job."""

from __future__ import annotations

import argparse
import os
import sys

from rankzero.cli import options
from rankzero.cli.commands import train
from rankzero.cli.submit import kubernetes, slurm
from rankzero.cli.submit.kubernetes import Pods
from rankzero.errors import FINISHED, UserError
from rankzero.mlflow_store.patience import WAIT
from rankzero.redaction.text import NOTIFY

_PODS = ("image", "gpus", "cpus", "memory", "claim", "secret")
# Variables of `rankzero train`, and the beginning of the option that each of them stands for.
_VARIABLES = {
    "MLFLOW_TRACKING_URI": "--tracking",
    "MLFLOW_EXPERIMENT_NAME": "--experiment",
    WAIT: "--wait",
    NOTIFY: "--notify",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_own(parser)
    train.add_training(parser)
    # The variables of torchrun in this shell are not of the job. Slurm alone passes others on.
    parser.set_defaults(nnodes=None, nproc=None, rdzv_endpoint=None, offline=False)


def _add_own(parser: argparse.ArgumentParser) -> None:
    """Add what `rankzero train` does not have."""
    where = parser.add_argument_group("where the job runs").add_mutually_exclusive_group()
    to = "as a job of Slurm; the words after -- are options of sbatch"
    where.add_argument("--slurm", action="store_true", help=to)
    to = "as a job of Kubernetes: print its manifest, for kubectl apply -f -"
    where.add_argument("--kubernetes", action="store_true", help=to)
    parser.add_argument("--dry-run", action="store_true", help="print the job's script only")
    title = "with --kubernetes; --nnodes is the number of pods"
    add = parser.add_argument_group(title).add_argument
    add("--image", help="the image of the pods, with RankZero and the experiment's file")
    add("--gpus", type=int, metavar="N", help="GPUs of each pod (default: none)")
    add("--cpus", metavar="N", help="cores of each pod, such as 16 or 500m")
    add("--memory", metavar="SIZE", help="memory of each pod, such as 64Gi")
    add("--claim", metavar="NAME", help="the PersistentVolumeClaim for the runs' folder")
    variables = "the Secret with variables of the pods, such as MLFLOW_TRACKING_URI"
    add("--secret", metavar="NAME", help=variables)


def run(arguments: argparse.Namespace) -> int:
    if not (arguments.slurm or arguments.kubernetes):
        raise UserError(
            "say where the job shall run: rankzero submit --slurm EXP, or --kubernetes EXP"
        )
    options.check_settings(arguments)
    options.check_batch_size(arguments)
    name = options.run_name(arguments)
    own = argparse.ArgumentParser(add_help=False)
    _add_own(own)
    _, words = own.parse_known_args(arguments.words)
    words += [] if arguments.run_name else ["--name", name]
    words += [] if arguments.resume_if_there else ["--resume-if-there"]
    return (_slurm if arguments.slurm else _kubernetes)(arguments, name, words)


def _slurm(arguments: argparse.Namespace, name: str, words: list[str]) -> int:
    if arguments.nnodes is not None or arguments.rdzv_endpoint:
        raise UserError("a job knows its machines: give sbatch their number, -- --nodes 2")
    if foreign := [option for option in _PODS if getattr(arguments, option) is not None]:
        raise UserError(
            f"--{foreign[0]} is for --kubernetes: give sbatch its own options, after --"
        )
    array = argparse.ArgumentParser(add_help=False)
    array.add_argument("--array", "-a", nargs="?", const="")
    if array.parse_known_args(arguments.after)[0].array is not None:
        raise UserError(
            f"all tasks of an --array would be the one run {name}: rankzero repeat --slurm trains "
            "several seeds or settings"
        )
    words[words.index(arguments.experiment)] = options.absolute(arguments.experiment)
    script = slurm.script(name, words, arguments.after, arguments.dir.absolute())
    if arguments.dry_run:
        print(script, end="")
        return FINISHED
    job = slurm.submit(script)
    print(f"{name} is job {job}: squeue --job {job} shows its state, slurm-{job}.out its output")
    return FINISHED


def _kubernetes(arguments: argparse.Namespace, name: str, words: list[str]) -> int:
    if arguments.after:
        raise UserError("--kubernetes takes no words after --: change the manifest instead")
    if arguments.rdzv_endpoint:
        raise UserError("a job knows where its pods meet: --nnodes N, without --rdzv-endpoint")
    if any(word.startswith("--di") for word in words):
        raise UserError("the runs' folder of the pods is on a claim: --claim NAME instead of --dir")
    if not arguments.image:
        raise UserError("--kubernetes needs --image, with RankZero and the experiment's file")
    delivers = (arguments.tracking_uri or arguments.secret) and not arguments.offline
    if not (arguments.claim or delivers):
        raise UserError(
            "a pod's disk is lost with it: keep the runs on a --claim NAME, or in MLflow, with "
            "--tracking-uri or a --secret NAME that has MLFLOW_TRACKING_URI"
        )
    lost = [
        name
        for name, option in _VARIABLES.items()
        if os.environ.get(name) and not any(word.startswith(option) for word in words)
    ]
    if lost and not arguments.secret:
        text = f"note: the pods do not get {', '.join(lost)} of this shell"
        print(f"{text}: give the option, or a --secret that has it", file=sys.stderr)
    _, most = arguments.nnodes or (1, 1)
    pods = Pods(count=most, **{option: getattr(arguments, option) for option in _PODS})
    print(kubernetes.manifest(name, words, pods), end="")
    return FINISHED

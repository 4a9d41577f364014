"""The verbs, with summaries and examples. Imports nothing, so that ``--help`` is fast."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """One command."""

    summary: str
    example: str
    module: str = ""
    """The verb's module, if it has no file of its own in cli/commands."""
    suffix: str = ""
    """The end of its functions' names, if it shares the file of another verb."""


_DIGITS = "experiments/digits.py"
VERBS = {
    "init": Verb(
        "write an experiment that trains at once",
        "rankzero init my_experiment.py",
        module="rankzero.cli.init",
    ),
    "train": Verb("run an experiment, tracked", f"rankzero train {_DIGITS} --nproc 2 lr=1e-2"),
    "submit": Verb(
        "make a training a job of Slurm or Kubernetes, which continues after a stop",
        f"rankzero submit --slurm {_DIGITS} lr=1e-2 -- --nodes 2 --time 8:00:00",
    ),
    "resume": Verb(
        "continue a run from its newest checkpoint, in the same MLflow run",
        "rankzero resume brisk-otter-412",
    ),
    "search": Verb(
        "find the configuration that reaches the quality bar in the least time",
        f"rankzero search {_DIGITS} --nproc 2 --minutes 10",
    ),
    "repeat": Verb(
        "train on several folds or seeds, and give the mean with its interval",
        f"rankzero repeat {_DIGITS} --seeds 5 lr=1e-2",
    ),
    "probe": Verb(
        "measure samples/s and memory, batch size x precision",
        f"rankzero probe {_DIGITS} width=64",
    ),
    "compare": Verb(
        "train the same work under several strategies, and compare them",
        f"rankzero compare {_DIGITS} --strategies single,ddp,fsdp --nproc 1,2",
    ),
    "profile": Verb(
        "show where the time of a step goes",
        f"rankzero profile {_DIGITS} --nproc 2",
        module="rankzero.cli.commands.compare",
        suffix="_profile",
    ),
    "config": Verb(
        "show an experiment's settings and every legal key", f"rankzero config {_DIGITS} lr=1e-2"
    ),
    "runs": Verb("list runs", "rankzero runs 'val/accuracy>0.9' status=FINISHED --sort -samples/s"),
    "report": Verb(
        "report on a run or a search, or compare runs", "rankzero report digits-a digits-b"
    ),
    "delete": Verb(
        "delete runs here and in MLflow; they can be restored",
        "rankzero delete brisk-otter-412",
        module="rankzero.cli.housekeeping.delete",
    ),
    "prune": Verb(
        "delete old runs that are not among the best, and free the disk of deleted ones",
        "rankzero prune --keep-best 5 --older-than 30d --dry-run",
        module="rankzero.cli.housekeeping.prune",
    ),
    "logs": Verb(
        "show what a run's ranks printed, or follow a running one",
        "rankzero logs digits-a --follow",
    ),
    "export": Verb(
        "write a run's metrics, settings and curves to files",
        "rankzero export digits-a --to results",
        module="rankzero.cli.housekeeping.export",
    ),
    "import": Verb(
        "take over a run that `rankzero export --bundle` wrote",
        "rankzero import brisk-otter-412.zip",
        module="rankzero.cli.housekeeping.import_bundle",
    ),
    "copy": Verb(
        "copy a whole run into another MLflow, such as a team's server",
        "rankzero copy brisk-otter-412 --to http://server:5000",
        module="rankzero.cli.housekeeping.copy",
    ),
    "relocate": Verb(
        "after a project was moved or copied: let MLflow find its artifacts",
        "rankzero relocate",
        module="rankzero.cli.housekeeping.relocate",
    ),
    "register": Verb(
        "put a run's best model into MLflow's model registry", "rankzero register digits-a digits"
    ),
    "ui": Verb("open the MLflow UI on the embedded store", "rankzero ui --port 5001"),
    "sync": Verb("deliver to MLflow what is not there yet", "rankzero sync"),
    "doctor": Verb(
        "check this machine, or explain what happened to a run", "rankzero doctor digits-a"
    ),
    "completion": Verb(
        "print a script that lets the shell complete these commands",
        'eval "$(rankzero completion bash)"',
        module="rankzero.cli.completion",
    ),
}
FOR_CLUSTERS = ("train", "submit", "search", "repeat", "probe", "compare", "profile")
"""The verbs whose words after ``--`` are for Slurm's programs, or for Ray."""
# They train, for as long as that takes. Ctrl-C is how people stop them.
TRAINING_VERBS = ("train", "resume", "search", "repeat", "probe", "compare", "profile")

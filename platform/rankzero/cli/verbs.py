"""The verbs: what each does, and a command that people would type. Imports nothing: ``--help`` is at once."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """What it does, in a few words; an example."""

    summary: str
    example: str


DIGITS = "experiments/digits.py"
VERBS = {
    "train": Verb("run an experiment, tracked", f"rankzero train {DIGITS} --nproc 2 lr=1e-2"),
    "resume": Verb(
        "go on with a run, in the same MLflow run", "rankzero resume digits-20261121-093005-3fa1c8"
    ),
    "search": Verb(
        "find the configuration that reaches the quality bar in the least time",
        f"rankzero search {DIGITS} --nproc 2 --minutes 10",
    ),
    "probe": Verb(
        "measure samples/s and memory, batch size x precision", f"rankzero probe {DIGITS} width=64"
    ),
    "compare": Verb(
        "train the same work under several strategies, and compare",
        f"rankzero compare {DIGITS} --strategies single,ddp,fsdp --nproc 1,2",
    ),
    "profile": Verb("see where the time of a step goes", f"rankzero profile {DIGITS} --nproc 2"),
    "config": Verb(
        "show an experiment's settings and every legal key", f"rankzero config {DIGITS} lr=1e-2"
    ),
    "runs": Verb("list runs", "rankzero runs 'val/accuracy>0.9' status=FINISHED --sort -samples/s"),
    "report": Verb(
        "show what became of a run or a search, or how two runs differ",
        "rankzero report digits-a digits-b",
    ),
    "logs": Verb(
        "show what a run's ranks printed; follow a run that goes on",
        "rankzero logs digits-a --follow",
    ),
    "export": Verb(
        "write a run's metrics, settings and curves to files",
        "rankzero export digits-a --to results",
    ),
    "register": Verb(
        "put a run's best model into MLflow's model registry", "rankzero register digits-a digits"
    ),
    "ui": Verb("open the MLflow UI on the embedded store", "rankzero ui --port 5001"),
    "sync": Verb("deliver to MLflow what a run's recorder left", "rankzero sync"),
    "doctor": Verb("check this machine, or tell what became of a run", "rankzero doctor digits-a"),
    "completion": Verb(
        "print what makes the shell complete these commands", 'eval "$(rankzero completion bash)"'
    ),
}

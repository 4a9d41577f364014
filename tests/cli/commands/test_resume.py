"""`rankzero resume` of a finished run: what trains further, and what would train nothing."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from rankzero import ConfigError, Experiment, Train
from rankzero.cli.commands import resume
from rankzero.launch.machines import Machines
from rankzero.launch.request import with_changes
from rankzero.run_store import checkpoint_files
from support.commands import TINY, Command, last_end, losses


@pytest.mark.timeout(200)
def test_report_of_a_run_in_steps_suggests_what_trains_further(rankzero: Command) -> None:
    code, output = rankzero("train", TINY, "train.steps=6", "--run-name", "r", "--offline")
    assert code == 0, output
    (run,) = rankzero.runs
    suggested = re.search(r"rankzero (resume r .*)", rankzero("report", "r")[1])
    assert suggested is not None and suggested[1] == "resume r train.steps=12"
    for change, says in (
        ("train.epochs=20", "train.epochs=20 changes nothing, because train.steps=6 decides"),
        ("train.steps=6", "r has finished with step 6 (best val"),
        ("lr=0.1", "pass a later end, such as train.steps=12"),
        ("train.steps=12 train.drop_last=false", "train.drop_last decides the order of the data"),
    ):
        code, output = rankzero("resume", "r", *change.split(), "--offline")
        assert code == 2 and says in output, output
    assert last_end(run).status == "FINISHED", "a refused resume leaves the run as it was"
    code, output = rankzero(*suggested[1].split(), "--offline")
    assert code == 0 and max(losses(run)) == 12, output
    code, output = rankzero("resume", "r", "train.steps=none", "train.epochs=3", "--offline")
    assert code == 0 and max(losses(run)) == 3 * (200 // 32), output
    code, output = rankzero("resume", "r", "train.epochs=3", "--offline")
    assert code == 2 and "such as train.epochs=6" in output, output
    newest = max(run.checkpoints.iterdir())
    (newest / "state.pt").write_bytes(b"damaged")
    output = rankzero("resume", "r", "--offline")[1]
    assert newest.name in output and "nothing is left" not in output


def test_steps_decide_unless_they_are_unset() -> None:
    stepped = Experiment(train=Train(steps=100))
    with pytest.raises(ConfigError, match=r"train\.steps=100 decides"):
        with_changes(stepped, {"train.epochs": "20"})
    assert with_changes(stepped, {"train.epochs": "20", "train.steps": "none"}).train.steps is None
    # A program that passes both, as `rankzero.train(Digits(train=Train(steps=9)))` does.
    both = with_changes(Experiment(), {"train.epochs": "10", "train.steps": "9"})
    assert both.train.steps == 9


@pytest.mark.parametrize(("machines", "nproc"), [(Machines(2, 2), 4), (Machines(1, 2), None)])
def test_a_range_of_machines_keeps_the_default_number_of_processes(
    machines: Machines, nproc: int | None, tmp_path: Path
) -> None:
    fields = {"step": 1, "metrics": {}, "best": False, "files": {}, "world_size": 8, "format": 1}
    (tmp_path / checkpoint_files.MANIFEST).write_text(json.dumps(fields))
    arguments = argparse.Namespace(nproc=None)
    resume._set_processes(tmp_path, arguments, machines)
    assert arguments.nproc == nproc

"""Runs below a run of `rankzero.track`, such as those of folds."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from mlflow.entities import Run

import rankzero
from rankzero import Goal
from rankzero.events import RunEnded, RunStarted
from rankzero.integrations.own_loop.tracked_run import TrackedRun
from rankzero.mlflow_store.client.connection import connect
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import delivery_status, sync
from support.commands import wait_until
from support.runs import of_kind


def in_mlflow(folder: Path) -> dict[str, Run]:
    client = connect(RunFolder(folder).identity.tracking_uri)
    return {run.info.run_name: run for run in client.search_runs(["1"])}


def ends(run: TrackedRun) -> list[str]:
    return [event.status for event in of_kind(run.folder, RunEnded)]


def test_children_are_below_their_run_in_mlflow() -> None:
    with rankzero.track("folds", {"k": 2}, goal=Goal("accuracy", "max"), name="cv") as run:
        for fold in (1, 2):
            with run.child(f"fold-{fold}", {"fold": fold}) as child:
                child.log({"train/loss": 1.0 / fold}, step=1)
                assert child.evaluated({"accuracy": fold / 4}, step=1)
        inner = child.child("deeper")
        run.evaluated({"accuracy": 0.375}, step=2)
    folder = RunFolder(Path("mlruns/runs/cv").absolute())
    assert delivery_status.wait(folder).done
    for below in folder.children:
        assert delivery_status.wait(below).done, "the courier of the run delivers them"
    found = in_mlflow(folder.path)
    assert found.keys() == {"cv", "cv-fold-1", "cv-fold-2", "cv-fold-2-deeper"}
    above = {name: one.data.tags.get("mlflow.parentRunId") for name, one in found.items()}
    ids = {name: one.info.run_id for name, one in found.items()}
    assert above == {
        "cv": None,
        "cv-fold-1": ids["cv"],
        "cv-fold-2": ids["cv"],
        "cv-fold-2-deeper": ids["cv-fold-2"],
    }
    assert {one.info.status for one in found.values()} == {"FINISHED"}
    assert found["cv-fold-2"].data.metrics["train/loss"] == 0.5
    assert found["cv-fold-2"].data.params["fold"] == "2"
    assert found["cv-fold-2"].data.params["goal.metric"] == "accuracy"
    assert ends(inner) == ["FINISHED"], "its run has ended it"


def test_ended_child_keeps_no_state_in_memory() -> None:
    with rankzero.track("folds", name="cv", offline=True) as run:
        weight = torch.ones(1000)
        with run.child("held") as held:
            held.checkpoint({"weight": weight}, step=1)
        with run.child("dropped") as dropped:
            dropped.checkpoint({"weight": weight}, step=1)
        last = weakref.ref(dropped)
        del dropped
        gc.collect()
        # A plain copy of the state would be a tensor, too.
        copies = [one for one in gc.get_objects() if _is_copy(one, weight)]
        assert not copies
        # Its flusher holds it for two seconds.
        wait_until(lambda: gc.collect() >= 0 and last() is None)
        held.log({"loss": 1.0})
    assert ends(held) == ["FINISHED", "FINISHED"], "the end of its run ends it once more"


def _is_copy(found: object, of: torch.Tensor) -> bool:
    return type(found) is torch.Tensor and found is not of and found.shape == of.shape


def test_child_continues_its_run_too() -> None:
    run = rankzero.track("folds", offline=True)
    child = run.child("a b")
    other = run.child("a-b")
    assert child.name != other.name
    run.finish(ValueError("in fold"))
    assert ends(run) == ends(child) == ends(other) == ["FAILED"]
    child.log({"loss": 1.0})
    for one in (child, run):
        assert [event.attempt for event in of_kind(one.folder, RunStarted)] == [1, 2]
    again = run.child("a b")
    assert again.name == child.name and len(RunFolder(run.folder or Path()).children) == 2
    run.finish()
    assert ends(again) == ["FAILED", "KILLED", "FINISHED"] and ends(other) == ["FAILED"]


def test_names_that_join_to_one_name_are_different_runs() -> None:
    rankzero.track("other", offline=True, name="cv-own").finish()
    for _ in range(2):
        with rankzero.track("folds", offline=True, name="cv") as run:
            children = [run.child("a").child("b"), run.child("a-b"), run.child("own")]
            names = [child.name for child in children]
        assert len({*names, "cv-own"}) == 4
    assert [ends(child) for child in children] == [["FINISHED", "FINISHED"]] * 3, "both continue"


def test_child_that_cannot_be_tracked_costs_only_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = rankzero.track("folds", offline=True, name="x" * 150)
    with run.child("y" * 80) as lost:
        lost.log({"loss": 1.0})
        lost.child("deeper").log({"loss": 1.0})
    with run.child("odd", config=3) as odd:
        odd.log({"loss": 1.0}, step=1)
    run.finish()
    printed = capsys.readouterr().out
    assert printed.count("is not tracked: ") == 1
    assert printed.count("the config of the child 'odd' is not logged: a config must") == 1
    assert lost.folder is None and ends(odd) == ends(run) == ["FINISHED"]


KILLED = """
import os, signal, rankzero
run = rankzero.track("folds", name="cv")
child = run.child("fold-1")
child.log({"loss": 1.0}, step=1)
child.step, run.id
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_process_leaves_no_child_running() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], check=False, env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    folder = RunFolder(Path("mlruns/runs/cv").absolute())
    assert delivery_status.wait(folder).done
    assert sync.deliver(folder).complete
    found = in_mlflow(folder.path)
    assert {name: run.info.status for name, run in found.items()} == {
        "cv": "FAILED",
        "cv-fold-1": "FAILED",
    }
    assert found["cv-fold-1"].data.metrics["loss"] == 1.0

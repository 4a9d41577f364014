"""Ranks that do not see the same, or do not get on, before the first step and after the last."""

from __future__ import annotations

import re
import time

import pytest

from support.commands import TINY, Command, tracked

UNSETTLED = TINY.with_name("unsettled.py")


@pytest.mark.parametrize(
    ("happens", "says"),
    [
        (
            "short 1",
            "training sets of different lengths: 200 samples on rank 0; 190 samples on rank 1.",
        ),
        (
            "fewer 0",
            "validation sets of different lengths: 50 samples on rank 0; 51 samples on rank 1.",
        ),
        ("raise 1", "OSError: no such data ("),
    ],
)
def test_ranks_that_see_other_data_end_at_once_with_one_message(
    rankzero: Command, happens: str, says: str
) -> None:
    rankzero.environ["UNSETTLED"] = happens
    begun = time.monotonic()
    code, output = rankzero("train", UNSETTLED, "--nproc", 2)
    assert code == 1, output
    (error,) = [line for line in output.splitlines() if line.startswith("error:")]
    run = tracked(rankzero.runs[-1])
    assert run.status == "FAILED" and says in run.tags["rankzero.reason"] and says in error
    assert "Traceback" not in output
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_before_the_first_step_is_named(rankzero: Command, rank: int) -> None:
    rankzero.environ["UNSETTLED"] = f"hang {rank}"
    code, output = rankzero(
        "train", UNSETTLED, "--nproc", 2, "train.limits.hang_minutes=0.01", "around_seconds=3"
    )
    assert code == 1, output
    hung(rankzero, rank, r"in set-up \(.*unsettled.py, line \d+, in data\)", "unsettled.py")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_disk_that_hangs_after_the_last_step_is_told(rankzero: Command, processes: int) -> None:
    rankzero.environ["UNSETTLED"] = "disk 0"
    code, output = rankzero(
        "train",
        UNSETTLED,
        "--nproc",
        processes,
        "train.limits.hang_minutes=0.01",
        "around_seconds=3",
        "train.steps=5",
        cold=True,  # the reported stack must begin in the rank, not in the tests' server
    )
    assert code == 1, output
    hung(rankzero, 0, "after the last step$", "unsettled.py")  # the thread that writes, in the log


def hung(rankzero: Command, rank: int, says: str, where: str) -> None:
    """Require that the run has failed, that it names the rank that hung, and that this left its stack in the log."""
    (folder,) = rankzero.runs
    run = tracked(folder)
    assert run.status == "FAILED"
    assert re.search(rf"rank {rank} hung for \d+ s {says}", run.tags["rankzero.reason"]), run.tags[
        "rankzero.reason"
    ]
    log = next((folder.path / "logs").glob(f"*/attempt_0/{rank}/stderr.log")).read_text()
    assert (
        "most recent call first" in log
        and where in log
        and "train.limits.hang_minutes sets the limit" in log
    )

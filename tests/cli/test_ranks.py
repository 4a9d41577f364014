"""Ranks with different data, and ranks that hang before the first step and after the last."""

from __future__ import annotations

import json
import re
import time

import pytest

from support.commands import TINY, Command, last_end

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
def test_ranks_with_different_data_end_at_once_with_one_message(
    rankzero: Command, happens: str, says: str
) -> None:
    rankzero.environ["UNSETTLED"] = happens
    begun = time.monotonic()
    code, output = rankzero("train", UNSETTLED, "--nproc", 2, "--offline")
    assert code == 1, output
    (error,) = [line for line in output.splitlines() if line.startswith("error:")]
    ended = last_end(rankzero.runs[-1])
    assert ended.status == "FAILED" and says in ended.reason and says in error
    for rank in (0, 1):
        failure = json.loads((rankzero.runs[-1].failures / f"rank_{rank}.json").read_text())
        assert says in failure["reason"] and failure["rank"] == (
            1 if happens == "raise 1" else rank
        )
    assert "Traceback" not in output
    assert time.monotonic() - begun < 60


def test_ranks_with_other_data_of_the_same_length_get_a_notice(rankzero: Command) -> None:
    rankzero.environ["UNSETTLED"] = "other 1"
    code, output = rankzero("train", UNSETTLED, "--nproc", 2, "train.steps=1", "--offline")
    assert code == 0 and "note: data() differs between ranks (training): " in output, output


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_hangs_before_the_first_step_is_named(rankzero: Command, rank: int) -> None:
    rankzero.environ |= {"UNSETTLED": f"hang {rank}", "RANKZERO_SETUP_SECONDS": "3"}
    words = ("--nproc", 2, "train.limits.hang_minutes=0.01", "--offline")
    code, output = rankzero("train", UNSETTLED, *words)
    assert code == 1, output
    hung(rankzero, rank, r"in set-up \(.*unsettled.py, line \d+, in data\)", "unsettled.py")


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.slow
def test_disk_that_hangs_after_the_last_step_is_reported(rankzero: Command, processes: int) -> None:
    rankzero.environ |= {"UNSETTLED": "disk 0", "RANKZERO_SETUP_SECONDS": "3"}
    code, output = rankzero(
        "train",
        UNSETTLED,
        "--nproc",
        processes,
        "train.limits.hang_minutes=0.01",
        "train.steps=5",
        "--offline",
        cold=True,  # the reported stack must begin in the rank, not in the tests' server
    )
    assert code == 1, output
    hung(rankzero, 0, "after the last step$", "unsettled.py")  # the thread that writes, in the log


def hung(rankzero: Command, rank: int, says: str, where: str) -> None:
    """Assert that the run failed, names the rank that hung, and has its stack in the log."""
    (folder,) = rankzero.runs
    ended = last_end(folder)
    assert ended.status == "FAILED"
    assert re.search(rf"rank {rank} hung for \d+ s {says}", ended.reason), ended.reason
    log = next((folder.path / "logs").glob(f"*/attempt_0/{rank}/stderr.log")).read_text()
    assert (
        "most recent call first" in log
        and where in log
        and "train.limits.hang_minutes sets the limit" in log
    )

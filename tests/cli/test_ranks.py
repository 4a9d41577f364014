"""Ranks that do not see the same, or do not get on, before the first step and after the last."""

from __future__ import annotations

import time

import pytest

from cli.conftest import TINY, Command, tracked

UNSETTLED = TINY.with_name("unsettled.py")


@pytest.mark.parametrize(
    ("happens", "says"),
    [
        ("short 1", "training sets of different lengths: 200 samples on rank 0; 190 samples on rank 1."),
        ("fewer 0", "validation sets of different lengths: 50 samples on rank 0; 51 samples on rank 1."),
        ("raise 1", "OSError: no such data ("),
    ],
)
def test_ranks_that_see_other_data_end_at_once_with_one_message(rankzero: Command, happens: str, says: str) -> None:
    rankzero.environ["UNSETTLED"] = happens
    begun = time.monotonic()
    code, output = rankzero("train", UNSETTLED, "--nproc", 2)
    assert code == 1, output
    (error,) = [line for line in output.splitlines() if line.startswith("error:")]
    run = tracked(rankzero.runs[-1])
    assert run.status == "FAILED" and says in run.tags["rankzero.reason"] and says in error
    assert "Traceback" not in output
    assert time.monotonic() - begun < 60

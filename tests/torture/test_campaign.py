"""A short campaign of four scenarios, and the summary of results. `make torture` runs them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torture import disks, fuzzing, room
from torture.campaign import SharedSetup, run_scenario, shared_setup
from torture.results import Result, report, summary, verdict
from torture.scenarios import processes

SEED = 20


@pytest.fixture(scope="module")
def setup() -> Iterator[SharedSetup]:
    with shared_setup() as found:
        yield found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "scenario", ["killed ranks", "damaged checkpoints", "full disk", "jumping clock"]
)
def test_promises_hold(setup: SharedSetup, scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MOST_KILLS", 3)
    result = run_scenario(setup, scenario, SEED)
    if result.not_run:
        pytest.skip(result.not_run)
    assert result.broken is None
    assert result.faults


def test_a_summary_counts_broken_promises_by_kind() -> None:
    results = [
        Result("signals", 1, ["SIGTERM to launcher"], 2.0, None),
        Result("signals", 2, ["SIGINT to rank 0", "SIGINT to rank 0"], 2.0, "lost: step 3"),
        Result("full disk", 3, ["disk full"], 2.0, "error: ZeroDivisionError"),
    ]
    text = summary(results)
    kinds = "doubled 0, corrupt 0, wrong 0, wrong status 0, hang 0, orphan 0"
    assert (
        text.splitlines()[-1]
        == f"faults tried 4 over 3 kinds; survived 1; lost 1, {kinds}, other 1"
    )
    assert verdict(results[:1]) == f"faults tried 1 over 1 kinds; survived 1; lost 0, {kinds}"
    assert report(results, 1)["by_fault"] == {
        "SIGINT to rank 0": 2,
        "SIGTERM to launcher": 1,
        "disk full": 1,
    }


@pytest.mark.slow
def test_a_report_lists_scenarios_and_checks_that_were_left_out(
    setup: SharedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "can_fail", lambda: False)
    monkeypatch.delenv(room.INSIDE, raising=False)
    result = run_scenario(setup, "failing disk", SEED)
    assert result.not_run and not result.faults and result.broken is None
    omitted = [
        f"not run: failing disk: {result.not_run} (1 of 2 scenarios)",
        f"{room.UNCHECKED} (1 of 2 scenarios)",
    ]
    results = [result, Result("signals", 1, ["SIGTERM"], 2.0, None, idling=1.0, leaving=3.0)]
    assert report(results, 1)["omitted"] == omitted
    assert report(results, 1)["longest_seconds"] == {"idling": 1.0, "leaving": 3.0}
    ended = "after a command its processes ended within 1 s, those that deliver within 3 s"
    assert summary(results).splitlines()[-4:-1] == [ended, *omitted]


def test_a_report_names_no_folder_of_the_machine() -> None:
    broken = (
        "orphan: 375 /home/me/.venv/bin/python -P -m rankzero.tracking.courier "
        "/tmp/t-1/1048-x/mlruns/run; sqlite:////home/me/mlflow.db "
        "'File \"/home/me/a.py\"' http://127.0.0.1:9/api/2.0 and/or 3/4"
    )
    (kept,) = report([Result("signals", 1, [], 2.0, broken)], 1)["scenarios"]
    assert kept["broken"] == (
        "orphan: 375 python -P -m rankzero.tracking.courier run; "
        "sqlite:///mlflow.db 'File \"a.py\"' http://127.0.0.1:9/api/2.0 and/or 3/4"
    )


def test_fuzz_cases_and_failures_are_counted() -> None:
    output = (
        "during generate phase (1.2 seconds): - 498 passing, 2 failing, and 30 invalid test cases"
    )
    found = fuzzing.counted(f"{output}\n{output}\n", passed=False)
    assert found.line == "fuzz cases tried 1,000; failed 4" and not found.passed

"""A short campaign: one of each of the scenarios that others do not test already. `make torture` has them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torture.campaign import Field, Result, prepared, report, summary, tried

SEED = 20


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with prepared() as found:
        yield found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", ["killed ranks", "killed launcher", "damaged checkpoints"])
def test_promises_hold(field: Field, scenario: str) -> None:
    result = tried(field, scenario, SEED)
    assert result.broken is None
    assert result.faults


def test_what_is_broken_is_counted_by_its_kind() -> None:
    results = [
        Result("signals", 1, ["SIGTERM to launcher"], 2.0, None),
        Result("signals", 2, ["SIGINT to rank 0", "SIGINT to rank 0"], 2.0, "lost: step 3"),
        Result("full disk", 3, ["disk full"], 2.0, "error: ZeroDivisionError"),
    ]
    told = summary(results)
    assert "faults tried 4; lost 1, corrupt 0" in told and "other 1" in told
    assert report(results, 1)["by_fault"] == {"SIGINT to rank 0": 2, "SIGTERM to launcher": 1, "disk full": 1}

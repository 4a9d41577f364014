"""How long the end of a training waits for its delivery. The recorder is a lock that is held, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankzero.tracking import incumbent, sync
from rankzero.tracking import progress as state
from rankzero.tracking.folder import RunFolder
from tracking.runs import append, ended, make_folder, started

LONG = 60.0  # seconds: nobody waits so long in these tests


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    """A run that has ended, and whose recorder gets nowhere."""
    made = make_folder(tmp_path)
    append(made, started(), ended())
    with incumbent.lock(made, 0) as held:
        assert held
        yield made


def waited(folder: RunFolder) -> float:
    began = time.monotonic()
    assert not sync.wait(folder).done
    return time.monotonic() - began


def test_no_longer_than_the_grace_that_is_set(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "0.3")
    assert 0.3 <= waited(folder) < LONG


def test_a_server_that_refuses_is_not_waited_for_as_one_that_may_answer(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", str(10 * LONG))
    monkeypatch.setattr(sync, "TROUBLED_SECONDS", 0.3)
    state.save(state.path_of(folder, 0), state.Progress(error="ConnectionError: refused"))
    assert 0.3 <= waited(folder) < LONG

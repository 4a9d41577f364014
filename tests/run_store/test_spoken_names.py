"""Names that are drawn for runs: short, plain, and never those of two runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rankzero
from rankzero.integrations.own_loop import track
from rankzero.run_store import names
from rankzero.run_store.spoken_names import new_name


def test_a_name_is_two_words_and_a_number(tmp_path: Path) -> None:
    drawn = {new_name(tmp_path) for _ in range(100)}
    assert len(drawn) > 90
    assert all(re.fullmatch(r"[a-z]+-[a-z]+-[1-9]\d{1,2}", name) for name in drawn)
    assert all(names.is_plain(name) and len(name) <= 21 for name in drawn)
    assert new_name(tmp_path, "compare").startswith("compare-")


def test_runs_that_draw_the_same_name_at_once_get_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both looked before either made its folder.
    drawn = iter(["brisk-otter-12", "brisk-otter-12", "calm-crow-34"])
    monkeypatch.setattr(track, "new_name", lambda _: next(drawn))
    with rankzero.track("mine", folder=tmp_path, offline=True) as first:
        first.log({"loss": 1.0}, 0)
    with rankzero.track("mine", folder=tmp_path, offline=True) as second:
        second.log({"loss": 2.0}, 0)
    assert (first.name, second.name) == ("brisk-otter-12", "calm-crow-34")

"""A folder and its mirror hold the same bytes after each look."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.errors import RunFailed
from rankzero.tuning.places import mirror
from rankzero.tuning.places.messages import Change
from rankzero.tuning.places.mirror import Mirror

NAMES = ["events.jsonl", "logs/0/stdout.log", "failures/rank_0.json", "pruned.txt"]


@given(writes=st.lists(st.tuples(st.sampled_from(NAMES), st.binary(min_size=1)), max_size=12))
def test_what_is_appended_or_replaced_comes_over(
    writes: list[tuple[str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    one, other = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    (one / "run.json").write_bytes(b"known to both")
    changes = Mirror(one)
    for count, (name, content) in enumerate(writes):
        path = one / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".jsonl", ".log"):
            with path.open("ab") as file:
                file.write(content)
        else:
            path.write_bytes(content)
        os.utime(path, ns=(count, count))  # two writes may fall into one tick of the clock
        for change in changes.changes():
            mirror.apply(change, other)
        assert mirror.contents(other) == {
            key: value for key, value in mirror.contents(one).items() if key != "run.json"
        }
    assert not list(changes.changes())


def test_only_files_of_a_prefix_are_read(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.failures/rank_0.json", "b.jsonl", "b.logs/a.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert mirror.contents(tmp_path, "a").keys() == {"a.jsonl", "a.failures/rank_0.json"}


def test_a_large_file_comes_in_parts(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    changes = Mirror(one)
    content = os.urandom(3 << 20)
    (one / "events.jsonl").write_bytes(content)
    parts = list(changes.changes())
    for change in parts:
        mirror.apply(change, other)
    assert len(parts) == 3 and (other / "events.jsonl").read_bytes() == content


def test_output_of_each_machine_has_a_folder(tmp_path: Path) -> None:
    one = tmp_path / "one"
    (one / "probe.logs" / "0").mkdir(parents=True)
    first, second = Mirror(one, logs="probe.logs"), Mirror(one, 1, "probe.logs")
    for name in ("probe.logs/0/stdout.log", "system-node_1.jsonl"):
        (one / name).write_text("x")
    assert [change.name for change in first.changes()] == [
        "probe.logs/0/stdout.log",
        "system-node_1.jsonl",
    ]
    assert [change.name for change in second.changes()] == [
        "probe.logs/node_1/0/stdout.log",
        "system-node_1.jsonl",
    ]


def test_claims_locks_and_links_stay_on_their_machine(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    for name in ("recorder.json", "launcher.lock", "attempt.lock", "delivery.json", ".half"):
        (one / name).write_text("x")
    (one / "secret").symlink_to("/etc/passwd")
    assert mirror.contents(one) == {}


@pytest.mark.parametrize("name", ["../elsewhere.txt", "/tmp/elsewhere.txt", "in/../../out.txt"])
def test_no_name_leads_out_of_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="outside of"):
        mirror.apply(Change(name, 0, b"x"), tmp_path / "folder")

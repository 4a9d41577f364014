"""Journals: what is appended is read, whatever happens to the writer."""

from __future__ import annotations

import errno
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.events import Event, RunEnded, StepsLogged, decode, encode
from rankzero.tracking.journal import Identity, Journal, RunFolder, new_name, read, read_all, write_atomically

numbers = st.floats()


def ended(reason: str = "done") -> RunEnded:
    return RunEnded(1.0, "FINISHED", reason, None, {})


@given(st.lists(st.tuples(st.integers(0, 2**40), numbers), min_size=1, max_size=5), st.text(max_size=30))
def test_an_event_is_read_back(rows: list[tuple[int, float]], name: str) -> None:
    event = StepsLogged([step for step, _ in rows], [0.5] * len(rows), {name: [value for _, value in rows]})
    back = decode(encode(event))
    assert isinstance(back, StepsLogged)
    assert back.steps == event.steps and list(back.metrics) == [name]
    for one, other in zip(back.metrics[name], event.metrics[name], strict=True):
        assert one == other or (math.isnan(one) and math.isnan(other))
    assert "\n" not in encode(event)


@pytest.mark.parametrize("line", ["", "{", "[]", "3", '{"event":"Nothing"}', '{"event":"RunEnded"}', '{"time":1}'])
def test_what_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"not an event|Expecting"):
        decode(line)


def test_a_torn_last_line_is_passed_over_and_closed_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(encode(ended("first")) + "\n" + encode(ended("torn"))[:20])
    events, offset = read(path)
    assert [event.reason for event in events if isinstance(event, RunEnded)] == ["first"]
    journal = Journal(path)
    journal(ended("second"))
    journal.close()
    later, _ = read(path, offset)
    assert later == [ended("second")]


def test_windows_wait_for_the_next_other_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    journal(StepsLogged([1], [0.0], {"loss": [1.0]}))
    assert read(path)[0] == []
    journal.flush()
    assert len(read(path)[0]) == 1
    journal(StepsLogged([2], [0.0], {"loss": [1.0]}))
    journal(ended())
    assert len(list(read_all(path))) == 3
    journal.close()


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.integers(1, 5000))
def test_reading_in_pieces_reads_each_event_once(lengths: list[int], limit: int) -> None:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"journal-{os.getpid()}.jsonl"
    path.write_text("".join(encode(ended("x" * length)) + "\n" for length in lengths))
    found: list[Event] = []
    offset = -1
    behind = 0
    while behind != offset:
        offset = behind
        events, behind = read(path, offset, limit)
        found += events
    path.unlink()
    assert [len(event.reason) for event in found if isinstance(event, RunEnded)] == lengths


def test_a_reader_follows_a_writer(tmp_path: Path) -> None:
    path, count = tmp_path / "events.jsonl", 2000
    seen: list[Event] = []

    def follow() -> None:
        offset = 0
        while len(seen) < count:
            events, offset = read(path, offset, 4096)
            seen.extend(events)

    reader = threading.Thread(target=follow)
    reader.start()
    journal = Journal(path)
    for number in range(count):
        journal(StepsLogged([number], [0.0], {"loss": [float(number)]}))
        if number % 7 == 0:
            journal.flush()
    journal.close()
    reader.join(timeout=30)
    assert [event.steps[0] for event in seen if isinstance(event, StepsLogged)] == list(range(count))


def test_a_full_disk_loses_nothing_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, room = Journal(tmp_path / "events.jsonl"), {"left": 30}
    real = os.write

    def write(descriptor: int, data: Any) -> int:
        if room["left"] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(descriptor, bytes(data)[: room["left"]])
        room["left"] -= count
        return count

    monkeypatch.setattr("rankzero.tracking.journal.os.write", write)
    for number in range(5):
        journal(ended(str(number)))
    room["left"] = 1 << 20
    journal(ended("5"))
    journal.close()
    reasons = [event.reason for event in read_all(tmp_path / "events.jsonl") if isinstance(event, RunEnded)]
    assert reasons == list("012345")


def test_identity_is_read_back(tmp_path: Path) -> None:
    identity = Identity("a-run", "u", "digits", "sqlite:///x.db", experiment_file="/x/digits.py")
    folder = RunFolder.create(tmp_path / "runs", identity)
    assert folder.identity == identity
    with pytest.raises(FileExistsError):
        RunFolder.create(tmp_path / "runs", identity)
    assert RunFolder.open_or_create(tmp_path / "runs", identity).path == folder.path


def test_an_atomic_write_leaves_one_file(tmp_path: Path) -> None:
    for text in ("one", "two"):
        write_atomically(tmp_path / "f", text)
    assert (tmp_path / "f").read_text() == "two" and len(list(tmp_path.iterdir())) == 1


def test_names_are_plain_and_differ() -> None:
    names = {new_name("digits") for _ in range(20)}
    assert len(names) > 10 and all(name.startswith("digits-2") for name in names)

"""Journals: what is appended is read, whatever happens to the writer."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.events import (
    ArtifactLogged,
    CheckpointDeleted,
    CheckpointSaved,
    Evaluated,
    Event,
    Noticed,
    ParamsLogged,
    RunEnded,
    RunStarted,
    StepsLogged,
    SystemSampled,
    TagsSet,
    decode,
    encode,
    encode_line,
)
from rankzero.run_store.folder import Identity, RunFolder, write_atomically
from rankzero.run_store.journal import Journal, milestones, newest_start, read, read_all
from rankzero.tracking.run_log import RunLog
from support.runs import append, make_folder, saved, started, steps

numbers = st.floats()
times = st.floats(-1e10, 1e10)
metrics = st.dictionaries(st.text(max_size=8), numbers, max_size=3)
paths = st.text().filter(
    lambda text: "\0" not in text
)  # which no path has, and no event is read with
events = st.one_of(
    st.builds(
        RunStarted, times, st.dictionaries(st.text(), st.text()), st.just({}), st.integers(1)
    ),
    st.builds(
        StepsLogged,
        st.lists(st.integers()),
        st.lists(numbers),
        st.dictionaries(st.text(), st.lists(numbers)),
    ),
    st.builds(Evaluated, times, st.integers(0), metrics, st.booleans()),
    st.builds(CheckpointSaved, times, st.integers(0), paths, st.booleans(), metrics),
    st.builds(CheckpointDeleted, times, st.integers(0), paths),
    st.builds(SystemSampled, times, st.integers(0), metrics),
    st.builds(ParamsLogged, times, st.dictionaries(st.text(), st.text())),
    st.builds(TagsSet, times, st.dictionaries(st.text(), st.text())),
    st.builds(ArtifactLogged, times, paths),
    st.builds(
        RunEnded,
        times,
        st.sampled_from(["FINISHED", "FAILED"]),
        st.text(),
        st.none() | st.text(),
        metrics,
    ),
)


def ended(reason: str = "done") -> RunEnded:
    return RunEnded(1.0, "FINISHED", reason, None, {})


@given(events)
def test_an_event_is_read_back(event: Event) -> None:
    line = encode(event)
    assert len(line.splitlines()) == 1
    assert repr(decode(line)) == repr(event)  # NaN is not equal to itself, but looks it


@given(st.lists(events, max_size=8))
def test_a_journal_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, written: list[Event]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "events.jsonl"
    journal = Journal(path)
    for event in written:
        journal(event)
    journal.close()
    assert repr(list(read_all(path))) == repr(written)


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "3", '{"event":"Nothing"}', '{"event":"RunEnded"}', '{"time":1}']
)
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


def test_the_newest_start_is_found_next_to_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert newest_start(path) is None
    first, second = (RunStarted(1.0, {}, {"n": str(n)}, n) for n in (1, 2))
    path.write_bytes(b"".join(map(encode_line, (first, steps(1, 3), second, steps(4, 6)))))
    assert newest_start(path) == second
    with path.open("ab") as file:
        file.write(encode_line(first)[:30] + b"\xff\n")
    assert newest_start(path) == second


def test_event_after_the_end_is_not_written_into_another_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    journal.close()
    with (tmp_path / "other").open("wb"):  # It gets the number of the journal's file.
        journal(Noticed(1.0, "late"))
        journal.sync()
    assert (tmp_path / "other").read_bytes() == b""


def test_a_window_is_on_the_disk_at_once_and_together(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    for window in (1, 2):
        journal(
            StepsLogged(
                [2 * window, 2 * window + 1],
                [1000.0 * window - 1, 1000.0 * window],
                {"loss": [1.0, 1.0]},
            )
        )
        journal(StepsLogged([2 * window + 1], [1000.0 * window], {"throughput": [1.0]}))
        assert len(read(path)[0]) == 2 * window
    journal.close()


def test_steps_that_follow_each_other_quickly_wait_for_the_next_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    for step, time in enumerate((1000.0, 1000.1, 1000.4, 1000.6, 1000.7)):
        journal(StepsLogged([step], [time], {"loss": [1.0]}))
        assert len(read(path)[0]) == (1, 1, 1, 4, 4)[step]
    journal.flush()
    assert len(read(path)[0]) == 5
    journal(StepsLogged([5], [1000.8], {"loss": [1.0]}))
    journal(ended())
    assert len(list(read_all(path))) == 7
    journal.close()


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.integers(1, 5000))
def test_reading_in_pieces_reads_each_event_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], limit: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "events.jsonl"
    path.write_text("".join(encode(ended("x" * length)) + "\n" for length in lengths))
    found: list[Event] = []
    offset = -1
    behind = 0
    while behind != offset:
        offset = behind
        events, behind = read(path, offset, limit)
        found += events
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
    assert [event.steps[0] for event in seen if isinstance(event, StepsLogged)] == list(
        range(count)
    )


def test_a_full_disk_loses_nothing_once_there_is_room(tmp_path: Path) -> None:
    room = {"left": 30}

    def write(descriptor: int, data: Any) -> int:
        if room["left"] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = os.write(descriptor, bytes(data)[: room["left"]])
        room["left"] -= count
        return count

    journal = Journal(tmp_path / "events.jsonl", write=write)
    for number in range(5):
        journal(ended(str(number)))
    room["left"] = 1 << 20
    journal(ended("5"))
    journal.close()
    reasons = [
        event.reason for event in read_all(tmp_path / "events.jsonl") if isinstance(event, RunEnded)
    ]
    assert reasons == list("012345")


def test_disk_that_stays_full_costs_counted_metrics_and_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    room = [True]

    def write(descriptor: int, data: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(descriptor, data)

    folder = make_folder(tmp_path)
    journal = Journal(folder.events, most_waiting_bytes=1000, write=write)
    log = RunLog(folder, journal, 1, None)
    room[0] = False
    for number in range(1, 101):
        log(steps(number, number))
    log(saved(folder, 50))
    assert capsys.readouterr().out.count("the disk has been full for so long") == 1
    room[0] = True
    log(steps(101, 101))
    log(ended())
    log.close()
    found = list(read_all(folder.events))
    kept = [event.steps[0] for event in found if isinstance(event, StepsLogged)]
    (told,) = [event.text for event in found if isinstance(event, Noticed)]
    assert kept[:3] == [1, 2, 3] and kept[-1] == 101, (
        "what fitted, and what came once there was room"
    )
    assert f"{101 - len(kept) + 1} events" in told, (
        "each is counted, the notice that found no room, too"
    )
    assert isinstance(found[-1], RunEnded) and any(
        isinstance(event, CheckpointSaved) for event in found
    )


def test_failing_fsync_stops_no_journal(tmp_path: Path) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    journal = Journal(tmp_path / "events.jsonl", fsync=full)
    journal(ended())
    journal.close()
    assert list(read_all(tmp_path / "events.jsonl")) == [ended()]


def test_killed_writer_loses_only_an_unfinished_window(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path; from rankzero.events import *\n"
        "from rankzero.run_store.journal import Journal; journal = Journal(Path(sys.argv[1]))\n"
        "journal(StepsLogged([1], [1.0], {})); journal(Evaluated(0.0, 1, {}, True))\n"
        "journal(StepsLogged([2], [1.1], {}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-P", "-c", code, path], check=False)
    assert list(read_all(path)) == [StepsLogged([1], [1.0], {}), Evaluated(0.0, 1, {}, True)]


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\x00", b"\x00" * 5000, b'{"event":"RunEnded"}', b"[" * 100]
)
def test_damaged_line_is_skipped(damage: bytes, tmp_path: Path) -> None:
    path, line = tmp_path / "events.jsonl", encode(ended()).encode()
    path.write_bytes(b"\n".join([line, damage, line, b""]))
    assert list(read_all(path)) == [ended(), ended()]
    assert read(path, limit_bytes=64)[1] == len(line) + 1


@given(events, st.integers(0), st.integers(1, 255))
def test_any_changed_byte_of_a_line_is_detected(
    tmp_path_factory: pytest.TempPathFactory, event: Event, where: int, change: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "events.jsonl"
    line = bytearray(encode_line(event))
    line[where % (len(line) - 1)] ^= change
    path.write_bytes(bytes(line) + encode_line(ended()))
    assert list(read_all(path)) == [ended()]


def test_a_line_larger_than_the_limit_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path, line = tmp_path / "events.jsonl", encode(ended("x" * 3_000_000))
    path.write_text(line[:-1])
    assert read(path) == ([], 0)
    path.write_text(line + "\n" + line[:9])
    events, offset = read(path)
    assert len(events) == 1 and offset == len(line) + 1 and read(path, offset) == ([], offset)


def test_missing_journal_is_empty(tmp_path: Path) -> None:
    assert read(tmp_path / "none", 7) == ([], 7) and list(read_all(tmp_path / "none")) == []


def test_identity_is_read_back(tmp_path: Path) -> None:
    identity = Identity("a-run", "u", "digits", "sqlite:///x.db", experiment_file="/x/digits.py")
    folder = RunFolder.create(tmp_path / "runs", identity)
    assert folder.identity == identity
    with pytest.raises(FileExistsError):
        RunFolder.create(tmp_path / "runs", identity)
    assert RunFolder.open_or_create(tmp_path / "runs", identity).path == folder.path


@pytest.mark.parametrize(
    "begun", ["events.jsonl", "checkpoints/step_00000001", "system-node_1.jsonl"]
)
def test_one_command_takes_over_the_folder_of_a_run_that_never_began(
    begun: str, tmp_path: Path
) -> None:
    identities = [Identity("a-run", str(n), "digits", "sqlite:///x.db") for n in range(8)]
    folder = RunFolder.create(tmp_path / "runs", identities[0])
    (folder.path / "run.json").unlink()

    def create(identity: Identity) -> Identity | None:
        with contextlib.suppress(FileExistsError):
            return RunFolder.create(tmp_path / "runs", identity).identity
        return None

    with ThreadPoolExecutor() as threads:
        made = [one for one in threads.map(create, identities) if one]
    assert made == [folder.identity]
    (folder.path / "run.json").unlink()
    (folder.path / begun).mkdir(parents=True)
    assert create(identities[0]) is None


def test_writers_with_one_process_id_do_not_disturb_each_other(tmp_path: Path) -> None:
    """As pods do: the command is process 1 in each, and they share the folder."""
    texts, path = [str(number) * 50_000 for number in range(4)], tmp_path / "f"

    def write(text: str) -> bool:
        for _ in range(20):
            write_atomically(path, text)
            if path.read_text() not in texts:
                return False
        return True

    with ThreadPoolExecutor(len(texts)) as threads:
        assert all(threads.map(write, texts))
    assert list(tmp_path.iterdir()) == [path]


def test_an_atomic_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    write_atomically(path := tmp_path / "f", "one")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


def test_a_notice_on_the_disk_that_is_full_is_in_the_journal_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path)
    log = RunLog(folder, Journal(folder.events), 1, None)
    with Path("/dev/full").open("w") as full:  # where torchrun's agent sends a rank's output
        monkeypatch.setattr("sys.stdout", full)
        log.notice("a checkpoint could not be written")
        log.close()
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    (noticed,) = read_all(folder.events)
    assert isinstance(noticed, Noticed) and noticed.text == "a checkpoint could not be written"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "closed"])
def test_a_notice_that_the_output_cannot_hold_is_in_the_journal_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    folder, text = make_folder(tmp_path), "no label called ‘é’"
    log = RunLog(folder, Journal(folder.events), 1, None)
    with (tmp_path / "output").open(
        "w", encoding="ascii" if encoding == "closed" else encoding
    ) as output:
        if encoding == "closed":
            output.close()
        monkeypatch.setattr("sys.stdout", output)
        log.notice(text)
        log.close()
        monkeypatch.undo()
    (noticed,) = read_all(folder.events)
    assert isinstance(noticed, Noticed) and noticed.text == text
    shown = {
        "ascii": b"note: no label called \\u2018\\xe9\\u2019\n",
        "latin-1": b"note: no label called \\u2018\xe9\\u2019\n",
    }
    assert (tmp_path / "output").read_bytes() == shown.get(encoding, b"")


def test_a_helping_machine_takes_over_the_name_that_rank_zero_gave_the_run(tmp_path: Path) -> None:
    mine = make_folder(tmp_path)  # made by this machine's launcher, for a --run-name
    told = dataclasses.replace(mine.identity, uuid="0" * 32)
    assert RunFolder.open_or_create(tmp_path / "runs", told).identity == told
    mine.events.touch()
    RunFolder.open_or_create(tmp_path / "runs", dataclasses.replace(told, uuid="1" * 32))
    assert mine.identity == told, "a run that has begun keeps its own"


def test_event_that_cannot_be_written_is_lost_alone_and_noticed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    log = RunLog(folder, Journal(folder.events), 1, None)
    log(steps(1, 1))
    log(dataclasses.replace(steps(2, 2), steps=[object()]))
    log(steps(3, 3))
    log.close()
    found = list(read_all(folder.events))
    assert [event.steps for event in found if isinstance(event, StepsLogged)] == [[1], [3]]
    assert [event.text for event in found if isinstance(event, Noticed)] == [
        "a StepsLogged is lost, since it cannot be written: "
        "Object of type object is not JSON serializable"
    ]


def test_each_attempt_is_found_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    # The first left its last event, the second nothing, the third its end.
    append(folder, started(1), steps(1, 3), started(2), started(3), steps(4, 6), ended())
    found = [type(event).__name__ for event in milestones(folder.events)]
    assert found == ["RunStarted", "StepsLogged", "RunStarted", "RunStarted", "RunEnded"]

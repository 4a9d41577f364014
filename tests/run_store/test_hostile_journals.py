"""Foreign lines in journals, run.json, delivery.json: skipped and counted, never a traceback."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.catalog import lookup
from rankzero.cli.commands import runs as runs_command
from rankzero.cli.display import diagnosis
from rankzero.events import Event, RunEnded, decode, encode
from rankzero.experiment import Goal
from rankzero.reporting import metric_table, run_report
from rankzero.reporting.progress_bar import ProgressModel, progress_panel
from rankzero.reporting.run_facts import fold
from rankzero.run_store import delivery_state, run_locks
from rankzero.run_store.attempt import is_written
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all, take
from rankzero.run_store.names import InvalidRunFolder
from rankzero.tracking import delivery_status
from support.fuzz import often, patient, seldom, thorough
from support.memory_store import MemoryStore, delivered
from support.runs import append, ended, evaluated, make_folder, started, steps

pytestmark = patient


@pytest.fixture(autouse=True, scope="module")
def disk_in_a_hurry() -> Iterator[None]:
    """Nothing is synced to the disk: thousands of journals are written here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


scalars = st.sampled_from(
    [None, True, "x", "", 1, -1, 2**80, 1e308, float("nan"), float("inf"), [], {}, [[1]], {"a": 1}]
)
values = scalars | st.text(max_size=5) | st.floats() | st.lists(scalars, max_size=3)
tables = st.dictionaries(
    st.sampled_from(["val/accuracy", "train/loss", "a", ""]) | st.text(max_size=4),
    values,
    max_size=3,
)
FIELDS = (
    "time",
    "params",
    "environment",
    "attempt",
    "step",
    "total_steps",
    "steps",
    "times",
    "metrics",
    "best",
    "path",
    "sample",
    "status",
    "reason",
    "error",
    "text",
)
KNOWN = [started(), steps(1, 3), evaluated(2, 0.5), ended()]


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Return a line that RankZero did not write: odd fields, a torn line, any bytes."""
    event = json.loads(encode(draw(st.sampled_from(KNOWN))))
    match draw(st.integers(0, 4)):
        case 0:
            event[draw(st.sampled_from(FIELDS))] = draw(values | tables)
            return json.dumps(event).encode()
        case 1:
            text = json.dumps(event).encode()
            return text[: draw(st.integers(0, len(text)))]
        case 2:
            event["metrics"] = draw(
                tables
                | st.dictionaries(st.text(max_size=3), st.lists(values, max_size=3), max_size=3)
            )
            return json.dumps(event).encode()
        case 3:
            damaged = bytearray(json.dumps(event).encode())
            damaged[draw(st.integers(0, len(damaged) - 1))] = draw(st.integers(0, 255))
            return bytes(damaged)
        case _:
            return draw(
                st.binary(max_size=40)
                | st.sampled_from([b"[" * 3000, b'{"event":' * 900, b"9" * 5000, b"\x00" * 9])
            )


@often
@given(st.lists(lines(), max_size=6))
def test_every_reader_of_a_journal_bears_every_line(
    tmp_path_factory: pytest.TempPathFactory, foreign: list[bytes]
) -> None:
    folder = make_folder(tmp_path_factory.mktemp("run"))
    append(folder, started(), steps(1, 3))
    with folder.events.open("ab") as file:
        file.write(b"".join(line.replace(b"\n", b"") + b"\n" for line in foreign))
    append(folder, evaluated(3, 0.75), ended(metrics={"samples_per_second": 9.0}))
    tracker = MemoryStore()
    done = delivered(folder, tracker).state
    assert tracker.status in ("FINISHED", "FAILED", "KILLED") and not done.retries.failures, done
    assert tracker.curve("train/loss").keys() >= {1, 2, 3} and 3 in tracker.curve("val/accuracy")
    assert "The report could not be written" not in tracker.tags["mlflow.note.content"]
    counted = sum(
        not _is_event(line)
        for line in foreign
        if line.replace(b"\n", b"").decode(errors="replace").strip()
    )
    assert done.problems.rejected >= bool(counted)
    [listed] = lookup.listed(folder.path.parent)
    assert listed.status == "FINISHED" and all(
        isinstance(cell, str) for cell in runs_command._cells(listed, "")
    )
    _show(list(read_all(folder.events)))
    assert all(isinstance(line, str) for _, lines in diagnosis.sections(folder) for line in lines)


@seldom
@given(st.lists(lines(), max_size=6))
def test_a_table_of_metrics_is_made_of_any_journal(
    tmp_path_factory: pytest.TempPathFactory, foreign: list[bytes]
) -> None:
    folder = make_folder(tmp_path_factory.mktemp("run"))
    append(folder, started(), steps(1, 3))
    with folder.events.open("ab") as file:
        file.write(b"".join(line.replace(b"\n", b"") + b"\n" for line in foreign))
    append(folder, ended())
    assert "train/loss" in metric_table.metrics(folder).columns


def _is_event(line: bytes) -> bool:
    try:
        decode(line.replace(b"\n", b"").decode(errors="replace"))
    except ValueError:
        return False
    return True


def _show(events: list[Event]) -> None:
    view = ProgressModel(Goal("val/accuracy", "max"))
    for event in events:
        view(event)
        view.facts(), progress_panel(view)
        if isinstance(event, RunEnded):
            list(view.results(event)), run_report.markdown("x", fold(events), event)


@thorough
@given(tables | values, st.sampled_from(FIELDS))
def test_a_field_of_any_value_is_an_event_or_is_refused(value: Any, field: str) -> None:
    for event in KNOWN:
        fields = json.loads(encode(event))
        if field in fields:
            fields[field] = value
            assert _is_event(json.dumps(fields).encode()) in (True, False)


def test_foreign_lines_are_counted_and_reported(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(), steps(1, 2))
    with folder.events.open("ab") as file:
        file.write(b"torn {\n\nnot ours\n" + b"[" * 100_000 + b"\n")
    append(folder, ended())
    assert take(folder.events).foreign == 3
    tracker = MemoryStore()
    done = delivered(folder, tracker)
    assert tracker.curve("train/loss").keys() == {1, 2} and done.state.problems.rejected == 1
    assert (
        "events.jsonl before byte" in done.state.problems.reasons[0]
        and "3 lines are no events" in done.state.problems.reasons[0]
    )
    assert "3 lines are no events" in tracker.tags["mlflow.note.content"]
    assert "3 lines are no events" in tracker.tags["rankzero.rejected"]
    assert any("3 lines are no events" in line for line in delivery_status.status(folder).trouble)


STATE_FIELDS = (
    *("run_id", "experiment_id", "attempt", "offsets", "marks", "floor", "sample_offset"),
    "attempt_offset",
    *("evaluated", "waiting", "ending", "uploaded", "infinite", "goal", "best", "delivered"),
    *("skipped", "rejected", "reasons", "owners", "altered", "remarks", "failures", "outages"),
    *("away_seconds", "error", "pending_bytes", "ended", "updated", "page", "told", "claim"),
)


@often
@given(
    st.text(max_size=60)
    | st.dictionaries(st.sampled_from([*STATE_FIELDS, "x"]), values).map(json.dumps)
)
def test_any_state_file_is_read_or_replaced(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = make_folder(tmp_path_factory.mktemp("run"))
    append(folder, started(), steps(1, 3), ended())
    delivery_state.path_of(folder, 0).write_bytes(text.encode("utf-8", "surrogatepass"))
    loaded = delivery_state.load(delivery_state.path_of(folder, 0))
    assert (
        isinstance(loaded.cursor.offsets, dict)
        and isinstance(loaded.queue.waiting, tuple)
        and isinstance(loaded.problems.rejected, int)
    )
    assert lookup.listed(folder.path.parent)
    assert delivery_status.status(folder).pending >= 0


def test_waiting_uploads_that_are_no_events_are_set_aside(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(), steps(1, 3), ended())
    planted = {"waiting": ["{", "[" * 5000, encode(started())], "ending": "no end"}
    delivery_state.path_of(folder, 0).write_text(json.dumps(planted))
    tracker = MemoryStore()
    done = delivered(folder, tracker)
    assert (
        tracker.status == "FINISHED"
        and done.state.problems.rejected >= 2
        and not done.state.retries.failures
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"name": 3}',
        '{"nobody": "x"}',
        "[" * 5000,
        "\x00",
        '{"name": "../up", "uuid": "u", "experiment": "e", "tracking_uri": "x"}',
        '{"name": "a", "uuid": 3, "experiment": "e", "tracking_uri": "x"}',
        '{"name": "a", "uuid": "u", "experiment": "e", "tracking_uri": "x", "parent": "/etc"}',
    ],
)
def test_foreign_identity_is_an_error_and_not_listed(text: str, tmp_path: Path) -> None:
    sound, broken = make_folder(tmp_path), RunFolder(tmp_path / "runs" / "broken")
    append(sound, started(), ended())
    broken.path.mkdir()
    (broken.path / "run.json").write_text(text)
    with pytest.raises(InvalidRunFolder, match=r"broken/run\.json"):
        _ = broken.identity
    assert [one.name for one in lookup.listed(tmp_path / "runs")] == [sound.path.name]
    assert lookup.find(tmp_path / "runs", "some-id") is None


@pytest.mark.parametrize(
    "change",
    [
        *({"time": one} for one in (None, math.inf, math.nan, 10**400, -1.0)),
        *({"token": one} for one in ("a\0b", "\ud800", "../up", "")),
        *({"events_offset": one} for one in ("x", -1, 10**30)),
        {"pid": "1"},
        {"host": 3},
    ],
)
def test_a_foreign_claim_is_none(change: dict[str, Any], tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(), ended())
    claim = dataclasses.asdict(run_locks.claim(folder, 0))
    (folder.path / "recorder.json").write_text(json.dumps({**claim, **change}))
    assert not is_written(folder) and not delivery_status.recorder_lives(folder)
    assert delivered(folder, MemoryStore()).complete


def test_children_outside_of_the_store_are_skipped(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder.path / "children.txt").write_bytes(
        b"../up\n/etc\n..\n.\nfine-1\n\xff\xfe\n" + b"x" * 5000
    )
    folder.add_child("fine-2")  # after a line that a power loss cut
    assert [child.path.name for child in folder.children] == ["fine-1", "fine-2"]


def test_a_journal_of_rubbish_takes_a_moment(tmp_path: Path) -> None:
    dice = random.Random(0)
    path = tmp_path / "events.jsonl"
    path.write_bytes(dice.randbytes(2_000_000))
    start = time.process_time()
    assert list(read_all(path)) == []
    assert time.process_time() - start < 10


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_duration_of_any_length_can_be_shown(seconds: float) -> None:
    assert run_report.duration(seconds)

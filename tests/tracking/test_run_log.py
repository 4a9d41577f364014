"""RunLog: a failure of the journal is reported, and never ends the training."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rankzero.errors import UserError
from rankzero.events import Evaluated, Noticed
from rankzero.ranks import Ranks
from rankzero.run_store.journal import Journal, read_all
from rankzero.tracking.run_log import RunLog
from support.runs import T0, append, ended, evaluated, make_folder, started


class Unreadable(dict[str, float]):
    """Metrics that raise when the journal encodes them."""

    def __init__(self, error: Exception) -> None:
        super().__init__(x=1.0)
        self.error = error

    def items(self) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [RuntimeError("of its own"), OSError("full"), MemoryError(), TypeError("no JSON")],
    ids=lambda error: type(error).__name__,
)
def test_an_unexpected_error_costs_one_event_and_is_noticed(
    tmp_path: Path, error: Exception
) -> None:
    folder = make_folder(tmp_path)
    log = RunLog(folder, Journal(folder.events), 1, None)
    odd = Evaluated(T0, 1, Unreadable(error), False)
    for event in (evaluated(1, 0.5), odd, evaluated(2, 0.6), ended()):
        log(event)
    log.close()
    *_, notice, second, end = read_all(folder.events)
    assert isinstance(notice, Noticed) and notice.text.startswith("a Evaluated is lost")
    assert (second, end) == (evaluated(2, 0.6), ended())


def test_an_interrupt_is_no_failure_of_the_journal(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)

    def interrupted(descriptor: int, data: Any) -> int:
        data.clear()
        raise KeyboardInterrupt

    log = RunLog(folder, Journal(folder.events, write=interrupted), 1, None)
    with pytest.raises(KeyboardInterrupt):
        log(ended())
    log.close()
    assert list(read_all(folder.events)) == []


def test_a_notice_of_the_loop_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path)
    log = RunLog(folder, Journal(folder.events), 1, None)
    log(Noticed(T0, "a helper moves"))
    log.close()
    assert list(read_all(folder.events)) == [Noticed(T0, "a helper moves")]
    assert capsys.readouterr().out == "note: a helper moves\n"


def test_an_output_without_flush_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path)
    log = RunLog(folder, Journal(folder.events), 1, None)
    monkeypatch.setattr("sys.stdout", object())
    log.notice("odd")
    log.close()
    assert [event.text for event in read_all(folder.events) if isinstance(event, Noticed)] == [
        "odd"
    ]


def test_the_end_is_written_on_a_disk_that_refuses_for_a_moment(tmp_path: Path) -> None:
    refused_until = [0.0]

    def write(descriptor: int, data: Any) -> int:
        if time.monotonic() < refused_until[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(descriptor, data)

    folder = make_folder(tmp_path)
    log = RunLog(folder, Journal(folder.events, write=write), 1, None)
    log(evaluated(1, 0.5))
    refused_until[0] = time.monotonic() + 0.5
    log(ended())
    log.close()
    assert list(read_all(folder.events)) == [evaluated(1, 0.5), ended()]


def test_all_tags_of_an_attempt_are_an_artifact(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    log = RunLog(folder, Journal(folder.events), 1, None)
    log(started())
    log.close()
    tags = json.loads((folder.artifacts / "provenance/tags.json").read_text())
    assert tags == started().environment


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    append(folder)
    log = RunLog(folder, None, 0, None)
    log(ended())
    log.notice("unseen")
    log.flush()
    log.close()
    assert list(read_all(folder.events)) == []


def test_a_helping_machine_keeps_out_of_another_run_of_that_name(tmp_path: Path) -> None:
    mine = make_folder(tmp_path)
    append(mine, started(), ended())
    told = dataclasses.replace(mine.identity, uuid="0" * 32)
    helper = Ranks(rank=1, world_size=2, node_rank=1)
    with pytest.raises(UserError, match="another run"):
        RunLog.open(tmp_path / "runs", told, helper, [])
    assert not (mine.path / "recorder-node_1.json").exists()

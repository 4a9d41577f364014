"""Who leads, and who lives: with real processes, and beats of other machines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from rankzero.tuning import members
from rankzero.tuning.members import BEAT, DEAD_SECONDS, LEADER, Members


class Board:
    """Facts in memory."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def note(self, name: str, fact: Any) -> None:
        self.facts[name] = fact


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    monkeypatch.setattr(members, "SETTLE_SECONDS", 0.0)
    return Board()


def named(pid: int) -> str:
    return f"{members.machine()} {pid} {members.claims.process_start(pid)}"


def test_the_first_leads_and_stays_leader(board: Board) -> None:
    assert Members(board).lead() and Members(board).lead()
    assert board.facts[LEADER] == members.name() and Members(board).led


def test_who_comes_later_helps_as_long_as_the_leader_lives(board: Board) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        board.note(LEADER, named(other.pid))
        assert not Members(board).lead()
    assert Members(board).lead(), "the leader is dead: the next takes over"


def test_a_process_that_has_anothers_number_is_not_it(board: Board) -> None:
    pid = os.getpid()
    assert members.lives(named(pid)) and not members.lives(f"{members.machine()} {pid} 1")


@pytest.mark.parametrize(("silent", "alive"), [(1.0, True), (DEAD_SECONDS + 1, False)])
def test_other_machines_live_by_their_beat(board: Board, silent: float, alive: bool) -> None:
    far = "elsewhere/1234/5 77 8"
    board.note(LEADER, far)
    board.note(BEAT + far, time.time() - silent)
    assert Members(board).led == alive and Members(board).lead() != alive
    assert members.host_of(far) == "elsewhere"


def test_who_never_said_anything_is_dead(board: Board) -> None:
    assert (
        not Members(board).live("elsewhere/1/2 3 4")
        and not Members(board).live(None)
        and not Members(board).live("")
    )


def test_a_beat_is_there_at_once_and_ends_with_the_block(board: Board) -> None:
    with Members(board).beating():
        deadline = time.monotonic() + 5
        while BEAT + members.name() not in board.facts and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.time() - board.facts[BEAT + members.name()] < 5
    assert "rankzero-heartbeat" not in [thread.name for thread in threading.enumerate()]

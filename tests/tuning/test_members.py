"""The leader and the live members: with real processes, and heartbeats of other machines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from rankzero.run_store.run_locks import process_start
from rankzero.tuning import members
from rankzero.tuning.members import BEAT, DEAD_SECONDS, LEADER

MACHINE = members.own_name().rsplit(" ", 2)[0]


class Board:
    """Facts in memory."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def note(self, name: str, fact: Any) -> None:
        self.facts[name] = fact


@pytest.fixture
def board() -> Board:
    return Board()


def named(pid: int) -> str:
    return f"{MACHINE} {pid} {process_start(pid)}"


def test_the_first_leads_and_stays_leader(board: Board) -> None:
    assert members.lead(board, 0.0) and members.lead(board, 0.0)
    assert board.facts[LEADER] == members.own_name() and members.has_leader(board)


def test_a_later_process_leads_only_after_the_leader_died(board: Board) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        board.note(LEADER, named(other.pid))
        assert not members.lead(board, 0.0)
    assert members.lead(board, 0.0), "the leader is dead: the next takes over"


def test_a_reused_process_number_is_not_the_same_member(board: Board) -> None:
    pid = os.getpid()
    assert members.is_alive(Board(), named(pid))
    assert not members.is_alive(Board(), f"{MACHINE} {pid} 1")


@pytest.mark.parametrize(("silent", "alive"), [(1.0, True), (DEAD_SECONDS + 1, False)])
def test_members_on_other_machines_are_alive_by_their_heartbeat(
    board: Board, silent: float, alive: bool
) -> None:
    far = "elsewhere/1234/5 77 8"
    board.note(LEADER, far)
    board.note(BEAT + far, time.time() - silent)
    assert members.has_leader(board) == alive and members.lead(board, 0.0) != alive


def test_a_member_without_a_heartbeat_is_dead(board: Board) -> None:
    assert (
        not members.is_alive(board, "elsewhere/1/2 3 4")
        and not members.is_alive(board, None)
        and not members.is_alive(board, "")
    )


def test_heartbeats_start_at_once_and_end_with_the_block(board: Board) -> None:
    with members.heartbeats(board):
        deadline = time.monotonic() + 5
        while BEAT + members.own_name() not in board.facts and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.time() - board.facts[BEAT + members.own_name()] < 5
    assert "rankzero-heartbeat" not in [thread.name for thread in threading.enumerate()]

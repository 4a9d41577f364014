"""The leader and the live members, by locks next to SQLite's file and in PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from rankzero.errors import RunFailed, UserError
from rankzero.tuning import members
from rankzero.tuning.members import LEADER, Members
from rankzero.tuning.store_locks import _DIALECTS, ServerLocks, open_locks
from support.company import opened

# Leads a study until its input ends, or it is killed.
LEADS = """
import sys
from rankzero.tuning.members import Members
mine = Members("s", sys.argv[1])
mine.join()
print(mine.take_lead(), mine.own_name, flush=True)
input()
"""


@pytest.fixture(params=["sqlite", "journal", "postgres"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres"))
    suffix = "db" if request.param == "sqlite" else "log"
    return f"{request.param}:///{tmp_path / f'of a, ä.{suffix}'}"


@pytest.fixture
def mine(storage: str) -> Iterator[Members]:
    found = Members("s", storage)
    yield found
    found.close()


def soon(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def test_a_killed_leader_is_dead_at_once_and_the_next_leads(storage: str, mine: Members) -> None:
    words = [sys.executable, "-c", LEADS, storage]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        leads, other = process.stdout.readline().strip().split(" ", 1)
        assert leads == "True" and mine.has_leader() and mine.is_alive(other)
        assert not mine.take_lead() and not mine.leads
        process.kill()
        assert soon(lambda: not mine.has_leader() and not mine.is_alive(other))
    assert mine.take_lead() and mine.take_lead() and mine.leads


def test_who_leaves_leads_no_more_and_other_studies_have_other_leaders(
    storage: str, mine: Members
) -> None:
    second, elsewhere = Members("s", storage), Members("another", storage)
    mine.join()
    assert mine.take_lead() and not second.take_lead() and elsewhere.take_lead()
    assert second.is_alive(mine.own_name) and not second.is_alive(elsewhere.own_name)
    mine.close()
    assert soon(second.take_lead) and not second.is_alive(mine.own_name)
    second.close()
    elsewhere.close()


def test_members_that_an_older_version_named_are_dead(mine: Members) -> None:
    assert not mine.is_alive("elsewhere/1234/5 77 8") and not mine.is_alive("")


def end_sessions(server: str) -> None:
    """End the sessions that hold locks, and wait until they are gone."""
    ends = "SELECT pg_terminate_backend(pid, 20000) FROM pg_locks WHERE locktype = 'advisory'"
    with create_engine(server).connect() as store:
        store.execute(text(ends))


def test_locks_that_a_server_ended_are_taken_again(postgres: str) -> None:
    locks = ServerLocks(postgres, _DIALECTS["postgresql"], keep_seconds=0.05)
    other = open_locks(postgres)
    assert locks.take(2**61 + 7) and other.is_taken(2**61 + 7)
    end_sessions(postgres)
    # To take it here shows the error of a server that lets nobody in.
    assert soon(lambda: other.is_taken(2**61 + 7)), locks.take(2**61 + 7)
    locks.close()
    other.close()


def test_a_server_that_restarts_makes_no_member_dead(postgres: str) -> None:
    locks, other, watcher = (
        ServerLocks(postgres, _DIALECTS["postgresql"], keep_seconds=1.0) for _ in range(3)
    )
    assert locks.take(2**61 + 8) and other.take(2**61 + 9)
    other.close()
    assert soon(lambda: not locks.is_taken(2**61 + 9))
    end_sessions(postgres)
    assert soon(lambda: locks.is_taken(2**61 + 9)), "its owner may be about to take it again"
    assert watcher.is_taken(2**61 + 8) and not watcher.is_taken(2**61 + 9)
    assert soon(lambda: not locks.is_taken(2**61 + 9))
    locks.close()
    watcher.close()


def test_a_process_that_lost_the_lead_to_another_one_stops(tmp_path: Path) -> None:
    study = opened(tmp_path)
    assert members.lead(study)
    members.require_lead(study)
    study.note(LEADER, "elsewhere 1 2")
    with pytest.raises(RunFailed, match="another process leads study s"):
        members.require_lead(study)


def test_a_store_without_locks_is_refused() -> None:
    with pytest.raises(UserError, match="PostgreSQL to share"):
        open_locks("mssql+pyodbc://user:planted@host/db")

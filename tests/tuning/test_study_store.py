"""A study in a journal: as in a database, whatever a killed or cut writer leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.storages import RDBStorage
from sqlalchemy import create_engine, text

from rankzero.errors import UserError
from rankzero.search_ranges import LogUniform
from rankzero.tuning.options import SearchOptions
from rankzero.tuning.session import Session
from rankzero.tuning.study import Study, find_study, open_study
from rankzero.tuning.study_store import connect_again, open_store
from support.company import SPACE
from support.fake_launcher import FakeLauncher

# Holds the lock of a journal until it is killed.
HOLDS = """
import sys, time
from rankzero.tuning.study_store import _AppendLock
_AppendLock(sys.argv[1]).acquire()
print("held", flush=True)
time.sleep(60)
"""


def opened(path: Path) -> Study:
    return open_study(f"journal:///{path}", "s", sampler="tpe", pruner="asha", seed=0)


def test_search_in_a_journal_is_the_one_in_a_database(tmp_path: Path) -> None:
    told = []
    for url in (f"journal:///{tmp_path / 'studies.log'}", f"sqlite:///{tmp_path / 'studies.db'}"):
        study = open_study(url, "s", sampler="tpe", pruner="asha", seed=0)
        study.draw_from(SPACE.parameters())
        options = SearchOptions(trials=8)
        Session(study, SPACE, [FakeLauncher()], options, lambda text: None).run()
        study.members.close()
        trials = find_study(url, "s").trials()
        told.append([(one.number, one.state, one.parameters, one.value) for one in trials])
    assert told[0] == told[1] and len(told[0]) >= 8


def test_a_study_outlives_the_end_of_its_connections(postgres: str) -> None:
    engine = create_engine(postgres, isolation_level="AUTOCOMMIT")
    with engine.connect() as server:
        server.execute(text("CREATE DATABASE cut"))  # other tests' database has MLflow's tables
        url = f"{postgres.rpartition('/')[0]}/cut"
        study = open_study(url, "cut", sampler="tpe", pruner="asha", seed=0)
        study.note("fact", 1)
        others = "FROM pg_stat_activity WHERE datname = 'cut'"
        assert server.execute(text(f"SELECT pg_terminate_backend(pid) {others}")).all()
    engine.dispose()
    assert study.facts["fact"] == 1 and not study.trials()
    study.note("fact", 2)
    assert study.facts["fact"] == 2
    study.members.close()


def test_a_server_that_restarts_is_asked_again() -> None:
    refusals: list[Exception] = [ConnectionRefusedError("starting up")]

    def connect(*arguments: str, **settings: int) -> tuple[object, ...]:
        if refusals:
            raise refusals.pop()
        return *arguments, settings

    dialect: Any = SimpleNamespace(
        connect=connect, loaded_dbapi=SimpleNamespace(OperationalError=ConnectionRefusedError)
    )
    assert connect_again(dialect, None, ["host"], {"port": 1}) == ("host", {"port": 1})
    refusals.append(ValueError("no port"))
    with pytest.raises(ValueError, match="no port"):
        connect_again(dialect, None, [], {})


def test_two_searches_may_make_the_same_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    make_tables = RDBStorage.__init__

    def other_first(*given: Any, **named: Any) -> None:
        monkeypatch.setattr(RDBStorage, "__init__", make_tables)
        RDBStorage(url)
        with create_engine(url).begin() as connection:
            connection.execute(text("INSERT INTO alembic_version SELECT * FROM alembic_version"))

    monkeypatch.setattr(RDBStorage, "__init__", other_first)
    with open_store(url) as store:
        assert store.get_all_studies() == []


@pytest.mark.parametrize("tail", [b'{"op_code":2,"worker', b'{"o', b"\0" * 30])
def test_line_that_a_killed_process_began_is_cut(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "studies.log"
    opened(path).note("first", 1)
    with path.open("ab") as file:
        file.write(tail)
    assert find_study(f"journal:///{path}", "s").facts["first"] == 1
    opened(path).note("second", 2)
    facts = find_study(f"journal:///{path}", "s").facts
    assert facts["first"] == 1 and facts["second"] == 2


def test_killed_process_holds_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "studies.log"
    study = opened(path)
    words = [sys.executable, "-c", HOLDS, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    study.note("after", 1)
    assert time.monotonic() - began < 5 and study.facts["after"] == 1


FOREIGN = (b"someone's notes", b"hello\n", b"a line\nanother", b"SQLite format 3\0\1", b"\n\n")


@pytest.mark.parametrize("content", FOREIGN)
def test_foreign_file_is_refused_and_not_changed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be used.*--storage"):
        opened(path)
    assert path.read_bytes() == content


def test_two_processes_share_a_journal(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "studies.log"), opened(tmp_path / "studies.log")
    for study in (first, second):
        study.draw_from({"lr": LogUniform(0.01, 0.1)})
    numbers = [study.ask() for study in (first, second, first, second)]
    assert numbers == [0, 1, 2, 3] and len(first.trials()) == len(second.trials()) == 4
    first.members.close()
    assert second.recover() == [0, 2] and second.abandoned == [0, 2]


def test_damaged_last_line_is_refused_and_not_buried(tmp_path: Path) -> None:
    path = tmp_path / "studies.log"
    opened(path).note("first", 1)
    before = path.read_bytes()
    path.write_bytes(before + b"x" * 20 + b"\n")
    with pytest.raises(Exception, match="is damaged"):
        find_study(f"journal:///{path}", "s").note("second", 2)
    assert path.read_bytes() == before + b"x" * 20 + b"\n"


def test_locks_of_members_are_not_optunas(tmp_path: Path) -> None:
    """Optuna would take a file with its lock's name for a killed process's, and remove it."""
    opened(tmp_path / "studies.log")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"studies.log", "studies.log.members"}


@pytest.mark.parametrize("url", ["journal:///", "journal://studies.log", "journal:studies.log"])
def test_url_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="journal:////folder"):
        open_study(url, "s", sampler="tpe", pruner="asha", seed=0)


def test_reader_of_a_journal_that_is_not_there_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        find_study(f"journal:///{tmp_path / 'mistyped.log'}", "s")
    assert not [*tmp_path.iterdir()]

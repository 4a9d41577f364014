"""The timeout of an upload grows with its size, that of metrics with the server's delays."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from mlflow.store.entities import PagedList

from rankzero.mlflow_store.client import MlflowRuns, connection
from rankzero.mlflow_store.client.connection import (
    MAX_FILE_SECONDS,
    MIN_FILE_SECONDS,
    STORED_BYTES_PER_SECOND,
    patience,
)
from support.runs import make_folder
from support.stores import Server
from torture.proxy import UPLOADS, Proxy

TIMEOUT, RETRIES = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


@pytest.mark.parametrize(
    ("bytes_", "seconds"),
    [
        (0, MIN_FILE_SECONDS),
        (60 * STORED_BYTES_PER_SECOND, MIN_FILE_SECONDS + 60),
        (1 << 40, MAX_FILE_SECONDS),
    ],
)
def test_a_larger_file_has_a_longer_timeout(tmp_path: Path, bytes_: int, seconds: int) -> None:
    (tmp_path / "sub").mkdir()
    with (tmp_path / "sub" / "state.pt").open("wb") as sparse:
        sparse.truncate(bytes_)
    before = os.environ[TIMEOUT]
    for path in (tmp_path, tmp_path / "sub" / "state.pt"):
        with patience(path):
            assert int(os.environ[TIMEOUT]) == seconds
        assert os.environ[TIMEOUT] == before
    with patience(tmp_path / "gone"):
        assert int(os.environ[TIMEOUT]) == MIN_FILE_SECONDS
    with patience():
        assert int(os.environ[TIMEOUT]) == MAX_FILE_SECONDS


def test_a_small_upload_without_an_answer_fails_within_seconds(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once took ten minutes, and the courier lived that long after the command."""
    monkeypatch.setenv(TIMEOUT, "1")
    (tmp_path / "config.yaml").write_text("lr: 1")
    server.start()
    server.wait()
    with Proxy(server.uri) as proxy:
        folder = make_folder(tmp_path, proxy.uri)
        monkeypatch.setattr(connection, "MIN_FILE_SECONDS", 1)
        tracker = MlflowRuns(proxy.uri)
        run = tracker.open_run(folder.identity, time.time())
        proxy.misbehave("hang", UPLOADS)
        began = time.monotonic()
        with pytest.raises(Exception, match=r"timed out|Max retries"):
            tracker.log_artifact(run.run_id, tmp_path / "config.yaml")
        assert time.monotonic() - began < 20
        proxy.behave()
        tracker.log_artifact(run.run_id, tmp_path / "config.yaml")


def test_a_server_that_is_slow_gets_more_time_and_then_less_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch that timed out is stored all the same. Sent again at once, it is stored twice."""
    monkeypatch.setenv(TIMEOUT, "1")
    limits = list[str]()

    def answer(seconds: float, error: Exception | None = None) -> None:
        limits.append(os.environ[TIMEOUT])
        assert os.environ[RETRIES] == ("1" if len(limits) < 3 else "0")
        time.sleep(seconds)
        if error is not None:
            raise error

    server: Any = SimpleNamespace(get_run=answer, log_batch=answer)
    client = connection._PatientClient(server)

    def ask(*how: Any) -> None:
        with contextlib.suppress(OSError):
            client.get_run(*how)

    ask(0.0, ConnectionRefusedError())
    ask(1.0)  # MLflow's second try was answered.
    assert os.environ[RETRIES] == "1"
    ask(2.0, TimeoutError())
    ask(1.1)
    client.log_batch(0.0)  # Another kind of request may be quicker.
    for _ in range(3):
        ask(0.0)
    assert limits == ["1", "1", "2", "4", "4", "4", "2", "1"] and os.environ[TIMEOUT] == "1"


def test_an_answer_that_was_late_once_changes_nothing_for_other_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a server that wakes. Each broken connection was then an outage for hours."""
    monkeypatch.setenv(TIMEOUT, "10")
    moments, asked = iter([0.0, 10.0, *[20.0] * 12]), list[tuple[str, str]]()
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    server: Any = Mock()
    server.log_batch = lambda: asked.append((os.environ[TIMEOUT], os.environ[RETRIES]))
    client = connection._PatientClient(server)
    client.create_run()
    for _ in range(6):
        client.log_batch()
    assert asked == [("20", "0"), *[("10", "0")] * 4, ("10", "1")]


def test_every_request_has_the_time_that_a_slow_server_needs(
    sqlite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask for the run was given up each time, so nothing was sent any more."""
    monkeypatch.setenv(TIMEOUT, "1")
    tracker, limits = MlflowRuns(sqlite), list[str]()

    def give_up(run_id: str) -> None:
        limits.append(os.environ[TIMEOUT])
        time.sleep(1.0 if len(limits) == 1 else 0.0)
        raise TimeoutError

    client: Any = tracker._client
    monkeypatch.setattr(client._client, "get_run", give_up)
    for ask in (tracker.require_run, tracker.description):
        with pytest.raises(TimeoutError):
            ask("0" * 32)
    assert limits == ["1", "2"]


def test_a_search_finds_what_is_on_all_pages() -> None:
    pages = {"": PagedList([1, 2], "a"), "a": PagedList([], "b"), "b": PagedList([3], None)}
    assert [*connection.all_found(lambda _, page_token="": pages[page_token], 7)] == [1, 2, 3]

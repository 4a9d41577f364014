"""Answers of a real server that end too early are errors, not answers that say nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository

from rankzero.faults import refusal
from rankzero.mlflow_store.client import MlflowRuns, OpenRun
from rankzero.mlflow_store.client import connection as client_module
from rankzero.mlflow_store.uris import TrackingError
from support.runs import T0, make_folder
from support.stores import Server

CUTS = {
    "within the first header": b"\r\ndat",
    "within a later header": b"\r\ncontent-ty",
    "before the length": b"content-length: ",
    "before the last line": b"\r\n\r",
    "before the body": b"\r\n\r\n",
    "within the body": b"\r\n\r\n{",
}


class Cutter:
    """Passes requests on to a server, and of answers to those with `only` in them what comes up to and with `until`."""

    def __init__(self, server: str) -> None:
        host, _, port = server.removeprefix("http://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.until: bytes | None = None  # all of the answer
        self.only = b""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self._target) as server:
            asked: list[bytes] = []
            threading.Thread(target=_pass_on, args=(client, server, asked), daemon=True).start()
            answer = b""
            while chunk := server.recv(1 << 16):
                cuts = self.until is not None and self.only in b"".join(asked)
                end = -1 if not cuts else (answer + chunk).lower().find(self.until or b"")
                client.sendall(
                    chunk if end < 0 else chunk[: end + len(self.until or b"") - len(answer)]
                )
                answer += chunk
                if end >= 0:
                    client.shutdown(socket.SHUT_RDWR)
                    return


def _pass_on(client: socket.socket, server: socket.socket, asked: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while request := client.recv(1 << 16):
            asked[:] = [*asked[-4:], request]
            server.sendall(request)


@pytest.fixture
def cutter(server: Server) -> Iterator[Cutter]:
    made = Cutter(server.uri)
    yield made
    made.close()


@pytest.fixture
def run(server: Server, tmp_path: Path) -> OpenRun:
    return MlflowRuns(server.uri).open_run(make_folder(tmp_path, server.uri).identity, T0)


@pytest.mark.parametrize("until", CUTS.values(), ids=CUTS)
def test_a_cut_answer_is_no_answer(
    until: bytes, cutter: Cutter, run: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker, identity = MlflowRuns(cutter.uri), make_folder(tmp_path, cutter.uri).identity
    cutter.until = until
    asked = {
        "find": lambda: tracker.find_open_run(identity),
        "open": lambda: tracker.open_run(identity, T0),
        "history": lambda: tracker.history(run.run_id, "train/loss"),
        "models": lambda: tracker.models.list_checkpoints(run),
        "tags": lambda: tracker.set_tags(run.run_id, {"a": "b"}),
    }
    for ask in asked.values():
        with pytest.raises(Exception, match=r"cut off|failed with exception") as raised:
            ask()
        assert refusal(raised.value) is None  # type: ignore[arg-type]
    cutter.until = None
    assert tracker.open_run(identity, T0) == tracker.find_open_run(identity)


@pytest.mark.parametrize("until", [b"\r\nconte", b"\r\n\r\n", b"lr"])
def test_a_download_that_ends_too_early_is_told(
    until: bytes, cutter: Cutter, run: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = MlflowRuns(cutter.uri)
    (tmp_path / "config.yaml").write_text("lr: 0.1")
    tracker.log_artifact(run.run_id, tmp_path / "config.yaml")
    cutter.until, cutter.only = until, b"GET /api/2.0/mlflow-artifacts/artifacts/"
    with pytest.raises(Exception, match="Failed to download"):
        tracker.download_artifact(run.run_id, "config.yaml", tmp_path / "back")
    cutter.until = None
    assert (
        tracker.download_artifact(run.run_id, "config.yaml", tmp_path / "back").read_text()
        == "lr: 0.1"
    )


def test_a_download_of_fewer_bytes_is_told(run: OpenRun, server: Server, tmp_path: Path) -> None:
    tracker = MlflowRuns(server.uri)
    (tmp_path / "config.yaml").write_text("lr: 0.1")
    tracker.log_artifact(run.run_id, tmp_path / "config.yaml")
    (stored,) = (server.root / "served").rglob(f"{run.run_id}/artifacts/config.yaml")
    listed = tracker._client.list_artifacts(run.run_id)
    stored.write_text("lr")
    tracker._client.list_artifacts = lambda *_: listed  # as it was while all of it was there
    with pytest.raises(TrackingError, match="2 of 7 bytes"):
        tracker.download_artifact(run.run_id, "config.yaml", tmp_path)


@pytest.mark.parametrize(
    "answer", [b"{}", b'{"error": "no such page"}', b"200 OK", b"", b"null", b"<html>log in</html>"]
)
def test_something_else_than_mlflow_is_told_from_it(answer: bytes, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_always, args=(listener, answer), daemon=True).start()
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
        tracker, identity = MlflowRuns(uri), make_folder(tmp_path, uri).identity
        run_id = "r" * 32
        for ask in (
            lambda: tracker.open_run(identity, T0),
            lambda: tracker.require_run(run_id),
            lambda: tracker.find_run(run_id),
        ):
            with pytest.raises(
                Exception, match=r"is it MLflow.s|none of MLflow.s|not in a valid JSON"
            ) as raised:
                ask()
            assert refusal(raised.value) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "taken"),
    [(b"", True), (b"{}", True), (b"<html>log in</html>", False), (b"null", False)],
)
def test_a_page_is_no_receipt_of_an_upload(
    answer: bytes, taken: bool, server: Server, tmp_path: Path
) -> None:
    MlflowRuns(server.uri)
    (tmp_path / "a.txt").write_text("hello")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_always, args=(listener, answer), daemon=True).start()
        port = listener.getsockname()[1]
        repository = HttpArtifactRepository(
            f"http://127.0.0.1:{port}/api/2.0/mlflow-artifacts/artifacts/1"
        )
        with (
            contextlib.nullcontext()
            if taken
            else pytest.raises(Exception, match=r"upload is none of MLflow.s")
        ):
            repository.log_artifact(str(tmp_path / "a.txt"))


def _always(listener: socket.socket, answer: bytes) -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(answer)
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            with client:
                client.recv(1 << 16)
                client.sendall(whole + answer)


def test_mlflow_alone_takes_it_for_an_empty_answer(
    cutter: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once this fails, `rankzero.mlflow_store.client.response_checks` can go."""
    monkeypatch.setattr(client_module, "refuse_false_answers", lambda: None)
    from mlflow.utils import rest_utils

    from rankzero.mlflow_store.client import response_checks

    tracker = MlflowRuns(cutter.uri)
    monkeypatch.setattr(rest_utils, "verify_rest_response", response_checks._verify)
    cutter.until = CUTS["within a later header"]
    assert tracker.list_runs() == []

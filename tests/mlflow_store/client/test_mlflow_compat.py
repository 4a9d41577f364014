"""MLflow's internals: those that are used exist, and each patch is still needed and works."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
from mlflow import MlflowClient, environment_variables, get_tracking_uri
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND
from mlflow.store.artifact import host_policy, http_artifact_repo
from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository
from mlflow.tracking._tracking_service import utils
from mlflow.utils import environment, rest_utils
from packaging.version import Version
from torch import nn

from rankzero.mlflow_store.client import MlflowRuns, RunRecord, mlflow_compat
from rankzero.mlflow_store.client.models import MlflowModels
from rankzero.mlflow_store.client.pytorch import save_pytorch
from rankzero.mlflow_store.uris import TrackingError
from rankzero.permanent_errors import refusal
from support.runs import T0, make_folder, saved
from support.stores import Server
from torture.proxy import Proxy

CUTS = {
    "within the first header": b"\r\ndat",
    "within a later header": b"\r\ncontent-ty",
    "before the length": b"content-length: ",
    "before the last line": b"\r\n\r",
    "before the body": b"\r\n\r\n",
    "within the body": b"\r\n\r\n{",
}


class Cutter:
    """Passes requests on to a server, and cuts its answers.

    An answer ends with the first `until` in it, if the request contains `only`.
    """

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
def run(server: Server, tmp_path: Path) -> RunRecord:
    return MlflowRuns(server.uri).open_run(make_folder(tmp_path, server.uri).identity, T0)


@pytest.mark.parametrize("until", CUTS.values(), ids=CUTS)
def test_a_cut_answer_is_an_error(
    until: bytes, cutter: Cutter, run: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_run_whose_answer_is_lost_is_not_created_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, identity = MlflowRuns(server.uri), make_folder(tmp_path, server.uri).identity
    retries, create = list[int](), tracker._client.create_run

    def noting(*given: Any, **named: Any) -> Any:
        retries.append(environment_variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get())
        return create(*given, **named)

    monkeypatch.setattr(tracker._client, "create_run", noting)
    tracker.open_run(identity, T0)
    assert retries == [0]


def test_a_model_or_version_whose_answer_is_lost_is_not_created_again(
    server: Server, tmp_path: Path
) -> None:
    with Proxy(server.uri) as proxy:
        folder, store = make_folder(tmp_path, proxy.uri), MlflowRuns(proxy.uri)
        run, event = store.open_run(folder.identity, T0), saved(folder, 5)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "MLmodel").touch()

        def once_lost(request: bytes, call: Callable[[], Any]) -> Any:
            proxy.misbehave("close", request)
            with pytest.raises(Exception, match=r"Connection aborted|Max retries"):
                call()
            assert proxy.behave()
            made.append([one.status for one in store.models.of_run(run)].count("PENDING"))
            return call()

        made: list[int] = []
        model = b"POST /api/2.0/mlflow/logged-models "
        once_lost(
            model,
            lambda: store.models.save_checkpoint(
                run, event, folder.path / event.path, lambda _: []
            ),
        )
        tags = {"rankzero.model": "best", "rankzero.step": "5"}
        model_id = once_lost(
            model, lambda: store.models.log_model(run, tmp_path / "model", "best", 5, tags)
        )
        name = f"of-{run.run_id}"
        version = b"/mlflow/model-versions/create "
        assert once_lost(version, lambda: store.models.register(run, model_id, name)) == 1
        assert made == [1, 1, 0]
        assert [one.status for one in store.models.of_run(run)] == ["READY", "READY"]
        assert len(store._client.search_model_versions(f"name = '{name}'")) == 1


@pytest.mark.parametrize("until", [b"\r\nconte", b"\r\n\r\n", b"lr"])
def test_a_download_that_ends_too_early_is_an_error(
    until: bytes, cutter: Cutter, run: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_download_of_fewer_bytes_is_an_error(
    run: RunRecord, server: Server, tmp_path: Path
) -> None:
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
def test_a_server_that_is_not_mlflow_is_an_error(answer: bytes, tmp_path: Path) -> None:
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
                Exception, match=r"is it MLflow.s|not MLflow|not in a valid JSON"
            ) as raised:
                ask()
            assert refusal(raised.value) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "taken"),
    [(b"", True), (b"{}", True), (b"<html>log in</html>", False), (b"null", False)],
)
def test_an_upload_is_answered_by_nothing_or_by_json(
    answer: bytes, taken: bool, tmp_path: Path
) -> None:
    mlflow_compat.prepare()
    with (
        contextlib.nullcontext()
        if taken
        else pytest.raises(Exception, match=r"upload is not MLflow.s")
    ):
        upload_to_a_server_that_answers(answer, tmp_path)


def upload_to_a_server_that_answers(answer: bytes, folder: Path) -> None:
    (folder / "a.txt").write_text("hello")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_always, args=(listener, answer), daemon=True).start()
        port = listener.getsockname()[1]
        repository = HttpArtifactRepository(
            f"http://127.0.0.1:{port}/api/2.0/mlflow-artifacts/artifacts/1"
        )
        repository.log_artifact(str(folder / "a.txt"))


@pytest.mark.parametrize(("status", "is_refusal"), [(413, True), (400, False), (407, False)])
def test_a_proxy_refuses_what_is_too_large_for_good(status: int, is_refusal: bool) -> None:
    page = SimpleNamespace(status_code=status, text="<html>")
    with pytest.raises(MlflowException) as raised:
        mlflow_compat._verified(page, "/api/2.0/mlflow/runs/log-batch")
    assert bool(refusal(raised.value)) == is_refusal


@pytest.mark.parametrize(("version", "is_refusal"), [("2.22.1", True), ("3.0.0", False)])
def test_a_server_older_than_mlflow_3_refuses_checkpoints_for_good(
    version: str, is_refusal: bool
) -> None:
    client = Mock()
    client.search_logged_models.side_effect = MlflowException("", error_code=ENDPOINT_NOT_FOUND)
    client._tracking_client.store._get_server_version.return_value = Version(version)
    with pytest.raises(Exception) as raised:
        MlflowModels(client, Mock()).of_run(Mock())
    assert bool(refusal(raised.value)) == is_refusal  # type: ignore[arg-type]


def test_a_busy_server_does_not_say_how_long_the_courier_sleeps() -> None:
    head = b"503 Busy\r\nRetry-After: 20"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_always, args=(listener, b"", head), daemon=True).start()
        tracker, began = MlflowRuns(f"http://127.0.0.1:{listener.getsockname()[1]}"), monotonic()
        with pytest.raises(MlflowException):
            tracker.require_run("0" * 32)
    assert monotonic() - began < 15


def _always(listener: socket.socket, answer: bytes, head: bytes = b"200 OK") -> None:
    end = b"\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(answer)
    whole = b"HTTP/1.1 " + head + end
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            with client:
                client.recv(1 << 16)
                client.sendall(whole + answer)


@pytest.mark.parametrize("name", mlflow_compat.ENVIRONMENT)
def test_each_environment_variable_is_one_of_mlflows(name: str) -> None:
    assert getattr(environment_variables, name).name == name


def test_mlflow_still_takes_an_empty_answer_for_one_with_empty_fields(
    cutter: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once this fails, `prepare` need not replace `verify_rest_response`."""
    monkeypatch.setattr(rest_utils, "verify_rest_response", mlflow_compat._verify_rest_response)
    client = MlflowClient(tracking_uri=cutter.uri)
    cutter.until = CUTS["within a later header"]
    assert client.search_experiments() == []


def test_mlflow_still_takes_any_page_for_a_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once this fails, `prepare` need not replace `augmented_raise_for_status`."""
    monkeypatch.setattr(
        http_artifact_repo, "augmented_raise_for_status", mlflow_compat._raise_for_status
    )
    upload_to_a_server_that_answers(b"<html>log in</html>", tmp_path)


@pytest.mark.parametrize("root", [None, "ours"])
def test_mlflow_still_reads_the_artifact_root_of_a_server(
    root: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once this fails, `default_artifacts_below` has no effect, or is needed no more."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(mlflow_compat._ARTIFACT_ROOT, raising=False)
    assert mlflow_compat._ARTIFACT_ROOT == utils._SERVER_ARTIFACT_ROOT_ENV_VAR
    with mlflow_compat.default_artifacts_below(root and str(tmp_path / root)):
        [default] = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_experiments()
    assert Path(default.artifact_location) == tmp_path / (root or "mlruns") / "0"
    assert not host_policy.is_tracking_server_process()


def test_mlflows_registry_still_has_a_client_of_its_own(
    sqlite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once this fails, `global_tracking_uri` can go."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/another.db")
    store, folder = MlflowRuns(sqlite), make_folder(tmp_path, sqlite)
    run = store.open_run(folder.identity, T0)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "MLmodel").touch()
    model_id = store.models.log_model(run, tmp_path / "model", "model", 1, {})
    store._client.create_registered_model("theirs")
    with pytest.raises(MlflowException, match="not found"):
        store._client.create_model_version(
            "theirs", f"models:/{model_id}", run.run_id, model_id=model_id
        )
    assert store.models.register(run, model_id, "ours") == 1
    assert store.models.register(run, model_id, "ours") == 1, "no second version"
    # As MLflow's page of a model wants it: it says "Not registered" without.
    versions = store._client.get_logged_model(model_id).tags["mlflow.modelVersions"]
    assert json.loads(versions) == [{"name": "ours", "version": 1}]


def test_a_registration_leaves_nothing_in_the_current_directory(
    sqlite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, folder, here = MlflowRuns(sqlite), make_folder(tmp_path, sqlite), tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    run = store.open_run(folder.identity, T0)
    model_id = store.models.log_model(run, folder.path, "model", 1, {})
    store.models.register(run, model_id, "ours")
    assert not list(here.iterdir())


def test_a_registration_asks_the_database_through_the_same_connections() -> None:
    """By another URI, MLflow connects once more, and without the settings for a lost server."""
    client, asked = Mock(tracking_uri="http://there?keepalives=1"), list[str]()
    client.search_model_versions.return_value = []
    client.get_logged_model.return_value.tags = {}
    client.create_model_version = lambda *_, **__: asked.append(get_tracking_uri()) or MagicMock()
    MlflowModels(client, Mock()).register(Mock(), "m-1", "ours")
    assert asked == ["http://there?keepalives=1"]


def test_only_mlflow_by_itself_reads_all_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow.pytorch

    checked: list[list[str]] = []
    name = "warn_dependency_requirement_mismatches"
    monkeypatch.setattr(environment, name, checked.append)
    model = nn.Linear(2, 1)
    save_pytorch(model, tmp_path / "ours", [np.ones((2, 2), "f4")], None, "pt2", ())
    assert not checked and getattr(environment, name) == checked.append
    example = np.ones((2, 2), "f4")
    mlflow.pytorch.save_model(
        model, tmp_path / "theirs", pip_requirements=["mlflow"], input_example=example
    )
    assert checked == [["mlflow"]], "the patch is still needed"


def test_a_local_location_is_read_as_mlflow_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "größer, a%20b"
    folder.mkdir()
    for location in (str(folder), folder.as_uri(), f"file:{folder}"):
        (folder / "x").write_text(location)
        repository = mlflow_compat.artifact_repository(location, "sqlite:///x.db")
        if mlflow_compat.local_path(location) == folder:
            assert [found.path for found in repository.list_artifacts()] == ["x"]
    assert mlflow_compat.scheme_of("s3://bucket/a") == "s3"
    assert mlflow_compat.scheme_of(str(folder)) == ""

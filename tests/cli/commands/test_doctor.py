"""`rankzero doctor`: each line ok, or the fix."""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from rankzero.cli.commands import doctor
from rankzero.mlflow_store import drivers
from support.second_user import as_nobody, needs_root


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


class Usage(NamedTuple):
    total: float
    free: float


def test_machine_without_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(dir=tmp_path / "mlruns", tracking_uri=None)
    assert doctor.run(arguments, usage=lambda path: Usage(64e9, 64e9)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all well"
    assert all(line.startswith(("ok ", "-- ")) for line in lines[:-1])
    assert [line.split()[1] for line in lines[:6]] == [
        "Python",
        "git",
        "runs",
        "shared",
        "tracking",
        "PyTorch",
    ]


def test_problems_are_printed_with_their_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = argparse.Namespace(dir=tmp_path, tracking_uri="http://127.0.0.1:1")
    assert doctor.run(arguments, usage=lambda path: Usage(64e6, 64e6)) == 1
    output = capsys.readouterr().out
    assert "--shm-size" in output and "make room" in output and "refused" in output
    assert "3 to fix: runs folder, shared memory, tracking store" in output


def test_folder_that_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "--dir" in str(doctor.disk(tmp_path / "file" / "mlruns").fix)


@needs_root
def test_folder_that_this_user_may_not_enter(tmp_path: Path) -> None:
    fix = as_nobody(lambda: doctor.disk(tmp_path / "closed" / "mlruns").fix)
    assert fix and "is not writable" in fix


def test_shared_memory_that_is_full(tmp_path: Path) -> None:
    full = doctor.shared_memory(tmp_path, usage=lambda path: Usage(64e9, 1e6))
    assert "what fills" in str(full.fix)
    assert not doctor.shared_memory(tmp_path / "none").there


def test_damaged_database(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"not a database" * 100)
    assert "not a database" in str(doctor.tracking_store(tmp_path).fix)


def test_database_that_is_in_use_is_not_damaged(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("CREATE TABLE runs (id INTEGER)")
        database.execute("BEGIN EXCLUSIVE")
        fix = str(doctor.tracking_store(tmp_path, timeout=0.01).fix)
    assert "database is locked: try again" in fix and "damaged" not in fix


def test_database_that_cannot_be_read_is_not_damaged(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").mkdir()
    fix = str(doctor.tracking_store(tmp_path).fix)
    assert "ask for the rights" in fix and "damaged" not in fix


def test_sound_database(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "mlflow.db")
    database.execute("CREATE TABLE runs (id INTEGER)")
    database.commit()
    database.close()
    assert doctor.tracking_store(tmp_path).fix is None


@pytest.mark.parametrize(
    ("name", "is_told"), [("a b#c ünï 5%", False), ("what?", True), ("a%20b", True)]
)
def test_database_in_a_folder_of_any_name(tmp_path: Path, name: str, is_told: bool) -> None:
    """Folder names that change their meaning in a URI are reported; others are read."""
    folder = tmp_path / name
    folder.mkdir()
    database = sqlite3.connect(folder / "mlflow.db")
    database.execute("CREATE TABLE runs (id INTEGER)")
    database.close()
    assert ("another with --dir" in str(doctor.tracking_store(folder).fix)) == is_told


def test_store_that_does_not_exist_yet(tmp_path: Path) -> None:
    check = doctor.tracking_store(tmp_path / "mlruns")
    assert check.fix is None and check.found.endswith("(made by the first run)")


def test_old_file_store(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "meta.yaml").touch()
    assert "mlflow migrate-filestore" in str(doctor.tracking_store(tmp_path).fix)


def test_database_without_a_driver_a_place_or_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = "postgresql+psycopg2://me:hunter2@127.0.0.1:1/mlflow"
    monkeypatch.delenv(drivers.ARTIFACT_ROOT, raising=False)
    without_root = doctor.tracking_store(tmp_path, uri)
    monkeypatch.setenv(drivers.ARTIFACT_ROOT, "/shared")
    silent = doctor.tracking_store(tmp_path, uri)
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    without_driver = doctor.tracking_store(tmp_path, uri)
    assert drivers.ARTIFACT_ROOT in str(without_root.fix)
    assert "refused" in str(silent.fix)
    assert "pip install psycopg2-binary" in str(without_driver.fix)
    assert "hunter2" not in f"{without_root}{silent}{without_driver}"


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, int]]]:
    """A server that answers with the status in the dictionary, or 401 without the token."""
    answer = {"status": 200, "major": 3}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            may = self.headers["authorization"] == "Bearer valid"
            self.send_response(answer["status"] if may else 401)
            self.end_headers()
            experiment = {"experiment_id": "1", "artifact_location": "s3://bucket"}
            self.wfile.write(json.dumps({"experiments": [experiment]}).encode())

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"{answer['major']}.0.1".encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{serving.server_port}", answer
        serving.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("token", "status", "major", "says"),
    [
        ("valid", 200, 3, "install boto3"),
        ("valid", 200, 2, "the server has MLflow 2.0.1; checkpoints need 3.0 or newer"),
        ("expired", 200, 3, "MLFLOW_TRACKING_PASSWORD, or a valid token"),
        ("valid", 404, 3, "correct the tracking URI"),
    ],
)
def test_server_is_asked_with_the_login_of_the_runs(
    token: str,
    status: int,
    major: int,
    says: str,
    server: tuple[str, dict[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token)
    address, answer = server
    answer |= {"status": status, "major": major}
    check = doctor.tracking_store(tmp_path, f"http://{address}")
    assert says in str(check.fix) and check.found == f"http://{address}"


def test_password_of_a_server_is_not_shown(server: tuple[str, dict[str, int]]) -> None:
    check = doctor.tracking_store(Path(), f"http://me:hunter2@{server[0]}")
    assert "hunter2" not in str(check) and check.fix


def test_server_that_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        check = doctor.tracking_store(tmp_path, address, timeout=1)
    assert "timed out" in str(check.fix)


def test_driver_without_a_gpu_is_a_problem_and_no_driver_is_not(tmp_path: Path) -> None:
    version = tmp_path / "version"
    assert doctor._no_gpu(version) == (
        "GPUs",
        "no NVIDIA driver: training on the CPU, over gloo",
        None,
        False,
    )
    version.write_text("570.1\n")
    assert "CUDA_VISIBLE_DEVICES" in str(doctor._no_gpu(version).fix)


def test_import_of_doctor_imports_nothing_heavy() -> None:
    code = (
        "import sys, rankzero.cli.commands.doctor\n"
        "assert not {'torch', 'mlflow', 'pynvml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


@pytest.mark.parametrize(
    ("torch", "wanted", "fits"),
    [
        ("2.11.0+cu130", "==2.11.0", True),
        ("2.15.0", ">=2.14.0", True),
        ("2.16.0.dev20261101", "==2.16.0.dev20261101", True),
        ("2.11.0", "", True),
        ("2.13.0", "==2.11.0", False),
    ],
)
def test_torchvision_is_made_for_some_versions_of_torch(
    torch: str, wanted: str, fits: bool
) -> None:
    check = doctor.torch_pair(lambda: doctor.TorchPair(torch, "0.26.0+cu132", wanted))
    assert (check.fix is None) == fits
    if not fits:
        assert check.fix == (
            "torchvision 0.26.0+cu132 is made for torch==2.11.0: install both together"
        )


def test_installed_pair_fits() -> None:
    check = doctor.torch_pair()
    assert check.fix is None and check.found.startswith("torch 2.")


def test_versions_that_do_not_load() -> None:
    def broken() -> doctor.TorchPair:
        raise RuntimeError("operator torchvision::nms does not exist")

    check = doctor.torch_pair(broken)
    assert "nms does not exist" in str(check.fix) and "make setup" in str(check.fix)

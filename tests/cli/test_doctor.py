"""`rankzero doctor`: each line ok, or the fix."""

from __future__ import annotations

import argparse
import sqlite3
from pathlib import Path
from typing import NamedTuple

import pytest

from rankzero.cli import doctor


class Usage(NamedTuple):
    total: float
    free: float


def test_a_machine_that_is_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(64e9, 64e9))
    assert doctor.run(argparse.Namespace(dir=tmp_path / "mlruns", tracking_uri=None)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all well"
    assert all(line.startswith("ok ") for line in lines[:-1])


def test_what_is_wrong_is_told_with_its_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(64e6, 64e6))
    assert doctor.run(argparse.Namespace(dir=tmp_path, tracking_uri="http://127.0.0.1:1")) == 1
    output = capsys.readouterr().out
    assert "--shm-size" in output and "make room" in output and "refused" in output
    assert "3 to fix: runs folder, shared memory, tracking store" in output


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "--dir" in str(doctor.disk(tmp_path / "file" / "mlruns").fix)


def test_a_damaged_database(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"not a database" * 100)
    assert "not a database" in str(doctor.tracking_store(tmp_path).fix)


def test_a_sound_database(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "mlflow.db")
    database.execute("CREATE TABLE runs (id INTEGER)")
    database.commit()
    database.close()
    assert doctor.tracking_store(tmp_path).fix is None


def test_versions_that_do_not_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_torch_versions", lambda: ("2.13.0", "0.29.2"))
    assert doctor.torch_pair().fix == "torch 2.13.0 goes with torchvision 0.27"


def test_a_pair_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[str, str]:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(doctor, "_torch_versions", broken)
    check = doctor.torch_pair()
    assert "nms does not exist" in str(check.fix) and "make setup" in str(check.fix)

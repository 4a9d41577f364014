"""Secrets planted wherever a run could pick them up reach neither MLflow nor the mlruns folder."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankzero.catalog import lookup
from rankzero.launch import failures
from rankzero.launch.request import write_config
from rankzero.run_store.delivery_state import load, path_of
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from rankzero.tracking.deliverer import Deliverer
from rankzero.tracking.run_log import RunLog
from rankzero.tuning.reports.study_run import StudyRun
from support.commands import TINY, Command
from support.runs import append, ended, make_folder, started

SETTING, ARGUMENT, VARIABLE, DIFF, ERROR, AWS, URI, FILE = (
    f"planted{number}staple" for number in range(8)
)
EXPERIMENT = f"""
import sys
sys.path.insert(0, {str(TINY.parent)!r})
from tiny import Tiny

class Leaky(Tiny):
    def measure(self, model, batch):
        print("the user's own words go to logs/ as they are")
        where = "postgresql+psycopg2://me:{ERROR}@host/db"
        raise ConnectionError(where + " AWS_SECRET_ACCESS_KEY={AWS} token: {ERROR}")
"""


def planted_in(folder: Path) -> list[tuple[Path, str]]:
    """Return where below the folder a planted word is."""
    return [
        (path.relative_to(folder), word)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        for word in (SETTING, ARGUMENT, VARIABLE, DIFF, ERROR, AWS, URI, FILE)
        if word.encode() in path.read_bytes()
    ]


def test_planted_secrets_reach_neither_mlflow_nor_the_runs(rankzero: Command) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", "-C", str(rankzero.folder)]
    (rankzero.folder / "leaky.py").write_text(EXPERIMENT)
    (rankzero.folder / "notes.py").write_text("x = 1\n")
    (rankzero.folder / ".gitignore").write_text("mlruns\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    (rankzero.folder / "notes.py").write_text(
        f"AWS_SESSION_TOKEN = '{DIFF}'\nurl = 'https://me:{DIFF}@host/x'\n"
    )
    (rankzero.folder / f"api_key={FILE}").touch()
    planted = {
        "AWS_SECRET_ACCESS_KEY": VARIABLE,
        "NCCL_AUTH_TOKEN": VARIABLE,
        "NCCL_X": f"s3://me:{VARIABLE}@h",
    }
    rankzero.environ |= planted
    code, output = rankzero(
        *("train", "leaky.py", "--run-name", "leaky", f"api_key={SETTING}", "train.steps=5"),
        *("--nproc", 2, "--rdzv-id", f"token={ARGUMENT}"),
    )
    assert code == 1 and "ConnectionError" in output
    [folder] = rankzero.runs
    mlruns = rankzero.folder / "mlruns"
    with sqlite3.connect(mlruns / "mlflow.db") as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    assert planted_in(mlruns) == [(Path("runs/leaky/config.yaml"), SETTING)]  # which a resume needs
    assert stat.S_IMODE(folder.config.stat().st_mode) == 0o600
    assert (mlruns / "artifacts").exists() and list(mlruns.rglob("artifacts/**/config.yaml"))
    assert not any(word in output for word in (ERROR, AWS, ARGUMENT))
    assert lookup.last_end(folder) is not None and list(folder.failures.glob("rank_*.json"))


class Refusing:
    """A store whose errors tell its password."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(f"postgresql://me:{URI}@host/db refused, password={URI}")


def test_password_in_a_uri_is_private_and_never_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_folder(tmp_path, f"postgresql://me:{URI}@host/db")
    append(folder, started(), ended())
    deliverer = Deliverer(folder, 0, lambda uri: Refusing(), longest_wait=0.0)  # type: ignore[arg-type, return-value]
    for _ in range(5):
        deliverer.work()
    assert URI not in caplog.text and "refused" in str(load(path_of(folder, 0)).retries.error)
    assert planted_in(tmp_path) == [(folder.path.relative_to(tmp_path) / "run.json", URI)]
    assert stat.S_IMODE((folder.path / "run.json").stat().st_mode) == 0o600
    assert folder.identity.tracking_uri.count(URI) == 1


def test_recorder_log_has_no_secrets(tmp_path: Path) -> None:
    program = (
        "import logging; from rankzero.redaction.text import log_without_secrets\n"
        "log_without_secrets()\n"
        f"try: raise OSError('https://me:{URI}@host/x password={URI}')\n"
        "except OSError: logging.getLogger('rankzero.recorder').exception('unexpected')"
    )
    done = subprocess.run(
        [os.sys.executable, "-c", program], capture_output=True, text=True, check=True
    )  # type: ignore[attr-defined]
    assert "unexpected" in done.stderr and "OSError" in done.stderr and URI not in done.stderr


def test_recorder_log_that_a_disk_refuses_once_has_no_secrets_afterwards() -> None:
    program = (
        "import errno, io, logging, sys; from rankzero.redaction.text import log_without_secrets\n"
        "class Disk(io.StringIO):\n"
        "    refused = False\n"
        "    def write(self, text):\n"
        "        if not self.refused:\n"
        "            self.refused = True\n"
        "            raise OSError(errno.EIO, 'Input/output error')\n"
        "        return super().write(text)\n"
        "sys.stderr = Disk(); log_without_secrets(); log = logging.getLogger('rankzero.recorder')\n"
        f"log.warning('failed: %s', 'password={URI}'); log.warning('next')\n"
        "print(sys.stderr.getvalue())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith("WARNING next") and len(done.stdout.splitlines()) == 2


def test_errors_are_redacted_on_every_way_into_the_journal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from rankzero.run_store.journal import Journal

    folder = make_folder(tmp_path)
    log = RunLog(folder, Journal(folder.events), 1, None)
    log(ended("FAILED", f"https://me:{ERROR}@host", error=f"x\npassword = {ERROR}\n"))
    log.notice(f"api_key={ERROR}")
    log.close()
    assert len(list(read_all(folder.events))) == 2
    assert ERROR not in folder.events.read_text() + capfd.readouterr().out
    try:
        raise ValueError(f"token={ERROR}")
    except ValueError as error:
        failures.write(failures.describe(error, 0), folder.failures)
    assert not planted_in(tmp_path)


def test_sweet_spot_has_no_secrets_and_asks_for_them(tmp_path: Path) -> None:
    from rankzero import config
    from rankzero.errors import UserError
    from rankzero.experiment_file import load as load_experiment
    from rankzero.launch.request import with_secrets

    tiny = load_experiment(str(TINY))
    log: Any = SimpleNamespace(folder=RunFolder(tmp_path))
    leaky = config.override(tiny(), {"api_key": SETTING})
    StudyRun(log, {}).write_sweet_spot(leaky, "says", "use")
    text = (tmp_path / "artifacts" / "sweet_spot.yaml").read_text()
    assert SETTING not in text
    with pytest.raises(UserError, match="pass them again, api_key=…"):
        with_secrets(config.read_yaml(text), {})
    assert with_secrets(config.read_yaml(text), {"api_key": SETTING})["api_key"] == SETTING


def test_config_without_secrets_is_readable_by_everybody(tmp_path: Path) -> None:
    from rankzero.experiment import Experiment

    folder = make_folder(tmp_path)
    write_config(folder, Experiment())
    assert stat.S_IMODE(folder.config.stat().st_mode) & 0o044

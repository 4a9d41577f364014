"""A command whose end ends every process below it, as that of a container does."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from support.commands import TINY, wait_until

CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
SCRIPT = f"""#!/bin/sh
{sys.executable} -m rankzero train {TINY} train.steps=10 --run-name r --nproc 1 "$@"
"""

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
NO_MODEL = "train.mlflow.log_model=false"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    if subprocess.run([*CONTAINER, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make a PID namespace")
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    path.chmod(0o755)
    return path


def runs_after(folder: Path, *words: str, **environ: str) -> list[tuple[str, str]]:
    """Run a container in `folder` to its end. Return the names and statuses that MLflow has."""
    subprocess.run(
        [*CONTAINER, "--kill-child", *words],
        cwd=folder,
        env=os.environ | environ,
        check=True,
        capture_output=True,
        timeout=120,
    )
    with closing(sqlite3.connect(folder / "mlruns" / "mlflow.db")) as store:
        if not store.execute("SELECT 1 FROM sqlite_master WHERE name = 'runs'").fetchone():
            return []
        return store.execute("SELECT name, status FROM runs").fetchall()


def test_its_end_is_in_mlflow_before_the_container_goes(
    script: Path, tmp_path: Path, new_store: Path
) -> None:
    sh = shutil.which("dash") or "/bin/sh"
    shutil.copy(sh, tmp_path / "tini")  # a container's first process may be such an init
    inner = f"./train.sh {NO_MODEL}; exit"
    for number, words in enumerate([["./train.sh"], ["./tini", "-c", inner]]):
        folder = tmp_path / str(number)
        (folder / "mlruns").mkdir(parents=True)
        shutil.copy(new_store, folder / "mlruns" / "mlflow.db")
        (folder / "train.sh").symlink_to(script)
        (folder / "tini").symlink_to(tmp_path / "tini")
        assert runs_after(folder, *words) == [("r", "FINISHED")], words


def test_a_command_that_does_not_wait_leaves_it_to_sync(
    script: Path, tmp_path: Path, new_store: Path
) -> None:
    database = tmp_path / "mlruns" / "mlflow.db"
    database.parent.mkdir()
    shutil.copy(new_store, database)
    impatient = {"RANKZERO_WAIT_DELIVERY": "0"}
    with ThreadPoolExecutor() as pool, closing(sqlite3.connect(database)) as other:
        found = pool.submit(
            runs_after, tmp_path, "sh", "-c", f"./train.sh {NO_MODEL}; true", **impatient
        )
        recorder = (database.parent / "runs" / "r").glob
        while not any(one.stat().st_size for one in recorder("*.live")) and not found.done():
            time.sleep(0.01)
        # Or a fast courier would be done before the command.
        other.execute("BEGIN IMMEDIATE")
        assert ("r", "FINISHED") not in found.result()
    words = [sys.executable, "-m", "rankzero", "sync"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    with closing(sqlite3.connect(tmp_path / "mlruns" / "mlflow.db")) as store:
        assert store.execute("SELECT name, status FROM runs").fetchall() == [("r", "FINISHED")]


@pytest.mark.usefixtures("script")
def test_sigterm_ends_it_before_the_ranks_start(tmp_path: Path) -> None:
    """A file whose import takes long stands for a checkpoint that is downloaded."""
    (tmp_path / "slow.py").write_text("import time\nopen('begun', 'w')\ntime.sleep(100)\n")
    words = [sys.executable, "-m", "rankzero", "train", "slow.py"]
    process = subprocess.Popen([*CONTAINER, "--kill-child", *words], cwd=tmp_path)
    try:
        wait_until((tmp_path / "begun").exists)
        (first,) = psutil.Process(process.pid).children()
        first.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()

"""Make the old store that test_old_stores.py reads: ``python tests/old_stores/make_store.py``.

The script extracts commit 80008b7, the last one before the modules were renamed. It runs the real
commands of that commit, so any later checkout can start it. The environment's packages must still
suit the commit. The script takes about four minutes and writes ``mlruns-80008b7.tar.xz`` into its
own folder. Make a new archive only to add something to the store.

The archive holds the experiment, the training loop, ``mlruns`` and ``expected.json``. The last one
has the values that the tests compare with.

===========  ====================================================================================
run          how it ended
===========  ====================================================================================
finished     all 64 steps, the best model logged
stopped      Ctrl-C after step 20 or more: exit 75, a checkpoint to resume from
undelivered  all 64 steps, but another process locked MLflow's database after step 20 or more
died         SIGKILL of all its processes after step 20 or more: no end, the rest not delivered
failed       KeyError at the first evaluation
own-loop     ``rankzero.track`` in a loop of the user's own
done         a study of three trials with its verdict
interrupted  a study, Ctrl-C in its second trial: the same command finishes it
===========  ====================================================================================

No text of the archive names the machine that made it. The commands run in /tmp/rankzero-old-store,
and a link there leads to the interpreter. Each process sees a neutral host name, user and kernel.
The archive has no pictures and no HTML of the studies, because they are large.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

COMMIT = "80008b7"
HERE = Path(__file__).resolve().parent
BASE = Path("/tmp/rankzero-old-store")
ARCHIVE = HERE / f"mlruns-{COMMIT}.tar.xz"
RUNS, DATABASE, STUDIES = (BASE / "mlruns" / name for name in ("runs", "mlflow.db", "studies.db"))
PYTHON = BASE / "venv" / "bin" / "python"
SEARCH = [
    *("exact.py", "step_seconds=0.02", "--nproc", "1", "--trials", "3", "--seeds", "2"),
    *("--challengers", "1"),
]
LEFT_OUT = (".png", ".html")
# A run of another machine looks alive while its files are new, so all of them get an old date.
MODIFIED = 1_750_000_000
NEUTRAL = """
import platform
import socket

socket.gethostname = lambda: "old-store"
platform.release = lambda: "6.0"
"""


def main() -> None:
    if BASE.exists():
        sys.exit(f"{BASE} exists: take it away first")
    BASE.mkdir()
    try:
        prepare()
        make_runs()
        make_studies()
        settle()
        pack()
    finally:
        kill_all()
        shutil.rmtree(BASE)


def prepare() -> None:
    """Extract the commit's package, and put the experiment where the commands find it."""
    code = subprocess.run(
        ["git", "archive", COMMIT, "platform"], cwd=HERE.parents[1], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(code)) as archive:
        archive.extractall(BASE, filter="data")
    (BASE / "venv").symlink_to(sys.prefix)
    (BASE / "neutral").mkdir()
    (BASE / "neutral" / "sitecustomize.py").write_text(NEUTRAL)
    for name in ("exact.py", "own_loop.py"):
        shutil.copy(HERE / name, BASE / name)


def make_runs() -> None:
    """Make all runs but the studies' trials."""
    run("train", "exact.py", "--run-name", "finished", "train.log_model=true")
    run("train", "exact.py", "--run-name", "failed", "fail_at=8", expected=1)
    finish(start_python("own_loop.py"), 0)
    stopped = start("train", "exact.py", "--run-name", "stopped", "step_seconds=0.05")
    wait_until(lambda: last_step("stopped") >= 20)
    os.killpg(stopped.pid, signal.SIGINT)
    finish(stopped, 75)
    make_undelivered()


def make_undelivered() -> None:
    """Make the two runs of which MLflow has a part only."""
    # On a busy machine the courier needs many seconds for its first delivery.
    died = start("train", "exact.py", "--run-name", "died", "step_seconds=1")
    with database_locked_within("died"):
        wait_until(lambda: last_step("died") > points("died") + 1)
        kill_all()
        finish(died, -signal.SIGKILL)
    words = ("train", "exact.py", "--run-name", "undelivered", "step_seconds=1")
    undelivered = start(*words, grace=3.0)
    with database_locked_within("undelivered"):
        finish(undelivered, 0)
        kill_all()


@contextlib.contextmanager
def database_locked_within(name: str) -> Iterator[None]:
    """Lock MLflow's database once it has a part of a run, until all processes have ended."""
    wait_until(lambda: last_step(name) >= 20 and points(name) > 0)
    with contextlib.closing(sqlite3.connect(DATABASE, timeout=60)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield
        settle()
        database.rollback()
    missing = last_step(name) - points(name)
    if missing <= 0:
        sys.exit(f"{name} was delivered: try again")
    print(f"{name}: {missing} values of train/loss are not in MLflow")


def make_studies() -> None:
    """Make a study with its verdict, and one that Ctrl-C stopped."""
    run("search", *SEARCH, "--study", "done")
    process = start("search", *SEARCH, "--study", "interrupted")
    wait_until(lambda: last_step("interrupted-001") >= 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to the whole group
    finish(process, 1)


def pack() -> None:
    """Put each database into one file, and write the archive."""
    with contextlib.closing(sqlite3.connect(STUDIES)) as database:
        # A search on another machine would wait for these processes while their heartbeats are new.
        database.execute(
            "UPDATE study_user_attributes SET value_json = ? WHERE key LIKE 'beat %'",
            [str(MODIFIED)],
        )
        database.commit()
    for path in (DATABASE, STUDIES):
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            database.execute("VACUUM")
    (BASE / "expected.json").write_text(json.dumps(expected(), indent=1))
    kept = [BASE / name for name in ("exact.py", "own_loop.py", "expected.json", "mlruns")]
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for path in kept:
            archive.add(path, path.name, filter=plain)
    print(f"{ARCHIVE.name}: {ARCHIVE.stat().st_size / 1e3:.0f} kB")


def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return the member with a neutral owner and date, or None to leave it out."""
    if member.name.endswith(LEFT_OUT):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mtime = MODIFIED
    return member


def expected() -> dict[str, object]:
    """Return what the journals and MLflow's database hold, read without the package."""
    names = ("finished", "stopped", "undelivered", "died", "own-loop")
    return {
        "commit": COMMIT,
        "base": str(BASE),
        "search": SEARCH,
        "verdict": verdict(),
        "losses": {name: losses(name) for name in names},
        "delivered": {name: points(name) for name in names},
        "torch": importlib.metadata.version("torch"),
    }


def losses(name: str) -> dict[int, float]:
    """Return train/loss by step, as the journal has it."""
    found: dict[int, float] = {}
    with contextlib.suppress(FileNotFoundError):
        *lines, _torn = (RUNS / name / "events.jsonl").read_text().split("\n")
        for line in lines:
            event = json.loads(line)
            if event["event"] == "StepsLogged" and "train/loss" in event["metrics"]:
                found.update(zip(event["steps"], event["metrics"]["train/loss"], strict=True))
    return found


def last_step(name: str) -> int:
    return max(losses(name), default=0)


def points(name: str) -> int:
    """Return how many values of train/loss MLflow has."""
    query = """SELECT count(*) FROM metrics JOIN runs USING (run_uuid)
               WHERE name = ? AND key = 'train/loss'"""
    with contextlib.closing(sqlite3.connect(DATABASE, timeout=60)) as database:
        return int(database.execute(query, [name]).fetchone()[0])


def verdict() -> str:
    """Return what the finished study found, in one sentence or a few."""
    query = """SELECT value_json FROM study_user_attributes JOIN studies USING (study_id)
               WHERE study_name = 'done' AND key = 'sentence'"""
    with contextlib.closing(sqlite3.connect(STUDIES)) as database:
        return str(json.loads(database.execute(query).fetchone()[0]))


def run(*words: str, expected: int = 0) -> None:
    finish(start(*words), expected)


def start(*words: str, grace: float = 120.0) -> subprocess.Popen[bytes]:
    return start_python("-m", "rankzero", *words, grace=grace)


def start_python(*words: str, grace: float = 120.0) -> subprocess.Popen[bytes]:
    print("$ python", *words, flush=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environ = {
        **kept,
        "PYTHONPATH": f"{BASE / 'platform'}:{BASE / 'neutral'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(BASE),
        "LOGNAME": "user",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "RANKZERO_DELIVERY_GRACE_SECONDS": str(grace),
    }
    return subprocess.Popen([PYTHON, *words], cwd=BASE, env=environ, start_new_session=True)


def finish(process: subprocess.Popen[bytes], expected: int) -> None:
    code = process.wait(timeout=300)
    if code != expected:
        sys.exit(f"the command ended with {code}, not {expected}")


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_true():
        if time.monotonic() > deadline:
            sys.exit("waited two minutes in vain")
        time.sleep(0.05)


def settle() -> None:
    """Wait until each recorder and courier has ended."""
    wait_until(lambda: not processes())


def kill_all() -> None:
    for process in processes():
        with contextlib.suppress(psutil.Error):
            process.kill()


def processes() -> list[psutil.Process]:
    """Return what works in the store's folder: commands, ranks, recorders, couriers."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(BASE) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


if __name__ == "__main__":
    main()

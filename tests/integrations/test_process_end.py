"""Runs that no `with` block ends: how their process ends is how they end."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rankzero
from rankzero.events import Evaluated, Event, Noticed, RunEnded, RunStarted, StepsLogged
from rankzero.run_store.journal import read_all
from support.commands import wait_until
from support.runs import of_kind

BEGIN = """
import multiprocessing, os, signal, sys, rankzero
run = rankzero.track("mine", name="r1", offline=True)
run.log({"loss": 1.0})
"""
CAUGHT = """
try:
    sys.exit(7)
except SystemExit:
    run.log({"loss": 2.0})
"""
# RankZero cannot see how this differs from `CAUGHT`.
FINALLY = """
try:
    sys.exit(7)
finally:
    run.log_text("done", "train.log")
"""
HANDLED = """
try:
    raise ValueError("boom")
except ValueError:
    sys.exit(3)
"""
CHILD = """
import sys, rankzero
import multiprocessing
def child():
    run = rankzero.track("mine", name="r1", offline=True)
    run.log({"loss": 1.0})
    raise ValueError("boom")
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
"""
ORPHAN = """
import os, signal, time, rankzero, torch
def child(_):
    run = rankzero.track("mine", name="r1", offline=True)
    run.log({"loss": 1.0})
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
torch.multiprocessing.start_processes(child, start_method="fork")
"""
SHOWN = """
import code
code.InteractiveInterpreter().runsource("typo")
run.evaluated({"acc": 1.0})
"""
USED_AT_EXIT = """
import atexit
atexit.register(lambda: run.evaluated({"late": 1.0}))
raise ValueError("boom")
"""
USED_IN_HOOK = """
import sys
def save(*error):
    run.checkpoint({"saved": 1})
    sys.__excepthook__(*error)
sys.excepthook = save
raise ValueError("boom")
"""
IMPORTED = """
from sys import exit
"""
FORKED = """
if os.fork() == 0:
    sys.exit(3)
os.wait()
"""

IMPORTED_AGAIN = """
if __name__ == "__main__":
    child = multiprocessing.get_context("{method}").Process(target=print)
    child.start()
    child.join()
    run.log({{"code": child.exitcode}})
"""
IN_BLOCK = """
with run:
    if os.fork() == 0:
        run.log({"child": 1.0})
        run.evaluated({"child": 1.0})
        sys.exit(3)
    os.wait()
    run.log({"loss": 2.0})
"""
TERMINATED = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
os.kill(os.getpid(), signal.SIGTERM)
"""
# It logs, and the run writes it, when the main thread has ended.
THREAD = """
import threading
def log():
    threading.main_thread().join()
    run.evaluated({"late": 1.0})
threading.Thread(target=log).start()
"""
EARLY = """
import atexit
atexit.register(lambda: run.log({"late": 1.0}))
"""
REPLACED = """
import sys
def leave(code):
    raise ValueError("replaced")
sys.exit = leave
"""

CONSOLE = """
import code, io
sys.stdin = io.StringIO("typo")
code.interact()
sys.ps1 = ">>> "  # From Python 3.13 on, `interact` removes it.
"""

# Each text is run as a cell, in IPython's own shell.
CELLS = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in {cells!r}:
    shell.run_cell(cell, silent="silent" in cell)
"""
CRASH = BEGIN + "raise ValueError('boom')"
USED = "run.log({'loss': 2.0})"
NESTED = "get_ipython().run_cell('1 + 1')"
# As an editor's list of variables does.
SILENT = "typo  # silent"
OTHER = 'other = rankzero.track("mine", name="r2", offline=True)'
# A name that is tracked again ends its own run.
SWEEP = """
import rankzero
from rankzero.integrations.deferred_run import DeferredRun
from rankzero.integrations.tensorboard import SummaryWriter
with rankzero.track("mine", offline=True) as run, run.child("fold"):
    DeferredRun("mine", offline=True).begin()
    SummaryWriter("mine", offline=True)
    runs = [rankzero.track("mine", name=name, offline=True) for name in ("r0", "r1", "r2", "r2")]
for run in runs:
    run.finish()
rankzero.track("mine", name="r3", offline=True)
"""


def ended(folder: Path, script: str) -> list[RunEnded]:
    (folder / "script.py").write_text(script)
    subprocess.run([sys.executable, "script.py"], cwd=folder, check=False)
    return of_kind(folder / "mlruns/runs/r1", RunEnded)


@pytest.mark.parametrize(
    ("script", "status", "reason", "error"),
    [
        (BEGIN, "FINISHED", "finished", None),
        (BEGIN + "sys.exit(0)", "FINISHED", "finished", None),
        (BEGIN + "sys.exit(1)", "FAILED", "exited with 1", "SystemExit"),
        (BEGIN + "exit('no data')", "FAILED", "exited with no data", "SystemExit"),
        (IMPORTED + BEGIN + "exit(1)", "FAILED", "exited with 1", "SystemExit"),
        (IMPORTED + BEGIN + CAUGHT.replace("sys.exit", "exit"), "FINISHED", "finished", None),
        (BEGIN + HANDLED, "FAILED", "ValueError: boom", "script.py"),
        (BEGIN + "raise ValueError('boom')", "FAILED", "ValueError: boom", "script.py"),
        (BEGIN + "os.kill(os.getpid(), signal.SIGINT)", "KILLED", "stopped by Ctrl-C", None),
        (BEGIN + CAUGHT, "FINISHED", "finished", None),
        (BEGIN + CAUGHT.replace("log(", "set_tags("), "FINISHED", "finished", None),
        (BEGIN + FINALLY, "FINISHED", "finished", None),
        (BEGIN + FORKED, "FINISHED", "finished", None),
        (BEGIN + "run.finish()", "FINISHED", "finished", None),
        (CHILD, "FAILED", "ValueError: boom", "script.py"),
        (BEGIN + TERMINATED, "FAILED", "exited with 143", "SystemExit"),
        (BEGIN + "with run: raise SystemExit(1)", "FAILED", "exited with 1", "SystemExit"),
        (BEGIN + IN_BLOCK, "FINISHED", "finished", None),
        (BEGIN + THREAD + "sys.exit(1)", "FAILED", "exited with 1", "SystemExit"),
        (BEGIN + THREAD + "raise ValueError('boom')", "FAILED", "ValueError: boom", "script.py"),
        (EARLY + BEGIN, "FINISHED", "finished", None),
        (BEGIN + SHOWN, "FINISHED", "finished", None),
        (BEGIN + USED_AT_EXIT, "FAILED", "ValueError: boom", "script.py"),
        (BEGIN + USED_IN_HOOK, "FAILED", "ValueError: boom", "script.py"),
        (BEGIN + CONSOLE, "FINISHED", "finished", None),
        (BEGIN + CONSOLE + "raise ValueError('boom')", "FAILED", "ValueError: boom", "script.py"),
        (REPLACED + BEGIN + "sys.exit(1)", "FAILED", "ValueError: replaced", "script.py"),
    ],
)
def test_end_of_the_process_is_the_end_of_the_run(
    tmp_path: Path, script: str, status: str, reason: str, error: str | None
) -> None:
    (end,), folder = ended(tmp_path, script), tmp_path / "mlruns/runs/r1"
    assert len(of_kind(folder, RunStarted)) == 1
    assert not [one for one in of_kind(folder, Evaluated) if "child" in one.metrics]
    assert (end.status, end.reason.partition(" (")[0]) == (status, reason)
    assert (error or "") in (end.error or "") and (end.error is not None or status != "FAILED")


@pytest.mark.parametrize(
    ("cells", "statuses", "reason"),
    [
        ([BEGIN, "typo"], ["FINISHED"], "finished"),
        ([CRASH, OTHER], ["FAILED"], "ValueError: boom"),
        ([CRASH, "1 +", USED], ["FAILED", "FINISHED"], "finished"),
        ([BEGIN, OTHER, USED + "; typo", "typo"], ["FAILED"], "NameError: name 'typo' is not"),
        ([BEGIN, "run.evaluated({'acc': 1.0}); raise KeyboardInterrupt"], ["KILLED"], "Ctrl-C"),
        ([BEGIN, "sys.exit(3)", OTHER], ["FINISHED"], "finished"),
        ([BEGIN + "sys.exit(3)"], ["FAILED"], "exited with 3"),
        (["%run train.py", "1"], ["FAILED"], "ValueError: boom"),
        (
            [BEGIN, "1", f"{USED}\n{NESTED}\nraise ValueError('boom')"],
            ["FAILED"],
            "ValueError: boom",
        ),
        ([BEGIN, "1", SILENT], ["FINISHED"], "finished"),
        (["with open('x', 'w') as file: pass", "typo", BEGIN, "1"], ["FINISHED"], "finished"),
    ],
)
def test_failed_cell_of_a_notebook_ends_the_runs_that_it_used(
    tmp_path: Path, cells: list[str], statuses: list[str], reason: str
) -> None:
    (tmp_path / "train.py").write_text(CRASH)
    ends = ended(tmp_path, CELLS.format(cells=cells))
    assert [end.status for end in ends] == statuses and reason in ends[-1].reason
    assert statuses[-1] != "FAILED" or "Error" in (ends[-1].error or "") or "exited" in reason
    if OTHER in cells:
        others = of_kind(tmp_path / "mlruns/runs/r2", RunEnded)
        assert [one.status for one in others] == ["FINISHED"]


def test_exception_at_a_prompt_fails_only_a_run_of_its_with_block(tmp_path: Path) -> None:
    lines = BEGIN + "typo\nwith rankzero.track('mine', name='r2', offline=True): typo\n\ntypo\n"
    subprocess.run([sys.executable, "-i"], input=lines, text=True, cwd=tmp_path, check=True)
    for name, status in (("r1", "FINISHED"), ("r2", "FAILED")):
        ends = of_kind(tmp_path / "mlruns/runs" / name, RunEnded)
        assert [one.status for one in ends] == [status]


@pytest.mark.parametrize("options", [["-i"], ["-m", "IPython", "-i"], ["-m", "IPython"]])
def test_script_that_fails_before_a_prompt_fails_its_run(
    tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "script.py").write_text(CRASH)
    command = [sys.executable, *options, "script.py"]
    subprocess.run(command, input="1\n", text=True, cwd=tmp_path, check=False)
    (end,) = of_kind(tmp_path / "mlruns/runs/r1", RunEnded)
    assert end.status == "FAILED" and end.reason.startswith("ValueError: boom (")


def test_signal_that_kills_the_process_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BEGIN + "os.kill(os.getpid(), signal.SIGTERM)")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGTERM
    folder = tmp_path / "mlruns/runs/r1"
    wait_until(lambda: of_kind(folder, RunEnded))  # The recorder writes the end.
    (end,) = of_kind(folder, RunEnded)
    assert end.status == "FAILED" and "killed by a signal" in end.reason


def test_death_of_the_process_that_spawned_this_one_stops_the_run(tmp_path: Path) -> None:
    ended(tmp_path, ORPHAN)
    wait_until(lambda: of_kind(tmp_path / "mlruns/runs/r1", RunEnded))
    (end,) = of_kind(tmp_path / "mlruns/runs/r1", RunEnded)
    assert end.status == "KILLED" and end.reason.startswith("stopped by")


def test_error_that_ends_the_process_is_that_of_all_its_runs(tmp_path: Path) -> None:
    other = 'other = rankzero.track("mine", name="r2", offline=True)\nother.log({"loss": 1.0})\n'
    (end,) = ended(tmp_path, BEGIN + other + "raise ValueError('boom')")
    (other_end,) = of_kind(tmp_path / "mlruns/runs/r2", RunEnded)
    assert end.reason == other_end.reason and end.reason.startswith("ValueError: boom (")


def test_finish_while_an_exception_is_handled_is_noted_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = rankzero.track("mine", name="r1", offline=True)
    try:
        raise ValueError("boom")
    except ValueError as error:
        # A run that a handler begins may end well.
        with rankzero.track("mine", name="r2", offline=True):
            pass
        rankzero.track("mine", name="r3", offline=True).finish(error)
        left = rankzero.track("mine", name="r4", offline=True)
        try:
            raise GeneratorExit
        except GeneratorExit:  # As in the `finally` of a generator.
            left.finish()
        assert "handled" not in capsys.readouterr().out
        run.child("fold")
        run.finish()
    out = capsys.readouterr().out
    assert "finish() was called while ValueError was handled: r1 is FINISHED; use `with`" in out
    assert out.count("was handled") == 1


def test_generator_that_its_reader_leaves_early_ends_its_run_well() -> None:
    def losses() -> Iterator[float]:
        with run:
            yield from (1.0, 0.5)

    run = rankzero.track("mine", offline=True)
    for _ in losses():
        break
    assert [one.status for one in of_kind(run.folder, RunEnded)] == ["FINISHED"]


def test_second_run_notes_once_that_the_first_is_open(tmp_path: Path) -> None:
    ended(tmp_path, SWEEP)
    folders = (tmp_path / "mlruns/runs").iterdir()
    notes = [one.text for folder in folders for one in of_kind(folder, Noticed)]
    assert [note.partition(",")[0] for note in notes] == ["r0 is still open"]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_process_that_only_imports_the_script_has_no_run(
    tmp_path: Path, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the workers of a DataLoader do, in each epoch. With the same name, they would fail."""
    ended(tmp_path, BEGIN + IMPORTED_AGAIN.format(method=method))
    assert "note" not in capfd.readouterr().out
    *_, logged = of_kind(tmp_path / "mlruns/runs/r1", StepsLogged)
    assert logged.metrics == {"code": [0.0]}


def test_second_track_of_a_run_ends_the_first(tmp_path: Path) -> None:
    again = 'again = rankzero.track("mine", name="r1", offline=True)\nagain.log({"loss": 2.0}, 1)'
    late = '\nrun.log({"loss": 3.0}, 2)'  # Each value would end the other and begin an attempt.
    assert [end.status for end in ended(tmp_path, BEGIN + again + late)] == ["KILLED", "FINISHED"]


def test_second_ctrl_c_ends_the_wait_for_a_checkpoint_and_keeps_the_end(tmp_path: Path) -> None:
    run = rankzero.track("mine", name="r1", offline=True)
    run.log({"loss": 1.0})

    class Writing:
        """A checkpoint writer on a slow disk, at which the user loses patience."""

        def poll(self) -> list[Event]:
            return []

        def close(self, patience_seconds: float) -> list[Event]:
            raise KeyboardInterrupt

    run._attempt.checkpoints = Writing()
    with pytest.raises(KeyboardInterrupt):
        run.finish(KeyboardInterrupt())
    *_, logged, end = read_all(tmp_path / "mlruns" / "runs" / "r1" / "events.jsonl")
    assert isinstance(logged, StepsLogged) and isinstance(end, RunEnded)
    assert end.status == "KILLED"

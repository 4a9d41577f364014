"""Signals to the command at unusual moments: while ranks start, twice, after they have ended."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rankzero.cli.main import main
from rankzero.events import Evaluated, RunEnded
from rankzero.mlflow_store import server
from rankzero.run_store.folder import RunFolder
from support.commands import (
    TINY,
    Command,
    events,
    free_port,
    last_end,
    losses,
    processes_of,
    starts,
    tracked,
    wait_for_status,
    wait_until,
)
from support.stores import copied

CLOCKED = TINY.with_name("clocked.py")
ENDLESS = ("step_seconds=0.02", "train.epochs=1000", "train.log_every=2")


def forkservers(command: Command) -> list[psutil.Process]:
    """Return the servers of workers, and the workers."""
    found = []
    for one in processes_of(command.folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.name() == "forkserver" or one.name().startswith("rank-"):
                found.append(one)
    return found


def has_a_rank(command: Command) -> bool:
    """Return whether the server has forked a worker. Loading PyTorch has other children."""
    servers = forkservers(command)
    return has_the_agents_logs(command) and any(
        one.ppid() in {other.pid for other in servers} for one in servers
    )


def has_the_agents_logs(command: Command) -> bool:
    return any((folder.path / "logs").exists() for folder in command.runs)


def joined(launcher: subprocess.Popen[str]) -> bool:
    return any(
        one.status == psutil.CONN_ESTABLISHED
        for one in psutil.Process(launcher.pid).net_connections()
    )


@pytest.mark.parametrize("moment", [has_the_agents_logs, has_a_rank])
def test_signal_while_ranks_start_stops_the_run(
    rankzero: Command, moment: Callable[[Command], bool]
) -> None:
    words = ("--nproc", 2, "--run-name", "early", "--offline")
    process = rankzero.start("train", TINY, *words, *ENDLESS, cold=True)
    wait_until(lambda: moment(rankzero))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=90)
    folder = RunFolder(rankzero.folder / "mlruns/runs/early")
    if "before it began" in output:
        assert process.returncode == 1 and not folder.events.exists()
    else:
        assert process.returncode == 75, output
        assert last_end(folder).status == "KILLED" and len(starts(folder)) == 1
    assert not forkservers(rankzero)


@pytest.mark.slow
def test_resume_that_fails_to_start_is_not_reported_as_the_attempt_before(
    rankzero: Command,
) -> None:
    rankzero.succeed("train", TINY, "--nproc", 1, "--run-name", "r", "train.steps=4")
    folder = rankzero.runs[0]
    broken = rankzero.folder / "broken.py"
    broken.write_text(
        "import os\nif 'RANK' in os.environ:\n    raise ImportError('not here')\n"
        + TINY.read_text()
    )
    began = time.monotonic()
    code, output = rankzero("resume", "r", "train.steps=8", "--experiment", broken)
    assert code == 1 and "ImportError: not here" in output and "FINISHED" not in output, output
    assert "in MLflow yet" not in output and time.monotonic() - began < 60, (
        "it waited although there is nothing to deliver"
    )
    assert tracked(folder).status == "FINISHED" and len(starts(folder)) == 1

    launched = len(list((folder.path / "logs").iterdir()))
    words = ("resume", "r", "--experiment", TINY, *ENDLESS, "train.steps=none")
    process = rankzero.start(*words)
    wait_until(lambda: len(list((folder.path / "logs").iterdir())) > launched)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 75, output
    if "before it began" in output:
        assert (
            "r is unchanged" in output
            and tracked(folder).status == "FINISHED"
            and len(starts(folder)) == 1
        )
    else:
        assert len(starts(folder)) == 2
        wait_for_status(folder, "KILLED")


def test_machine_that_waits_for_a_stopped_one_ends_with_a_message(rankzero: Command) -> None:
    words = (
        *("train", TINY, "--nproc", 1, "--nnodes", 4),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
    )
    first, second = (rankzero.start(*words, "--dir", f"node_{number}") for number in (0, 1))
    # Both have joined once their stores' clients are connected. Nothing else shows it from outside.
    wait_until(lambda: all(joined(one) for one in (first, second)))
    time.sleep(2.0)
    first.send_signal(signal.SIGTERM)
    outputs = [one.communicate(timeout=60)[0] for one in (first, second)]
    assert [one.returncode for one in (first, second)] == [1, 1]
    assert (
        "stopped by SIGTERM before it began" in outputs[0]
        and "did not find each other" in outputs[1]
    )
    assert not any("Traceback" in output for output in outputs), outputs


def test_signal_to_every_process_leaves_a_checkpoint(rankzero: Command) -> None:
    # Cold: a warm command has other processes.
    process = rankzero.start("train", TINY, "--nproc", 2, *ENDLESS, cold=True)
    folder = rankzero.wait_for_step(4)
    for one in processes_of(rankzero.folder):
        one.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert any(folder.checkpoints.glob("step_*"))
    wait_for_status(folder, "KILLED")


@pytest.mark.parametrize("verb", ["train", "probe"])
def test_ranks_have_sessions_of_their_own_and_end_with_the_group_of_the_command(
    rankzero: Command, verb: str
) -> None:
    """Also where a script's shell has the command ignore SIGINT, which PyTorch would send them."""
    settings = ENDLESS if verb == "train" else ("step_seconds=0.5",)
    command = shlex.join([sys.executable, "-m", "rankzero", verb, str(TINY), "--nproc", "2"])
    script = f"trap '' INT; exec {command} --offline {shlex.join(settings)}"
    process = rankzero.start_program("sh", "-c", script)

    def ranks() -> list[psutil.Process]:
        return [one for one in forkservers(rankzero) if os.getsid(one.pid) == one.pid]

    wait_until(lambda: len(ranks()) == 2)
    started = ranks()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive


@pytest.mark.slow
def test_hangup_under_nohup_stops_nothing(rankzero: Command) -> None:
    """As when a terminal is closed: every process of the session gets it."""
    command = [
        *(sys.executable, "-m", "rankzero", "train", str(TINY), "--nproc", "2"),
        *("step_seconds=0.02", "train.steps=150"),
    ]
    process = rankzero.start_program("nohup", *command, "train.log_every=2")
    folder = rankzero.wait_for_step(4)
    assert len(forkservers(rankzero)) == 3
    for one in processes_of(rankzero.folder):
        one.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert tracked(folder).status == "FINISHED" and len(losses(folder)) == 150


def test_background_job_reports_that_ctrl_c_is_ignored_and_sigterm_stops_it(
    rankzero: Command,
) -> None:
    """A script's shell starts background jobs with SIGINT ignored."""
    words = ["train", str(TINY), "--offline", *ENDLESS]
    command = shlex.join([sys.executable, "-m", "rankzero", *words])
    process = rankzero.start_program("sh", "-c", f"trap '' INT; exec {command}")
    folder = rankzero.wait_for_step(4)
    for one in processes_of(rankzero.folder):
        one.send_signal(signal.SIGINT)
    rankzero.wait_for_step(max(losses(folder)) + 50)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert output.count("Ctrl-C does not stop this command") == 1 and "SIGTERM stops it" in output
    assert last_end(folder).reason.startswith("stopped by SIGTERM")


def test_second_signal_ends_the_training_without_a_restart(
    rankzero: Command,
) -> None:
    process = rankzero.start(
        *("train", TINY, "--nproc", 2, "--max-restarts", 3, "step_seconds=5"),
        *("train.epochs=1000", "--offline"),
    )
    wait_until(lambda: any(folder.events.exists() and starts(folder) for folder in rankzero.runs))
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    output, _ = process.communicate(timeout=60)
    assert process.returncode in (1, 75), output
    (folder,) = rankzero.runs
    assert len(starts(folder)) == 1
    assert last_end(folder).status in ("KILLED", "FAILED")


def test_stop_during_a_long_evaluation_leaves_a_checkpoint_in_time(
    rankzero: Command,
) -> None:
    settings = (
        *("train.steps=40", "train.eval_every=20", "train.batch_size=8", "dropout=0.2"),
        *("--nproc", 2, "--offline"),
    )
    rankzero.succeed("train", CLOCKED, "--run-name", "straight", *settings)
    evaluating = rankzero.folder / "evaluating"
    rankzero.environ["TORTURE_EVALUATING"] = str(evaluating)
    # Seven batches of five seconds on each rank; six of them would begin after the signal.
    process = rankzero.start(
        "train", CLOCKED, "--run-name", "stopped", "evaluation_seconds=5", *settings
    )
    wait_until(evaluating.exists)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75 and time.monotonic() - began < 30, output
    stopped, straight = (
        RunFolder(rankzero.folder / "mlruns/runs" / name) for name in ("stopped", "straight")
    )
    (ended,) = [event for event in events(stopped) if isinstance(event, RunEnded)]
    assert (ended.status, ended.reason) == (
        "KILLED",
        "stopped by SIGTERM at step 20, during its evaluation",
    )
    assert not evaluations(stopped)

    rankzero.succeed("resume", "stopped", "evaluation_seconds=0", "--offline")
    assert losses(stopped) == losses(straight)
    assert evaluations(stopped) == evaluations(straight) and list(evaluations(stopped)) == [20, 40]
    assert last_end(stopped).status == "FINISHED"


def evaluations(folder: RunFolder) -> dict[int, dict[str, float]]:
    return {
        event.step: dict(event.metrics) for event in events(folder) if isinstance(event, Evaluated)
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signal_after_the_last_line_does_not_change_the_exit_code(
    rankzero: Command, number: signal.Signals
) -> None:
    process = rankzero.start("train", TINY, "train.steps=4", "--offline")
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("look:"):
        assert line, "it ended without its last line"
    time.sleep(0.02)  # the way out of the training
    process.send_signal(number)
    assert process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signal_during_the_delivery_ends_the_wait_with_the_same_exit_code(
    rankzero: Command, number: signal.Signals
) -> None:
    rankzero.environ["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{free_port()}"
    process = rankzero.start("train", TINY, "train.steps=4", "--run-name", "late")
    folder = RunFolder(rankzero.folder / "mlruns/runs/late")
    wait_until(
        lambda: (
            folder.events.exists() and any(isinstance(event, RunEnded) for event in events(folder))
        )
    )
    time.sleep(2.0)  # the agent sees within half a second that its workers have ended
    assert process.poll() is None, "nothing was waited for"
    told = time.monotonic()
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert time.monotonic() - told < 9.0, (
        "unhurried it waits for 15 s; the way out takes some where all cores are busy"
    )
    assert "rankzero sync late" in output


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 0), ("SIGINT", 3), ("SIGHUP", 0)])
def test_interrupt_while_the_ui_starts_ends_it_quietly(
    number: str,
    code: int,
    tmp_path: Path,
    empty_database: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    copied(empty_database, tmp_path)
    # A server that ends with the terminal's Ctrl-C, before it answers. It has none of our imports.
    program = (
        f"import os, signal, sys, time; time.sleep(1); os.kill(os.getppid(), signal.{number}); "
        f"sys.exit({code})"
    )
    monkeypatch.setattr(server, "command", lambda *_: [sys.executable, "-ISc", program])
    # As in a terminal, also where these tests run under nohup.
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        assert main(["ui", "--port", str(free_port()), "--no-open", "--dir", str(tmp_path)]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "".join(capfd.readouterr()) == ""

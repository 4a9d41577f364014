"""`rankzero train` and `resume`, for real: processes, signals, MLflow."""

from __future__ import annotations

import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rankzero.catalog.lookup import folders, mlflow_id
from rankzero.events import Evaluated, RunEnded, RunStarted, StepsLogged
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store import checkpoint_files
from rankzero.run_store.folder import RunFolder
from rankzero.training.checkpoints import restore
from support.commands import (
    TINY,
    Command,
    events,
    free_port,
    last_end,
    losses,
    starts,
    tracked,
    wait_for_status,
)
from support.stores import Server


def tracked_losses(folder: RunFolder) -> dict[int, float]:
    run_id = mlflow_id(folder)
    assert run_id is not None
    points = MlflowRuns(folder.identity.tracking_uri).history(run_id, "train/loss")
    assert len(points) == len({point.step for point in points}), "a step was logged twice"
    return {point.step: point.value for point in points}


def final_weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    path, problems = checkpoint_files.newest_intact(folder.checkpoints)
    assert path is not None and not problems
    weights: dict[str, torch.Tensor] = restore.load(path)["model"]
    return weights


def resumed_at(folder: RunFolder) -> int:
    """Return the second attempt's first step; assert that it trained from there."""
    told = events(folder)
    begun, again = (event for event in told if isinstance(event, RunStarted))
    assert begun.step == 0
    trained = [
        step
        for event in told[told.index(again) :]
        if isinstance(event, StepsLogged)
        for step in event.steps
    ]
    assert trained and min(trained) == again.step + 1
    return again.step


def test_a_file_that_changes_the_folder_trains_into_the_commands_store(rankzero: Command) -> None:
    sub = rankzero.folder / "sub"
    sub.mkdir()
    (sub / "seed.txt").write_text("7")
    text = TINY.read_text().replace("samples(200, 1)", "samples(200, int(open('seed.txt').read()))")
    move = "import os\nos.chdir(os.path.dirname(os.path.abspath(__file__)))\n"
    (sub / "moves.py").write_text(move + text)
    words = ("train", "sub/moves.py", "--run-name", "moves", "--offline", "train.steps=1")
    rankzero.succeed(*words)
    folder = RunFolder(rankzero.folder / "mlruns/runs/moves")
    assert last_end(folder).status == "FINISHED"
    assert folder.identity.project_dir == str(rankzero.folder)


def test_two_processes_train_as_one_does(rankzero: Command) -> None:
    settings = ("train.steps=12", "train.log_every=4", "train.eval_every=6")
    rankzero.succeed("train", TINY, "--nproc", 1, "--run-name", "one", "--offline", *settings)
    output = rankzero.succeed("train", TINY, "--nproc", 2, "--run-name", "two", *settings)
    one, two = (RunFolder(rankzero.folder / "mlruns/runs" / name) for name in ("one", "two"))
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    for name, weight in final_weights(one).items():
        torch.testing.assert_close(final_weights(two)[name], weight)
    evaluations = [
        [event.metrics for event in events(run) if isinstance(event, Evaluated)]
        for run in (one, two)
    ]
    for alone, together in zip(*evaluations, strict=True):
        assert together == pytest.approx(alone, rel=1e-5)
    assert tracked_losses(two) == losses(two)
    run = tracked(two)
    assert run.status == "FINISHED"
    assert run.params["train.steps"] == "12" and run.params["world_size"] == "2"
    assert "rankzero runs" not in output and "rankzero ui" in output and "FINISHED" in output


def test_sigterm_stops_with_a_checkpoint_and_resuming_is_exact(rankzero: Command) -> None:
    settings = (
        *("train.steps=60", "train.log_every=2", "train.eval_every=10", "dropout=0.2"),
        *("--nproc", 2),
    )
    rankzero.succeed("train", TINY, "--run-name", "straight", "--offline", *settings)
    process = rankzero.start("train", TINY, "--run-name", "stopped", "step_seconds=0.05", *settings)
    stopped = rankzero.wait_for_step(7, "stopped")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "rankzero resume stopped" in output
    wait_for_status(stopped, "KILLED")
    ended = [event for event in events(stopped) if isinstance(event, RunEnded)][-1]
    assert ended.reason.startswith("stopped by SIGTERM")
    first_id = mlflow_id(stopped)
    saved, _ = checkpoint_files.newest_intact(stopped.checkpoints)
    assert saved is not None
    step = restore.load(saved)["step"]
    assert 7 <= step == max(losses(stopped)) < 60

    rankzero.succeed("resume", "stopped", "step_seconds=0")  # with as many processes as before
    assert resumed_at(stopped) == step
    straight = RunFolder(rankzero.folder / "mlruns/runs/straight")
    assert losses(stopped) == losses(straight)
    for name, weight in final_weights(straight).items():
        assert torch.equal(final_weights(stopped)[name], weight)
    assert mlflow_id(stopped) == first_id
    run = tracked(stopped)
    assert run.status == "FINISHED" and run.tags["rankzero.attempt"] == "2"
    assert tracked_losses(stopped) == losses(straight)
    code, output = rankzero("resume", first_id)
    assert code == 2 and "has finished" in output


def test_a_time_limit_is_a_planned_end_and_is_continued(rankzero: Command) -> None:
    words = ("step_seconds=0.02", "train.epochs=1000", "train.limits.max_minutes=0.01")
    code, output = rankzero("train", TINY, "--name", "mine", "--offline", *words)
    folder = rankzero.runs[0]
    ended, step = last_end(folder), max(losses(folder))
    assert code == 0 and ended.status == "FINISHED", output
    limit = f"reached train.limits.max_minutes at step {step}; "
    assert ended.reason.startswith(limit)
    assert (
        "Resume from the latest:\n\n```sh\nrankzero resume mine\n" in rankzero("report", "mine")[1]
    )
    rankzero.succeed("resume", "mine", "--offline")
    assert resumed_at(folder) == step and last_end(folder).status == "FINISHED"
    code, output = rankzero("resume", "mine", "--offline", f"train.steps={step}")
    assert code == 2 and "nothing is left to train" in output


def test_ctrl_c_stops_with_a_checkpoint(rankzero: Command) -> None:
    process = rankzero.start(
        "train", TINY, "--offline", "step_seconds=0.05", "train.epochs=100", "train.log_every=2"
    )
    folder = rankzero.wait_for_step(4)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert last_end(folder).status == "KILLED"
    assert last_end(folder).reason.startswith("stopped by Ctrl-C at step")


def test_sigkill_of_rank_0_leaves_a_failed_run_with_every_metric(rankzero: Command) -> None:
    process = rankzero.start(
        "train", TINY, "--nproc", 2, "step_seconds=0.02", "train.epochs=100", "train.log_every=1"
    )
    folder = rankzero.wait_for_step(20)
    os.kill(_rank_zero(folder), signal.SIGKILL)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1, output
    run = tracked(folder)
    assert run.status == "FAILED"
    assert "SIGKILL" in output and "SIGKILL" in run.tags["rankzero.reason"]
    assert tracked_losses(folder) == losses(folder)
    assert max(losses(folder)) >= 20


def _rank_zero(folder: RunFolder) -> int:
    found = re.search(r'"pid": (\d+)', (folder.path / "recorder.json").read_text())
    assert found is not None
    return int(found[1])


def test_killed_rank_restarts_from_its_checkpoint(rankzero: Command) -> None:
    process = rankzero.start(
        *("train", TINY, "--nproc", 2, "--max-restarts", 1, "step_seconds=0.03"),
        *("train.steps=60", "train.log_every=2", "train.checkpoints.save_every=10"),
    )
    folder = rankzero.wait_for_step(25)
    os.kill(_rank_zero(folder), signal.SIGKILL)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    _, step = starts(folder)
    # Each 12 steps are an epoch, and the best evaluations are saved, too.
    assert step >= 20 and (step % 10 == 0 or step % 12 == 0)
    assert sorted(losses(folder)) == list(range(1, 61))
    assert tracked(folder).status == "FINISHED"
    assert tracked(folder).tags["rankzero.attempt"] == "2"
    assert tracked_losses(folder).keys() == losses(folder).keys()


@pytest.mark.parametrize(
    ("fail", "says"),
    [
        ("measure", "no such measure"),
        ("model", "no such model"),
        ("nan", "not finite"),
    ],
)
def test_exception_of_the_user_is_one_line_and_fails_the_run(
    rankzero: Command, fail: str, says: str
) -> None:
    # MLflow gets the same of each of these failures.
    offline = [] if fail == "measure" else ["--offline"]
    code, output = rankzero("train", TINY, "--nproc", 2, f"fail={fail}", *offline)
    assert code == 1
    error = next(line for line in output.splitlines() if line.startswith("error:"))
    assert says in error
    assert "Traceback" not in output
    if fail != "nan":
        assert re.search(rf"tiny\.py, line \d+, in {fail}", error)
    ended = last_end(rankzero.runs[-1])
    assert ended.status == "FAILED" and says in ended.reason and says in (ended.error or "")
    if not offline:
        run = tracked(rankzero.runs[-1])
        assert run.status == "FAILED" and says in run.tags["rankzero.reason"]
        assert says in run.tags["rankzero.error"]


def test_hanging_rank_ends_the_run_and_is_named(rankzero: Command) -> None:
    rankzero.environ["TORTURE_RANK"] = "hang 1 20"
    words = ("--nproc", 2, "train.limits.hang_minutes=0.05", "--offline")
    code, output = rankzero("train", TINY.with_name("clocked.py"), *words)
    assert code == 1, output
    (folder,) = rankzero.runs
    ended = last_end(folder)
    assert ended.status == "FAILED"
    assert re.search(r"rank 1 hung for \d s \(.*clocked.py, line \d+, in hurt\)", ended.reason)
    log = next((folder.path / "logs").glob("*/attempt_0/1/stderr.log")).read_text()
    assert (
        "most recent call first" in log
        and "clocked.py" in log
        and "train.limits.hang_minutes sets the limit" in log
    )


def test_truncated_checkpoint_is_skipped(rankzero: Command) -> None:
    rankzero.succeed(
        *("train", TINY, "train.steps=20", "train.checkpoints.save_every=10"),
        *("train.eval_every=10", "train.checkpoints.keep=3", "--run-name", "torn"),
        "--offline",
    )
    folder = RunFolder(rankzero.folder / "mlruns/runs/torn")
    newest = sorted(folder.checkpoints.iterdir())[-1] / "state.pt"
    newest.write_bytes(newest.read_bytes()[:100])
    output = rankzero.succeed("resume", "torn", "train.steps=30", "--offline")
    assert "truncated" in output
    assert starts(folder) == [0, 10]


@pytest.mark.slow
def test_run_of_another_machine_resumes_from_mlflow(rankzero: Command, tmp_path: Path) -> None:
    rankzero.succeed("train", TINY, "train.steps=20", "--run-name", "far")
    folder = RunFolder(rankzero.folder / "mlruns/runs/far")
    run_id, before = mlflow_id(folder), losses(folder)
    folder.path.rename(tmp_path / "elsewhere")
    rankzero.succeed("resume", run_id, "train.steps=25", "--experiment", TINY)
    run = tracked(folder)
    assert run.run_id == run_id and run.status == "FINISHED"
    assert sorted(tracked_losses(folder)) == list(range(1, 26))
    assert {step: tracked_losses(folder)[step] for step in before} == before


@pytest.mark.slow
def test_secret_does_not_reach_mlflow_and_resume_elsewhere_asks_for_it(
    rankzero: Command, tmp_path: Path
) -> None:
    rankzero.succeed("train", TINY, "train.steps=5", "--run-name", "far", "api_key=hunter2")
    folder = RunFolder(rankzero.folder / "mlruns/runs/far")
    run = tracked(folder)
    artifact = MlflowRuns(folder.identity.tracking_uri).download_artifact(
        run.run_id, "config.yaml", tmp_path
    )
    assert "api_key: '[secret]'" in artifact.read_text() and run.params["api_key"] == "[secret]"
    assert "hunter2" not in artifact.read_text() + str(run)
    assert "api_key: hunter2" in folder.config.read_text()
    folder.path.rename(tmp_path / "elsewhere")
    code, output = rankzero("resume", run.run_id, "train.steps=8")
    assert (
        code == 2 and "--experiment FILE" in output
    )  # MLflow names a file that is not below this folder
    code, output = rankzero("resume", run.run_id, "train.steps=8", "--experiment", TINY)
    assert code == 2 and "pass them again, api_key=…" in output
    # A command that was refused leaves no file noted.
    words = ("resume", run.run_id, "train.steps=8", "--experiment", TINY)
    rankzero.succeed(*words, "api_key=hunter2")
    assert "api_key: hunter2" in folder.config.read_text()
    assert sorted(tracked_losses(folder)) == list(range(1, 9))


def test_broken_pipe_prints_no_traceback(rankzero: Command) -> None:
    code, _ = rankzero("train", TINY, "train.steps=2", "--offline")
    assert code == 0
    runs = subprocess.Popen(
        [sys.executable, "-m", "rankzero", "runs"],
        cwd=rankzero.folder,
        env=rankzero.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert runs.stdout is not None
    runs.stdout.close()  # as head does
    assert "Traceback" not in runs.communicate()[1]


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_server_that_dies_slows_nothing_and_loses_nothing(
    rankzero: Command, sqlite: str, tmp_path: Path
) -> None:
    rankzero.environ["RANKZERO_DELIVERY_GRACE_SECONDS"] = "3"
    server = Server(tmp_path, sqlite)
    with server.running():
        process = rankzero.start(
            *("train", TINY, "--tracking-uri", server.uri, "--nproc", 2, "--run-name", "outage"),
            *("step_seconds=0.02", "train.steps=250", "train.log_every=5"),
        )
        folder = rankzero.wait_for_step(60)
    down = max(losses(folder))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "rankzero sync outage" in output
    times = step_times(folder)
    before, after = times[10 : down - 5], times[down + 5 :]
    assert statistics.median(after) < 1.5 * statistics.median(before)
    with server.running():
        rankzero.succeed("sync", "outage")
        assert tracked_losses(folder) == losses(folder) and len(losses(folder)) == 250
        assert tracked(folder).status == "FINISHED"


def step_times(folder: RunFolder) -> list[float]:
    """Return the seconds between steps."""
    logged = [
        event
        for event in events(folder)
        if isinstance(event, StepsLogged) and "train/loss" in event.metrics
    ]
    moments = [moment for event in logged for moment in event.times]
    return [later - earlier for earlier, later in itertools.pairwise(moments)]


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_batch(rankzero: Command) -> None:
    layered = TINY.with_name("layered.py")
    rankzero.succeed("train", layered, "--nproc", 1, "--run-name", "roomy", "--offline")
    settings = ("most_samples=2", "train.eval_batch=8")
    output = rankzero.succeed("train", layered, "--nproc", 2, "--run-name", "tight", *settings)
    assert "out of memory: micro-batch 8 -> 4 -> 2" in output
    tight, roomy = (
        RunFolder(rankzero.folder / "mlruns/runs" / name) for name in ("tight", "roomy")
    )
    assert losses(tight) == pytest.approx(losses(roomy), rel=1e-4)
    run = tracked(tight)
    assert run.status == "FINISHED", output
    assert run.tags["rankzero.out_of_memory"] == "micro-batch 8 -> 4 -> 2"
    config = tight.config.read_text()
    assert "micro_batch: 2" in config and "eval_batch: 2" in config
    assert run.params["train.batch_size"] == "16"
    code, output = rankzero(
        "train", layered, "--nproc", 2, "most_samples=2", "train.limits.oom=fail", "--offline"
    )
    assert code == 1 and "OutOfMemoryError" in output
    code, output = rankzero(
        "train", layered, "--nproc", 2, "train.micro_batch=2", "most_samples=0", "--offline"
    )
    assert code == 1 and "OutOfMemoryError" in output and "micro-batch 2 -> 1" in output


@pytest.mark.parametrize(("later", "ending"), [("room", "FINISHED"), ("exit", "FAILED")])
def test_out_of_memory_of_an_earlier_start_is_ignored(
    rankzero: Command, later: str, ending: str
) -> None:
    words = (
        *("train", TINY.with_name("layered.py"), "--nproc", 2, "--max-restarts", 1),
        *("most_samples=2", "--offline"),
    )
    code, output = rankzero(*words, f"later={later}")
    assert code == (0 if ending == "FINISHED" else 1), output
    assert "micro-batch" not in output
    assert len(starts(rankzero.runs[-1])) == 2 and last_end(rankzero.runs[-1]).status == ending


@pytest.mark.cluster
@pytest.mark.timeout(200)
def test_two_nodes_train_as_one(rankzero: Command, tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    words = (
        *("train", TINY, "--nproc", 1, "--nnodes", 2, "--rdzv-endpoint", endpoint),
        *("train.steps=12", "--offline"),
    )
    nodes = [
        rankzero.start(*words, f"lr=0.0{3 + number}", "--dir", tmp_path / f"node_{number}")
        for number in (0, 1)
    ]
    outputs = [node.communicate(timeout=90)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    (first,) = [
        folder
        for number in (0, 1)
        for folder in folders(tmp_path / f"node_{number}" / "runs")
        if folder.events.exists()
    ]
    (lr,) = re.findall(
        r"^lr: .*", first.config.read_text(), re.MULTILINE
    )  # rank 0's, whichever node that is
    rankzero.succeed(
        *("train", TINY, "--run-name", "alone", "train.steps=12", lr.replace(": ", "=")),
        "--offline",
    )
    assert losses(first) == pytest.approx(losses(rankzero.runs[0]), rel=1e-5)
    assert sum("FINISHED" in output for output in outputs) == 1

    held = first.path.parents[1]  # the other machine has no checkpoints
    resume = (
        *("resume", first.path.name, "train.steps=16", "--nproc", 1, "--nnodes", 2),
        *("--rdzv-endpoint", endpoint, "--offline"),
    )
    helped = next(tmp_path / name for name in ("node_0", "node_1") if tmp_path / name != held)
    (part,) = [one for one in folders(helped / "runs") if one.path.name == first.path.name]
    # Its own command was given another rate. A resume there needs rank 0's settings.
    assert re.findall(r"^lr: .*", part.config.read_text(), re.MULTILINE) == [lr]
    assert part.processes.read_text() == "2"
    # The machine that is named first in the endpoint is now the one without the run.
    nodes = [rankzero.start(*resume, "--dir", folder) for folder in (helped, held)]
    outputs = [node.communicate(timeout=90)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert list(losses(first)) == list(range(1, 17))


@pytest.mark.slow
def test_two_nodes_with_one_disk_share_a_name(rankzero: Command) -> None:
    words = (
        *("train", TINY, "--nproc", 1, "--nnodes", 2),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "train.steps=8"),
        *("train.mlflow.log_model=true", "--run-name", "shared"),
    )
    nodes = [rankzero.start(*words) for _ in (0, 1)]
    outputs = [node.communicate(timeout=90)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    (folder,) = rankzero.runs
    assert list(losses(folder)) == list(range(1, 9)) and tracked(folder).status == "FINISHED"
    code, output = rankzero(*words)
    assert code == 2 and "there is a run 'shared' already" in output

"""A command's work for the delivery of its run, once the training is over."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankzero import config, experiment_file
from rankzero.catalog.lookup import last_end
from rankzero.cli import launch_run
from rankzero.cli.display import delivery_notes
from rankzero.errors import RunFailed
from rankzero.events import RunEnded
from rankzero.launch import agent, failures
from rankzero.launch.failures import Failure, FailureKind
from rankzero.run_store import checkpoint_files, disk
from rankzero.run_store import delivery_state as state
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import delivery_status
from rankzero.training.checkpoints import best_model
from support.commands import TINY, Command
from support.runs import append, ended, make_folder, started, stuck
from support.webhook import Webhook


@dataclasses.dataclass
class Told:
    """A console that keeps what it is told."""

    ended: RunEnded | None
    is_first: bool | None = True
    notices: list[str] = dataclasses.field(default_factory=list)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def result(self, ended: RunEnded) -> None:
        self.ended = ended

    @contextlib.contextmanager
    def status(self, text: str) -> Iterator[None]:
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    """A finished run, whose recorder lives and gets nowhere."""
    with stuck(tmp_path) as made:
        checkpoint_files.folder_of(made.checkpoints, 1).mkdir(parents=True)
        yield made


def plan_of(folder: RunFolder, processes: int = 1) -> launch_run.LaunchPlan:
    experiment = experiment_file.load(str(TINY))()
    return launch_run.LaunchPlan(folder, experiment, agent.Topology(processes))


def finish(
    folder: RunFolder,
    hurried: Callable[[], bool] = lambda: False,
    *,
    seen: bool = True,
    is_first: bool = True,
) -> list[str]:
    """Let the command wait for the delivery; return its notices. `seen`: whether it saw the end."""
    console = Told(ended() if seen else None, is_first)
    plan = plan_of(folder)
    experiment = config.override(plan.experiment, {"train.mlflow.log_model": True})
    tried = dataclasses.replace(plan, experiment=experiment)
    launch_run._finish_delivery(tried, console, hurried)  # type: ignore[arg-type]
    return console.notices


def without_rank_zero(
    folder: RunFolder, *, stopped: bool, is_first: bool | None = True
) -> tuple[int, list[str]]:
    """Report a launch whose ranks did not come up; return the exit code and what is said."""
    console = Told(None, is_first)
    plan = plan_of(folder)
    result = agent.LaunchResult("FAILED", "stopped by SIGTERM before it began")
    code = launch_run._report_without_attempt(plan, result, console, stopped=stopped)  # type: ignore[arg-type]
    return code, console.notices


def test_resume_that_is_stopped_early_leaves_the_run_unchanged(tmp_path: Path) -> None:
    run = make_folder(tmp_path)
    (run.checkpoints / "step_00000004").mkdir(parents=True)
    code, said = without_rank_zero(run, stopped=True)
    assert code == 75 and said == [
        f"stopped by SIGTERM before it began: {run.path.name} is unchanged"
    ]
    with pytest.raises(RunFailed, match="before it began; see"):
        without_rank_zero(run, stopped=False)
    assert (run.path / "run.json").exists()


def test_one_failure_of_several_machines_is_one_message(
    tmp_path: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_NOTIFY", webhook.address)
    for is_first in (False, None):
        run = make_folder(tmp_path / str(is_first))
        for _ in range(2):  # two machines that share the folder
            with pytest.raises(RunFailed):
                without_rank_zero(run, stopped=False, is_first=is_first)
    ((_, news),) = webhook.got
    assert news["run"] == run.path.name, "machines that met no other send their own"


def test_folder_that_is_gone_after_a_training_fails_the_command(tmp_path: Path) -> None:
    plan = plan_of(make_folder(tmp_path))
    shutil.rmtree(plan.folder.path)
    for result in (agent.LaunchResult("FINISHED"), agent.LaunchResult("FAILED", "disk")):
        with pytest.raises(RunFailed, match="deleted during the training: move it back"):
            launch_run._report_without_attempt(plan, result, Told(None), stopped=False)  # type: ignore[arg-type]


def test_a_rank_that_was_killed_after_the_training_is_named(folder: RunFolder) -> None:
    console = Told(None)
    plan = plan_of(folder, 2)
    for result in (
        agent.LaunchResult("FINISHED"),
        agent.LaunchResult("FAILED", "rank 1 was killed by SIGKILL", signal.SIGKILL),
    ):
        assert launch_run._report(plan, result, console) == 0  # type: ignore[arg-type]
    assert console.notices == ["after the training, rank 1 was killed by SIGKILL"]


def test_only_the_first_machine_says_how_the_logging_of_the_model_ended(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_WAIT_DELIVERY", "1")
    folder.late_model.touch()
    plan, result = plan_of(folder, 2), agent.LaunchResult("FINISHED")
    codes = [launch_run._report(plan, result, Told(None, is_first)) for is_first in (True, False)]  # type: ignore[arg-type]
    assert codes == [74, 0]


@pytest.mark.parametrize(("total", "halved"), [(None, None), (100, 8)])
def test_a_model_that_does_not_fit_keeps_its_micro_batch(
    tmp_path: Path, total: int | None, halved: int | None
) -> None:
    """An attempt that fails in set-up does not know its steps."""
    folder = make_folder(tmp_path)
    append(folder, dataclasses.replace(started(), total_steps=total), ended("FAILED"))
    failures.write(Failure(0.0, 0, "", "", FailureKind.OUT_OF_MEMORY), folder.failures)
    plan = plan_of(folder)
    plan = dataclasses.replace(
        plan, experiment=config.override(plan.experiment, {"train.batch_size": 16})
    )
    found = launch_run._with_half_the_micro_batch(plan)
    assert (found[1].train.micro_batch if found else None) == halved


def test_launch_that_never_began_leaves_no_run(tmp_path: Path) -> None:
    run = make_folder(tmp_path)
    for _ in range(2):  # of two machines that share the folder, the second as well
        with pytest.raises(RunFailed, match="before it began; see"):
            without_rank_zero(run, stopped=True)
    assert not (run.path / "run.json").exists()


def test_delivery_problems_are_printed_with_what_mlflow_lacks(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "0.2")
    state.save(
        state.path_of(folder, 0),
        state.DeliveryState(
            run_id="abc",
            retries=state.Retries(7, 1, error="ConnectionError: refused"),
            problems=state.Problems(1, ("metric x: no",)),
            queue=state.Queue((state.Task.ARTIFACTS,)),
            cursor=state.Cursor({folder.events.name: folder.events.stat().st_size}),
        ),
    )
    told = finish(folder)
    assert told[0].startswith("7 tries to deliver failed") and "- metric x: no" in told
    assert told[-1] == (
        "not everything is in MLflow yet (ConnectionError: refused); it lacks an upload, the best "
        f"model. Nothing is lost on this disk: rankzero sync {folder.path.name} "
        f"--dir {folder.path.parent.parent}"
    )
    assert sum("ConnectionError" in line for line in told) == 1


def test_a_run_on_a_full_disk_is_not_promised(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "0.1")
    lost = make_folder(tmp_path / "lost")
    without_an_end: list[str] = []
    delivery_notes.wait(lost, without_an_end.append)
    assert "The end of the run is not on this disk. To deliver the rest: " in without_an_end[-1]
    monkeypatch.setattr(disk, "is_full", lambda at: True)
    told = finish(folder)[-1]
    assert "Make room, then: rankzero sync" in told and "Nothing is lost" not in told
    plan = plan_of(lost)
    for reason in ("rank 0 was killed", ""):
        result = agent.LaunchResult("FAILED", reason)
        with pytest.raises(RunFailed, match=rf"\({reason}.*the disk of {lost.path} is full\)"):
            launch_run._report(plan, result, Told(None))  # type: ignore[arg-type]


def test_wait_for_the_delivery_that_was_asked_for_decides_the_exit_code(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "0.1")
    finish(folder)
    folder.late_model.unlink()
    assert delivery_notes.exit_code(folder) == 0, "nobody asked to wait"
    monkeypatch.setenv("RANKZERO_WAIT_DELIVERY", "0.5")
    began = time.monotonic()
    assert "rankzero sync" in finish(folder)[-1] and time.monotonic() - began >= 0.5
    assert delivery_notes.exit_code(folder) == 74
    done = state.DeliveryState(
        run_id="abc",
        queue=state.Queue(ended=True),
        cursor=state.Cursor({folder.events.name: folder.events.stat().st_size}),
    )
    state.save(state.path_of(folder, 0), done)
    assert delivery_notes.exit_code(folder) == 74, "the best model is still to be logged"
    folder.late_model.unlink()
    assert delivery_notes.exit_code(folder) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("RANKZERO_WAIT_DELIVERY", "86400")],
)
def test_stopped_run_does_not_wait_long_for_a_server_that_is_away(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.delenv("RANKZERO_DELIVERY_GRACE_SECONDS", raising=False)
    monkeypatch.setenv(name, value)
    received = [signal.SIGTERM]
    hurried, began = launch_run.stops_waiting(received, 0.5), time.monotonic()
    assert "rankzero sync" in finish(folder, hurried)[-1]
    assert 0.5 <= time.monotonic() - began < 10.0
    hurried = launch_run.stops_waiting(received, 60.0)
    assert not hurried()
    received.append(signal.SIGTERM)
    assert hurried(), "another signal ends the wait"
    assert not launch_run.stops_waiting([], 0.0)(), "nothing stopped the run"


def test_signals_end_the_wait_of_a_finished_search_and_not_the_command(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANKZERO_WAIT_DELIVERY", "60")

    def wait(
        of: RunFolder, enough: Callable[[delivery_status.Delivery], bool]
    ) -> delivery_status.Delivery:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert enough(delivery_status.status(of))
        return delivery_status.status(of)

    monkeypatch.setattr(delivery_status, "wait", wait)
    delivery_notes.print_delivery(folder, offline=False)
    assert "(the command was stopped); it lacks" in " ".join(capsys.readouterr().out.split())
    assert delivery_notes.exit_code(folder) == 74


def test_best_model_gets_the_time_that_the_delivery_left(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "30")
    left = []

    def deliver(
        of: RunFolder, enough: Callable[[delivery_status.Delivery], bool]
    ) -> delivery_status.Delivery:
        time.sleep(1.0)
        return delivery_status.status(of)._replace(done=True)

    monkeypatch.setattr(delivery_status, "wait", deliver)
    monkeypatch.setattr(
        best_model.LoggingProcess,
        "wait",
        lambda process, notice, hurried, seconds: left.append(seconds),
    )
    assert finish(folder) == []
    assert 20.0 < left[0] <= 29.0


def test_a_run_without_checkpoints_has_no_best_model_to_log(folder: RunFolder) -> None:
    checkpoint_files.folder_of(folder.checkpoints, 1).rmdir()
    finish(folder, lambda: True)
    assert not folder.late_model.exists()


def test_the_machine_that_shows_a_run_logs_its_best_model(folder: RunFolder) -> None:
    finish(folder, lambda: True, is_first=False)
    assert not folder.late_model.exists()
    finish(folder, lambda: True)
    assert folder.late_model.exists()


def test_sync_delivers_what_a_command_did_not_wait_for(rankzero: Command) -> None:
    rankzero.environ["RANKZERO_DELIVERY_GRACE_SECONDS"] = "0"
    output = rankzero.succeed(
        "train", TINY, "train.steps=4", "train.mlflow.log_model=true", "--run-name", "hasty"
    )
    assert "the best model" in output and "rankzero sync hasty" in output, output
    folder = RunFolder(rankzero.folder / "mlruns/runs/hasty")
    assert not folder.logged_model.exists()
    assert folder.late_model.exists(), "sync is to know"
    code, output = rankzero("sync")
    assert code == 0 and "hasty: complete" in output, output
    logged, end = json.loads(folder.logged_model.read_text()), last_end(folder)
    assert end is not None and logged["ended"] == end.time, "a later sync has nothing to do"
    assert not folder.late_model.exists(), output
    assert "nothing to deliver" in rankzero("sync")[1]

"""Dead runs get their end recorded, and `rankzero doctor RUN` explains what happened."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rankzero.catalog import dead_runs, lookup
from rankzero.cli.display import diagnosis as command
from rankzero.cli.main import main
from rankzero.errors import UserError
from rankzero.events import Evaluated, Noticed, RunEnded, RunStarted, StepsLogged
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.reporting import timeline
from rankzero.run_store import delivery_state as delivery
from rankzero.run_store import run_locks
from rankzero.run_store.attempt import is_written, sole_launcher, take_over
from rankzero.run_store.delivery_state import Cursor, Curves, DeliveryState, Problems, Retries
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import sync
from support.commands import TINY, Command
from support.runs import T0, append, ended, evaluated, make_folder, saved, started, steps
from support.stores import list_runs


def aged(folder: RunFolder, seconds: float) -> None:
    """Let all that the folder holds be that old."""
    for path in folder.path.rglob("*"):
        os.utime(path, (time.time() - seconds,) * 2)


def dead_writer(folder: RunFolder) -> None:
    """Leave the claim of a process that is gone."""
    program = (
        "from pathlib import Path; from rankzero.run_store import run_locks, folder; "
        f"run_locks.claim(folder.RunFolder(Path({str(folder.path)!r})), 0)"
    )
    subprocess.run([os.sys.executable, "-c", program], check=True)  # type: ignore[attr-defined]


def test_run_that_is_training_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path)
    run_locks.claim(folder, 0)
    append(folder, started(), steps(1, 2))
    assert is_written(folder)
    assert main(["resume", folder.path.name, "--dir", str(tmp_path)]) != 0
    assert f"{folder.path.name} is still training: stop it first" in capsys.readouterr().err
    append(folder, ended("KILLED"))
    assert not is_written(folder), (
        "a process that has said its end may live on, as a notebook's does"
    )
    on_another_machine(folder)
    assert not is_written(folder)
    append(folder, started(2))
    run_locks.claim(folder, 0)
    on_another_machine(folder)
    assert is_written(folder), "of that nothing is known but that it wrote of late"


def test_run_belongs_to_its_command_also_between_two_attempts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(), steps(1, 2), ended("FAILED"))
    with sole_launcher(folder, 1):
        assert main(["resume", folder.path.name, "--dir", str(tmp_path)]) != 0
        assert f"{folder.path.name}: another command still trains" in capsys.readouterr().err
        with pytest.raises(UserError, match="another command still trains"):
            take_over(folder)
    take_over(folder)
    two_machines = sole_launcher(folder, 2), sole_launcher(folder, 2)  # they may share the folder
    with (
        two_machines[0],
        two_machines[1],
        pytest.raises(UserError, match="another command still trains"),
    ):
        sole_launcher(folder, 1).__enter__()


def on_another_machine(folder: RunFolder) -> None:
    path = folder.path / "recorder.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere"}))


@pytest.mark.timeout(200)
def test_run_without_any_process_is_closed_and_explained(rankzero: Command) -> None:
    process = rankzero.start(
        "train", TINY, "--run-name", "gone", "step_seconds=0.02", "train.steps=5000"
    )
    folder = rankzero.wait_for_step(30)
    # As when a machine goes down. Once is not enough: a recorder may just start its courier.
    for _ in range(4):
        for pid in _family(process.pid, folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    process.wait()
    assert lookup.listed(folder.path.parent)[0].status == "DIED" and not dead_runs.is_stale(
        folder
    )  # not at once
    aged(folder, 300)
    code, output = rankzero("runs")
    assert (
        code == 0
        and "no sign of life since" in output
        and "FAILED" in output
        and "RUNNING" not in output
    )
    record = MlflowRuns(folder.identity.tracking_uri).find_run("gone")
    assert record.status == "FAILED" and "no sign of life since" in record.tags["rankzero.reason"]
    last = lookup.last_end(folder)
    assert (
        last is not None and last.time < time.time() - 250
    )  # when it died, not when somebody looked
    output = rankzero.succeed("doctor", "gone")
    for words in (
        "gone: FAILED",
        "attempt 1 began at step 0",
        "no sign of life since",
        "values delivered",
        ", gone",
    ):
        assert words in output, output
    assert "closed" not in rankzero("runs")[1]


def _family(launcher: int, folder: RunFolder) -> list[int]:
    """Return the processes of the launcher and of the run's recorder, which has its own session."""
    found = [launcher]
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().decode(errors="replace")
            session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
        except (OSError, ValueError):
            continue
        if str(folder.path) in line or session == launcher:
            found.append(int(path.name))
    return list(dict.fromkeys(found))[::-1]


class TestStale:
    def test_dead_writer_and_silence(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        append(folder, started(), steps(1, 9))
        dead_writer(folder)
        assert not dead_runs.is_stale(folder)
        aged(folder, 60)
        assert dead_runs.is_stale(folder)
        with run_locks.lock(folder, 0):  # somebody delivers still, and will say the end
            assert not dead_runs.is_stale(folder)
        claim = run_locks.latest(folder, 0)
        recorder = run_locks.announce_recorder(folder, 0, claim.token) if claim else None
        assert recorder is not None
        assert not dead_runs.is_stale(folder), (
            "its recorder lives, which delivers nothing, and will say the end"
        )
        os.close(recorder)
        assert dead_runs.is_stale(folder)
        dead_runs.close(folder)
        dead_runs.close(folder)
        assert (
            not dead_runs.is_stale(folder)
            and lookup.listed(tmp_path / "runs")[0].status == "FAILED"
        )
        assert folder.events.read_text().count("RunEnded") == 1

    def test_live_writer_is_never_stale(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        append(folder, started())
        run_locks.claim(folder, 0)
        aged(folder, 10_000)
        assert (
            not dead_runs.is_stale(folder)
            and lookup.listed(tmp_path / "runs")[0].status == "RUNNING"
        )
        dead_runs.close(folder)  # as by who looked before it began
        assert "RunEnded" not in folder.events.read_text()

    def test_run_of_another_machine_is_alive_by_its_samples(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        append(folder, started())
        dead_writer(folder)
        claim = json.loads((folder.path / "recorder.json").read_text())
        (folder.path / "recorder.json").write_text(json.dumps({**claim, "host": "another"}))
        aged(folder, 3600)
        folder.system(0).write_text("")
        assert run_locks.writer_lives(folder)
        aged(folder, 3600)
        assert dead_runs.is_stale(folder)

    def test_helping_machine_writes_no_end(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        run_locks.claim(folder, 0)  # as the launcher does where the run has a name of the user's
        dead_writer(folder)
        folder.system(1).write_text("")
        aged(folder, 3600)
        assert (
            not dead_runs.is_stale(folder)
            and lookup.listed(tmp_path / "runs")[0].status == "ELSEWHERE"
        )
        sync.deliver(folder, patience=0.0)
        assert not folder.events.exists()

    def test_failure_file_of_a_rank_gives_the_reason(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        append(folder, started())
        folder.failures.mkdir()
        left = {"time": time.time(), "rank": 1, "reason": "OSError: no", "error": "Traceback"}
        (folder.failures / "rank_1.json").write_text(json.dumps(left))
        aged(folder, 60)
        dead_runs.close(folder)
        end = lookup.last_end(folder)
        assert end is not None and end.reason == "OSError: no"

    def test_run_that_never_began(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        aged(folder, 60)
        assert (
            not dead_runs.is_stale(folder)
            and lookup.listed(tmp_path / "runs")[0].status == "STARTING"
        )
        aged(folder, 600)
        assert dead_runs.is_stale(folder) and "never began" in dead_runs.close(folder)

    def test_sync_closes_a_run_that_died_before_it_began(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = make_folder(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}")
        dead_writer(folder)
        assert main(["sync", "--dir", str(tmp_path)]) == 0
        end = lookup.last_end(folder)
        assert (
            end is not None
            and "never began" in end.reason
            and folder.path.name in capsys.readouterr().out
        )
        (run,) = list_runs(folder.identity.tracking_uri)
        assert run.status == "FAILED"

    def test_run_whose_launcher_waits_for_another_machine_is_not_stale(
        self, tmp_path: Path
    ) -> None:
        folder = make_folder(tmp_path)
        run_locks.claim(folder, 0)
        aged(folder, 10_000)
        assert (
            not dead_runs.is_stale(folder)
            and lookup.listed(tmp_path / "runs")[0].status == "STARTING"
        )


def test_timeline_is_ordered_and_short() -> None:
    events = [
        RunStarted(T0, {"goal.metric": "val/loss"}, {"rankzero.host": "box"}, 1, 0, 1000),
        *(Evaluated(T0 + n, n, {"val/loss": 1 / n}, True) for n in range(1, 31)),
        StepsLogged([30], [T0 + 30], {"train/loss": [1.0]}),
        Noticed(T0 + 31, "the hook x failed and was disabled"),
        StepsLogged([31], [T0 + 631], {"train/loss": [1.0]}),
        RunEnded(T0 + 632, "KILLED", "stopped by SIGTERM at step 31", None, {}),
        RunStarted(T0 + 900, {}, {}, 2, 30, 1000),
        StepsLogged([31], [T0 + 700], {"train/loss": [1.0]}),
        RunEnded(T0 + 701, "FINISHED", "trained", None, {}),
        RunStarted(T0 + 702, {}, {"rankzero.own_loop": "true"}, 3),
    ]
    told = [line.text for line in timeline.lines(events)]
    assert "attempt 3 began" in told
    assert told[0] == "attempt 1 began at step 0 of 1,000 on box"
    assert told[1] == "evaluation at step 1: val/loss 1, the best so far"
    assert "… 22 more evaluations …" in told and len(told) < 20
    for words in (
        "nothing was written for 10.0 min after step 30",
        "note: the hook x failed and was disabled",
        "KILLED at step 31: stopped by SIGTERM at step 31",
        "attempt 2 began at step 30 of 1,000",
        "the clock went back by 3.3 min",
        "FINISHED at step 31: trained",
    ):
        assert words in told, told


def test_doctor_shows_the_first_ranks_of_the_newest_launch(tmp_path: Path) -> None:
    append(folder := make_folder(tmp_path), started(), ended("FAILED"))
    for launch, moment in (("zz", 1e9), ("aa", 2e9)):
        attempt = folder.path / "logs" / launch / "attempt_0"
        for rank in range(12):
            (attempt / f"{rank}").mkdir(parents=True)
            (attempt / f"{rank}" / "stderr.log").write_text(launch)
            (attempt / f"{rank}" / "stdout.log").write_text(launch)
        os.utime(attempt, (moment, moment))
    shown = dict(command.sections(folder))["the ranks' last output (logs/)"]
    assert shown[::2] == [f"aa/attempt_0/{rank}/stderr.log: aa" for rank in range(8)]


def test_doctor_shows_failures_delivery_and_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "postgresql://me:hunter2@host/db")
    append(
        folder,
        started(),
        steps(1, 9),
        evaluated(9, 0.5),
        saved(folder, 9),
        Noticed(T0 + 9, "hook x was disabled"),
    )
    with folder.events.open("a") as file:
        file.write("torn\n")
    append(folder, ended("FAILED", "ValueError: bad", error="Traceback\nValueError: bad"))
    folder.failures.mkdir()
    # Rank 3 has written the failure of rank 1, which it only saw.
    for writer, rank, moment in ((1, 1, 5.0), (0, 0, 6.0), (3, 1, 4.0)):
        left = {
            "time": moment,
            "rank": rank,
            "reason": f"rank {rank} says no",
            "error": "File x\nValueError: bad",
        }
        (folder.failures / f"rank_{writer}.json").write_text(json.dumps(left))
    (folder.failures / "rank_2.json").write_text("[")
    delivery.save(
        delivery.path_of(folder, 0),
        DeliveryState(
            run_id="abc",
            cursor=Cursor(delivered=12),
            curves=Curves(skipped=3),
            problems=Problems(1, ("metric x: no",), 1, ("param p: cut",)),
            retries=Retries(7, 2, 99, "ConnectionError: refused"),
        ),
    )
    (folder.path / "recorder.log").write_text("INFO fine\nWARNING try 7 failed\n")
    logs = folder.path / "logs" / "x" / "attempt_0" / "0"
    logs.mkdir(parents=True)
    (logs / "stderr.log").write_text("password=hunter2\nlast words\n")
    assert main(["doctor", folder.path.name, "--dir", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    for words in (
        ": FAILED",
        "rank 1, the first: rank 1 says no",
        "checkpoint of step 9",
        "1 lines of the journal",
        "note: hook x was disabled",
        "12 values delivered",
        "7 tries to deliver failed",
        "metric x: no",
        "param p: cut",
        "not everything is delivered: ConnectionError",
        "WARNING try 7 failed",
        "last words",
        "3 values not sent again",
        "rankzero resume",
        "rankzero sync",
    ):
        assert words in output, (words, output)
    assert "hunter2" not in output and "Traceback (most" not in output
    assert output.count("rank 1 says no") == 1


@pytest.mark.parametrize(
    ("recorded", "name", "again"),
    [
        ("/bin/rankzero repeat x.py --seeds 3", "run", "continue: rankzero repeat run --dir"),
        ("/bin/rankzero repeat x.py --seeds 3", "run-seed0", "continue: rankzero repeat run --dir"),
        (
            "/bin/rankzero search 'my x.py' --name run --new --trials 9",
            "run",
            "continue: rankzero search 'my x.py' --name run --trials 9\n",
        ),
        ("/bin/rankzero compare x.py", "run", "start a new run"),
    ],
)
def test_parent_of_runs_without_a_checkpoint_is_continued_by_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: str, name: str, again: str
) -> None:
    folder = make_folder(tmp_path, name=name, parent="run" if name != "run" else None)
    tags = {"rankzero.command": recorded}
    append(folder, RunStarted(T0, {}, tags, 1), ended("FAILED"))
    command.run(tmp_path / "runs", name)
    output = capsys.readouterr().out
    assert again in output, output


def test_empty_run_has_a_diagnosis(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert dict(command.sections(folder))["delivery to MLflow"] == [
        "[yellow]nothing was delivered yet[/]"
    ]


def test_events_that_cannot_be_written_are_on_the_run_page(tmp_path: Path) -> None:
    from rankzero.run_store.journal import Journal
    from rankzero.tracking.deliverer import Deliverer
    from rankzero.tracking.run_log import RunLog
    from support.memory_store import MemoryStore

    folder, tracker = make_folder(tmp_path), MemoryStore()
    log = RunLog(folder, Journal(folder.events), 1, None)
    odd = Evaluated(T0, 3, {"x": object()}, False)  # type: ignore[dict-item]
    for event in (started(), steps(1, 3), odd, ended()):
        log(event)
    log.close()
    tracker.fail = _failing_once()
    deliverer = Deliverer(folder, 0, lambda uri: tracker)  # type: ignore[arg-type, return-value]
    while not deliverer.complete:
        deliverer.hasten()
        deliverer.work()
    page = tracker.tags["mlflow.note.content"]
    assert "a Evaluated is lost, since it cannot be written" in page
    assert (
        "1 try to deliver failed, MLflow was away once, " in page
        and tracker.tags["rankzero.retries"] == "1"
    )


def _failing_once():  # type: ignore[no-untyped-def]
    left = [1]

    def fail(name: str, argument: object) -> None:
        if name == "log_metrics" and left:
            left.pop()
            raise ConnectionError("away")

    return fail

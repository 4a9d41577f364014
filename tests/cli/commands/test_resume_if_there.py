"""`rankzero train --resume-if-there`: one command that starts a run and continues it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from rankzero import config, experiment_file
from rankzero.cli.commands import resume
from rankzero.housekeeping import download
from rankzero.launch.machines import ALONE
from rankzero.launch.request import write_config
from rankzero.mlflow_store.client import MlflowRuns, RunRecord
from rankzero.run_store import checkpoint_files, run_locks
from rankzero.run_store.attempt import is_written
from rankzero.run_store.folder import Identity, RunFolder
from support.checkpoints import damage_checkpoint, save_steps
from support.commands import (
    TINY,
    Command,
    losses,
    processes_of,
    starts,
    tracked,
    wait_for_status,
    wait_until,
)
from support.runs import append, ended, make_folder, started, steps
from support.stores import Server, mlflow_runs

AGAIN = ("train", TINY, "--name", "again", "--resume-if-there", "train.steps=30")


def test_the_same_command_starts_continues_and_then_leaves_a_run(rankzero: Command) -> None:
    process = rankzero.start(*AGAIN, "step_seconds=0.1")
    folder = rankzero.wait_for_step(4)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=120)
    assert process.wait() == 75, output
    rankzero.succeed(*AGAIN, "step_seconds=0.0")
    begun, again = starts(folder)
    assert begun == 0 and 4 <= again < 30 and max(losses(folder)) == 30
    code, output = rankzero(*AGAIN)
    assert code == 0 and "note: again has finished with step 30" in output, output
    assert rankzero.runs == [folder] and tracked(folder).status == "FINISHED"
    assert list(mlflow_runs(rankzero.folder)) == ["again"]


@pytest.mark.parametrize(("store", "code"), [((), 0), (("--tracking-uri", "http://[::1]:9"), 74)])
def test_the_same_command_delivers_what_is_left_if_it_is_to_wait(
    rankzero: Command, store: tuple[str, ...], code: int
) -> None:
    words = (*AGAIN[:-1], "train.steps=4", "train.mlflow.log_model=false", *store)
    rankzero.succeed(*words, "--offline")
    assert rankzero(*words, "--wait-delivery=1")[0] == code
    assert code or tracked(rankzero.runs[0]).status == "FINISHED"


@pytest.mark.parametrize("moment", ["before its settings", "before its first checkpoint"])
def test_a_run_that_was_killed_early_begins_again(rankzero: Command, moment: str) -> None:
    process = rankzero.start(*AGAIN, "step_seconds=0.2", "train.eval_every=30")
    folder = rankzero.wait_for_step(2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    wait_for_status(folder, "FAILED")
    identity = folder.identity
    if moment == "before its settings":
        wait_until(lambda: not processes_of(rankzero.folder))
        shutil.rmtree(folder.path)
        RunFolder.create(folder.path.parent, identity)
    code, output = rankzero(*AGAIN, "train.eval_every=30")
    assert code == 0 and "has no checkpoint: it begins again" in output, output
    assert starts(folder)[-1] == 0 and max(losses(folder)) == 30
    assert rankzero.runs == [folder] and folder.identity.uuid == identity.uuid
    assert tracked(folder).status == "FINISHED" and len(mlflow_runs(rankzero.folder)) == 1


def test_a_mistake_in_the_set_up_is_mended_under_the_same_name(rankzero: Command) -> None:
    file = rankzero.folder / "mine.py"
    tiny, quick = Path(TINY).read_text(), ("train.steps=8", "train.mlflow.log_model=false")
    words = ("train", file, "--name", "mine", *quick)
    file.write_text(tiny.replace('fail: str = ""', 'fail: str = "model"'))
    code, output = rankzero(*words)
    assert code == 1 and "no such model" in output, output
    file.write_text(tiny.replace("batch_size=32", "batch_size=20"))
    again = "`rankzero train … --name mine --resume-if-there` begins it again"
    for wrong in (words, ("resume", "mine")):
        code, output = rankzero(*wrong)
        assert code == 2 and again in output, output
    rankzero.succeed(*words, "--resume-if-there")
    (folder,) = rankzero.runs
    assert starts(folder)[-1] == 0 and config.read_file(folder.config)["train.batch_size"] == 20
    code, output = rankzero(*words)
    assert code == 2 and "continue it: rankzero resume mine" in output, output
    wait_until(lambda: not processes_of(rankzero.folder))
    rankzero.succeed("delete", "mine", "--yes")
    code, output = rankzero(*words)
    assert code == 2 and "mine is deleted: `rankzero delete --restore mine`" in output, output


@pytest.mark.cluster
def test_a_run_of_a_lost_disk_continues_from_the_server(rankzero: Command, server: Server) -> None:
    words = (*AGAIN, "--tracking-uri", server.uri, "--experiment-name", "lost-disk")
    rankzero.succeed(*words, "train.steps=10", "--wait-delivery")
    run_id = tracked(rankzero.runs[0]).run_id
    _lose_the_disk(rankzero)
    code, output = rankzero(*words, "--wait-delivery")
    assert code == 0 and "again is not on this disk, and continues from" in output, output
    assert starts(rankzero.runs[0]) == [10] and tracked(rankzero.runs[0]).run_id == run_id
    # A run of this name in another MLflow experiment is somebody else's.
    _lose_the_disk(rankzero)
    code, output = rankzero(*words[:-1], "another", "train.steps=2", "--wait-delivery")
    assert code == 0 and starts(rankzero.runs[0]) == [0], output
    assert tracked(rankzero.runs[0]).run_id != run_id


def _lose_the_disk(rankzero: Command) -> None:
    # `--wait-delivery` ends when MLflow has all; the courier then writes once more how far it is.
    wait_until(lambda: not processes_of(rankzero.folder))
    shutil.rmtree(rankzero.folder / "mlruns" / "runs")


@pytest.mark.cluster
def test_a_run_that_returns_to_its_first_machine_continues_from_the_newest_checkpoint(
    rankzero: Command, server: Server
) -> None:
    """Machine A, then B, then A again, without a shared disk."""
    store = ("--tracking-uri", server.uri, "--experiment-name", "there-and-back")
    words, slow = (*AGAIN, *store, "--wait-delivery"), "step_seconds=0.3"
    rankzero.succeed(*words, "train.steps=10")
    runs = rankzero.folder / "mlruns" / "runs"
    wait_until(lambda: not processes_of(rankzero.folder))
    shutil.copytree(runs, rankzero.folder / "disk-of-a")
    shutil.rmtree(runs)
    code, output = rankzero(*words, "train.steps=20", slow)
    assert code == 0 and starts(rankzero.runs[0]) == [10], output
    _lose_the_disk(rankzero)
    (rankzero.folder / "disk-of-a").rename(runs)
    code, output = rankzero(*words, slow)
    assert code == 0 and "comes from MLflow" in output, output
    (folder,) = rankzero.runs
    assert starts(folder) == [0, 20] and max(losses(folder)) == 30
    _assert_each_step_once(MlflowRuns(server.uri), tracked(folder))


def test_the_same_command_leaves_a_run_that_ended_early(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, experiment_file=str(TINY))
    tiny, words = experiment_file.load(str(TINY))(), ["train.epochs=100", "train.patience=3"]
    write_config(folder, config.override(tiny, config.parse_assignments(words)))
    append(folder, started(), steps(1, 20), ended(reason="no better val/accuracy for 3"))
    again = argparse.Namespace(dir=tmp_path, settings=words, experiment=None)
    with pytest.raises(resume.NothingLeft, match="has finished with step 20"):
        resume._experiment(folder, again)
    again.settings = ["train.patience=4"]
    assert resume._experiment(folder, again).train.patience == 4


def test_a_server_that_is_away_holds_up_no_resume_of_a_checkpoint_that_is_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "http://127.0.0.1:9", mlflow_run_id="run-1")
    save_steps(folder.path, {3: 0.5})
    here = checkpoint_files.folder_of(folder.checkpoints, 3)
    assert resume._newest_checkpoint(folder, False, required=True) == here
    assert "MLflow cannot be asked for a newer checkpoint" in capsys.readouterr().out


def test_a_checkpoint_that_is_damaged_here_and_not_a_deleted_one_comes_from_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, "http://127.0.0.1:9", mlflow_run_id="run-1")
    saved = save_steps(folder.path, {3: 0.5, 4: 0.6, 5: 0.7}, keep=9)
    append(folder, *saved)
    asked: list[int] = []

    def newest_checkpoint(_folder: RunFolder, after: int) -> tuple[Path | None, list[str]]:
        asked.append(after)
        return None, []

    monkeypatch.setattr(download, "newest_checkpoint", newest_checkpoint)
    fourth, fifth = (checkpoint_files.folder_of(folder.checkpoints, step) for step in (4, 5))
    damage_checkpoint(fifth, "truncate")
    assert resume._newest_checkpoint(folder, False, required=True) == fourth
    shutil.copytree(fifth, tmp_path / "damaged")
    shutil.rmtree(fifth)
    assert resume._newest_checkpoint(folder, False, required=True) == fourth
    shutil.copytree(tmp_path / "damaged", fifth)
    append(folder, dataclasses.replace(saved[1], time=9.0))  # of a branch from the third
    assert resume._newest_checkpoint(folder, False, required=True) == fourth
    assert asked == [4, 5, 5]


def _assert_each_step_once(store: MlflowRuns, run: RunRecord) -> None:
    for key in run.marks:
        steps = [point.step for point in store.history(run.run_id, key)]
        assert steps == sorted(set(steps)), key
        if key.startswith(("train/", "system/cpu")):
            assert steps == list(range(steps[0], len(steps) + steps[0])), key
    saved = [one.step for one in store.models.list_checkpoints(run)]
    assert saved == sorted(set(saved))


def test_it_waits_for_the_writer_of_another_machine_until_that_counts_as_dead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its node has failed, so nobody will write the end."""
    folder = RunFolder.create(tmp_path, Identity("again", "u", "e", "sqlite:///none", None))
    run_locks.claim(folder, 0)
    for path in folder.path.glob("recorder*.json"):
        path.write_text(path.read_text().replace(socket.gethostname(), "failed-node"))
    lately = time.time() - run_locks.ABANDONED_SECONDS + 3
    os.utime(folder.path / "run.json", (lately, lately))
    resume._await_other_machine(folder, ALONE)
    assert "waiting for the last attempt, on failed-node" in capsys.readouterr().out
    assert time.time() >= lately + run_locks.ABANDONED_SECONDS and not is_written(folder)


def test_it_needs_a_name(rankzero: Command) -> None:
    code, output = rankzero("train", TINY, "--resume-if-there")
    assert code == 2 and "add --name NAME" in output

"""Each check of the campaign finds a planted violation. Otherwise it would prove nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rankzero.events import CheckpointSaved, StepsLogged, decode, encode_line
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.items import MetricPoint
from rankzero.run_store import checkpoint_files
from rankzero.run_store import delivery_state as state
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import sync
from support.runs import T0, append, deleted, ended, evaluated, make_folder, started, steps
from torture import curves, promises, room
from torture.ground import DELIVERERS, Ground
from torture.planted import REFERENCE, STEPS, expect_broken, run_of
from torture.scenarios import checkpoints, signals, training
from torture.scenarios.checkpoints import _one_before_is_offered as _offered
from torture.servers import free_port


@pytest.fixture
def saved(tmp_path: Path) -> RunFolder:
    """A finished run with two intact checkpoints."""
    run = make_folder(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}")
    append(run, started(), steps(1, STEPS), evaluated(STEPS, 0.5), ended())
    for step in (2, STEPS):
        checkpoint_files.write(
            checkpoint_files.folder_of(run.checkpoints, step), _save(step), step, {}, best=False
        )
    return run


@pytest.fixture
def whole(saved: RunFolder, tmp_path: Path, new_store: Path) -> RunFolder:
    """The same run, delivered to MLflow."""
    shutil.copy(new_store, tmp_path / "mlflow.db")
    assert sync.deliver(saved).done
    return saved


def _save(step: int) -> Any:
    return lambda path: torch.save({"step": step}, path)


def test_wrong_values_and_statuses_of_a_run_are_found(whole: RunFolder) -> None:
    promises.delivered_without_sync(whole)
    promises.nothing_is_lost(whole, REFERENCE, steps=STEPS)
    assert promises.checkpoints_are_intact(whole) == STEPS
    assert promises.status_is(whole, "FINISHED") == "FINISHED"
    expect_broken("wrong status", promises.status_is, whole, "KILLED")
    _another_value(whole, '"val/loss":0.5', '"val/loss":0.25')
    expect_broken(
        "doubled|wrong: in MLflow val/loss of step 4 is 0.5",
        promises.nothing_is_lost,
        whole,
        REFERENCE,
    )
    _another_value(whole, '"val/loss":0.25', '"val/loss":0.5')
    append(whole, steps(STEPS + 1, STEPS + 1))
    expect_broken(
        "lost: 1 points of train/loss are not in MLflow", promises.delivered_without_sync, whole
    )
    MlflowRuns(whole.identity.tracking_uri).close_run(
        promises.delivered(whole).run_id, dataclasses.replace(ended(), status="KILLED")
    )
    expect_broken(
        "wrong status: the journal has FINISHED, MLflow KILLED",
        promises.status_is,
        whole,
        "KILLED",
    )


def test_wrong_values_of_two_attempts_in_a_row_are_ignored(
    place: Ground,
) -> None:
    # The scenario spoiled step 2 of the first attempt and step 4 of the second.
    run = run_of(place, started(), steps(1, 1), steps(2, 2, offset=math.nan))
    append(run, started(attempt=2, step=1), steps(2, 3), steps(4, 4, offset=math.nan))
    promises.nothing_is_lost(run, REFERENCE, spoiled=4, ignored={2})
    expect_broken("wrong", promises.nothing_is_lost, run, REFERENCE, spoiled=4)
    expect_broken("wrong", promises.nothing_is_lost, run, REFERENCE, ignored={2})


def test_a_recorder_that_did_not_note_its_end_is_found(whole: RunFolder) -> None:
    path = state.path_of(whole, 0)
    known = state.load(path)
    state.save(path, dataclasses.replace(known, queue=state.Queue(ended=False)))
    expect_broken(
        "wrong: MLflow has all of .*, but the recorder did not note that",
        promises.delivered_without_sync,
        whole,
    )
    state.save(
        path, dataclasses.replace(known, queue=state.Queue((state.Task.ARTIFACTS,), ended=True))
    )
    expect_broken(
        "lost: 1 of .* are not in MLflow without `sync`", promises.delivered_without_sync, whole
    )


def _another_value(run: RunFolder, was: str, becomes: str) -> None:
    lines = run.events.read_text().splitlines()
    assert any(was in line for line in lines)
    events = []
    for line in lines:
        fields = json.loads(line.replace(was, becomes))
        del fields["crc"]
        events.append(decode(json.dumps(fields)))
    # With checksums that fit, so that only the value is wrong.
    run.events.write_bytes(b"".join(map(encode_line, events)))


@pytest.mark.parametrize("name", ["state.pt", "manifest.json"])
def test_a_torn_checkpoint_is_found_also_an_older_one(saved: RunFolder, name: str) -> None:
    for step in (2, STEPS):
        torn = checkpoint_files.folder_of(saved.checkpoints, step) / name
        content = torn.read_bytes()
        torn.write_bytes(content[:-9])
        expect_broken("corrupt", promises.checkpoints_are_intact, saved)
        torn.unlink()
        expect_broken("corrupt", promises.checkpoints_are_intact, saved)
        torn.write_bytes(content)
    assert promises.checkpoints_are_intact(saved) == STEPS


def test_a_checkpoint_of_another_step_is_found(saved: RunFolder) -> None:
    checkpoint_files.folder_of(saved.checkpoints, 2).rename(
        checkpoint_files.folder_of(saved.checkpoints, 3)
    )
    expect_broken("corrupt: step_00000003 holds step 2", promises.checkpoints_are_intact, saved)


def test_a_missing_checkpoint_is_found_unless_a_later_one_replaced_it(
    saved: RunFolder,
) -> None:
    _journal_checkpoint(saved, 2, best=True)
    _journal_checkpoint(saved, STEPS, best=False)
    assert promises.checkpoints_are_intact(saved) == STEPS
    _moved(saved, STEPS, ".tmp-replaced-")
    assert promises.checkpoints_are_intact(saved) == STEPS, "an interrupted replacement is undone"
    aside = _moved(saved, STEPS, "gone-")
    expect_broken(
        r"lost: the newest checkpoint, of step 4, is gone: there are \[2\]",
        promises.checkpoints_are_intact,
        saved,
    )
    append(saved, deleted(STEPS))
    assert promises.checkpoints_are_intact(saved) == 2
    aside.rename(checkpoint_files.folder_of(saved.checkpoints, STEPS))
    best = _moved(saved, 2, "gone-")
    expect_broken(
        r"lost: the best checkpoint, of step 2, is gone: there are \[4\]",
        promises.checkpoints_are_intact,
        saved,
    )
    checkpoint_files.write(
        checkpoint_files.folder_of(saved.checkpoints, 3), _save(3), 3, {}, best=True
    )
    assert promises.checkpoints_are_intact(saved) == STEPS, (
        "a better one was saved, but not journaled"
    )
    shutil.rmtree(checkpoint_files.folder_of(saved.checkpoints, 3))
    append(saved, deleted(2))
    assert promises.checkpoints_are_intact(saved) == STEPS
    shutil.rmtree(best)


def _journal_checkpoint(run: RunFolder, step: int, *, best: bool) -> None:
    path = checkpoint_files.folder_of(run.checkpoints, step)
    append(run, CheckpointSaved(T0 + step, step, str(path.relative_to(run.path)), best, {}))


def _moved(run: RunFolder, step: int, prefix: str) -> Path:
    path = checkpoint_files.folder_of(run.checkpoints, step)
    return path.rename(path.with_name(prefix + path.name))


def test_the_use_of_a_damaged_checkpoint_is_found(saved: RunFolder, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(saved.checkpoints, whole)
    newest, before = (checkpoint_files.folder_of(saved.checkpoints, step) for step in (STEPS, 2))
    wanted = "wanted step_00000002"
    expect_broken(
        f"corrupt: after nothing, step_00000004 is offered, {wanted}",
        _offered,
        saved,
        whole,
        "nothing",
    )
    expect_broken(
        "corrupt: step_00000004 is loaded, though damaged",
        checkpoints._is_not_loaded,
        newest,
        "damaged",
    )
    (newest / "state.pt").write_bytes(b"")
    _offered(saved, whole, "emptied")
    checkpoints._is_not_loaded(newest, "emptied")
    checkpoint_files.write(before, _save(1), 2, {}, best=False)
    expect_broken(
        "corrupt: after emptied, step_00000002 has changed", _offered, saved, whole, "emptied"
    )
    shutil.rmtree(before)
    expect_broken(
        f"corrupt: after emptied, None is offered, {wanted}", _offered, saved, whole, "emptied"
    )
    expect_broken(
        f"corrupt: the run resumed from step 0, {wanted}",
        checkpoints._resumed_from,
        saved,
        whole / before.name,
    )
    append(saved, started(attempt=2, step=2))
    checkpoints._resumed_from(saved, whole / before.name)


def _points(*values: tuple[int, float]) -> list[MetricPoint]:
    return [MetricPoint("train/loss", value, 0, step) for step, value in values]


@pytest.mark.parametrize(
    ("points", "begin"),
    [
        (_points((1, 1.0)), "lost: 1 points of train/loss"),
        (_points((1, 1.0), (2, 0.25)), "wrong: in MLflow train/loss of step 2 is 0.25, wanted 0.5"),
        (_points((1, 1.0), (2, math.nan)), "wrong: in MLflow train/loss of step 2 is nan"),
        (_points((1, 1.0), (2, 0.5), (2, 0.5)), "doubled: MLflow has 3 points"),
        (
            _points((1, 1.0), (2, 0.5), (3, 0.3)),
            "wrong: MLflow has train/loss of step 3, which was never",
        ),
    ],
)
def test_wrong_and_missing_points_in_mlflow_are_found(
    points: Sequence[MetricPoint], begin: str
) -> None:
    expect_broken(
        begin, curves.have_arrived, {"train/loss": {1: 1.0, 2: 0.5}}, {"train/loss": points}
    )


LOSS = REFERENCE["train/loss"]
LOSSES = list(LOSS.items())


@pytest.mark.parametrize(
    ("points", "journaled", "total", "begin"),
    [
        (LOSSES[:2], [3], None, None),
        (LOSSES[:1] + LOSSES[2:], [1, 3], None, "lost: 1 points of train/loss are in neither"),
        (LOSSES[:3], [1, 2, 3, 4], 4, "lost: 1 points of train/loss are not in MLflow"),
        (LOSSES + LOSSES[1:2], [1, 2, 3, 4], 4, "doubled: MLflow has 5 points"),
        ([(1, 0.9)], [1], None, "wrong: in MLflow train/loss of step 1 is 0.9, wanted 1.0"),
    ],
)
def test_a_step_that_an_undisturbed_training_has_otherwise_is_found(
    points: list[tuple[int, float]], journaled: list[int], total: int | None, begin: str | None
) -> None:
    found = {"train/loss": _points(*points)}
    mine, oracle = {"train/loss": {step: LOSS[step] for step in journaled}}, {"train/loss": LOSS}
    if begin is None:
        curves.match_oracle(found, mine, oracle, total)
    else:
        expect_broken(begin, curves.match_oracle, found, mine, oracle, total)


def test_a_wrong_best_value_and_values_that_a_scenario_spoiled_are_told_apart() -> None:
    curves.best_is(0.5, REFERENCE)
    expect_broken("wrong: MLflow's best val/accuracy is 0.25", curves.best_is, 0.25, REFERENCE)
    expect_broken("wrong: MLflow's best val/accuracy is None", curves.best_is, None, REFERENCE)
    found, mine = {"train/loss": _points((1, 1.0), (2, math.nan))}, {"train/loss": {1: 1.0}}
    curves.match_oracle(found, mine, {"train/loss": LOSS}, None, {2})
    expect_broken("wrong", curves.match_oracle, found, mine, {"train/loss": LOSS}, None)


@pytest.mark.parametrize("name", ["lr", "throughput/step_seconds", "grad_norm"])
def test_a_window_missing_in_mlflow_is_found_also_one_of_a_resume_between_others(
    place: Ground, name: str
) -> None:
    run = run_of(place, started(), steps(1, STEPS), _window(2, name), _window(4, name))
    append(run, started(attempt=2, step=2), _window(3, name, 8.0), _window(5, name, 8.0))
    assert curves.first(run)[name] == {2: 1.0, 3: 8.0, 4: 1.0, 5: 8.0}
    record = promises.delivered(run)
    points = curves.in_mlflow(run, record.run_id, [name])
    curves.have_arrived({name: curves.first(run)[name]}, points)
    expect_broken(
        f"lost: 1 points of {name}",
        curves.have_arrived,
        {name: curves.first(run)[name]},
        {name: points[name][1:]},
    )
    append(run, _window(7, name))
    expect_broken(
        f"lost: 1 points of {name} are not in MLflow, the first of step 7",
        promises.delivered_without_sync,
        run,
    )


def _window(step: int, name: str, value: float = 1.0) -> StepsLogged:
    return StepsLogged([step], [T0 + step], {name: [value]})


def test_wrong_and_missing_values_in_a_journal_are_found() -> None:
    nan, gap = (
        {"train/loss": {1: 1.0, 2: math.nan, 3: math.nan}},
        {"train/loss": {1: 1.0, 3: 1 / 3}},
    )
    expect_broken(
        "wrong: in the journal train/loss of step 2 is nan", curves.are_undisturbed, nan, REFERENCE
    )
    expect_broken(
        "wrong: in the journal train/loss of step 2 is nan",
        curves.are_undisturbed,
        nan,
        REFERENCE,
        3,
    )
    curves.are_undisturbed(nan, REFERENCE, 2)
    expect_broken(
        "wrong: in the journal val/loss of step 4",
        curves.are_undisturbed,
        {"val/loss": {4: 0.75}},
        REFERENCE,
    )
    expect_broken(
        "lost: the journal has 2 steps up to 3, wanted no gap", curves.have_no_gap, gap, None
    )
    expect_broken("lost: the journal has 3 steps up to 3, wanted 4", curves.have_no_gap, nan, 4)
    expect_broken(
        "lost: 1 points of val/accuracy",
        curves.have_all,
        {"train/loss": REFERENCE["train/loss"]},
        REFERENCE,
    )


def test_a_run_without_a_journal_and_one_that_finished_too_early_are_found(
    place: Ground,
) -> None:
    expect_broken("lost: there is no run", training.resumes, place, REFERENCE, ("FINISHED",))
    run = run_of(place)
    run.events.unlink(missing_ok=True)
    expect_broken("lost: the run has no journal", training.resumes, place, REFERENCE, ("FINISHED",))
    append(run, started(), steps(1, STEPS), ended())
    expect_broken(
        "wrong status: FINISHED after 4 of 200 steps",
        training.resumes,
        place,
        REFERENCE,
        ("FINISHED",),
    )


def test_a_restart_after_a_signal_and_a_stop_without_checkpoint_are_found(place: Ground) -> None:
    run = run_of(place, started(), steps(1, STEPS), ended("KILLED", "stopped by SIGTERM"))
    signals._began_once(place)
    sync.deliver(run)
    expect_broken("lost: stopped at step 4, the newest checkpoint is of step 0", _stopped, place)
    checkpoint_files.write(
        checkpoint_files.folder_of(run.checkpoints, STEPS), _save(STEPS), STEPS, {}, best=False
    )
    _stopped(place)
    append(run, started(attempt=2))
    expect_broken("wrong: the training began 2 times", signals._began_once, place)


def _stopped(place: Ground) -> None:
    signals._stopped_where_it_was(place, REFERENCE)


@contextlib.contextmanager
def _left_over(
    place: Ground, code: str = "", words: Sequence[str] = (), marked: bool = True
) -> Iterator[int]:
    """Start a process in the scenario's folder that does not end, and yield its pid."""
    environ = place.environ if marked else {"PATH": os.environ["PATH"]}
    stays = f"{code}\nprint('here', flush=True)\nimport time; time.sleep(600)"
    command = [sys.executable, "-c", stays, *words]
    with subprocess.Popen(
        command, cwd=place.folder, env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("marked", [True, False])
def test_a_process_that_does_not_end_is_found(place: Ground, marked: bool) -> None:
    promises.nothing_is_left(place, 0.2, 0.2)
    with _left_over(place, marked=marked) as pid:
        expect_broken(f"orphan: {pid} ", promises.no_process_is_left, place, 0.2, 0.2)
        expect_broken(f"orphan: {pid} ", promises.nothing_is_left, place, 0.2, 0.2)
    promises.nothing_is_left(place, 0.2, 0.2)
    assert 0.0 < place.leaving < 10.0


def test_a_process_that_delivers_may_run_longer(place: Ground) -> None:
    with _left_over(place, words=DELIVERERS[:1]) as pid:
        expect_broken(f"orphan: {pid} ", promises.no_process_is_left, place, 0.3, 0.1)
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
        promises.no_process_is_left(place, 60.0, 0.1)
    with _left_over(place) as pid:
        expect_broken(f"orphan: {pid} ", promises.no_process_is_left, place, 60.0, 0.1)


def test_an_open_port_is_found(place: Ground) -> None:
    port = free_port()
    listens = f"import socket; held = socket.create_server(('127.0.0.1', {port}))"
    with _left_over(place, listens, marked=False):
        expect_broken(
            f"orphan: .* listens on port {port}$", promises.nothing_is_left, place, 0.2, 0.2
        )
    promises.nothing_is_left(place, 0.2, 0.2)


def test_shared_memory_that_a_scenario_left_is_found(
    tmp_path: Path, new_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    (memory / "before").touch()
    monkeypatch.setattr(room, "SHARED_MEMORY", memory)
    monkeypatch.setenv(room.INSIDE, str(os.getpid()))
    place = Ground(tmp_path / "ground", 1, new_store)
    promises.nothing_is_left(place)
    (memory / "sem.IZR0Rc").touch()
    promises.nothing_is_left(place)
    (memory / "sem.mp-abcd1234").touch()
    (memory / "torch_1_2").touch()
    expect_broken(
        "orphan: shared memory sem.mp-abcd1234, torch_1_2$", promises.nothing_is_left, place
    )
    monkeypatch.delenv(room.INSIDE)
    # Without a namespace, the file may be another program's.
    promises.nothing_is_left(place)


def test_a_traceback_for_users_is_found(place: Ground) -> None:
    (place.folder / "output-0.txt").write_text("error: the disk is full\n")
    promises.no_traceback_is_printed(place)
    (place.folder / "output-1.txt").write_text(
        'Traceback (most recent call last):\n  File "x.py"\nBrokenPipeError\n'
    )
    expect_broken(
        r"wrong: a traceback in output-1.txt: (?s:.*)BrokenPipeError",
        promises.no_traceback_is_printed,
        place,
    )
    (place.folder / "output-1.txt").unlink()
    log = run_of(place).path / "recorder-node_1.log"
    log.write_text("Traceback (most recent call last):\nKeyError: 'run'\n")
    expect_broken(
        r"wrong: recorder-node_1.log ends with a traceback: (?s:.*)'run'",
        promises.no_traceback_is_printed,
        place,
    )
    log.write_text(f"{log.read_text()}  File 'x.p")
    promises.no_traceback_is_printed(place)
    log.write_text("Traceback (most recent call last):\nKeyError: 'run'\n")
    log.write_text(
        f"{log.read_text()}2026-11-22 17:33:55,944 WARNING try 1 failed: KeyError: 'run'\n"
    )
    promises.no_traceback_is_printed(place)
    log.write_text(
        "2026-11-22 17:33:55,944 ERROR unexpected error; trying again\n"
        "Traceback (most recent call last):\nFileNotFoundError: run\n"
    )
    promises.no_traceback_is_printed(place)

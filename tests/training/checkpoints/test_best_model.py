"""The end of a training logs its best model, and does not wait for ever for a hanging server."""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from rankzero import ConfigError, experiment_file
from rankzero.experiment_file import CODE
from rankzero.launch.request import write_config
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.permanent_errors import NeverAccepted
from rankzero.ranks import Ranks
from rankzero.run_store import checkpoint_files
from rankzero.run_store import delivery_state as state
from rankzero.run_store.folder import RunFolder
from rankzero.training import periodic, rng
from rankzero.training.build import build
from rankzero.training.checkpoints import best_model, restore
from rankzero.training.distributed.world import World
from support.commands import wait_until
from support.paths import FIXTURES
from support.returning import (
    DEAF,
    deaf,
    no_space,
    not_now,
    out_of_memory,
    stopped_in_a_callback,
    told,
)
from support.runs import T0, append, ended, make_folder, started
from support.training import tiny

TINY = FIXTURES / "tiny.py"
LONG = 200.0
"""Seconds. No test waits so long."""


class Silent:
    """A server that takes requests and never answers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked = threading.Event()
        self._taken: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._taken.append(client)
            self.asked.set()

    def close(self) -> None:
        for one in (self._listener, *self._taken):
            one.close()


@pytest.fixture
def left() -> Callable[[], set[BaseProcess]]:
    """Return the processes that the test has started and that are alive.

    Earlier tests may have left loading processes, which live as long as their loader.
    """
    earlier = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - earlier


@pytest.fixture
def silent() -> Iterator[Silent]:
    server = Silent()
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path: Path, silent: Silent) -> RunFolder:
    """A finished run that is delivered, but for its best model."""
    made = make_folder(tmp_path, silent.uri, experiment_file=str(TINY))
    experiment = experiment_file.load(str(TINY))()
    write_config(made, experiment)
    append(made, started(), ended())
    save = functools.partial(torch.save, {"model": experiment.model().state_dict()})
    checkpoint_files.write(
        checkpoint_files.folder_of(made.checkpoints, 4), save, 4, {"val/accuracy": 0.9}, False
    )
    state.save(
        state.path_of(made, 0),
        state.DeliveryState(run_id="a" * 32, experiment_id="1", queue=state.Queue(ended=True)),
    )
    return made


def test_hanging_server_is_not_waited_for_beyond_the_limit(
    folder: RunFolder, silent: Silent, left: Callable[[], set[BaseProcess]]
) -> None:
    notices: list[str] = []

    def clock() -> float:
        # The time is over once the server hangs, however long the imports took.
        return time.monotonic() + LONG * silent.asked.is_set()

    with best_model.LoggingProcess(folder) as process:
        process.wait(notices.append, seconds=LONG, clock=clock)
    assert silent.asked.is_set(), notices
    remedy = f"rankzero sync {folder.path.name} --dir {folder.path.parent.parent} does it"
    assert notices == [f"the best model was not logged to MLflow: it took too long; {remedy}"]
    assert not left(), "its process lives on"
    assert folder.late_model.exists(), "sync is to know"


def test_stop_request_ends_the_wait_for_the_best_model(folder: RunFolder, silent: Silent) -> None:
    notices: list[str] = []
    best_model.log_best(folder, notices.append, silent.asked.is_set, LONG)
    (notice,) = notices
    assert f"stopping; rankzero sync {folder.path.name} --dir" in notice


def test_a_process_without_memory_leaves_the_model_to_sync(folder: RunFolder) -> None:
    notices: list[str] = []
    with best_model.LoggingProcess(folder, entry=out_of_memory) as process:
        process.wait(notices.append)
    assert "ended with -9" in notices[0] and "rankzero sync" in notices[0]
    assert folder.late_model.exists()


def test_a_full_disk_leaves_the_model_to_sync(folder: RunFolder) -> None:
    notices: list[str] = []
    with best_model.LoggingProcess(folder, entry=no_space) as process:
        process.wait(notices.append)
    assert "No space left on device; rankzero sync" in notices[0]
    assert folder.late_model.exists()


def test_a_run_that_mlflow_has_erased_is_told_once_and_left(folder: RunFolder, sqlite: str) -> None:
    folder.write_identity(dataclasses.replace(folder.identity, tracking_uri=sqlite))
    notices: list[str] = []
    best_model.log_best(folder, notices.append)
    (notice,) = notices
    assert f"MLflow has no run {'a' * 32} any more" in notice and "sync" not in notice
    assert not folder.late_model.exists(), "sync would fail for ever"


@pytest.mark.parametrize("broken", ["a setting", "the file", "the data"])
def test_a_file_that_may_be_mended_leaves_the_model_to_sync(
    folder: RunFolder, broken: str, tmp_path: Path
) -> None:
    says = "config.yaml has 'slow', which tiny.py has no more: put it back there, or"
    if broken == "a setting":
        folder.config.write_text(folder.config.read_text() + "slow: 2\n")
        with pytest.raises(ConfigError, match="has no more: put it back"):
            best_model.load_best(folder)
    elif broken == "the data":
        write_config(folder, tiny(fail="data"))
        says = "OSError: no such data"
    else:
        (file := tmp_path / "mine.py").write_text("class Mine(:\n")
        folder.write_identity(dataclasses.replace(folder.identity, experiment_file=str(file)))
        says = "SyntaxError: invalid syntax (mine.py, line 1)"
    notices: list[str] = []
    best_model.log_best(folder, notices.append)
    (notice,) = notices
    assert says in notice and "; rankzero sync" in notice
    assert folder.late_model.exists(), "sync would say that MLflow has everything"


def test_a_file_that_was_edited_since_the_training_leaves_the_model_to_sync(
    folder: RunFolder,
) -> None:
    """Or MLflow had the trained weights in another model."""
    notices: list[str] = []
    code = experiment_file.code_tags(str(TINY))
    for step, digest in ((0, "edited"), (0, code[f"{CODE}tiny.py"]), (4, "later")):
        tags = {**code, f"{CODE}tiny.py": digest}
        append(folder, dataclasses.replace(started(step=step), environment=tags))
        near, far = multiprocessing.Pipe(duplex=False)
        far.close()
        if digest == "edited":
            best_model.log_best(folder, notices.append)
        else:
            with pytest.raises(EOFError):  # It waits to log it.
                best_model._trace_and_log(folder, near)
    assert "tiny.py was edited since it trained step 4: put it back (" in notices[0]
    assert folder.late_model.exists()


def test_a_server_that_fails_for_now_leaves_the_model_to_sync(
    folder: RunFolder,
) -> None:
    notices: list[str] = []
    with best_model.LoggingProcess(folder, entry=not_now) as process:
        process.wait(notices.append)
    assert "logged to MLflow: 503 Service Unavailable; rankzero sync" in notices[0]
    assert folder.late_model.exists()


def test_an_answer_that_may_change_is_no_answer_about_the_model(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = multiprocessing.Pipe()
    far.send(None)

    def answer(error: Exception) -> None:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(best_model, "_log", fail)

    answer(OSError("connection reset"))
    with pytest.raises(best_model._NotNow, match="connection reset"):
        best_model._trace_and_log(folder, near)
    far.send(None)
    answer(NeverAccepted("no such run"))
    with pytest.raises(NeverAccepted):
        best_model._trace_and_log(folder, near)


def test_other_weights_of_the_same_step_are_logged_again(folder: RunFolder) -> None:
    """As after a return to an older checkpoint, from which the run was trained another way."""
    near, far = multiprocessing.Pipe(duplex=False)
    far.close()
    folder.logged_model.write_text('{"step": 4, "model_id": "m"}')  # of an earlier version
    best_model._trace_and_log(folder, near)
    path = checkpoint_files.folder_of(folder.checkpoints, 4)
    other = {"model": restore.load(path)["model"], "step": 4}
    checkpoint_files.write(path, functools.partial(torch.save, other), 4, {}, False)
    with pytest.raises(EOFError):  # It waits to log it.
        best_model._trace_and_log(folder, near)


def test_two_processes_log_one_model(folder: RunFolder, sqlite: str) -> None:
    tracker = MlflowRuns(sqlite)
    folder.write_identity(dataclasses.replace(folder.identity, tracking_uri=sqlite))
    run = tracker.open_run(folder.identity, T0)
    delivered = state.DeliveryState(run_id=run.run_id, experiment_id=run.experiment_id)
    state.save(state.path_of(folder, 0), delivered)
    saved, note = folder.artifacts, {"step": 4, "ended": T0}
    (saved / "MLmodel").write_text("a model")
    log = functools.partial(best_model._log, folder, saved, note, {"rankzero.saved_at": "1.5"})

    def models() -> list[str]:
        return [str(model.model_id) for model in tracker.models.of_run(run)]

    both = [threading.Thread(target=log) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    (known,) = models()
    # Killed between the upload and the note.
    folder.logged_model.unlink()
    log()
    assert models() == [known] and json.loads(folder.logged_model.read_text())["model_id"] == known
    # A better one takes its place, also if somebody has deleted it in MLflow.
    tracker.models.delete_checkpoint(known)
    best_model._log(folder, saved, {**note, "step": 8}, {"rankzero.saved_at": "2.5"})
    (better,) = models()
    assert better != known
    # The registry's versions have no files of their own.
    tracker.models.register(run, better, "ours")
    best = {"rankzero.model": "best", "rankzero.step": "9", "rankzero.saved_at": "3.5"}
    best_model._log(folder, saved, {**note, "step": 9}, best)
    assert len(models()) == 2 and better in models()
    tags = {one.model_id: one.tags["rankzero.model"] for one in tracker.models.of_run(run)}
    assert tags.pop(better) == "former" and list(tags.values()) == ["best"]


def test_a_best_model_of_a_machine_that_continued_the_run_stays(
    folder: RunFolder, sqlite: str
) -> None:
    tracker = MlflowRuns(sqlite)
    folder.write_identity(dataclasses.replace(folder.identity, tracking_uri=sqlite))
    run = tracker.open_run(folder.identity, T0)
    delivered = state.DeliveryState(run_id=run.run_id, experiment_id=run.experiment_id)
    state.save(state.path_of(folder, 0), delivered)
    (folder.artifacts / "MLmodel").write_text("a model")
    # It logs step 9. This disk has step 7 until it continues, also with another goal.
    for step, newest, logged in ((9, 9, 9), (7, 7, 9), (8, 9, 8), (8, 8, 8)):
        path = checkpoint_files.folder_of(folder.checkpoints, newest)
        checkpoint_files.write(path, Path.touch, newest, {}, False)
        tags = {"rankzero.model": "best", "rankzero.step": str(step)}
        best_model._log(folder, folder.artifacts, {"step": step, "ended": T0}, tags)
        assert list(tracker.models.best_models(run).values()) == [logged]
        (only,) = tracker.models.best_models(run)
        assert json.loads(folder.logged_model.read_text())["model_id"] == only
        folder.logged_model.unlink()
        shutil.rmtree(folder.checkpoints)


def test_the_model_is_logged_once_the_run_is_delivered_and_else_left_to_sync(
    folder: RunFolder,
) -> None:
    (seen := folder.path / "seen").touch()
    with best_model.LoggingProcess(folder, entry=told) as process:
        wait_until(lambda: seen.read_text() == "begun")
        assert folder.late_model.exists(), "the command may be killed"
        process.wait(pytest.fail)
    assert seen.read_text() == "delivered" and not folder.late_model.exists()
    with best_model.LoggingProcess(folder, entry=told) as process:
        wait_until(lambda: seen.read_text() == "begun")
        process._delivered.close()  # as the kernel does for a killed command
        wait_until(lambda: seen.read_text() == "alone")
    assert folder.late_model.exists()


def test_process_that_ignores_sigterm_is_killed(
    folder: RunFolder, left: Callable[[], set[BaseProcess]]
) -> None:
    notices: list[str] = []
    ignores_sigterm = folder.path / DEAF
    began = time.monotonic()
    with best_model.LoggingProcess(folder, entry=deaf) as process:
        process.wait(notices.append, ignores_sigterm.exists)
    assert time.monotonic() - began < LONG and not left()
    assert "was not logged" in notices[0]


def test_a_stop_that_python_drops_is_repeated(
    folder: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    notices: list[str] = []
    with best_model.LoggingProcess(folder, entry=stopped_in_a_callback) as process:
        process.wait(notices.append, seconds=LONG)
    assert "its process ended with 1;" in notices[0] and "Traceback" not in capfd.readouterr().err


def test_the_best_model_has_the_averaged_weights(folder: RunFolder) -> None:
    plain, averaged = (experiment_file.load(str(TINY))().model() for _ in range(2))
    save = functools.partial(
        torch.save, {"model": plain.state_dict(), "ema": averaged.state_dict()}
    )
    checkpoint_files.write(
        checkpoint_files.folder_of(folder.checkpoints, 5), save, 5, {"val/accuracy": 0.95}, True
    )
    found = best_model.load_best(folder).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in averaged.state_dict().items())


@pytest.mark.parametrize(("data_draws", "is_old"), [(False, False), (True, False), (False, True)])
def test_the_best_model_has_again_what_model_drew_and_no_state_dict_holds(
    tmp_path: Path, data_draws: bool, is_old: bool
) -> None:
    """A checkpoint of an older version lacks the generators' states."""
    file = str(FIXTURES / "permuted.py")
    experiment = dataclasses.replace(experiment_file.load(file)(), data_draws=data_draws)
    made = make_folder(tmp_path, "", experiment_file=file)
    write_config(made, experiment)
    job, trained = build(experiment, World(Ranks(), torch.device("cpu")))
    content = periodic.state_dict(job, trained)
    if is_old:
        del content["model_randoms"]
    save, path = (
        functools.partial(torch.save, content),
        checkpoint_files.folder_of(made.checkpoints, 4),
    )
    checkpoint_files.write(path, save, 4, {"val/loss": 0.9}, True)
    torch.manual_seed(7)
    before = rng.state(torch.device("cpu"))
    found = best_model.load_best(made)
    assert torch.equal(found.order, trained.model.order)
    assert torch.equal(before, rng.state(torch.device("cpu"))), "the caller's generators"


def test_data_that_are_read_late_may_be_away_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(list[int]):
        def __getitem__(self, index: object) -> NoReturn:
            raise RuntimeError("no such file")

    monkeypatch.setattr(best_model.sets, "load", lambda _: ([], {"val": Away([1, 2, 3])}))
    with pytest.raises(best_model._NotNow, match=r"such file.* \(train\.mlflow\.log_model=false"):
        best_model._example_inputs(tiny(), torch.nn.Linear(1, 1), 1)


def test_the_example_inputs_of_a_measure_with_progress_and_helpers_are_found() -> None:
    experiment = experiment_file.load(str(FIXTURES / "staged.py"))()
    (inputs,) = best_model._example_inputs(experiment, experiment.model(), 4)
    assert inputs.shape == (2, 8)

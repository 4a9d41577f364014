"""Steps reach the journal, and the disk, before the checkpoint that contains them."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rankzero.events import CheckpointSaved, Noticed, StepsLogged
from rankzero.experiment import Experiment
from rankzero.run_store import checkpoint_files, disk
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import Journal, read_all
from rankzero.tracking.run_log import RunLog
from rankzero.training import worker
from rankzero.training.build import build
from rankzero.training.checkpoints.writer import Checkpoints
from rankzero.training.distributed.watchdog import Watchdog
from rankzero.training.lifecycle import AttemptOutcome
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.stop import StopCode, StopRequest
from support.checkpoints import GOAL
from support.runs import make_folder, steps
from support.training import ALONE, tiny


class BrokenDisk:
    """Confirms no write while `broken`. `order` has the names of what was to be synced."""

    def __init__(self, times: float) -> None:
        self.left, self.order = times, list[str]()

    def sync(self, path: Path) -> None:
        self.order.append(path.name)
        self.left -= 1
        if self.left >= 0:
            raise OSError(5, "Input/output error")
        disk.sync(path)

    def fsync(self, descriptor: int) -> None:
        self.sync(Path(f"/proc/self/fd/{descriptor}").readlink())


def train(
    folder: RunFolder, experiment: Experiment, log: RunLog, stop: StopRequest | None = None
) -> AttemptOutcome:
    job, state = build(experiment, ALONE)
    watchdog = Watchdog(10.0, 0, [])
    outcome = worker._train(job, state, log, stop or StopRequest(), RunTotals(), watchdog, {})
    log.close()
    return outcome


def test_a_kill_when_a_checkpoint_appears_leaves_no_hole_in_the_curve(tmp_path: Path) -> None:
    folder, holes = make_folder(tmp_path), list[set[int]]()
    plain = type(tiny())

    class Watching(plain):  # type: ignore[misc, valid-type]
        def measure(self, model: Any, batch: Any) -> Any:
            values = super().measure(model, batch)
            if model.training and folder.checkpoints.exists() and not holes:
                until = time.monotonic() + 20.0
                while not (found := list(folder.checkpoints.glob("step_*"))):
                    assert time.monotonic() < until
                    time.sleep(0.001)
                step = checkpoint_files.read_manifest(found[0]).step
                logged = (e for e in read_all(folder.events) if isinstance(e, StepsLogged))
                kept = {step for event in logged for step in event.steps}
                holes.append(set(range(1, step + 1)) - kept)
            return values

    experiment = tiny(
        train__steps=12, train__eval_every=12, train__checkpoints__save_every=3, train__log_every=1
    )
    watching = Watching(**{f.name: getattr(experiment, f.name) for f in dataclasses.fields(plain)})
    train(folder, watching, RunLog(folder, Journal(folder.events), 1, None))
    assert holes == [set()]


def test_the_disk_has_the_steps_before_the_name_of_their_checkpoint(tmp_path: Path) -> None:
    folder, slow = make_folder(tmp_path), BrokenDisk(0)
    log = RunLog(folder, Journal(folder.events, fsync=slow.fsync), 1, None)
    names: list[list[str]] = []

    def sync(path: Path) -> None:
        names.append([path.name for path in folder.checkpoints.glob("step_*")])
        slow.sync(path)

    checkpoints = Checkpoints(
        folder.path, 1, GOAL, flush_journal=log.flush, sync_journal=log.sync, sync=sync
    )
    log(steps(1, 5))
    checkpoints.save({"weights": torch.zeros(3)}, 5, {}, False)
    checkpoints.close()
    new = ".tmp-step_00000005"
    run = folder.path.name
    assert slow.order == ["events.jsonl", run, "manifest.json", "state.pt", new, "checkpoints"]
    assert names == [[], [], [], [], ["step_00000005"]], "the name comes after the content"


def test_a_checkpoint_whose_sync_failed_is_not_used_and_the_next_one_is_whole(
    tmp_path: Path,
) -> None:
    broken, problems = BrokenDisk(1), list[str]()
    checkpoints = Checkpoints(tmp_path, 1, GOAL, notice=problems.append, sync=broken.sync)
    events = checkpoints.save({"weights": torch.zeros(3)}, 1, {}, False)
    events += checkpoints.save({"weights": torch.ones(3)}, 2, {}, False)
    assert checkpoints.failure is None
    events += checkpoints.close()
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    (problem,) = problems
    assert "checkpoint of step 1 could not be written" in problem and "Input/output" in problem


def test_the_last_checkpoint_is_written_again_after_a_disk_has_refused(tmp_path: Path) -> None:
    broken, problems = BrokenDisk(2), list[str]()
    checkpoints = Checkpoints(tmp_path, 1, GOAL, notice=problems.append, sync=broken.sync)
    checkpoints.save({"weights": torch.zeros(3)}, 1, {}, False)
    (event,) = checkpoints.close(patience_seconds=20.0)
    assert isinstance(event, CheckpointSaved) and checkpoints.failure is None
    assert len(problems) == 1, "each try is not a problem of its own"


@pytest.mark.parametrize("values", [3, 1_000_000])
def test_last_checkpoint_is_written_again_after_the_disk_was_full(
    tmp_path: Path, values: int
) -> None:
    checkpoints = Checkpoints(tmp_path, 1, GOAL, notice=lambda text: None)
    with pytest.raises(RuntimeError) as full:
        torch.save({"weights": torch.zeros(values)}, "/dev/full")
    checkpoints.save({"weights": torch.zeros(3)}, 1, {}, False)
    assert checkpoints.finish() and not checkpoints.failure
    checkpoints._error = full.value
    assert str(checkpoints.failure).endswith(": no space left, or the disk refuses writes")
    (event,) = checkpoints.close(patience_seconds=20.0)
    assert isinstance(event, CheckpointSaved) and checkpoints.failure is None


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: no")]
)
def test_errors_of_a_gpu_are_not_retried_at_the_end(tmp_path: Path, error: Exception) -> None:
    checkpoints = Checkpoints(tmp_path, 1, GOAL, notice=lambda text: None)
    checkpoints.save({"weights": torch.zeros(3)}, 1, {}, False)
    checkpoints.finish()
    checkpoints._error = error
    assert checkpoints.close(patience_seconds=20.0) == [] and checkpoints.failure


def test_only_a_finished_training_waits_long_for_a_disk(tmp_path: Path) -> None:
    asked: list[bool] = []

    class Watched(RunLog):
        def patience_seconds(self, *, finished: bool) -> float:
            asked.append(finished)
            return super().patience_seconds(finished=finished)

    log = Watched(make_folder(tmp_path), None, 1, None)
    assert (log.patience_seconds(finished=True), log.patience_seconds(finished=False)) == (30, 5)
    for code in (StopCode.NONE, StopCode.SIGTERM):
        folder, stop = make_folder(tmp_path), StopRequest()
        stop.request(code)
        train(folder, tiny(train__steps=3), Watched(folder, Journal(folder.events), 1, None), stop)
    # After each training, `train` closes the log without a status.
    assert asked[2:] == [True, False, False, False]


def test_a_run_without_its_last_checkpoint_is_not_finished(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    folder.checkpoints.write_text("in the way")
    log = RunLog(folder, Journal(folder.events), 1, None, patience_seconds=0.0)
    outcome = train(folder, tiny(train__steps=3), log)
    assert outcome.status == "FAILED"
    assert "trained 3 steps; the checkpoint of step 3 could not be written" in outcome.reason


@pytest.mark.parametrize("failing", [1, 9])
def test_a_sync_of_the_journal_that_failed_is_reported_once(tmp_path: Path, failing: int) -> None:
    folder, broken = make_folder(tmp_path), BrokenDisk(failing)
    log = RunLog(folder, Journal(folder.events, fsync=broken.fsync), 1, None)
    outcome = train(folder, tiny(train__steps=6, train__checkpoints__save_every=1), log)
    assert outcome.status == "FINISHED"
    texts = [event.text for event in read_all(folder.events) if isinstance(event, Noticed)]
    assert len(texts) == 1 and "the disk did not confirm the journal" in texts[0]

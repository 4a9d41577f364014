"""Checkpoints are written by a thread, pruned, and never end a training."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rankzero.events import CheckpointDeleted, CheckpointSaved, Event
from rankzero.run_store import checkpoint_files, disk
from rankzero.training.checkpoints import restore
from rankzero.training.checkpoints.writer import Checkpoints, unlogged
from support.checkpoints import GOAL, damage_checkpoint, save_steps, steps_in
from support.runs import started


def test_saved_state_is_loaded_again(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": {"b": [torch.arange(5), 1.5, None, "x"]}, "n": (3, tmp_path)}
    checkpoints = Checkpoints(tmp_path, 1, GOAL)
    checkpoints.save(state, 7, {"val/loss": 0.5}, True)
    (event,) = checkpoints.close()
    assert event == CheckpointSaved(
        event.time, 7, "checkpoints/step_00000007", True, {"val/loss": 0.5}
    )
    loaded = restore.load(tmp_path / event.path)
    assert torch.equal(loaded["a"]["b"][0], torch.arange(5))
    assert loaded["a"]["b"][1:] == [1.5, None, "x"] and loaded["n"] == (3, tmp_path)


def test_state_of_a_module_keeps_its_version(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1, GOAL)
    checkpoints.save(torch.nn.BatchNorm1d(1).state_dict(), 1, {}, False)
    checkpoints.close()
    loaded: Any = restore.load(tmp_path / "checkpoints/step_00000001")
    assert loaded._metadata[""]["version"] == 2


def test_later_changes_of_a_tensor_do_not_reach_the_checkpoint(tmp_path: Path) -> None:
    weights = torch.zeros(1000)
    checkpoints = Checkpoints(tmp_path, 2, GOAL)
    checkpoints.save({"weights": weights}, 1, {}, False)
    weights.add_(1)
    checkpoints.save({"weights": weights}, 2, {"val/loss": 1.0}, False)
    weights.add_(1)
    checkpoints.close()
    assert restore.load(tmp_path / "checkpoints/step_00000002")["weights"].unique().tolist() == [
        1.0
    ]


def test_the_best_and_the_last_are_kept(tmp_path: Path) -> None:
    events = save_steps(tmp_path, {1: 0.9, 2: 0.3, 3: 0.5, 4: 0.7, 5: None}, keep=2)
    assert steps_in(tmp_path) == [2, 3, 5]
    assert [event.step for event in events if isinstance(event, CheckpointDeleted)] == [1, 4]


def test_broken_checkpoint_stays_and_later_ones_are_saved(tmp_path: Path) -> None:
    save_steps(tmp_path, {1: 0.1})
    damage_checkpoint(tmp_path / "checkpoints/step_00000001", "torn manifest")
    events = save_steps(tmp_path, {2: 0.2, 3: 0.3, 4: 0.4})
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [2, 3, 4]
    assert steps_in(tmp_path) == [1, 2, 4]
    assert (
        checkpoint_files.best(tmp_path / "checkpoints", GOAL)
        == tmp_path / "checkpoints/step_00000002"
    )


@pytest.mark.parametrize("damage", ["truncate", "flip", "no state", "torn manifest"])
def test_broken_checkpoint_causes_no_deletion(tmp_path: Path, damage: str) -> None:
    """The damaged one was the newest and the best. A resume skips it and saves worse ones."""
    save_steps(tmp_path, {50: 0.5, 100: 0.1}, keep=2)
    damage_checkpoint(tmp_path / "checkpoints/step_00000100", damage)
    save_steps(tmp_path, {60: 0.4})
    assert steps_in(tmp_path) == [60, 100]
    assert (
        checkpoint_files.newest_intact(tmp_path / "checkpoints")[0]
        == tmp_path / "checkpoints/step_00000060"
    )
    assert (
        checkpoint_files.best(tmp_path / "checkpoints", GOAL)
        == tmp_path / "checkpoints/step_00000060"
    )
    save_steps(tmp_path, {70: 0.9})
    assert steps_in(tmp_path) == [60, 70, 100], (
        "the best one that is intact, the last, and the broken one, to look at"
    )
    save_steps(tmp_path, {100: 0.2, 110: 0.3})
    assert steps_in(tmp_path) == [100, 110], "written again, it counts"


def test_loop_that_starts_again_keeps_old_and_new_checkpoints(tmp_path: Path) -> None:
    save_steps(tmp_path, {10: 0.1, 100: 0.5})
    save_steps(tmp_path, {1: 0.9, 2: 0.8})
    assert steps_in(tmp_path) == [2, 10, 100]


def test_failed_write_is_a_notice_and_no_exception(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    problems: list[str] = []
    checkpoints = Checkpoints(tmp_path, 1, GOAL, notice=problems.append)
    checkpoints.save({"weights": torch.zeros(3)}, 1, {}, False)
    assert checkpoints.close() == [] and len(problems) == 1
    assert "could not be written" in problems[0]


@pytest.mark.parametrize("fails", ["rename", "rmtree"])
def test_failed_deletion_is_reported_once_and_hides_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    rename = Path.rename

    def refuse_to_rename(path: Path, target: Path) -> Path:
        if path.name.startswith("step_"):
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    def refuse_to_remove(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(13, "Permission denied", str(path))

    if fails == "rename":
        monkeypatch.setattr(Path, "rename", refuse_to_rename)
    else:
        monkeypatch.setattr(shutil, "rmtree", refuse_to_remove)
    problems: list[str] = []
    checkpoints = Checkpoints(tmp_path, 1, GOAL, notice=problems.append)
    events: list[Event] = []
    for step in range(1, 5):
        events += checkpoints.save(
            {"weights": torch.zeros(3)}, step, {"val/loss": float(step)}, False
        )
    events += checkpoints.close()
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [1, 2, 3, 4]
    gone = [event.step for event in events if isinstance(event, CheckpointDeleted)]
    assert gone == ([2, 3] if fails == "rmtree" else [])
    (problem,) = problems
    assert "could not be deleted" in problem and "Permission denied" in problem


def test_a_file_that_nfs_keeps_for_an_upload_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(path: Path, ignore_errors: bool = False) -> None:
        (path / "state.pt").rename(path / ".nfs01")
        (path / "manifest.json").unlink()
        raise OSError(39, "Directory not empty", str(path))

    save_steps(tmp_path, {1: 0.5})
    monkeypatch.setattr(shutil, "rmtree", remove)
    checkpoint_files.delete(tmp_path / "checkpoints/step_00000001")


def test_what_a_killed_attempt_could_not_log_is_logged_by_the_next(tmp_path: Path) -> None:
    events = [started(), *save_steps(tmp_path, {1: 0.9, 2: 0.3, 3: 0.5}, keep=1)]
    assert unlogged(tmp_path, events, 1, GOAL) == []
    without_saved = [event for event in events if getattr(event, "step", 0) != 3]
    (saved,) = unlogged(tmp_path, without_saved, 1, GOAL)
    assert isinstance(saved, CheckpointSaved) and saved.step == 3 and not saved.best
    without_deleted = [event for event in events if not isinstance(event, CheckpointDeleted)]
    (deleted,) = unlogged(tmp_path, without_deleted, 1, GOAL)
    assert isinstance(deleted, CheckpointDeleted) and deleted.step == 1
    (tmp_path / "own_loop").mkdir()
    save_steps(tmp_path / "own_loop", {0: 0.5})
    assert [one.step for one in unlogged(tmp_path / "own_loop", [started()], 1, GOAL)] == [0]


def test_a_step_that_a_killed_attempt_saved_again_is_logged_again(tmp_path: Path) -> None:
    events: list[Event] = [started(), *save_steps(tmp_path, {1: math.nan})]
    assert unlogged(tmp_path, events, 1, GOAL) == []
    save_steps(tmp_path, {1: 0.3})
    (saved,) = unlogged(tmp_path, events, 1, GOAL)
    assert isinstance(saved, CheckpointSaved) and saved.metrics == {GOAL.metric: 0.3}
    assert unlogged(tmp_path, [*events, saved], 1, GOAL) == []


def test_checkpoints_of_other_machines_and_of_people_are_not_logged_again(tmp_path: Path) -> None:
    events = [started(), *save_steps(tmp_path, {1: 0.9, 2: 0.3, 3: 0.5}, keep=1)]
    downloaded: list[Event] = [started(2, step=3)]
    assert unlogged(tmp_path, downloaded, 1, GOAL) == []
    # The run went to another machine, and came back with its checkpoint.
    (tmp_path / "checkpoints/step_00000003/downloaded").touch()
    assert unlogged(tmp_path, [started(), *save_steps(tmp_path, {2: 0.3}, keep=2)], 2, GOAL) == []
    shutil.rmtree(tmp_path / "checkpoints/step_00000002")  # the best, which retention keeps
    assert unlogged(tmp_path, events, 1, GOAL) == []


def test_a_first_copy_uses_what_was_prepared_once(tmp_path: Path) -> None:
    asked, weights = [], torch.ones(1 << 20)

    def tensors() -> list[torch.Tensor]:
        asked.append(1)
        return [weights]

    notices: list[str] = []
    checkpoints = Checkpoints(tmp_path, 1, GOAL, notice=notices.append)
    for _ in range(3):
        checkpoints.prepare(tensors)
    assert checkpoints._prepared is not None
    checkpoints._prepared.result()
    copier = checkpoints._copier
    assert copier._memory is not None
    checkpoints.save({"model": {"w": weights}}, 1, {}, False)
    assert copier._buffers["model", "w"].data_ptr() == copier._memory._address and asked == [1]
    (event,) = checkpoints.close()
    assert torch.equal(restore.load(tmp_path / event.path)["model"]["w"], weights)
    assert notices == []


def test_a_slow_sync_of_a_large_file_shows_progress_between_its_pieces(tmp_path: Path) -> None:
    class SlowDisk:
        """Confirms at most 8 MiB at once. `moved` has what the thread had moved before each."""

        def __init__(self) -> None:
            self.moved, self.confirmed = list[int](), 0

        def sync(self, path: Path, piece: range | None = None) -> None:
            if piece is not None:
                assert piece.start == self.confirmed and len(piece) <= 8 << 20
                self.moved.append(checkpoints.bytes_moved())
                self.confirmed = piece.stop
            elif path.name == checkpoint_files.STATE:
                assert path.stat().st_size == self.confirmed, "it waits in silence"
            disk.sync(path, piece)

    slow = SlowDisk()
    checkpoints = Checkpoints(tmp_path, 1, GOAL, sync=slow.sync)
    checkpoints.save({"weights": torch.arange(5 << 20)}, 1, {}, False)
    (event,) = checkpoints.close()
    assert isinstance(event, CheckpointSaved)
    assert len(slow.moved) == 6 and slow.moved == sorted(set(slow.moved))
    assert checkpoint_files.problem_with(tmp_path / event.path) is None


def test_a_piece_that_the_disk_has_lost_fails_the_write(tmp_path: Path) -> None:
    def sync(path: Path, piece: range | None = None) -> None:
        if piece is not None:
            raise OSError(5, "Input/output error")
        disk.sync(path)

    checkpoints = Checkpoints(tmp_path, 1, GOAL, notice=list[str]().append, sync=sync)
    checkpoints.save({"weights": torch.arange(5 << 20)}, 1, {}, False)
    assert checkpoints.close() == [] and "Input/output error" in str(checkpoints.failure)
    assert steps_in(tmp_path) == []

"""Checkpoint folders: atomic, checksummed, choosing the newest, the best and the superseded."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankzero.experiment import Goal
from rankzero.run_store import checkpoint_files
from rankzero.run_store.checkpoint_files import (
    FORMAT,
    MANIFEST,
    STATE,
    BrokenCheckpoint,
    Manifest,
)
from rankzero.training.checkpoints import restore
from rankzero.training.checkpoints.writer import Checkpoints
from support.checkpoints import GOAL, damage_checkpoint, save_steps, steps_in


@given(
    st.lists(st.one_of(st.none(), st.floats(allow_infinity=False)), min_size=1, max_size=12),
    st.integers(0, 4),
    st.sampled_from(["min", "max"]),
)
def test_retention_keeps_the_last_and_the_best(
    values: list[float | None], keep: int, mode: Any
) -> None:
    goal = Goal("val/loss", mode)
    manifests = {
        Path(str(step)): Manifest(step, {} if value is None else {"val/loss": value}, False, {})
        for step, value in enumerate(values)
    }
    # The last one written is that of step 0, as in a loop that starts again.
    doomed = checkpoint_files.superseded(manifests, keep, goal, Path("0"))
    kept = [path for path in manifests if path not in doomed]
    numbers = [value for value in values if value is not None and value == value]
    best = sorted(numbers, reverse=mode == "max")[:keep]
    kept_values = [manifests[path].metrics.get("val/loss") for path in kept]
    assert {Path("0"), Path(str(len(values) - 1))} <= set(kept)
    found = [value for value in kept_values if value is not None and value == value]
    assert all(any(not goal.better(value, one) for one in found) for value in best)
    assert len(kept) <= keep + 2


def test_a_tie_but_for_rounding_leaves_the_earlier_checkpoint_the_best(tmp_path: Path) -> None:
    save_steps(tmp_path, {1: 0.5, 2: 0.10000001, 3: 0.1, 4: 0.2}, keep=2)
    assert checkpoint_files.best(tmp_path / "checkpoints", GOAL) == (
        tmp_path / "checkpoints/step_00000002"
    )


def test_a_best_checkpoint_of_another_goal_is_no_longer_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, goal=GOAL, world_size=1)
    # Until step 2, val/loss was not the goal.
    for step, loss, best in ((1, 0.1, True), (2, 0.3, False), (3, 0.25, True), (4, 0.28, False)):
        checkpoints.save({}, step, {"val/loss": loss}, best)
    checkpoints.close()
    path = checkpoint_files.best(tmp_path / "checkpoints", GOAL)
    assert path and path.name == "step_00000003" and steps_in(tmp_path) == [3, 4]


@pytest.mark.parametrize("damage", ["truncate", "flip", "no state", "no manifest", "torn manifest"])
def test_damaged_checkpoint_is_skipped(tmp_path: Path, damage: str) -> None:
    save_steps(tmp_path, {1: 0.1, 2: 0.2})
    newest = tmp_path / "checkpoints/step_00000002"
    damage_checkpoint(newest, damage)
    path, problems = checkpoint_files.newest_intact(tmp_path / "checkpoints")
    assert path == tmp_path / "checkpoints/step_00000001"
    assert len(problems) == (0 if damage == "no manifest" else 1)
    if damage != "no manifest":
        with pytest.raises(BrokenCheckpoint):
            restore.load(newest)


def sealed(fields: dict[str, Any]) -> str:
    """Return the text of a manifest with these fields and a valid seal."""
    return Manifest(**{name: value for name, value in fields.items() if name != "seal"}).to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"step": 90},
        {"metrics": {"val/loss": 0.0}},
        {"best": True},
        {"world_size": 64},
        {"torch": "9"},
        {"seal": None},
    ],
)
def test_altered_manifest_is_skipped_and_causes_no_deletion(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    save_steps(tmp_path, {1: 0.3, 2: 0.2}, keep=1)
    first = tmp_path / "checkpoints/step_00000001"
    save_steps(tmp_path, {3: 0.1}, keep=3)
    altered = tmp_path / "checkpoints/step_00000003"
    fields = json.loads((altered / MANIFEST).read_text())
    (altered / MANIFEST).write_text(json.dumps({**fields, **change}))
    with pytest.raises(BrokenCheckpoint, match="altered manifest"):
        restore.load(altered)
    path, problems = checkpoint_files.newest_intact(tmp_path / "checkpoints")
    assert path == tmp_path / "checkpoints/step_00000002" and len(problems) == 1
    save_steps(tmp_path, {4: 0.5}, keep=1)
    assert steps_in(tmp_path) == [2, 3, 4] and not first.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"files": {STATE: 5}},
        {"step": "2"},
        {"step": True},
        {"metrics": {"val/loss": "low"}},
        {"metrics": []},
        {"world_size": 0},
        {"world_size": 2.0},
        {"best": 1},
    ],
)
def test_manifest_with_values_of_wrong_types_is_broken(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    save_steps(tmp_path, {1: 0.1, 2: 0.2})
    newest = tmp_path / "checkpoints/step_00000002"
    fields = json.loads((newest / MANIFEST).read_text())
    (newest / MANIFEST).write_text(sealed({**fields, **change}))
    assert (
        checkpoint_files.newest_intact(tmp_path / "checkpoints")[0]
        == tmp_path / "checkpoints/step_00000001"
    )
    assert checkpoint_files.best(tmp_path / "checkpoints", GOAL) is not None


def test_checkpoint_of_a_negative_step_is_read(tmp_path: Path) -> None:
    """An own loop may save its baseline as step -1."""
    save_steps(tmp_path, {-1: 0.1})
    found, problems = checkpoint_files.newest_intact(tmp_path / "checkpoints")
    assert found is not None and checkpoint_files.read_manifest(found).step == -1
    assert not problems


def test_leftover_of_a_killed_replacement_is_not_in_the_way_of_the_next(tmp_path: Path) -> None:
    save_steps(tmp_path, {1: 0.1})
    target = tmp_path / "checkpoints/step_00000001"
    # Killed after the new folder had its name, before the old one was deleted.
    leftover = target.with_name(checkpoint_files.REPLACED + target.name)
    shutil.copytree(target, leftover)
    new = checkpoint_files.temporary_folder(target)
    shutil.copytree(target, new)
    checkpoint_files.replace(new, target)
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("written", ["2", None, [2]])
def test_format_that_is_no_number_is_broken(tmp_path: Path, written: Any) -> None:
    save_steps(tmp_path, {1: 0.1, 2: 0.2})
    newest = tmp_path / "checkpoints/step_00000002"
    fields = json.loads((newest / MANIFEST).read_text())
    del fields["seal"]
    (newest / MANIFEST).write_text(json.dumps({**fields, "format": written}))
    with pytest.raises(BrokenCheckpoint, match="altered manifest"):
        checkpoint_files.read_manifest(newest)
    assert list(checkpoint_files.known(tmp_path / "checkpoints")) == [
        tmp_path / "checkpoints/step_00000001"
    ]


def test_manifest_names_the_build_of_torch(tmp_path: Path) -> None:
    save_steps(tmp_path, {1: 0.1})
    manifest = checkpoint_files.read_manifest(tmp_path / "checkpoints/step_00000001")
    assert manifest.torch == torch.__version__


def test_manifest_of_format_1_without_seal_is_read(tmp_path: Path) -> None:
    save_steps(tmp_path, {1: 0.1})
    folder = tmp_path / "checkpoints/step_00000001"
    fields = json.loads((folder / MANIFEST).read_text())
    del fields["seal"]
    (folder / MANIFEST).write_text(json.dumps({**fields, "format": 1}))
    assert checkpoint_files.problem_with(folder) is None
    assert checkpoint_files.read_manifest(folder).step == 1


def test_format_2_had_one_checksum_of_the_whole_file(tmp_path: Path) -> None:
    save_steps(tmp_path, {1: 0.1})
    folder = tmp_path / "checkpoints/step_00000001"
    content = (folder / STATE).read_bytes()
    fields = json.loads((folder / MANIFEST).read_text())
    fields |= {
        "format": 2,
        "files": {
            STATE: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)},
        },
    }
    (folder / MANIFEST).write_text(sealed(fields))
    assert restore.load(folder).keys() == torch.load(folder / STATE).keys()
    (folder / STATE).write_bytes(content[:-1] + b"x")
    assert "checksum does not match" in str(checkpoint_files.problem_with(folder))


@pytest.mark.parametrize("size", [0, 1, (8 << 20) - 1, 8 << 20, (24 << 20) + 5])
def test_each_piece_of_a_file_counts_in_its_place(tmp_path: Path, size: int) -> None:
    content = bytearray(random.Random(size).randbytes(size))
    target = tmp_path / "checkpoints/step_00000001"
    checkpoint_files.write(target, lambda path: path.write_bytes(content), 1, {}, False)
    pieces = [content[at : at + (8 << 20)] for at in range(0, size, 8 << 20)]
    digest = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces))
    seen = checkpoint_files.read_manifest(target).files[STATE]
    assert seen == {"sha256_of_pieces": digest.hexdigest(), "bytes": size}
    assert checkpoint_files.problem_with(target) is None
    if len(pieces) > 1:
        (target / STATE).write_bytes(b"".join([pieces[1], pieces[0], *pieces[2:]]))
        assert "checksum does not match" in str(checkpoint_files.problem_with(target))


def test_without_more_threads_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a program no thread can start, and the last checkpoint is being written."""
    monkeypatch.setattr(threading.Thread, "start", _cannot_start)
    target = tmp_path / "checkpoints/step_00000001"
    content = bytes(24 << 20)
    checkpoint_files.write(target, lambda path: path.write_bytes(content), 1, {}, False)
    assert checkpoint_files.problem_with(target, threads=4) is None


def _cannot_start(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread at interpreter shutdown")


def test_a_file_of_another_size_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, {1: 0.1})
    folder = tmp_path / "checkpoints/step_00000001"
    with (folder / STATE).open("ab") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(os, "pread", lambda *_: pytest.fail("it has a terabyte"))
    assert "truncated or altered" in (checkpoint_files.problem_with(folder) or "")
    with pytest.raises(BrokenCheckpoint, match="truncated or altered"):
        restore.load(folder)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "sub/x", "..", ""])
def test_manifest_may_name_only_files_of_its_folder(tmp_path: Path, name: str) -> None:
    save_steps(tmp_path, {1: 0.1, 2: 0.2})
    (tmp_path / "x").write_text("x")
    newest = tmp_path / "checkpoints/step_00000002"
    fields = json.loads((newest / MANIFEST).read_text())
    fields["files"][name] = {"sha256": "0", "bytes": 1}
    (newest / MANIFEST).write_text(sealed(fields))
    with pytest.raises(BrokenCheckpoint, match="no file of its own"):
        restore.load(newest)
    assert (
        checkpoint_files.newest_intact(tmp_path / "checkpoints")[0]
        == tmp_path / "checkpoints/step_00000001"
    )


def test_manifest_without_files_and_linked_state_are_broken(tmp_path: Path) -> None:
    save_steps(tmp_path, {1: 0.1, 2: 0.2})
    first, second = (tmp_path / f"checkpoints/step_0000000{step}" for step in (1, 2))
    fields = json.loads((first / MANIFEST).read_text())
    for named in ({}, [], None):
        (first / MANIFEST).write_text(sealed({**fields, "files": named}))
        with pytest.raises(BrokenCheckpoint, match="does not name"):
            restore.load(first)
    (second / STATE).rename(tmp_path / "elsewhere")
    (second / STATE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BrokenCheckpoint, match="no file of its own"):
        restore.load(second)


@pytest.mark.parametrize("more", [{}, {"shards": 8}])
def test_checkpoint_of_a_newer_format_is_reported_and_skipped(
    tmp_path: Path, more: dict[str, int]
) -> None:
    save_steps(tmp_path, {1: 0.1, 2: 0.2})
    newest = tmp_path / "checkpoints/step_00000002"
    fields = json.loads((newest / MANIFEST).read_text())
    newer = {**fields, **more, "format": FORMAT + 1}
    (newest / MANIFEST).write_text(json.dumps(newer))
    with pytest.raises(
        BrokenCheckpoint, match=r"newer version of rankzero \(format 4, .*: update rankzero"
    ):
        restore.load(newest)
    path, (problem,) = checkpoint_files.newest_intact(tmp_path / "checkpoints")
    assert path == tmp_path / "checkpoints/step_00000001" and "newer version" in problem
    save_steps(tmp_path, {3: 0.3, 4: 0.05})
    assert newest.exists(), "what cannot be read is not deleted"


def test_the_newest_checkpoint_has_the_highest_step_also_beyond_eight_digits(
    tmp_path: Path,
) -> None:
    for step in (99_999_999, 100_000_000):
        path = checkpoint_files.folder_of(tmp_path, step)
        path.mkdir()
        (path / MANIFEST).touch()
    found = [path.name for path in checkpoint_files.newest_first(tmp_path)]
    assert found == ["step_100000000", "step_99999999"]


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints/.tmp-step_00000009"
    leftover.mkdir(parents=True)
    (leftover / "state.pt").write_bytes(b"half")
    save_steps(tmp_path, {1: None})
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize("looked_at", [True, False])
@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_checkpoint_survives_a_kill_while_its_step_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int, looked_at: bool
) -> None:
    """A resumed run may save the step of its only checkpoint again, with metrics."""
    save_steps(tmp_path, {7: None})
    renames: list[Path] = []
    plain = Path.rename

    def rename(path: Path, target: Path) -> Path:
        renames.append(path)
        if len(renames) == killed_at:
            raise SystemExit("killed")
        return plain(path, target)

    with monkeypatch.context() as until_killed, pytest.raises(SystemExit):
        until_killed.setattr(Path, "rename", rename)
        save_steps(tmp_path, {7: 0.5})
    if not looked_at:  # a user's own loop only saves
        Checkpoints(tmp_path, 1, GOAL).close()
    path, problems = checkpoint_files.newest_intact(tmp_path / "checkpoints")
    assert path == checkpoint_files.folder_of(tmp_path / "checkpoints", 7) and not problems
    assert restore.load(path)["weights"].tolist() == [7.0] * 3
    save_steps(tmp_path, {7: 0.5})
    assert steps_in(tmp_path) == [7]


def test_failed_replacement_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, {7: None})
    plain = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name.startswith(checkpoint_files.TEMPORARY + "step"):
            raise OSError("no more")
        return plain(path, target)

    problems: list[str] = []
    monkeypatch.setattr(Path, "rename", rename)
    again = Checkpoints(tmp_path, 1, GOAL, notice=problems.append)
    again.save({"weights": torch.zeros(3)}, 7, {"val/loss": 0.5}, False)
    assert again.close() == [] and "no more" in problems[0]
    assert (
        restore.load(checkpoint_files.folder_of(tmp_path / "checkpoints", 7))["weights"].tolist()
        == [7.0] * 3
    )


def test_planted_link_is_not_restored(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "checkpoints"
    save_steps(elsewhere, {7: None})
    folder.mkdir()
    (folder / f"{checkpoint_files.REPLACED}step_00000007").symlink_to(
        elsewhere / "checkpoints" / "step_00000007"
    )
    assert checkpoint_files.newest_intact(folder) == (None, [])


@given(st.integers(0, 10**6))
def test_any_flipped_bit_of_a_manifest_is_detected(where: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_steps(Path(folder), {1: 0.1, 2: 0.2})
        path = Path(folder) / "checkpoints/step_00000002" / MANIFEST
        content = bytearray(path.read_bytes())
        content[where // 8 % len(content)] ^= 1 << where % 8
        path.write_bytes(content)
        newest, problems = checkpoint_files.newest_intact(Path(folder) / "checkpoints")
        assert newest is not None and newest.name == "step_00000001" and len(problems) == 1

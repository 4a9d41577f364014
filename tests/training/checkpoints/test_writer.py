"""Checkpoints: atomic, checksummed, asynchronous; what is kept; nothing that is loaded executes code."""

import contextlib
import json
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankzero.events import CheckpointDeleted, CheckpointSaved, Event
from rankzero.experiment import Goal
from rankzero.run_store import checkpoint_files
from rankzero.run_store.checkpoint_files import (
    FORMAT,
    MANIFEST,
    STATE,
    BrokenCheckpoint,
    Manifest,
)
from rankzero.training.checkpoints import host_copy, restore
from rankzero.training.checkpoints.writer import Checkpoints

GOAL = Goal("val/loss", "min")


def saved(folder: Path, losses: dict[int, float | None], keep: int = 1) -> list[Event]:
    checkpoints = Checkpoints(folder, keep, GOAL)
    events: list[Event] = []
    for step, loss in losses.items():
        metrics = {} if loss is None else {"val/loss": loss}
        events += checkpoints.save(
            {"weights": torch.full((3,), float(step))}, step, metrics, best=False
        )
    return [*events, *checkpoints.close()]


def steps_in(folder: Path) -> list[int]:
    return [
        int(path.name.removeprefix("step_")) for path in sorted((folder / "checkpoints").iterdir())
    ]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": {"b": [torch.arange(5), 1.5, None, "x"]}, "n": 3}
    checkpoints = Checkpoints(tmp_path, 1, GOAL)
    checkpoints.save(state, 7, {"val/loss": 0.5}, True)
    (event,) = checkpoints.close()
    assert event == CheckpointSaved(
        event.time, 7, "checkpoints/step_00000007", True, {"val/loss": 0.5}
    )
    loaded = restore.load(tmp_path / event.path)
    assert torch.equal(loaded["a"]["b"][0], torch.arange(5))
    assert loaded["a"]["b"][1:] == [1.5, None, "x"] and loaded["n"] == 3


def test_the_state_is_the_one_at_the_time_of_saving(tmp_path: Path) -> None:
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
    events = saved(tmp_path, {1: 0.9, 2: 0.3, 3: 0.5, 4: 0.7, 5: None}, keep=2)
    assert steps_in(tmp_path) == [2, 3, 5]
    assert [event.step for event in events if isinstance(event, CheckpointDeleted)] == [1, 4]


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
    doomed = checkpoint_files.superseded(
        manifests, keep, goal, Path("0")
    )  # as a loop that has begun anew
    kept = [path for path in manifests if path not in doomed]
    numbers = [value for value in values if value is not None and value == value]
    best = sorted(numbers, reverse=mode == "max")[:keep]
    kept_values = [manifests[path].metrics.get("val/loss") for path in kept]
    assert {Path("0"), Path(str(len(values) - 1))} <= set(kept)
    assert all(value in kept_values for value in best)
    assert len(kept) <= keep + 2


@pytest.mark.parametrize("damage", ["truncate", "flip", "no state", "no manifest", "torn manifest"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    saved(tmp_path, {1: 0.1, 2: 0.2})
    newest = tmp_path / "checkpoints/step_00000002"
    _damage(newest, damage)
    path, problems = checkpoint_files.newest_intact(tmp_path / "checkpoints")
    assert path == tmp_path / "checkpoints/step_00000001"
    assert len(problems) == (0 if damage == "no manifest" else 1)
    if damage != "no manifest":
        with pytest.raises(BrokenCheckpoint):
            restore.load(newest)


def test_a_broken_checkpoint_is_left_and_stops_no_later_one(tmp_path: Path) -> None:
    saved(tmp_path, {1: 0.1})
    _damage(tmp_path / "checkpoints/step_00000001", "torn manifest")
    events = saved(tmp_path, {2: 0.2, 3: 0.3, 4: 0.4})
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [2, 3, 4]
    assert steps_in(tmp_path) == [1, 2, 4]
    assert (
        checkpoint_files.best(tmp_path / "checkpoints", GOAL)
        == tmp_path / "checkpoints/step_00000002"
    )


@pytest.mark.parametrize("damage", ["truncate", "flip", "no state", "torn manifest"])
def test_a_broken_checkpoint_decides_on_no_deletion(tmp_path: Path, damage: str) -> None:
    """It was the newest and the best; a resume passed over it, and what that saves is neither as far nor as good."""
    saved(tmp_path, {50: 0.5, 100: 0.1}, keep=2)
    _damage(tmp_path / "checkpoints/step_00000100", damage)
    saved(tmp_path, {60: 0.4})
    assert steps_in(tmp_path) == [60, 100]
    assert (
        checkpoint_files.newest_intact(tmp_path / "checkpoints")[0]
        == tmp_path / "checkpoints/step_00000060"
    )
    assert (
        checkpoint_files.best(tmp_path / "checkpoints", GOAL)
        == tmp_path / "checkpoints/step_00000060"
    )
    saved(tmp_path, {70: 0.9})
    assert steps_in(tmp_path) == [60, 70, 100], (
        "the best one that is intact, the last, and the broken one, to look at"
    )
    saved(tmp_path, {100: 0.2, 110: 0.3})
    assert steps_in(tmp_path) == [100, 110], "written again, it counts"


def test_a_loop_that_begins_anew_keeps_what_it_saves_and_what_was_there(tmp_path: Path) -> None:
    saved(tmp_path, {10: 0.1, 100: 0.5})
    saved(tmp_path, {1: 0.9, 2: 0.8})
    assert steps_in(tmp_path) == [2, 10, 100]


def _damage(folder: Path, how: str) -> None:
    state, told = folder / STATE, folder / MANIFEST
    content = state.read_bytes()
    match how:
        case "truncate":
            state.write_bytes(content[: len(content) // 2])
        case "flip":
            state.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        case "no state":
            state.unlink()
        case "no manifest":
            told.unlink()
        case _:
            told.write_text(told.read_text()[:20])


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('code was executed')",))


def test_loading_executes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "checkpoints/step_00000001"
    checkpoint_files.write(target, lambda path: torch.save({"x": Bomb()}, path), 1, {}, False)
    with pytest.raises(BrokenCheckpoint, match="more than tensors and plain values"):
        restore.load(target)


class Writer:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


@pytest.mark.parametrize("place", ["state", "in a list", "protocol 4", "a plain pickle"])
def test_a_planted_pickle_writes_nothing(tmp_path: Path, place: str) -> None:
    bomb, target = Writer(tmp_path / "executed"), tmp_path / "checkpoints/step_00000001"
    save = {
        "state": lambda path: torch.save(bomb, path),
        "in a list": lambda path: torch.save({"model": [torch.zeros(1), bomb]}, path),
        "protocol 4": lambda path: torch.save({"x": bomb}, path, pickle_protocol=4),
        "a plain pickle": lambda path: path.write_bytes(pickle.dumps(bomb)),
    }[place]
    checkpoint_files.write(target, save, 1, {}, False)
    with pytest.raises(Exception, match=r"(?i)weights.only|unsupported|legacy|magic|is refused"):
        restore.load(target)
    assert not (tmp_path / "executed").exists()


def sealed(fields: dict[str, Any]) -> str:
    """Return what a manifest's file would say, had it been written so."""
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
def test_an_altered_manifest_is_passed_over_and_deletes_nothing(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    saved(tmp_path, {1: 0.3, 2: 0.2}, keep=1)
    first = tmp_path / "checkpoints/step_00000001"
    saved(tmp_path, {3: 0.1}, keep=3)
    altered = tmp_path / "checkpoints/step_00000003"
    fields = json.loads((altered / MANIFEST).read_text())
    (altered / MANIFEST).write_text(json.dumps({**fields, **change}))
    with pytest.raises(BrokenCheckpoint, match="altered manifest"):
        restore.load(altered)
    path, problems = checkpoint_files.newest_intact(tmp_path / "checkpoints")
    assert path == tmp_path / "checkpoints/step_00000002" and len(problems) == 1
    saved(tmp_path, {4: 0.5}, keep=1)
    assert steps_in(tmp_path) == [2, 3, 4] and not first.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"files": {STATE: 5}},
        {"step": "2"},
        {"step": -1},
        {"step": True},
        {"metrics": {"val/loss": "low"}},
        {"metrics": []},
        {"world_size": 0},
        {"world_size": 2.0},
        {"best": 1},
    ],
)
def test_a_manifest_whose_values_are_none_of_ours_is_broken(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    saved(tmp_path, {1: 0.1, 2: 0.2})
    newest = tmp_path / "checkpoints/step_00000002"
    fields = json.loads((newest / MANIFEST).read_text())
    (newest / MANIFEST).write_text(sealed({**fields, **change}))
    assert (
        checkpoint_files.newest_intact(tmp_path / "checkpoints")[0]
        == tmp_path / "checkpoints/step_00000001"
    )
    assert checkpoint_files.best(tmp_path / "checkpoints", GOAL) is not None


def test_a_checkpoint_from_before_manifests_were_sealed_is_read(tmp_path: Path) -> None:
    saved(tmp_path, {1: 0.1})
    folder = tmp_path / "checkpoints/step_00000001"
    fields = json.loads((folder / MANIFEST).read_text())
    del fields["seal"]
    (folder / MANIFEST).write_text(json.dumps({**fields, "format": 1}))
    assert checkpoint_files.verify(folder).step == 1


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "sub/x", "..", ""])
def test_a_manifest_names_files_of_its_own_folder_only(tmp_path: Path, name: str) -> None:
    saved(tmp_path, {1: 0.1, 2: 0.2})
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


def test_a_manifest_that_vouches_for_nothing_and_a_link_are_broken(tmp_path: Path) -> None:
    saved(tmp_path, {1: 0.1, 2: 0.2})
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
def test_a_checkpoint_of_a_newer_version_is_named_and_passed_over(
    tmp_path: Path, more: dict[str, int]
) -> None:
    saved(tmp_path, {1: 0.1, 2: 0.2})
    newest = tmp_path / "checkpoints/step_00000002"
    fields = json.loads((newest / MANIFEST).read_text())
    newer = {**fields, **more, "format": FORMAT + 1}
    (newest / MANIFEST).write_text(json.dumps(newer))
    with pytest.raises(
        BrokenCheckpoint, match=r"newer version of rankzero \(format 3, .*: update rankzero"
    ):
        restore.load(newest)
    path, (problem,) = checkpoint_files.newest_intact(tmp_path / "checkpoints")
    assert path == tmp_path / "checkpoints/step_00000001" and "newer version" in problem
    saved(tmp_path, {3: 0.3, 4: 0.05})
    assert newest.exists(), "what cannot be read is not deleted"


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints/.tmp-step_00000009"
    leftover.mkdir(parents=True)
    (leftover / "state.pt").write_bytes(b"half")
    saved(tmp_path, {1: None})
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize("looked_at", [True, False])
@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_a_step_that_is_saved_again_is_there_whenever_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int, looked_at: bool
) -> None:
    """It may be the only checkpoint: a resumed run makes an evaluation anew, and saves its step with the metrics."""
    saved(tmp_path, {7: None})
    renames: list[Path] = []
    plain = Path.rename

    def rename(path: Path, target: Path) -> Path:
        renames.append(path)
        if len(renames) == killed_at:
            raise SystemExit("killed")
        return plain(path, target)

    with monkeypatch.context() as until_killed, pytest.raises(SystemExit):
        until_killed.setattr(Path, "rename", rename)
        saved(tmp_path, {7: 0.5})
    if not looked_at:  # by who keeps their own loop, and only goes on saving
        Checkpoints(tmp_path, 1, GOAL).close()
    path, problems = checkpoint_files.newest_intact(tmp_path / "checkpoints")
    assert path == checkpoint_files.folder_of(tmp_path / "checkpoints", 7) and not problems
    assert restore.load(path)["weights"].tolist() == [7.0] * 3
    saved(tmp_path, {7: 0.5})
    assert steps_in(tmp_path) == [7]


def test_a_step_that_cannot_be_saved_again_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, {7: None})
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


def test_nothing_that_is_planted_is_put_back(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "checkpoints"
    saved(elsewhere, {7: None})
    folder.mkdir()
    (folder / f"{checkpoint_files.REPLACED}step_00000007").symlink_to(
        elsewhere / "checkpoints" / "step_00000007"
    )
    assert checkpoint_files.newest_intact(folder) == (None, [])


def test_a_checkpoint_that_cannot_be_written_is_a_problem_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    problems: list[str] = []
    checkpoints = Checkpoints(tmp_path, 1, GOAL, notice=problems.append)
    checkpoints.save({"weights": torch.zeros(3)}, 1, {}, False)
    assert checkpoints.close() == [] and len(problems) == 1
    assert "could not be written" in problems[0]


@pytest.mark.parametrize("fails", ["rename", "rmtree"])
def test_a_deletion_that_fails_hides_no_checkpoint_and_is_told_once(
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


def test_a_copy_has_arrived_when_that_of_every_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that lies on several GPUs: an event on the current one's stream says nothing of the others."""
    waited: list[str] = []

    class Recorded:
        def record(self, stream: str) -> None:
            self.stream = stream

        def synchronize(self) -> None:
            waited.append(self.stream)

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: f"of {gpu}")
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert host_copy.PendingCopy("state", host_copy.record_events(gpus)).wait() == "state"
    assert waited == ["of cuda:0", "of cuda:1"]
    assert host_copy.HostCopier().copy({"x": torch.zeros(1)}).arrived == []


@given(st.integers(0, 10**6))
def test_a_flipped_bit_anywhere_in_a_manifest_is_noticed(where: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved(Path(folder), {1: 0.1, 2: 0.2})
        path = Path(folder) / "checkpoints/step_00000002" / MANIFEST
        content = bytearray(path.read_bytes())
        content[where // 8 % len(content)] ^= 1 << where % 8
        path.write_bytes(content)
        newest, problems = checkpoint_files.newest_intact(Path(folder) / "checkpoints")
        assert newest is not None and newest.name == "step_00000001" and len(problems) == 1

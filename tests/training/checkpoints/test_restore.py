"""Every rank reads the newest intact checkpoint. Loading executes no code."""

from __future__ import annotations

import datetime
import gc
import json
import multiprocessing
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rankzero.errors import UserError
from rankzero.ranks import Ranks
from rankzero.run_store import checkpoint_files
from rankzero.run_store.checkpoint_files import (
    BrokenCheckpoint,
)
from rankzero.training.checkpoints import restore
from rankzero.training.distributed.world import World
from support.checkpoints import damage_checkpoint, save_steps


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
def test_planted_pickle_is_not_executed(tmp_path: Path, place: str) -> None:
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


ALONE = World(Ranks(), torch.device("cpu"))


@pytest.mark.parametrize("damage", ["truncate", "flip", "no state", "torn manifest"])
def test_newest_is_read_without_the_damaged_ones(tmp_path: Path, damage: str) -> None:
    save_steps(tmp_path, {1: 0.1, 2: 0.2, 3: 0.3}, keep=3)
    for step in (2, 3):
        damage_checkpoint(tmp_path / f"checkpoints/step_0000000{step}", damage)
    notices: list[str] = []
    found = restore.read_newest(tmp_path / "checkpoints", ALONE, notices.append)
    assert found is not None and found[0] == "step_00000001"
    assert found[1]["weights"].tolist() == [1.0] * 3
    assert len(notices) == 2 and all("skipped a checkpoint" in text for text in notices)


def test_without_an_intact_checkpoint_nothing_is_read(tmp_path: Path) -> None:
    assert restore.read_newest(tmp_path / "checkpoints", ALONE, pytest.fail) is None


def test_refused_checkpoint_is_not_skipped(tmp_path: Path) -> None:
    save_steps(tmp_path, {1: 0.1})
    target = tmp_path / "checkpoints/step_00000002"
    checkpoint_files.write(target, lambda path: torch.save({"x": Bomb()}, path), 2, {}, False)
    with pytest.raises(UserError, match=r"is refused; to continue from .* delete this one"):
        restore.read_newest(tmp_path / "checkpoints", ALONE, pytest.fail)


def _read_as(rank: int, folder: Path, checkpoints: Path) -> None:
    """Read as one of two ranks, and write what comes of it."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    world, notices = World(Ranks(rank=rank, world_size=2), torch.device("cpu")), list[str]()
    try:
        found = restore.read_newest(checkpoints, world, notices.append)
        seen = [found and [found[0], found[1]["weights"].tolist()], len(notices)]
    except Exception as error:
        seen = [type(error).__name__, len(notices)]
    (folder / f"{rank}.json").write_text(json.dumps(seen))


@pytest.mark.parametrize("second", ["the same folder", "no folder", "a damaged copy", "another"])
def test_two_ranks_read_what_rank_0_has(tmp_path: Path, second: str) -> None:
    """Rank 0's newest checkpoint is damaged, so both read the one before."""
    folders = [tmp_path / name for name in ("here", "there")]
    folders[0].mkdir()
    save_steps(folders[0], {1: 0.1, 2: 0.2}, keep=2)
    damage_checkpoint(folders[0] / "checkpoints/step_00000002", "flip")
    match second:
        case "the same folder":
            folders[1] = folders[0]
        case "a damaged copy":
            shutil.copytree(folders[0], folders[1])
            damage_checkpoint(folders[1] / "checkpoints/step_00000001", "flip")
        case "another":
            folders[1].mkdir()
            save_steps(folders[1], {2: 0.2}, keep=2)
            target = folders[1] / "checkpoints/step_00000001"
            other = {"weights": torch.zeros(3)}
            checkpoint_files.write(target, lambda path: torch.save(other, path), 1, {}, False)
    assert _seen_by_two(tmp_path, folders) == [
        [["step_00000001", [1.0] * 3], 1],
        [["step_00000001", [1.0] * 3], 0],
    ]


def test_all_ranks_know_that_the_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    save_steps(tmp_path / "there", {1: 0.1})
    target = tmp_path / "there/checkpoints/step_00000002"
    checkpoint_files.write(target, lambda path: torch.save({"x": Bomb()}, path), 2, {}, False)
    # Only rank 0 has the folder, and its state is refused.
    seen = _seen_by_two(tmp_path, [tmp_path / "there", tmp_path / "none"])
    assert seen == [["UserError", 0], ["UserError", 0]]


def _seen_by_two(tmp_path: Path, folders: Sequence[Path]) -> list[Any]:
    """Return what two ranks read of these folders, or their errors, and how many notices."""
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=_read_as, args=(rank, tmp_path, folder / "checkpoints"))
        for rank, folder in enumerate(folders)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_a_damaged_state_is_not_kept(tmp_path: Path) -> None:
    """Neither in the error, nor in its traceback: it may be as large as the memory."""
    save_steps(tmp_path, {1: 0.1})
    damage_checkpoint(tmp_path / "checkpoints/step_00000001", "flip")
    gc.collect()
    gc.disable()
    try:
        assert restore.read_newest(tmp_path / "checkpoints", ALONE, str) is None
        states = [one for one in gc.get_objects() if type(one) is dict and "weights" in one]
        kept = [one for one in states if isinstance(one["weights"], torch.Tensor)]
    finally:
        gc.enable()
    assert not kept

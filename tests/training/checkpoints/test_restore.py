"""Loading a checkpoint executes no code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from rankzero.run_store import checkpoint_files
from rankzero.run_store.checkpoint_files import (
    BrokenCheckpoint,
)
from rankzero.training.checkpoints import restore


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

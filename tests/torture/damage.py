"""Ways to damage a checkpoint in place."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rankzero.run_store import checkpoint_files
from rankzero.training.checkpoints import restore

Damage = Callable[[Path, random.Random, Path], None]


def truncated(step: Path, choose: random.Random, _: Path) -> None:
    path = _file(step, choose)
    os.truncate(path, choose.randrange(path.stat().st_size))


def bit_flipped(step: Path, choose: random.Random, _: Path) -> None:
    path = _file(step, choose)
    content = bytearray(path.read_bytes())
    content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    path.write_bytes(content)


def half_renamed(step: Path, _choose: random.Random, _: Path) -> None:
    step.rename(step.with_name(checkpoint_files.TEMPORARY + step.name))


def without_manifest(step: Path, _choose: random.Random, _: Path) -> None:
    (step / "manifest.json").unlink()


def without_state(step: Path, _choose: random.Random, _: Path) -> None:
    (step / "state.pt").unlink()


def emptied(step: Path, choose: random.Random, _: Path) -> None:
    _file(step, choose).write_bytes(b"")


def zeroed(step: Path, choose: random.Random, _: Path) -> None:
    """Fill a file with zeros, as a file system does if its blocks were never written."""
    path = _file(step, choose)
    path.write_bytes(bytes(path.stat().st_size))


def another_runs(step: Path, choose: random.Random, _: Path) -> None:
    """Put the state of another model under this manifest."""
    torch.save(
        {"model": {"weight": torch.zeros(3)}, "step": choose.randrange(1000)}, step / "state.pt"
    )


def malicious(step: Path, _choose: random.Random, proof: Path) -> None:
    """Write a pickle that runs code, and a manifest with its size and checksum."""
    import hashlib
    import pickle

    class Attack:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {proof}",)

    # PyTorch reads protocol 2 without a warning.
    content = pickle.dumps({"model": Attack(), "step": 1}, protocol=2)
    (step / "state.pt").write_bytes(content)
    seen = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = checkpoint_files.read_manifest(step)
    matching = dataclasses.replace(manifest, files=dict.fromkeys(manifest.files, seen))
    (step / "manifest.json").write_text(matching.to_json())


def another_models(step: Path, choose: random.Random, _: Path) -> None:
    """Write an intact checkpoint of another model, with correct checksums."""
    manifest, saved = checkpoint_files.read_manifest(step), restore.load(step)
    saved["model"] = {"weight": torch.zeros(choose.randrange(1, 9))}
    checkpoint_files.write(
        step,
        lambda path: torch.save(saved, path),
        manifest.step,
        manifest.metrics,
        manifest.best,
        manifest.world_size,
    )


def a_file(step: Path, _choose: random.Random, _: Path) -> None:
    """Put a file in place of the folder."""
    shutil.rmtree(step)
    step.write_text("not a folder")


DAMAGES: dict[str, Damage] = {
    "truncated": truncated,
    "bit-flipped": bit_flipped,
    "half-renamed": half_renamed,
    "without manifest": without_manifest,
    "without state": without_state,
    "emptied": emptied,
    "zeroed": zeroed,
    "another run's": another_runs,
    "malicious": malicious,
    "a file": a_file,
}

# Checksums do not show these. A resume starts with such a checkpoint, and refuses it.
REFUSED: dict[str, Damage] = {"malicious": malicious, "another model's": another_models}


def _file(step: Path, choose: random.Random) -> Path:
    return step / choose.choice(("state.pt", "manifest.json"))

"""Captured pictures, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from rankzero.events import PicturesTaken
from rankzero.run_store import picture_files
from rankzero.run_store.folder import RunFolder
from support.runs import T0


def arrays(classes: int = 3, mistakes: int = 5, **others: Any) -> dict[str, Any]:
    """Return arrays as `ImageCapture` writes them."""
    random = np.random.default_rng(0)
    return {
        "samples": np.int64(40),
        "total": np.int64(80),
        "wrong": np.int64(mistakes),
        "cut": np.bool_(False),
        "mistakes": random.integers(0, 256, (mistakes, 6, 6, 3)).astype(np.uint8),
        "mistakes_true": np.arange(mistakes) % classes,
        "mistakes_predicted": np.ones(mistakes, int),
        "mistakes_confidence": np.full(mistakes, 0.5),
        "confusion": random.integers(0, 9, (classes, classes)),
        "batch": np.zeros((16, 6, 6, 1), np.uint8),
        "batch_labels": np.zeros(16, int),
        "classes": np.array(["a $very$ long name of a class \\frac", "b", "c"], "U"),
        "own_names": np.array([], "U"),
        **others,
    }


def one_picture() -> dict[str, Any]:
    """Return arrays of one picture of a user, which is drawn in a tenth of the time."""
    return {"own_names": np.array(["mask"], "U"), "own_0": np.zeros((6, 6, 3), np.uint8)}


def taken(folder: RunFolder, step: int, content: dict[str, Any] | bytes) -> PicturesTaken:
    """Write arrays, or any bytes, into the folder, and return the event."""
    path = folder.pictures / f"step_{step:08d}.npz"
    if isinstance(content, bytes):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    else:
        picture_files.write(path, content)
    return PicturesTaken(T0 + step, step, f"pictures/{path.name}")

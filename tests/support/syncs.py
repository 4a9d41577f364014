"""Which files and folders are synced, and in which order."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


def recorded(
    monkeypatch: pytest.MonkeyPatch, see: Callable[[Path], None] | None = None
) -> list[Path]:
    """Return a list that gets each path that Python syncs from now on.

    `see` is called before each sync, and may raise what a disk would.
    """
    order: list[Path] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        order.append(path)
        if see is not None:
            see(path)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return order

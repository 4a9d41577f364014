"""Checkpoints on the disk: atomic, checksummed, read without executing code."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rankzero.experiment import Goal
from rankzero.training.checkpoints.manifest import (
    MANIFEST,
    STATE,
    BrokenCheckpoint,
    Manifest,
    complete,
    fingerprint,
    is_judged,
    known,
    problem_with,
    text,
    verify,
)

TEMPORARY = ".tmp-"
DELETED, REPLACED = TEMPORARY + "deleted-", TEMPORARY + "replaced-"


def superseded(
    manifests: Mapping[Path, Manifest], keep: int, goal: Goal, written: Path
) -> list[Path]:
    """Return the checkpoints that are neither the last nor among the best `keep` by the goal metric. Pure.

    The last is the one just `written`, and that of the highest step: a loop of one's own may have begun anew.
    """
    last = max(manifests, key=lambda path: manifests[path].step, default=written)
    kept = {written, last, *_best_first(manifests, goal)[:keep]}
    return [path for path in manifests if path not in kept]


def _best_first(manifests: Mapping[Path, Manifest], goal: Goal) -> list[Path]:
    """Return the checkpoints at which the goal's metric was measured, the older first where two are as good."""
    judged = [path for path in manifests if is_judged(manifests[path], goal)]
    sign = -1 if goal.mode == "max" else 1
    return sorted(
        judged, key=lambda path: (sign * manifests[path].metrics[goal.metric], manifests[path].step)
    )


def write(
    target: Path,
    save_state: Callable[[Path], None],
    step: int,
    metrics: Mapping[str, float],
    best: bool,
    world_size: int | None = None,
) -> None:
    """Write a checkpoint's folder in one step: a reader sees all of it or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(TEMPORARY + target.name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    save_state(temporary / STATE)
    _sync(temporary / STATE)
    manifest = Manifest(step, metrics, best, {STATE: fingerprint(temporary / STATE)}, world_size)
    (temporary / MANIFEST).write_text(text(manifest), encoding="utf-8")
    _sync(temporary / MANIFEST)
    _sync(temporary)
    _replace(temporary, target)
    _sync(target.parent)


def load(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's state, on the CPU. Raises BrokenCheckpoint where it is not intact, or more than data."""
    verify(folder)
    try:
        state: dict[str, Any] = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError
    ) as error:  # with the checksum right, this was written so: nothing of it was run
        raise BrokenCheckpoint(
            f"{folder} holds more than tensors and plain values, and is refused"
        ) from error
    return state


def newest_intact(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint whose checksums hold, and what is wrong with newer ones. Before an attempt only."""
    _put_back(checkpoints)
    problems: list[str] = []
    for path in reversed(complete(checkpoints)):
        problem = problem_with(path)
        if problem is None:
            return path, problems
        problems.append(problem)
    return None, problems


def best(checkpoints: Path, goal: Goal) -> Path | None:
    """Return the intact checkpoint with the best goal metric; the last one where none was evaluated."""
    manifests = known(checkpoints)
    judged = _best_first(manifests, goal)
    others = sorted(manifests.keys() - set(judged), key=lambda path: -manifests[path].step)
    return next((path for path in (*judged, *others) if problem_with(path) is None), None)


def folder_of(checkpoints: Path, step: int) -> Path:
    """Return where the checkpoint of `step` lies; the names sort by step."""
    return checkpoints / f"step_{step:08d}"


def _replace(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    doomed = _set_aside(target, REPLACED)  # a resumed run saves a step again
    try:
        temporary.rename(target)
    except OSError:
        doomed.rename(target)
        raise
    with contextlib.suppress(OSError):  # then it is a leftover, which the next start removes
        shutil.rmtree(doomed.rename(target.with_name(DELETED + target.name)))


def _put_back(checkpoints: Path) -> None:
    """Undo a replacement that was cut short between its two steps: it may have been of the only checkpoint."""
    for path in checkpoints.glob(REPLACED + "step_*"):
        target = path.with_name(path.name.removeprefix(REPLACED))
        if not target.exists() and not path.is_symlink():
            with contextlib.suppress(OSError):  # another rank was faster
                path.rename(target)


def _delete(path: Path) -> None:
    shutil.rmtree(_set_aside(path, DELETED))


def _set_aside(path: Path, prefix: str) -> Path:
    """Give a folder a temporary name: it is gone in one step for readers."""
    return path.rename(path.with_name(prefix + path.name))


def _remove_leftovers(checkpoints: Path) -> None:
    _put_back(checkpoints)
    for path in checkpoints.glob(TEMPORARY + "*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

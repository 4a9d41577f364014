"""Checkpoints: copied to the host at once, written by a thread, atomic, checksummed; retention; restore.

    checkpoints/step_00000120/state.pt        tensors and plain values, loaded with weights_only=True
                              manifest.json   sizes and SHA-256 of the files, step, metrics

A folder under its final name is complete: it is written under a temporary name, synced and
renamed. Loading verifies the checksums and never executes code.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rankzero.events import CheckpointDeleted, CheckpointSaved, Event
from rankzero.experiment import Goal
from rankzero.train.manifest import (
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
from rankzero.train.staging import Staged, Staging

TEMPORARY = ".tmp-"
DELETED, REPLACED = TEMPORARY + "deleted-", TEMPORARY + "replaced-"
LOWEST_PRIORITY = 19


class Checkpoints:
    """Rank 0's checkpoints of one run: save, keep the best `keep` and the last, delete the rest.

    `save` returns as soon as the state is copied; one thread writes. At most one checkpoint is
    in flight: a second `save` waits for it, and what it waited counts into `blocked_seconds`.
    What earlier attempts left is read once, by that thread: only for what is intact another one is deleted.
    `notice` is told what went wrong as soon as `save`, `poll`, `finish` or `close` know it, each problem once.
    """

    def __init__(
        self,
        run_folder: Path,
        keep: int,
        goal: Goal,
        world_size: int | None = None,
        notice: Callable[[str], None] = print,
    ) -> None:
        self._root, self._keep, self._goal, self._world_size = run_folder, keep, goal, world_size
        self._notice = notice
        self._folder = run_folder / "checkpoints"
        self._staging = Staging()
        self._writer = ThreadPoolExecutor(1, "checkpoint", _lowest_priority)
        self._pending: Future[list[Event]] | None = None
        self.blocked_seconds = 0.0
        self._problems: list[str] = []
        self._cannot_delete = False
        self._intact: dict[Path, bool] = {}
        _remove_leftovers(self._folder)

    def save(self, state: Mapping[str, Any], step: int, metrics: Mapping[str, float], best: bool) -> list[Event]:
        """Copy `state` and have it written; return the events of the checkpoint before."""
        start = time.perf_counter()
        events = self.finish()
        staged = self._staging.copy(dict(state))
        self._pending = self._writer.submit(self._write, staged, step, dict(metrics), best)
        self.blocked_seconds += time.perf_counter() - start
        return events

    def poll(self) -> list[Event]:
        """Return the events of a write that has ended since the last call; never waits."""
        return self.finish() if self._pending is not None and self._pending.done() else []

    def finish(self) -> list[Event]:
        """Wait for the write in flight, if any, and return its events."""
        pending, self._pending = self._pending, None
        if pending is None:
            return []
        try:
            return pending.result()
        except Exception as error:  # a full disk must not end the training: say so, keep the older ones
            self._problems.append(f"a checkpoint could not be written: {error}")
            return []
        finally:
            while self._problems:  # the thread that wrote has ended its work: this is the only one at the list
                self._notice(self._problems.pop(0))

    def close(self) -> list[Event]:
        """Wait for the write in flight and end the thread."""
        events = self.finish()
        self._writer.shutdown()
        return events

    def _write(self, staged: Staged, step: int, metrics: dict[str, float], best: bool) -> list[Event]:
        target = folder_of(self._folder, step)
        write(target, lambda path: torch.save(staged.wait(), path), step, metrics, best, self._world_size)
        saved = CheckpointSaved(time.time(), step, str(target.relative_to(self._root)), best, metrics)
        self._intact[target] = True
        return [saved, *self._prune(target)]

    def _prune(self, written: Path) -> Iterator[Event]:
        manifests = known(self._folder)
        for path in self._doomed(manifests, written):
            try:
                _delete(path)
            except OSError as error:  # what has been saved is no less good for it
                self._complain_of_deleting(error)
            if not path.exists():
                yield CheckpointDeleted(time.time(), manifests[path].step, str(path.relative_to(self._root)))

    def _doomed(self, manifests: Mapping[Path, Manifest], written: Path) -> list[Path]:
        """Return what intact checkpoints have superseded. Reads those that are to be kept, where any is to go."""
        while doomed := superseded(manifests, self._keep, self._goal, written):
            intact = {path: told for path, told in manifests.items() if path in doomed or self._holds(path)}
            if len(intact) == len(manifests):
                break
            manifests = intact
        return doomed

    def _holds(self, path: Path) -> bool:
        """Tell whether a checkpoint is intact, as far as this attempt has looked: once."""
        if path not in self._intact:
            self._intact[path] = problem_with(path) is None
        return self._intact[path]

    def _complain_of_deleting(self, error: OSError) -> None:
        """Say once that retention fails: the next checkpoint will have it fail again, and the one after that."""
        if not self._cannot_delete:
            self._cannot_delete = True
            self._problems.append(f"an older checkpoint could not be deleted, and others may stay, too: {error}")


def superseded(manifests: Mapping[Path, Manifest], keep: int, goal: Goal, written: Path) -> list[Path]:
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
    return sorted(judged, key=lambda path: (sign * manifests[path].metrics[goal.metric], manifests[path].step))


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
    except pickle.UnpicklingError as error:  # with the checksum right, this was written so: nothing of it was run
        raise BrokenCheckpoint(f"{folder} holds more than tensors and plain values, and is refused") from error
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


def _lowest_priority() -> None:
    """Lower this thread's priority (on Linux, threads have their own): the training comes first."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)

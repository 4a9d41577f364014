"""Checkpoints: copied to the host at once, written by a thread, atomic, checksummed; retention; restore.

    checkpoints/step_00000120/state.pt        tensors and plain values, loaded with weights_only=True
                              manifest.json   sizes and SHA-256 of the files, step, metrics

A folder under its final name is complete: it is written under a temporary name, synced and
renamed. Loading verifies the checksums and never executes code.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rankzero.events import CheckpointDeleted, CheckpointSaved, Event
from rankzero.experiment import Goal
from rankzero.training.checkpoints.files import (
    _delete,
    _remove_leftovers,
    folder_of,
    superseded,
    write,
)
from rankzero.training.checkpoints.host_copy import HostCopier, PendingCopy
from rankzero.training.checkpoints.manifest import (
    Manifest,
    known,
    problem_with,
)

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
        self._staging = HostCopier()
        self._writer = ThreadPoolExecutor(1, "checkpoint", _lowest_priority)
        self._pending: Future[list[Event]] | None = None
        self.blocked_seconds = 0.0
        self._problems: list[str] = []
        self._cannot_delete = False
        self._intact: dict[Path, bool] = {}
        _remove_leftovers(self._folder)

    def save(
        self, state: Mapping[str, Any], step: int, metrics: Mapping[str, float], best: bool
    ) -> list[Event]:
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
        except (
            Exception
        ) as error:  # a full disk must not end the training: say so, keep the older ones
            self._problems.append(f"a checkpoint could not be written: {error}")
            return []
        finally:
            while (
                self._problems
            ):  # the thread that wrote has ended its work: this is the only one at the list
                self._notice(self._problems.pop(0))

    def close(self) -> list[Event]:
        """Wait for the write in flight and end the thread."""
        events = self.finish()
        self._writer.shutdown()
        return events

    def _write(
        self, staged: PendingCopy, step: int, metrics: dict[str, float], best: bool
    ) -> list[Event]:
        target = folder_of(self._folder, step)
        write(
            target,
            lambda path: torch.save(staged.wait(), path),
            step,
            metrics,
            best,
            self._world_size,
        )
        saved = CheckpointSaved(
            time.time(), step, str(target.relative_to(self._root)), best, metrics
        )
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
                yield CheckpointDeleted(
                    time.time(), manifests[path].step, str(path.relative_to(self._root))
                )

    def _doomed(self, manifests: Mapping[Path, Manifest], written: Path) -> list[Path]:
        """Return what intact checkpoints have superseded. Reads those that are to be kept, where any is to go."""
        while doomed := superseded(manifests, self._keep, self._goal, written):
            intact = {
                path: told
                for path, told in manifests.items()
                if path in doomed or self._holds(path)
            }
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
            self._problems.append(
                f"an older checkpoint could not be deleted, and others may stay, too: {error}"
            )


def _lowest_priority() -> None:
    """Lower this thread's priority (on Linux, threads have their own): the training comes first."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)

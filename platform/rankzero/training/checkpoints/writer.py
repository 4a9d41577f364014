"""Rank 0's checkpoints of one run: copied to the host at once, written by a thread, pruned.

A checkpoint of step N reaches the disk after the journal's events up to N. Otherwise a killed run
would be resumed behind steps that nobody has logged.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankzero.errors import UserError
from rankzero.events import CheckpointDeleted, CheckpointSaved, Event, RunStarted
from rankzero.experiment import Goal
from rankzero.permanent_errors import TORCH_WRITER_ERRORS
from rankzero.run_store import checkpoint_files, disk
from rankzero.run_store.checkpoint_files import Manifest
from rankzero.run_store.journal import read_all
from rankzero.tracking.run_log import RunLog
from rankzero.training.checkpoints.host_copy import HostCopier, PendingCopy
from rankzero.training.checkpoints.host_memory import room_for

_RETRY_SECONDS = 0.5


class Checkpoints:
    """Saves checkpoints, keeps the best `keep` and the last, and deletes the rest.

    `save` returns as soon as the state is copied. One thread writes, and at most one checkpoint is
    being written: the next `save` waits for it, and `blocked_seconds` includes that wait.
    `save`, `poll`, `finish` and `close` pass each problem to `notice`, once.

    `save` calls `flush_journal`, and the thread calls `sync_journal` before it writes.
    """

    def __init__(
        self,
        run_folder: Path,
        keep: int,
        goal: Goal,
        world_size: int | None = None,
        notice: Callable[[str], None] = print,
        *,
        flush_journal: Callable[[], None] = lambda: None,
        sync_journal: Callable[[], None] = lambda: None,
        sync: disk.Sync = disk.sync,
    ) -> None:
        self._root, self._keep, self._goal, self._world_size = run_folder, keep, goal, world_size
        self._notice = notice
        self._flush_journal, self._sync_journal, self._sync = flush_journal, sync_journal, sync
        self._folder = run_folder / "checkpoints"
        self._copier = HostCopier()
        self._writer = ThreadPoolExecutor(1, "checkpoint", _lower_priority)
        self._thread_id = 0
        self._pending: Future[list[Event]] | None = None
        self._prepared: Future[None] | None = None
        self._is_hurried = threading.Event()
        self._error: Exception | None = None
        self.blocked_seconds = 0.0
        self._problems: list[str] = []
        self._cannot_delete = False
        self._intact: dict[Path, bool] = {}
        checkpoint_files.remove_leftovers(self._folder)

    @classmethod
    def of_run(
        cls, log: RunLog, keep: int, goal: Goal, world_size: int | None = None
    ) -> Checkpoints:
        """Return a run's checkpoints, after logging what a killed attempt did to them."""
        path, notice = log.folder.path, log.notice
        found = cls(
            path, keep, goal, world_size, notice, flush_journal=log.flush, sync_journal=log.sync
        )
        for event in unlogged(path, read_all(log.folder.events), keep, goal):
            log(event)
        return found

    def prepare(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Have the thread make memory ready for copies of these tensors, at the first call.

        A page fault for every 4 KiB would else be a part of the first `save`.
        """
        if self._prepared is None:
            found = list(tensors())
            size, for_gpu = sum(map(room_for, found)), any(one.is_cuda for one in found)
            self._prepared = self._writer.submit(
                self._copier.prepare, size, self._is_hurried.is_set, for_gpu=for_gpu
            )

    def save(
        self, state: Mapping[str, Any], step: int, metrics: Mapping[str, float], best: bool
    ) -> list[Event]:
        """Copy `state`, start writing it, and return the events of the checkpoint before.

        A state that could not be loaded again is not written. That counts as a failed write.
        """
        start = time.perf_counter()
        events = self.finish()
        if self._prepared is not None:
            self._is_hurried.set()
            # Without memory for them, the copy fails, too, and says so.
            self._prepared.exception()
        self._flush_journal()
        before, self._error = self._error, None
        try:
            # A copy as a dict would lose the versions that a module's state has.
            copy = self._copier.copy(state if isinstance(state, dict) else dict(state))
        except UserError as error:
            self._error, self._last = error, (PendingCopy({}, []), step, dict(metrics), best)
            if str(before) != str(error):  # The next state has the same value, as a rule.
                self._notice(str(self.failure))
            return events
        # The training may change the state now: the copy is done, or ahead of it in the stream.
        self._last = copy, step, dict(metrics), best
        self._pending = self._writer.submit(self._write, *self._last)
        self.blocked_seconds += time.perf_counter() - start
        return events

    def poll(self) -> list[Event]:
        """Return the events of a write that has ended since the last call. Never waits."""
        return [] if self.is_writing() else self.finish()

    def still_writing(self, seconds: float) -> int | None:
        """Wait for the current write, at most `seconds`. Return its step if it has not ended."""
        if self._pending is None:
            return None
        begun = time.perf_counter()
        wait([self._pending], seconds)
        self.blocked_seconds += time.perf_counter() - begun
        return None if self._pending.done() else self._last[1]

    def is_writing(self) -> bool:
        """Return whether a write has not ended. Any thread may call this."""
        pending = self._pending
        return pending is not None and not pending.done()

    @property
    def is_unlogged(self) -> bool:
        """Whether `poll` will return the events of a write."""
        return self._pending is not None

    def bytes_moved(self) -> int:
        """Return how much the thread has read and written. Linux only, else 0."""
        # Not the size of the file: its sync and its checksum may take as long as its bytes. Each
        # piece is read once it is synced.
        with contextlib.suppress(OSError):
            text = Path(f"/proc/self/task/{self._thread_id}/io").read_text()
            read, written = (int(line.split()[1]) for line in text.splitlines()[:2])
            return read + written
        return 0

    def finish(self) -> list[Event]:
        """Wait for the current write, if any, and return its events."""
        if self._pending is None:
            return []
        events = self._result()
        # The thread is idle now, so nothing else uses the list.
        if self.failure is not None:
            self._problems.append(self.failure)
        while self._problems:
            self._notice(self._problems.pop(0))
        return events

    def close(self, patience_seconds: float = 0.0) -> list[Event]:
        """Wait for the current write, end the thread, and return the events of the write.

        A write that failed is tried again for `patience_seconds`.
        """
        self._is_hurried.set()
        events = self.finish()
        until = time.monotonic() + patience_seconds
        while _is_of_the_disk(self._error) and time.monotonic() < until:
            time.sleep(_RETRY_SECONDS)
            self._pending = self._writer.submit(self._write, *self._last)
            events += self._result()
        self._writer.shutdown()
        self._copier.close()
        return events

    @property
    def failure(self) -> str | None:
        """Why the newest checkpoint is not on the disk, or None if it is."""
        if self._error is None:
            return None
        # PyTorch's text of a full disk is about a C++ source and positions in the file.
        is_torchs = isinstance(self._error, RuntimeError) and _is_of_the_disk(self._error)
        why = "no space left, or the disk refuses writes" if is_torchs else self._error
        return f"the checkpoint of step {self._last[1]} could not be written: {why}"

    def _result(self) -> list[Event]:
        pending, self._pending, self._error = self._pending, None, None
        try:
            return pending.result() if pending is not None else []
        except Exception as error:  # a full disk must not end the training; older ones stay
            self._error = error
            return []

    def _write(
        self, copy: PendingCopy, step: int, metrics: dict[str, float], best: bool
    ) -> list[Event]:
        self._thread_id = threading.get_native_id()
        target = checkpoint_files.folder_of(self._folder, step)
        self._sync_journal()
        checkpoint_files.write(
            target,
            lambda path: torch.save(copy.wait(), path),
            step,
            metrics,
            best,
            self._world_size,
            self._sync,
        )
        place = str(target.relative_to(self._root))
        saved = CheckpointSaved(time.time(), step, place, best, metrics)
        self._intact[target] = True
        return [saved, *self._prune(target)]

    def _prune(self, written: Path) -> Iterator[Event]:
        manifests = checkpoint_files.known(self._folder)
        for path in self._doomed(manifests, written):
            try:
                checkpoint_files.delete(path, self._sync)
            except OSError as error:
                # The same fault would return with every checkpoint, so it is reported once.
                if not self._cannot_delete:
                    self._problems.append(
                        f"an older checkpoint could not be deleted, and others may stay: {error}"
                    )
                self._cannot_delete = True
            if not path.exists():
                place = str(path.relative_to(self._root))
                yield CheckpointDeleted(time.time(), manifests[path].step, place)

    def _doomed(self, manifests: Mapping[Path, Manifest], written: Path) -> list[Path]:
        """Return the checkpoints that intact ones supersede."""
        # A damaged checkpoint must not cause the deletion of a good one. To know that reads every
        # file that is to stay, so it happens only if something is to go, and once an attempt.
        while doomed := checkpoint_files.superseded(manifests, self._keep, self._goal, written):
            for path in manifests.keys() - set(doomed) - self._intact.keys():
                self._intact[path] = checkpoint_files.problem_with(path, threads=1) is None
            usable = {
                path: manifest
                for path, manifest in manifests.items()
                if path in doomed or self._intact[path]
            }
            if len(usable) == len(manifests):
                break
            manifests = usable
        return doomed


def unlogged(run_folder: Path, events: Iterable[Event], keep: int, goal: Goal) -> list[Event]:
    """Return what a killed attempt did to its checkpoints and could not log. Before an attempt.

    `events`: of the run's journal. Without these events, MLflow would never get the newest
    checkpoint, or would keep a deleted one.
    """
    first = math.inf
    logged: dict[Path, CheckpointSaved] = {}
    for event in events:
        if isinstance(event, RunStarted):
            first = min(first, event.step)
        elif isinstance(event, CheckpointSaved):
            logged[run_folder / event.path] = event
        elif isinstance(event, CheckpointDeleted):
            logged.pop(run_folder / event.path, None)
    found, now = checkpoint_files.known(run_folder / "checkpoints"), time.time()
    missed: list[Event] = [
        CheckpointSaved(
            now, manifest.step, str(path.relative_to(run_folder)), manifest.best, manifest.metrics
        )
        for path, manifest in found.items()
        # MLflow has a downloaded checkpoint. Those of earlier versions have no such file, and this
        # disk's attempts continue from them. A repeated evaluation saves a step again.
        if (path not in logged or _results(logged[path]) != _results(manifest))
        and not (path / checkpoint_files.DOWNLOADED).exists()
        # An attempt that begins at step 0 has downloaded nothing, and an own loop may save step 0.
        and (first == 0 or manifest.step > first)
    ]
    missing = {
        path: Manifest(event.step, event.metrics, event.best, {})
        for path, event in logged.items()
        if not path.exists()
    }
    newest = max(found, key=lambda path: found[path].step, default=None)
    if newest is not None:
        # A person deleted what retention would keep. MLflow's copy of it stays.
        doomed = checkpoint_files.superseded({**found, **missing}, keep, goal, newest)
        missed += [
            CheckpointDeleted(now, missing[path].step, str(path.relative_to(run_folder)))
            for path in doomed
            if path in missing
        ]
    return missed


def _results(saved: CheckpointSaved | Manifest) -> str:
    # As text, in which NaN equals NaN.
    return str((saved.best, sorted(saved.metrics.items())))


def _is_of_the_disk(error: Exception | None) -> bool:
    """Return whether a disk that refuses writes caused the error. It may mend itself."""
    # torch.save reports a full disk as a RuntimeError. So are the errors of a GPU, which stay.
    return isinstance(error, OSError) or (
        type(error) is RuntimeError and any(text in str(error) for text in TORCH_WRITER_ERRORS)
    )


# No method: the thread would keep the checkpoints, and their copies, for as long as it lives.
def _lower_priority() -> None:
    """Give this thread the lowest priority, because the training comes first."""
    # On Linux, each thread has its own.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)

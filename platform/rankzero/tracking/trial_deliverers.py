"""The deliverers of a run's children (a study's trials, a repeat's runs), in its own courier."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping

from rankzero.run_store import delivery_state, run_locks
from rankzero.run_store.attempt import finish_lines
from rankzero.run_store.folder import EVENTS, RunFolder
from rankzero.tracking.deliverer import Deliverer

_LOOK_SECONDS = 1.0


# One courier imports MLflow once for a study, and not again for each short trial.
class TrialDeliverers:
    """The deliverers of the runs that name `folder` their parent. Most runs have none."""

    def __init__(
        self,
        folder: RunFolder,
        make: Callable[[RunFolder], Deliverer] = Deliverer,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._folder, self._make, self._look_seconds = folder, make, look_seconds
        # With the file descriptor of each trial's lock.
        self._working: dict[str, tuple[Deliverer, int]] = {}
        self._done: dict[str, Mapping[str, int]] = {}
        """The bytes that MLflow has of each released trial's journals. They may get more."""
        self._look_at, self._hurried = 0.0, False

    def __iter__(self) -> Iterator[Deliverer]:
        return iter([deliverer for deliverer, _ in self._working.values()])

    def look(self, at_once: bool = False) -> None:
        """Release trials that are delivered, and take those that have begun, once a second."""
        for name, (deliverer, _) in tuple(self._working.items()):
            if deliverer.complete and deliverer.state.queue.ended:
                self._release(name)
        if time.monotonic() < self._look_at and not at_once:
            return
        self._look_at = time.monotonic() + self._look_seconds
        self._finish_lines()
        for child in self._folder.children:
            name = child.path.name
            # Any journal is more than -1 bytes.
            done = self._done.get(name, {EVENTS: -1})
            if name in self._working or not delivery_state.unread_bytes(child, done):
                continue
            lock = run_locks.acquire(child, 0)
            if lock is None:
                continue
            try:
                deliverer = self._make(child)
            except BaseException:
                # A journal that cannot be read now is tried again with the next look.
                os.close(lock)
                raise
            self._working[name] = deliverer, lock
            if self._hurried:
                deliverer.hasten()

    @property
    def complete(self) -> bool:
        """Whether MLflow has everything of every trial that has begun by now."""
        self.look(at_once=True)
        return all(deliverer.complete for deliverer in self)

    def hasten(self) -> None:
        """Deliver at once from now on, trials that are found later included."""
        self._hurried = True
        for deliverer in self:
            deliverer.hasten()

    def close(self) -> None:
        """Write every trial's state, and release its lock."""
        for name in tuple(self._working):
            self._release(name)

    def _finish_lines(self) -> None:
        """End the lines that the dead processes of ended trials left unfinished."""
        for name, (deliverer, _) in self._working.items():
            if deliverer.complete or not deliverer.state.queue.ended:
                continue
            child = RunFolder(self._folder.path.parent / name)
            # Its folder may have been moved.
            with contextlib.suppress(OSError):
                if not (run_locks.writer_lives(child) or run_locks.has_live_recorder(child)):
                    finish_lines(child, 0)

    def _release(self, name: str) -> None:
        deliverer, lock = self._working.pop(name)
        try:
            deliverer.commit()
            self._done[name] = deliverer.state.cursor.offsets
        finally:
            # Otherwise nobody could deliver the trial again, this process included.
            os.close(lock)

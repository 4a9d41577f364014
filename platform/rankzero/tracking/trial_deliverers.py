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
        make: Callable[[RunFolder, int], Deliverer] = Deliverer,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._folder, self._make, self._look_seconds = folder, make, look_seconds
        # By the trial's name and the node, with the file descriptor of the lock.
        self._working: dict[tuple[str, int], tuple[Deliverer, int]] = {}
        self._done: dict[tuple[str, int], Mapping[str, int]] = {}
        """The bytes that MLflow has of the journals of what was released. They may get more."""
        self._look_at, self._hurried = 0.0, False

    def __iter__(self) -> Iterator[Deliverer]:
        return iter([deliverer for deliverer, _ in self._working.values()])

    def look(self, at_once: bool = False) -> None:
        """Release trials that are delivered, and take those that have begun, once a second.

        Raises the first error of a trial that cannot be taken, once the others are.
        """
        for key, (deliverer, _) in tuple(self._working.items()):
            name, node = key
            # Node 0 delivers the end, and is released first.
            ended = deliverer.state.queue.ended if node == 0 else (name, 0) not in self._working
            # One that was deleted in MLflow has unread lines, and would be taken again at once.
            if deliverer.complete and ended and not deliverer.state.retries.gone:
                self._release(key)
        if time.monotonic() < self._look_at and not at_once:
            return
        self._look_at = time.monotonic() + self._look_seconds
        self._finish_lines()
        errors: list[Exception] = []
        for child in self._folder.children:
            for node in self._nodes(child, at_once):
                try:
                    self._take(child, node)
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]

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
        for key in tuple(self._working):
            self._release(key)

    def _nodes(self, child: RunFolder, all_nodes: bool) -> Iterator[int]:
        """Yield the nodes of a trial with journals that MLflow may not have whole."""
        name = child.path.name
        # A study has a thousand delivered trials, and to list each folder takes a while.
        listed = all_nodes or (name, 0) not in self._done
        nodes = sorted(delivery_state.nodes(child)) if listed and child.events.exists() else [0]
        for node in nodes:
            # Any journal is more than -1 bytes.
            first = EVENTS if node == 0 else child.system(node).name
            done = self._done.get((name, node), {first: -1})
            if (name, node) not in self._working and delivery_state.unread_bytes(child, done):
                yield node

    def _take(self, child: RunFolder, node: int) -> None:
        lock = run_locks.acquire(child, node)
        if lock is None:
            return
        try:
            deliverer = self._make(child, node)
        except BaseException:
            # A journal that cannot be read now is tried again with the next look.
            os.close(lock)
            raise
        key = child.path.name, node
        self._working[key] = deliverer, lock
        self._done.pop(key, None)
        if self._hurried:
            deliverer.hasten()

    def _finish_lines(self) -> None:
        """End the lines that the dead processes of ended trials left unfinished."""
        for (name, node), (deliverer, _) in self._working.items():
            if deliverer.complete or not (deliverer.state.queue.ended or node):
                continue
            child = RunFolder(self._folder.path.parent / name)
            # Its folder may have been moved.
            with contextlib.suppress(OSError):
                if not (run_locks.writer_lives(child) or run_locks.has_live_recorder(child, node)):
                    finish_lines(child, node)

    def _release(self, key: tuple[str, int]) -> None:
        deliverer, lock = self._working.pop(key)
        try:
            deliverer.commit()
            self._done[key] = deliverer.state.cursor.offsets
        finally:
            # Otherwise nobody could deliver the trial again, this process included.
            os.close(lock)

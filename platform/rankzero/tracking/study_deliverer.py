"""A study and its trials, delivered by one courier: MLflow is imported once, and not beside every short trial."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from rankzero.run_store import claims
from rankzero.run_store.folder import RunFolder
from rankzero.tracking.deliverer import Deliverer

LOOK_SECONDS = 1.0


class StudyDeliverer:
    """Delivers a run and those that name it their parent; used as a `Deliverer` is."""

    def __init__(
        self,
        folder: RunFolder,
        node: int = 0,
        make: Callable[[RunFolder, int], Deliverer] = Deliverer,
    ) -> None:
        self._folder, self._make = folder, make
        self._own = make(folder, node)
        self._children: dict[str, tuple[Deliverer, int]] = {}
        self._done: set[str] = set()
        self._look_at = 0.0

    @property
    def complete(self) -> bool:
        """Tell whether MLflow has everything that the journals hold now."""
        self._look()
        return all(one.complete for one in self._all())

    def work(self) -> bool:
        """Do one thing that is due in each; return whether anything was done."""
        if time.monotonic() >= self._look_at:
            self._look()
        did = [one.work() for one in self._all()]
        for name, (child, _) in tuple(self._children.items()):
            if child.complete and child.progress.ended:
                self._let_go(name)
        return any(did)

    def hasten(self) -> None:
        """Take from now on what there is at once."""
        for one in self._all():
            one.hasten()

    def commit(self) -> None:
        """Write down how far each is, and let go of the children."""
        for name in tuple(self._children):
            self._let_go(name)
        self._own.commit()

    def _all(self) -> list[Deliverer]:
        return [self._own, *(child for child, _ in self._children.values())]

    def _look(self) -> None:
        self._look_at = time.monotonic() + LOOK_SECONDS
        for child in self._folder.children:
            name = child.path.name
            if name in self._done or name in self._children or not child.events.exists():
                continue
            right = claims.acquire(child, 0)
            if right is not None:
                self._children[name] = self._make(child, 0), right

    def _let_go(self, name: str) -> None:
        child, right = self._children.pop(name)
        try:
            child.commit()
            self._done.add(name)
        finally:
            os.close(right)  # else nobody could take it again, this process neither

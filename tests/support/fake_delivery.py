"""Deliver a run's journal to a store that keeps nothing: python fake_delivery.py FOLDER.

Prints the memory of the process before it reads the journal and the most it had, in bytes, and how
many points the store got.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from rankzero.mlflow_store.items import MetricPoint
from rankzero.run_store.folder import RunFolder
from support.memory_store import MemoryStore, deliverer_to


class Counting(MemoryStore):
    """Counts points."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        self.count += len(points)


def main(folder: RunFolder) -> None:
    tracker, process = Counting(), psutil.Process()
    deliverer = deliverer_to(tracker, folder)
    deliverer.work()
    assert tracker.calls == ["open_run"]
    begin = most = process.memory_info().rss
    while deliverer.work():
        most = max(most, process.memory_info().rss)
    print(begin, most, tracker.count)


if __name__ == "__main__":
    main(RunFolder(Path(sys.argv[1])))

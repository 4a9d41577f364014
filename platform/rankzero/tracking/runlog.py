"""A run as its processes write it: rank 0 appends to the journal, one process a node starts the recorder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankzero.events import Event, Hook, RunStarted
from rankzero.tracking import recorder
from rankzero.tracking.emitter import Emitter
from rankzero.tracking.journal import Identity, Journal, RunFolder, read_all
from rankzero.tracking.ranks import Ranks


class RunLog:
    """Rank 0's way to write a run; on other ranks every call does nothing. A `Hook`."""

    def __init__(
        self, folder: RunFolder, journal: Journal | None, attempt: int, recording: Any, hooks: Sequence[Hook] = ()
    ) -> None:
        self.folder, self.attempt = folder, attempt
        self._journal, self._recording = journal, recording
        self._emit = Emitter([journal, *hooks] if journal is not None else ())

    @classmethod
    def open(cls, runs: Path, identity: Identity, ranks: Ranks, gpu_uuids: Sequence[str] | None) -> RunLog:
        """Open the run's folder, made where it is missing, and start this node's recorder (local rank 0)."""
        folder = RunFolder.open_or_create(runs, identity) if ranks.local_rank == 0 else RunFolder(runs / identity.name)
        attempt = 1 + sum(isinstance(event, RunStarted) for event in read_all(folder.events)) if ranks.first else 0
        journal = Journal(folder.events) if ranks.first else None
        recording = (
            recorder.start(folder, gpu_uuids, ranks.node_rank, ranks.node_count) if ranks.local_rank == 0 else None
        )
        return cls(folder, journal, attempt, recording)

    def __call__(self, event: Event) -> None:
        self._emit(event)

    def flush(self) -> None:
        """Hand what was logged to the operating system, where readers find it."""
        if self._journal is not None:
            self._journal.flush()

    def notice(self, text: str) -> None:
        """Say something about the run that people should see."""
        if self._journal is not None:
            print(f"note: {text}", flush=True)

    def close(self) -> None:
        """Say what failed on the way, close the journal, and let the recorder finish by itself."""
        for problem in self._emit.problems:
            self.notice(problem)
        try:
            if self._journal is not None:
                self._journal.close()
        except OSError as error:
            self.notice(f"the end of the journal could not be written: {error}")
        if self._recording is not None:
            self._recording.close()

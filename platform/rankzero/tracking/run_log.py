"""A run as its processes write it: rank 0 appends to the journal, one process a node starts the recorder."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankzero.events import Event, Noticed, RunEnded, RunStarted
from rankzero.ranks import Ranks
from rankzero.redaction.text import text_without_secrets
from rankzero.run_store import picture_files
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.journal import Journal, read_all
from rankzero.tracking import recorder

MOST_NOTICES = 200
FULL = "the disk has been full for so long that metrics are lost from now on, until there is room"


class RunLog:
    """Rank 0's way to write a run; on other ranks every call does nothing."""

    def __init__(
        self,
        folder: RunFolder,
        journal: Journal | None,
        attempt: int,
        recording: Any,
    ) -> None:
        self.folder, self.attempt = folder, attempt
        self._journal, self._recording = journal, recording
        self._told: list[str] = []

    @classmethod
    def open(
        cls,
        runs: Path,
        identity: Identity,
        ranks: Ranks,
        gpu_uuids: Sequence[str] | None,
        *,
        offline: bool = False,
    ) -> RunLog:
        """Open the run's folder, made where it is missing, and start this node's recorder (local rank 0).

        `offline`: nothing is delivered to MLflow until `rankzero sync`.
        """
        folder = (
            RunFolder.open_or_create(runs, identity)
            if ranks.local_rank == 0
            else RunFolder(runs / identity.name)
        )
        attempt = (
            1 + sum(isinstance(event, RunStarted) for event in read_all(folder.events))
            if ranks.first
            else 0
        )
        if ranks.first:
            picture_files.clear(folder)
        journal = Journal(folder.events) if ranks.first else None
        recording = (
            recorder.start(folder, gpu_uuids, ranks.node_rank, ranks.node_count, offline=offline)
            if ranks.local_rank == 0
            else None
        )
        return cls(folder, journal, attempt, recording)

    def __call__(self, event: Event) -> None:
        """Append the event to the journal, a failure's text without secrets. Raises nothing."""
        if self._journal is None:
            return
        if isinstance(event, RunEnded):
            error = None if event.error is None else text_without_secrets(event.error)
            event = dataclasses.replace(
                event, reason=text_without_secrets(event.reason), error=error
            )
        self._journal(event)
        self._report_problems(self._journal)

    def flush(self) -> None:
        """Hand what was logged to the operating system, where readers find it."""
        if self._journal is not None:
            self._journal.flush()

    def notice(self, text: str) -> None:
        """Say something about the run that people should see: on the console, in the journal, on its page."""
        if self._journal is None:
            return
        text = text_without_secrets(text)
        if text not in self._told and len(self._told) < MOST_NOTICES:
            self._told.append(text)
            self._journal(Noticed(time.time(), text))
        _print(text)  # last: whatever becomes of the output, the journal has it

    def _report_problems(self, journal: Journal) -> None:
        while journal.problems:
            self.notice(journal.problems.pop(0))
        if journal.lost and FULL not in self._told:
            self.notice(FULL)

    def close(self) -> None:
        """Close the journal, and let the recorder finish by itself."""
        if self._journal is not None:
            self._report_problems(self._journal)
            try:
                self._journal.close()
            except OSError as error:
                _print(f"the end of the journal could not be written: {error}")
        if self._recording is not None:
            self._recording.close()


def _print(text: str) -> None:
    """Print a notice; what the output's encoding lacks, as its escape. A notice that cannot be printed ends nothing."""
    # A rank's output is a file in the run's folder, whose disk may be the full one; or the program has closed it.
    with contextlib.suppress(OSError, ValueError, LookupError):
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(f"note: {text}".encode(encoding, "backslashreplace").decode(encoding), flush=True)

"""Writes a run: rank 0 appends events to the journal, local rank 0 starts the node's recorder."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankzero.errors import UserError
from rankzero.events import Event, Noticed, RunEnded, RunStarted
from rankzero.ranks import Ranks
from rankzero.redaction.text import text_without_secrets
from rankzero.run_store import picture_files
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.journal import Journal, milestones
from rankzero.run_store.provenance import write_tags
from rankzero.tracking import recorder
from rankzero.tracking.recorder import RecorderHandle

# Beyond these, a notice is only printed: a problem of every step must not fill the run's page.
_MOST_NOTICES = 200
# After a stop or an error, a scheduler or the user waits for the end.
_HURRIED_SECONDS = 5.0
_FULL = "the disk has been full for so long that metrics are lost from now on, until there is room"


class RunLog:
    """Writes a run's events and notices. On other ranks than 0 every call does nothing."""

    def __init__(
        self,
        folder: RunFolder,
        journal: Journal | None,
        attempt: int,
        recorder: RecorderHandle | None,
        patience_seconds: float = 30.0,
        tags_before: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.attempt = folder, attempt
        self.tags_before = tags_before or {}
        self._patience_seconds = patience_seconds
        self._journal, self._recorder = journal, recorder
        self._noticed: list[str] = []

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
        """Open the run's folder, created if it is missing. Local rank 0 starts the node's recorder.

        With `offline` nothing is delivered to MLflow until `rankzero sync`.
        """
        journal, attempt, handle, before = None, 0, None, dict[str, str]()
        folder = RunFolder(runs / identity.name)
        if ranks.local_rank == 0:
            folder = RunFolder.open_or_create(runs, identity)
            # Rank 0 chose the name, and cannot know the runs of another machine.
            if ranks.node_rank > 0 and folder.identity.uuid != identity.uuid:
                raise UserError(
                    f"this machine has another run that is called {identity.name}: choose another "
                    f"name with --name, or move {folder.path} away"
                )
        # No event names the pictures of a killed attempt, so nothing else would ever delete them.
        if ranks.first:
            attempt = 1
            for event in milestones(folder.events):
                if isinstance(event, RunStarted):
                    attempt, before = attempt + 1, {**before, **event.environment}
            picture_files.clear(folder)
            journal = Journal(folder.events)
        if ranks.local_rank == 0:
            handle = recorder.start(
                folder, gpu_uuids, ranks.node_rank, ranks.node_count, offline=offline
            )
        return cls(folder, journal, attempt, handle, tags_before=before)

    def __call__(self, event: Event) -> None:
        """Append the event to the journal, with secrets redacted from an error. Raises nothing."""
        if self._journal is None:
            return
        if isinstance(event, RunStarted):
            # The journal has the tags, too: the artifact is for people who only see MLflow.
            with contextlib.suppress(OSError, UserError):
                write_tags(self.folder.artifacts, event.environment)
        if isinstance(event, RunEnded):
            error = None if event.error is None else text_without_secrets(event.error)
            event = dataclasses.replace(
                event, reason=text_without_secrets(event.reason), error=error
            )
        self._journal(event)
        if isinstance(event, Noticed):
            _print(text_without_secrets(event.text))
        self._report_problems(self._journal)

    def flush(self) -> None:
        """Hand what was logged to the operating system, where readers find it."""
        if self._journal is not None:
            self._journal.flush()

    def sync(self) -> None:
        """Return once the disk has what was handed to the operating system. For any thread."""
        if self._journal is not None:
            self._journal.sync()

    def notice(self, text: str) -> None:
        """Report something to people: on the console, in the journal, on the run's page."""
        if self._journal is None:
            return
        text = text_without_secrets(text)
        if text not in self._noticed and len(self._noticed) < _MOST_NOTICES:
            self._noticed.append(text)
            self._journal(Noticed(time.time(), text))
        # Printed last: whatever happens to the output, the journal has it.
        _print(text)

    def patience_seconds(self, *, finished: bool) -> float:
        """Return how long the run's end is retried on a disk that refuses it.

        `finished`: whether the training ended without an error and without a request to stop.
        """
        most = self._patience_seconds
        return most if finished else min(most, _HURRIED_SECONDS)

    def disown(self) -> None:
        """Leave the journal to the process that this one was forked from."""
        if self._journal is not None:
            self._journal.disown()

    def close(self, *, finished: bool = False) -> None:
        """Close the journal, and let the recorder finish by itself.

        Writing the last events is retried for `patience_seconds`.
        """
        if self._journal is not None:
            self._report_problems(self._journal)
            try:
                self._journal.close(self.patience_seconds(finished=finished))
            except OSError as error:
                _print(f"the end of the journal could not be written: {error}")
            for problem in self._journal.problems:
                _print(problem)
        if self._recorder is not None:
            self._recorder.close()

    def _report_problems(self, journal: Journal) -> None:
        while journal.problems:
            self.notice(journal.problems.pop(0))
        if journal.lost and _FULL not in self._noticed:
            self.notice(_FULL)


def _print(text: str) -> None:
    """Print a notice, with escapes for characters that the output's encoding lacks."""
    # A rank's output is a file in the run's folder, whose disk may be full. A program may also have
    # closed or replaced its output, or a signal handler prints meanwhile. None may end a training.
    with contextlib.suppress(Exception):
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(f"note: {text}".encode(encoding, "backslashreplace").decode(encoding), flush=True)

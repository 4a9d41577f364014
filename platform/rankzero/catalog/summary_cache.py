"""Summaries of ended runs, kept from one list to the next in two files, a line for each run.

    runs/.summary-heads.jsonl      the folder's name, the times of its files, and what a list shows
    runs/.summary-details.jsonl    name and times again, and params, metrics and tags

Few lists need the second file, which is five times as large. Both may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankzero.catalog import summary
from rankzero.catalog.summary import Details, Summary
from rankzero.run_store import symlinks
from rankzero.run_store.folder import EVENTS, RunFolder
from rankzero.run_store.names import InvalidRunFolder

HEADS, DETAILS = ".summary-heads.jsonl", ".summary-details.jsonl"
_OF_EARLIER_VERSIONS = ".summaries.jsonl"
# File systems count time in ticks. Two changes further apart than this have different times.
_SETTLED_NANOSECONDS = 2_000_000_000


class SummaryCache:
    """The summaries that earlier lists have kept."""

    def __init__(self, runs: Path) -> None:
        self._runs, self._new = runs, list[tuple[str, str]]()
        lines = _lines(runs / HEADS)
        self._count = len(lines)
        self._heads = {name: (signature, row) for name, signature, *row in _rows(lines)}
        self._details: dict[str, tuple[str, str]] | None = None
        self._found = dict[str, Details]()

    def find(self, name: str, path: str, signature: str) -> Summary | None:
        """Return the summary of a folder, unless the folder has another `signature` now."""
        kept, row = self._heads.get(name, ("", ()))
        if kept != signature or not kept:
            return None
        details = functools.partial(self._details_of, name, path, signature)
        return summary.from_row(path, details, row)

    def keep(self, run: Summary, name: str, signature: str) -> None:
        """Have `save` write a summary, if the run has ended and has not changed just now."""
        now, changed = time.time_ns(), signature.split()[:2]
        if run.ended and changed and all(now - int(one) > _SETTLED_NANOSECONDS for one in changed):
            head = json.dumps((name, signature, *run.to_row()), separators=(",", ":"))
            details = json.dumps(run.details(), separators=(",", ":"))
            self._new.append((head, f"{json.dumps(name)}\t{signature}\t{details}"))

    def save(self, runs: int, spare_lines: int) -> None:
        """Add what is new to the files. Delete them if most of their lines are outdated."""
        # A read-only or full disk costs the next list some time.
        with contextlib.suppress(OSError):
            (self._runs / _OF_EARLIER_VERSIONS).unlink(missing_ok=True)
            if self._count > runs + spare_lines:
                self._load_details()  # This list may still need them.
                self._delete()
            elif self._new:
                # The details first, because `_details_of` takes a head without them for damage.
                for name, part in ((DETAILS, 1), (HEADS, 0)):
                    text = "".join(f"{one[part]}\n" for one in self._new)
                    with open(self._runs / name, "ab", opener=symlinks.no_follow) as file:
                        file.write(text.encode())

    def _details_of(self, name: str, path: str, signature: str) -> Details:
        """Return a folder's details, which are read when they are needed, and once.

        If they are damaged, reads the run, and deletes the files: the next list writes them again.
        """
        if name not in self._found:
            kept, text = self._load_details().get(json.dumps(name), ("", ""))
            found = summary.details_from_line(text) if kept == signature else None
            if found is None:
                with contextlib.suppress(OSError):
                    self._delete()
            self._found[name] = found or _read(path)
        return self._found[name]

    def _load_details(self) -> dict[str, tuple[str, str]]:
        if self._details is None:
            parts = (line.split("\t") for line in _lines(self._runs / DETAILS))
            # A line may be torn.
            self._details = {one[0]: (one[1], one[2]) for one in parts if len(one) == 3}
        return self._details

    def _delete(self) -> None:
        for name in (HEADS, DETAILS):
            (self._runs / name).unlink(missing_ok=True)


def _read(path: str) -> Details:
    try:
        return summary.read_summary(RunFolder(Path(path))).details()
    except InvalidRunFolder:  # It was deleted meanwhile.
        return Details({}, {}, {})


def signature(folder: str) -> str:
    """Return a text that changes whenever the run's summary would; nothing without a journal.

    Every file of the folder but the journal is replaced, which changes the folder's time.
    Other folders than its checkpoints do not count.
    """
    # Thousands of them: `Path` would take twice the time.
    try:
        events = os.stat(f"{folder}/{EVENTS}")  # noqa: PTH116
        changed = os.stat(folder).st_mtime_ns  # noqa: PTH116
    except OSError:
        return ""
    # People delete checkpoints to free a disk.
    with contextlib.suppress(OSError):
        changed = max(changed, os.stat(f"{folder}/checkpoints").st_mtime_ns)  # noqa: PTH116
    # The version last: earlier ones had the first settings of a run, or another best value.
    return f"{changed} {events.st_mtime_ns} {events.st_size} 5"


def _lines(path: Path) -> list[str]:
    try:
        # JSON escapes other characters. One that a disk damaged spoils its own line only.
        return path.read_text(encoding="ascii", errors="replace").split("\n")[:-1]
    except OSError:
        return []


def _rows(lines: list[str]) -> Iterator[list[Any]]:
    """Yield the lines that are rows with a name and times first. A line may be torn."""
    try:
        # In one piece it takes two thirds of the time.
        found = json.loads(f"[{','.join(lines)}]")
    except (ValueError, RecursionError):
        found = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                found.append(json.loads(line))
    for row in found:
        if isinstance(row, list) and len(row) > 1 and isinstance(row[0], str):
            yield row

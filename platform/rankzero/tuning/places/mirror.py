"""A trial's folder on the search's machine: what changes on the host's machines comes over.

Each file is written by one machine of a run, rank 0's or another, but for the logs. Those of the
second machine and the next have folders of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

from rankzero.errors import RunFailed
from rankzero.run_store import symlinks
from rankzero.tuning.places.messages import Change

# Claims and locks are of processes of one machine. The search has its own.
_OF_ONE_MACHINE = (".*", "recorder*.json", "delivery*.json", "*.live", "*.lock")
_GROWING = (".jsonl", ".log")
_PART_BYTES = 1 << 20


def contents(folder: Path, prefix: str = "") -> dict[str, bytes]:
    """Return the files below a folder by their names relative to it, which begin with `prefix`."""
    return {name: path.read_bytes() for name, path in _files(folder) if name.startswith(prefix)}


def write_all(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files below a folder."""
    for name, content in files.items():
        apply(Change(name, 0, content), folder)


def apply(change: Change, folder: Path) -> None:
    """Write a part of a file below a folder. Raises RunFailed if its name leads elsewhere."""
    path = folder / change.name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise RunFailed(f"the host of a trial sent the file {change.name!r}, outside of {folder}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", opener=symlinks.no_follow) as file:
        file.truncate(change.begin)
        file.write(change.content)


class Mirror:
    """Finds what has changed below a folder since the last look."""

    def __init__(self, folder: Path, number: int = 0, logs: str = "logs") -> None:
        """Take the folder's present content as known.

        `number`: this machine's. `logs`: the folder in it that has the ranks' output.
        """
        self._folder, self._number, self._logs = folder, number, logs
        self._known = {name: _state(path) for name, path in _files(folder)}

    def changes(self) -> Iterator[Change]:
        """Yield the changes, in parts. Files of lines are only ever appended to."""
        for name, path in _files(self._folder):
            try:
                state = _state(path)
                before = self._known.get(name)
                if state == before:
                    continue
                grows = path.name.endswith(_GROWING) and before and before[0] <= state[0]
                begin = before[0] if before and grows else 0
                with path.open("rb") as file:
                    file.seek(begin)
                    # The next look brings content that is added meanwhile.
                    left = state[0] - begin
                    while left > 0 and (part := file.read(min(left, _PART_BYTES))):
                        yield Change(self._name_elsewhere(name), begin, part)
                        begin, left = begin + len(part), left - len(part)
            except FileNotFoundError:
                continue
            self._known[name] = state

    def _name_elsewhere(self, name: str) -> str:
        """Return the name of a file in the search's folder, where all machines' files meet."""
        if self._number == 0 or not name.startswith(f"{self._logs}/"):
            return name
        return f"{self._logs}/node_{self._number}{name.removeprefix(self._logs)}"


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_local = any(fnmatch(path.name, pattern) for pattern in _OF_ONE_MACHINE)
        if not is_local and path.is_file() and not path.is_symlink():
            yield str(name), path


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns

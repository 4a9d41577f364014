"""A model of the disk: what a crash after a call may leave below the recorded folder.

Every prefix of the recorded calls is a crash point, and each has several variants.

A kill of all processes keeps every call. A power cut keeps all that was synced, and of the rest:

- names (files and folders that were created, renamed, deleted), one of three:
  - ``all``: every call, also a rename that is older than the data of its file;
  - ``ordered``: the calls before the last sync of anything. ext4, XFS and btrfs write such calls in
    their order, and a sync of one file writes all earlier ones;
  - ``strict``: only what the sync of its folder has written, as POSIX promises;
- data that were written after the last sync of their file, one of five: none, all, all but one
  file's, a prefix that ends inside a write, or the right length with zeros behind that prefix.

Assumptions: a sync that returned is durable; a rename is atomic; a write of synced bytes damages no
other byte; the MLflow server is another machine, and keeps what it has accepted. The models are
ALICE (Pillai et al., OSDI 2014) and SQLite's crash tests.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from crash_points.record import Call, Kind

Tree = dict[str, "File | None"]
"""Path -> its file, or None for a folder."""
Content = Mapping[str, bytes | None]
PAGE = 4096
METADATA = ("all", "ordered", "strict")


@dataclasses.dataclass(eq=False)
class File:
    """A file by its identity, which renames do not change."""

    data: bytes = b""
    synced: bytes = b""
    pending: list[bytes] = dataclasses.field(default_factory=list)
    """Its content after each call since the last sync."""

    def change(self, data: bytes) -> None:
        self.data = data
        self.pending.append(data)

    def sync(self) -> None:
        self.synced, self.pending = self.data, []


@dataclasses.dataclass(eq=False)
class Folder:
    """A folder, with its entries now and as of its last sync."""

    entries: dict[str, File | Folder] = dataclasses.field(default_factory=dict)
    synced: dict[str, File | Folder] = dataclasses.field(default_factory=dict)

    def sync(self) -> None:
        self.synced = dict(self.entries)

    def flat(self, synced: bool = False, prefix: str = "") -> Tree:
        found: Tree = {}
        for name, node in (self.synced if synced else self.entries).items():
            path = prefix + name
            if isinstance(node, Folder):
                found[path] = None
                found |= node.flat(synced, path + "/")
            else:
                found[path] = node
        return found


class State(NamedTuple):
    """The disk after one variant of a crash."""

    variant: str
    content: Content


class Disk:
    """The disk after the calls applied so far."""

    def __init__(self) -> None:
        self._root = Folder()
        self._ordered: Tree = {}

    def apply(self, call: Call) -> None:
        """Do what the call did."""
        folder, name = self._place(call.path)
        entries = folder.entries
        match call.kind:
            case Kind.CREATE | Kind.WRITE | Kind.TRUNCATE:
                file = entries.setdefault(name, File())
                assert isinstance(file, File)
                if (data := _written(file.data, call)) is not file.data:
                    file.change(data)
            case Kind.SYNC:
                node = entries[name] if name else self._root
                node.sync()
                self._ordered = self._root.flat()
            case Kind.MKDIR:
                entries[name] = Folder()
            case Kind.UNLINK:
                del entries[name]
            case Kind.RENAME | Kind.LINK:
                target, other = self._place(call.other)
                target.entries[other] = entries[name]
                if call.kind is Kind.RENAME:
                    del entries[name]

    def now(self) -> Content:
        """Return what a reader sees now."""
        return _content(self._root.flat(), {})

    def states(self, cuts: int, chance: random.Random) -> Iterator[State]:
        """Yield what a crash now may leave, with `cuts` places to tear each file's data at."""
        now = self._root.flat()
        yield State("kill", _content(now, {}))
        for metadata, tree in zip(
            METADATA, (now, self._ordered, self._root.flat(synced=True)), strict=True
        ):
            unsynced = {path: file for path, file in tree.items() if file and file.pending}
            lost = {id(file): file.synced for file in unsynced.values()}
            yield State(f"names {metadata}, data lost", _content(tree, lost))
            if metadata != "all":
                yield State(f"names {metadata}, data kept", _content(tree, {}))
            for path, file in unsynced.items():
                if len(unsynced) > 1:
                    yield State(
                        f"names {metadata}, data of {path} lost",
                        _content(tree, {id(file): file.synced}),
                    )
                for at in _cuts(file, cuts, chance):
                    torn, zeros = file.data[:at], file.data[:at].ljust(len(file.data), b"\0")
                    for name, data in (("torn", torn), ("zeros", zeros)):
                        yield State(
                            f"names {metadata}, {path} {name} at {at}",
                            _content(tree, {id(file): data}),
                        )

    def _place(self, path: str) -> tuple[Folder, str]:
        *parents, name = path.split("/")
        folder = self._root
        for part in parents:
            node = folder.entries[part]
            assert isinstance(node, Folder)
            folder = node
        return folder, name


def _written(data: bytes, call: Call) -> bytes:
    """Return a file's content after a call."""
    at = call.offset
    match call.kind:
        case Kind.WRITE:
            return data[:at].ljust(at, b"\0") + call.data + data[at + len(call.data) :]
        case Kind.TRUNCATE:
            return data[:at].ljust(at, b"\0")
        case _:
            return b"" if at and data else data


def _content(tree: Tree, instead: Mapping[int, bytes]) -> Content:
    return {
        path: None if file is None else instead.get(id(file), file.data)
        for path, file in tree.items()
    }


def _cuts(file: File, most: int, chance: random.Random) -> Sequence[int]:
    """Return where to tear what is not synced: ends of writes, and places inside of them."""
    first, last = min(len(file.synced), len(file.data)), len(file.data)
    if last <= first:
        return []
    ends = {len(data) for data in file.pending[:-1]} & set(range(first + 1, last))
    inside = {first + 1, last - 1, *range((first // PAGE + 1) * PAGE, last, PAGE)}
    places = sorted((ends | inside | {chance.randrange(first, last)}) & set(range(first, last)))
    return places if len(places) <= most else sorted(chance.sample(places, most))


def read_real(root: Path) -> Content:
    """Return what the folder holds really, to compare the model with it."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


def write_real(content: Content, root: Path) -> None:
    """Make the folder hold this."""
    root.mkdir()
    # Parents come before what is in them.
    for path, data in content.items():
        if data is None:
            (root / path).mkdir(exist_ok=True, parents=True)
        else:
            (root / path).write_bytes(data)

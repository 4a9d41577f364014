"""How much of a run MLflow has: ``delivery.json``, which the courier replaces after each batch.

The records are frozen. Each change gives a new `DeliveryState`, so the courier can keep the
state on the disk and the state that holds once its batch is sent apart without copying either.
In the file the records' fields stand side by side, as versions before these records wrote them.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import enum
import json
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from rankzero.events import (
    CheckpointDeleted,
    CheckpointSaved,
    Event,
    ModelLogged,
    PicturesTaken,
    RunEnded,
    decode,
    encode,
)
from rankzero.redaction.text import line_without_secrets
from rankzero.run_store.folder import RunFolder, write_atomically
from rankzero.run_store.journal import checksum_of_first

_REASONS_KEPT, _MARKS_KEPT = 20, 1000


class Task(enum.Enum):
    """An upload that no event describes. The values are written to ``delivery.json``."""

    ARTIFACTS = "artifacts"
    PAGE = "page"
    PAGE_UPDATE = "afterword"


UploadEvent = CheckpointSaved | CheckpointDeleted | PicturesTaken | ModelLogged
Upload = Task | UploadEvent
_FORMER_TASKS = ("figures",)
"""Earlier versions queued these: figures of the whole run, which MLflow draws itself."""


@dataclasses.dataclass(frozen=True)
class Cursor:
    """How far the journals are delivered."""

    offsets: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Journal file -> bytes of it that are delivered."""
    checksums: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Journal file -> CRC-32 of these bytes. Earlier versions wrote none."""
    delivered: int = 0
    """Points sent."""


@dataclasses.dataclass(frozen=True)
class Curves:
    """MLflow's values of each metric, as far as the next points depend on them."""

    attempt: int = 0
    marks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Metric -> highest step so far."""
    earlier: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The same when the newest attempt began."""
    floor: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The same of what this journal lacks. Points at or below are not sent."""
    replayed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The same of what MLflow has from this journal: it is read again. Each step comes once."""
    sample_offset: int = 0
    """Added to a sample's number: the samples of earlier attempts on other machines."""
    attempt_offset: int = 0
    """Added to an attempt's number: the attempts on other machines."""
    other_began: float = 0.0
    """When another machine began an attempt. Those of this disk before it are out of date."""
    other_step: int = -1
    """Checkpoints up to this step are the other machine's, until a later attempt begins here."""
    evaluated: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Step -> time of its evaluation in ms. A checkpoint's metrics link to the same points."""
    infinite: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Metric -> first step at which it was infinite."""
    goal: str | None = None
    """The goal metric."""
    best: float | None = None
    """The goal metric's best value."""
    best_step: int = 0
    """The step of its evaluation, if this disk has that."""
    skipped: int = 0
    """Points not sent because an earlier attempt sent their steps."""
    owners: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name in MLflow -> the metric's own name. They differ if that is illegal or taken."""


@dataclasses.dataclass(frozen=True)
class Queue:
    """The work after the points: the end of the attempt, then uploads."""

    waiting: tuple[Upload, ...] = ()
    ending: RunEnded | None = None
    """The attempt's end, until MLflow has it."""
    ended: bool = False
    """Whether MLflow has the end of the latest attempt."""
    uploaded: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Artifact -> size and time of the uploaded file, or the step of an uploaded picture."""
    last_artifact: str = ""
    """The artifact that was tried last."""

    @property
    def awaited(self) -> tuple[Upload, ...]:
        """The uploads without which the delivery is not done."""
        return tuple(upload for upload in self.waiting if upload is not Task.PAGE_UPDATE)

    @property
    def page_update_waits(self) -> bool:
        """Whether the page update, which no command waits for, is still to be done."""
        return Task.PAGE_UPDATE in self.waiting


@dataclasses.dataclass(frozen=True)
class Problems:
    """Values and files that MLflow lacks, or has not as they were."""

    rejected: int = 0
    """Things that MLflow will never accept. They are set aside, so the rest can pass."""
    reasons: tuple[str, ...] = ()
    """Why, for the latest of them."""
    altered: int = 0
    """Things that MLflow has in another form: renamed, cut, infinite."""
    remarks: tuple[str, ...] = ()
    """The fate of the first of them, each once."""
    later_remarks: tuple[int, ...] = ()
    """The CRC-32 of the latest others, which count once as well."""

    def reject(self, what: str, reason: str) -> Problems:
        """Count something that is set aside, and remember the reason."""
        reasons = (*self.reasons, line_without_secrets(f"{what}: {reason}"))[-_REASONS_KEPT:]
        return dataclasses.replace(self, rejected=self.rejected + 1, reasons=reasons)

    def remark(self, what: str, became: str) -> Problems:
        """Count something that MLflow gets in another form, and remember which."""
        line = f"{_shorten(what)}: {_shorten(became)}"
        mark = zlib.crc32(line.encode("utf-8", "surrogatepass"))
        if line in self.remarks or mark in self.later_remarks:
            return self
        counted = dataclasses.replace(self, altered=self.altered + 1)
        if len(self.remarks) < _REASONS_KEPT:
            return dataclasses.replace(counted, remarks=(*self.remarks, line))
        later = (*self.later_remarks, mark)[-_MARKS_KEPT:]
        return dataclasses.replace(counted, later_remarks=later)


@dataclasses.dataclass(frozen=True)
class Retries:
    """How well MLflow answered."""

    failures: int = 0
    """Requests that failed and were sent again."""
    outages: int = 0
    """Periods in which every request failed."""
    away_seconds: float = 0.0
    """How long they lasted together."""
    error: str | None = None
    """The error of the latest request, None after a success."""
    gone: bool = False
    """Whether the latest request found the run deleted, or continued by another machine."""


@dataclasses.dataclass(frozen=True)
class Page:
    """Checksums of the run's page, to see later whether it is still ours and complete."""

    page: str = ""
    """The checksum of the whole description that a version without a marker sent, else empty."""
    told: str = ""
    """The problems that it lists, as text."""


@dataclasses.dataclass(frozen=True)
class DeliveryState:
    """All that a courier must know to continue after a crash."""

    run_id: str | None = None
    experiment_id: str | None = None
    cursor: Cursor = Cursor()
    curves: Curves = Curves()
    queue: Queue = Queue()
    problems: Problems = Problems()
    retries: Retries = Retries()
    page: Page = Page()
    user_tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Those that the attempts began with, each as the newest one that has it."""
    claim: str = ""
    """The token of the run's latest claim when this was written."""
    updated: float = 0.0
    """When this was written. Only shown: clocks jump."""


_PARTS: dict[str, type[Any]] = {
    field.name: type(field.default)
    for field in dataclasses.fields(DeliveryState)
    if dataclasses.is_dataclass(field.default)
}
# Resolving the annotations takes longer than to read a file, and commands poll it.
_HINTS = {
    kind: {
        name: hint
        for name, hint in get_type_hints(kind).items()
        if name not in ("waiting", "ending") and not dataclasses.is_dataclass(hint)
    }
    for kind in (DeliveryState, *_PARTS.values())
}


def path_of(folder: RunFolder, node: int) -> Path:
    """Return where the state of one node's courier is kept."""
    return folder.path / ("delivery.json" if node == 0 else f"delivery-node_{node}.json")


def save(path: Path, state: DeliveryState) -> None:
    """Replace the file."""
    fields: dict[str, Any] = {}
    for name, value in vars(state).items():
        fields |= vars(value) if dataclasses.is_dataclass(value) else {name: value}
    fields["waiting"] = [
        upload.value if isinstance(upload, Task) else encode(upload)
        for upload in state.queue.waiting
    ]
    fields["ending"] = None if state.queue.ending is None else encode(state.queue.ending)
    fields["updated"] = time.time()
    write_atomically(path, json.dumps(fields, indent=1))


def load(path: Path) -> DeliveryState:
    """Read the state. A missing or damaged file gives a new one: a replay changes nothing."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        words = _typed(fields.get("waiting", []), tuple[str, ...])
        ending = _typed(fields.get("ending"), str | None)
        parts: dict[str, Any] = {
            name: kind(**_fields_of(kind, fields)) for name, kind in _PARTS.items()
        }
        state = DeliveryState(**parts, **_fields_of(DeliveryState, fields))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return DeliveryState()
    problems, waiting = state.problems, []
    for word in words:
        upload = _read(word)
        if isinstance(upload, Upload):
            waiting.append(upload)
        elif word not in _FORMER_TASKS:
            problems = problems.reject(f"upload {word[:100]}", "it is not an upload")
    end = None if ending is None else _read(ending)
    if ending is not None and not isinstance(end, RunEnded):
        problems = problems.reject(f"end {ending[:100]}", "it is not the end of a run")
    queue = dataclasses.replace(
        state.queue, waiting=tuple(waiting), ending=end if isinstance(end, RunEnded) else None
    )
    return dataclasses.replace(state, queue=queue, problems=problems)


def check_journals(state: DeliveryState, folder: RunFolder, names: Sequence[str]) -> DeliveryState:
    """Return the state, with offset 0 for each journal that is not the one that was delivered.

    Reads what was delivered of each journal.
    """
    offsets, checksums = dict(state.cursor.offsets), dict(state.cursor.checksums)
    curves, problems = state.curves, state.problems
    for name in names:
        offset = offsets.setdefault(name, 0)
        found = checksum_of_first(folder.path / name, offset)
        if found is None or checksums.get(name, found) != found:
            offsets[name] = found = 0
            # MLflow keeps the steps that it has, so a step trained again is not there twice.
            curves = dataclasses.replace(curves, floor=dict(curves.marks))
            problems = problems.remark(
                f"{name} up to byte {offset:,}",
                "is not what was delivered, as after a power loss; it is read again, "
                "and steps that MLflow has stay",
            )
        checksums[name] = found
    cursor = dataclasses.replace(state.cursor, offsets=offsets, checksums=checksums)
    return dataclasses.replace(state, cursor=cursor, curves=curves, problems=problems)


def unread_bytes(folder: RunFolder, offsets: Mapping[str, int]) -> int:
    """Return how many bytes of the journals named in `offsets` are not yet delivered."""
    total = 0
    for name, offset in offsets.items():
        with contextlib.suppress(OSError):
            size = (folder.path / name).stat().st_size
            # A shorter file is not the one that was delivered: a power loss took its end.
            total += size - offset if size >= offset else size
    return total


def nodes(folder: RunFolder) -> set[int]:
    """Return the numbers of the nodes whose journals are here, and 0."""
    numbers = (path.stem.rpartition("_")[2] for path in folder.path.glob("system-node_*.jsonl"))
    return {0, *(int(number) for number in numbers if number.isdigit())}


def late_nodes(folder: RunFolder) -> list[int]:
    """Return the other nodes than 0 that have samples here which are not delivered."""
    late = []
    for node in sorted(nodes(folder) - {0}):
        offsets = load(path_of(folder, node)).cursor.offsets
        if unread_bytes(folder, {folder.system(node).name: 0, **offsets}):
            late.append(node)
    return late


def _fields_of(kind: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the record's fields that stand in the file as JSON has them."""
    hints = _HINTS[kind]
    return {name: _typed(fields[name], hints[name]) for name in hints if name in fields}


def _typed(value: Any, hint: Any) -> Any:
    """Return a JSON value as the type hint has it. Raises ValueError, TypeError for any other."""
    types = get_args(hint) or (hint,)
    values: Iterable[Any] = [value]
    if get_origin(hint) is collections.abc.Mapping:
        types, values = types[1:], value.values()
    elif get_origin(hint) is tuple:
        types = types[:1]
        value = values = tuple(value)
    if float in types:
        types = (*types, int)
    if not all(isinstance(one, types) for one in values):
        raise ValueError(f"not {hint}: {value!r}")
    return value


def _read(word: str) -> Task | Event | None:
    """Return the task or the event that a text of the file stands for, or None."""
    with contextlib.suppress(ValueError):
        return Task(word)
    with contextlib.suppress(ValueError):
        return decode(word)
    return None


def _shorten(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:80]}…{text[-40:]}"

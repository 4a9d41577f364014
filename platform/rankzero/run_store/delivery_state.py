"""How far a run's delivery to MLflow has come: ``delivery.json``, replaced after each delivered batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rankzero.events import Event, RunEnded, decode
from rankzero.redaction.text import line_without_secrets
from rankzero.run_store.folder import RunFolder, write_atomically

REASONS_KEPT = 20
ARTIFACTS = "artifacts"
"""The upload of a run's artifacts, among what waits."""
FIGURES = "figures"
"""The drawing and upload of pictures of the whole run, likewise."""
AFTERWORD = "afterword"
"""The page once more, should it have more to tell, likewise."""
LAST = (FIGURES, AFTERWORD)
"""What nobody waits for."""
WORDS = (ARTIFACTS, *LAST)
STEPS_REMEMBERED = 1000


@dataclasses.dataclass
class DeliveryState:
    """What one recorder has delivered, and what it must remember to go on after a crash."""

    run_id: str | None = None
    experiment_id: str | None = None
    attempt: int = 0
    offsets: dict[str, int] = dataclasses.field(default_factory=dict)
    """Journal file -> bytes of it that are delivered."""
    marks: dict[str, int] = dataclasses.field(default_factory=dict)
    """Metric -> highest step delivered."""
    floor: dict[str, int] = dataclasses.field(default_factory=dict)
    """`marks` as earlier attempts left them: points at or below are in MLflow already and stay as they are."""
    sample_offset: int = 0
    """What to add to a sample's number: the samples of earlier attempts on other machines."""
    evaluated: dict[str, int] = dataclasses.field(default_factory=dict)
    """Step -> when its evaluation was, in milliseconds: a checkpoint's metrics are linked as the same points."""
    waiting: list[str] = dataclasses.field(default_factory=list)
    """Uploads not yet done: events about checkpoints, as in the journal, and names of other things."""
    ending: str | None = None
    """The attempt's RunEnded while MLflow has not heard of it."""
    uploaded: dict[str, str] = dataclasses.field(default_factory=dict)
    """Artifact -> size and time of the file that was uploaded."""
    infinite: dict[str, int] = dataclasses.field(default_factory=dict)
    """Metric -> first step at which it was infinite."""
    goal: str | None = None
    """The metric that the run is for."""
    best: float | None = None
    """Its best value."""
    delivered: int = 0
    """Points sent."""
    skipped: int = 0
    """Points not sent, since an earlier attempt sent that step."""
    rejected: int = 0
    """Things that MLflow will never take: set aside so as not to hold up the rest."""
    reasons: list[str] = dataclasses.field(default_factory=list)
    """Why, for the latest of them."""
    owners: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name in MLflow -> the metric's own: they differ where MLflow does not take that, or another metric has it."""
    altered: int = 0
    """Things that MLflow has, but not as they were: renamed, cut, infinite."""
    remarks: list[str] = dataclasses.field(default_factory=list)
    """What became of the first of them; each is told once."""
    failures: int = 0
    """Tries that failed, and were made again."""
    outages: int = 0
    """Times in which MLflow took nothing."""
    away_seconds: float = 0.0
    """How long they were together."""
    error: str | None = None
    """What the latest try failed with; none after a success."""
    pending_bytes: int = 0
    """Bytes of journal not yet delivered, when this was written."""
    ended: bool = False
    """MLflow knows how the latest attempt ended."""
    updated: float = 0.0
    """When this was written, for people: clocks jump."""
    page: str = ""
    """A checksum of the run's page as it was sent."""
    told: str = ""
    """One of the troubles that it tells."""
    claim: str = ""
    """The attempt, by its claim's token, that was the run's latest when this was written."""

    @property
    def uploads(self) -> list[str]:
        """Return what waits, but for pictures of the whole run: nobody waits for those."""
        return awaited(self.waiting)

    @property
    def undrawn(self) -> bool:
        """Tell whether what nobody waits for is still to be done: pictures of the whole run, its page once more."""
        return not set(LAST).isdisjoint(self.waiting)

    @property
    def pending(self) -> int:
        """Return how much is left to do before the run is told; 0 when it is."""
        return self.pending_bytes + len(self.uploads) + (self.ending is not None)

    @property
    def done(self) -> bool:
        """Tell whether MLflow had everything but pictures of the whole run, when this was written; the end, too."""
        return self.ended and not self.pending

    def put_last_things_last(self) -> None:
        """Let nothing wait for pictures of the whole run: they are of use once all else is there."""
        self.waiting.sort(key=lambda word: (word in LAST, word == AFTERWORD))

    def reject(self, what: str, reason: str) -> None:
        """Count something that is set aside, and remember why."""
        self.rejected += 1
        self.reasons = [*self.reasons, line_without_secrets(f"{what}: {reason}")][-REASONS_KEPT:]

    def reject_once(self, what: str, reason: str) -> None:
        """Count something that is set aside each time it is looked at, the first time."""
        if not any(known.startswith(f"{what}: ") for known in self.reasons):
            self.reject(what, reason)

    def remark(self, what: str, became: str) -> None:
        """Count something that MLflow does not get as it is, and remember what became of it."""
        line = f"{_short(what)}: {_short(became)}"
        if line not in self.remarks:
            self.altered += 1
            self.remarks = [*self.remarks, line][:REASONS_KEPT]

    def remember_evaluation(self, step: int, milliseconds: int) -> None:
        """Keep when `step` was evaluated, for the latest thousand steps."""
        self.evaluated.setdefault(str(step), milliseconds)
        while len(self.evaluated) > STEPS_REMEMBERED:
            del self.evaluated[next(iter(self.evaluated))]


def path_of(folder: RunFolder, node: int) -> Path:
    """Return where the progress of node `node`'s recorder is kept."""
    return folder.path / ("delivery.json" if node == 0 else f"delivery-node_{node}.json")


def load(path: Path) -> DeliveryState:
    """Read the progress; a new one where there is none. One that is damaged is begun anew: a replay does no harm."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        kinds = _kinds()
        found = DeliveryState(
            **{name: _sound(value, kinds[name]) for name, value in fields.items() if name in kinds}
        )
        return _without_foreign_words(found)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return DeliveryState()


class DeliverySummary(NamedTuple):
    """Of a delivery, what lists show."""

    run_id: str | None
    offsets: Mapping[str, int]
    waits: bool
    """Whether uploads are still to be done, other than of pictures of the whole run."""
    undrawn: bool
    """Whether those are."""


def glance(path: Path) -> DeliverySummary:
    """Return the run's id in MLflow, the journals' offsets and whether something waits, as `load` does.

    For lists of thousands, where reading all of it is felt.
    """
    try:
        fields, kinds = json.loads(path.read_bytes()), _kinds()
        found = {
            name: _sound(fields[name], kinds[name])
            for name in ("run_id", "offsets", "waiting")
            if name in fields
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return DeliverySummary(None, {}, False, False)
    waiting = found.get("waiting", [])
    return DeliverySummary(
        found.get("run_id"),
        found.get("offsets", {}),
        bool(awaited(waiting)),
        not set(LAST).isdisjoint(waiting),
    )


def awaited(waiting: Sequence[str]) -> list[str]:
    """Return those of the words in `waiting` that a run's delivery is not done without."""
    return [word for word in waiting if word not in LAST]


@functools.cache
def _kinds() -> dict[str, Any]:
    return typing.get_type_hints(DeliveryState)


def _short(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:80]}…{text[-40:]}"


def _without_foreign_words(found: DeliveryState) -> DeliveryState:
    """Set aside what waits and is nothing that a journal told."""
    for word in (*found.waiting, *filter(None, [found.ending])):
        if word not in WORDS and _event(word) is None:
            found.reject(f"upload {word[:100]}", "it is no event")
    found.waiting = [word for word in found.waiting if word in WORDS or _event(word) is not None]
    if found.ending is not None and not isinstance(_event(found.ending), RunEnded):
        found.ending = None
    return found


def _event(word: str) -> Event | None:
    try:
        return decode(word)
    except ValueError:
        return None


def _sound(value: Any, kind: Any) -> Any:
    """Return the value as the field's type has it. Raises ValueError, TypeError for any other."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:
        return {str(key): _sound(one, arguments[1]) for key, one in value.items()}
    if origin is list:
        return [_sound(one, arguments[0]) for one in list(value)]
    if not isinstance(value, (arguments or (kind,))) and not (
        kind is float and isinstance(value, int)
    ):
        raise ValueError(f"not {kind}: {value!r}")
    return value


def save(path: Path, progress: DeliveryState) -> None:
    """Replace the file."""
    progress.updated = time.time()
    write_atomically(path, json.dumps(dataclasses.asdict(progress), indent=1))


def unread_bytes(folder: RunFolder, offsets: dict[str, int]) -> int:
    """Return how many bytes of the journals named in `offsets` are not yet delivered."""
    total = 0
    for name, offset in offsets.items():
        with contextlib.suppress(OSError):
            total += max(0, (folder.path / name).stat().st_size - offset)
    return total

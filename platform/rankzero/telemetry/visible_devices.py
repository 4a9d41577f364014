"""Which of a node's GPUs are the job's. Pure: the driver's list comes in as data.

CUDA_VISIBLE_DEVICES is read as CUDA and torch read it: comma-separated indices, or UUIDs
that may be shortened; what cannot be resolved ends the list; a repetition empties it.

Indices are taken in the order of the PCI bus, which is NVML's order. CUDA itself counts so
only under CUDA_DEVICE_ORDER=PCI_BUS_ID; by default it puts the fastest GPU first, so on a
node with different GPUs an index can mean another card. UUIDs have no such doubt, nor do
launchers that show each process its own GPU only: a trainer should pass the UUIDs of the
node's ranks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

_LEADING_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")  # "1gpu" is 1, as strtoul reads it


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU, or one compute instance of a partitioned GPU (MIG), as the driver lists it."""

    uuid: str
    """As NVML spells it: ``GPU-…`` or ``MIG-…``."""
    name: str
    index: int
    """The card's number in NVML, in PCI order."""
    card: str
    """The card's UUID; `uuid` itself unless this is a MIG device."""
    instance: tuple[int, int] | None = None
    """GPU instance and compute instance of a MIG device."""

    def __str__(self) -> str:
        return f"{self.name}, {self.uuid}, index {self.index}"


def select_devices(
    listed: Sequence[Device], environ: Mapping[str, str], uuids: Sequence[str] | None
) -> dict[int, Device]:
    """Return the job's devices by its CUDA ordinals, 0 to n-1.

    `uuids`, in ordinal order, win over `environ`; one that the driver does not list leaves
    its ordinal out. `listed`: whole cards in PCI order, and the MIG devices of each.
    """
    if uuids is not None:
        found = {ordinal: _by_whole_uuid(listed, uuid) for ordinal, uuid in enumerate(uuids)}
        return {ordinal: device for ordinal, device in found.items() if device is not None}
    return dict(enumerate(_visible(listed, environ.get("CUDA_VISIBLE_DEVICES"))))


def parse_visible(value: str) -> list[int | str]:
    """Return the indices, or the UUIDs, that a value of CUDA_VISIBLE_DEVICES lists.

    The first entry decides which of the two; the list ends before an entry of another kind
    and is empty when one is repeated.
    """
    prefix = value[:4] if value.startswith(("GPU-", "MIG-")) else None
    found: list[int | str] = []
    for entry in value.split(","):
        token = _index(entry) if prefix is None else _with_prefix(entry, prefix)
        if token is None:
            break
        if token in found:
            return []
        found.append(token)
    return found


def _index(entry: str) -> int | None:
    match = _LEADING_INTEGER.match(entry.strip())
    index = int(match.group()) if match else -1
    return index if index >= 0 else None


def _with_prefix(entry: str, prefix: str) -> str | None:
    return entry if entry.startswith(prefix) else None


def _visible(listed: Sequence[Device], value: str | None) -> list[Device]:
    cards = [device for device in listed if device.instance is None]
    if value is None:
        return _as_cuda_opens(cards, listed)
    found: list[Device] = []
    for entry in parse_visible(value):
        device = _by_index(cards, entry) if isinstance(entry, int) else _by_uuid(listed, entry)
        if device is None:
            break
        if device in found:
            return []
        found.append(device)
    return _as_cuda_opens(found, listed)


def _as_cuda_opens(devices: Sequence[Device], listed: Sequence[Device]) -> list[Device]:
    """Put a partitioned card's first MIG device in its place.

    CUDA opens no partitioned card as a whole, and when it opens a MIG device so, it opens
    nothing else. Several MIG devices that were named one by one stay: a launcher deals them out.
    """
    for card in devices:
        for device in listed:
            if card.instance is None and device.instance is not None and device.card == card.uuid:
                return [device]
    return list(devices)


def _by_index(cards: Sequence[Device], index: int) -> Device | None:
    return cards[index] if index < len(cards) else None


def _by_uuid(listed: Sequence[Device], start: str) -> Device | None:
    matches = [
        device
        for device in listed
        if device.uuid.startswith(start) or _former_uuid(device) == start
    ]
    return matches[0] if len(matches) == 1 else None


def _by_whole_uuid(listed: Sequence[Device], uuid: str) -> Device | None:
    """Find a device by its UUID, whatever its prefix: torch says none, and does not tell a MIG device from a GPU."""
    bare = uuid.removeprefix("GPU-")
    spellings = (uuid, "GPU-" + bare, "MIG-" + bare)
    return next(
        (device for device in listed if device.uuid in spellings or _former_uuid(device) == uuid),
        None,
    )


def _former_uuid(device: Device) -> str | None:
    """Return how drivers before R470 called a MIG device."""
    return device.instance and "MIG-{}/{}/{}".format(device.card, *device.instance)

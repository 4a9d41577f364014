"""Which of a node's GPUs are the job's. The driver's list is an argument.

CUDA_VISIBLE_DEVICES is read as CUDA and torch read it: comma-separated indices, or UUIDs that may
be shortened. An entry that cannot be resolved ends the list, and a repeated one empties it.

Indices follow the order of the PCI bus, as NVML's do. CUDA itself counts so only with
CUDA_DEVICE_ORDER=PCI_BUS_ID. By default it puts the fastest GPU first, so on a node with different
GPUs an index may mean another card. UUIDs are unambiguous, also if a launcher shows each process
only its own GPU. Therefore a trainer passes the UUIDs of the node's ranks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

# strtoul reads "1gpu" as 1.
_LEADING_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


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

    `listed`: whole cards in PCI order, and the MIG devices of each. `uuids`, in the order of the
    ordinals, win over `environ`. A UUID that the driver does not list leaves its ordinal out.
    """
    if uuids is None:
        return dict(enumerate(_visible(listed, environ.get("CUDA_VISIBLE_DEVICES"))))
    found: dict[int, Device] = {}
    for ordinal, uuid in enumerate(uuids):
        # Torch leaves out the prefix, GPU- or MIG-.
        bare = uuid.removeprefix("GPU-")
        for device in listed:
            if device.uuid in (uuid, "GPU-" + bare, "MIG-" + bare) or _former_uuid(device) == uuid:
                found.setdefault(ordinal, device)
    return found


def parse_visible(value: str) -> list[int | str]:
    """Return the indices, or the UUIDs, that a value of CUDA_VISIBLE_DEVICES lists.

    The first entry decides which of the two. The list ends before an entry of another kind, and
    is empty if an entry is repeated.
    """
    prefix = value[:4] if value.startswith(("GPU-", "MIG-")) else None
    found: list[int | str] = []
    for entry in value.split(","):
        token: int | str | None
        if prefix is None:
            match = _LEADING_INTEGER.match(entry.strip())
            token = int(match.group()) if match and int(match.group()) >= 0 else None
        else:
            token = entry if entry.startswith(prefix) else None
        if token is None:
            break
        if token in found:
            return []
        found.append(token)
    return found


def _visible(listed: Sequence[Device], value: str | None) -> list[Device]:
    cards = [device for device in listed if device.instance is None]
    if value is None:
        return _as_cuda_opens(cards, listed)
    found: list[Device] = []
    for entry in parse_visible(value):
        if isinstance(entry, int):
            fitting = cards[entry : entry + 1]
        else:
            fitting = [
                device
                for device in listed
                if device.uuid.startswith(entry) or _former_uuid(device) == entry
            ]
        # A UUID may be shortened only as far as it names one device.
        if len(fitting) != 1:
            break
        if fitting[0] in found:
            return []
        found += fitting
    return _as_cuda_opens(found, listed)


def _as_cuda_opens(devices: Sequence[Device], listed: Sequence[Device]) -> list[Device]:
    """Return the devices that CUDA opens: of a partitioned card, only its first MIG device.

    CUDA then opens nothing else. Several MIG devices that were named stay, because a launcher
    gives each process its own.
    """
    for card in devices:
        for device in listed:
            if card.instance is None and device.instance is not None and device.card == card.uuid:
                return [device]
    return list(devices)


def _former_uuid(device: Device) -> str | None:
    """Return the name that drivers before R470 gave a MIG device."""
    return device.instance and "MIG-{}/{}/{}".format(device.card, *device.instance)

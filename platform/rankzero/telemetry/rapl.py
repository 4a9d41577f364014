"""The energy of the machine's processors and memory, from the counters that Linux calls RAPL.

Intel's and AMD's processors have them. The files belong to root: Linux keeps them from others since
CVE-2020-8694, unless an administrator makes them readable.
"""

from __future__ import annotations

from pathlib import Path

_MICRO = 1e6
ZONES = Path("/sys/class/powercap")


class CpuEnergy:
    """Counts joules since it was made: of all processor packages, and of memory outside them.

    It is the whole machine's energy, whatever runs there. `zones`: the folder with the counters.
    """

    def __init__(self, zones: Path = ZONES) -> None:
        # A package has its cores in it, but not its memory.
        found = [one for one in zones.glob("intel-rapl:*") if _is(one, "package")]
        found += [one for one in zones.glob("intel-rapl:*:*") if _is(one, "dram")]
        self._last = {zone: now for zone in found if (now := _read(zone)) is not None}
        self._joules = 0.0

    def sample(self) -> dict[str, float]:
        """Return the energy so far, or nothing without a counter that this user may read."""
        for zone, last in self._last.items():
            now = _read(zone)
            if now is None:
                return {}
            if now < last:  # it starts again at 0 after its largest value
                last -= _read(zone, "max_energy_range_uj") or last
            self._joules += (now - last) / _MICRO
            self._last[zone] = now
        return {"cpu_energy_joules": self._joules} if self._last else {}


def _is(zone: Path, kind: str) -> bool:
    try:
        return (zone / "name").read_text(encoding="ascii").startswith(kind)
    except OSError:
        return False


def _read(zone: Path, file: str = "energy_uj") -> int | None:
    try:
        return int((zone / file).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None

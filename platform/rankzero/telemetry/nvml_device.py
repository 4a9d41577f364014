"""One GPU's readings. The driver's binding comes in as `nvml`: `gpu.py` alone imports it."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

MEGABYTE = 1e6
MANY_FAILURES = 3  # of one reading in a row: one alone is nothing to tell of
MILLIS = 1e3  # milliwatts in a watt, millijoules in a joule

# By number, not by class: which classes there are depends on the binding's version.
_UNINITIALIZED, _INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND = (
    1,
    2,
    3,
    4,
    13,
)
_GPU_IS_LOST, _RESET_REQUIRED, _VERSION_MISMATCH, _DEPRECATED = 15, 16, 25, 26
_NEVER = {
    _INVALID_ARGUMENT,
    _NOT_SUPPORTED,
    _NO_PERMISSION,
    _FUNCTION_NOT_FOUND,
    _VERSION_MISMATCH,
    _DEPRECATED,
}
_GONE = {_UNINITIALIZED, _GPU_IS_LOST, _RESET_REQUIRED}

_TEMPERATURE_OF_GPU, _CLOCK_OF_SM = 0, 1

# Why the clocks are lower than asked for; bits of nvmlClocksEventReasons.
_THROTTLED = {
    "throttled_power_percentage": 0x04 | 0x80,  # the power limit; the power supply's brake
    "throttled_thermal_percentage": 0x20 | 0x40,
    "throttled_hardware_percentage": 0x08,  # the hardware halved the clocks, whatever for
}


class GpuLostError(Exception):
    """The GPU fell off the bus, or needs a reset before it answers again."""


class GpuReader:
    """Reads one device. `card`: whom to ask for what only whole cards have; None: nobody.

    `trouble`: the first reading that failed `MANY_FAILURES` times in a row, and why; it is asked for all the same.
    """

    def __init__(self, nvml: Any, handle: Any, card: Any | None) -> None:
        self._nvml = nvml
        self._handle = handle
        self._card = card
        self.trouble: str | None = None
        self._failures: collections.Counter[str] = collections.Counter()
        self._watts: float | None = None
        self._joules = 0.0
        self._energy_read: float | None = None
        self._power_read: tuple[float, float] | None = None
        self._reads: list[Callable[[], dict[str, float]]] = [self._utilization, self._memory]
        if card is not None:
            self._reads += [
                self._power,
                self._share_of_limit,
                self._temperature,
                self._clock,
                self._throttled,
            ]
            self._reads.append(self._choose_energy())

    def sample(self) -> dict[str, float]:
        """Return what the device tells now; raises GpuLostError."""
        metrics: dict[str, float] = {}
        self._watts = None
        for read in list(self._reads):
            try:
                metrics.update(read())
                del self._failures[read.__name__]
            except self._nvml.NVMLError as error:
                if error.value in _GONE:
                    raise GpuLostError(str(error)) from None
                if error.value in _NEVER:
                    self._reads.remove(read)
                else:
                    self._count_failure(read.__name__, error)
        return metrics

    def _count_failure(self, name: str, error: Exception) -> None:
        self._failures[name] += 1
        if self._failures[name] == MANY_FAILURES and self.trouble is None:
            self.trouble = f"{name.strip('_').replace('_', ' ')}: {error}"

    def _utilization(self) -> dict[str, float]:
        return {
            "utilization_percentage": float(
                self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
            )
        }

    def _memory(self) -> dict[str, float]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(
            self._handle
        )  # used: what the driver reserves included
        if not memory.total:
            return {}
        return {
            "memory_usage_percentage": memory.used / memory.total * 100,
            "memory_usage_megabytes": memory.used / MEGABYTE,
        }

    def _power(self) -> dict[str, float]:
        # Of this moment up to the A100; later cards answer with the mean of the last second.
        self._watts = self._nvml.nvmlDeviceGetPowerUsage(self._card) / MILLIS
        return {"power_usage_watts": self._watts}

    def _share_of_limit(self) -> dict[str, float]:
        limit = self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._card) / MILLIS
        return (
            {"power_usage_percentage": self._watts / limit * 100}
            if self._watts is not None and limit
            else {}
        )

    def _temperature(self) -> dict[str, float]:
        calls = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
        return {"temperature_celsius": float(self._first_known(calls, _TEMPERATURE_OF_GPU))}

    def _clock(self) -> dict[str, float]:
        return {
            "sm_clock_megahertz": float(self._nvml.nvmlDeviceGetClockInfo(self._card, _CLOCK_OF_SM))
        }

    def _throttled(self) -> dict[str, float]:
        calls = (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        )
        reasons = self._first_known(calls)
        # 0 or 100 now, so that the mean is the share of the time.
        return {name: 100.0 if reasons & bits else 0.0 for name, bits in _THROTTLED.items()}

    def _first_known(self, calls: Sequence[str], *args: int) -> int:
        """Call the first function that binding and driver both have; they were renamed over the years."""
        for call in calls:
            try:
                return int(getattr(self._nvml, call)(self._card, *args))
            except AttributeError:
                continue
            except self._nvml.NVMLError as error:
                if error.value != _FUNCTION_NOT_FOUND:
                    raise
        raise self._nvml.NVMLError(_FUNCTION_NOT_FOUND)

    def _choose_energy(self) -> Callable[[], dict[str, float]]:
        self._energy_read = or_none(
            self._nvml, self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._card
        )
        return self._integrated_energy if self._energy_read is None else self._counted_energy

    def _counted_energy(self) -> dict[str, float]:
        now = float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._card))
        if self._energy_read is not None:
            self._joules += (
                max(0.0, now - self._energy_read) / MILLIS
            )  # the counter restarts with the driver
        self._energy_read = now
        return {"energy_joules": self._joules}

    def _integrated_energy(self) -> dict[str, float]:
        """Sum up power over time, for GPUs without a counter (before Volta)."""
        if self._watts is None:
            return {}
        now = time.monotonic()
        if self._power_read is not None:
            then, watts = self._power_read
            self._joules += (watts + self._watts) / 2 * (now - then)
        self._power_read = now, self._watts
        return {"energy_joules": self._joules}


def or_none(nvml: Any, call: Callable[..., Any], *args: Any) -> Any:
    """Call the driver; None when it refuses."""
    try:
        return call(*args)
    except nvml.NVMLError:
        return None

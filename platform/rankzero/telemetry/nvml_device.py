"""The readings of one GPU. The caller passes the driver's binding: `nvml.py` alone imports it."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

_MEGABYTE = 1e6
# Milliwatts in a watt, millijoules in a joule.
_MILLI = 1e3
# Failures of one reading in a row that the user is notified of. Single ones are common.
_MANY_FAILURES = 3

# By number, because the binding's version decides which exception classes exist.
_UNINITIALIZED, _INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION = 1, 2, 3, 4
_FUNCTION_NOT_FOUND, _GPU_IS_LOST, _RESET_REQUIRED = 13, 15, 16
_VERSION_MISMATCH, _DEPRECATED = 25, 26
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

# Why the clocks are lower than requested: bits of nvmlClocksEventReasons.
_THROTTLED = {
    # The power limit, and the brake of the power supply.
    "throttled_power_percentage": 0x04 | 0x80,
    "throttled_thermal_percentage": 0x20 | 0x40,
    # The hardware halved the clocks, for any reason.
    "throttled_hardware_percentage": 0x08,
}


class GpuLostError(Exception):
    """The GPU is off the bus, or needs a reset before it answers again."""


class GpuReader:
    """Reads one device.

    `card`: the handle for readings that only whole cards have, or None to leave them out.
    `trouble`: the first reading that failed several times in a row, with the error. The reader
    still tries it.
    """

    def __init__(self, nvml: Any, handle: Any, card: Any | None) -> None:
        self._nvml, self._handle, self._card = nvml, handle, card
        self.trouble: str | None = None
        self._failures: collections.Counter[str] = collections.Counter()
        self._watts: float | None = None
        self._joules = 0.0
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
            counted = or_none(nvml, nvml.nvmlDeviceGetTotalEnergyConsumption, card)
            self._energy_read = counted or 0.0
            has_counter = counted is not None
            self._reads.append(self._counted_energy if has_counter else self._integrated_energy)

    def sample(self) -> dict[str, float]:
        """Return the present readings. Raises GpuLostError."""
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
                    continue
                self._failures[read.__name__] += 1
                if self._failures[read.__name__] == _MANY_FAILURES and self.trouble is None:
                    name = read.__name__.strip("_").replace("_", " ")
                    self.trouble = f"{name}: {error}"
        return metrics

    def _utilization(self) -> dict[str, float]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        return {"utilization_percentage": float(rates.gpu)}

    def _memory(self) -> dict[str, float]:
        # The driver's own memory counts as used.
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        if not memory.total:
            return {}
        return {
            "memory_usage_percentage": memory.used / memory.total * 100,
            "memory_usage_megabytes": memory.used / _MEGABYTE,
        }

    def _power(self) -> dict[str, float]:
        # Up to the A100 the present value, on later cards the mean of the last second.
        self._watts = self._nvml.nvmlDeviceGetPowerUsage(self._card) / _MILLI
        return {"power_usage_watts": self._watts}

    def _share_of_limit(self) -> dict[str, float]:
        limit = self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._card) / _MILLI
        if self._watts is None or not limit:
            return {}
        return {"power_usage_percentage": self._watts / limit * 100}

    def _temperature(self) -> dict[str, float]:
        calls = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
        return {"temperature_celsius": float(self._first_known(calls, _TEMPERATURE_OF_GPU))}

    def _clock(self) -> dict[str, float]:
        clock = self._nvml.nvmlDeviceGetClockInfo(self._card, _CLOCK_OF_SM)
        return {"sm_clock_megahertz": float(clock)}

    def _throttled(self) -> dict[str, float]:
        calls = (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        )
        reasons = self._first_known(calls)
        # 0 or 100, so that the mean is the share of the time.
        return {name: 100.0 if reasons & bits else 0.0 for name, bits in _THROTTLED.items()}

    def _first_known(self, calls: Sequence[str], *args: int) -> int:
        """Call the first function that binding and driver have. Versions renamed some of them."""
        for call in calls:
            try:
                return int(getattr(self._nvml, call)(self._card, *args))
            except AttributeError:
                continue
            except self._nvml.NVMLError as error:
                if error.value != _FUNCTION_NOT_FOUND:
                    raise
        raise self._nvml.NVMLError(_FUNCTION_NOT_FOUND)

    def _counted_energy(self) -> dict[str, float]:
        now = float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._card))
        # The counter restarts with the driver.
        self._joules += max(0.0, now - self._energy_read) / _MILLI
        self._energy_read = now
        return {"energy_joules": self._joules}

    def _integrated_energy(self) -> dict[str, float]:
        """Integrate power over time, for GPUs before Volta, which have no energy counter."""
        if self._watts is None:
            return {}
        now = time.monotonic()
        if self._power_read is not None:
            then, watts = self._power_read
            self._joules += (watts + self._watts) / 2 * (now - then)
        self._power_read = now, self._watts
        return {"energy_joules": self._joules}


def or_none(nvml: Any, call: Callable[..., Any], *args: Any) -> Any:
    """Return the driver's answer, or None if it raises."""
    try:
        return call(*args)
    except nvml.NVMLError:
        return None

"""What the job's GPUs do. The only file that imports pynvml.

The process that trains never comes here: the recorder reads the driver, beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rankzero.telemetry.nvml_device import GpuLostError, GpuReader, or_none
from rankzero.telemetry.visible_devices import Device, select_devices


@dataclasses.dataclass(frozen=True)
class _Listed:
    device: Device
    handle: Any
    card: Any
    """NVML's handle of the whole card; `handle` unless this is a MIG device."""


class GpuSampler:
    """Reads the job's GPUs; `gpu_<i>` is the job's CUDA ordinal i.

    `uuids`: in ordinal order; an empty sequence: no GPU; None: what `environ` leaves.
    Without a driver there are no readings and `notices` says why.

    A card's power, temperature, clocks and energy appear once, under the first of the job's
    MIG devices on it, and are the whole card's, whoever else uses it.
    """

    def __init__(self, uuids: Sequence[str] | None, environ: Mapping[str, str]) -> None:
        self.notices: list[str] = []
        self._nvml: Any = None
        self._devices: dict[int, Device] = {}
        self._gpus: dict[int, GpuReader] = {}
        self._cards = 0
        self._troubled: set[int] = set()
        if uuids is None or len(uuids) > 0:
            self._open(uuids, environ)

    def _open(self, uuids: Sequence[str] | None, environ: Mapping[str, str]) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except ImportError:
            self.notices.append("no GPU metrics: the package nvidia-ml-py is not installed")
            return
        except pynvml.NVMLError as error:
            self.notices.append(f"no GPU metrics: {error}")
            return
        self._nvml = pynvml
        self._choose(_list_devices(pynvml), uuids, environ)

    def _choose(
        self, listed: list[_Listed], uuids: Sequence[str] | None, environ: Mapping[str, str]
    ) -> None:
        by_device = {entry.device: entry for entry in listed}
        self._devices = select_devices(list(by_device), environ, uuids)
        cards: set[str] = set()
        for ordinal, device in self._devices.items():
            entry = by_device[device]
            self._gpus[ordinal] = GpuReader(
                self._nvml, entry.handle, None if device.card in cards else entry.card
            )
            cards.add(device.card)
        self._cards = len(cards)
        for ordinal, uuid in enumerate(uuids or ()):
            if ordinal not in self._devices:
                self.notices.append(f"no metrics of GPU {ordinal}: the driver does not list {uuid}")

    def describe(self) -> dict[str, str]:
        """Return what each ordinal is: ``{"gpu_0": "NVIDIA H200, GPU-…, index 3"}``."""
        return {f"gpu_{ordinal}": str(device) for ordinal, device in self._devices.items()}

    def sample(self) -> dict[str, float]:
        """Return the readings of this moment, ``gpu_0_utilization_percentage`` and so on.

        What a GPU does not support is left out, and what it fails to say. A lost GPU is left out from then on. The
        last two are said in `notices`, once a GPU.
        """
        readings = {ordinal: self._read(ordinal, gpu) for ordinal, gpu in list(self._gpus.items())}
        metrics = {
            f"gpu_{i}_{name}": value
            for i, reading in readings.items()
            for name, value in reading.items()
        }
        return (
            metrics | across(list(readings.values()), self._cards)
            if len(self._devices) > 1
            else metrics
        )

    def _read(self, ordinal: int, gpu: GpuReader) -> dict[str, float]:
        try:
            reading = gpu.sample()
        except GpuLostError as error:
            self._gpus.pop(ordinal, None)
            self.notices.append(
                f"GPU {ordinal} ({self._devices[ordinal]}) gives no more metrics: {error}"
            )
            return {}
        if gpu.trouble and ordinal not in self._troubled:
            self._troubled.add(ordinal)
            self.notices.append(
                f"GPU {ordinal} ({self._devices[ordinal]}) lacks some metrics: {gpu.trouble}"
            )
        return reading

    def close(self) -> None:
        """Let go of the driver; may be called twice."""
        nvml, self._nvml = self._nvml, None
        self._gpus = {}
        if nvml is not None:
            or_none(nvml, nvml.nvmlShutdown)


def across(readings: Sequence[Mapping[str, float]], cards: int) -> dict[str, float]:
    """Summarise the GPUs of a node: one chart to look at before the chart of each.

    A sum that lacks one of the `cards` would mislead and is left out.
    """
    summary = {
        "gpu_" + name: _column(readings, name) for name in ("power_usage_watts", "energy_joules")
    }
    metrics = {
        name: sum(values) for name, values in summary.items() if values and len(values) == cards
    }
    if busy := _column(readings, "utilization_percentage"):
        metrics["gpu_utilization_percentage"] = sum(busy) / len(busy)
        metrics["gpu_utilization_percentage_min"] = min(busy)
    for name in ("memory_usage_percentage", "temperature_celsius"):
        if values := _column(readings, name):
            metrics[f"gpu_{name}_max"] = max(values)
    return metrics


def _column(readings: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [reading[name] for reading in readings if name in reading]


def _list_devices(nvml: Any) -> list[_Listed]:
    """Return every card that the driver lets this process see, in PCI order, each before its MIG devices."""
    listed: list[_Listed] = []
    for index in range(or_none(nvml, nvml.nvmlDeviceGetCount) or 0):
        card = or_none(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
        if card is not None and (whole := or_none(nvml, _describe, nvml, card, index)):
            listed += [_Listed(whole, card, card), *_list_instances(nvml, card, whole)]
    return listed


def _list_instances(nvml: Any, card: Any, whole: Device) -> list[_Listed]:
    count = or_none(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, card) or 0  # 0: not partitioned
    handles = [
        or_none(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, card, number)
        for number in range(count)
    ]
    found = [
        (handle, or_none(nvml, _describe_instance, nvml, handle, whole))
        for handle in handles
        if handle
    ]
    return [_Listed(device, handle, card) for handle, device in found if device]


def _describe(nvml: Any, card: Any, index: int) -> Device:
    uuid = nvml.nvmlDeviceGetUUID(card)
    return Device(uuid, nvml.nvmlDeviceGetName(card), index, uuid)


def _describe_instance(nvml: Any, handle: Any, whole: Device) -> Device:
    instance = nvml.nvmlDeviceGetGpuInstanceId(handle), nvml.nvmlDeviceGetComputeInstanceId(handle)
    name = or_none(nvml, nvml.nvmlDeviceGetName, handle) or whole.name
    return Device(nvml.nvmlDeviceGetUUID(handle), name, whole.index, whole.uuid, instance)

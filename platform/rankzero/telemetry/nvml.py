"""The readings of the job's GPUs. The only file that imports pynvml.

The training process never imports it: the recorder reads the driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rankzero.telemetry.nvml_device import GpuLostError, GpuReader, or_none
from rankzero.telemetry.visible_devices import Device, select_devices


class GpuSampler:
    """Reads the job's GPUs; `gpu_<i>` is the job's CUDA ordinal i.

    `uuids`: in the order of the ordinals. An empty sequence means no GPU, None those that
    `environ` leaves. Without a driver there are no readings, and `notices` has the reason.

    A card's power, temperature, clocks and energy are those of the whole card, also if other jobs
    use it. They appear once, under the first of the job's MIG devices on the card.
    """

    def __init__(self, uuids: Sequence[str] | None, environ: Mapping[str, str]) -> None:
        self.notices: list[str] = []
        self._nvml: Any = None
        self._devices: dict[int, Device] = {}
        self._gpus: dict[int, GpuReader] = {}
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
        listed = _list_devices(pynvml)
        self._devices = select_devices(list(listed), environ, uuids)
        cards: set[str] = set()
        for ordinal, device in self._devices.items():
            handle, card = listed[device]
            # Readings of a whole card appear once, under the first of its MIG devices.
            whole = None if device.card in cards else card
            self._gpus[ordinal] = GpuReader(pynvml, handle, whole)
            cards.add(device.card)
        for ordinal, uuid in enumerate(uuids or ()):
            if ordinal not in self._devices:
                self.notices.append(f"no metrics of GPU {ordinal}: the driver does not list {uuid}")

    def describe(self) -> dict[str, str]:
        """Return the GPU of each ordinal: ``{"gpu_0": "NVIDIA H200, GPU-…, index 3"}``."""
        return {f"gpu_{ordinal}": str(device) for ordinal, device in self._devices.items()}

    def sample(self) -> dict[str, float]:
        """Return the present readings, ``gpu_0_utilization_percentage`` and so on.

        Leaves out what a GPU does not support or fails to read, and a lost GPU from then on. The
        last two appear in `notices`, once for each GPU.
        """
        readings: dict[int, dict[str, float]] = {}
        for ordinal, gpu in list(self._gpus.items()):
            name = f"GPU {ordinal} ({self._devices[ordinal]})"
            try:
                readings[ordinal] = gpu.sample()
            except GpuLostError as error:
                del self._gpus[ordinal]
                self.notices.append(f"{name} gives no more metrics: {error}")
                continue
            notice = f"{name} lacks some metrics: {gpu.trouble}"
            if gpu.trouble and notice not in self.notices:
                self.notices.append(notice)
        metrics = {
            f"gpu_{ordinal}_{name}": value
            for ordinal, reading in readings.items()
            for name, value in reading.items()
        }
        if len(self._devices) > 1:
            cards = {device.card for device in self._devices.values()}
            metrics |= _across(list(readings.values()), len(cards))
        return metrics

    def close(self) -> None:
        """Release the driver; may be called twice."""
        nvml, self._nvml = self._nvml, None
        self._gpus = {}
        if nvml is not None:
            or_none(nvml, nvml.nvmlShutdown)


def _across(readings: Sequence[Mapping[str, float]], cards: int) -> dict[str, float]:
    """Return metrics of all GPUs together: one chart to look at before the chart of each."""
    metrics: dict[str, float] = {}
    for name in ("power_usage_watts", "energy_joules"):
        values = _column(readings, name)
        # A sum that lacks a card would mislead.
        if values and len(values) == cards:
            metrics[f"gpu_{name}"] = sum(values)
    if busy := _column(readings, "utilization_percentage"):
        metrics["gpu_utilization_percentage"] = sum(busy) / len(busy)
        metrics["gpu_utilization_percentage_min"] = min(busy)
    for name in ("memory_usage_percentage", "temperature_celsius"):
        if values := _column(readings, name):
            metrics[f"gpu_{name}_max"] = max(values)
    return metrics


def _column(readings: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [reading[name] for reading in readings if name in reading]


def _list_devices(nvml: Any) -> dict[Device, tuple[Any, Any]]:
    """Return each card that this process may see, in PCI order, each before its MIG devices.

    The values are NVML's handles of the device and of its whole card, which are the same but for a
    MIG device.
    """
    listed: dict[Device, tuple[Any, Any]] = {}
    for index in range(or_none(nvml, nvml.nvmlDeviceGetCount) or 0):
        # A GPU that the driver does not describe is left out.
        with contextlib.suppress(nvml.NVMLError):
            card = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(card)
            whole = Device(uuid, nvml.nvmlDeviceGetName(card), index, uuid)
            listed[whole] = card, card
            listed |= {device: (handle, card) for device, handle in _parts(nvml, whole, card)}
    return listed


def _parts(nvml: Any, whole: Device, card: Any) -> Iterator[tuple[Device, Any]]:
    """Yield the MIG devices of a card, with their handles. Only a partitioned card has some."""
    for number in range(or_none(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, card) or 0):
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number)
            gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
            instance = gpu_instance, nvml.nvmlDeviceGetComputeInstanceId(handle)
            name = or_none(nvml, nvml.nvmlDeviceGetName, handle) or whole.name
            uuid = nvml.nvmlDeviceGetUUID(handle)
            yield Device(uuid, name, whole.index, whole.uuid, instance), handle

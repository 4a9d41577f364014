"""Environments in which pynvml loads `nvml_stub.c`, which answers from `recorded_gpu.json`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORDED: dict[str, Any] = json.loads((HERE / "recorded_gpu.json").read_text())
MIB = 1 << 20
NOT_SUPPORTED, UNKNOWN, GPU_IS_LOST = "E3", "E999", "E15"
DRIVER_NOT_LOADED, RESET_REQUIRED = "E9", "E16"


def uuid(card: int) -> str:
    return f"GPU-{card}fdaf0a5-179b-f636-d15d-daf243e3ff16"


def mig_uuid(number: int) -> str:
    return f"MIG-{number}eb88891-0321-5fef-9c87-d4af3b54259e"


def card(number: int, state: str = "whole_load", **script: str) -> dict[str, str]:
    """Return the stub's variables for one recorded card. `script` replaces some answers."""
    seen = RECORDED[state]
    busy = seen["utilization_percent"]
    answers = {
        "nvmlDeviceGetUUID": uuid(number),
        "nvmlDeviceGetName": RECORDED["name"],
        "nvmlDeviceGetMaxMigDeviceCount": "7" if "devices" in seen else "0",
        "nvmlDeviceGetUtilizationRates": NOT_SUPPORTED if busy is None else str(busy),
        "nvmlDeviceGetMemoryInfo_total": str(RECORDED["memory_total_mib"] * MIB),
        "nvmlDeviceGetMemoryInfo_free": str(seen["memory_free_mib"] * MIB),
        "nvmlDeviceGetPowerUsage": str(seen["power_milliwatts"]),
        "nvmlDeviceGetEnforcedPowerLimit": str(RECORDED["power_limit_milliwatts"]),
        "nvmlDeviceGetTemperature": str(seen["temperature_celsius"]),
        "nvmlDeviceGetClockInfo": str(seen["sm_clock_megahertz"]),
        "nvmlDeviceGetCurrentClocksEventReasons": seen["clocks_event_reasons"],
        "nvmlDeviceGetTotalEnergyConsumption": "1000000,1000627,1001255,1001882",
        **script,
    }
    return {f"{function}_gpu{number}": answer for function, answer in answers.items()}


def mig_card(number: int) -> dict[str, str]:
    environment = card(number, "mig_load")
    for place, device in enumerate(RECORDED["mig_load"]["devices"]):
        answers = {
            "nvmlDeviceGetUUID": mig_uuid(number * 5 + place),
            "nvmlDeviceGetName": f"{RECORDED['name']} MIG {device['profile']}",
            "nvmlDeviceGetGpuInstanceId": str(device["gpu_instance"]),
            "nvmlDeviceGetComputeInstanceId": str(device["compute_instance"]),
            "nvmlDeviceGetMemoryInfo_total": str(device["memory_total_mib"] * MIB),
            "nvmlDeviceGetMemoryInfo_free": str(device["memory_free_mib"] * MIB),
        }
        environment |= {
            f"{function}_gpu{number}mig{place}": answer for function, answer in answers.items()
        }
    return environment


def compile_stub(folder: Path, *flags: str) -> dict[str, str]:
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", *flags, "-o", library, HERE / "nvml_stub.c"], check=True
    )
    return {"LD_LIBRARY_PATH": str(folder)}

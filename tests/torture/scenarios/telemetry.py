"""GPU drivers that are absent, fail, lose a device, or partition one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rankzero.events import Noticed, SystemSampled
from rankzero.run_store.folder import RunFolder
from support.stubbed_nvml import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    RESET_REQUIRED,
    UNKNOWN,
    card,
    compile_stub,
    mig_card,
    mig_uuid,
    uuid,
)
from torture.ground import Broken, Ground
from torture.promises import Curves
from torture.scenarios.training import CLOCK, SETTINGS, ends, finished_without_sync, the_run

CALLS = ("nvmlDeviceGetTemperature", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage")
Driver = Callable[[Ground], dict[str, str]]


def gpu_telemetry(ground: Ground, reference: Curves) -> None:
    """NVML is absent, fails, loses a GPU or has MIG: training continues, with one notice each."""
    kind = ground.next_of(tuple(DRIVERS))
    driver, notice, times = DRIVERS[kind]
    ground.note_fault(f"GPU telemetry: {kind}")
    ground.environ |= {"TORTURE_GPUS": f"{uuid(0)} {uuid(1)}", **driver(ground)}
    ends(ground.start("train", CLOCK, *SETTINGS, "step_seconds=0.03"), 0)
    finished_without_sync(ground, reference)
    _is_reported(the_run(ground), notice, times, kind)


def _is_reported(run: RunFolder, wanted: str, times: int, kind: str) -> None:
    """Check that the journals have samples of each readable GPU, and the wanted notices."""
    events = list(run.all_events())
    notices = [event.text for event in events if isinstance(event, Noticed) and "GPU" in event.text]
    if len(notices) != times or any(wanted not in text for text in notices):
        raise Broken(f"lost: {kind}: notices {notices}, wanted {wanted!r} {times} times")
    sampled = {
        name for event in events if isinstance(event, SystemSampled) for name in event.metrics
    }
    if (kind != "absent" and kind != "not loaded") != any("gpu_0_" in name for name in sampled):
        raise Broken(f"lost: {kind}: the samples are {sorted(sampled)}")


def _stub(ground: Ground) -> dict[str, str]:
    folder = ground.folder / "nvml"
    folder.mkdir()
    return compile_stub(folder)


def _after_a_while(ground: Ground, error: str) -> str:
    return ",".join(["52"] * ground.random.randrange(1, 5) + [error])


def _absent(ground: Ground) -> dict[str, str]:
    library = Path(_stub(ground)["LD_LIBRARY_PATH"]) / "libnvidia-ml.so.1"
    library.write_text("not a library")
    return {"LD_LIBRARY_PATH": str(library.parent)}


def _not_loaded(ground: Ground) -> dict[str, str]:
    return {**_stub(ground), "nvmlInitWithFlags": DRIVER_NOT_LOADED}


def _fails(ground: Ground) -> dict[str, str]:
    """Every reading of both cards fails from a random moment on, with an unknown error."""
    answers = {call: _after_a_while(ground, UNKNOWN) for call in CALLS}
    return {**_stub(ground), **card(0, **answers), **card(1, **answers)}


def _lost(ground: Ground) -> dict[str, str]:
    error = ground.random.choice((GPU_IS_LOST, RESET_REQUIRED))
    return {
        **_stub(ground),
        **card(0),
        **card(1, nvmlDeviceGetTemperature=_after_a_while(ground, error)),
    }


def _divided(ground: Ground) -> dict[str, str]:
    return {**_stub(ground), **mig_card(0), "TORTURE_GPUS": f"{mig_uuid(0)} {mig_uuid(1)}"}


# Drivers, a part of the notices that each must cause, and the number of notices: one per card.
DRIVERS: dict[str, tuple[Driver, str, int]] = {
    "absent": (_absent, "NVML Shared Library Not Found", 1),
    "not loaded": (_not_loaded, "Driver Not Loaded", 1),
    "fails": (_fails, "lacks some metrics", 2),
    "a GPU is lost": (_lost, "gives no more metrics", 1),
    "MIG": (_divided, "", 0),
}

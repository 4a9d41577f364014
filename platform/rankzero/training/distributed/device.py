"""The device that a rank computes on, and the facts about it that a run records."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import torch

from rankzero.errors import UserError
from rankzero.ranks import Ranks
from rankzero.telemetry.host import core_count
from rankzero.training.distributed.world import World


def choose(ranks: Ranks) -> torch.device:
    """Return this rank's device, made current: the GPU of its local rank, or the CPU.

    Raises UserError for GPUs that PyTorch cannot use, and for fewer GPUs than ranks.
    """
    check_driver()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    check_gpus(ranks.local_world_size)
    device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def check_driver() -> None:
    """Raise UserError if this machine has GPUs that PyTorch cannot use.

    It initializes CUDA, so a process that calls it must not be forked.
    """
    # PyTorch counts GPUs without its own CUDA, for which the driver may be too old.
    gpus = 0 if torch.cuda.is_available() else torch.cuda.device_count()
    try:
        if gpus:
            torch.cuda.init()
    except Exception as error:  # a driver fails in many ways
        why = str(error).strip().partition("\n")[0].rstrip(".")
        raise UserError(
            f"PyTorch cannot use this machine's {gpus} GPUs, driver {driver_version()}: {why}; "
            "install a PyTorch built for this driver, or set CUDA_VISIBLE_DEVICES= to train on the "
            "CPU"
        ) from error


def check_gpus(processes: int) -> None:
    """Raise UserError if this node has GPUs, but fewer than `processes`."""
    gpus = torch.cuda.device_count()
    if 0 < gpus < processes:
        raise UserError(
            f"{processes} processes need {processes} GPUs, but this machine has {gpus}: "
            f"use --nproc {gpus}, or CUDA_VISIBLE_DEVICES= to train on the CPU"
        )


def set_threads(ranks: Ranks) -> None:
    """Give each of the node's ranks an equal share of the cores, or OMP_NUM_THREADS."""
    threads = core_count() // ranks.local_world_size
    # OpenMP takes a list, "4,2", for nested levels, and ignores what is no number.
    with contextlib.suppress(ValueError):
        threads = int(os.environ.get("OMP_NUM_THREADS", "").split(",")[0])
    torch.set_num_threads(max(1, threads))


def gpu_uuids(ranks: Ranks, strategy: str) -> list[str]:
    """Return the UUIDs of the GPUs that this node's ranks use, in the order of local ranks."""
    if not torch.cuda.is_available():
        return []
    used = torch.cuda.device_count()
    # DataParallel uses all GPUs in one process.
    if strategy != "dp":
        used = min(ranks.local_world_size, used)
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(used)]


def forget_peak_memory(world: World) -> None:
    """Restart the count of `peak_memory_megabytes`."""
    # Building a sharded model takes more memory for a moment than training it.
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)


def peak_memory_megabytes(world: World) -> float:
    """Return the most memory that this rank has held.

    On a GPU: what PyTorch has reserved. On a CPU: the resident size of the process.
    """
    if world.device.type == "cuda":
        return torch.cuda.max_memory_reserved(world.device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def describe(world: World) -> dict[str, str]:
    """Return tags about the software and hardware that the run computes with."""
    facts = {
        "rankzero.torch": torch.__version__,
        "rankzero.world_size": str(world.size),
        "rankzero.device": world.device.type,
    }
    if world.device.type != "cuda":
        return facts
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts |= {"rankzero.gpu": ", ".join(sorted(set(names))), "rankzero.driver": driver_version()}
    versions = {"cuda": torch.version.cuda, "rocm": torch.version.hip, "nccl": nccl_version()}
    return facts | {f"rankzero.{name}": found for name, found in versions.items() if found}


def nccl_version() -> str:
    """Return the version of NCCL, or "" if PyTorch was built without it."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # such a build raises what it likes
        return ""


def driver_version() -> str:
    """Return the NVIDIA driver's version, or "unknown"."""
    # Not through NVML: only the recorder calls that, because a call may hang.
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"

"""Which device a rank computes on, and what it is made of."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from rankzero.errors import UserError
from rankzero.ranks import Ranks
from rankzero.telemetry.host import usable_cores
from rankzero.training.distributed.world import World


def choose(ranks: Ranks) -> torch.device:
    """Return this rank's device, made current: the GPU of its local rank, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    check_gpus(ranks.local_world_size)
    device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def gpu_count() -> int:
    """Return how many GPUs this process sees."""
    return torch.cuda.device_count()


def check_gpus(processes: int) -> None:
    """Raise UserError where a node has GPUs, but fewer than `processes`."""
    gpus = gpu_count()
    if 0 < gpus < processes:
        raise UserError(
            f"{processes} processes need {processes} GPUs, but this machine shows {gpus}: "
            f"use --nproc {gpus}, or CUDA_VISIBLE_DEVICES= to train on the CPU"
        )


def set_threads(ranks: Ranks) -> None:
    """Share the cores among the node's ranks, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(max(1, int(os.environ["OMP_NUM_THREADS"])))
        return
    cores = len(usable_cores())
    torch.set_num_threads(max(1, cores // ranks.local_world_size))


def gpu_uuids(ranks: Ranks, strategy: str) -> list[str]:
    """Return the UUIDs of the GPUs that this node's ranks use, by local rank; empty without GPUs."""
    if not torch.cuda.is_available():
        return []
    visible = torch.cuda.device_count()
    shown = visible if strategy == "dp" else min(ranks.local_world_size, visible)
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(shown)]


def forget_peak_memory(world: World) -> None:
    """Begin to count anew: building a divided model takes more for a moment than training it."""
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)


def peak_memory_megabytes(world: World) -> float:
    """Return the most memory that this rank has held: of the GPU, as PyTorch reserves it, else of the host."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_reserved(world.device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def describe(world: World) -> dict[str, str]:
    """Return what the run computes with, as tags."""
    facts = {
        "rankzero.torch": torch.__version__,
        "rankzero.world_size": str(world.size),
        "rankzero.device": world.device.type,
    }
    if world.device.type != "cuda":
        return facts
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        **facts,
        "rankzero.gpu": ", ".join(sorted(set(names))),
        "rankzero.cuda": str(torch.version.cuda),
        "rankzero.nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "rankzero.driver": driver_version(),
    }


def driver_version() -> str:
    """Return the NVIDIA driver's version; unknown where it does not say."""
    try:  # without NVML: the training process never talks to it
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"

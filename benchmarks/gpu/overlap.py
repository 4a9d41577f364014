"""Show whether copies to the GPU overlap with computing, and how long the GPU waits.

    benchmarks/gpu/run_all.sh starts it: overlap.py OUT

Two ways take turns: copies by way of a stage on the GPU, as the loop makes them, and copies on the
stream of the kernels. Each profiles 30 steps of the training loop itself, and times others without
the profiler. Writes OUT/overlap.json, and traces for chrome://tracing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import machine, ratios
from models import ResNet18
from pieces import device
from torch.utils.data import TensorDataset

from rankzero import config
from rankzero.ranks import Ranks
from rankzero.training.build import build
from rankzero.training.data import device_copy
from rankzero.training.distributed.world import World
from rankzero.training.step import train_step

Spans = Sequence[tuple[float, float]]
STEPS, ROUNDS = 30, 3


class FromHost(ResNet18):
    """With more data than a run keeps on the GPU: each batch is copied from the host."""

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        train, val = super().data()
        many = [torch.cat([column] * 6) for column in train.tensors]
        return TensorDataset(*many), val


class Narrow(FromHost):
    """With a quarter of the channels: a step is shorter, and a batch is as large."""

    width: int = 16


def merged(spans: Spans) -> list[tuple[float, float]]:
    """Return the union of spans, sorted."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in merged(spans))


def measure(experiment: FromHost, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the readings of both ways, which take turns in one process."""
    given = config.override(experiment, {"train.steps": 10000, "train.precision": "bf16"})
    job, state = build(given, World(Ranks(), torch.device("cuda", 0)))
    found: dict[str, dict[str, list[float]]] = {"staged": {}, "direct": {}}
    for turn in range(2 * ROUNDS):
        way = ("staged", "direct")[(turn + 1) // 2 % 2]
        least = device_copy.STAGED_BYTES if way == "staged" else sys.maxsize
        with mock.patch.object(device_copy, "STAGED_BYTES", least):
            batches = job.train_loader.train_batches(
                job.batch_order, 0, state.step, job.total_steps
            )

            def steps(batches: Iterator[Any] = batches) -> float:
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(STEPS):
                    train_step(job, state, batches)
                    state.step += 1
                torch.cuda.synchronize()
                return STEPS / (time.perf_counter() - began)

            steps()
            readings = {
                "steps/s": steps(),
                **profiled(steps, folder / f"overlap_{way}_{experiment.width}.json"),
            }
            readings["GPU's memory, most MB"] = torch.cuda.max_memory_allocated() / 1e6
            torch.cuda.reset_peak_memory_stats()
        for name, value in readings.items():
            found[way].setdefault(name, []).append(value)
    return found


def profiled(steps: Callable[[], object], trace: Path) -> dict[str, float]:
    """Return how much of the copies overlaps with kernels, and how long no kernel runs."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        steps()
    profile.export_chrome_trace(str(trace))
    copies, kernels = [], []
    for event in json.loads(trace.read_text())["traceEvents"]:
        span = (event.get("ts", 0.0), event.get("ts", 0.0) + event.get("dur", 0.0))
        if event.get("cat") == "kernel":
            kernels.append(span)
        elif event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]:
            copies.append(span)
    both = length(copies) + length(kernels) - length([*copies, *kernels])
    whole = max(end for _, end in kernels) - min(begin for begin, _ in kernels)
    return {
        "copied during kernels": both / length(copies),
        "GPU without a kernel": 1 - length(kernels) / whole,
        "copies over the whole": length(copies) / whole,
    }


def main() -> int:
    """Return 1 without a GPU, which has nothing to show."""
    if not torch.cuda.is_available():
        print("no GPU: nothing to see")
        return 1
    out, found = Path(sys.argv[1]), dict[str, Any]()
    for experiment in (FromHost(), Narrow()):
        readings = measure(experiment, out)
        gain = [readings[way]["steps/s"] for way in ("staged", "direct")]
        name = f"ResNet-18, width {experiment.width}"
        found[name] = {"staged over direct": ratios(*gain), **readings}
        print(name, json.dumps(found[name]), flush=True)
    found = {"machine": machine() | device(), **found}
    (out / "overlap.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

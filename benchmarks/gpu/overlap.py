"""Show whether copies to the GPU overlap with computing, and how long the GPU waits.

    benchmarks/gpu/run_all.sh starts it: overlap.py OUT

Profiles 30 steps of the training loop itself. Writes OUT/overlap.json, and OUT/overlap_trace.json
for chrome://tracing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import machine
from models import ResNet18
from pieces import device
from torch.utils.data import TensorDataset

from rankzero import config
from rankzero.ranks import Ranks
from rankzero.training.build import build
from rankzero.training.distributed.world import World
from rankzero.training.step import train_step

Spans = Sequence[tuple[float, float]]
STEPS = 30


class FromHost(ResNet18):
    """With more data than a run keeps on the GPU: each batch is copied from the host."""

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        train, val = super().data()
        many = [torch.cat([column] * 6) for column in train.tensors]
        return TensorDataset(*many), val


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


def main() -> int:
    """Return 1 without a GPU, which has nothing to show."""
    if not torch.cuda.is_available():
        print("no GPU: nothing to see")
        return 1
    out, place = Path(sys.argv[1]), torch.device("cuda", 0)
    given = config.override(FromHost(), {"train.steps": 1000, "train.precision": "bf16"})
    job, state = build(given, World(Ranks(), place))
    batches = job.train_loader.train_batches(job.batch_order, 0, 0, job.total_steps)

    def steps() -> None:
        for _ in range(STEPS):
            train_step(job, state, batches)
            state.step += 1
        torch.cuda.synchronize()

    steps()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        steps()
    trace = out / "overlap_trace.json"
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
    found = {
        "machine": machine() | device(),
        "copied during kernels": both / length(copies) if copies else None,
        "GPU without a kernel": 1 - length(kernels) / whole,
        "microseconds": {"copies": length(copies), "kernels": length(kernels), "whole": whole},
    }
    (out / "overlap.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

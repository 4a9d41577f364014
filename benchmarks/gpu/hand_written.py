"""A hand-written training loop that logs nothing, with its data on the device.

    hand_written.py Gpt bf16 0        # workload, precision, compile

For each number of steps on its input it trains so many, and prints steps per second. So it can
take turns with other commands, and compiles only once.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

import models
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def trainer(name: str, precision: str, compiles: bool) -> Callable[[int], float]:
    """Return a function that trains some steps and returns the seconds of all but a fifth."""
    device, experiment = DEVICE, getattr(models, name)()
    columns = [column.to(device) for column in experiment.data()[0].tensors]
    model = experiment.model().to(device)
    optimizer = experiment.optimizer(model)
    computed = torch.compile(model) if compiles else model
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    size, count = experiment.train.batch_size, len(columns[0])
    dtype = DTYPES.get(precision)
    autocast = torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()

    def train(steps: int) -> float:
        began = 0.0
        for step in range(steps):
            if step == steps // 5:
                synchronize(device)
                began = time.perf_counter()
            if step * size % count == 0:
                order = torch.randperm(count, device=device)
            chosen = order[step * size % count :][:size]
            batch = tuple(column.index_select(0, chosen) for column in columns)
            with autocast:
                loss = experiment.measure(computed, batch)["loss"]
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        return time.perf_counter() - began

    return train


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    torch.set_float32_matmul_precision("highest" if sys.argv[2] == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = sys.argv[2] != "fp32"
    torch.manual_seed(0)
    train = trainer(sys.argv[1], sys.argv[2], sys.argv[3] == "1")
    for line in sys.stdin:
        steps = int(line)
        print((steps - steps // 5) / train(steps), flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the other commands need the memory


if __name__ == "__main__":
    main()

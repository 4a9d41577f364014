"""Train a workload in a hand-written loop that logs nothing, with its data on the device.

python hand_written.py Gpt bf16 0 200 out.json        # workload, precision, compile, steps, result
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

import models
import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def loop(name: str, precision: str, compiles: bool, steps: int) -> tuple[float, float]:
    """Train. Return the steps per second of all steps but the first fifth, and the last loss."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    experiment = getattr(models, name)()
    torch.manual_seed(0)
    columns = [column.to(device) for column in experiment.data()[0].tensors]
    model = experiment.model().to(device)
    optimizer = experiment.optimizer(model)
    computed = torch.compile(model) if compiles else model
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    size, count = experiment.train.batch_size, len(columns[0])
    loss, began = torch.tensor(0.0), 0.0
    for step in range(steps):
        if step == steps // 5:
            synchronize(device)
            began = time.perf_counter()
        if step * size % count == 0:
            order = torch.randperm(count, device=device)
        chosen = order[step * size % count :][:size]
        batch = tuple(column.index_select(0, chosen) for column in columns)
        autocast = (
            torch.autocast(device.type, DTYPES[precision])
            if precision in DTYPES
            else contextlib.nullcontext()
        )
        with autocast:
            loss = experiment.measure(computed, batch)["loss"]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    synchronize(device)
    return (steps - steps // 5) / (time.perf_counter() - began), loss.item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    rate, last = loop(sys.argv[1], sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]))
    Path(sys.argv[5]).write_text(json.dumps({"steps_per_second": rate, "loss": last}))

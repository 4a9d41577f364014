"""Measure how long a 100 MB checkpoint blocks training, against a blocking `torch.save`.

    python benchmarks/checkpoint_blocking.py [--rounds 9]

Takes about 1 minute. Both save the same state. Training steps run in between, so the thread that
writes competes with them, as in a real run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from harness import is_whole, line, ratios, save
from torch import Tensor, nn, optim

from rankzero.experiment import Goal
from rankzero.training.checkpoints.writer import Checkpoints

WANTED = 0.2
WIDTH = 2044  # three such layers and their momenta: 100 MB
STEPS_BETWEEN = 12


def training() -> tuple[nn.Module, optim.Optimizer]:
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers)
    return model, optim.SGD(model.parameters(), 1e-3, momentum=0.9)


def steps(model: nn.Module, optimizer: optim.Optimizer, batch: Tensor) -> float:
    """Train some steps. Return the seconds of one step."""
    start = time.perf_counter()
    for _ in range(STEPS_BETWEEN):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - start) / STEPS_BETWEEN


def timed(action: object) -> float:
    start = time.perf_counter()
    action()  # type: ignore[operator]
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, optimizer = training()
    batch = torch.randn(64, WIDTH)
    steps(model, optimizer, batch)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    ours, theirs, quiet, busy = [], [], [], []
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        checkpoints = Checkpoints(Path(temporary), 1, Goal())
        momenta = [one["momentum_buffer"] for one in optimizer.state.values()]
        checkpoints.prepare(lambda: [*model.parameters(), *momenta])
        steps(model, optimizer, batch)
        for number in range(options.rounds + 1):
            ours.append(timed(lambda step=number: checkpoints.save(state, step + 1, {}, False)))
            busy.append(steps(model, optimizer, batch))
            checkpoints.finish()
            theirs.append(timed(lambda: torch.save(state, Path(temporary) / "plain.pt")))
            quiet.append(steps(model, optimizer, batch))
        checkpoints.close()
        size = (Path(temporary) / "plain.pt").stat().st_size
    ratio, slower = ratios(ours[1:], theirs[1:]), ratios(busy[1:], quiet[1:])
    print(
        f"{size / 1e6:.0f} MB; first checkpoint {ours[0] * 1e3:.0f} ms, later "
        f"{statistics.median(ours[1:]) * 1e3:.1f} ms; "
        f"torch.save {statistics.median(theirs) * 1e3:.0f} ms"
    )
    print(line("training blocked", ratio, f"<= {WANTED}"))
    print(line("a step while the thread writes", slower, "near 1"))
    if is_whole(parser, options):
        save(
            "checkpoint_blocking",
            bytes=size,
            first_seconds=ours[0],
            first_ratio=ours[0] / statistics.median(theirs),
            seconds={"rankzero": ours[1:], "torch.save": theirs[1:]},
            ratio=ratio,
            step_slowdown=slower,
            wanted=WANTED,
        )


if __name__ == "__main__":
    main()

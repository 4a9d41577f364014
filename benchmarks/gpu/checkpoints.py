"""Measure how long a checkpoint holds up the training on a GPU, and how long it takes to load.

    benchmarks/gpu/run_all.sh starts it: checkpoints.py OUT [--rounds 5] [--model GptMedium]

The time is that of a save and one step, until the GPU has done the step, less that of such a step
alone. `torch.save` writes the same state. Then steps beside the thread that writes are timed. Last,
a resume's read of the newest checkpoint takes turns with `torch.load` of the same state.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch
from hand_written import synchronize
from harness import machine, ratios
from models import Gpt
from pieces import device
from torch import Tensor, nn, optim

from rankzero.experiment import Goal
from rankzero.ranks import Ranks
from rankzero.training.checkpoints import restore
from rankzero.training.checkpoints.writer import Checkpoints
from rankzero.training.distributed.world import World

STEPS_BESIDE = 10
PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclasses.dataclass(frozen=True)
class Training:
    """A model, its optimizer, and one batch."""

    experiment: Gpt
    model: nn.Module
    optimizer: optim.Optimizer
    batch: tuple[Tensor]

    def step(self) -> None:
        with torch.autocast(PLACE.type, torch.bfloat16):
            self.experiment.measure(self.model, self.batch)["loss"].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[Tensor]:
        """Return what a checkpoint has, as the training loop names it beforehand."""
        states = self.optimizer.state.values()
        kept = [value for each in states for value in each.values() if isinstance(value, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *kept]


def begin(experiment: Gpt) -> Training:
    model = experiment.model().to(PLACE)
    (text,) = (column.to(PLACE) for column in experiment.data()[1].tensors)
    training = Training(experiment, model, experiment.optimizer(model), (text,))
    for _ in range(10):
        training.step()
    return training


def timed(*actions: Callable[[], object]) -> float:
    synchronize(PLACE)
    began = time.perf_counter()
    for action in actions:
        action()
    synchronize(PLACE)
    return time.perf_counter() - began


def measure(training: Training, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each save, by either way, and of the steps."""
    step, plain, checkpoints = training.step, folder / "plain.pt", Checkpoints(folder, 1, Goal())
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    names = ("quiet", "save", "beside", "torch", "load", "torch.load")
    figures: dict[str, list[float]] = {name: [] for name in names}
    checkpoints.prepare(training.tensors)
    figures["beside the preparation"] = [timed(step) for _ in range(40)]
    for number in range(1, rounds + 2):
        quiet = statistics.median(timed(step) for _ in range(5))
        figures["quiet"].append(quiet)
        save = timed(functools.partial(checkpoints.save, state, number, {}, False), step)
        figures["save"].append(save - quiet)
        beside = [timed(step) for _ in range(STEPS_BESIDE)]
        figures["beside"].append(statistics.median(beside) / quiet)
        checkpoints.finish()
        figures["torch"].append(timed(lambda: torch.save(state, plain), step) - quiet)
    checkpoints.close()
    read = functools.partial(restore.read_newest, folder / "checkpoints", World(Ranks(), PLACE))
    for _ in range(rounds):
        figures["torch.load"].append(timed(lambda: torch.load(plain, "cpu", weights_only=True)))
        figures["load"].append(timed(lambda: read(print)))
    return figures


def summary(figures: dict[str, list[float]]) -> dict[str, Any]:
    """Return the ratios to torch.save, and how much slower the steps beside a save are."""
    usual, quiet = statistics.median(figures["torch"]), statistics.median(figures["quiet"])
    later = [seconds / usual for seconds in figures["save"][1:]]
    return {
        "first": figures["save"][0] / usual,
        "later": {"median": statistics.median(later), "least": min(later), "most": max(later)},
        "step beside the writing": statistics.median(figures["beside"]),
        "load over torch.load": ratios(figures["load"], figures["torch.load"]),
        "step beside the preparation": statistics.median(figures["beside the preparation"]) / quiet,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=("Gpt", "GptMedium"), default="Gpt")
    options = parser.parse_args()
    training = begin(getattr(models, options.model)())
    with tempfile.TemporaryDirectory(dir=options.out) as temporary:
        figures = measure(training, Path(temporary), options.rounds)
        size = (Path(temporary) / "plain.pt").stat().st_size
    found = {"machine": machine() | device(), "bytes": size, **summary(figures)}
    name = "checkpoints" if options.model == "Gpt" else f"checkpoints_{options.model}"
    (options.out / f"{name}.json").write_text(
        json.dumps(found | {"seconds": figures}, indent=1) + "\n"
    )
    print(json.dumps({key: value for key, value in found.items() if key != "machine"}))


if __name__ == "__main__":
    main()

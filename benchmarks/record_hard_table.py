"""Record an exhaustive table of a small task: batch size x its settings x learning rate x seed.

    python benchmarks/record_hard_table.py rows|letters|chapters|images|knobs

`replay.py --table NAME` runs searchers on the table.

A plain PyTorch loop trains each configuration to its end, on one thread. Its clock is the thread's
processor time, so other work on the machine changes little. A row has the validation loss after
every epoch. The seconds of an epoch are the median of all rows with that batch size and settings.

It continues an earlier recording: the times stay, and a new target gets the seeds that it lacks.
All configurations have the seeds of a search, and those that are not hopeless also the others:
confirmations and held-out seeds need them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from hard_tasks import TASKS, Task
from harness import RESULTS, save
from torch.utils.data import default_collate

from rankzero import Choice
from rankzero.config import override

SEARCH_SEEDS, OTHER_SEEDS = range(2), range(2, 22)
HOPELESS = 3.0  # times the best known time to the target
LR_EXPONENT = 0.5  # of AdamW
FACTORS = [32 ** (2 * number / 9 - 1) for number in range(10)]
BATCH_SIZES = (16, 32, 64, 128, 256, 512)
Cell = tuple[int, tuple[Any, ...], float]
"""Batch size, the task's own settings, factor of the scaled learning rate."""


def train(task: Task, seed: int, data: tuple[Any, Any]) -> tuple[float, list[float]]:
    """Return the median seconds of an epoch, and the validation loss after each."""
    torch.manual_seed(seed)
    model, batch_size = task.model(), task.train.batch_size
    optimizer, order = task.optimizer(model), torch.Generator().manual_seed(seed)
    samples, held_out = data
    batch_of = functools.partial(batch, task)
    seconds, losses = [], []
    for _ in range(task.train.epochs or 1):
        began = time.thread_time()
        model.train()
        drawn = torch.randperm(len(samples), generator=order)
        for chosen in drawn[: len(drawn) // batch_size * batch_size].view(-1, batch_size):
            loss = task.measure(model, batch_of(samples, chosen.tolist()))["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds.append(time.thread_time() - began)
        model.eval()
        with torch.no_grad():
            value = task.measure(model, batch_of(held_out, range(len(held_out))))["loss"].item()
        losses.append(round(value, 4) if math.isfinite(value) else 1e9)
    return statistics.median(seconds), losses


def batch(task: Task, samples: Any, chosen: Any) -> Any:
    """Return a batch, as fast as the data allow: tensors are indexed, others collated."""
    if hasattr(samples, "tensors"):
        return [one[list(chosen)] for one in samples.tensors]
    collate: Callable[..., Any] = getattr(task, "collate", default_collate)
    return collate([samples[one] for one in chosen])


def epochs_to(target: float, losses: list[float]) -> float:
    return next((epoch for epoch, loss in enumerate(losses, 1) if loss <= target), math.inf)


def earlier(name: str) -> tuple[list[Any], dict[tuple[int, tuple[Any, ...]], list[float]]]:
    """Return the rows of an earlier recording, perhaps for another target, and the seconds."""
    path = RESULTS / f"table_{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {"rows": [], "epoch_seconds": []}
    took = {(batch, tuple(own)): [seconds] for batch, own, seconds in found["epoch_seconds"]}
    return found["rows"], took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("task", choices=TASKS)
    torch.set_num_threads(1)
    record_table(parser.parse_args().task)


def record_table(name: str) -> None:
    """Record or complete the table of this task."""
    own = TASKS[name]()
    ranges = type(own).search.items()
    search = {key: one.options for key, one in ranges if isinstance(one, Choice)}
    data, target = own.data(), own.goal.target or 0.0
    rows, took = earlier(name)
    known_seconds = bool(took)
    losses_of = {
        (batch, tuple(values), FACTORS[at], seed): losses
        for batch, values, at, seed, losses in rows
    }

    def record(cell: Cell, seed: int) -> float:
        """Record one run; return its seconds to the target, or infinity."""
        batch_size, values, factor = cell
        if (*cell, seed) in losses_of:
            return epochs_to(target, losses_of[*cell, seed]) * took[batch_size, values][0]
        lr = own.lr * factor * (batch_size / own.train.batch_size) ** LR_EXPONENT
        settings = dict(zip(search, values, strict=True))
        task = override(own, {"train.batch_size": batch_size, "lr": lr, **settings})
        seconds, losses = train(task, seed, data)
        if not known_seconds:
            took.setdefault((batch_size, values), []).append(seconds)
        rows.append([batch_size, values, FACTORS.index(factor), seed, losses])
        return seconds * epochs_to(target, losses)

    cells = list(itertools.product(BATCH_SIZES, itertools.product(*search.values()), FACTORS))
    random.Random(0).shuffle(cells)
    known = {cell: min(record(cell, seed) for seed in SEARCH_SEEDS) for cell in cells}
    best = min(known.values())
    near = [cell for cell in cells if known[cell] <= HOPELESS * best]
    print(f"{len(cells)} cells, {len(near)} near the best of {best:.2f} s", flush=True)
    for cell, seed in itertools.product(near, OTHER_SEEDS):
        record(cell, seed)
    save(
        f"table_{name}",
        task=name,
        target=target,
        lr_exponent=LR_EXPONENT,
        batch_sizes=BATCH_SIZES,
        settings=search,
        factors=FACTORS,
        samples=len(data[0]),
        epoch_seconds=[
            [*cell, round(statistics.median(found), 5)] for cell, found in sorted(took.items())
        ],
        rows=rows,
    )


if __name__ == "__main__":
    main()

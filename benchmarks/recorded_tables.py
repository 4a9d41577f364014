"""The recorded tables: each configuration's learning curve and its time, by seed."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import statistics
from collections.abc import Iterator
from typing import Any

from hard_tasks import TASKS
from harness import RESULTS

from rankzero import Experiment, Goal, Train
from rankzero.config import flatten
from rankzero.events import Evaluated, Event, RunStarted, StepsLogged
from rankzero.tuning.learning_curve import LearningCurve
from rankzero.tuning.space import PRECISION

SEARCH_SEEDS, CONFIRM_SEEDS, HELD_OUT = (0, 1), (2, 3, 4, 5, 6, 7), range(8, 16)
MORE_SEARCH_SEEDS = range(16, 22)  # of the cells of a hard table that are not hopeless
METRIC = "val/loss"
NEVER = 1e9
_NOISE = 0.03  # relative, of a run's speed, where the table has one time for all seeds
Key = tuple[int, tuple[Any, ...], float]
"""Batch size, the other settings' values, factor of the scaled learning rate."""


class NoisyDigits(Experiment):
    """The settings of `noisy_digits.py`."""

    train: Train = Train(batch_size=32, epochs=12)
    goal: Goal = Goal(METRIC, "min", target=0.3)
    lr: float = 1e-3


@dataclasses.dataclass(frozen=True)
class Row:
    """One training: seconds and validation loss after each epoch."""

    points: list[tuple[float, float]]
    samples_per_second: float


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """The recorded runs by configuration and seed."""

    own: Experiment
    """The configuration that a user begins with."""
    settings: dict[str, tuple[Any, ...]]
    """The other settings and their values: `train.precision`, or the experiment's own."""
    rows: dict[tuple[Key, int], Row]
    batch_sizes: tuple[int, ...]
    factors: tuple[float, ...]
    exponent: float
    samples: int
    fixed_seconds: float
    """Seconds that a run costs in addition to its steps."""
    missed: float = math.inf
    """What a run counts that misses the target, in times its length. A user would train again."""

    @functools.cached_property
    def keys(self) -> list[Key]:
        return sorted({key for key, _ in self.rows})

    @property
    def has_precision(self) -> bool:
        return PRECISION in self.settings

    @property
    def own_values(self) -> tuple[Any, ...]:
        """Return the values of the other settings that a user begins with."""
        return tuple(flatten(self.own)[name] for name in self.settings)

    @property
    def target(self) -> float:
        return self.own.goal.target or 0.0

    def row(self, key: Key, seed: int) -> Row:
        """Return a run. A hopeless configuration has two seeds only."""
        return self.rows.get((key, seed)) or self.rows[key, SEARCH_SEEDS[seed % 2]]

    def search_seed(self, number: int, trial: object, again: int = 0) -> int:
        """Return the seed of a trial in this replay: its luck. `again`: its training, from 0.

        In a hard table, another trial of the same cell has another one. A small change of the
        learning rate is a new draw, too.
        """
        if self.has_precision:
            return SEARCH_SEEDS[(number + again) % 2]
        seeds: list[int] = [*SEARCH_SEEDS, *MORE_SEARCH_SEEDS]
        # The others follow in a row.
        first = seeds.index(random.Random(f"{number} {trial}").choice(seeds))
        return seeds[(first + again) % len(seeds)]

    def confirm_seeds(self, number: int) -> list[int]:
        """Return the seeds of this replay's confirmations. Else all replays share one luck."""
        return random.Random(number).sample(CONFIRM_SEEDS, len(CONFIRM_SEEDS))

    def seconds_to_target(self, key: Key, seed: int) -> float:
        """Return the training seconds to the target; if it is missed, `missed` or `NEVER`."""
        curve, row = LearningCurve(self.own.goal), self.row(key, seed)
        for event in self.journal(row, key[0]):
            curve(event)
        found = curve.seconds_to(self.target)
        return min(NEVER, self.missed * row.points[-1][0]) if found is None else found

    def cost(self, key: Key, seed: int, *, to_target: bool) -> float:
        """Return a run's cost in seconds: to its end, or to the first evaluation at the target."""
        points = self.row(key, seed).points
        reached = (seconds for seconds, value in points if self.own.goal.reached(value))
        return self.fixed_seconds + (next(reached, points[-1][0]) if to_target else points[-1][0])

    @functools.cached_property
    def truths(self) -> dict[Key, float]:
        """Return the geometric mean of each configuration's time on the held-out seeds."""
        seeds: dict[Key, list[int]] = {key: [] for key in self.keys}
        for key, seed in self.rows:
            if seed in HELD_OUT:
                seeds[key].append(seed)
        return {
            key: statistics.geometric_mean(
                self.seconds_to_target(key, seed) for seed in found or SEARCH_SEEDS
            )
            for key, found in seeds.items()
        }

    def speed(self, key: Key, seed: int) -> float:
        return self.row(key, seed).samples_per_second

    def journal(self, row: Row, batch_size: int) -> Iterator[Event]:
        """Yield the events of a recorded run, as in its journal."""
        before, per_epoch = 0.0, self.samples // batch_size
        yield RunStarted(0.0, {}, {}, 1, total_steps=per_epoch * len(row.points))
        for epoch, (seconds, value) in enumerate(row.points, start=1):
            yield StepsLogged(
                [epoch * per_epoch],
                [seconds],
                {"throughput/step_seconds": [(seconds - before) / per_epoch]},
            )
            yield Evaluated(seconds, epoch * per_epoch, {METRIC: value}, best=True)
            before = seconds


def digits(longer: float = 1.0) -> Table:
    """Return the table of `record_table.py`, with training that takes `longer` times as long."""
    found = json.loads((RESULTS / "digits_table.json").read_text())
    return Table(
        NoisyDigits(),
        {PRECISION: tuple(found["precisions"])},
        {
            ((row["batch_size"], (row["precision"],), row["factor"]), row["seed"]): Row(
                [(longer * seconds, value) for seconds, value in row["points"]],
                row["samples_per_second"] / longer,
            )
            for row in found["rows"]
        },
        tuple(found["batch_sizes"]),
        tuple(found["factors"]),
        found["lr_exponent"],
        1437,
        statistics.median(row["wall_seconds"] - row["points"][-1][0] for row in found["rows"]),
    )


def hard(name: str, best_seconds: float, fixed_seconds: float = 1.0) -> Table:
    """Return a table of `record_hard_table.py`. Its fastest run takes `best_seconds`."""
    found = json.loads((RESULTS / f"table_{name}.json").read_text())
    seconds = {(batch, tuple(own)): each for batch, own, each in found["epoch_seconds"]}
    rows = {}
    for batch, own, factor, seed, losses in found["rows"]:
        values = tuple(own)
        drawn = random.Random(f"{batch} {' '.join(map(str, own))} {factor} {seed}")
        each = seconds[batch, values] * drawn.lognormvariate(0.0, _NOISE)
        points = [(epoch * each, loss) for epoch, loss in enumerate(losses, start=1)]
        key = batch, values, found["factors"][factor]
        rows[key, seed] = Row(points, found["samples"] / each)
    table = Table(
        TASKS[name](),
        {name: tuple(values) for name, values in found["settings"].items()},
        rows,
        tuple(found["batch_sizes"]),
        tuple(found["factors"]),
        found["lr_exponent"],
        found["samples"],
        fixed_seconds,
        missed=3.0,
    )
    longer = best_seconds / min(table.truths.values())
    scaled = {
        one: Row([(longer * t, value) for t, value in row.points], row.samples_per_second / longer)
        for one, row in rows.items()
    }
    return dataclasses.replace(table, rows=scaled)

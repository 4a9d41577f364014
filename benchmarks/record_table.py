"""Record one exhaustive table: batch size x precision x learning rate x seed, each to its end.

    python benchmarks/record_table.py [--resume]

Takes about 30 minutes. `replay.py` runs searchers on the table.

With --resume, the script keeps the rows of an earlier recording. It drops rows that another
process on the machine disturbed: those more than 10 % slower than the upper quartile of their
batch size and precision.

The experiment is `noisy_digits.py`, with two gloo processes and twelve epochs. Each run goes
through the search's own launcher. A row has the run's curve (training seconds and validation loss
after every epoch), its samples/s, and the elapsed time of the run.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import HERE, RESULTS, save

from rankzero.config import override
from rankzero.launch.agent import Topology
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.tuning.space import BATCH_INDEX, FACTOR, PRECISION, Space, make_space
from rankzero.tuning.trials import describe
from rankzero.tuning.trials.follower import run_alone
from rankzero.tuning.trials.host_process import LocalHost
from rankzero.tuning.trials.launcher import TrainLauncher

EXPERIMENT = str(HERE / "noisy_digits.py")
BATCH_SIZES, PRECISIONS, FACTORS, SEEDS = (
    (32, 64, 128, 256, 512),
    ("fp32", "bf16"),
    (0.5, 1.0, 2.0, 4.0),
    range(10),
)
# More seeds near the sweet spot, to know the true times there better.
CLOSE, MORE_SEEDS = (64, 128, 256), range(10, 16)


def record(
    space: Space, launcher: TrainLauncher, batch_size: int, precision: str, factor: float, seed: int
) -> Any:
    """Train one configuration to its end. Return its row, with the curve."""
    drawn = {BATCH_INDEX: space.batch_sizes.index(batch_size), PRECISION: precision, FACTOR: factor}
    kept = {name: value for name, value in drawn.items() if name in space.parameters()}
    experiment = override(space.experiment(kept), {"train.seed": seed})
    began = time.perf_counter()
    found = run_alone(launcher, experiment, f"{batch_size}-{precision}-{factor}-{seed}")
    assert found.state == "COMPLETE", found.reason
    return {
        "batch_size": batch_size,
        "precision": precision,
        "factor": factor,
        "seed": seed,
        "points": [
            [round(point.seconds, 4), round(point.value, 5)] for point in found.curve.points
        ],
        "samples_per_second": found.curve.samples_per_second
        or found.curve.step * batch_size / found.curve.seconds,
        "wall_seconds": round(time.perf_counter() - began, 3),
    }


def recorded() -> list[Any]:
    """Return the undisturbed rows of an earlier recording."""
    path = RESULTS / "digits_table.json"
    if "--resume" not in sys.argv or not path.exists():
        return []
    rows = json.loads(path.read_text())["rows"]
    speeds: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        speeds.setdefault((row["batch_size"], row["precision"]), []).append(
            row["samples_per_second"]
        )
    usual = {cell: statistics.quantiles(found, n=4)[2] for cell, found in speeds.items()}
    return [
        row
        for row in rows
        if row["samples_per_second"] >= 0.9 * usual[row["batch_size"], row["precision"]]
    ]


def main() -> None:
    cells = [
        *itertools.product(BATCH_SIZES, PRECISIONS, FACTORS, SEEDS),
        *itertools.product(CLOSE, PRECISIONS, FACTORS, MORE_SEEDS),
    ]
    # In random order, so that a drift of the machine's speed affects all cells equally.
    random.Random(0).shuffle(cells)
    with tempfile.TemporaryDirectory() as temporary:
        study = RunFolder.create(
            Path(temporary),
            Identity("table", "table", "table", "sqlite:///none", experiment_file=EXPERIMENT),
        )
        host = LocalHost(())
        described = host.describe(describe.Question(EXPERIMENT, {}, 2))
        space = make_space(
            describe.mirrored(described), 2, described.lr_exponent, PRECISIONS, described.samples
        )
        launcher = TrainLauncher(host, study, Topology(2), {})
        rows = recorded()
        done = {(row["batch_size"], row["precision"], row["factor"], row["seed"]) for row in rows}
        cells = [cell for cell in cells if cell not in done]
        for number, cell in enumerate(cells):
            rows.append(record(space, launcher, *cell))
            print(f"{number + 1}/{len(cells)} {json.dumps(rows[-1])[:110]}", flush=True)
        host.close()
    save(
        "digits_table",
        experiment="noisy_digits",
        lr_exponent=described.lr_exponent,
        batch_sizes=BATCH_SIZES,
        precisions=PRECISIONS,
        factors=FACTORS,
        rows=rows,
    )


if __name__ == "__main__":
    main()

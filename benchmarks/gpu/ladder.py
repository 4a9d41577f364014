"""Compare `rankzero train` with a bare loop on each rung of precision and compile.

    benchmarks/gpu/run_all.sh starts it: ladder.py OUT [--only Gpt-bf16 …] [--pairs 2]

Real commands take turns: bare, tracked, tracked, bare. The bare loops of all rungs start at once
and compile side by side. Then only one of them, or a tracked run, works at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import interval, machine, rankzero, ratios, run
from pieces import device

from rankzero.events import StepsLogged, SystemSampled
from rankzero.metric_names import SPEED
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all

HERE = Path(__file__).parent
WANTED = 0.99
WARM_UP_STEPS = 20
BUSY, WATTS = (f"system/gpu_0_{name}" for name in ("utilization_percentage", "power_usage_watts"))


@dataclasses.dataclass(frozen=True)
class Rung:
    """A workload in a precision, compiled or not."""

    workload: str
    precision: str
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.workload}-{self.precision}{'-compiled' if self.compiled else ''}"


# Most important first: the machine may be taken away at any time.
RUNGS = (
    Rung("Gpt", "bf16"),
    Rung("ResNet18", "bf16"),
    Rung("Gpt", "bf16", compiled=True),
    Rung("ResNet18", "bf16", compiled=True),
    Rung("Mlp", "fp32"),
    Rung("ResNet18", "tf32"),
    Rung("Gpt", "tf32"),
    Rung("ResNet18", "fp16"),
    Rung("Gpt", "fp16"),
    Rung("ResNet18", "fp32"),
)


class BareLoop:
    """The hand-written loop of a rung, in a process that waits between its turns."""

    def __init__(self, rung: Rung) -> None:
        words = rung.workload, rung.precision, str(int(rung.compiled))
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "hand_written.py"), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask(WARM_UP_STEPS)

    def _ask(self, steps: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()

    def warm(self) -> float:
        """Wait until it has compiled and warmed up. Return its steps per second."""
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def rate(self, steps: int) -> float:
        """Train. Return the steps per second of all but the first fifth."""
        self._ask(steps)
        return self.warm()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def tracked(folder: Path, rung: Rung, steps: int) -> dict[str, float]:
    """Return a tracked run's steps per second, and the medians of what it reports."""
    settings = {
        "train.precision": rung.precision,
        "train.compile": str(rung.compiled).lower(),
        "train.steps": steps,
        "train.eval_every": steps,
        "train.schedule": "constant",
        "train.checkpoints.save_every": 0,
        "train.mlflow.log_model": "false",
    }
    label = f"{rung}-{len(list(folder.glob('mlruns/runs/*')))}"
    experiment = f"{HERE / 'models.py'}:{rung.workload}"
    words = rankzero("train", experiment, "--nproc", 1, "--name", label)
    run([*words, *(f"{key}={value}" for key, value in settings.items())], os.environ, folder)
    found = RunFolder(folder / "mlruns" / "runs" / label)
    windows: list[list[float]] = []
    reported: dict[str, list[float]] = {}
    for event in (*read_all(found.events), *read_all(found.system(0))):
        if isinstance(event, StepsLogged) and "train/loss" in event.metrics:
            windows.append(list(event.times))
        values = event.metrics if isinstance(event, StepsLogged) else {}
        # The start takes longer than the training here, and the GPU is idle in it.
        if isinstance(event, SystemSampled) and event.metrics.get(BUSY, 0.0) > 90:
            values = {key: [value] for key, value in event.metrics.items()}
        for key, column in values.items():
            reported.setdefault(key, []).extend(column)
    kept = {
        key: statistics.median(column)
        for key, column in reported.items()
        if key.startswith("throughput/") or "gpu_0_" in key
    }
    watts = {"busy_watts": kept[WATTS]} if WATTS in kept else {}
    return {"steps_per_second": rate(windows), **watts, **kept}


def rate(windows: list[list[float]]) -> float:
    """Return steps per second from windows of host times, without the first fifth of the windows.

    Within a window the host runs ahead of the GPU. It waits for it between two windows, so only the
    first step's time of each is good.
    """
    first = max(1, len(windows) // 5)
    steps = sum(map(len, windows[first:-1]))
    return steps / (windows[-1][0] - windows[first][0])


def measure(folder: Path, rung: Rung, bare: BareLoop, seconds: float, pairs: int) -> dict[str, Any]:
    """Return the readings of one rung, and print a line."""
    steps = max(30, round(bare.rate(2 * WARM_UP_STEPS) * seconds))
    rates, runs = list[float](), list[dict[str, float]]()
    for pair in range(pairs):
        for turn in ("bare", "tracked") if pair % 2 == 0 else ("tracked", "bare"):
            if turn == "bare":
                rates.append(bare.rate(steps))
            else:
                runs.append(tracked(folder, rung, steps))
    ours = [one["steps_per_second"] for one in runs]
    found = {"steps": steps, "bare": rates, "tracked": runs, **ratios(ours, rates)}
    found |= {"interval": interval(ours, rates)}
    if watts := [one["busy_watts"] for one in runs if "busy_watts" in one]:
        found["joules_per_sample"] = statistics.median(watts) / runs[0][SPEED]
    shown = {key: round(value, 3) for key, value in runs[0].items() if key.startswith("throughp")}
    each = " ".join(f"{a / b:.4f}" for a, b in zip(ours, rates, strict=True))
    print(f"{rung}: {found['median']:.4f} of {rates[0]:.2f} steps/s ({each}) {shown}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=tuple(map(str, RUNGS)))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--pairs", type=int, default=2)
    options = parser.parse_args()
    rungs = [rung for rung in RUNGS if options.only is None or str(rung) in options.only]
    found: dict[str, Any] = {"machine": machine() | device(), "wanted": WANTED, "rungs": {}}
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        loops = [BareLoop(rung) for rung in rungs]
        for loop in loops:
            stack.callback(loop.close)
        print("warm:", *(f"{loop.warm():.1f}" for loop in loops), flush=True)
        for rung, loop in zip(rungs, loops, strict=True):
            figures = measure(Path(temporary), rung, loop, options.seconds, options.pairs)
            found["rungs"][str(rung)] = figures
            (options.out / "ladder.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Compare `rankzero train` with a bare loop on each rung of precision and compile.

    benchmarks/gpu/run_all.sh starts it: ladder.py OUT [--only Gpt-bf16 …] [--pairs 2]

Real commands take turns: bare, tracked, tracked, bare. The bare loops of all rungs start at once
and compile side by side. The tracked runs of a rung start while the rung before is measured, and
wait before they load their data. Only one loop has the GPU at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import interval, machine, rankzero, ratios
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
    Rung("MlpGraphs", "fp32"),
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


class TrackedRun:
    """`rankzero train` of a rung, which waits at its gate for its turn."""

    def __init__(self, folder: Path, rung: Rung, number: int, steps: int) -> None:
        settings = {
            "train.precision": rung.precision,
            "train.compile": str(rung.compiled).lower(),
            "train.steps": steps,
            "train.eval_every": steps,
            "train.schedule": "constant",
            "train.checkpoints.save_every": 0,
            "train.mlflow.log_model": "false",
        }
        label = f"{rung}-{number}"
        self._gate = folder / f"gate-{label}"
        self._gate.mkdir()
        self.run = RunFolder(folder / "mlruns" / "runs" / label)
        experiment = f"{HERE / 'models.py'}:{rung.workload}"
        words = rankzero("train", experiment, "--nproc", 1, "--name", label)
        self._process = subprocess.Popen(
            [*words, *(f"{key}={value}" for key, value in settings.items())],
            env={**os.environ, "RANKZERO_GATE": str(self._gate)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_at_gate(self) -> None:
        """Return once the run would load its data. Raises RuntimeError if it has ended."""
        while not (self._gate / "ready").exists():
            if self._process.poll() is not None:
                raise RuntimeError(self._process.communicate()[0][-4000:])
            time.sleep(0.05)

    def finish(self) -> None:
        """Let the run train, and wait for its end. Raises RuntimeError if it failed."""
        self.wait_at_gate()
        (self._gate / "open").touch()
        output, _ = self._process.communicate()
        if self._process.returncode:
            raise RuntimeError(output[-4000:])

    def close(self) -> None:
        """End the run, if `finish` has not."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def readings(found: RunFolder) -> dict[str, float]:
    """Return a run's steps per second, and the medians of what it reports."""
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


class Contest:
    """The loops of one rung: a bare one, and `pairs` tracked runs."""

    def __init__(self, rung: Rung, bare: BareLoop, pairs: int) -> None:
        self.rung, self._bare, self._pairs = rung, bare, pairs
        self._runs: list[TrackedRun] = []
        self.steps = 0

    def start(self, folder: Path, seconds: float) -> None:
        """Start the tracked runs, with as many steps as the bare loop takes in `seconds`."""
        self.steps = max(30, round(self._bare.rate(2 * WARM_UP_STEPS) * seconds))
        for number in range(self._pairs):
            self._runs.append(TrackedRun(folder, self.rung, number, self.steps))

    def measure(self) -> dict[str, Any]:
        """Return the readings, and print a line."""
        for run in self._runs:
            run.wait_at_gate()
        rates, runs = list[float](), list[dict[str, float]]()
        for pair, run in enumerate(self._runs):
            for turn in ("bare", "tracked") if pair % 2 == 0 else ("tracked", "bare"):
                if turn == "bare":
                    rates.append(self._bare.rate(self.steps))
                else:
                    run.finish()
                    runs.append(readings(run.run))
        ours = [one["steps_per_second"] for one in runs]
        found = {"steps": self.steps, "bare": rates, "tracked": runs, **ratios(ours, rates)}
        found |= {"interval": interval(ours, rates)}
        if watts := [one["busy_watts"] for one in runs if "busy_watts" in one]:
            found["joules_per_sample"] = statistics.median(watts) / runs[0][SPEED]
        shown = {key: round(value, 3) for key, value in runs[0].items() if key.startswith("throug")}
        each = " ".join(f"{a / b:.4f}" for a, b in zip(ours, rates, strict=True))
        median = f"{found['median']:.4f}"
        print(f"{self.rung}: {median} of {rates[0]:.2f} steps/s ({each}) {shown}", flush=True)
        return found

    def close(self) -> None:
        self._bare.close()
        for run in self._runs:
            run.close()


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
        contests = [
            Contest(rung, loop, options.pairs) for rung, loop in zip(rungs, loops, strict=True)
        ]
        for contest in contests:
            stack.callback(contest.close)
        print("warm:", *(f"{loop.warm():.1f}" for loop in loops), flush=True)
        contests[0].start(Path(temporary), options.seconds)
        for contest, following in itertools.zip_longest(contests, contests[1:]):
            # A step that is all launches feels what else the host does.
            is_alone = contest.rung.workload.startswith("Mlp")
            if following is not None and not is_alone:
                following.start(Path(temporary), options.seconds)
            found["rungs"][str(contest.rung)] = contest.measure()
            if following is not None and is_alone:
                following.start(Path(temporary), options.seconds)
            (options.out / "ladder.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Compare `rankzero train` with a bare loop on each rung of precision and compile.

    benchmarks/gpu/run_all.sh starts it: ladder.py ResNet18|Gpt OUT [--seconds 8]

Real commands, alternating: bare, tracked, tracked, bare. A first bare run, which does not count,
finds how many steps take `--seconds` and fills the caches of the compiler. Planned: six
minutes a workload.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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
RUNGS = {
    "ResNet18": (("fp32", 0), ("tf32", 0), ("bf16", 0), ("fp16", 0), ("bf16", 1)),
    "Gpt": (("tf32", 0), ("bf16", 0), ("fp16", 0), ("bf16", 1)),
}
WANTED = 0.99


def bare(folder: Path, name: str, rung: tuple[str, int], steps: int) -> float:
    """Return the bare loop's steps per second."""
    out = folder / "bare.json"
    words = [
        sys.executable,
        str(HERE / "hand_written.py"),
        name,
        *map(str, rung),
        str(steps),
        str(out),
    ]
    run(words, os.environ, folder)
    return float(json.loads(out.read_text())["steps_per_second"])


def tracked(folder: Path, name: str, rung: tuple[str, int], steps: int) -> dict[str, float]:
    """Return a tracked run's steps per second, and the means of what it reports."""
    settings = {
        "train.precision": rung[0],
        "train.compile": "true" if rung[1] else "false",
        "train.steps": steps,
        "train.eval_every": steps,
        "train.schedule": "constant",
        "train.checkpoints.save_every": 0,
        "train.mlflow.log_model": "false",
    }
    label = f"{rung[0]}-{rung[1]}-{len(list(folder.glob('mlruns/runs/*')))}"
    words = rankzero("train", f"{HERE / 'models.py'}:{name}", "--nproc", 1, "--name", label)
    run([*words, *(f"{key}={value}" for key, value in settings.items())], os.environ, folder)
    found = RunFolder(folder / "mlruns" / "runs" / label)
    times: list[float] = []
    reported: dict[str, list[float]] = {}
    for event in (*read_all(found.events), *read_all(found.system(0))):
        if isinstance(event, StepsLogged) and "train/loss" in event.metrics:
            times += event.times
        values = event.metrics if isinstance(event, StepsLogged) else {}
        if isinstance(event, SystemSampled):
            values = {key: [value] for key, value in event.metrics.items()}
        for key, column in values.items():
            reported.setdefault(key, []).extend(column)
    first = len(times) // 5
    rate = (len(times) - 1 - first) / (times[-1] - times[first])
    kept = {
        key: statistics.median(column)
        for key, column in reported.items()
        if key.startswith("throughput/") or "gpu_0_" in key
    }
    return {"steps_per_second": rate, **kept}


def measure(folder: Path, name: str, rung: tuple[str, int], seconds: float) -> dict[str, Any]:
    """Return the readings of one rung."""
    steps = max(50, round(bare(folder, name, rung, 50) * seconds))
    first, one, other = (
        bare(folder, name, rung, steps),
        *(tracked(folder, name, rung, steps) for _ in range(2)),
    )
    rates = [first, bare(folder, name, rung, steps)]
    ours = [one["steps_per_second"], other["steps_per_second"]]
    found = {"steps": steps, "bare": rates, "tracked": [one, other], **ratios(ours, rates)}
    found |= {"interval": interval(ours, rates)}
    watts = [value for key, value in one.items() if key.endswith("gpu_0_power_usage_watts")]
    if watts:
        found["joules_per_sample"] = watts[0] / one[SPEED]
    shown = {key: round(value, 3) for key, value in one.items() if key.startswith("throughput/")}
    print(f"{name} {rung[0]}{' compiled' if rung[1] else ''}: {found['median']:.3f} {shown}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=tuple(RUNGS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine() | device(), "wanted": WANTED, "rungs": {}}
    with tempfile.TemporaryDirectory() as temporary:
        for rung in RUNGS[options.workload]:
            key = f"{rung[0]}{' compiled' if rung[1] else ''}"
            found["rungs"][key] = measure(Path(temporary), options.workload, rung, options.seconds)
            # After each rung: the machine may be taken away at any time.
            path = options.out / f"ladder_{options.workload}.json"
            path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

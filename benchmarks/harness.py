"""Functions that the benchmarks share: the machine, ratios, tables, results on disk."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankzero.confidence import half_width
from rankzero.events import StepsLogged
from rankzero.run_store.journal import read_all

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def machine() -> dict[str, Any]:
    """Return the machine and the versions that a figure depends on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    packages = {name: importlib.metadata.version(name) for name in ("torch", "mlflow")}
    system = f"{platform.system()} {platform.machine()}"
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": system,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
        **packages,
    }


def known(name: str) -> dict[str, Any]:
    """Return the figures of ``results/<name>.json``; none if there is no such file."""
    path = RESULTS / f"{name}.json"
    figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    figures.pop("machine", None)
    return figures


def is_whole(parser: ArgumentParser, options: Namespace, *free: str) -> bool:
    """Return whether all options but `free` have their defaults. If not, say that nothing is saved.

    Otherwise a short try would replace the published figures.
    """
    whole = all(
        value == parser.get_default(name)
        for name, value in vars(options).items()
        if name not in free
    )
    if not whole:
        print("not saved: only a measurement with the default options is")
    return whole


def save(name: str, **figures: Any) -> None:
    """Write ``results/<name>.json``, with the machine. A list of `rows` has one row a line."""
    RESULTS.mkdir(exist_ok=True)
    rows = figures.get("rows", [])
    text = json.dumps({"machine": machine(), **figures, **({"rows": []} if rows else {})}, indent=1)
    lines = ",\n  ".join(map(json.dumps, rows))
    text = text.replace('"rows": []', f'"rows": [\n  {lines}\n ]')
    (RESULTS / f"{name}.json").write_text(text + "\n")


def ratios(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Return median, least and most of the pairwise ratios one/other.

    The two readings of a pair must be measured one after the other.
    """
    found = [a / b for a, b in zip(one, other, strict=True)]
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


def interval(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Return the geometric mean of the pairwise ratios, and its 95 % interval.

    The interval is Student's t of the logarithms.
    """
    logarithms = [math.log(a / b) for a, b in zip(one, other, strict=True)]
    middle, half = statistics.fmean(logarithms), half_width(logarithms) or math.inf
    return {
        "mean": math.exp(middle),
        "low": math.exp(middle - half),
        "high": math.exp(middle + half),
    }


def line(label: str, ratio: Mapping[str, float], wanted: str) -> str:
    """Return a row of a results table."""
    spread = f"({ratio['least']:.3f} to {ratio['most']:.3f})"
    return f"{label:34} {ratio['median']:6.3f}  {spread}   wanted {wanted}"


def step_times(journal: Path) -> list[float]:
    """Return when each step of a run ended. Its reports of the speed repeat a step: not those."""
    return [
        moment
        for event in read_all(journal)
        if isinstance(event, StepsLogged) and "train/loss" in event.metrics
        for moment in event.times
    ]


def run(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
    """Run a command without output. Raises RuntimeError with its output if it fails."""
    done = subprocess.run(
        command, env=dict(environ), cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )


def environment(**extra: str) -> dict[str, str]:
    """Return the environment for both candidates: one thread each, this folder importable."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **extra}


def torchrun(*words: object) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2"),
        *map(str, words),
    ]


def rankzero(*words: object) -> list[str]:
    return [sys.executable, "-m", "rankzero", *map(str, words)]

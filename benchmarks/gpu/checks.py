"""Check what only a GPU can show, by real commands.

    benchmarks/gpu/run_all.sh starts it: checks.py OUT [--only NAME ...]

Prints a line for each check and writes OUT/checks.json. Returns 1 if one failed. A check that needs
a GPU says so where there is none.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import machine, rankzero
from pieces import device

from rankzero.events import Noticed, RunEnded, StepsLogged, SystemSampled
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all

HERE = Path(__file__).parent
QUIET = ("train.mlflow.log_model=false", "train.mlflow.log_pictures=false")


class NotHere(Exception):
    """This machine lacks what the check needs."""


def workload(name: str) -> str:
    return f"{HERE / 'models.py'}:{name}"


def train(folder: Path, name: str, *words: object) -> RunFolder:
    """Train the workload `name` as a run of the same name. Raises RuntimeError if that fails."""
    run = RunFolder(folder / "mlruns" / "runs" / f"{name}-{time.monotonic_ns()}")
    command = rankzero("train", workload(name), "--name", run.path.name, "--nproc", 1, *QUIET)
    call(folder, [*command, *map(str, words)])
    ends = [event for event in read_all(run.events) if isinstance(event, RunEnded)]
    assert ends and ends[-1].status == "FINISHED", ends
    return run


def call(folder: Path, command: Sequence[str]) -> str:
    """Run a command; return its output. Raises RuntimeError with its end if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return done.stdout


def losses(run: RunFolder) -> dict[int, float]:
    """Return the training loss of each step."""
    return {
        step: loss
        for event in read_all(run.events)
        if isinstance(event, StepsLogged)
        for step, loss in zip(event.steps, event.metrics.get("train/loss", ()), strict=False)
    }


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise NotHere("no GPU")


def strategies(folder: Path) -> dict[str, Any]:
    """DDP by NCCL, zero1 and fsdp, and dp, each on one GPU: the losses of a single process."""
    alone = losses(train(folder, "ResNet18", "train.steps=30", "train.strategy=single"))
    found: dict[str, Any] = {}
    # dp divides a batch among GPUs.
    others = ("ddp", "zero1", "fsdp", *(["dp"] if torch.cuda.is_available() else []))
    for strategy in others:
        other = losses(train(folder, "ResNet18", "train.steps=30", f"train.strategy={strategy}"))
        found[strategy] = max(abs(other[step] - alone[step]) for step in alone)
        assert found[strategy] < 0.05, found
    return found


def exact_resume(folder: Path) -> dict[str, Any]:
    """A run that is stopped and resumed has the losses of one that is not, bit for bit."""
    words = ("train.steps=60", "train.checkpoints.save_every=20", "train.deterministic=true")
    whole = losses(train(folder, "ResNet18", *words))
    name = f"stopped-{time.monotonic_ns()}"
    command = rankzero("train", workload("ResNet18"), "--name", name, "--nproc", 1, *QUIET, *words)
    run = RunFolder(folder / "mlruns" / "runs" / name)
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while not list(run.checkpoints.glob("*")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
    call(folder, rankzero("resume", name))
    other = losses(run)
    differing = [step for step, loss in whole.items() if other.get(step) != loss]
    assert not differing, f"steps {differing[:5]} differ"
    return {"steps": len(whole), "stopped with exit code": process.returncode}


def out_of_memory(folder: Path) -> dict[str, Any]:
    """A batch that does not fit is divided into micro-batches until it does."""
    need_gpu()
    free, _ = torch.cuda.mem_get_info()
    # The logits alone take 4 bytes for each of 50,304 words of 1,024 tokens.
    batch = max(8, int(free / (50304 * 1024 * 4) / 8) * 8)
    run = train(folder, "Gpt", "train.steps=3", "train.precision=bf16", f"train.batch_size={batch}")
    notices = [event.text for event in read_all(run.events) if isinstance(event, Noticed)]
    assert any("out of memory" in text for text in notices), notices
    return {"batch": batch, "notices": notices}


def readings(folder: Path) -> dict[str, Any]:
    """RankZero's samples of the GPU are those of nvidia-smi."""
    need_gpu()
    asked = "utilization.gpu,memory.used,power.draw,temperature.gpu"
    watch = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits", "-lms", "500"]
    with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as smi:
        run = train(folder, "Gpt", "train.steps=200", "train.precision=bf16")
        smi.terminate()
        lines = (smi.stdout.read() if smi.stdout else "").splitlines()
    theirs = [list(map(float, text.split(","))) for text in lines if text.count(",") == 3]
    columns = {
        name: statistics.quantiles(column, n=10)[8]
        for name, column in zip(asked.split(","), zip(*theirs, strict=True), strict=True)
    }
    ours: dict[str, list[float]] = {}
    for event in read_all(run.system(0)):
        if isinstance(event, SystemSampled):
            for key, value in event.metrics.items():
                ours.setdefault(key.rpartition("gpu_0_")[2], []).append(value)
    pairs = {
        "utilization.gpu": ("utilization_percentage", 0.1),
        "memory.used": ("memory_usage_megabytes", 0.1),
        "power.draw": ("power_usage_watts", 0.15),
        "temperature.gpu": ("temperature_celsius", 0.1),
    }
    found = {}
    for name, (own, tolerance) in pairs.items():
        high = statistics.quantiles(ours[own], n=10)[8]
        found[name] = {"nvidia-smi": columns[name], "rankzero": high}
        assert abs(high - columns[name]) <= tolerance * columns[name] + 2, found
    return found


def probe(folder: Path) -> dict[str, Any]:
    """The probe map of batch sizes and precisions, with its limit of memory."""
    said = call(folder, rankzero("probe", workload("ResNet18"), "--nproc", 1, "--minutes", 3))
    return {"output": said[-6000:]}


CHECKS: dict[str, Callable[[Path], dict[str, Any]]] = {
    each.__name__: each for each in (strategies, exact_resume, readings, out_of_memory, probe)
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=tuple(CHECKS), default=tuple(CHECKS))
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine() | device(), "checks": {}}
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.only:
            began = time.monotonic()
            try:
                result: dict[str, Any] = {"passed": True, **CHECKS[name](Path(temporary))}
            except NotHere as reason:
                result = {"passed": None, "reason": str(reason)}
            except Exception:
                result, failed = {"passed": False, "error": traceback.format_exc()}, failed + 1
            result["seconds"] = round(time.monotonic() - began, 1)
            found["checks"][name] = result
            print(name, json.dumps(result)[:500], flush=True)
            (options.out / "checks.json").write_text(json.dumps(found, indent=1) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Check what only a GPU can show, by real commands.

    benchmarks/gpu/run_all.sh starts it: checks.py OUT [--only NAME ...]

Prints a line for each check and writes OUT/checks.json. Returns 1 if one failed. A check that needs
a GPU says so where there is none. Checks that measure nothing run side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from harness import machine, rankzero
from pieces import device
from torch import Tensor

from rankzero import track
from rankzero.events import Noticed, RunEnded, StepsLogged, SystemSampled
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from rankzero.training.checkpoints import best_model
from rankzero.training.checkpoints.host_memory import HostMemory, room_for
from rankzero.training.data.device_copy import DeviceCopier, is_staged

HERE = Path(__file__).parent
DIGITS = HERE.parent.parent / "experiments" / "digits.py"
PROGRAMS, PROJECT = f"{Path(sys.executable).parent}/", f"{HERE.parent.parent}/"
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


def nccl(folder: Path) -> dict[str, Any]:
    """Each collective by NCCL, and ddp, zero1 and fsdp: the losses of a run without a group."""
    out = folder / "nccl.json"
    call(folder, [sys.executable, str(HERE / "nccl.py"), str(out)])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def data_parallel(folder: Path) -> dict[str, Any]:
    """`dp` on one GPU, channels last and recomputed: the losses of a single process."""
    need_gpu()
    alone = losses(train(folder, "ResNet18", "train.steps=20", "train.strategy=single"))
    ways = ("train.strategy=dp", "train.channels_last=true", "train.recompute=true")
    found: dict[str, Any] = {}
    for way in ways:
        other = losses(train(folder, "ResNet18", "train.steps=20", way))
        found[way] = max(abs(other[step] - alone[step]) for step in range(1, 6))
        assert found[way] < 0.05, found
    return found


def cuda_graphs(folder: Path) -> dict[str, Any]:
    """An experiment that compiles its model into CUDA graphs has the losses of a plain one."""
    need_gpu()
    plain, graphs = (
        losses(train(folder, name, "train.steps=200", "train.eval_every=50"))
        for name in ("Mlp", "MlpGraphs")
    )
    apart = max(abs(graphs[step] - loss) for step, loss in plain.items())
    assert len(plain) == 200 and graphs.keys() == plain.keys() and apart < 1e-3, apart
    return {"steps": len(plain), "most apart": apart}


def refused_lock(_folder: Path) -> dict[str, Any]:
    """Memory that CUDA refuses to lock stays ordinary memory, and no later kernel has the error."""
    need_gpu()
    source = torch.arange(1 << 20, device="cuda")
    memory = HostMemory(room_for(source), for_gpu=True)
    target = memory.take(source)
    assert target is not None
    first = torch.cuda.cudart().cudaHostRegister(target.data_ptr(), 4096, 0)
    assert int(first) == 0, first
    assert not memory.lock(), "CUDA has locked the same memory twice"
    torch.cuda.cudart().cudaHostUnregister(target.data_ptr())
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(target.cuda() + 1, source + 1)
    memory.unlock()
    return {"pinned": target.is_pinned()}


def staged_copies(_folder: Path) -> dict[str, Any]:
    """Batches of changing sizes that pass through a stage arrive whole, and stay as they were."""
    need_gpu()
    device = torch.device("cuda", 0)
    copy, kept = DeviceCopier(device), list[tuple[int, list[Tensor]]]()
    busy = torch.randn(4096, 4096, device=device)
    torch.cuda.reset_peak_memory_stats()
    for number in range(60):
        size = 1 << (18 + number % 5)
        batch = [
            torch.full((size,), number, dtype=dtype).pin_memory()
            for dtype in (torch.float32, torch.int64)
        ]
        assert all(map(is_staged, batch)), size
        kept.append((number, copy(batch)))
        del batch  # its pinned memory is used again
        busy = busy @ busy * 1e-4
    wrong = [number for number, batch in kept if any(bool((one != number).any()) for one in batch)]
    assert not wrong, wrong
    return {"batches": len(kept), "most MB": torch.cuda.max_memory_allocated() / 1e6}


def logged_streams(folder: Path) -> dict[str, Any]:
    """What an own loop computes on a stream of its own is logged, although it comes late."""
    need_gpu()
    side, steps = torch.cuda.Stream(), 300
    tracked = track("streams", name="streams", folder=folder, offline=True)
    with tracked as run, torch.cuda.stream(side):
        busy = torch.randn(4096, 4096, device="cuda")
        for step in range(1, steps + 1):
            busy = busy @ busy * 1e-4
            loss = busy[0, 0] * 0 + step
            run.log({"loss": loss}, step)
            loss.fill_(-1.0)  # what is logged must be a copy
    logged = {
        step: loss
        for event in read_all(folder / "runs" / "streams" / "events.jsonl")
        if isinstance(event, StepsLogged)
        for step, loss in zip(event.steps, event.metrics["loss"], strict=True)
    }
    assert logged == {step: float(step) for step in range(1, steps + 1)}, logged
    return {"steps": steps}


def generators(folder: Path) -> dict[str, Any]:
    """`run.model()` leaves the caller's generators, the GPU's too, as they were."""
    need_gpu()
    run = train(folder, "Mlp", "train.steps=20")
    drawn = []
    for loads in (False, True):
        torch.manual_seed(5)
        if loads:
            best_model.load_best(run)
        drawn.append([torch.rand(4, device=place).tolist() for place in ("cpu", "cuda")])
    assert drawn[0] == drawn[1], drawn
    return {"drawn": drawn[0]}


def demonstration(folder: Path) -> dict[str, Any]:
    """README's experiment reaches its target, and `doctor` has nothing to fix."""
    doctor = call(folder, rankzero("doctor"))
    words = rankzero("train", DIGITS, "--nproc", 1, "--name", "digits")
    return {"doctor": doctor, "train": call(folder, words)[-2500:]}


def one_gpu_for_two(folder: Path) -> dict[str, Any]:
    """Two processes on one GPU are refused with one clear line."""
    need_gpu()
    words = rankzero("train", DIGITS, "--nproc", torch.cuda.device_count() + 1)
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "need" in done.stderr, done
    return {"said": done.stderr[-500:]}


def energy(folder: Path) -> dict[str, Any]:
    """A search for the least energy has the card's counter, and ends with a verdict."""
    need_gpu()
    words = ("--nproc", 1, "--trials", 3, "--seeds", 2, "--challengers", 1, "--no-probe")
    said = call(folder, rankzero("search", DIGITS, *words, "--objective", "energy"))
    assert "confirm" in said, said
    return {"said": said[-2500:]}


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
    assert process.returncode == 75, f"the first command was not stopped: {process.returncode}"
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
    # Without pauses: RankZero's samples are means over two seconds, those of nvidia-smi are not.
    steady = ("train.eval_every=160", "train.checkpoints.save_every=0", "train.precision=bf16")
    with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as smi:
        run = train(folder, "Gpt", "train.steps=160", *steady)
        smi.terminate()
        lines = (smi.stdout.read() if smi.stdout else "").splitlines()
    theirs = [list(map(float, text.split(","))) for text in lines if text.count(",") == 3]
    columns = {
        name: high(column)
        for name, column in zip(asked.split(","), zip(*theirs, strict=True), strict=True)
    }
    ours: dict[str, list[float]] = {}
    for event in read_all(run.system(0)):
        if isinstance(event, SystemSampled):
            for key, value in event.metrics.items():
                ours.setdefault(key.rpartition("gpu_0_")[2], []).append(value)
    pairs = {
        "utilization.gpu": ("utilization_percentage", 1.0, 0.1),
        "memory.used": ("memory_usage_megabytes", 1.048576, 0.05),  # nvidia-smi counts in MiB
        "power.draw": ("power_usage_watts", 1.0, 0.15),
        "temperature.gpu": ("temperature_celsius", 1.0, 0.1),
    }
    found = {}
    for name, (own, unit, _) in pairs.items():
        found[name] = {"nvidia-smi": columns[name] * unit, "rankzero": high(ours[own])}
    apart = {
        name: found[name]
        for name, (_, _, tolerance) in pairs.items()
        if abs(found[name]["rankzero"] / found[name]["nvidia-smi"] - 1) > tolerance
    }
    assert not apart, (found, ours)
    return found | {"joules": ours["energy_joules"][-1], "samples": len(ours["energy_joules"])}


def high(values: Sequence[float]) -> float:
    """Return the value that a quarter of the readings exceed."""
    return statistics.quantiles(values, n=4, method="inclusive")[2]


def probe(folder: Path) -> dict[str, Any]:
    """The probe map of batch sizes and precisions, with its limit of memory."""
    said = call(folder, rankzero("probe", workload("ResNet18"), "--nproc", 1))
    return {"output": said[-6000:]}


Check = Callable[[Path], dict[str, Any]]
SIDE_BY_SIDE: tuple[Check, ...] = (
    nccl,
    exact_resume,
    data_parallel,
    cuda_graphs,
    demonstration,
    one_gpu_for_two,
    energy,
    logged_streams,
    generators,
)
ALONE: tuple[Check, ...] = (refused_lock, staged_copies, readings, out_of_memory, probe)
NAMES = tuple(check.__name__ for check in (*SIDE_BY_SIDE, *ALONE))


def result_of(check: Check) -> dict[str, Any]:
    """Run a check in a folder of its own; return what it found, and print it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            result: dict[str, Any] = {"passed": True, **check(Path(folder))}
        except NotHere as reason:
            result = {"passed": None, "reason": str(reason)}
        except Exception:
            result = {"passed": False, "error": traceback.format_exc()}
    # Results are kept in the repository, and no path of this machine is.
    result = json.loads(json.dumps(result).replace(PROGRAMS, "").replace(PROJECT, ""))
    result["seconds"] = round(time.monotonic() - began, 1)
    print(check.__name__, json.dumps(result)[:900], flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    options = parser.parse_args()
    first, then = (
        [check for check in group if check.__name__ in options.only]
        for group in (SIDE_BY_SIDE, ALONE)
    )
    found: dict[str, Any] = {"machine": machine() | device(), "checks": {}}
    with ThreadPoolExecutor(max(1, min(len(first), (os.cpu_count() or 1) // 2))) as pool:
        results = pool.map(result_of, first)
        found["checks"] |= {
            check.__name__: result for check, result in zip(first, results, strict=True)
        }
    for check in then:
        found["checks"][check.__name__] = result_of(check)
        (options.out / "checks.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "checks.json").write_text(json.dumps(found, indent=1) + "\n")
    return int(any(result["passed"] is False for result in found["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())

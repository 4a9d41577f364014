"""Measure steps/s of the commands that users run: `rankzero train` over a bare script by torchrun.

    python benchmarks/commands.py [--blocks 8] [--seconds 15] [--only LABEL...] [--offline]

Takes about two hours. A block is bare, tracked, tracked, bare: four commands, each with processes
of its own. `steady` leaves out the first fifth of the steps. MLflow's courier works on the same
cores.

A shared machine may change its speed by more than the difference in question. So the script also
reads what a step costs rank 0, and this changes less: its processor time, page faults and context
switches.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from harness import (
    HERE,
    RESULTS,
    environment,
    interval,
    line,
    machine,
    rankzero,
    ratios,
    run,
    save,
    step_times,
    torchrun,
)
from side_by_side import rate

from rankzero.run_store.folder import RunFolder


class Case(NamedTuple):
    """A workload of workloads.py, its loading processes, and the processes that train."""

    workload: str
    workers: int
    processes: int
    wanted: float
    offline: bool = False


CASES = {
    "MLP, tensors": Case("Mlp", 0, 2, 0.97),
    "MLP, tensors, one process": Case("Mlp", 0, 1, 0.97),
    "convnet, tensors": Case("Convnet", 0, 2, 0.99),
    "convnet, crop and flip, 0 workers": Case("Augmented", 0, 2, 0.99),
    "convnet, crop and flip, 1 worker": Case("Augmented", 1, 2, 0.99),
    "convnet, crop and flip, 2 workers": Case("Augmented", 2, 1, 0.99),
    "language model": Case("LanguageModel", 0, 2, 0.99),
    "sentences of any length": Case("Lengths", 0, 2, 0.99),
}
SAMPLE_SECONDS = 0.25


class Use(NamedTuple):
    """What a process had used of the machine at a time."""

    time: float
    cpu_seconds: float
    page_faults: int
    context_switches: int


class Turn(NamedTuple):
    """One command: steps/s, and what a step cost rank 0."""

    steady: float
    cpu_microseconds: float
    page_faults: float
    context_switches: float


def use_of(process: psutil.Process) -> Use:
    """Return what a process has used. Raises psutil.Error and OSError if it has ended."""
    cpu, switches = process.cpu_times(), process.num_ctx_switches()
    # After the name in parentheses: the eighth field is the number of minor faults.
    faults = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[7]
    return Use(
        time.time(),
        cpu.user + cpu.system,
        int(faults),
        switches.voluntary + switches.involuntary,
    )


@contextlib.contextmanager
def watching(pid: Callable[[], int]) -> Iterator[list[Use]]:
    """Read the use of rank 0 in the block, as soon as `pid` returns its process."""
    uses, over = list[Use](), threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_SECONDS):
            with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
                uses.append(use_of(psutil.Process(pid())))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield uses
    finally:
        over.set()
        thread.join()


def turn(times: list[float], uses: list[Use]) -> Turn:
    """Return a command's figures. Raises ValueError if rank 0 was seen too seldom."""
    begin = times[len(times) // 5]
    steady = [use for use in uses if begin <= use.time <= times[-1]]
    if len(steady) < 2:
        raise ValueError(f"rank 0 was read {len(steady)} times in its steady part: train longer")
    first, last = steady[0], steady[-1]
    steps = bisect.bisect(times, last.time) - bisect.bisect(times, first.time)
    return Turn(
        rate(times, len(times) // 5),
        (last.cpu_seconds - first.cpu_seconds) * 1e6 / steps,
        (last.page_faults - first.page_faults) / steps,
        (last.context_switches - first.context_switches) / steps,
    )


def bare(case: Case, steps: int, folder: Path) -> Turn:
    """Run the hand-written loop."""
    out, pid = folder / "bare.json", folder / "bare.pid"
    pid.unlink(missing_ok=True)
    with watching(lambda: int(pid.read_text())) as uses:
        script = torchrun(HERE / "bare.py", case.workload, steps, out, case.workers, pid)
        script[script.index("--nproc-per-node") + 1] = str(case.processes)
        run(script, environment(), folder)
    return turn(json.loads(out.read_text())["times"], uses)


def tracked(case: Case, steps: int, folder: Path) -> Turn:
    """Run the command, tracked to the embedded store."""
    label = f"run-{time.monotonic_ns()}"
    found = RunFolder(folder / "mlruns/runs" / label)
    with watching(lambda: int(json.loads((found.path / "recorder.json").read_text())["pid"])) as u:
        command = rankzero(
            *("train", f"{HERE}/workloads.py:{case.workload}", "--nproc", case.processes),
            *(
                "--run-name",
                label,
                *["--offline"] * case.offline,
                f"train.steps={steps}",
                f"train.eval_every={steps}",
            ),
            *(f"train.workers={case.workers}", "train.mlflow.log_model=false"),
        )
        run(command, environment(RANKZERO_DIR=str(folder / "mlruns")), folder)
    times = step_times(found.events)
    assert len(times) == steps, f"{len(times)} steps in the journal, not {steps}"
    return turn(times, u)


def compare(label: str, case: Case, blocks: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Return the ratios of the tracked command to the bare one, and all readings."""
    steps = _steps_in(seconds, case, folder)
    tracked(case, steps // 4, folder)  # a warm-up
    turns: dict[str, list[Turn]] = {"tracked": [], "bare": []}
    for _ in range(blocks):
        for who in ("bare", "tracked", "tracked", "bare"):
            turns[who].append((tracked if who == "tracked" else bare)(case, steps, folder))
    # The mean of a block's two turns: a steady drift of the machine's speed cancels.
    means = {
        who: [statistics.fmean(pair) for pair in zip(rates[::2], rates[1::2], strict=True)]
        for who, rates in ((who, [one.steady for one in each]) for who, each in turns.items())
    }
    ratio = ratios(means["tracked"], means["bare"]) | interval(means["tracked"], means["bare"])
    print(line(label, ratio, f">= {case.wanted}"), flush=True)
    print(f"    mean {ratio['mean']:.3f}, 95 % interval {ratio['low']:.3f} to {ratio['high']:.3f}")
    costs = {}
    for name in Turn._fields[1:]:
        ours, theirs = (
            statistics.median(getattr(one, name) for one in turns[who])
            for who in ("tracked", "bare")
        )
        costs[name] = {"tracked": ours, "bare": theirs}
        print(f"    {name} a step of rank 0: {ours:.1f}, bare {theirs:.1f}", flush=True)
    return {"case": case._asdict(), "steps": steps, "ratio": ratio, "costs": costs, "turns": turns}


def _steps_in(seconds: float, case: Case, folder: Path) -> int:
    """Return how many steps the hand-written loop does in so many seconds, after a warm-up."""
    for steps in (300, 3000, 30_000):
        with contextlib.suppress(ValueError):
            return max(200, round(bare(case, steps, folder).steady * seconds))
    raise ValueError("a step takes less than 50 microseconds: train longer")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a training")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--offline", action="store_true", help="RankZero without a courier")
    parser.add_argument("--quick", action="store_true", help="to check that it works")
    options = parser.parse_args()
    if options.quick:
        options.blocks, options.seconds = 1, 4.0
    known = RESULTS / "commands.json"
    found = json.loads(known.read_text())["cases"] if known.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        for label in options.only:
            folder = Path(temporary)
            case = CASES[label]._replace(offline=options.offline)
            # Other conditions are another row.
            if options.seconds != parser.get_default("seconds"):
                label += f", {options.seconds:g} seconds"
            label += ", offline" * options.offline
            readings = compare(label, case, options.blocks, options.seconds, folder)
            # Each case says when it was measured: it takes minutes, and is measured alone again.
            found[label] = {"machine": machine(), **readings}
            if options.blocks >= 4:  # fewer are a try
                save("commands", cases=found)


if __name__ == "__main__":
    main()

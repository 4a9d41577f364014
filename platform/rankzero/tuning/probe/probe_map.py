"""The probe map: how fast and how much memory, batch size x precision, each cell measured once and kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rankzero import config
from rankzero.errors import RunFailed
from rankzero.experiment import Experiment
from rankzero.launch import failures as failure
from rankzero.launch.agent import Topology
from rankzero.tuning.probe import grid, worker
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.space import Space
from rankzero.tuning.trials.describe import ExperimentDescription
from rankzero.tuning.trials.host_process import Host

BELOW = 2  # a ladder starts at the user's batch size over this
MOST_RESTARTS = 8
OUT_OF_MEMORY = (failure.FailureKind.OUT_OF_MEMORY, failure.FailureKind.OUT_OF_HOST_MEMORY)
NOT_PART = (
    "train.batch_size",
    "train.micro_batch",
    "train.precision",
    "train.seed",
    "train.epochs",
    "train.steps",
    "train.eval_every",
    "train.checkpoints.save_every",
    "train.checkpoints.keep",
    "train.mlflow.log_model",
    "train.mlflow.log_pictures",
    "train.limits.max_minutes",
    "train.limits.stop_at_target",
    "train.log_every",
    "train.schedule",
    "train.warmup_steps",
    "lr",
    "goal.metric",
    "goal.mode",
    "goal.target",
)
"""Settings that do not change how long a step takes, or that a cell sets itself."""


@dataclasses.dataclass(frozen=True)
class ProbePlan:
    """What to probe, and where the results are kept."""

    experiment_file: str
    reference: Experiment
    batch_sizes: tuple[int, ...]
    precisions: tuple[str, ...]
    processes: int
    run_samples: float
    """How many samples one of the user's runs trains on."""
    cache: Path
    """A file, one line a cell."""
    relative: float = 0.01
    most_seconds: float = 4.0


def make_batch_order(
    space: Space, described: ExperimentDescription, reference_file: str, root: Path
) -> ProbePlan:
    """Return the plan for a space: its precisions, its batch sizes from a quarter of the user's own on."""
    own = space.reference.train.batch_size
    return ProbePlan(
        experiment_file=reference_file,
        reference=space.reference,
        batch_sizes=tuple(size for size in space.batch_sizes if size * BELOW >= own),
        precisions=space.precisions,
        processes=described.processes,
        run_samples=_run_samples(space.reference, described.samples),
        cache=root / "probes" / f"{_key(space.reference, described, reference_file)}.jsonl",
    )


def _run_samples(reference: Experiment, samples: int) -> float:
    train = reference.train
    return train.steps * train.batch_size if train.steps else (train.epochs or 1) * samples


def run(plan: ProbePlan, host: Host, say: Callable[[str], None]) -> list[ProbeResult]:
    """Measure what is not known yet; return the whole map. Raises RunFailed where no cell could be measured."""
    plan.cache.parent.mkdir(parents=True, exist_ok=True)
    failures = plan.cache.with_suffix(".failures")
    for _ in range(MOST_RESTARTS):
        known = read(plan.cache)
        if grid.next_cell(known, plan.batch_sizes, plan.precisions, plan.processes) is None:
            break
        _measure(plan, host, known, failures, say)
    found = [one for one in read(plan.cache) if one.precision in plan.precisions]
    if not any(one.status == "ok" for one in found):
        first = failure_text(failures)
        raise RunFailed(f"no batch size could be measured: {first or 'see ' + str(plan.cache)}")
    return found


def _measure(
    plan: ProbePlan,
    host: Host,
    known: Sequence[ProbeResult],
    failures: Path,
    say: Callable[[str], None],
) -> None:
    """Run one process group for as long as it lives; a cell that kills it is noted."""
    for path in failures.glob("rank_*.json"):
        path.unlink()
    request = worker.ProbeRequest(
        plan.experiment_file,
        config.to_yaml(plan.reference),
        plan.batch_sizes,
        plan.precisions,
        tuple(known),
        str(plan.cache),
        plan.relative,
        plan.most_seconds,
        plan.run_samples,
        str(failures),
    )
    host.run(
        "rankzero.tuning.probe.worker:main",
        Topology(plan.processes),
        request,
        plan.cache.with_suffix(".logs"),
    )
    told = len(known)
    while not host.over(0.2):
        told = _tell(plan, told, say)
    _tell(plan, told, say)
    begun = unfinished(plan.cache)
    if begun is not None:
        first = failure.first(failures)
        reason = first.reason if first else "its processes ended and wrote no reason"
        status = "out of memory" if first and first.kind in OUT_OF_MEMORY else "failed"
        lost = grid.parse({**begun, "status": status, "reason": reason})
        _append(plan.cache, lost)
        say(line(lost))


def _tell(plan: ProbePlan, told: int, say: Callable[[str], None]) -> int:
    found = read(plan.cache)
    for one in found[told:]:
        say(line(one))
    return len(found)


def read(path: Path) -> list[ProbeResult]:
    """Return the cells in a file; lines that are none are passed over."""
    return [grid.parse(fields) for fields in _lines(path) if "status" in fields]


def unfinished(path: Path) -> dict[str, Any] | None:
    """Return the cell that was begun last and not finished."""
    lines = _lines(path)
    return lines[-1]["begun"] if lines and "begun" in lines[-1] else None


def line(one: ProbeResult) -> str:
    """Return a cell in words."""
    what = f"batch {one.batch_size:6} {one.precision:5}"
    if one.status != "ok":
        return f"probe  {what} {one.status}: {one.reason}"
    memory = "" if one.memory_bytes is None else f"  {one.memory_bytes / 2**30:6.1f} GiB"
    return (
        f"probe  {what} {one.samples_per_second:12,.0f} samples/s ± {one.relative_half_width:.1%}{memory}"
        f"  {one.bound}-bound"
    )


def guesses(space: Space, measured: Sequence[ProbeResult]) -> list[dict[str, Any]]:
    """Return the parameters that the map suggests, as the scaling rule has it: between the user's batch and the knee.

    With samples to the target n0 (1 + B / B_crit) and speed X0 B / (B + B_hw), the best batch is sqrt(B_hw B_crit):
    below the knee, where the speed levels off, and for a user who began small, above what they have.
    """
    from rankzero.tuning.space import BATCH_INDEX, PRECISION

    found, own = grid.knee(measured), space.reference_parameters()
    if found is None or BATCH_INDEX not in own:
        return []
    knee = (
        space.batch_sizes.index(found.batch_size)
        if found.batch_size in space.batch_sizes
        else own[BATCH_INDEX]
    )
    between = math.ceil((own[BATCH_INDEX] + knee) / 2)
    precision = (
        {PRECISION: found.precision}
        if PRECISION in own and found.precision in space.precisions
        else {}
    )
    tried = [{**own, **precision, BATCH_INDEX: index} for index in dict.fromkeys((between, knee))]
    return [parameters for parameters in tried if parameters != own]


def failure_text(failures: Path) -> str:
    first = failure.first(failures)
    return first.reason if first else ""


def _append(path: Path, one: ProbeResult) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(one)) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            fields = json.loads(text)
        except ValueError:
            continue  # torn by a crash
        if isinstance(fields, dict):
            found.append(fields)
    return found


def _key(reference: Experiment, described: ExperimentDescription, reference_file: str) -> str:
    """Return what a measurement depends on, as one word: code, settings, processes, device, driver, versions."""
    source = Path(
        reference_file.rpartition(":")[0]
        if reference_file.endswith(described.name)
        else reference_file
    )
    settings = {
        key: value for key, value in config.flatten(reference).items() if key not in NOT_PART
    }
    what = (
        source.read_bytes() if source.is_file() else b"",
        described.name,
        sorted(map(repr, settings.items())),
        described.processes,
        described.device,
        described.driver,
        version("torch"),
    )
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]

"""One attempt at a run, as the launching command sees it: launch, show, wait for the tracking, report."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rankzero import config
from rankzero.catalog import lookup
from rankzero.cli.display import delivery_notes
from rankzero.cli.display.data_wait import DataWait
from rankzero.cli.display.live import Console
from rankzero.errors import FAILED, FINISHED, RESUMABLE, RunFailed, UserError
from rankzero.experiment import Experiment, Train
from rankzero.launch import agent, failures
from rankzero.launch.request import OUT_OF_MEMORY, request_for, write_config
from rankzero.launch.signals import SignalForwarder
from rankzero.run_store import provenance
from rankzero.run_store.folder import RunFolder
from rankzero.telemetry.host import usable_cores
from rankzero.tracking import delivery_status
from rankzero.tracking.retry import grace_seconds

# Libraries whose import is slow and harmless in the server that workers are forked from: no threads, no CUDA.
SLOW_LIBRARIES = {
    "lightning",
    "lightning.pytorch",
    "pytorch_lightning",
    "torchmetrics",
    "torchvision",
    "torchvision.datasets",
    "torchvision.models",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "sklearn",
    "sklearn.datasets",
    "scipy",
    "pandas",
    "PIL",
}


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """What to launch."""

    folder: RunFolder
    experiment: Experiment
    nodes: agent.Topology
    root: Path
    argv: Sequence[str]
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What else is known of it."""
    resumes: bool = False
    joined: bool = False
    """Whether another machine began the run in this folder, and does what is done once."""
    offline: bool = False
    """Whether the run is only recorded; nothing talks to MLflow."""


def run(attempt: LaunchPlan) -> int:
    """Launch, follow and report; return the exit code. Raises RunFailed with the reason.

    Where a device runs out of memory, all ranks begin again from the newest checkpoint with half the micro-batch.
    """
    with SignalForwarder() as signals:
        attempt, launched = _trained(attempt, signals)
        if not launched.attempt_started:
            return _without_rank_zero(attempt, launched, stopped=bool(signals.received))
        heard = len(signals.received)  # what comes from now on can only mean the waiting
        finish = _finish_offline if attempt.offline else _finish_tracking
        finish(attempt, launched.console, lambda: len(signals.received) > heard)
        return _report(attempt, launched.console)


@dataclasses.dataclass(frozen=True)
class _LaunchResult:
    """How a launch went: what was shown, the status, and whether rank 0 came so far as to start an attempt."""

    console: Console
    status: str
    attempt_started: bool


def _trained(attempt: LaunchPlan, signals: SignalForwarder) -> tuple[LaunchPlan, _LaunchResult]:
    """Launch until memory suffices; return the attempt that it sufficed, and how its launch went."""
    launched = _launched(attempt, signals)
    while (
        launched.status == "FAILED" and (smaller := _with_half_the_micro_batch(attempt)) is not None
    ):
        attempt = smaller
        launched.console.notice(
            f"out of memory: {attempt.tags[OUT_OF_MEMORY]}, and on from the newest checkpoint"
        )
        write_config(attempt.folder, attempt.experiment)
        launched = _launched(attempt, signals)
    return attempt, launched


def _launched(attempt: LaunchPlan, signals: SignalForwarder) -> _LaunchResult:
    """Launch and show until all processes have ended."""
    from rankzero.training import worker

    folder, status = attempt.folder, "FAILED"
    before = lookup.journal_bytes(folder)
    request = request_for(
        folder,
        attempt.experiment,
        {**_provenance(attempt), **attempt.tags},
        resumes=attempt.resumes,
        offline=attempt.offline,
    )
    advice = DataWait(
        attempt.experiment.train.workers, attempt.nodes.processes, len(usable_cores())
    )
    console = Console(folder, attempt.experiment.goal, attempt.root, advise=advice)
    with console:
        try:
            status = agent.run(attempt.nodes, worker.main, request, folder.path / "logs", signals)
        except agent.WorkersFailed as error:
            console.failed = str(error)
    return _LaunchResult(console, status, lookup.attempt_started(folder, before))


def _with_half_the_micro_batch(attempt: LaunchPlan) -> LaunchPlan | None:
    """Return the next attempt after an out-of-memory; None where that was not it, or nothing can be halved.

    With several machines, only one of them knows why the ranks ended: there it fails.
    """
    train, nodes, first = (
        attempt.experiment.train,
        attempt.nodes,
        failures.first(attempt.folder.failures),
    )
    if (
        first is None
        or first.kind is not failures.FailureKind.OUT_OF_MEMORY
        or train.limits.oom == "fail"
        or nodes.nodes > 1
    ):
        return None
    from rankzero.training import strategies
    from rankzero.training.data.order import micro_batch_size

    micro_batch = micro_batch_size(train, strategies.shards(train.strategy, nodes.processes))
    if micro_batch % 2 or train.strategy == "pp":
        return None
    told = f"{attempt.tags.get(OUT_OF_MEMORY, f'micro-batch {micro_batch}')} -> {micro_batch // 2}"
    experiment = config.override(attempt.experiment, {"train.micro_batch": micro_batch // 2})
    return dataclasses.replace(attempt, experiment=experiment, tags={OUT_OF_MEMORY: told})


def _without_rank_zero(attempt: LaunchPlan, launched: _LaunchResult, *, stopped: bool) -> int:
    """Report where rank 0 ran on another machine, or did not come so far as to start an attempt.

    What an earlier attempt has said of its end is not this one's.
    """
    folder, resumable = attempt.folder, _may_go_on(attempt.folder)
    if not (folder.events.exists() or resumable or any(folder.path.glob("system-node_*.jsonl"))):
        (folder.path / "run.json").unlink(missing_ok=True)  # what is left here are logs: no run
    first = failures.first(folder.failures)
    reason = first.reason if first else launched.console.failed
    if launched.status == "FAILED" and not (stopped and resumable):
        raise RunFailed(f"{reason}; see {folder.path / 'logs'}")
    if launched.status == "FAILED":
        launched.console.notice(f"{reason}: {folder.path.name} is as it was")
    return FINISHED if launched.status == "FINISHED" else RESUMABLE


def _may_go_on(folder: RunFolder) -> bool:
    return any(folder.checkpoints.glob("step_*"))


def nodes_of(arguments: argparse.Namespace, train: Train) -> agent.Topology:
    """Return the processes that the command line asks for. Raises UserError where they cannot be."""
    import torch

    from rankzero.training import strategies
    from rankzero.training.data.order import micro_batch_size
    from rankzero.training.distributed.device import check_gpus

    asked = arguments.nproc
    processes = (
        asked
        if asked is not None
        else strategies.processes(train.strategy, torch.cuda.device_count())
    )
    if processes < 1 or arguments.nnodes < 1:
        raise UserError("--nproc and --nnodes must be at least 1")
    if arguments.nnodes > 1 and not arguments.rdzv_endpoint:
        raise UserError(
            "--nnodes needs --rdzv-endpoint HOST:PORT, the first machine's, on every machine"
        )
    check_gpus(processes)
    micro_batch_size(train, strategies.shards(train.strategy, processes * arguments.nnodes))
    endpoint = arguments.rdzv_endpoint or "localhost:0"
    return agent.Topology(
        processes, arguments.nnodes, endpoint, arguments.rdzv_id, arguments.max_restarts
    )


def libraries_of(path: Path) -> list[str]:
    """Return the slow libraries that a file imports at its top, for the server to load beforehand."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return []
    named = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            named += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in named if name in SLOW_LIBRARIES]


def _provenance(attempt: LaunchPlan) -> Mapping[str, str]:
    found = provenance.collect(Path.cwd(), attempt.argv, os.environ)
    provenance.write_artifacts(found, attempt.folder.artifacts)
    reference = os.path.relpath(attempt.folder.identity.experiment_file or "", Path.cwd())
    return {**provenance.environment(found), "rankzero.experiment_file": reference}


def _finish_tracking(attempt: LaunchPlan, console: Console, hurried: Callable[[], bool]) -> None:
    """Wait while the recorder gets on; log the final model of a finished run: both within `grace_seconds`.

    Who is `hurried` waits for nothing. What is left then, the recorder goes on with, and `rankzero sync` brings.
    """
    from rankzero.training.checkpoints import best_model

    until = time.monotonic() + grace_seconds()
    with console.status("delivering to MLflow"):
        delivery = delivery_status.wait(
            attempt.folder,
            enough=lambda delivery: delivery_status.is_delivered(delivery) or hurried(),
        )
    ended = lookup.last_end(
        attempt.folder
    )  # not what was shown: showing may fail, as where the output's reader goes
    finished = ended is not None and ended.status == "FINISHED"
    logs_model = finished and attempt.experiment.train.mlflow.log_model and not attempt.joined
    why = "nobody waited" if hurried() else "it takes long"
    also = ["the best model"] if logs_model else []
    for line in delivery_notes.lines(delivery, attempt.folder.path.name, why, also):
        console.notice(line)
    if logs_model and not delivery.done:
        best_model.mark_unlogged(attempt.folder, True)
    elif logs_model:
        with console.status("logging the best model to MLflow"):
            best_model.in_new_process(
                attempt.folder, console.notice, hurried, until - time.monotonic()
            )


def _finish_offline(attempt: LaunchPlan, console: Console, hurried: Callable[[], bool]) -> None:
    """Wait until the recorder has written the run's last lines; print how to deliver the run."""
    from rankzero.training.checkpoints import best_model

    folder = attempt.folder
    delivery_status.wait_for_recorder(folder, hurried)
    ended = lookup.last_end(folder)
    finished = ended is not None and ended.status == "FINISHED"
    if finished and attempt.experiment.train.mlflow.log_model and not attempt.joined:
        best_model.mark_unlogged(folder, True)
    console.notice(delivery_notes.offline(folder))


def _report(attempt: LaunchPlan, console: Console) -> int:
    ended = lookup.last_end(attempt.folder)
    if ended is None:
        raise RunFailed(
            f"the run did not say how it ended ({console.failed}); see {attempt.folder.path / 'logs'}"
        )
    console.result(ended)
    if ended.status == "FAILED":
        killed = f" ({console.failed})" if "was killed by" in console.failed else ""
        raise RunFailed(ended.reason + killed)
    if ended.status == "KILLED":
        return RESUMABLE if _may_go_on(attempt.folder) else FAILED
    return FINISHED

"""Launch a run, show the progress, wait for MLflow, report: `rankzero train` and `resume`."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rankzero import ranks
from rankzero.catalog import command_lines, lookup
from rankzero.cli.display import delivery_notes
from rankzero.cli.display.data_wait import DataWait
from rankzero.cli.display.live import Console
from rankzero.errors import FAILED, FINISHED, RESUMABLE, RunFailed, UserError
from rankzero.experiment import Experiment
from rankzero.launch import agent, failures
from rankzero.launch.machines import ALONE, Machines
from rankzero.launch.request import OUT_OF_MEMORY, request_for
from rankzero.launch.signals import SignalForwarder
from rankzero.mlflow_store.patience import patience
from rankzero.redaction.text import NOTIFY
from rankzero.run_store import disk, provenance
from rankzero.run_store.folder import RunFolder
from rankzero.telemetry.host import core_count
from rankzero.tracking import delivery_status, notification

# They are slow to import, and start no threads and no CUDA. So the server that workers are forked
# from may have them.
_SLOW_LIBRARIES = {
    "PIL",
    "lightning",
    "pandas",
    "pytorch_lightning",
    "scipy",
    "sklearn",
    "torchmetrics",
    "torchvision",
}
# A scheduler kills a stopped job soon, often after 30 s, and the exit code would be lost.
_STOPPED_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """One attempt to launch."""

    folder: RunFolder
    experiment: Experiment
    topology: agent.Topology
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Tags of the MLflow run, besides those of its provenance."""
    resumes: bool = False
    offline: bool = False
    """Whether the run is only recorded; nothing talks to MLflow."""
    shows_progress: bool = True
    """Whether the command prints the progress between evaluations."""
    is_part: bool = False
    """Whether a repeat launches the run. It waits for the delivery of all its runs at the end."""


def run(plan: LaunchPlan, forwarder: SignalForwarder | None = None) -> int:
    """Launch, show the progress, wait for the delivery; return the exit code.

    If a device runs out of memory, all ranks start again from the newest checkpoint with half the
    micro-batch. `forwarder`: if the caller has opened one. Raises RunFailed with the reason.
    """
    if forwarder is None:
        with SignalForwarder() as forwarder:
            return run(plan, forwarder)
    console, result, started = _launch(plan, forwarder)
    while result.status == "FAILED" and (halving := _with_half_the_micro_batch(plan)):
        size, experiment = halving
        halved = f"{plan.tags.get(OUT_OF_MEMORY, f'micro-batch {size}')} -> {size // 2}"
        tags = {**plan.tags, OUT_OF_MEMORY: halved}
        plan = dataclasses.replace(plan, experiment=experiment, tags=tags)
        console.notice(f"out of memory: {halved}; starting again from the newest checkpoint")
        console, result, started = _launch(plan, forwarder)
    if not started:
        stopped = bool(forwarder.received)
        return _report_without_attempt(plan, result, console, stopped=stopped)
    finish = _finish_later if plan.offline or plan.is_part else _finish_delivery
    hurried = stops_waiting(forwarder.received)
    finish(plan, console, hurried)
    if not plan.is_part and (unsent := notification.problem(plan.folder, hurried)):
        console.notice(unsent)
    return _report(plan, result, console)


def _launch(
    plan: LaunchPlan, forwarder: SignalForwarder
) -> tuple[Console, agent.LaunchResult, bool]:
    """Launch the workers and show their progress until all have ended.

    Return what showed it, how they ended, and whether rank 0 started an attempt here.
    """
    from rankzero.training import worker
    from rankzero.training.data.processes import loader_workers

    folder, processes, cores = plan.folder, plan.topology.processes, core_count()
    before = lookup.journal_bytes(folder)
    # For each launch: code and environment may have changed since the run's last attempt.
    tags = provenance.record(folder.artifacts, sys.argv, folder.identity.experiment_file)
    tags |= plan.tags
    request = request_for(folder, plan.experiment, tags, resumes=plan.resumes, offline=plan.offline)
    workers = loader_workers(plan.experiment.train.workers, processes, cores)
    advice = DataWait(workers, processes, cores)
    machines = plan.topology.machines
    first = True if machines.alone else None
    goal, shows = plan.experiment.goal, plan.shows_progress
    console = Console(folder, goal, advise=advice, is_first=first, shows_progress=shows)
    with console:
        result = agent.run(
            plan.topology,
            worker.main,
            request,
            folder.path / "logs",
            forwarder,
            console.joined,
            folder=folder,
            notice=console.notice,
        )
    return console, result, lookup.attempt_started(folder, before)


def _with_half_the_micro_batch(plan: LaunchPlan) -> tuple[int, Experiment] | None:
    """Return the micro-batch that was too large and an experiment with half of it.

    None if another reason failed the attempt, or if no smaller micro-batch is possible or helps.
    """
    from rankzero.training.data.order import micro_batch_size

    train, topology = plan.experiment.train, plan.topology
    first = failures.first(plan.folder.failures)
    if first is None or first.kind is not failures.FailureKind.OUT_OF_MEMORY:
        return None
    # With several machines, a command may not know why the ranks of another one ended.
    if train.limits.oom == "fail" or not topology.machines.alone or train.strategy == "pp":
        return None
    size = micro_batch_size(train, ranks.shards(train.strategy, topology.processes))
    if size % 2 or lookup.ended_in_set_up(plan.folder):
        return None
    # An evaluation may be what needs the memory.
    smaller = train.eval_batch and max(1, train.eval_batch // 2)
    train = dataclasses.replace(train, micro_batch=size // 2, eval_batch=smaller)
    return size, dataclasses.replace(plan.experiment, train=train)


def _report_without_attempt(
    plan: LaunchPlan, result: agent.LaunchResult, console: Console, *, stopped: bool
) -> int:
    """Report a launch in which rank 0 ran on another machine, or ended before it started training.

    An end in the journal is then an earlier attempt's.
    """
    folder, resumable = plan.folder, _has_checkpoint(plan.folder)
    if not folder.path.exists():
        again = command_lines.line(folder.root, "sync", folder.path.name)
        why = f"{folder.path} was moved or deleted during the training"
        raise RunFailed(f"{why}: move it back, then {again}")
    first = failures.first(folder.failures)
    reason, is_left = first.reason if first else result.reason, stopped and resumable
    if result.status == "FAILED" and not is_left and not plan.is_part:
        _notify(folder, reason, console)
    # Without its identity the folder is not listed as a run. Its logs stay for the user.
    if not folder.has_begun:
        (folder.path / "run.json").unlink(missing_ok=True)
    if result.status != "FAILED":
        return FINISHED if result.status == "FINISHED" else RESUMABLE
    if not is_left:
        raise RunFailed(f"{reason}; see {folder.path / 'logs'}")
    console.notice(f"{reason}: {folder.path.name} is unchanged")
    return RESUMABLE


def _notify(folder: RunFolder, reason: str, console: Console) -> None:
    """Send that a launch failed, of which no recorder knows, unless another machine sends it."""
    webhook, is_known = os.environ.get(NOTIFY), (folder.path / "run.json").exists()
    if webhook and is_known and console.is_first is not False:
        unsent = notification.post(webhook, notification.news_of(folder, reason))
        console.notice(unsent or "sent a notification")


def stops_waiting(
    received: Sequence[signal.Signals], stopped_seconds: float = _STOPPED_SECONDS
) -> Callable[[], bool]:
    """Return a function that returns whether to stop waiting for the delivery. After the training.

    It returns True after another signal. If one of `received` stopped the training, it returns True
    after `stopped_seconds`, too.
    """
    before = len(received)
    until = time.monotonic() + (stopped_seconds if received else math.inf)
    return lambda: len(received) > before or time.monotonic() >= until


def _finish_delivery(plan: LaunchPlan, console: Console, hurried: Callable[[], bool]) -> None:
    """Wait for the delivery and log the best model, both within `patience`.

    If `hurried()` returns true, stop waiting. The recorder continues; `rankzero sync` delivers
    what remains.
    """
    from rankzero.training.checkpoints import best_model

    folder, until = plan.folder, time.monotonic() + patience().seconds
    logs_model = _logs_model(plan, console)
    also = ["the best model"] if logs_model else []
    with best_model.LoggingProcess(folder) if logs_model else contextlib.nullcontext() as process:
        with console.status("delivering to MLflow"):
            delivered = delivery_notes.wait(folder, console.notice, hurried, also)
        if process is not None and delivered:
            with console.status("logging the best model to MLflow"):
                process.wait(console.notice, hurried, until - time.monotonic())


def _finish_later(plan: LaunchPlan, console: Console, hurried: Callable[[], bool]) -> None:
    """Wait until the recorder has written the run's last lines; what is left comes later."""
    from rankzero.training.checkpoints import best_model

    delivery_status.wait_for_recorder(plan.folder, hurried)
    if _logs_model(plan, console):
        best_model.mark_unlogged(plan.folder, True)
    if not plan.is_part:
        console.notice(delivery_notes.offline_note(plan.folder))


def _logs_model(plan: LaunchPlan, console: Console) -> bool:
    # From the journal, not from the console, which may have failed to show it: its reader may go.
    ended = lookup.last_end(plan.folder)
    finished = ended is not None and ended.status == "FINISHED"
    wanted = plan.experiment.train.mlflow.log_model and _has_checkpoint(plan.folder)
    return bool(finished and wanted and console.is_first)


def _report(plan: LaunchPlan, result: agent.LaunchResult, console: Console) -> int:
    ended = lookup.last_end(plan.folder)
    if ended is None:
        path = plan.folder.path
        full = f"the disk of {path} is full" if disk.is_full(path) else ""
        reasons = "; ".join(filter(None, (result.reason, full)))
        why, logs = f" ({reasons})" if reasons else "", path / "logs"
        raise RunFailed(f"the run ended without a record of it{why}; see {logs}")
    console.result(ended)
    if ended.status == "FINISHED" and result.status == "FAILED":
        console.notice(f"after the training, {result.reason}")
    # A killed rank could not say so in the journal. The launcher knows its exit code.
    if ended.status == "FAILED":
        raise RunFailed(ended.reason + (f" ({result.reason})" if result.killed_by else ""))
    if ended.status == "KILLED":
        return RESUMABLE if _has_checkpoint(plan.folder) else FAILED
    # The first machine may still log the best model, and its command says how that ended.
    return FINISHED if console.is_first is False else delivery_notes.exit_code(plan.folder)


def _has_checkpoint(folder: RunFolder) -> bool:
    return any(folder.checkpoints.glob("step_*"))


def topology_of(
    arguments: argparse.Namespace, experiment: Experiment, machines: Machines = ALONE
) -> agent.Topology:
    """Return the processes that the command line asks for. Raises UserError if they cannot run."""
    import torch

    from rankzero.training import strategy_check
    from rankzero.training.data.order import micro_batch_size
    from rankzero.training.distributed.device import check_gpus
    from rankzero.training.distributed.watchdog import setup_seconds

    setup_seconds()  # a wrong one would end each rank
    train, processes, gpus = experiment.train, arguments.nproc, torch.cuda.device_count()
    if processes is None:
        processes = ranks.default_count(train.strategy, gpus)
    if processes < 1:
        raise UserError("--nproc must be at least 1")
    if arguments.max_restarts < 0:
        raise UserError(f"--max-restarts must be at least 0, got {arguments.max_restarts}")
    check_gpus(processes)
    for count in range(machines.least, machines.most + 1):
        strategy_check.check(experiment, processes * count, on_gpu=gpus > 0)
        micro_batch_size(train, ranks.shards(train.strategy, processes * count))
    limit = train.limits.hang_minutes
    silence_seconds = None if limit is None else 60 * limit
    return agent.Topology(processes, arguments.max_restarts, machines, silence_seconds)


def libraries_of(path: Path) -> list[str] | None:
    """Return the slow libraries that a file imports at its top. None: it is no Python program."""
    # Parsed, not imported: the server that workers are forked from has no code of the user.
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return None
    named = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            named += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    # A name that is no module, such as pandas.DataFrame, is left out when they are imported.
    return [name for name in named if name.split(".")[0] in _SLOW_LIBRARIES]

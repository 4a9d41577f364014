"""Train the same work under each strategy, as children of one run; and profile one job."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rankzero import config
from rankzero.compare import plots, results, tables
from rankzero.compare.results import StrategyResult, StrategyRun
from rankzero.errors import RunFailed
from rankzero.experiment import Experiment
from rankzero.launch import failures
from rankzero.launch.agent import Topology
from rankzero.reporting.run_facts import fold
from rankzero.run_store.journal import read_all
from rankzero.scalars import shown
from rankzero.training.profiling import profiler
from rankzero.training.profiling.profiler import Profile
from rankzero.tuning.reports.study_run import StudyRun
from rankzero.tuning.trials import describe
from rankzero.tuning.trials.describe import ExperimentDescription
from rankzero.tuning.trials.follower import run_alone
from rankzero.tuning.trials.host import Host
from rankzero.tuning.trials.launcher import TrainLauncher

_POLL_SECONDS = 0.2


def compare(
    study: StudyRun,
    host: Host,
    described: ExperimentDescription,
    plan: Sequence[StrategyRun],
    notify: Callable[[str], None],
) -> tuple[list[StrategyResult], list[str]]:
    """Train the same work under each strategy; return the rows, and fairness warnings.

    `study`: the run that the results are artifacts of. `notify` prints a line.
    """
    # One after the other: side by side they would slow each other down.
    rows = results.with_speed_ups([_measure(study, host, described, run, notify) for run in plan])
    notes = results.warnings(rows, described.device == "cpu", "OMP_NUM_THREADS" in os.environ)
    verdict = tables.sentence(rows)
    study.write_table("compare.json", tables.COLUMNS, [tables.cells(row) for row in rows])
    study.write_description(f"**{verdict}**\n\n{tables.markdown(rows, notes)}\n")
    with study.drawing():
        plots.write_scaling(study.folder.artifacts, rows)
    study.finish(verdict, {f"speed_up/{row.run.name}": row.speed_up for row in rows})
    return rows, notes


def profile(study: StudyRun, host: Host, described: ExperimentDescription) -> Profile:
    """Profile a few steady steps, as a run of their own with the traces. Raises RunFailed."""
    artifacts, experiment = study.folder.artifacts, describe.mirrored(described)
    folder = artifacts / "profile"
    found = _profiled(study, host, experiment, described.processes, folder, trace=True)
    verdict, costs = tables.verdict(found), tables.costs_in_markdown(found)
    where = "Traces: `profile/`, for ui.perfetto.dev"
    study.write_description(f"{verdict}\n\n{costs}\n\n{where}\n")
    shares = {"compute": found.breakdown.compute, **dataclasses.asdict(found.breakdown)}
    with study.drawing():
        plots.write_step(artifacts / "step_time.png", found)
    summary = {
        "step_seconds": found.step_seconds,
        "samples_per_second": found.batch_size / found.step_seconds,
        **{f"{name}_fraction": share for name, share in shares.items()},
    }
    study.finish(verdict, summary)
    return found


def _profiled(
    study: StudyRun,
    host: Host,
    experiment: Experiment,
    processes: int,
    folder: Path,
    *,
    trace: bool,
) -> Profile:
    folder.mkdir(parents=True, exist_ok=True)
    file, failure_folder = study.folder.identity.experiment_file or "", folder / "failures"
    request = profiler.ProfileRequest(
        file, config.to_yaml(experiment), str(folder), str(failure_folder), trace
    )
    host.run(profiler.main, Topology(processes), request, folder / "logs", folder)
    # `has_ended` waits, so this is no busy loop.
    while not host.has_ended(_POLL_SECONDS):
        pass
    # Rank 0 writes this file last, so without it the profile failed.
    if not (folder / "profile.json").exists():
        first = failures.first(failure_folder)
        unknown = f"its processes ended and wrote no reason: see {folder / 'logs'}"
        raise RunFailed(first.reason if first else unknown)
    return profiler.read(folder)


def _measure(
    study: StudyRun,
    host: Host,
    described: ExperimentDescription,
    run: StrategyRun,
    notify: Callable[[str], None],
) -> StrategyResult:
    """Train under one strategy, then profile it: the profile shows what limits it."""
    if run.strategy == "dp" and run.devices != described.gpus > 0:
        reason = f"dp takes all {described.gpus} GPUs that it sees: set CUDA_VISIBLE_DEVICES"
        return StrategyResult(run, reason=reason)
    experiment = config.override(describe.mirrored(described), {"train.strategy": run.strategy})
    name, topology = f"{study.folder.path.name}-{run.name}", Topology(run.processes)
    launcher = TrainLauncher(host, study.folder, topology, study.environment)
    # Trained in full first. The profiler slows its steps, so their speed is not the result.
    trained = run_alone(launcher, experiment, name)
    # A strategy that cannot train here, such as dp without GPUs, is a row of the table.
    if trained.state != "COMPLETE":
        notify(f"{run.name:10} not run: {trained.reason}")
        return StrategyResult(run, reason=trained.reason)
    folder, breakdown = study.folder.path / "profiles" / run.name, None
    try:
        found = _profiled(study, host, experiment, run.processes, folder, trace=False)
        breakdown = found.breakdown
    except RunFailed as error:
        study.log.notice(f"{run.name} could not be profiled: {error}")
    # A run that ends before its first report has no summary of its speed.
    curve = trained.curve
    summary = curve.ended.metrics if curve.ended else {}
    speed = summary.get("samples_per_second", curve.mean_speed)
    notify(f"{run.name:10} {shown(speed):>12} samples/s")
    # The launcher gave it another name if this one was taken.
    sampled = fold(read_all(study.folder.children[-1].system(0)))
    return StrategyResult(
        run,
        seconds=summary.get("train_seconds", curve.seconds),
        samples_per_second=speed,
        half_width=summary.get("samples_per_second_half_width"),
        memory_megabytes=summary.get("peak_memory_megabytes"),
        gpu_percent=sampled.gpu_means.get("utilization_percentage"),
        samples_per_joule=curve.samples_per_joule,
        breakdown=breakdown,
    )

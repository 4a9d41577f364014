"""The same work trained under each strategy, one after the other, as children of one run; and one job profiled."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rankzero import config
from rankzero.compare import plots, results, tables
from rankzero.compare.results import StrategyResult, StrategyRow, StrategyRun
from rankzero.errors import RunFailed
from rankzero.experiment import Experiment
from rankzero.launch import failures as failure
from rankzero.launch.agent import Topology
from rankzero.redaction.text import settings_without_secrets
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.journal import read_all
from rankzero.training.profiling import profiler
from rankzero.training.profiling.profiler import Profile
from rankzero.tuning.objective import Objective
from rankzero.tuning.reports.study_run import Record
from rankzero.tuning.trials.follower import OF_A_TRIAL, Say, StopRules, TrialResult
from rankzero.tuning.trials.host_process import Host
from rankzero.tuning.trials.launcher import TrainLauncher
from rankzero.tuning.trials.pool import TrialJob, TrialPool, in_turn

OVER_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class CompareContext:
    """Where comparisons happen."""

    host: Host
    reference: Experiment
    identity: Identity
    runs: Path
    device: str
    gpus: int
    say: Say
    offline: bool = False
    """Whether the run is only recorded, and delivered to MLflow later."""

    def record(self, argv: Sequence[str]) -> Record:
        """Return the run of its own that everything is recorded in."""
        return Record(
            self.runs, self.identity, params_of(self.reference), argv, offline=self.offline
        )


def compare(
    bench: CompareContext, plan: Sequence[StrategyRun], argv: Sequence[str]
) -> tuple[list[StrategyRow], list[str], RunFolder]:
    """Train the same work under each entry; return the rows, why they may not be fair, and the run they are in."""
    with bench.record(argv) as kept:
        measured = [_measured(bench, kept, entry) for entry in plan]
        rows = results.rows(measured)
        notes = results.warnings(measured, bench.device == "cpu", "OMP_NUM_THREADS" in os.environ)
        says = tables.sentence(rows)
        kept.write(
            "compare.json",
            json.dumps(
                {"columns": list(tables.COLUMNS), "data": [tables.cells(row) for row in rows]}
            ),
        )
        kept.write_description(f"**{says}**\n\n{tables.markdown(rows, notes)}\n")
        _draw(kept, lambda: plots.write(kept.folder.artifacts, rows))
        kept.finished(says, _summary(rows))
    return rows, notes, kept.folder


def profile(
    bench: CompareContext, processes: int, argv: Sequence[str]
) -> tuple[Profile, RunFolder]:
    """Profile a few steady steps; traces and the verdict become artifacts of a run. Raises RunFailed."""
    with bench.record(argv) as kept:
        found = profiled(
            bench, bench.reference, processes, kept.folder.artifacts / "profile", trace=True
        )
        says = tables.verdict(found)
        kept.write_description(
            f"{says}\n\n{tables.costs_markdown(found)}\n\nTraces: `profile/`, for ui.perfetto.dev\n"
        )
        summary = {
            "step_seconds": found.step_seconds,
            "samples_per_second": found.batch_size / found.step_seconds,
        }
        shares = {"compute": found.breakdown.compute, **dataclasses.asdict(found.breakdown)}
        _draw(
            kept,
            lambda: plots.write_step(kept.folder.artifacts / "figures" / "step_time.png", found),
        )
        kept.finished(
            says, {**summary, **{f"{name}_fraction": value for name, value in shares.items()}}
        )
    return found, kept.folder


def profiled(
    bench: CompareContext, experiment: Experiment, processes: int, folder: Path, *, trace: bool
) -> Profile:
    """Return a profile of the experiment. Raises RunFailed with the reason where it could not be made."""
    failures = folder / "failures"
    folder.mkdir(parents=True, exist_ok=True)
    request = profiler.ProfileRequest(
        bench.identity.experiment_file or "",
        config.to_yaml(experiment),
        str(folder),
        str(failures),
        trace,
    )
    bench.host.run(
        "rankzero.training.profiling.profiler:main", Topology(processes), request, folder / "logs"
    )
    while not bench.host.over(OVER_SECONDS):
        pass
    if not (folder / "profile.json").exists():
        first = failure.first(failures)
        raise RunFailed(
            first.reason if first else f"its processes ended without a word; see {folder / 'logs'}"
        )
    return profiler.read(folder)


def params_of(reference: Experiment) -> dict[str, str]:
    """Return what of a configuration MLflow may know."""
    return settings_without_secrets(config.rendered(reference))


def _measured(bench: CompareContext, kept: Record, entry: StrategyRun) -> StrategyResult:
    """Train under one entry, then profile it: what limits it is measured, too."""
    if entry.strategy == "dp" and entry.devices != bench.gpus > 0:
        return StrategyResult(
            entry, reason=f"dp takes all {bench.gpus} GPUs that it sees; set CUDA_VISIBLE_DEVICES"
        )
    experiment = config.override(bench.reference, {"train.strategy": entry.strategy, **OF_A_TRIAL})
    name, ends = f"{bench.identity.name}-{entry.name}", list[TrialResult]()
    launcher = TrainLauncher(bench.host, kept.folder, Topology(entry.processes), kept.environment)
    job = TrialJob(
        experiment, name, Objective("throughput", experiment.goal, None), StopRules(), ends.append
    )
    TrialPool([launcher]).work(in_turn([job]))
    found = ends[0]
    if found.state != "COMPLETE":
        bench.say(f"{entry.name:10} not run: {found.reason}")
        return StrategyResult(entry, reason=found.reason)
    parts = kept.folder.path / "profiles" / entry.name
    try:
        limits = profiled(bench, experiment, entry.processes, parts, trace=False).breakdown
    except RunFailed as error:
        kept.notice(f"{entry.name} could not be profiled: {error}")
        limits = None
    one = _of_run(entry, found, RunFolder(bench.runs / name), experiment.train.batch_size)
    bench.say(f"{entry.name:10} {one.samples_per_second:12,.0f} samples/s")
    return dataclasses.replace(one, breakdown=limits)


def _of_run(
    entry: StrategyRun, found: TrialResult, folder: RunFolder, batch_size: int
) -> StrategyResult:
    assert found.curve.ended is not None
    figures, sampled = found.curve.ended.metrics, list(read_all(folder.system(0)))
    joules = found.curve.joules
    samples = found.curve.step * batch_size
    return StrategyResult(
        entry,
        seconds=figures.get("train_seconds", found.curve.seconds),
        samples_per_second=figures.get(
            "samples_per_second", samples / max(found.curve.seconds, 1e-9)
        ),
        half_width=figures.get("samples_per_second_half_width"),
        memory_megabytes=figures.get("peak_memory_megabytes"),
        gpu_percent=results.mean_of(sampled, "utilization_percentage"),
        samples_per_joule=samples / joules if joules else None,
    )


def _summary(rows: Sequence[StrategyRow]) -> dict[str, float]:
    return {
        f"speed_up/{row.measured.entry.name}": row.speed_up
        for row in rows
        if row.speed_up is not None
    }


def _draw(kept: Record, draw: Callable[[], None]) -> None:
    try:
        draw()
    except Exception as error:  # a picture that cannot be drawn must not cost the table
        kept.notice(f"the picture could not be drawn: {error!r}")

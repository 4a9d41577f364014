"""``rankzero repeat EXP [--over fold=0,1,2] [--seeds 3]``: the mean over folds and seeds."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence

from rankzero import config
from rankzero.cli import launch_run, options
from rankzero.cli.commands import search
from rankzero.cli.commands.resume import RECORDER_SECONDS, class_of
from rankzero.cli.commands.train import experiment_of
from rankzero.cli.display import delivery_notes
from rankzero.cli.display.live import command, look
from rankzero.cli.display.terminal import print_line, print_table
from rankzero.cli.submit import clusters
from rankzero.errors import FAILED, RESUMABLE, RunFailed, UserError
from rankzero.experiment import Experiment, Goal
from rankzero.launch import agent
from rankzero.launch.request import (
    make_folder,
    refuse_new,
    with_changes,
    with_saved,
    write_config,
)
from rankzero.launch.signals import SignalForwarder
from rankzero.mlflow_store import named_runs
from rankzero.mlflow_store.patience import patience
from rankzero.repeats import plan as plans
from rankzero.repeats import results
from rankzero.repeats.plan import Plan, Repetition
from rankzero.repeats.results import RunResult
from rankzero.reporting.run_facts import facts_of
from rankzero.run_store import provenance
from rankzero.run_store.attempt import is_written, sole_launcher
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import delivery_status, sync
from rankzero.tuning.reports.study_run import StudyRun

_Part = tuple[Repetition, Experiment, agent.Topology]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_experiment(parser, reference="the experiment's file, or a repeat to continue")
    over = "train with each of these values of a setting; give it again for another setting"
    parser.add_argument("--over", action="append", metavar="key=a,b,…", help=over)
    seeds = "how many seeds, or which: 3 means 0,1,2 (default: 3, or with --over train.seed)"
    parser.add_argument("--seeds", help=seeds)
    options.add_start_and_name(parser)
    options.add_processes(parser)
    options.add_new_run(parser)
    clusters.add_clusters(parser)


def run(arguments: argparse.Namespace) -> int:
    reference, runs = arguments.experiment, arguments.dir / "runs"
    # A file ends with .py, or has a class behind it: exp.py:Class.
    known = None if ".py:" in f"{reference}:" else named_runs.find(runs, reference)
    before = plans.stored(known) if known is not None else None
    if before is not None and arguments.nproc is None:
        arguments.nproc = before.nproc
    continued = known.path.name if known is not None and before is not None else ""
    one_task = "--nodes=1", "--ntasks=1"
    clusters.become(arguments, one_task, kind="repeat", known=continued)
    if known is not None and before is not None:
        folder, plan, experiment = known, *_continued(arguments, known, before)
        parts = _parts(arguments, plan, experiment)
    else:
        experiment = experiment_of(arguments)
        plan = _plan(arguments, experiment)
        # Every mistake is reported before there is a folder.
        parts = _parts(arguments, plan, experiment)
        folder = _new_folder(arguments, experiment, plan)
    for child in folder.children:
        if is_written(child):
            raise UserError(f"{child.path.name} is still training: wait until it has ended")
    with sole_launcher(folder, machines=1), SignalForwarder() as forwarder:
        with search.open_run(arguments, folder.identity, experiment, plan.params()) as study:
            found = _train(arguments, study, plan, parts, forwarder)
            complete = all(one.settled for one in found)
            stopped = "" if complete or not forwarder.received else forwarder.received[0].name
            _finish(study, plan, found, experiment.goal, stopped)
        _print(folder.path.name, found, experiment.goal)
        _deliver(folder, forwarder, offline=arguments.offline)
    if stopped:
        print(
            f"stopped by {stopped}; continue: {command(folder.root, 'repeat', folder.path.name)}",
            flush=True,
        )
        return RESUMABLE
    return delivery_notes.exit_code(folder) if complete else FAILED


def _continued(
    arguments: argparse.Namespace, folder: RunFolder, before: Plan
) -> tuple[Plan, Experiment]:
    """Return a repeat's plan, with the seeds and values of the command line, and its experiment."""
    if arguments.settings or arguments.start or arguments.run_name:
        raise UserError(
            f"{folder.path.name} is a repeat, and all its runs share their settings: to change "
            "them, start a new repeat of the experiment's file"
        )
    agent.warm_up()
    experiment = with_saved(class_of(folder, arguments.dir)(), folder, {})
    given = _plan(arguments, experiment)
    seeds = given.seeds if arguments.seeds else ()
    plan = before.extended(given.over, seeds, given.nproc)
    plans.refuse_taken_names(plan, folder)
    return plan, experiment


def _plan(arguments: argparse.Namespace, experiment: Experiment) -> Plan:
    over, seeds, nproc = arguments.over or (), arguments.seeds, arguments.nproc
    return plans.make_plan(over, seeds, experiment.train.seed, nproc)


def _new_folder(arguments: argparse.Namespace, experiment: Experiment, plan: Plan) -> RunFolder:
    refuse_new(type(experiment), config.parse_assignments(arguments.settings))
    for one in plan:
        config.refuse_stale(experiment, one.settings)
    name, runs = options.run_name(arguments, "repeat"), arguments.dir / "runs"
    if plans.stored(RunFolder(runs / name)) is not None:
        again = command(arguments.dir, "repeat", name)
        raise UserError(f"there is a repeat {name!r} already: continue it: {again}")
    plans.refuse_taken_names(plan, RunFolder(runs / name))
    folder = make_folder(runs, options.identity_for(arguments, name))
    write_config(folder, experiment)
    return folder


def _parts(arguments: argparse.Namespace, plan: Plan, experiment: Experiment) -> list[_Part]:
    """Return the runs to train. Raises UserError and ConfigError for a value that cannot be."""
    changed = [(one, with_changes(experiment, one.settings)) for one in plan]
    first: dict[str, Repetition] = {}
    for one, own in changed:
        if (same := first.setdefault(config.to_yaml(own), one)) is not one:
            raise UserError(f"{same.label} and {one.label} are equal: give each value once")
    return [(one, own, launch_run.topology_of(arguments, own)) for one, own in changed]


def _train(
    arguments: argparse.Namespace,
    study: StudyRun,
    plan: Plan,
    parts: Sequence[_Part],
    forwarder: SignalForwarder,
) -> list[RunResult]:
    """Train each run that has not finished, one after the other; return all results."""
    parent, runs = study.folder, study.folder.path.parent
    folders = [RunFolder(runs / name) for name in plans.run_names(plan, parent)]
    found = [results.read(one, folder) for (one, _, _), folder in zip(parts, folders, strict=True)]
    _write(study, plan, found)
    _log_means(study, found)
    for number, (one, experiment, topology) in enumerate(parts):
        folder = folders[number]
        if found[number].settled or forwarder.received:
            continue
        print_line(f"\nrun {number + 1} of {len(parts)}: {one.label}")
        RunFolder.open_or_create(runs, parent.identity.child(folder.path.name))
        if folder not in parent.children:
            parent.add_child(folder.path.name)
        with sole_launcher(folder, machines=1):
            if folder.events.exists():
                sync.close_if_dead(folder, RECORDER_SECONDS)
            write_config(folder, experiment)
            # An earlier attempt's checkpoint is continued. Without one, the run starts again.
            attempt = launch_run.LaunchPlan(
                folder,
                experiment,
                topology,
                tags=provenance.tags_of_user(options.tags_of(arguments)),
                offline=arguments.offline,
                is_part=True,
            )
            try:
                launch_run.run(attempt, forwarder)
            except RunFailed as error:
                print_line(f"failed: {error}")
        found[number] = results.read(one, folder)
        _log_means(study, found)
    return found


def _log_means(study: StudyRun, found: Sequence[RunResult]) -> None:
    """Log the means. Those of an earlier session may have counted a run that is deleted now."""
    facts, new = facts_of(study.folder), results.flat(results.means(found))
    if facts.metrics or new:
        # MLflow shows the value at the highest step.
        study.log_metrics(facts.steps + 1, {**dict.fromkeys(facts.metrics, math.nan), **new})


def _finish(
    study: StudyRun, plan: Plan, found: Sequence[RunResult], goal: Goal, stopped: str
) -> None:
    """Write the means into the repeat's own run, and its end."""
    _write(study, plan, found)
    text = results.sentence(found, goal)
    study.write_description(results.page(study.folder.path.name, found, goal))
    goal_mean = results.means(found).get(goal.metric)
    summary = {"finished_runs": float(sum(one.finished for one in found))}
    if goal_mean is not None:
        summary["best"] = goal_mean.mean
    if stopped:
        study.finish(f"stopped by {stopped}. {text}", summary, "KILLED")
    else:
        complete = all(one.settled for one in found)
        study.finish(text, summary, "FINISHED" if complete else "FAILED")


def _write(study: StudyRun, plan: Plan, found: Sequence[RunResult]) -> None:
    fields = {**dataclasses.asdict(plan), **results.as_fields(found)}
    study.write(plans.file_of(study.folder).name, json.dumps(fields, indent=1))


def _print(name: str, found: Sequence[RunResult], goal: Goal) -> None:
    print()
    print_table(f"repeat {name}", *results.run_table(found, goal))
    if any(one.finished for one in found):
        print_table("means", *results.metric_table(found))
    print(*results.problems(found, goal), results.sentence(found, goal), sep="\n", flush=True)


def _deliver(folder: RunFolder, forwarder: SignalForwarder, *, offline: bool) -> None:
    """Wait until MLflow has all runs, and log their best models, all within `patience`."""
    from rankzero.training.checkpoints import best_model

    until = time.monotonic() + patience().seconds
    hurried = launch_run.stops_waiting(forwarder.received)
    delivery_notes.print_delivery(folder, offline=offline, hurried=hurried)
    # A run that MLflow lacks keeps its mark, for `rankzero sync`.
    late = [child for child in folder.children if child.late_model.exists() and not offline]
    for child in late:
        seconds = until - time.monotonic()
        if delivery_status.status(child).done and not hurried() and seconds > 0:
            best_model.log_best(child, delivery_notes.print_note, hurried, seconds)
    if left := sum(child.late_model.exists() for child in late):
        again = command(folder.root, "sync", folder.path.name)
        delivery_notes.print_note(f"best models that MLflow lacks: {left}; {again}")
    again = command(folder.root, "report", folder.path.name)
    print(f"look:  {look(folder)}   again: {again}", flush=True)

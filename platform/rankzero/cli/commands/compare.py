"""``rankzero compare EXP`` and ``rankzero profile EXP``: which strategy is fast, and why."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager

from rankzero import config
from rankzero.cli import options
from rankzero.cli.commands import search
from rankzero.cli.display import delivery_notes
from rankzero.cli.display.live import command, look
from rankzero.cli.display.terminal import print_line, print_table
from rankzero.errors import FAILED, UserError
from rankzero.run_store.spoken_names import new_name
from rankzero.tuning.reports.study_run import StudyRun
from rankzero.tuning.trials import describe
from rankzero.tuning.trials.describe import ExperimentDescription, Question


def add_arguments(parser: argparse.ArgumentParser) -> None:
    search.add_experiment_arguments(parser, nproc=False)
    names = "which, separated by commas (default: single,ddp; with GPUs also dp)"
    parser.add_argument("--strategies", help=names)
    counts = "numbers of devices, separated by commas (default: 1 and all GPUs, or 1,2)"
    parser.add_argument("--nproc", help=counts)


def run(arguments: argparse.Namespace) -> int:
    from rankzero.compare import runner, tables
    from rankzero.compare.results import strategy_runs

    # Report mistakes before a process is started.
    names = [word for word in arguments.settings if "=" not in word]
    if names and (arguments.dir / "runs" / arguments.experiment).is_dir():
        report = command(arguments.dir, "report", arguments.experiment, *names)
        raise UserError(f"compare trains an experiment; to compare runs: {report}")
    typed = bool(arguments.strategies)
    strategies = arguments.strategies.split(",") if typed else ["single", "ddp"]
    counts = options.device_counts(arguments.nproc or "1,2")
    plan = strategy_runs(strategies, counts, typed=typed)
    settings = config.parse_assignments(arguments.settings)
    with search.stoppable(arguments), search.host(arguments, max(counts)) as host:
        described = host.describe(Question(arguments.experiment, settings, 1))
        # The defaults depend on the GPUs, which only the host may look for.
        if described.gpus:
            strategies = strategies if typed else ["single", "dp", "ddp"]
            counts = counts if arguments.nproc else [1, described.gpus]
            plan = strategy_runs(strategies, counts, typed=typed)
        with _open_run(arguments, described) as study:
            rows, notes = runner.compare(study, host, described, plan, print_line)
    head, body = tables.table(rows)
    print_table("the same work, compared", head, body)
    problems = [f"not run: {reason}" for reason in tables.reasons(rows)]
    for text in [*problems, *(f"not fair: {note}" for note in notes), tables.sentence(rows)]:
        print_line(text)
    delivery_notes.print_delivery(study.folder, offline=arguments.offline)
    print(f"look:  {look(study.folder)}   run: {study.folder.path.name}", flush=True)
    trained = any(row.speed_up is not None for row in rows)
    return delivery_notes.exit_code(study.folder) if trained else FAILED


def add_arguments_profile(parser: argparse.ArgumentParser) -> None:
    search.add_experiment_arguments(parser)


def run_profile(arguments: argparse.Namespace) -> int:
    from rankzero.compare import runner, tables

    settings = config.parse_assignments(arguments.settings)
    with search.stoppable(arguments), search.host(arguments) as host:
        described = host.describe(Question(arguments.experiment, settings, arguments.nproc))
        with _open_run(arguments, described) as study:
            profile = runner.profile(study, host, described)
    print_table("top costs", *tables.costs(profile))
    print_line(tables.verdict(profile))
    delivery_notes.print_delivery(study.folder, offline=arguments.offline)
    print(f"trace: {study.folder.artifacts / 'profile'} (open in ui.perfetto.dev)")
    print(f"look:  {look(study.folder)}", flush=True)
    return delivery_notes.exit_code(study.folder)


def _open_run(
    arguments: argparse.Namespace, described: ExperimentDescription
) -> AbstractContextManager[StudyRun]:
    """Return the new run of a comparison or a profile, for a ``with`` block."""
    runs = arguments.dir / "runs"
    name = arguments.study or new_name(runs, arguments.verb)
    if (runs / name).exists():
        raise UserError(f"there is a run {name!r} already: choose another --name")
    identity = options.identity_for(arguments, name)
    return search.open_run(arguments, identity, describe.mirrored(described))

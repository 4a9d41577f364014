"""``rankzero search EXP [--minutes M | --trials N] [key=value…]``: find the sweet spot."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rankzero import config, experiment_file
from rankzero.cli.commands.train import add_delivery_arguments
from rankzero.cli.display import delivery_notes
from rankzero.cli.display.live import program
from rankzero.cli.identity import identity_for
from rankzero.cli.launch_run import libraries_of
from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.mlflow_store import uris
from rankzero.run_store import names
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.telemetry.host import usable_cores
from rankzero.tracking import delivery_status
from rankzero.tuning.objective import NAMES
from rankzero.tuning.options import PRUNERS, SAMPLERS, SearchOptions, default_storage
from rankzero.tuning.space import Space, make_space
from rankzero.tuning.trials import describe
from rankzero.tuning.trials.describe import ExperimentDescription
from rankzero.tuning.trials.host_process import Host
from rankzero.tuning.trials.resources import shares

_PART_OF_THE_NAME = ("objective", "sampler", "pruner", "tolerance", "trial_minutes")


def add_experiment_arguments(parser: argparse.ArgumentParser, *, nproc: bool = True) -> None:
    """Add the options that `search`, `probe`, `compare` and `profile` share."""
    parser.add_argument(
        "experiment", metavar="EXP", help="the experiment's file: path.py or path.py:Class"
    )
    parser.add_argument(
        "settings",
        metavar="key=value",
        nargs="*",
        help="settings of your own configuration to change",
    )
    if nproc:
        parser.add_argument(
            "--nproc", type=int, help="processes of each trial (default: one per GPU, or 1)"
        )
    parser.add_argument(
        "--tracking-uri", help="where MLflow keeps runs (default: $MLFLOW_TRACKING_URI or embedded)"
    )
    parser.add_argument(
        "--experiment-name", help="the MLflow experiment (default: the file's name)"
    )
    parser.add_argument(
        "--new", action="store_true", help="start a new study; the earlier one is kept"
    )
    add_delivery_arguments(parser)
    parser.set_defaults(study=None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rankzero search`."""
    add_experiment_arguments(parser)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--minutes", type=float, help="how long to search, the confirmation included"
    )
    budget.add_argument(
        "--trials", type=int, help="how many trials, your own configuration included (default: 20)"
    )
    parser.add_argument(
        "--objective",
        choices=NAMES,
        default=NAMES[0],
        help="what to look for (default: %(default)s)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.01,
        help="for throughput: how much worse than yours the quality may be, relative to it",
    )
    parser.add_argument(
        "--trial-minutes", type=float, help="for quality: the training time of each trial"
    )
    parser.add_argument(
        "--sampler", choices=SAMPLERS, default="tpe", help="what draws the next trial (%(default)s)"
    )
    parser.add_argument(
        "--pruner", choices=PRUNERS, default="asha", help="what stops bad trials (%(default)s)"
    )
    _add_confirmation_and_study_arguments(parser)


def _add_confirmation_and_study_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="new seeds on which the best are confirmed (%(default)s)",
    )
    parser.add_argument(
        "--challengers",
        type=int,
        default=3,
        help="how many of the best are confirmed (%(default)s)",
    )
    parser.add_argument(
        "--parallel",
        type=int,
        default=1,
        metavar="K",
        help="trials at a time, each on its own GPUs or cores (1)",
    )
    parser.add_argument(
        "--study", metavar="NAME", help="the study's name (default: by what is searched)"
    )
    parser.add_argument(
        "--storage",
        help="the study's database, which machines may share (default: studies.db next to the "
        "runs; not MLflow's)",
    )
    # For rankzero.search, which runs the command: the study's name as JSON.
    parser.add_argument("--result-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--silence-seconds",
        type=float,
        default=300.0,
        help="a trial that shows no sign of life for so long is killed",
    )
    parser.add_argument(
        "--no-probe",
        dest="probe",
        action="store_false",
        help="search without measuring speeds first",
    )


def run(arguments: argparse.Namespace) -> int:
    """Search; return the exit code."""
    _check(arguments)
    with contextlib.ExitStack() as hosts:
        first = hosts.enter_context(contextlib.closing(Host(libraries(arguments))))
        described, space = described_space(arguments, first)
        if arguments.parallel == 1:
            return _search(arguments, [first], described, space)
        # The first host has the whole machine. Each trial needs a host on its own share.
        hosts.pop_all().close()
        found = shares(
            arguments.parallel, described.processes, described.gpus, usable_cores(), os.environ
        )
        side_by_side = [
            hosts.enter_context(contextlib.closing(Host(libraries(arguments), share)))
            for share in found
        ]
        return _search(arguments, side_by_side, described, space)


def libraries(arguments: argparse.Namespace) -> list[str]:
    """Return the slow libraries of the experiment's file. Raises UserError for a missing file."""
    return libraries_of(experiment_file.split(arguments.experiment)[0])


def described_space(
    arguments: argparse.Namespace, host: Host
) -> tuple[ExperimentDescription, Space]:
    """Return the experiment, and the space around it. Raises UserError, ConfigError."""
    settings = config.parse_assignments(arguments.settings)
    parallel = getattr(arguments, "parallel", 1)
    found = host.describe(arguments.experiment, settings, arguments.nproc, parallel)
    reference = describe.mirrored(found)
    space = make_space(
        reference, found.processes, found.lr_exponent, found.precisions, found.samples
    )
    return found, space


def print_line(text: str) -> None:
    """Print a line at once, also into a file or a pipe."""
    print(text, flush=True)


def delivery_lines(folder: RunFolder, *, offline: bool) -> list[str]:
    """Wait for the delivery to MLflow; return what it lacks, and its problems."""
    if offline:
        delivery_status.wait_for_recorder(folder)
        return [f"note: {delivery_notes.offline(folder)}"]
    delivery = delivery_status.wait(folder)
    return [f"note: {line}" for line in delivery_notes.lines(delivery, folder.path.name)]


def study_identity(
    arguments: argparse.Namespace, reference: Experiment, processes: int, verb: str
) -> Identity:
    """Return the identity of the study's run. The same command gets the same: it resumes."""
    path, cls = experiment_file.split(arguments.experiment)
    base = arguments.study
    # The name depends on all that must stay equal, so that the same command finds its study.
    if not base:
        how = sorted(
            (key, value) for key, value in vars(arguments).items() if key in _PART_OF_THE_NAME
        )
        what = repr((str(path), cls, config.to_yaml(reference), processes, how))
        digest = hashlib.sha256(what.encode()).hexdigest()[:6]
        base = f"{names.made_plain(path.stem)}-{verb}-{digest}"
    names.checked_run(base)
    return identity_for(arguments, _newest_study(arguments.dir / "runs", base, arguments.new))


def _search(
    arguments: argparse.Namespace,
    hosts: Sequence[Host],
    described: ExperimentDescription,
    space: Space,
) -> int:
    from rankzero.tuning import search

    identity = study_identity(arguments, space.reference, described.processes, "search")
    if not arguments.offline:
        uris.prepare_store(identity.tracking_uri)
    setup = search.SearchSetup(
        identity=identity,
        root=arguments.dir,
        space=space,
        described=described,
        options=_options(arguments),
        storage=arguments.storage or default_storage(arguments.dir),
        shared=arguments.storage is not None,
        probes=arguments.probe,
        use=f"{program()} train {arguments.experiment} --from {identity.name}",
        offline=arguments.offline,
        argv=sys.argv,
        hosts=hosts,
        notify=print_line,
    )
    if arguments.result_file is not None:
        arguments.result_file.write_text(json.dumps({"study": identity.name}), encoding="utf-8")
    where = f"{described.processes} x {described.device}"
    print_line(f"study  {identity.name}  ({arguments.objective}, {where})")
    outcome = search.run(setup)
    notes = delivery_lines(outcome.folder, offline=arguments.offline)
    print_line("\n".join(["", outcome.text, *notes]))
    if outcome.decided:
        again = f"{program()} report {identity.name}"
        print_line(f"use:   {setup.use}\nlook:  {program()} ui   again: {again}")
    return delivery_notes.exit_code(outcome.folder)


def _options(arguments: argparse.Namespace) -> SearchOptions:
    return SearchOptions(
        objective=arguments.objective,
        sampler=arguments.sampler,
        pruner=arguments.pruner,
        minutes=arguments.minutes,
        trials=arguments.trials or (None if arguments.minutes else SearchOptions.trials),
        tolerance=arguments.tolerance,
        trial_minutes=arguments.trial_minutes,
        challengers=arguments.challengers,
        seeds=arguments.seeds,
        silence_seconds=arguments.silence_seconds,
    )


def _check(arguments: argparse.Namespace) -> None:
    """Raise UserError for options that are out of range or do not fit together."""
    for name in ("minutes", "trials", "trial_minutes", "seeds", "silence_seconds", "parallel"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    if arguments.seeds < 2:
        raise UserError(
            f"--seeds must be at least 2, got {arguments.seeds}: one run says nothing about the "
            "noise"
        )
    if arguments.objective == "quality" and arguments.trial_minutes is None:
        raise UserError(
            "--objective quality needs --trial-minutes: the training time that each trial gets"
        )
    if arguments.tolerance < 0:
        raise UserError(f"--tolerance must be at least 0, got {arguments.tolerance:g}")
    tracking = uris.resolve_tracking_uri(arguments.tracking_uri, os.environ, arguments.dir)
    if not arguments.storage:
        default_storage(arguments.dir)  # called for its check
    elif _is_same_database(arguments.storage, tracking):
        raise UserError(
            "--storage is MLflow's own database: their tables would clash. Name another"
        )


def _is_same_database(storage: str, tracking_uri: str) -> bool:
    paths = uris.sqlite_path(storage), uris.sqlite_path(tracking_uri)
    if None in paths:
        return storage == tracking_uri
    return len({path.absolute() for path in paths if path is not None}) == 1


def _newest_study(runs: Path, base: str, new: bool) -> str:
    """Return the newest study's name, or with `new` the next: ``base``, ``base-2`` …"""
    count = 1
    while (runs / f"{base}-{count + 1}").exists():
        count += 1
    count += new and (runs / base).exists()
    return base if count == 1 else f"{base}-{count}"

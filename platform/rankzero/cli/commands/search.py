"""``rankzero search EXP [--minutes M | --trials N] [key=value…]``: find the throughput sweet spot."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from rankzero import config, experiment_file
from rankzero.cli.commands.train import add_offline_argument
from rankzero.cli.display import delivery_notes
from rankzero.cli.display.live import program
from rankzero.cli.launch_run import libraries_of
from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.mlflow_store import uris
from rankzero.run_store import names
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.telemetry.host import usable_cores
from rankzero.tracking import delivery_status
from rankzero.tuning.budget import SearchOptions
from rankzero.tuning.objective import NAMES
from rankzero.tuning.space import Space, make_space
from rankzero.tuning.trials import describe
from rankzero.tuning.trials.host_process import Host
from rankzero.tuning.trials.resources import shares, visible_gpus

PART_OF_THE_NAME = ("objective", "sampler", "pruner", "tolerance", "trial_minutes")
SAMPLERS, PRUNERS = ("tpe", "gp", "random", "grid"), ("asha", "hyperband", "median", "none")


def add_experiment_arguments(parser: argparse.ArgumentParser, *, nproc: bool = True) -> None:
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
        "--new", action="store_true", help="begin anew; what there is so far is kept"
    )
    add_offline_argument(parser)
    parser.set_defaults(study=None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        help="how much worse than yours, relatively, with throughput",
    )
    parser.add_argument(
        "--trial-minutes", type=float, help="the training time of each trial, with quality"
    )
    parser.add_argument(
        "--sampler", choices=SAMPLERS, default="tpe", help="what draws the next trial (%(default)s)"
    )
    parser.add_argument(
        "--pruner", choices=PRUNERS, default="asha", help="what stops bad trials (%(default)s)"
    )
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
        "--study", metavar="NAME", help="what to call the study (default: by what is searched)"
    )
    parser.add_argument(
        "--storage",
        help="the study's database, which machines may share (default: studies.db beside the runs; not MLflow's)",
    )
    # For rankzero.search, which runs the command: the study's name as JSON.
    parser.add_argument("--result-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--silence-seconds",
        type=float,
        default=300.0,
        help="without a sign of life, a trial is killed",
    )
    parser.add_argument(
        "--no-probe",
        dest="probe",
        action="store_false",
        help="search without measuring speeds first",
    )


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    with contextlib.ExitStack() as hosts:
        first = hosts.enter_context(contextlib.closing(Host(libraries(arguments))))
        described, space = look(arguments, first)
        if arguments.parallel == 1:
            return _search(arguments, [first], described, space)
        hosts.pop_all().close()
        found = shares(
            arguments.parallel,
            described.processes,
            visible_gpus(described.gpus, os.environ),
            usable_cores(),
        )
        side_by_side = [
            hosts.enter_context(contextlib.closing(Host(libraries(arguments), share)))
            for share in found
        ]
        return _search(arguments, side_by_side, described, space)


def libraries(arguments: argparse.Namespace) -> list[str]:
    """Return the slow libraries of the experiment's file. Raises UserError where there is no such file."""
    return libraries_of(experiment_file.split(arguments.experiment)[0])


def look(arguments: argparse.Namespace, host: Host) -> tuple[describe.ExperimentDescription, Space]:
    """Return what the experiment is, and the space around it. Raises UserError, ConfigError."""
    settings = config.parse_assignments(arguments.settings)
    found = host.describe(
        arguments.experiment, settings, arguments.nproc, getattr(arguments, "parallel", 1)
    )
    space = make_space(
        describe.mirrored(found),
        found.processes,
        found.lr_exponent,
        found.precisions,
        found.samples,
    )
    return found, space


def say(text: str) -> None:
    print(text, flush=True)


def delivery_lines(folder: RunFolder, *, offline: bool) -> list[str]:
    """Wait for the delivery to MLflow; return what it lacks and what went wrong."""
    if offline:
        delivery_status.wait_for_recorder(folder)
        return [f"note: {delivery_notes.offline(folder)}"]
    delivery = delivery_status.wait(folder)
    return [f"note: {line}" for line in delivery_notes.lines(delivery, folder.path.name)]


def _search(
    arguments: argparse.Namespace,
    hosts: Sequence[Host],
    described: describe.ExperimentDescription,
    space: Space,
) -> int:
    from rankzero.tuning import search
    from rankzero.tuning.setup import SearchSetup

    identity = identity_of(arguments, space.reference, described.processes, "search")
    if not arguments.offline:
        uris.prepare_store(identity.tracking_uri)
    quest = SearchSetup(
        identity=identity,
        root=arguments.dir,
        space=space,
        described=described,
        options=_options(arguments),
        sampler=arguments.sampler,
        pruner=arguments.pruner,
        storage=arguments.storage or f"sqlite:///{(arguments.dir / 'studies.db').absolute()}",
        shared=arguments.storage is not None,
        probes=arguments.probe,
        use=f"{program()} train {arguments.experiment} --from {identity.name}",
        offline=arguments.offline,
    )
    if arguments.result_file is not None:
        arguments.result_file.write_text(json.dumps({"study": identity.name}), encoding="utf-8")
    say(
        f"study  {identity.name}  ({arguments.objective}, {described.processes} x {described.device})"
    )
    outcome = search.run(quest, hosts, sys.argv, say)
    notes = delivery_lines(outcome.folder, offline=arguments.offline)
    say("\n".join(["", outcome.says, *notes]))
    if outcome.decided:
        say(
            f"use:   {quest.use}\nlook:  {program()} ui   again: {program()} report {identity.name}"
        )
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for name in ("minutes", "trials", "trial_minutes", "seeds", "silence_seconds", "parallel"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    if arguments.seeds < 2:
        raise UserError(
            f"--seeds must be at least 2, got {arguments.seeds}: one run says nothing about the noise"
        )
    if arguments.objective == "quality" and arguments.trial_minutes is None:
        raise UserError(
            "--objective quality needs --trial-minutes: the training time that each trial gets"
        )
    if arguments.tolerance < 0:
        raise UserError(f"--tolerance must be at least 0, got {arguments.tolerance:g}")
    tracking = uris.resolve_tracking_uri(arguments.tracking_uri, os.environ, arguments.dir)
    if not arguments.storage:
        uris.require_plain((arguments.dir / "studies.db").absolute())
    if arguments.storage and _same_database(arguments.storage, tracking):
        raise UserError(
            "--storage is MLflow's own database: their tables would clash; name another"
        )


def _same_database(storage: str, tracking_uri: str) -> bool:
    one, other = uris.sqlite_path(storage), uris.sqlite_path(tracking_uri)
    return (
        storage == tracking_uri
        if one is None or other is None
        else one.absolute() == other.absolute()
    )


def _options(arguments: argparse.Namespace) -> SearchOptions:
    trials = arguments.trials or (None if arguments.minutes else SearchOptions.trials)
    return SearchOptions(
        arguments.objective,
        arguments.minutes,
        trials,
        arguments.tolerance,
        arguments.trial_minutes,
        arguments.challengers,
        arguments.seeds,
        arguments.silence_seconds,
    )


def identity_of(
    arguments: argparse.Namespace, reference: Experiment, processes: int, verb: str
) -> Identity:
    """Return the study's run: the same for the same command, so that it goes on where it was."""
    path, cls = experiment_file.split(arguments.experiment)
    how = {key: value for key, value in vars(arguments).items() if key in PART_OF_THE_NAME}
    what = repr((str(path), cls, config.to_yaml(reference), processes, sorted(how.items())))
    base = (
        arguments.study
        or f"{names.made_plain(path.stem)}-{verb}-{hashlib.sha256(what.encode()).hexdigest()[:6]}"
    )
    names.checked_run(base)
    name = newest(arguments.dir / "runs", base, arguments.new)
    uri = uris.resolve_tracking_uri(arguments.tracking_uri, os.environ, arguments.dir)
    return Identity(
        name=name,
        uuid=secrets.token_hex(16),
        experiment=arguments.experiment_name
        or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        or path.stem,
        tracking_uri=uri,
        artifact_root=uris.artifact_root(uri),
        experiment_file=f"{path}:{cls}" if cls else str(path),
        project_dir=str(Path.cwd()),
    )


def newest(runs: Path, base: str, new: bool) -> str:
    """Return the newest study of that name, or the name of the next: ``base``, ``base-2`` … Nothing is overwritten."""
    count = 1
    while (runs / f"{base}-{count + 1}").exists():
        count += 1
    count += new and (runs / base).exists()
    return base if count == 1 else f"{base}-{count}"

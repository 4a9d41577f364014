"""``rankzero search EXP [--minutes M | --trials N] [key=value…]``: find the sweet spot."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import glob
import hashlib
import json
import math
import os
import shlex
import signal
import socket
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rankzero import config, experiment_file
from rankzero.catalog import command_lines, deleted, lookup
from rankzero.cli import options
from rankzero.cli.display import delivery_notes
from rankzero.cli.display.live import command, look, program
from rankzero.cli.display.terminal import is_interactive, print_line, text_console
from rankzero.cli.launch_run import libraries_of, stops_waiting
from rankzero.cli.submit import clusters
from rankzero.errors import RESUMABLE, UserError
from rankzero.events import RunStarted
from rankzero.experiment import Experiment
from rankzero.launch.signals import handled_signals
from rankzero.mlflow_store import uris
from rankzero.redaction.text import text_without_secrets
from rankzero.reporting import reproduce
from rankzero.run_store import names, provenance
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.journal import read_all
from rankzero.telemetry.host import core_count, usable_cores
from rankzero.tuning import knobs
from rankzero.tuning.objective import NAMES
from rankzero.tuning.options import PRUNERS, SAMPLERS, SearchOptions, default_storage
from rankzero.tuning.places import ray_actor, slurm
from rankzero.tuning.places.remote_host import RemoteHost
from rankzero.tuning.reports.study_run import StudyRun
from rankzero.tuning.space import Space, make_space
from rankzero.tuning.trials import describe
from rankzero.tuning.trials.describe import ExperimentDescription, Question
from rankzero.tuning.trials.host import Host, closed_together
from rankzero.tuning.trials.host_process import LocalHost
from rankzero.tuning.trials.resources import Share, shares

_PART_OF_THE_NAME = ("objective", "sampler", "pruner", "tolerance", "trial_minutes", "knobs")


def add_experiment_arguments(
    parser: argparse.ArgumentParser, *, nproc: bool = True, probes: bool = False
) -> None:
    """Add the options that `search`, `probe`, `compare` and `profile` share.

    `probes`: and those that only the two that measure a probe map have.
    """
    options.add_experiment(parser, "settings of your own configuration to change")
    if nproc:
        processes = f"processes{' of each trial' * probes} (default: one per GPU, or 1)"
        processes += "; 1,2,4: the search chooses, and yours has the first" if probes else ""
        parser.add_argument("--nproc", type=str if probes else int, help=processes)
    options.add_new_run(parser)
    name = "the study's name (default: by what is searched)" if probes else "the run's name"
    names = ["--name", "--study"] if probes else ["--name"]
    parser.add_argument(*names, dest="study", metavar="NAME", help=name)
    if probes:
        again = "start a new study; keep the old one"
        parser.add_argument("--new", action="store_true", help=again)
        which = f"what to vary, such as batch,lr,workers: {', '.join(knobs.TRAINED)} are trained, "
        which += f"{', '.join(knobs.MEASURED)} measured (default: by the machine and the data)"
        parser.add_argument("--knobs", action="append", metavar="LIST", help=which)
        silence = "a trial, or a cell of the probe map, with no sign of life for so long is killed"
        parser.add_argument("--silence-seconds", type=float, default=300.0, help=silence)
    clusters.add_clusters(parser)
    if probes:
        many = "with --slurm or --ray: machines of each trial, with --nproc processes each (1)"
        parser.add_argument("--nnodes", type=int, default=1, metavar="N", help=many)
    # Options that only `search` has, and functions read that all of these commands call.
    parser.set_defaults(parallel=1, probe=True, **({} if probes else {"nnodes": 1}))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_experiment_arguments(parser, probes=True)
    add, budget = parser.add_argument, parser.add_mutually_exclusive_group()
    how_long = "how long to search, the confirmation included"
    budget.add_argument("--minutes", type=float, help=how_long)
    how_many = "how many trials, your own configuration included (default: 20)"
    budget.add_argument("--trials", type=int, help=how_many)
    # As a metavar, the choices would be wider than a terminal.
    choose = functools.partial(add, metavar="NAME")
    what = "what to look for: %(choices)s (default: %(default)s)"
    choose("--objective", choices=NAMES, default=NAMES[0], help=what)
    worse = "for throughput, tokens: how much worse than yours the quality may be, relative to it"
    add("--tolerance", type=float, default=0.01, help=worse)
    add("--trial-minutes", type=float, help="for quality: a trial's minutes, evaluations included")
    draws = "what draws the next trial: %(choices)s (default: %(default)s)"
    choose("--sampler", choices=SAMPLERS, default="tpe", help=draws)
    stops = "what stops bad trials: %(choices)s (default: %(default)s)"
    choose("--pruner", choices=PRUNERS, default="asha", help=stops)
    add("--price", type=float, help="a device for an hour costs this: states the cost")
    seeds = "new seeds on which the best are confirmed (%(default)s)"
    add("--seeds", type=int, default=3, help=seeds)
    best = "how many of the best are confirmed (%(default)s)"
    add("--challengers", type=int, default=3, help=best)
    parallel = "trials at a time, each on its own GPUs or cores (1)"
    add("--parallel", type=int, default=1, metavar="K", help=parallel)
    shared = "a database or journal:///FILE that machines may share (default: studies.db in --dir)"
    add("--storage", help=shared)
    add("--like", metavar="STUDY", help="begin with the best trials of an earlier study")
    # For rankzero.search, which runs the command: the study's name as JSON.
    add("--result-file", type=Path, help=argparse.SUPPRESS)
    add("--no-probe", dest="probe", action="store_false", help="search without a probe map")


def run(arguments: argparse.Namespace) -> int:
    chosen = _search_options(arguments)
    try:
        with stoppable(arguments):
            return _run(arguments, chosen)
    except KeyboardInterrupt:
        # Without --new, a command continues the newest study that has begun.
        folder: RunFolder | None = vars(arguments).get("opened")
        again = _again(new=arguments.new and not (folder and folder.events.exists()))
        print(f"interrupted: `{again}` continues the study", file=sys.stderr)
        return RESUMABLE


def _run(arguments: argparse.Namespace, chosen: SearchOptions) -> int:
    with closed_together() as hosts:
        first = _make_host(arguments)
        hosts.append(first)
        described, space = described_space(arguments, first)
        if chosen.price and space.reference.train.strategy == "dp":
            raise UserError("--price counts processes, and train.strategy=dp has one: use ddp")
        if chosen.objective == "energy" and arguments.parallel > 1 and not described.gpus:
            raise UserError("without GPUs, energy is the whole machine's: leave out --parallel")
        if arguments.parallel == 1 or _is_elsewhere(arguments):
            hosts += [_make_host(arguments) for _ in range(arguments.parallel - 1)]
            return _search(arguments, chosen, hosts, described, space)
        # The first host has the whole machine. Each trial needs a host on its own share.
        hosts.remove(first)
        first.close()
        cores = own_cores(socket.gethostname())
        found = shares(arguments.parallel, max(space.devices), described.gpus, cores, os.environ)
        hosts += [_make_host(arguments, share) for share in found]
        return _search(arguments, chosen, hosts, described, space)


@contextlib.contextmanager
def stoppable(arguments: argparse.Namespace) -> Iterator[None]:
    """Let SIGTERM and SIGHUP stop the block as Ctrl-C does, and MLflow get the end of its run.

    Main thread only.
    """
    numbers = handled_signals([signal.SIGTERM, signal.SIGHUP])

    def stop(number: int, _frame: object) -> None:
        # A service manager sends both. The second must not end the stop.
        for one in numbers:
            signal.signal(one, lambda _number, _frame: None)
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        _deliver_stopped(arguments)
        raise
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)


def _deliver_stopped(arguments: argparse.Namespace) -> None:
    """Wait some seconds until MLflow has the end of the run that was stopped, if one had begun."""
    folder: RunFolder | None = vars(arguments).get("opened")
    # A helper of a search has a run of another name. The one of this name may still run.
    if folder is None or lookup.last_end(folder) is None:
        return
    hurried = stops_waiting([signal.SIGTERM])
    with contextlib.suppress(KeyboardInterrupt):  # it ends the wait
        delivery_notes.print_delivery(folder, offline=arguments.offline, hurried=hurried)


def own_cores(host: str) -> list[int]:
    """Return the cores that trials side by side divide. `host`: the name of this container.

    A container's quota is divided, too, and not only the cores that it sees.
    """
    cores, count = usable_cores(), core_count()
    # All containers of a machine see the same cores, so each begins at another one.
    first = zlib.crc32(host.encode()) % len(cores) if count < len(cores) else 0
    return [*cores[first:], *cores[:first]][:count]


def host(arguments: argparse.Namespace, processes: int | None = None) -> contextlib.closing[Host]:
    """Return a host process for a ``with`` block. Raises UserError if the file is missing.

    `processes`: the most of a trial, to ask a cluster for as many cores; None: as the command line
    says.
    """
    return contextlib.closing(_make_host(arguments, processes=processes))


def _make_host(
    arguments: argparse.Namespace, share: Share | None = None, processes: int | None = None
) -> Host:
    libraries = libraries_of(experiment_file.split(arguments.experiment)[0]) or []
    if arguments.nnodes < 1:
        raise UserError(f"--nnodes must be at least 1, got {arguments.nnodes}")
    if not _is_elsewhere(arguments):
        if arguments.nnodes > 1:
            raise UserError("--nnodes needs a cluster's machines: give --slurm or --ray, too")
        if arguments.after:
            raise UserError("the words after -- are for a cluster: give --slurm or --ray, too")
        return LocalHost(libraries, share)
    if arguments.ray == "":
        raise UserError("--ray got an empty address: give HOST:PORT, or auto")
    processes = processes or max(options.device_counts(str(arguments.nproc or 1)))
    machines, words = arguments.nnodes, arguments.after
    if arguments.ray is not None:
        cluster, command = "Ray", ray_actor.command(arguments.ray, words, processes, machines)
    else:
        command = slurm.command(words, processes, arguments.parallel, machines)
        cluster = "Slurm"
    return RemoteHost(command, libraries, cluster, print_line, machines)


def _is_elsewhere(arguments: argparse.Namespace) -> bool:
    return arguments.slurm or arguments.ray is not None


def described_space(
    arguments: argparse.Namespace, host: Host
) -> tuple[ExperimentDescription, Space]:
    """Return the experiment, and the space around it. Raises UserError, ConfigError."""
    settings = config.parse_assignments(arguments.settings)
    counts = options.device_counts(arguments.nproc) if arguments.nproc else []
    own, more = counts[0] if counts else None, counts[1:]
    # Before the file is read, which takes seconds.
    if arguments.knobs is not None:
        arguments.knobs = knobs.parse(",".join(arguments.knobs))
    # A host of a cluster has its machine's GPUs, or its part of them, for itself.
    sharing = 1 if _is_elsewhere(arguments) else arguments.parallel
    asked = Question(arguments.experiment, settings, own, sharing, more, searches=True)
    found = host.describe(asked)
    reference = describe.mirrored(found)
    all_counts = [count * found.machines for count in more]
    space = make_space(
        reference, found.processes, found.lr_exponent, found.precisions, found.samples, all_counts
    )
    space = dataclasses.replace(space, machines=found.machines, device=found.device)
    space = knobs.turned(space, arguments.knobs or knobs.defaults(found, space))
    if arguments.knobs and space.knobs and not arguments.probe:
        raise UserError(
            f"--knobs {','.join(space.knobs)} needs the probe, which --no-probe leaves out: give "
            "one of the two"
        )
    return found, space


def study_identity(arguments: argparse.Namespace, space: Space, verb: str) -> Identity:
    """Return the identity of the study's run. The same command gets the same: it resumes."""
    path, cls = experiment_file.split(arguments.experiment)
    base = arguments.study
    # The name depends on all that must stay equal, so that the same command finds its study.
    if not base:
        given = vars(arguments)
        how = sorted((key, given[key]) for key in _PART_OF_THE_NAME if key in given)
        # A study of an older version has no knobs in its name.
        how = [(key, value) for key, value in how if key != "knobs" or value]
        # A study of an older version has one number of processes.
        processes = space.devices if len(space.devices) > 1 else space.devices[0]
        what = repr((str(path), cls, config.to_yaml(space.reference), processes, how))
        what += f" on {space.machines} machines" if space.machines > 1 else ""
        digest = hashlib.sha256(what.encode()).hexdigest()[:6]
        base = f"{names.made_plain(path.stem)}-{verb}-{digest}"
    names.checked_run(base)
    name = _newest_study(arguments.dir / "runs", base, verb, arguments.new)
    identity = options.identity_for(arguments, name)
    _refuse_other(RunFolder(arguments.dir / "runs" / identity.name), verb)
    return identity


def open_run(
    arguments: argparse.Namespace,
    identity: Identity,
    reference: Experiment,
    params: Mapping[str, str] | None = None,
) -> AbstractContextManager[StudyRun]:
    """Return a run that is the parent of others, for a ``with`` block; `params`: further ones."""
    arguments.opened = RunFolder(arguments.dir / "runs" / identity.name)
    again = {"probe": _again(), "repeat": command(None, "repeat", identity.name)}
    return StudyRun.open(
        arguments.dir / "runs",
        identity,
        reference,
        sys.argv,
        offline=arguments.offline,
        tags=options.tags_of(arguments),
        options=params,
        again=again.get(arguments.verb, ""),
    )


def _again(*, new: bool = False) -> str:
    """Return the command that continues what this one began. `new`: a new study has no run yet."""
    words = [word for word in sys.argv[1:] if new or word != "--new"]
    return text_without_secrets(shlex.join([program(), *words]))


def _refuse_other(folder: RunFolder, verb: str) -> None:
    """Raise UserError if the folder has a run of another verb, or of the user's own loop."""
    if deleted.is_hidden(folder):
        back = command(folder.root, "delete", "--restore", folder.path.name)
        raise UserError(
            f"the {verb} {folder.path.name!r} is deleted: bring it back with `{back}`, or choose "
            "another --name"
        )
    environment = _first_environment(folder)
    words = reproduce.words(environment.get("rankzero.command", ""))
    is_other = words[:1] == ["rankzero"] and words[1:2] != [verb]
    if is_other or provenance.OWN_LOOP in environment:
        raise UserError(
            f"there is a run {folder.path.name!r} already, which is no {verb}: choose another "
            "--name"
        )


def _first_environment(folder: RunFolder) -> Mapping[str, str]:
    """Return the tags of a run's first attempt, or nothing before it has begun."""
    events = read_all(folder.events) if folder.events.exists() else ()
    started = next((one for one in events if isinstance(one, RunStarted)), None)
    return {} if started is None else started.environment


def _search(
    arguments: argparse.Namespace,
    chosen: SearchOptions,
    hosts: Sequence[Host],
    described: ExperimentDescription,
    space: Space,
) -> int:
    from rankzero.tuning import search

    identity = study_identity(arguments, space, "search")
    setup = search.SearchSetup(
        identity=identity,
        root=arguments.dir,
        space=space,
        described=described,
        options=chosen,
        storage=arguments.storage or default_storage(arguments.dir),
        shared=arguments.storage is not None,
        probes=arguments.probe,
        like=arguments.like,
        use=command(None, "train", arguments.experiment, "--from", identity.name),
        again=_again(),
        offline=arguments.offline,
        tags=options.tags_of(arguments),
        argv=sys.argv,
        hosts=hosts,
        notify=print_line,
    )
    if arguments.result_file is not None:
        arguments.result_file.write_text(json.dumps({"study": identity.name}), encoding="utf-8")
    where = f"{'/'.join(map(str, space.devices))} x {described.device}"
    where += f", {space.machines} machines" if space.machines > 1 else ""
    print_line(f"study  {identity.name}  ({arguments.objective}, {where})")
    arguments.opened = RunFolder(arguments.dir / "runs" / identity.name)
    outcome = search.run(setup)
    # From here on, a stop only ends the wait for MLflow.
    arguments.new, arguments.opened = False, None
    print_line(f"\n{outcome.text}")
    if is_interactive():
        text_console().bell()
    if outcome.folder is None:
        return RESUMABLE
    delivery_notes.print_delivery(outcome.folder, offline=arguments.offline)
    if outcome.use:
        print_line(f"use:   {outcome.use}{command_lines.option(arguments.dir)}")
    # A helper's part has a run of its own.
    if outcome.folder.path.name == identity.name:
        again = report_command(arguments.dir, identity.name, arguments.storage)
        print_line(f"look:  {look(outcome.folder)}   again: {again}")
    return RESUMABLE if outcome.is_leaderless else delivery_notes.exit_code(outcome.folder)


def report_command(root: Path, study: str, storage: str | None) -> str:
    """Return the command that shows a study. `storage`: its own, without a password, or None."""
    words = ["--storage", text_without_secrets(storage)] if storage else []
    return command(root, "report", study, *words)


def _search_options(arguments: argparse.Namespace) -> SearchOptions:
    """Return the options. Raises UserError if they are out of range or do not fit together."""
    positive = ("minutes", "trials", "trial_minutes", "seeds", "silence_seconds", "parallel")
    for name in (*positive, "price"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    if arguments.seeds < 2:
        why = "one run says nothing about the noise"
        raise UserError(f"--seeds must be at least 2, got {arguments.seeds}: {why}")
    if arguments.objective == "quality" and arguments.trial_minutes is None:
        raise UserError("--objective quality needs --trial-minutes: how long a trial trains")
    if arguments.like is not None and arguments.sampler == "grid":
        raise UserError(
            "--like begins with other trials, and a grid covers its cells: leave it out"
        )
    _check_cost(arguments)
    if arguments.objective == "energy" and arguments.nnodes > 1:
        raise UserError("--objective energy counts one machine's energy: leave out --nnodes")
    if not arguments.tolerance >= 0:
        raise UserError(f"--tolerance must be at least 0, got {arguments.tolerance:g}")
    tracking = uris.resolve_tracking_uri(arguments.tracking_uri, os.environ, arguments.dir)
    if not arguments.storage:
        default_storage(arguments.dir)  # called for its check
    elif _database(arguments.storage) == _database(tracking):
        raise UserError("--storage is MLflow's database: their tables would clash. Name another")
    if arguments.trials is None and arguments.minutes is None:
        arguments.trials = SearchOptions.trials
    chosen = {one.name: getattr(arguments, one.name) for one in dataclasses.fields(SearchOptions)}
    return SearchOptions(**chosen)


def _check_cost(arguments: argparse.Namespace) -> None:
    """Raise UserError for a price, or several numbers of devices, without a time to a target."""
    several = arguments.nproc and len(options.device_counts(arguments.nproc)) > 1
    if arguments.price == math.inf:
        raise UserError("--price must be finite")
    for is_given, option in ((several, f"--nproc {arguments.nproc}"), (arguments.price, "--price")):
        if is_given and arguments.objective != "time-to-target":
            raise UserError(
                f"{option} is about the time to a target, and --objective {arguments.objective} "
                "has none: leave out one of the two"
            )


def _database(uri: str) -> Path | str:
    path = uris.sqlite_path(uri)
    return uri if path is None else path.absolute()


def _newest_study(runs: Path, base: str, verb: str, new: bool) -> str:
    """Return the newest study's name, or with `new` the next: ``base``, ``base-2`` …

    Only `--new` makes a further one. A run that the user has called ``base-2`` is none.
    """
    # Somebody may have erased earlier ones.
    known = {1: base} if (runs / base).exists() else {}
    for path in runs.glob(f"{glob.escape(base)}-*"):
        number = path.name.removeprefix(f"{base}-")
        if number.isdecimal() and _is_further(RunFolder(path), verb):
            known[int(number)] = path.name
    count = max(known, default=0)
    if not new or not known:
        return known.get(count, base)
    while (runs / (name := f"{base}-{count + 1}")).exists():
        count += 1
    return name


def _is_further(folder: RunFolder, verb: str) -> bool:
    """Return whether `--new` made the run, and named it."""
    command = _first_environment(folder).get("rankzero.command", "")
    words = reproduce.words(command)
    is_named = folder.path.name in command.replace("=", " ").split()
    return words[:2] == ["rankzero", verb] and "--new" in words and not is_named

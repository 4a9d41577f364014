"""Options that several commands share, and the identity of a new run that follows from them."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import secrets
from pathlib import Path
from typing import Any

from rankzero import config, experiment_file, ranks
from rankzero.catalog import deleted, filters, lookup
from rankzero.errors import UserError
from rankzero.launch import machines
from rankzero.launch.machines import ALONE, Machines
from rankzero.launch.request import refuse_new, with_changes
from rankzero.mlflow_store import drivers, limits, named_runs, uris
from rankzero.mlflow_store.items import DESCRIPTION
from rankzero.mlflow_store.patience import A_DAY, WAIT, seconds
from rankzero.redaction.text import NOTIFY, settings_without_secrets, text_without_secrets
from rankzero.run_store import names
from rankzero.run_store.folder import Identity
from rankzero.run_store.location import is_offline
from rankzero.run_store.provenance import RESERVED
from rankzero.run_store.spoken_names import new_name
from rankzero.tracking.notification import is_webhook

_TAG_KEY = re.compile(r"[\w./-]+")
# In the name of a job, which begins the name of a folder of logs.
_ODD, _JOB_LENGTH = re.compile(r"[^\w.-]"), 100


def add_experiment(
    parser: argparse.ArgumentParser,
    changes: str = "settings to change",
    reference: str = "the experiment's file: path.py or path.py:Class",
) -> None:
    """Add the experiment and its settings, with the help of each."""
    parser.add_argument("experiment", metavar="EXP", help=reference)
    # With a default, argparse does not call it required where the experiment is missing.
    parser.add_argument("settings", metavar="key=value", nargs="*", default=[], help=changes)


def add_run(parser: argparse.ArgumentParser, *, elsewhere: bool = False) -> None:
    """Add the run, and with `elsewhere` where to look for one that is not on this disk."""
    parser.add_argument("run_name", metavar="RUN", help="the run's name or its MLflow run id")
    if elsewhere:
        store = "where MLflow has the run, if it is not on this disk"
        parser.add_argument("--tracking-uri", help=store)


def add_new_run(parser: argparse.ArgumentParser) -> None:
    """Add the options for where a new run is kept."""
    parser.add_argument(
        "--experiment-name",
        help="the MLflow experiment (default: $MLFLOW_EXPERIMENT_NAME or the file's name)",
    )
    parser.add_argument(
        "--tracking-uri",
        help="where MLflow keeps runs (default: $MLFLOW_TRACKING_URI or the embedded store)",
    )
    tag = "a tag of the run, for `rankzero runs KEY=VALUE`; give it again for another"
    parser.add_argument(
        "--tag", type=_tag, action="append", default=[], metavar="KEY=VALUE", help=tag
    )
    parser.add_argument("--note", metavar="TEXT", help="the first lines of the run's description")
    add_delivery(parser)


def add_start_and_name(parser: argparse.ArgumentParser) -> None:
    """Add ``--from`` and ``--name``."""
    start = "start from these settings: a file such as sweet_spot.yaml, a study or a run"
    parser.add_argument("--from", dest="start", metavar="FILE", help=start)
    name = "the run's name (default: two words and a number)"
    parser.add_argument("--name", "--run-name", dest="run_name", metavar="NAME", help=name)


def add_processes(
    parser: argparse.ArgumentParser,
    default: str = "one per GPU; 1 without, or under single and dp",
) -> None:
    """Add ``--nproc`` and ``--max-restarts``; `default`: the default of the first, in words."""
    add = parser.add_argument_group("processes (torchrun's options)").add_argument
    nproc = f"processes on this machine (default: {default})"
    given = _of_torchrun("NPROC_PER_NODE")
    add("--nproc", "--nproc-per-node", type=_processes, dest="nproc", default=given, help=nproc)
    restarts = "how often failed processes restart from the newest checkpoint (default: 0)"
    add("--max-restarts", type=int, default=_of_torchrun("MAX_RESTARTS") or 0, help=restarts)


def device_counts(text: str) -> list[int]:
    """Return the numbers of a list such as ``1,2,4``. Raises UserError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--nproc takes whole numbers, such as 1,2,4: got {text!r}") from None
    if min(found) < 1:
        raise UserError(f"--nproc must be at least 1, got {text}")
    if len(set(found)) < len(found):
        raise UserError(f"--nproc {text} names a number twice: give each once")
    return found


def add_machines(parser: argparse.ArgumentParser) -> None:
    """Add the options for several machines. Each has the default of torchrun's ``PET_…``."""
    group = parser.add_argument_group("several machines (torchrun's options)")

    def add(name: str, **words: Any) -> None:
        default = _of_torchrun(name.strip("-").replace("-", "_").upper())
        group.add_argument(name, default=default, **words)

    nodes = "machines; run the same command on each (default: 1, or those of a Slurm step)"
    add("--nnodes", type=_machines, metavar="N|MIN:MAX", help=nodes)
    add("--rdzv-endpoint", help="host:port of the first machine, the same on each")
    job = "the job's name, the same on each machine (default: the run's --name, or the file's)"
    add("--rdzv-id", help=job)
    add("--rdzv-conf", metavar="KEY=VALUE,…", help="settings of torchrun's rendezvous")
    local = "this machine's address, for the others (default: by the route to --rdzv-endpoint)"
    add("--local-addr", help=local)


def machines_of(arguments: argparse.Namespace) -> Machines:
    """Return the machines of the command line, of torchrun's variables or of a Slurm step.

    Raises UserError if they are incomplete, if this machine has no address for the others, or if
    another launcher has started the command several times.
    """
    endpoint, number = arguments.rdzv_endpoint, None
    if not endpoint and (first := _of_torchrun("MASTER_ADDR")):
        endpoint = machines.joined(first, _of_torchrun("MASTER_PORT") or machines.DEFAULT_PORT)
        # It is the address of the machine with number 0. Any machine may be an endpoint.
        known = _of_torchrun("NODE_RANK") or ""
        number = int(known) if known.isdecimal() else None
    # The last of a key counts. An empty option leaves the variable out.
    both = f"{_of_torchrun('RDZV_CONF') or ''},{arguments.rdzv_conf}"
    words = both.split(",") if arguments.rdzv_conf else []
    given = {
        "endpoint": endpoint,
        "job": arguments.rdzv_id,
        "address": arguments.local_addr,
        "settings": config.parse_assignments(word for word in words if word.strip()),
    }
    given = {name: value for name, value in given.items() if value}
    typed = machines.is_typed()
    if arguments.nnodes is None and (step := machines.of_slurm(os.environ, typed=typed)):
        number = number if endpoint else step.number
        return machines.meet(dataclasses.replace(step, number=number, **given))
    if arguments.nnodes is None:
        machines.refuse_launcher(os.environ)
        return ALONE
    least, most = arguments.nnodes
    if most == 1:
        return ALONE
    if not endpoint:
        raise UserError("--nnodes needs --rdzv-endpoint HOST:PORT, the first machine's, on each")
    default = {"address": None, "job": _job_of(arguments)}
    return machines.meet(Machines(least, most, number=number, **{**default, **given}))


def _job_of(arguments: argparse.Namespace) -> str:
    """Return the name of a job that is given none: equal on all machines, another for others."""
    name, file = getattr(arguments, "run_name", None), getattr(arguments, "experiment", None)
    # The path of the file may be another one on each machine.
    return _ODD.sub("_", name or Path(file or "rankzero").name.partition(":")[0])[:_JOB_LENGTH]


def _of_torchrun(name: str) -> str | None:
    return os.environ.get(f"{machines.OF_TORCHRUN}{name}") or None


def _processes(text: str) -> int | None:
    # Both mean one for each device. Our own default also knows the strategy.
    try:
        return None if text in ("auto", "gpu") else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, auto or gpu") from None


def _machines(text: str) -> tuple[int, int]:
    try:
        return machines.count_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_delivery(parser: argparse.ArgumentParser) -> None:
    """Add ``--offline``, ``--no-offline``, ``--wait-delivery`` and ``--notify``."""
    parser.add_argument(
        "--offline",
        action=argparse.BooleanOptionalAction,
        default=is_offline(),
        help="only record in this command; `rankzero sync RUN` delivers to MLflow later "
        "(default: $RANKZERO_OFFLINE)",
    )
    parser.add_argument(
        "--wait-delivery",
        nargs="?",
        type=_wait_seconds,
        const=A_DAY,
        default=os.environ.get(WAIT) or None,
        metavar="=SECONDS",
        help="wait at the end until MLflow has everything, for at most SECONDS (a day); exit with "
        "74 if it has not (default: $RANKZERO_WAIT_DELIVERY, or one minute and exit with 0; ten "
        "minutes in a container, a pod or a Slurm job)",
    )
    parser.add_argument(
        "--notify",
        type=_webhook,
        default=os.environ.get(NOTIFY) or None,
        metavar="URL",
        help="a webhook that gets a message when the run ends, fails, hangs or diverges: Slack's, "
        "ntfy's, or one that takes JSON (default: $RANKZERO_NOTIFY)",
    )


def _webhook(text: str) -> str:
    if not is_webhook(text):
        # Without the text: it may have a secret.
        raise argparse.ArgumentTypeError(
            f"the address (also from {NOTIFY}) must be like https://ntfy.sh/my-topic; slack+ or "
            "ntfy+ in front of it chooses the form"
        )
    return text


def _wait_seconds(text: str) -> float:
    try:
        return seconds(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} (also from {WAIT}) is not a number of seconds, 0 or more"
        ) from None


def _tag(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    # Another key would be lost: MLflow, a filter or our own tags take it for theirs.
    legal = _TAG_KEY.fullmatch(key) and not key.startswith(RESERVED) and key not in filters.COLUMNS
    if not (legal and limits.name(key) == key and value.strip()):
        raise argparse.ArgumentTypeError(
            f"{text[:100]!r}: write KEY=VALUE, such as team=vision; KEY has letters, digits and "
            f"'_-./', at most {limits.KEY_LENGTH}, is no path such as ../x, does not begin with "
            f"{' or '.join(RESERVED)}, and is no column of `rankzero runs`"
        )
    return key, value


def tags_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the tags of ``--tag`` and ``--note``, without secrets."""
    note = {} if arguments.note is None else {DESCRIPTION: text_without_secrets(arguments.note)}
    return {**settings_without_secrets(dict(arguments.tag)), **note}


def check_settings(arguments: argparse.Namespace) -> None:
    """Raise UserError for settings that would else be refused once a cluster has machines."""
    changes = config.parse_assignments(arguments.settings)
    experiment = with_changes(experiment_file.load(arguments.experiment)(), changes)
    # A job may continue a run.
    if not (arguments.run_name and lookup.find(arguments.dir / "runs", arguments.run_name)):
        refuse_new(type(experiment), changes)


def check_batch_size(arguments: argparse.Namespace) -> None:
    """Raise UserError if the processes of a job, as far as known, cannot divide a typed batch."""
    changes = config.parse_assignments(arguments.settings)
    # One that the file computes may be another on the job's machines, and a job may begin --from.
    if arguments.start or not changes.keys() & {"train.batch_size", "train.micro_batch"}:
        return
    from rankzero.training.data.order import micro_batch_size  # it imports PyTorch

    train = with_changes(experiment_file.load(arguments.experiment)(), changes).train
    processes = arguments.nproc or ranks.default_count(train.strategy, arguments.gpus or 0)
    # Slurm chooses the machines. One of them can divide a batch that several can divide.
    least, most = arguments.nnodes or (1, 1)
    for count in range(least, most + 1):
        micro_batch_size(train, ranks.shards(train.strategy, processes * count))


def absolute(reference: str) -> str:
    """Return an experiment's reference with its file's absolute path."""
    path, cls = experiment_file.split(reference)
    return f"{path}:{cls}" if cls else str(path)


def refuse_unnamed_resume(arguments: argparse.Namespace) -> None:
    """Raise UserError for ``--resume-if-there`` without ``--name``: each start gets a new name."""
    if arguments.run_name is None and getattr(arguments, "resume_if_there", False):
        raise UserError("--resume-if-there needs the name of the run: add --name NAME")


def run_name(arguments: argparse.Namespace, kind: str = "") -> str:
    """Return the name of ``--name``, or a new one that begins with `kind`."""
    if arguments.run_name is not None:
        return names.checked_run(arguments.run_name)
    return new_name(arguments.dir / "runs", kind)


def identity_for(arguments: argparse.Namespace, name: str) -> Identity:
    """Return a new identity called `name`, by the options of `add_experiment` and `add_new_run`.

    Creates the tables of its store, but not offline.
    """
    uri = uris.resolve_tracking_uri(arguments.tracking_uri, os.environ, arguments.dir)
    root = uris.artifact_root(uri)
    experiment = experiment_name(arguments)
    if not arguments.offline:
        uris.prepare_store(uri)
        drivers.require_place(uri, root, experiment)
    return Identity(
        name=name,
        uuid=secrets.token_hex(16),
        experiment=experiment,
        tracking_uri=uri,
        artifact_root=root,
        experiment_file=absolute(arguments.experiment),
        project_dir=str(Path.cwd()),
    )


def experiment_name(arguments: argparse.Namespace) -> str:
    """Return the name of the MLflow experiment of a new run."""
    path, _ = experiment_file.split(arguments.experiment)
    return str(arguments.experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or path.stem)


def store_of_absent_run(arguments: argparse.Namespace) -> str:
    """Return where to look for a run that is not on this disk. Raises UserError without a store."""
    uri = uris.resolve_tracking_uri(arguments.tracking_uri, os.environ, arguments.dir)
    embedded, runs = uri == uris.default_tracking_uri(arguments.dir), arguments.dir / "runs"
    names = deleted.read_store(runs).runs if embedded else {}
    is_known = arguments.run_name in {*names, *names.values()} or arguments.tracking_uri
    server = named_runs.server_of(runs) if embedded and not is_known else None
    if embedded and not server and not (arguments.dir / uris.DATABASE).exists():
        # It raises, and names the newest runs.
        lookup.require(runs, arguments.run_name)
    return server or uri

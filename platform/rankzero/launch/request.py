"""What a launcher asks of every worker of a node, and the folder that it makes beforehand. Imports no torch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankzero import config
from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.redaction.assignments import BLOT
from rankzero.redaction.text import blotted
from rankzero.run_store import claims
from rankzero.run_store.folder import Identity, RunFolder, write_atomically

MAKING_SECONDS = 5.0
OUT_OF_MEMORY = "rankzero.out_of_memory"
"""The tag of a run whose micro-batch had to be made smaller."""


@dataclasses.dataclass(frozen=True)
class JobRequest:
    """What a launcher asks of every worker of a node. Plain values: it crosses process boundaries."""

    experiment_file: str
    config: str
    """The experiment's settings, as YAML; rank 0's count."""
    runs: str
    """The folder of all runs."""
    identity: Identity
    """What this node calls the run; rank 0's counts."""
    environment: Mapping[str, str]
    """Tags that say where the run comes from."""
    failures: str
    """The folder in which a failing rank leaves word."""
    resumes: bool = False
    """Whether there must be a checkpoint to go on from, on rank 0's machine."""
    offline: bool = False
    """Whether the run is only recorded, and delivered to MLflow later."""


def request_for(
    folder: RunFolder,
    experiment: Experiment,
    environment: Mapping[str, str],
    *,
    resumes: bool = False,
    offline: bool = False,
) -> JobRequest:
    """Return the request to train `experiment` into `folder`, whose earlier words of failure are forgotten."""
    for path in folder.failures.glob("rank_*.json"):
        path.unlink()
    return JobRequest(
        experiment_file=folder.identity.experiment_file or "",
        config=config.to_yaml(experiment),
        runs=str(folder.path.parent),
        identity=folder.identity,
        environment=environment,
        failures=str(folder.failures),
        resumes=resumes,
        offline=offline,
    )


def make_folder(runs: Path, identity: Identity, *, machines: int = 1) -> RunFolder:
    """Make a new run's folder; of several machines with one disk, one does. Raises UserError where that cannot be.

    Until the ranks begin, which may wait for another machine's, the run lives as long as this process does.
    """
    try:
        folder = RunFolder.create(runs, identity)
        claims.claim(folder, 0)
        return folder
    except FileExistsError:
        folder = RunFolder(runs / identity.name)
        if machines > 1 and _is_made(folder) and not folder.events.exists():
            return folder
        raise UserError(
            f"there is a run {identity.name!r} already: choose another --run-name, or go on with it: "
            f"rankzero resume {identity.name}"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot write to {runs}: {error.strerror}; choose another folder with --dir"
        ) from error


def with_secrets(settings: Mapping[str, Any], changes: Mapping[str, str]) -> dict[str, Any]:
    """Return settings as a file has them; of those that were hidden, as they look secret, what `changes` say.

    Raises UserError for those that they do not.
    """
    hidden = [key for key, value in settings.items() if BLOT in str(value)]
    unknown = [key for key in hidden if key not in changes]
    if unknown:
        raise UserError(
            f"what looks like a secret is not written down there: say it again, {'=… '.join(unknown)}=…"
        )
    return {**settings, **{key: changes[key] for key in hidden}}


def _is_made(folder: RunFolder) -> bool:
    """Tell whether a folder is a run's, after a moment if need be: another machine may be about to make it."""
    deadline = time.monotonic() + MAKING_SECONDS
    while not (there := (folder.path / "run.json").exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return there


def write_config(folder: RunFolder, experiment: Experiment) -> None:
    """Write the settings twice: whole, for this disk, and for MLflow without what looks like a secret."""
    hidden = blotted(config.rendered(experiment))
    write_atomically(folder.config, config.to_yaml(experiment), private=bool(hidden))
    folder.artifacts.mkdir(exist_ok=True)
    write_atomically(
        folder.artifacts / folder.config.name, config.to_yaml(experiment, instead=hidden)
    )

"""A launcher's request to each worker of its machine, and the run's folder. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from rankzero import config
from rankzero.catalog import command_lines, deleted, lookup
from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.launch.machines import ALONE, Machines
from rankzero.lightning_module import ignored_hooks
from rankzero.redaction.assignments import BLOT
from rankzero.redaction.text import blotted
from rankzero.run_store import checkpoint_files, run_locks
from rankzero.run_store.attempt import has_launcher, is_written
from rankzero.run_store.folder import Identity, RunFolder, write_atomically

_Configured = TypeVar("_Configured", bound=Experiment)
OUT_OF_MEMORY = "rankzero.out_of_memory"
"""The tag of a run whose micro-batch was halved because a device ran out of memory."""


@dataclasses.dataclass(frozen=True)
class JobRequest:
    """A launcher's request to each worker. Plain values, because they are pickled."""

    experiment_file: str
    config: str
    """The experiment's settings, as YAML. All ranks use rank 0's."""
    runs: str
    """The folder of all runs."""
    identity: Identity
    """The run. All ranks use rank 0's."""
    environment: Mapping[str, str]
    """Tags of the run's provenance."""
    failures: str
    """The folder for the failure files of ranks."""
    resumes: bool = False
    """Whether rank 0 must find a checkpoint to continue from. All ranks use rank 0's."""
    offline: bool = False
    """Whether the run is only recorded, and delivered to MLflow later."""
    is_trial: bool = False
    """Whether a search launched the run, which may prune it."""


def request_for(
    folder: RunFolder,
    experiment: Experiment,
    environment: Mapping[str, str],
    *,
    resumes: bool = False,
    offline: bool = False,
    is_trial: bool = False,
) -> JobRequest:
    """Return the request to train `experiment` into `folder`; delete its old failure files."""
    for path in folder.failures.glob("rank_*.json"):
        path.unlink(missing_ok=True)  # another machine deletes them, too
    return JobRequest(
        experiment_file=folder.identity.experiment_file or "",
        config=config.to_yaml(experiment),
        # The user's file may call os.chdir before the rank reads them.
        runs=str(folder.path.parent.absolute()),
        identity=folder.identity,
        environment=environment,
        failures=str(folder.failures.absolute()),
        resumes=resumes,
        offline=offline,
        is_trial=is_trial,
    )


def make_folder(runs: Path, identity: Identity, *, machines: Machines = ALONE) -> RunFolder:
    """Create the run folder.

    With several machines on a shared disk, one creates it and the others use it, now or later. The
    run counts as alive while this process lives, until ranks start. Raises UserError.
    """
    try:
        folder = RunFolder.create(runs, identity)
        # Without a claim `rankzero runs` would close the run while its ranks start.
        run_locks.claim(folder, 0)
        return folder
    except FileExistsError:
        folder = RunFolder(runs / identity.name)
        created = (folder.path / "run.json").exists()
        helps = not folder.events.exists() or takes_more(folder, machines)
        if not machines.alone and created and helps:
            return folder
        raise UserError(_taken(folder)) from None
    except OSError as error:
        raise UserError(
            f"cannot write to {runs}: {error.strerror}; choose another folder with --dir"
        ) from error


def takes_more(folder: RunFolder, machines: Machines) -> bool:
    """Return whether other machines train the run of a shared disk now, and take one more.

    Ask before this command is a launcher of the run itself.
    """
    # Until machines have met again after a join, the run has an end and no writer.
    return (
        machines.least < machines.most
        and (is_written(folder) or has_launcher(folder))
        # A writer that died on another machine counts as alive for minutes.
        and machines.is_served()
    )


def _taken(folder: RunFolder) -> str:
    """Return why a run of this name cannot start, and the commands that mend it."""
    name, root = folder.path.name, folder.root
    if deleted.is_hidden(folder):
        back = command_lines.line(root, "delete", "--restore", name)
        return (
            f"{name} is deleted: `{back}` brings it back, and "
            f"`{command_lines.line(root, 'prune', '--deleted')}` erases all that is deleted"
        )
    ended = lookup.last_end(folder)
    can_begin = folder.config.exists() and not folder.children
    can_begin = can_begin and ended is not None and ended.status != "FINISHED"
    if can_begin and not checkpoint_files.by_step(folder.checkpoints):
        return (
            f"there is a run {name!r} already, which has no checkpoint: {restart_line(folder)} "
            "begins it again, or choose another --name"
        )
    return (
        f"there is a run {name!r} already: choose another --name, or continue it: "
        f"{command_lines.line(root, 'resume', name)}"
    )


def restart_line(folder: RunFolder) -> str:
    """Return the command that begins a run without a checkpoint again."""
    store = command_lines.option(folder.root)
    return f"`rankzero train … --name {shlex.quote(folder.path.name)} --resume-if-there{store}`"


def with_secrets(settings: Mapping[str, Any], changes: Mapping[str, str]) -> dict[str, Any]:
    """Return a file's settings, with the values of `changes` for those that were redacted.

    Raises UserError for redacted settings that `changes` lack.
    """
    # The copy that went through MLflow has no secrets.
    hidden = [key for key, value in settings.items() if BLOT in str(value)]
    unknown = [key for key in hidden if key not in changes]
    if unknown:
        raise UserError(
            "the saved settings lack values that look like secrets: pass them again, "
            f"{'=… '.join(unknown)}=…"
        )
    return {**settings, **{key: changes[key] for key in hidden}}


def with_saved(
    experiment: _Configured, folder: RunFolder, secrets: Mapping[str, str] | None = None
) -> _Configured:
    """Return the experiment with a run's settings. Raises ConfigError.

    `secrets`: values for redacted settings. If given, raises UserError for those that it lacks.
    """
    saved, known = config.read_file(folder.config), config.flatten(experiment)
    if gone := [repr(key) for key in saved if key not in known]:
        file = Path(inspect.getfile(type(experiment))).name
        raise config.ConfigError(
            f"{folder.config} has {', '.join(gone)}, which {file} has no more: put it back there, "
            "or rename or delete its line in config.yaml"
        )
    return config.override(experiment, saved if secrets is None else with_secrets(saved, secrets))


def with_changes(experiment: _Configured, changes: Mapping[str, Any]) -> _Configured:
    """Return the experiment with a user's changes. Raises ConfigError, also for one in vain."""
    changed = config.checked(config.override(experiment, changes))
    train = changed.train
    if {"train.epochs", "train.steps"} & changes.keys() == {"train.epochs"} and train.steps:
        raise config.ConfigError(
            f"train.epochs={train.epochs} changes nothing, because train.steps={train.steps} "
            "decides the length: set train.steps, or add train.steps=none"
        )
    # `rankzero.train` may pass all settings of an experiment, which has this one in vain by itself.
    is_asked = train.limits.stop_at_target and not experiment.train.limits.stop_at_target
    if is_asked and changed.goal.target is None:
        raise config.ConfigError(
            "train.limits.stop_at_target=true changes nothing, because goal.target is none: add "
            "goal.target"
        )
    return changed


def refuse_new(experiment: type[Experiment], changes: Mapping[str, Any]) -> None:
    """Raise UserError before a new run of a class that defines something in vain.

    Raises ConfigError if a setting would not follow `changes`. A run that an older version began
    continues as it did.
    """
    if found := ignored_hooks(experiment):
        raise UserError(found)
    _refuse_unset(default := experiment())
    config.refuse_stale(default, changes)


def _refuse_unset(group: Any) -> None:
    """Raise UserError for a field that the ranks could not read from the settings."""
    for field in dataclasses.fields(group):
        if not field.init:
            raise UserError(
                f"{field.name} is a field with init=False, which no setting can be: make it a "
                "functools.cached_property"
            )
        if dataclasses.is_dataclass(value := getattr(group, field.name)):
            _refuse_unset(value)


def keep_for_helper(folder: RunFolder, experiment: Experiment, processes: int) -> None:
    """Keep what `resume` needs on the own disk of a machine that helps. Ignores a full disk."""
    if folder.events.exists():
        return  # a shared disk
    with contextlib.suppress(OSError):
        write_config(folder, experiment)
        write_atomically(folder.processes, str(processes))


def write_config(folder: RunFolder, experiment: Experiment) -> None:
    """Write the settings twice: complete for this disk, and redacted for MLflow."""
    # A resume on this machine needs the secrets, so their file is private to its owner.
    hidden = blotted(experiment)
    write_atomically(folder.config, config.to_yaml(experiment), private=bool(hidden))
    folder.artifacts.mkdir(exist_ok=True)
    write_atomically(
        folder.artifacts / folder.config.name, config.to_yaml(experiment, instead=hidden)
    )

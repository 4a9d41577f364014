"""The commands that repeat a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import PurePath

from rankzero.reporting.run_facts import Facts

_RUN_NAME = "--name", "--run-name"
_LEFT_OUT = (*_RUN_NAME, "--notify")
_NEEDS_NAME = "--resume-if-there"


def commands(name: str, facts: Facts) -> list[str]:
    """Return the commands for the code and for each attempt, or none if no attempt has one."""
    recorded, stops = list[list[str]](), dict[int, int]()
    for text, at_limit, interrupted in facts.every_command:
        one = _own(words(text), name, facts)
        is_resume = one[1:2] == ["resume"]
        # A resume is exact. The first command trains on to the end, or to the next time limit.
        if at_limit and not is_resume and one in recorded:
            recorded.append(["rankzero", "resume", name])  # as --resume-if-there does
        elif (is_resume and at_limit) or (one not in recorded and (not is_resume or _changes(one))):
            if is_resume and interrupted is not None:
                stops[len(recorded)] = interrupted
            recorded.append(one)
    # Only a resume needs to know the new run's name.
    again = f"{name}-again" if any(command[1:2] == ["resume"] for command in recorded) else ""
    attempts = [shlex.join(_repeated(command, name, again)) for command in recorded]
    for place, step in sorted(stops.items(), reverse=True):
        stop = f"# this attempt continued from step {step}; the command above trains past it"
        attempts.insert(place, stop)
    commit = facts.environment.get("mlflow.source.git.commit")
    if not attempts or not commit:
        return attempts
    is_dirty = facts.environment.get("rankzero.dirty") == "true"
    patch = ["git apply diff.patch   # of the run's artifacts, in provenance/"] if is_dirty else []
    return [f"git checkout {commit}", *patch, *attempts]


def _changes(command: list[str]) -> bool:
    """Return whether a command changes a setting."""
    return any("=" in word and not word.startswith("-") for word in command)


def _own(command: list[str], name: str, facts: Facts) -> list[str]:
    """Return the command, or the one that trains a child run alone if the command made many."""
    is_parent = "rankzero.study" in facts.environment or "search.sampler" in facts.params
    if is_parent or command[:1] != ["rankzero"] or command[1:2] in (["train"], ["resume"]):
        return command
    file = facts.environment.get("rankzero.experiment_file", "EXP")
    processes = facts.params.get("world_size", "1")
    return ["rankzero", "train", file, "--from", name, "--nproc", processes]


def _repeated(command: list[str], name: str, again: str) -> list[str]:
    """Return the command of an attempt of the run `name`, for the new run `again`."""
    if command[:2] == ["rankzero", "train"]:
        return [*command, *([_RUN_NAME[0], again] if again else [])]
    if command[:2] == ["rankzero", "resume"]:
        return [again if word == name else word for word in command]
    return command


def resume_lines(name: str) -> str:
    """Return the lines of a program with its own loop that continue the run."""
    adapters = f'# with an adapter: its option name="{name}", and the framework\'s own checkpoint'
    return f'run = rankzero.track(…, name="{name}")\nstate = run.latest()\n{adapters}'


def longer(params: Mapping[str, str]) -> str:
    """Return the settings that double a run's length, or an empty text if its params lack it."""
    # `train.steps` decides if it is set.
    lengths = {key: params.get(key, "") for key in ("train.steps", "train.epochs")}
    found = next((f"{key}={2 * int(n)}" for key, n in lengths.items() if n.isdecimal()), "")
    # A run that has stopped early would stop again at once.
    is_patient = params.get("train.patience", "none") != "none"
    return f"{found} train.patience=none" if found and is_patient else found


def words(command: str) -> list[str]:
    """Return the words of a recorded command, without the program's path and `_LEFT_OUT`."""
    try:
        found = shlex.split(command)
    except ValueError:
        # A quote without an end, which RankZero does not write.
        return command.split()
    program = PurePath(found[0] if found else "")
    if program.name != "rankzero" and program.parts[-2:] != ("rankzero", "__main__.py"):
        return ["python", *found] if program.suffix == ".py" else found
    # Without `--name NAME` and `--name=NAME`: the name is taken, and a webhook's address unknown.
    kept, before = ["rankzero"], ""
    for word in found[1:]:
        if before not in _LEFT_OUT and word.partition("=")[0] not in (*_LEFT_OUT, _NEEDS_NAME):
            kept.append(word)
        before = word
    return kept

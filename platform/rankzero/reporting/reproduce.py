"""The commands that repeat a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from rankzero.reporting.run_facts import Facts

# Its value is taken already.
_RUN_NAME = "--run-name"


def commands(name: str, facts: Facts) -> list[str]:
    """Return the commands for the code and for each attempt, or none if no attempt has one."""
    attempts = list(_attempts(name, facts))
    commit = facts.environment.get("mlflow.source.git.commit")
    if not attempts or not commit:
        return attempts
    is_dirty = facts.environment.get("rankzero.dirty") == "true"
    patch = ["git apply diff.patch   # of the run's artifacts, in provenance/"] if is_dirty else []
    return [f"git checkout {commit}", *patch, *attempts]


def _attempts(name: str, facts: Facts) -> Iterator[str]:
    all_words = [_plain(command) for command in facts.commands]
    # Only a resume needs to know the new run's name.
    again = f"{name}-again" if any(words[1:2] == ["resume"] for words in all_words) else ""
    for words in all_words:
        if words[:1] != ["rankzero"]:
            yield shlex.join(words)
        elif words[1:2] == ["train"]:
            yield shlex.join([*words, *([_RUN_NAME, again] if again else [])])
        elif words[1:2] == ["resume"]:
            yield shlex.join(again if word == name else word for word in words)
        else:
            # A search's trial: the recorded command made many runs.
            file = facts.environment.get("rankzero.experiment_file", "EXP")
            processes = facts.params.get("world_size", "1")
            yield shlex.join(["rankzero", "train", file, "--from", name, "--nproc", processes])


def plain(command: str) -> str:
    """Return a recorded command without the program's path and without the run's name."""
    return shlex.join(_plain(command))


def _plain(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError:
        # A quote without an end, which RankZero does not write.
        return command.split()
    program = PurePath(words[0] if words else "")
    if program.name == "rankzero" or program.parts[-2:] == ("rankzero", "__main__.py"):
        return ["rankzero", *_without_run_name(words[1:])]
    return ["python", *words] if program.suffix == ".py" else list(words)


def _without_run_name(words: Sequence[str]) -> Iterator[str]:
    skip = False
    for word in words:
        if not skip and word != _RUN_NAME and not word.startswith(_RUN_NAME + "="):
            yield word
        skip = word == _RUN_NAME

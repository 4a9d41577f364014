"""The commands that do a run again, from what its journal says of the first time. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from rankzero.reporting.run_facts import Facts

OF_THIS_RUN = "--run-name"  # taken already


def commands(name: str, facts: Facts) -> list[str]:
    """Return what to type: the code as it was, then each attempt's command. Empty where no command is known."""
    typed = list(_typed(name, facts))
    return [*_code(facts), *typed] if typed else []


def _code(facts: Facts) -> Iterator[str]:
    commit = facts.environment.get("mlflow.source.git.commit")
    if commit:
        yield f"git checkout {commit}"
        if facts.environment.get("rankzero.dirty") == "true":
            yield "git apply diff.patch   # of the run's artifacts, in provenance/"


def _typed(name: str, facts: Facts) -> Iterator[str]:
    all_words = [_plain(command) for command in facts.commands]
    again = f"{name}-again" if any(words[1:2] == ["resume"] for words in all_words) else None
    for words in all_words:
        if words[:1] != ["rankzero"]:
            yield shlex.join(words)
        elif words[1:2] == ["train"]:
            yield shlex.join([*words, *([OF_THIS_RUN, again] if again else [])])
        elif words[1:2] == ["resume"]:
            yield shlex.join(again if word == name else word for word in words if again)
        else:  # a search's trial: the command made many runs
            file = facts.environment.get("rankzero.experiment_file", "EXP")
            processes = facts.params.get("world_size", "1")
            yield shlex.join(["rankzero", "train", file, "--from", name, "--nproc", processes])


def plain(command: str) -> str:
    """Return a recorded command as one would type it anywhere: no paths to programs, no name that is taken."""
    return shlex.join(_plain(command))


def _plain(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError:  # a quote that does not end: nothing that we wrote
        return command.split()
    program = PurePath(words[0] if words else "")
    if program.name == "rankzero" or program.parts[-2:] == ("rankzero", "__main__.py"):
        return ["rankzero", *_without_name(words[1:])]
    return ["python", *words] if program.suffix == ".py" else list(words)


def _without_name(words: Sequence[str]) -> Iterator[str]:
    skip = False
    for word in words:
        if not skip and word != OF_THIS_RUN and not word.startswith(OF_THIS_RUN + "="):
            yield word
        skip = word == OF_THIS_RUN

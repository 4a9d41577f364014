"""Folders that are moved or deleted during a run, and a repository that is gone at a resume."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from torture import promises
from torture.ground import Broken, Command, Ground
from torture.promises import Curves
from torture.scenarios.training import (
    CLOCK,
    LATER,
    SLOW,
    STEPS,
    at,
    at_a_random_moment,
    resumes,
    the_run,
)

WORDS = ("train", CLOCK, *SLOW, "step_seconds=0.04", "train.limits.hang_minutes=0.2")
ENDS = ("FINISHED", "FAILED", "KILLED")
# Files of a run that a user deletes while it trains. The journal is the only record of a run.
FILES = ("delivery.json", "recorder.log", "recorder.json", "launcher.lock", "config.yaml", "logs")
FILES_EACH = 3


def moved_folder(ground: Ground, reference: Curves) -> None:
    """The run's folder moves away during the training: moved back, the run resumes whole."""
    command = ground.start(*WORDS)
    moment, which = ground.next_pair(LATER, ("the run's folder", "the runs' folder"))
    _wait(ground, command, moment)
    path = the_run(ground).path if which == "the run's folder" else ground.runs_folder
    aside = ground.folder / "moved"
    path.rename(aside)
    ground.note_fault(f"{which} moved at {moment}")
    command.wait()
    promises.no_process_is_left(ground)
    # A process may have created the old place again.
    if path.exists():
        shutil.rmtree(path)
    aside.rename(path)
    resumes(ground, reference, ENDS)


def deleted_folder(ground: Ground, _: Curves) -> None:
    """The run's folder is deleted during the training: all processes end, and none hangs."""
    command = ground.start(*WORDS)
    moment, what = ground.next_pair(LATER, ("run", "checkpoints"))
    _wait(ground, command, moment)
    run = the_run(ground)
    shutil.rmtree(run.path if what == "run" else run.checkpoints, ignore_errors=True)
    ground.note_fault(f"folder of the {what} deleted at {moment}")
    code = command.wait()
    promises.no_process_is_left(ground)
    if what == "checkpoints":
        promises.status_is(run, *ENDS)
    # A command that has shown the result may have ended before.
    elif code == 0 and "run: FINISHED" not in command.tail():
        raise Broken("wrong status: exit code 0 of a run whose folder was deleted")


def deleted_files(ground: Ground, reference: Curves) -> None:
    """Files of a run other than its journal vanish during the training: nothing is lost."""
    command = ground.start(*WORDS)
    moment = at_a_random_moment(ground, command, LATER)
    for name in itertools.islice(ground.turn.of(FILES, FILES_EACH), FILES_EACH):
        path = the_run(ground).path / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        ground.note_fault(f"{name} deleted at {moment}")
    command.wait()
    promises.no_process_is_left(ground)
    promises.nothing_is_lost(the_run(ground), reference, power_cut=True)
    promises.status_is(the_run(ground), *ENDS)


def without_repository(ground: Ground, reference: Curves) -> None:
    """The experiment's file or git is gone at a resume: one message, then an exact resume."""
    home = ground.folder / "repository"
    shutil.copytree(CLOCK.parent, home)
    command = ground.start("train", home / CLOCK.name, *WORDS[2:])
    _wait(ground, command, "checkpoint")
    command.process.terminate()
    command.wait()
    promises.no_process_is_left(ground)
    home.rename(ground.folder / "gone")
    _refused(ground, "the experiment's file is gone", str(home))
    (ground.folder / "gone").rename(home)
    for spoil, name in ((_break_syntax, "broken"), (_empty, "empty")):
        original = (home / CLOCK.name).read_text()
        spoil(home / CLOCK.name)
        _refused(ground, f"the experiment's file is {name}", CLOCK.name)
        (home / CLOCK.name).write_text(original)
    ground.environ["PATH"] = str(ground.folder)
    ground.note_fault("resume without git")
    resumes(ground, reference, ("KILLED",))


def _wait(ground: Ground, command: Command, moment: str) -> None:
    """Wait for a moment, and for the run's first checkpoint."""
    at(ground, command, "checkpoint")
    if moment != "checkpoint":
        at(ground, command, moment)


def _refused(ground: Ground, fault: str, named: str) -> None:
    """Check that a resume ends with one message that names the file, and begins no attempt."""
    before = the_run(ground).events.read_bytes()
    command = ground.run("resume", "run", f"train.steps={STEPS}", code=None)
    ground.note_fault(f"resume: {fault}")
    text = command.output.read_text()
    if command.process.returncode not in (1, 2) or named not in text or "error" not in text:
        raise Broken(
            f"wrong status: {fault}: exit code {command.process.returncode}: {command.tail()}"
        )
    if the_run(ground).events.read_bytes() != before:
        raise Broken(f"wrong: {fault}, and the journal has changed")
    promises.no_process_is_left(ground)


def _break_syntax(path: Path) -> None:
    path.write_text("def broken(:\n")


def _empty(path: Path) -> None:
    path.write_text("")

"""Killed processes of searches."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Sequence

from rankzero.catalog.lookup import folders, last_end, mlflow_id
from rankzero.tuning import next_trial
from rankzero.tuning.options import default_storage
from rankzero.tuning.study import Study, find_study
from rankzero.tuning.trial import Trial
from support.stores import list_runs
from torture import curves, promises
from torture.ground import Broken, Command, Ground, wait_for
from torture.promises import Curves
from torture.scenarios.training import TINY

NARROW = TINY.with_name("narrow.py")
TRIALS = 4
SEARCH = (
    *("search", NARROW, "train.epochs=4", "step_seconds=0.01", "goal.target=0.9999"),
    *("--nproc", 1, "--trials", TRIALS, "--pruner", "none", "--no-probe", "--study", "s"),
    *("--seeds", 2, "--challengers", 1),
)
MOST_REPEATS = 6


@dataclasses.dataclass(frozen=True)
class Company:
    """Processes that share a study, and those to kill. The first one to start leads."""

    workers: int
    trials: int
    victims: tuple[str, ...]


COMPANIES = (
    Company(3, TRIALS, ("a leader",)),
    Company(3, TRIALS, ("a helper",)),
    Company(8, 2 * TRIALS, ("a helper", "a leader", "a helper")),
    Company(3, TRIALS, ("a leader", "a helper")),
)


def killed_search(ground: Ground, _: Curves) -> None:
    """Kill a search at random moments: the same command resumes it, and no process is left."""
    storage = default_storage(ground.runs_folder.parent)
    for runs in itertools.islice(ground.turn.of(range(TRIALS + 3), 2), 2):
        command = ground.start(*SEARCH)
        _once_there_are(ground, command, runs)
        _kill(ground, command, f"the search, {_phase(runs)}")
        command.wait()
        promises.no_process_is_left(ground)
    ground.run(*SEARCH)
    study_is_whole(ground, find_study(storage, "s"), TRIALS)


def shared_study(ground: Ground, _: Curves) -> None:
    """Kill processes that share a study: the others, or the same command again, finish it."""
    company = ground.next_of(COMPANIES)
    storage = f"sqlite:///{ground.folder / 'shared.db'}"
    words = (*SEARCH, "--trials", company.trials, "--storage", storage)
    workers = [ground.start(*words)]
    wait_for(lambda: bool(list(ground.runs_folder.glob("s-0*"))) or not workers[0].running)
    workers += [ground.start(*words) for _ in range(company.workers - 1)]
    for number, who in enumerate(company.victims):
        time.sleep(ground.random.uniform(0.5, 6.0))
        _kill(
            ground,
            workers[0] if who == "a leader" else workers[1 + number],
            f"{who} of {company.workers}",
        )
    for worker in workers:
        worker.wait()
    promises.no_process_is_left(ground)
    decide(ground, words)
    study_is_whole(ground, find_study(storage, "s"), company.trials)


def _phase(runs: int) -> str:
    return "confirming" if runs > TRIALS else "trying" if runs else "beginning"


def decide(ground: Ground, words: tuple[object, ...], inside: Sequence[str] = ()) -> None:
    """Repeat the command until it prints a verdict."""
    # If the leader was killed, a later process leads.
    for _ in range(MOST_REPEATS):
        last = ground.run(*words, inside=inside)
        # A verdict may be that no configuration reached the target, which is nothing to use.
        lines = last.output.read_text().splitlines()
        if last.process.returncode == 0 and any(line.startswith("look:") for line in lines):
            return
    raise Broken(f"hang: no verdict after {MOST_REPEATS} commands: {last.tail()}")


def _once_there_are(ground: Ground, command: Command, wanted: int) -> None:
    """Wait until this many trials or confirmation runs have begun, and a moment longer."""
    wait_for(lambda: len(list(ground.runs_folder.glob("s-*"))) >= wanted or not command.running)
    time.sleep(ground.random.uniform(0.0, 2.0))


def _kill(ground: Ground, command: Command, what: str) -> None:
    if command.running:
        with contextlib.suppress(ProcessLookupError):
            command.process.kill()
            ground.note_fault(f"SIGKILL of {what}")


def study_is_whole(ground: Ground, study: Study, wanted: int) -> None:
    """Check that the study has all trials, each with a run that has ended, and a verdict."""
    promises.no_process_is_left(ground)
    promises.no_run_is_running(ground)
    trials = study.trials()
    counted = next_trial.ended(trials)
    if next_trial.running(trials):
        raise Broken(
            f"wrong status: trials {[one.number for one in next_trial.running(trials)]} are RUNNING"
        )
    if len(counted) != wanted:
        raise Broken(
            f"lost: {wanted} trials were requested, {len(counted)} count: "
            f"{[one.state for one in trials]}"
        )
    _each_has_a_run(ground, counted)
    _each_is_delivered(ground)
    if not study.facts.get("sentence"):
        raise Broken("lost: there is no verdict")
    _all_have_ended(ground)


def _each_has_a_run(ground: Ground, counted: list[Trial]) -> None:
    """Check that no run or configuration counts twice, and that MLflow agrees with the study."""
    status = {run.name: run.status for run in list_runs(ground.store)}
    for name, times in Counter(str(trial.facts.get("run")) for trial in counted).items():
        if times != 1 or name not in status:
            raise Broken(
                f"wrong: {times} trials have the run {name}, which MLflow has as {status.get(name)}"
            )
    for trial in counted:
        if trial.state == "COMPLETE" and status[str(trial.facts["run"])] != "FINISHED":
            raise Broken(f"wrong status: trial {trial.number} is COMPLETE, its run is not FINISHED")
    for parameters, times in Counter(
        repr(sorted(trial.parameters.items())) for trial in counted
    ).items():
        if times != 1:
            raise Broken(f"wrong: {times} trials count for {parameters}")


def _each_is_delivered(ground: Ground) -> None:
    """Check that no run has a gap, and that MLflow has each of its steps once."""
    for run in folders(ground.runs_folder):
        mine, run_id = curves.first(run), mlflow_id(run)
        if mine and run_id is None:
            raise Broken(f"lost: {run.path.name} is not in MLflow")
        if run_id is not None:
            curves.have_arrived(mine, curves.in_mlflow(run, run_id, mine))
        curves.have_no_gap(curves.latest(run), None)


def _all_have_ended(ground: Ground) -> None:
    # A trial that never began has no journal. `rankzero runs` ends it after two minutes.
    begun = [run for run in folders(ground.runs_folder) if run.events.exists()]
    endless = [run.path.name for run in begun if last_end(run) is None]
    if endless:
        raise Broken(f"wrong status: no end in the journals of {', '.join(endless)}")
    finished = next(run.status for run in list_runs(ground.store) if run.name == "s")
    if finished != "FINISHED":
        raise Broken(f"wrong status: the study's run is {finished}")

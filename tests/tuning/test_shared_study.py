"""A study that several processes share, and some of them die: no trial counts twice or is lost.

The database is real.
"""

from __future__ import annotations

import datetime
import multiprocessing
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from optuna.trial import FrozenTrial

from rankzero.tuning import next_trial
from rankzero.tuning import study as study_module
from rankzero.tuning.options import SearchOptions
from rankzero.tuning.session import Session
from rankzero.tuning.space import BATCH_INDEX
from rankzero.tuning.study import OWNER, Study
from support import company
from support.company import SPACE, Ledger, opened
from support.fake_launcher import FakeLauncher

DEAD = "elsewhere/1234/5 77 8"
"""A process that does not live. Older versions wrote such names."""
WORKERS, TRIALS = 8, 24


def session(study: Study, trials: int, launcher: FakeLauncher | None = None) -> Session:
    return Session(
        study, SPACE, [launcher or FakeLauncher()], SearchOptions(trials=trials), lambda text: None
    )


def counted(study: Study) -> list[int]:
    return [trial.number for trial in next_trial.ended(study.trials())]


def leave_a_trial(study: Study) -> None:
    """Ask for a trial as a process does that is dead now."""
    number = study.ask()
    study._open.pop(number).set_user_attr(OWNER, DEAD)


def at_once(*actions: Callable[[], object]) -> None:
    """Do all of it at the same time. Raises what any of them raises."""
    gate, failed = threading.Barrier(len(actions)), list[BaseException]()

    def act(action: Callable[[], object]) -> None:
        gate.wait()
        try:
            action()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=act, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_a_half_drawn_trial_of_a_killed_process_is_not_repeated(tmp_path: Path) -> None:
    study = opened(tmp_path)
    session(study, 1).run()
    half = study._study.ask({BATCH_INDEX: study._distributions[BATCH_INDEX]})
    half.set_user_attr(OWNER, DEAD)
    session(study, 6).run()
    tried = [trial.parameters for trial in study.trials()]
    assert study.abandoned == [1] and len(counted(study)) == 6
    assert all(guess in tried for guess in next_trial.guesses(SPACE))


def test_the_leader_repeats_a_trial_that_a_dead_helper_left_at_the_end(tmp_path: Path) -> None:
    study, helper = opened(tmp_path), opened(tmp_path)
    launcher = FakeLauncher(lambda number, _: "" if number != 4 else leave_a_trial(helper) or "")
    session(study, 6, launcher).run()
    assert len(study.abandoned) == 1 and len(counted(study)) == 6


def test_two_processes_recover_the_same_dead_trials_at_once(tmp_path: Path) -> None:
    study = opened(tmp_path)
    for _ in range(20):
        leave_a_trial(study)
    at_once(opened(tmp_path).recover, opened(tmp_path).recover)
    assert study.abandoned == list(range(20)) and counted(study) == []


def test_several_processes_do_not_exceed_the_number_of_trials(tmp_path: Path) -> None:
    study = opened(tmp_path)
    session(study, 1).run()
    at_once(*(lambda: session(opened(tmp_path), 7).help() for _ in range(4)))
    session(study, 7).run()
    assert len(counted(study)) == 7 and not next_trial.running(study.trials())


def test_a_live_process_taken_for_dead_continues_and_its_trial_is_abandoned(
    tmp_path: Path,
) -> None:
    study, other = opened(tmp_path), opened(tmp_path)
    number = study.ask()
    study._open[number].set_user_attr(OWNER, DEAD)  # as if it had been silent for minutes
    assert other.recover() == [number]
    assert study.report(number, 3, 0.5)
    study.tell(number, "COMPLETE", 1.0, {}, {"run": "late"})
    assert study.trials()[number].state == "FAIL" and counted(study) == []
    assert study.ask() == number + 1


def test_a_trial_that_ends_while_its_owner_leaves_is_not_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, helper = opened(tmp_path), opened(tmp_path)
    number = helper.ask()

    def leaves(_: object) -> bool:
        helper.tell(number, "COMPLETE", 1.0, {}, {})
        return False

    monkeypatch.setattr(study, "_may_have_owner", leaves)
    assert study.recover() == [] == study.abandoned
    assert study.trials()[number].state == "COMPLETE" and counted(study) == [number]


def test_a_trial_without_an_owner_is_abandoned_by_the_readers_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, other = opened(tmp_path), opened(tmp_path)
    number = study._study.ask().number
    monkeypatch.setattr(
        FrozenTrial, "datetime_start", datetime.datetime(1999, 1, 1)
    )  # another zone, a wrong clock
    assert other.recover() == []
    monkeypatch.setattr(study_module, "_DRAWING_SECONDS", 0.0)
    assert other.recover() == [number]


def test_the_abandoned_trials_of_older_versions_are_read(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.note("abandoned", [3, 5])
    study.abandon(4)
    study.abandon(5)
    assert study.abandoned == [3, 4, 5]


@pytest.mark.parametrize("victim", [0, 3], ids=["who leads", "who helps"])
@pytest.mark.slow
def test_eight_processes_finish_a_study_although_one_is_killed(tmp_path: Path, victim: int) -> None:
    company.session(tmp_path, 1).run()  # the reference, for which helpers wait
    killed = _work_together(tmp_path, victim)
    ledger = Ledger(tmp_path / "ledger.txt")
    assert victim == 0 or any("confirm" in name for _, name in ledger.starts())
    found = company.session(tmp_path, TRIALS).run()  # the same command, given again
    study = opened(tmp_path)
    assert found.winner is not None and not next_trial.running(study.trials())
    assert len(counted(study)) == TRIALS
    assert (
        _most(repr(sorted(study.trials()[one].parameters.items())) for one in counted(study)) == 1
    )
    starts = ledger.starts()
    names = [name for _, name in starts if "confirm" not in name]
    assert _most(names) == 1 and {f"s-t{number:02d}" for number in counted(study)} <= set(names)
    assert _most(ledger.results()) == 1 and set(counted(study)) <= set(ledger.results())
    last = [name for pid, name in starts if pid == killed][-1]
    # A trial keeps its first result if it is killed on another seed.
    is_first = "confirm" not in last and "-seed" not in last
    assert not is_first or int(last[3:]) in study.abandoned


def _work_together(folder: Path, victim: int) -> int:
    """Let eight processes finish a study; return the number of the one that was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.company"])
    begin = context.Barrier(WORKERS)
    # A busy machine may give a helper one trial only, so the helper dies in its first.
    dies_at = 1 if victim == 0 else 0
    fates = [(number == 0, dies_at if number == victim else None) for number in range(WORKERS)]
    workers = [
        context.Process(target=company.take_part, args=(folder, TRIALS, begin, *fate))
        for fate in fates
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [
        -signal.SIGKILL * (one == victim) for one in range(WORKERS)
    ]
    return int(workers[victim].pid or 0)


def _most(names: Iterable[object]) -> int:
    return max(Counter(names).values())

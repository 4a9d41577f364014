"""A study and its trials, delivered by one courier."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rankzero.events import SystemSampled
from rankzero.run_store import delivery_state, run_locks
from rankzero.run_store.folder import FolderGone, Identity, RunFolder
from rankzero.tracking import delivery_status
from rankzero.tracking.deliverer import Deliverer
from rankzero.tracking.trial_deliverers import TrialDeliverers
from support.memory_store import MemoryStore, deliverer_to
from support.runs import append, ended, started, steps

SAMPLE = SystemSampled(1.0, 1, {"system/x": 1.0})


def make(runs: Path, name: str, parent: str | None = None) -> RunFolder:
    return RunFolder.create(runs, Identity(name, name, "e", "sqlite:////nowhere.db", parent=parent))


@pytest.fixture
def study(tmp_path: Path) -> RunFolder:
    return make(tmp_path, "study")


@pytest.fixture
def child(tmp_path: Path, study: RunFolder) -> RunFolder:
    study.add_child("one")
    return make(tmp_path, "one", parent="study")


class Family:
    """A study's deliverer and its trials', worked as the courier does."""

    def __init__(self, study: RunFolder) -> None:
        self.trackers = {study.path.name: MemoryStore()}
        self.own = deliverer_to(self.trackers[study.path.name], study)
        self.trials = TrialDeliverers(study, make=self._make, look_seconds=0.0)

    def _make(self, trial: RunFolder, node: int) -> Deliverer:
        return deliverer_to(self.trackers.setdefault(trial.path.name, MemoryStore()), trial, node)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.trials.look()
            for each in (self.own, *self.trials):
                each.work()

    def work(self) -> None:
        self.turn(200)
        self.trials.close()
        self.own.commit()


def test_a_trial_that_was_deleted_in_mlflow_is_asked_for_once(
    study: RunFolder, child: RunFolder
) -> None:
    family = Family(study)
    append(study, started())
    append(child, started(), steps(1, 10), ended())
    family.turn(100)
    family.trackers["one"].gone = True
    append(child, started(attempt=2), steps(11, 20), ended())
    family.turn(100)
    (only,) = family.trials
    assert family.trials.complete and list(family.trials) == [only]
    family.trials.close()
    assert delivery_state.load(delivery_state.path_of(child, 0)).retries.gone


def test_trials_follow_their_study_and_name_it(study: RunFolder, tmp_path: Path) -> None:
    append(study, started())
    family = Family(study)
    for name in ("one", "two"):
        child = make(tmp_path, name, parent="study")
        study.add_child(name)
        append(child, started(), steps(1, 10), ended())
    append(study, ended())
    family.work()
    assert {name: tracker.status for name, tracker in family.trackers.items()} == dict.fromkeys(
        ["study", "one", "two"], "FINISHED"
    )
    assert family.own.complete and family.trials.complete
    for name in ("one", "two"):
        assert delivery_status.status(RunFolder(tmp_path / name)).done
        assert not run_locks.is_recording(RunFolder(tmp_path / name)), "the lock is released"


def test_a_trial_waits_for_its_study(tmp_path: Path) -> None:
    study, tracker = make(tmp_path, "study"), MemoryStore()
    child = make(tmp_path, "one", parent="study")
    append(child, started(), ended())
    assert not deliverer_to(tracker, child).work() and not tracker.calls
    assert study.children == []


def test_a_trial_whose_folder_is_moved_can_be_taken_again(
    study: RunFolder, child: RunFolder, tmp_path: Path
) -> None:
    for run in (study, child):
        append(run, started(), steps(1, 5))
    family = Family(study)
    family.turn()
    moved = RunFolder(child.path.rename(tmp_path / "moved"))
    assert run_locks.is_recording(moved)
    with pytest.raises(FolderGone):
        family.trials.close()
    assert not run_locks.is_recording(moved)


def test_a_run_without_trials_has_no_deliverer_but_its_own(study: RunFolder) -> None:
    append(study, started(), steps(1, 5), ended())
    family = Family(study)
    family.work()
    assert family.trackers["study"].status == "FINISHED" and list(family.trackers) == ["study"]
    assert not list(family.trials)


def test_a_trial_that_cannot_be_read_now_is_taken_later(study: RunFolder, tmp_path: Path) -> None:
    children = [make(tmp_path, name, parent="study") for name in ("one", "two")]
    for one in children:
        study.add_child(one.path.name)
        append(one, started(), ended())
    errors = [OSError(errno.EIO, "input/output")]

    def deliverer(trial: RunFolder, node: int) -> Deliverer:
        if errors:
            raise errors.pop()
        return deliverer_to(MemoryStore(), trial)

    trials = TrialDeliverers(study, make=deliverer, look_seconds=0.0)
    with pytest.raises(OSError, match="input/output"):
        trials.look()
    assert [run_locks.is_recording(one) for one in children] == [False, True]
    trials.look()
    assert len(list(trials)) == 2
    trials.close()


def test_a_trial_that_is_resumed_is_taken_again(study: RunFolder, child: RunFolder) -> None:
    append(study, started())
    append(child, started(), steps(1, 5), ended("KILLED", "stopped"))
    family = Family(study)
    family.turn(50)
    assert family.trackers["one"].status == "KILLED" and not list(family.trials)
    append(child, started(attempt=2, step=5), steps(6, 9), ended())
    family.work()
    assert family.trackers["one"].status == "FINISHED"
    assert max(point.step for point in family.trackers["one"].sent) == 9
    assert delivery_status.status(child).done


@pytest.mark.parametrize("journal", ["events.jsonl", "system-node_0.jsonl"])
def test_a_line_that_a_dead_process_cut_keeps_no_trial(
    study: RunFolder, child: RunFolder, journal: str
) -> None:
    append(study, started())
    append(child, started(), steps(1, 5), ended())
    with (child.path / journal).open("a") as file:
        file.write('{"event": "Noti')
    family = Family(study)
    family.turn(50)
    assert family.trackers["one"].status == "FINISHED"
    assert family.trials.complete and not list(family.trials)
    assert delivery_status.status(child).done


def test_a_sample_after_the_release_of_a_trial_is_delivered(
    study: RunFolder, child: RunFolder
) -> None:
    append(study, started())
    append(child, started(), steps(1, 5), ended())
    family = Family(study)
    family.turn(50)
    assert not list(family.trials)
    # As the trial's recorder writes its last one.
    append(child, SAMPLE, node=0)
    family.work()
    assert family.trackers["one"].curve("system/x") == {1: 1.0} and family.trials.complete


def test_samples_of_all_machines_of_a_trial_are_delivered(
    study: RunFolder, child: RunFolder
) -> None:
    append(study, started())
    append(child, started(), steps(1, 5), ended())
    append(child, SAMPLE, node=1)
    assert delivery_status.combined_status(study).pending > delivery_status.status(child).pending
    family = Family(study)
    family.turn(50)
    assert family.trackers["one"].curve("system/x") == {1: 1.0} and not list(family.trials)
    # A machine that is late.
    append(child, SAMPLE, node=2)
    assert not delivery_status.combined_status(study).done
    assert not family.trials.complete
    family.work()
    assert family.trials.complete and not delivery_state.late_nodes(child)

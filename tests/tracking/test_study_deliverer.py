"""A study and its trials, delivered together."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankzero.run_store import claims
from rankzero.run_store.folder import FolderGone, Identity, RunFolder
from rankzero.tracking import delivery_status
from rankzero.tracking.deliverer import Deliverer
from rankzero.tracking.study_deliverer import StudyDeliverer
from support.fake_tracker import FakeTracker
from support.runs import append, ended, started, steps


def make(runs: Path, name: str, parent: str | None = None) -> RunFolder:
    return RunFolder.create(runs, Identity(name, name, "e", "sqlite:////nowhere.db", parent=parent))


def family(folder: RunFolder, trackers: dict[str, FakeTracker]) -> StudyDeliverer:
    def deliverer(found: RunFolder, node: int) -> Deliverer:
        tracker = trackers.setdefault(found.path.name, FakeTracker())
        made = Deliverer(found, node, connect=lambda uri: tracker)  # type: ignore[arg-type, return-value]
        made.hasten()
        return made

    found = StudyDeliverer(folder, make=deliverer)
    found._look_at = 0.0
    return found


def work(found: StudyDeliverer) -> None:
    for _ in range(200):
        found._look_at = 0.0
        found.work()
    found.commit()


def test_trials_follow_their_study_and_name_it(tmp_path: Path) -> None:
    study, trackers = make(tmp_path, "study"), dict[str, FakeTracker]()
    append(study, started())
    found = family(study, trackers)
    for name in ("one", "two"):
        child = make(tmp_path, name, parent="study")
        study.add_child(name)
        append(child, started(), steps(1, 10), ended())
    append(study, ended())
    work(found)
    assert {name: tracker.status for name, tracker in trackers.items()} == dict.fromkeys(
        ["study", "one", "two"], "FINISHED"
    )
    assert found.complete
    for name in ("one", "two"):
        assert delivery_status.status(RunFolder(tmp_path / name)).done
        assert not claims.is_recording(RunFolder(tmp_path / name)), (
            "the right to deliver is given back"
        )


def test_a_trial_waits_for_its_study(tmp_path: Path) -> None:
    study, trackers = make(tmp_path, "study"), dict[str, FakeTracker]()
    child = make(tmp_path, "one", parent="study")
    append(child, started(), ended())
    alone = Deliverer(child, connect=lambda uri: trackers.setdefault("one", FakeTracker()))  # type: ignore[arg-type, return-value]
    assert not alone.work() and not trackers
    assert study.children == []


def test_a_trial_whose_folder_is_moved_can_be_taken_again(tmp_path: Path) -> None:
    study, trackers = make(tmp_path, "study"), dict[str, FakeTracker]()
    child = make(tmp_path, "one", parent="study")
    study.add_child("one")
    for run in (study, child):
        append(run, started(), steps(1, 5))
    found = family(study, trackers)
    found.work()
    moved = RunFolder(child.path.rename(tmp_path / "moved"))
    assert claims.is_recording(moved)
    with pytest.raises(FolderGone):
        found.commit()
    assert not claims.is_recording(moved)


def test_a_run_without_trials_is_delivered_as_ever(tmp_path: Path) -> None:
    study, trackers = make(tmp_path, "study"), dict[str, FakeTracker]()
    append(study, started(), steps(1, 5), ended())
    work(family(study, trackers))
    assert trackers["study"].status == "FINISHED" and list(trackers) == ["study"]

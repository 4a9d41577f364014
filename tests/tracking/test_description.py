"""The description of a run in MLflow: users' words stay, and the page is below them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path

import pytest

from rankzero.events import RunEnded
from rankzero.mlflow_store import limits
from rankzero.reporting import run_report
from rankzero.run_store import delivery_state
from rankzero.run_store.delivery_state import Page
from rankzero.run_store.folder import RunFolder
from rankzero.tracking.deliverer import Deliverer
from rankzero.tracking.description import join, moved, split
from support.memory_store import MemoryStore, deliver, delivered
from support.pictures import arrays, taken
from support.runs import append, ended, make_folder, started, steps

NOTE = "mlflow.note.content"
OURS = join("", "### FINISHED: trained")


@pytest.fixture
def tracker() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_folder(tmp_path)


@pytest.mark.parametrize(
    ("present", "notes", "is_ours"),
    [
        ("", "", False),
        (OURS, "", True),
        (OURS.replace("\n", " \r\n") + "\n\n", "", True),
        ("My notes.\n\n" + OURS, "My notes.", True),
        ("My notes.", "My notes.", False),
        (OURS + " Not by us.", "### FINISHED: trained Not by us.", False),
        (join(join("", "An older page") + " of mine", "now"), "An older page of mine", True),
    ],
)
def test_users_words_are_what_is_not_a_page_as_we_wrote_it(
    present: str, notes: str, is_ours: bool
) -> None:
    assert split(present) == (notes, is_ours)


def test_page_is_cut_for_long_notes_and_left_out_for_longer_ones() -> None:
    page = "x" * 9000
    for length in (10, 5000):
        text = join("n" * length, page)
        assert len(text) == limits.TAG_LENGTH and split(text) == ("n" * length, True)
    assert join("n" * 7900, page) == "n" * 7900


def test_note_on_a_running_run_stays_at_its_end_and_at_every_resume(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    tracker.tags[NOTE] = "The one with the new data."
    append(folder, started(), steps(1, 10), ended("KILLED", "stopped"))
    delivered(folder, tracker)
    notes, page = tracker.tags[NOTE].split("\n\n<!-- rankzero ")
    assert notes == "The one with the new data." and "### KILLED: stopped" in page
    tracker.tags[NOTE] = tracker.tags[NOTE].replace("new data.", "new data. Stopped by me.")
    append(folder, started(2, step=10), steps(11, 20), ended())
    delivered(folder, tracker)
    notes, page = tracker.tags[NOTE].split("\n\n<!-- rankzero ")
    assert notes == "The one with the new data. Stopped by me."
    assert "### FINISHED" in page and "KILLED" not in tracker.tags[NOTE]


def test_page_that_a_user_removed_or_edited_is_kept_above_the_next_one(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    for attempt, edited in enumerate(["Mine alone.", "### FINISHED: by me"], 1):
        append(folder, started(attempt), ended())
        delivered(folder, tracker)
        tracker.tags[NOTE] = edited
        append(folder, started(attempt + 1), ended("KILLED", "stopped"))
        delivered(folder, tracker)
        assert tracker.tags[NOTE].startswith(f"{edited}\n\n<!-- rankzero ")
        assert "### KILLED: stopped" in tracker.tags[NOTE]


def test_page_of_an_earlier_version_is_replaced(folder: RunFolder, tracker: MemoryStore) -> None:
    append(folder, started(), ended("KILLED", "stopped"))
    delivered(folder, tracker)
    tracker.tags[NOTE] = "### KILLED: stopped, without a marker"
    path = delivery_state.path_of(folder, 0)
    digest = hashlib.sha256(tracker.tags[NOTE].encode()).hexdigest()
    state = dataclasses.replace(delivery_state.load(path), page=Page(page=digest))
    delivery_state.save(path, state)
    append(folder, started(2), ended())
    delivered(folder, tracker)
    assert "KILLED" not in tracker.tags[NOTE] and "### FINISHED" in tracker.tags[NOTE]


@pytest.mark.parametrize(
    ("edited", "is_kept"), [("", False), ("My notes.\n\n", True), ("\nMine below.", True)]
)
def test_page_of_an_earlier_version_is_recognised_without_delivery_json(
    edited: str, is_kept: bool, folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, started(lr="0.1"), ended("KILLED", "stopped"))
    delivered(folder, tracker)
    # Its tables had no gap in their heads.
    page = tracker.tags[NOTE].split("-->\n\n")[1].replace("&emsp; | Value |", " | Value |")
    assert "### Setting\n\n| Setting | Value |" in page
    tracker.tags[NOTE] = page + edited if edited.startswith("\n") else edited + page
    delivery_state.path_of(folder, 0).unlink()
    append(folder, started(2, lr="0.1"), ended())
    delivered(folder, tracker)
    notes, _ = tracker.tags[NOTE].split("<!-- rankzero ") if is_kept else ("", "")
    assert ("KILLED" in notes) == is_kept
    assert is_kept or tracker.tags[NOTE].startswith("<!-- rankzero ")
    assert "### FINISHED" in tracker.tags[NOTE]


def test_note_tags_and_name_of_a_user_survive_a_resume(tmp_path: Path, sqlite: str) -> None:
    from mlflow import MlflowClient

    folder, client = make_folder(tmp_path, sqlite), MlflowClient(sqlite)

    def sent(*events: object) -> str:
        append(folder, *events)  # type: ignore[arg-type]
        state = deliver(Deliverer(folder)).state
        assert state.run_id is not None
        return state.run_id

    run_id = sent(started(), steps(1, 10))
    client.set_tag(run_id, NOTE, "Ask Ana before deleting.")
    client.set_tag(run_id, "team", "vision")
    client.update_run(run_id, name="the good one")
    for attempt, status in ((1, "KILLED"), (2, "FINISHED")):
        end: RunEnded = ended(status, at=1_800_000_100.0 + attempt)
        sent(*([started(attempt)] if attempt > 1 else []), end)
        run = client.get_run(run_id)
        assert run.data.tags[NOTE].startswith("Ask Ana before deleting.\n\n<!-- rankzero ")
        assert f"### {status}" in run.data.tags[NOTE]
        assert run.data.tags["team"] == "vision"
        assert run.info.run_name == run.data.tags["mlflow.runName"] == "the good one"
        assert (run.info.status, run.info.end_time) == (status, int(end.time * 1000))


PICTURES = ["confusion matrix", "hardest mistakes", "training batch"]


def links_of(description: str) -> list[str]:
    """Return the words of the links in the first line of a page below its heading."""
    line = description.split("-->\n\n")[1].split("\n\n")[1]
    return re.findall(r"\[([^]]*)\]\(#/experiments/", line)


def test_page_links_to_what_mlflow_has_by_then(folder: RunFolder, tracker: MemoryStore) -> None:
    """The page comes before the uploads. It is written again if they bring something to see."""
    pages: list[str] = []
    folder.artifacts.mkdir()
    (folder.artifacts / "my [own] chart.html").write_text("<p>")
    append(folder, started(), taken(folder, 5, arrays()), ended())

    def note(name: str, argument: object) -> None:
        if name == "set_tags" and isinstance(argument, dict) and NOTE in argument:
            pages.append(argument[NOTE])

    tracker.fail = note
    state = delivered(folder, tracker).state
    assert [links_of(page) for page in pages] == [[], ["my own chart", *PICTURES]]
    assert f"runs/{state.run_id}/artifacts/pictures/hardest_mistakes.png?" in pages[-1]
    assert split(pages[-1]) == ("", True)
    assert "](#/" not in run_report.page(folder)
    # Nothing new: no third page.
    delivered(folder, tracker)
    assert len(pages) == 2


def test_links_of_a_study_follow_its_first_line(folder: RunFolder, tracker: MemoryStore) -> None:
    folder.artifacts.mkdir()
    (folder.artifacts / "search.html").write_text("<p>")
    folder.description.write_text("**It is fast.**\n\n| a |\n| --- |\n| 1 |\n")
    append(folder, started(), ended())
    delivered(folder, tracker)
    page = tracker.tags[NOTE].split("-->\n\n")[1]
    assert page.startswith("**It is fast.** · [search](#/experiments/")
    assert run_report.page(folder) == folder.description.read_text()


def test_page_of_a_copied_run_links_to_the_copy() -> None:
    page = f"FINISHED · [a](#/experiments/1/runs/{'a' * 32}/artifacts/a.png)"
    described = moved(join("Mine.", page), "7", "b" * 32)
    assert split(described) == ("Mine.", True)
    assert described.endswith(f"FINISHED · [a](#/experiments/7/runs/{'b' * 32}/artifacts/a.png)")
    assert moved("Mine alone." + page, "7", "b" * 32) == "Mine alone." + page

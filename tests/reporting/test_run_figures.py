"""Pictures of a whole run: drawn from its journal, uploaded after its end."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import pytest
from PIL import Image

from rankzero import metric_names
from rankzero.catalog import summary
from rankzero.cli.commands import sync as sync_command
from rankzero.events import Event, StepsLogged
from rankzero.reporting import run_figures
from rankzero.run_store import claims, journal
from rankzero.run_store import delivery_state as state
from rankzero.tracking import delivery_status, recorder
from rankzero.tracking.deliverer import Deliverer
from support.fake_tracker import FakeTracker, delivered
from support.runs import T0, append, ended, evaluated, make_folder, saved, started, steps


def speed(step: int, seconds: float = 0.01, wait: float = 0.2) -> Event:
    return StepsLogged(
        [step], [T0 + step], {metric_names.STEP_SECONDS: [seconds], metric_names.DATA_WAIT: [wait]}
    )


BOTH = {"figures/learning_curves.png", "figures/step_time.png"}


def test_a_run_has_its_curves_and_its_step_time_once_it_has_ended(tmp_path: Path) -> None:
    folder, tracker = make_folder(tmp_path), FakeTracker()
    append(folder, started(), steps(1, 20), speed(10), speed(20), evaluated(20, 0.5), ended())
    assert not delivered(folder, tracker).state.problems.rejected
    assert set(tracker.artifacts) == BOTH
    assert tracker.calls.index("close_run") < tracker.calls.index("log_artifact"), (
        "nobody waits for pictures"
    )


@pytest.mark.parametrize(
    ("parent", "events"),
    [
        (None, [started()]),
        (None, [started(), steps(1, 1)]),
        (
            None,
            [started(**{"train.mlflow.log_pictures": "false"}), steps(1, 20), speed(10), speed(20)],
        ),
        (None, [started(), steps(1, 9, "search/value")]),
    ],
)
def test_runs_with_nothing_to_show_have_none(
    tmp_path: Path, parent: str | None, events: list[Event]
) -> None:
    folder, tracker = make_folder(tmp_path, parent=parent), FakeTracker()
    append(folder, *events, ended())
    assert not delivered(folder, tracker).state.problems.rejected
    assert not tracker.artifacts and tracker.status == "FINISHED"


def test_values_that_cannot_be_drawn_cost_the_figures_alone(tmp_path: Path) -> None:
    folder, tracker = make_folder(tmp_path), FakeTracker()
    infinite = StepsLogged(
        [1, 2], [T0, T0], {"train/loss": [float("inf"), float("nan")], "val/x": [1e308, -1e308]}
    )
    append(
        folder,
        started(),
        infinite,
        speed(1, float("inf"), float("nan")),
        speed(2, 1e300, 7.0),
        ended(),
    )
    delivered(folder, tracker)
    assert tracker.status == "FINISHED"


def test_nobody_waits_for_them(tmp_path: Path) -> None:
    """The run is told while they cannot be uploaded; lists show nothing that waits, and later they are there."""
    folder, tracker, away = make_folder(tmp_path), FakeTracker(), True

    def fail(name: str, argument: object) -> None:
        if away and name == "log_artifact":
            raise ConnectionError("away")

    tracker.fail = fail
    append(folder, started(), steps(1, 20), saved(folder, 20), ended())
    made = Deliverer(folder, 0, lambda uri: tracker)  # type: ignore[arg-type, return-value]
    made.hasten()
    for _ in range(20):
        made.work()
    found = delivery_status.status(folder)
    assert found.done and found.undrawn and not found.pending and not made.complete
    assert tracker.checkpoints and delivery_status.wait(folder, 5) == found
    assert not summary.read_summary(folder).undelivered
    assert state.glance(state.path_of(folder, 0)).undrawn
    away = False
    assert (
        delivered(folder, tracker).complete and "figures/learning_curves.png" in tracker.artifacts
    )
    assert delivery_status.is_complete(delivery_status.status(folder))


def test_they_hold_up_nothing_of_a_later_attempt(tmp_path: Path) -> None:
    folder, tracker = make_folder(tmp_path), FakeTracker()
    append(folder, started(), steps(1, 20), ended("KILLED", "stopped"))
    made = Deliverer(folder, 0, lambda uri: tracker)  # type: ignore[arg-type, return-value]
    made.hasten()
    while not made.state.queue.undrawn:
        made.work()
    append(folder, started(2, step=20), steps(21, 30), saved(folder, 30), ended())
    delivered(folder, tracker)
    calls = tracker.calls
    assert (
        calls.index("save_checkpoint") < calls.index("log_artifact")
        and calls.count("close_run") == 2
    )
    assert calls.index("log_artifact") > len(calls) - 1 - calls[::-1].index("close_run")
    assert calls.count("log_artifact") == 1, "drawn once, after the end that counts"


def test_the_courier_draws_them_after_the_command_has_gone(tmp_path: Path, sqlite: str) -> None:
    folder = make_folder(tmp_path, sqlite)
    recording = recorder.start(folder, [], 0)
    append(folder, started(), steps(1, 20), ended())
    recording.close()
    assert delivery_status.wait(folder, 60).done
    deadline = time.monotonic() + 180  # processor time that nobody wants may be long in coming
    while claims.is_recording(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = delivery_status.status(folder)
    assert not claims.is_recording(folder) and delivery_status.is_complete(found)
    assert len(list(tmp_path.rglob("figures/learning_curves.png"))) == 1


def test_sync_draws_what_a_courier_that_died_has_left(tmp_path: Path, sqlite: str) -> None:
    folder = make_folder(tmp_path, sqlite)
    append(folder, started(), steps(1, 20), ended())
    made = Deliverer(folder)
    made.hasten()
    while not made.state.queue.undrawn:
        made.work()
    assert delivery_status.is_delivered(delivery_status.status(folder)) and not list(
        tmp_path.rglob("learning_curves.png")
    )
    assert sync_command.run(argparse.Namespace(dir=tmp_path, run=None)) == 0
    assert (
        delivery_status.is_complete(delivery_status.status(folder))
        and len(list(tmp_path.rglob("learning_curves.png"))) == 1
    )


@pytest.mark.parametrize("name", ["train/a$b{c$", "val/$\\\\frac$", "train/$$", "val/_x"])
def test_names_are_taken_for_no_formulas(tmp_path: Path, name: str) -> None:
    folder, tracker = make_folder(tmp_path), FakeTracker()
    append(folder, started(), steps(1, 20), steps(1, 20, name), speed(10), speed(20), ended())
    assert not delivered(folder, tracker).state.problems.rejected and set(tracker.artifacts) == BOTH


def test_a_figure_that_fails_leaves_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, table: object, goal: str) -> bool:
        raise RuntimeError("no")

    monkeypatch.setattr(run_figures, "write", fail)
    folder, tracker = make_folder(tmp_path), FakeTracker()
    append(folder, started(), steps(1, 20), speed(10), speed(20), ended())
    assert delivered(folder, tracker).state.problems.reasons == (
        "figure learning_curves: RuntimeError: no",
    )
    assert set(tracker.artifacts) == {"figures/step_time.png"}


def test_what_no_figure_shows_is_not_kept() -> None:
    names = (
        [f"own/{n}" for n in range(50)]
        + [f"train/m{n}" for n in range(500)]
        + ["val/goal", "val/loss", metric_names.STEP_SECONDS]
    )
    kept = {
        cell[0] for cell in run_figures.shown(((name, 1, T0, 1.0) for name in names), "val/goal")
    }
    assert {"val/goal", "val/loss", metric_names.STEP_SECONDS} | {
        f"train/m{n}" for n in range(12)
    } == kept


def test_figures_read_a_journal_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read, real = make_folder(tmp_path), [], journal.read_all
    append(folder, started(), steps(1, 20), speed(10), speed(20), ended())
    monkeypatch.setattr(journal, "read_all", lambda path: read.append(path) or real(path))
    found, failed = run_figures.draw(folder, tmp_path)
    assert len(found) == 2 and not failed and len(read) == 1


def test_long_curves_are_thinned_evenly_and_keep_their_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_figures, "MOST_POINTS", 100)
    cells = [(name, step, T0, float(step)) for step in range(10_007) for name in ("a", "b")]
    kept = [cell[1] for cell in run_figures.thinned(cells) if cell[0] == "a"]
    assert kept[0] == 0 and kept[-1] == 10_006 and 50 < len(kept) <= 202
    assert len({after - before for before, after in itertools.pairwise(kept[:-1])}) == 1
    assert [cell[1] for cell in run_figures.thinned(cells[:40]) if cell[0] == "b"] == list(
        range(20)
    )


def test_the_parts_of_a_step_are_drawn(tmp_path: Path) -> None:
    parts = {
        "forward": 0.3,
        "backward": 0.5,
        "optimizer": 0.1,
        "communication": 0.02,
        "data": 0.0,
        "other": 0.08,
    }
    run_figures.write_bar(tmp_path / "bar.png", parts, "A step of 1 ms")
    run_figures.write_bar(tmp_path / "nothing.png", dict.fromkeys(parts, 0.0), "A step of 0 ms")
    with Image.open(tmp_path / "bar.png") as image:
        assert image.width > 900

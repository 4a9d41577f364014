"""The pictures of a search: what is on them, and that the page needs nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rankzero.experiment import Goal
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.reports import html_page, png_figures
from rankzero.tuning.trial import State, Trial

GOAL = Goal("val/accuracy", "max")


def trial(
    number: int, speed: float, quality: float, state: State = "COMPLETE", value: float | None = 1.0
) -> Trial:
    facts: dict[str, Any] = {
        "samples_per_second": speed,
        "best": quality,
        "batch_size": 32,
        "precision": "fp32",
        "lr": 0.1,
    }
    return Trial(
        number,
        state,
        {"batch_index": number, "width": 8 * number, "kind": "a"},
        value,
        {"quality": 0.0},
        facts,
    )


TRIALS = [
    trial(0, 100, 0.9),
    trial(1, 200, 0.8),
    trial(2, 150, 0.7),
    trial(3, 300, 0.99, "PRUNED", None),
    Trial(4, "FAIL", {}, None, {}, {}),
]
MAP = [
    ProbeResult(16, 16, "fp32", "ok", 100.0),
    ProbeResult(32, 32, "fp32", "ok", 180.0),
    ProbeResult(16, 16, "bf16", "ok", 90.0),
    ProbeResult(32, 32, "bf16", "out of memory"),
]


def test_the_front_is_what_nothing_finished_beats_in_both() -> None:
    assert [point[2].number for point in html_page.front(html_page.points(TRIALS), GOAL)] == [0, 1]


def test_the_page_opens_offline(tmp_path: Path) -> None:
    page = html_page.page(TRIALS, MAP, {"batch_index": 0.7, "width": 0.3}, GOAL, [1], "A <search>")
    assert "A &lt;search&gt;" in page and "<search>" not in page
    assert 'src="http' not in page and "batch size" in page
    for title in (
        "Throughput and quality",
        "Objective by trial",
        "Probe map",
        "Importance",
        "Configurations",
    ):
        assert title in page


def test_a_search_without_a_map_or_an_answer_is_drawn_all_the_same(tmp_path: Path) -> None:
    assert "Throughput" in html_page.page([TRIALS[-1]], [], {}, GOAL, [], "none")
    png_figures.write(tmp_path, [TRIALS[-1]], [], {}, GOAL, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history.png", "pareto.png"]


def test_pngs(tmp_path: Path) -> None:
    png_figures.write(tmp_path, TRIALS, MAP, {"batch_index": 0.7, "width": 0.3}, GOAL, [1])
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(found) == [
        "history.png",
        "importance.png",
        "parallel.png",
        "pareto.png",
        "probe_map.png",
    ]
    assert all(content.startswith(b"\x89PNG") for content in found.values())


def test_names_are_taken_for_no_formulas(tmp_path: Path) -> None:
    png_figures.write(tmp_path, TRIALS, [], {"a$b{c$": 1.0}, Goal("val/a$b{c$", "max"), [1])
    assert len(list(tmp_path.iterdir())) == 4


def test_a_map_alone() -> None:
    assert "Probe map" in html_page.map_page(MAP, "A map")

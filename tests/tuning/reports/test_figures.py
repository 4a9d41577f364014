"""The figures of a search, and the page that needs no network."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rankzero.experiment import Goal
from rankzero.reporting import html_page
from rankzero.run_store.folder import RunFolder
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.probe.scaling import Scaling, ScalingPoint
from rankzero.tuning.probe.speed_knobs import EFFECT_COLUMNS, Effect
from rankzero.tuning.reports import device_figures, optuna_figures, png_files, probe_figures
from rankzero.tuning.reports.study_run import StudyRun, texts_markdown
from rankzero.tuning.trial import State, Trial
from rankzero.tuning.verdict.cost import DeviceResult, PricedTrial

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
EFFECTS = [
    Effect("workers", {"train.workers": 2}, "kept", 1.5, 1.45, 1.55),
    Effect("compile", {"train.compile": False}, "no gain", 0.95, 0.85, 1.05),
    Effect("channels_last", {}, "refused", reason="no images"),
]


def test_the_pareto_front_has_the_finished_trials_that_none_beats_in_both() -> None:
    pareto = optuna_figures.interactive(TRIALS, GOAL, [1])[0]
    best = next(trace for trace in pareto.data if trace.name == "none is better in both")
    assert sorted(zip(best.x, best.y, strict=True)) == [(100.0, 0.9), (200.0, 0.8)]
    sweet = next(trace for trace in pareto.data if trace.name == "sweet region")
    assert (sweet.x, sweet.y) == ((200.0,), (0.8,))


def test_the_page_opens_offline_and_shows_what_people_read() -> None:
    figures = [
        *optuna_figures.interactive(TRIALS, GOAL, [1]),
        *probe_figures.figures(MAP, []).values(),
    ]
    page = html_page.page("A <search>", figures)
    assert "A &lt;search&gt;" in page and "<search>" not in page
    assert 'src="http' not in page and "batch size" in page and "batch_index" not in page
    for title in (
        "Throughput and quality",
        "Objective by trial",
        "Probe map",
        "Importance",
        "Configurations",
    ):
        assert title in page


def test_an_axis_with_one_value_is_left_out() -> None:
    parallel = str(optuna_figures.interactive(TRIALS, GOAL, [1])[-1])
    assert "width" in parallel and "precision" not in parallel and "kind" not in parallel


def test_a_choice_among_tuples_is_drawn() -> None:
    tuples = [
        dataclasses.replace(one, parameters={"widths": [8, 8 * one.number]}) for one in TRIALS[:3]
    ]
    assert "[8, 16]" in str(optuna_figures.interactive(tuples, GOAL, [1])[-1])


def test_hovering_shows_rounded_numbers() -> None:
    trials = [trial(0, 182.37103390881495, 0.5944444444444444), *TRIALS[1:]]
    page = html_page.page("s", optuna_figures.interactive(trials, GOAL, [1]))
    [pareto, *_] = html_page.figures(page)
    texts = "".join(text for one in pareto.data for text in one.text or ())
    assert "182.4" in texts and "0.5944" in texts
    assert "0.59444" not in texts and pareto.layout.yaxis.hoverformat == ".4~g"


def test_bars_show_the_knobs_that_were_measured(tmp_path: Path) -> None:
    found = probe_figures.figures(MAP, EFFECTS)
    bars = found["knobs"].data[0]
    assert bars.x == pytest.approx((50.0, -5.0))
    assert bars.y == ("workers 2 (kept)", "no compile (no gain)")
    assert bars.error_x.array == pytest.approx((5.0, 10.0))
    assert list(probe_figures.figures(MAP, EFFECTS[2:])) == ["probe_map"]
    png_files.write_all(tmp_path, found)
    assert (tmp_path / "knobs.png").read_bytes().startswith(b"\x89PNG")
    table = texts_markdown(EFFECT_COLUMNS, [one.row() for one in EFFECTS])
    assert "| workers 2&emsp; | +50.0%&emsp; | +45.0% to +55.0%&emsp; | kept |" in table
    assert "refused: no images" in table and texts_markdown(EFFECT_COLUMNS, []) == ""


def test_a_table_is_json_also_with_what_was_not_measured(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    StudyRun(Mock(folder=folder), {}).write_probe(MAP, EFFECTS)
    for name in ("knobs.json", "probe_map.json"):
        text = (folder.artifacts / name).read_text()
        assert "NaN" not in text and "Infinity" not in text and json.loads(text)["data"]


def test_a_search_without_results_is_drawn(tmp_path: Path) -> None:
    figures = optuna_figures.interactive([TRIALS[-1]], GOAL, [])
    assert "Throughput" in html_page.page("none", figures)
    optuna_figures.write_pngs(tmp_path, [TRIALS[-1]], GOAL, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history.png", "pareto.png"]


def test_all_pngs_are_written(tmp_path: Path) -> None:
    optuna_figures.write_pngs(tmp_path, TRIALS, GOAL, [1])
    png_files.write_all(tmp_path, probe_figures.figures(MAP, []))
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(found) == [
        "history.png",
        "importance.png",
        "parallel.png",
        "pareto.png",
        "probe_map.png",
    ]
    assert all(content.startswith(b"\x89PNG") for content in found.values())


def test_names_with_dollar_signs_are_no_formulas(tmp_path: Path) -> None:
    odd = [
        Trial(one.number, one.state, {"a$b{c$": f"$x{one.number}{{"}, one.value, {}, one.facts)
        for one in TRIALS
    ]
    optuna_figures.write_pngs(tmp_path, odd, Goal("val/a$b{c$", "max"), [1])
    assert len(list(tmp_path.iterdir())) == 4


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    for name in ("pareto.png", "probe_map.png"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    optuna_figures.write_pngs(tmp_path, TRIALS, GOAL, [1])
    png_files.write_all(tmp_path, probe_figures.figures(MAP, []))
    assert (tmp_path / "precious").read_text() == "kept"


def test_time_against_cost_and_the_scaling_curve(tmp_path: Path) -> None:
    found = [PricedTrial(0, 1, 100.0, 0.1, 3, 1.1), PricedTrial(1, 4, 30.0, 0.12)]
    points = (
        ScalingPoint(1, 100.0, 1.0, 1.0),
        ScalingPoint(2, 180.0, 1.8, 0.9, 0.04, 0.1),
        ScalingPoint(4, 300.0, 3.0, 0.75, is_predicted=True),
    )
    result = DeviceResult(3.6, found, {}, Scaling(64, points, 8))
    figures = device_figures.figures(result)
    cost, scaling = figures["cost"], figures["scaling"]
    lines = {trace.name: trace for trace in cost.data}
    assert list(lines["Pareto front"].x) == [30.0, 100.0]
    sure = lines["confirmed, with 95 % intervals"]
    assert sure.error_x.array[0] == pytest.approx(10.0)
    assert sure.error_y.arrayminus[0] == pytest.approx(0.1 - 0.1 / 1.1)
    assert list(lines["trials"].error_x.array) == [0.0]
    assert [trace.name for trace in scaling.data] == ["measured", "prediction", "100 % efficiency"]
    assert list(scaling.data[2].y) == [100.0, 400.0] and scaling.layout.xaxis.title.text
    png_files.write_all(tmp_path, figures)
    assert {path.name for path in tmp_path.iterdir()} == {"cost.png", "scaling.png"}
    assert device_figures.figures(DeviceResult(None, [], {}, None)) == {}

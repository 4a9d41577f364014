"""`rankzero report --html`: one file with curves, pictures, settings and differences."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
from playwright.sync_api import Browser
from plotly.express import scatter

from rankzero.cli.housekeeping import export
from rankzero.errors import UserError
from rankzero.reporting import html_page, html_report
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import sync
from rankzero.tuning.reports.study_run import StudyRun
from support.browser import check_page, chromium, screenshots
from support.memory_store import MemoryStore, delivered
from support.pictures import arrays, taken
from support.runs import T0, append, ended, evaluated, make_folder, started, steps

STUDY = {"search.sampler": "tpe"}  # a param that only a study's run has
HOSTILE = "val/</script><script>alert(1)"


def trained(root: Path, lr: str, uri: str = "http://127.0.0.1:9", **params: str) -> RunFolder:
    folder = make_folder(root, uri)
    append(folder, started(lr=lr, text="<b>", **params), steps(1, 60), steps(1, 60, HOSTILE))
    append(folder, evaluated(30, 0.6), evaluated(60, 0.7), taken(folder, 60, arrays()))
    append(folder, ended(metrics={"best": 0.7, "samples_per_second": 10.0}))
    return folder


def texts_of(page: str) -> str:
    """Return a page without its scripts and pictures."""
    return re.sub(r"<script.*?</script>|data:image/png;base64,[^\"]+", "", page, flags=re.DOTALL)


def test_a_run_is_one_file_that_needs_nothing_else(tmp_path: Path) -> None:
    folder, path = trained(tmp_path, "0.1"), tmp_path / "page.html"
    assert html_report.write(path, [folder]) == []
    page = path.read_text()
    shown = texts_of(page)
    assert shown.count("<img ") == 3 and 'alt="hardest_mistakes"' in shown
    assert "FINISHED" in shown and "<td>&lt;b&gt;</td>" in shown and "<script>alert" not in shown
    assert page.count("plotly.js v") == 1 and 'src="http' not in page and "<link" not in page
    assert "<h2>Report</h2>" in shown and "Differences" not in shown
    with pytest.raises(UserError, match="Is a directory"):
        html_report.write(tmp_path, [folder])


def test_a_reason_with_a_name_that_is_no_utf_8_is_written(tmp_path: Path) -> None:
    append(folder := make_folder(tmp_path), started(), ended("FAILED", "bad image \udce9.png"))
    html_report.write(tmp_path / "page.html", [folder])
    assert "bad image \\udce9.png" in (tmp_path / "page.html").read_text()
    (tmp_path / "figures").mkdir()
    export._write_all(folder, tmp_path, "csv")
    assert "bad image \\udce9.png" in (tmp_path / "report.md").read_text()
    study: Any = SimpleNamespace(folder=folder)
    StudyRun.write_description(study, "bad \udce9")
    assert folder.description.read_text() == "bad \\udce9"


def test_a_study_has_the_charts_of_its_search_and_no_picture_of_them(tmp_path: Path) -> None:
    folder, path = trained(tmp_path, "0.1", **STUDY), tmp_path / "page.html"
    folder.artifacts.mkdir()
    figures = [scatter([1, 2], [3, 4], title="Cost <b>"), scatter([5], [6], title="Speed")]
    searched = html_page.page("s", ["<script>alert(2)</script>", *figures])
    (folder.artifacts / "search.html").write_text(searched)
    (folder.artifacts / "cost.png").write_bytes(b"png")
    assert html_report.write(path, [folder]) == []
    page = path.read_text()
    shown = texts_of(page)
    assert "<h3>Cost &lt;b&gt;</h3>" in shown and "<h3>Speed</h3>" in shown
    assert "<img" not in shown and page.count("plotly.js v") == 1 and "alert(2)" not in page
    (folder.artifacts / "search.html").write_text(searched[:-900])
    assert html_report.write(path, [folder]) == [], "a damaged file costs its charts only"
    foreign = b'<figure \xff><script>Plotly.newPlot("a",[{"y":[1]}],[1])</script>'
    (folder.artifacts / "search.html").write_bytes(foreign)
    assert html_report.write(path, [folder]) == []
    own = trained(tmp_path, "0.2")
    own.artifacts.mkdir()
    (own.artifacts / "search.html").write_text(searched)
    html_report.write(path, [own])
    shown = texts_of(path.read_text())
    assert "<h3>Speed</h3>" not in shown and "<img " in shown, "a user's own file"


def test_the_newest_pictures_that_a_program_logged_are_in_the_page(tmp_path: Path) -> None:
    append(folder := make_folder(tmp_path), started(), ended())
    for epoch in range(13):
        (folder.artifacts / "folder.png").mkdir(parents=True, exist_ok=True)
        (picture := folder.artifacts / f"{epoch:02}.png").parent.mkdir(exist_ok=True)
        picture.write_bytes(b"png")
        os.utime(picture, (T0 + epoch, T0 + epoch))
    shown = "".join(html_report._pictures(folder, []))
    assert 'alt="12"' in shown and 'alt="01"' in shown and 'alt="00"' not in shown


def test_several_runs_show_what_differs(tmp_path: Path) -> None:
    folders, path = [trained(tmp_path, lr) for lr in ("0.1", "0.2", "0.3")], tmp_path / "page.html"
    names = [folder.path.name for folder in folders]
    html_report.write(path, folders)
    shown = texts_of(path.read_text())
    assert "<tr><td>lr</td><td>0.1</td><td>0.2</td><td>0.3</td><td></td></tr>" in shown
    assert shown.count("<summary>Report</summary>") == 3 and shown.count("<img ") == 9
    assert all(f"<h2>{name}</h2>" in shown for name in names)


def test_a_repeat_has_the_curves_of_its_runs_and_none_over_their_count(tmp_path: Path) -> None:
    folder, child = make_folder(tmp_path, name="repeat"), trained(tmp_path, "0.1")
    append(folder, started(**{"repeat.seeds": "0"}), steps(1, 1, "val/loss/mean"), ended())
    folder.add_child("deleted")
    html_report.write(tmp_path / "page.html", [folder])
    folder.add_child(child.path.name)
    html_report.write(tmp_path / "page.html", [folder])
    shown = texts_of((tmp_path / "page.html").read_text())
    assert "<h3>accuracy</h3>" in shown and "mean</h3>" not in shown


def test_pictures_that_mlflow_has_are_in_the_page(tmp_path: Path, sqlite: str) -> None:
    folder, path = trained(tmp_path, "0.1", sqlite), tmp_path / "page.html"
    assert sync.deliver(folder, patience=20).done
    assert not list(folder.pictures.iterdir())
    assert html_report.write(path, [folder]) == []
    assert texts_of(path.read_text()).count("<img ") == 3


def test_a_store_that_does_not_answer_costs_the_pictures_only(tmp_path: Path) -> None:
    folder, path = trained(tmp_path, "0.1"), tmp_path / "page.html"
    delivered(folder, MemoryStore())
    [lacking] = html_report.write(path, [folder])
    assert lacking.startswith(f"the pictures of {folder.path.name}: ")
    shown = texts_of(path.read_text())
    assert "This page lacks the pictures" in shown and "<h2>Report</h2>" in shown


def test_a_long_curve_keeps_its_extremes() -> None:
    values = np.linspace(1.0, 2.0, 100_000)
    values[777], values[99_000] = 50.0, -50.0
    table = pandas.DataFrame({"step": range(100_000), "loss": values})
    thinned = html_report._thinned(table)
    assert len(thinned) < 1100 and thinned["step"].is_monotonic_increasing
    assert (thinned["loss"].max(), thinned["loss"].min()) == (50.0, -50.0)
    assert list(thinned["step"].iloc[[0, -1]]) == [0, 99_999]
    assert len(html_report._thinned(table[:900])) == 900


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.mark.slow
def test_the_page_fits_desktop_and_phone_in_light_and_dark(
    browser: Browser, tmp_path: Path
) -> None:
    folders, path = [trained(tmp_path, lr) for lr in ("0.1", "0.2")], tmp_path / "report.html"
    html_report.write(path, folders)
    check_page(browser, path, screenshots(tmp_path))
    folders[0] = trained(tmp_path, "0.1", **STUDY)
    folders[0].artifacts.mkdir()
    searched = html_page.page("s", [scatter([1, 2], [3, 4], title="Cost")] * 3)
    (folders[0].artifacts / "search.html").write_text(searched)
    html_report.write(path, folders[:1])
    check_page(browser, path.rename(tmp_path / "study.html"), screenshots(tmp_path))

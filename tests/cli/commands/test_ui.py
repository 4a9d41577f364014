"""`rankzero ui` in a real browser, as somebody uses it who looks for what became of their runs.

Pictures of every step are in the folder $RANKZERO_SCREENSHOTS, else in pytest's. `make screenshots`
renews those of the documentation with them.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from rankzero.mlflow_store.client import RunRecord
from rankzero.mlflow_store.saved_view import BUSY_GPUS, WHOLE_SPEED
from support.browser import check_page, chromium, screenshots
from support.commands import SECONDS, Command, command_in, free_port
from support.paths import EXPERIMENTS
from support.stores import list_runs
from support.stubbed_nvml import card, compile_stub

pytestmark = pytest.mark.slow

HERE = re.compile(r"(http://127\.0\.0\.1:\d+/|data:|blob:|about:)")
DIGITS = EXPERIMENTS / "digits.py"
STUDY, NEWEST = "the-study", "with-gpus"
TRIALS = 8
PATIENCE = 30_000  # milliseconds: two cores, and whatever else they do
NO_ASSISTANT = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
OWN_LOOP = f"""
import time, rankzero
goal = rankzero.Goal("val/accuracy", "max")
with rankzero.track("digits", {{"lr": 0.1}}, name="{NEWEST}", goal=goal) as run:
    for step in range(1, 31):
        run.log({{"train/loss": 1 / step}}, step=step)
        if step % 5 == 0:
            run.evaluated({{"val/accuracy": 1 - 1 / step}}, step=step)
        time.sleep(0.15)
"""


class Shown(NamedTuple):
    """A UI that serves a store, and what it said."""

    folder: Path
    address: str
    runs: str
    newest: str
    records: dict[str, RunRecord]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, new_store: Path) -> Iterator[Shown]:
    """Two trainings and a search."""
    folder = tmp_path_factory.mktemp("ui")
    with command_in(folder, new_store) as rankzero:
        _train_and_search(rankzero)
        with _served(rankzero) as found:
            yield found


@pytest.fixture(scope="module")
def shown_with_gpus(tmp_path_factory: pytest.TempPathFactory, new_store: Path) -> Iterator[Shown]:
    """A tracked run with two GPUs of a stub NVML, in a store of its own: its values are invented.

    The documentation's pictures show the other one.
    """
    gpus = compile_stub(tmp_path_factory.mktemp("nvml"))
    with command_in(tmp_path_factory.mktemp("gpus"), new_store) as rankzero:
        subprocess.run(
            [sys.executable, "-c", OWN_LOOP],
            cwd=rankzero.folder,
            env={**rankzero.environ, **gpus, **card(0), **card(1, "whole_idle")},
            check=True,
            timeout=SECONDS,
        )
        with _served(rankzero) as found:
            yield found


@contextlib.contextmanager
def _served(rankzero: Command) -> Iterator[Shown]:
    """Deliver what is left, and serve the store."""
    rankzero.succeed("sync")
    server = rankzero.start("ui", "--port", free_port())
    links = _printed(server)
    found = list_runs(f"sqlite:///{rankzero.folder / 'mlruns' / 'mlflow.db'}")
    records = {run.name: run for run in found}
    yield Shown(rankzero.folder, links["MLflow UI"], links["runs"], links["newest run"], records)
    server.send_signal(signal.SIGINT)
    assert server.wait(timeout=30) == 0


def _train_and_search(rankzero: Command) -> None:
    """Side by side, what can be: it all waits for imports."""
    started = [
        rankzero.start(
            *("train", DIGITS, "train.epochs=3", f"lr={lr}", "--nproc", 1),
            *("--name", f"lr-{lr}"),
        )
        for lr in (0.003, 0.01)
    ]
    started += [
        rankzero.start(
            *("search", DIGITS, "train.epochs=2", "goal.target=0.8", "--nproc", 1),
            *("--trials", TRIALS, "--no-probe", "--seeds", 2, "--challengers", 1, "--study", STUDY),
        )
    ]
    for process in started:
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output


def _printed(server: subprocess.Popen[str]) -> dict[str, str]:
    assert server.stdout is not None
    links: dict[str, str] = {}
    while "MLflow UI" not in links:
        line = server.stdout.readline()
        assert line, links
        name, _, address = line.partition(": ")
        links[name] = address.split()[0]
    assert list(links) == ["runs", "newest run", "MLflow UI"], "the runs come first"
    return links


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def context(browser: Browser) -> BrowserContext:
    """A browser that opens nothing of MLflow's by itself."""
    context = browser.new_context(viewport={"width": 1440, "height": 700})
    context.set_default_timeout(PATIENCE)
    expect.set_options(timeout=PATIENCE)
    context.add_init_script(NO_ASSISTANT)
    return context


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A page; what it asks for lies on this machine."""
    elsewhere: list[str] = []
    page = context.new_page()
    page.on(
        "request",
        lambda request: None if HERE.match(request.url) else elsewhere.append(request.url),
    )
    yield page
    page.close()
    assert not elsewhere


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return screenshots(tmp_path_factory.mktemp("screenshots"))


def names(page: Page) -> list[str]:
    """Return the runs in the table, from the top. MLflow moves rows but not their elements."""
    rows = page.locator(".ag-pinned-left-cols-container .ag-row").all()
    found = [
        (int(row.get_attribute("row-index") or -1), row.locator("a").first.inner_text())
        for row in rows
    ]
    return [name.strip() for _, name in sorted(found)]


def run_page(shown: Shown, name: str, tab: str = "") -> str:
    run = shown.records[name]
    page = f"{shown.address}/#/experiments/{run.experiment_id}/runs/{run.run_id}{tab}"
    return f"{page}?workflowType=machine_learning"


def see_curve(page: Page, title: str) -> None:
    """Wait until the chart of this title has its curve."""
    chart = page.get_by_test_id("experiment-view-compare-runs-card").filter(has_text=title).first
    chart.scroll_into_view_if_needed()
    expect(chart.locator(".scatterlayer path.js-line").first).to_be_attached()


@pytest.mark.timeout(400)
def test_runs_have_useful_columns_and_charts(shown: Shown, page: Page, pictures: Path) -> None:
    """The table has status, goal, samples/s, batch size, lr, precision and duration.

    The charts begin with the most useful ones.
    """
    page.goto(shown.runs)
    expect(page.get_by_role("link", name="lr-0.01")).to_be_visible()
    assert set(names(page)) == {STUDY, "lr-0.01", "lr-0.003"}
    page.screenshot(path=pictures / "runs.png")
    page.set_viewport_size({"width": 2000, "height": 900})  # the grid makes only what is in sight
    for column in (
        "whole_run/best",
        "val/accuracy",
        WHOLE_SPEED,
        "train.batch_size",
        "lr",
        "train.precision",
        "Duration",
    ):
        expect(page.locator(".ag-header-cell").get_by_text(column, exact=True)).to_be_attached()
    page.goto("about:blank")  # else the address changes and the page stays
    page.goto(f"{shown.runs}&compareRunsMode=CHART")
    expect(page.get_by_text("What matters first", exact=False)).to_be_visible()
    see_curve(page, "val/accuracy")
    assert 4 <= page.get_by_test_id("experiment-view-compare-runs-card").count() <= 8
    page.set_viewport_size({"width": 1440, "height": 900})
    page.screenshot(path=pictures / "charts.png")


@pytest.mark.timeout(400)
def test_newest_run_has_its_curve_and_system_metrics(
    shown_with_gpus: Shown, page: Page, pictures: Path
) -> None:
    page.goto(shown_with_gpus.runs)
    page.set_viewport_size({"width": 2000, "height": 900})
    column = page.locator(".ag-header-cell").get_by_text(BUSY_GPUS, exact=True)
    expect(column).to_be_attached()
    page.set_viewport_size({"width": 1440, "height": 700})
    page.get_by_role("link", name=NEWEST).click()
    expect(page.get_by_role("heading", name=NEWEST)).to_be_visible()
    assert shown_with_gpus.newest.partition("?")[0] == page.url.partition("?")[0]
    expect(page.get_by_text("FINISHED:", exact=False).first).to_be_visible()
    page.screenshot(path=pictures / "run.png")
    page.get_by_role("tab", name="Model metrics").click()
    see_curve(page, "loss")
    page.screenshot(path=pictures / "metrics.png")
    page.get_by_role("tab", name="System metrics").click()
    for title in (
        "cpu_utilization_percentage",
        "gpu_0_utilization_percentage",
        "gpu_1_power_usage_watts",
    ):
        page.get_by_placeholder("Search metric charts").fill(
            title
        )  # it draws only what is in sight
        see_curve(page, title)
    page.get_by_placeholder("Search metric charts").fill("utilization")
    see_curve(page, "gpu_1_utilization_percentage")
    page.screenshot(path=pictures / "system.png")


@pytest.mark.timeout(400)
def test_pictures_are_one_click_away(shown: Shown, page: Page, pictures: Path) -> None:
    page.goto(run_page(shown, "lr-0.003"))
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="hardest mistakes", exact=True).click()
    artifact = opened.value
    # Its step is one that has a picture, and the picture has its own size.
    picture = artifact.locator("img[src^='blob:']").first
    expect(picture).to_be_visible()
    assert picture.evaluate("one => one.naturalWidth") > 300
    artifact.set_viewport_size({"width": 1440, "height": 1400})  # else MLflow cuts it below
    picture.screenshot(path=pictures / "pictures.png")
    artifact.close()


@pytest.mark.timeout(400)
def test_study_has_trials_and_figures_without_other_hosts(
    shown: Shown, page: Page, pictures: Path
) -> None:
    page.goto(run_page(shown, STUDY))
    expect(page.get_by_text("val/accuracy", exact=False).first).to_be_visible()
    page.screenshot(path=pictures / "study.png")
    # MLflow covers the links if the verdict has more than three lines.
    page.get_by_text("Show more").click()
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="search", exact=True).click()
    artifact = opened.value
    plots = artifact.frame_locator("iframe").locator(".js-plotly-plot")
    expect(plots.first.locator("svg.main-svg").first).to_be_visible()
    expect(plots.first.locator(".scatterlayer .point").first).to_be_attached()
    artifact.screenshot(path=pictures / "study-search.png")
    artifact.close()
    trials = page.locator("table").filter(has_text="COMPLETE").first
    expect(trials.locator("tbody tr").first).to_be_visible()
    assert trials.locator("tbody tr").count() == TRIALS


@pytest.mark.timeout(400)
def test_page_of_a_search_fits_desktop_and_phone_in_light_and_dark(
    shown: Shown, browser: Browser, pictures: Path
) -> None:
    path = shown.folder / "mlruns" / "runs" / STUDY / "artifacts" / "search.html"
    check_page(browser, path, pictures, wide=1)
    page = browser.new_page(viewport={"width": 900, "height": 900})
    page.goto(path.as_uri())
    page.locator("figure").first.screenshot(path=pictures / "pareto.png")
    page.close()


@pytest.mark.timeout(400)
def test_trials_sort_by_their_speed(shown: Shown, page: Page, pictures: Path) -> None:
    page.goto(shown.runs)
    study = shown.records[STUDY].run_id
    search = page.get_by_placeholder(re.compile("metrics.rmse"))
    search.fill(f"tags.mlflow.parentRunId = '{study}'")
    search.press("Enter")
    expect(page.get_by_role("link", name="lr-0.01")).to_be_hidden()
    page.get_by_test_id("sort-select-dropdown").click()
    page.get_by_test_id(f"sort-select-{WHOLE_SPEED}").click()
    speeds = {
        name: run.metrics.get(WHOLE_SPEED, 0.0)
        for name, run in shown.records.items()
        if run.tags.get("mlflow.parentRunId") == study
    }
    wanted = sorted(speeds, key=lambda name: -speeds[name])
    expect(page.locator(".ag-pinned-left-cols-container .ag-row[row-index='0']")).to_contain_text(
        wanted[0]
    )
    assert len(wanted) >= 3 and names(page) == wanted
    page.screenshot(path=pictures / "trials.png")


@pytest.mark.timeout(400)
def test_two_runs_side_by_side(shown: Shown, page: Page, pictures: Path) -> None:
    page.goto(shown.runs)
    for name in ("lr-0.003", "lr-0.01"):
        row = page.locator(".ag-pinned-left-cols-container .ag-row")
        row = row.filter(has=page.get_by_role("link", name=name, exact=True))
        row.locator("input.ag-checkbox-input").check()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_text("Comparing 2 Runs")).to_be_visible()
    for name in ("lr-0.003", "lr-0.01"):
        expect(page.get_by_text(name, exact=True).first).to_be_visible()
    expect(page.locator(".js-plotly-plot").first).to_be_visible()
    page.screenshot(path=pictures / "compare.png")

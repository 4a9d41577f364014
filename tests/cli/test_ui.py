"""`rankzero ui` in a real browser: the run's page, its numbers, its charts."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from cli.conftest import TINY, Command, free_port
from rankzero.tracking.catalog import mlflow_id

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


@pytest.fixture
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "these tests need chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.mark.timeout(180)
def test_the_newest_run_is_a_click_away(rankzero: Command, browser: Browser) -> None:
    assert rankzero("train", TINY, "train.steps=20", "--run-name", "first-run")[0] == 0
    server = rankzero.start("ui", "--port", free_port())
    assert server.stdout is not None
    shown = [server.stdout.readline(), server.stdout.readline()]
    link = re.search(r"newest run: (\S+)", "".join(shown))
    assert link is not None, shown
    address, _, query = link[1].partition("?")
    assert address.endswith(f"/runs/{mlflow_id(rankzero.runs[0])}")
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.goto(link[1])
    expect(page.get_by_text("first-run").first).to_be_visible(timeout=60_000)
    expect(page.get_by_text("val/accuracy").first).to_be_visible(timeout=60_000)
    page.goto(f"{address}/model-metrics?{query}")
    expect(page.get_by_role("heading", name="loss").first).to_be_visible(timeout=60_000)
    page.goto(f"{address}/system-metrics?{query}")
    expect(page.get_by_text("cpu_utilization_percentage").first).to_be_visible(timeout=60_000)
    page.screenshot(path=rankzero.folder / "system.png")
    server.send_signal(signal.SIGINT)
    assert server.wait(timeout=30) == 0

"""Headless Chromium, for tests that look at pages as people do."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
FORMS = [(width, scheme) for width in (1440, 390) for scheme in ("light", "dark")]
"""Desktop and phone, light and dark."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser for the block."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    assert found, "these tests need chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


def screenshots(otherwise: Path) -> Path:
    """Return the folder for pictures of what tests saw: $RANKZERO_SCREENSHOTS if it is set."""
    folder = Path(os.environ.get("RANKZERO_SCREENSHOTS") or otherwise)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_page(browser: Browser, path: Path, pictures: Path, wide: int = 0) -> None:
    """Assert that a page of charts fits desktop and phone, in light and dark, without a network.

    `wide`: how many of its charts may be wider than a phone. They scroll within the page.
    """
    for width, scheme in FORMS:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        problems: list[str] = []
        page.on("pageerror", lambda error, found=problems: found.append(str(error)))
        page.on("request", lambda one, found=problems: found.append(one.url))
        page.goto(path.as_uri())
        page.wait_for_selector(".scatterlayer .trace")
        page.screenshot(path=pictures / f"{path.stem}-{width}-{scheme}.png", full_page=True)
        assert problems == [path.as_uri()], "nothing is fetched"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        charts = page.locator(".grid > figure").evaluate_all(
            "all => all.map(one => [one.clientWidth, one.querySelector('svg').clientWidth,"
            " one.querySelector('svg').clientHeight])"
        )
        assert charts and all(drawn > 0 and height >= 300 for _, drawn, height in charts), charts
        assert sum(drawn > room for room, drawn, _ in charts) <= wide, charts
        colour = "getComputedStyle(document.querySelector('.xtick text')).fill"
        ink = "0" if scheme == "light" else "255"
        assert page.evaluate(colour) == f"rgb({ink}, {ink}, {ink})"
        texts = "[...document.querySelectorAll('body :not(script):not(style)')].filter(one =>"
        texts += " [...one.childNodes].some(part => part.nodeType == 3 && part.data.trim()))"
        fonts = page.evaluate(f"{texts}.map(one => getComputedStyle(one).fontFamily)")
        families = {one.replace('"', "") for one in fonts}
        assert families <= {"system-ui, sans-serif", "ui-monospace, monospace"}, families
        page.close()

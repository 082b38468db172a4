"""One browser for all tests of the page, without a way to the network."""

import os
import shutil
from collections.abc import Iterator

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL = "install your distribution's chromium, or run `playwright install chromium`"
QUIET = (
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Chromium, headless; skips where there is none, unless ATTNSCOPE_REQUIRE_BROWSER asks for one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as started:
        there = next(filter(None, map(shutil.which, (*NAMES, started.chromium.executable_path))), None)
        if there is None:
            missing = pytest.fail if os.environ.get("ATTNSCOPE_REQUIRE_BROWSER") else pytest.skip
            missing(f"no Chromium: {INSTALL}")
        as_root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=there, args=[*QUIET, *as_root])
        yield browser
        browser.close()

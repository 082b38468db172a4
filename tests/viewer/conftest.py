"""One browser for all tests of the page, and the pages of two models."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from helpers.browsing import visiting
from helpers.command_line import call
from helpers.pretrained import pretrained

if TYPE_CHECKING:
    from attnscope.observe.observation import Observation

TEXT = "the financial bank is located on river bank"

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
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium, headless; skips where there is none, unless ATTNSCOPE_REQUIRE_BROWSER asks for one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as started:
        there = next(filter(None, map(shutil.which, (*NAMES, started.chromium.executable_path))), None)
        if there is None:
            missing = pytest.fail if os.environ.get("ATTNSCOPE_REQUIRE_BROWSER") else pytest.skip
            missing(f"no Chromium: {INSTALL}")
        as_root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=there, args=[*QUIET, *as_root])
        first = tmp_path_factory.mktemp("first") / "page.html"
        call("view", "--text", "the bank", "-o", str(first)).ok()
        with visiting(browser, first) as visit:  # fonts, a first tab and its process: a second of work
            visit.view("model").locator("canvas").first.wait_for()
        yield browser
        browser.close()


@dataclass(frozen=True)
class Subject:
    """A text, observed by one model, and its page as the command writes it."""

    seen: Observation
    path: Path
    folder: str

    @cached_property
    def relations(self) -> list[dict]:
        """The rows of the relations CSV."""
        return self.seen.relations().to_pylist()


@pytest.fixture(scope="session", params=["demo", pytest.param("stories260K-llama", marks=pytest.mark.e2e)])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """The embedded model, and a pretrained one where it is at hand."""
    import attnscope

    folder = "demo" if request.param == "demo" else str(pretrained(request.param))
    path = tmp_path_factory.mktemp("page") / f"{request.param}.html"
    call("view", "--model", folder, "--text", TEXT, "-o", str(path)).ok()
    return Subject(attnscope.capture(attnscope.load(folder), TEXT), path, folder)

"""What all tests share."""

import gc
import logging
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import pytest

from helpers.pretrained import ELSEWHERE, SHARED, pretrained

# What a person's shell may say otherwise, and what tests go by; xdist sets COLUMNS.
PINNED = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # tiny models gain nothing from more, and other tests may be running
    "LC_ALL": "C.UTF-8",
    "TERM": "xterm-256color",
    "ATTNSCOPE_READING_SECONDS": "600",  # a text of a test that is not about the deadline, on a busy machine
}
UNSET = """
    COLUMNS LINES NO_COLOR FORCE_COLOR CLICOLOR CLICOLOR_FORCE COLORTERM MKL_NUM_THREADS RAY_ADDRESS MPLBACKEND
    PYTHONWARNINGS PYTHONIOENCODING PYTHONUTF8 TQDM_DISABLE
"""
OTHERS = ("HF_", "TRANSFORMERS_", "HUGGINGFACE_", "TYPER_", "ATTNSCOPE_")  # what begins so is unset, too
KEPT = {"ATTNSCOPE_REQUIRE_BROWSER"}


def pin(environment: MutableMapping[str, str]) -> None:
    """Make an environment the same on every machine and in every shell, as far as the package and its tests read it."""
    for name in [*environment]:
        if name in UNSET.split() or (name.startswith(OTHERS) and name not in KEPT):
            del environment[name]
    environment.update(PINNED)


pin(os.environ)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What collecting imports stays to the end: without this, every look for garbage goes over millions of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(autouse=True)
def plain_logger() -> None:
    """A library's logger in every test: a command that ran in this process before may have made it quiet."""
    logger = logging.getLogger("attnscope")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def demo():
    """The embedded model."""
    from attnscope.model.loading import LoadOptions, load

    return load(LoadOptions())


@pytest.fixture(params=["stories260K-llama", "babyllama-char105"])
def real_model_folder(request: pytest.FixtureRequest) -> Path:
    """A folder of real pretrained weights with an independent oracle; skips where they are not at hand."""
    return pretrained(request.param)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many claims about pretrained models nobody tested here."""
    skipped = [report for report in terminalreporter.getreports("skipped") if ELSEWHERE in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests on pretrained models did not run: they need {SHARED}")

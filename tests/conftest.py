"""What all tests share."""

import copy
import gc
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import seconds
from helpers.environment import pin
from helpers.pretrained import ELSEWHERE, ORACLES, SHARED, pretrained

REPORT = os.environ.pop("ATTNSCOPE_REPORT", None)  # `--report` of this pytest, and of none that a test runs
pin(os.environ)
SECONDS = Path(__file__).with_name("seconds.json")  # of each file, by the marks that were chosen; see .ci/tests.py


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", metavar="FILE", help="write how each case ended and its processor seconds")
    parser.addoption("--repeat", type=int, default=1, metavar="N", help="run each case so often; with -n 0")


def pytest_configure(config: pytest.Config) -> None:
    report = config.option.report or REPORT
    worker = getattr(config, "workerinput", {})
    if report or worker.get("counts"):
        config.pluginmanager.register(seconds)
    if report and not worker:
        config.pluginmanager.register(seconds.Report(report))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers count seconds where this process writes a report of them."""
    node.workerinput["counts"] = bool(node.config.option.report or REPORT)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What collecting imports stays to the end: without this, every look for garbage goes over millions of objects.

    What tests make goes mostly by its count of references: a look for the rest is needed a tenth as often.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.set_threshold(10 * gc.get_threshold()[0], *gc.get_threshold()[1:])
        gc.enable()
        gc.freeze()
        gc.get_freeze_count = lambda: 1  # to count what is frozen takes 0.1 s, and every run of a corpus asks


@pytest.fixture(autouse=True)
def plain_logger() -> None:
    """A library's logger in every test: a command that ran in this process before may have made it quiet."""
    logger = logging.getLogger("attnscope")
    logger.handlers, logger.propagate = [], True
    if logger.level:  # to set one empties the caches of thousands of loggers
        logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def demo():
    """The embedded model."""
    from attnscope.model.loading import load
    from attnscope.model.options import LoadOptions

    return load(LoadOptions())


@pytest.fixture(scope="session")
def demo_without_atlas(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a copy of the embedded model that nothing has scanned."""
    from attnscope.model.loading import DEMO_FOLDER

    folder = tmp_path_factory.mktemp("unscanned") / "demo"
    return str(shutil.copytree(DEMO_FOLDER, folder, ignore=shutil.ignore_patterns("atlas")))


@pytest.fixture(scope="session")
def readers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader of README and the docs works in, one folder for all their commands: what a clone has for them."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("examples", "configs", "README.md"):
        (folder / name).symlink_to(Path(__file__).parents[1] / name)
    return folder


@pytest.fixture(params=ORACLES)
def real_model_folder(request: pytest.FixtureRequest) -> Path:
    """A folder of real pretrained weights with an independent oracle; skips where they are not at hand."""
    return pretrained(request.param)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker the longest files begin first: one left to the end would keep that worker alone."""
    if hasattr(config, "workerinput") and SECONDS.exists():
        longest = json.loads(SECONDS.read_text()).get(config.option.markexpr, {})
        items.sort(key=lambda item: -longest.get(item.path.relative_to(config.rootpath).as_posix(), 0.0))
    items += [_again(item) for _ in range(config.option.repeat - 1) for item in items]


def _again(item: pytest.Item) -> pytest.Item:
    """The same case as an item of its own: pytest does not set up again what comes twice in a row."""
    again = copy.copy(item)
    if isinstance(again, pytest.Function):
        again._initrequest()
    return again


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many claims about pretrained models nobody tested here."""
    skipped = [report for report in terminalreporter.getreports("skipped") if ELSEWHERE in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests on pretrained models did not run: they need {SHARED}")

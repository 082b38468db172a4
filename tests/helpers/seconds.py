"""Processor seconds of every case, its child processes included: a plugin that `conftest.py` registers for a report.

What is made once for many cases is counted apart from the case that needs it first: fixtures of a wider scope than a
function, and what `once` keeps. `--report=FILE` writes a JSON line per phase of each case, for `.ci/tests.py`.
"""

import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]

P, T = ParamSpec("P"), TypeVar("T")
shared: dict[str, float] = {}  # what was made for many cases in the phase that runs


def once(make: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache`, whose seconds are not those of the case that happens to call first."""

    @functools.cache
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        with_parts, began = sum(shared.values()), processor_seconds()
        try:
            return make(*args, **kwargs)
        finally:
            parts = sum(shared.values()) - with_parts
            _count(f"{make.__module__}.{make.__qualname__}", processor_seconds() - began - parts)

    return made


def processor_seconds() -> float:
    """Of this process and of all that it started.

    Without /proc those that still run are left out, and on Windows all that it started.
    """
    if resource is None:
        return time.process_time()
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    running = sum(map(_of_process, _started_by("self")))
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime + running


def _started_by(pid: str) -> Iterator[str]:
    """The processes below one that still run."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in found:
            yield child
            yield from _started_by(child)


def _of_process(pid: str) -> float:
    """A running process and those of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _count(name: str, seconds: float) -> None:
    shared[name] = shared.get(name, 0.0) + seconds


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    """Count a fixture that many cases share apart, without those that it uses itself."""
    if fixturedef.scope == "function":
        return (yield)
    with_parts, began = sum(shared.values()), processor_seconds()
    try:
        return (yield)
    finally:
        parts = sum(shared.values()) - with_parts
        _count(f"{fixturedef.baseid}::{fixturedef.argname}", processor_seconds() - began - parts)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Leave a phase's seconds in its report: the case's own, and what was made for many."""
    shared.clear()
    began = processor_seconds()
    try:
        return (yield)
    finally:
        taken = processor_seconds() - began
        item.user_properties[:] = [("own", round(taken - sum(shared.values()), 3)), *shared.items()]


pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup


class Report:
    """The file of `--report`."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.path.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = {"case": report.nodeid, "when": report.when, "outcome": report.outcome, "text": report.longreprtext}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | {"seconds": report.user_properties}) + "\n")

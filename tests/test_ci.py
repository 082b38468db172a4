"""`.ci/tests.py`: what fails twice, what is flaky, what takes too long."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
CASE = "tests/test_a.py::test_b"
FAILS = "def test_fails(): assert 0\n"
FLAKY = """
def test_flaky_{0}():
    tries = __import__("pathlib").Path("tries-{0}")
    tries.open("a").write("x")
    assert len(tries.read_text()) > 1, "the first try"
"""


@pytest.fixture(scope="module")
def ci() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_tests", ROOT / ".ci" / "tests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ran(ci: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """The verdict on a default selection in which cases failed or took so long; `again` is how each ends alone."""

    def verdict(failed=(), seconds=0.5, again=0, thrice=(), shared=0.0, before=0.0, code=0):
        def pytest(*arguments):
            run = ci.Run(again)
            run.cases[CASE] = list(thrice)
            return run

        monkeypatch.setattr(ci, "pytest", pytest)
        runs = {mark: ci.Run(0) for mark in ci.SELECTIONS}
        runs["e2e"].failed = dict.fromkeys(failed, "assert 0")
        runs[ci.DEFAULT].code = code
        runs[ci.DEFAULT].cases[CASE] = [seconds]
        runs[ci.DEFAULT].shared = {"demo": shared}
        return ci.verdict(runs, {CASE.partition("::")[0]: before, "tests/test_that_went.py": 100.0})

    return verdict


def test_a_run_without_failures_is_well(ran):
    assert ran() == (True, [])


def test_what_fails_again_fails_the_run(ran):
    assert ran([CASE], again=1) == (False, [f"failed: {CASE}"])


def test_what_passes_alone_is_named_with_its_first_failure(ran):
    well, lines = ran([CASE])
    assert well
    assert lines == [f"flaky: {CASE} failed, and passed alone", "    assert 0"]


@pytest.mark.parametrize(("count", "well"), [(3, True), (4, False)])
def test_three_flaky_cases_are_the_most(count, well, ran):
    verdict, lines = ran([f"{CASE}_{number}" for number in range(count)])
    assert verdict == well
    assert sum(line.startswith("flaky: ") for line in lines) == count


def test_where_dozens_fail_none_is_tried_again(ran):
    well, lines = ran([f"{CASE}_{number}" for number in range(31)])
    assert not well
    assert len(lines) == 31


def test_a_selection_that_stops_fails_the_run(ran):
    well, [line] = ran(code=2)
    assert not well
    assert "2" in line


@pytest.mark.parametrize(
    ("seconds", "thrice", "before", "well"),
    [
        (1.1, (1.1, 0.2, 0.3), 0, True),  # it was the first to import something
        (1.1, (1.1, 1.2, 0.3), 0, False),
        (1.1, (1.1, 1.2, 0.3), 0.9, True),  # on a machine that takes 1.2 times as long
        (1.1, (1.1, 1.2, 0.3), 9.0, False),
    ],
)
def test_the_median_of_three_may_be_a_second(seconds, thrice, before, well, ran):
    verdict, lines = ran(seconds=seconds, thrice=thrice, before=before)
    assert verdict == well
    assert well or CASE in lines[0]


@pytest.mark.parametrize(("shared", "well"), [(4.9, True), (5.1, False)])
def test_what_is_made_once_may_take_five(shared, well, ran):
    assert ran(shared=shared)[0] == well


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("source", "code", "named"),
    [
        (FLAKY.format(1), 0, "flaky: tests/test_made.py::test_flaky_1"),
        (FAILS, 1, "failed: tests/test_made.py::test_fails"),
        ("".join(map(FLAKY.format, range(4))), 1, "4 flaky cases"),
    ],
)
def test_a_whole_run(source, code, named, tmp_path, monkeypatch, ci, capfd):
    """With this project's own plugin, in processes, of a file of tests in all three selections."""
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "helpers"):
        (tmp_path / "tests" / name).symlink_to(ROOT / "tests" / name)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    more = "import pytest\n@pytest.mark.{0}\ndef test_{0}(): pass\n"
    (tmp_path / "tests" / "test_made.py").write_text(source + more.format("families") + more.format("e2e"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    assert ci.main() == code
    last = capfd.readouterr().out.rpartition("processor seconds")[2]
    assert named in last
    assert ("the first try" in last) == ("flaky" in named)
    assert ci.KEPT.exists() == (code == 0)
    if not code:
        assert "tests/test_made.py" in json.loads(ci.KEPT.read_text())[ci.DEFAULT]

"""scripts/external.sh: which judges it runs, what it takes for a failure, and the page that it makes. No network."""

import ast
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from external import driver  # noqa: E402
from external.common import by_project, source_of  # noqa: E402
from external.document import CODE, calls_of, document, fell_short, filled, parts_of, peers, tables  # noqa: E402

SCRIPT = """
from external.common import Report, arguments
asked = arguments()
report = Report(("pytest",))
with report.check("two and two") as check:
    check.hold(2 + 2 == {sum}, "the sum")
    check.expect("a bar | that differs", 1)
with report.control("one is two") as check:
    check.hold({control})
report.not_had += [str(asked.source)] if asked.source else []
report.write(asked.out)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of judges without any; a judge runs with the tests' own Python."""
    folder = tmp_path / "external"
    folder.mkdir()
    for name in ("__init__.py", "common.py"):
        shutil.copy(driver.HERE / name, folder)
    monkeypatch.setattr(driver, "made_environment", lambda judge, folder: Path(sys.executable))
    return folder


def judge(folder: Path, name: str, script: str = "", total: str = "4", control: str = "1 == 2", more: str = "") -> None:
    (folder / f"{name}.toml").write_text(f'title = "Of {name}"\nabout = "Sums."\n{more}')
    (folder / f"{name}.py").write_text(script or SCRIPT.format(sum=total, control=control))


def run(folder: Path, *arguments: str) -> int:
    return driver.main(arguments, folder, folder.parent / "external.md")


def rows_of(folder: Path, name: str) -> list[list[str]]:
    """The rows of a table next to the page, without its head."""
    with (folder.parent / "external" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return [*csv.reader(file)][1:]


def kept(folder: Path, name: str) -> Any:
    return json.loads((folder / "results" / f"{name}.json").read_text())


def test_a_judge_that_passes_is_kept_and_written_to_the_page(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    judge(place, "sums")
    assert run(place, "sums") == 0
    found = kept(place, "sums")
    assert found["version"] == {"pytest": pytest.__version__}
    (check,), (control,) = found["checks"], found["controls"]
    assert (check["what"], check["passed"], check["of"], check["explained"]) == ("two and two", 1, 2, 1)
    assert (control["passed"], control["of"]) == (0, 1)
    page = (place.parent / "external.md").read_text()
    assert f"| Of sums | pytest {pytest.__version__} | 1 of 2 | 1 | 0 | 1 of 1 | {found['date']} |" in page
    assert rows_of(place, "notes") == [["Of sums", "differs", "two and two", "a bar | that differs"]]
    assert [row[:6] for row in rows_of(place, "checks")] == [
        ["Of sums", "check", "two and two", "1", "2", "1"],
        ["Of sums", "control", "one is two", "0", "1", "0"],
    ]
    assert rows_of(place, "judges") == [
        ["Of sums", f"pytest {pytest.__version__}", found["date"], found["machine"], "Sums."]
    ]
    assert capfd.readouterr().out == f"wrote {place.parent / 'external.md'}\n"


def test_a_check_that_falls_short_ends_with_1_and_is_named(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    judge(place, "sums", total="5")
    assert run(place) == 1
    assert "sums: two and two: 0 of 2 passed, 1 explained" in capfd.readouterr().out
    page = (place.parent / "external.md").read_text()
    assert "| 0 of 2 | 1 | 1 | 1 of 1 |" in page
    assert ["Of sums", "fell short", "two and two", "the sum"] in rows_of(place, "notes")


def test_a_control_that_passes_whole_ends_with_1(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    judge(place, "sums", control="True")
    assert run(place) == 1
    assert "sums: control passed whole: one is two" in capfd.readouterr().out
    assert "| 0 of 1 |" in (place.parent / "external.md").read_text()
    assert [row[1:5] for row in rows_of(place, "checks")][1] == ["control", "one is two", "1", "1"]


def test_a_result_without_a_case_or_a_control_falls_short() -> None:
    nothing = {"what": "all of none", "passed": 0, "of": 0}
    assert fell_short({"checks": [nothing], "controls": []}) == [
        "all of none: 0 of 0 passed, 0 explained",
        "it has no control",
    ]
    assert fell_short({"checks": [], "controls": [nothing]}) == ["control passed whole: all of none"]
    assert fell_short({"checks": [{"what": "one", "passed": 1, "of": 1}], "controls": [{**nothing, "of": 1}]}) == []


@pytest.mark.parametrize(
    ("script", "minutes", "why"),
    [
        ("raise SystemExit(3)", 1, "its script ended with exit code 3 and wrote no result"),
        ("pass", 1, "its script ended with exit code 0 and wrote no result"),
        (SCRIPT.format(sum=4, control="1 == 2") + "raise SystemExit(3)", 1, "its script ended with exit code 3"),
        ("import time\ntime.sleep(600)", 0.02, "stopped after 0.02 minutes"),
    ],
)
def test_a_script_that_fails_ends_with_1_and_leaves_the_kept_result(
    place: Path, script: str, minutes: float, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    judge(place, "sums")
    run(place, "sums")
    before = kept(place, "sums")
    judge(place, "sums", script, more=f"minutes = {minutes}")
    assert run(place, "sums") == 1
    assert f"sums: {why}\n" in capfd.readouterr().out
    assert kept(place, "sums") == before


def test_a_missing_source_could_not_be_had(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    judge(place, "other", more='source = "their clone"')
    judge(place, "sums")
    assert run(place) == 0
    assert "other: could not be had: it needs their clone: --source other=FOLDER" in capfd.readouterr().err
    page = (place.parent / "external.md").read_text()
    assert "| Of other | - | could not be had: needs their clone, `--source other=FOLDER` | | | | |" in page
    assert [row[0] for row in rows_of(place, "judges")] == ["Of sums"]


def test_a_source_is_handed_to_its_judge(place: Path, tmp_path: Path) -> None:
    judge(place, "other", more='source = "their clone"')
    assert run(place, "other", "--source", f"other={tmp_path}") == 0
    assert kept(place, "other")["not_had"] == [str(tmp_path)]
    assert ["Of other", "not had", "", str(tmp_path)] in rows_of(place, "notes")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["absent"], "there is no judge 'absent': the judges are sums"),
        (["--source", "absent=."], "there is no judge 'absent'"),
        (["--source", "sums"], "expected --source NAME=FOLDER with a folder that exists, got 'sums'"),
        (["--source", "sums=nowhere"], "got 'sums=nowhere'"),
    ],
)
def test_what_is_not_understood_ends_with_2(
    place: Path, arguments: list[str], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    judge(place, "sums")
    with pytest.raises(SystemExit) as ended:
        run(place, *arguments)
    assert ended.value.code == 2
    assert why in capfd.readouterr().err
    assert not (place / "results").exists()


def test_the_page_alone_runs_nothing(place: Path) -> None:
    judge(place, "sums", "raise SystemExit(3)")
    assert run(place, "--docs") == 0
    assert "| Of sums | - | not run | | | | |" in (place.parent / "external.md").read_text()


@pytest.mark.e2e
def test_an_environment_is_made_used_and_deleted(tmp_path: Path) -> None:
    """pip is what a new environment has already: nothing is fetched."""
    folder = tmp_path / "external"
    folder.mkdir()
    (folder / "__init__.py").touch()
    script = 'import json, sys\njson.dump({"prefix": sys.prefix}, open(sys.argv[1], "w"))'
    judge(folder, "where", script)
    one = driver.Judge("where", "", "", requires=("pip",), constraints=False, project=False)
    prefix = Path(driver.run(one, None, None, tmp_path)["prefix"])
    assert prefix != Path(sys.prefix)
    assert not prefix.parent.exists()


@pytest.mark.parametrize("fails", [False, True])
def test_an_environment_is_finished_once_pip_has_ended_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Without a venv and without pip, which the two tests marked e2e run."""
    asked: list[list[str]] = []

    def ran(command: list[object], **how: object) -> None:
        asked.append([*map(str, command)])
        (tmp_path / "env").mkdir(exist_ok=True)
        if fails and "pip" in asked[-1]:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(driver.subprocess, "run", ran)
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "left over").touch()
    one = driver.Judge("x", "", "", requires=("a==1",))
    if fails:
        with pytest.raises(driver.NotHadError, match=r"its environment could not be made: .*a==1"):
            driver.made_environment(one, tmp_path)
    else:
        assert driver.made_environment(one, tmp_path) == tmp_path / "env" / "bin" / "python"
    assert [command[1:3] for command in asked] == [["-m", "venv"], ["-m", "pip"]]
    assert asked[1][3:] == driver.installs(one)
    assert (tmp_path / "env" / "finished").exists() is not fails
    assert not (tmp_path / "env" / "left over").exists()


def test_an_environment_that_was_finished_is_used_again(tmp_path: Path) -> None:
    one = driver.Judge("x", "", "", requires=("no such requirement",))
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "finished").touch()
    assert driver.made_environment(one, tmp_path) == tmp_path / "env" / "bin" / "python"


@pytest.mark.e2e
def test_an_environment_that_pip_cannot_make_could_not_be_had(tmp_path: Path) -> None:
    one = driver.Judge("x", "", "", requires=("no such requirement",), constraints=False, project=False)
    with pytest.raises(driver.NotHadError, match=r"its environment could not be made: .*no such requirement"):
        driver.made_environment(one, tmp_path)
    assert not (tmp_path / "env" / "finished").exists()


def test_pip_is_given_the_pins_and_this_clone() -> None:
    one = driver.Judge("x", "", "", requires=("a==1",), project="fast")
    expected = ["install", "-q", "--no-compile", "-c", str(ROOT / "constraints.txt"), "a==1", "-e", f"{ROOT}[fast]"]
    assert driver.installs(one) == expected
    alone = driver.Judge("x", "", "", requires=("a==1",), constraints=False, project=False)
    assert driver.installs(alone) == ["install", "-q", "--no-compile", "a==1"]


def test_every_judge_has_its_script_its_pins_and_its_result() -> None:
    known = driver.judges()
    assert known
    for name, one in known.items():
        assert (driver.HERE / f"{name}.py").exists()
        assert all("==" in requirement for requirement in one.requires)
    kept = {path.stem for path in (driver.HERE / "results").glob("*.json")}
    assert kept <= known.keys()
    assert kept | {name for name, one in known.items() if one.source} == set(known)


def test_the_page_is_made_of_the_kept_results_which_hold() -> None:
    results = {path.stem: json.loads(path.read_text()) for path in (driver.HERE / "results").glob("*.json")}
    page = (ROOT / "docs" / "external.md").read_text("utf-8")
    assert page == document(driver.judges(), results)
    made = tables(driver.judges(), results)
    assert {path.name: path.read_text("utf-8") for path in (ROOT / "docs" / "external").iterdir()} == made
    assert {name: fell_short(found) for name, found in results.items()} == {name: [] for name in results}


# docs/coming-from.md, and the table of model types


def calls_judges() -> dict[str, Any]:
    """{heading of docs/coming-from.md: (its judge, its kept result)}."""
    return {judge.calls: (judge, kept(driver.HERE, name)) for name, judge in driver.judges().items() if judge.calls}


def test_every_call_that_coming_from_names_was_run_as_it_is_written_there() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text("utf-8")
    parts, judges = parts_of(page), calls_judges()
    assert parts.keys() == judges.keys()
    for heading, (_, result) in judges.items():
        typed = {call["wrote"]: call["typed"] for call in result["calls"]}
        named = [[code for code in CODE.findall(row["wrote"]) if code in typed] for row in calls_of(parts[heading])]
        assert sorted(named) == sorted([code] for code in typed), heading
        for [code], row in zip(named, calls_of(parts[heading]), strict=True):
            assert typed[code] in CODE.findall(row["typed"]), code
    assert page == filled(page, {heading: result for heading, (_, result) in judges.items()})
    assert not re.search(r"\| -? \|$", page, re.MULTILINE)


def test_calls_were_run_with_the_versions_that_their_judges_pin() -> None:
    for judge, result in calls_judges().values():
        pinned = dict(requirement.split("==") for requirement in judge.requires)
        assert {
            name: version.partition("+")[0] for name, version in result["version"].items()
        }.items() <= pinned.items()


def test_the_kept_calls_are_those_of_the_judges() -> None:
    """A call that was changed in a script has to be run again."""
    for judge, result in calls_judges().values():
        tree = ast.parse((driver.HERE / f"{judge.name}.py").read_text("utf-8"))
        texts = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
        rows = [node.args for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Row"]
        written = [[ast.literal_eval(texts.get(ast.unparse(part), part)) for part in row[:2]] for row in rows]
        assert sorted(written) == sorted([call["wrote"], call["typed"]] for call in result["calls"])


def test_a_row_that_was_not_run_shows_no_number() -> None:
    page = "## From it\n\nRun with nothing.\n\n| you wrote | you type | apart |\n|---|---|---|\n{}## From else\n"
    rows = "| `one(1)`, or so | `attnscope one` | {} |\n| `two(2)` | `two` | {} |\n"
    result = {"version": {"it": "1.0"}, "calls": [{"wrote": "one(1)", "typed": "attnscope one", "apart": 3e-8}]}
    made = filled(page.format(rows.format("-", "5e-01")), {"From it": result})
    assert made == page.format(rows.format("3e-08", "-")).replace("with nothing", "with it 1.0")
    assert filled(made, {"From it": result}) == made


def test_the_table_of_model_types_tells_rounding_from_other_weights() -> None:
    judges = {"a": driver.Judge("a", "", "", column="peer"), "b": driver.Judge("b", "", "", column="attnscope")}
    types = {
        "x": {"apart": 0.25, "stacks": ["all"]},
        "y": {"refused": "ValueError: no"},
        "z": {"apart": 1e-6, "stacks": ["cross", "decoder"]},
    }
    result = {"version": {"peer": "2.0"}, "model_types": types}
    own = {"version": {"own": "3.0"}, "model_types": {"w": {"apart": 0.0, "stacks": ["all"]}}}
    table = [line for line in peers(judges, {"a": result, "b": own}) if line.startswith("|")]
    assert table[0] == "| type | attnscope | peer |"
    assert table[2] == "| version | own 3.0 | peer 2.0 |"
    assert set(table[3:]) == {
        "| `w` | 0 | - |",
        "| `x` | - | **0.25** |",
        "| `y` | - | refused |",
        "| `z` | - | 1e-06 (cross, decoder) |",
    }


def test_the_command_runs_from_any_folder(tmp_path: Path) -> None:
    asked = [ROOT / "scripts" / "external.sh", "--help"]
    done = subprocess.run(asked, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}, text=True,
        capture_output=True, check=True)  # fmt: skip
    assert "--source NAME=FOLDER" in done.stdout


def test_a_judge_without_attnscope_asks_this_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever attnscope is installed in the project's Python, and whatever the judge's own path is."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PYTHONPATH $*" > {tmp_path}/asked\n')
    python.chmod(0o755)
    monkeypatch.setenv("ATTNSCOPE_PYTHON", str(python))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    by_project("kvpress_ours", "folder")
    assert (tmp_path / "asked").read_text() == f"{ROOT / 'scripts'}{os.pathsep}{ROOT} -m external.kvpress_ours folder\n"


@pytest.mark.slow
def test_transformers_own_tests_hold_for_three_families(tmp_path: Path) -> None:
    """In the tests' own environment; TRANSFORMERS_SOURCE is an unpacked source distribution for who has no network."""
    pytest.importorskip("parameterized", reason="transformers' tests need parameterized")
    given = os.environ.get("TRANSFORMERS_SOURCE")
    try:
        source = Path(given) if given else source_of(f"transformers=={transformers.__version__}", tmp_path / "source")
    except subprocess.CalledProcessError:
        pytest.skip("pip cannot download transformers' source distribution; TRANSFORMERS_SOURCE=FOLDER gives one")
    command = [sys.executable, "-m", "external.transformers", str(tmp_path / "out.json"), "--source", str(source)]
    path = os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    subprocess.run([*command, "--families", "llama,bert,t5"], cwd=tmp_path, env=environment, check=True)
    found = json.loads((tmp_path / "out.json").read_text())
    assert fell_short(found) == []
    assert sum(check["passed"] for check in found["checks"]) > 200
    assert len(found["controls"]) == 4

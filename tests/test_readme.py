"""README: its sample is what comes out, and every command in it runs in a clone."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import attnscope
from attnscope.cli.app import COMMANDS
from helpers.command_line import HANGS, call
from helpers.forks import shim
from helpers.readme import COLUMNS, SAMPLE, document
from helpers.rows import csv_rows

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
LINES = [
    line.removeprefix("pip install -c constraints.txt -e . && ")
    for line in re.findall(r"^    (.*attnscope .*)$", README, re.MULTILINE)
    if "git " not in line
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder in which the first command ran, and the page with what it showed."""
    folder = tmp_path_factory.mktemp("sample")
    return folder, document(README, folder)


def test_the_sample_is_what_comes_out(made):
    _, page = made
    assert page == README, "run scripts/readme_doc.py"


def test_the_sample_shows_roles(made):
    sample = SAMPLE.search(README)[3]
    rows = [line.split() for line in sample.splitlines() if re.match(r" *L\d+H\d+ ", line)]
    assert {"induction", "previous-token"} <= {row[2] for row in rows}
    assert max(map(len, sample.splitlines())) <= COLUMNS


def test_what_is_said_of_the_overview_holds(made):
    folder, _ = made
    said = re.search(r"(L\dH\d) and (L\dH\d) look one token back, (L\dH\d) and\s(L\dH\d) at what followed", README)
    role = roles(csv_rows((folder / "runs" / "story" / "heads.csv").read_bytes()))
    assert [role[name] for name in said.groups()] == ["previous-token"] * 2 + ["induction"] * 2


def test_what_the_demo_configuration_says_of_itself_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = ROOT / "configs" / "demo.yaml"
    assert "induction and previous-token heads show" in file.read_text()
    found = call("heads", "--config", str(file), "-q", "--format", "csv").rows
    assert {"induction", "previous-token"} <= set(roles(found).values())


def roles(rows):
    """The role of each head of heads.csv."""
    return {f"L{row['layer']}H{row['head']}": row["role"] for row in rows}


@pytest.mark.parametrize("line", LINES)
def test_a_command_runs_in_the_clone(line, tmp_path):
    """Hub models need a network: those lines are held to run with the embedded model in the hub model's place."""
    for name in ("examples", "configs", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    if "jq" in line and not shutil.which("jq"):
        pytest.skip("jq is not installed")
    env = os.environ | {"PATH": f"{shim()}{os.pathsep}{os.environ['PATH']}"}
    here = re.sub(r"--model \S+/\S+", "--model demo", line)
    command = ["bash", "-o", "pipefail", "-c", here]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    assert "does not hold" not in done.stderr
    assert "Traceback" not in done.stderr
    if target := re.search(r"--out (\S+)", here):
        made = tmp_path / target[1]
        assert made.stat().st_size if made.is_file() else any(made.iterdir())
    else:
        assert done.stdout


def test_there_is_a_line_for_every_command():
    assert len(LINES) >= 8
    table = set(re.findall(r"^\| `attnscope (\w+)", README, re.MULTILINE))
    assert table == set(COMMANDS)


def test_the_page_answers_in_the_order_of_a_newcomers_questions():
    """A picture, two commands, ten words, the gallery, and then tables."""
    places = [README.index(mark) for mark in ("<img ", "## Two commands", "## Ten words", "## Gallery", "\n| ")]
    assert places == sorted(places)
    words = README.partition("## Ten words")[2].partition("\n## ")[0]
    expected = ["query", "key", "weight", "head", "kv head", "mass", "uniform", "sink", "focus", "role"]
    assert re.findall(r"\*\*([\w ]+)\*\*", words) == expected


def test_torch_for_the_cpu_is_a_line_on_both_pages():
    line = "pip install -c constraints.txt torch --index-url https://download.pytorch.org/whl/cpu"
    assert all(line in page.splitlines() or f"    {line}" in page.splitlines() for page in (README, INSTALL))


def test_links_lead_somewhere():
    for page, folder in ((README, ROOT), (INSTALL, ROOT / "docs")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page):
            assert (folder / target).exists(), target


def test_the_examples_are_what_their_page_says(demo):
    texts = {name: (ROOT / "examples" / name).read_text() for name in ("story.txt", "long.txt")}
    tokens = {name: len(demo.tokenizer(text).input_ids) for name, text in texts.items()}
    assert tokens["story.txt"] <= 512 < tokens["long.txt"]
    lines = (ROOT / "examples" / "corpus.jsonl").read_text().splitlines()
    assert len(lines) == 8
    assert all(json.loads(line).keys() == {"id", "text"} for line in lines)
    listed = re.findall(r"^\| `([\w.]+)`", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "examples").iterdir() if path.name != "README.md")


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == attnscope.__version__
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["license"] == "Apache-2.0"

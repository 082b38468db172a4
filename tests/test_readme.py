"""README: its sample is what comes out, and every command in it runs in a clone."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

import attnscope
from attnscope.cli.app import COMMANDS, command_named
from helpers.command_line import call
from helpers.documented import in_a_shell, quick, runs, runs_here
from helpers.readme import COLUMNS, SAMPLE, document
from helpers.rows import csv_rows

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
LINES = [  # Hub models need a network: those lines run with the embedded model in the Hub model's place
    re.sub(r"--model \S+/\S+", "--model demo", line.removeprefix("pip install -c constraints.txt -e . && "))
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


def test_what_is_said_of_the_first_picture_holds():
    said = re.search(r"followed the first one\? (L\dH\d), with nearly all of its attention, and (L\dH\d)\.", README)
    story = ("heads", "--file", str(ROOT / "examples" / "story.txt"), "--format", "csv")
    result = call(*story, "--query", "80", "--key", "20").ok()
    assert "query 80: se(80)" in result.err
    assert "key 20: es(20)" in result.err
    mass = {f"L{row['layer']}H{row['head']}": float(row["mass"]) for row in result.rows}
    assert mass[said[1]] > 0.99
    assert {name for name, value in mass.items() if value > 0.1} == set(said.groups())


def test_what_the_demo_configuration_says_of_itself_holds(tmp_path):
    text, file = (ROOT / "configs" / "demo.yaml").read_text(), tmp_path / "demo.yaml"
    file.write_text(text.replace("out: runs/demo\n", ""))  # pictures, which say no more
    assert "induction and previous-token heads show" in text
    found = call("heads", "--config", str(file), "--top", "all", "-q", "--format", "csv").rows
    assert {"induction", "previous-token"} <= set(roles(found).values())


def roles(rows):
    """The role of each head of heads.csv."""
    return {f"L{row['layer']}H{row['head']}": row["role"] for row in rows}


def made_before(line):
    """The line whose folder this one reads."""
    found = re.match(r"attnscope \w+ (runs/\S+)", line)
    return [one for one in LINES if found and f"--out {found[1]}" in one]


@pytest.mark.parametrize("line", [line for line in quick(LINES) if set(made_before(line)) <= set(quick(LINES))])
def test_a_quick_command_runs_in_this_process(line, readers_folder):
    for one in (*made_before(line), line):
        runs_here(one, readers_folder)


@pytest.mark.parametrize("line", in_a_shell(LINES))
def test_a_command_runs_in_the_clone(line, readers_folder):
    if "jq" in line and not shutil.which("jq"):
        pytest.skip("jq is not installed")
    runs(" && ".join([*made_before(line), line]), readers_folder)


def test_there_is_a_line_for_every_command():
    assert len(LINES) >= 8
    table = set(re.findall(r"^\| `attnscope (\w+)", README, re.MULTILINE))
    assert {command_named(name) for name in table} == set(COMMANDS)


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

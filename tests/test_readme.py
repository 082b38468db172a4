"""README: short, without a placeholder, true of its picture and table, and every command in it runs."""

import json
import re
from pathlib import Path

import pytest
import yaml

import attnscope
from attnscope.cli.app import COMMANDS
from helpers.command_line import call
from helpers.documented import in_a_shell, makers, quick, runs, runs_here
from helpers.gallery import FILES, STORY
from helpers.samples import COLUMNS, samples

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^ {4}(\S.*)$", README.split("```python")[0], re.MULTILINE)
INSTALLED = "pip install -c constraints.txt . && "
LINES = [line.removeprefix(INSTALLED) for line in BLOCKS if re.match(rf"({re.escape(INSTALLED)})?attnscope ", line)]
LONGEST = 110


def test_it_is_short():
    assert README.count("\n") <= LONGEST


def test_every_line_of_a_block_can_be_pasted():
    """A word in capitals, an ellipsis or angle brackets would be for the reader to fill in."""
    assert len(LINES) >= 4
    assert BLOCKS[0].startswith(INSTALLED)
    gaps = re.compile(r"\b[A-Z]{2,}(?![.\w])|\.\.\.|…|[<>]")
    assert [line for line in BLOCKS if gaps.search(line)] == []
    assert gaps.search("git clone URL-OF-THIS-REPOSITORY")
    assert gaps.search('attnscope heads "..."')


def test_the_table_shows_roles_and_the_words_below_it_are_true_of_it():
    [(_, sample)] = samples(README)
    assert max(map(len, sample.splitlines())) <= COLUMNS
    rows = [line.split() for line in sample.splitlines() if re.match(r" *L\d+H\d+ ", line)]
    assert {row[2] for row in rows} == {"induction"}
    induct, even = re.search(r"`induct` is (\S+), where attention spread evenly has (\S+):", README).groups()
    assert rows[0][5] == induct
    assert re.search(r"^ uniform +\S+ +\S+ +(\S+)", sample, re.MULTILINE)[1] == even


def test_the_picture_is_the_overview_and_its_dark_blue_frames_are_the_heads_that_are_named():
    [shown] = re.findall(r'<img src="docs/([^"]+)"', README)
    assert [entry.command for entry in FILES if entry.image == shown] == [f"attnscope draw {STORY} --out runs/overview"]
    names = re.search(r"dark blue frames are induction heads, (L\dH\d) and (L\dH\d):", README).groups()
    rows = call("heads", "--file", str(ROOT / "examples" / "story.txt"), "--top", "all", "-q", "--format", "csv").rows
    first = {f"L{row['layer']}H{row['head']}": [*row["atlas_roles"].split(), "-"][0] for row in rows}
    assert {name for name, role in first.items() if role == "induction"} == set(names)


def test_the_look_in_the_first_row_is_there():
    name = re.search(r"From the second `se` (L\dH\d) looks at the `es` after the first one", README)[1]
    story = ("heads", "--file", str(ROOT / "examples" / "story.txt"), "--format", "csv", "--top", "all")
    result = call(*story, "--query", "80", "--key", "20").ok()
    assert "query 80: se(80)" in result.err
    assert "key 20: es(20)" in result.err
    mass = {f"L{row['layer']}H{row['head']}": float(row["mass"]) for row in result.rows}
    assert mass[name] > 0.99


def test_what_the_demo_configuration_says_of_itself_holds(tmp_path):
    text, file = (ROOT / "configs" / "demo.yaml").read_text(), tmp_path / "demo.yaml"
    file.write_text(text.replace("out: runs/demo\n", ""))  # pictures, which say no more
    assert "induction and previous-token heads show" in text
    rows = call("heads", "--config", str(file), "--top", "all", "-q", "--format", "csv").rows
    assert {"induction", "previous-token"} <= {row["role"] for row in rows}


def test_what_is_claimed_of_speed_was_measured_by_the_last_run_of_all_claims():
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    table = page.partition("\n## What README and docs/engines.md claim\n")[2].partition("\n## ")[0]
    measured = dict(re.findall(r"^\| (.*?) \| (\d.*?) \|", table, re.MULTILINE))
    kernel, tiles, eager, batch = (
        measured[claim]
        for claim in (
            "all statistics by the compiled kernel, of a plain forward",
            "the same by PyTorch's tiles",
            "the same after `output_attentions=True`",
            "`batch`, of a loop of padded batches",
        )
    )
    figures = re.search(
        r"all statistics\s+take (\S+) times a plain\s+forward pass, with the\s+compiled\s+kernel (\S+), by "
        r"`output_attentions=True` (\S+)\. `batch` is (\S+) times",
        README,
    ).groups()
    assert figures == tuple(f"{float(cell.split()[0]):.1f}" for cell in (tiles, kernel, eager, batch))
    engines = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*? \| (\d\S* \(.*?\)) \| ([\d.]+) \|$", engines, re.MULTILINE)
    memory = [
        measured[f"memory of {way}"]
        for way in ("the compiled kernel, of a plain forward", "PyTorch's tiles", "`output_attentions=True`")
    ]
    assert rows == list(zip((kernel, tiles, eager), memory, strict=True))
    assert f"2,000 texts {batch} times as fast" in engines


@pytest.mark.parametrize("line", quick(LINES))
def test_a_quick_command_runs_in_this_process(line, readers_folder):
    for one in (*makers(line, LINES), line):
        runs_here(one, readers_folder)


@pytest.mark.parametrize("line", in_a_shell(LINES))
def test_a_command_runs_in_the_clone(line, readers_folder):
    runs(" && ".join([*makers(line, LINES), line]), readers_folder)


def test_every_command_is_named_in_its_group():
    commands = README.partition("\n## Commands\n")[2].partition("\n## ")[0]
    assert set(COMMANDS) <= set(re.findall(r"`(?:attnscope )?(\w+)[ `]", commands))


def test_torch_for_the_cpu_is_a_line_on_both_pages():
    line = "pip install -c constraints.txt torch --index-url https://download.pytorch.org/whl/cpu"
    assert all(line in page.splitlines() or f"    {line}" in page.splitlines() for page in (README, INSTALL))


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

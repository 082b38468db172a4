"""Pages of docs/: made as they say, their commands run, their pictures and the pages that they name are there."""

import codeop
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnscope.cli.app import COMMANDS, command_named
from helpers import gallery, samples
from helpers.documented import DEAR, first_of_each, in_a_shell, makers, quick, runs, runs_here
from helpers.gallery import IMAGES, PARTS, RECORD, document, page_hash
from helpers.reference_pages import command_section, metrics_page

DOCS = Path(__file__).parents[1] / "docs"
ROOT = DOCS.parent
PAGES = [
    "tutorial",
    "gallery",
    "paper-figure",
    "cookbook",
    "engines",
    "trust",
    "knockout",
    "patching",
    "budgets",
    "why",
    "depth",
]
FILES = (
    "facts.jsonl",
    "pairs.jsonl",
    "subjects.jsonl",
    "rag.jsonl",
    "sentences.txt",
    "attention.npz",
    "README.md",
)  # a reader's own
LINES = [  # of each page in its order
    *dict.fromkeys(
        line
        for page in PAGES
        for line in samples.commands((DOCS / f"{page}.md").read_text("utf-8"))
        if not any(name in line for name in FILES)
    )
]


def test_the_gallery_is_what_its_script_writes():
    assert (DOCS / "gallery.md").read_text("utf-8") == document(), "run scripts/gallery.py"


BLOCKS = [
    pytest.param(block, id=f"{path.stem}: {block.splitlines()[0][:40]}")
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
    for block in re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL)
]


def refused_line(block: str) -> str | None:
    """The line of a block that Python's prompt refuses as it is pasted; there an empty line ends what is indented."""
    pasted: list[str] = []
    for line in [*block.splitlines(), ""]:
        pasted.append(line)
        try:
            if codeop.compile_command("\n".join(pasted), symbol="single") is not None:
                pasted = []
        except SyntaxError:
            return line
    return pasted[0] if any(pasted) else None


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_python_can_be_pasted_at_the_prompt(block):
    assert refused_line(block) is None


@pytest.mark.parametrize(
    ("block", "line"),
    [
        ("for word in 'ab':\n    print(word)\nprint('end')\n", "print('end')"),
        ("class Own:\n    a = 1\n\n    b = 2\n", "    b = 2"),
        ("print(\n", "print("),
        ("for word in 'ab':\n    print(word)\n\nprint('end')\n", None),
    ],
)
def test_what_the_prompt_refuses(block, line):
    assert refused_line(block) == line


@pytest.mark.parametrize("name", COMMANDS)
def test_the_reference_has_the_help_of_a_command(name):
    assert command_section(name) in (DOCS / "commands.md").read_text("utf-8"), "run scripts/reference_doc.py"


def test_the_reference_has_no_other_command():
    assert re.findall(r"^### (\S+)$", (DOCS / "commands.md").read_text("utf-8"), re.MULTILINE) == [*COMMANDS]


def test_the_reference_has_every_metric_and_role():
    assert (DOCS / "metrics.md").read_text("utf-8") == metrics_page(), "run scripts/reference_doc.py"


def test_every_picture_of_the_gallery_is_there_and_none_else():
    named = {Path(one.image).name for part in PARTS.values() for one in part}
    there = {path.name: path.read_bytes() for path in (DOCS / IMAGES).iterdir() if path.name != RECORD}
    assert there.keys() == named
    assert all(data.startswith(b"\x89PNG") and len(data) < 1_000_000 for data in there.values())


def test_pictures_of_the_page_are_of_the_page_as_it_is():
    assert (DOCS / IMAGES / RECORD).read_text("utf-8") == page_hash() + "\n", "run scripts/gallery.py page"


@pytest.mark.parametrize("name", ["bundle.js", "bundle.css"])
def test_another_script_or_style_of_the_page_has_another_hash(name, tmp_path):
    for file in (gallery.VIEWER / "bundle.js", gallery.VIEWER / "bundle.css"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert page_hash(tmp_path) == page_hash()
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b" ")
    assert page_hash(tmp_path) != page_hash()


@pytest.mark.parametrize(
    "page", sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *DOCS.glob("*.md")))
)
def test_what_a_page_links_to_is_there(page):
    """The site's strict build says so too, slowly."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    named = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)|src=\"([^\"]+)\"", text)
    named = [link or picture for link, picture in named]
    local = [name for name in named if not re.match(r"[a-z]+:", name)]
    assert [name for name in local if not ((ROOT / page).parent / name).exists()] == []


SAMPLES = [
    pytest.param(page, command, shown, marks=[pytest.mark.e2e] if DEAR.search(command) else [], id=f"{page} {command}")
    for page in samples.PAGES
    for command, shown in samples.samples((ROOT / page).read_text("utf-8"))
]


@pytest.mark.parametrize(("page", "command", "shown"), SAMPLES)
def test_a_sample_is_what_its_command_shows(page, command, shown, tmp_path):
    for line in makers(command, samples.commands((ROOT / page).read_text("utf-8"))):
        samples.shown(line, tmp_path)
    assert samples.shown(command, tmp_path) == shown, "run scripts/readme_doc.py"


@pytest.mark.parametrize("line", first_of_each(quick(LINES)))
def test_a_quick_command_runs_in_this_process(line, readers_folder):
    for one in (*makers(line, LINES), line):
        runs_here(one, readers_folder)


@pytest.mark.parametrize("line", in_a_shell(LINES))
def test_a_command_runs(line, readers_folder):
    runs(" && ".join([*makers(line, LINES), line]), readers_folder)


def test_the_commands_for_other_tools_calls_are_typed_in_full_elsewhere():
    """Each command of the tables, whose TEXT is left open, is on another page in full."""
    page = (DOCS / "coming-from.md").read_text("utf-8")
    named = set(re.findall(r"\| `attnscope (\w+)", page))
    assert {command_named(name) for name in named} <= {line.split()[1] for line in LINES}
    assert len(LINES) > 20


def folders_of(page: Path) -> Iterator[tuple[str, str]]:
    """The folders that the commands of a page's blocks write into, and the command of each, its words in order.

    What is drawn again adds files, as texts are added to a scan; and a file is replaced.
    """
    for line in page.read_text("utf-8").splitlines():
        for command in re.split(r" (?:&&|\|\|?|;) ", line) if re.match(r"    \S|attnscope ", line) else ():
            out = re.search(r"attnscope .* (?:--out|-o) (\S+?)(?: |$)", command)
            if out and not Path(out[1]).suffix and not re.match(r"attnscope (draw|heatmap) \S+/", command.strip()):
                plain = re.sub(r"(attnscope scan .*) --texts \S+", r"\1", command)
                yield out[1], " ".join(sorted(plain[plain.index("attnscope") :].split()))


def test_no_two_commands_write_into_one_folder():
    """README, the gallery and the docs run in one folder, in any order; examples of help texts have tests elsewhere."""
    first: dict[str, str] = {}
    for page in (ROOT / "README.md", *sorted({*DOCS.glob("*.md")} - {DOCS / "commands.md"})):
        for folder, command in folders_of(page):
            assert first.setdefault(folder, command) == command, f"{page.name}: {folder}"
    assert len(first) > 20

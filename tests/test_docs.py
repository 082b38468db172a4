"""Pages of docs/: made as they say, their commands run, their pictures and the pages that they name are there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.documented import first_of_each, in_a_shell, quick, runs, runs_here
from helpers.gallery import IMAGES, PARTS, document

DOCS = Path(__file__).parents[1] / "docs"
ROOT = DOCS.parent
PAGES = ("gallery", "coming-from", "knockout", "patching", "budgets", "why")
FILES = ("facts.jsonl", "pairs.jsonl", "README.md")  # that a reader has, or that stand elsewhere
LINES = sorted(
    {
        line
        for page in PAGES
        for line in re.findall(r"^    (attnscope .*)$", (DOCS / f"{page}.md").read_text("utf-8"), re.MULTILINE)
        if not any(name in line for name in FILES)
    }
)


def test_the_gallery_is_what_its_script_writes():
    assert (DOCS / "gallery.md").read_text("utf-8") == document(), "run scripts/gallery.py"


def test_every_picture_of_the_gallery_is_there_and_none_else():
    named = {Path(one.image).name for part in PARTS.values() for one in part}
    there = {path.name: path.read_bytes() for path in (DOCS / IMAGES).iterdir()}
    assert there.keys() == named
    assert all(data.startswith(b"\x89PNG") and len(data) < 1_000_000 for data in there.values())


@pytest.mark.parametrize(
    "page", sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *DOCS.glob("*.md")))
)
def test_what_a_page_links_to_is_there(page):
    """The site's strict build says so too, slowly."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    named = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [name for name in named if not re.match(r"[a-z]+:", name)]
    assert [name for name in local if not ((ROOT / page).parent / name).exists()] == []


@pytest.mark.parametrize("line", first_of_each(quick(LINES)))
def test_a_quick_command_runs_in_this_process(line, readers_folder):
    runs_here(line, readers_folder)


@pytest.mark.parametrize("line", in_a_shell(LINES))
def test_a_command_runs(line, readers_folder):
    runs(line, readers_folder)


def test_the_commands_that_are_said_to_run_do():
    """Each command of a page's tables whose TEXT is left open stands below it in full."""
    page = (DOCS / "coming-from.md").read_text("utf-8")
    named = set(re.findall(r"\| `attnscope (\w+)", page))
    assert named <= {line.split()[1] for line in LINES} | {"batch", "capture"}
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
    """README, the gallery and the docs run in one folder, in any order."""
    first: dict[str, str] = {}
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        for folder, command in folders_of(page):
            assert first.setdefault(folder, command) == command, f"{page.name}: {folder}"
    assert len(first) > 20

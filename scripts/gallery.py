"""Draw docs/images/gallery and write docs/gallery.md: `python scripts/gallery.py`. Chromium takes the screenshots.

`python scripts/gallery.py page head` draws only pictures whose names begin so: those of the page, and head, heads.
"""

import contextlib
import io
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"HF_HUB_OFFLINE": "1", "ATTNSCOPE_STAGES": "none"}
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from PIL import Image  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.terminal_theme import MONOKAI  # noqa: E402
from rich.text import Text  # noqa: E402

from attnscope.cli import run  # noqa: E402
from helpers.command_line import Screen  # noqa: E402
from helpers.gallery import IMAGES, PARTS, RECORD, Entry, document, page_hash  # noqa: E402

WIDEST = 1400  # pixels of a figure on the page
SETTLED = 2500  # ms until a view has drawn what it unpacks
PAGE = {"width": 1280, "height": 800}
SHEET = """<body style="margin:0;background:{background}"><pre id="shot" style="display:inline-block;margin:0;
padding:12px 16px;line-height:1.25;font:14px 'DejaVu Sans Mono',monospace;color:{foreground}">{code}</pre></body>"""


def typed(entry: Entry) -> str:
    """Run the command as in a terminal; what it printed, colours and all."""
    screen = io.BytesIO()
    out, err = (Screen(screen, encoding="utf-8", write_through=True) for _ in range(2))
    settings = {"COLUMNS": str(entry.columns), "TERM": "xterm-256color", "COLORTERM": "truecolor", "FORCE_COLOR": "1"}
    with patch.dict(os.environ, settings), patch.multiple(sys, stdout=out, stderr=err):
        code = run([*shlex.split(entry.command)[1:], "--device", "cpu", "-q"])
    assert code == 0, screen.getvalue().decode()
    return screen.getvalue().decode()


def terminal(printed: str, columns: int, page: Any, image: Path) -> None:
    """A picture of what was printed."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(printed.rstrip()))
    page.set_content(console.export_html(theme=MONOKAI, code_format=SHEET, inline_styles=True))
    page.locator("#shot").screenshot(path=image)


def figure(path: Path, image: Path) -> None:
    """The figure, no wider than a page needs."""
    with Image.open(path) as found:
        found.thumbnail((WIDEST, 10 * WIDEST))
        found.convert("RGB").quantize(256).save(image, optimize=True)


def shown(address: str, page: Any, image: Path) -> None:
    """A view of the page that `attnscope view` wrote."""
    name, _, state = address.partition("#")
    page.goto(f"{Path(name).absolute().as_uri()}#{state}")
    page.reload()  # an address that differs after the # alone loads nothing anew
    page.wait_for_selector("[data-view]")
    page.wait_for_timeout(SETTLED)
    page.screenshot(path=image)
    figure(image, image)


def draw(entry: Entry, page: Any, image: Path) -> None:
    """Run an entry's command, and keep what it shows."""
    printed = typed(entry)
    if entry.shows == "terminal":
        terminal(printed, entry.columns, page, image)
        figure(image, image)
    elif "#" in entry.shows:
        shown(entry.shows, page, image)
    else:
        figure(Path(entry.shows), image)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A page of Chromium."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=found, args=flags)
        yield chromium.new_page(viewport=PAGE, color_scheme="light")
        chromium.close()


if __name__ == "__main__":
    docs = ROOT / "docs"
    (docs / IMAGES).mkdir(parents=True, exist_ok=True)
    entries = [entry for part in PARTS.values() for entry in part if entry.name.startswith(tuple(sys.argv[1:] or [""]))]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), browser() as page:
        (Path(folder) / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
        for entry in entries:
            draw(entry, page, docs / entry.image)
    if set(PARTS["The page"]) <= set(entries):
        (docs / IMAGES / RECORD).write_text(page_hash() + "\n", encoding="utf-8")
    (docs / "gallery.md").write_text(document(), encoding="utf-8")
    print(f"wrote {docs / 'gallery.md'}")

"""Files that a host, a tool or a reporter reads: they parse, and name what exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from attnscope.cli.app import COMMANDS, command_named
from attnscope.cli.option_groups import parameters
from helpers import commands

ROOT = Path(__file__).parents[1]
SCRIPTS = [".ci/run", "scripts/release.sh", "scripts/versions.sh"]
PAGE = "docs/gallery.html"


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_parses_and_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    done = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_workflow_runs_what_exists_on_three_systems() -> None:
    workflow = yaml.safe_load(read(".github/workflows/ci.yml"))
    [job] = workflow["jobs"].values()
    systems = {name.partition("-")[0] for name in job["strategy"]["matrix"]["os"]}
    assert systems == {"ubuntu", "macos", "windows"}
    assert workflow["permissions"] == {"contents": "read"}
    [command] = [step["run"] for step in job["steps"] if "run" in step]
    assert os.access(ROOT / command.split()[0], os.X_OK)
    option = re.findall(r"'(--\w+)'", command)
    assert option == ["--slow"]
    assert f'"{option[0]}"' in read(".ci/run")


def test_the_hooks_call_what_is_installed() -> None:
    [local] = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    pins = {line.partition("==")[0] for line in read("constraints.txt").splitlines()}
    for hook in local["hooks"]:
        program, *arguments = shlex.split(hook["entry"])
        assert program in pins
        assert all((ROOT / one).is_file() for one in arguments if "/" in one)
    assert [hook["id"] for hook in local["hooks"]] == ["ruff-check", "ruff-format", "mypy", "words"]


def test_every_tool_of_the_release_is_pinned_and_nothing_is_uploaded() -> None:
    script = read("scripts/release.sh")
    [tools] = re.findall(r"constraints\.txt\" (build .*)", script)
    pins = {line.partition("==")[0] for line in read("constraints.txt").splitlines()}
    assert set(tools.split()) == {"build", "check-wheel-contents", "twine"} <= pins
    assert set(re.findall(r"twine\" (\w+)", script)) == {"check"}
    assert set(re.findall(r"attnscope\" (\w+)", script)) <= set(COMMANDS)


def test_what_security_and_the_template_name_exists() -> None:
    page = read("SECURITY.md")
    options = {
        one.spelled: one for groups, _ in commands.COMMANDS.values() for one in parameters(*groups.groups).values()
    }
    named = re.findall(r"`(--set )?(--[\w-]+|\w+=true)`", page)
    assert named
    for setting, name in named:
        assert options[name.removeprefix("--").removesuffix("=true").replace("_", "-")].is_setting is bool(setting)
    for command in re.findall(r"attnscope (\w+)`", page + read(".github/ISSUE_TEMPLATE/bug.md")):
        assert command_named(command)
    assert "`attnscope doctor`" in read(".github/ISSUE_TEMPLATE/bug.md")
    for target, _, anchor in re.findall(r"\]\(([^)#]+)(#([\w-]+))?\)", page):
        titles = re.findall(r"^#+ (.*)$", read(target), re.MULTILINE)
        assert not anchor or anchor in [title.lower().replace(" ", "-") for title in titles]


class Addresses(HTMLParser):
    """What a page refers to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("src", "href") and value]


@pytest.mark.slow
def test_the_site_builds_strictly_and_every_address_leads_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason='pip install -c constraints.txt -e ".[docs]"')
    site = tmp_path / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = sorted(site.rglob("*.html"))
    assert {"index.html", PAGE, "docs/glossary.html", "SECURITY.html"} <= {
        page.relative_to(site).as_posix() for page in pages
    }
    lost = [f"{page.relative_to(site)}: {one}" for page in pages for one in lost_of(page, site)]
    assert not lost
    assert all(f'id="attnscope.{name}"' in (site / "docs/api.html").read_text("utf-8") for name in ("load", "capture"))


def lost_of(page: Path, site: Path) -> list[str]:
    """The addresses of a page that lead to no file of the site."""
    lost = []
    for address in Addresses(page.read_text("utf-8")).found:
        parts = urlsplit(address)
        start = site if parts.path.startswith("/") else page.parent
        path = start / unquote(parts.path).lstrip("/") if parts.path else page
        if not parts.scheme and not parts.netloc and not path.exists():
            lost.append(address)
    return lost


def test_a_lost_address_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text('<a href="b.html">b</a><img src="c.png"><a href="https://example.org/d">d</a><a href="#e">e</a>')
    (tmp_path / "c.png").touch()
    assert lost_of(page, tmp_path) == ["b.html"]

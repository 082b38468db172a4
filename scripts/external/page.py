"""The HTML page, as validators and axe-core see it, in Chromium and Firefox. `page.mjs` drives the browsers."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from external.common import Check, Report, arguments

PACKAGES = {"axe-core": "4.14.1", "html-validate": "10.9.0", "puppeteer-core": "24.43.1", "vnu-jar": "26.9.27"}
BROWSERS = {
    "Chromium": ("chrome", ("chromium", "chromium-browser", "google-chrome")),
    "Firefox": ("firefox", ("firefox-esr", "firefox")),
}
TEXT = "the financial bank is located on river bank"
VIEWS = ("model", "metrics", "head", "matrix", "text", "token", "steps")
WITH_PICTURE = "a text with a picture"
LONG = tuple(view for view in VIEWS if view != "steps")
PATCHES = {"the decoder": "&at=1&head=2&query=6", "the tower": "&at=3&head=1&query=35"}  # of the page with a picture
CHOSEN = "&at=1&head=4&query=5&key=3&pin=1&heads=2.0,0.1"
DIALOGS = {"help": "?", "search": "/"}
PRESSED = "document.dispatchEvent(new KeyboardEvent('keydown', {{ key: '{key}', bubbles: true }}))"
THEMES, WIDTHS = ("light", "dark"), (1280, 390)
HEIGHT = 860
PLANTED = {  # of an opened page: what is damaged, and how
    "a control without its label": "const s = document.querySelector('select'); s.closest('label').replaceWith(s)",
    "grey text on white": "document.documentElement.style.setProperty('--muted', '#c9c9c9')",
    "a button without a name": "document.querySelector('.tools button').removeAttribute('aria-label'), "
    "document.querySelector('.tools button').removeAttribute('title'), "
    "document.querySelector('.tools button').replaceChildren()",
}
KNOWN = {  # what a validator says of a page, and why it may
    "Inline script violates Content Security Policy": "The Nu Html Checker does not compute hashes: the policy names "
    "the hash of the page's script, which both browsers run under it.",
    "Inline style violates Content Security Policy": "The same of the hash of its style.",
    "Prefer to use the native <select> element": "The list of places found is filtered by what is typed, which a "
    "`select` cannot be.",
    "“aria-activedescendant” value should either refer to a descendant": "The search box is a combobox: by ARIA 1.2 it "
    "may refer to an element of the list that its `aria-controls` names.",
}
POLICY = re.compile("<meta http-equiv=.Content-Security-Policy.[^>]*>")
DAMAGED = {  # of a file: what is taken out, and what stands there instead
    "an element that is not closed": (b'<div id="app">', b'<div id="app"><section><b>'),
    "an id that occurs twice": (b'<div id="app">', b'<div id="page"></div><div id="app">'),
    "a page without a title": (re.compile(rb"<title>.*?</title>", re.DOTALL), b""),
}


@dataclass(frozen=True)
class Subject:
    """A page that was written, and the views it has."""

    name: str
    path: Path
    views: Sequence[str] = VIEWS


class Case(NamedTuple):
    """A page at a state, as page.mjs opens it; before: JavaScript that is run first."""

    name: str
    file: str
    state: str
    width: int = WIDTHS[0]
    height: int = HEIGHT
    before: str = ""


def written(folder: Path) -> list[Subject]:
    """The pages, as the command writes them."""
    examples = Path(__file__).parents[2] / "examples"
    asked = {
        "one text": ([TEXT], VIEWS),
        "a question": ([TEXT, "--query", "last", "--key", "bank", "--answer", " and a lake"], VIEWS),
        "signs without a shape": (['=a,b "c" \u202egnp.exe\u200b <b>&amp; \u05e9\u05dc\u05d5\u05dd'], VIEWS),
        "two texts": ([TEXT, "--compare-text", "the river bank is located on financial bank"], (*VIEWS, "compare")),
        "a text that does not fit": (["--file", str(examples / "story.txt"), "--max-mb", "0.3"], LONG),
        "an encoder-decoder": (
            ["--model", encoder_decoder(folder / "t5"), "--text", TEXT, "--target", "a bank"],
            VIEWS,
        ),
        WITH_PICTURE: (with_picture(folder), (*LONG, "picture")),
    }
    found = []
    for place, (name, (given, views)) in enumerate(asked.items()):
        path = folder / f"{place}.html"
        command = [sys.executable, "-m", "attnscope", "view", *given, "--out", str(path), "--quiet"]
        subprocess.run(command, check=True)
        found.append(Subject(name, path, views))
    return found


def encoder_decoder(folder: Path) -> str:
    """A T5 of random weights with the tokenizer of the embedded model."""
    from transformers import T5Config, T5ForConditionalGeneration, set_seed

    from attnscope.model.loading import DEMO_FOLDER

    set_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=2000, decoder_start_token_id=0, **sizes))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder)
    return str(folder)


def with_picture(folder: Path) -> list[str]:
    """What `view` is given for a Llava of random weights and a picture, both as the repository's tests make them."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from helpers.picture_models import picture, saved

    return ["--model", saved("llava", folder), "--text", TEXT, "--picture", picture(folder / "field.png")]


def cases(subjects: Sequence[Subject]) -> Iterator[Case]:
    """Every view of every page, light and dark, wide and narrow; tokens and further heads chosen; the dialogs."""
    for subject, theme, width in itertools.product(subjects, THEMES, WIDTHS):
        if subject is not subjects[0] and (theme, width) not in zip(THEMES, WIDTHS, strict=True):
            continue  # of the first page all four, of the others light and wide, dark and narrow
        name, file = f"{subject.name}, {theme}, {width} wide", str(subject.path)
        for view in subject.views:
            yield Case(f"{name}: {view}", file, f"view={view}&theme={theme}", width)
        for part, patch in PATCHES.items() if subject.name == WITH_PICTURE else ():
            yield Case(f"{name}, a patch of {part}: picture", file, f"view=picture&theme={theme}{patch}", width)
    for theme, width in itertools.product(THEMES, WIDTHS):
        name, file = f"{subjects[0].name}, {theme}, {width} wide", str(subjects[0].path)
        for view in subjects[0].views:
            yield Case(f"{name}, tokens chosen: {view}", file, f"view={view}&theme={theme}{CHOSEN}", width)
        for dialog, key in DIALOGS.items():
            yield Case(f"{name}: {dialog}", file, f"view=head&theme={theme}", width, before=PRESSED.format(key=key))


class Node:
    """The packages of the registry, at pinned versions, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.modules = folder / "node_modules"
        folder.mkdir(exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        wanted = [f"{name}@{version}" for name, version in PACKAGES.items()]
        asked = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", *wanted]
        subprocess.run(asked, cwd=folder, check=True, stdout=sys.stderr)

    def opened(self, browser: str, executable: str, asked: Sequence[Case]) -> dict[str, Any]:
        """What axe-core says of each case, and the document as it stood."""
        request, answers = self.modules.parent / "request.json", self.modules.parent / "answers.json"
        cases = [one._asdict() for one in asked]
        visit = {"modules": str(self.modules), "browser": browser, "executable": executable, "cases": cases}
        request.write_text(json.dumps(visit))
        script = Path(__file__).with_suffix(".mjs")
        subprocess.run(["node", str(script), str(request), str(answers)], check=True, stdout=sys.stderr)
        return json.loads(answers.read_text())

    def nu(self, files: Sequence[Path]) -> dict[str, list[str]]:
        """The Nu Html Checker's errors and warnings, of each file that has any."""
        jar = self.modules / "vnu-jar" / "build" / "dist" / "vnu.jar"
        asked = ["java", "-jar", str(jar), "--format", "json", *map(str, files)]
        said = subprocess.run(asked, capture_output=True, text=True).stderr
        found: dict[str, list[str]] = {}
        for one in json.loads(said)["messages"]:
            found.setdefault(Path(one["url"]).name, []).append(f"{one['type']}: {one['message']}")
        return found

    def html_validate(self, files: Sequence[Path]) -> dict[str, list[str]]:
        """html-validate's errors by its rules of the standard and of accessibility, of each file that has any."""
        rules = self.modules.parent / "rules.json"
        rules.write_text('{"root": true, "extends": ["html-validate:standard", "html-validate:a11y"]}')
        program = self.modules / ".bin" / "html-validate"
        out = self.modules.parent / "validated.json"  # to its standard output it writes less than it has to say
        asked = [str(program), "--formatter", f"json={out}", "--config", str(rules), *map(str, files)]
        subprocess.run(asked, stdout=subprocess.DEVNULL)
        said = json.loads(out.read_text())
        return {
            Path(one["filePath"]).name: [f"{two['ruleId']}: {two['message']}" for two in one["messages"]]
            for one in said
            if one["messages"]
        }


def browsers(report: Report, node: Node, subjects: Sequence[Subject]) -> Mapping[str, str]:
    """axe-core in each browser that is there; the documents as Chromium drew them, by case."""
    drawn: dict[str, str] = {}
    for name, (kind, programs) in BROWSERS.items():
        executable = next(filter(None, map(shutil.which, programs)), None)
        if executable is None:
            report.not_had.append(f"{name}: not installed")
            continue
        asked = list(cases(subjects))
        with report.check(f"axe-core finds nothing in {name}") as check:
            found = node.opened(kind, executable, asked)
            report.version[name] = found["version"].partition("/")[2]
            for one, answer in zip(asked, found["cases"], strict=True):
                check.hold(answer["rules"] > 0 and not answer["violations"], f"{one.name}: {said(answer)}")
        if not drawn:
            drawn = {one.name: answer["html"] for one, answer in zip(asked, found["cases"], strict=True)}
        for fault, planted in PLANTED.items():
            with report.control(f"axe-core in {name}: {fault}") as check:
                one = Case(fault, str(subjects[0].path), "view=metrics&theme=light", before=planted)
                [answer] = node.opened(kind, executable, [one])["cases"]
                check.hold(not answer["violations"])
    return drawn


def said(answer: Mapping[str, Any]) -> str:
    """What axe-core found, and where first."""
    return "; ".join(f"{one['id']} at {' '.join(one['nodes'][0].split())}" for one in answer["violations"])


def validators(report: Report, node: Node, subjects: Sequence[Subject], drawn: Mapping[str, str], folder: Path) -> None:
    """Both validators on the files, on what the browser made of them, and on damaged files."""
    files = [one.path for one in subjects]
    made = [folder / f"drawn-{place}.html" for place in range(len(drawn))]
    for path, html in zip(made, drawn.values(), strict=True):
        # Without the policy: styles that the script sets are attributes in this copy, which it forbids in a file.
        path.write_text(POLICY.sub("", html), encoding="utf-8")
    names = dict(zip([one.name for one in (*files, *made)], [*(one.name for one in subjects), *drawn], strict=True))
    whole = files[0].read_bytes()
    damaged = {}
    for place, (fault, (old, new)) in enumerate(DAMAGED.items()):
        damaged[fault] = folder / f"damaged-{place}.html"
        changed = old.sub(new, whole) if isinstance(old, re.Pattern) else whole.replace(old, new, 1)
        damaged[fault].write_bytes(changed)
    readers = {"html-validate": node.html_validate}
    if shutil.which("java"):
        readers["the Nu Html Checker"] = node.nu
    else:
        report.not_had.append("the Nu Html Checker: there is no java")
    for reader, read in readers.items():
        for what, paths in {"the files": files, "what the views have drawn": made}.items():
            if paths:
                with report.check(f"{reader} finds nothing in {what}") as check:
                    read_all(check, read(paths), paths, names)
        with report.control(f"{reader}: {', '.join(DAMAGED)}") as check:
            found = read(list(damaged.values()))
            for path in damaged.values():
                check.hold(not unknown(found.get(path.name, [])))


def read_all(check: Check, found: Mapping[str, list[str]], paths: Sequence[Path], names: Mapping[str, str]) -> None:
    """A case for each file; what is known is named once, with its reason."""
    for path in paths:
        wrong = unknown(found.get(path.name, []))
        check.hold(not wrong, f"{names[path.name]}: {'; '.join(sorted(set(wrong)))}")
    for message, why in KNOWN.items():
        if any(message in one for path in paths for one in found.get(path.name, [])):
            check.expect(f"“{message}”: {why}", 0)


def unknown(messages: Sequence[str]) -> list[str]:
    """Those that have no known reason."""
    return [one for one in messages if not any(known in one for known in KNOWN)]


def main() -> None:
    asked, folder = arguments(), Path.cwd()
    report = Report(("attnscope",))
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    if missing:
        report.not_had.append(f"{' and '.join(missing)}: nothing was checked")
        return report.write(asked.out)
    node = Node(folder / "node")
    report.version |= PACKAGES
    subjects = written(folder)
    drawn = browsers(report, node, subjects)
    validators(report, node, subjects, drawn, folder)
    return report.write(asked.out)


if __name__ == "__main__":
    main()

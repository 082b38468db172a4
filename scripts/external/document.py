"""docs/external.md with its tables, and a column of docs/coming-from.md, from the results that the judges wrote."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

HEAD = """# Judged by others' tests and programs

Written by `scripts/external.sh` from the results of the last runs. Each judge is a test suite or program that others
wrote, at a pinned version and unmodified, in an environment of its own. A *control* is the same check with a planted
fault: it is right when it fails. A case that differs for a known reason is counted apart from those that pass, and the
judge checks that it is the case that was expected. [judges.csv](external/judges.csv) says what each judge does and on
which machine, [checks.csv](external/checks.csv) has its checks and controls with their seconds.
[notes.csv](external/notes.csv) has what was read, what differs and why, what fell short and what could not be had.
"""
COLUMNS = (
    "| judge | version | passed | differ as expected | fell short | controls that fail | on |\n"
    "|---|---|---|---|---|---|---|"
)

PEERS = """## Peers and model types

Tiny random models of each type, read by others' programs in environments of their own: 19 tokens, float32, on a CPU. A
cell is the largest difference of a weight from what transformers' `eager` attention returns for the same folder and
version: 0 is every bit. Bold numbers are other weights. Why numbers are bold, and how types are refused, is in
[notes.csv](external/notes.csv). A dash is a type that the program's version of transformers does not have. Of an
encoder-decoder the stacks that a program shows are named where it does not show all.
"""
RIGHT = 5e-6  # below which a difference is rounding
CALL = re.compile(r"^\| (?P<wrote>.+?) \| (?P<typed>.+?) \| (?P<apart>[^|]*?) ?\|$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")


def fell_short(found: Mapping[str, Any]) -> list[str]:
    """What is wrong with a result: checks with cases that nothing explains, and controls that passed whole."""
    short = [
        f"{one['what']}: {one['passed']} of {one['of']} passed, {one.get('explained', 0)} explained"
        for one in found["checks"]
        if unexplained(one)
    ]
    passed = [f"control passed whole: {one['what']}" for one in found["controls"] if one["passed"] >= one["of"]]
    missing = [] if found["controls"] or not found["checks"] else ["it has no control"]
    return short + passed + missing


def unexplained(check: Mapping[str, Any]) -> int:
    """How many of a check's cases did not pass for no reason that is given; one that has no case counts as one."""
    return check["of"] - check["passed"] - check.get("explained", 0) if check["of"] else 1


def document(judges: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
    """The page: a row for each judge, and the table of model types."""
    rows = [row(name, one, kept.get(name)) for name, one in judges.items()]
    return "\n".join([HEAD, COLUMNS, *rows, "", *peers(judges, kept)])


def tables(judges: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, str]:
    """{name of a CSV file next to the page: its text}, of all judges that have a result."""
    had = [(judge, kept[name]) for name, judge in judges.items() if name in kept]
    about = [
        (judge.title, versions(result), result["date"], result["machine"], " ".join(judge.about.split()))
        for judge, result in had
    ]
    checks = [
        (judge.title, kind[:-1], one["what"], one["passed"], one["of"], one.get("explained", 0), one.get("seconds", ""))
        for judge, result in had
        for kind in ("checks", "controls")
        for one in result[kind]
    ]
    notes = [(judge.title, *note) for judge, result in had for note in notes_of(result)]
    return {
        "judges.csv": as_csv(("judge", "version", "on", "machine", "about"), about),
        "checks.csv": as_csv(("judge", "kind", "what", "passed", "of", "differ as expected", "seconds"), checks),
        "notes.csv": as_csv(("judge", "kind", "check", "note"), notes),
    }


def notes_of(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What a judge read, what differs and why, what fell short, what could not be had: (kind, check, note)."""
    yield from (("read", "", note) for note in result.get("notes", ()))
    yield from (("differs", one["what"], "; ".join(one["differs"])) for one in result["checks"] if one.get("differs"))
    yield from (("fell short", one["what"], case) for one in result["checks"] for case in one.get("short", ()))
    yield from (("not had", "", note) for note in result["not_had"])


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def peers(judges: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    """The table of model types: a column for each judge whose toml names one."""
    columns = [(judge.column, kept[name]) for name, judge in judges.items() if judge.column and name in kept]
    columns.sort(key=lambda one: (one[0] != "attnscope", one[0].lower()))
    if not columns:
        return []
    kinds = dict.fromkeys(kind for _, result in columns for kind in result["model_types"])
    heads = ["type", *(column for column, _ in columns)]
    first = ["version", *(", ".join(versions(result).split(", ")[:2]) for _, result in columns)]
    rows = [[f"`{kind}`", *(weight(result["model_types"].get(kind)) for _, result in columns)] for kind in kinds]
    lines = [f"| {' | '.join(map(cell, one))} |" for one in (heads, ["---"] * len(heads), first, *rows)]
    return [PEERS, *lines, ""]


def weight(result: Mapping[str, Any] | None) -> str:
    """A type's cell of a peer."""
    if result is None:
        return "-"
    if "refused" in result:
        return "refused"
    number = written(result["apart"]) if result["apart"] <= RIGHT else f"**{result['apart']:.2g}**"
    stacks = result["stacks"]
    return number if len(stacks) in (1, 3) else f"{number} ({', '.join(stacks)})"


def written(apart: float) -> str:
    """`0`, `7e-07`."""
    return f"{apart:.0e}" if apart else "0"


def row(name: str, judge: Any, found: Mapping[str, Any] | None) -> str:
    """A judge's row in the first table."""
    if found is None:
        why = f"could not be had: needs {judge.source}, `--source {name}=FOLDER`" if judge.source else "not run"
        return f"| {judge.title} | - | {why} | | | | |"
    checks, controls = found["checks"], found["controls"]
    failing = sum(one["passed"] < one["of"] for one in controls)
    cells = (
        judge.title,
        versions(found),
        f"{sum(one['passed'] for one in checks)} of {sum(one['of'] for one in checks)}",
        sum(one.get("explained", 0) for one in checks),
        sum(map(unexplained, checks)),
        f"{failing} of {len(controls)}",
        found["date"],
    )
    return f"| {' | '.join(map(cell, cells))} |"


def versions(found: Mapping[str, Any]) -> str:
    """`transformers 5.23.0, torch 2.13.0`."""
    return ", ".join(f"{name} {version}" for name, version in found["version"].items())


def cell(value: Any) -> str:
    """Text in a table's cell, which a bar or a line's end would break."""
    return " ".join(str(value).split()).replace("|", "\\|")


# docs/coming-from.md


def parts_of(page: str) -> dict[str, str]:
    """{heading: text} of a page's parts."""
    texts = re.split(r"^## (.+)\n", page, flags=re.MULTILINE)[1:]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def calls_of(part: str) -> Iterator[re.Match[str]]:
    """The rows of a part's table of calls, without its head."""
    return (one for one in CALL.finditer(part) if CODE.search(one["wrote"]))


def filled(page: str, kept: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with versions, and with how far each call is apart. kept: {heading of a part: its judge's result}."""
    for heading, part in parts_of(page).items():
        if heading not in kept:
            continue
        apart = {one["wrote"]: written(one["apart"]) for one in kept[heading]["calls"]}
        new = re.sub(r"^Run with .*$", f"Run with {versions(kept[heading])}.", part, count=1, flags=re.MULTILINE)
        for one in calls_of(part):
            codes = [code for code in CODE.findall(one["wrote"]) if code in apart]
            number = apart[codes[0]] if codes else "-"
            new = new.replace(one[0], f"| {one['wrote']} | {one['typed']} | {number} |")
        page = page.replace(f"## {heading}\n{part}", f"## {heading}\n{new}")
    return page

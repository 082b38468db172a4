"""docs/external.md, from the results that the judges wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = """# Judged by others' tests and programs

Written by `scripts/external.sh` from the results of the last runs. Each judge is a test suite or program that others
wrote, at a pinned version and unmodified, in an environment of its own. A *control* is the same check with a planted
fault: it is right when it fails. A case that differs for a known reason is counted apart from those that pass, and the
judge checks that it is the case that was expected.
"""
COLUMNS = (
    "| judge | version | passed | differ as expected | fell short | controls that fail | on |\n"
    "|---|---|---|---|---|---|---|"
)


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
    """The whole page: a row for each judge, then a part for each that has a result."""
    rows = [row(name, one, kept.get(name)) for name, one in judges.items()]
    parts = [part(one, kept[name]) for name, one in judges.items() if name in kept]
    return "\n".join([HEAD, COLUMNS, *rows, "", *parts])


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


def part(judge: Any, found: Mapping[str, Any]) -> str:
    """A judge's own part: its checks, what differs and why, its controls."""
    tables = [
        "| check | passed | of | seconds |\n|---|---|---|---|",
        *(table_row(one) for one in found["checks"]),
        "",
        "| control | passed | of | seconds |\n|---|---|---|---|",
        *(table_row(one) for one in found["controls"]),
    ]
    differs = [f"- {one['what']}: {'; '.join(one['differs'])}" for one in found["checks"] if one.get("differs")]
    short = [f"- {one['what']}: {case}" for one in found["checks"] for case in one.get("short", ())]
    lists = {
        "What was read:": [f"- {one}" for one in found.get("notes", ())],
        "What differs, and why:": differs,
        "What fell short:": short,
        "What could not be had:": [f"- {one}" for one in found["not_had"]],
    }
    below = [f"\n{head}\n\n" + "\n".join(lines) for head, lines in lists.items() if lines]
    ran = f"{versions(found)}. {found['date']}, {found['machine']}."
    return "\n".join([f"## {judge.title}\n", judge.about.strip() + "\n", ran + "\n", *tables, *below, ""])


def table_row(check: Mapping[str, Any]) -> str:
    """One check or control."""
    return f"| {cell(check['what'])} | {check['passed']} | {check['of']} | {check.get('seconds', '')} |"


def versions(found: Mapping[str, Any]) -> str:
    """`transformers 5.23.0, torch 2.13.0`."""
    return ", ".join(f"{name} {version}" for name, version in found["version"].items())


def cell(value: Any) -> str:
    """Text in a table's cell, which a bar or a line's end would break."""
    return " ".join(str(value).split()).replace("|", "\\|")

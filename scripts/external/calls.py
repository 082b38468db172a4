"""Calls of docs/coming-from.md, run: what a peer gives for a row's first column, and attnscope for its second.

A judge whose toml names a part of that page evaluates the very text of the first column in its peer's environment. It
runs the command, or evaluates the Python, of the second. `document.filled` writes how far the two are apart.

Shapes: Q query, K key.
"""

from __future__ import annotations

import io
import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from external.common import Check, Report
from external.models import demo_folder

TEXT = "the financial bank is located on river bank"
OTHER = "the bank is located on the river bank"  # as many tokens, for the control
TABLES = {"ablate", "explain", "heads", "knockout", "patch", "relations", "rollout", "text", "tokens"}  # that print one
ALLOWED = 2e-6  # of weights, in float32


@dataclass(frozen=True)
class Source:
    """What commands read: a model, and a text. other: a text of as many tokens, for the control.

    more: what stands for other placeholders than TEXT and DIR.
    """

    what: str = "the demo"
    model: str = "demo"
    text: str = TEXT
    other: str = OTHER
    more: Mapping[str, str] = field(default_factory=dict)


DEMO = Source()


@dataclass(frozen=True)
class Row:
    """A row of the page: `wrote`, the peer's code, and `typed`, a command that starts with `attnscope`, or Python.

    apart: how far what the peer gives is from what attnscope gives: the objects that a command prints, the value of the
    Python, or the observation that a picture or page is made of. allowed: above which it counts as different.
    """

    wrote: str
    typed: str
    apart: Callable[[Any, Any], float]
    allowed: float = ALLOWED


def notebook(folder: Path | None = None, text: str = TEXT) -> dict[str, Any]:
    """The names that a notebook has once a model has read a text; the demo without a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import attnscope

    folder = folder or demo_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    ids = inputs["input_ids"][0].tolist()
    return {
        "attnscope": attnscope,
        "torch": torch,
        "model": model,
        "tokenizer": tokenizer,
        "text": text,
        "inputs": inputs,
        "attentions": attentions,
        "ids": ids,
        "tokens": tokenizer.convert_ids_to_tokens(ids),
        "seen": lambda text: attnscope.capture(attnscope.load(str(folder)), text),
    }


def run_rows(report: Report, rows: Sequence[Row], names: Mapping[str, Any], source: Source = DEMO) -> None:
    """Run every row once, and each once more with another text for attnscope, which must differ.

    names: what the peer's code is evaluated with; `seen` is a function of a text that captures it. In attnscope's
    Python it is what was captured.
    """
    theirs = {row.wrote: eval(row.wrote, dict(names)) for row in rows}  # text of this repository
    with report.check(f"the calls on {source.what}: their numbers are attnscope's, to {ALLOWED:g} or as stated") as one:
        for row in rows:
            apart = compare(one, row, theirs[row.wrote], names, source.text, source)
            report.calls.append({"wrote": row.wrote, "typed": row.typed, "apart": apart})
    with report.control(f"the calls on {source.what}, attnscope on another text") as control:
        for row in rows:
            compare(control, row, theirs[row.wrote], names, source.other, source)


def compare(check: Check, row: Row, theirs: Any, names: Mapping[str, Any], text: str, source: Source) -> float:
    """How far the two sides of a row are apart; infinity where attnscope's has another shape."""
    seen = names["seen"](text)
    if row.typed.startswith("attnscope "):
        ours = command(row.typed, text, source)
    else:
        ours = eval(row.typed, {**names, "seen": seen, "text": text})
    try:
        apart = float(row.apart(theirs, seen if ours is None else ours))
    except (IndexError, KeyError, RuntimeError, ValueError):
        if text == source.text:
            raise
        apart = float("inf")
    check.hold(apart <= row.allowed, f"{row.wrote}: apart by {apart:.2g}")
    return apart


def command(typed: str, text: str, source: Source) -> list[Any] | None:
    """The objects that the last command of a row prints, None of a picture or a page.

    Raises RuntimeError where a command ends with an error, which it prints.
    """
    from attnscope.cli import run

    shutil.rmtree("out", ignore_errors=True)
    given = {"TEXT": text, "DIR": "out", **source.more}
    records = None
    for one in typed.split(" && "):
        name, *rest = [given.get(part, part) for part in shlex.split(one)[1:]]
        more = ["--format", "jsonl"] if name in TABLES and "--format" not in rest else []
        of_folder = "demo" in rest or rest[:1] == ["out"]
        loaded = [] if of_folder else ["--model", source.model]
        out = io.TextIOWrapper(io.BytesIO(), "utf-8")
        with redirect_stdout(out):
            code = run([name, *rest, *more, *loaded, "--quiet"])
        if code:
            raise RuntimeError(f"{one}: exit code {code}")
        out.seek(0)
        records = [json.loads(line) for line in out] if name in TABLES else None
    return records


# what rows compare


def apart(theirs: Any, ours: Any) -> float:
    """The largest difference of two tensors, or of a tensor and numbers."""
    theirs, ours = (torch.as_tensor(one).detach().double() for one in (theirs, ours))
    if theirs.shape != ours.shape:
        raise ValueError(f"expected numbers of one shape, got {tuple(theirs.shape)} and {tuple(ours.shape)}")
    return float((theirs - ours).abs().max())


def column(records: Sequence[Any], name: str) -> list[float]:
    """A column of a table of heads, by layer and head."""
    return [one[name] for one in sorted(records, key=lambda one: (one["layer"], one["head"]))]


def printed(theirs_QK: Tensor, records: Sequence[Any], name: str = "weight") -> float:
    """The largest difference of the entries that a table of relations prints."""
    return apart([theirs_QK[one["query"], one["key"]].item() for one in records], [one[name] for one in records])

"""A comparison as tables, and the folder that holds them.

    heads_table(found)   # a row per head, largest divergence first

Shapes: N head of all layers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from attnscope.errors import InputError
from attnscope.inputs.spans import WORDS
from attnscope.metrics.metrics import METRICS
from attnscope.model.selection import SOFTMAX, STACKS
from attnscope.utils.files import check_schema, check_types, damaged, jsonable, read_json, read_small, refuse_links
from attnscope.utils.folders import OVER, check, document, refuse_other_kind
from attnscope.utils.tables import as_table, numbers, read_delimited, words

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel
    from attnscope.study.comparison import Comparison, Pair, Shared

SCHEMA, NAME = "compare/2", "compare.json"
STACK = f"(?:(?:{'|'.join(SOFTMAX)})/)?"
OF_STACKS = re.compile(rf"{STACK}(?:layers/L[0-9]+|differences)\.(?:png|svg|pdf)")
Places = Sequence[int] | None


def heads_table(found: Comparison, places: Places = None) -> pa.Table:
    """A row per head, largest divergence first: js and its interval, lost mass, rows, and each metric's difference.

    places: of the heads that are listed, in their order.
    """
    order = found.order if places is None else list(places)
    columns = {name: getattr(found.js, part)[order] for name, part in JS.items()}
    lost = {name: getattr(found, f"{name}_SN").mean(0)[order] for name in ("lost", "other_lost")}
    return as_table(
        {
            **_which(found, order),
            **{name: numbers(value) for name, value in (columns | lost).items()},
            "rows": found.rows_SN.sum(0)[order].astype(np.int64),
            "texts": np.full(len(order), found.texts, np.int32),
            **{f"{name}_difference": numbers(found.metric(name).effect[order]) for name in METRICS},
            "stack": _stacks(found, order),
        }
    )


JS = {"js": "effect", "js_low": "low", "js_high": "high"}
SIDES = {"first": "null", "other": "score", "difference": "effect", "low": "low", "high": "high"}


def metrics_table(found: Comparison, places: Places = None) -> pa.Table:
    """A row per metric and head: the metric on both sides, its difference with an interval, and the texts behind it."""
    order = found.order if places is None else list(places)
    effects = [found.metric(name) for name in METRICS]

    def column(part: str) -> np.ndarray:
        return np.concatenate([getattr(one, part)[order] for one in effects])

    which = {name: np.tile(values, len(METRICS)) for name, values in _which(found, order).items()}
    metric = words([name for name in METRICS for _ in order])
    values = {name: numbers(column(part)) for name, part in SIDES.items()}
    texts, stack = column("n").astype(np.int32), _stacks(found, order * len(METRICS))
    return as_table({**which, "metric": metric.dictionary_encode(), **values, "texts": texts, "stack": stack})


def tokens_table(pair: Pair) -> pa.Table:
    """A row per unit that two texts share, then one per token without a partner; `unit` is null for those.

    read_by: the stack that reads the text, `encoder` and `decoder` of an encoder-decoder.
    """
    return pa.concat_tables([_tokens_of(one) for one in pair.texts])


def _tokens_of(text: Shared) -> pa.Table:
    nobody, (first, other) = list[int](), text.units.alone
    rows = list(zip(*text.units.members, strict=True))
    rows += [*(([token], nobody) for token in first), *((nobody, [token]) for token in other)]
    number = np.arange(len(rows), dtype=np.int32)
    columns: dict[str, Any] = {"unit": numbers(number, number >= text.units.size)}
    for side, (name, prompt) in enumerate((("first", text.first), ("other", text.other))):
        columns[f"{name}_position"] = words([",".join(map(str, row[side])) or None for row in rows])
        columns[f"{name}_text"] = words(["".join(prompt.tokens[at] for at in row[side]) or None for row in rows])
    return as_table({**columns, "read_by": words([text.stack] * len(rows))})


def comparison_facts(models: Sequence[LoadedModel], texts: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a comparison from another: the models, a hash of all texts, and what was asked for."""
    said = [{"name": one.name, "revision": one.revision, "dtype": one.dtype, "device": one.device} for one in models]
    digest = hashlib.sha256("\0".join(texts).encode(errors="backslashreplace")).hexdigest()
    found: dict[str, Any] = jsonable({"models": said, "texts_sha256": digest, "options": options})
    return found


def kept_comparison(folder: Path) -> tuple[Comparison, str]:
    """The divergences and differences of a finished comparison as if of one text, and what was compared, in words.

    Raises InputError for a folder with damaged or missing tables.
    """
    from attnscope.study.comparison import Comparison

    with damaged(f"{folder} holds no whole comparison", "compare again: attnscope compare --out DIR"):
        said = read_json(folder / NAME)
        check_schema(said, SCHEMA, folder, "compare again", InputError)
        check_types(said, {"asked": {"models": list}, "texts": int})
        for model in said["asked"]["models"]:
            check_types(model, {"name": str})
        columns = read_delimited(pa.BufferReader(read_small(folder / "heads.csv"))).to_pydict()
        rows = sorted(range(len(columns["stack"])), key=lambda at: (STACKS.index(columns["stack"][at]), at))
        stacks = tuple(str(columns["stack"][at]) for at in rows)
        heads = tuple((columns["layer"][at], columns["head"][at]) for at in rows)

        def of_heads(name: str) -> np.ndarray:
            return np.array([columns[name][at] for at in rows], np.float64)[None]

        js_1N = of_heads("js")
        none_1N = np.zeros_like(js_1N)
        metrics = {name: (none_1N, of_heads(f"{name}_difference")) for name in METRICS}
        names = [one["name"] for one in said["asked"]["models"][:2]]
        line = f"{' compared with '.join(dict.fromkeys(names))}, {said['texts']} texts"
        line += "".join(f", {said_of}" for by, said_of in WORDS.items() if by in said.get("aligned", {}).values())
        return Comparison(heads, stacks, js_1N, none_1N, none_1N, none_1N, metrics, ()), line


def check_folder(folder: Path, asked: Mapping[str, Any], force: bool) -> None:
    """Raise UsageError for a folder that holds another comparison, or that another run fills, unless force is given."""
    before = _before(folder)
    if before is not None and not force:
        check_schema(before, SCHEMA, folder, OVER)
    refuse_other_kind(folder, NAME, force)
    check(folder, "comparison", before and before.get("asked", {}), asked, force)


def _before(folder: Path) -> dict[str, Any] | None:
    """What the compare.json of a folder says; None without one. Raises UsageError for a damaged one, and links."""
    stacks = [folder / stack for stack in STACKS]
    refuse_links([*stacks, *(one / "layers" for one in (folder, *stacks))])
    hint = "name another folder, or remove it"
    return document(folder / NAME, "not what a comparison wrote, or damaged", hint, _is_ours)


def _is_ours(found: Mapping[str, Any]) -> bool:
    parts = found.get("asked", {}), found.get("files", {})
    return str(found.get("schema")).startswith("compare/") and all(isinstance(one, dict) for one in parts)


def clear(folder: Path) -> None:
    """Take away the layers of the comparison before, which may have been others; first the file that lists them."""
    before = _before(folder) or {}
    (folder / NAME).unlink(missing_ok=True)
    for name in before.get("files", ()):
        if OF_STACKS.fullmatch(name):
            (folder / name).unlink(missing_ok=True)


def _which(found: Comparison, order: Sequence[int]) -> dict[str, np.ndarray]:
    layer, head = np.array([found.heads[place] for place in order], np.int32).reshape(-1, 2).T
    return {"layer": layer, "head": head}


def _stacks(found: Comparison, order: Sequence[int]) -> Any:
    return words([found.head_stacks[place] for place in order]).dictionary_encode()

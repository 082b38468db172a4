"""`attnscope relations`: which token looks at which, head by head."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.one_text import export_text, observe_text, report_checks, say_shares
from attnscope.cli.option_groups import FIRST, HELD, of_run
from attnscope.cli.options import Heads, Question, Relations, TextRun
from attnscope.cli.output import Results, Top, writing_to
from attnscope.model.selection import StackLayer, mixes
from attnscope.utils import display as cells
from attnscope.utils.display import Column, Fit, Sheet
from attnscope.utils.folders import TABLES

if TYPE_CHECKING:
    import pyarrow as pa


EXAMPLES = (
    'attnscope relations --text "the cat sat on the mat" --select last --top-k 3',
    'attnscope relations --text "the cat sat on the mat" --query last --over heads | head -5',
    'attnscope relations --text "the cat sat on the mat" --key cat --top-k all --engine fused',
    'attnscope relations --text "the cat sat on the mat" --query last --over heads --weights value | head -5',
    'attnscope relations "the bank of the river, the bank of the" --answer " river" --foil " bank" --weights logit',
    'attnscope relations "the bank is" --answer " on the river" --query answer --key prompt --over heads',
    'echo "the bank by the river" | attnscope relations --text - --group words --min-weight 0.2 --format jsonl',
)


class Related(Heads):
    """What is read of the heads, of an answer's logit too."""

    weights: Annotated[
        Literal["softmax", "scores", "value", "logit"],
        "softmax: weights; scores: logits before the softmax; value: norms of the written values, A |v "
        "W_O|; logit: contributions to the logit of --answer.",
    ] = "softmax"
    foil: Annotated[
        str | None, "With --weights logit: compare with this token's logit, not with the mean of all tokens."
    ] = None


Listing = writing_to(Results, "Folder for relations.csv and manifest.json, or a file for the table.", *TABLES)


class Ranked(Relations):
    """Which keys of a query are listed, and in which order."""

    top_k: Annotated[str, FIRST, HELD] = "5"
    over: Annotated[
        Literal["heads", "none"] | None,
        "heads: sort all heads together; none: list head by head (default: heads on a terminal, else none).",
        FIRST,
    ] = None
    all_keys: Annotated[
        bool | None,
        "Include the first key and each query's own (default: only where heads are listed one by one).",
        Option("--all-keys/--other-keys"),
    ] = None

    def written(self) -> dict[str, Any]:
        """Which relations a file or a pipe gets, as `Observation.relations` takes it."""
        ranked = self.over == "heads"
        others = not self.all_keys if ranked else self.all_keys is False
        return {"min_weight": self.min_weight, "over": "heads" if ranked else None, "other_keys": others}

    def shown(self) -> dict[str, Any]:
        """Which relations a person sees: unless they say else, strongest first, without key 0 and each query's own."""
        if self.over == "none":
            return self.written()
        return {**self.written(), "over": "heads", "other_keys": not self.all_keys}


@with_options(TextRun, Related, Question, Top, Listing, Ranked)
def relations(asked: TextRun, entries: Related, question: Question, top: Top, printing: Results, listed: Ranked) -> int:
    """List which token looks at which: the strongest keys of a query.

    By default all heads and tokens; narrow with --select, --query, --key. A terminal gets the strongest relations
    of all heads, without the first key and each token's own, and so does --top. A pipe gets all rows as csv, head
    by head.

    keys, rollout and text are other views of the same relations.
    """
    format = output.wanted_format(printing.format)

    from attnscope.observe.request import Request

    # Relations are kept before they are cut: files and pipes get more of them than a person sees.
    keep = Request(
        view=entries.view(),
        metrics=(),
        relations=True,
        top_k=listed.keys_per_query,
        group=listed.group,
        **question.asks(),
    )
    options = of_run("relations", asked, entries, question, top, printing, listed)
    seen = observe_text(asked, entries, printing, options, keep)
    export_text(seen, printing, options=options, figures=(), **listed.written())
    # --top asks for the strongest, whoever reads them; else a program gets all, head by head.
    how = listed.shown() if format == "table" or top.top is not None else listed.written()
    table = seen.relations(**how)
    sheet = partial(relations_sheet, table, top.shown)
    output.emit_first(table, top, format, sheet, printing)
    if format == "table" and listed.over is None:
        line = "strongest first over all heads; a pipe without --top, and --over none, get them head by head"
        output.log(line, printing.quiet)
    if how["other_keys"]:
        left_out = len(seen.relation_numbers(listed.min_weight)["weight"]) - len(table)
        line = f"{left_out} rows hidden (key 0, and each token's own key); --all-keys shows them"
        output.log(line, printing.quiet or not left_out)
    if listed.group is not None:
        say_shares(seen, printing.quiet)
    return report_checks(seen, printing.quiet)


def relations_sheet(table: pa.Table, top: int | None, wrapped: str = "") -> Sheet:
    """The first rows for a person; where the screen is narrow the texts are cut, never the numbers.

    wrapped: a column with texts that are never cut either.
    """
    from pyarrow import types

    from attnscope.utils.tables import rows, words

    stacks = table.column("stack").unique().to_pylist() if "stack" in table.column_names else []
    only = stacks[0] if len(stacks) == 1 else ""  # the stack of all heads, where it is in their names
    if "stack" in table.column_names and len(stacks) <= 1:  # a file has it in any case
        table = table.drop_columns("stack")
    if "kv_head" in table.column_names:
        # Heads by name, as on every terminal: `L1H4`, and its kv head where heads share one.
        layer, head, kv = (table.column(name).to_pylist() for name in ("layer", "head", "kv_head"))
        numbers = zip(layer, head, kv, strict=True)
        layers = [StackLayer(place, only) if mixes(only) else place for place in layer]
        names = [
            cells.head_name(place, group if one is None else one, one is None)
            for place, (_, one, group) in zip(layers, numbers, strict=True)
        ]
        shared = any(one is not None and group not in (None, one) for one, group in zip(head, kv, strict=True))
        table = table.drop_columns(["layer", "head"] + ["kv_head"] * (not shared))
        table = table.rename_columns({"kv_head": "kv"}) if shared else table
        table = table.add_column(0, "head", words(names))
    columns = []
    for field in table.schema:
        number = types.is_integer(field.type) or types.is_floating(field.type)
        fit: Fit = "whole" if number else "wrap" if field.name == wrapped else "cut"
        columns.append(Column(field.name, align="right" if number else "left", fit=fit, min_width=3))
    named = (zip(table.column_names, row, strict=True) for row in rows(table.slice(0, top)))
    return Sheet([{name: _cell(name, value) for name, value in row} for row in named], columns)


def _cell(name: str, value: object) -> str:
    from attnscope.inputs.labels import visible_blanks

    if name == "logit" and isinstance(value, float):
        return f"{value:+.3f}"
    if isinstance(value, float):
        return cells.share(value)
    return visible_blanks(cells.plain(value)) if name.endswith("token") else cells.plain(value)

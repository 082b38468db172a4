"""`attnscope text`: the text itself, coloured by where chosen tokens look, or by who looks at them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.figure_options import Scale
from attnscope.cli.one_text import export_text, observe_text, report_checks, say_shares
from attnscope.cli.option_groups import FIRST, fill, of_run
from attnscope.cli.options import Heads, Question, TextRun
from attnscope.cli.output import Results, writing_to
from attnscope.errors import UsageError
from attnscope.utils.folders import TABLES

if TYPE_CHECKING:
    from attnscope.figures import Style
    from attnscope.figures.terminal import Prose
    from attnscope.observe.observation import HeadTokens, Observation

EXAMPLES = (
    'attnscope text --text "the financial bank is located on river bank" --query last --select 1.4',
    "attnscope text --file README.md --truncate right --key first --mean layer --format csv | head",
)


ColouredText = writing_to(Results, "Folder for text.csv and manifest.json, or a file for the numbers.", *TABLES)


class Over(Question):
    """Which tokens are asked about, and whether heads are averaged."""

    mean: Annotated[
        Literal["none", "layer", "all"] | None,
        "Average over all heads, per layer, or not at all (default: all, with --select none).",
        FIRST,
    ] = None


class Colours(Scale):
    """How weights become colours."""

    sink: Annotated[
        Literal["keep", "mask"] | None,
        "Attention sink: keep it, or leave it uncoloured (default: keep).",
    ] = None


@with_options(TextRun, Heads, Over, ColouredText, Colours)
def text(asked: TextRun, chosen: Heads, question: Over, printing: Results, colours: Colours) -> int:
    """Print the text, coloured by where chosen tokens look.

    The colour is the weight that each token gets from the --query tokens, on average (default: all tokens). With
    --key alone, it is the weight that each token gives to those keys. A terminal gets the text, once per head of
    --select. A pipe gets the numbers as csv, a row per token.
    """
    if colours.sink == "mask" and question.key is not None and question.query is None:
        raise UsageError(
            "--sink needs a query: with --key alone, queries are coloured", "leave out {sink}, or add --query"
        )
    format = output.wanted_format(printing.format)

    from attnscope.figures import Style
    from attnscope.observe.observation import head_tokens, token_table
    from attnscope.observe.request import Request

    options = of_run("text", asked, chosen, question, printing, colours)
    keep = Request(view=chosen.view(), metrics=(), per_token=True, **question.asks())
    seen = observe_text(asked, chosen, printing, options, keep)
    over = question.mean or ("none" if chosen.select else "all")
    export_text(seen, printing, options=options, figures=(), per_token=over)
    if format == "table":
        from rich.console import Group

        output.show(Group(*(prose(seen, head, fill(Style, colours)) for head in head_tokens(seen, over))))
    else:
        output.emit(token_table(seen, over), format, lambda: "", printing.spreadsheet)
    say_shares(seen, printing.quiet)
    return report_checks(seen, printing.quiet)


def prose(seen: Observation, head: HeadTokens, style: Style) -> Prose:
    """The text of an observation, coloured as a head looks."""
    from attnscope.figures.colours import find_limits
    from attnscope.figures.terminal import Prose
    from attnscope.observe.observation import coloured

    seen = seen.of(head.stack)
    on_keys = seen.chosen.keys_alone
    weight_T = head.weight_T.copy()
    if style.sink == "mask":
        weight_T[head.sink] = np.nan
    telling_T = (
        np.where(head.uniform_T > 1 - 1e-6, np.nan, weight_T) if on_keys else weight_T
    )  # it could look nowhere else
    limits = find_limits([telling_T[None] if np.isfinite(telling_T).any() else weight_T[None]], style)
    marked = {place: name for name in ("key", "query") for place in positions(seen, name)}
    shown = coloured(seen)
    plain = shown.plain if any(shown.plain) else [f"{label} " for label in shown.labels]  # of a picture, its patches
    return Prose(plain, weight_T, limits, style, marked, not on_keys, head.name, scale_legend(seen, head, weight_T))


def positions(seen: Observation, name: str) -> tuple[int, ...]:
    """The tokens of the text that is shown that were chosen as queries, or as keys."""
    from attnscope.observe.observation import coloured

    tokens = getattr(seen.chosen, name)
    there = {"query": seen.queries, "key": seen.keys}[name] is coloured(seen)
    return tokens.positions if tokens is not None and there else ()


def scale_legend(seen: Observation, head: HeadTokens, shown_T: np.ndarray) -> str:
    """The words next to the scale: the largest weight, the sink's, that of the chosen keys, and what is marked."""
    from attnscope.cli.head_tables import token_name
    from attnscope.observe.observation import coloured

    query, key = (positions(seen, name) for name in ("query", "key"))
    weight_T, largest = np.nan_to_num(head.weight_T), int(np.nan_to_num(shown_T).argmax())
    prompt = coloured(seen)
    words = [f"largest {weight_T[largest]:.2f} {token_name(prompt, largest)}"]
    if not seen.chosen.keys_alone:
        left_out = " (left out)" * bool(np.isnan(shown_T[head.sink]))
        words.append(f"sink {token_name(prompt, head.sink)} {weight_T[head.sink]:.2f}{left_out}")
        words += [f"keys {weight_T[list(key)].sum():.2f}"] * bool(key)
    words += ["»query«"] * bool(query) + ["‹key›"] * bool(key)
    return ", ".join(words)

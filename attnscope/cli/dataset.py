"""`attnscope heads DATASET`: the heads of a corpus, ranked over its texts, without a model."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.config import refuse_others
from attnscope.cli.figure_options import DEPTH, Drawing, Look, place_of_pictures
from attnscope.cli.option_groups import command_line, parameters
from attnscope.cli.output import Results, Top, write_file
from attnscope.cli.study_tables import open_line
from attnscope.errors import UsageError
from attnscope.metrics.metrics import KEPT_FIRST, UNIFORM
from attnscope.observe.records import first_ranked, unranked
from attnscope.utils import display as cells
from attnscope.utils.display import Column, Row, Sheet, fitting
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    import numpy as np
    import typer

    from attnscope.corpus.dataset import CorpusHeads, Dataset, Pair
    from attnscope.figures import Style

LONGEST_ASKED = 80  # characters
PART = {  # options that say something of a dataset
    *("given", "set", "config", "sort", "top", "select", "atlas", "query", "key", "metrics", "format"),
    *("figures", "out", "quiet", "verbose", *parameters(Look)),
}


@dataclass(frozen=True)
class DatasetAsk:
    """What is asked of a dataset: which heads in which order, which spans, and what else is drawn over the layers."""

    sort: str | None
    top: Top = Top()
    select: str | None = None
    atlas: Path | None = None
    metrics: Sequence[str] = ()
    query: str | None = None
    key: str | None = None

    @property
    def pair(self) -> Pair | None:
        """The two spans. Raises UsageError where one alone was named."""
        if self.query is not None and self.key is not None:
            return self.query, self.key
        if self.query is not None or self.key is not None:
            why = "--query and --key name two spans of a dataset, and one of them was given"
            raise UsageError(why, "give both, or leave out both")
        return None


@dataclass(frozen=True)
class Chosen:
    """A dataset, its heads, and the places among them of those that were chosen."""

    asked: DatasetAsk
    dataset: Dataset
    heads: CorpusHeads
    places: np.ndarray

    @classmethod
    def read(cls, folder: Path, asked: DatasetAsk, quiet: bool) -> Chosen:
        """What is asked of the dataset in a folder. Raises UsageError where --select names none of its heads."""
        import numpy as np

        from attnscope.corpus.dataset import read_dataset
        from attnscope.corpus.tables import summarised

        dataset = read_dataset(folder)
        with output.progress("means over the texts", len(summarised(dataset.output)), quiet) as advance:
            heads = dataset.heads(asked.pair, advance)
        if asked.select is None:
            return cls(asked, dataset, heads, np.arange(len(heads.key)))
        from attnscope.model.selection import select_stacks

        named = None
        if asked.atlas is not None:
            from attnscope.observe.atlas import names_of

            named = names_of(asked.atlas).by_role()
        places = heads.places(select_stacks(asked.select, heads.counts, heads.plain, named, "this dataset"))
        if not len(places):
            hint = "attnscope heads DATASET lists them"
            raise UsageError(f"the dataset has no head of --select {asked.select}", hint)
        return cls(asked, dataset, heads, places)

    @property
    def sort(self) -> str:
        """The metric that ranks the heads."""
        return self.asked.sort or first_ranked(self.heads.scores, self.places) or "layer"

    @property
    def question(self) -> str:
        """Which queries and keys the numbers are of: whatever the dataset's files say, short."""
        return cells.shortened(self.dataset.asked, LONGEST_ASKED)

    def draw(self, into: Path, style: Style, figures: str) -> list[Path]:
        """Draw metrics over the layers: depth.png, of several stacks one in a folder of each; the paths."""
        from attnscope.errors import visible
        from attnscope.figures import About, save_depth
        from attnscope.metrics.metrics import COLUMNS, order_of

        if {part.strip() for part in figures.split(",")} != {DEPTH}:
            raise UsageError(f"--figures: expected {DEPTH} of a dataset, got {figures!r}", "write --figures depth")
        # The metric that ranks comes first; columns that are no metric are not drawn.
        first, pair = [order_of(self.sort)[0], *self.asked.metrics], self.asked.pair
        names = [name for name in dict.fromkeys(first) if name not in COLUMNS] or [self.heads.ranked_by]
        stacks = self.dataset.depths(self.heads, self.places, names, pair)
        note = f"queries {pair[0]!r}, keys {pair[1]!r}" if pair else visible(self.question)
        model, texts = self.dataset.model, f"{self.dataset.texts:,} texts"
        line = ", ".join(filter(None, (cells.shortened(model, 60), texts)))
        look = replace(style, about=About(line, model, command=style.about.command))
        if not stacks:
            raise UsageError(f"{' and '.join(names)}: no text of the dataset has a value", "name another metric")
        # Layers of two stacks are not one axis: each has a picture.
        written = []
        for stack, depths in stacks.items():
            target = into / stack if len(stacks) > 1 else into
            target.mkdir(parents=True, exist_ok=True)
            written.append(save_depth(target / f"depth.{style.image}", depths, look, note))
        return written


def dataset_heads(context: typer.Context, folder: Path, asked: DatasetAsk, printing: Results, drawing: Drawing) -> int:
    """Print the ranked heads of a dataset, and draw what is asked for; the exit code."""
    refuse_others(context, PART, f"{folder} is a finished dataset", "leave it out, or give it to attnscope batch")
    figures = drawing.figures or (DEPTH if printing.draws else None)
    if figures is not None and not printing.draws:
        raise UsageError("--figures are files", "name a folder with --out DIR")
    format = output.wanted_format(printing.format)
    # Which heads, and in which order; what is not printed is drawn and written all the same.
    chosen = Chosen.read(folder, asked, printing.quiet)
    dataset, heads, places = chosen.dataset, chosen.heads, chosen.places
    order = heads.order(chosen.sort, places)
    if printing.out is not None:
        draw = partial(chosen.draw, style=drawing.figure_style(command_line("heads", drawing)), figures=figures or "")
        if printing.file is not None:
            table = partial(heads.table, order)
            write_file(printing.file, table, draw, printing.quiet, spreadsheet=printing.spreadsheet)
        else:
            with unwinding():
                paths = draw(place_of_pictures(folder, printing.out))
            output.log(f"wrote {', '.join(map(str, paths))}", printing.quiet)
    # What was read: `runs/ioi  demo  100 texts  24 heads in 4 layers  queries last, keys of the field subject`.
    failed = f", {dataset.failed:,} failed" * bool(dataset.failed)
    layers = len(set(zip(heads.stack[places].tolist(), heads.layer[places].tolist(), strict=True)))
    parts = [str(dataset.folder), dataset.model, f"{dataset.texts:,} texts{failed}"]
    parts += [f"{len(places):,} heads in {layers:,} layers", chosen.question]
    output.log("  ".join(filter(None, parts)), printing.quiet)
    # A terminal gets the first rows, a file all of them.
    shown = order[: asked.top.shown]
    sheet = dataset_sheet(heads, shown, chosen.sort, output.width())
    output.emit_first(heads.table(order), asked.top, format, lambda: sheet, printing)
    output.log_lines(unranked(heads.scores, places, asked.sort), printing.quiet)
    if format == "table":
        notes = [*open_ends(heads, shown, chosen.sort), *dataset_legend(dataset, sheet.columns)]
        output.log_lines(notes, printing.quiet)
    return 0


def dataset_sheet(heads: CorpusHeads, shown: np.ndarray, sort: str, width: int) -> Sheet:
    """The ranked heads: the metric that sorts with its interval, and as many means as so many characters hold."""
    import numpy as np

    from attnscope.metrics.metrics import KNOWN, MASS, order_of

    name, (by, ascending) = _sorting(heads, sort), order_of(sort)
    score, arrow = heads.scores[name], " ▴" if ascending else " ▾"
    # The interval is of the metric that sorts alone: with one per metric no screen had room for two of them.
    rows: list[Row] = [
        {
            "head": _name(heads, place),
            "kv": heads.kv_head[place],
            **{metric: values.value[place] for metric, values in heads.scores.items()},
            "interval": ""
            if score.low is None or score.high is None
            else cells.MISSING
            if np.isnan([score.low[place], score.high[place]]).all()
            else cells.interval(score.low[place], score.high[place], cells.score),
            UNIFORM: score.null[place],
            "texts": heads.texts[name][place],
        }
        for place in shown.tolist()
    ]
    shared = bool(((heads.head >= 0) & (heads.head != heads.kv_head)).any())
    columns = [
        Column("head" + arrow * (by == "layer"), name="head", align="left"),
        *[Column("kv")] * shared,
        Column(KNOWN[name].short + arrow * (by == name), cells.score, name),
        Column("95 % interval", name="interval"),
        *[Column(UNIFORM, cells.score)] * (name == MASS.id),
        Column("texts", "{:,}".format),
    ]
    # The other metrics take what room is left; a table of data has all.
    rest = [Column(KNOWN[other].short, cells.score, other) for other in _rest(heads, sort)]
    room = width - sum(column.width(rows) for column in columns)
    return Sheet(rows, [*columns, *fitting(rest, rows, room)])


def _sorting(heads: CorpusHeads, sort: str) -> str:
    """The metric whose interval the table shows: the one that sorts, or without one the first."""
    from attnscope.metrics.metrics import order_of

    by = order_of(sort)[0]
    return heads.ranked_by if by == "layer" else by


def _name(heads: CorpusHeads, place: int) -> str:
    """`L27H3`, `L27KV1` for the mean over a kv head's group, `cross L3H2` in another stack than the plain one."""
    from attnscope.model.selection import STACKS

    stack, head = STACKS[heads.stack[place]], int(heads.head[place])
    number = int(heads.kv_head[place]) if head < 0 else head
    return f"{stack} " * (stack != heads.plain) + cells.head_name(int(heads.layer[place]), number, head < 0)


def open_ends(heads: CorpusHeads, shown: np.ndarray, sort: str) -> list[str]:
    """A line where intervals of the metric that sorts lack an end, though there are texts enough."""
    import numpy as np

    from attnscope.studies.intervals import FEWEST

    name = _sorting(heads, sort)
    enough, ends = heads.texts[name][shown] >= FEWEST, (heads.scores[name].low, heads.scores[name].high)
    missing = [end[shown] != end[shown] for end in ends if end is not None]  # NaN
    opened = int((enough & np.any(missing, axis=0)).sum() if missing else 0)
    return [open_line(opened, f"{len(shown)} intervals")] * bool(opened)


def _rest(heads: CorpusHeads, sort: str) -> list[str]:
    """The other metrics, those that narrow screens keep first."""
    sorting = _sorting(heads, sort)
    order = dict.fromkeys([*(name for name in KEPT_FIRST if name in heads.scores), *heads.scores])
    return [name for name in order if name != sorting]


def dataset_legend(dataset: Dataset, columns: Sequence[Column]) -> list[str]:
    """What the columns are, what has no interval, and where all of them are."""
    from attnscope.cli.head_tables import MASS_WORDS, column_words
    from attnscope.metrics.metrics import MASS
    from attnscope.studies.intervals import FEWEST

    names = {column.key for column in columns}
    lines = [
        *column_words(names),
        *[f"{MASS_WORDS}; uniform: the mass of attention spread uniformly"] * (MASS.id in names),
    ]
    lines.append("all are means over the texts, each text counted once")
    if dataset.texts < FEWEST:
        lines.append(f"no intervals: they need {FEWEST} texts, this dataset has {dataset.texts}")
    folder = shlex.quote(str(dataset.folder))
    return [*lines, f"all metrics and intervals: attnscope heads {folder} --format csv"]

"""`attnscope heads`: what every head does with a text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.figure_options import Drawing, kinds_of_file
from attnscope.cli.one_text import FEW, Show, draw_in_terminal, export_text, observe_text, report_checks, stream
from attnscope.cli.option_groups import FIRST, HIDDEN, SETTING, build, command_line, fill, of_run
from attnscope.cli.option_groups import metrics as metric_names
from attnscope.cli.options import Entries, Question, Relations, TextRun
from attnscope.cli.output import Results, Top
from attnscope.errors import UsageError
from attnscope.utils.folders import PICTURES, TABLES

if TYPE_CHECKING:
    from attnscope.observe.observation import Observation
    from attnscope.observe.records import Head
    from attnscope.observe.request import MapFields

EXAMPLES = (
    'attnscope heads --text "the financial bank is located on river bank" --out runs/bank',
    'attnscope heads --text "Mary saw John, and John gave Mary a book" --query last --key Mary --top 5',
    "attnscope heads --file README.md --truncate right --sort induction --top 5",
    "attnscope heads --file README.md --truncate right --sort keys_95 --metrics streaming_mass_32,streaming_mass_128",
    "attnscope batch corpus.jsonl --text-field body --tables heads --out runs/corpus && "
    "attnscope heads runs/corpus --sort sink --figures depth --out runs/depth",
    'attnscope heads "the financial bank is located on" --generate 8 --sort lookback --top 5',
)


ANSWER = "add --generate N, or --answer TEXT"


class MeasuredEntries(Entries):
    """What is read of the heads, and measured."""

    metrics: Annotated[
        str | None,
        "More metrics, by commas: keys_95, streaming_mass_32, _128, _512.",
        "METRICS",
        Option(autocompletion=metric_names),
    ] = None

    @property
    def named(self) -> list[str]:
        """Their ids. Raises UsageError for a name that is none."""
        from attnscope.metrics.metrics import metric_ids

        return metric_ids([part.strip() for part in (self.metrics or "").split(",") if part.strip()])

    def check_answered(self, otherwise: str) -> None:
        """Raise UsageError for a metric of an answer, which there is none of."""
        from attnscope.metrics.metrics import LOOKBACKS

        for name in self.named:
            if name in LOOKBACKS:
                raise UsageError(f"--metrics {name} needs an answer", otherwise)

    def over_layers(self, order: str) -> list[str]:
        """The metrics of the figure of depth: those that were named, behind the one that sorts where it is one."""
        from attnscope.metrics.metrics import COLUMNS, order_of

        return list(dict.fromkeys(metric for metric in (order_of(order)[0], *self.named) if metric not in COLUMNS))

    def of_panels(self, sort: str | None) -> list[str]:
        """The metrics of the figure of that name: those that were named, behind the one that --sort names; or none."""
        return self.over_layers(sort) if sort else self.named

    def ids(self, sort: str | None) -> tuple[str, ...]:
        """The metrics that are measured where heads are sorted so. Raises UsageError for a name that is none."""
        from attnscope.metrics.metrics import with_asked

        return with_asked(self.metrics, sort or "layer")


class Ranking(Top, panel="What to ask"):
    """The order of the heads, and how many are printed."""

    sort: Annotated[
        str | None,
        "Metric to rank by, or layer; -METRIC: smallest first (default: focus, or the first that the heads have; with "
        "--key mass). `attnscope metrics` lists them.",
        "METRIC",
        Option(autocompletion=metric_names),
        FIRST,
    ] = None
    ascending: Annotated[bool, "Another name of --sort=-METRIC.", SETTING, HIDDEN] = False
    FEW = 20
    top: Annotated[
        str | None,
        "Heads printed and drawn: a number, or all (default: 20 printed, in a pipe all; 8 with a role drawn). "
        "heads.csv has all.",
    ] = None

    def check(self, asked: TextRun, entries: MeasuredEntries, question: Question) -> None:
        """Raise UsageError for a metric of keys or of an answer where there is none.

        A run that is repeated may have an answer.
        """
        from attnscope.metrics.metrics import LOOKBACKS, MASS, order_of

        metric = order_of(self.sort)[0] if self.sort else ""
        if metric == MASS.id and question.key is None:
            raise UsageError("--sort mass needs keys", "name them with --key")
        if asked.answered or (asked.from_ is not None and not asked.has_text):
            return
        if metric in LOOKBACKS:
            raise UsageError(f"--sort {self.sort} needs an answer", ANSWER)
        entries.check_answered(ANSWER)

    def order(self, seen: Observation) -> str:
        """The metric, by default one that the heads have; with a minus where the smallest come first."""
        sort = self.sort or seen.ranked_by or "layer"
        return f"-{sort.removeprefix('-')}" if self.ascending else sort


class RankedHeads(Results):
    """A table to stdout; tables, figures and a manifest to --out."""

    files = (*PICTURES, *TABLES)
    out: Annotated[
        Path | None, "Folder for tables and figures, or a file for the table or one picture.", "DIR|FILE"
    ] = None


GROUPS = (TextRun, MeasuredEntries, Question, Ranking, RankedHeads, Relations, Drawing, Show)


def over_texts(context: Context, folder: Path, given: dict[str, Any]) -> int:
    """The heads of a dataset that `attnscope batch` wrote, ranked over its texts."""
    from attnscope.cli.dataset import DatasetAsk, dataset_heads

    ranking, entries, question = build(Ranking, given), build(MeasuredEntries, given), build(Question, given)
    sort = f"-{ranking.sort.removeprefix('-')}" if ranking.sort and ranking.ascending else ranking.sort
    asked = fill(DatasetAsk, entries, question, sort=sort, top=ranking, metrics=entries.named)
    return dataset_heads(context, folder, asked, build(RankedHeads, given), build(Drawing, given))


def is_dataset(folder: Path) -> bool:
    """Whether a folder is one that `attnscope batch` has filled."""
    from attnscope.corpus import folder as kept

    return kept.is_dataset(folder)


@with_options(*GROUPS, of_folder=over_texts, folders=is_dataset)
def heads(
    asked: TextRun,
    entries: MeasuredEntries,
    question: Question,
    ranking: Ranking,
    printing: RankedHeads,
    relations: Relations,
    drawing: Drawing,
    showing: Show,
) -> int:
    """Rank every attention head by its behaviour on a text.

    The table has a row per head, in the order of --sort. With --query, every number is a mean over those queries.
    With --key, the table has each head's weight on those keys. The strongest relation is the largest weight above
    uniform attention; it ignores the first token. --out writes tables, figures and a manifest. --show draws heads
    in the terminal.

    In place of TEXT, the folder of `attnscope batch` ranks heads by their means over its texts, with intervals.
    There --query and --key name two spans. The folder of a run repeats that run.
    """
    # What can be refused without a model is refused before one is loaded.
    entries.check(relations.group, drawing.scale)
    ranking.check(asked, entries, question)
    measured, kinds = entries.ids(ranking.sort), drawing.kinds(question)
    if kinds and not printing.draws:
        raise UsageError("--figures are files", "name a folder with --out DIR")
    if printing.file is not None and printing.draws:
        kinds = kinds_of_file(kinds, entries.select, printing.file)
    over = over_picture(asked, entries, question, drawing) and "picture" in (kinds or ())
    format = output.wanted_format(printing.format)

    from attnscope.observe.request import Request

    groups = (asked, entries, question, ranking, printing, relations, drawing)
    options = of_run("heads", *groups)
    style = partial(drawing.figure_style, command_line("heads", *groups))
    # Kept is what will be printed or drawn, and no more: relations and maps are the most of a pass's memory.
    maps: MapFields = {"maps": "all"} if printing.draws else showing.maps(style, stream(only=False))
    maps = {**drawing.maps(), **maps}
    keep = Request(
        view=entries.view(),
        metrics=measured,
        relations=printing.out is not None and printing.file is None,
        top_k=relations.keys_per_query,
        group=relations.group,
        per_token=over,
        **question.asks(),
        **maps,
    )
    seen = observe_text(asked, entries, printing, options, keep)
    order = ranking.order(seen)
    shown = seen.kept_heads(order)[: ranking.shown]
    # Files first: a reader of stdout may leave early.
    drew: list[str] = []
    if printing.out:
        # By default heads with a role are drawn one by one, with --figures heads all.
        named = seen.kept_heads() if entries.select else shown if ranking.top else None
        written = export_text(
            seen,
            printing,
            options=options,
            heads=None if named is None else [head.name for head in named],
            sort=order,
            top=ranking.shown,
            min_weight=relations.min_weight,
            depth=entries.over_layers(order),
            metrics=entries.of_panels(ranking.sort),
            figures=kinds if printing.draws else (),
            style=style(),
        )
        if printing.folder and (kinds is None or "heads" in kinds) and not entries.select:
            drew = drew_lines(seen, sum(path.parent.name == "heads" for path in written), ranking.top is not None)
    _print(seen, shown, order, ranking, printing, format)
    if showing.show:
        draw_in_terminal(seen, shown if entries.select else shown[:FEW], style(), stream(only=False))
    output.log_lines(drew, printing.quiet)
    return report_checks(seen, printing.quiet)


def drew_lines(seen: Observation, drawn: int, first: bool) -> list[str]:
    """How many heads have a picture of their own, and how to get the others; first: whether --top says how many."""
    from attnscope.metrics.roles import NONE, OTHER

    every, roles = len(seen.heads), sum(head.role not in (NONE, OTHER) for head in seen.heads)
    which = "the first" if first else "those with a role here" if drawn == roles else "of each role the strongest"
    which = which if drawn else "none has a role here"
    rest = "--figures heads draws all, --select L1H4 draws one"
    return [f"drew {drawn} of {every} heads one by one, {which}; {rest}"] * (drawn < every)


def _print(
    seen: Observation, shown: Sequence[Head], order: str, ranking: Ranking, printing: Results, format: str
) -> None:
    """The table on stdout; on stderr what its columns mean, what it leaves out and what was not measured.

    shown: the heads that a person sees.
    """
    from attnscope.observe.records import unranked

    lines = [*unranked(seen.every.scores, seen.every.order(None), ranking.sort), *missing_support(seen)]
    if format != "table":
        output.emit_data(seen.table(order, ranking.limit(format)), format, printing.spreadsheet)
    else:
        from attnscope.cli.head_tables import heads_table, legend, without_attention

        table = heads_table(seen, shown, order, output.width())
        output.show(table.sheet)
        output.log_lines(legend(table, shown), printing.quiet)
        rest = ranking.rest(len(shown), len(seen.kept_heads()), "heads shown")
        lines = [*rest, *without_attention(seen), *lines]
    output.log_lines(lines, printing.quiet)


def missing_support(seen: Observation) -> list[str]:
    """What the text is too short, or repeats too little, to show in some layers; and what shows it."""
    from attnscope.metrics.roles import NEEDED_ROWS, not_shown, unsupported
    from attnscope.model.selection import as_ranges, has_decoder_heads

    if seen.of_two_texts:
        return []  # roles are of one text
    queries, of_text = seen.chosen.query, "text " * (seen.atlas is not None)  # an atlas needs no text for its roles
    if queries and len(queries.positions) < NEEDED_ROWS:
        return [f"no {of_text}roles: they need at least {NEEDED_ROWS} queries, got {len(queries.positions)}"]
    where: dict[str, list[tuple[int, str]]] = {}
    for key, support in seen.support.items():
        # Each role has its reason; where many roles have several, their names say more.
        missing, who_has = not_shown(support, key.stack), "this text has" if queries is None else "these queries have"
        names = ", ".join(name for roles in missing.values() for name in roles)
        reasons = [f"{names}: {who_has} too few tokens, or too few that are repeated"]
        for line in reasons if len(missing) > 1 else unsupported(support, who_has, key.stack):
            where.setdefault(line, []).append((key.layer, seen.visible[key]))
    lines = []
    for line, places in where.items():
        stacks = ", ".join(dict.fromkeys(stack for _, stack in places))
        layers = f" in layers {as_ranges([layer for layer, _ in places])} ({stacks})" * (
            len(places) < len(seen.support)
        )
        lines.append(f"{'text roles ' * bool(of_text)}not judged{layers}: {line}")
    if (
        lines
        and not seen.atlas
        and "source" not in seen.facts
        and "modules" not in seen.facts["model"]
        and all(has_decoder_heads(key.stack) for key in seen.support)
    ):
        name = seen.facts["model"]["name"]
        lines[-1] += f"; attnscope scan {name} --out DIR finds roles without a text, --atlas DIR shows them"
    return lines


def over_picture(asked: TextRun, entries: MeasuredEntries, question: Question, drawing: Drawing) -> bool:
    """Whether the weights on a picture are drawn over it. Raises UsageError where that was named and cannot be."""
    why = "no --picture was given" if not asked.picture else ""
    why = why or "--key alone asks who looks at a token" * (question.key is not None and question.query is None)
    why = why or "it shows weights" * (entries.weights != "softmax")
    if why and "picture" in (drawing.kinds(question) or ()):
        raise UsageError(f"--figures picture shows where tokens look in a picture: {why}", "leave it out")
    return not why

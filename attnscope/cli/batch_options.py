"""The options of `attnscope batch` that no other command has, and what the library makes of them all.

`--ray [ADDRESS]`: an option whose value may be left out, which Typer has no word for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from attnscope.cli.figure_options import FIGURES, Drawing, Rehearsal, names
from attnscope.cli.heads import MeasuredEntries
from attnscope.cli.help import PanelCommand
from attnscope.cli.option_groups import FIRST, HELD, SETTING, OptionGroup, changed, command_line, fill, held
from attnscope.cli.options import (
    MOST_TOKENS,
    EngineName,
    GlobalTokens,
    Implementation,
    Loading,
    Question,
    Relations,
    Tokens,
)
from attnscope.cli.output import Printing, Spreadsheet
from attnscope.errors import UsageError
from attnscope.utils.folders import CORPORA

if TYPE_CHECKING:
    import typer

    from attnscope.corpus.folder import Job
    from attnscope.corpus.records import Corpus
    from attnscope.corpus.run import Cluster
    from attnscope.observe.atlas import HeadNames

# What is no address is the next argument, so that `--ray corpus.jsonl` reads the corpus.
ADDRESS = re.compile(r"auto|local|ray://\S+|([\w.-]+|\[[0-9A-Fa-f:]+\]):\d{1,5}")


class BatchCommand(PanelCommand):
    """A command that reads a plain `--ray` as one with an empty address."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, list(with_value(args)))


def with_value(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments, `--ray` with its address as `--ray=ADDRESS`, without one as `--ray=`.

    >>> list(with_value(["--ray", "corpus.jsonl", "--ray", "auto"]))
    ['--ray=', 'corpus.jsonl', '--ray=auto']
    """
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            yield argument
            yield from rest
        elif argument != "--ray":
            yield argument
        else:
            following = next(rest, None)
            address = following if following is not None and ADDRESS.fullmatch(following) else ""
            yield f"--ray={address}"
            if following is not None and not address:
                yield from with_value([following, *rest])


def address(given: str | None) -> str | None:
    """The address behind --ray: None without it, "" for Ray's own default. Raises UsageError for what is none.

    A file of options says `ray: true` for the default, and `ray: false` for none.
    """
    if given is None or given == "false":
        return None
    if given in ("", "true"):
        return ""
    if not ADDRESS.fullmatch(given):
        raise UsageError(f"--ray: expected auto, local, ray://HOST:PORT or HOST:PORT, got {given!r}", "see --help")
    return given


TABLES = ("heads", "relations")


class Sources(GlobalTokens, Tokens):
    """Which texts, and how they are read."""

    sources: Annotated[list[str], "Files, folders, globs; - reads stdin.", "SOURCE", Argument(), HELD]
    text_field: Annotated[str | None, "Field of the text (default: text).", "NAME", FIRST, HELD] = None
    pair_field: Annotated[str | None, "Field of the second text of a pair.", "NAME", HELD] = None
    target_field: Annotated[
        str | None, "Field of the decoder text (default: the model's own output).", "NAME", HELD
    ] = None
    answer_field: Annotated[str | None, "Field of the answer to its text.", "NAME", HELD] = None
    answer: Annotated[str | None, "Answer to append to every text.", HELD, SETTING] = None
    audio_field: Annotated[
        str | None,
        "Field with the path of a sound file, from the folder of the corpus; replaces the text.",
        "NAME",
        HELD,
    ] = None
    picture_field: Annotated[
        str | None, "Field with the path of a picture for the text, or a list of paths.", "NAME", HELD
    ] = None
    id_field: Annotated[str | None, "Field of the id (default: id).", "NAME", HELD, SETTING] = None
    input_format: Annotated[
        Literal["txt", "json", "jsonl", "csv", "tsv", "parquet"] | None,
        "Format of stdin, or of files with another suffix.",
        HELD,
    ] = None
    whole: Annotated[bool, "Read a .txt file as one text, not as one text per line.", HELD, SETTING] = False
    max_tokens: Annotated[
        int | None, "Cut texts to N tokens, on the right by default.", Option(min=1, max=MOST_TOKENS), HELD
    ] = None

    def __post_init__(self) -> None:
        of_text = ("picture-field", "text-field", "chat", "max-tokens")
        self._refuse("audio-field", *of_text, why="a sound is read instead of the text")
        others = ("audio-field", "picture-field", "answer-field", "answer", "chat")
        self._refuse("pair-field", *others, why="a pair of texts is read alone")
        self._refuse("picture-field", "truncate", "max-tokens", why="a text with pictures is not cut")
        if self.answer_field is not None and self.answer is not None:
            raise UsageError("each record gives its answer, and one of all texts was given", "leave out {answer}")
        if self.answered and (self.truncate or self.max_tokens):
            raise UsageError(
                "an answer needs the whole text, and the text would be cut", "leave out {truncate} and {max_tokens}"
            )
        if self.answer is not None and not self.answer.strip():
            raise UsageError("the answer is empty", "give one with at least one word")

    @property
    def answered(self) -> bool:
        """Whether an answer follows each text."""
        return (self.answer_field, self.answer) != (None, None)

    def _refuse(self, option: str, *others: str, why: str) -> None:
        """Raise UsageError where an option was given with one of these."""
        given = [name for name in (option, *others) if getattr(self, name.replace("-", "_"))]
        if option in given[:-1]:
            raise UsageError(f"--{option} and --{given[1]} were both given: {why}", f"leave out --{given[1]}")

    def corpus(self) -> Corpus:
        """How the corpus is read."""
        from attnscope.corpus.records import Corpus

        return fill(Corpus, self, sources=tuple(self.sources), format=self.input_format)


class Questions(Question):
    """Which tokens of every text are asked about."""

    query_field: Annotated[str | None, "Field with the queries of each record.", "NAME", HELD] = None
    key_field: Annotated[str | None, "Field with the keys of each record.", "NAME", HELD] = None
    spans: Annotated[
        list[str] | None,
        "Spans to measure the weight on each other: subject=Mary, or a name of --define or of the record.",
        "NAME[=TOKENS]",
        HELD,
    ] = None

    def __post_init__(self) -> None:
        for name in ("query", "key"):
            if getattr(self, name) is not None and getattr(self, f"{name}_field") is not None:
                raise UsageError(f"--{name} and --{name}-field were both given", "give one of them")

    @property
    def span_names(self) -> tuple[str, ...]:
        """The names of --spans. Raises UsageError for what is none."""
        from attnscope.inputs.tokens import names_of_spans

        return names_of_spans(self.spans or ())


class Dataset(Drawing, MeasuredEntries, Relations, Spreadsheet, Printing):
    """What is written of every text."""

    of_folders = CORPORA
    tables: Annotated[str, "Tables, by commas: heads, relations.", "TABLES", FIRST, HELD] = "heads,relations"
    atlas: Annotated[Path | None, SETTING] = None
    image: Annotated[Literal["png", "svg", "pdf"], HELD, SETTING] = "png"
    weights: Annotated[Literal["softmax", "scores", "value"], HELD] = "softmax"
    metrics: Annotated[str | None, HELD] = None
    figures: Annotated[str | None, "Figures, by commas: overview, layers, heads, metrics.", "KINDS", FIRST, HELD] = None
    format: Annotated[Literal["parquet", "csv", "jsonl"], "Format of the tables.", HELD] = "parquet"
    to_stdout: Annotated[Literal["jsonl"] | None, "Print one JSON object per text, and write no folder.", FIRST] = None
    matrices: Annotated[bool, "Write whole matrices too, as safetensors: float16, signed ones float32.", HELD] = False
    keep_text: Annotated[bool, "Keep the text itself in the table of texts.", HELD, SETTING] = True
    summary: Annotated[bool, "Write a table of means over the texts too, with intervals."] = False
    shard_size: Annotated[
        int, "Approximate size of a shard in MiB.", "MIB", Option(min=1, max=2**20), HELD, SETTING
    ] = 64

    def __post_init__(self) -> None:
        Relations.__post_init__(self)
        Printing.__post_init__(self)
        Drawing.__post_init__(self)
        self.check(self.group, self.scale)
        if self.matrices and self.weights != "softmax":
            raise UsageError(
                "--matrices writes softmax weights alone", f"leave out --weights {self.weights}, or --matrices"
            )
        if self.spreadsheet and self.format != "csv":
            raise UsageError("--spreadsheet is for csv alone", "add --format csv")
        if self.summary and self.to_stdout:
            raise UsageError("--summary is of a whole corpus, and --to-stdout prints text by text", "give --out DIR")
        _ = self.table_names, self.figure_kinds

    @property
    def looks(self) -> dict[str, object]:
        """The settings of pictures that are not as they come, which all of a dataset's share."""
        return {option.spelled: value for option, value in changed(self, Drawing) if option.is_setting}

    @property
    def table_names(self) -> tuple[str, ...]:
        """The tables of --tables, in a fixed order."""
        return names(self.tables, TABLES, "--tables")

    @property
    def figure_kinds(self) -> tuple[str, ...]:
        """The kinds of --figures, in a fixed order."""
        return names(self.figures, FIGURES, "--figures")


class Work(Rehearsal):
    """How a corpus is worked through."""

    batch_tokens: Annotated[
        int | None, "Tokens per batch (default: by memory).", Option(min=1, max=MOST_TOKENS), SETTING
    ] = None
    strict: Annotated[bool, "Stop at the first item that fails.", SETTING] = False


class Ray(OptionGroup, panel="Model and engine"):
    """On how many machines."""

    ray: Annotated[
        str | None,
        "Run on Ray: auto, local, HOST:PORT, ray://HOST:PORT; without a value, Ray's own default.",
        "[ADDRESS]",
    ] = None
    num_actors: Annotated[int, "With --ray: number of models at once.", Option(min=1, max=10_000), SETTING] = 1
    num_gpus_per_actor: Annotated[float, "With --ray: GPUs per model.", Option(min=0, max=1_000), SETTING] = 0

    def cluster(self) -> Cluster | None:
        """Where the run goes when --ray was given."""
        where = address(self.ray)
        if where is None:
            return None
        from attnscope.corpus.run import Cluster

        return Cluster(where, self.num_actors, self.num_gpus_per_actor)


class BatchRun(Ray, Work, Implementation, EngineName, Dataset, Questions, Sources, Loading):
    """A corpus, a model, and what is written of each text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Questions.__post_init__(self)
        Sources.__post_init__(self)
        if (self.out is None) == (self.to_stdout is None) and not self.dry_run:
            raise UsageError("expected one place to write to", "give --out DIR or --to-stdout jsonl")
        if not self.answered:
            self.check_answered("give it with {answer_field=NAME}")
        if self.summary and not (self.span_names or "heads" in self.table_names):
            raise UsageError("--summary is of heads or spans, and neither is written", "add heads to --tables")
        if self.to_stdout and (self.figures or self.matrices or address(self.ray) is not None):
            raise UsageError("--to-stdout prints rows alone", "give --out DIR for figures, weights and --ray")

    def named_by(self) -> HeadNames | None:
        """What names the model's heads."""
        from attnscope.model.loading import locate
        from attnscope.observe.atlas import atlas_of

        return atlas_of(locate(self.load_options()), self.atlas)

    def resolved(self, atlas: HeadNames | None) -> BatchRun:
        """The same with heads in place of every @role, as the folder's options have them."""
        if "@" not in (self.select or ""):
            return self
        from attnscope.model.selection import resolve_roles

        return replace(self, select=resolve_roles(self.select or "", atlas.by_role() if atlas else None))

    def held(self) -> dict[str, object]:
        """The options that change the rows, each spelled one way: what an output folder is held to."""
        from attnscope.metrics.metrics import LENGTHS

        asked = ",".join(name for name in LENGTHS if name in self.named) or None
        weights = None if self.weights == "softmax" else self.weights  # as a folder has it that was made without it
        spelled = {"tables": ",".join(self.table_names), "figures": ",".join(self.figure_kinds)}
        return held(self) | spelled | {"metrics": asked, "weights": weights} | self.looks

    def job(self, atlas: HeadNames | None = None) -> Job:
        """What a worker needs to know."""
        from attnscope.api.batch import BatchOptions, named_heads

        about = {key: value for key, value in self.held().items() if key != "sources"} | {"atlas": named_heads(atlas)}
        pictures = None
        if self.figure_kinds:
            from attnscope.export.drawing import Pictures

            pictures = Pictures(self.figure_kinds, self.figure_style(command_line("batch", self)))
        asked = fill(
            BatchOptions,
            self,
            tables=self.table_names,
            top_k=self.keys_per_query,
            define=self.names(),
            spans=tuple(self.spans or ()),
        )
        job = asked.job(self.load_options(), about, pictures, atlas)
        return replace(job, request=replace(job.request, **self.maps()))

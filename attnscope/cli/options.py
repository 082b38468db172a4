"""The options that commands share, each declared once, in the groups that commands take.

A group's panel is the section of `--help all` that lists its options. Those that most people type are marked FIRST: the
first section lists them, with the options of groups that have no panel, and a plain `--help` shows that section alone.
"""

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from attnscope.cli.completion import models, offer
from attnscope.cli.groups import Mark, Unlisted, fill
from attnscope.errors import UsageError

if TYPE_CHECKING:
    from attnscope.ask import Ask, How, Text
    from attnscope.figures import Style
    from attnscope.keep.request import MapFields, Request, TokenFields
    from attnscope.keep.view import View
    from attnscope.model.options import LoadOptions

# The sections of --help in their order; a group without a panel is of the first.
PANELS = (
    *("Options", "Corpus", "Text", "Question", "Page", "Attention", "Relations", "Dataset", "Files"),
    *("Figures", "Engine", "Model", "Ray", "Messages"),
)
FIGURES = ("overview", "layers", "heads", "metrics")  # of every run with --out
FEW = 2  # sequences of a rehearsal: as many as a mean over others takes
FIRST, HELD, UNRECORDED = Mark.FIRST, Mark.HELD, Mark.UNRECORDED


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Which model, and how it is read."""

    panel = "Model"
    model: Annotated[
        str,
        Option("-m", help="demo, a folder, a GGUF file, or a hub id.", metavar="NAME", autocompletion=models),
        FIRST,
        HELD,
    ] = "demo"
    device: Annotated[
        str,
        Option(
            help="auto, cpu, cuda, cuda:N or mps.",
            metavar="DEVICE",
            autocompletion=offer("auto", "cpu", "cuda", "mps"),
        ),
        FIRST,
        HELD,
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Option(help="auto: the checkpoint's on an accelerator, float32 on CPU."),
        HELD,
    ] = "auto"
    revision: Annotated[str | None, Option(help="Branch, tag or commit on the hub.", metavar="REVISION"), HELD] = None
    offline: Annotated[bool, Option(help="Never ask the network.")] = False
    trust_remote_code: Annotated[bool, Option(help="Run code that the model brings.")] = False
    base: Annotated[
        str | None,
        Option(help="The model that an adapter changes (default: what its config names).", metavar="NAME"),
        HELD,
    ] = None
    task: Annotated[
        Literal["auto", "decoder", "encoder", "seq2seq"] | None,
        Option(help="What the model is read as (default: auto, as its config says)."),
        HELD,
    ] = None

    def load_options(self) -> LoadOptions:
        """What `load` takes."""
        from attnscope.model.options import LoadOptions

        return fill(LoadOptions, self)


@dataclass(frozen=True, kw_only=True)
class Loading(Checkpoint):
    """Where its weights go."""

    device_map: Annotated[
        str | None, Option(help="`auto` spreads the model over several devices.", metavar="MAP"), HELD
    ] = None
    quantize: Annotated[Literal["8bit", "4bit"] | None, Option(help="Load with bitsandbytes."), HELD] = None
    adapter: Annotated[
        Literal["merged", "beside"] | None,
        Option(
            help="merged: added to its base's weights (default, but for quantized ones); beside: kept beside them.",
            metavar="WHERE",
        ),
        HELD,
    ] = None
    allow_pickle: Annotated[bool, Option(help="Read weights that are not safetensors.")] = False


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """How a text becomes tokens."""

    panel = "Text"
    chat: Annotated[bool, Option(help="Apply the chat template: a user turn, or JSON messages."), FIRST, HELD] = False
    truncate: Annotated[Literal["left", "right"] | None, Option(help="Cut a text that is too long."), HELD] = None


@dataclass(frozen=True, kw_only=True)
class OneText(Tokens):
    """One text, and where it comes from."""

    given: Annotated[str | None, Argument(help="The text, in quotes; - reads stdin.", metavar="TEXT"), UNRECORDED] = (
        None
    )
    text: Annotated[str | None, Option("-t", help="The text; - reads stdin.", metavar="TEXT"), FIRST, UNRECORDED] = None
    file: Annotated[str | None, Option("-f", help="A UTF-8 file; - reads stdin.", metavar="FILE"), FIRST] = None
    ids: Annotated[str | None, Option(help="A file of token ids; - reads stdin.", metavar="FILE")] = None

    def __post_init__(self) -> None:
        named = [name for name, one in self._places.items() if one is not None]
        if len(named) > 1:
            raise UsageError(f"{named[0]} and {named[1]} were both given", "give one of them")
        if self.ids is not None and self.chat:
            raise UsageError("--chat is about a text, and --ids gives tokens", "leave out one of them")
        if self.given and os.path.isfile(self.given):
            raise UsageError(
                f"TEXT is the name of a file, {self.given}",
                f"--file {self.given} reads it, --text {self.given} reads the name",
            )
        if self.given and os.path.isdir(self.given):
            raise UsageError(f"TEXT is the name of a folder, {self.given}", f"--text {self.given} reads the name")

    @property
    def _places(self) -> dict[str, str | None]:
        return {"TEXT": self.given, "--text": self.text, "--file": self.file, "--ids": self.ids}

    @property
    def has_text(self) -> bool:
        """Whether a text was named, or a place to read it."""
        return any(one is not None for one in self._places.values())


@dataclass(frozen=True, kw_only=True)
class ModelText(OneText, Loading):
    """One text and the model that reads it."""

    @property
    def how(self) -> How:
        """How the text is read."""
        return {"chat": self.chat, "truncate": self.truncate}

    def ask(self, text: Text, selected: Selected, keep: Request) -> Ask:
        """What is asked of the text."""
        from attnscope.ask import Ask

        return replace(Ask(text, keep, **self.how), select=selected.select, atlas=selected.atlas)


@dataclass(frozen=True, kw_only=True)
class ModelTexts(ModelText):
    """One text and the model that reads it, and what an encoder-decoder's decoder reads beside it."""

    panel = "Text"
    target: Annotated[
        str | None,
        Option(
            help="What an encoder-decoder's decoder reads (default: what the model makes of the text).", metavar="TEXT"
        ),
        HELD,
    ] = None
    audio: Annotated[
        str | None,
        Option(help="A file of sound, for a model that reads sound (Whisper); - reads stdin.", metavar="FILE"),
    ] = None
    picture: Annotated[
        list[str] | None,
        Option(help="A picture that a vision-language model reads with the text; may be repeated.", metavar="FILE"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.picture and (self.ids is not None or self.audio is not None):
            raise UsageError("--picture stands beside a text, and another thing was given", "leave out one of them")
        if self.audio is not None and self.chat:
            raise UsageError("--chat is about a text, and --audio gives a sound", "leave out one of them")

    @property
    def _places(self) -> dict[str, str | None]:
        return super()._places | {"--audio": self.audio}

    @property
    def how(self) -> How:
        return {**super().how, "target": self.target, "picture": self.picture or None}


@dataclass(frozen=True, kw_only=True)
class EngineName:
    """Who computes the attention."""

    panel = "Engine"
    engine: Annotated[
        Literal["auto", "eager", "fused", "tiles", "numba", "triton"],
        Option(
            help="eager: the model's own matrices, bit for bit; fused: none is made; auto: the faster one that gives "
            "what is asked and fits the memory."
        ),
        Unlisted(("tiles", "numba", "triton")),  # fused, computed in that one way
        FIRST,
        HELD,
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class Memory(EngineName):
    """Who computes the attention, and in how much memory."""

    panel = "Engine"
    memory: Annotated[
        str | None,
        Option(help="What a layer's matrices may take, e.g. 4GB (default: half of what is free).", metavar="SIZE"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EngineChoice(Memory):
    """Who computes the attention, and whether it is checked."""

    listen: Annotated[bool, Option(help="Fused: keep the model's own attention call, too.")] = False
    positions: Annotated[
        int | None, Option(help="Extend the model to so many positions, by linear rope scaling.", metavar="N")
    ] = None
    verify: Annotated[bool, Option(help="Check every layer against the oracle, as `parity` does.")] = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What follows the text."""

    panel = "Text"
    generate: Annotated[
        int | None, Option(help="Let the model go on for up to N tokens, greedily, and read them too.", metavar="N")
    ] = None
    answer: Annotated[
        str | None,
        Option(
            help="Read this behind the text, as its answer; begin it with a space where one belongs.", metavar="TEXT"
        ),
        UNRECORDED,
    ] = None


@dataclass(frozen=True, kw_only=True)
class TextRun(EngineChoice, Answer, ModelTexts):
    """One text through one model, or a run that was written down."""

    panel = "Text"
    given: Annotated[str | None, Argument(help="The text, in quotes, or a run's folder; - reads stdin.")] = None
    from_: Annotated[
        Path | None,
        Option("--from", help="Repeat a run: its manifest.json or folder; options given beside it win.", metavar="RUN"),
        UNRECORDED,
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        from attnscope.text.answer import check_answer

        check_answer(self.generate, self.answer, self.truncate if self.audio is None else None)
        if self.answer is not None and self.ids is not None:
            raise UsageError("--answer follows a text, and --ids gives tokens", "leave out one of them")
        if self.answered and self.from_ is not None and not self.has_text:
            raise UsageError(
                "the tokens of a run are read as they are", "leave out --generate or --answer, or add --text"
            )

    @property
    def how(self) -> How:
        answer: How = {"generate": self.generate, "answer": self.answer}
        return {**super().how, **answer, "engine": self.engine, "memory": self.memory, "listen": self.listen}

    @property
    def answered(self) -> bool:
        """Whether an answer is to follow the text."""
        return self.generate is not None or self.answer is not None


@dataclass(frozen=True, kw_only=True)
class Selected:
    """Which heads."""

    panel = "Attention"
    select: Annotated[
        str | None,
        Option("-s", help="Heads: 27, 27.3, L27H3, 0-3.*, last (layer), *.0, @ROLE; by commas.", metavar="HEADS"),
        FIRST,
        HELD,
    ] = None
    atlas: Annotated[
        Path | None,
        Option(
            help="What `scan` wrote: it says which heads @ROLE means (default: atlas/ in the model's folder).",
            metavar="DIR",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Query:
    """Which tokens look."""

    panel = "Question"
    query: Annotated[
        str | None,
        Option(help="Queries: 8, 3-7, last (token), bank, bank#2; all: `attnscope tokens -h`.", metavar="TOKENS"),
        FIRST,
        HELD,
    ] = None


@dataclass(frozen=True, kw_only=True)
class Question(Query):
    """Which tokens are asked about."""

    panel = "Question"
    key: Annotated[str | None, Option(help="Keys, in the same words.", metavar="TOKENS"), FIRST, HELD] = None
    define: Annotated[
        list[str] | None,
        Option(help="A name for tokens, as subject=Mary; may be repeated.", metavar="NAME=TOKENS"),
        HELD,
    ] = None

    @property
    def meanings(self) -> list[str]:
        """What names mean, as `subject=Mary`."""
        return list(self.define or ())

    def asks(self) -> TokenFields:
        """The fields of `Request` that say which tokens are meant. Raises UsageError for what no text makes right."""
        from attnscope.text.tokens import check_expression, defined

        groups = defined(self.meanings)
        for expression in (self.query, self.key):
            if expression is not None:
                check_expression(expression, groups)
        return {"query": self.query, "key": self.key, "define": groups}


@dataclass(frozen=True, kw_only=True)
class Heads(Selected):
    """Which heads, one by one or averaged."""

    by: Annotated[Literal["kv"] | None, Option(help="Average the heads that share a kv head."), HELD] = None


@dataclass(frozen=True, kw_only=True)
class Entries(Heads):
    """What is read of the heads."""

    weights: Annotated[
        Literal["softmax", "scores", "value"],
        Option(help="Weights; logits before the softmax; or norms of what keys write, A |v W_O|."),
    ] = "softmax"

    def view(self) -> View:
        """How entries are read."""
        from attnscope.keep.view import View

        return View(self.weights, self.by == "kv")

    def check(self, group: str | None = None, scale: str = "linear") -> None:
        """Raise UsageError where --group or --scale asks of logits or norms what only weights can give."""
        if group and self.weights != "softmax":
            what = "logits" if self.weights == "scores" else "norms"
            raise UsageError(f"{what} of several keys cannot be summed into one", "use --weights softmax with --group")
        if scale != "linear" and self.weights == "scores":
            raise UsageError(
                f"logits can be negative and have no {scale} scale", "use --scale linear with --weights scores"
            )


def count(text: str | int) -> int | None:
    """The number that a person wrote; `all` is None. Raises ValueError."""
    if text == "all":
        return None
    if not re.fullmatch(r"-?[0-9]{1,999}", str(text)):
        raise ValueError(f"expected a number or all, got {str(text)[:20]!r}")
    return min(int(text), sys.maxsize)


@dataclass(frozen=True, kw_only=True)
class Top:
    """How much of a table is shown."""

    top: Annotated[
        int | None,
        Option(help="Rows printed on a terminal: a number, or all.", metavar="N|all", parser=count),
    ] = 40

    def __post_init__(self) -> None:
        if self.top is not None and self.top < 1:
            raise UsageError(f"--top takes a number from 1; {self.top} came", "write --top 20, or --top all")


@dataclass(frozen=True, kw_only=True)
class Seed:
    """What random numbers are drawn from."""

    seed: Annotated[int, Option(min=0, max=2**63 - 1, help="Seed of random numbers.", metavar="N")] = 0


@dataclass(frozen=True, kw_only=True)
class OtherSide:
    """What a text or a model stands beside."""

    compare_text: Annotated[str | None, Option(help="Another text beside it.", metavar="TEXT")] = None
    compare_model: Annotated[
        str | None, Option(help="Another model beside it.", metavar="NAME", autocompletion=models)
    ] = None

    def check_other_side(self) -> None:
        """Raise UsageError where both were given."""
        if self.compare_text is not None and self.compare_model is not None:
            raise UsageError("--compare-text and --compare-model were both given", "give one of them")


@dataclass(frozen=True, kw_only=True)
class ManyTexts:
    """A file of texts, for what is said of many."""

    panel = "Corpus"
    texts: Annotated[str | None, Option(help="Texts, one per line or record.", metavar="FILE"), FIRST] = None


@dataclass(frozen=True, kw_only=True)
class Sampled(ManyTexts):
    """How many sequences stand behind a number."""

    panel = "Corpus"
    sequences: Annotated[int, Option(min=2, help="Sequences per probe; intervals need 32.", metavar="N"), FIRST] = 64


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Whether anything is done."""

    dry_run: Annotated[bool, Option(help="Say what would be done, and its cost."), FIRST] = False


@dataclass(frozen=True, kw_only=True)
class Sequences(Rehearsal, Sampled):
    """Sequences that are drawn, or counted alone."""

    @property
    def drawn(self) -> int:
        """How many are drawn: a rehearsal counts all, and draws few."""
        return min(self.sequences, FEW) if self.dry_run else self.sequences


@dataclass(frozen=True, kw_only=True)
class Relations:
    """Which keys of a query are listed."""

    panel = "Relations"
    top_k: Annotated[
        str,
        Option(help="Keys that are kept of every query, strongest first: a number, or all.", metavar="N|all"),
        HELD,
    ] = "5"
    min_weight: Annotated[float | None, Option(help="Leave out smaller entries.", metavar="WEIGHT"), HELD] = None
    group: Annotated[
        Literal["words", "sentences"] | None,
        Option(help="Relations of words or sentences: sum over keys, mean over queries."),
        HELD,
    ] = None

    def __post_init__(self) -> None:
        _ = self.keys_per_query
        if self.min_weight is not None and math.isnan(self.min_weight):
            raise UsageError("--min-weight takes a number; nan came", "write --min-weight 0.1")

    @property
    def keys_per_query(self) -> int | None:
        """The number behind --top-k, None for all."""
        if self.top_k == "all":
            return None
        if not re.fullmatch(r"0*[1-9][0-9]{0,8}", self.top_k):
            raise UsageError(
                f"--top-k takes a number from 1, or all; {self.top_k!r} came", "write --top-k 5, or --top-k all"
            )
        return int(self.top_k)


@dataclass(frozen=True, kw_only=True)
class Image:
    """What kind of file a figure is."""

    panel = "Figures"
    image: Annotated[Literal["png", "svg", "pdf"], Option(help="File format of figures."), HELD] = "png"

    def style(self, command: str = "") -> Style:
        """How figures are drawn; command: what the files say made them."""
        from attnscope.figures import About, Style

        return fill(Style, self, about=About(command=command))


@dataclass(frozen=True, kw_only=True)
class Look(Image):
    """How every figure looks."""

    title: Annotated[str | None, Option(help="Stands before each figure's own title.", metavar="TITLE")] = None
    width: Annotated[
        str | None,
        Option(help="No wider than a paper's column (3.25 in), its page (6.75), or inches.", metavar="WIDTH"),
    ] = None
    dpi: Annotated[int | None, Option(help="Pixels per inch (default: 120).", metavar="N")] = None
    cmap: Annotated[
        str | None,
        Option(help="A colour map of matplotlib (default: viridis; of scores: berlin).", metavar="NAME"),
    ] = None

    def __post_init__(self) -> None:
        _ = self.style()  # refused before a model is loaded
        if self.cmap:
            from attnscope.figures.colours import find_cmap

            find_cmap(self.cmap)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How weights become colours."""

    panel = "Figures"
    scale: Annotated[Literal["linear", "sqrt", "log"], Option(help="Colour scale.")] = "linear"
    floor: Annotated[
        float | None, Option(help="Where --scale log begins, e.g. 0.001 (default: the least weight).", metavar="WEIGHT")
    ] = None
    sink: Annotated[
        Literal["keep", "mask"] | None,
        Option(help="A head's sink (its top key, else key 0): keep it, or draw it as a strip (default: keep)."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Map(Scale, Look):
    """How a heatmap is drawn."""

    annotate: Annotated[
        bool | None, Option("--annotate/--no-annotate", help="Numbers in the cells (default: up to 12 tokens).")
    ] = None


def names(text: str | None, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """The parts of a comma-joined option, each known, in the order of `known`."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    for part in parts:
        if part not in known:
            raise UsageError(f"{option} knows {', '.join(known)}; {part!r} came", "see --help")
    return tuple(name for name in known if name in parts)


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """Which figures are drawn."""

    panel = "Figures"
    figures: Annotated[
        str | None,
        Option(
            help="overview, layers, heads, metrics, mass (on named keys), top (a sheet of the first heads), picture "
            "(weights over a --picture); by commas.",
            metavar="KINDS",
        ),
        FIRST,
    ] = None

    def kinds(self, question: Question) -> tuple[str, ...] | None:
        """The kinds that were named, None where none were. Raises UsageError for one that cannot be drawn."""
        if self.figures is None:
            return None
        found = names(self.figures, (*FIGURES, "mass", "top", "picture"), "--figures")
        if not found:
            raise UsageError("--figures names no figure", "write --figures overview")
        if "mass" in found and question.key is None:
            raise UsageError("--figures mass shows the mass on named keys", "name them with --key")
        return found


@dataclass(frozen=True, kw_only=True)
class Drawing(Kinds, Map):
    """How many heatmaps are drawn."""

    per_head_scale: Annotated[bool, Option(help="One colour scale per head, not per figure.")] = False
    bin: Annotated[Literal["sum", "max"], Option(help="How texts over 200 tokens are binned.")] = "sum"

    def maps(self) -> MapFields:
        """The fields of `Request` that say how maps are kept."""
        return {"bin_rule": self.bin, "split_sink": self.sink == "mask"}


@dataclass(frozen=True, kw_only=True)
class Quiet:
    """Whether we talk."""

    panel = "Messages"
    quiet: Annotated[bool, Option("-q", help="No talk on stderr."), UNRECORDED] = False


@dataclass(frozen=True, kw_only=True)
class Verbose:
    """Whether the libraries underneath talk."""

    panel = "Messages"
    verbose: Annotated[bool, Option(help="The libraries' noise, and tracebacks."), UNRECORDED] = False


@dataclass(frozen=True, kw_only=True)
class Noise(Verbose, Quiet):
    """What is said on stderr."""


@dataclass(frozen=True, kw_only=True)
class Writing(Noise):
    """Where files go, and what is said on stderr."""

    out: Annotated[Path | None, Option("-o", help="Write tables and figures here.", metavar="DIR"), FIRST] = None

    def __post_init__(self) -> None:
        if self.out is not None:
            check_folder(self.out)


@dataclass(frozen=True, kw_only=True)
class Exporting(Writing):
    """A folder that holds one run."""

    panel = "Files"
    force: Annotated[bool, Option(help="Write over another run in --out."), UNRECORDED] = False


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a table is printed."""

    format: Annotated[
        Literal["table", "csv", "tsv", "jsonl", "parquet", "arrow"] | None,
        Option(help="Default: table on a terminal, csv in a pipe."),
        UNRECORDED,
    ] = None


@dataclass(frozen=True, kw_only=True)
class Facts(Format):
    """How facts that are no table are printed."""

    format: Annotated[Literal["table", "json"] | None, Option(help="Default: table on a terminal, json in a pipe.")] = (
        None  # type: ignore[assignment]
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Where options come from that no flag gives."""

    panel = "Files"
    config: Annotated[
        Path | None, Option(help="A YAML file of options; flags win over it.", metavar="FILE"), UNRECORDED
    ] = None


@dataclass(frozen=True, kw_only=True)
class Printing(Config, Format, Writing):
    """A table to stdout, files to --out."""


@dataclass(frozen=True, kw_only=True)
class Spreadsheet:
    """Who reads the tables."""

    panel = "Files"
    spreadsheet: Annotated[bool, Option(help="Cells of csv and tsv that no spreadsheet runs."), HELD] = False


@dataclass(frozen=True, kw_only=True)
class Results(Spreadsheet, Printing, Exporting):
    """A table to stdout, a run to --out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spreadsheet and self.format not in (None, "table", "csv", "tsv"):
            raise UsageError("--spreadsheet is about csv and tsv", "add --format csv")


def check_folder(folder: Path) -> None:
    """Raise UsageError for a folder that cannot be made or written, before a model is loaded; make nothing yet."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise UsageError(f"cannot write to {folder}: {there} is no folder", "name another folder with --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write to {folder}: {there} is not writable", "name another folder with --out")

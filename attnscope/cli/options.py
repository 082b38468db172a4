"""The options that commands share, each declared once, in the groups that commands take.

Here are the model and its engine, the text, and what is asked about it; `output.py` has where tables go,
`figure_options.py` pictures, many texts and sequences. A group's panel is the section of --help that lists its
options. Those that most people type are marked FIRST: a plain --help shows them alone, `--help all` the others too.
Those that few people change are marked SETTING: `--set NAME=VALUE` gives them.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, BadParameter, Option

from attnscope.cli.option_groups import (
    FIRST,
    HELD,
    HIDDEN,
    REST,
    SETTING,
    UNRECORDED,
    OptionGroup,
    check_one_given,
    check_words,
    fill,
    models,
    offer,
    refuse_changed,
)
from attnscope.cli.output import count_of, count_or_all
from attnscope.errors import UsageError, brief
from attnscope.model.options import DEMO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnscope.model.options import LoadOptions
    from attnscope.observe.request import CaptureSpec, Request, Text, TokenFields, View

# The sections of --help in their order.
PANELS = ("What to ask", "Input", "Output", "Model and engine", "Settings")
OF_RECORDS = (".jsonl", ".csv", ".tsv", ".parquet")  # suffixes of corpora
OF_TENSORS = (".npz", ".safetensors")
ENDS = r"txt|md|json|jsonl|csv|tsv|html?|ya?ml|log|pdf"
FILE_NAME = re.compile(rf"[^\s\"'<>]*/[^\s\"'<>]*|[^\s\"'<>]+\.({ENDS})")  # one word: what else has a slash is a text


class Checkpoint(OptionGroup, panel="Model and engine"):
    """Which model, and how it is read."""

    model: Annotated[
        str, "demo, a folder, a GGUF file, or a hub id.", "NAME", Option("-m", autocompletion=models), FIRST, HELD
    ] = "demo"
    device: Annotated[
        str,
        "auto, cpu, cuda, cuda:N or mps.",
        "DEVICE",
        Option(autocompletion=offer("auto", "cpu", "cuda", "mps")),
        FIRST,
        HELD,
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "Precision; auto: float32 on CPU, else that of the checkpoint.",
        HELD,
    ] = "auto"
    revision: Annotated[str | None, "Branch, tag or commit on the hub.", "REVISION", HELD] = None
    offline: Annotated[bool, "Never use the network."] = False
    trust_remote_code: Annotated[bool, "Run code from the model's files."] = False
    base: Annotated[str | None, "Base model of an adapter (default: from its config).", "NAME", HELD, SETTING] = None
    task: Annotated[
        Literal["auto", "decoder", "encoder", "seq2seq", "vision"] | None,
        "Kind of model (default: auto, from its config).",
        HELD,
        SETTING,
    ] = None
    gguf: Annotated[
        Literal["check", "trust"],
        "`trust`: read a GGUF file in spite of features that are not supported.",
        HELD,
        SETTING,
    ] = "check"

    def load_options(self) -> LoadOptions:
        """What `load` takes."""
        from attnscope.model.options import LoadOptions

        return fill(LoadOptions, self)


class Loading(Checkpoint):
    """Where its weights go."""

    device_map: Annotated[str | None, "auto: spread the model over several devices.", "MAP", HELD, SETTING] = None
    quantize: Annotated[Literal["8bit", "4bit"] | None, "Load with bitsandbytes.", HELD] = None
    adapter: Annotated[
        Literal["merged", "beside"] | None,
        "`merged`: add the adapter to the weights of its base (default, except for quantized weights); "
        "`beside`: keep it separate.",
        "WHERE",
        HELD,
        SETTING,
    ] = None
    allow_pickle: Annotated[bool, "Allow weights in pickle files.", SETTING] = False


MOST_TOKENS = 10**9  # of a text, a batch, an answer
MOST_CHANNELS = 10**6  # of a layer
ENGINE_WORDS = ("auto", "eager", "fused", "probe")  # that --help lists; others are one way of these


def engine_word(text: str) -> str:
    """The name of an engine. Raises BadParameter for a word that is none."""
    if text not in ENGINE_WORDS:
        from attnscope.hooks.engines import ENGINES

        if text not in ENGINES:
            raise BadParameter(f"expected {', '.join(ENGINE_WORDS[:-1])} or {ENGINE_WORDS[-1]}, got {brief(text)}")
    return text


ENGINE = Option(parser=engine_word, autocompletion=offer(*ENGINE_WORDS))


class EngineName(OptionGroup, panel="Model and engine"):
    """Who computes the attention."""

    engine: Annotated[
        str,
        "eager: the model's own matrices, bit for bit; fused: no stored matrices; auto: the faster one "
        "for this question and memory; probe: rows of the kernel that the model runs with.",
        "|".join(ENGINE_WORDS),
        ENGINE,
        FIRST,
        HELD,
    ] = "auto"


class Memory(EngineName):
    """Who computes the attention, and in how much memory."""

    memory: Annotated[
        str | None, "Memory for the matrices of a layer, e.g. 4GB (default: half of the free memory).", "SIZE", SETTING
    ] = None


class Implementation(OptionGroup, panel="Model and engine"):
    """Which attention of transformers the model is loaded with."""

    attention: Annotated[
        str | None,
        "Attention of transformers for --engine probe, e.g. sdpa (default: the choice of transformers).",
        "NAME",
        HELD,
        SETTING,
    ] = None


class EngineChoice(Implementation, Memory):
    """Who computes the attention, and whether it is checked."""

    listen: Annotated[bool, "With fused: run the model's own attention too.", SETTING] = False
    positions: Annotated[
        int | None,
        "Extend the model to N positions by linear RoPE scaling.",
        Option(min=1, max=MOST_TOKENS),
        SETTING,
    ] = None
    verify: Annotated[bool, "Check every layer against the oracle, as `parity` does."] = False


class Tokens(OptionGroup, panel="Input"):
    """How a text becomes tokens."""

    chat: Annotated[bool, "Apply the chat template to a user turn, or to JSON messages.", FIRST, HELD] = False
    truncate: Annotated[Literal["left", "right"] | None, "Cut a long text on this side.", HELD] = None


class OneText(Tokens):
    """One text, and where it comes from."""

    given: Annotated[str | None, "The text, in quotes; - reads stdin.", "TEXT", Argument(), UNRECORDED] = None
    text: Annotated[str | None, "The text; - reads stdin.", Option("-t"), FIRST, UNRECORDED] = None
    file: Annotated[str | None, "A text file in UTF-8; - reads stdin.", "FILE", Option("-f"), FIRST] = None
    ids: Annotated[str | None, "A file of token ids; - reads stdin.", "FILE"] = None

    def __post_init__(self) -> None:
        check_one_given(self._places)
        if self.ids is not None and self.chat:
            raise UsageError("--chat needs a text, and --ids gives token ids", "leave out one of them")
        if self.given and os.path.isfile(self.given):
            steps = [f"read it as one text with {{file={self.given}}}", f"read the name with {{text={self.given}}}"]
            suffix = Path(self.given).suffix
            if suffix in OF_RECORDS:
                steps.insert(0, f"read its records with {{texts={self.given}}}")
                steps.insert(1, f"measure each record with `attnscope batch {self.given} --out DIR`")
            elif suffix in OF_TENSORS and isinstance(self, GivenFile):
                steps = [f"read its layers with {{tensors={self.given}}}"]
            raise UsageError(f"TEXT is the name of a file, {self.given}", "; ".join(steps))
        if self.given and os.path.isdir(self.given):
            raise UsageError(f"TEXT is the name of a folder, {self.given}", f"--text {self.given} reads the name")
        if self.given and FILE_NAME.fullmatch(self.given):
            raise UsageError(
                f"there is no file or folder {self.given}", f"check the path; --text {self.given} reads the name"
            )
        if self.given == DEMO:
            raise UsageError("TEXT is demo, the name of a model", 'give a text: "..." --model demo')

    @property
    def _places(self) -> dict[str, str | None]:
        return {"TEXT": self.given, "--text": self.text, "--file": self.file, "--ids": self.ids}

    @property
    def has_text(self) -> bool:
        """Whether a text was named, or a place to read it."""
        return any(place is not None for place in self._places.values())


class Pair(OptionGroup, panel="Input"):
    """The second text of a pair."""

    pair: Annotated[str | None, "Second text of a pair of sentences.", UNRECORDED] = None


class MayAsk(Checkpoint):
    """Whether a server is asked, which may hold the model."""

    no_server: Annotated[bool, "Do not ask `attnscope serve`.", UNRECORDED, SETTING] = False


class ModelText(OneText, Loading):
    """One text and the model that reads it."""

    def ask(self, text: Text, selected: Selected, keep: Request) -> CaptureSpec:
        """What is asked of the text."""
        from attnscope.observe.request import CaptureSpec

        return fill(CaptureSpec, self, selected, text=text, keep=keep)


class GlobalTokens(OptionGroup, panel="Input"):
    """Which tokens have global attention."""

    global_tokens: Annotated[
        str | None,
        "Tokens with global attention in Longformer and LED, or none (default: the choice of the model).",
        "TOKENS",
        HELD,
        SETTING,
    ] = None


class PairedText(Pair, GlobalTokens, ModelText):
    """One text or a pair of them, and the model that reads it."""


class ModelTexts(PairedText):
    """One text and the model that reads it, and what an encoder-decoder's decoder reads."""

    target: Annotated[
        str | None, "Text of the decoder, in an encoder-decoder (default: the model's own output).", HELD
    ] = None
    audio: Annotated[str | None, "Sound file, for speech models such as Whisper; - reads stdin.", "FILE"] = None
    picture: Annotated[
        list[str] | None, "Picture for a vision-language model, or alone for a vision model; may be repeated.", "FILE"
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.picture and (self.ids is not None or self.audio is not None):
            raise UsageError("--picture needs a text, and another source was given", "leave out one of them")
        if self.audio is not None and self.chat:
            raise UsageError("--chat needs a text, and --audio gives a sound", "leave out one of them")

    @property
    def _places(self) -> dict[str, str | None]:
        return super()._places | {"--audio": self.audio}

    def load_options(self) -> LoadOptions:
        options = super().load_options()
        alone = self.picture and not self.has_text and options.task is None
        return replace(options, task="picture") if alone else options


class Generated(OptionGroup, panel="Input"):
    """What the model puts after the text."""

    generate: Annotated[
        int | None,
        "Append up to N tokens of the model's own greedy output.",
        Option(min=1, max=MOST_TOKENS),
    ] = None


class TextsAsked(Generated, MayAsk, ModelTexts):
    """The text of a study of one token or logit, which a server may read."""

    chat: Annotated[bool, REST] = False


class Answer(Generated):
    """What follows the text."""

    answer: Annotated[
        str | None, "Answer to append to the text; it begins with a space where one belongs.", UNRECORDED
    ] = None


class GivenFile(OptionGroup, panel="Input"):
    """Attention that somebody else computed, in place of a text and its model."""

    tensors: Annotated[
        str | None,
        "q and k, or attention weights, and tokens of any runtime, not verified: safetensors or npz.",
        "FILE",
    ] = None
    weights_file: Annotated[str | None, "Another name of --tensors.", "FILE", HIDDEN] = None

    WITHOUT_MODEL = frozenset(
        {"tensors", "weights_file", "given", "text", "file", "ids", "from_", "offline", "no_server"}
    )

    @property
    def tensors_file(self) -> str | None:
        """The file, by either name."""
        return self.tensors if self.weights_file is None else self.weights_file

    @property
    def file_places(self) -> dict[str, str | None]:
        """Both names, and what was given under each."""
        return {"--tensors": self.tensors, "--weights-file": self.weights_file}

    def refuse_model(self) -> None:
        """Raise UsageError for an option that needs the model."""
        why = "needs a model, and tensors are read without one"
        refuse_changed(self, type(self), self.WITHOUT_MODEL, why)


class OwnModule(Loading, panel="Input"):
    """A module of PyTorch of any code, in place of a model."""

    module: Annotated[
        str | None,
        "A PyTorch module in place of a model: what PACKAGE.MODULE:FUNCTION returns. Needs --trust-remote-code.",
        "NAME",
    ] = None

    def check_module(self) -> None:
        """Raise UsageError for an option that says how a model is loaded, where a module is given."""
        if self.module is not None:
            why = "needs a model, and --module gives a module"
            refuse_changed(self, Loading, ("trust_remote_code", "offline"), why)


class TextRun(GivenFile, OwnModule, EngineChoice, Answer, MayAsk, ModelTexts):
    """One text through one model, or a run that was written down."""

    given: Annotated[str | None, "The text, in quotes, or the folder of a run; - reads stdin.", Argument()] = None
    from_: Annotated[
        Path | None,
        "Another name of a run's folder as TEXT.",
        "RUN",
        Option("--from"),
        HIDDEN,
        UNRECORDED,
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensors_file is not None:
            self.refuse_model()
        self.check_module()
        if self.answered:  # most texts have none
            from attnscope.inputs.answers import check_answer

            check_answer(self.generate, self.answer, self.truncate if self.audio is None else None)
        if self.answer is not None and self.ids is not None:
            raise UsageError("--answer needs a text, and --ids gives token ids", "leave out one of them")
        if self.answered and self.from_ is not None and not self.has_text:
            raise UsageError(
                "a run is repeated with its own tokens, and no answer after them",
                "leave out --generate or --answer, or add --text",
            )

    @property
    def _places(self) -> dict[str, str | None]:
        return super()._places | self.file_places

    @property
    def answered(self) -> bool:
        """Whether an answer is to follow the text."""
        return self.generate is not None or self.answer is not None


class Selected(OptionGroup, panel="What to ask"):
    """Which heads."""

    select: Annotated[
        str | None,
        "Layers and heads: 27, 27.3, L27H3, 0-3.*, last (layer), *.0, @ROLE; by commas.",
        "HEADS",
        Option("-s"),
        FIRST,
        HELD,
    ] = None
    atlas: Annotated[
        Path | None,
        "Folder of `scan`: roles of heads, for tables and @ROLE (default: atlas/ in the model's folder).",
        "DIR",
    ] = None


class OneHead(OptionGroup, panel="What to ask"):
    """Which head, where it is one."""

    head: Annotated[str | None, "The head: L2H3 or 2.3.", "HEAD", FIRST] = None

    @property
    def named(self) -> str:
        """The head's name. Raises UsageError where none was named."""
        if self.head is None:
            raise UsageError("no head was named", "name one with --head L2H3; `attnscope heads` lists them")
        return self.head


class Named(OptionGroup, panel="What to ask"):
    """Names for tokens."""

    define: Annotated[list[str] | None, "Name tokens, as subject=Mary; may be repeated.", "NAME=TOKENS", HELD] = None

    def names(self, *expressions: str | None) -> Mapping[str, str]:
        """The tokens that each name means. Raises UsageError for what no text makes right, in these expressions too."""
        from attnscope.inputs.tokens import check_expression, defined

        groups = defined(self.define or ())
        for expression in expressions:
            if expression is not None:
                check_expression(expression, groups)
        return groups


class Query(OptionGroup, panel="What to ask"):
    """Which tokens look."""

    query: Annotated[
        str | None,
        "Tokens that look: last, 8, 3-7, bank, bank#2. Full syntax: `attnscope help tokens`.",
        "TOKENS",
        FIRST,
        HELD,
    ] = None


class Queries(Named, Query):
    """Which tokens look, of those that have names too."""

    def asks(self) -> TokenFields:
        """The fields of `Request` that say which tokens are meant. Raises UsageError for what no text makes right."""
        key = getattr(self, "key", None)
        return {"query": self.query, "key": key, "define": self.names(self.query, key)}


class Question(Queries):
    """Which tokens are asked about."""

    key: Annotated[str | None, "Tokens that are looked at, in the syntax of --query.", "TOKENS", FIRST, HELD] = None


class Heads(Selected):
    """Which heads, one by one or averaged."""

    by: Annotated[Literal["kv"] | None, "Average the heads that share a kv head.", HELD, SETTING] = None
    channel: Annotated[
        int | None,
        "One channel's own map, where every channel has one.",
        "N",
        Option(min=0, max=MOST_CHANNELS),
        HELD,
        SETTING,
    ] = None

    def view(self) -> View:
        """How entries are read."""
        from attnscope.observe.request import View

        return fill(View, self, by_kv=self.by == "kv")


class Entries(Heads):
    """What is read of the heads."""

    weights: Annotated[
        Literal["softmax", "scores", "value"],
        "softmax: weights; scores: logits before the softmax; value: norms of the written values, A |v W_O|.",
    ] = "softmax"

    def check(self, group: str | None = None, scale: str = "auto") -> None:
        """Raise UsageError where --group or --scale asks of logits or norms what only weights can give."""
        if group and self.weights != "softmax":
            what = "norms" if self.weights == "value" else "logits"
            raise UsageError(f"{what} of several keys cannot be summed into one", "use --weights softmax with --group")
        if scale not in ("auto", "linear") and self.weights == "scores":
            raise UsageError(
                f"logits can be negative and have no {scale} scale", "use {scale=linear} with --weights scores"
            )


class Seed(OptionGroup, panel="What to ask"):
    """What random numbers are drawn from."""

    seed: Annotated[int, "Seed of random numbers.", Option(min=0, max=2**63 - 1)] = 0


class OtherSide(OptionGroup, panel="What to ask"):
    """What a text or a model is compared with."""

    compare_text: Annotated[str | None, "Second text, to compare with.", FIRST] = None
    compare_model: Annotated[
        str | None, "Second model, to compare with.", "NAME", Option(autocompletion=models), FIRST
    ] = None
    align: Annotated[
        Literal["position", "text"] | None,
        "Align tokens by position, or by shared text (default: by position if the texts have equally many tokens).",
    ] = None

    @property
    def of_two(self) -> bool:
        """Whether there is one."""
        return self.compare_text is not None or self.compare_model is not None

    def check_other_side(self) -> None:
        """Raise UsageError where both were given, or --align without either."""
        if self.align is not None and self.compare_text is None and self.compare_model is None:
            raise UsageError("--align needs two texts, got one", "give --compare-text TEXT, or leave it out")
        check_one_given({"--compare-text": self.compare_text, "--compare-model": self.compare_model})
        check_words(self.compare_text, "--compare-text")


class Relations(OptionGroup, panel="What to ask"):
    """Which keys of a query are listed."""

    top_k: Annotated[str, "Strongest keys of each query: a number, or all.", "N|all", HELD] = "5"
    min_weight: Annotated[
        float | None, "Leave out entries below this weight.", "WEIGHT", Option(min=-1e6, max=1e6), HELD
    ] = None
    group: Annotated[
        Literal["words", "sentences"] | None, "Relations of words or sentences: sum over keys, mean over queries.", HELD
    ] = None

    def __post_init__(self) -> None:
        _ = self.keys_per_query

    @property
    def keys_per_query(self) -> int | None:
        """The number behind --top-k, None for all."""
        try:
            return count_of(count_or_all(self.top_k))
        except ValueError as error:
            raise UsageError(f"--top-k: {error}", "write --top-k 5, or --top-k all") from None

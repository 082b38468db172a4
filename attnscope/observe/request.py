"""What is asked of a text, in one record: for the command line, the library, a corpus, a manifest.

ask = CaptureSpec("the financial bank", keep=Request(relations=True), engine="fused")
read(loaded, ask)
CaptureSpec.of_json(ask.as_json()) == ask

First what to keep of a forward pass, then what it is asked of: texts, the tokens of them that are named, their stacks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict

from attnscope.errors import InputError, UsageError
from attnscope.inputs.tokens import TokenSelection, choose, choose_of_two
from attnscope.metrics.metrics import METRICS
from attnscope.metrics.texts import MAP_SIDE
from attnscope.model.selection import has_summaries, is_causal, is_cross, is_over_patches, is_vision, sides
from attnscope.observe.layers import View
from attnscope.utils.schema import from_json, to_json

if TYPE_CHECKING:
    from attnscope.inputs.pictures import PictureSource
    from attnscope.inputs.prompt import Prompt, Side
    from attnscope.inputs.sound import Sound
    from attnscope.model.geometry import Geometry
    from attnscope.observe.atlas import HeadNames

    Text: TypeAlias = str | Prompt | Sequence[int] | Sound


class TokenFields(TypedDict):
    """The fields of `Request` that name tokens."""

    query: str | None
    key: str | None
    define: Mapping[str, str]


class MapFields(TypedDict, total=False):
    """The fields of `Request` that say which maps are kept, and how."""

    maps: Literal["all", "kept"] | None
    map_side: int
    bin_rule: Literal["sum", "max"]
    split_sink: bool


@dataclass(frozen=True)
class Request:
    """What to keep of a forward pass.

    view: how entries are read, and of which heads relations and maps are kept. metrics: ids to measure. key_zero:
    lets key 0 into a head's strongest relation. relations: whether to keep the `top_k` strongest keys of every query
    (None: all), of `group`s if given. maps: the heads to draw ("all", "kept" or None), binned by `bin_rule` to at most
    `map_side` rows, with key 0 in a column of its own if `split_sink`. weights: keep whole matrices. operands: keep q,
    k and v as they were multiplied. Both are of the view's heads, or of {layer: heads}. rollout: the units to roll
    attention out over; `bins` are at most MAP_SIDE runs of tokens. per_token: keep what every token gets from the
    chosen queries, or gives to the keys where keys alone are chosen. query, key: the tokens that are asked about, as
    `inputs/tokens.py` reads them, with the groups of `define`, and the part of the maps that is kept; None for all.
    spans: groups whose mass on each other is kept, of every pair. stacks: of an encoder-decoder the heads of each stack
    that are kept, {"cross": {layer: heads}}, over the view's, which are the decoder's.

        >>> attnscope.capture(model, "the financial bank", request=attnscope.Request(relations=True, top_k=None))
    """

    view: View = View()
    metrics: Sequence[str] = tuple(METRICS)
    key_zero: bool = False
    relations: bool = False
    top_k: int | None = 5
    group: Literal["words", "sentences"] | None = None
    maps: Literal["all", "kept"] | None = None
    bin_rule: Literal["sum", "max"] = "sum"
    split_sink: bool = False
    map_side: int = MAP_SIDE
    weights: bool | Mapping[int, Sequence[int]] = False
    operands: bool | Mapping[int, Sequence[int]] = False
    rollout: Literal["bins", "tokens", "words", "sentences"] | None = None
    per_token: bool = False
    query: str | None = None
    key: str | None = None
    define: Mapping[str, str] = field(default_factory=dict)
    spans: Sequence[str] = ()
    stacks: Mapping[str, Mapping[int, Sequence[int]]] | None = None

    def __post_init__(self) -> None:
        if self.group and self.view.weights != "softmax":
            what = "norms" if self.view.weights == "value" else "logits"
            raise UsageError(f"{what} of several keys cannot be summed into one", "use {weights=softmax} with {group}")
        if self.view.weights == "logit" and self.maps:
            raise UsageError("effects on a logit have no map", "ask for {relations}")

    def selecting(self, heads: Mapping[str, Mapping[int, Sequence[int]]], geometry: Geometry) -> Request:
        """The same of these heads alone, by stack."""
        view = replace(self.view, heads=heads.get(geometry.stack, {}))
        return replace(self, view=view, stacks=heads if len(geometry.shown) > 1 else None)

    def view_of(self, asked: bool | Mapping[int, Sequence[int]]) -> View:
        """The view, of the heads that `weights` or `operands` asks for."""
        return replace(self.view, heads=asked) if isinstance(asked, Mapping) else self.view

    def of(self, stack: str, plain: str) -> Request:
        """What is asked of one stack; plain: the one that the view's heads are of."""
        heads = self.view.heads
        if self.stacks is not None:
            heads = self.stacks.get(stack, {})
            if has_summaries(stack):  # of long texts these are the decoder's own layers
                heads = {**self.stacks.get(plain, {}), **heads}
        elif heads is not None and stack != plain:
            heads = {}
        rollout = None if is_cross(stack) else self.rollout  # of units that are the same on both sides
        per_token = self.per_token and (stack == plain or not is_vision(stack))
        return replace(self, view=replace(self.view, heads=heads), rollout=rollout, per_token=per_token)

    @property
    def asks(self) -> bool:
        """Whether the question is of the text's own tokens or units, which the tower of a decoder has none of."""
        return any((self.query, self.key, self.group, self.rollout))

    def chosen(self, prompt: Prompt, source: Prompt | None = None) -> TokenSelection:
        """The tokens of a text that are asked about. Raises UsageError or InputError for what means none.

        source: what an encoder-decoder's encoder reads, where the prompt is its decoder's.
        """
        asked = self.query, self.key, self.define, self.spans
        return choose(prompt, *asked) if source is None else choose_of_two(prompt, source, *asked)


class TextInputs(NamedTuple):
    """A text, the tokens of it that are asked about, and the text that an encoder-decoder's encoder reads."""

    prompt: Prompt
    chosen: TokenSelection
    source: Prompt | None = None
    keys: Prompt | None = None  # where they are another text's than the queries

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.prompt), len(self.source or ())

    def of(self, stack: str, plain: str) -> list[TextInputs]:
        """What one stack reads: of the tower of a decoder a text for each picture, or part of one, that it is given.

        plain: the model's own stack. Nothing of one over patches: only the pass will say where in the text they are.
        """
        if is_vision(stack) and stack != plain:
            return [TextInputs(part, TokenSelection()) for part in self.prompt.medium.tower]
        if is_over_patches(stack):
            return []
        # What one stack of an encoder-decoder reads.
        chosen = self.chosen.of(stack)
        if self.source is None or is_causal(stack):
            return [self._replace(chosen=chosen)]
        queries, keys = sides(stack, self.source, self.prompt)
        return [TextInputs(queries, chosen, keys=None if keys is queries else keys)]

    @property
    def looked_at(self) -> Prompt:
        """The text that the keys are of."""
        return self.keys or self.prompt

    @property
    def queries(self) -> Sequence[int]:
        """The queries that are asked about: those that were named, or all that there are."""
        return self.chosen.query.positions if self.chosen.query else range(self.prompt.medium.unasked, len(self.prompt))

    @property
    def key_positions(self) -> Sequence[int]:
        """The keys that are asked about: those that were named, or all."""
        return self.chosen.key.positions if self.chosen.key else range(len(self.looked_at))


def nothing_named(asked: Sequence[TextInputs]) -> bool:
    """Whether tokens were named, and no text has any of them."""
    return all(one.chosen.nothing for one in asked)


EngineWord = Literal["auto", "eager", "fused", "tiles", "numba", "triton"]
WHAT = {"chat": "a chat", "picture": "a picture", "answer": "an answer"}
SCHEMA = "ask/1"  # goes up when a field is renamed, or means something else


class CaptureOptions(TypedDict, total=False):
    """How a text is read: the fields of `CaptureSpec` besides the text and what is kept of it."""

    engine: EngineWord
    memory: str | None
    listen: bool
    verify: bool
    select: str | None
    atlas: HeadNames | Path | str | None
    chat: bool
    truncate: Side | None
    generate: int | None
    answer: str | Sequence[int] | None
    target: str | Sequence[int] | None
    picture: PictureSource | Sequence[PictureSource] | None
    pair: str | None
    global_tokens: str | None


@dataclass(frozen=True)
class CaptureSpec:
    """A text, what is kept of it, and how it is read.

    text: the text, its tokens as a Prompt, token ids, or a sound. keep: what is kept, and of which tokens.

    engine: "eager" reads the model's own matrices, "fused" makes none ("tiles", "numba", "triton": that way of it),
    "auto" takes the faster one that gives what is asked and fits the memory. memory: what a layer's matrices may take,
    such as "4GB". listen: with the fused engine, leave the layers' outputs to the model. verify: hold every layer
    against the oracle.

    select: heads to keep, as "27.3,last"; over the view's own. atlas: what `scan` found, or its folder; without one
    what lies in atlas/ of the model's own folder, where it is of these weights.

    chat: apply the chat template. truncate: cut a text that is too long, on this side. generate: let the model add up
    to so many tokens after the text, which are read with it. answer: put this after it, as text where the text is
    one, else as ids. target: what an encoder-decoder's decoder reads, as text or as ids; without it what the model
    makes of the text, greedily, in at most `generate` tokens. picture: one or several, files or pictures of Pillow,
    that a vision-language model reads with the text. pair: a second text, read with the first as its tokenizer writes
    a pair: special tokens between them, and token types where the model has some. global_tokens: those with global
    attention, of Longformer and LED, as an expression; "none" for none; without it what the model's class chooses.
    """

    text: Text
    keep: Request = Request()
    engine: str = "auto"
    memory: str | None = None
    listen: bool = False
    verify: bool = False
    select: str | None = None
    atlas: HeadNames | Path | str | None = None
    chat: bool = False
    truncate: Side | None = None
    generate: int | None = None
    answer: str | Sequence[int] | None = None
    target: str | Sequence[int] | None = None
    picture: PictureSource | Sequence[PictureSource] | None = None
    pair: str | None = None
    global_tokens: str | None = None

    def check_pair(self) -> None:
        """Raise UsageError or InputError for a second text that cannot be meant."""
        if self.pair is None:
            return
        if not (isinstance(self.text, str) and isinstance(self.pair, str)):
            raise UsageError(
                "a pair needs two texts, and one of these is not text", "give both as text, or leave out {pair}"
            )
        for name in ("chat", "picture", "answer"):
            if getattr(self, name):
                raise UsageError(f"a pair of texts is read alone, and there is {WHAT[name]}", f"leave out {{{name}}}")
        if not self.pair.strip():
            raise InputError("the second text of the pair is empty", "give it at least one word, or leave out {pair}")

    def as_json(self) -> dict[str, Any]:
        """The ask as JSON has it. Raises UsageError for what lies in memory alone: a sound, a picture, an atlas."""
        text, atlas, picture = self.text, self.atlas, self.picture
        if not isinstance(text, str):
            text = getattr(text, "ids", text)  # of a Prompt
            if not isinstance(text, Sequence):
                raise UsageError("a sound in memory has no form in JSON", "give token ids or a text")
            text = [int(token) for token in text]
        pictures = picture if isinstance(picture, list | tuple | None) else [picture]
        for what, value in [("an atlas", atlas), *(("a picture", one) for one in pictures or ())]:
            if value is not None and not isinstance(value, str | os.PathLike):
                raise UsageError(f"{what} in memory has no form in JSON", "save it to a file and name that")
        record = {option.name: getattr(self, option.name) for option in fields(self) if option.name != "keep"}
        record |= {"text": text, "atlas": None if atlas is None else os.fspath(atlas)}  # type: ignore[arg-type]
        record["picture"] = None if pictures is None else [os.fspath(one) for one in pictures]  # type: ignore[arg-type]
        return {"schema": SCHEMA, **record, "keep": to_json(self.keep)}

    @classmethod
    def of_json(cls, said: Any) -> CaptureSpec:
        """The ask that JSON holds. Raises UsageError for another schema, an unknown field, and another type."""
        if not isinstance(said, Mapping) or said.get("schema") != SCHEMA:
            raise UsageError(f"expected an ask of the form {SCHEMA}", "write one with Ask.as_json")
        form = from_json(_Form, {name: value for name, value in said.items() if name != "schema"}, "ask")
        return cls(**{option.name: getattr(form, option.name) for option in fields(form)})


# The fields of an ask, as JSON can have them: others than what Python may be given are named here.
_JSON_TYPES = {
    "text": "str | tuple[int, ...]",
    "atlas": "str | None",
    "truncate": "Literal['left', 'right'] | None",
    "answer": "str | tuple[int, ...] | None",
    "target": "str | tuple[int, ...] | None",
    "picture": "tuple[str, ...] | None",
}
_Form = make_dataclass(
    "_Form",
    [
        (option.name, _JSON_TYPES.get(option.name, option.type), field(default=option.default))
        for option in fields(CaptureSpec)
    ],
    namespace={"__module__": __name__},
)

"""What is asked of a text, in one record: for the command line, the library, a corpus, a manifest.

ask = CaptureSpec("the financial bank", keep=Request(relations=True), engine="fused")
read(loaded, ask)
CaptureSpec.of_json(ask.as_json()) == ask

First the layers of a stack, what is kept by layer, and how the entries of a matrix are read. Then what to keep of a
forward pass, and what it is asked of: texts, the tokens of them that are named, their stacks.

Shapes: B text, H head (or kv head, where they are averaged), Q query, K key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar

import numpy as np

from attnscope.errors import InputError, UnknownLayerError, UsageError
from attnscope.inputs.tokens import TokenSelection, choose, choose_of_two
from attnscope.metrics.metrics import METRICS, SIGNED
from attnscope.metrics.texts import MAP_SIDE
from attnscope.model.selection import (
    DECODER,
    MODEL,
    STACKS,
    HeadsByRole,
    StackLayer,
    has_summaries,
    is_causal,
    is_cross,
    is_over_patches,
    is_vision,
    mixes,
    prefix,
    select_stacks,
    sides,
    stack_of,
)
from attnscope.utils.display import number_list
from attnscope.utils.schema import from_json, to_json

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.attention.operator import AttentionOperator
    from attnscope.inputs.pictures import PictureSource
    from attnscope.inputs.prompt import Prompt, Side
    from attnscope.inputs.sound import Sound
    from attnscope.inputs.tensors import GivenTensors
    from attnscope.metrics.texts import Texts
    from attnscope.observe.atlas import HeadNames

    Text: TypeAlias = str | Prompt | Sequence[int] | Sound | GivenTensors


T = TypeVar("T", covariant=True)


NOT_KNOWN = -1  # the number of a kv head that weights alone do not tell: null in tables


class LayerKey(NamedTuple):
    """A layer: its index, and its stack."""

    layer: int
    stack: str = DECODER

    @property
    def named(self) -> int:
        """The index of its layer, which names the stack of layers without a softmax."""
        return StackLayer(self.layer, self.stack) if mixes(self.stack) else self.layer


@dataclass(frozen=True)
class Layer:
    """What is asked: which layer, its operator, its kv heads, and the texts on its device.

    written(start, stop): gives what a whole weight on a key writes: its norm where values weigh, see
    `values.ValueNorms`; what it adds to a logit where logits are asked about, see `values.Directions`. further: more
    layers; their heads follow its own, see `side_by_side`.
    """

    key: LayerKey
    P: AttentionOperator
    kv_heads: int
    texts: Texts
    written: Callable[..., Tensor] | None = field(default=None, repr=False, compare=False, kw_only=True)
    further: Sequence[LayerKey] = field(default=(), kw_only=True)
    _here: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False, kw_only=True)

    @property
    def keys(self) -> tuple[LayerKey, ...]:
        """The layers whose heads it has."""
        return self.key, *self.further

    def here(self, tensor: Tensor) -> Tensor:
        """The tensor on the layer's device: the same one each time, since it distinguishes questions."""
        if tensor.device == self.P.device:
            return tensor
        if id(tensor) not in self._here:
            self._here[id(tensor)] = tensor, tensor.to(self.P.device)  # holding the first keeps its id its own
        return self._here[id(tensor)][1]

    def kv_head(self, head: int) -> int:
        """The kv head that a query head reads."""
        return kv_head_of(head, self.P.heads, self.kv_heads)

    def per_kv_head(self, values: Tensor) -> Tensor:
        """(B, H, ...) -> (B, kv heads, ...), the mean over the query heads that share a kv head."""
        return values.view(self.P.batch, self.kv_heads, -1, *values.shape[2:]).mean(2)


def kv_head_of(head: int, heads: int, kv_heads: int) -> int:
    """The kv head that a query head reads, of so many heads; NOT_KNOWN where the layer's kv heads are not known, as 0.

    >>> kv_head_of(3, heads=4, kv_heads=2), kv_head_of(3, heads=4, kv_heads=0)
    (1, -1)
    """
    return head * kv_heads // heads if kv_heads else NOT_KNOWN


def codes(stacks: Sequence[str] | np.ndarray) -> np.ndarray:
    """The place of each stack in STACKS, (N,) int8.

    >>> codes(["cross", "encoder"])
    array([2, 0], dtype=int8)
    """
    return np.array([STACKS.index(stack) for stack in stacks], np.int8)


class ModelLayers(NamedTuple):
    """The layers of a stack: the numbers of those with attention, and {layer: type} of those without."""

    attending: Sequence[int]
    without: Mapping[int, str]


class PerLayer(Mapping[LayerKey, T]):
    """{layer: something} of one stack, in the model's order; `layers[3]` is `layers[3, "decoder"]` in a causal model.

    Raises UnknownLayerError, which is a KeyError, for a layer that is not there, such as one without attention. model:
    the stack's layers, where they are known: the refusal says which of them attend.

    >>> PerLayer({LayerKey(3): "kept"})[3]
    'kept'
    """

    def __init__(self, by_layer: Mapping[LayerKey, T] | None = None, model: ModelLayers | None = None) -> None:
        self._by_layer, self.model = dict(by_layer or {}), model
        self._stack = next((key.stack for key in self._by_layer), DECODER)

    def __getitem__(self, key: int | tuple[int, str]) -> T:
        if isinstance(key, str):
            how = f"write [{int(key)}]" if key.isdecimal() else "write weights[1][4], or matrix('L1H4')"
            raise UsageError(f"expected the number of a layer, got {key!r}", how)
        layer = LayerKey(*key) if isinstance(key, tuple) else LayerKey(key, self._stack)
        if layer not in self._by_layer:
            raise self._unknown(layer)
        return self._by_layer[layer]

    def _unknown(self, layer: LayerKey) -> UnknownLayerError:
        named = f"{prefix(layer.stack)}layer {layer.layer}"
        if self.model is not None and layer.stack == self._stack and layer.layer not in self.model.attending:
            kind = self.model.without.get(layer.layer)
            message = (
                f"there is no {named}"
                if kind is None
                else f"{named} has no attention over the text, its type is {kind}"
            )
            return UnknownLayerError(message, f"layers with attention: {number_list(self.model.attending)}")
        if not self._by_layer:
            return UnknownLayerError("nothing was kept of any layer: it was not asked for", "name it in the Request")
        known = ", ".join(f"{prefix(key.stack)}{key.layer}" for key in self._by_layer)
        return UnknownLayerError(f"nothing of {named} was kept: it was not asked for", f"take {known}")

    def __contains__(self, key: object) -> bool:
        return (LayerKey(key, self._stack) if isinstance(key, int) else key) in self._by_layer

    def __iter__(self) -> Iterator[LayerKey]:
        return iter(self._by_layer)

    def __len__(self) -> int:
        return len(self._by_layer)

    def __repr__(self) -> str:
        return f"PerLayer of {len(self)} layers"


OF_SOFTMAX = "what is before a softmax, or weighs by values,"  # the views that no layer without one has
ENTRIES = {"softmax": "weight", "scores": "score", "value": "norm", "logit": "logit"}  # the column of what a view reads


@dataclass(frozen=True)
class View:
    """How entries are read wherever they are tabled or drawn.

    weights: "softmax"; "scores", the logits after scale, cap, bias and mask; "value", the norm of what a key writes
    into the residual stream, A[i,j] |v_j W_O| (Kobayashi et al. 2020, arXiv 2004.10102), norms and gates as they were
    in the query's row; or "logit", what it adds to the logit of the answer's token, signed, in the rows that make the
    answer: over the mean of all tokens, or with a foil over the foil's first token. by_kv: average the query heads that
    share a kv head. heads: {layer: heads to keep}, None for all. channel: of layers whose channels have maps of their
    own, the one whose signed map is read; without it the mean of |w| over all.

        >>> attnscope.Request(view=attnscope.View(by_kv=True, heads={0: [1, 2]}), relations=True)
    """

    weights: Literal["softmax", "scores", "value", "logit"] = "softmax"
    by_kv: bool = False
    heads: Mapping[int, Sequence[int]] | None = None
    foil: str | None = None
    channel: int | None = None

    def __post_init__(self) -> None:
        if self.channel is not None and self.channel < 0:
            raise UsageError(f"expected a channel from 0, got {self.channel}", "use {channel=0}")
        if self.foil is not None and self.weights != "logit":
            raise UsageError("a foil needs effects on a logit", "add {weights=logit}, or leave out {foil}")

    @property
    def by_size(self) -> bool:
        """Whether the strongest entries are the largest of either sign."""
        return self.weights == "logit"

    @property
    def of_heads(self) -> bool:
        """Whether entries are the weights of the heads themselves."""
        return self.weights == "softmax" and not self.by_kv

    def kept(self, layer: Layer) -> list[int]:
        """The heads (kv heads, when averaged) of a layer that this view keeps."""
        if self.heads is None:
            return list(range(layer.kv_heads if self.by_kv else layer.P.heads))
        starts = range(0, layer.P.heads, layer.P.heads // len(layer.keys))
        of_layers = [self.heads.get(key.layer, ()) for key in layer.keys]
        chosen = [start + head for start, heads in zip(starts, of_layers, strict=True) for head in heads]
        return sorted({layer.kv_head(head) for head in chosen}) if self.by_kv else chosen

    def rows(self, layer: Layer, heads: Sequence[int], start: int, stop: int, most: int | None = None) -> Tensor:
        """Entries of a block of queries, fp32 (B, len(heads), stop - start, K).

        most: only so many largest are wanted of each row: of a view of "value" others may be 0.
        """
        entries = layer.P.scores(start, stop) if self.weights == "scores" else layer.P.rows(start, stop)
        if self.weights in ("value", "logit"):
            assert layer.written is not None
            few = most is not None and self.weights == "value" and not self.by_kv
            entries = entries * (layer.written(start, stop, entries, most) if few else layer.written(start, stop))
        return self.select(layer, heads, entries)

    def select(self, layer: Layer, heads: Sequence[int], values: Tensor) -> Tensor:
        """(B, H, ...) -> (B, len(heads), ...): the values of these heads; of a kv head the mean over its own."""
        values = layer.per_kv_head(values) if self.by_kv else values
        return values if list(heads) == list(range(values.shape[1])) else values[:, list(heads)]

    def seen(self, layer: Layer, heads: Sequence[int], seen_BHQK: Tensor) -> Tensor:
        """Which entries of these heads there are, from what the query heads see, (B or 1, H or 1, Q, K) boolean.

        A kv head has a mean weight where any of its heads sees the key, and a mean logit where all of them do.
        """
        if seen_BHQK.shape[1] == 1:  # one mask for all heads
            return seen_BHQK
        if self.by_kv:
            grouped = seen_BHQK.unflatten(1, (layer.kv_heads, -1))
            seen_BHQK = grouped.all(2) if self.weights == "scores" else grouped.any(2)
        return seen_BHQK[:, list(heads)]


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

    def selecting(
        self,
        select: str | None,
        heads: Mapping[str, Mapping[int, int]],
        plain: str,
        named: HeadsByRole | None = None,
        of: str = MODEL,
    ) -> Request:
        """The same of the heads that an expression names, None for all; the rest as of `select_stacks`.

        plain: the stack that the view's heads are of.
        """
        if select is None:
            return self
        chosen = select_stacks(select, heads, plain, named, of=of)
        view = replace(self.view, heads=chosen.get(plain, {}))
        return replace(self, view=view, stacks=chosen if len(heads) > 1 else None)

    def view_of(self, asked: bool | Mapping[int, Sequence[int]]) -> View:
        """The view, of the heads that `weights` or `operands` asks for."""
        return replace(self.view, heads=asked) if isinstance(asked, Mapping) else self.view

    def keeps(self, layer: Layer) -> bool:
        """Whether anything is kept of a layer: of its heads, or of all."""
        views = self.view, self.view_of(self.weights), self.view_of(self.operands)
        return self.maps == "all" or self.rollout is not None or any(view.kept(layer) for view in views)

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
        request = replace(
            self,
            view=replace(self.view, heads=heads),
            rollout=rollout,
            per_token=per_token,
            weights=_own(self.weights, stack, plain),
            operands=_own(self.operands, stack, plain),
        )
        return request.of_signed() if mixes(stack) else request

    def of_signed(self) -> Request:
        """What is asked of a linear layer: metrics of signed rows, and maps that keep signs where they are binned.

        Its map has no sink, and is made of no q and k by a softmax; a rollout is of attention.
        """
        metrics = (*self.metrics, *SIGNED) if self.metrics else ()
        return replace(self, metrics=metrics, bin_rule="max", split_sink=False, rollout=None, operands=False)

    @property
    def asks(self) -> bool:
        """Whether the question is of the text's own tokens or units, which the tower of a decoder has none of."""
        return any((self.query, self.key, self.group, self.rollout))

    @property
    def rolls_out_alone(self) -> bool:
        """Whether all that is asked for is a rollout, which layers without a softmax have no part in."""
        others = self.metrics, self.maps, self.relations, self.weights, self.operands, self.per_token, self.spans
        return self.rollout is not None and not any(others)

    def chosen(self, prompt: Prompt, source: Prompt | None = None) -> TokenSelection:
        """The tokens of a text that are asked about. Raises UsageError or InputError for what means none.

        source: what an encoder-decoder's encoder reads, where the prompt is its decoder's.
        """
        asked = self.query, self.key, self.define, self.spans
        return choose(prompt, *asked) if source is None else choose_of_two(prompt, source, *asked)


def _own(asked: bool | Mapping[int, Sequence[int]], stack: str, plain: str) -> bool | Mapping[int, Sequence[int]]:
    """Of {layer: heads} those of one stack: of layers without a softmax those whose indices name it.

    plain: the stack of indices that name none.
    """
    if not isinstance(asked, Mapping):
        return asked
    names = [stack] * mixes(stack) + [""] * (stack == plain or not mixes(stack))
    return {int(layer): heads for layer, heads in asked.items() if stack_of(layer) in names}


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
    def key_prompt(self) -> Prompt:
        """The text that the keys are of."""
        return self.keys or self.prompt

    @property
    def queries(self) -> Sequence[int]:
        """The queries that are asked about: those that were named, or all that there are."""
        return self.chosen.query.positions if self.chosen.query else range(self.prompt.medium.unasked, len(self.prompt))

    @property
    def key_positions(self) -> Sequence[int]:
        """The keys that are asked about: those that were named, or all."""
        return self.chosen.key.positions if self.chosen.key else range(len(self.key_prompt))


def nothing_named(asked: Sequence[TextInputs]) -> bool:
    """Whether tokens were named, and no text has any of them."""
    return all(text.chosen.nothing for text in asked)


EngineWord = Literal["auto", "eager", "fused", "tiles", "numba", "triton", "probe"]
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


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a text is read: each call whose options these are takes them from here.

    chat: apply the chat template. truncate: cut a text that is too long, on this side. generate: let the model add up
    to so many tokens after the text, which are read with it. target: what an encoder-decoder's decoder reads, as text
    or as ids; without it what the model makes of the text, greedily, in at most `generate` tokens. picture: one or
    several, files or pictures of Pillow, that a vision-language model reads with the text. pair: a second text, read
    with the first as its tokenizer writes a pair: special tokens between them, and token types where the model has
    some. global_tokens: those with global attention, of Longformer and LED, as an expression; "none" for none; without
    it what the model's class chooses.
    """

    chat: bool = False
    truncate: Side | None = None
    generate: int | None = None
    target: str | Sequence[int] | None = None
    picture: PictureSource | Sequence[PictureSource] | None = None
    pair: str | None = None
    global_tokens: str | None = None


@dataclass(frozen=True)
class CaptureSpec(Reading):
    """A text, what is kept of it, and how it is read.

    text: the text, its tokens as a Prompt, token ids, or a sound. keep: what is kept, and of which tokens.

    engine: "eager" reads the model's own matrices, "fused" makes none ("tiles", "numba", "triton": that way of it),
    "probe" reads the kernel that the model runs with, "auto" takes the faster of the first two that gives what is asked
    and fits the memory. memory: what a layer's matrices may take,
    such as "4GB". listen: with the fused engine, leave the layers' outputs to the model. verify: hold every layer
    against the oracle.

    select: heads to keep, as "27.3,last"; over the view's own. atlas: what `scan` found, or its folder; without one
    what lies in atlas/ of the model's own folder, where it is of these weights.

    answer: put this after the text, as text where the text is one, else as ids. The others are those of `Reading`.
    """

    text: Text
    keep: Request = Request()
    engine: str = "auto"
    memory: str | None = None
    listen: bool = False
    verify: bool = False
    select: str | None = None
    atlas: HeadNames | Path | str | None = None
    answer: str | Sequence[int] | None = None

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
        for what, value in [("an atlas", atlas), *(("a picture", item) for item in pictures or ())]:
            if value is not None and not isinstance(value, str | os.PathLike):
                raise UsageError(f"{what} in memory has no form in JSON", "save it to a file and name that")
        record = {option.name: getattr(self, option.name) for option in fields(self) if option.name != "keep"}
        record |= {"text": text, "atlas": None if atlas is None else os.fspath(atlas)}  # type: ignore[arg-type]
        record["picture"] = None if pictures is None else [os.fspath(file) for file in pictures]  # type: ignore[arg-type]
        return {"schema": SCHEMA, **record, "keep": to_json(self.keep)}

    @classmethod
    def of_json(cls, document: Any) -> CaptureSpec:
        """The ask that JSON holds. Raises UsageError for another schema, an unknown field, and another type."""
        if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
            raise UsageError(f"expected an ask of the form {SCHEMA}", "write one with CaptureSpec.as_json")
        form = from_json(_Form, {name: value for name, value in document.items() if name != "schema"}, "ask")
        return cls(**{option.name: getattr(form, option.name) for option in fields(form)})


def spec_of(text: Text, how: Reading, keep: Request = Request(), **more: Any) -> CaptureSpec:
    """A text that is read so; more: further fields of the spec."""
    return CaptureSpec(text, keep, **{option.name: getattr(how, option.name) for option in fields(Reading)}, **more)


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
        (option.name, _JSON_TYPES.get(option.name, option.type), field(default=option.default, kw_only=option.kw_only))
        for option in fields(CaptureSpec)
    ],
    namespace={"__module__": __name__},
)


@dataclass(frozen=True)
class RunInfo:
    """What is known before the forward pass: the text that was given, and who reads it.

    by_memory: whether the engine was chosen by the memory that was free.
    """

    text: Prompt
    name: str
    revision: str | None
    device: str
    dtype: str
    by_memory: bool = False

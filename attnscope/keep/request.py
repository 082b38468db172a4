"""What to keep of a forward pass, and what it is asked of: texts, the tokens of them that are named, their stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from attnscope.errors import UsageError
from attnscope.inputs.tokens import TokenSelection as Chosen
from attnscope.inputs.tokens import choose, choose_of_two
from attnscope.keep.view import View
from attnscope.metrics.binned import MAP_SIDE
from attnscope.metrics.metrics import METRICS
from attnscope.model.selection import has_summaries, is_causal, is_cross, is_over_patches, is_vision, sides

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.geometry import Geometry


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
    k and v as they were multiplied. Both are of the view's heads, or of {layer: heads}. rollout: the units whose
    attention is rolled out; `bins` are at most MAP_SIDE runs of tokens. per_token: keep what every token gets from the
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
        """Whether the question is of the text's own tokens or units, which a tower beside a decoder has none of."""
        return any((self.query, self.key, self.group, self.rollout))

    def chosen(self, prompt: Prompt, source: Prompt | None = None) -> Chosen:
        """The tokens of a text that are asked about. Raises UsageError or InputError for what means none.

        source: what an encoder-decoder's encoder reads, where the prompt is its decoder's.
        """
        asked = self.query, self.key, self.define, self.spans
        return choose(prompt, *asked) if source is None else choose_of_two(prompt, source, *asked)


class Asked(NamedTuple):
    """A text, the tokens of it that are asked about, and the text that an encoder-decoder's encoder reads."""

    prompt: Prompt
    chosen: Chosen
    source: Prompt | None = None
    keys: Prompt | None = None  # where they are another text's than the queries

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.prompt), len(self.source or ())

    def of(self, stack: str, plain: str) -> list[Asked]:
        """What one stack reads: of a tower beside a decoder a text for each picture, or part of one, that it is given.

        plain: the model's own stack. Nothing of one over patches: only the pass will say where in the text they are.
        """
        if is_vision(stack) and stack != plain:
            return [Asked(part, Chosen()) for part in self.prompt.medium.tower]
        if is_over_patches(stack):
            return []
        return [self._of_two(stack)]

    def _of_two(self, stack: str) -> Asked:
        """What one stack of an encoder-decoder reads."""
        chosen = self.chosen.of(stack)
        if self.source is None or is_causal(stack):
            return self._replace(chosen=chosen)
        queries, keys = sides(stack, self.source, self.prompt)
        return Asked(queries, chosen, keys=None if keys is queries else keys)

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


def nothing_named(asked: Sequence[Asked]) -> bool:
    """Whether tokens were named, and no text has any of them."""
    return all(one.chosen.nothing for one in asked)

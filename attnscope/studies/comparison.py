"""Two texts, or two models on the same texts, head by head: two forward passes per pair, compared layer by layer.

    result = compare_heads([(OneSide(loaded, one, engine), OneSide(loaded, other, engine))])
    result.js.effect         # (N,) bits, per head
    heads_table(result)      # a row per head, largest divergence first

Of the first pass q, k and v of every layer are kept, never a matrix; the second is compared while it runs, in blocks of
rows. Last the tables, and the folder that holds them.

Shapes: S text, N head of all layers, Q, K cell of a map.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from attnscope.attention.linear import shares_of
from attnscope.attention.operator import DenseAttention
from attnscope.attention.spec import Visibility
from attnscope.errors import InputError, MemoryLimitError, UsageError
from attnscope.hooks.forward import text_inputs
from attnscope.hooks.listen import calls_interface, listen
from attnscope.inputs.spans import WORDS, Align, Units, alignment, units
from attnscope.inputs.tokens import TokenSelection
from attnscope.metrics.divergence import (
    Divergence,
    DivergenceSide,
    KeyChanges,
    diverge,
    key_changes,
    own_pairs,
    readable,
)
from attnscope.metrics.metrics import KNOWN, METRICS, measure, metrics_for
from attnscope.metrics.roles import roles_of
from attnscope.metrics.texts import MAP_SIDE, Cells
from attnscope.model.selection import DECODER, ENCODER, NAMES, SOFTMAX, STACKS, TEXT_TASKS, prefix, sides
from attnscope.observe.collect import texts_of
from attnscope.observe.collectors.heads import HeadScores
from attnscope.observe.request import Layer, LayerKey, TextInputs
from attnscope.studies.intervals import FEWEST, SHARE, Range
from attnscope.studies.statistics import Effects, largest_first, paired_where_shown
from attnscope.studies.study_folder import head_columns
from attnscope.utils.display import head_name
from attnscope.utils.files import check_schema, check_types, damaged, jsonable, read_json, read_small, refuse_links
from attnscope.utils.folders import OVER, check, document, refuse_other_kind
from attnscope.utils.memory import DTYPE_BYTES, free_memory, human_bytes, read_size
from attnscope.utils.tables import as_table, numbers, read_delimited, words

if TYPE_CHECKING:
    from attnscope.attention.operator import AttentionOperator
    from attnscope.hooks.calls import AttentionCall
    from attnscope.hooks.engines import Engine
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.loaded import LoadedModel
    from attnscope.model.selection import HeadsByLayer

LayersRead = Callable[[int], object]
Keep = Callable[["LayerKey", "AttentionOperator", "LayerScores"], None]


class OneSide(NamedTuple):
    """One text that a model is about to read; source: what an encoder-decoder's encoder reads."""

    loaded: LoadedModel
    prompt: Prompt
    engine: Engine
    source: Prompt | None = None

    @property
    def has_own_matrix(self) -> bool:
        """Whether the weights are those of a kernel, whose work q and k do not tell; eager attention follows them."""
        return self.engine.output == "model" and self.engine.implementation != "eager"

    @property
    def asked(self) -> dict[str, TextInputs]:
        """What every stack reads."""
        both = TextInputs(self.prompt, TokenSelection(), self.source)
        geometry = self.loaded.geometry
        return {stack: both.of(stack, geometry.stack)[0] for stack in geometry.stacks}


class Shared(NamedTuple):
    """A text on both sides: its name where there are two, the stack that reads it, its tokens and their units.

    by: how its tokens are paired.
    """

    name: str
    stack: str
    first: Prompt
    other: Prompt
    units: Units
    by: Align

    @classmethod
    def of(cls, name: str, stack: str, first: Prompt, other: Prompt, align: Align | None) -> Shared:
        """A text on both sides, paired as asked. Raises as `alignment`."""
        by = alignment(first.plain, other.plain, align)
        return cls(name, stack, first, other, units(first.plain, other.plain, by), by)

    @property
    def moved(self) -> int:
        """How many shared tokens are at another position in the other text; 0 for one text on both sides."""
        return 0 if "".join(self.first.plain) == "".join(self.other.plain) else self.units.moved


class Drawn(NamedTuple):
    """What can be drawn of a stack: the heads of each layer, their maps (h, Q, K), the units that cells are of."""

    heads: HeadsByLayer
    values: Mapping[int, np.ndarray]
    cells: tuple[Cells, Cells]


class Pair(NamedTuple):
    """Two texts, what they share, and what can be drawn of each stack where maps were asked for.

    texts: each that both sides read: of encoder-decoders the encoder's `text`, then the decoder's `target`.
    """

    first: OneSide
    other: OneSide
    texts: Sequence[Shared]
    drawn: Mapping[str, Drawn] = {}

    @classmethod
    def of(cls, first: OneSide, other: OneSide, align: Align | None = None) -> Pair:
        """Two readings, their tokens aligned.

        Raises InputError where they share none, and as `alignment` and `check_alike`.
        """
        check_alike(first.loaded, other.loaded)
        for one in (first, other):
            one.loaded.check_queries("a comparison")
        if first.source is None:
            first.loaded.check_task("one text at a time", DECODER, ENCODER)
        stack = first.loaded.geometry.stack
        both = first.source is not None and other.source is not None
        texts = [Shared.of("target" if both else "", stack, first.prompt, other.prompt, align)]
        if first.source is not None and other.source is not None:
            texts.insert(0, Shared.of("text", ENCODER, first.source, other.source, align))
        if not any(text.units.size for text in texts):
            raise InputError("the two texts share no word", "compare texts that have some in common")
        return cls(first, other, texts)

    @property
    def shared(self) -> Units:
        """What the texts share that the queries of the model's own stack are of."""
        return self.texts[-1].units

    def axes(self, stack: str) -> tuple[Shared, Shared]:
        """What the queries and the keys of a stack are of."""
        text, target = self.texts[0], self.texts[-1]
        return sides(stack, text, target)


class LayerScores(NamedTuple):
    """What is measured of one layer of a side, (H,) each: metrics, NaN of another stack; for a gate text roles and
    `own_pairs`."""

    metrics: Mapping[str, np.ndarray]
    roles: np.ndarray | None = None
    own: np.ndarray | None = None


class Changes(NamedTuple):
    """What a gate asks besides, per text and head, (S, N) each.

    roles, own: of the first side and of the other, the text role and `own_pairs`. keys: which have mass on one side
    alone, as `KeyChanges` has it; None against a baseline. masks: then the names of both sides' masks, empty where one
    is not known.
    """

    roles: tuple[np.ndarray, np.ndarray]
    own: tuple[np.ndarray, np.ndarray]
    keys: KeyChanges | None = None
    masks: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True)
class Comparison:
    """What two sides differ in: heads as (layer, head), and per text and head (S, N) arrays of `Divergence`'s numbers.

    head_stacks: the stack of each head, those of one stack side by side. metrics: {id: (first, other)}, NaN for null.
    failures: what did not hold in a pass, in words. pair: where there is but one. changes: where a gate asks for them.
    """

    heads: tuple[tuple[int, int], ...]
    head_stacks: tuple[str, ...]
    js_SN: np.ndarray
    rows_SN: np.ndarray
    lost_SN: np.ndarray
    other_lost_SN: np.ndarray
    metrics: Mapping[str, tuple[np.ndarray, np.ndarray]]
    failures: Sequence[str]
    pair: Pair | None = None
    changes: Changes | None = None

    @property
    def texts(self) -> int:
        return len(self.js_SN)

    @property
    def has_divergence(self) -> bool:
        """Whether a head has one: against a baseline none does."""
        return bool(np.isfinite(self.js_SN).any())

    @property
    def stacks(self) -> dict[str, list[int]]:
        """The places of every stack's heads."""
        return {
            stack: [at for at, own in enumerate(self.head_stacks) if own == stack]
            for stack in dict.fromkeys(self.head_stacks)
        }

    def stack_name(self, stack: str) -> str:
        """`cross `, as it is put before a layer; nothing where a number alone means one of this stack."""
        return prefix(stack) * (len(self.stacks) > 1)

    def name(self, place: int) -> str:
        """`L3H2`, `cross L3H2` of the head at a place."""
        return self.stack_name(self.head_stacks[place]) + head_name(*self.heads[place])

    @cached_property
    def js(self) -> Effects:
        """The mean divergence of each head, with an interval over the texts."""
        return self._paired(self.js_SN, np.zeros_like(self.js_SN[0]), SHARE)

    @cached_property
    def differences(self) -> dict[str, Effects]:
        """The other side's metrics minus the first's, over the texts in which they can show on both."""
        return {
            name: self._paired(other_SN, first_SN, KNOWN[name].within)
            for name, (first_SN, other_SN) in self.metrics.items()
        }

    def open_ends(self) -> tuple[int, int]:
        """How many intervals of metrics' differences have an open end, and how many there are."""
        every = self.differences.values()
        enough = np.concatenate([effects.n >= FEWEST for effects in every])
        ends = np.concatenate([np.isnan(effects.low) | np.isnan(effects.high) for effects in every])
        return int((ends & enough).sum()), int(enough.sum())

    def _paired(self, score_SN: np.ndarray, null: np.ndarray, within: Range | None) -> Effects:
        """The difference of each stack over the texts in which one of its heads has one.

        null: measured on the same texts (S, N), or known (N,).
        """
        by_stack = [
            paired_where_shown(score_SN[:, places], null[..., places], flips=0, within=within)
            for places in self.stacks.values()
        ]
        names = [column.name for column in fields(Effects)]
        return Effects(**{name: np.concatenate([getattr(part, name) for part in by_stack]) for name in names})

    @property
    def order(self) -> list[int]:
        """Places of the heads, largest divergence first, those without one last."""
        return largest_first(self.js.effect)


def compare_heads(
    pairs: Iterable[tuple[OneSide, OneSide]],
    *,
    maps: Mapping[str, HeadsByLayer] | None = None,
    memory: str | None = None,
    align: Align | None = None,
    changes: bool = False,
    advance: LayersRead = lambda layers: None,
) -> Comparison:
    """Read both sides of every pair and compare each head with the one of the same place, stack by stack.

    maps: the heads of each stack of which the difference is kept to be drawn, binned to at most MAP_SIDE cells a side;
    of one pair alone. memory: what may be kept of the first side, such as "4GB"; what is free without it. align: how
    tokens are paired; as `alignment` says without it. changes: what a gate asks besides, of sides that read the same
    tokens. advance: called with 1 whenever a layer was read. Raises
    UsageError for models of other layers or heads, InputError for texts that share nothing or cannot be paired as
    asked, MemoryLimitError for one that is too long.
    """
    texts = [_Passes(Pair.of(first, other, align), maps or {}, memory, advance, changes) for first, other in pairs]
    if not texts:
        raise InputError("there is no text to compare", "give at least one")
    heads = texts[0].heads
    if any(passes.heads != heads for passes in texts):
        raise InputError("not all texts are attended to by the same layers", "give texts of about one length")

    # Texts as rows, S, and the heads of all stacks as columns, N.
    def column(whose: Callable[[_Passes], Mapping[LayerKey, Any]], value: Callable[[Any], np.ndarray]) -> np.ndarray:
        return np.stack([np.concatenate([value(whose(one)[key]) for key in one.divergences]) for one in texts])

    def of_sides(value: Callable[[LayerScores], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        return column(lambda one: one.values[0], value), column(lambda one: one.values[1], value)

    def metric(name: str) -> tuple[np.ndarray, np.ndarray]:
        return of_sides(lambda scores: scores.metrics[name])

    # What a gate asks besides.
    moved = None
    if changes:
        keys = [column(attrgetter("changes"), attrgetter(name)) for name in KeyChanges._fields]
        moved = Changes(of_sides(attrgetter("roles")), of_sides(attrgetter("own")), KeyChanges(*keys))
    divergence = {f"{name}_SN": column(attrgetter("divergences"), attrgetter(name)) for name in Divergence._fields[:4]}
    return Comparison(
        heads=tuple((key.layer, head) for key, head in heads),
        head_stacks=tuple(key.stack for key, _ in heads),
        **divergence,
        metrics={name: metric(name) for name in METRICS},
        failures=list(dict.fromkeys(line for passes in texts for line in passes.failures)),
        pair=texts[0].pair._replace(drawn=texts[0].drawn) if len(texts) == 1 else None,
        changes=moved,
    )


def weights_divergence(
    first_HQK: torch.Tensor, other_HQK: torch.Tensor, shared: Units, shares: bool = False
) -> Divergence:
    """The same of matrices that were kept of two texts' passes, for one layer; shared: what the texts share.

    shares: whether |w| is read as a share of its row.

    >>> weights_divergence(seen.weights[3], other.weights[3], units(seen.prompt.plain, other.prompt.plain)).js   # (H,)
    """
    if shares:
        first_HQK, other_HQK = shares_of(first_HQK), shares_of(other_HQK)
    both = (first_HQK, shared.of_a), (other_HQK, shared.of_b)
    layers = ((DenseAttention(side_HQK[None], Visibility(*side_HQK.shape[1:])), of) for side_HQK, of in both)
    first, other = (DivergenceSide.of(P, of, of) for P, of in layers)
    cells = Cells.of(range(shared.size), MAP_SIDE)
    return diverge(first, other, (cells, cells))


def check_alike(first: LoadedModel, other: LoadedModel) -> None:
    """Raise UsageError where heads have no counterpart: other stacks, layers, or numbers of heads.

    Raises ModelError for a model whose layers do not all read tokens.
    """
    for loaded in (first, other):
        loaded.check_task("a comparison", *TEXT_TASKS)
    one, two = first.geometry, other.geometry
    if one.task != two.task:
        raise UsageError(
            f"{first.name} is read as {NAMES[one.task]}, {other.name} as {NAMES[two.task]}: their heads have no "
            "counterparts",
            "compare models of one kind; {task=encoder} reads the encoder of an encoder-decoder",
        )
    if heads_of(first) != heads_of(other):
        raise UsageError(
            f"{first.name} has {one.in_words}, {other.name} {two.in_words}: their heads have no counterparts",
            "compare models with the same layers and heads",
        )


def heads_of(loaded: LoadedModel) -> dict[str, dict[int, int]]:
    """{stack: {layer index: number of heads}} of what is compared."""
    stacks = loaded.geometry.stacks
    return {stack: {layer.index: layer.heads for layer in layers.values()} for stack, layers in stacks.items()}


class _Passes:
    """Two passes: the first keeps every layer, the second compares with it."""

    def __init__(
        self,
        pair: Pair,
        maps: Mapping[str, HeadsByLayer],
        memory: str | None,
        advance: LayersRead,
        with_changes: bool = False,
    ) -> None:
        first, other = pair[:2]
        if with_changes and any(text.first.ids != text.other.ids for text in pair.texts):
            raise UsageError(
                "a gate compares key by key, and the two sides have other tokens",
                "compare models of one tokenizer, or leave out {gate}; what a decoder reads is set by {target}",
            )
        self.pair, self.maps = pair, maps
        for side in (first, other):
            side.loaded.check_softmax("compare")
        # What the first pass leaves stays until the second has read as far.
        loaded, tokens, source = first.loaded, len(first.prompt), len(first.source or ())
        needed = kept_bytes(loaded, tokens, source, whole=first.has_own_matrix)
        room = free_memory(loaded.devices) if memory is None else read_size(memory)
        if needed > room:
            raise MemoryLimitError(
                f"what is kept of {tokens + source} tokens while the other side is read takes {human_bytes(needed)}, "
                f"and {human_bytes(room)} are free for it",
                "shorten the text, or take a smaller model or dtype",
            )
        self.units = {stack: tuple(text.units for text in self.pair.axes(stack)) for stack in first.asked}
        self.kept: dict[LayerKey, AttentionOperator] = {}
        self.divergences: dict[LayerKey, Divergence] = {}
        self.values: tuple[dict[LayerKey, LayerScores], dict[LayerKey, LayerScores]] = ({}, {})
        self.with_changes = with_changes
        self.changes: dict[LayerKey, KeyChanges] = {}
        self.failures = read_side(first, self.keep, advance, with_changes)
        self.failures += read_side(other, self.hold_against, advance, with_changes)
        if not self.divergences:
            raise InputError("no layer attends to the tokens of both texts themselves", "take shorter texts")
        # Calls come in the order of the forward, tables have the order of stacks.
        in_order = sorted(self.divergences, key=lambda key: STACKS.index(key.stack))
        self.divergences = {key: self.divergences[key] for key in in_order}

    def keep(self, key: LayerKey, P: AttentionOperator, scores: LayerScores) -> None:
        self.kept[key], self.values[0][key] = readable(P, self.pair.first.has_own_matrix), scores

    def hold_against(self, key: LayerKey, P: AttentionOperator, scores: LayerScores) -> None:
        """Hold a layer of the second side against the first's."""
        before, self.values[1][key] = self.kept.pop(key, None), scores
        if before is None:
            return
        of_a, of_b = ([getattr(one, name) for one in self.units[key.stack]] for name in ("of_a", "of_b"))
        now = readable(P, self.pair.other.has_own_matrix)
        first, other = DivergenceSide.of(before, *of_a), DivergenceSide.of(now, *of_b)
        heads = self.maps.get(key.stack, {}).get(key.layer, ())
        self.divergences[key] = diverge(first, other, self.cells(key.stack), heads)
        if self.with_changes:
            self.changes[key] = key_changes(before, now)

    def cells(self, stack: str) -> tuple[Cells, Cells]:
        """The rows and columns of a stack's maps."""
        queries, keys = (Cells.of(range(one.size), MAP_SIDE) for one in self.units[stack])
        return queries, keys

    @property
    def heads(self) -> tuple[tuple[LayerKey, int], ...]:
        return tuple((key, head) for key, of_layer in self.divergences.items() for head in range(len(of_layer.js)))

    @property
    def drawn(self) -> dict[str, Drawn]:
        """What can be drawn of every stack that maps were kept of."""
        maps: dict[str, dict[int, np.ndarray]] = {}
        for (layer, stack), one in self.divergences.items():
            if one.map is not None:
                maps.setdefault(stack, {})[layer] = one.map
        return {stack: Drawn(self.maps[stack], values, self.cells(stack)) for stack, values in maps.items()}


def read_side(reading: OneSide, keep: Keep, advance: LayersRead, with_roles: bool) -> list[str]:
    """One forward pass over one text; each layer that attends to its tokens is kept once, with its heads' metrics.

    Returns what did not hold in the pass, in words.
    """
    loaded, texts_of_stacks, stacks = reading.loaded, reading.asked, reading.loaded.geometry.stacks
    # What is asked of each layer while it is there: metrics, and roles where a gate asks for them.
    texts = {stack: texts_of([text], loaded.device, stack) for stack, text in texts_of_stacks.items()}
    reads, inputs = text_inputs(loaded, reading.prompt, reading.source)
    scores = HeadScores()

    def measured(layer: Layer) -> LayerScores:
        count, stack = layer.P.heads, layer.key.stack
        if not with_roles:
            known = measure(layer.P, layer.texts, metrics_for(tuple(METRICS), stack))
            none_H = np.full(count, np.nan)
            return LayerScores({name: known[name][0].cpu().numpy() if name in known else none_H for name in METRICS})
        of_layer = scores.collect(layer, layer.P.together(scores.questions(layer)))
        parts = (of_layer.ids, of_layer.values), (of_layer.ids, of_layer.uniform), (of_layer.kinds, of_layer.support)
        value, null, support = (
            {name: part[0].expand(count).cpu().numpy() for name, part in zip(names, parts_SBH, strict=True)}
            for names, parts_SBH in parts
        )
        return LayerScores(value, roles_of(value, null, support, stack), own_pairs(layer.P))

    def on_call(call: AttentionCall) -> None:
        text = texts_of_stacks[call.stack]
        if call.call == 0 and (call.P.queries, call.P.keys) == (len(text.prompt), len(text.key_prompt)):
            layer = Layer(LayerKey(call.layer, call.stack), call.P, 1, texts[call.stack])
            keep(layer.key, call.P, measured(layer))
            advance(1)

    # A layer that is not heard would be missing from every number.
    layers = [(layer, stack) for stack, of_stack in stacks.items() for layer in of_stack]
    how: dict[str, Any] = {"engine": reading.engine, "windows": loaded.geometry.windows, "computed": False, **inputs}
    return list(listen(loaded.model, reads, on_call, expected_layers=layers, **how).failures(loaded.model.dtype))


def kept_bytes(loaded: LoadedModel, tokens: int, source: int = 0, whole: bool = False) -> int:
    """What the first pass leaves: q, k and v of every layer; of a family that shows none, its matrices.

    source: the tokens that an encoder-decoder's encoder reads. whole: the matrices in any case.
    """
    shows, numbers = calls_interface(loaded.model) and not whole, 0
    for stack, layers in loaded.geometry.stacks.items():
        queries, keys = sides(stack, source or tokens, tokens)
        for layer in layers.values():
            of_keys = keys * layer.kv_heads * (layer.head_dim + layer.value_dim)
            of_head = queries * (layer.head_dim if shows else keys)
            numbers += layer.heads * of_head + of_keys * shows
    return numbers * DTYPE_BYTES[loaded.dtype]


SCHEMA, NAME = "compare/2", "compare.json"
STACK = f"(?:(?:{'|'.join(SOFTMAX)})/)?"
OF_STACKS = re.compile(rf"{STACK}(?:layers/L[0-9]+|differences)\.(?:png|svg|pdf)")
Places = Sequence[int] | None


def heads_table(comparison: Comparison, places: Places = None) -> pa.Table:
    """A row per head, largest divergence first: js and its interval, lost mass, rows, and each metric's difference.

    places: of the heads that are listed, in their order.
    """
    order = comparison.order if places is None else list(places)
    columns = {name: getattr(comparison.js, part)[order] for name, part in JS.items()}
    lost = {name: getattr(comparison, f"{name}_SN").mean(0)[order] for name in ("lost", "other_lost")}
    return as_table(
        {
            **head_columns([comparison.heads[place] for place in order]),
            **columns,
            **lost,
            "rows": comparison.rows_SN.sum(0)[order].astype(np.int64),
            "texts": np.full(len(order), comparison.texts, np.int32),
            **{f"{name}_difference": comparison.differences[name].effect[order] for name in METRICS},
            "stack": _stacks(comparison, order),
        }
    )


JS = {"js": "effect", "js_low": "low", "js_high": "high"}
SIDES = {"first": "null", "other": "score", "difference": "effect", "low": "low", "high": "high"}


def metrics_table(comparison: Comparison, places: Places = None) -> pa.Table:
    """A row per metric and head: the metric on both sides, its difference with an interval, and the texts behind it."""
    order = comparison.order if places is None else list(places)
    effects = [comparison.differences[name] for name in METRICS]

    def column(part: str) -> np.ndarray:
        return np.concatenate([getattr(effect, part)[order] for effect in effects])

    which = head_columns([comparison.heads[place] for place in order] * len(METRICS))
    metric = words([name for name in METRICS for _ in order])
    values = {name: column(part) for name, part in SIDES.items()}
    texts, stack = column("n").astype(np.int32), _stacks(comparison, order * len(METRICS))
    return as_table({**which, "metric": metric.dictionary_encode(), **values, "texts": texts, "stack": stack})


def tokens_table(pair: Pair) -> pa.Table:
    """A row per unit that two texts share, then one per token without a partner; `unit` is null for those.

    read_by: the stack that reads the text, `encoder` and `decoder` of an encoder-decoder.
    """
    tables, nobody = [], list[int]()
    for text in pair.texts:
        rows, (first, other) = list(zip(*text.units.members, strict=True)), text.units.alone
        rows += [*(([token], nobody) for token in first), *((nobody, [token]) for token in other)]
        number = np.arange(len(rows), dtype=np.int32)
        columns: dict[str, Any] = {"unit": numbers(number, number >= text.units.size)}
        for side, (name, prompt) in enumerate((("first", text.first), ("other", text.other))):
            columns[f"{name}_position"] = words([",".join(map(str, row[side])) or None for row in rows])
            columns[f"{name}_text"] = words(["".join(prompt.tokens[at] for at in row[side]) or None for row in rows])
        tables.append(as_table({**columns, "read_by": words([text.stack] * len(rows))}))
    return pa.concat_tables(tables)


def comparison_facts(models: Sequence[LoadedModel], texts: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a comparison from another: the models, a hash of all texts, and what was asked for."""
    names = ("name", "revision", "dtype", "device")
    described = [{name: getattr(loaded, name) for name in names} for loaded in models]
    digest = hashlib.sha256("\0".join(texts).encode(errors="backslashreplace")).hexdigest()
    facts: dict[str, Any] = jsonable({"models": described, "texts_sha256": digest, "options": options})
    return facts


def load_comparison(folder: Path) -> tuple[Comparison, str]:
    """The divergences and differences of a finished comparison as if of one text, and what was compared, in words.

    Raises InputError for a folder with damaged or missing tables.
    """

    with damaged(f"{folder} holds no whole comparison", "compare again: attnscope compare --out DIR"):
        facts = read_json(folder / NAME)
        check_schema(facts, SCHEMA, folder, "compare again", InputError)
        check_types(facts, {"asked": {"models": list}, "texts": int})
        for model in facts["asked"]["models"]:
            check_types(model, {"name": str})
        columns = read_delimited(pa.BufferReader(read_small(folder / "heads.csv"))).to_pydict()
        rows = sorted(range(len(columns["stack"])), key=lambda at: (STACKS.index(columns["stack"][at]), at))
        stacks = tuple(str(columns["stack"][at]) for at in rows)
        heads = tuple((columns["layer"][at], columns["head"][at]) for at in rows)

        def of_heads(name: str) -> np.ndarray:
            return np.array([columns[name][at] for at in rows], np.float64)[None]

        js_1N = of_heads("js")
        none_1N = np.zeros_like(js_1N)
        metrics = {name: (none_1N, of_heads(f"{name}_difference")) for name in METRICS}
        names = [model["name"] for model in facts["asked"]["models"][:2]]
        line = f"{' compared with '.join(dict.fromkeys(names))}, {facts['texts']} texts"
        line += "".join(f", {said_of}" for by, said_of in WORDS.items() if by in facts.get("aligned", {}).values())
        return Comparison(heads, stacks, js_1N, none_1N, none_1N, none_1N, metrics, ()), line


def check_folder(folder: Path, asked: Mapping[str, Any], force: bool) -> None:
    """Raise UsageError for a folder that holds another comparison, or that another run fills, unless force is given."""
    before = _before(folder)
    if before is not None and not force:
        check_schema(before, SCHEMA, folder, OVER)
    refuse_other_kind(folder, NAME, force)
    check(folder, "comparison", before and before.get("asked", {}), asked, force)


def _before(folder: Path) -> dict[str, Any] | None:
    """What the compare.json of a folder says; None without one. Raises UsageError for a damaged one, and links."""

    def is_ours(before: Mapping[str, Any]) -> bool:
        parts = before.get("asked", {}), before.get("files", {})
        return str(before.get("schema")).startswith("compare/") and all(isinstance(part, dict) for part in parts)

    stacks = [folder / stack for stack in STACKS]
    refuse_links([*stacks, *(one / "layers" for one in (folder, *stacks))])
    hint = "name another folder, or remove it"
    return document(folder / NAME, "not what a comparison wrote, or damaged", hint, is_ours)


def clear(folder: Path) -> None:
    """Take away the layers of the comparison before, which may have been others; first the file that lists them."""
    before = _before(folder) or {}
    (folder / NAME).unlink(missing_ok=True)
    for name in before.get("files", ()):
        if OF_STACKS.fullmatch(name):
            (folder / name).unlink(missing_ok=True)


def _stacks(comparison: Comparison, order: Sequence[int]) -> Any:
    return words([comparison.head_stacks[place] for place in order]).dictionary_encode()

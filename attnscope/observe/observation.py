"""One text, observed: its heads as columns, relations, maps, matrices, and how the capture held. Nothing of it changes.

And per head, or on average over several, what every token has to do with the tokens that were asked about.

Shapes: N heads of all layers, H heads of a layer, Q query, K key, k kept keys, T token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from attnscope.errors import InputError, UsageError
from attnscope.hooks.report import GIVEN, UNREAD, failures
from attnscope.inputs.tokens import TokenSelection
from attnscope.metrics.metrics import MASS
from attnscope.metrics.roles import NEEDED_ROWS, NONE, SINK_MASS
from attnscope.model.selection import CROSS, DECODER, ENCODER, STACKS, is_bidirectional, mixes
from attnscope.observe.records import (
    Head,
    HeadColumns,
    Relation,
    RelationRows,
    first_ranked,
    with_others,
)
from attnscope.observe.request import ENTRIES, LayerKey, ModelLayers, PerLayer, codes, kv_head_of
from attnscope.utils.display import shortened

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from attnscope.hooks.report import CallCheck, CaptureReport
    from attnscope.inputs.prompt import Prompt
    from attnscope.observe.atlas import HeadNames
    from attnscope.observe.records import KeptKeys, KeptOperands, LayerMaps, Rollout, SpanPairs, TokenWeights
    from attnscope.observe.request import CaptureSpec, View

Axis = Literal["queries", "keys"]


@dataclass(frozen=True)
class NamesBeside:
    """A model that names its heads by an atlas in its own folder, where one lies: it is read when a name is wanted."""

    name: str
    revision: str | None
    source_folder: Path | None
    base_folder: Path | None

    def read(self) -> HeadNames | None:
        """What the atlas calls the heads, None without one."""
        from attnscope.observe.atlas import atlas_of

        return atlas_of(self)


@dataclass(frozen=True, repr=False)
class Observation:
    """One text, observed.

    queries, keys: the prompts on the two axes, one and the same where a text attends to itself. text_columns: every
    head and its scores, by the roles that it has on this text. view: how entries were read, and of which heads. group:
    what relations speak of, None for tokens. support: {layer: {kind of rows: how many}}. visible: {layer: which keys a
    query sees, as `window 16`}. received: the mean mass that each token receives as a key, over the kept heads (T,).
    kv_of: {layer: (heads, kv heads)}. facts: what a manifest says of the run. kept: what else was kept, by the name of
    its `Collector`; each has a property here. chosen: the tokens that were asked about; scores, supports and what
    tokens receive are then of the chosen queries, and `columns.scores["mass"]` is there where keys were chosen.
    named_by: the atlas that names the model's heads, or whose own folder may hold one. ask: how the text was asked,
    without the text itself. without: {layer: type} of its layers without attention: `ssm`, `linear`, `conv`. within:
    {layer: type} of what layers with attention compute in parallel: `ssm`. other_stacks: of an encoder-decoder, whose
    decoder's this is, the observations of its `encoder`, and of `cross`: the decoder's text as queries, the encoder's
    as keys; tables list them too.

        >>> seen = attnscope.capture(attnscope.load("demo"), "the financial bank")
        >>> seen.table("focus").to_pandas()
    """

    queries: Prompt
    keys: Prompt
    text_columns: HeadColumns
    view: View
    group: str | None
    support: PerLayer[Mapping[str, int]]
    visible: PerLayer[str]
    received: np.ndarray
    report: CaptureReport
    kv_of: PerLayer[tuple[int, int]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    chosen: TokenSelection = TokenSelection()
    named_by: HeadNames | NamesBeside | None = None
    without: Mapping[int, str] = field(default_factory=dict)
    within: Mapping[int, str] = field(default_factory=dict)
    other_stacks: Mapping[str, Observation] = field(default_factory=dict)
    ask: CaptureSpec | None = None

    def __post_init__(self) -> None:
        layers = ModelLayers([key.layer for key in self.kv_of], self.without)
        maps = (self.maps.values, self.maps.heads) if self.maps else ()
        for part in (self.support, self.visible, self.kv_of, *self.kept.values(), *maps):
            if isinstance(part, PerLayer):
                part.model = layers  # what the refusal of a layer without attention says

    @property
    def maps(self) -> LayerMaps | None:
        """What can be drawn, where that was asked for."""
        return self.kept.get("maps")

    @cached_property
    def weights(self) -> PerLayer[torch.Tensor]:
        """{layer: (H, Q, K) fp32 on the CPU}, where they were asked for."""
        return PerLayer({key: part.weights for key, part in self.kept.get("weights", {}).items()}, self.kv_of.model)

    @cached_property
    def weight_heads(self) -> PerLayer[Sequence[int]]:
        """{layer: the numbers of the heads whose `weights` were kept}."""
        return PerLayer({key: part.heads for key, part in self.kept.get("weights", {}).items()}, self.kv_of.model)

    @property
    def operands(self) -> PerLayer[KeptOperands]:
        """{layer: q, k and v of its heads}, where they were asked for."""
        return self.kept.get("operands", PerLayer())

    @property
    def rollout(self) -> Rollout | None:
        """What each unit is attributed to, where that was asked for."""
        return self.kept.get("rollout")

    @property
    def kept_keys(self) -> PerLayer[KeptKeys] | None:
        """{layer: the strongest keys of its queries}, None where relations were not asked for."""
        return self.kept.get("relations")

    @property
    def per_token(self) -> PerLayer[TokenWeights]:
        """{layer: what every token has to do with those that were asked about}, where that was asked for."""
        return self.kept.get("per_token", PerLayer())

    @property
    def spans(self) -> PerLayer[SpanPairs]:
        """{layer: the mass that the spans of `chosen` give each other, (H, S, S)}."""
        return self.kept.get("spans", PerLayer())

    @cached_property
    def atlas(self) -> HeadNames | None:
        """What names the model's heads, where there is something."""
        return self.named_by.read() if self.named_by else None

    @cached_property
    def columns(self) -> HeadColumns:
        """Every head and its scores, called what the atlas calls it where there is one."""
        return self.text_columns.named(self.atlas.roles) if self.atlas else self.text_columns

    def named(self, by: HeadNames | NamesBeside | None) -> Self:
        """The same with its heads called what an atlas calls them, in all stacks; None: as the text shows them."""
        others = {stack: obs.named(by) for stack, obs in self.other_stacks.items()}
        return replace(self, named_by=by, other_stacks=others)

    def __getstate__(self) -> dict[str, Any]:
        """With the names: where it is read, the model's folder may not be."""
        return {**self.__dict__, "named_by": self.atlas}

    def keeping(self, **kept: Any) -> Self:
        """The same with other things kept, or in other form."""
        return replace(self, kept={**self.kept, **kept})

    @property
    def prompt(self) -> Prompt:
        """The text that was read, as tokens; of an encoder-decoder what its encoder read."""
        return self.other_stacks[ENCODER].queries if self.of_two_texts else self.queries

    @property
    def of_two_texts(self) -> bool:
        """Whether an encoder-decoder read it, whose decoder's this is."""
        return ENCODER in self.other_stacks

    @cached_property
    def stacks(self) -> dict[str, Observation]:
        """The observation of every stack that was read, in the order of a forward pass: this one and the others."""
        of_stacks = {**self.other_stacks, self.stack: replace(self, other_stacks={}) if self.other_stacks else self}
        return {stack: of_stacks[stack] for stack in STACKS if stack in of_stacks}

    @property
    def stack(self) -> str:
        """The stack that this is the observation of."""
        return next((key.stack for key in self.kv_of), DECODER)

    def of(self, stack: str) -> Observation:
        """The observation of one stack. Raises UsageError for one that the model does not have."""
        if stack not in self.stacks:
            raise UsageError(f"this model has no {stack} layers", f"it has {', '.join(self.stacks)}")
        return self.stacks[stack]

    @cached_property
    def every(self) -> HeadColumns:
        """The heads of all stacks as columns."""
        return HeadColumns.joined([obs.columns for obs in self.stacks.values()])

    @cached_property
    def _texts(self) -> list[Prompt]:
        """What the stacks read, each text once."""
        return list({id(text): text for obs in self.stacks.values() for text in (obs.queries, obs.keys)}.values())

    def names(self, group: str | None = None) -> Sequence[str]:
        """The tokens, or the words or sentences, of every text that the stacks read, one text after the other."""
        return [name for text in self._texts for name in _units(text, group)]

    def place(self, axis: Axis, stack: np.ndarray, place: np.ndarray, group: str | None = None) -> np.ndarray:
        """The places of an axis in `names`, each in the text that its stack, a place in STACKS, reads."""
        if len(self._texts) == 1:
            return place
        starts = np.cumsum([0, *(len(_units(text, group)) for text in self._texts)], dtype=np.int32)
        start = {id(text): at for text, at in zip(self._texts, starts.tolist(), strict=False)}
        of_stack = [start.get(id(getattr(self.stacks.get(name), axis, None)), 0) for name in STACKS]
        return place + np.array(of_stack, np.int32)[stack]

    @cached_property
    def heads(self) -> list[Head]:
        """Every head, in the model's order."""
        return [self._head(place) for place in range(len(self.every.layer))]

    def kept_heads(self, sort: str | None = None) -> list[Head]:
        """The heads that the view keeps, in the model's order, or largest score first; with `-entropy` the smallest.

        `mass` puts those first that are furthest above uniform attention.
        """
        return [self.heads[place] for place in self.every.order(sort)]

    @property
    def ranked_by(self) -> str | None:
        """What heads are sorted by, by default: mass where keys were chosen, else focus, or the first metric that they
        have; None where nothing was measured."""
        return first_ranked(self.every.scores, np.flatnonzero(self.every.kept))

    def table(self, sort: str | None = None, top: int | None = None) -> pa.Table:
        """The kept heads: which, roles, top key, then a column per metric; in the order of `kept_heads`.

        top: so many heads alone, the first ones, and no rows of layers without attention; all without it.

        role is one word: the first role that the atlas names, where there is one (`-`: none), else text_role, the one
        that the head has on this text. atlas_roles: all that it names, joined by blanks, empty for none; null without
        an atlas, and for the mean over a kv head's group. Where keys were chosen mass and uniform follow the metrics,
        what uniform attention would give them. Then stack, the stack of the layer, and type, null of a head. Where no
        heads were chosen, a layer without attention is a row of nulls with what it is as its type, and so is what a
        layer computes besides attention: at its place in the model's order, else behind the heads.
        """
        columns, order = self.every, self.every.order(sort)[:top]
        top_key = self.place("keys", codes(columns.stack), columns.top_key)
        types = ((stack, {**obs.others, **obs.partners}) for stack, obs in self.stacks.items())
        others = [(stack, layer, what) for stack, of in types for layer, what in of.items() if layer not in self.mixing]
        others = others if top is None else []
        return with_others(columns.table(order, self.names(), top_key), others, sort)

    @cached_property
    def rules(self) -> Mapping[tuple[str, str], Sequence[int]]:
        """{stack and name of a rule: its layers} of the layers without a softmax that were read."""
        layers: dict[tuple[str, str], list[int]] = {}
        for stack, obs in self.stacks.items():
            for check in obs.report.calls if mixes(stack) else ():
                if check.call == 0 and (check.layer, stack) in obs.kv_of:
                    layers.setdefault((stack, check.kernel), []).append(check.layer)
        return layers

    @property
    def mixing(self) -> frozenset[int]:
        """The layers without a softmax that were read: tables list their heads, and no layer without attention."""
        return frozenset(chain.from_iterable(self.rules.values()))

    @property
    def others(self) -> Mapping[int, str]:
        """{layer: type} of the layers without attention, where no heads were chosen: each has a place of its own."""
        return self.without if self.view.heads is None else {}

    @property
    def partners(self) -> Mapping[int, str]:
        """{layer: type} of what layers with attention compute besides it, where no heads were chosen."""
        return self.within if self.view.heads is None else {}

    def key_table(self) -> pa.Table:
        """A row per token: the mean mass it receives from the kept heads, and which of them look at it most; those that
        receive most first. Tokens of a stack without a kept head have none.

        Columns position, token, received, heads (how many have it as their top key with a mass above SINK_MASS),
        `resting` (`L1H1 0.86, L2H0 0.41`, the largest mass first), stack: the stack whose keys these are.
        """
        from attnscope.utils.tables import as_table, texts_at, words

        resting: dict[tuple[str, int], list[Head]] = {}
        for head in sorted(self.kept_heads(), key=lambda head: -head.top_key_mass):
            if head.top_key_mass > SINK_MASS:
                resting.setdefault((head.stack, head.top_key), []).append(head)
        kept = {head.stack for head in self.kept_heads()}
        stacks = [(stack, of) for stack, of in self.stacks.items() if stack in kept or not kept]
        places = [(stack, position, token) for stack, of in stacks for position, token in enumerate(of.keys.tokens)]
        received = np.concatenate([of.received for _, of in stacks])
        order = np.argsort(-received, kind="stable").tolist()
        stack, position, tokens = zip(*(places[row] for row in order), strict=True)
        heads = [resting.get(key, []) for key in zip(stack, position, strict=True)]
        return as_table(
            {
                "position": np.array(position, np.int32),
                "token": words(tokens),
                "received": received[order],
                "heads": np.array([len(of_key) for of_key in heads], np.int32),
                "resting": words(
                    [", ".join(f"{head.name} {head.top_key_mass:.2f}" for head in of_key) for of_key in heads]
                ),
                "stack": texts_at(STACKS, codes(stack)),
            }
        )

    def rollout_table(self, top_k: int | None = None, min_weight: float | None = None) -> pa.Table:
        """The source of each unit of every stack's own text: the rows of `Rollout.table`, and their stack.

        Cross-attention has none: a rollout is of units that are the same on both sides.
        """
        import pyarrow as pa

        from attnscope.utils.tables import texts_at

        parts = []
        for stack, obs in self.stacks.items():
            if obs.rollout is not None:
                part = obs.rollout.table(top_k, min_weight)
                parts.append(part.append_column("stack", texts_at(STACKS, np.full(len(part), STACKS.index(stack)))))
        if not parts:
            raise UsageError("this observation kept no rollout", 'ask with Request(rollout="tokens")')
        return pa.concat_tables(parts).unify_dictionaries().combine_chunks()

    @property
    def rests_above(self) -> float:
        """The mean mass above which a top key is listed with its head: RESTS, or infinite where few queries count."""
        asked = self.chosen.query
        return SINK_MASS if asked is None or len(asked.positions) >= NEEDED_ROWS else math.inf

    def uniform(self, layer: int | tuple[int, str]) -> dict[str, float]:
        """What uniform attention would score in a layer, by metric. Raises UnknownLayerError as `weights` does."""
        key = LayerKey(*layer) if isinstance(layer, tuple) else LayerKey(layer, self.stack)
        _ = self.of(key.stack).kv_of[key]
        place = int(np.flatnonzero((self.every.layer == key.layer) & (self.every.stack == key.stack))[0])
        return {name: float(score.null[place]) for name, score in self.every.scores.items()}

    def units(self, axis: Axis = "queries") -> Sequence[str]:
        """The exact text of what relations speak of on an axis: tokens, or the words or sentences of the grouping."""
        return _units(getattr(self, axis), self.group)

    def relations(
        self, min_weight: float | None = None, over: Literal["heads"] | None = None, other_keys: bool = False
    ) -> pa.Table:
        """Who looks at whom: a row per head, query and key; of the queries and keys that were asked about.

        Columns layer, head, kv_head, query, query_token, key, key_token, weight (`score`, `norm` or `logit`, as the
        view reads entries), stack; those under min_weight are left out. In the model's order, strongest key first; over
        "heads", strongest first over all heads. Signed entries, effects on a logit and weights of linear layers, are
        ranked by their size. other_keys: without key 0 and each query's own key, unless keys were asked for; query 0,
        asked for, keeps the one key that it sees. Raises UsageError where no relations were kept.
        """
        from attnscope.utils.tables import as_table, numbers, texts_at

        columns, chosen = self.relation_numbers(min_weight), self.chosen
        order = np.arange(len(columns["weight"]))
        if other_keys and chosen.key is None:
            own = (columns["key"] == columns["query"]) & (columns["stack"] != STACKS.index(CROSS))
            # query 0 sees no other key than key 0
            order = order[(columns["key"] != 0) & ~own | (columns["query"] == 0) & (chosen.query is not None)]
        if over == "heads":
            weight = columns["weight"][order]
            by_size = self.view.by_size or self.view.weights == "softmax"  # those of linear layers are signed
            order = order[np.argsort(-np.abs(weight) if by_size else -weight, kind="stable")]
        columns = {name: column[order] for name, column in columns.items()}

        def tokens(axis: Axis, place: np.ndarray) -> pa.DictionaryArray:
            return texts_at(self.names(self.group), self.place(axis, columns["stack"], place, self.group))

        return as_table(
            {
                "layer": columns["layer"],
                "head": numbers(columns["head"], columns["head"] < 0),
                "kv_head": numbers(columns["kv_head"], columns["kv_head"] < 0),
                "query": columns["query"],
                "query_token": tokens("queries", columns["query"]),
                "key": columns["key"],
                "key_token": tokens("keys", columns["key"]),
                ENTRIES[self.view.weights]: columns["weight"],
                "stack": texts_at(STACKS, columns["stack"]),
            }
        )

    def relation_numbers(self, min_weight: float | None = None) -> dict[str, np.ndarray]:
        """The columns of `relations` as numbers: head is -1 where kv heads were averaged, stack a place in STACKS."""
        return self.relation_rows(min_weight).columns()

    def relation_rows(self, min_weight: float | None = None) -> RelationRows:
        """The same; what all rows of a head share is kept once."""
        return RelationRows.joined([part for obs in self.stacks.values() for part in obs._own_relations(min_weight)])

    def _own_relations(self, min_weight: float | None) -> Iterator[RelationRows]:
        """Those of this stack, layers of one shape together.

        Those under min_weight are left out, by their size where the view ranks by size, or weights are signed.
        """
        if self.kept_keys is None:
            raise UsageError("this observation kept no relations", "ask with Request(relations=True)")
        queries, keys = len(self.units()), len(self.units("keys"))
        place, by_size = STACKS.index(self.stack), self.view.by_size or mixes(self.stack)
        for _, alike in groupby(self.kept_keys.items(), lambda item: item[1].weight.shape[1:]):
            layers = list(alike)
            # Which entries are rows: padding, and what no query sees, are none.
            weight_HQk = np.concatenate([np.asarray(kept.weight[:, :queries]) for _, kept in layers])
            key_HQk = np.concatenate([np.asarray(kept.key[:, :queries]) for _, kept in layers], dtype=np.int32)
            keep = ~np.isnan(weight_HQk) & (key_HQk < keys)
            if min_weight is not None:
                keep &= (np.abs(weight_HQk) if by_size else weight_HQk) >= min_weight
            which = [
                _which(key.layer, tuple(kept.heads), *self.kv_of[key], self.view.by_kv, place) for key, kept in layers
            ]
            query_Q = np.array(layers[0][1].query[:queries], np.int32)
            if keep.size and (keep == keep[0]).all():  # as under a causal mask: the same entries of every head
                kept_Q, entry = np.count_nonzero(keep[0], -1), np.flatnonzero(keep[0])
                rows = np.full(len(keep), len(entry))
                weight, key = (part.reshape(len(part), -1).take(entry, 1).ravel() for part in (weight_HQk, key_HQk))
                query = np.tile(np.repeat(query_Q, kept_Q), len(keep))
            else:
                kept_HQ = np.count_nonzero(keep, -1)
                rows = kept_HQ.sum(-1)
                weight, key = weight_HQk[keep], key_HQk[keep]
                query = np.repeat(np.broadcast_to(query_Q, kept_HQ.shape), kept_HQ.ravel())
            yield RelationRows(np.concatenate(which), rows, query, key, weight)

    @property
    def most_relations(self) -> int:
        """How many rows `relations` can have."""
        kept = [keys for obs in self.stacks.values() for keys in (obs.kept_keys or {}).values()]
        return sum(math.prod(keys.weight.shape) for keys in kept)

    def kv_head(self, layer: int | LayerKey, head: int) -> int | None:
        """The kv head that a query head reads; None where that is not known."""
        kv_head = kv_head_of(head, *self.kv_of[layer])
        return None if kv_head < 0 else kv_head

    @cached_property
    def failures(self) -> list[str]:
        """What did not hold in this run, in words; empty when all did."""
        return failures(self.calls, self.facts.get("dtype", "float32"))

    @property
    def calls(self) -> list[CallCheck]:
        """How the calls of all stacks held."""
        return [check for obs in self.stacks.values() for check in obs.report.calls]

    @cached_property
    def unmeasured(self) -> list[str]:
        """What this run could not measure, in words."""
        unread = [*self.facts.get("unverified", ()), *self.facts.get("unread", ())]
        if not self.other_stacks:
            return self._unmeasured() + unread
        return [f"{stack}: {line}" for stack, obs in self.stacks.items() for line in obs._unmeasured()] + unread

    def _unmeasured(self) -> list[str]:
        calls = self.report.calls
        again = sorted({check.layer for check in calls if check.call > 0 and not check.repeats})
        pooled = [check for check in calls if is_bidirectional(check.stack) and check.queries not in (0, check.keys)]
        others = [check for check in calls if check.keys != self.report.tokens]
        other_keys = sorted({check.layer for check in (*pooled, *others) if check.call == 0})
        no_output = sorted(
            {check.layer for check in calls if check.value_error is None and check.route not in (GIVEN, UNREAD)}
        )
        lines = []
        if again:
            lines.append(f"layers {again} attend more than once; the scores are of each layer's first call")
        if other_keys:
            lines.append(f"layers {other_keys} attend to keys that are not tokens; they have no scores")
        if no_output:
            lines.append(f"layers {no_output}: P V was not compared with the layer's own output")
        mass = None if self.chosen.nothing else self.columns.scores.get(MASS.id)
        if mass is not None and np.isnan(mass.value).all():
            lines.append("mass: no query that was named sees a key that was named")
        return lines

    def __repr__(self) -> str:
        model, columns = self.facts.get("model", {}), self.every
        layers = len(set(zip(columns.layer.tolist(), columns.stack.tolist(), strict=True)))
        counted = f"{layers} layer" + "s" * (layers != 1)
        roles = Counter(role for role in columns.role.tolist() if role != NONE)
        kept = [name for name in ("kept_keys", "maps", "weights", "rollout") if getattr(self, name)]
        names = {"kept_keys": "relations"}
        return "\n".join(
            (
                f"Observation: {len(self.prompt)} tokens, {len(columns.layer)} heads in {counted} of "
                f"{model.get('name', 'a model')}, engine {self.facts.get('engine', 'eager')}",
                f"  text      {shortened(self.prompt.text, 60)!r}",
                f"  roles     {', '.join(f'{count} {role}' for role, count in roles.most_common()) or 'none'}",
                f"  kept      {', '.join(names.get(name, name) for name in kept) or 'scores alone'}",
            )
        )

    def _head(self, place: int) -> Head:
        columns = self.every
        weight = float(columns.relation_weight[place])
        relation = Relation(int(columns.relation_query[place]), int(columns.relation_key[place]), weight)
        mass = columns.scores.get(MASS.id)
        return Head(
            int(columns.layer[place]),
            None if columns.head[place] < 0 else int(columns.head[place]),
            None if columns.kv_head[place] < 0 else int(columns.kv_head[place]),
            str(columns.role[place]),
            {name: float(score.value[place]) for name, score in columns.scores.items()},
            None if np.isnan(weight) else relation,
            str(columns.stack[place]),
            columns.near_uniform[place],
            int(columns.top_key[place]),
            float(columns.top_key_mass[place]),
            float(mass.null[place]) if mass else None,
            str(columns.text_role[place]),
            tuple((columns.atlas_roles[place] or "").split()),
            str(columns.stack[place]) in self.other_stacks,
        )


@lru_cache(maxsize=1 << 10)
def _which(layer: int, numbers: tuple[int, ...], heads: int, kv_heads: int, by_kv: bool, stack: int) -> np.ndarray:
    """Of some heads of a layer what `RelationRows.which` says."""
    which = [
        (layer, -1 if by_kv else head, head if by_kv else kv_head_of(head, heads, kv_heads), stack) for head in numbers
    ]
    return np.array(which, np.int32).reshape(-1, 4)


def _units(text: Prompt, group: str | None) -> Sequence[str]:
    """The exact text of the tokens, or of the words or sentences."""
    return text.tokens if group is None else [span.name for span in text.spans(group)]


Mean = Literal["none", "layer", "all"]


@dataclass(frozen=True)
class HeadTokens:
    """One head, or the mean of several: every token's weight, and what uniform attention gives it, (T,), NaN if hidden.

    layer, head, kv_head: None where several were averaged. sink: the key to which most of the heads give most.
    stack: the layer's stack.
    """

    name: str
    layer: int | None
    head: int | None
    kv_head: int | None
    weight_T: np.ndarray
    uniform_T: np.ndarray
    sink: int
    stack: str = DECODER


def head_tokens(obs: Observation, mean: Mean = "none") -> list[HeadTokens]:
    """The kept heads of every stack, one by one, or on average per layer, or over all of the stack.

    Raises UsageError where none was asked for, InputError where no stack's texts have what is named.
    """
    stacks, several = list(obs.stacks.values()), bool(obs.other_stacks)
    weights = [head for of in stacks for head in _of_stack(of, mean, f"{of.stack} " * several)]
    if not weights and any(of.chosen.nothing for of in stacks):
        raise InputError("no stack that is shown has what is named in its texts", "choose others: {select=enc,dec}")
    if not weights:
        raise UsageError("this observation kept no weights per token", "ask with Request(per_token=True)")
    return weights


def _of_stack(obs: Observation, mean: Mean, stack: str) -> list[HeadTokens]:
    per_layer = {key.layer: _of_layer(obs, key, stack) for key in obs.per_token}
    if mean == "layer":
        of_layers = sorted(per_layer.items())
        return [_averaged(of, f"{stack}L{layer}, mean of {len(of)} heads", layer) for layer, of in of_layers]
    weights = [*chain.from_iterable(per_layer.values())]
    if mean == "all" and weights:
        return [_averaged(weights, f"{stack}mean of {len(weights)} heads", None)]
    return weights


def coloured(obs: Observation) -> Prompt:
    """The text whose tokens have weights: of a stack's queries where keys alone were chosen, else of its keys."""
    return obs.queries if obs.chosen.keys_alone else obs.keys


def token_table(obs: Observation, mean: Mean = "none") -> pa.Table:
    """A row per head and token; see `Capture.token_table`."""
    from attnscope.utils.tables import as_table, numbers, texts_at

    weights = head_tokens(obs, mean)
    counts = [len(head.weight_T) for head in weights]
    position = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    which = {
        name: np.repeat(
            np.array([-1 if (number := getattr(head, name)) is None else number for head in weights]), counts
        )
        for name in ("layer", "head", "kv_head")
    }
    tokens = [token for head in weights for token in coloured(obs.of(head.stack)).tokens]
    return as_table(
        {
            **{name: numbers(column.astype(np.int32), column < 0) for name, column in which.items()},
            "position": position,
            "token": texts_at(tokens, np.arange(len(tokens))),
            "weight": np.concatenate([head.weight_T for head in weights]),
            "uniform": np.concatenate([head.uniform_T for head in weights]),
            "stack": texts_at(STACKS, np.repeat(codes([head.stack for head in weights]), counts)),
        }
    )


def _of_layer(obs: Observation, key: LayerKey, stack: str) -> list[HeadTokens]:
    kept, columns, by_kv = obs.per_token[key], obs.columns, obs.view.by_kv
    places = np.flatnonzero((columns.layer == key.layer) & (columns.stack == key.stack))[kept.heads]
    sinks = np.where(columns.top_key_mass[places] > obs.rests_above, columns.top_key[places], 0).tolist()
    return [
        HeadTokens(
            stack + obs.heads[place].name,
            key.layer,
            None if by_kv else head,
            head if by_kv else obs.kv_head(key, head),
            np.asarray(kept.weight[row]),
            np.asarray(kept.uniform[row]),
            sinks[row],
            key.stack,
        )
        for row, (place, head) in enumerate(zip(places.tolist(), kept.heads, strict=True))
    ]


def _averaged(weights: list[HeadTokens], name: str, layer: int | None) -> HeadTokens:
    """The mean; a token that some of the heads cannot see has nothing of theirs."""
    sink = Counter(head.sink for head in weights).most_common(1)[0][0]
    means = {}
    for part in ("weight_T", "uniform_T"):
        part_HT = np.stack([getattr(head, part) for head in weights])
        mean_T = np.nan_to_num(part_HT).mean(0, dtype=np.float64)
        means[part] = np.where(np.isnan(part_HT).all(0), np.nan, mean_T).astype(np.float32)
    return HeadTokens(name, layer, None, None, **means, sink=sink, stack=weights[0].stack)

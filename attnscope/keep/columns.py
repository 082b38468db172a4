"""What the heads of a text do: all of them as columns, and one as a record.

Shapes: N heads of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa

from attnscope.errors import UsageError
from attnscope.keep.layers import codes
from attnscope.metrics.metrics import COLUMNS, MASS, order_of
from attnscope.metrics.roles import NONE
from attnscope.model.selection import STACKS, has_decoder_heads
from attnscope.utils.display import head_name
from attnscope.utils.tables import as_table, flags, numbers, texts_at, words


@dataclass(frozen=True)
class Score:
    """One metric of all heads, (N,) each, NaN for null: its value, and what uniform attention would score.

    low, high: the ends of an interval of the value, None where none was measured.
    """

    value: np.ndarray
    null: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclass(frozen=True)
class HeadColumns:
    """All heads (with by_kv, the means over the heads of each kv head) of all layers, one entry each, in model order.

    layer, stack, head, kv_head: which head; head is -1 for the mean over a kv head's group. role: what it is called,
    one word or `-`: the first role that an atlas names where there is one, else text_role. text_role: the role that it
    has on this text. atlas_roles: all that the atlas names, joined by blanks; None without an atlas. near_uniform:
    True, False, or None where the text cannot tell. scores: {metric id: Score}. top_key, top_key_mass: the key that
    receives most, and its mean mass. relation_*: its strongest relation; the weight is NaN where it has none. kept:
    whether the view keeps it.
    """

    layer: np.ndarray
    stack: np.ndarray
    head: np.ndarray
    kv_head: np.ndarray
    role: np.ndarray
    text_role: np.ndarray
    atlas_roles: np.ndarray
    near_uniform: np.ndarray
    scores: Mapping[str, Score]
    top_key: np.ndarray
    top_key_mass: np.ndarray
    relation_weight: np.ndarray
    relation_query: np.ndarray
    relation_key: np.ndarray
    kept: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[HeadColumns]) -> HeadColumns:
        """Those of several stacks as one; a metric without an interval in one of them has none.

        One that was not measured in a stack is null there.
        """
        if len(parts) == 1:
            return parts[0]
        of_heads = [one.name for one in fields(cls) if one.name != "scores"]
        nulls = [Score(*[np.full(len(part.layer), np.nan, np.float32)] * 2) for part in parts]
        names = dict.fromkeys(name for part in parts for name in part.scores)
        found = {name: [part.scores.get(name, null) for part, null in zip(parts, nulls, strict=True)] for name in names}
        scores = {
            name: Score(np.concatenate([one.value for one in of]), np.concatenate([one.null for one in of]))
            for name, of in found.items()
        }
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in of_heads}
        return cls(**joined, scores=scores)

    def named(self, roles: Mapping[tuple[int, int], Sequence[str]]) -> HeadColumns:
        """The same with the roles of an atlas, {(layer, head): names}.

        An atlas is of the heads of decoders: those of other stacks have none of its roles, and the mean over a kv
        head's group is nothing that it could name.
        """
        places = zip(self.layer.tolist(), self.head.tolist(), self.stack.tolist(), strict=True)
        of_heads = [roles.get((layer, head), ()) if has_decoder_heads(stack) else () for layer, head, stack in places]
        role, atlas_roles = np.empty_like(self.role), np.full(len(self.head), None)
        role[:] = [next(iter(names), NONE) for names in of_heads]
        single = self.head >= 0
        atlas_roles[single] = np.array([" ".join(names) for names in of_heads], object)[single]
        return replace(self, role=role, atlas_roles=atlas_roles)

    def order(self, sort: str | None) -> np.ndarray:
        """Places of the kept heads, in model order or by score; nulls last, ties in the model's order.

        Raises UsageError for a metric that was not measured.
        """
        kept = np.flatnonzero(self.kept)
        if sort is None:
            return kept
        return ranked(kept, sort, self.scores, {name: getattr(self, name) for name in COLUMNS})

    def table(self, order: np.ndarray, tokens: Sequence[str], top_key: np.ndarray) -> pa.Table:
        """The heads of some places as rows: which, roles, top key, then a column per metric, and the stack.

        tokens: of all stacks; top_key: where among them the top key of each head is.
        """
        head, mass, unasked = self.head[order], self.scores.get(MASS.id), np.isnan(self.top_key_mass[order])
        return as_table(
            {
                "layer": self.layer[order],
                "head": numbers(head, head < 0),
                "kv_head": self.kv_head[order],
                "role": words(self.role[order].tolist()),
                "text_role": words(self.text_role[order].tolist()),
                "atlas_roles": words(self.atlas_roles[order].tolist()),
                "near_uniform": flags(self.near_uniform[order].tolist()),
                "top_key": numbers(self.top_key[order], unasked),
                "top_key_token": texts_at(tokens, top_key[order], unasked),
                "top_key_mass": self.top_key_mass[order],
                **{name: score.value[order].astype(np.float32) for name, score in self.scores.items()},
                **({"uniform": mass.null[order].astype(np.float32)} if mass else {}),
                "stack": texts_at(STACKS, codes(self.stack[order])),
            }
        )


def ranked(
    kept: np.ndarray, sort: str, scores: Mapping[str, Score], others: Mapping[str, np.ndarray], of: str = "observation"
) -> np.ndarray:
    """Some places in the order of a score, or of another column; nulls last, ties in their own order.

    Raises UsageError for what was not measured; of: what did not measure it.
    """
    name, ascending = order_of(sort)
    if name in others:
        score = others[name][kept]
    elif name in scores:
        found = scores[name]
        score = (found.value - found.null if name == MASS.id else found.value)[kept]
    else:
        raise UsageError(f"this {of} did not measure {name}", f"it has {', '.join(scores)}")
    return kept[np.lexsort((np.nan_to_num(score) * (1 if ascending else -1), np.isnan(score)))]


def with_others(listed: pa.Table, others: Sequence[tuple[str, int, str]], sort: str | None) -> pa.Table:
    """A table of heads with a last column `type`, and a row of nulls for each (stack, layer, type) that is no softmax
    attention."""
    if not others:
        return listed.append_column("type", texts_at([""], np.zeros(len(listed), np.int32), np.ones(len(listed), bool)))
    stacks, layers, types = zip(*others, strict=True)
    place = np.arange(len(listed) + len(types), dtype=np.int32)
    layer = np.concatenate([listed["layer"].to_numpy(), np.array(layers, np.int32)])
    stack = [*listed["stack"].to_pylist(), *stacks]
    whole = listed.take(numbers(place, place >= len(listed)))
    whole = whole.set_column(whole.column_names.index("layer"), "layer", numbers(layer))
    whole = whole.set_column(whole.num_columns - 1, "stack", words(stack).dictionary_encode())
    whole = whole.append_column("type", words([*[None] * len(listed), *types]).dictionary_encode())
    if sort is not None and order_of(sort)[0] != "layer":
        return whole
    return whole.take(numbers(np.lexsort((layer, codes(stack)) if sort is None else (layer,))))


@dataclass(frozen=True)
class Relation:
    """One query looking at one key: token positions and the weight."""

    query: int
    key: int
    weight: float


@dataclass(frozen=True)
class Head:
    """What one head (with by_kv, the mean of the heads of one kv head) does with a text; scores are NaN for null.

    role: what it is called, one word or `-`: the first of atlas_roles where there is an atlas, else text_role.
    text_role: its role on this text. atlas_roles: all that the atlas names it, none without one. uniform: the `mass`
    that uniform attention would have, None where no keys were chosen. stack: its layer's. in_other_stack: whether a
    number alone means a layer of another stack.
    """

    layer: int
    head: int | None
    kv_head: int
    role: str
    score: Mapping[str, float]
    strongest: Relation | None
    stack: str = "decoder"
    near_uniform: bool | None = None
    top_key: int = 0
    top_key_mass: float = float("nan")
    uniform: float | None = None
    text_role: str = NONE
    atlas_roles: tuple[str, ...] = ()
    in_other_stack: bool = False

    @property
    def mass(self) -> float | None:
        """What the chosen queries give the chosen keys; NaN where none sees one, None where no keys were chosen."""
        return self.score.get("mass")

    @property
    def name(self) -> str:
        """`L27H3`, `L27KV1` for the mean over a kv head's group, `cross L3H2` in a stack beside the decoder's."""
        by_kv, number = (True, self.kv_head) if self.head is None else (False, self.head)
        return f"{self.stack} " * self.in_other_stack + head_name(self.layer, number, by_kv)

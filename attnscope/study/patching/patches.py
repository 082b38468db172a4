"""What is patched one at a time: heads, kv groups, layers, positions, or each position in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnscope.errors import UsageError
from attnscope.interventions.patching import Patch
from attnscope.interventions.spec import SHARED, HeadSet, Over
from attnscope.interventions.spec import PatchTarget as What
from attnscope.model.geometry import Geometry
from attnscope.study.ablation.sets import controls_of, portions, whole_groups
from attnscope.study.knockout.records import key_name
from attnscope.study.patching.pairs import TextPair


@dataclass(frozen=True)
class AskedPatch:
    """One patch that is asked for. layer, head: where it is of one. place: which of the asked tokens, where it is of
    one."""

    patch: Patch
    layer: int | None = None
    head: int | None = None
    place: int | None = None


def patches_over(
    over: Over, whole: HeadSet, geometry: Geometry, pairs: Sequence[TextPair], what: What
) -> list[AskedPatch]:
    """The patches of some heads; of keys and values whole kv groups.

    Raises UsageError where tokens are to be patched one by one, and pairs have other numbers of them.
    """
    if what in SHARED:
        whole = whole_groups(whole, geometry)
    every = _at(pairs)
    if over == "none":
        return [AskedPatch(Patch(whole.name, whole.heads, every))]
    if over in ("heads", "kv"):
        # A group of one head is that head, whatever it was asked as.
        parts = portions("kv" if what in SHARED else over, whole, geometry)
        alone = [one.heads[0][1] if len(one.heads) == 1 else None for one in parts]
        return [
            AskedPatch(Patch(one.name, one.heads, every), one.layer, head)
            for one, head in zip(parts, alone, strict=True)
        ]
    layers = portions("layers", whole, geometry)
    if over == "layers":
        return [AskedPatch(Patch(one.name, one.heads, every), one.layer) for one in layers]
    # The first token of each pair is one patch, the second another: pairs need as many.
    counts = sorted({len(pair.at) for pair in pairs})
    if len(counts) > 1:
        raise UsageError(
            f"one by one, pairs need as many tokens, got {counts[0]} and {counts[-1]}", "name as many with {at}"
        )
    places = range(counts[0])
    if over == "positions":
        return [AskedPatch(Patch(_name(pairs, one), whole.heads, _at(pairs, one)), place=one) for one in places]
    return [
        AskedPatch(Patch(f"{layer.name} {_name(pairs, one)}", layer.heads, _at(pairs, one)), layer.layer, place=one)
        for layer in layers
        for one in places
    ]


def _at(pairs: Sequence[TextPair], place: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The positions of each text of the task; place: of one asked token alone."""
    both = [positions for pair in pairs for positions in (pair.at, pair.partners)]
    return tuple(positions if place is None else (positions[place],) for positions in both)


def _name(pairs: Sequence[TextPair], place: int) -> str:
    """An asked token as a table names it: `bank(8)` of one pair, of several `token 3`, counted among those asked."""
    return key_name(pairs[0].clean, pairs[0].at[place]) if len(pairs) == 1 else f"token {place}"


def random_patches(asked: AskedPatch, geometry: Geometry, what: What, count: int, seed: int) -> list[Patch]:
    """Patches of as many other heads in each layer, at the same tokens."""
    drawn = controls_of(asked.patch, [asked.patch], geometry, by_kv=what in SHARED, seed=seed, count=count)
    return [Patch(one.name, one.heads, asked.patch.at) for one in drawn]

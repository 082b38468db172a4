"""TransformerLens judges patched pairs: its `get_act_patch_` functions, and its attribution patching.

Both patch one text of a pair from the other: the clean one from the corrupted one, and back.

Shapes: L layer, X what is patched of a layer (heads, kv heads or positions), R run (the clean text patched, the
corrupted one patched), B pair, S text (clean and corrupted in turn), P patch, T token, H head, V token of the
vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformer_lens import patching as functions
from transformer_lens.tools.analysis.attribution_patching import attribution_patch

import attnscope
from external.common import Check, Report
from external.transformerlens_models import ANSWER, FOIL, TOKENS, Both, near

APART = 1e-4  # of logit differences
PAIRS = 3
DIFFER = (1, 6, 11)  # the positions at which the texts of a pair differ
PLACES = (6, TOKENS - 1)  # patched alone: a position that differs, and the last
CACHED = {"output": "out", "pattern": "pattern", "key": "k", "value": "v"}  # as TransformerLens names them
OTHER_TEXT = "TransformerLens patches the other text of the pair"


@dataclass(frozen=True)
class Sweep:
    """One of TransformerLens' functions, and what `attnscope.patch` is asked for the same.

    function: its name without `get_act_patch_`. activation: where it is not the function's own. at: one position alone,
    None for all.
    """

    function: str
    what: Any
    over: Literal["heads", "layers,positions"] = "heads"
    activation: str = ""
    at: int | None = None

    def __str__(self) -> str:
        return f"`get_act_patch_{self.function}`" + f" of `hook_{self.activation}`" * bool(self.activation)

    @property
    def grouped(self) -> bool:
        """Whether kv heads are patched, which the heads of a group share."""
        return self.what in ("key", "value")


HEADS = tuple(Sweep(f"attn_head_{name}_all_pos", what) for what, name in CACHED.items())
ROTATED = Sweep("attn_head_k_all_pos", "key", activation="rot_k")
BLOCKS = Sweep("attn_out", "output", "layers,positions")


def patching(report: Report, models: Sequence[Both]) -> None:
    """Every function, and the same with a planted fault."""
    for sweep in HEADS:
        compare_sweep(report, models, sweep)
    rotated = [both for both in models if f"blocks.0.attn.hook_{ROTATED.activation}" in their_cache(both, 0)]
    compare_sweep(report, rotated, ROTATED)
    report.notes.append(f"keys after the rotation, which the bridge shows of {', '.join(map(str, rotated))} alone")
    compare_sweep(report, models, BLOCKS)
    at_one_position(report, models)
    for over in ("heads", "layers,positions"):
        estimates(report, models, over)


def compare_sweep(report: Report, models: Sequence[Both], sweep: Sweep) -> None:
    one = "position" if sweep.over != "heads" else "kv head" if sweep.grouped else "head"
    asked = f'what="{sweep.what}", over="{sweep.over}"'
    with report.check(f"{sweep}, either text patched from the other: `patch` with {asked}, to {APART:g}") as check:
        for both in models:
            hold_all(check, f"{both} {sweep}", our_patched(both, sweep), their_patched(both, sweep))
    with report.control(f"{sweep}: TransformerLens patches the {one} before") as control:
        for both in models:
            hold_all(control, "", our_patched(both, sweep), their_patched(both, sweep).roll(1, 1))
    with report.control(f"{sweep}: {OTHER_TEXT}") as control:
        for both in models:
            hold_all(control, "", our_patched(both, sweep), their_patched(both, sweep).flip(2))
    pairs = [(our_patched(both, sweep), their_patched(both, sweep)) for both in models]
    report.notes.append(f"{sweep}: {how_far(pairs)}")


def hold_all(check: Check, name: str, found_LXRB: Tensor, expected_LXRB: Tensor) -> None:
    """A case per patch, run and pair."""
    for place in np.ndindex(*expected_LXRB.shape):
        found, expected = found_LXRB[place], expected_LXRB[place]
        case = f"{name} layer, part, run, pair {place}: {found:.6f}, expected {expected:.6f}"
        check.hold(near(found, expected, APART), case)


def how_far(pairs: Sequence[tuple[Tensor, Tensor]]) -> str:
    """How far two programs are apart at most, and how far one patch is from the next in the same layer."""
    apart = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    between = torch.cat([(theirs - theirs.roll(1, 1)).abs().flatten() for _, theirs in pairs]).median()
    return f"apart by at most {apart:.1e}; a patch and the next of its layer by {between:.1e} in the median"


# what both are given


@cache
def texts(both: Both) -> Tensor:
    """(R, B, T): the clean and the corrupted texts, of random tokens of which none is there twice."""
    drawn, count = torch.Generator().manual_seed(3), min(both.ours.geometry.vocab_size, 1000) - 3
    drawn_BT = torch.stack([torch.randperm(count, generator=drawn)[: TOKENS + len(DIFFER)] + 3 for _ in range(PAIRS)])
    clean_BT = drawn_BT[:, :TOKENS]
    corrupted_BT = clean_BT.clone()
    corrupted_BT[:, DIFFER] = drawn_BT[:, TOKENS:]
    return torch.stack([clean_BT, corrupted_BT])


def difference(logits_BTV: Tensor) -> Tensor:
    """(B,): logit(answer) - logit(foil) after the last token."""
    return logits_BTV[:, -1, ANSWER] - logits_BTV[:, -1, FOIL]


def ours(both: Both, **asked: Any) -> Any:
    """What attnscope.patch measures of the pairs."""
    clean_BT, corrupted_BT = texts(both).tolist()
    shared = {"answer": [ANSWER], "foil": [FOIL]}
    pairs = [{"text": one, "corrupted": other, **shared} for one, other in zip(clean_BT, corrupted_BT, strict=True)]
    return attnscope.patch(both.ours, pairs, random=0, **asked)


def by_layer(both: Both, values_P: Sequence[Any] | Tensor) -> Tensor:
    """(L, X, ...): what there is of each patch, layer by layer."""
    return torch.as_tensor(np.asarray(values_P)).unflatten(0, (len(both.ours.geometry.heads_by_layer), -1))


# patches that are run


@cache
def our_patched(both: Both, sweep: Sweep) -> Tensor:
    """(L, X, R, B): the logit difference of either text after a patch: the intact one and what the patch changes."""
    found = ours(both, what=sweep.what, over=sweep.over, at=sweep.at)
    clean_B, corrupted_B = found.intact_S[::2], found.intact_S[1::2]
    patches = [one.patch for one in found.asked]
    return by_layer(both, [[clean_B - found.effect(one), corrupted_B + found.restored(one)] for one in patches])


@cache
def their_patched(both: Both, sweep: Sweep) -> Tensor:
    """(L, X, R, B): the same by TransformerLens."""
    runs = []
    for run, tokens_BT in enumerate(texts(both)):
        with torch.no_grad():
            asked = (both.theirs, tokens_BT, their_cache(both, 1 - run), difference)
            found = their_function(both, sweep)(*asked, reduce="none")
        runs.append(by_layer(both, found.values.flatten(0, -2)))
    return torch.stack(runs, 2)


@cache
def their_cache(both: Both, text: int) -> Any:
    """What TransformerLens keeps of the intact texts: 0 of the clean ones, 1 of the corrupted ones."""
    with torch.no_grad():
        _, kept = both.theirs.run_with_cache(texts(both)[text])
    return kept


def their_function(both: Both, sweep: Sweep) -> Callable[..., Any]:
    """TransformerLens' function, with its own list of what is patched unless a position or an activation is named."""
    named = getattr(functions, f"get_act_patch_{sweep.function}")
    if sweep.at is None and not sweep.activation:
        return named
    axes = named.keywords["index_axis_names"]
    chosen = {"index_axis_names": None, "index_df": listed(both, sweep, axes)}
    if sweep.activation:
        chosen["activation_name"] = sweep.activation
    return partial(named, **chosen)


def listed(both: Both, sweep: Sweep, axes: Sequence[str]) -> pd.DataFrame:
    """Every head of every layer, kv heads where these are patched, at the sweep's position."""
    config = both.theirs.cfg
    heads = range((sweep.grouped and config.n_key_value_heads) or config.n_heads)
    ranges = {
        "layer": range(config.n_layers),
        "head": heads,
        "head_index": heads,
        "pos": [sweep.at],
        "dest_pos": [sweep.at],
    }
    return pd.DataFrame(itertools.product(*(ranges[axis] for axis in axes)), columns=list(axes))


def at_one_position(report: Report, models: Sequence[Both]) -> None:
    """Heads patched at one position alone."""
    sweeps = [Sweep(f"attn_head_{name}_by_pos", what, at=at) for what, name in CACHED.items() for at in PLACES]
    names = ", ".join(f"`get_act_patch_attn_head_{name}_by_pos`" for name in CACHED.values())
    places = " and ".join(map(str, PLACES))
    with report.check(f"{names} at positions {places}: `patch` with `at`, to {APART:g}") as check:
        for both, sweep in itertools.product(models, sweeps):
            hold_all(check, f"{both} {sweep} {sweep.at}", our_patched(both, sweep), their_patched(both, sweep))
    with report.control(f"heads at one position: TransformerLens patches {PLACES[0]}, not {PLACES[1]}") as control:
        for both, sweep in itertools.product(models, sweeps):
            if sweep.at == PLACES[1]:
                moved = replace(sweep, at=PLACES[0])
                hold_all(control, "", our_patched(both, sweep), their_patched(both, moved))
    pairs = [(our_patched(both, one), their_patched(both, one)) for both, one in itertools.product(models, sweeps)]
    report.notes.append(f"heads at one position: {how_far(pairs)}")


# estimates


def estimates(report: Report, models: Sequence[Both], over: Any) -> None:
    """Attribution patching: what patches would change, to first order."""
    asked = f'method="gradient", over="{over}"'
    with report.check(f"`attribution_patch`, towards either text: `patch` with {asked}, to {APART:g}") as check:
        for both in models:
            hold_all(check, f"{both} estimate", our_estimates(both, over), their_estimates(both, over))
    with report.control(f"`attribution_patch`, over {over}: the gradient is that of the other text") as control:
        for both in models:
            hold_all(control, "", our_estimates(both, over), -their_estimates(both, over).flip(2))
    pairs = [(our_estimates(both, over), their_estimates(both, over)) for both in models]
    report.notes.append(f"`attribution_patch` over {over}: {how_far(pairs)}")


@cache
def our_estimates(both: Both, over: str) -> Tensor:
    """(L, X, R, B): what patches would change in either text; attnscope estimates how far the difference falls."""
    estimate_SP = ours(both, over=over, method="gradient").estimates
    return by_layer(both, -estimate_SP.reshape(PAIRS, 2, -1).transpose(2, 1, 0))


@cache
def their_scores(both: Both) -> Tensor:
    """(L, T, H, R, B): TransformerLens' score of each head's output at each position."""
    shape = (both.theirs.cfg.n_layers, TOKENS, both.theirs.cfg.n_heads, 2, PAIRS)
    found = torch.full(shape, torch.nan)
    for run, pair in itertools.product(range(2), range(PAIRS)):
        one = slice(pair, pair + 1)
        tokens_BT, source_BT = texts(both)[run], texts(both)[1 - run]
        scored = attribution_patch(both.theirs, source_BT[one], tokens_BT[one], lambda logits: difference(logits)[0])
        for node, score in scored.node_scores.items():
            if node.kind == "attn_head_out":
                found[node.layer, node.position, node.head, run, pair] = score
    return found


def their_estimates(both: Both, over: str) -> Tensor:
    """(L, X, R, B): the same by TransformerLens: the sum over positions, or over the heads."""
    return their_scores(both).sum(1 if over == "heads" else 2)

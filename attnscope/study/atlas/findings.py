"""Every probe of a model: read all trials, keep one number per sequence, head and measure, compare.

Shapes: S sequence, N head of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from attnscope.errors import ModelError
from attnscope.hooks.listen import listen
from attnscope.metrics.metrics import Texts
from attnscope.observe.choice import choose
from attnscope.observe.collector import collect_layer
from attnscope.observe.layers import LayerKey
from attnscope.study.atlas.copying import CalledLayer, Copying
from attnscope.study.atlas.long_range_copying import completed
from attnscope.study.atlas.probes import Arm, Contrast, Measure, Trial, batches
from attnscope.study.statistics import SHARE, Effects, paired

if TYPE_CHECKING:
    from attnscope.hooks.calls import AttentionCall
    from attnscope.hooks.engines import Engine
    from attnscope.model.loaded import LoadedModel

BATCH_TOKENS = 4096
OfHeads = tuple[tuple[tuple[int, int], ...], Mapping[str, np.ndarray]]  # the heads, and every measure of a batch (B, N)
Keep = Callable[[str, range, Callable[[], OfHeads]], OfHeads]  # an arm, some of its sequences, and what reads them


@dataclass(frozen=True)
class Readings:
    """What a trial's passes gave: heads as (layer, head), and {measure: (S, N) float64, NaN where it cannot show}."""

    heads: tuple[tuple[int, int], ...]
    values: Mapping[Measure, np.ndarray]


@dataclass(frozen=True)
class Finding:
    """What one contrast shows of all heads: the probe, what it is compared with, and the effects."""

    probe: str
    against: str
    effects: Effects


def read_trial(
    loaded: LoadedModel,
    trial: Trial,
    advance: Callable[[int], object] = lambda tokens: None,
    keep: Keep = lambda arm, rows, read: read(),
) -> Readings:
    """Read a trial's sequences; advance: called with the tokens of every pass.

    keep: gives what a batch does, or what an earlier run kept of it.
    """
    values: dict[Measure, np.ndarray] = {}
    heads: tuple[tuple[int, int], ...] = ()
    for name, arm in trial.arms.items():
        parts: dict[str, list[np.ndarray]] = {asked: [] for asked in arm.asks}
        for rows, ids_BT in batches(arm.ids_ST, BATCH_TOKENS):
            heads, found = keep(name, rows, partial(_read, loaded, ids_BT, arm, advance))
            for asked, value_BN in found.items():
                parts[asked].append(value_BN)
        values |= {Measure(name, asked): np.concatenate(part) for asked, part in parts.items()}
    return Readings(heads, values)


def batches_of(trial: Trial) -> int:
    """How many batches a trial is read in."""
    return sum(1 for arm in trial.arms.values() for _ in batches(arm.ids_ST, BATCH_TOKENS))


def findings_of(trial: Trial, readings: Readings, seed: int = 0) -> list[Finding]:
    """The trial's contrasts, each with its effects on every head."""
    values = readings.values

    def null_SN(one: Contrast) -> np.ndarray:
        if one.null:
            return np.maximum.reduce([values[null] for null in one.null])
        score_SN = values[one.score]
        there_S1 = np.isfinite(score_SN).sum(1, keepdims=True)
        return (np.nansum(score_SN, 1, keepdims=True) - score_SN) / np.maximum(there_S1 - 1, 1)

    def effects(one: Contrast) -> Effects:
        shown_S = np.isfinite(values[one.score]).any(1)
        shown_S |= ~shown_S.any()
        null_Sn = null_SN(one)[shown_S]
        return paired(values[one.score][shown_S], null_Sn[0] if one.computed else null_Sn, seed=seed, within=SHARE)

    return [Finding(one.probe, one.against, effects(one)) for one in trial.contrasts]


def _read(loaded: LoadedModel, ids_BT: np.ndarray, arm: Arm, advance: Callable[[int], object]) -> OfHeads:
    """One batch of an arm, which the model completes first where the arm asks for that."""
    if arm.completed:
        ids_BT = completed(loaded, ids_BT, arm.completed)
        advance(ids_BT.size - len(ids_BT))
    found = _pass(loaded, ids_BT, arm)
    advance(ids_BT.size)
    return found


def _pass(loaded: LoadedModel, ids_BT: np.ndarray, arm: Arm) -> OfHeads:
    """One forward pass: the heads, and every measure of the batch, (B, N)."""
    count, tokens = ids_BT.shape
    engine: Engine = choose(loaded, tokens, batch=count).engine  # by memory alone: sequences are short
    ids = torch.tensor(ids_BT, device=loaded.device)
    texts = Texts(ids, torch.full((count,), tokens, device=loaded.device))
    layers, windows = tuple(loaded.geometry.heads_by_layer), loaded.geometry.windows
    kept: dict[int, dict[str, torch.Tensor]] = {}
    # Copying is read of what a gate lets through, which a pass before this one tells.
    copying = [one for one in arm.asks.values() if isinstance(one, Copying)]
    gated = copying[0].behind_gates(loaded, ids) if copying else {}

    def on_call(call: AttentionCall) -> None:
        if call.call > 0 or call.P.keys != tokens:
            return
        kv_heads = call.spec.kv_heads if call.spec else call.P.heads
        here, given = texts.to(call.P.device), gated.get(call.module)
        layer = CalledLayer(LayerKey(call.layer), call.P, kv_heads, here, call=call, gated_BRC=given)
        kept[call.layer] = collect_layer(arm.asks, layer)

    listen(
        loaded.model,
        ids,
        on_call,
        engine=engine,
        expected_layers=layers,
        windows=windows,
        computed=bool(copying),
    )
    if not kept:
        raise ModelError(
            f"no layer of {loaded.geometry.model_type} attends from the {tokens} tokens of a probe to the same",
            "choose another model",
        )
    heads = [(layer, head) for layer, found in kept.items() for head in range(next(iter(found.values())).shape[1])]
    return tuple(heads), {name: np.concatenate([one[name].numpy() for one in kept.values()], 1) for name in arm.asks}

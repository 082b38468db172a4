"""KVPress' scores of keys against what attnscope says that keys receive, and pressed caches against its budgets.

Shapes: G kv head, K key, D width of a key, T token, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvpress import ObservedAttentionPress, SnapKVPress, TOVAPress
from transformers import AutoModelForCausalLM, DynamicCache

from external.common import Check, Report, arguments, by_project

ROUNDING = 1e-6
WINDOW, KERNEL, KEPT = 16, 5, 0.5
Received = Mapping[str, np.ndarray]  # "2 window": (G, K), of a layer and the queries that are asked
Expected = Callable[[Received, int], np.ndarray]


def observed(received: Received, layer: int) -> np.ndarray:
    """A key's mean over the queries that see it, where `received` is the mean over all queries."""
    found_GK = received[f"{layer} all"]
    tokens = found_GK.shape[1]
    return found_GK * tokens / np.arange(tokens, 0, -1)


def snapkv(received: Received, layer: int, kernel: int = KERNEL) -> np.ndarray:
    """The mean over the last queries, then over neighbouring keys; keys of the window have no score of their own."""
    found_GK = received[f"{layer} window"][:, :-WINDOW]
    return np.stack([np.convolve(row, np.ones(kernel) / kernel, "same") for row in found_GK])


def tova(received: Received, layer: int, queries: str = "last") -> np.ndarray:
    """The row of the last query, the mean over all heads, for each kv head the same; the last key has no score."""
    found_GK = received[f"{layer} {queries}"][:, :-1]
    return np.broadcast_to(found_GK.mean(0), found_GK.shape)


KEPT_BY = {  # what budgets of attnscope are to its presses
    "received": lambda share, window: ObservedAttentionPress(share),
    "snap": lambda share, window: SnapKVPress(share, window, KERNEL),
}
PROMPT, LOSS_ROUNDING = 40, 1e-4  # nats
CASES: tuple[tuple[Any, str, Expected], ...] = (
    (ObservedAttentionPress(KEPT), "eager", observed),
    (SnapKVPress(KEPT, WINDOW, KERNEL), "eager", snapkv),
    (SnapKVPress(KEPT, WINDOW, KERNEL), "sdpa", snapkv),
    (TOVAPress(KEPT), "eager", tova),
    (TOVAPress(KEPT), "sdpa", tova),
)


def main() -> None:
    """Run every press on every model and write the result."""
    asked = arguments()
    folder = Path("ours").resolve()
    folder.mkdir(exist_ok=True)
    by_project("kvpress_ours", str(folder))
    models = json.loads((folder / "models.json").read_text())
    received = {name: dict(np.load(folder / f"{name}.npz")) for name in models}
    report = Report(("kvpress", "transformers", "torch"))
    for press, attention, expected in CASES:
        with report.check(f"{type(press).__name__} under {attention}: every key's score, to {ROUNDING:g}") as check:
            for name, ours in received.items():
                theirs = scores(press, models[name], attention, ours["ids"])
                compare(check, name, theirs, lambda layer, ours=ours, expected=expected: expected(ours, layer))
    with report.check("which half of a cache's keys each press keeps") as check:
        for press, attention, expected in CASES:
            for name, ours in received.items():
                theirs = scores(press, models[name], attention, ours["ids"])
                compare_kept(check, f"{type(press).__name__} {attention} {name}", theirs, ours, expected)
    pressed(report, models, received)
    mass, snap, last = (CASES[place][0] for place in (0, 1, -2))
    faults: dict[str, tuple[Any, Expected]] = {
        "received as it is, over all queries: not divided by the queries that see the key": (
            mass,
            lambda ours, layer: ours[f"{layer} all"],
        ),
        "the kv heads in another order": (mass, lambda ours, layer: np.roll(observed(ours, layer), 1, 0)),
        "the keys one place further": (mass, lambda ours, layer: np.roll(observed(ours, layer), 1, 1)),
        "the mean over three neighbouring keys, not five": (snap, lambda ours, layer: snapkv(ours, layer, 3)),
        "the query before the last": (last, lambda ours, layer: tova(ours, layer, "before")),
    }
    for what, (press, fault) in faults.items():
        with report.control(f"{type(press).__name__}, {what}") as control:
            for name, ours in received.items():
                theirs = scores(press, models[name], "eager", ours["ids"])
                compare(control, name, theirs, lambda layer, ours=ours, fault=fault: fault(ours, layer))
    with report.control("which half of a cache's keys TOVAPress keeps, by the query before the last") as control:
        for name, ours in received.items():
            theirs = scores(last, models[name], "eager", ours["ids"])
            compare_kept(control, name, theirs, ours, lambda ours, layer: tova(ours, layer, "before"))
    report.write(asked.out)


def pressed(report: Report, models: Mapping[str, str], received: Mapping[str, Received]) -> None:
    """The keys that are left in a pressed cache, and the loss of what is read after it."""
    texts = [(name, models[name], ours) for name, ours in received.items()]
    budgets = sorted({name.partition(" kept ")[2] for ours in received.values() for name in ours if " kept " in name})
    with report.check("budgets received and snap: the keys that are left in a cache that a press has pressed") as check:
        for name, folder, ours in texts:
            for written in budgets:
                compare_left(check, f"{name} {written}", left_in_cache(folder, written, ours["ids"]), ours, written)
    losses = sorted(name for ours in received.values() for name in ours if name.startswith("loss "))
    with report.check(f"the loss of the tokens after a pressed prompt, to {LOSS_ROUNDING:g} nats per token") as check:
        for name, folder, ours in texts:
            for loss in dict.fromkeys(losses):
                apart = abs(loss_after(folder, loss.partition(" ")[2], ours["ids"]) - float(ours[loss]))
                check.hold(apart <= LOSS_ROUNDING, f"{name} {loss}: apart by {apart:.2g}")
    with report.control("the keys that received:30 keeps, of a cache that SnapKVPress has pressed") as control:
        for name, folder, ours in texts:
            theirs = left_in_cache(folder, "snap:30@16", ours["ids"])
            compare_left(control, name, theirs, ours, "received:30")
    with report.control("the loss after a pressed prompt, against that of the whole cache") as control:
        for name, folder, ours in texts:
            apart = abs(loss_after(folder, "snap:20@16", ours["ids"]) - float(ours["loss"]))
            control.hold(apart <= LOSS_ROUNDING, f"{name}: apart by {apart:.2g}")


def press_of(written: str, tokens: int) -> Any:
    """The press that keeps as many keys of so many as a budget."""
    kind, _, numbers = written.partition(":")
    kept, _, window = numbers.partition("@")
    share = 1 - (int(kept) + 0.5) / tokens  # it keeps int(tokens * (1 - share)) keys
    return KEPT_BY[kind](share, int(window or 0))


def left_in_cache(folder: str, written: str, ids: np.ndarray) -> list[np.ndarray]:
    """(G, K) boolean of each layer: which keys of the whole cache are in the one that a press has pressed."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    whole, less = DynamicCache(), DynamicCache()
    with torch.no_grad():
        model(torch.from_numpy(ids)[None], past_key_values=whole, use_cache=True)
        with press_of(written, len(ids))(model):
            model(torch.from_numpy(ids)[None], past_key_values=less, use_cache=True)
    found = []
    for every, left in zip(whole.layers, less.layers, strict=True):
        same_GKK = (every.keys[0, :, :, None] - left.keys[0, :, None]).abs().amax(-1) < ROUNDING
        found.append(same_GKK.any(-1).numpy())
    return found


def loss_after(folder: str, written: str, ids: np.ndarray) -> float:
    """The mean loss of the tokens after the first one that follows a pressed prompt, nats."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    cache, ids_1T = DynamicCache(), torch.from_numpy(ids)[None]
    with torch.no_grad():
        with press_of(written, PROMPT)(model):
            model(ids_1T[:, :PROMPT], past_key_values=cache, use_cache=True)
        places_1T = torch.arange(PROMPT, len(ids))[None]
        given = {"past_key_values": cache, "position_ids": places_1T, "use_cache": True}
        logits_TV = model(ids_1T[:, PROMPT:], **given).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits_TV, ids_1T[0, PROMPT + 1 :]))


def compare_left(check: Check, case: str, theirs: list[np.ndarray], ours: Received, written: str) -> None:
    """Every key of every kv head: whether it is kept."""
    for layer, left_GK in enumerate(theirs):
        found_GK = ours[f"{layer} kept {written}"]
        for group, (found_K, left_K) in enumerate(zip(found_GK, left_GK, strict=True)):
            for key, (mine, other) in enumerate(zip(found_K.tolist(), left_K.tolist(), strict=True)):
                check.hold(
                    mine == other, f"{case} layer {layer} kv head {group} key {key}: {mine}, {other} in the cache"
                )


def scores(press: Any, folder: str, attention: str, ids: np.ndarray) -> list[np.ndarray]:
    """(G, K) of each layer: what a press scores while it presses the cache of one pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
    kept: list[np.ndarray] = []

    def scored(*given: Any) -> torch.Tensor:
        found = type(press).score(press, *given)
        kept.append(found[0].numpy().copy())
        return found

    press.score = scored  # its own method, listened to
    try:
        with torch.no_grad(), press(model):
            model(torch.from_numpy(ids)[None], past_key_values=DynamicCache(), use_cache=True)
    finally:
        del press.score
    return kept


def compare(check: Check, name: str, theirs: list[np.ndarray], expected: Callable[[int], np.ndarray]) -> None:
    """Every key of every kv head that a press scores; those that it always keeps have one score above all others."""
    for layer, score_GK in enumerate(theirs):
        found_GK = expected(layer)
        scored = found_GK.shape[1]
        for group, (found_K, score_K) in enumerate(zip(found_GK, score_GK, strict=True)):
            for key in range(scored):
                apart = abs(found_K[key] - score_K[key])
                check.hold(apart <= ROUNDING, f"{name} layer {layer} kv head {group} key {key}: apart by {apart:.2g}")
        if scored < score_GK.shape[1]:
            always = bool((score_GK[:, scored:] > score_GK[:, :scored].max()).all())
            check.hold(always, f"{name} layer {layer}: a key that is always kept")


def compare_kept(check: Check, case: str, theirs: list[np.ndarray], ours: Received, expected: Expected) -> None:
    """The keys with the highest scores, by theirs and by ours with those that are always kept."""
    for layer, score_GK in enumerate(theirs):
        found_GK = np.full(score_GK.shape, np.inf)
        scored_GK = expected(ours, layer)
        found_GK[:, : scored_GK.shape[1]] = scored_GK
        count = int(found_GK.shape[1] * (1 - KEPT))
        for group, (found_K, score_K) in enumerate(zip(found_GK, score_GK, strict=True)):
            best = [set(np.argsort(-one, kind="stable")[:count].tolist()) for one in (found_K, score_K)]
            check.hold(best[0] == best[1], f"{case} layer {layer} kv head {group}: {sorted(best[0] ^ best[1])}")


if __name__ == "__main__":
    main()

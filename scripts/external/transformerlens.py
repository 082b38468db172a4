"""TransformerLens judges patterns, head outputs, its detector's scores, ablation, attribution, patches and logits.

Shapes: B text, T token, H head, N head of all layers, Q query, K key, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformer_lens.head_detector import HEAD_NAMES, detect_head
from transformer_lens.tools.analysis import direct_logit_attribution

import attnscope
from attnscope.interventions.passes import measured
from attnscope.interventions.spec import HeadSet, Task
from attnscope.observe.logit_path import LogitPath, path_to_logits
from attnscope.studies.ablation import direct_effects
from external.common import Check, Report, arguments
from external.models import demo_folder, tiny
from external.transformerlens_models import ANSWER, FOIL, TOKENS, Both, near
from external.transformerlens_patching import patching
from external.transformerlens_why import taken_apart

ROUNDING = 2e-6  # of weights and outputs, in float32
NATS = 1e-5
LOGITS = 1e-5
FAMILIES = ("llama", "gpt2", "gpt_neox")
WRAPPED = "gptj"  # the bridge of this family runs the family's own attention
METRICS = {f"{one}_head": one for one in ("previous_token", "duplicate_token", "induction")}
STORY = "The small bird saw the boat. Then the the bird sees the boat, the boat, and the small bird sees the bird."


def main() -> None:
    """Ask everything of every model and write the result."""
    asked = arguments()
    torch.set_num_threads(1)  # models this small are many times slower on two threads of a busy machine
    report = Report(("transformer-lens", "transformers", "torch"))
    made = [Both(kind, tiny(kind, Path(kind).resolve())) for kind in (*FAMILIES, WRAPPED)]
    models = [*made[:-1], Both("demo", demo_folder())]
    hook_names(report, [*models, made[-1]])
    patterns(report, models)
    outputs(report, models)
    detector(report, models)
    near_repeats(report, models[-1])
    ablation(report, models)
    attribution(report, models)
    patching(report, models)
    taken_apart(report, models)
    report.write(asked.out)


def hook_names(report: Report, models: Sequence[Both]) -> None:
    """What the bridge hands over under each hook's name, before anything is compared with it."""
    with report.check(
        "what lies under each hook's name: weights, logits before the softmax, outputs per head"
    ) as check:
        for both in models:
            _, cache = both.theirs.run_with_cache(both.ids())
            for layer in both.ours.geometry.heads_by_layer:
                logits, weights, z = (
                    cache[f"blocks.{layer}.attn.hook_{one}"] for one in ("attn_scores", "pattern", "z")
                )
                check.hold(near(weights.sum(-1), 1, 1e-5), f"{both} layer {layer}: hook_pattern's rows do not sum to 1")
                check.hold(z.shape[2] == weights.shape[1], f"{both} layer {layer}: hook_z is {tuple(z.shape)}")
                if both.name == WRAPPED and torch.equal(logits, weights):
                    check.expect(
                        f"{both} layer {layer}: under `hook_attn_scores` lie the weights after the softmax, as under "
                        "`hook_pattern`: the bridge wraps the family's own attention, which shows no logits",
                        1,
                    )
                else:
                    check.hold(near(logits.softmax(-1), weights, ROUNDING), f"{both} layer {layer}: hook_attn_scores")
    with report.control("the weights taken for the logits before the softmax") as control:
        for both in models[:-1]:
            for weights in their_patterns(both):
                control.hold(near(weights.softmax(-1), weights, ROUNDING))


# patterns


def patterns(report: Report, models: Sequence[Both]) -> None:
    with report.check(f"the pattern of every head of every text is `hook_pattern`, to {ROUNDING:g}") as check:
        for both in models:
            compare_patterns(check, both, their_patterns(both))
    with report.control("the patterns of a layer's heads in reverse order") as control:
        for both in models:
            compare_patterns(control, both, [weights.flip(1) for weights in their_patterns(both)])
    with report.control("TransformerLens' logits times 1.01 before the softmax") as control:
        for both in models:
            compare_patterns(control, both, [(1.01 * one).softmax(-1) for one in their_patterns(both, "attn_scores")])


def their_patterns(both: Both, hook: str = "pattern") -> list[Tensor]:
    """(B, H, Q, K) of each layer."""
    _, cache = both.theirs.run_with_cache(both.ids())
    return [cache[f"blocks.{layer}.attn.hook_{hook}"] for layer in both.ours.geometry.heads_by_layer]


def compare_patterns(check: Check, both: Both, theirs: Sequence[Tensor]) -> None:
    for text, ids in enumerate(both.ids().tolist()):
        seen = attnscope.capture(both.ours, ids)
        for layer, head in both.heads:
            found, expected = seen.weights[layer][head], theirs[layer][text, head]
            check.hold(near(found, expected, ROUNDING), f"{both} text {text} L{layer}H{head}")


# outputs before the projection


def outputs(report: Report, models: Sequence[Both]) -> None:
    with report.check(
        f"what every head gives before the output projection is `hook_z`, to {ROUNDING:g} of the largest"
    ) as check:
        for both in models:
            compare_outputs(check, both)
    with report.control("the output of the next head") as control:
        for both in models:
            compare_outputs(control, both, shift=1)


def compare_outputs(check: Check, both: Both, shift: int = 0) -> None:
    _, cache = both.theirs.run_with_cache(both.ids())
    found: dict[int, Tensor] = {}
    attnscope.listen(both.ours.model, both.ids(), lambda call: found.update({call.layer: call.output_BQHV}))
    for layer, head in both.heads:
        expected = cache[f"blocks.{layer}.attn.hook_z"].roll(shift, 2)[:, :, head]
        allowed = ROUNDING * float(expected.abs().max())
        check.hold(near(found[layer][:, :, head], expected, allowed), f"{both} L{layer}H{head}")


# the head detector


def detector(report: Report, models: Sequence[Both]) -> None:
    with report.check("`detect_head` on a text that is repeated, run by TransformerLens, is our metric") as check:
        for both in models:
            compare_detector(check, both, None)
    with report.check("`detect_head` with our weights as its cache is our metric") as check:
        for both in models:
            compare_detector(check, both, our_cache(both, both.repeated))
    first, *others = METRICS.values()
    with report.control("each of the three patterns compared with another of the metrics") as control:
        for both in models:
            compare_detector(control, both, None, dict(zip(METRICS, [*others, first], strict=True)))


def our_cache(both: Both, text: str) -> Any:
    """attnscope's weights, as TransformerLens' functions ask their cache for them."""
    seen = attnscope.capture(both.ours, both.theirs.to_tokens(text)[0].tolist())
    return {("pattern", layer, "attn"): seen.weights[layer] for layer in both.ours.geometry.heads_by_layer}


def compare_detector(check: Check, both: Both, cache: Any, metrics: Mapping[str, str] = METRICS) -> None:
    ids = both.theirs.to_tokens(both.repeated)[0].tolist()
    seen = attnscope.capture(both.ours, ids)
    for name in HEAD_NAMES:
        theirs = detect_head(both.theirs, both.repeated, name, cache=cache)
        for head in seen.heads:
            # theirs is a share of all rows' weight, ours a mean over the rows that can show it
            ours = head.score[metrics[name]] * rows_of(metrics[name], ids) / len(ids)
            case = f"{both} L{head.layer}H{head.head} {name}: {ours:.6f}, expected {theirs[head.layer, head.head]:.6f}"
            check.hold(abs(ours - float(theirs[head.layer, head.head])) <= ROUNDING, case)


def rows_of(metric: str, ids: Sequence[int]) -> int:
    """The rows over which a metric is a mean: those with a token before them, or with an earlier equal token."""
    apart = {"previous_token": None, "duplicate_token": 1, "induction": 3}[metric]
    if apart is None:
        return len(ids) - 1
    return sum(ids[row] in ids[: max(0, row - apart + 1)] for row in range(len(ids)))


def near_repeats(report: Report, both: Both) -> None:
    """A text with `the the`: TransformerLens counts the query's own key and the one before it as induction."""
    ids = both.theirs.to_tokens(STORY)[0].tolist()
    seen, theirs = attnscope.capture(both.ours, ids), detect_head(both.theirs, STORY, "induction_head")
    why = (
        "after `the the` TransformerLens counts the weight on the query itself and on the token before it as "
        "induction; attnscope leaves both keys out, since a head that looks there does so without a repetition. The "
        "difference is just that weight"
    )
    with report.check("`induction_head` on a text that repeats tokens next to each other") as check:
        expected = 0
        for head in seen.heads:
            ours = head.score["induction"] * rows_of("induction", ids) / len(ids)
            left_out = weight_next_to(seen.weights[head.layer][head.head], ids) / len(ids)
            apart = float(theirs[head.layer, head.head]) - ours
            if abs(apart - left_out) <= ROUNDING < left_out:
                expected += 1
            else:
                check.hold(abs(apart) <= ROUNDING, f"{both} L{head.layer}H{head.head}: apart by {apart:.6f}")
        check.expect(why, expected)


def weight_next_to(weights_QK: Tensor, ids: Sequence[int]) -> float:
    """The weight on the last two keys of each query, where the token before such a key equals the query's."""
    places = [(row, key) for row in range(len(ids)) for key in (row - 1, row) if key > 0 and ids[key - 1] == ids[row]]
    return float(sum((weights_QK[place] for place in places), torch.zeros(())))


# ablation


def ablation(report: Report, models: Sequence[Both]) -> None:
    for replacement in ("zero", "mean", "resample"):
        with report.check(
            f"the loss of every text, intact and with heads replaced ({replacement}), to {NATS:g} nats"
        ) as check:
            for both in models:
                compare_ablation(check, both, replacement)
    with report.control("TransformerLens replaces the next head") as control:
        for both in models:
            compare_ablation(control, both, "zero", shift=1)


def compare_ablation(check: Check, both: Both, replacement: Any, shift: int = 0) -> None:
    """Every head alone, and the first head of each layer together."""
    ids_BT = both.ids()
    sets = [HeadSet("alone", (one,)) for one in both.heads]
    sets.append(HeadSet("together", tuple(one for one in both.heads if one[1] == 0)))
    rows = tuple(tuple(range(3, TOKENS - 1)) for _ in ids_BT)
    task = Task("random tokens", tuple(map(tuple, ids_BT.tolist())), rows)
    loss_BK = torch.from_numpy(measured(both.ours, task, sets, replacement))
    for place, one in enumerate([(), *(one.heads for one in sets)]):
        expected_B = their_loss(both, ids_BT, one, replacement, shift)[:, 3:].double().mean(-1)
        for text, (found, expected) in enumerate(zip(loss_BK[:, place], expected_B, strict=True)):
            check.hold(
                near(found, expected, NATS), f"{both} text {text} without {one}: {found:.6f}, expected {expected:.6f}"
            )


def their_loss(both: Both, ids_BT: Tensor, heads: Sequence[tuple[int, int]], replacement: str, shift: int) -> Tensor:
    """(B, T - 1): TransformerLens' loss of every token, with the output of some heads replaced by what they give for
    the other texts in an intact pass."""
    _, intact = both.theirs.run_with_cache(ids_BT)

    def replaced(z_BTHD: Tensor, hook: Any, gone: Sequence[int]) -> Tensor:
        own_BTHD, changed = intact[hook.name], z_BTHD.clone()
        mean_BTHD = (own_BTHD.sum(0) - own_BTHD) / (len(own_BTHD) - 1)
        instead = {"zero": 0 * own_BTHD, "mean": mean_BTHD, "resample": own_BTHD.roll(-1, 0)}[replacement]
        changed[:, :, gone] = instead[:, :, gone]
        return changed

    count = both.theirs.cfg.n_heads
    per_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        per_layer.setdefault(layer, []).append((head + shift) % count)
    hooks = [(f"blocks.{layer}.attn.hook_z", partial(replaced, gone=gone)) for layer, gone in per_layer.items()]
    return both.theirs.run_with_hooks(ids_BT, return_type="loss", loss_per_token=True, fwd_hooks=hooks).detach()


# direct logit attribution


def attribution(report: Report, models: Sequence[Both]) -> None:
    with report.check(
        f"direct logit attribution of every head to the logit difference of two tokens, to {LOGITS:g}"
    ) as check:
        for both in models:
            compare_attribution(check, both, lambda way: way)
    with report.control("the final norm's weight left out") as control:
        for both in models:
            compare_attribution(control, both, without_weight)


def without_weight(way: LogitPath) -> LogitPath:
    """The same way with a norm whose weight is 1."""
    return replace(way, norm=replace(way.norm, weight_E=torch.ones_like(way.norm.weight_E)))


def compare_attribution(check: Check, both: Both, changed: Callable[[LogitPath], LogitPath]) -> None:
    ids_BT, folded = both.ids(), both.bridge()
    folded.enable_compatibility_mode(fold_value_biases=False)
    theirs = direct_logit_attribution(folded, ids_BT, ANSWER, FOIL, unit="head")
    way = path_to_logits(both.ours, ids_BT[0].tolist())
    if isinstance(way, str):
        check.hold(False, f"{both}: {way}")
        return

    def towards(token: int) -> Tensor:
        right_BT = torch.full_like(ids_BT, -1)
        right_BT[:, -1] = token
        return direct_effects(both.ours, changed(way), ids_BT, right_BT)

    ours_BN = (towards(ANSWER) - towards(FOIL)).detach()
    for place, label in enumerate(theirs.labels[:-1]):  # the last is all that no head writes
        expected_B = theirs.attribution[place].detach()
        check.hold(
            near(ours_BN[:, place], expected_B, LOGITS * max(1.0, float(expected_B.abs().max()))), f"{both} {label}"
        )


if __name__ == "__main__":
    main()

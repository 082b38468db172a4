"""From q, k and v to each head's output, step by step for one head and one query; and what is before and after.

The arithmetic is the reference's, in float64, each step on the numbers of the step before.
Source: Vaswani et al. 2017, equation 1; order of scale, soft-cap, bias, mask, sink as in `reference.attention`.
The steps before the scores and after the values are read from a layer's raw weights by its family's layout.

Shapes: B text, H query head, G kv head, T token, Q query, K key, D width of q and k, V width of v, E model width, M
pairs that turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from attnscope.errors import UsageError
from attnscope.model.loaded import as_input
from attnscope.reference.attention import Operands, attention_logits, attention_output
from attnscope.reference.projections import LayerInputs
from attnscope.reference.reader import OutputStages, operands_of, output_stages
from attnscope.steps.records import HIDDEN, Check, Numbers, Step, attention_words, sight


@dataclass(frozen=True)
class Observed:
    """What the model, or torch, computed for the same text, to compare with; None where it is not known.

    who: "the model's" or "torch's". tolerance: of the largest number. logits: after the mask, before the softmax.
    weights: of a row, with sink logits what is left of it or its shares, as the model returns them.
    """

    who: str
    tolerance: float
    q_HQD: Tensor | None = None
    k_GKD: Tensor | None = None
    v_GKV: Tensor | None = None
    scale: float | None = None
    logits_HQK: Tensor | None = None
    weights_HQK: Tensor | None = None
    heads_HQV: Tensor | None = None
    output_QE: Tensor | None = None

    def check(self, name: str, ours: Tensor, theirs: Tensor | None) -> tuple[Check, ...]:
        """Ours compared with what was observed; nothing where nothing was."""
        return () if theirs is None else (check_against(f"{self.who} {name}", ours, theirs, self.tolerance),)

    def with_scale(self, scale: float) -> Observed:
        """With q as it was before the scale, for models that multiply q by it and their scores by 1 (OPT, Whisper)."""
        if self.q_HQD is None or self.scale != 1.0:
            return self
        return replace(self, q_HQD=self.q_HQD.cpu().double() / scale, scale=scale)


def check_against(against: str, ours: Tensor, theirs: Tensor, tolerance: float) -> Check:
    """The largest |ours - theirs|; allowed is the tolerance times the largest |theirs|.

    Where both are hidden logits they agree, where one is the difference is infinite. NaN never agrees.
    Raises ValueError for tensors of different shapes.

    >>> check_against("theirs", torch.tensor([1.0]), torch.tensor([1.5]), 1e-5).difference
    0.5
    """
    ours, theirs = ours.detach().cpu().double(), theirs.detach().cpu().double()
    if ours.shape != theirs.shape:
        raise ValueError(f"expected {against} of shape {tuple(ours.shape)}, got {tuple(theirs.shape)}")
    both_hidden = (ours < HIDDEN) & (theirs < HIDDEN)
    difference = (ours - theirs).masked_fill(both_hidden, 0.0).abs().nan_to_num(nan=math.inf)
    largest = float(theirs.masked_fill(theirs < HIDDEN, 0.0).abs().max())
    return Check(against, float(difference.max()), largest, tolerance * largest)


def numbers(name: str, axes: str, values: Tensor) -> Numbers:
    """A tensor as float64 numbers; its axes in words.

    >>> numbers("v", "key dim", torch.zeros(9, 4)).axes
    ('key', 'dim')
    """
    return Numbers(name, tuple(axes.split()), array(values))


def array(values: Tensor) -> np.ndarray:
    """A tensor as float64 numpy."""
    return values.detach().cpu().double().numpy()


def check_query(query: int, tokens: int) -> int:
    """The position of a query, counted from the end where it is negative; UsageError for one that is not there.

    >>> check_query(-1, 9)
    8
    """
    if not -tokens <= query < tokens:
        message = f"there is no query {query}: the text has {tokens} tokens"
        raise UsageError(message, f"they count from 0 to {tokens - 1}")
    return query % tokens


class QKV(NamedTuple):
    """q, k and v of every head of a layer."""

    q_HTD: Tensor
    k_GTD: Tensor
    v_GTV: Tensor

    def kv_head(self, head: int) -> int:
        """Which kv head a query head reads (Ainslie et al. 2023, section 2.2)."""
        return head // (len(self.q_HTD) // len(self.k_GTD))

    def of(self, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """q (T, D) of one head, k (T, D) and v (T, V) of its kv head."""
        kv_head = self.kv_head(head)
        return self.q_HTD[head], self.k_GTD[kv_head], self.v_GTV[kv_head]


@dataclass(frozen=True, eq=False)
class Attention:
    """One layer's attention for one text: what it is computed from, and the steps that the oracle takes.

    Every tensor is float64 on the CPU. sinks_in_weights: whether the model's weights are after the sink took its share.
    """

    operands: Operands
    sinks_in_weights: bool = True

    @property
    def qkv(self) -> QKV:
        """q, k and v after positions."""
        return QKV(self.operands.q_HQD, self.operands.k_GKD, self.operands.v_GKV)

    @cached_property
    def steps_HQK(self) -> Mapping[str, Tensor]:
        """What the oracle notes on its way from q · k to the weights; see `attention_weights`."""
        noted: dict[str, Tensor] = {}
        self.operands.weights(noted.__setitem__)
        return noted

    @cached_property
    def heads_HQV(self) -> Tensor:
        """Each head's output."""
        return attention_output(self.steps_HQK["weights"], self.operands.v_GKV)

    def visible_QK(self, head: int) -> np.ndarray:
        """Which keys each query of a head may see."""
        return (self.steps_HQK["masked"][head] > HIDDEN).numpy()

    def summary(self, head: int) -> dict[str, Any]:
        """What an `Explanation` keeps as well as its steps."""
        return {
            "raw_QK": array(self.steps_HQK["raw"][head]),
            "scale": self.operands.scale,
            "head_dim": self.operands.q_HQD.shape[-1],
            "visible_QK": self.visible_QK(head),
            "weights_QK": array(self.steps_HQK["weights"][head]),
        }


def attention_steps(attention: Attention, head: int, query: int, observed: Observed) -> list[Step]:
    """From the scores to the weighted values; what was observed is compared with at each step.

    >>> [step.name for step in attention_steps(attention, 0, 2, observed)]
    ['scores', 'scaling', 'mask', 'softmax', 'weighted values']
    """
    operands, steps_HQK, visible_QK = attention.operands, attention.steps_HQK, attention.visible_QK(head)
    sink = None if operands.sinks is None else float(operands.sinks[head])
    words = attention_words(
        operands.q_HQD.shape[-1],
        operands.scale,
        softcap=operands.softcap,
        bias=operands.bias is not None,
        sink=sink,
        ahead=bool(np.triu(visible_QK, 1).any()),
        windowed=not visible_QK[:, 0].all(),
    )

    # the head's numbers by their keys in the words: those that the oracle noted, and what is shown of its softmax,
    # which is one step to it: the exponents of what is left of the logits after the largest
    q_QD, k_KD, v_KV = attention.qkv.of(head)
    parts = {name: step_HQK[head] for name, step_HQK in steps_HQK.items()} | {"q": q_QD, "k": k_KD, "v": v_KV}
    largest_Q1 = parts["masked"].amax(-1, keepdim=True)
    largest_Q1 = largest_Q1 if sink is None else largest_Q1.clamp_min(sink)
    parts["exp"] = (parts["masked"] - largest_Q1.masked_fill(largest_Q1 == -torch.inf, 0.0)).exp()
    if operands.bias is not None:
        parts["bias"] = operands.bias.expand_as(steps_HQK["raw"])[head]
    parts["weighted"], parts["output"] = parts["weights"][query, :, None] * v_KV, attention.heads_HQV[head]
    values = {key: array(part) for key, part in parts.items()} | {"visible": visible_QK}

    # all heads are compared: a head that is right among wrong ones would be right by chance
    weights_HQK = steps_HQK["weights"]
    shares_HQK = weights_HQK if attention.sinks_in_weights else weights_HQK / weights_HQK.sum(-1, keepdim=True)
    checks = {
        "scores": observed.check("q · k", steps_HQK["raw"], _product(observed, 1.0)),
        "scaling": observed.check("scaled q · k", steps_HQK["scaled"], _product(observed, observed.scale)),
        "mask": observed.check("logits, all heads", steps_HQK["masked"], observed.logits_HQK),
        "softmax": observed.check("weights, all heads", shares_HQK, observed.weights_HQK),
        "weighted values": observed.check("output of each head", attention.heads_HQV, observed.heads_HQV),
    }
    visible, keys = int(visible_QK[query].sum()), visible_QK.shape[1]
    return [step.step(values, checks.get(step.name, ()), keys=keys, sight=sight(visible, keys)) for step in words]


def concatenation(heads_HQV: Tensor, head: int, checks: tuple[Check, ...] = ()) -> Step:
    """The heads side by side: (Q, H * V)."""
    heads, _, width = heads_HQV.shape
    start = head * width
    return Step(
        "concatenation",
        f"[head 0; …; head {heads - 1}]   {heads} × {width} → {heads * width}" if heads > 1 else "head 0, alone",
        f"The outputs of all heads are laid side by side; head {head} fills numbers {start} to {start + width - 1}.",
        (numbers("output of head", "token head dim", heads_HQV.transpose(0, 1)),),
        checks,
    )


def _product(observed: Observed, scale: float | None) -> Tensor | None:
    """The observed q . k times a scale, where they are known."""
    if observed.q_HQD is None or observed.k_GKD is None or scale is None:
        return None
    return attention_logits(observed.q_HQD.cpu().double(), observed.k_GKD.cpu().double(), scale=scale)


LATENT_PROJECTIONS = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa")
SEPARATE = ("separate", "gated_query")
STAGES = {  # what may happen to q, k and v between split and scores, by the oracle's names
    "norm": Step(
        "norm of q and k",
        "q, k → q, k divided by their size, times a learned weight",
        "Bounds the lengths of q and k, so that no score can grow without limit.",
    ),
    "multipliers": Step("multipliers", "q, k, v × constants", "This family clips or multiplies its projections."),
    "positions": Step(
        "positions",
        "(a, b) → (a cos t − b sin t, b cos t + a sin t),   t = position × frequency of the pair",
        "Rotary positions: pairs of numbers of q and k turn by an angle t that grows with the token's position; then "
        "q · k depends on how far apart two tokens are. Turning keeps their length",
    ),
    "factor": Step("factor on q", "q × factor of its position", "Keeps long texts' queries sharp."),
}

UNSEEN_OUTPUT = Step("output projection", "[heads] W_O", "From the heads back to the width of the model.")


def before_scores(
    inputs: LayerInputs, module: nn.Module, head: int, observed: Observed
) -> tuple[list[Step], Attention]:
    """Hidden states, projections, heads, norms and positions; and the attention of the q, k and v that they make.

    module: the model's own; its projections run on the same hidden states, and their output is compared.
    """
    noted: dict[str, Any] = {}
    operands = operands_of(inputs, noted.__setitem__)
    names = [name for name in noted if name in ("split", *STAGES)]  # in the oracle's order
    split, *stages = [(name, QKV(*(x_BHTD[0] for x_BHTD in noted[name]))) for name in names]
    heads, x_TE = split[1], inputs.hidden_BTE[0]
    hidden = Step(
        "hidden states",
        f"X   {len(x_TE)} tokens × {x_TE.shape[-1]}",
        f"What enters the attention of layer {inputs.layer.index}: one vector per token, as the model passes it.",
        (numbers("x", "token dim", x_TE),),
    )
    steps = [hidden, _projections(inputs, heads, module, observed), _split(inputs, heads, head)]
    # a step that changes nothing here, as a clamp that nothing reaches, is not shown
    for name, after in stages:
        if not all(torch.equal(a, b) for a, b in zip(heads, after, strict=True)):
            step = _positions(inputs, noted) if name == "positions" else STAGES[name]
            changes = [
                numbers(f"{letter} {when}", "token dim", x_TD)
                for letter, *pair in zip("qkv", heads.of(head), after.of(head), strict=True)
                if not torch.equal(*pair)
                for when, x_TD in zip(("before", "after"), pair, strict=True)
            ]
            steps.append(replace(step, numbers=(*changes, *step.numbers)))
            heads = after
    # q, k and v as they meet against what the model's attention received, on the last step that made them
    scaled = observed.with_scale(operands.scale)
    checks = list(steps[-1].checks)
    for name, ours, theirs in zip("qkv", heads, (scaled.q_HQD, scaled.k_GKD, scaled.v_GKV), strict=True):
        if theirs is not None:  # families that repeat a kv head for each of its query heads pass more than they have
            checks += scaled.check(f"{name}, all heads", ours, theirs[:: len(theirs) // len(ours)])
    steps[-1] = replace(steps[-1], checks=tuple(checks))
    of_text = replace(operands, q_HQD=heads.q_HTD, k_GKD=heads.k_GTD, v_GKV=heads.v_GTV)
    return steps, Attention(of_text, inputs.layout.sinks_in_weights)


def after_values(inputs: LayerInputs, heads_HTV: Tensor, head: int, observed: Observed) -> list[Step]:
    """Gate, concatenation and output projection, down to what the module gives back."""
    steps, stages = [], output_stages(inputs, heads_HTV.transpose(0, 1)[None])
    others_TE = None if observed.heads_HQV is None else _side_by_side(observed.heads_HQV)
    checks = observed.check("heads side by side", _side_by_side(heads_HTV), others_TE)
    if inputs.layout.gate:
        gated_HTV = stages.gated_BTHV[0].transpose(0, 1)
        both = zip(("before the gate", "after the gate"), (heads_HTV[head], gated_HTV[head]), strict=True)
        steps.append(
            Step(
                "gate",
                "output of the head × gate(x)",
                "This family lets each token damp what its heads found before they are mixed.",
                tuple(numbers(name, "token dim", x_TV) for name, x_TV in both),
            )
        )
        heads_HTV, checks = gated_HTV, ()
    return [*steps, concatenation(heads_HTV, head, checks), _output(inputs, stages, observed)]


def observed_heads(heads: QKV, head: int) -> Step:
    """q, k and v as the model passed them to its attention."""
    count, kv_heads = len(heads.q_HTD), len(heads.k_GTD)
    return Step(
        "heads",
        f"{count} query heads, {kv_heads} kv heads",
        f"As the model's attention received them. {_sharing(head, count, kv_heads)}",
        _of_head(heads, head),
    )


def _projections(inputs: LayerInputs, heads: QKV, module: nn.Module, observed: Observed) -> Step:
    layout, shared = inputs.layout, inputs.shared is not None
    parts = dict(zip("q" if shared else "qkv", heads, strict=False))
    products = ", ".join(f"{letter} = x W_{letter.upper()}" for letter in parts)
    sizes = ", ".join(f"{x.shape[0] * x.shape[-1]}" for x in parts.values())
    bias = _bias(inputs, layout.q if layout.split in SEPARATE else layout.fused)
    how = {
        "latent": " This family first squeezes x into a short vector and grows k and v of all heads from it.",
        "separate": " This layer makes queries only: its keys and values are those of an earlier layer." * shared,
        "gated_query": " The query's matrix also makes a gate, used after the values.",
    }.get(layout.split, f" This family keeps the three matrices in one, {layout.fused}.")
    # our products against the model's own projection modules, on the same hidden states
    names: Sequence[str] = (layout.q, layout.k, layout.v) if layout.split in SEPARATE else (layout.fused,)
    checks: list[Check] = []
    for name in LATENT_PROJECTIONS if layout.split == "latent" else names:
        if f"{name}.weight" in inputs.parameters:
            projection = module.get_submodule(name)
            with torch.no_grad():
                output_TE = projection(as_input(inputs.hidden_BTE, projection))[0]
            checks += observed.check(name, inputs.linear(name, inputs.hidden_BTE)[0], output_TE)
    return Step(
        "projections",
        f"{products}{bias}   {inputs.hidden_BTE.shape[-1]} → {sizes}",
        "Learned matrices make of each token a query (what it looks for), a key (what it is found by) and a value "
        f"(what it hands over).{how}",
        tuple(numbers(letter, "token dim", _side_by_side(x)) for letter, x in parts.items()),
        tuple(checks),
    )


def _split(inputs: LayerInputs, heads: QKV, head: int) -> Step:
    count, kv_heads = len(heads.q_HTD), len(heads.k_GTD)
    width, width_v = heads.q_HTD.shape[-1], heads.v_GTV.shape[-1]
    wide = f"{width}" if width == width_v else f"{width} (v: {width_v})"
    return Step(
        "split into heads",
        f"q → {count} heads × {wide},  k, v → {kv_heads} kv heads × {wide}",
        f"Each head attends on its own, with its own share of the numbers. {_sharing(head, count, kv_heads)}"
        + (" k and v are shown as the earlier layer used them, after its positions." if inputs.shared else ""),
        _of_head(heads, head),
    )


def _of_head(heads: QKV, head: int) -> tuple[Numbers, ...]:
    """q of one head, k and v of its kv head."""
    kv_head = heads.kv_head(head)
    names = (f"q of head {head}", f"k of kv head {kv_head}", f"v of kv head {kv_head}")
    return tuple(numbers(name, "token dim", x_TD) for name, x_TD in zip(names, heads.of(head), strict=True))


def _sharing(head: int, heads: int, kv_heads: int) -> str:
    """Which kv head serves which query heads, in a sentence or two."""
    if heads == kv_heads:
        return f"Every query head has its own k and v: head {head} reads kv head {head}."
    if kv_heads == 1:
        return f"All {heads} query heads share one kv head (multi-query)."
    group = heads // kv_heads
    # All kv heads where they are few, else that of the head itself.
    served = "; ".join(
        f"kv head {kv_head} serves query heads {kv_head * group} {'and' if group == 2 else 'to'} "
        f"{(kv_head + 1) * group - 1}"
        for kv_head in (range(kv_heads) if kv_heads <= 4 else (head // group,))
    )
    return f"{group} query heads share a kv head (grouped-query): {served}."


def _positions(inputs: LayerInputs, noted: Mapping[str, Any]) -> Step:
    """The turn of q and k: the angles of every token and pair, in radians, and which numbers make a pair."""
    layout, step = inputs.layout, STAGES["positions"]
    frequency_M, factor = noted["frequencies"]
    stretched = (
        f"; this model's long-context scaling then multiplies both by {factor:.4g}" if abs(factor - 1) >= 1e-6 else ""
    )
    angle_TM = inputs.position_T[:, None].double() * frequency_M.double() * (-1 if layout.reverse else 1)
    # pair m: (a, b) of the input, (a, b) of the output
    half, head_dim = len(frequency_M), noted["positions"][0].shape[-1]
    start = head_dim - 2 * half if layout.part == "last" else 0
    near = [(start + 2 * pair, start + 2 * pair + 1) for pair in range(half)]
    far = [(start + pair, start + pair + half) for pair in range(half)]
    ways = {"half": (far, far), "interleaved": (near, near), "deinterleaved": (near, far)}[layout.rotary]
    places = np.array([(*a, *b) for a, b in zip(*ways, strict=True)])
    arrays = numbers("angle t", "token pair", angle_TM), Numbers("places of a and b", ("pair", "place"), places)
    return replace(step, why=f"{step.why}{stretched}.", numbers=arrays)


def _output(inputs: LayerInputs, stages: OutputStages, observed: Observed) -> Step:
    layout, width = inputs.layout, stages.gated_BTHV[0, 0].numel()
    output_TE, product = stages.output_BTE[0], f"[heads] W_O{_bias(inputs, layout.out)}"
    if not layout.out:  # then what the module gives back is all that there is to see of it
        checks = observed.check("output of its attention module", output_TE, observed.output_QE)
        missing = "this family projects in another module; its attention gives back the heads side by side"
        return replace(UNSEEN_OUTPUT, checks=checks, missing=missing)
    why = "A last matrix mixes what the heads found, back to the width of the model: what attention adds to the token."
    arrays: tuple[Numbers, ...] = (numbers("y", "token dim", output_TE),)
    # A few families add and norm inside the module, where others leave that to the block.
    if layout.residual:
        product += " + x"
        arrays = (numbers("[heads] W_O", "token dim", stages.projected_BTE[0]), *arrays)
        why += " This family's module adds the token's own vector itself."
    if layout.out_norm:
        product = f"layer norm({product})"
        why += " It norms the sum, too."
    return Step(
        "output projection",
        f"y = {product}   {width} → {output_TE.shape[-1]}",
        why,
        arrays,
        observed.check("output of the layer's attention", output_TE, observed.output_QE),
    )


def _side_by_side(heads_HTV: Tensor) -> Tensor:
    return heads_HTV.transpose(0, 1).flatten(-2)


def _bias(inputs: LayerInputs, name: str) -> str:
    return " + bias" if f"{name}.bias" in inputs.parameters else ""

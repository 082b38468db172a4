"""One head of a real model, from the hidden states that enter its layer to what the layer gives back.

Where the family's layout is known every number comes from the raw weights; else the steps begin with the q, k and v
that the model passed to its attention, and what precedes them is reported as missing. Nothing is taken over from a
step's check: an error made early stays visible to the end.

Shapes: H query head, G kv head, Q query, K key, D width of q and k, V width of v, E model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attnscope.certificate.oracle import layer_inputs_of, mask_of, precise
from attnscope.errors import ModelError, UsageError
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.engines import ENGINES
from attnscope.hooks.listen import listen
from attnscope.hooks.modules import HALF, ModuleRecorder, ModuleRun
from attnscope.model.quantised import is_quantised
from attnscope.model.selection import DECODER, ENCODER
from attnscope.reference.attention import Operands
from attnscope.reference.layouts import layout_of
from attnscope.reference.projections import UnreadableError
from attnscope.steps.attention import (
    UNSEEN_OUTPUT,
    Attention,
    Observed,
    after_values,
    attention_steps,
    before_scores,
    check_query,
    concatenation,
    observed_heads,
)
from attnscope.steps.records import Explanation, Step
from attnscope.utils.display import head_name

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.loaded import LoadedModel

TOLERANCE = 1e-5  # of the largest number: what float32 does to the model's own values
HALF_TOLERANCE = 5e-2  # quantised weights cannot be copied to float32, and are compared as they ran


@dataclass(frozen=True)
class LayerRun:
    """One attention call of a layer, what its module was given, and how far its numbers can be trusted.

    note: what a reader must know of the comparison, "" where there is nothing to say.
    """

    run: ModuleRun
    call: AttentionCall
    tolerance: float = TOLERANCE
    note: str = ""


def explain_head(loaded: LoadedModel, prompt: Prompt, layer: int, head: int, query: int = -1) -> Explanation:
    """Every step of one head for one text, a query token followed; -1 is the last.

    Runs the model once. Raises UsageError for a layer, head or query that is not there, ModelError for a family whose
    attention can neither be read from its weights nor observed.

    >>> explain_head(loaded, prompt, layer=2, head=3).failures
    []
    """
    query = check_query(query, len(prompt))
    loaded.check_task("an explanation", DECODER, ENCODER)
    loaded.check_queries("an explanation")
    shape = loaded.geometry.layers[layer]
    if not shape.attention or head not in range(shape.heads):
        message = f"there is no head {head_name(layer, head)}"
        raise UsageError(message, f"layer {layer} has {shape.heads} heads, type {shape.type}")
    ran = run_layer(loaded, prompt.ids, layer)
    try:
        config = loaded.model.config.get_text_config(decoder=True)
        layout = layout_of(config)
        if layout is None:
            raise UnreadableError(f"no layout of {config.model_type}'s weights is known")
        if is_quantised(loaded.model):
            raise UnreadableError("the weights are quantised")
        inputs, observed = layer_inputs_of(ran.run, layout, config, shape, "cpu"), observed_of(ran)
        before, attention = before_scores(inputs, ran.run.module, head, observed)
        steps = attention_steps(attention, head, query, observed.with_scale(attention.operands.scale))
        steps = [*before, *steps, *after_values(inputs, attention.heads_HQV, head, observed)]
    except UnreadableError as error:
        steps, attention = _from_call(ran, head, query, str(error))
    source, text = f"{loaded.name}{ran.note}", (prompt.tokens, prompt.labels)
    return Explanation(head_name(layer, head), source, *text, query, tuple(steps), **attention.summary(head))


def run_layer(loaded: LoadedModel, ids: Sequence[int], layer: int) -> LayerRun:
    """Run the model once and keep the first attention call of one layer; half precision runs again in float32.

    Raises ModelError where the layer was not observed.
    """
    runs: list[LayerRun] = []

    def keep(run: ModuleRun, recorder: ModuleRecorder) -> None:
        place = next((place for place, call in enumerate(run.calls) if call.layer == layer), None)
        if place is None or runs:
            return
        # As it ran; in half precision as a float32 copy of its module runs it, where its weights can be copied.
        call = run.calls[place]
        if call.weights_BHQK is None or call.weights_BHQK.dtype not in HALF:
            runs.append(LayerRun(run, call))
        elif is_quantised(loaded.model):
            runs.append(LayerRun(run, call, HALF_TOLERANCE, " (quantised: compared as rounded)"))
        else:
            exact, dtype = recorder.in_float32(run), str(call.weights_BHQK.dtype).removeprefix("torch.")
            note = f" ({dtype}; compared with its layer copied to float32, on the same hidden states)"
            runs.append(LayerRun(exact, exact.calls[place], note=note))

    with ModuleRecorder(loaded.model, keep) as recorder:
        listen(
            loaded.model,
            torch.tensor([list(ids)], device=loaded.device),
            recorder.record,
            engine=ENGINES["eager"],
            windows=loaded.geometry.windows,
        )
    if not runs:
        raise ModelError(f"layer {layer} made no attention call", "choose another layer")
    return runs[0]


def observed_of(ran: LayerRun) -> Observed:
    """The model's own values, without the text dim; None for what its family does not show."""
    call, spec, output_BTE = ran.call, ran.call.spec, ran.run.output_BTE
    observed = Observed(
        "the model's",
        ran.tolerance,
        weights_HQK=None if call.weights_BHQK is None else call.weights_BHQK[0],
        heads_HQV=None if call.output_BQHV is None else call.output_BQHV[0].transpose(0, 1),
        output_QE=None if output_BTE is None else output_BTE[0],
    )
    if call.v_BGKV is not None:
        observed = replace(observed, v_GKV=call.v_BGKV[0])
    if call.P.shows_logits:  # some families hide keys by a number that is a logit too
        seen_HQK, logits_HQK = call.visible.rows(0, call.P.queries)[0], call.P.scores(0, call.P.queries)[0]
        observed = replace(observed, logits_HQK=logits_HQK.masked_fill(~seen_HQK, -torch.inf))
    if spec is None:
        return observed
    return replace(observed, q_HQD=spec.q_BHQD[0], k_GKD=spec.k_BGKD[0], scale=spec.scale)


def _from_call(ran: LayerRun, head: int, query: int, why: str) -> tuple[list[Step], Attention]:
    """From the q, k and v of the call: what was done to get them, and what follows the heads, cannot be shown."""
    spec = ran.call.spec
    if spec is None or (spec.sinks is not None and spec.sinks.shape[-1] != 1):
        too = "its q, k and v cannot be heard" if spec is None else "its sink logits are not one per head"
        raise ModelError(f"this layer cannot be taken apart: {why}, and {too}", "choose another layer or model")
    operands = Operands(
        precise(spec.q_BHQD[0], "cpu"),
        precise(spec.k_BGKD[0], "cpu"),
        precise(spec.v_BGKV[0], "cpu"),
        scale=spec.scale,
        mask=mask_of(ran.call, "cpu")[0],
        softcap=spec.softcap,
        bias=None if spec.bias is None else precise(spec.bias[0], "cpu"),
        sinks=None if spec.sinks is None else precise(spec.sinks[0, :, 0], "cpu"),
    )
    attention = Attention(operands, sinks_in_weights=not spec.sinks_scale_output)
    # q, k and what follows from them alone are the model's own: only weights and outputs can be compared
    observed = replace(observed_of(ran), q_HQD=None, k_GKD=None, scale=None, logits_HQK=None)
    missing = f"{why}; q, k and v below are as the model passed them to its attention"
    steps = [
        Step(
            "projections and positions", "X → q, k, v", "From each token's vector to its q, k and v.", missing=missing
        ),
        observed_heads(attention.qkv, head),
        *attention_steps(attention, head, query, observed),
        concatenation(attention.heads_HQV, head),
        replace(UNSEEN_OUTPUT, missing=why),
    ]
    return steps, attention

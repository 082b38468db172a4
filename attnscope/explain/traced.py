"""One head of a real model, from the hidden states that enter its layer to what the layer gives back.

Where the family's layout is known every number comes from the raw weights; else the steps begin with the q, k and v
that the model passed to its attention, and what came before is said to be missing. Nothing is taken over from a step's
check: an error made early stays visible to the end.

Shapes: H query head, G kv head, Q query, K key, T token, D width of q and k, V width of v, E model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscope.errors import ModelError, UsageError
from attnscope.explain import layer_steps
from attnscope.explain.steps import (
    Attended,
    Explanation,
    Rules,
    Step,
    Theirs,
    attend,
    check_query,
    concatenation,
)
from attnscope.parity import is_quantised
from attnscope.reference.given import Given, UnreadableError
from attnscope.reference.layouts import layout_of
from attnscope.seam.listen import AttentionCall, listen
from attnscope.seam.modules import ModuleRecorder, ModuleRun

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel
    from attnscope.text.prompt import Prompt

TOLERANCE = 1e-5  # of the largest number: what float32 does to the model's own values
HALF_TOLERANCE = 5e-2  # quantised weights cannot be copied to float32, and are compared as they ran
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Heard:
    """One attention call of the layer, what its module was given, and how far its numbers can be trusted.

    note: what a reader must know of the comparison, "" where there is nothing to say.
    """

    run: ModuleRun
    call: AttentionCall
    who: str
    tolerance: float
    note: str = ""

    @property
    def theirs(self) -> Theirs:
        """The model's own values, without the text dim; None for what its family lets nobody hear."""
        call, logits = self.call, self.call.logits
        return Theirs(
            self.who,
            self.tolerance,
            q_HQD=None if logits is None else logits.q_BHQD[0],
            k_GKD=None if logits is None else logits.k_BGKD[0],
            v_GKV=None if call.v_BGKD is None else call.v_BGKD[0],
            scale=None if logits is None else logits.scale,
            logits_HQK=None if logits is None else logits.rows(0, logits.q_BHQD.shape[2])[0],
            weights_HQK=None if call.weights_BHQK is None else call.weights_BHQK[0],
            heads_HQV=None if call.output_BQHD is None else call.output_BQHD[0].transpose(0, 1),
            output_QE=None if self.run.output_BTE is None else self.run.output_BTE[0],
        )


def explain_head(loaded: LoadedModel, prompt: Prompt, layer: int, head: int, query: int = -1) -> Explanation:
    """Every step of one head for one text, a query token followed; -1 is the last.

    Runs the model once. Raises UsageError for a layer, head or query that is not there, ModelError for a family whose
    attention can neither be read from its weights nor heard.

        >>> explain_head(loaded, from_text(loaded.tokenizer, "the bank"), layer=2, head=3).failures
        []
    """
    query = check_query(query, len(prompt))
    shape = loaded.geometry.layers[layer]
    if not shape.attention or head not in range(shape.heads):
        raise UsageError(
            f"there is no head L{layer}H{head}", f"layer {layer} has {shape.heads} heads, kind {shape.kind}"
        )
    heard = hear(loaded, prompt.ids, layer)
    steps, attended, rules = _steps(loaded, heard, shape, (head, query))
    return Explanation(
        f"L{layer}H{head}",
        f"{loaded.name}{heard.note}",
        prompt.tokens,
        prompt.labels,
        query,
        tuple(steps),
        attended.raw_QK,
        rules.scale,
        attended.head_dim,
        attended.visible_QK,
        attended.weights_QK,
    )


def hear(loaded: LoadedModel, ids: Sequence[int], layer: int) -> Heard:
    """Run the model once and keep the first attention call of one layer; half precision runs again in float32.

    Raises ModelError where the layer was not heard.
    """
    found: list[Heard] = []

    def keep(run: ModuleRun, recorder: ModuleRecorder) -> None:
        places = [place for place, call in enumerate(run.calls) if call.layer == layer]
        if places and not found:
            found.append(_trusted(loaded, run, places[0], recorder))

    windows = {one.index: one.window for one in loaded.geometry.attention_layers}
    with ModuleRecorder(loaded.model, keep) as recorder:
        listen(loaded.model, torch.tensor([list(ids)], device=loaded.device), recorder.record, windows=windows)
    if not found:
        raise ModelError(f"no attention was heard from layer {layer}", "choose another layer")
    return found[0]


def _trusted(loaded: LoadedModel, run: ModuleRun, place: int, recorder: ModuleRecorder) -> Heard:
    """The call as it ran, or in half precision as a float32 copy of its module runs it."""
    weights = run.calls[place].weights_BHQK
    if weights is None or weights.dtype not in HALF:
        return Heard(run, run.calls[place], "the model's", TOLERANCE)
    if is_quantised(loaded.model):
        return Heard(run, run.calls[place], "the model's", HALF_TOLERANCE, " (quantised: compared as rounded)")
    exact, dtype = recorder.in_float32(run), str(weights.dtype).removeprefix("torch.")
    note = f" ({dtype}; compared with its layer copied to float32, on the same hidden states)"
    return Heard(exact, exact.calls[place], "the model's", TOLERANCE, note)


def _steps(
    loaded: LoadedModel, heard: Heard, shape: Any, chosen: tuple[int, int]
) -> tuple[list[Step], Attended, Rules]:
    """From the weights where they can be read, else from what was heard."""
    config = loaded.model.config.get_text_config(decoder=True)
    layout = layout_of(config)
    try:
        if layout is None:
            raise UnreadableError(f"no layout of {config.model_type}'s weights is known")
        if is_quantised(loaded.model):
            raise UnreadableError("the weights are quantised")
        if len(heard.run.calls) > 1 or heard.run.output_BTE is None:
            raise UnreadableError("the layer attends more than once, or outside its own module")
        return _from_weights(_given(heard.run, layout, config, shape), heard, chosen)
    except UnreadableError as error:
        return _from_heard(heard, chosen, str(error))


def _given(run: ModuleRun, layout: Any, config: Any, shape: Any) -> Given:
    """What the oracle gets, in float64: raw parameters, and what entered the module."""
    parameters = {**dict(run.module.named_buffers()), **dict(run.module.named_parameters())}
    if any(parameter.is_meta for parameter in parameters.values()):
        raise UnreadableError("the weights are offloaded")
    hidden_BTE = run.hidden_BTE
    return Given(
        layout=layout,
        parameters={name: _exact(parameter) for name, parameter in parameters.items()},
        config=config,
        layer=shape,
        hidden_BTE=_exact(hidden_BTE),
        position_T=torch.arange(hidden_BTE.shape[1]),
        arguments={name: _exact(value) for name, value in run.arguments.items() if isinstance(value, Tensor)},
        model_dtype=run.model_dtype,
    )


def _exact(x: Tensor) -> Tensor:
    return x.detach().cpu().double() if x.is_floating_point() else x.detach().cpu()


def _from_weights(given: Given, heard: Heard, chosen: tuple[int, int]) -> tuple[list[Step], Attended, Rules]:
    theirs, head = heard.theirs, chosen[0]
    before, (q_HTD, k_GTD, v_GTV) = layer_steps.before_scores(given, heard.run.module, head, theirs)
    rules = layer_steps.rules(given, q_HTD.shape[-1])
    attended = attend(q_HTD, k_GTD, v_GTV, rules, chosen, theirs)
    after = layer_steps.after_values(given, attended.heads_HQV, head, theirs)
    return [*before, *attended.steps, *after], attended, rules


def _from_heard(heard: Heard, chosen: tuple[int, int], why: str) -> tuple[list[Step], Attended, Rules]:
    """From the q, k and v of the call: what was done to get them, and what follows the heads, cannot be shown."""
    call, logits, theirs = heard.call, heard.call.logits, heard.theirs
    heard_all = logits is not None and theirs.v_GKV is not None
    if not heard_all or (call.sinks is not None and call.sinks.dim() != 1):
        also = "its sink logits are not one a head" if heard_all else "its q, k and v cannot be heard"
        raise ModelError(f"this layer cannot be taken apart: {why}, and {also}", "choose another layer or model")
    assert logits is not None
    assert theirs.v_GKV is not None
    assert theirs.q_HQD is not None
    assert theirs.k_GKD is not None
    visible = call.visible
    mask = visible.rows(0, visible.queries) if visible.mask is None else visible.mask[..., : visible.keys]
    bias, sinks = (None if x is None else _exact(x) for x in (logits.bias, call.sinks))
    bias = bias if bias is None else bias[0]
    rules = Rules(logits.scale, _exact(mask)[0], logits.softcap, bias, sinks, not call.sinks_scale_output)
    # q, k and what follows from them alone are the model's own: only weights and outputs can be compared
    known = replace(theirs, q_HQD=None, k_GKD=None, scale=None, logits_HQK=None)
    attended = attend(theirs.q_HQD, theirs.k_GKD, theirs.v_GKV, rules, chosen, known)
    head, heads, kv_heads = chosen[0], theirs.q_HQD.shape[0], theirs.k_GKD.shape[0]
    missing = f"{why}; q, k and v below are as the model passed them to its attention"
    steps = [
        Step(
            "projections and positions", "X → q, k, v", "From each token's vector to its q, k and v.", missing=missing
        ),
        layer_steps.heard_heads(theirs, head, heads, kv_heads),
        *attended.steps,
        concatenation(attended.heads_HQV, head),
        Step("output projection", "[heads] W_O", "From the heads back to the width of the model.", missing=why),
    ]
    return steps, attended, rules

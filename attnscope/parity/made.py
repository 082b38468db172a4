"""The q and k of a layer that does not show them, as the oracle makes them of what enters its module.

They are held against the weights that the module gave. A gradient finds its way through them to the hidden states.

Shapes: B text, T token, H head, Q query, K key.
"""

from __future__ import annotations

from dataclasses import replace

from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.errors import ModelError
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.modules import ModuleRun
from attnscope.parity.allowed import weights_allowed
from attnscope.parity.comparing import Stack
from attnscope.parity.given import given_of, precise
from attnscope.parity.verdicts import ATOL
from attnscope.reference.given import Given, UnreadableError
from attnscope.reference.reader import Reading, operands_of, read

ANOTHER = "choose another model"


def made_spec(run: ModuleRun, stack: Stack) -> AttentionSpec:
    """A run's one call, with q, k and v as its family's layout makes them.

    Raises ModelError for a layer that no layout describes, and where the weights are not those of the model.

    >>> made_spec(run, stack).q_BHQD.requires_grad
    True
    """
    [call] = run.calls
    try:
        if stack.layout is None:
            raise UnreadableError("no layout is known for it")
        given = given_of(run, stack.layout, stack.config, stack.layers[call.layer])
        reading = read(given)
    except UnreadableError as error:
        raise ModelError(f"the q and k of this model are not seen: {error}", ANOTHER) from None
    _check_weights(call, reading)
    return _spec(replace(given, hidden_BTE=run.hidden_BTE.to(given.hidden_BTE)), reading)


def _check_weights(call: AttentionCall, reading: Reading) -> None:
    assert call.weights_BHQK is not None
    missed_BHQK = (precise(call.weights_BHQK) - reading.weights_BHQK).abs()
    allowed_BHQK = weights_allowed(reading.weights_BHQK, reading.terms(), call.weights_BHQK.dtype).clamp_min(ATOL)
    if not bool((missed_BHQK <= allowed_BHQK).all()):
        raise ModelError(
            f"its weights differ by {float(missed_BHQK.max()):.2g} from those of the q and k that its layout makes",
            ANOTHER,
        )


def _spec(given: Given, reading: Reading) -> AttentionSpec:
    operands = operands_of(given)
    tokens, bias = operands.q_HQD.shape[2], operands.bias
    return AttentionSpec(
        operands.q_HQD,
        operands.k_GKD,
        operands.v_GKV,
        scale=operands.scale,
        visible=Visibility(tokens, tokens, reading.visible_QK[None, None], device=operands.q_HQD.device),
        softcap=operands.softcap,
        bias=None if bias is None else bias.expand(-1, tokens, -1)[None],
    )

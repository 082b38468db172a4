"""What a request wants to know of one stack: the probes that keep it, and what they must know of the texts.

Shapes: B text, Q query, T token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from attnscope.attention.questions import Features, Received
from attnscope.errors import UsageError
from attnscope.measure.maps import Maps
from attnscope.measure.metrics import LOOKBACKS, MASS
from attnscope.measure.operands import Operands
from attnscope.measure.per_token import PerToken
from attnscope.measure.probes import (
    HeadScores,
    Probe,
    TopKey,
    TopRelation,
    Weights,
)
from attnscope.measure.relations import ChosenKeys, TopKeys
from attnscope.measure.rollout import RolloutProbe, spans_of
from attnscope.measure.spans import SpanMass
from attnscope.measure.texts import Texts
from attnscope.observe.request import Asked, Request
from attnscope.seam.call import AttentionCall
from attnscope.seam.projection import gram_root
from attnscope.stacks import CAUSAL
from attnscope.text.tokens import Found

if TYPE_CHECKING:
    from attnscope.text.prompt import Prompt


def texts_of(asked: Sequence[Asked], device: str, kind: str) -> Texts:
    prompts = [one.prompt for one in asked]
    longest = max(len(prompt) for prompt in prompts)
    ids_BT = side_by_side([prompt.ids_apart for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    query_BT = _marked([one.chosen.query for one in asked], longest, default=True)
    most_keys = max(len(one.looked_at) for one in asked)
    key_BT = _marked([one.chosen.key for one in asked], most_keys, default=False)
    answers = _answers(prompts) if kind in CAUSAL else None
    return Texts(ids_BT, lengths, query_BT, key_BT, answers, kind, prompts[0].unasked).to(torch.device(device))


def _answers(prompts: Sequence[Prompt]) -> torch.Tensor | None:
    """Where each text's answer begins, its length where it has none, (B,); None where none has one."""
    if all(prompt.answer is None for prompt in prompts):
        return None
    return torch.tensor([len(prompt) if prompt.answer is None else prompt.answer for prompt in prompts])


def _marked(found: Sequence[Found | None], longest: int, default: bool) -> torch.Tensor | None:
    """True on each text's named tokens, (B, T); `default` in a text that names none, None where none does."""
    if not any(found):
        return None
    marked_BT = torch.full((len(found), longest), default)
    for row, one in enumerate(found):
        if one is not None:
            marked_BT[row] = False
            marked_BT[row, list(one.positions)] = True
    return marked_BT


def probes_of(asked: Sequence[Asked], request: Request) -> dict[str, Probe]:
    prompts, chosen = [one.prompt for one in asked], asked[0].chosen
    always = [name for name in request.metrics if name not in LOOKBACKS and name != MASS.id]
    lookbacks = LOOKBACKS if always and any(prompt.answer is not None for prompt in prompts) else ()
    mass = [MASS.id] if any(one.chosen.key for one in asked) else []
    probes: dict[str, Probe] = {
        "scores": HeadScores((*always, *lookbacks, *mass)),
        "relation": TopRelation(request.key_zero),
        "top_key": TopKey(request.view),
    }
    nothing = all(one.chosen.nothing for one in asked)
    if request.relations and not nothing:
        probes["keys"] = _keys_probe(asked, request)
    if request.maps and not nothing:
        view = request.view if request.maps == "kept" else replace(request.view, heads=None)
        probes["maps"] = Maps(
            len(prompts[0]),
            view,
            request.bin_rule,
            request.split_sink,
            request.map_side,
            _queries(asked[0]) if chosen.query or prompts[0].unasked else None,
            chosen.key.positions if chosen.key else None,
            len(asked[0].looked_at),
        )
    if request.weights:
        probes["weights"] = Weights(request.view_of(request.weights))
    if request.operands:
        probes["operands"] = Operands(request.view_of(request.operands))
    if request.rollout:
        probes["rollout"] = RolloutProbe(_groups(prompts, request.rollout))
    if request.per_token and not nothing:
        probes["per_token"] = PerToken(_towards(asked), request.view)
    if request.spans:
        keys = None if asked[0].keys is None else _spans(asked, request.spans, of_keys=True)
        probes["spans"] = SpanMass(_spans(asked, request.spans), request.view, keys)
    return probes


def _keys_probe(asked: Sequence[Asked], request: Request) -> TopKeys | ChosenKeys:
    """What keeps relations: of all queries and keys, or of those that are asked about."""
    groups = None
    if request.group:
        of_queries = _groups([one.prompt for one in asked], request.group)
        others = asked[0].keys is not None
        groups = of_queries, _groups([one.looked_at for one in asked], request.group) if others else of_queries
    if not any(one.chosen.query or one.chosen.key or one.prompt.unasked for one in asked):
        return TopKeys(request.top_k, request.view, groups)

    def units(side: int, text: int) -> Sequence[int]:
        """The tokens that are asked about as queries, or as keys, or the groups that they stand in."""
        one = asked[text]
        places = _keys(one) if side else _queries(one)
        return places if groups is None else tuple(groups[side][text, list(places)].unique().tolist())

    query, key = (tuple(units(side, text) for text in range(len(asked))) for side in (0, 1))
    return ChosenKeys(request.top_k, query, key, request.view, groups)


def _queries(one: Asked) -> Sequence[int]:
    """The queries that are asked about: those that were named, or all that there are."""
    return one.chosen.query.positions if one.chosen.query else range(one.prompt.unasked, len(one.prompt))


def _keys(one: Asked) -> Sequence[int]:
    return one.chosen.key.positions if one.chosen.key else range(len(one.looked_at))


def _towards(asked: Sequence[Asked]) -> Received | Features:
    """What is asked of every token: its mean weight as a key of the chosen queries, or its mass on the chosen keys."""
    on_keys = all(one.chosen.keys_alone for one in asked)
    texts = [one.looked_at if on_keys else one.prompt for one in asked]
    share_BT = torch.zeros(len(asked), max(map(len, texts)))
    for row, one in enumerate(asked):
        positions = list(_keys(one) if on_keys else _queries(one))
        share_BT[row, positions] = 1.0 if on_keys else 1 / max(1, len(positions))
    return Features(share_BT[..., None]) if on_keys else Received(share_BT)


def _spans(asked: Sequence[Asked], names: Sequence[str], of_keys: bool = False) -> torch.Tensor:
    """True on the tokens of each text's spans, (B, T, S)."""
    longest = max(len(one.looked_at if of_keys else one.prompt) for one in asked)
    spans = [(one.chosen.key_spans if of_keys else one.chosen.spans) or {} for one in asked]
    marked = [_marked([of_text.get(name) for of_text in spans], longest, default=False) for name in names]
    nowhere_BT = torch.zeros(len(asked), longest, dtype=torch.bool)
    return torch.stack([nowhere_BT if one is None else one for one in marked], -1)


def _groups(prompts: Sequence[Prompt], group: str) -> torch.Tensor:
    """The number of each token's group, (B, T); -1 for padding."""
    groups_BT = torch.full((len(prompts), max(len(prompt) for prompt in prompts)), -1)
    for row, prompt in enumerate(prompts):
        for number, span in enumerate(spans_of(prompt, group)):
            groups_BT[row, span.start : span.stop] = number
    return groups_BT


def root_of(call: AttentionCall, out: Mapping[nn.Module, nn.Module]) -> torch.Tensor:
    """What makes norms of a layer's values as they are written. Raises UsageError where they are not v W_O."""
    spec, why = call.spec, ""
    if spec is None:
        why = "does not show the values of its attention"
    elif spec.sinks_scale_output:
        why = "scales what its weights give before it is written"
    elif call.module not in out:
        why = "has no output projection that is given the heads side by side, as they come"
    if spec is None or why:
        raise UsageError(f"this model family {why}, so that no key's share of it is known", "use {weights=softmax}")
    return gram_root(out[call.module], spec.heads, spec.v_BGKV)


def side_by_side(ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Ids of several texts, (B, T): shorter ones are filled up with their last."""
    longest = max(map(len, ids))
    return torch.tensor([[*one, *[one[-1]] * (longest - len(one))] for one in ids])

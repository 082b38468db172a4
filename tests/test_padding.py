"""A text beside others has the weights that it has alone, in every causal family: padded, packed, of one token or two.

Where transformers itself reads a padded or packed text otherwise than alone, or refuses it, there is nothing to hold
attnscope to: its corpus code finds that while it runs, and reads such texts alone.

Shapes: B text, H head, Q query, K key, T token, E model width.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attnscope.hooks.engines import ENGINES
from attnscope.hooks.listen import calls_interface, listen
from attnscope.inputs.prompt import Prompt
from attnscope.observe.collect import observe
from attnscope.observe.request import Request
from helpers.parity_models import DECODERS, TYPES, as_loaded, roused_model

SHORT, LONG = 9, 20  # tokens; both longer than the tiny windows of 8
MISSING = LONG - SHORT
UNREAD = {"cpmant", "xlnet"}  # no command reads them: docs/families.md says why
OF_BYTES = {"blt"}  # its patches are those of one text: tests/test_bytes_and_patches.py
FAMILIES = [family for family in TYPES if family not in UNREAD | OF_BYTES | set(DECODERS)]
# Some of each kind, and the ways besides padding on the right in which transformers reads their texts as if alone.
QUICK = {
    "llama": {"padded_left", "packed", "packed_by_mask"},
    "gpt2": {"padded_left", "packed", "packed_by_mask"},
    "gemma3_text": {"padded_left", "packed"},  # a mask that is given hides no window
    "bloom": {"padded_left"},
    "jamba": {"padded_left"},
    "roberta": set(),
}
EVERY_FAMILY = pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in FAMILIES]
)
CLOSE = {"gemma4": 3e-5, "gemma4_text": 3e-5, "gemma4_unified": 3e-5, "gemma4_unified_text": 3e-5}  # logits up to 80

generator = torch.Generator().manual_seed(3)
SHORT_T, LONG_T = (torch.randint(6, 128, (tokens,), generator=generator) for tokens in (SHORT, LONG))  # none begins
Inputs = dict[str, Tensor]
Part = tuple[Tensor, int, slice]  # a text alone; the row that it stands in, and where
Heard = dict[tuple[str, int, int], Tensor]  # weights (B, H, Q, K) of each module, layer (one per pass of HRM) and call


def padded_right() -> tuple[Tensor, Inputs, list[Part]]:
    ids_BT = torch.stack([torch.cat([SHORT_T, SHORT_T[:1].expand(MISSING)]), LONG_T])
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[0, SHORT:] = 0
    return ids_BT, {"attention_mask": mask_BT}, [(SHORT_T, 0, slice(0, SHORT)), (LONG_T, 1, slice(0, LONG))]


def padded_left() -> tuple[Tensor, Inputs, list[Part]]:
    ids_BT, _, parts = padded_right()
    ids_BT[0] = ids_BT[0].roll(MISSING)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[0, :MISSING] = 0
    position_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": mask_BT, "position_ids": position_BT}
    return ids_BT, inputs, [(SHORT_T, 0, slice(MISSING, LONG)), parts[1]]


def packed() -> tuple[Tensor, Inputs, list[Part]]:
    """Both in one row; by the positions alone transformers tells where one ends."""
    position_T = torch.cat([torch.arange(SHORT), torch.arange(LONG)])
    parts = [(SHORT_T, 0, slice(0, SHORT)), (LONG_T, 0, slice(SHORT, SHORT + LONG))]
    return torch.cat([SHORT_T, LONG_T])[None], {"position_ids": position_T[None]}, parts


def packed_by_mask() -> tuple[Tensor, Inputs, list[Part]]:
    ids_BT, inputs, parts = packed()
    seen_QK = torch.block_diag(torch.ones(SHORT, SHORT), torch.ones(LONG, LONG)).bool().tril()
    mask_BHQK = torch.zeros(1, 1, *seen_QK.shape).masked_fill(~seen_QK, torch.finfo(torch.float32).min)
    return ids_BT, inputs | {"attention_mask": mask_BHQK}, parts


WAYS: Mapping[str, Callable[[], tuple[Tensor, Inputs, list[Part]]]] = {
    way.__name__: way for way in (padded_right, padded_left, packed, packed_by_mask)
}


def heard(model: Any, ids_BT: Tensor, engine: str = "eager", **inputs: Tensor) -> Heard:
    found: Heard = {}

    def hear(call: Any) -> None:
        if call.P.keys == ids_BT.shape[1]:
            found[call.path, call.layer, call.call] = call.P.dense()

    listen(model, ids_BT, hear, engine=ENGINES[engine], **inputs)
    return found


def hidden(model: Any, ids_BT: Tensor, inputs: Inputs) -> Tensor:
    """What transformers computes, without attnscope, (B, T, E)."""
    with torch.no_grad():
        return model.base_model(ids_BT, use_cache=False, **inputs)[0]


def reads_as_alone(model: Any, ids_BT: Tensor, inputs: Inputs, parts: list[Part]) -> bool:
    """Whether transformers does."""
    try:
        beside_BTE = hidden(model, ids_BT, inputs)
    except (AssertionError, RuntimeError, ValueError):  # each refuses in its own way
        return False
    for text_T, row, place in parts:
        alone_TE = hidden(model, text_T[None], {})[0]
        far_T = (beside_BTE[row, place] - alone_TE).norm(dim=-1) / alone_TE.norm(dim=-1)
        if far_T.max() > 1e-4:
            return False
    return True


def engines(model: Any) -> list[str]:
    return ["eager", "tiles"] if calls_interface(model) else ["eager"]


@EVERY_FAMILY
def test_texts_that_are_padded_or_packed_have_the_weights_that_they_have_alone(family: str) -> None:
    model, as_alone = roused_model(family), set()
    for way, made in WAYS.items():
        ids_BT, inputs, parts = made()
        if not reads_as_alone(model, ids_BT, inputs, parts):
            continue
        as_alone.add(way)
        for engine in engines(model):
            beside = heard(model, ids_BT, engine, **inputs)
            for text_T, row, place in parts:
                alone = heard(model, text_T[None])
                assert beside.keys() & alone.keys()
                for call in beside.keys() & alone.keys():
                    found_HQK = beside[call][row][:, place, place]
                    assert_close(
                        found_HQK, alone[call][0], atol=CLOSE.get(family, 1e-5), rtol=0, msg=f"{way}, {engine}"
                    )
    assert "padded_right" in as_alone
    if family in QUICK:
        assert as_alone == {"padded_right", *QUICK[family]}


@EVERY_FAMILY
def test_a_corpus_of_texts_of_any_length_has_the_weights_that_they_have_alone(family: str) -> None:
    """Of one token, of two, and more, as the corpus code puts them together or apart."""
    model, texts = roused_model(family), [LONG_T[:1], LONG_T[:2], SHORT_T, LONG_T]
    own = [heard(model, text_T[None]) for text_T in texts]
    for engine in engines(model):
        seen = observe(as_loaded(model), [prompt(text_T) for text_T in texts], WEIGHTS, engine=ENGINES[engine])
        for one, alone in zip(seen, own, strict=True):
            first = [weights[0] for (*_, call), weights in alone.items() if call == 0]  # of a layer that calls again
            assert_close(list(one.weights.values()), first, atol=CLOSE.get(family, 1e-5), rtol=0)
            assert first


WEIGHTS = Request(metrics=(), weights=True)


def prompt(ids_T: Tensor) -> Prompt:
    return Prompt("", tuple(ids_T.tolist()), ("",) * len(ids_T), (), (), (), ())

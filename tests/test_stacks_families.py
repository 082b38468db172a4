"""Every encoder and encoder-decoder of text that transformers has: what is heard is what the family itself returns.

`docs/families/stacks.csv` has these measurements; the last tests hold it to them.

Shapes: B text, H head, Q query, K key, T token, D head dim.
"""

import inspect
from collections.abc import Callable, Container, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close
from transformers import CONFIG_MAPPING

from attnscope.attention.spec import Visibility
from attnscope.errors import ModelError
from attnscope.hooks.engines import eager_bytes
from attnscope.hooks.families import banded, weights_in
from attnscope.hooks.listen import calls_interface, listen
from attnscope.model.checkpoint import check_has_attention
from attnscope.model.families import Family
from attnscope.model.geometry import geometry_of
from attnscope.model.selection import CROSS, DECODER, ENCODER
from attnscope.model.tasks import model_class, task_of
from helpers.families import of_all_families, tiny_config
from helpers.families_table import read, stack_row, stacks
from helpers.seconds import once
from helpers.stack_families import (
    NOT_OF_TEXT,
    OVERRIDES,
    REACH,
    SEQ2SEQ,
    SOURCE,
    TYPES,
    UNREAD,
    Key,
    Measured,
    heard,
    ids,
    inputs_of,
    measure,
    own,
    peak_bytes,
    tiny,
)

FUSED = 1e-4  # entropies of rows whose unscaled logits go to hundreds
QUICK = (
    *("albert", "bart", "bert", "convbert", "deberta-v2", "distilbert", "encoder-decoder", "fsmt", "funnel", "ibert"),
    *("layoutlm", "led", "longformer", "longt5", "luke", "marian", "mobilebert", "modernbert", "pegasus_x"),
    *("prophetnet", "roberta", "squeezebert", "t5", "t5gemma2", "xlnet"),
)


AS_ANOTHER = ("ibert", "layoutlm", "marian", "roberta")  # tried in full by bert, bart and those read by hooks
OF_SIZES = (  # what cuts, pads or pools tokens in a way of its own
    *("bart", "bert", "convbert", "deberta-v2", "led", "longformer", "longt5", "modernbert", "pegasus_x"),
    *("prophetnet", "squeezebert", "t5", "t5gemma2", "xlnet"),
)


def every_but(
    names: Container[str] = (), quick: Container[str] = QUICK, default: Container[str] | None = None
) -> list[Any]:
    """Every type but those; what is not quick is slow, of what is quick the default is tried by default."""
    default = [name for name in QUICK if name not in AS_ANOTHER] if default is None else default
    marks = {name: [] if name in default else [pytest.mark.families] for name in TYPES if name in quick}
    return [pytest.param(name, marks=marks.get(name, [pytest.mark.slow])) for name in TYPES if name not in names]


EVERY = every_but()
BY_HOOK = (
    *("big_bird", "convbert", "deberta", "deberta-v2", "flaubert", "fsmt", "funnel", "ibert", "layoutlmv3", "led"),
    *("lilt", "longformer", "luke", "megatron-bert", "mpnet", "mvp", "prophetnet", "rembert", "roformer"),
    *("squeezebert", "tapas", "visual_bert", "xlm", "xlnet"),
)
BOTH_WAYS = ("bigbird_pegasus", "longt5", "t5gemma2")

measured: Callable[[str], Measured] = once(measure)


@pytest.mark.parametrize("family", EVERY)
def test_what_is_heard_is_what_the_family_returns(family: str) -> None:
    found = measured(family)
    assert found.weights <= 1e-6
    assert found.unlike == ()
    assert found.failures == ()  # row sums to 1e-5, P V to 1e-4 of the layer's own output, nothing on hidden keys
    assert found.route == (
        "hook" if family in BY_HOOK else "hook and interface" if family in BOTH_WAYS else "interface"
    )
    assert (found.output is None) == (family == "longformer")  # whose windows are multiplied piece by piece


@pytest.mark.parametrize("family", EVERY)
def test_fused_engines_say_the_same_where_the_family_asks_the_interface(family: str) -> None:
    found = measured(family)
    assert (found.fused is None) == (family in BY_HOOK or family == "t5gemma2")
    assert found.fused is None or found.fused <= FUSED


@of_all_families
def test_the_counts() -> None:
    tasks = {one: task_of(tiny_config(one, **OVERRIDES.get(one, {}))) for one in TYPES}
    assert [one for one in TYPES if tasks[one] == "seq2seq"] == SEQ2SEQ
    assert len(TYPES) == 79
    assert len(UNREAD) == 12
    assert len(NOT_OF_TEXT) == 12
    assert set(QUICK) | set(BY_HOOK) | set(BOTH_WAYS) | set(OVERRIDES) <= set(TYPES)
    assert not set(TYPES) & (set(UNREAD) | set(NOT_OF_TEXT))


@pytest.mark.parametrize("family", sorted(UNREAD))
def test_what_cannot_be_read_is_refused_in_one_line(family: str) -> None:
    with pytest.raises(ModelError) as raised:
        check_has_attention(family)
    assert family in raised.value.message
    assert UNREAD[family] in raised.value.message.replace("it hashes", "hashes")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("pix2struct", "Pix2StructForConditionalGeneration is given flattened_patches first, and no text alone"),
        pytest.param("pi0", "PI0Model is given state first", marks=pytest.mark.families),
        pytest.param("pp_formulanet", "is given pixel_values first", marks=pytest.mark.families),
        pytest.param("bark", "BarkModel has no forward pass of its own", marks=pytest.mark.families),
    ],
)
def test_what_reads_no_text_alone_is_refused_in_one_line(family: str, why: str) -> None:
    config = CONFIG_MAPPING[family]()
    with pytest.raises(ModelError, match=why):
        model_class(config, task_of(config), family)


# The checks above can fail.


def test_another_models_weights_are_not_equal() -> None:
    model, other = tiny("bert"), tiny("bert", hidden_act="relu")
    found, _ = heard(model, ids(SOURCE))
    expected = own(other, ids(SOURCE))
    assert max(float((found[key] - expected[key]).abs().max()) for key in found) > 1e-3


def test_a_geometry_that_ignores_what_is_known_of_the_family_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscope.model.geometry.family", lambda name: Family())
    assert measure("convbert").unlike
    assert measure("funnel").unlike


# Where transformers returns something else than weights.


def module_seen(model: Any, path: str, run: Callable[[], object]) -> tuple[Tensor, Tensor]:
    """What a module was given and what it put out."""
    seen: list[Tensor] = []

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        given = kwargs.get("hidden_states", args[0] if args else None)
        out = output["context_layer"] if isinstance(output, dict) else output[0]
        seen.extend((given, out))

    handle = model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)
    run()
    handle.remove()
    return seen[0], seen[1]


def test_prophetnet_returns_logits_and_its_output_is_that_of_their_softmax() -> None:
    model, source = tiny("prophetnet"), ids(SOURCE)
    path = "prophetnet.encoder.layers.0.self_attn"
    inputs = inputs_of(model)
    given_BTD, output_BTD = module_seen(model, path, lambda: model(source, **inputs, use_cache=False))
    weights_BHQK = heard(model, source, **inputs)[0][ENCODER, 0]
    module = model.get_submodule(path)
    v_BHKD = module.value_proj(given_BTD).unflatten(-1, (4, -1)).transpose(1, 2)
    expected = module.out_proj((weights_BHQK @ v_BHKD).transpose(1, 2).flatten(2))
    assert_close(output_BTD, expected, atol=1e-5, rtol=1e-5)


def test_squeezebert_returns_logits_and_its_output_is_that_of_their_softmax() -> None:
    model, source = tiny("squeezebert"), ids(SOURCE)
    path = "encoder.layers.0.attention"
    given_BDT, output_BDT = module_seen(model, path, lambda: model(source))
    weights_BHQK = heard(model, source)[0][ENCODER, 0]
    v_BHKD = model.get_submodule(path).value(given_BDT).unflatten(1, (4, -1)).transpose(2, 3)
    expected = (weights_BHQK @ v_BHKD).transpose(2, 3).flatten(1, 2)
    assert_close(output_BDT, expected, atol=1e-5, rtol=1e-5)


def test_t5gemma2_has_one_softmax_over_target_and_source() -> None:
    model = tiny("t5gemma2")
    found, _ = heard(model, ids(SOURCE), **inputs_of(model))
    sums = found[DECODER, 0].sum(-1) + found[CROSS, 0].sum(-1)
    assert_close(sums, torch.ones_like(sums), atol=1e-5, rtol=0)
    assert found[CROSS, 0].sum(-1).min() < 0.99


# Local attention, at true positions.


@pytest.mark.parametrize("family", ["led", "longformer", "longt5"])
def test_local_attention_sees_what_is_near_and_nothing_else(family: str) -> None:
    model = tiny(family)
    seen: list[Visibility] = []

    def on_call(call: Any) -> None:
        if call.stack == ENCODER:
            seen.append(call.visible)

    report = listen(model, ids(SOURCE), on_call, **inputs_of(model))
    expected = torch.tensor([[abs(i - j) <= REACH for j in range(SOURCE)] for i in range(SOURCE)])
    assert all(torch.equal(one.rows(0, SOURCE)[0, 0], expected) for one in seen)
    assert {check.masked_weight for check in report.calls if check.stack == ENCODER} == {0.0}


def test_a_band_lies_around_its_query() -> None:
    weights_BQHW = torch.tensor([1.0, 2.0, 3.0]).expand(1, 4, 1, 3)
    found, reach = banded([weights_BQHW], None, 3)
    assert reach == 1
    assert found[0, 0].tolist() == [[2, 3, 0], [1, 2, 3], [0, 1, 2]]


def test_weights_are_found_wherever_a_module_puts_them() -> None:
    out, weights = torch.zeros(1, 2, 4), torch.zeros(1, 1, 2, 2)
    for output in [(out, weights), (out, None, weights), ((out, weights), (None, None)), {"a": out, "b": weights}]:
        assert weights_in(output, Family())[0] is weights
    assert weights_in((out, None), Family()) == []


# Lengths, padding.

COUNTS_PADDING = (  # on the left as positions of the text, and takes no others
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "dpr", "encoder-decoder", "led", "marian", "mbart"),
    *("mvp", "pegasus", "pegasus_x", "plbart", "prophetnet"),
)
MIXES = {  # what pads reaches real tokens by another way than attention
    "convbert": "its convolutions",
    "funnel": "its pooling",
    "mobilebert": "its embeddings, each made of its neighbours' too",
}
UNPACKED = {
    **dict.fromkeys(
        ("embedding_gemma2_text", "modernbert", "neomme", "openai_privacy_filter", "ultrabert"),
        "a mask that is given hides no window",
    ),
    **dict.fromkeys(
        (
            *("deberta", "deberta-v2", "esm", "flaubert", "layoutlm", "longformer", "markuplm", "tipsv2_text_model"),
            *("xlm", "xlnet"),
        ),
        "it takes one mask for all queries",
    ),
    "clip_text_model": "a mask that is given hides no later token",
    "dpr": "it takes no positions",
}
OF_TWO = (
    "bart",
    "convbert",
    "longformer",
    "xlnet",
)  # whose texts of two tokens are read by default, beside those of one
TOO_SHORT = {"funnel": "transformers' own pooling fails on so few tokens"}


def padded(model: Any, source: Tensor, left: bool) -> tuple[Tensor, Tensor]:
    """The texts with three tokens of padding, and the mask."""
    pad = getattr(model.config, "pad_token_id", None)
    padding = torch.full((len(source), 3), 0 if pad is None else pad)
    mask, hidden = torch.ones_like(source), torch.zeros_like(padding)
    both = [(padding, source), (hidden, mask)] if left else [(source, padding), (mask, hidden)]
    return torch.cat(both[0], 1), torch.cat(both[1], 1)


@pytest.mark.parametrize(
    ("tokens", "family"),
    [
        *(pytest.param(1, *one.values, marks=one.marks) for one in every_but(TOO_SHORT, default=OF_SIZES)),
        *(pytest.param(2, *one.values, marks=one.marks) for one in every_but(TOO_SHORT, default=OF_TWO)),
    ],
)
def test_short_texts(tokens: int, family: str) -> None:
    model = tiny(family)
    source, inputs = ids(tokens), {name: value[:, :tokens] for name, value in inputs_of(model).items()}
    found, report = heard(model, source, **inputs)
    expected = own(model, source, **inputs)
    assert found.keys() == expected.keys()
    assert all(float((found[key] - expected[key]).abs().max()) <= 1e-6 for key in found)
    assert [line for check in report.calls for line in check.failures(torch.float32)] == []
    layers = geometry_of(model.config, count=False).stacks
    assert {kind: len(there) for kind, there in layers.items() if there} == {
        kind: sum(one == kind for one, _ in found) for kind, _ in found
    }


POOLED = [
    {},
    {"block_sizes": [1] * 3},
    {"block_sizes": [1] * 3, "separate_cls": False},
    {"block_sizes": [1] * 3, "attention_type": "factorized"},
    *(
        pytest.param(one, marks=pytest.mark.slow)
        for one in (
            {"block_sizes": [1] * 4},
            {"block_sizes": [1] * 2, "truncate_seq": False},
            {"block_sizes": [1] * 4, "truncate_seq": False},
            {"block_sizes": [3]},
        )
    ),
]


@pytest.mark.parametrize("config", POOLED)
def test_the_shortest_text_that_funnel_reads_is_known_from_its_config(config: dict[str, Any]) -> None:
    model = tiny("funnel", **config, block_repeats=[1] * len(config.get("block_sizes", "ab")))
    least = geometry_of(model.config, count=False).least_tokens
    for tokens in range(least, 3 * least):
        model(ids(tokens))
    if least > 1:
        with pytest.raises(RuntimeError):
            model(ids(least - 1))


@pytest.mark.parametrize("family", ["bert", "t5", "longformer"])
def test_other_families_read_a_text_of_one_token(family: str) -> None:
    assert geometry_of(tiny(family).config, count=False).least_tokens == 1


LONG = 1024  # tokens, beside which the hidden states of a tiny model are small
FIXED = ("encoder-decoder",)  # its parts have positions of their own configs


@pytest.mark.parametrize(
    "family", every_but(FIXED, quick=("bert", "deberta-v2", "funnel", "t5"), default=("bert", "deberta-v2", "t5"))
)
def test_eager_takes_no_more_than_is_said(family: str) -> None:
    model = tiny(family) if family == "xlnet" else tiny(family, max_position_embeddings=LONG + 64)
    said = eager_bytes(geometry_of(model.config, count=False), LONG, 4)
    assert 0.5 * said < peak_bytes(model, LONG) < 1.2 * said


def positions(model: Any, source: Tensor, alone: Mapping[Key, Tensor], **inputs: Tensor) -> dict[str, Tensor]:
    """The positions that the model gives a text by itself, as an input; nothing where it takes none."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    for first in range(3):  # some begin behind their padding token
        given = {"position_ids": torch.arange(first, first + source.shape[1]).expand_as(source)}
        found = heard(model, source, **inputs, **given)[0]
        if all(torch.equal(found[key], alone[key]) for key in alone):
            return given
    return {}


@pytest.mark.parametrize("family", every_but(MIXES, default=OF_SIZES))
def test_padding_changes_nothing(family: str) -> None:
    """Behind an attention_mask, real tokens have the weights that they have alone, and padding gets none."""
    model = tiny(family)
    source, inputs = ids(SOURCE), inputs_of(model)
    alone = heard(model, source, **inputs)[0]
    for left in (False,) if family in COUNTS_PADDING else (False, True):
        long, mask = padded(model, source, left)
        sides = (3, 0) if left else (0, 3)
        own = {name: pad(one, sides) for name, one in positions(model, source, alone, **inputs).items()}
        beside = heard(model, long, attention_mask=mask, **inputs, **own)[0]
        part = slice(3, None) if left else slice(0, SOURCE)
        for (kind, layer), weights in alone.items():
            queries = part if kind == ENCODER else slice(None)
            keys = part if kind in (ENCODER, CROSS) else slice(None)
            assert_close(beside[kind, layer][..., queries, keys], weights, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", every_but((*MIXES, *UNPACKED, *SEQ2SEQ)))
def test_packed_texts_have_the_weights_that_they_have_alone(family: str) -> None:
    model, lengths = tiny(family), (SOURCE, 9)
    texts = [ids(length, seed)[:1] for seed, length in enumerate(lengths)]
    alone = [heard(model, text)[0] for text in texts]
    own = [positions(model, text, found) for text, found in zip(texts, alone, strict=True)]
    text_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = torch.where(text_T[:, None] == text_T, 0.0, torch.finfo(torch.float32).min)[None, None]
    given = {name: torch.cat([one[name] for one in own], 1) for name in own[0]}
    packed = heard(model, torch.cat(texts, 1), attention_mask=mask, **given)[0]
    for place, found in enumerate(alone):
        part = text_T == place
        for key, weights in found.items():
            assert_close(packed[key][:, :, part][..., part], weights, atol=2e-5, rtol=0)


def test_a_mask_with_one_row_for_all_queries_is_read_for_each() -> None:
    mask = torch.tensor([0.0, 0.0, torch.finfo(torch.float32).min]).view(1, 1, 1, 3)
    visible = Visibility(2, 3, mask)
    assert visible.rows(1, 2).tolist() == [[[[True, True, False]]]]
    assert visible.counts_BHQ.tolist() == [[[2, 2]]]


# The document.


@pytest.mark.parametrize("family", [*QUICK[:1], *(pytest.param(one, marks=pytest.mark.families) for one in QUICK[1:])])
def test_the_document_has_what_is_measured(family: str) -> None:
    assert stack_row(family, measured(family)) in read("stacks"), "run scripts/families_doc.py"


@pytest.mark.slow
def test_the_document_is_what_is_measured() -> None:
    assert read("stacks") == stacks(measured), "run scripts/families_doc.py"


def test_hook_read_families_are_those_that_do_not_ask_the_interface() -> None:
    assert not calls_interface(tiny("deberta-v2"))
    assert calls_interface(tiny("bert"))

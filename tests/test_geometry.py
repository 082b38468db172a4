"""The geometry read from a config against what the modules of the model really compute with.

N tokens, H heads, D head dim.
"""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import EncoderDecoderConfig
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES
from transformers.modeling_utils import AttentionInterface

from attnscope.attention.questions import Entropy, Holding, RowSum
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.attention.tiling import TILE_BYTES, TiledAttention
from attnscope.hooks.engines import eager_bytes, fused_bytes, tokens_that_fit
from attnscope.model.geometry import TYPES, Geometry, LayerGeometry, geometry_of
from attnscope.model.tasks import layer_modules
from helpers import stack_families
from helpers.dispatched import thread_count
from helpers.families import MODEL_TYPES, WITHOUT_ATTENTION, few, of_all_families, tiny_config, tiny_model
from helpers.parity_stacks import tiny_stacks
from helpers.pretend import Pretended, pretend

TOKENS = 12
SHARED_LAYERS = ("hrm_text", "zamba", "zamba2")  # one attention module serves several layers and knows no index
OTHERS = [  # which the code knows by name, or whose config names layers, heads or windows in a way of its own
    *("afmoe", "bamba", "cpmant", "dbrx", "deepseek_v2", "deepseek_v32", "deepseek_v4", "diffllama", "doge"),
    *("dots1", "falcon_h1", "gemma3n_text", "gemma4_text", "gpt_bigcode", "gpt_neo", "granitemoehybrid", "hrm_text"),
    *("inkling_text", "jamba", "jetmoe", "kimi_linear", "laguna", "lfm2", "llama4_text", "longcat_flash"),
    *("mimo_v2_flash", "minicpm3", "minimax", "minimax_m3_vl_text", "mllama", "moshi", "mpt", "nemotron_h", "opt"),
    *("prophetnet", "qwen2", "recurrent_gemma", "xlm", "xlnet", "zamba", "zamba2"),
]
VARIANTS = [
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ("mistral", {"sliding_window": None}),
    ("phi3", {"sliding_window": 5}),
    ("llama", {"head_dim": 8, "num_key_value_heads": 1}),
    ("llama", {"num_hidden_layers": 7}),
    ("gpt_bigcode", {"multi_query": False}),
    ("inkling_text", {"swa_num_key_value_heads": 4}),
    ("jamba", {"attn_layer_offset": 0, "attn_layer_period": 3}),
    ("gemma3_text", {"num_hidden_layers": 9}),
]


@pytest.fixture
def calls(monkeypatch):
    """(layer, heads, kv heads, head dim, value dim, window) of every call of the attention interface."""
    seen = []
    original = AttentionInterface.get_interface

    def get_interface(self, name, default):
        function = original(self, name, default)

        def listening(module, *args, **given):
            names = ("query", "key", "value", "attention_mask")
            named = dict(zip(names, args, strict=False)) | given
            query, key, value = (named[name] for name in names[:3])
            window = widest_row(named.get("attention_mask"))
            layer = getattr(module, "layer_idx", None)
            seen.append((layer, query.shape[1], key.shape[1], query.shape[3], value.shape[3], window))
            return function(module, *args, **given)

        return listening

    monkeypatch.setattr(AttentionInterface, "get_interface", get_interface)
    return seen


def widest_row(mask):
    """How many keys the query that sees most may see; None when the last query sees all of them."""
    if mask is None:
        return None
    allowed = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] > -1e30
    counts = allowed.sum(-1)
    return None if int(counts[-1]) == allowed.shape[-1] else int(counts.max())


def sizes(layer, with_window=True):
    return (layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim, *((layer.window,) if with_window else ()))


def forward(model, **options):
    with torch.no_grad():
        return model(torch.arange(8, 8 + TOKENS)[None], use_cache=False, **options)


def check(model, calls, geometry):
    """The geometry's attention layers are those that called, with the sizes they called with."""
    forward(model)
    for call in calls:
        assert call[0] is not None
        layer = geometry.layers[call[0]]
        exact = layer.type in ("full", "sliding", "chunked")
        assert sizes(layer, exact) == call[1 : 6 if exact else 5]
    assert sorted({call[0] for call in calls}) == [layer.index for layer in geometry.attention_layers]


READ_ALONE = sorted({*stack_families.TYPES, *MODEL_TYPES} - {"whisper", "xlnet"})  # a sound; a config that has no limit
WITH_ATTENTION = [name for name in MODEL_TYPES if name not in (*WITHOUT_ATTENTION, "blt")]


@pytest.mark.parametrize("model_type", few(WITH_ATTENTION, also=OTHERS))
def test_every_family_has_the_layers_that_its_modules_compute(model_type, calls):
    model = tiny_model(model_type)
    geometry = geometry_of(model.config, count=False)
    if model_type in SHARED_LAYERS:
        forward(model)
        assert [sizes(layer) for layer in geometry.attention_layers] == [call[1:] for call in calls]
    elif model_type in ("prophetnet", "xlnet", "cpmant") or not _calls_the_interface(model, calls):
        weights = [part for part in forward(model, output_attentions=True).attentions if part is not None]
        assert [weight.shape[1] for weight in weights] == [layer.heads for layer in geometry.attention_layers]
    else:
        check(model, calls, geometry)


def _calls_the_interface(model, calls):
    forward(model)
    called = bool(calls)
    calls.clear()
    return called


@pytest.mark.parametrize(("model_type", "overrides"), VARIANTS, ids=lambda value: str(value)[:40])
def test_variants_of_a_family(model_type, overrides, calls):
    model = tiny_model(model_type, **overrides)
    check(model, calls, geometry_of(model.config, count=False))


@pytest.mark.parametrize("wrong", [{"num_key_value_heads": 4}, {"head_dim": 32}, {"num_hidden_layers": 3}])
def test_the_check_catches_a_wrong_geometry(wrong, calls):
    with pytest.raises((AssertionError, IndexError)):
        check(tiny_model("llama"), calls, geometry_of(tiny_config("llama", **wrong), count=False))


@pytest.mark.parametrize("model_type", WITHOUT_ATTENTION)
def test_types_without_softmax_attention_have_no_attention_layer(model_type):
    geometry = geometry_of(tiny_config(model_type), count=False)
    assert len(geometry.layers) == 4
    assert not geometry.attention_layers


@pytest.mark.parametrize(
    ("overrides", "kv_heads"),
    [
        ({"multi_query": True, "new_decoder_architecture": False}, 1),
        ({"multi_query": False, "new_decoder_architecture": False}, 4),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
    ],
)
def test_falcon_kv_heads_are_those_of_its_fused_projection(overrides, kv_heads):
    model = tiny_model("falcon", **overrides)
    [layer, *_] = geometry_of(model.config, count=False).layers
    fused = model.transformer.h[0].self_attention.query_key_value.out_features
    assert layer.kv_heads == kv_heads
    assert fused == (layer.heads + 2 * layer.kv_heads) * layer.head_dim


@pytest.mark.e2e
@of_all_families
def test_kinds_in_print():
    kinds = {
        "gemma2": ["sliding", "full", "sliding", "full"],
        "jamba": ["ssm", "full", "ssm", "full"],
        "qwen3_next": ["linear", "linear", "linear", "full"],
        "lfm2_moe": ["conv", "full", "conv", "full"],
        "llama4_text": ["chunked", "chunked", "chunked", "full", "chunked", "chunked"],
        "gpt_neo": ["full", "sliding", "full", "sliding"],
        "mllama": ["full", "full", "full", "cross"],
        "deepseek_v32": ["sparse"] * 4,
    }
    for model_type, expected in kinds.items():
        geometry = geometry_of(tiny_config(model_type), count=False)
        assert [layer.type for layer in geometry.layers] == expected, model_type


@pytest.mark.parametrize(
    "model_type", few(READ_ALONE, also=("longformer", "lxmert", "mbart", "prophetnet", "xlm-roberta"))
)
def test_the_most_tokens_are_read_and_where_positions_begin_behind_a_padding_row_no_more(model_type):
    limit = 48  # whole windows of LED, whole chunks of Reformer
    names = ("max_position_embeddings", "max_encoder_position_embeddings", "max_decoder_position_embeddings")
    model = stack_families.tiny(model_type, **dict.fromkeys(names, limit))
    most = geometry_of(model.config, count=False).max_positions

    def read(tokens):
        ids_BT = torch.full((1, tokens), 9)
        model(ids_BT, use_cache=False, **({"decoder_input_ids": ids_BT} if model.config.is_encoder_decoder else {}))

    read(most or limit + 1)
    if most and most < limit:
        with pytest.raises((IndexError, RuntimeError)):
            read(most + 1)


def test_an_encoder_decoder_reads_what_both_its_stacks_have_positions_for_and_a_target_what_its_decoder_has():
    parts = [tiny_config(name, max_position_embeddings=most) for name, most in (("roberta", 40), ("gpt2", 64))]
    found = geometry_of(EncoderDecoderConfig.from_encoder_decoder_configs(*parts), count=False)
    assert (found.max_positions, found.decoder_positions) == (38, 64)
    both = {"max_encoder_position_embeddings": 96, "max_decoder_position_embeddings": 24}
    found = geometry_of(stack_families.tiny("led", **both).config, count=False)
    assert (found.max_positions, found.decoder_positions) == (96, 24)


@of_all_families
def test_every_word_of_transformers_for_a_layer_of_attention_has_a_meaning():
    assert set(ALLOWED_ATTN_LAYER_TYPES) <= TYPES.keys()


@pytest.mark.families
def test_every_word_that_a_family_calls_its_layers_has_a_meaning():
    words = set()
    for model_type in MODEL_TYPES:
        text = tiny_config(model_type).get_text_config(decoder=True)
        for name in ("layer_types", "layers_block_type", "attention_layers"):
            words.update(getattr(text, name, None) or ())
    assert len(words) > 10
    assert words <= TYPES.keys()


UNKNOWN = {  # a word that is left out of the table, and whether its layers attend
    "gemma2": ("sliding_attention", True),
    "qwen3_next": ("full_attention", True),
    "lfm2_moe": ("conv", False),
    "jamba": ("linear_attention", False),
    "llama4_text": ("chunked_attention", True),
    "deepseek_v32": ("indexed_attention", True),
    "falcon_h1": ("hybrid", True),
}


@pytest.mark.parametrize("model_type", few(UNKNOWN, also=("qwen3_next", "lfm2_moe")))
def test_a_layer_of_an_unknown_type_attends_where_its_modules_do(model_type, monkeypatch):
    word, attends = UNKNOWN[model_type]
    config = tiny_config(model_type)
    known = geometry_of(config, count=False)
    places = [layer.index for layer in known.layers if layer.type == TYPES[word]]
    monkeypatch.delitem(TYPES, word)
    asked = geometry_of(config, count=False)
    assert [layer.index for layer in asked.attention_layers] == [layer.index for layer in known.attention_layers]
    for place in places:
        assert asked.layers[place].of_unknown_type == attends
        assert (asked.layers[place].in_words == f"{word}: keys not known before the pass") == attends


@pytest.mark.families
def test_the_layers_of_a_part_that_has_no_class_of_its_own_are_asked_of_the_whole(monkeypatch):
    config = tiny_stacks("t5gemma")
    assert layer_modules(config.encoder, "encoder") is None
    monkeypatch.delitem(TYPES, "sliding_attention")
    every = geometry_of(config, count=False).every
    assert [layer.attention for stack in ("encoder", "decoder") for layer in every[stack]] == [True] * 8


def test_sizes_around_the_layers_and_the_count():
    model = tiny_model("llama")
    geometry = geometry_of(model.config)
    assert (geometry.hidden_size, geometry.vocab_size, geometry.max_positions) == (64, 128, 512)
    assert geometry.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert geometry_of(tiny_config("bloom"), count=False).max_positions is None  # ALiBi


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that operations made and that are still referenced."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage):
        name = storage._cdata
        if name not in self.sizes:
            self.sizes[name] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, name)

    def _gone(self, name):
        self.now -= self.sizes.pop(name)


def bytes_per_pair(model):
    """The part of a forward's peak that grows with the square of the tokens, per pair of tokens."""
    peaks = []
    for tokens in (256, 512):
        with torch.no_grad(), LiveStorages() as live:
            model(torch.arange(tokens)[None] % 100 + 8, use_cache=False, logits_to_keep=1)
        peaks.append(live.peak)
    return (peaks[1] - 2 * peaks[0]) / (512**2 - 2 * 256**2)


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        ("llama", torch.float32),
        ("llama", torch.bfloat16),
        ("gemma2", torch.float32),
        ("gpt_oss", torch.float32),
        ("bloom", torch.float32),
        ("gptj", torch.float32),
        ("mpt", torch.float32),
    ],
    ids=str,
)
def test_eager_bytes_are_what_a_forward_holds_at_its_peak(model_type, dtype):
    model = tiny_model(model_type).to(dtype)
    predicted = eager_bytes(geometry_of(model.config, count=False), 1, dtype.itemsize)
    assert 0.8 * predicted <= bytes_per_pair(model) <= 1.01 * predicted


def geometry_with(heads, kinds=("full",)):
    layers = [LayerGeometry(index, kind, heads, heads, 64, 64, None) for index, kind in enumerate(kinds)]
    return Geometry("llama", tuple(layers), 64, 100, None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [512, 2048])
def test_fused_bytes_are_about_what_a_layer_holds_at_its_peak(dtype, tokens):
    """Of a short text the tiles are smaller than they may be."""
    q, k, v = (torch.randn(1, heads, tokens, 64, dtype=dtype) for heads in (8, 2, 2))
    layer = replace(geometry_with(8).layers[0], kv_heads=2)
    predicted = fused_bytes(replace(geometry_with(8), layers=(layer,)), tokens)
    with thread_count(1), LiveStorages() as live:
        P = TiledAttention(AttentionSpec(q, k, v, 0.125, Visibility(tokens, tokens)), with_output=True)
        P.together([Entropy(), RowSum()])
        P.output()
    assert 0.45 * predicted <= live.peak <= 1.1 * predicted


@pytest.mark.parametrize(("tokens", "heads"), [(96, 8), (1024, 8), pytest.param(1500, 6, marks=pytest.mark.families)])
def test_fused_bytes_on_a_card_are_what_a_layer_holds_there(tokens, heads, monkeypatch):
    """Of which tiles are most, sorted for how many keys hold 95 % of a row; smaller ones here, and on a card."""
    monkeypatch.setitem(TILE_BYTES, "cuda", 8 * 2**20)
    layer = replace(geometry_with(heads).layers[0], kv_heads=2)
    predicted = fused_bytes(replace(geometry_with(heads), layers=(layer,)), tokens, device="cuda:0")
    with thread_count(1), LiveStorages() as live, pretend():
        q, k, v = (Pretended(torch.randn(1, n, tokens, 64), "cuda:0") for n in (heads, 2, 2))
        P = TiledAttention(AttentionSpec(q, k, v, 0.125, Visibility(tokens, tokens, device=q.device)), True)
        P.together([Entropy(), RowSum(), Holding(95)])
        P.output()
    assert 0.7 * predicted <= live.peak <= 1.1 * predicted
    assert predicted > fused_bytes(replace(geometry_with(heads), layers=(layer,)), tokens) or tokens == 96


def test_eager_bytes_by_hand():
    assert eager_bytes(geometry_with(24), 9, 4) == 9 * 9 * (24 * (4 + 4) + 4)
    assert eager_bytes(geometry_with(24), 9, 2) == 9 * 9 * (24 * (2 + 4 + 4) + 2)
    assert eager_bytes(geometry_with(24, ("full", "sliding", "full")), 9, 4) == 9 * 9 * (24 * 8 + 2 * 4)
    assert fused_bytes(geometry_with(24), 18) - fused_bytes(geometry_with(24), 9) == fused_bytes(
        geometry_with(24), 9
    ) - fused_bytes(geometry_with(24), 0)
    assert eager_bytes(geometry_with(24), 9, 4, batch=3) == 3 * eager_bytes(geometry_with(24), 9, 4)


@pytest.mark.parametrize("free", [0, 1, 10_000, 16 << 30])
def test_the_longest_text_that_fits_is_the_longest(free):
    geometry = geometry_with(24)
    tokens = tokens_that_fit(geometry, free, 4)
    assert eager_bytes(geometry, tokens, 4) <= free < eager_bytes(geometry, tokens + 1, 4)

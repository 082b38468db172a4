"""What is known of a model family by its name, because its config does not say it: one table, read by everything else.

A family that needs nothing of this has no entry. Words that families share stay with whoever reads them: those of
configs (`TYPES` and the attribute names) in `geometry`, those of module classes in `hooks.families`. The oracle in
`reference` keeps its own knowledge of families, so that it shares no mistake with what it checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attnscope.model.selection import DECODER, GLOBAL, LOCAL, PATCHER, is_bidirectional


@dataclass(frozen=True)
class Family:
    """What sets a family apart; the defaults say what most families do."""

    # Its attention modules compute attention themselves and never ask `AttentionInterface`, so it is read through
    # forward hooks, under eager attention alone. Only its code says so; of code that is not transformers', a pass over
    # two tokens does (`hooks.families.route_of`).
    bypasses_interface: bool = False
    # Its modules return their weights only to a forward pass with output_attentions=True; again only the code says so.
    returns_weights_when_asked: bool = False
    # Its sink logits scale the output and leave the returned weights summing to 1. The modules of other families have
    # the same `sinks` parameter, and there the weights lose the sink's share.
    sinks_scale_output: bool = False
    # The type of all its layers where none computes softmax attention; its config counts them like attention layers.
    without_softmax: str | None = None
    # Why its attention cannot be read, where it is not that; the rest of "it ...".
    unread: str | None = None
    # An encoder that `is_decoder` makes a decoder; transformers' lists of models say so of others. More families have
    # the attribute and never ask it.
    either: bool = False
    # Whatever its config says, it attends in both directions; or its attention hides what follows a token by itself.
    looks_ahead: bool = False
    hides_future: bool = False
    # What its config must say before the model is built, where the default gives no matrix to read.
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    # (config) -> the most tokens of which its own code attends as `config_changes` has it anyway.
    changes_nothing_up_to: Callable[[Any], int] = lambda config: 0
    # What its attention modules return as weights are the logits before the softmax: the class of those modules.
    returns_logits: str | None = None
    # The layout of what its modules return, where it is not (B, H, Q, K): each query's weights on the keys of a `band`
    # around it, (B, Q, H, 2 reach + 1), or of its own `blocks` and their neighbours, (B, blocks, H, block, 3 block); or
    # texts and heads come `last`, (Q, K, B, H).
    layout: str | None = None
    # Its decoder attends to its own tokens and to the encoder's in one softmax, and returns the weights in two parts.
    merges_cross: bool = False
    # Its layers are told apart by the order of their calls: several share a module, or stand in several lists.
    by_order: bool = False
    # (config) -> how many layers, (config) -> heads of a layer, (config, stack) -> type of all layers of a stack, where
    # the usual attributes say something else; None where they are right.
    layers: Callable[[Any], int] | None = None
    heads: Callable[[Any], int] | None = None
    layer_type: Callable[[Any, str], str | None] | None = None
    # (config, heads, type of layer) -> kv heads, where the usual attributes are missing or mean something else; None
    # where they are right after all.
    kv_heads: Callable[[Any, int, str], int | None] | None = None
    # (config) -> the tokens that its code needs, where that fails on fewer; None for any number.
    least_tokens: Callable[[Any], int] | None = None
    # How many positions after its own each token looks up, where it predicts more than the token behind it.
    positions_ahead: int = 0
    # {stack: the config's attribute with the config of that part}, of a model that is made of several decoders.
    parts: Mapping[str, str] = field(default_factory=dict)
    # It has a window in its config and builds a plain causal mask.
    window_unread: bool = False
    # How many N x N float tensors per head are alive at once in its eager attention: measured by counting storages.
    matrices_alive: int = 2
    # Padding on the right changes the rows of shorter texts, so a batch has texts of one length: the family's positions
    # depend on the longest text, or it looks ahead. None where the run is to find out; False where it need not.
    one_length: bool | None = None


def family(model_type: str | None) -> Family:
    """The family of a config's `model_type`; the defaults for one that the table does not name.

    Example:
        family("falcon").bypasses_interface  # True
    """
    return FAMILIES.get(model_type or "", USUAL)


def family_of(module: Any) -> Family:
    """The family of a model, or of one of its modules that keeps the config; the defaults where there is none."""
    return family(getattr(getattr(module, "config", None), "model_type", None))


def _few_blocks(config: Any) -> int:
    """The global, the window's and the random blocks of a query: of fewer BigBird's code makes full attention."""
    blocks: int = (5 + 2 * config.num_random_blocks) * config.block_size
    return blocks


def _in_blocks(config: Any) -> int:
    sizes, repeats = config.block_sizes, config.block_repeats
    return sum(size * repeat for size, repeat in zip(sizes, repeats, strict=True)) + config.num_decoder_layers


def _left_to_the_last_block(config: Any) -> int:
    """Each block has half of the tokens before it, and the relative shift needs two that are not the begin token."""
    blocks, apart = config.num_blocks, config.separate_cls
    if blocks == 1 or config.attention_type == "factorized":
        return 1
    rounded_up = apart and not config.truncate_seq and blocks > 2
    return 1 + 2 ** (blocks - 2 + apart) + 2 ** (blocks - 2) * rounded_up


def _blocks_with_summaries(config: Any, stack: str) -> str | None:
    summaries = getattr(config, "encoder_attention_type", None) != "local"
    return "blocks" if is_bidirectional(stack) and summaries else None


def _multi_query(config: Any, heads: int, layer_type: str) -> int | None:
    if getattr(config, "new_decoder_architecture", False):
        return None
    return 1 if config.multi_query else heads


USUAL = Family()
ROWS: Mapping[str, Family] = {  # by the names of those that are alike
    # No softmax attention over the text.
    "falcon_mamba mamba mamba2 rwkv": Family(without_softmax="ssm"),
    "xlstm": Family(without_softmax="linear"),
    "reformer": Family(without_softmax="lsh", unread="hashes its keys into buckets", one_length=True),
    # Softmax attention of another kind, or none.
    "canine": Family(unread="is of chunks of characters, and of groups of four"),
    "fnet": Family(unread="is a Fourier transform, with no weights"),
    "mra": Family(unread="approximates far weights by those of blocks"),
    "nystromformer": Family(unread="goes through landmarks, and has no weight for a query and a key"),
    "perceiver": Family(unread="is of latents, not of tokens"),
    "yoso": Family(unread="counts collisions of hashes, and has no softmax"),
    "bros lxmert tvp udop vilt": Family(unread="needs boxes or pictures with the text"),
    # Encoders that can be configured as decoders.
    "bert-generation": Family(either=True),
    "megatron-bert rembert roformer": Family(bypasses_interface=True, matrices_alive=3),
    "big_bird": Family(
        bypasses_interface=True,
        returns_weights_when_asked=True,
        config_changes={"attention_type": "original_full"},  # its default looks at blocks and gives no matrix
        changes_nothing_up_to=_few_blocks,
    ),
    "xlm": Family(bypasses_interface=True, returns_weights_when_asked=True, hides_future=True, one_length=True),
    # Encoders and encoder-decoders.
    "albert": Family(by_order=True, layers=lambda config: config.num_hidden_layers * config.inner_group_num),
    "bigbird_pegasus": Family(config_changes={"attention_type": "original_full"}, changes_nothing_up_to=_few_blocks),
    "convbert": Family(
        returns_weights_when_asked=True,
        heads=lambda config: max(1, config.num_attention_heads // config.head_ratio),
        matrices_alive=3,
    ),
    "flaubert fsmt ibert luke tapas visual_bert": Family(returns_weights_when_asked=True),
    "deberta deberta-v2 mpnet": Family(returns_weights_when_asked=True, matrices_alive=3),
    "funnel": Family(
        returns_weights_when_asked=True,
        by_order=True,
        layers=_in_blocks,
        matrices_alive=7,
        least_tokens=_left_to_the_last_block,
    ),
    "led longformer": Family(returns_weights_when_asked=True, layout="band"),
    "longt5": Family(returns_weights_when_asked=True, layout="blocks", layer_type=_blocks_with_summaries),
    "pegasus_x": Family(layer_type=_blocks_with_summaries, matrices_alive=3),
    "squeezebert": Family(returns_weights_when_asked=True, returns_logits="SqueezeBertSelfAttention", matrices_alive=3),
    "embedding_gemma2_text mt5 neomme openai_privacy_filter switch_transformers t5 umt5": Family(matrices_alive=3),
    "layoutlmv3 lilt": Family(matrices_alive=6),
    "t5gemma2": Family(bypasses_interface=True),
    "t5gemma2_decoder": Family(merges_cross=True),
    # Decoders that attend outside the interface.
    "xglm": Family(bypasses_interface=True),
    "codegen gptj mpt": Family(bypasses_interface=True, matrices_alive=3),
    "gpt_neo": Family(bypasses_interface=True, hides_future=True, matrices_alive=3),
    "cpmant": Family(looks_ahead=True, bypasses_interface=True, matrices_alive=3, one_length=True),
    "bloom gpt_neox_japanese": Family(bypasses_interface=True, matrices_alive=4),
    "xlnet": Family(
        looks_ahead=True,
        returns_weights_when_asked=True,
        bypasses_interface=True,
        layout="last",
        matrices_alive=4,
        one_length=True,
    ),
    "git mvp trocr": Family(bypasses_interface=True, returns_weights_when_asked=True),
    "openai-gpt": Family(bypasses_interface=True, returns_weights_when_asked=True, hides_future=True),
    "prophetnet": Family(
        bypasses_interface=True,
        hides_future=True,
        returns_weights_when_asked=True,
        returns_logits="ProphetNetAttention",
        positions_ahead=1,
        matrices_alive=5,
        one_length=True,
    ),
    "falcon": Family(bypasses_interface=True, returns_weights_when_asked=True, matrices_alive=4, kv_heads=_multi_query),
    # Decoders that ask the interface.
    "diffllama doge flint gpt_oss hy_v4 inkling_text": Family(matrices_alive=3),
    "deepseek_v4 inkling2_text": Family(matrices_alive=4),
    "blt": Family(
        parts={PATCHER: "patcher_config", LOCAL: "encoder_config", GLOBAL: "global_config", DECODER: "decoder_config"}
    ),
    "dbrx": Family(kv_heads=lambda config, heads, layer_type: config.attn_config.kv_n_heads),
    "gpt_bigcode": Family(kv_heads=_multi_query),
    "hrm_text": Family(  # numbered as its cache and its `attentions` are
        by_order=True, layers=lambda config: config.num_layers_per_stack * config.H_cycles * (config.L_cycles + 1)
    ),
    "jetmoe": Family(kv_heads=lambda config, heads, layer_type: heads),
    "mimo_v2_flash": Family(
        kv_heads=lambda config, heads, layer_type: 2 * config.num_key_value_heads if layer_type == "sliding" else None
    ),
    "moshi": Family(window_unread=True),
    "granite_swa granitemoe_swa": Family(sinks_scale_output=True),
}
FAMILIES = {name: known for names, known in ROWS.items() for name in names.split()}

# Tokenizers that need no vocabulary file; by class, because a tokenizer_config.json names its class and no family.
BYTE_TOKENIZERS = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")

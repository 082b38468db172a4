"""What a model's config says of its attention, layer by layer.

Pure Python: no weights, and torch only to count the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from attnscope.errors import UsageError, brief, visible
from attnscope.model.families import family
from attnscope.model.selection import (
    CAUSAL_LM,
    CROSS,
    CROSSING,
    CSA,
    DECODER,
    DIFFERENCE,
    ENCODER,
    ENCODER_ONLY,
    HCA,
    LINEAR,
    LOCAL,
    MIXING,
    PATCHER,
    POOLING,
    SEQ2SEQ,
    STACKS,
    VISION,
    VISION_ONLY,
    StackLayer,
    is_bidirectional,
    is_vision,
    main_stack,
    mixes,
)
from attnscope.model.tasks import RULE_NAMES, both_ways, empty_model, layer_modules, stack_config, task_of
from attnscope.utils.memory import DTYPE_BYTES

# What families, and older configs, call their layer types; transformers' own list is `ALLOWED_ATTN_LAYER_TYPES`.
# "sparse" layers choose the keys of each query by content; the keys of "compressed" layers are a window of tokens and
# summaries of the tokens before it. `layer_modules` reads the meaning of other names from the code of their modules.
TYPES = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "hybrid": "full",
    "reference_sliding_attention": "full",
    "sliding_attention": "sliding",
    "hybrid_sliding": "sliding",
    "local": "sliding",
    "chunked_attention": "chunked",
    "window_attention": "windowed",
    "indexed_attention": "sparse",
    "minimax_m3_sparse": "sparse",
    "heavily_compressed_attention": "compressed",
    "compressed_sparse_attention": "compressed",
    "linear_attention": "linear",
    "mamba": "ssm",
    "recurrent": "recurrent",
    "conv": "conv",
    "moe": "moe",
    "mlp": "mlp",
}
OF_GENERATED = ("reference_sliding_attention",)  # those whose window is over generated tokens alone
NOT_KNOWN = "keys not known before the pass"
KEYS_NOT_KNOWN = "visible keys not known"  # of weights without a model
OF_WEIGHTS = ("causal", "both ways", "mask as given", KEYS_NOT_KNOWN)  # how words begin for masks that weights show
ATTENTION_TYPES = ("full", "sliding", "chunked", "windowed", "sparse", "compressed", "patch")
WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size")
NO_TOKENS = ("mlp", "moe")  # types of layers that read each token by itself
SIZES = ("max_positions", "decoder_positions", "hidden_size", "vocab_size")  # of a model
LAYER_SIZES = ("heads", "kv_heads", "head_dim", "value_dim")
MOST_LAYERS, MOST_NUMBER = 1000, 2**40  # a config that says more is no model's
POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "max_sequence_length")


@dataclass(frozen=True)
class LayerGeometry:
    """One layer of a stack.

    `type` is `full`, `sliding`, `chunked`, `windowed` (of patches), `sparse`, `compressed` or `patch` (a patch sees its
    own bytes, a byte its patch) for softmax attention; anything else has none over the text: `ssm` (a state space
    model: Mamba, RWKV), `recurrent` (a gated linear recurrence), `linear` (linear or gated delta attention), `conv`,
    `mlp`, `moe`, `cross` to a picture. It says what the layer is; the stack that it is in is another thing, see
    `selection`. `window` is the sliding window (of an encoder's layer the keys on either side of the query's own), the
    chunk or the window of patches, in tokens. `parallel`: what a layer with attention computes of the text too, `ssm`
    of Falcon-H1's. `both_ways`: whether its queries see the tokens after them too. `of_unknown_type`: whether `type`
    is a word of the config that attnscope does not know, of a layer whose modules attend: which keys a query sees is
    not known before the pass. `generated_window`: how many of the tokens that it generated itself the layer sees, where
    that is not all; it sees the whole text that it is given. `keys`: which keys a query sees, in words, where its
    weights alone say it.
    """

    index: int
    type: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    parallel: str = ""
    both_ways: bool = False
    of_unknown_type: bool = False
    generated_window: int | None = None
    keys: str = ""

    @property
    def attention(self) -> bool:
        return self.type in ATTENTION_TYPES or self.of_unknown_type

    @property
    def in_words(self) -> str:
        """Which keys a query sees: `full`, `window 16`, `chunk 8192`, `in windows of 64`, `sparse`.

        A window has so many keys, the query's own the last of them; `window 4 to either side` has them on both sides of
        it.
        """
        if self.of_unknown_type:
            return f"{self.type}: {NOT_KNOWN}"
        if self.keys:
            return self.keys
        names = {"sliding": "window", "chunked": "chunk", "windowed": "in windows of"}
        name = names.get(self.type, self.type)
        sides = " to either side" if self.both_ways and self.type == "sliding" else ""
        return f"{name} {self.window}{sides}" if self.window else name


@dataclass(frozen=True)
class Geometry:
    """The shape of a model: its layers and the sizes around them.

    layers: of its stack; of a model of several the decoder's, and `other_stacks` has those of the others, and of a
    vision tower that is to be read. max_positions: the most tokens that a stack reads, None where nothing limits them,
    as with dynamic rotary positions. decoder_positions: the same of an encoder-decoder's decoder. views: layers of
    `layers` that have maps of their own, by stack: `difference`, `csa`. rates: the tokens that each summary among their
    keys adds; of `pooling` the vectors that a patch is made into. least_tokens: of a text, fewer of which its code
    cannot read. both_ways: what the config of a decoder says that looks both ways: one that is read as an encoder, or
    follows one.
    """

    model_type: str
    layers: tuple[LayerGeometry, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    parameters: int | None
    task: str = CAUSAL_LM
    other_stacks: Mapping[str, tuple[LayerGeometry, ...]] = field(default_factory=dict)
    views: Mapping[str, tuple[LayerGeometry, ...]] = field(default_factory=dict)
    rates: Mapping[str, int] = field(default_factory=dict)
    least_tokens: int = 1
    both_ways: str = ""
    decoder_positions: int | None = None

    @property
    def stack(self) -> str:
        """The stack that `layers` are of."""
        return main_stack(self.task)

    @property
    def every(self) -> dict[str, tuple[LayerGeometry, ...]]:
        """{stack: all its layers}, in the order of a forward pass."""
        layers = {**self.other_stacks, self.stack: self.layers}
        return {stack: layers[stack] for stack in STACKS if layers.get(stack)}

    @property
    def stacks(self) -> dict[str, dict[int, LayerGeometry]]:
        """{stack: {layer index: layer}} of the layers with attention."""
        return {
            stack: {layer.index: layer for layer in layers if layer.attention} for stack, layers in self.every.items()
        }

    @property
    def shown(self) -> dict[str, dict[int, LayerGeometry]]:
        """`stacks`, and after them the layers with maps of their own."""
        return self.stacks | {stack: {layer.index: layer for layer in layers} for stack, layers in self.views.items()}

    @property
    def numbered(self) -> str:
        """The stack of which a number alone names a layer: without attention that of its maps."""
        return self.stack if any(self.stacks.values()) else next(iter(self.views), self.stack)

    @property
    def tower(self) -> tuple[LayerGeometry, ...]:
        """The layers of the vision tower of a decoder that is given pictures too."""
        return self.other_stacks.get(VISION, ())

    @property
    def in_every_pass(self) -> dict[str, dict[int, LayerGeometry]]:
        """`stacks` without the vision tower of a decoder, which attends only where there are pictures."""
        return {stack: layers for stack, layers in self.stacks.items() if not (self.tower and is_vision(stack))}

    @property
    def mixing(self) -> dict[int, tuple[str, LayerGeometry]]:
        """{layer index: (kind of its maps, layer)} of the layers that mix tokens by a rule; `keys` is the rule."""
        of_kinds = ((stack, layers) for stack, layers in self.views.items() if mixes(stack))
        return {layer.index: (stack, layer) for stack, layers in of_kinds for layer in layers}

    @property
    def over_patches(self) -> bool:
        """Whether it reads bytes, and patches of them."""
        return POOLING in self.other_stacks

    @property
    def attention_layers(self) -> tuple[LayerGeometry, ...]:
        return tuple(layer for layer in self.layers if layer.attention)

    @property
    def in_words(self) -> str:
        """`4 layers x 6 heads (3 kv)`, with ranges where layers differ, and `, 12 ssm` of layers without attention.

        Of linear layers `, 12 ssm x 8 heads`, where there are no others `12 ssm layers x 8 heads`.
        Of several stacks `encoder 6 layers x 8 heads (8 kv), decoder 6 layers x 8 heads (8 kv)`.
        """
        if ENCODER in self.other_stacks or self.over_patches:
            apart = (stack for stack in self.every if stack not in (CROSS, VISION, *CROSSING))
            return ", ".join(f"{stack} {_in_words(self.every[stack])}" for stack in apart)
        mixing = {layer.index: layer.heads for layer in self.views.get(LINEAR, ())}
        return _in_words(self.layers, mixing) + (f", vision {_in_words(self.tower)}" if self.tower else "")

    @property
    def heads_by_layer(self) -> dict[int, int]:
        """{layer index: number of heads} of the layers with attention."""
        return {layer.index: layer.heads for layer in self.attention_layers}

    @property
    def linear_heads(self) -> dict[int, int]:
        """The same of the layers with a signed map per head instead of a softmax, whose indices name that stack."""
        return {StackLayer(layer.index, LINEAR): layer.heads for layer in self.views.get(LINEAR, ())}

    @property
    def changeable(self) -> dict[int, int]:
        """{layer index: number of heads} of all heads that a study can change: of attention, and of linear layers."""
        return dict(sorted({**self.heads_by_layer, **self.linear_heads}.items()))

    @property
    def mapped(self) -> dict[int, int]:
        """{layer index: number of heads} of attention and of all layers without a softmax, whose indices name them."""
        others = ((stack, layer) for stack in MIXING for layer in self.views.get(stack, ()))
        return {**self.heads_by_layer, **{StackLayer(layer.index, stack): layer.heads for stack, layer in others}}

    @property
    def unnamed(self) -> dict[int, int]:
        """{layer index: number of heads} of the heads that a study changes where none are named: those of attention.

        Of a model without attention those of its linear layers.
        """
        return self.heads_by_layer or self.linear_heads

    @property
    def heads_of_stacks(self) -> dict[str, dict[int, int]]:
        """{stack: {layer index: number of heads}} of all that is shown, as `selection.select_stacks` takes them."""
        return {stack: {layer.index: layer.heads for layer in layers.values()} for stack, layers in self.shown.items()}

    @property
    def windows(self) -> dict[int, int | None]:
        """{layer index: keys that a query sees at most, None for all} of the layers with attention."""
        return {layer.index: layer.window for layer in self.attention_layers}


def geometry_of(config: Any, *, count: bool = True, task: str | None = None) -> Geometry:
    """Read the geometry from a transformers config; `count=False` leaves the parameters uncounted (None).

    task: what the model is read at; what its config says without it.

    Example:
        geometry = geometry_of(AutoConfig.from_pretrained("gpt2"))
        geometry.layers[0].heads  # 12
    """
    # The config of an encoder-decoder has a part for each stack, or says both in one.
    task = task or task_of(config)
    text, others = stack_config(config, main_stack(task)), {}
    if task == SEQ2SEQ:
        cross = (_layer(text, index, "full") for index in range(_count(text, DECODER)))
        others = {ENCODER: _layers(config, ENCODER), CROSS: tuple(cross)}
    layers = vision_layers(text) if task == VISION_ONLY else _layers(config, main_stack(task))

    # Of a model that reads bytes and patches of them, the layers of every part.
    rates: dict[str, int] = {}
    if parts := family(config.model_type).parts:
        others, rates = {stack: _layers(config, stack) for stack in parts}, {POOLING: config.cross_attn_k}
        if not config.patch_in_forward or config.patching_mode != "entropy":  # then it is not asked where patches begin
            del others[PATCHER]
        local = others[LOCAL][0]  # whose mask the decoder is given too
        others[DECODER] = tuple(replace(layer, type=local.type, window=local.window) for layer in others[DECODER])
        for stack, part in CROSSING.items():
            number = len(others[part]) if stack_config(config, stack).cross_attn_all_layers else 1
            others[stack] = tuple(replace(layer, type="patch", window=None) for layer in others[part][:number])
        layers = others.pop(DECODER)

    # Layers with maps of their own: over summaries of tokens, and of the difference of two heads' weights.
    views: dict[str, tuple[LayerGeometry, ...]] = {}
    added, types = getattr(text, "compress_rates", None) or {}, getattr(text, "layer_types", None) or ()
    for stack, name in ((CSA, "compressed_sparse_attention"), (HCA, "heavily_compressed_attention")):
        if name in added and name in types:
            views[stack] = tuple(layer for layer in layers if types[layer.index] == name)
            rates[stack] = added[name]
    views |= _mixing_layers(config, main_stack(task), layers)
    if hasattr(text, "lambda_std_dev"):
        pairs = (replace(layer, heads=layer.heads // 2, kv_heads=max(1, layer.kv_heads // 2)) for layer in layers)
        views[DIFFERENCE] = tuple(pairs)
    max_positions, decoder_positions = _limits(config, task)
    geometry = Geometry(
        model_type=config.model_type,
        task=task,
        other_stacks=others,
        views={stack: of_stack for stack, of_stack in views.items() if of_stack},
        rates=rates,
        least_tokens=least(config) if (least := family(config.model_type).least_tokens) else 1,
        both_ways=both_ways(config) if task in (ENCODER_ONLY, SEQ2SEQ) else "",
        layers=layers,
        hidden_size=_first(text, "hidden_size", "d_model", "n_embd") or 0,
        vocab_size=_first(text, "decoder_vocab_size", "vocab_size") or 0,
        max_positions=max_positions,
        decoder_positions=decoder_positions,
        parameters=count_parameters(config) if count else None,
    )

    # A config may say anything: what is no size is refused here, where its name is known.
    for holder, names in ((geometry, SIZES), *((layer, LAYER_SIZES) for layer in layers)):
        for name in names:
            value = getattr(holder, name)
            if value is not None and not (isinstance(value, int | float) and 0 <= value <= MOST_NUMBER):
                raise ValueError(f"expected a size as {name}, got {brief(value)}")
    return geometry


def vision_layers(tower: Any) -> tuple[LayerGeometry, ...]:
    """The layers of a vision tower, by its config; none where that does not say them.

    None either of a tower that attends in windows of a size that its config does not say.

    Example:
        vision_layers(AutoConfig.from_pretrained("llava-hf/llava-1.5-7b-hf").vision_config)[0].heads  # 16
    """
    heads = _first(tower, "num_attention_heads", "num_heads") or 0
    full, side = getattr(tower, "fullatt_block_indexes", None), window_side(tower)
    if not isinstance(heads, int) or (full is not None and not side):
        return ()
    width = _first(tower, "embed_dim", "hidden_size") or 0
    size = _first(tower, "head_dim") or (width // heads if heads else 0)
    count = _bounded(_first(tower, "num_hidden_layers", "depth") or 0)
    return tuple(
        LayerGeometry(index, "full", heads, heads, size, size, None)
        if full is None or index in full
        else LayerGeometry(index, "windowed", heads, heads, size, size, side**2)
        for index in range(count if heads else 0)
    )


def window_side(tower: Any) -> int:
    """The side of the windows of patches that most layers of a vision tower attend in, in patches; 0 without windows.

    Example:
        window_side(AutoConfig.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct").vision_config)  # 8
    """
    sizes = [_first(tower, name) for name in ("window_size", "patch_size", "spatial_merge_size")]
    if getattr(tower, "fullatt_block_indexes", None) is None or not all(isinstance(size, int) for size in sizes):
        return 0
    pixels, patch, merge = sizes
    return int(pixels // merge // patch * merge)


def with_tower(geometry: Geometry, config: Any) -> Geometry:
    """The geometry with the layers of a decoder's vision tower; as it is where there are none."""
    layers = () if is_vision(geometry.stack) else vision_layers(getattr(config, "vision_config", None))
    return replace(geometry, other_stacks={**geometry.other_stacks, VISION: layers}) if layers else geometry


def rotary_types(config: Any) -> set[str]:
    """The kinds of rotary positions that a config names ("default", "dynamic", ...); some have one per layer type.

    >>> rotary_types(LlamaConfig())
    {'default'}
    """
    text = config.get_text_config(decoder=True)
    types, inside = set[str](), [getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}]
    while inside:
        rotary = inside.pop()
        inside += [part for part in rotary.values() if isinstance(part, Mapping)]
        types |= {str(rotary[key]) for key in ("rope_type", "type") if key in rotary}
    return types


def count_parameters(config: Any) -> int | None:
    """Parameters of the model of this config, built on the meta device; None where it can't be built."""
    try:
        return sum(parameter.numel() for parameter in empty_model(config).parameters())
    except Exception:  # any family's constructor, with any config: not counting is the answer
        return None


def weight_bytes(config: Any, dtype: str) -> int | None:
    """What the weights of this config's model take; None where they cannot be counted.

    dtype: a name, `auto` for the config's own, or `8bit` or `4bit`, which leave no layer's weights wider.

    Example:
        weight_bytes(AutoConfig.from_pretrained("gpt2"), "bfloat16")  # 248879616
    """
    parameters = count_parameters(config)
    bits = {"8bit": 8, "4bit": 4}.get(dtype) or 8 * number_bytes(config, dtype)
    return None if parameters is None else parameters * bits // 8


def number_bytes(config: Any, dtype: str) -> int:
    """What a number of a model's weights takes. dtype: a name, or `auto` for the config's own.

    >>> number_bytes(LlamaConfig(), "auto")
    4
    """
    own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return DTYPE_BYTES.get(own if dtype == "auto" else dtype, 4)


def stretch_positions(config: Any, positions: int | None) -> Any:
    """The config with room for `positions` tokens, its rotary positions stretched linearly; unchanged where it has it.

    Raises UsageError for a family without rotary positions.
    """
    text = config.get_text_config()
    current = geometry_of(config, count=False).max_positions
    if positions is None or current is None or positions <= current:
        return config
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope:
        raise UsageError(
            f"{text.model_type} has no rotary positions to stretch", "use {truncate=left} or {truncate=right}"
        )
    if rope["rope_type"] != "default":
        raise UsageError(
            f"{text.model_type} scales its positions already ({rope['rope_type']})", "leave out {positions}"
        )
    text.rope_parameters = {**rope, "rope_type": "linear", "factor": positions / current}
    text.max_position_embeddings = positions
    return config


def _limits(config: Any, task: str) -> tuple[Any, Any]:
    """The most tokens that a model reads, and those of an encoder-decoder's decoder; None where nothing limits them."""
    if "dynamic" in rotary_types(config):  # such positions stretch themselves: no text is too long for them
        return None, None
    if task != SEQ2SEQ:
        return _positions(stack_config(config, main_stack(task))), None
    # A text has no more than the least of two stacks with a config each. LED states both in one.
    encoder, decoder = (stack_config(config, stack) for stack in (ENCODER, DECODER))
    of_encoder = _positions(encoder, "max_encoder_position_embeddings")
    of_decoder = _positions(decoder, "max_decoder_position_embeddings")
    limits = [limit for limit in (of_encoder, of_decoder) if limit is not None]
    return next(iter(limits), None) if encoder is decoder else min(limits, default=None), of_decoder


def _positions(text: Any, own: str = "") -> Any:
    """The most tokens that one stack has positions for; None where its config names no limit.

    A table of positions may have a padding row, as RoBERTa's, and begin after it. No config says so: the table's own
    class does, or the module that has it, which count from that row. own: what the config calls this stack's, where it
    has several.
    """
    limit = _first(text, own, *POSITIONS)
    if limit is None or getattr(text, "pad_token_id", None) is None or rotary_types(text):
        return limit
    from torch import nn

    with suppress(Exception):  # any family's constructor, with any config
        for holder in empty_model(text).modules():
            for name, table in holder.named_children():
                row = getattr(table, "padding_idx", None) if "position" in name else None
                # LXMERT counts from 0: its table is a plain one, and the module does not know the row.
                if row is not None and (type(table) is not nn.Embedding or hasattr(holder, "padding_idx")):
                    rows = len(table.get_parameter("weight")) - row - 1
                    return min(limit, rows - family(text.model_type).positions_ahead)
    return limit


def _in_words(layers: tuple[LayerGeometry, ...], mixing: Mapping[int, int] | None = None) -> str:
    """mixing: {layer index: how many maps it has} of those that mix tokens by a rule without a softmax."""
    there = [layer for layer in layers if layer.attention]

    def spread(numbers: list[int]) -> str:
        """`24`, or `8-16` where layers differ."""
        return "-".join(str(number) for number in sorted({min(numbers), max(numbers)})) if numbers else "0"

    def maps(of: list[LayerGeometry]) -> str:
        heads = [mixing[layer.index] for layer in of if layer.index in mixing] if mixing else []
        return f" x {spread(heads)} heads" if heads else ""

    words = [f"{len(there)} layers x {spread([layer.heads for layer in there])} heads "]
    words[0] += f"({spread([layer.kv_heads for layer in there])} kv)"
    words = words if there or not layers else []
    without, both = [layer for layer in layers if not layer.attention], [layer for layer in there if layer.parallel]
    for name in dict.fromkeys(layer.type for layer in without):
        alike = [layer for layer in without if layer.type == name]
        words.append(f"{len(alike)} {name}{'' if there else ' layers'}{maps(alike)}")
    for name in dict.fromkeys(layer.parallel for layer in both):
        alike = [layer for layer in both if layer.parallel == name]
        words.append(f"{name}{maps(alike)} parallel to {len(alike)}")
    return ", ".join(words)


def _layers(config: Any, stack: str) -> tuple[LayerGeometry, ...]:
    """The layers of a stack of the model of a config."""
    text = stack_config(config, stack)
    count, known = _count(text, stack), family(text.model_type)
    names = _first(text, "layer_types", "layers_block_type", "attention_layers")
    words = names if isinstance(names, list | tuple) and len(names) == count else ()

    # What the family says goes before the words of the config.
    fixed = known.without_softmax or (known.layer_type and known.layer_type(text, stack))
    types = [TYPES.get(word) or visible(str(word)) for word in words]
    if not types:  # asked only here: of layers that differ a config has no window of all
        types = ["sparse" if _first(text, "keep_window_size") else "sliding" if _window(text) else "full"] * count
    has_mamba = any(name.startswith(("mamba", "n_mamba")) for name in vars(text))
    cross = _first(text, "cross_attention_layers") or ()
    types = ["ssm" if has_mamba and word == "linear" else word for word in types]
    types = [fixed or ("cross" if index in cross else word) for index, word in enumerate(types)]

    # A word that is not in TYPES is of a layer with attention where its modules attend: then a model is built.
    unknown = {index for index, word in enumerate(words) if word not in TYPES}
    modules = layer_modules(config, stack) if unknown else None
    attending = unknown & modules.attending if modules else set()

    # With a Mamba in the config and no list of the layers that are one, all layers have it parallel to their attention;
    # with such a list those that it calls hybrid.
    hybrid = {index for index, word in enumerate(words or ["hybrid"] * len(types)) if word == "hybrid"}
    parallel = hybrid if has_mamba else set()
    return tuple(
        replace(
            _layer(text, index, name, stack),
            parallel="ssm" if index in parallel else "",
            both_ways=is_bidirectional(stack),
            of_unknown_type=index in attending,
            generated_window=_window(text) if words and words[index] in OF_GENERATED else None,
        )
        for index, name in enumerate(types)
    )


def _mixing_layers(config: Any, stack: str, layers: Sequence[LayerGeometry]) -> dict[str, tuple[LayerGeometry, ...]]:
    """The layers that mix tokens by a rule without a softmax, by the kind of their maps."""
    if all(layer.attention and not layer.parallel for layer in layers):
        return {}
    modules = layer_modules(config, stack)
    kinds: dict[str, list[LayerGeometry]] = {}
    for index, mixer in sorted(modules.mixers.items()) if modules else ():
        if index < len(layers):
            layer = replace(layers[index], heads=mixer.heads, kv_heads=mixer.heads, window=None, parallel="")
            kinds.setdefault(mixer.kind, []).append(replace(layer, keys=RULE_NAMES[mixer.name]))
    return {kind: tuple(of_kind) for kind, of_kind in kinds.items()}


def _count(text: Any, stack: str) -> int:
    rule = family(text.model_type).layers
    names = (f"{stack}_layers", f"num_{stack}_layers", "num_hidden_layers", "n_layer", "n_layers")
    return _bounded(rule(text) if rule else _first(text, *names) or 0)


def _bounded(count: int) -> int:
    """The number of layers. Raises ValueError for more than any model has."""
    if count > MOST_LAYERS:
        raise ValueError(f"expected at most {MOST_LAYERS} layers, got {brief(count)}")
    return int(count)


def _layer(text: Any, index: int, layer_type: str, stack: str = DECODER) -> LayerGeometry:
    config = text.per_layer_config[index] if getattr(text, "is_heterogeneous", False) else text
    known = family(config.model_type)

    def own(*names: str) -> list[str]:
        """The names of a layer that slides first, as some configs have both."""
        return [*(f"swa_{name}" for name in names if layer_type == "sliding"), *names]

    window = None
    if layer_type == "chunked":
        window = _first(config, "attention_chunk_size")
    elif layer_type in ("sliding", "compressed"):
        window = _window(config)
        # Of a window that looks both ways the query's own key is one where the family makes it of its causal one.
        counts_itself = getattr(config, "use_bidirectional_attention", None) and getattr(config, "is_causal", True)
        if window and is_bidirectional(stack) and counts_itself:
            window -= 1

    per_layer = getattr(config, "num_attention_heads_per_layer", None)
    if per_layer:
        heads = per_layer[index]
    elif known.heads:
        heads = known.heads(config)
    else:
        of_stack = (f"{stack}_attention_heads", f"num_{stack}_attention_heads")
        heads = _first(config, *of_stack, *own("num_attention_heads", "n_heads", "num_heads", "attention_heads")) or 0

    # In latent attention every head has a key of its own, of two parts.
    if _first(config, "kv_lora_rank") and hasattr(config, "qk_nope_head_dim"):
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return LayerGeometry(index, layer_type, heads, heads, head_dim, config.v_head_dim, window)
    kv_heads = known.kv_heads(config, heads, layer_type) if known.kv_heads else None
    if kv_heads is None:
        kv_heads = _first(config, *own("num_key_value_heads"), "num_kv_heads") or heads
    width = _first(config, "true_hidden_size", "hidden_size", "d_model", "n_embd") or 0
    head_dim = _first(config, *own("head_dim", "attention_head_dim", "kv_channels", "d_kv", "d_head"))
    head_dim = head_dim or (width // heads if heads else 0)
    value_dim = _first(config, *own("v_head_dim")) or head_dim
    return LayerGeometry(index, layer_type, heads, kv_heads, head_dim, value_dim, window)


def _window(text: Any) -> int | None:
    if getattr(text, "use_sliding_window", None) is False or family(text.model_type).window_unread:
        return None
    return _first(text, *WINDOWS)


def _first(config: Any, *names: str) -> Any:
    """The first of these attributes that is there and says something."""
    return next((value for name in names if (value := getattr(config, name, None)) not in (None, 0, -1, [])), None)

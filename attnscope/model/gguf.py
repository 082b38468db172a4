"""What a GGUF file states of its attention, and the config that follows from it.

transformers makes a config of some keys of a file and leaves the rest at the defaults of its class, which are those of
one checkpoint. Here every key that bears on attention goes into that config, or is neutral, or is left: an error that
names it. A key that is absent means what llama.cpp takes it for: `load_hparams` of its src/llama-model.cpp, and the
`load_arch_hparams` of src/models/.

The file is read as data, within bounds, without torch.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from math import inf, log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attnscope.errors import AttnscopeError, ModelError, brief, listed
from attnscope.model.checkpoint import check_counts
from attnscope.model.geometry import MOST_LAYERS
from attnscope.model.libraries import needed
from attnscope.model.options import TrustPolicy, read_error
from attnscope.model.tasks import empty_model
from attnscope.utils.files import FileState, state_of

VERSIONS = (2, 3)
HEADER_BYTES = 1 << 26  # a vocabulary of 262,144 tokens with its merges takes a fourth
MOST_NUMBERS, MOST_TEXT, MOST_DIMENSIONS = 1 << 16, 1 << 20, 8
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # ggml's types
TEXT, ARRAY, F32 = 8, 9, 0
MOST_WIDTH = 1 << 16  # of a head
BEARING = ("softcap", "scale", "window", "context_length")  # in a name: it bears on attention

# Layers that slide, of llama.cpp's `set_swa_pattern`: of so many layers all but the last. EVERY: no layer is full.
EVERY = 0
PERIODS = {"gemma2": 2, "gemma3": 6, "gemma4": 6, "gpt-oss": 2, "phi3": EVERY, "starcoder2": EVERY}
SAME_BASE = ("gemma2", "gpt-oss")  # for both kinds of layers, unless the file states another for those that slide
CAPS = {("gemma2", "attn_logit_softcapping"): 50.0, ("gemma2", "final_logit_softcapping"): 30.0}
BIG_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, whose queries are scaled by hidden size / heads
OPTIONAL = {  # what a config says is there, and a tensor that there is then
    "attention_bias": "blk.0.attn_q.bias",
    "use_qkv_bias": "blk.0.attn_q.bias",
    "qk_layernorm": "blk.0.attn_q_norm.weight",
    "mlp_bias": "blk.0.ffn_up.bias",
}
READER = "transformers.modeling_gguf_pytorch_utils"
# In the name of a tensor that is no weight: tables of positions, and what llama.cpp skips too.
NO_WEIGHT = ("rope_f", "attn_rot_embd", "cross_attn_rel_b", ".nextn.")
BLOCK = re.compile(r"\bblk\.(\d+)\.")  # of a tensor's name: its layer
EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")


@dataclass(frozen=True)
class Header:
    """The keys of a GGUF file, and where its tensors are.

    keys: numbers, texts and short arrays of numbers; None for other arrays. tensors: {name: (shape, ggml type, offset
    from `data`)}.
    """

    path: Path
    architecture: str
    keys: Mapping[str, Any]
    tensors: Mapping[str, tuple[tuple[int, ...], int, int]]
    data: int


def check(path: Path) -> None:
    """Raise for a file that is no GGUF file, and where the package that reads it is missing."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file, as its name says", "download it again")
    if find_spec("gguf") is None:
        raise ModelError("reading a GGUF file needs gguf", 'pip install "attnscope[gguf]"')


def read_header(path: Path) -> Header:
    """The header of a GGUF file, without its tokens and weights. Raises `ModelError` for one that is no header.

    >>> read_header(Path("llama.gguf")).keys["llama.rope.freq_base"]
    500000.0
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Cursor(content).header(path)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"the header of {path} is cut short or damaged: {error}", "download it again") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", "check the file") from None


@dataclass
class _Cursor:
    """A place in a header. Its methods raise struct.error past the end, ValueError for what no header holds."""

    content: mmap.mmap
    place: int = 4

    def header(self, path: Path) -> Header:
        version, tensors, keys = self.numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"expected version {' or '.join(map(str, VERSIONS))}, got {version}")
        values: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text()
            if key in values:
                raise ValueError(f"it has {brief(key)} twice")
            values[key] = self.value(*self.numbers("I"))
        places = {}
        for _ in range(tensors):
            name, (dimensions,) = self.text(), self.numbers("I")
            if dimensions > MOST_DIMENSIONS:
                raise ValueError(f"a tensor of {dimensions} dimensions")
            shape = self.numbers(f"{dimensions}Q")
            kind, offset = self.numbers("IQ")
            places[name] = shape, kind, offset
        alignment = values.get("general.alignment", 32)
        architecture = values.get("general.architecture")
        if not isinstance(architecture, str) or not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise ValueError("it has no general.architecture" if alignment else "its alignment is 0")
        return Header(path, architecture, values, places, -(-self.place // alignment) * alignment)

    def numbers(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        numbers = struct.unpack_from(form, self.content, self.place)
        self.move(struct.calcsize(form))
        return numbers

    def move(self, by: int) -> None:
        self.place += by
        if self.place > min(HEADER_BYTES, len(self.content)):
            raise ValueError("it ends before it is complete, or is larger than any")

    def text(self) -> str:
        (length,) = self.numbers("Q")
        if length > MOST_TEXT:
            raise ValueError(f"a text of {length} bytes")
        start = self.place
        self.move(length)
        return self.content[start : self.place].decode()

    def value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.numbers(NUMBERS[kind])[0]
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}")
        kind, count = self.numbers("IQ")
        if kind == TEXT:
            # A vocabulary has a million with its merges: they are skipped, and not read.
            place, end, length_at = self.place, min(HEADER_BYTES, len(self.content)), struct.Struct("<Q").unpack_from
            for _ in range(count):
                place += 8 + length_at(self.content, place)[0]
                if place > end:
                    break
            self.move(place - self.place)
            return None
        if kind not in NUMBERS:
            raise ValueError(f"an array of type {kind}")
        if count <= MOST_NUMBERS:
            return self.numbers(f"{count}{NUMBERS[kind]}")
        self.move(count * struct.calcsize(f"<{NUMBERS[kind]}"))
        return None


@dataclass(frozen=True)
class Statement:
    """What of a file goes into transformers' config, and what has no entry there.

    architecture: llama.cpp's name. raw: the entries of a config.json. left: keys and tensors that no one has use for,
    with their values. unstated: what bears on attention and has no key in such a file, in words.
    """

    architecture: str
    raw: Mapping[str, Any]
    left: Mapping[str, Any]
    unstated: tuple[str, ...]


def load_config(path: Path, permits: TrustPolicy, trust: bool = False) -> Any:
    """The config of a file's model, with what the file states. trust: continue without what no one has use for.

    Raises `ModelError` that names a key which bears on attention and which no one has use for.
    """
    from transformers import CONFIG_MAPPING

    stated = statement(path, permits)
    if stated.left and not trust:
        raise ModelError(
            f"{path} has {in_words(stated)}, and transformers leaves that out: attention would be another",
            "read the model from its own folder, or continue without that: {gguf=trust}",
        )
    raw = deepcopy(dict(stated.raw))
    try:
        config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    except Exception as error:  # any family's config class, with any values
        raise read_error(f"the config of {path}", error, "check its values") from error
    config.name_or_path = str(path.parent)
    return config


def in_words(stated: Statement) -> str:
    """The keys and tensors that no one has use for, with their values.

    >>> in_words(Statement("llama", {}, {"llama.attention.clamp_kqv": 8.0}, ()))
    'llama.attention.clamp_kqv = 8.0'
    """
    words = []
    for name, value in stated.left.items():
        shown = f"{value:.7g}" if isinstance(value, float) else brief(value)
        words.append(name if value is None else f"{name} = {shown}")
    return listed(words)


def taken_on_trust(path: Path, permits: TrustPolicy) -> tuple[str, ...]:
    """What of a file's attention is taken on trust, in words: what it cannot state, and what no one has use for.

    >>> taken_on_trust(Path("gemma2.gguf"), TrustPolicy())
    ('the scale of queries (a gemma2 file does not state it)',)
    """
    stated = statement(path, permits)
    unstated = [f"{what} (a {stated.architecture} file does not state it)" for what in stated.unstated]
    return (*unstated, *([f"{in_words(stated)} (of the file, left out by transformers)"] if stated.left else []))


def statement(path: Path, permits: TrustPolicy) -> Statement:
    """What a file states; read once for a file that stays the same. Raises `ModelError` for one that is not read."""
    return _statement(path, permits, state_of(path))


@lru_cache(maxsize=2)
def _statement(path: Path, permits: TrustPolicy, state: FileState) -> Statement:
    """state: the file is read again where it is another."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    header = read_header(path)
    parts = header.keys.get("split.count", 1)
    if parts != 1:
        raise ModelError(f"{path} is one of {brief(parts)} parts of a model", "merge them: llama-gguf-split --merge")

    # What transformers makes of the keys, then what its reader left at the defaults of the class.
    try:
        with permits.held():
            raw, _ = PreTrainedConfig.get_config_dict(path.parent, gguf_file=path.name, **permits.given)
        if raw["model_type"] == "mistral" and header.architecture == "llama":
            raw["model_type"] = "llama"  # that is what a file named "mistral" is; transformers cannot name its tensors
    except Exception as error:  # any architecture, with any keys
        raise read_error(f"the config of {path}", error, "choose a file of another architecture") from error
    check_counts(raw, path)
    if raw["model_type"] not in CONFIG_MAPPING:
        raise ModelError(
            f"{path} is of the architecture {header.architecture}, of which transformers has no model",
            "choose a file of another architecture",
        )
    kind = CONFIG_MAPPING[raw["model_type"]]
    reading = _Reading(header, kind, dict(raw))
    try:
        reading.read()
    except AttnscopeError:
        raise
    except Exception as error:  # any keys, with values of any type
        raise read_error(f"the keys of {path}", error, "convert the model again") from error
    names = [*sorted(reading.left), *_unread(header, kind, reading.raw)]
    return Statement(
        header.architecture, reading.raw, {name: header.keys.get(name) for name in names}, tuple(reading.unstated)
    )


def _unread(header: Header, kind: Any, raw: Mapping[str, Any]) -> list[str]:
    """Tensors of a file that no weight of the model is made of, which transformers' older reader drops without a word.

    None where the model cannot be made: that is reported later.
    """
    processors = needed(READER, "TENSOR_PROCESSORS")
    try:
        model: Any = empty_model(kind.from_dict(deepcopy(dict(raw))))
        processor = processors.get(header.architecture, needed(READER, "TensorProcessor"))(config=dict(raw))
        names_of = needed(READER, "get_gguf_hf_weights_map")
        # Without its parts: for each of them transformers' reader would make all names again.
        alone = [
            SimpleNamespace(config=part.config, state_dict=part.state_dict, named_children=tuple)
            for part in (model, model.base_model)
        ]
        names = {name for part in alone for name in names_of(part, processor)}
    except Exception:  # any family's code, with any config; or the newer reader's architecture
        return []
    stems = {name.removesuffix(".weight") for name in names}
    there = {name for name in header.tensors if not any(word in name for word in NO_WEIGHT)}
    there -= {"output.weight"} if model.get_output_embeddings() is None else set()  # a body is read without its head
    return sorted(name for name in there if name.removesuffix(".weight") not in stems)


@dataclass
class _Reading:
    """Keys of a file on their way into the config of a class.

    raw: the entries so far. left: what bears on attention and was not read yet, or has no entry in the config.
    """

    header: Header
    kind: type
    raw: dict[str, Any]
    arch: str = field(init=False)
    left: set[str] = field(init=False)
    unstated: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arch = self.header.architecture
        self.left = {name for name in self.header.tensors if "rope_f" in name}
        for key in self.header.keys:
            place, _, name = key.partition(".")
            bears = name.startswith(("attention.", "rope.")) or any(word in name for word in BEARING)
            if bears and place not in ("general", "tokenizer"):
                self.left.add(key)

    def states(self, name: str) -> bool:
        return f"{self.arch}.{name}" in self.header.keys

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a key, named without its architecture."""
        key = f"{self.arch}.{name}"
        self.left.discard(key)
        return self.header.keys.get(key, default)

    def positive(self, name: str, default: float, most: float = inf) -> Any:
        """The value of a key that is a number above 0, and at most `most`. Raises ValueError where it is none."""
        value = self.take(name, default)
        if not 0 < value < inf or value > most:  # NaN is neither
            raise ValueError(f"{self.arch}.{name} is {value}")
        return value

    def expect(self, name: str, neutral: Any) -> None:
        """Take a key that has no entry in the config: another value than the neutral one is left."""
        self.leave_unless(self.take(name, neutral) == neutral, name)

    def leave(self, name: str) -> None:
        """Keep a key as one that has no entry in the config, if the file has it."""
        if self.states(name):
            self.left.add(f"{self.arch}.{name}")

    def name_of(self, *names: str) -> str | None:
        """The first of some entries that the config's class has, as it calls it."""
        entries: set[str] = set()
        for kind in self.kind.__mro__:
            entries |= set(vars(kind).get("__annotations__", ()))
        mapped = getattr(self.kind, "attribute_map", {})
        return next((own for name in names if (own := mapped.get(name, name)) in entries), None)

    def put(self, value: Any, *names: str) -> bool:
        """Tell the first of some entries that the config's class has; whether it has one."""
        if name := self.name_of(*names):
            self.raw[name] = value
        return name is not None

    def put_or_equal(self, name: str, value: Any, neutral: Any, *names: str) -> None:
        """Tell an entry the value of a key; where the class has none, the key must say what the class does."""
        if not self.put(value, *names) and value != neutral:
            self.leave(name)

    def read(self) -> None:
        """Read everything that bears on attention."""
        self.sizes()
        for key in ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"):
            if self.states(key) and not self.put(self.take(key), *EPSILONS):
                self.leave(key)
        self.windows()
        self.scores()
        self.positions()
        self.parts()
        scales = {f"{self.arch}.{name}_scale" for name in ("embedding", "residual", "logit", "expert_weights")}
        self.left -= {key for key in scales if self.header.keys.get(key) in (0.0, 1.0)}  # llama.cpp: no factor

    def sizes(self) -> None:
        required = ("block_count", "embedding_length")  # which llama.cpp has no default for
        if absent := [name for name in required if not self.states(name)]:
            raise ValueError(f"it does not state {self.arch}.{absent[0]}")
        self.layers, self.hidden = (int(self.take(name)) for name in required)
        stated = max(self.layers, self.take("decoder_block_count", 0))
        there = len({block[1] for name in self.header.tensors if (block := BLOCK.search(name))})
        if stated > min(there, MOST_LAYERS):  # a model is made of so many, whatever the file holds
            raise ValueError(f"it states {brief(stated)} layers, and has tensors of {there}")
        self.heads = int(self.one_of("attention.head_count") or 1)
        self.context = self.take("context_length", 0)
        self.put(self.context, "max_position_embeddings")  # those without have no limit: relative, or ALiBi
        kv_heads = self.one_of("attention.head_count_kv", self.heads)
        self.put_or_equal("attention.head_count_kv", kv_heads, self.heads, "num_key_value_heads", "num_kv_heads")
        self.size = self.positive("attention.key_length", self.hidden // self.heads, MOST_WIDTH)
        if not self.put(self.size, "head_dim") and self.size * self.heads != self.hidden:
            self.raw["head_dim"] = self.size  # of a class that has no use for it the weights have other shapes
        self.expect("attention.value_length", self.size)
        width = self.take("expert_feed_forward_length")
        if width is not None:
            self.put(width, "moe_intermediate_size", "intermediate_size")
        shared, decoder_layers = self.take("expert_shared_feed_forward_length"), self.take("decoder_block_count")
        if shared is not None:
            self.put(shared, "shared_expert_intermediate_size")
        if decoder_layers is not None:
            self.put(decoder_layers, "num_decoder_layers")

    def one_of(self, name: str, default: Any = None) -> Any:
        """A number of heads that is the same for all layers with attention; left where it differs."""
        value = self.take(name, default)
        if not isinstance(value, tuple):
            return value
        numbers = sorted(set(value) - {0})
        if len(numbers) != 1 or (0 in value and "layer_types" not in self.raw):
            self.leave(name)
        return numbers[-1] if numbers else default

    def windows(self) -> None:
        """Which layers slide, over how many keys."""
        if self.arch not in PERIODS:
            self.unstated += ["a sliding window"] * (self.arch == "llama" or self.name_of("sliding_window") is not None)
            if self.take("attention.sliding_window", 0):
                self.leave("attention.sliding_window")
            else:
                self.take("attention.sliding_window_pattern")
            return
        window = self.take("attention.sliding_window", 4096 if self.arch == "gemma2" else 0) or None
        if not self.states("attention.sliding_window"):
            self.unstated += ["a sliding window"] * (self.arch == "starcoder2")
        by_layer = self.name_of("layer_types") is not None
        if window or not by_layer:  # a config whose layers do not slide needs one all the same
            self.put(window, "sliding_window")
        if not by_layer:
            return
        # By layer, or the last of so many is full.
        pattern = self.take("attention.sliding_window_pattern", PERIODS[self.arch])
        if isinstance(pattern, tuple):
            slides = list(pattern)
        else:
            slides = [pattern == EVERY or index % pattern < pattern - 1 for index in range(self.layers)]
        if len(slides) != self.layers:
            self.leave("attention.sliding_window_pattern")
            return
        names = ("full_attention", "sliding_attention")
        self.raw["layer_types"] = [names[bool(slide and window)] for slide in slides]

    def scores(self) -> None:
        """Scales, soft-caps and biases of scores, and which keys are ahead."""
        # Gemma's classes have the scale as a whole number of its own; the others compute it from the width of a head.
        scale = self.take("attention.scale", 0.0)
        if self.name_of("query_pre_attn_scalar"):
            big = self.layers == BIG_GEMMA.get(self.arch)
            value = scale**-2 if scale else self.hidden // self.heads if big else self.size
            self.put(round(value), "query_pre_attn_scalar")
            if abs(value - round(value)) > 1e-3:
                self.leave("attention.scale")
            self.unstated += [] if scale else ["the scale of queries"]
        elif scale and abs(scale - self.size**-0.5) > 1e-6:
            self.leave("attention.scale")
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            cap = self.take(name, CAPS.get((self.arch, name), 0.0)) or None
            self.put_or_equal(name, cap, None, name)
        if not self.take("attention.causal", True):
            self.raw["is_causal"] = False

        self.expect("attention.max_alibi_bias", 8.0 if self.arch == "bloom" else 0.0)
        self.expect("attention.clamp_kqv", 0.0)
        if self.states("attention.relative_buckets_count"):
            buckets = self.take("attention.relative_buckets_count")
            self.put_or_equal("attention.relative_buckets_count", buckets, None, "relative_attention_num_buckets")
            self.unstated.append("the distance of the last bucket of positions")
        shared = self.take("attention.shared_kv_layers", 0)
        self.put_or_equal("attention.shared_kv_layers", shared, 0, "num_kv_shared_layers")

    def positions(self) -> None:
        """Rotary positions: base, dimensions, scaling, tables."""
        defaults = getattr(self.kind(), "rope_parameters", None)
        if not defaults:
            return
        full = {"rope_theta": self.positive("rope.freq_base", 10000.0), **self.scaling(defaults)}
        turned = self.take("rope.dimension_count", self.size)
        if "partial_rotary_factor" in defaults or "rotary_dim" in self.raw:
            full["partial_rotary_factor"] = turned / self.size
        else:
            self.leave_unless(turned == self.size, "rope.dimension_count")
        by_transformers = self.raw.get("rope_parameters") or {}
        for name in ("rope_theta", "rope_scaling", "rotary_dim"):
            self.raw.pop(name, None)
        if "mrope_section" in by_transformers:
            self.take("rope.dimension_sections")
        nested = "sliding_attention" in defaults
        if not nested:
            self.raw["rope_parameters"] = {**by_transformers, **full}
            if self.arch in SAME_BASE:
                self.expect("rope.freq_base_swa", full["rope_theta"])
            return
        sliding = {"rope_type": "default", "rope_theta": self.positive("rope.freq_base_swa", 10000.0)}
        self.raw["rope_parameters"] = {"sliding_attention": sliding, "full_attention": full}

    def scaling(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """How rotary positions are scaled, in the words of transformers."""
        kind = self.take("rope.scaling.type", "linear")  # llama.cpp: that, with a factor of 1
        older = self.take("rope.scale_linear")
        stated = self.take("rope.scaling.factor", older)
        factor = self.positive("rope.scaling.factor", older) if stated else 1.0  # 0 is none, as in llama.cpp
        original = self.take("rope.scaling.original_context_length", self.context)
        self.put(original, "original_max_position_embeddings")  # Phi-3 has it in two places
        attention = self.take("rope.scaling.attn_factor", 1.0)
        yarn = {key: self.take(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow", "attn_factor")}
        multiplier = self.take("rope.scaling.yarn_log_multiplier", 0.0)
        self.take("rope.scaling.finetuned")  # which llama.cpp prints, and no more
        self.expect("rope.scaling.yarn_ext_factor", 1.0)
        self.expect("rope.scaling.alpha", 0.0)

        # llama.cpp applies tables of frequencies whatever the kind. transformers calls frequencies that are divided by
        # tables longrope, whatever made the tables.
        scaled = factor != 1.0 and kind in ("linear", "yarn")
        if (tables := self.tables()) and not scaled:
            long, short = tables
            if set(long) == set(short) == {1.0} and attention == 1.0:
                return {"rope_type": "default"}
            length = self.context if long == short else original  # one table holds for any length
            return {
                "rope_type": "longrope",
                "long_factor": long,
                "short_factor": short,
                "factor": max(self.context / length, 1.0),
                "original_max_position_embeddings": length,
                "attention_factor": attention,
            }
        if not scaled:
            self.leave_unless(attention == 1.0, "rope.scaling.attn_factor")
            self.leave_unless(kind in ("none", "linear", "yarn"), "rope.scaling.type")
            return {"rope_type": "default"}
        if tables:
            self.left |= {name for name in self.header.tensors if "rope_f" in name}
        if kind == "linear":
            self.leave_unless(attention == 1.0, "rope.scaling.attn_factor")
            return {"rope_type": "linear", "factor": factor}

        # What remains is YaRN. Whether the bounds of its ramp are whole numbers no key says.
        entries = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        entries |= {name: yarn[name] for name in ("beta_fast", "beta_slow") if yarn[name] is not None}
        if "truncate" in defaults:
            entries["truncate"] = defaults["truncate"]
            self.unstated.append("whether the bounds of its YaRN are whole numbers")
        if yarn["attn_factor"] is not None:  # as converters write it: the factor of cos and sin
            entries["attention_factor"] = yarn["attn_factor"] * attention
        elif attention != 1.0 or multiplier:
            magnitude = _magnitude(factor) / (_magnitude(factor, multiplier) if multiplier else 1.0)
            entries["attention_factor"] = magnitude * attention
        return entries

    def leave_unless(self, holds: bool, name: str) -> None:
        if not holds:
            self.leave(name)

    def tables(self) -> tuple[list[float], list[float]] | None:
        """The factors of rotary frequencies past the original length and within it, where the file has them.

        Those of Llama 3.1 are one table. Tensors that are no such table are left.
        """
        names = [f"rope_factors_{which}.weight" for which in ("long", "short")]
        names = names if names[0] in self.header.tensors else ["rope_freqs.weight"] * 2
        if names[0] not in self.header.tensors or names[1] not in self.header.tensors:
            return None
        turned = self.header.keys.get(f"{self.arch}.rope.dimension_count", self.size)
        long, short = map(self.vector, names)
        if long is None or short is None or not len(long) == len(short) == turned // 2 or min(*long, *short) <= 0:
            return None
        self.left -= set(names)
        return long, short

    def vector(self, name: str) -> list[float] | None:
        """A vector of the file in float32; None for a tensor that is none, or has more numbers than any of these."""
        shape, kind, offset = self.header.tensors[name]
        if kind != F32 or len(shape) != 1 or shape[0] > MOST_NUMBERS:
            return None
        with self.header.path.open("rb") as file:
            file.seek(self.header.data + offset)
            content = file.read(4 * shape[0])
        return list(struct.unpack(f"<{shape[0]}f", content)) if len(content) == 4 * shape[0] else None

    def parts(self) -> None:
        """What single architectures state in ways of their own."""
        if self.arch == "llama" and not self.states("attention.head_count_kv"):
            raise ModelError(
                f"{self.header.path} does not state llama.attention.head_count_kv, without which transformers leaves "
                "its queries and keys in another order",
                "convert the model again, with a llama.cpp of today",
            )
        if self.arch == "falcon":
            self.raw["new_decoder_architecture"] = "blk.0.attn_norm_2.weight" in self.header.tensors
            if self.raw["num_kv_heads"] != 1:  # transformers does not undo the order of llama.cpp's converter
                self.leave("attention.head_count_kv")
        if self.arch in ("t5", "t5encoder"):  # llama.cpp asks whether there are gates, too
            gated = "enc.blk.0.ffn_gate.weight" in self.header.tensors
            self.raw["feed_forward_proj"] = "gated-gelu" if gated else "relu"
            self.raw.pop("is_gated_act", None)
        for entry, tensor in OPTIONAL.items():
            if name := self.name_of(entry):
                self.raw[name] = tensor in self.header.tensors
        if self.arch == "gpt2":
            self.unstated.append("whether scores are divided by the layer's number")
        if self.arch != "gemma4":
            return
        # Heads of layers that slide differ from those of full layers, whose positions turn a part of each head.
        sliding = self.take("attention.key_length_swa", self.size)
        self.raw |= {"head_dim": sliding, "global_head_dim": self.size}
        self.expect("attention.value_length_swa", sliding)
        self.expect("rope.dimension_count_swa", sliding)
        width = self.take("embedding_length_per_layer_input", 0)
        self.raw |= {"hidden_size_per_layer_input": width, "vocab_size_per_layer_input": self.raw.get("vocab_size")}
        full = self.raw["rope_parameters"]["full_attention"]
        if full["rope_type"] == "longrope":  # its table: 1 for what is turned, and as good as infinite for the rest
            table = full["short_factor"]
            turned = table.count(1.0)
            self.leave_unless(table == [1.0] * turned + [table[-1]] * (len(table) - turned), "rope.dimension_count")
            share = {"partial_rotary_factor": turned / len(table), "rope_theta": full["rope_theta"]}
            self.raw["rope_parameters"]["full_attention"] = {"rope_type": "proportional", **share}


def _magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of cos and sin (https://arxiv.org/abs/2309.00071)."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * log(factor) + 1.0

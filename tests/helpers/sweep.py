"""Every type that transformers has a causal, a base or an image-text model of: built tiny, saved, and read as users do.

    swept("llama", "causal").outcome     # "certified"

Transformers alone is the judge, run on the same weights: maps are held against its own `output_attentions`, layers
against the calls of its attention interface, and what looks ahead against its own maps.

Shapes: H head, Q query, K key, T token.
"""

from __future__ import annotations

import inspect
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    ViTImageProcessorPil,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

import attnscope
from attnscope.certificate.check import check_parity
from attnscope.errors import AttnscopeError
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import DEMO_FOLDER
from attnscope.model.selection import CROSS, DECODER, DIFFERENCE, ENCODER, SEQ2SEQ, VISION, VISION_ONLY
from attnscope.model.tasks import looks_back_alone, task_of
from helpers.families import FAMILIES
from helpers.parity_models import NESTED, rouse
from helpers.shrinking import MOST, parameters, shrunk
from helpers.stack_families import BROUGHT, OVERRIDES


def _of_other_registries() -> dict[str, str]:
    """{type: class} of folders of which none of the three registries has a type, by whatever registry has one."""
    covered = {model_type_to_module_name(name) for names in NAMES.values() for name in names}
    mappings = [names for name, names in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    found = {name: kind for names in mappings for name, kind in names.items() if not str(kind).endswith("Config")}
    return {name: kind for name, kind in found.items() if model_type_to_module_name(name) not in covered}


NAMES = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "base": modeling_auto.MODEL_MAPPING_NAMES,
    "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
OTHERS = _of_other_registries()
REGISTRIES = (*NAMES, "others")
ENTRIES = sorted((name, registry) for registry, names in (NAMES | {"others": OTHERS}).items() for name in names)
TOKENS, TARGET = 12, 7
EXACT = 1e-6  # what a weight may differ by from transformers' own, under the same eager attention

CERTIFIED, READ, REFUSED, NOT_BUILT = "certified", "read", "refused", "not built"
FAULTS = ("internal error", "unequal", "layers missing", "false verdict", "grey layer", "wrong direction")

# Where transformers does otherwise than its config says, for which parity does not hold, as it should.
EAGER_HIDES = {"colpali": "Gemma's use_bidirectional_attention is read for sdpa alone: eager hides later tokens"}

# What a type needs beside small sizes: where its default config cannot be built, or not be run on a text.
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
BACKBONE = {"use_timm_backbone": False, "backbone": None, "backbone_config": {**RESNET, "out_indices": [2, 3, 4]}}
IMAGES = {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 4, "IMGIMGA": 3, "<|visual token 000000|>": 3}}
FORECAST = {"prediction_length": 4}
NEEDED: dict[str, dict[str, Any]] = {
    "autoformer": FORECAST,
    "chameleon": IMAGES,
    "cohere_compass": {"text_config": FAMILIES["cohere_compass_text"]},
    "conditional_detr": BACKBONE,
    "dab-detr": BACKBONE,
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", *["sparse"] * 3], "num_experts_per_tok": 2}},
    "deformable_detr": BACKBONE,
    "detr": BACKBONE,
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "emu3": IMAGES,
    "granite4_vision": {"deepstack_layer_map": [[0, 1]], "spatial_target_layers": [1], "downsample_rate": "1/2"},
    "hunyuan_vl": {"text_config": {"head_dim": 16}},
    "hunyuan_vl_text": {"head_dim": 16},
    "informer": FORECAST,
    "moonshine_streaming": {"num_key_value_heads": 4},
    "omdet-turbo": BACKBONE,
    "step3p7": {"text_config": {"sliding_window": 8}},
    "table-transformer": BACKBONE,
    "time_series_transformer": FORECAST,
    "unlimited_ocr": {"text_config": {"num_key_value_heads": 4}},
}


@dataclass
class Swept:
    """What became of one type in one registry.

    outcome: CERTIFIED; READ, which is equal to transformers and parity says why it has no verdict; REFUSED; NOT_BUILT;
    or one of FAULTS. why: the reason, in attnscope's or transformers' words. stage: what ran last. model: its class.
    main: what it reads first. own: the maps that transformers returns, by their name; own_error: why it returns none.
    maps: those read, by stack. calls: modules that called transformers' interface in that pass. difference: the largest
    of a weight. causal: whether none of its maps looks ahead. levels: of parity, by stack.
    """

    type: str
    registry: str
    outcome: str = ""
    why: str = ""
    stage: str = "build"
    model: str = ""
    main: str = ""
    parameters: int = 0
    own: dict[str, int] = field(default_factory=dict)
    own_error: str = ""
    maps: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    difference: float | None = None
    causal: bool | None = None
    levels: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def swept(model_type: str, registry: str) -> Swept:
    """Build, save, load, read and certify one; every way that this may end is an outcome, none is raised."""
    result = Swept(model_type, registry)
    try:
        model = _built(result)
    except Exception as error:  # any family's config and constructor
        result.outcome, result.why = NOT_BUILT, f"{type(error).__name__}: {_in_line(error)}"
        return result
    with tempfile.TemporaryDirectory() as place:
        try:
            _read(model, Path(place), result)
        except AttnscopeError as error:
            result.outcome, result.why = REFUSED, str(error).replace(place, "the model")
        except Exception as error:  # what a user would see as an internal error
            result.outcome, result.why = "internal error", f"{type(error).__name__}: {_in_line(error)}"
    return result


def tiny(model_type: str, registry: str) -> PreTrainedConfig:
    """The small config of a type, whose decoder is one where it is loaded as one. Raises what transformers raises."""
    changes = {**FAMILIES.get(model_type, {}), **NESTED.get(model_type, {}), **NEEDED.get(model_type, {})}
    if registry != "causal":
        changes = {**NEEDED.get(model_type, {}), **OVERRIDES.get(model_type, {})} or changes
    return shrunk(model_type, lambda config: _model(config, registry), **changes)


def _model(config: PreTrainedConfig, registry: str) -> Any:
    """The model that transformers makes of a config, under eager attention."""
    config.architectures = config.architectures or []  # it walks through them where a type has several base models
    if registry == "others":
        return getattr(transformers, OTHERS[config.model_type])._from_config(config, attn_implementation="eager")
    kind = {"causal": AutoModelForCausalLM, "base": AutoModel, "image-text": AutoModelForImageTextToText}[registry]
    return kind.from_config(config, attn_implementation="eager")


def _built(result: Swept) -> Any:
    config = tiny(result.type, result.registry)
    result.parameters = parameters(config, lambda config: _model(config, result.registry))
    if result.parameters > MOST:
        raise ValueError(f"no config of it is small: {result.parameters} parameters")
    torch.manual_seed(0)
    model = _model(config, result.registry).eval().requires_grad_(False)
    rouse(model)
    result.model, result.main = type(model).__name__, model.main_input_name
    return model


def _read(model: Any, place: Path, result: Swept) -> None:
    """Fill in what became of a model, read from its folder as users do: a text, or a picture where it reads none."""
    ids, target = _ids(TOKENS), _ids(TARGET, seed=1)
    source = {"input_ids": torch.tensor([ids])}
    own = _own_maps(model, source | _decoder(model, target), result)
    model.save_pretrained(place)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, place)
    if result.main == "pixel_values" or task_of(model.config) == VISION_ONLY:
        _image_processor(model.config).save_pretrained(place)
    result.stage = "load"
    loaded = attnscope.load(str(place), device="cpu")
    result.stage, main = "read", loaded.geometry.stack
    of_two = loaded.geometry.task == SEQ2SEQ
    if main == VISION:
        seen = attnscope.capture(loaded, picture=_picture(), engine="eager")
        own = _own_maps(model, seen.prompt.medium.inputs, result)
    elif of_two:
        seen = attnscope.capture(loaded, ids, engine="eager", target=target)
        own = _own_maps(model, source | _decoder(model, seen.queries.ids), result)  # a start token comes first
    else:
        seen = attnscope.capture(loaded, ids, engine="eager")
    maps = {stack: list(seen.of(stack).weights.values()) for stack in seen.stacks}
    result.maps = {stack: len(weights) for stack, weights in maps.items()}
    result.stage = "parity"
    _certify(loaded, seen, result)
    causal = looks_back_alone(loaded.model.config, main)
    result.outcome = judged(own, maps, main, result, seen.unmeasured, causal, seen.failures)
    if result.type in EAGER_HIDES and result.outcome == "wrong direction":
        result.outcome, result.why = READ, EAGER_HIDES[result.type]
    if of_two and result.outcome not in FAULTS:
        result.stage = "without a target"
        with suppress(AttnscopeError):  # a model that cannot generate says that a target has to be given
            attnscope.capture(loaded, ids, engine="eager", generate=2)
    result.stage = "done"


def _decoder(model: Any, ids: Sequence[int]) -> dict[str, Tensor]:
    """What the decoder of an encoder-decoder reads."""
    return {"decoder_input_ids": torch.tensor([ids])} if getattr(model.config, "is_encoder_decoder", False) else {}


def _image_processor(config: Any) -> Any:
    """One that makes pictures of the size that a model expects."""
    side = getattr(config, "image_size", None) or 32
    height, width = (side, side) if isinstance(side, int) else side[-2:]
    return ViTImageProcessorPil(size={"height": height, "width": width})


def _picture() -> Image.Image:
    return Image.effect_noise((48, 32), 64).convert("RGB")


def _certify(loaded: LoadedModel, seen: Any, result: Swept) -> None:
    """The levels; CERTIFIED, READ, or "false verdict", which it is where the maps are equal to transformers' own."""
    source = seen.prompt if loaded.geometry.task == SEQ2SEQ else None
    try:
        report = check_parity(loaded, seen.queries if source else seen.prompt, source=source)
    except AttnscopeError as error:
        result.outcome, result.why = READ, f"parity: {error}"
        return
    result.levels = dict(report.levels)
    result.why = "; ".join(dict.fromkeys(layer.why for layer in report.layers if layer.why))
    result.outcome = {True: CERTIFIED, False: "false verdict", None: READ}[report.verdict]


def judged(
    own: list[Tensor],
    maps: Mapping[str, list[Tensor]],
    main: str,
    result: Swept,
    unmeasured: Sequence[str] = (),
    said_causal: bool | None = None,
    failures: Sequence[str] = (),
) -> str:
    """The outcome. Every map must be one of transformers' own, in their order, and each of its own must be read.

    unmeasured: what the run says that it did not read. said_causal: what config and class say of the main stack.
    failures: of checks, as that a map of a linear layer times its values is its output.
    """
    all_maps = [weights for stack, of_stack in maps.items() if stack != DIFFERENCE for weights in of_stack]
    if result.calls > len(all_maps) and not any("layers" in line or "stack" in line for line in unmeasured):
        return "grey layer"
    shapes = {weights.shape for weights in own}
    compared = [maps[stack] for stack in (main, ENCODER, CROSS) if stack in maps]
    nearest = [[_nearest(one, own) for one in of_stack if one.shape in shapes] for of_stack in compared]
    result.difference = max((difference for of_stack in nearest for difference, _ in of_stack), default=None)
    in_order = all(places == sorted(places) for places in ([place for _, place in of_stack] for of_stack in nearest))
    if result.difference is not None and (result.difference > EXACT or not in_order):
        return "unequal"
    if any(_nearest(weights, all_maps)[0] > EXACT for weights in own):
        return "layers missing"
    if failures:
        return "unequal"
    if result.causal is not None and said_causal not in (None, result.causal):
        return "wrong direction"
    return result.outcome


def _nearest(weights: Tensor, others: list[Tensor]) -> tuple[float, int]:
    """The smallest of the largest differences to one of the others of this shape, and which that is."""
    same = [(index, other) for index, other in enumerate(others) if other.shape == weights.shape]
    return min(((float((weights - other).abs().max()), index) for index, other in same), default=(float("inf"), -1))


OWN = ("encoder_attentions", "attentions", "decoder_attentions", "cross_attentions")


def _own_maps(model: Any, inputs: Mapping[str, Any], result: Swept) -> list[Tensor]:
    """The maps (H, Q, K) that transformers itself returns, over whole texts; notes what calls, and what looks ahead."""
    names = inspect.signature(type(model).forward).parameters
    more = {"use_cache": False} if "use_cache" in names or hasattr(model.config, "use_cache") else {}
    try:
        with torch.no_grad(), _counted_calls() as calls:
            output = model(**inputs, **more, output_attentions=True)
    except Exception as error:  # any family's forward, which may want more than a text
        result.own_error = f"{type(error).__name__}: {_in_line(error)}"
        return []
    result.calls = len(set(calls))
    lengths = {ids.shape[1] for name, ids in inputs.items() if name.endswith("input_ids")}
    found = {}
    for name in OWN:
        kind = {OWN[0]: ENCODER, OWN[2]: DECODER}.get(name, name)
        if name == "attentions":
            kind = DECODER if result.registry == "causal" else ENCODER
        bring = BROUGHT.get(result.type, lambda kind, given, tokens: given)
        maps = [weights for weights in getattr(output, name, None) or () if isinstance(weights, Tensor)]
        maps = [bring(kind, weights, TOKENS)[0] for weights in maps if weights.dim() >= 4]
        found[name] = [one for one in maps if one.dim() == 3 and (not lengths or {*one.shape[-2:]} <= lengths)]
    result.own = {name: len(maps) for name, maps in found.items() if maps}
    square = [weights.triu(1) for weights in found["attentions"] if weights.shape[-2] == weights.shape[-1]]
    result.causal = not any(bool(weights.any()) for weights in square) if square else None
    return [weights for maps in found.values() for weights in maps]


@contextmanager
def _counted_calls() -> Iterator[list[nn.Module]]:
    """While open, the module of every call of transformers' attention interface is put in the list."""
    called: list[nn.Module] = []
    original = AttentionInterface.get_interface

    def get_interface(self: Any, name: Any, default: Any) -> Callable[..., Any]:
        function = original(self, name, default)

        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            called.append(module)
            return function(module, *args, **kwargs)

        return attend

    AttentionInterface.get_interface = get_interface
    try:
        yield called
    finally:
        AttentionInterface.get_interface = original


def _ids(count: int, seed: int = 0) -> list[int]:
    return [int(one) for one in torch.randint(6, 100, (count,), generator=torch.Generator().manual_seed(seed))]


def _in_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:300]

"""What the oracle expects of one attention call: from raw weights (`full`), or from q, k and v (`scores`).

The one place that turns a model's run into the oracle's inputs: the module's raw weights, projections with LoRA next to
them as the one matrix that they amount to, what entered the module, and how the tokens of a text with pictures are
arranged. Parity and explain both read layers through it.

Shapes: B text, T token, H head, G kv head, Q query, K key, D head dim, V width of v, E model width, O width out, I
width in, R rank, A axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.modules import ModuleRun
from attnscope.inputs.prompt import Patch
from attnscope.model.geometry import window_side
from attnscope.model.loaded import weights_of
from attnscope.model.modules import is_prefix
from attnscope.model.selection import CROSSING, DECODER, VISION, is_cross
from attnscope.reference.attention import apply_mask, attention_logits, attention_output, logit_terms, softmax
from attnscope.reference.layouts import UNREAD, UNREAD_ENCODERS, UNREAD_TOWERS, Layout
from attnscope.reference.masks import BLOCKS, PLACES, grid_positions, mixed_positions, windows
from attnscope.reference.projections import LayerInputs, UnreadableError
from attnscope.reference.reader import Reading, read


def adapted(module: nn.Module, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """A module's parameters under the names that they have without adapters: W + s B A (Hu et al. 2021, section 4.1).

    Raises UnreadableError for an adapter that is something else than this.

    >>> adapted(attention, {"q_proj.base_layer.weight": W, "q_proj.lora_A.default.weight": A, ...}).keys()
    dict_keys(['q_proj.weight', ...])
    """
    layers = {path: part for path, part in module.named_modules() if path and hasattr(part, "base_layer")}
    for path, layer in layers.items():
        inside = {name: parameters[name] for name in parameters if name.startswith(f"{path}.")}
        parameters = {name: matrix for name, matrix in parameters.items() if name not in inside}
        parameters |= {
            name.replace(".base_layer.", "."): matrix for name, matrix in inside.items() if ".base_layer." in name
        }
        # What each adapter adds to the projection's weight, (O, I), or (I, O) where the layer keeps it so.
        for name in [] if layer.merged or layer.disable_adapters else layer.active_adapters:
            own = {key for key in inside if ".base_layer." not in key and name in key.split(".")}
            if not own:  # it leaves this projection alone
                continue
            A, B = f"{path}.lora_A.{name}.weight", f"{path}.lora_B.{name}.weight"
            if own != {A, B} or name in layer.lora_variant:
                raise UnreadableError(f"{path} has an adapter that is not a plain LoRA")
            change_OI = layer.scaling[name] * (inside[B] @ inside[A])
            change = change_OI.T if layer.fan_in_fan_out else change_OI
            parameters[f"{path}.weight"] = parameters[f"{path}.weight"] + change
    return parameters


@dataclass(frozen=True)
class Arrangement:
    """How the tokens of a stack are arranged, where their order does not say it.

    axes_AT: their positions on several axes. block_T: the block of each, as of `reference.projections.LayerInputs`;
    window_T: the same in the layers that attend in windows. unknown: what the oracle does not know of them, "" where it
    knows all.
    """

    axes_AT: Tensor | None = None
    block_T: Tensor | None = None
    window_T: Tensor | None = None
    unknown: str = ""

    def blocks(self, layer: Any) -> Tensor | None:
        """The blocks of a layer's tokens."""
        return self.window_T if layer.type == "windowed" else self.block_T


PLAIN = Arrangement()


def arrangements_of(config: Any, ids: Sequence[int], inputs: Mapping[str, Tensor]) -> dict[str, Arrangement]:
    """How decoder and vision tower arrange what they were given, and patches their bytes; nothing of a text alone.

    config: the model's. inputs: the arguments of its forward with the ids.

    >>> arrangements_of(model.config, prompt.ids, {"image_grid_thw": torch.tensor([[1, 4, 6]])})["vision"].axes_AT.shape
    torch.Size([2, 24])
    """
    result = dict.fromkeys(CROSSING, Arrangement(unknown="which bytes a patch has, its entropy model says"))
    if "image_grid_thw" in inputs:
        try:
            grids = [tuple(grid) for grid in inputs["image_grid_thw"].tolist()]
            merge = config.vision_config.spatial_merge_size
            image_T = [token == config.image_token_id for token in ids]
            sides = [(rows // merge, columns // merge) for _, rows, columns in grids]
            decoder = Arrangement(mixed_positions(image_T, sides))
            result |= {DECODER: decoder, VISION: _tower(config.vision_config, grids)}
        except (RuntimeError, ValueError, TypeError, AttributeError):  # a family that means something else by them
            result |= dict.fromkeys((DECODER, VISION), Arrangement(unknown="its pictures' sizes do not fit its tokens"))
    if "token_type_ids" in inputs:
        result[DECODER] = Arrangement(
            unknown="some tokens see each other, which the oracle takes from the model's own mask"
        )
        if config.model_type in BLOCKS:
            result[DECODER] = Arrangement(block_T=BLOCKS[config.model_type](inputs["token_type_ids"][0].cpu()))
    if not inputs.get("pixel_attention_mask", torch.ones(1)).all():
        result[VISION] = Arrangement(unknown="its tiles have padding, which the oracle takes from the model's mask")
    return result


def of_picture(config: Any, tokens: int, patches: Mapping[int, Patch]) -> Arrangement:
    """How the tokens of a picture alone are arranged; those that are no patch do not turn, as at place 0.

    >>> of_picture(DINOv3ViTConfig(), 5, {1: patch, 2: patch, 3: patch, 4: patch}).axes_AT.shape
    torch.Size([2, 5])
    """
    places, boxes = PLACES.get(config.model_type), [patch.box for patch in patches.values() if patch.box]
    if places is None:
        return PLAIN
    axes_AT, order = torch.zeros(2, tokens), [box[1::-1] for box in boxes]  # top and left edge
    rows, columns = (sorted(set(edges)) for edges in zip(*order, strict=True))
    numbers = [rows.index(top) * len(columns) + columns.index(left) for top, left in order]
    axes_AT[:, list(patches)] = places(len(rows), len(columns))[:, numbers]
    return Arrangement(axes_AT)


def _tower(config: Any, grids: Sequence[tuple[int, int, int]]) -> Arrangement:
    """The patches of all pictures in a tower's order; each picture is a block, each window one too."""
    axes, blocks, in_windows = [], [], []
    side, merge = window_side(config), config.spatial_merge_size
    for number, (frames, rows, columns) in enumerate(grids):
        axes_2T = grid_positions(rows, columns, merge)
        if side:
            order_T, window_T = windows(axes_2T, side)
            axes_2T = axes_2T[:, order_T]
            in_windows.append(window_T)
        axes += [axes_2T] * frames
        blocks.append(torch.full((rows * columns,), number).repeat(frames))
    starts = accumulate((int(window_T.max()) + 1 for window_T in in_windows), initial=0)
    apart = [start + window_T for start, window_T in zip(starts, in_windows, strict=False)]
    return Arrangement(torch.cat(axes, 1), torch.cat(blocks), torch.cat(apart) if side else None)


def layer_inputs_of(
    run: ModuleRun,
    layout: Layout,
    config: Any,
    layer: Any,
    device: str | None = None,
    arrangement: Arrangement = PLAIN,
) -> LayerInputs:
    """A run's raw parameters, and what entered its module, in the oracle's precision.

    config: the model's (the text part). layer: index, heads, kv_heads, type and window of the layer. device: where the
    oracle computes, the module's own device where it is None. arrangement: of the tokens of a text with pictures.
    Raises UnreadableError for a module that attends more than once or outside its own forward, where its weights are
    offloaded to where no one finds them, where an adapter changes them in another way than LoRA or brings keys and
    values, and in cross-attention where the encoder's states did not come by a known name.

    >>> layer_inputs_of(run, layout, config, layer).hidden_BTE.dtype
    torch.float64
    """
    if len(run.calls) > 1 or run.output_BTE is None:
        raise UnreadableError("its module attends more than once, or outside its own forward")
    if any(map(is_prefix, run.arguments.values())):
        raise UnreadableError("its first keys and values are an adapter's, which no hidden states have made")
    # The module's own; and a table of positions that only the stack's first layer has, as T5's layers share it.
    parameters = weights_of(run.module)
    if layout.table and layout.table not in parameters and run.first is not None:
        parameters |= {name: values for name, values in weights_of(run.first).items() if name == layout.table}
    if any(parameter.is_meta for parameter in parameters.values()):
        raise UnreadableError("its weights are offloaded")
    hidden_BTE, source_BSE = precise(run.hidden_BTE, device), run.source_BSE
    if is_cross(run.stack) and source_BSE is None:
        raise UnreadableError("its module is given the encoder's states in a way of its own")
    # k and v (B, G, T, D) of an earlier layer, where the module has no projection of its own for them.
    states, own = run.arguments.get("shared_kv_states"), any(name.startswith("k_proj.") for name in parameters)
    shared = None if states is None or own else states[config.layer_types[layer.index]]
    # All of it in the oracle's precision, so that its own rounding is no part of a difference.
    return LayerInputs(
        layout=layout,
        parameters=adapted(run.module, {name: precise(matrix, device) for name, matrix in parameters.items()}),
        config=config,
        layer=layer,
        hidden_BTE=hidden_BTE,
        position_T=torch.arange(hidden_BTE.shape[1], device=hidden_BTE.device),
        arguments={
            name: precise(value, device)
            for name, value in run.arguments.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        },
        shared=None if shared is None else (precise(shared[0], device), precise(shared[1], device)),
        model_dtype=run.model_dtype,
        stack=run.stack,
        source_BSE=None if source_BSE is None else precise(source_BSE, device),
        axes_AT=_to(hidden_BTE, arrangement.axes_AT),
        block_T=_to(hidden_BTE, arrangement.blocks(layer)),
    )


def _to(hidden_BTE: Tensor, of_tokens: Tensor | None) -> Tensor | None:
    """Numbers of tokens where the hidden states are. Raises UnreadableError for another number of tokens."""
    if of_tokens is not None and of_tokens.shape[-1] != hidden_BTE.shape[1]:
        what = f"{of_tokens.shape[-1]} tokens by the pictures' sizes, {hidden_BTE.shape[1]} in its module"
        raise UnreadableError(f"its tokens are not arranged as expected: {what}")
    return None if of_tokens is None else of_tokens.to(hidden_BTE.device)


def precise(x: Tensor, device: str | None = None) -> Tensor:
    """The oracle's own rounding stays out of the difference: float64, where the device has it.

    >>> precise(torch.ones(1)).dtype
    torch.float64
    """
    x = x.detach() if device is None else x.detach().to(device)
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def mask_of(call: AttentionCall, device: str | None = None) -> Tensor:
    """The call's mask, boolean or to be added, (B or 1, H or 1, Q, K): the model's own, or what its rule says."""
    visible = call.visible
    mask = visible.rows(0, visible.queries) if visible.mask is None else visible.mask[..., : visible.keys]
    return mask.to(device) if mask.dtype == torch.bool else precise(mask, device)


@dataclass(frozen=True)
class Expected(Reading):
    """What the oracle says one call should be, and what the model's output is.

    output_BTE, model_output_BTE: of the module where it is read in full, else of its heads, side by side.
    """

    model_output_BTE: Tensor


def from_weights(
    run: ModuleRun, layout: Layout | None, config: Any, layer: Any, arrangement: Arrangement = PLAIN
) -> Expected:
    """Weights and the module's output, from the hidden states that entered the module and its raw weights.

    Raises UnreadableError where the layer cannot be read so, or comes out in another shape than the model's.
    """
    if layout is None or layer is None:
        reasons = {**UNREAD, **UNREAD_ENCODERS, **UNREAD_TOWERS}
        raise UnreadableError(reasons.get(config.model_type, f"no layout is known for {config.model_type}"))
    if arrangement.unknown:
        raise UnreadableError(arrangement.unknown)
    reading = read(layer_inputs_of(run, layout, config, layer, arrangement=arrangement))
    _same_shape("weights", reading.weights_BHQK, run.calls[0].weights_BHQK)
    _same_shape("output", reading.output_BTE, run.output_BTE)
    assert run.output_BTE is not None
    return Expected(**vars(reading), model_output_BTE=run.output_BTE)


def from_call(call: AttentionCall) -> Expected | None:
    """Weights and the heads' output, from what the model passed to its attention; None where it was not observed."""
    spec = call.spec
    if spec is None or call.output_BQHV is None:
        return None
    bias, mask = None if spec.bias is None else precise(spec.bias), mask_of(call)
    q, k, v = (precise(x) for x in (spec.q_BHQD, spec.k_BGKD, spec.v_BGKV))
    logits = partial(attention_logits, q, k, scale=spec.scale, softcap=spec.softcap, bias=bias)
    logits_BHQK = apply_mask(logits(), mask)
    # The sinks (B, H, Q) are one more key, whose weight is left out.
    with_sinks_BHQK = weights_BHQK = softmax(logits_BHQK)
    if spec.sinks is not None:
        sink_BHQ1 = spec.sinks[..., None].to(logits_BHQK).expand(*logits_BHQK.shape[:-1], 1)
        with_sinks_BHQK = softmax(torch.cat([logits_BHQK, sink_BHQ1], dim=-1))[..., :-1]
    weights_BHQK = weights_BHQK if spec.sinks_scale_output else with_sinks_BHQK
    share_BHQ1 = with_sinks_BHQK.sum(-1, keepdim=True) if spec.sinks_scale_output else torch.ones(()).to(q)
    visible = call.visible.rows(0, call.visible.queries)
    if mask.dtype != torch.bool:  # what it adds to a visible key is a term of the logit
        bias = (0 if bias is None else bias) + mask.where(visible, 0.0)

    def output(weights_BHQK: Tensor) -> Tensor:
        return attention_output(weights_BHQK, v).transpose(1, 2).flatten(2)

    return Expected(
        weights_BHQK,
        visible,
        v,
        output(with_sinks_BHQK),
        output_of=lambda others_BHQK: output(others_BHQK * share_BHQ1),
        logits=logits,
        terms=lambda: logit_terms(q, k, scale=spec.scale, bias=bias, mask=visible, sinks=spec.sinks),
        model_output_BTE=call.output_BQHV.flatten(2),
    )


def dtype_of(call: AttentionCall) -> torch.dtype | None:
    """The dtype of the q that the model passed to its attention; None where it was not observed."""
    return None if call.spec is None else call.spec.q_BHQD.dtype


def _same_shape(name: str, ours: Tensor, theirs: Tensor | None) -> None:
    if theirs is not None and ours.shape != theirs.shape:
        raise UnreadableError(f"its layout gives {name} {tuple(ours.shape)}, the model {tuple(theirs.shape)}")

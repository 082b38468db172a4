"""The library in three lines: load a model, capture a text, read the numbers; or those of tensors that you have.

Several texts through one model, in padded passes: an observation each, as if each were read alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import torch
from torch.overrides import has_torch_function

from attnscope.api.captured import Capture
from attnscope.attention.spec import AttentionSpec, by_place
from attnscope.corpus.item_requests import KERNEL, KERNEL_TOKENS, batch_limit, batches
from attnscope.errors import AttnscopeError, InputError, UnknownOptionError, UsageError, brief, hints_of, nearest
from attnscope.hooks.engines import Engine, engine_named
from attnscope.inputs.sound import sound_of
from attnscope.model.libraries import without_bars
from attnscope.model.loaded import LoadedModel, LoadedModule, check_loaded, pads
from attnscope.model.loading import load as load_model
from attnscope.model.options import LoadOptions
from attnscope.model.selection import SEQ2SEQ
from attnscope.observe.collect import observe
from attnscope.observe.collectors.entries import drawn_whole
from attnscope.observe.engine_choice import FASTER_SCORES, kernel_reads
from attnscope.observe.observation import Observation
from attnscope.observe.request import CaptureOptions, CaptureSpec, Request, TextInputs, View
from attnscope.observe.run import Run, prepare, read
from attnscope.utils.schema import takes_fields

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.inputs.tensors import GivenTensors
    from attnscope.observe.request import Text

T = TypeVar("T")
NamedTokens = tuple[str | int | None, str | int | None, Mapping[str, str] | None]  # query, key, define
NO_TOKENS: NamedTokens = (None, None, None)


def read_texts(loaded: LoadedModel, asks: Sequence[CaptureSpec]) -> list[Observation]:
    """What is asked of each text, in order; texts of like length are read in one pass, within what memory allows.

    The asks differ in their text alone. Raises as `run.read`, which reads those that need a pass of their own; an error
    names the text.

        >>> read_texts(load(), [CaptureSpec("the bank"), CaptureSpec("the river bank")])
    """
    first = asks[0]
    alone = first.verify or first.keep.rollout or first.keep.operands or first.generate
    if len(asks) == 1 or alone or loaded.geometry.task == SEQ2SEQ or loaded.geometry.over_patches:
        return _each(asks, partial(read, loaded))
    runs = _each(asks, lambda ask: prepare(loaded, ask, compared=ask is first))
    # What keeps a text apart from others: its engine, its length where padding is not exact, its own inputs or map.
    apart = []
    for at, run in enumerate(runs):
        medium, text = run.prompt.medium, TextInputs(run.prompt, run.chosen)
        binned = run.request.maps is not None and not drawn_whole(text, run.request)
        own = at if binned or medium.inputs or medium.unasked else -1
        apart.append((run.engine.name, len(run.prompt) * (not pads(loaded.model)), own))
    # Many short texts are read as those of a corpus: by the kernel where it answers all, in larger batches.
    observations: dict[int, Observation] = {}
    scores = sum(len(run.prompt) ** 2 for run in runs) * sum(layer.heads for layer in loaded.geometry.attention_layers)
    quick = first.engine == "auto" and scores >= FASTER_SCORES and kernel_reads(loaded, runs[0].request)
    limit = batch_limit(loaded) * (KERNEL_TOKENS if quick else 1)
    groups = batches([len(run.prompt) for run in runs], limit, apart)

    def together(replica: LoadedModel, group: Sequence[int]) -> list[Observation]:
        engine = engine_named(KERNEL) if quick else runs[group[0]].engine
        own = [replace(run.loaded, model=replica.model) for run in (runs[place] for place in group)]
        return _together([replace(runs[place], loaded=of) for place, of in zip(group, own, strict=True)], engine)

    # The kernel's passes run side by side, each on one core, where the model is as it was loaded.
    if quick and not _observed_by_others(loaded):
        from attnscope.corpus.worker import Replicas  # with Arrow, which one text needs after its pass alone

        parts = Replicas(loaded).each(together, groups, lambda: False) or []
    else:
        parts = [together(loaded, group) for group in groups]
    for group, part in zip(groups, parts, strict=True):
        observations |= dict(zip(group, part, strict=True))
    return [observations[place] for place in range(len(runs))]


def _observed_by_others(loaded: LoadedModel) -> bool:
    """Whether a copy of the model in another thread would be something else: somebody made it or hooked it, or the
    caller's thread casts or listens."""
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in loaded.model.modules())
    listens = has_torch_function((torch.empty(0),))
    return loaded.options is None or hooked or listens or torch.is_autocast_enabled(loaded.device.partition(":")[0])


def _each(asks: Sequence[CaptureSpec], work: Callable[[CaptureSpec], T]) -> list[T]:
    """`work` on every ask; an error that is about one text of the list names it, as `text[3]`."""
    results: list[T] = []
    for place, ask in enumerate(asks):
        try:
            results.append(work(ask))
        except AttnscopeError as error:
            if place or isinstance(error, InputError):  # what fails with the first text may be about all of them
                error.message = f"text[{place}]: {error.message}"
                error.args = (error.message, error.hint)
            raise
    return results


def _together(runs: Sequence[Run], engine: Engine) -> list[Observation]:
    """One pass over texts that may be read side by side; what does not hold there is read text by text."""
    if len(runs) == 1:
        return [runs[0].observe()]
    one = runs[0]
    prompts, chosen = [run.prompt for run in runs], [run.chosen for run in runs]
    observations = observe(one.loaded, prompts, one.request, engine=engine, chosen=chosen)
    if observations[0].failures:
        return [run.observe() for run in runs]
    pairs = zip(observations, runs, strict=True)
    return [replace(of.named(run.named_by), facts={**of.facts, **run.facts}, ask=run.ask) for of, run in pairs]


@hints_of(LoadOptions)
@takes_fields(LoadOptions)
def load(options: LoadOptions) -> LoadedModel:
    """Load a model with its tokenizer: the embedded `demo`, a folder, an adapter's too, a GGUF file, or a hub id.

    options: the other fields of `attnscope.model.options.LoadOptions` (device, dtype, revision, offline, ...). Raises
    ModelError when it cannot be found or read, UsageError for an option that does not exist.

        >>> model = attnscope.load("demo", device="cpu")
    """
    with without_bars():
        return load_model(options)


@overload
def capture(  # type: ignore[overload-overlap]  # a str is a sequence of them, and is one text
    model: LoadedModel,
    text: Text | None = None,
    layers: Sequence[int] | None = None,
    *,
    request: Request | None = None,
    query: str | int | None = None,
    key: str | int | None = None,
    define: Mapping[str, str] | None = None,
    audio: Any = None,
    **how: Unpack[CaptureOptions],
) -> Capture: ...
@overload
def capture(
    model: LoadedModel,
    text: Sequence[str] | Sequence[Prompt] | Sequence[Sequence[int]] | Sequence[tuple[str, str]],
    layers: Sequence[int] | None = None,
    *,
    request: Request | None = None,
    query: str | int | None = None,
    key: str | int | None = None,
    define: Mapping[str, str] | None = None,
    audio: None = None,
    **how: Unpack[CaptureOptions],
) -> list[Capture]: ...
@hints_of(CaptureOptions, Request, View, LoadOptions)
def capture(
    model: LoadedModel,
    text: Any = None,
    layers: Sequence[int] | None = None,
    *,
    request: Request | None = None,
    query: str | int | None = None,
    key: str | int | None = None,
    define: Mapping[str, str] | None = None,
    audio: Any = None,
    **how: Unpack[CaptureOptions],
) -> Capture | list[Capture]:
    """One forward pass over one text: every head's weights, scores, role, relations and map.

    text: the text, a Prompt, or token ids; or a list of them, which padded passes read side by side: then a list of
    captures, each as if its text were read alone; ("a text", "its second") in such a list is a pair. layers: of which
    relations, maps and matrices are kept, None for all. request: what to keep, where that is less or more. query, key:
    the tokens that are asked about, as "last" or "Mary": metrics are means over the queries, and each head has a `mass`
    on the keys; define: names for such expressions.
    audio: instead of a text, for a model of sound: a file, or (samples, rate).

    how: the other fields of `CaptureSpec`: engine, memory, listen, verify, select, atlas, chat, truncate,
    generate, answer, target, picture, pair. With an answer `prompt`, `answer` and `made` name tokens, and each head has
    its `lookback`. Of a pair `text` and `pair` name the tokens of each. The tokens of a picture are `img 3,7`, row and
    column, and `img` names them all; `beside["vision"]` has the vision tower's layers.

    Returns a Capture, which is an Observation with its ways out: `weights[layer]` is (H, Q, K) fp32 on the CPU; `heads`
    has one entry per head; `prompt` the tokens. Raises InputError for a text that does not fit the model,
    MemoryLimitError for one that does not fit the memory, UsageError for what cannot be meant.

        >>> seen = attnscope.capture(model, "the financial bank is located on river bank")
        >>> seen.weights[0].shape
    """
    if text is None and audio is None and how.get("picture") is not None:
        text = ""  # a vision tower reads a picture alone
    if (text is None) == (audio is None):
        raise UsageError("expected one text, or one sound", "give a text, or {audio=FILE}")
    # What is no model of transformers is read by what it asks of PyTorch.
    if isinstance(model, LoadedModule):
        from attnscope.observe.any_module import hear

        if layers is not None:
            if request is not None or how.get("select") is not None:
                raise UsageError("layers and heads were both given", "choose heads with {select=1.*} instead")
            how = {**how, "select": ",".join(f"{layer}.*" for layer in layers)}
        keep = kept(None, request, (query, key, define), how)
        several = isinstance(text, list) and bool(text) and all(isinstance(item, str) for item in text)
        asks = [CaptureSpec(item, keep, **how) for item in (text if several else [text])]
        seen = [Capture.made_of(hear(model, ask).observe(ask)) for ask in asks]
        return seen if several else seen[0]
    check_loaded(model)
    heads, geometry = None, model.geometry
    if layers is not None:
        there, kind = geometry.heads_of_stacks[geometry.numbered], " with attention" * any(geometry.stacks.values())
        for layer in layers:
            if layer not in there:
                hint = f"there are {', '.join(map(str, there))}"
                if layer in geometry.mixing:
                    hint += f"; its map is {{select={geometry.mixing[layer][0]}.{layer}}}"
                raise UsageError(f"there is no layer {layer}{kind}", hint)
        heads = {layer: range(there[layer]) for layer in layers}
    keep = kept(heads, request, (query, key, define), how)
    if is_several(text):
        return [Capture.made_of(one) for one in read_texts(model, [_ask(item, keep, how) for item in text])]
    return Capture.made_of(read(model, CaptureSpec(sound_of(audio) if text is None else text, keep, **how)))


@hints_of()
def from_weights(
    weights: Any,
    tokens: Any = None,
    *,
    query_tokens: Any = None,
    tokenizer: Any = None,
    model: str | None = None,
    kv_heads: int | None = None,
    sink_logits: bool | None = None,
    attention_mask: Any = None,
    query_attention_mask: Any = None,
    mask: Any = None,
    query_positions: Any = None,
    request: Request | None = None,
    query: str | int | None = None,
    key: str | int | None = None,
    define: Mapping[str, str] | None = None,
    select: str | None = None,
) -> Capture:
    """Attention matrices of any model, as what `capture` returns: tables, pictures and page, marked as not verified.

    weights: after the softmax, an array (heads, queries, keys) for each layer, as `output_attentions=True` gives them,
    or one array (layers, heads, queries, keys), of numpy or torch, in any float dtype; {layer: array} where others have
    none. Or the path of an npz or safetensors file, which has the tokens too, see `save_weights`. tokens: strings, or
    ids with their tokenizer. query_tokens: those of the queries in cross-attention. Of an encoder-decoder, weights is
    {"encoder": ..., "decoder": ..., "cross": ...}, tokens the text, and query_tokens the target.

    model: a name for captions. kv_heads: how many a layer has; null without it. sink_logits: rows may sum to less than
    1. attention_mask, query_attention_mask: 0 for tokens of padding, as tokenizers give it. query_positions: the last
    tokens, where these alone have queries. request, query, key, define, select: as of `capture`.

    Which keys a query sees is read off the weights, where those in some head are the keys of a mask: causal, a window,
    chunks, a prefix. Elsewhere it is not known, unless mask says it: "causal", or an array (queries, keys).

    Raises InputError for shapes that do not fit, and for a row that does not sum to 1 within what its dtype allows;
    UsageError for what only the model can tell.

        >>> seen = attnscope.from_weights(model(ids, output_attentions=True).attentions, ["the", "bank"])
        >>> seen.page().save("bank.html")
    """
    masks = {"attention_mask": attention_mask, "query_attention_mask": query_attention_mask, "mask": mask}
    axes = {"query_tokens": query_tokens, "tokenizer": tokenizer, "query_positions": query_positions}
    given = _given(weights, tokens, masks, **axes, kv_heads=kv_heads)
    sinks = given.sink_logits if sink_logits is None else sink_logits
    given = replace(given, name=model or given.name, sink_logits=sinks)
    return _observed(given, kept(None, request, (query, key, define), {}), select)


@hints_of()
def from_tensors(
    layers: Any,
    tokens: Any = None,
    *,
    query_tokens: Any = None,
    tokenizer: Any = None,
    model: str | None = None,
    attention_mask: Any = None,
    query_attention_mask: Any = None,
    query_positions: Any = None,
    request: Request | None = None,
    query: str | int | None = None,
    key: str | int | None = None,
    define: Mapping[str, str] | None = None,
    select: str | None = None,
) -> Capture:
    """Attention of any runtime from its q and k, as what `capture` returns: marked as not verified.

    layers: for each layer {"q": (heads, queries, width), "k": (kv heads, keys, width), "scale": number, ...}, in a list
    or as {layer: ...}; or `call.spec` of `attnscope.listen`; or finished weights, as of `from_weights`. q and k are
    those after position encoding. Other names: v; output, P V before the output projection, which is compared; mask,
    boolean or added to the logits, or window or chunk; causal; softcap; bias; sinks; key_positions. Or the path of a
    file, see `save_tensors`.

    query_positions: the last tokens, where these alone have queries, as in a step of decoding. The other arguments are
    those of `from_weights`. With `view=View(weights="scores")` entries are logits, with "value" norms of v.

    Raises InputError for shapes that do not fit and for numbers that are not finite, UsageError for what only the model
    can tell.

        >>> seen = attnscope.from_tensors([{"q": q, "k": k, "scale": 0.125}], ["the", "bank"])
        >>> seen.table("focus")
    """
    masks = {"attention_mask": attention_mask, "query_attention_mask": query_attention_mask}
    axes = {"query_tokens": query_tokens, "tokenizer": tokenizer, "query_positions": query_positions}
    given = _given(layers, tokens, masks, **axes)
    return _observed(replace(given, name=model or given.name), kept(None, request, (query, key, define), {}), select)


def _given(layers: Any, tokens: Any, masks: Mapping[str, Any], **axes: Any) -> GivenTensors:
    """Layers from Python, or from a file. Raises UsageError for an argument that a file has of its own."""
    from attnscope.inputs.tensor_files import read_tensors
    from attnscope.inputs.tensors import tensors_of

    if isinstance(layers, str | os.PathLike):
        # A file has tokens and names of its own, which an argument would contradict.
        own = {"tokens": tokens, **axes, **masks}
        other = next((name for name, value in own.items() if value is not None), None)
        if other is not None:
            raise UsageError(f"a file of weights has its own {other}", f"leave out {{{other}}}")
        return read_tensors(Path(layers))
    if tokens is None:
        raise UsageError("expected the tokens of the weights", "give {tokens} as a list of strings")
    return tensors_of(_without_specs(layers), tokens, masks=masks, **axes)


def _observed(given: GivenTensors, keep: Request, select: str | None) -> Capture:
    from attnscope.observe.tensors import observe_tensors

    # A request as of a text: the same collectors read these layers.
    return Capture.made_of(observe_tensors(given, CaptureSpec("", keep, select=select)))


def _without_specs(layers: Any) -> Any:
    """The layers with calls that were listened to as their arrays and numbers by name."""
    if isinstance(layers, AttentionSpec):
        return _parts_of(layers)
    if isinstance(layers, Mapping):
        return {name: _without_specs(layer) for name, layer in layers.items()}
    return [_without_specs(layer) for layer in layers] if isinstance(layers, list | tuple) else layers


def _parts_of(spec: AttentionSpec) -> dict[str, Any]:
    """The arrays and numbers of a call over one text. Raises InputError for one of several."""
    if spec.batch != 1:
        raise InputError(f"the call is of {spec.batch} texts, expected one", "give spec.first_texts(1)")
    visible, bias = spec.visible, spec.bias
    if visible.mask is not None:  # a causal mask is left out, and its window is one number
        visible = by_place(visible, [None, int(visible.rows(visible.queries - 1, visible.queries).sum(-1).max())])
    mask = visible.as_mask
    parts = {"q": spec.q_BHQD, "k": spec.k_BGKD, "v": spec.v_BGKV, "scale": spec.scale, "softcap": spec.softcap}
    if mask is None:
        parts |= {"causal": int(visible.causal), "window": visible.window}
    else:
        parts["mask"] = mask[..., : visible.keys].expand(-1, -1, visible.queries, -1)
    if bias is not None:
        parts["bias"] = bias[..., : visible.keys].expand(-1, -1, visible.queries, visible.keys)
    if spec.sinks is not None:
        sinks = spec.sinks[0]
        parts |= {"sinks": sinks[:, 0] if sinks.shape[-1] == 1 else sinks}
        parts["sinks_scale_output"] = int(spec.sinks_scale_output)
    return parts


@hints_of()
def save_weights(
    path: str | Path,
    weights: Any,
    tokens: Any,
    *,
    query_tokens: Any = None,
    tokenizer: Any = None,
    model: str | None = None,
    kv_heads: int | None = None,
    sink_logits: bool = False,
    attention_mask: Any = None,
    query_attention_mask: Any = None,
    mask: Any = None,
    query_positions: Any = None,
) -> Path:
    """Write attention matrices and their tokens to an npz or safetensors file, which `heads --tensors` reads.

    The arguments are those of `from_weights`. npz has `layer.0`, ... and `tokens_utf8`, a JSON list; in safetensors the
    tokens are metadata. Raises as `from_weights` for shapes, UsageError for another suffix.

        >>> attnscope.save_weights("bank.npz", attentions, tokenizer.convert_ids_to_tokens(ids[0]), model="my-model")
    """
    masks = {"attention_mask": attention_mask, "query_attention_mask": query_attention_mask, "mask": mask}
    axes = {"query_tokens": query_tokens, "tokenizer": tokenizer, "query_positions": query_positions}
    return _saved(path, weights, tokens, masks, model, sink_logits, kv_heads=kv_heads, **axes)


@hints_of()
def save_tensors(
    path: str | Path,
    layers: Any,
    tokens: Any,
    *,
    query_tokens: Any = None,
    tokenizer: Any = None,
    model: str | None = None,
    attention_mask: Any = None,
    query_attention_mask: Any = None,
    query_positions: Any = None,
) -> Path:
    """Write q and k of layers and their tokens to a safetensors or npz file, which `heads --tensors` reads.

    The arguments are those of `from_tensors`; docs/tensors.md has the names in the file. Raises as `from_tensors` for
    shapes, UsageError for another suffix.

        >>> calls = {}
        >>> attnscope.listen(model.model, ids, lambda call: calls.setdefault(call.layer, call.spec))
        >>> attnscope.save_tensors("calls.safetensors", calls, model.tokenizer.convert_ids_to_tokens(ids[0]))
    """
    masks = {"attention_mask": attention_mask, "query_attention_mask": query_attention_mask}
    axes = {"query_tokens": query_tokens, "tokenizer": tokenizer, "query_positions": query_positions}
    return _saved(path, layers, tokens, masks, model, False, **axes)


def _saved(
    path: str | Path, layers: Any, tokens: Any, masks: Mapping[str, Any], model: str | None, sinks: bool, **axes: Any
) -> Path:
    from attnscope.inputs.tensor_files import save_tensors
    from attnscope.inputs.tensors import tensors_of

    given = tensors_of(_without_specs(layers), tokens, masks=masks, **axes)
    return save_tensors(path, replace(given, name=model, sink_logits=sinks))


def _ask(text: Any, keep: Request, how: CaptureOptions) -> CaptureSpec:
    """What is asked of one of several texts, or of a pair of them."""
    if isinstance(text, tuple | list) and len(text) == 2 and all(isinstance(item, str) for item in text):
        return replace(CaptureSpec(text[0], keep, **how), pair=text[1])
    return CaptureSpec(text, keep, **how)


def kept(
    heads: Mapping[int, Sequence[int]] | None, request: Request | None, tokens: NamedTokens, how: CaptureOptions
) -> Request:
    """What `capture` keeps; heads: of the layers that were named. Raises UsageError for what cannot be meant."""
    unknown = next((name for name in how if name not in CaptureOptions.__annotations__), None)
    if unknown is not None:
        raise UnknownOptionError(f"capture has no option {unknown!r}", _instead(unknown, dict(how)[unknown]))
    if request is None:
        of_pictures = how.get("picture") is not None
        request = Request(view=View(heads=heads), relations=True, maps="kept", weights=True, per_token=of_pictures)
    elif heads is not None:
        raise UsageError("layers and request were both given", "choose heads with {select=1.*} instead")
    if not isinstance(request, Request):
        raise UsageError(f"expected a Request, got {brief(request)}", "give attnscope.Request(weights=True)")
    *sides, define = tokens
    named: dict[str, Any] = {name: str(of) for name, of in zip(("query", "key"), sides, strict=True) if of is not None}
    return replace(request, **named | ({} if define is None else {"define": define}))


def _instead(name: str, value: object) -> str:
    """What takes an option that `capture` lacks: one of its records, or `load`; else the options that it has."""
    own = ("layers", "request", "query", "key", "define", "audio", *CaptureOptions.__annotations__)
    view, request, loading = ([option.name for option in fields(record)] for record in (View, Request, LoadOptions))
    given = f'{name}="{value}"' if isinstance(value, str) and value.isidentifier() else f"{name}=..."
    if name in view and (name not in request or isinstance(value, str)):  # entries to be read, or whole matrices
        return f"ask for request=Request(view=View({given}), relations=True)"
    if name in request:
        return f"ask for request=Request({given})"
    if name in loading:
        return f"give it to attnscope.load(MODEL, {given})"
    alike = nearest(name, [*own, *view, *request, *loading])
    return f"it has {', '.join(own)}" if alike is None or alike in own else _instead(alike, value)


def is_several(text: Any) -> bool:
    """Whether a list of texts was given, not one as token ids."""
    return isinstance(text, list | tuple) and bool(text) and not any(isinstance(item, int) for item in text)

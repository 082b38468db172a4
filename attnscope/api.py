"""The library in three lines: load a model, capture a text, read the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnscope.errors import UsageError
from attnscope.face import Capture
from attnscope.keep.view import View
from attnscope.media.picture import Given
from attnscope.media.sound import sound_of
from attnscope.model.libraries import without_bars
from attnscope.model.loading import LoadedModel
from attnscope.model.loading import load as load_model
from attnscope.model.options import LoadOptions
from attnscope.observe import Request
from attnscope.run import Text, read
from attnscope.study.atlas.atlas import Atlas
from attnscope.text.prompt import Side


def load(model: str = "demo", **options: Any) -> LoadedModel:
    """Load a model with its tokenizer: the embedded `demo`, a folder, an adapter's too, a GGUF file, or a hub id.

    options: the other fields of `attnscope.model.options.LoadOptions` (device, dtype, revision, offline, ...). Raises
    ModelError when it cannot be found or read, UsageError for an option that does not exist.

        >>> model = attnscope.load("demo", device="cpu")
    """
    names = LoadOptions.__dataclass_fields__
    for name in options:
        if name not in names:
            raise UsageError(f"load has no option {name!r}", f"it has {', '.join(names)}")
    with without_bars():
        return load_model(LoadOptions(model=model, **options))


def capture(
    model: LoadedModel,
    text: Text | None = None,
    layers: Sequence[int] | None = None,
    *,
    engine: str = "auto",
    request: Request | None = None,
    select: str | None = None,
    atlas: Atlas | Path | str | None = None,
    query: str | int | None = None,
    key: str | int | None = None,
    define: Mapping[str, str] | None = None,
    chat: bool = False,
    truncate: Side | None = None,
    memory: str | None = None,
    listen: bool = False,
    verify: bool = False,
    generate: int | None = None,
    answer: str | Sequence[int] | None = None,
    target: str | Sequence[int] | None = None,
    picture: Given | Sequence[Given] | None = None,
    audio: Any = None,
) -> Capture:
    """One forward pass over one text: every head's weights, scores, role, relations and map.

    text: the text, a Prompt, or token ids. layers: of which relations, maps and matrices are kept, None for all.
    engine: "auto", "eager", "fused", or which of the fused ones ("tiles", "numba", "triton"). request: what to
    keep, where that is less or more. select: heads to keep, as "27.3,last", or "@induction" for those that the
    atlas names. atlas: what `scan` found, or its folder; without one what lies in atlas/ of the model's own folder,
    where it is of these weights. query, key: the tokens that are asked about, as "last" or "Mary": metrics are
    means over the queries, and each head has a `mass` on the keys; define: names for such expressions. chat: apply
    the chat template. truncate: cut a text that is too long, "left" or "right". memory: what a layer's matrices may
    take, such as "4GB". listen: with the fused engine, leave the layers' outputs to the model. verify: hold every
    layer against the oracle. generate: let the model put up to so many tokens behind the text first, and read them
    with it; answer: put this behind it instead. `prompt` and `answer` then name tokens, and each head has its
    `lookback`. target: what an encoder-decoder's decoder reads; without it, what the model makes of the text, greedily.
    audio: in the text's stead, for a model of sound: a file, or (samples, rate).
    picture: one or several, files or pictures of Pillow, that a vision-language model reads with the text: its tokens
    are `img 3,7`, row and column, and `img` names them all; `beside["vision"]` has the vision tower's layers.

    Returns a Capture, which is an Observation with its ways out: `weights[layer]` is (H, Q, K) fp32 on the CPU; `heads`
    has one entry per head; `prompt` the tokens. Raises InputError for a text that does not fit the model,
    MemoryLimitError for one that does not fit the memory, UsageError for what cannot be meant.

        >>> seen = attnscope.capture(model, "the financial bank is located on river bank")
        >>> seen.weights[0].shape
    """
    if (text is None) == (audio is None):
        raise UsageError("expected one text, or one sound", "give a text, or {audio=FILE}")
    if request is None:
        view = View(heads=None if layers is None else _heads_of(model, layers))
        request = Request(view=view, relations=True, maps="kept", weights=True, per_token=picture is not None)
    elif layers is not None:
        raise UsageError("layers and request were both given", "choose heads with {select=1.*} instead")
    asked: dict[str, Any] = {name: str(value) for name, value in (("query", query), ("key", key)) if value is not None}
    asked |= {} if define is None else {"define": define}
    request = replace(request, **asked)
    seen = read(
        model,
        sound_of(audio) if text is None else text,
        request,
        engine=engine,
        verify=verify,
        select=select,
        atlas=atlas,
        chat=chat,
        truncate=truncate,
        memory=memory,
        listen=listen,
        generate=generate,
        answer=answer,
        target=target,
        picture=picture,
    )
    return Capture.made_of(seen)


def _heads_of(model: LoadedModel, layers: Sequence[int]) -> dict[int, range]:
    there = model.geometry.heads_by_layer
    for layer in layers:
        if layer not in there:
            raise UsageError(f"there is no layer {layer} with attention", f"there are {', '.join(map(str, there))}")
    return {layer: range(there[layer]) for layer in layers}

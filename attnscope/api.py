"""The library in three lines: load a model, capture a text, read the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from attnscope.ask import Ask, How
from attnscope.errors import UsageError
from attnscope.face import Capture
from attnscope.keep.view import View
from attnscope.media.sound import sound_of
from attnscope.model.libraries import without_bars
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import load as load_model
from attnscope.model.options import LoadFields, LoadOptions
from attnscope.observe import Request
from attnscope.run import read
from attnscope.typed import check_names

if TYPE_CHECKING:
    from attnscope.ask import Text
    from attnscope.attention.again import CutHow
    from attnscope.study.atlas.atlas import Atlas
    from attnscope.study.knockout.effects import Knocked


def load(model: str = "demo", **options: Unpack[LoadFields]) -> LoadedModel:
    """Load a model with its tokenizer: the embedded `demo`, a folder, an adapter's too, a GGUF file, or a hub id.

    options: the other fields of `attnscope.model.options.LoadOptions` (device, dtype, revision, offline, ...). Raises
    ModelError when it cannot be found or read, UsageError for an option that does not exist.

        >>> model = attnscope.load("demo", device="cpu")
    """
    check_names("load", options, LoadOptions)
    with without_bars():
        return load_model(LoadOptions(model=model, **options))


def capture(
    model: LoadedModel,
    text: Text | None = None,
    layers: Sequence[int] | None = None,
    *,
    request: Request | None = None,
    query: str | int | None = None,
    key: str | int | None = None,
    define: Mapping[str, str] | None = None,
    audio: Any = None,
    **how: Unpack[How],
) -> Capture:
    """One forward pass over one text: every head's weights, scores, role, relations and map.

    text: the text, a Prompt, or token ids. layers: of which relations, maps and matrices are kept, None for all.
    request: what to keep, where that is less or more. query, key: the tokens that are asked about, as "last" or "Mary":
    metrics are means over the queries, and each head has a `mass` on the keys; define: names for such expressions.
    audio: instead of a text, for a model of sound: a file, or (samples, rate).

    how: the other fields of `attnscope.ask.Ask`: engine, memory, listen, verify, select, atlas, chat, truncate,
    generate, answer, target, picture. With an answer `prompt`, `answer` and `made` name tokens, and each head has its
    `lookback`. The tokens of a picture are `img 3,7`, row and column, and `img` names them all; `beside["vision"]` has
    the vision tower's layers.

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
        kept = how.get("picture") is not None
        request = Request(view=view, relations=True, maps="kept", weights=True, per_token=kept)
    elif layers is not None:
        raise UsageError("layers and request were both given", "choose heads with {select=1.*} instead")
    asked: dict[str, Any] = {name: str(value) for name, value in (("query", query), ("key", key)) if value is not None}
    asked |= {} if define is None else {"define": define}
    whole = sound_of(audio) if text is None else text
    return Capture.made_of(read(model, Ask(whole, replace(request, **asked), **how)))


def knockout(
    model: LoadedModel,
    text: str | Sequence[int] | Sequence[Mapping[str, Any]],
    query: str | int = "last",
    key: str | int | None = None,
    *,
    answer: str | Sequence[int] | None = None,
    foil: str | Sequence[int] | None = None,
    over: str = "none",
    select: str | None = None,
    how: CutHow = "mask",
    random: int = 100,
    seed: int = 0,
    define: Mapping[str, str] | None = None,
    chat: bool = False,
    atlas: Atlas | Path | str | None = None,
    out: Path | str | None = None,
    force: bool = False,
) -> Knocked:
    """What an answer loses where heads may not look from the queries at the keys (Geva et al. 2023, arXiv 2304.14767).

    text: one text, or token ids; or records of {"text", "query", "key", "answer", "foil"}, each of which may leave out
    what all share. query, key: tokens of the text, as "last" or "Mary"; key: all where each is cut
    alone. answer: what is to follow, the model's own next token without it; with a foil the effect is the fall of
    logit(answer) - logit(foil), else nats. over: what is cut at a time: "none", "heads", "layers", "window:N", "keys",
    "kv". select: the heads, as "27.3,last"; all without it. how: "mask", the rest of a row takes the weight, or "zero".
    random: draws of other keys to compare with. out: a folder for table and facts, where a stopped run resumes.

    Returns what was measured: `table()` has a row per cut. Raises InputError for a text, an answer or tokens that
    cannot be meant, ModelError for a family that attends outside the attention interface.

        >>> attnscope.knockout(model, "the bank of the river, the bank of the", key="river", over="heads").table()
    """
    from attnscope.selection import select as selected
    from attnscope.study.atlas.atlas import atlas_of
    from attnscope.study.knockout.cases import asked_of, cases_of
    from attnscope.study.knockout.effects import CutPlan, knocked_out

    shared = {"query": str(query), "key": None if key is None else str(key), "answer": answer, "foil": foil}
    asked = asked_of(text, {**shared, "define": define or {}, "chat": chat}, each_key=over == "keys")
    found, heads = atlas_of(model, atlas), None
    if select is not None:
        heads = selected(select, model.geometry.heads_by_layer, found.by_role() if found else None)
    plan = CutPlan(over, heads, select or CutPlan.name, how, random, seed)
    return knocked_out(model, cases_of(model, asked), plan, None if out is None else Path(out), force=force)


def _heads_of(model: LoadedModel, layers: Sequence[int]) -> dict[int, range]:
    there = model.geometry.heads_by_layer
    for layer in layers:
        if layer not in there:
            raise UsageError(f"there is no layer {layer} with attention", f"there are {', '.join(map(str, there))}")
    return {layer: range(there[layer]) for layer in layers}

"""A module of any code, and an input -> an Observation of the layers that were heard while it ran.

    seen = hear(wrap(net, tokenizer), ask).observe(ask)

The calls of one pass are kept, and asked when it has ended: then it is known how many tokens there are. Self-attention
over the tokens that most layers have is shown, and cross-attention from them; other layers are named as unread. A batch
may hold windows of one picture: one row of it is shown.

Shapes: B text, T token, H head, Q query, K key.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscope.attention.operator import AttentionOperator, DenseAttention
from attnscope.attention.spec import AttentionSpec
from attnscope.attention.tiling import TiledAttention
from attnscope.errors import InputError, MemoryLimitError, UsageError, first_line, listed
from attnscope.hooks.calls import AttentionCall, CallSite
from attnscope.hooks.engines import engine_named, select_operator
from attnscope.hooks.forward import own_errors
from attnscope.hooks.functions import check_heard, hearing, unheard_lines
from attnscope.hooks.report import SOFTMAX, CallCheck, CaptureReport
from attnscope.inputs.labels import visible_blanks
from attnscope.inputs.prompt import Medium, Patch, Prompt, from_ids, from_text, unnamed_tokens
from attnscope.model.geometry import LayerGeometry
from attnscope.model.loaded import LoadedModule
from attnscope.model.selection import CROSS, DECODER, ENCODER
from attnscope.observe.collect import ReadyLayer, observe_layers
from attnscope.observe.observation import Observation
from attnscope.observe.request import CaptureSpec, LayerKey, RunInfo, TextInputs
from attnscope.utils.memory import free_memory, human_bytes
from attnscope.utils.stages import NO_PROGRESS, Progress

logger = logging.getLogger(__name__)
# What an ask may say that only a model of transformers can do.
OF_MODELS = ("memory", "atlas", "truncate", "generate", "answer", "target", "picture", "pair", "global_tokens")
OF_MODELS_ALONE = ("listen", "verify", "chat")
NEEDS_MODEL = {"value": "norms of what keys write", "logit": "effects on a logit"}
SURELY_FREE = 2**28  # bytes that are not asked after
AS_CALLED = "as called"  # in the place of transformers' implementation
MOST_OTHERS = 8  # tokens before the patches of a picture: a class token, registers


class ModuleInput(NamedTuple):
    """What a forward is given, and the tokens that it is of where a tokenizer says them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    prompt: Prompt | None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among its arguments."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]

    @property
    def texts(self) -> int:
        """How many texts or pictures there are side by side."""
        return next((len(tensor) for tensor in self.tensors if tensor.ndim), 1)


@dataclass(frozen=True)
class HeardCall:
    """One call of a pass, of the row that is shown: an operator to ask.

    index: its place among the calls of the pass. rows: how many its batch had.
    """

    index: int
    P: AttentionOperator
    check: CallCheck
    rows: int
    kv_heads: int

    @property
    def axes(self) -> tuple[int, int]:
        return self.P.queries, self.P.keys

    @property
    def looks_back(self) -> bool:
        """Whether no query sees a key after its own."""
        return bool(float(self.P.visible.ahead) == 0)


@dataclass(frozen=True)
class HeardModule:
    """What was heard of a module in one pass, before anything is asked of it.

    layers: as they are read. plain: the stack that is observed. prompt: its tokens; source: other keys that these look
    at. notes: how tokens were named. unread: what is not shown, in words. given: what its forward was given. places:
    the layer of each call that is shown, by the path of its module and the number of the call there.
    """

    loaded: LoadedModule
    layers: Mapping[LayerKey, ReadyLayer]
    plain: str
    prompt: Prompt
    source: Prompt | None
    notes: Sequence[str]
    unread: Sequence[str]
    given: ModuleInput
    places: Mapping[tuple[str, int], LayerKey]

    @property
    def heads(self) -> dict[str, dict[int, int]]:
        """How many heads each layer has, by stack."""
        shown: dict[str, dict[int, int]] = {}
        for key, layer in self.layers.items():
            shown.setdefault(key.stack, {})[key.layer] = layer.geometry.heads
        return shown

    @property
    def run_info(self) -> RunInfo:
        """What is known before the layers are read."""
        loaded = self.loaded
        return RunInfo(self.source or self.prompt, loaded.name, None, loaded.device, loaded.dtype)

    def observe(self, ask: CaptureSpec, tell: Progress = NO_PROGRESS) -> Observation:
        """What the ask keeps of the layers."""
        if ask.select is not None and "@" in ask.select:
            what = f"{ask.select!r} names a role, and a module of other code has no atlas"
            raise UsageError(what, "name heads, as {select=1.4}")
        request = ask.keep.selecting(ask.select, self.heads, self.plain, of="this module")
        texts = TextInputs(self.prompt, request.chosen(self.prompt, self.source), self.source)
        facts = facts_of(self.loaded, self.layers, ask.engine)
        facts |= {name: list(lines) for name, lines in (("unread", self.unread), ("notes", self.notes)) if lines}
        for line in (module_line(self), *self.notes):
            tell.say(line)
        with tell.stage("reading layers", len(self.layers), "layers") as advance:
            seen = observe_layers(
                *(self.layers, texts, request, facts),
                plain=self.plain,
                attention=AS_CALLED,
                advance=advance,
                say=tell.say,
            )
        return replace(seen, ask=replace(ask, text=""))


def hear(loaded: LoadedModule, ask: CaptureSpec, tell: Progress = NO_PROGRESS) -> HeardModule:
    """One pass of the module over the input that the ask names.

    Raises UsageError for what needs a model of transformers, ModelError where nothing was heard, InputError for an
    input that cannot be given, MemoryLimitError where the weights of all layers do not fit.

        >>> hear(wrap(net), CaptureSpec(torch.arange(9)[None])).heads
        {'decoder': {0: 4, 1: 4}}
    """
    check_ask(loaded, ask)
    given, heard = module_input(loaded, ask.text), PassCalls(loaded, ask.engine)
    with tell.stage("forward pass"), own_errors(loaded.module), torch.no_grad(), heard.hearing():
        loaded.module(*given.args, **given.kwargs)
    return heard.of(given)


def check_ask(loaded: LoadedModule, ask: CaptureSpec) -> None:
    """Raise UsageError for what only a model of transformers can do."""
    others = [name for name in OF_MODELS if getattr(ask, name) is not None]
    others += [name for name in OF_MODELS_ALONE if getattr(ask, name)]
    if others:
        what = f"{others[0]} needs a model of transformers, and {loaded.name} is a module of other code"
        raise UsageError(what, f"leave out {{{others[0]}}}")
    if ask.keep.view.weights in NEEDS_MODEL:
        what = NEEDS_MODEL[ask.keep.view.weights]
        raise UsageError(
            f"{what} need a model of transformers, and {loaded.name} is a module of other code",
            "use {weights=softmax} or {weights=scores}",
        )
    if loaded.module.training:
        raise UsageError("the module is in training mode, where dropout changes the weights", "call .eval() first")


# What the module is given.


def module_input(loaded: LoadedModule, value: Any) -> ModuleInput:
    """An input as the arguments of the module's forward, on its device."""
    prompt = None
    if isinstance(value, Prompt):
        prompt, value = value, list(value.ids)
    elif isinstance(value, str) and loaded.tokenizer is not None:
        prompt = tokens_of(loaded.tokenizer, value)
    if loaded.feed is not None:
        try:
            value = loaded.feed(value)
        except Exception as error:  # anybody's code
            raise InputError(f"the feed of {loaded.name} failed: {first_line(error)}", "check what it takes") from error
    elif prompt is not None:
        value = list(prompt.ids)
    elif isinstance(value, str):
        raise UsageError(
            f"{loaded.name} has no tokenizer, and this is a text",
            "give one to attnscope.wrap, or a feed that makes its arguments of a text",
        )
    device = torch.device(loaded.device)
    if isinstance(value, Mapping):
        args, kwargs = (), {str(name): _placed(item, device) for name, item in value.items()}
    else:
        items = value if isinstance(value, tuple) else (value,)
        args, kwargs = tuple(_placed(item, device) for item in items), {}
    return with_tokens(loaded, ModuleInput(args, kwargs, prompt))


def with_tokens(loaded: LoadedModule, given: ModuleInput) -> ModuleInput:
    """The same with its tokens, where its first tensor is of ids, which the tokenizer names."""
    if given.prompt is not None or loaded.tokenizer is None or not given.tensors:
        return given
    ids = given.tensors[0]
    if ids.is_floating_point() or ids.ndim not in (1, 2):
        return given
    ids_BT = torch.atleast_2d(ids)
    shown = map(int, ids_BT[min(loaded.row, len(ids_BT) - 1)].tolist())
    return given._replace(prompt=tokens_of(loaded.tokenizer, list(shown)))


def tokens_of(tokenizer: Any, text: str | list[int]) -> Prompt:
    """The tokens of a text by a tokenizer of transformers, or of another library: `encode` makes ids, `decode` text.

    >>> tokens_of(tokenizer, "the bank").labels
    ('the', '·bank')
    """
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return from_text(tokenizer, text) if isinstance(text, str) else from_ids(tokenizer, text)
    if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
        raise UsageError(
            f"expected a tokenizer with encode and decode, got {type(tokenizer).__name__}",
            "give {feed} instead, which makes the module's arguments of a text",
        )
    encoded = tokenizer.encode(text) if isinstance(text, str) else text
    ids = [int(token) for token in getattr(encoded, "ids", encoded)]
    if not ids:
        raise InputError("the text has no tokens", "give at least one word")
    pieces = tuple(str(tokenizer.decode([token])) for token in ids)
    labels = tuple(visible_blanks(piece) for piece in pieces)
    return Prompt("".join(pieces), tuple(ids), pieces, labels, (False,) * len(ids), pieces, ())


def _placed(item: Any, device: torch.device) -> Any:
    """A tensor on the module's device; of an array or of a list of ids one, (1, T)."""
    if isinstance(item, list) and item and all(type(token) is int for token in item):
        return torch.tensor([item], device=device)
    if hasattr(item, "__array_interface__"):
        return torch.as_tensor(item, device=device)
    return item.to(device) if isinstance(item, Tensor) else item


# The pass.


def operator_of(engine: str) -> Callable[[AttentionSpec], AttentionOperator]:
    """Who answers the questions about calls of which q and k are known. Raises UsageError for an unknown engine."""
    if engine == "auto":
        return select_operator
    named = engine_named(engine)
    if named.probes:
        raise UsageError(
            f"{engine} calls an attention function of transformers again, and a module of other code has none",
            "use {engine=auto}: q and k are those that its kernel was given",
        )
    if engine == "eager":
        return lambda spec: DenseAttention(spec.weights(0, spec.visible.queries), spec.visible, spec)
    return named.operator


class PassCalls:
    """The calls of one pass, of the row that is shown.

    >>> calls = PassCalls(loaded, "auto")
    >>> with calls.hearing():
    ...     loaded.module(ids_BT)
    >>> calls.of(ModuleInput((ids_BT,), {}, None)).heads
    """

    def __init__(self, loaded: LoadedModule, engine: str) -> None:
        self.loaded, self.operator = loaded, operator_of(engine)
        self.report = CaptureReport()
        self._room = _Room(loaded)
        self._calls: list[tuple[CallSite, HeardCall]] = []
        self._others: list[str] = []

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """While open, the calls of the module are kept."""
        with hearing(self.loaded.module, self._keep, operator=TiledAttention) as self.report:
            yield

    def _keep(self, call: AttentionCall) -> None:
        loaded = self.loaded
        if not any(fnmatch(call.path, pattern) for pattern in loaded.parts) or loaded.row >= call.P.batch:
            self._others.append(call.path)
            return
        P, kv_heads = _of_row(call, loaded.row, self.operator, self._room)
        index = len(self._calls) + len(self._others)
        heard = HeardCall(index, P, CallCheck(0, 0, "", 0, ""), call.P.batch, kv_heads)
        self._calls.append((call.place, heard))

    def of(self, given: ModuleInput) -> HeardModule:
        """What was heard of a pass over an input. Raises ModelError where nothing was, InputError for another row."""
        loaded = self.loaded
        check_heard(self.report, loaded.name)
        if not self._calls:
            paths = ", ".join(dict.fromkeys(path or loaded.name for path in self._others))
            raise InputError(
                f"no call of {loaded.name} is of row {loaded.row} and of {', '.join(loaded.parts)}",
                f"parts that attend: {paths}",
            )
        checks = {(check.path, check.call): check for check in self.report.calls}
        calls = [replace(call, check=checks[place.path, place.call]) for place, call in self._calls]
        stacks, unread = stacks_of(calls)
        plain = next(stack for stack in (DECODER, ENCODER, CROSS) if stack in stacks)
        prompt, source, notes = prompts_of(stacks, plain, given, loaded.row)
        unread += unheard_lines(self.report)
        shown = [call for of_stack in stacks.values() for _, call in of_stack]
        notes += own_softmaxes(shown)
        if folded := _paths(call.check.path for call in shown if call.check.path in self.report.folded):
            notes.append(
                f"heads in the batch are read text by text, and may lie head by head with several texts: {folded}"
            )
        layers = {key: _ready(call, key) for of_stack in stacks.values() for key, call in of_stack}
        places = {(call.check.path, call.check.call): key for of_stack in stacks.values() for key, call in of_stack}
        return HeardModule(loaded, layers, plain, prompt, source, notes, unread, given, places)


@dataclass
class _Room:
    """What matrices of all layers take together, which are kept until the pass has ended."""

    loaded: LoadedModule
    taken: int = 0

    def take(self, count: int) -> None:
        """Raise MemoryLimitError where so many more bytes do not fit."""
        self.taken += count
        if self.taken > SURELY_FREE and self.taken > (room := free_memory("cpu")) // 2:
            raise MemoryLimitError(
                f"the weights of {self.loaded.name} take over {human_bytes(self.taken)}, of {human_bytes(room)} free",
                "read fewer of its parts at a time, with attnscope.wrap(module, parts=...), or a shorter input",
            )


def _of_row(
    call: AttentionCall, row: int, operator: Callable[[AttentionSpec], AttentionOperator], room: _Room
) -> tuple[AttentionOperator, int]:
    """The operator of one row of the batch of a call, and how many kv heads it has."""
    if call.spec is not None:
        return operator(call.spec.texts(row, row + 1)), call.spec.kv_heads
    assert call.weights_BHQK is not None
    weights = call.weights_BHQK[row : row + 1]
    room.take(weights.numel() * weights.element_size())
    if len(call.weights_BHQK) > 1:  # a view would keep all rows
        weights = weights.clone()
    visible = call.visible
    if row or call.P.batch > 1:  # which way one row looks, and not all of them
        later = weights[0].amax(0).triu(1)
        causal = call.P.queries == call.P.keys >= 2 and not bool((later > 0).any())
        visible = replace(visible, causal=causal, _once={})
    return DenseAttention(weights, visible), weights.shape[1]


# Stacks, and the tokens of their axes.

Stacks = dict[str, list[tuple[LayerKey, HeardCall]]]


def stacks_of(calls: Sequence[HeardCall]) -> tuple[Stacks, list[str]]:
    """The layers of each stack that is shown, numbered in the order of the pass, and what is not shown, in words.

    That is self-attention over the tokens that most calls have as queries, the cross-attention from these tokens, and
    self-attention over the tokens that it looks at.
    """
    own = Counter(call.axes for call in calls if call.check.stack != CROSS)
    across = Counter(call.axes for call in calls if call.check.stack == CROSS)
    # The tokens of most calls that have queries and keys of them, or queries alone.
    queries = Counter(call.axes[0] for call in calls if not own or (call.axes[0], call.axes[0]) in own)
    tokens = queries.most_common(1)[0][0]
    pair = next((axes for axes, _ in across.most_common() if axes[0] == tokens), None)
    main = (tokens, tokens)
    back = all(call.looks_back for call in calls if call.check.stack != CROSS and call.axes == main)
    stacks, others = Stacks(), dict[tuple[int, int], list[str]]()
    for call in calls:
        crosses = call.check.stack == CROSS
        if not crosses and call.axes == main:
            stack = DECODER if pair or back else ENCODER
        elif not crosses and pair and call.axes == (pair[1], pair[1]):
            stack = ENCODER
        elif crosses and call.axes == pair:
            stack = CROSS
        else:
            others.setdefault(call.axes, []).append(call.check.path)
            continue
        stacks.setdefault(stack, []).append((LayerKey(call.index, stack), call))
    unread = [
        f"not shown, with {queries} queries and {keys} keys: {_paths(paths)}; parts=... of attnscope.wrap chooses them"
        for (queries, keys), paths in others.items()
    ]
    return {stack: stacks[stack] for stack in (ENCODER, DECODER, CROSS) if stack in stacks}, unread


def own_softmaxes(calls: Sequence[HeardCall]) -> list[str]:
    """Which calls are read from a softmax of the module's own, in words, and of which no more than that was seen."""
    own = [call.check for call in calls if call.check.route == SOFTMAX]
    mixed = [check.path for check in own if check.value_error is None]
    lines = []
    if own:
        paths = _paths(check.path for check in own)
        lines.append(f"{len(own)} of {len(calls)} calls take a softmax of their own, read as finished weights: {paths}")
    if mixed:
        lines.append(
            f"what values are multiplied by may be mixed of these weights, for no product of them was seen: "
            f"{_paths(mixed)}"
        )
    return lines


def _paths(paths: Iterable[str]) -> str:
    """The paths of some modules, each once."""
    return listed([path or "the module itself" for path in dict.fromkeys(paths)])


def prompts_of(stacks: Stacks, plain: str, given: ModuleInput, row: int) -> tuple[Prompt, Prompt | None, list[str]]:
    """The tokens of the queries, those of other keys where there are some, and how they were named, in words."""
    notes, first = list[str](), {stack: layers[0][1] for stack, layers in stacks.items()}
    prompt = _named(first[plain].axes[0], given, first[plain].rows, notes)
    source = _named(first[CROSS].axes[1], given, first[CROSS].rows, notes) if CROSS in stacks else None
    batches = {call.rows for layers in stacks.values() for _, call in layers}
    if batches != {1}:
        windows = "" if batches == {given.texts} else ", which has windows or parts of the input in it"
        notes.append(f"row {row} is shown of a batch of {' or '.join(map(str, sorted(batches)))}{windows}")
    return prompt, source, notes


def _named(tokens: int, given: ModuleInput, rows: int, notes: list[str]) -> Prompt:
    """So many tokens: those of the tokenizer, the patches of a picture or of a window of it, else numbers."""
    if given.prompt is not None and len(given.prompt) == tokens:
        return given.prompt
    picture = next((tensor for tensor in given.tensors if tensor.ndim == 4), None)
    windows = rows // given.texts if rows % given.texts == 0 else 1
    if picture is not None:
        sides = [(picture.shape[-2], picture.shape[-1]), (picture.shape[1], picture.shape[2])]
        for height, width in [(1, 1)] if windows > 1 else sides:
            grid = _grid(tokens, height, width)
            if grid is not None:
                return _patches(tokens, *grid, whole=windows == 1, notes=notes)
    if given.prompt is not None:
        notes.append(f"{tokens} tokens attend, and the text has {len(given.prompt)}: they are named by their places")
    return unnamed_tokens([str(place) for place in range(tokens)])


def _grid(tokens: int, height: int, width: int) -> tuple[int, int] | None:
    """Rows and columns of patches of a picture of these sides, with at most a few tokens before them."""
    for others in range(min(MOST_OTHERS, tokens - 1) + 1):
        rows = isqrt((tokens - others) * height // width)
        if rows and (tokens - others) % rows == 0:
            columns = (tokens - others) // rows
            if rows * width == columns * height and columns > 1:
                return rows, columns
    return None


def _patches(tokens: int, rows: int, columns: int, *, whole: bool, notes: list[str]) -> Prompt:
    others = tokens - rows * columns
    names = [str(place) for place in range(others)]
    names += [f"{'img ' * whole}{row},{column}" for row in range(rows) for column in range(columns)]
    before = f" after {others} other token{'s' * (others != 1)}" if others else ""
    what = "the picture" if whole else "a window"
    notes.append(f"{tokens} tokens are read as {what} in {rows} x {columns} patches{before}, by their number")
    patches = {}
    if whole:
        for place in range(rows * columns):
            row, column = divmod(place, columns)
            box = (column / columns, row / rows, (column + 1) / columns, (row + 1) / rows)
            patches[others + place] = Patch(0, box)
    return unnamed_tokens(names, Medium(patches=patches))


# The layers as they are read, their header line and the manifest.


def _ready(call: HeardCall, key: LayerKey) -> ReadyLayer:
    """A layer as it is read: what its own call shows of it."""
    P, visible, spec = call.P, call.P.visible, call.P.spec
    hides = not visible.by_position and bool((visible.counts_BHQ < visible.keys).any())
    both_ways = not visible.causal if visible.by_position else not call.looks_back
    geometry = LayerGeometry(
        index=key.layer,
        type="sparse" if hides else "full",
        heads=P.heads,
        kv_heads=call.kv_heads,
        head_dim=0 if spec is None else spec.q_BHQD.shape[-1],
        value_dim=0 if spec is None else spec.v_BGKV.shape[-1],
        window=None,
        both_ways=both_ways,
        keys="mask of the call" if hides else "",
    )
    check = replace(call.check, layer=key.layer, stack=key.stack, call=0, heads=P.heads)
    return ReadyLayer(P, geometry, check)


def module_line(heard: HeardModule) -> str:
    """What is read, in a line.

    >>> module_line(heard)
    'NanoGPT  cpu  float32  2 layers x 4 heads (h.0.attn to h.1.attn)  10 tokens'
    """
    loaded, layers = heard.loaded, [heard.layers[key] for key in sorted(heard.layers)]
    heads = sorted({layer.geometry.heads for layer in layers})
    counted = str(heads[0]) if len(heads) == 1 else f"{heads[0]} to {heads[-1]}"
    paths = [layer.check.path or loaded.name for layer in layers]
    between = paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
    keys = f", {len(heard.source)} other keys" if heard.source is not None else ""
    tokens = f"{len(layers)} layers x {counted} heads ({between})  {len(heard.prompt)} tokens{keys}"
    return f"{loaded.name}  {loaded.device}  {loaded.dtype}  {tokens}"


def facts_of(loaded: LoadedModule, layers: Mapping[LayerKey, ReadyLayer], engine: str) -> dict[str, Any]:
    """What a manifest says of the module, and which part of it each layer is."""
    in_order = [(key, layers[key].check) for key in sorted(layers)]
    return {
        "model": {
            "name": loaded.name,
            "revision": None,
            "type": type(loaded.module).__name__,
            "layers": len(layers),
            "layers_without_attention": {},
            "modules": {str(key.layer): check.path for key, check in in_order},
            "heard_by": {str(key.layer): check.route for key, check in in_order},
        },
        "device": loaded.device,
        "dtype": "float32" if loaded.dtype == "float64" else loaded.dtype,  # what weights are read in
        "attention": AS_CALLED,
        "engine": "fused" if engine == "auto" else engine,
        "output": "model",
    }

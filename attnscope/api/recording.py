"""`attnscope.recording`: what the forwards of somebody's own code attend to, as that code runs.

    with attnscope.recording(model) as seen:
        ids = model.generate(**inputs, max_new_tokens=40)
    seen.of(ids)[0].heatmap("L1H4")

Nothing of the model is switched: its outputs are the same bits as without a recording. What a text of several forwards
attends to is one map of it.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, Self

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from attnscope.api.capture import NO_TOKENS, kept
from attnscope.api.captured import Capture
from attnscope.errors import InputError, ModelError, UsageError, hints_of, listed
from attnscope.hooks.engines import ENGINES
from attnscope.hooks.forward import bare_model, temporary
from attnscope.hooks.forwards import UNKNOWN, Forward, ForwardKeeper, Layer, kept_forwards, path
from attnscope.hooks.functions import check_heard
from attnscope.hooks.generation import ends
from attnscope.hooks.joining import JoinedLayer, JoinedText, joined
from attnscope.hooks.listen import uncompiled
from attnscope.hooks.report import CaptureReport
from attnscope.inputs.prompt import Prompt, from_ids
from attnscope.inputs.tensors import prompt_of_tokens
from attnscope.model.geometry import LayerGeometry
from attnscope.model.loaded import LoadedModel, LoadedModule
from attnscope.model.loading import as_deployed, holds_model, wrap
from attnscope.model.selection import ENCODER, VISION_ONLY, as_ranges, mixes, select_stacks
from attnscope.model.tasks import looks_back_alone
from attnscope.observe.any_module import ModuleInput, PassCalls, check_ask, with_tokens
from attnscope.observe.collect import ReadyLayer, model_facts, observe_layers
from attnscope.observe.observation import NamesBeside
from attnscope.observe.request import CaptureSpec, LayerKey, Request, TextInputs
from attnscope.utils.display import number_of
from attnscope.utils.memory import check_free

logger = logging.getLogger(__name__)
ELSEWHERE = "ran in another thread, and is not recorded: record there"
FAILED = "ended with an error, and is not kept"
SILENT = "made no attention call that could be heard, as of attnscope.capture or an attention of its own"
NO_TOKEN = "<embedding>"  # the name of a token without an id


@hints_of()
def recording(
    model: Any, *, keep: Request | None = None, tokenizer: Any = None, select: str | None = None
) -> Recording | ModuleRecording:
    """Record what the forwards inside a `with` block attend to, whoever runs them: `generate`, a loop, a pipeline.

    model: of transformers, what `load` or `wrap` gave, or any module of PyTorch. keep: what to keep of each text, as of
    `capture`. tokenizer: names the tokens; without it they are ids. select: the heads that are kept, as "27.3,last".

    The model runs as it is, under its own attention implementation, and gives the same bits. The forwards of this
    thread are recorded. Cached forwards of a text are joined to one map, from their own queries and keys. Of other code
    each forward is a text, and is read when it ends.

    Returns a Recording, or a ModuleRecording of other code, to be opened with `with`. Raises UsageError for a model in
    training mode. At its end the block raises ModelError where nothing was heard.

        >>> with attnscope.recording(model, keep=attnscope.Request(relations=True)) as seen:
        ...     ids = model.generate(**inputs, max_new_tokens=40)
        >>> seen.of(ids)[0].table().to_pandas()
    """
    if isinstance(model, LoadedModule) or (isinstance(model, nn.Module) and not holds_model(model)):
        loaded_module = model if isinstance(model, LoadedModule) else wrap(model, tokenizer, feed=None)
        ask = CaptureSpec("", kept(None, keep, NO_TOKENS, {}), select=select)
        check_ask(loaded_module, ask)
        return ModuleRecording(loaded_module, ask)
    loaded = model if isinstance(model, LoadedModel) else as_deployed(model, tokenizer)
    if loaded.geometry.task == VISION_ONLY:
        raise UsageError(f"{loaded.name} reads pictures, and a recording is of texts", "use attnscope.capture")
    if loaded.model.training:
        raise UsageError("the model is in training mode, where dropout changes the weights", "call model.eval() first")
    request, geometry = kept(None, keep, NO_TOKENS, {}), loaded.geometry
    if request.view.weights in ("value", "logit"):
        raise UsageError("norms and effects of values are not recorded", "ask for weights or scores")
    there = geometry.heads_of_stacks
    heads = {} if select is None else select_stacks(select, there, geometry.stack)
    # A layer without a softmax keeps a state in its cache, and no keys of which forwards could be joined.
    if any(map(mixes, heads)) or all(mixes(stack) for stack, layers in there.items() if layers):
        raise UsageError("a recording is of attention, and has no linear layers", "use attnscope.capture")
    return Recording(loaded, request.selecting(select, there, geometry.stack))


class Place(NamedTuple):
    """Where a text ends: the forward that read its last token, its row there, and how many of that row's tokens."""

    forward: Forward
    row: int
    end: int


class RecordedForward(NamedTuple):
    """One forward of a recording: the ids that each of its rows read, and how many tokens were read before these.

    layers: those that were heard, as stack and number.
    """

    ids: tuple[tuple[int, ...], ...]
    before: int
    layers: tuple[Layer, ...]


class Recording:
    """The forwards of a block of code, and the texts that they read.

    A text is made when it is asked for: a Capture, as of one pass over the whole text.
    """

    def __init__(self, loaded: LoadedModel, keep: Request) -> None:
        self.loaded, self.keep = loaded, keep
        self._kept = ForwardKeeper(loaded.geometry.stack, {})
        self._open = ExitStack()
        self._captures: dict[tuple[tuple[int, int], int], Capture] = {}
        self._started = False

    def __enter__(self) -> Self:
        if self._started:
            raise UsageError("this recording was used before", "call attnscope.recording again")
        self._started = True
        self._kept = self._open.enter_context(kept_forwards(self.loaded))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._open.close()
        for note in self.notes:
            logger.warning("%s", note)
        if kind is None and not self._kept.forwards:
            raise ModelError(*self._nothing())

    def __repr__(self) -> str:
        return f"Recording: {len(self.passes)} forwards of {self.loaded.name}"

    @property
    def passes(self) -> list[RecordedForward]:
        """Every forward that was recorded, in order."""
        return [
            RecordedForward(tuple(map(tuple, of.ids[of.main].tolist())), of.start, tuple(of.calls))
            for of in self._kept.forwards
        ]

    @property
    def texts(self) -> list[Capture]:
        """The texts as their last forwards left them: one for each row, beams too.

        A draft that was rejected in the last forward is in it: `of` leaves it out.
        """
        rows = [(forward, row) for forward in self._kept.last_of_runs for row in range(forward.batch)]
        return [self._capture(forward, row, forward.queries) for forward, row in rows]

    def of(self, sequences: Any) -> list[Capture]:
        """The texts of some ids, as `generate` returns them: a Capture each, without padding.

        The last token of a text has no row where no forward read it. Raises InputError for ids that were not read.

            >>> [text] = seen.of(model.generate(ids))
        """
        rows = getattr(sequences, "sequences", sequences)
        rows = rows.tolist() if hasattr(rows, "tolist") else rows
        if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
            raise UsageError(f"expected ids, got {type(sequences).__name__}", "give what generate returned")
        rows = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
        rows = [rows] if rows and isinstance(rows[0], int) else rows
        if not all(isinstance(row, Sequence) and all(isinstance(token, int) for token in row) and row for row in rows):
            raise UsageError("expected ids, or a list of ids for each text", "give what generate returned")
        places: list[Place] = []
        for row in rows:
            places.append(self._place(list(row), places))
        return [self._capture(*place) for place in places]

    @property
    def notes(self) -> list[str]:
        """What ran inside the block and is in no text, in words."""
        counts = (
            (self._kept.elsewhere, ELSEWHERE),
            (self._kept.failed, FAILED),
            (self._kept.silent, SILENT),
            (sum(of.loose for of in self._kept.forwards), "continued a cache from before, and its rows are not joined"),
        )
        notes = [f"{number_of(count, 'forward')}: each {why}" for count, why in counts if count]
        if count := self._kept.loose:
            notes.append(f"{number_of(count, 'attention call')} outside a forward: not recorded, call the model")
        others = sorted(self._kept.others)
        return notes + ([f"not in the maps: {listed(others)}"] if others else [])

    def _nothing(self) -> tuple[str, str]:
        """What was looked for, where nothing was heard, and the next step."""
        model, heard = type(self.loaded.model).__name__, self._kept
        looked = "calls of transformers' attention interface, and weights that attention modules return"
        if heard.elsewhere:
            return f"nothing was recorded: {model} ran in another thread", "open the recording in that thread"
        if heard.others:
            return f"nothing of {model} can be joined: {listed(sorted(heard.others))}", "use attnscope.capture"
        if heard.silent or heard.failed:
            how = "give {output_attentions} to the forward, or load with attn_implementation='eager'"
            forwards = number_of(heard.silent + heard.failed, "forward")
            return f"nothing was heard of {model} in {forwards}; looked for {looked}", how
        return f"nothing was recorded: no forward of {model} ran; looked for {looked}", "run the model inside the block"

    def _place(self, ids: list[int], others: Sequence[Place]) -> Place:
        """Where the text of some ids ends; others: of the sequences before it, which may have the same ids.

        Two targets of different sources may be equal: their order is that of the rows.
        """
        ids = self._without_padding(ids)
        matches = list(_matches(self._kept.forwards, ids))
        most = max((matched for _, matched in matches), default=0)
        if most < max(1, len(ids) - 1):
            message = f"sequence {len(others)}: its first {most} of {len(ids)} tokens were read inside the recording"
            raise InputError(message, "give what generate returned inside the block")
        best = [place for place, matched in matches if matched == most]
        last = max(place.forward.number for place in best)
        best = sorted((place for place in best if place.forward.number == last), key=lambda place: place.row)
        return next((place for place in best if place not in others), best[0])

    def _without_padding(self, ids: list[int]) -> list[int]:
        """The ids up to their end token, where padding alone follows it."""
        config = getattr(self.loaded.model, "generation_config", None)
        padding = getattr(config, "pad_token_id", None)
        last = len(ids)
        while last > 1 and (ids[last - 1] == padding or ends(self.loaded, ids[last - 1])):
            last -= 1
        return ids[: last + 1] if last < len(ids) and ends(self.loaded, ids[last]) else ids

    def _capture(self, forward: Forward, row: int, count: int) -> Capture:
        place = (forward.number, row), count
        if place not in self._captures:
            self._captures[place] = self._observed(joined(path(forward, row, count)))
        return self._captures[place]

    def _observed(self, text: JoinedText) -> Capture:
        """A joined text, as of a pass."""
        if not text.layers:
            raise ModelError(f"no layer was heard in all {text.forwards} forwards of this text", "record all of them")
        loaded, geometry = self.loaded, self.loaded.geometry
        report = CaptureReport(attention=getattr(loaded.model.config, "_attn_implementation", None) or "eager")
        prompt = self._prompt(text.ids)
        source = None if text.source is None else self._prompt(text.source)
        # The joined layers; the config says whether a layer is causal.
        ready = {}
        for (stack, index), layer in text.layers.items():
            layer.check.back_alone = looks_back_alone(loaded.model.config, stack)
            if layer.P.queries == layer.P.keys:
                layer.check.note(ahead=layer.P.visible.ahead)
            known = geometry.shown.get(stack, {}).get(index)
            ready[LayerKey(index, stack)] = ReadyLayer(layer.P, known or _geometry(index, layer), layer.check)
            report.calls.append(layer.check)
        # A layer that was not heard in every forward is named, and has no map.
        expected = {(stack, index) for stack, layers in geometry.in_every_pass.items() for index in layers}
        absent = sorted(expected - text.layers.keys() - {(ENCODER, index) for _, index in expected if source is None})
        notes = [*text.missing, *(f"{stack} layer {index}" for stack, index in absent)]
        notes = [f"no attention call of every forward was heard in {listed(notes)}"] if notes else []
        for note in notes:
            logger.warning("%s", note)
        engine = replace(ENGINES["fused"], output="model")
        facts = model_facts(loaded, engine, report) | {"recorded": {"forwards": text.forwards}}
        facts |= {"notes": notes} if notes else {}
        if geometry.mixing:
            facts["unread"] = [f"linear layers {as_ranges(sorted(geometry.mixing))}: a recording is of attention"]
        # Matrices are kept where they were asked for, as float32.
        if self.keep.weights:
            needed = sum(4 * layer.P.heads * layer.P.queries * layer.P.keys for layer in text.layers.values())
            check_free("the matrices of this text take", needed, "record with a Request without weights")
        inputs = TextInputs(prompt, self.keep.chosen(prompt, source), source)
        plain = next(iter(ready)).stack if geometry.stack not in {key.stack for key in ready} else geometry.stack
        observed = observe_layers(ready, inputs, self.keep, facts, plain=plain, attention=report.attention)
        named = NamesBeside(loaded.name, loaded.revision, loaded.source_folder, loaded.base_folder)
        return Capture.made_of(observed.named(named if loaded.source_folder else None))

    def _prompt(self, ids_T: Tensor) -> Prompt:
        """The tokens of some ids; without a tokenizer their numbers."""
        ids = ids_T.tolist()
        if self.loaded.tokenizer is not None and UNKNOWN not in ids:
            return from_ids(self.loaded.tokenizer, ids)
        names = [NO_TOKEN if token == UNKNOWN else str(token) for token in ids]
        own = tuple(UNKNOWN - at if token == UNKNOWN else token for at, token in enumerate(ids))
        return replace(prompt_of_tokens(names), ids=own)


class ModuleRecording:
    """The forwards of a module of other code inside a block, a Capture each, made when the forward ends.

    texts: in the order of the forwards.
    """

    def __init__(self, loaded: LoadedModule, ask: CaptureSpec) -> None:
        self.loaded, self.ask = loaded, ask
        self.texts: list[Capture] = []
        self._open = ExitStack()
        self._pass: tuple[PassCalls, ExitStack, BaseException | None] | None = None
        self._unheard = CaptureReport()
        self._thread = 0
        self._counts = Counter[str]()

    def __enter__(self) -> Self:
        if self._thread:
            raise UsageError("this recording was used before", "call attnscope.recording again")
        self._thread = threading.get_ident()
        # Hooks on the module itself would switch its fast path off.
        begin = module_hooks.register_module_forward_pre_hook(self._begin)
        end = module_hooks.register_module_forward_hook(self._end, with_kwargs=True, always_call=True)
        self._open.enter_context(uncompiled())
        self._open.enter_context(temporary([begin, end]))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._pass is not None:  # a forward that was interrupted
            self._pass[1].close()
        self._open.close()
        for note in self.notes:
            logger.warning("%s", note)
        if kind is None and not self.texts:
            if not self._counts:
                message = f"nothing was recorded: no forward of {self.loaded.name} ran"
                raise ModelError(message, "run it inside the block")
            if self._counts[SILENT]:
                check_heard(self._unheard, self.loaded.name)
            raise ModelError(f"nothing was recorded of {self.loaded.name}: {self.notes[0]}", "run it in this thread")

    def __repr__(self) -> str:
        return f"ModuleRecording: {len(self.texts)} forwards of {self.loaded.name}"

    @property
    def notes(self) -> list[str]:
        """What ran inside the block and is in no text, in words."""
        return [f"{number_of(count, 'forward')}: each {why}" for why, count in self._counts.items()]

    def _begin(self, module: nn.Module, args: Any) -> None:
        if module is not bare_model(self.loaded.module) or self._pass is not None:
            return
        if threading.get_ident() != self._thread:
            self._counts[ELSEWHERE] += 1
            return
        calls, around = PassCalls(self.loaded, self.ask.engine), ExitStack()
        around.enter_context(calls.hearing())
        self._pass = calls, around, sys.exception()

    def _end(self, module: nn.Module, args: Any, *rest: Any) -> None:
        # Of a forward that failed PyTorch gives no keyword arguments: `rest` is then its output alone.
        if module is not bare_model(self.loaded.module) or self._pass is None:
            return
        if threading.get_ident() != self._thread:
            return
        (calls, around, handled), self._pass = self._pass, None
        around.close()
        if sys.exception() is not handled:
            self._counts[FAILED] += 1
        elif not calls.report.calls:
            self._unheard = calls.report
            self._counts[SILENT] += 1
        else:
            given = with_tokens(self.loaded, ModuleInput(args, rest[0], None))
            self.texts.append(Capture.made_of(calls.of(given).observe(self.ask)))


def _geometry(index: int, layer: JoinedLayer) -> LayerGeometry:
    """A layer that its config does not say, as it was heard."""
    return LayerGeometry(index, "full", layer.P.heads, layer.kv_heads, 0, 0, None)


def _matches(forwards: Sequence[Forward], ids: list[int]) -> Iterator[tuple[Place, int]]:
    """The texts that begin as some ids do: where each ends, and how many of the ids it has.

    Embeddings before the first id have none, and are left out of what `generate` returns.
    """
    following: dict[tuple[int, int], list[tuple[Forward, int]]] = {}
    waiting: list[tuple[Forward, int, int]] = []  # a forward, its row, and how many ids were read before
    for forward in forwards:
        for row, parent in enumerate(forward.parents):
            if parent is not None:
                following.setdefault((parent.forward.number, parent.row), []).append((forward, row))
            elif forward.run != UNKNOWN:
                waiting.append((forward, row, 0))
    while waiting:
        forward, row, before = waiting.pop()
        own = forward.ids[forward.main][row].tolist()
        count, matched = 0, before
        for token in own:
            if token != UNKNOWN and (matched == len(ids) or ids[matched] != token):
                break
            count, matched = count + 1, matched + (token != UNKNOWN)
        if count:
            yield Place(forward, row, count), matched
        for other, its_row in following.get((forward.number, row), ()):
            parent = other.parents[its_row]
            assert parent is not None
            if parent.place < count:
                read = sum(token != UNKNOWN for token in own[: parent.place + 1])
                waiting.append((other, its_row, before + read))

"""One stack in one forward pass: its layers are asked as they are read, and what is kept is cut into texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.report import CallCheck, CaptureReport
from attnscope.keep.collector import LayerBatcher, PendingTransfers, wanted_collectors
from attnscope.keep.layers import Layer, LayerKey, PerLayer
from attnscope.keep.request import Asked, Request
from attnscope.keep.values import Directions, Projections
from attnscope.metrics.texts import Texts
from attnscope.model.selection import has_summaries, heard_as
from attnscope.observation import Observation
from attnscope.observe.texts import texts_of

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel


class PaddingError(Exception):
    """A text is read in another way beside a longer one than alone."""


class Reading:
    """One stack in one forward pass: its collectors ask every layer, and what they keep is cut into texts."""

    def __init__(
        self,
        loaded: LoadedModel,
        asked: Sequence[Asked],
        request: Request,
        check: bool,
        advance: Callable[[int], object],
        stack: str,
        out: Projections | None = None,
        directions: Directions | None = None,
    ) -> None:
        self.stack, self.keys = stack, [one.looked_at for one in asked]
        self.prompts, self.chosen = [one.prompt for one in asked], [one.chosen for one in asked]
        self.request, self.check, self.advance = request, check, advance
        self.out, self.directions, self.model_type = out, directions, loaded.geometry.model_type
        self.texts, geometry = texts_of(asked, loaded.device, stack), loaded.geometry
        self._texts = {stack: self.texts}
        self.key_count = max(len(keys) for keys in self.keys)
        self.layers = geometry.shown[stack]
        self.every = geometry.every.get(stack, ())
        self.asked, self.collectors = asked, wanted_collectors(asked, request)
        self._kept: dict[str, dict[LayerKey, Any]] = {name: {} for name in self.collectors}
        self._batcher, self._pending = LayerBatcher(self.collectors), PendingTransfers()
        self.kv_of: dict[LayerKey, tuple[int, int]] = {}

    def heard(self, call: AttentionCall | CallCheck) -> bool:
        """Whether a call of the decoder is of these layers, over tokens and their summaries."""
        queries, keys = (call.P.queries, call.P.keys) if isinstance(call, AttentionCall) else (call.queries, call.keys)
        return call.layer in self.layers and queries < keys == self.key_count and has_summaries(self.stack)

    def on_call(self, call: AttentionCall) -> None:
        """Keep what is asked of a layer's first call over the text's tokens; the report lists what is not read.

        check: whether a layer that chooses its keys ends the pass.
        """
        if self.check and self._chooses_keys(call):
            raise PaddingError
        if call.call > 0 or (call.P.queries, call.P.keys) != (self.texts.ids_BT.shape[1], self.key_count):
            return
        if call.P.batch != len(self.prompts):  # a tower may be given its picture in other parts
            return
        key = LayerKey(call.layer, self.stack)
        known = self.layers.get(key.layer)
        kv_heads = call.spec.kv_heads if call.spec else known.kv_heads if known else call.P.heads
        self.kv_of[key] = call.P.heads, kv_heads
        layer = Layer(key, call.P, kv_heads, self._texts_for(call), written=self._written(call))
        if self.out is None:
            self._ask(layer)
        else:
            self.out.when_known(call, lambda norms: self._ask(replace(layer, value_norms=norms)))

    def _texts_for(self, call: AttentionCall) -> Texts:
        """The texts for the metrics of the stack that a call was heard as, on its device."""
        visible = call.visible
        stack = heard_as(self.stack, visible.once("ahead", lambda: float(visible.ahead)))
        if stack not in self._texts:
            self._texts[stack] = replace(self.texts, stack=stack, asked={})
        return self._texts[stack].to(call.P.device)

    def _ask(self, layer: Layer) -> None:
        self._keep(self._pending.add(layer.P.device, self._batcher.add(layer)))
        self.advance(1)

    def _written(self, call: AttentionCall) -> Callable[[int, int], Tensor] | None:
        """What gives what a whole weight on a key adds to a logit, where logits are asked about."""
        if self.directions is None:
            return None
        return partial(self.directions.written, call)

    def _keep(self, ready: Mapping[LayerKey, Mapping[str, Any]]) -> None:
        for key, of_layer in ready.items():
            for name, collected in of_layer.items():
                if collected is not None:
                    self._kept[name][key] = collected

    def _chooses_keys(self, call: AttentionCall) -> bool:
        """Whether the keys are not the tokens, or the mask hides some that the layer's causal and window rules show."""
        if call.P.keys != self.texts.ids_BT.shape[1]:
            return True
        if call.visible.mask is None:
            return False
        position_Q, layer = call.visible.position_Q, self.layers.get(call.layer)
        shown_Q = position_Q + 1
        if layer and layer.window:
            chunked = layer.type == "chunked"
            shown_Q = position_Q % layer.window + 1 if chunked else shown_Q.clamp(max=layer.window)
        return bool((call.visible.counts_BHQ < shown_Q).any())

    @cached_property
    def of_texts(self) -> dict[str, Sequence[Any]]:
        """What was kept, one entry per text."""
        self._keep(self._pending.all() | self._batcher.all())
        return {name: one.of_texts(self._kept[name], self.asked) for name, one in self.collectors.items()}

    def observation(self, row: int, report: CaptureReport, facts: Mapping[str, Any]) -> Observation:
        """One text's part of what was kept, cut to its length."""
        kept = {name: texts[row] for name, texts in self.of_texts.items()}
        heads, rollout = kept.pop("heads"), kept.get("rollout")
        if rollout is not None:
            facts = {**facts, "rollout": rollout.facts([layer.index for layer in self.every])}
        return Observation(
            queries=self.prompts[row],
            keys=self.keys[row],
            text_columns=heads.columns,
            view=self.request.view,
            group=self.request.group,
            support=heads.support,
            visible=PerLayer({key: self._visible(key) for key in self.kv_of}),
            received=heads.received,
            report=report,
            kv_of=PerLayer(self.kv_of),
            facts=facts,
            kept=kept,
            chosen=self.chosen[row],
            without={one.index: one.type for one in self.every if not (one.attention or self._was_read(one.index))},
            within={layer.index: layer.parallel for layer in self.every if layer.attention and layer.parallel},
        )

    def _was_read(self, layer: int) -> bool:
        return LayerKey(layer, self.stack) in self.kv_of

    def _visible(self, key: LayerKey) -> str:
        known = self.layers.get(key.layer)
        if known is None:  # such as one that attends although its config calls it something else
            known = next((replace(one, of_unknown_type=True) for one in self.every if one.index == key.layer), None)
        return known.in_words if known else "full"

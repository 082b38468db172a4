"""One run of an attention module against the oracle: at the highest level that works, and how far they are apart.

A model in half precision is compared through a repetition of each run in float32, and as it ran.

The q and k of a layer that does not show them are those that the oracle makes of what enters its module, once its
weights are those that the module gave. A gradient finds its way through them to the hidden states.

At the end: what a text is too short to show, and what is taken on trust. There parity holds whatever the model does.

Shapes: B text, T token, H head, Q query, K key, E model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.certificate import oracle, verdicts
from attnscope.certificate.oracle import Arrangement, Expected, precise
from attnscope.certificate.verdicts import ATOL, Difference, LayerParity, Level, ParityReport, Tolerance, judged
from attnscope.errors import ModelError
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.modules import HALF, ModuleRecorder, ModuleRun
from attnscope.hooks.report import tolerance, turned_away
from attnscope.model.quantised import is_quantised
from attnscope.model.selection import CAUSAL, CROSS, DECODER, VISION, is_bidirectional, is_cross
from attnscope.model.tasks import looks_back_alone, stack_config
from attnscope.reference.layouts import layout_of
from attnscope.reference.projections import UnreadableError, setting
from attnscope.reference.reader import operands_of, read

if TYPE_CHECKING:
    from attnscope.model.geometry import LayerGeometry
    from attnscope.model.loaded import LoadedModel

# What a reader raises over a module that is built in another way than its layout says.
MISFITS = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError)


class Stack:
    """What the oracle knows of the layers of one stack."""

    def __init__(self, config: Any, stack: str, layers: Iterable[LayerGeometry]) -> None:
        self.config = stack_config(config, DECODER if is_cross(stack) else stack)
        self.layers = {layer.index: layer for layer in layers}
        layout = layout_of(self.config)
        self.layout = layout.across if layout and is_cross(stack) else layout


class Comparison:
    """Compares each run of an attention module with the oracle, and keeps what was found."""

    def __init__(
        self,
        loaded: LoadedModel,
        heads: Mapping[str, Mapping[int, tuple[int, ...]]],
        atol: float,
        level: Level,
        arrangements: Mapping[str, Arrangement],
    ) -> None:
        geometry = loaded.geometry
        stacks = {**geometry.other_stacks, geometry.stack: geometry.layers}
        self.config = loaded.model.config
        self.stacks = {stack: Stack(self.config, stack, layers) for stack, layers in stacks.items()}
        self.heads, self.atol, self.highest = heads, atol, level
        self.quantised, self.rotary = is_quantised(loaded.model), _rounded_rotary(loaded.model)
        self.arrangements = arrangements
        self.layers: list[LayerParity] = []
        self.keys: dict[str, int] = {}

    def judge(self, run: ModuleRun, recorder: ModuleRecorder) -> None:
        """Compare one run of an attention module, call by call."""
        self.keys |= {call.stack: call.visible.keys for call in run.calls}
        # Calls of which heads were chosen, and those of layers that the model was not thought to have.
        numbers = [
            number
            for number, call in enumerate(run.calls)
            if call.stack in self.stacks
            and (call.layer in self.heads.get(call.stack, {}) or call.layer not in self.stacks[call.stack].layers)
        ]
        if not numbers:
            return
        # Half precision has an exact form, its repetition in float32; without one all difference is called rounding.
        exact, unjudged = None, "its weights are quantised: rounding only" if self.quantised else ""
        if not self.quantised and _dtype(run) in HALF:
            try:
                exact = recorder.in_float32(run)
            except Exception as error:  # any family's module, asked to run in another dtype
                unjudged = f"its module does not run in float32: {error}"
            if exact is not None and len(exact.calls) != len(run.calls):
                unjudged = f"its module attends {len(run.calls)} times as run, {len(exact.calls)} times in float32"
                exact = None
        self.layers += [self._compared(run, exact, unjudged, number) for number in numbers]

    def _compared(self, run: ModuleRun, exact: ModuleRun | None, unjudged: str, number: int) -> LayerParity:
        """One call. exact: the run's repetition in float32. unjudged: why a run that needs one has none."""
        # Through the repetition where there is one, a copy that lost its layer; what the run itself did is judged next.
        original, weights_BHQK = run.calls[number], run.calls[number].weights_BHQK
        call = original if exact is None else replace(exact.calls[number], place=original.place)
        level, why, expected = self._oracle(run if exact is None else exact, call, unjudged)
        # As it ran it is held to its own q, k, v and mask where these are all that is compared.
        own = expected
        if exact is not None and expected is not None:
            own = oracle.from_call(original)
            if level == "full" and run.output_BTE is not None:
                own = replace(expected, model_output_BTE=run.output_BTE)
        implementation, as_run, rounding = self._differences(run, exact, unjudged, number, expected, own)
        # Without the oracle: whether rows sum to 1, and whether a call over one text looks where config and class say.
        row_sum_error, turned = None, ""
        if weights_BHQK is not None and (original.spec is None or original.spec.row_sinks is None):
            row_sum_error = verdicts.largest_size(weights_BHQK.float().sum(-1) - 1)
        if original.visible.queries == original.visible.keys and original.stack not in self.arrangements:
            turned = turned_away(float(original.visible.ahead), looks_back_alone(self.config, original.stack))
        judged_exactly = expected is not None and not unjudged
        apart = verdicts.seen_apart(call, expected, Tolerance(self.atol)) if expected and judged_exactly else ""
        # Rows of half precision sum to 1 to what it allows; elsewhere the weights themselves are held to less.
        sums_to_1 = True
        if row_sum_error is not None and exact is not None:
            sums_to_1 = row_sum_error <= tolerance(_dtype(run))[0]
        holds = implementation.holds and as_run.holds and sums_to_1 and not (turned or apart)
        # Layers that choose keys by their content may choose others in half precision, at any distance in weights.
        if exact is not None and original.spec is not None:  # else the mask was not seen, in neither
            visible, exact_visible = (each.visible.rows(0, each.visible.queries) for each in (original, call))
            if visible.shape != exact_visible.shape or not bool((visible == exact_visible).all()):
                why = "; ".join(filter(None, (why, "in half precision it attends to other keys than in float32")))
        masked_weight = None
        if own is not None and weights_BHQK is not None:  # a row that sees nothing is uniform in eager attention
            hidden_QK = ~own.visible_QK & own.visible_QK.any(-1, keepdim=True)
            masked_weight = verdicts.largest_size(weights_BHQK.float() * hidden_QK)
        return LayerParity(
            layer=call.layer,
            call=number,
            module=call.path,
            level=level,
            why=why,
            implementation=implementation,
            as_run=as_run,
            rounding=rounding,
            row_sum_error=row_sum_error,
            masked_weight=masked_weight,
            verdict=None if not turned and not judged_exactly else holds,
            stack=call.stack,
            turned=turned,
            apart=apart,
            kernel=original.kernel,
        )

    def _differences(
        self,
        run: ModuleRun,
        exact: ModuleRun | None,
        unjudged: str,
        number: int,
        expected: Expected | None,
        own: Expected | None,
    ) -> tuple[Difference, Difference, Difference]:
        """What is judged of a call, what of it as it ran in half precision, and what its rounding is."""
        original, none = run.calls[number], Difference()
        heads = self.heads.get(original.stack, {}).get(original.layer)
        weights_BHQK, atol = original.weights_BHQK, Tolerance(self.atol)
        if exact is None:
            if expected is None:
                return none, none, none
            if unjudged:
                return none, none, verdicts.difference(weights_BHQK, expected, heads)
            return judged(weights_BHQK, expected, heads, atol), none, none
        # The rounding of half precision needs no oracle: it is the run against its repetition.
        exact_BHQK, off = exact.calls[number].weights_BHQK, None
        if weights_BHQK is not None and exact_BHQK is not None:
            off = verdicts.largest_size(verdicts.of_heads(weights_BHQK - exact_BHQK, heads))
        rounding = Difference(off)
        if run.output_BTE is not None and exact.output_BTE is not None:
            rounding = Difference(off, *verdicts.output_difference(run.output_BTE, exact.output_BTE))
        if expected is None or own is None:
            return none, none, rounding
        allowed = Tolerance(max(self.atol, ATOL), _dtype(run))
        return judged(exact_BHQK, expected, heads, atol), judged(weights_BHQK, own, heads, allowed), rounding

    def _oracle(self, run: ModuleRun, call: AttentionCall, why: str) -> tuple[Level, str, Expected | None]:
        """The highest level that works, why not a higher one, and what the oracle expects there."""
        why = why or ("" if self.highest == "full" else f"asked for {self.highest}")
        blind = "" if call.weights_BHQK is not None else "the model returned no weights: only its output is compared"
        stack = self.stacks[call.stack]
        if not why:
            try:
                layer, arrangement = stack.layers.get(call.layer), self.arrangements.get(call.stack, oracle.PLAIN)
                expected = oracle.from_weights(run, stack.layout, stack.config, layer, arrangement)
                caveat = stack.layout.caveat if stack.layout else ""
                return "full", "; ".join(filter(None, (caveat, run.caveat, self.rotary, blind))), expected
            except UnreadableError as error:
                why = str(error)
            except MISFITS as error:
                why = f"its layout does not fit ({type(error).__name__}: {error})"
        if self.highest != "none" and (observed := oracle.from_call(call)) is not None:
            return "scores", "; ".join(filter(None, (why, blind))), observed
        return "none", why + "; its q, k and v cannot be heard" * (oracle.dtype_of(call) is None), None


def _rounded_rotary(model: nn.Module) -> str:
    """Whether rotary frequencies lost digits in half precision, in words: what their modules make of the config has
    them. transformers keeps them in float32 where it is asked for a dtype itself.
    """
    for module in model.modules():
        buffers = {name: buffer for name, buffer in module.named_buffers(recurse=False) if name.endswith("inv_freq")}
        fresh: Mapping[str, Tensor] = {}
        if buffers:
            with suppress(Exception):  # any family's module
                fresh = dict(type(module)(module.config).named_buffers())
        for name, frequencies in buffers.items():
            exact = fresh.get(name, frequencies.float()).to(frequencies.device)
            for half in (torch.bfloat16, torch.float16):  # the coarser first, which rounds the other's numbers too
                rounded = exact.to(half).to(frequencies.dtype)
                lost = torch.equal(frequencies, rounded) and not torch.equal(rounded.float(), exact)
                if lost or (name not in fresh and frequencies.dtype is half):
                    kind = str(half).removeprefix("torch.")
                    return (
                        f"its rotary frequencies are rounded to {kind}, as model.half() and model.to() leave them: "
                        f"from_pretrained(dtype={kind!r}) keeps them"
                    )
    return ""


def _dtype(run: ModuleRun) -> torch.dtype:
    """What a run rounds to: half precision where its model or one of its calls is in it."""
    dtypes = (run.model_dtype, *(oracle.dtype_of(call) for call in run.calls))
    return next((dtype for dtype in dtypes if dtype in HALF), run.model_dtype)


ANOTHER = "choose another model"


def made_spec(run: ModuleRun, stack: Stack) -> AttentionSpec:
    """A run's one call, with q, k and v as its family's layout makes them.

    Raises ModelError for a layer that no layout describes, and where the weights are not those of the model.

    >>> made_spec(run, stack).q_BHQD.requires_grad
    True
    """
    [call] = run.calls
    try:
        if stack.layout is None:
            raise UnreadableError("no layout is known for it")
        inputs = oracle.layer_inputs_of(run, stack.layout, stack.config, stack.layers[call.layer])
        reading = read(inputs)
    except UnreadableError as error:
        raise ModelError(f"the q and k of this model are not seen: {error}", ANOTHER) from None
    assert call.weights_BHQK is not None
    missed_BHQK = (precise(call.weights_BHQK) - reading.weights_BHQK).abs()
    allowed_BHQK = verdicts.weights_allowed(reading.weights_BHQK, reading.terms(), call.weights_BHQK.dtype)
    if not bool((missed_BHQK <= allowed_BHQK.clamp_min(ATOL)).all()):
        off = f"{float(missed_BHQK.max()):.2g}"
        raise ModelError(f"its weights differ by {off} from those of the q and k that its layout makes", ANOTHER)
    # Once more of the hidden states themselves: a gradient is to find its way to them.
    operands = operands_of(replace(inputs, hidden_BTE=run.hidden_BTE.to(inputs.hidden_BTE)))
    tokens, bias = operands.q_HQD.shape[2], operands.bias
    return AttentionSpec(
        operands.q_HQD,
        operands.k_GKD,
        operands.v_GKV,
        scale=operands.scale,
        visible=Visibility(tokens, tokens, reading.visible_QK[None, None], device=operands.q_HQD.device),
        softcap=operands.softcap,
        bias=None if bias is None else bias.expand(-1, tokens, -1)[None],
    )


# The config's entry with the length up to which a kind of rotary positions does not stretch.
STRETCHED_FROM = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}


def on_trust(loaded: LoadedModel, report: ParityReport) -> str:
    """What the oracle does not compute again, in words.

    >>> on_trust(loaded, report)
    'order of layers, norms, MLPs, embeddings'
    """
    otherwise = loaded.read_otherwise(max(report.tokens, report.source_tokens))
    if report.whole and report.whole.holds:
        return ", ".join(("transformers' own code, the config and the files", *loaded.trusted, *otherwise))
    parts = ["order of layers", "norms", "MLPs", "embeddings"]
    parts += ["encoder states handed over"] if CROSS in report.levels else []
    parts += ["features of pictures handed over"] if loaded.geometry.tower and VISION in report.levels else []
    nothing = "" if loaded.options else " (made in memory: no files to load a second instance from)"
    return ", ".join((*parts, *loaded.trusted, *otherwise)) + nothing


def too_short(loaded: LoadedModel, report: ParityReport) -> tuple[str, ...]:
    """What texts of so many tokens cannot show of the report's layers, in words.

    >>> too_short(loaded, report)
    ()
    """
    compared = {stack: {layer.layer for layer in report.layers if layer.stack == stack} for stack in report.levels}
    alone = set(loaded.geometry.stacks) == {report.plain}
    tokens = {**dict.fromkeys([report.plain, *CAUSAL], report.tokens), VISION: report.patches}
    return tuple(
        words if alone else f"{stack}: {words}"
        for stack, layers in compared.items()
        for words in _of_stack(loaded, stack, layers, tokens.get(stack, report.source_tokens))
    )


def _of_stack(loaded: LoadedModel, stack: str, compared: set[int], tokens: int) -> Iterator[str]:
    """What so many keys cannot show of some layers of a stack."""
    if tokens == 1:
        yield "any weight but 1"
    if tokens == 1 or is_cross(stack):
        return
    geometry, config = loaded.geometry, stack_config(loaded.model.config, stack)
    # Rotary positions that stretch do so from a length on; a window hides nothing of what fits into it.
    lengths, rope = set[tuple[int, str]](), setting(config, "rope_parameters", {})
    for rules in [rope] if "rope_type" in rope else rope.values():  # or one for each type of layer
        kind = setting(rules, "rope_type", "")
        name = STRETCHED_FROM.get(kind, "")
        length = setting(rules, name) or setting(config, name)
        if length and not (kind == "longrope" and setting(rules, "long_factor") == setting(rules, "short_factor")):
            lengths.add((length, f"{kind} positions past {length}"))
    for layer in {**geometry.other_stacks, geometry.stack: geometry.layers}[stack]:
        if layer.index in compared and layer.window:
            name = {"chunked": "chunk", "windowed": "windows"}.get(layer.type, "window")
            lengths.add((layer.window + is_bidirectional(stack), f"the {name} of {layer.window}"))
    yield from (what for length, what in sorted(lengths) if tokens <= length)

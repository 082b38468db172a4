"""Direct effects by key: what a head writes of each key's value towards the answer, A_ij <v_j W_O, u>, signed.

u is the direction of the residual stream that raises the answer's logit over a foil's, or over the mean of all. Gates
and the scales of norms are frozen as they were in an intact pass. Over all keys a query's effects sum to its direct
effect, see `direct`.

    result = directions_of_answer(loaded, prompt, rows=[5], foil=None)
    result.of[attention_module]                      # (H, R, V)

First the way from heads to logits: output projection, residual stream and final norm, with gates and norms between. No
family is known here: every step is measured on a few tokens, and the first that is not as simple is named.

    path = path_to_logits(loaded, ids)        # or in words why there is none
    path.towards(token_BT)                   # (B, T, E)

Shapes: B text, T token, H head, R row that is asked, V width of v, E model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnscope.errors import UsageError
from attnscope.hooks.calls import relative_error
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.listen import listen
from attnscope.hooks.projections import (
    EARLIER,
    Norm,
    ProjectionInputs,
    frozen_scales,
    has_earlier,
    in_streams,
    norm_of,
    plain_and_gated,
    projection,
    streams,
    weighted,
)
from attnscope.hooks.report import tolerance
from attnscope.model.loaded import as_input, weights_of
from attnscope.observe.value_norms import Directions

if TYPE_CHECKING:
    from attnscope.hooks.calls import AttentionCall
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.request import Request

ROUNDINGS = 4  # of the additions and factors between a block's input and its output
OTHERWISE = "its attention gives something else than the sum of its heads"
MOST_PARTS = 2  # modules of a block that add to the residual stream besides its attention


@dataclass(frozen=True)
class LogitPath:
    """How what a head writes reaches the logits: linear, but for gates and the scales of norms.

    out: each attention module's output projection; a gate before it is part of what it is given. gated: the attention
    modules with such a gate, or a norm there. added: by attention module, the factor with which it reaches the last
    block's output. after: the norm that takes an attention module's output before it is added, where there is one.
    factor: of the logits after the vocabulary projection. note: what is left out, in words.
    """

    out: Mapping[nn.Module, nn.Module]
    added: Mapping[nn.Module, float]
    norm: Norm
    unembed: nn.Module
    factor: float
    note: str = ""
    gated: frozenset[nn.Module] = frozenset()
    after: Mapping[nn.Module, Norm] = field(default_factory=dict)

    def towards(self, token_BT: Tensor) -> Tensor:
        """(B, T, E): the direction of the residual stream that raises a token's logit over the mean of all."""
        weight = weights_of(self.unembed)["weight"]
        unembed_BTE = weight[token_BT.to(weight.device)].float() - weight.mean(0, dtype=torch.float32)
        return self.norm.back(unembed_BTE)

    def before(self, attention: nn.Module, towards_BTE: Tensor) -> Tensor:
        """That direction as one of an attention module's output, but for the scale of the norm between."""
        added_BTE = self.added[attention] * towards_BTE
        return self.after[attention].back(added_BTE) if attention in self.after else added_BTE


def path_to_logits(loaded: LoadedModel, ids: Sequence[int]) -> LogitPath | str:
    """The way from the heads to the logits, verified on some tokens; or in words where it is not plain.

    Every block must add its attention, as its output projection or a norm after it gives it, and what others of its
    modules give, to what it was given, each with a factor; a norm must take the last block's output, and its projection
    be the logits but for a factor. Logits that the family caps after that are taken before it: the cap is no part of
    what a head writes.
    """
    unembed = loaded.model.get_output_embeddings()
    if unembed is None or getattr(unembed, "weight", torch.empty(0)).ndim != 2:
        return "the model has no vocabulary projection"
    try:
        return _path(loaded, ids, unembed)
    except _NotPlainError as reason:
        return str(reason)


def norms_after_attention(loaded: LoadedModel, ids: Sequence[int]) -> dict[nn.Module, Norm]:
    """The norms that are given what an attention module gives, by that module; found on some tokens."""
    try:
        passed = _passed(loaded, ids)
    except _NotPlainError:
        return {}
    # modules that give what one of their own parts gives, and add no residual to it
    alone = [module for module in passed.heads if any(passed.same(module, part) for part in weighted(module))]
    norms = {module: next(_norms_of(passed.gave[module], loaded.model.modules(), passed), None) for module in alone}
    return {module: norm for module, norm in norms.items() if norm is not None}


class _NotPlainError(Exception):
    """Why a head's way to the logits is not plain."""


@dataclass(frozen=True)
class _Sum:
    """What a block gives: `kept` times what it was given, `added` times its attention or the norm of it, and others."""

    kept: float
    attention: nn.Module | None = None
    added: float = 0.0
    norm: Norm | None = None


@dataclass(frozen=True)
class _Passed:
    """What every module was given and gave in one pass, and the heads' outputs of every attention module.

    extras: what else than its hidden states a module was given, of tensors that hold several vectors per token.
    """

    given: Mapping[nn.Module, Tensor]
    extras: Mapping[nn.Module, Sequence[Tensor]]
    gave: Mapping[nn.Module, Tensor]
    heads: Mapping[nn.Module, tuple[int, Tensor]]
    logits: Tensor
    dtype: torch.dtype

    def same(self, module: nn.Module, other: nn.Module) -> bool:
        """Whether two modules gave the same numbers."""
        return module in self.gave and other in self.gave and torch.equal(self.gave[module], self.gave[other])

    @property
    def allowed(self) -> float:
        """The largest relative error of matrix products in the model's own precision."""
        return tolerance(self.dtype, "bfloat16")[1]

    def close(self, result: Tensor, expected: Tensor) -> bool:
        """As far as matrix products in the model's own precision allow."""
        return result.shape == expected.shape and float(relative_error(result, expected)) <= self.allowed


def _path(loaded: LoadedModel, ids: Sequence[int], unembed: nn.Module) -> LogitPath:
    passed = _passed(loaded, ids)
    plain, gated = plain_and_gated(loaded, ids, len(passed.heads))
    out = plain | gated
    config = loaded.model.config.get_text_config()
    blocks = _blocks(loaded.model, list(passed.heads))
    # The residual is one vector per token, and a block is given that of the block before it alone.
    written = next((passed.gave[module] for module in passed.heads if module in passed.gave), None)
    residuals = [passed.given[block] for block in blocks if block in passed.given]
    if written is not None and residuals and (count := streams(residuals[0].numel(), written.numel())) > 1:
        raise _NotPlainError(in_streams(count))
    if any(has_earlier(passed.extras.get(block, ()), residuals) for block in blocks):
        raise _NotPlainError(EARLIER)
    before, sums = passed.given.get(blocks[0]), list[_Sum]()
    for index, block in enumerate(blocks):
        state = passed.given.get(block)
        if state is None or before is None or not torch.equal(state, before):
            raise _NotPlainError(f"block {index} does not take what the block before it gives")
        sums.append(_sum_of(block, index, passed, out))
        before = passed.gave.get(block)
    assert before is not None
    # What else takes what the last block gives is a norm: the first that does.
    within = {module for block in blocks for module in block.modules()}
    norm = next(_norms_of(before, [module for module in passed.given if module not in within], passed), None)
    if norm is None:
        raise _NotPlainError("no RMSNorm or LayerNorm takes what the last block gives")
    factor, note = _logits_factor(unembed, passed.gave[norm.module], passed, config)
    # Each attention module reaches the last block's output with the factors of all blocks behind it.
    added, after, behind = dict[nn.Module, float](), dict[nn.Module, Norm](), 1.0
    for part in reversed(sums):
        if part.attention is not None:
            added[part.attention] = part.added * behind
            if part.norm is not None:
                after[part.attention] = part.norm
        behind *= part.kept
    return LogitPath(out, added, norm, unembed, factor, note, frozenset(gated), after)


def _passed(loaded: LoadedModel, ids: Sequence[int]) -> _Passed:
    # Of every module what it is given and gives; of an attention call, from which a block's part is made, the heads.
    given: dict[nn.Module, Tensor] = {}
    extras: dict[nn.Module, list[Tensor]] = {}
    gave: dict[nn.Module, Tensor] = {}
    heads: dict[nn.Module, tuple[int, Tensor]] = {}

    def keep(module: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        came, went = _first([*inputs, kwargs.get("hidden_states")]), _first([output])
        if came is not None and went is not None:
            given[module], gave[module] = came.detach().cpu().clone(), went.detach().cpu().clone()
            others = [value for value in (*inputs, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 3]
            extras[module] = [value.detach().cpu().clone() for value in others if value is not came]

    def on_call(call: AttentionCall) -> None:
        if call.call > 0:
            raise _NotPlainError(f"layer {call.layer} attends twice")
        if call.output_BQHV is None:
            raise _NotPlainError(f"{loaded.geometry.model_type} attends where its heads' outputs are not seen")
        heads[call.module] = call.layer, call.output_BQHV

    # Hooks go whatever happens: the model is somebody else's.
    handles = [module.register_forward_hook(keep, with_kwargs=True) for module in loaded.model.modules()]
    ids_BT = torch.tensor([list(ids)], device=loaded.device)
    try:
        report = listen(loaded.model, ids_BT, on_call, engine=UNCHECKED, logits_at=range(len(ids)))
    finally:
        for handle in handles:
            handle.remove()
    assert report.logits is not None
    return _Passed(given, extras, gave, heads, report.logits.cpu(), next(loaded.model.parameters()).dtype)


def _first(values: Sequence[Any]) -> Tensor | None:
    """The first tensor of numbers, also within tuples."""
    for value in values:
        first = _first(value) if isinstance(value, tuple | list) else value
        if isinstance(first, Tensor) and first.is_floating_point():
            return first
    return None


def _blocks(model: nn.Module, attentions: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks that hold the attention modules: the one list of modules whose items hold one each at most."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for blocks in lists:
        counts = [sum(module in attentions for module in block.modules()) for block in blocks]
        if sum(counts) == len(attentions) and max(counts, default=0) == 1:
            return list(blocks)
    raise _NotPlainError("its attention modules do not lie in one list of blocks")


def _sum_of(block: nn.Module, index: int, passed: _Passed, out: Mapping[nn.Module, nn.Module]) -> _Sum:
    """The sum that a block is: of its attention, the heads through the projection, and of other modules' outputs."""
    attention = next((module for module in block.modules() if module in passed.heads), None)
    parts = [module for module in block.children() if module in passed.gave and attention not in list(module.modules())]
    inner = [module for part in parts for module in weighted(part) if module in passed.gave]
    writer = None if attention is None else _writer(attention, passed, out)
    norms = [] if writer is None else list(_norms_of(passed.gave[writer], block.modules(), passed))
    # most have no factors, and most modules give what the block adds; others add the residual themselves
    for fitted, summed in ((False, parts), (False, parts + inner), (True, parts)):
        for norm in (None, *norms):
            adds = writer if norm is None else norm.module
            factors = _factors(block, adds, [module for module in summed if module is not adds], passed, fitted)
            if factors is not None:
                return _Sum(factors[0]) if adds is None else _Sum(factors[0], attention, factors[1], norm)
    if attention is not None and writer is not attention:
        raise _NotPlainError(f"layer {passed.heads[attention][0]}: {OTHERWISE}")
    raise _NotPlainError(f"block {index} does not add its modules' outputs as they are to what it was given")


def _writer(attention: nn.Module, passed: _Passed, out: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """What gives the sum of the heads through the projection: the attention module, or the projection itself.

    BLOOM's attention module adds the residual to it, and BERT's leaves the projection to another.
    """
    layer, z_BTHV = passed.heads[attention]
    if attention not in out or passed.given[out[attention]].numel() != z_BTHV.numel():
        raise _NotPlainError(f"layer {layer}: no projection takes the heads side by side, as they come or gated")
    gated_BTHV = passed.given[out[attention]].reshape(z_BTHV.shape).to(z_BTHV.device)
    written_BTE = _written(out[attention], gated_BTHV)
    writers = [writer for writer in (attention, out[attention]) if passed.close(written_BTE, passed.gave[writer])]
    if not writers:
        raise _NotPlainError(f"layer {layer}: {OTHERWISE}")
    return writers[0]


def _factors(
    block: nn.Module, adds: nn.Module | None, parts: Sequence[nn.Module], passed: _Passed, fitted: bool
) -> list[float] | None:
    """The factors with which a block adds what it was given, what a module gave, and some of its parts or none.

    None where it gives something else. fitted: with factors other than 1; then that module must be needed.
    """
    state, gave, always = passed.given[block], passed.gave[block], [] if adds is None else [passed.gave[adds]]
    if any(term.shape != gave.shape for term in always):
        return None
    shaped = [passed.gave[part].reshape(gave.shape) for part in parts if passed.gave[part].numel() == gave.numel()]
    for count in range(MOST_PARTS + 1):
        for chosen in combinations(shaped, count):
            terms = [state, *always, *chosen]
            factors = _fitted(terms, gave) if fitted else [1.0] * len(terms)
            without = [factors[0], *(0.0 for _ in always), *factors[1 + len(always) :]]
            needed = adds is None or not fitted or not _is_sum(terms, without, gave)
            if needed and _is_sum(terms, factors, gave):
                return factors
    return None


def _fitted(terms: Sequence[Tensor], gave: Tensor) -> list[float]:
    """The factors with which the sum of the terms is nearest: Granite's, MiniCPM3's and Beam's are not 1."""
    columns = torch.stack([term.double().flatten() for term in terms], 1)
    factors: list[float] = torch.linalg.lstsq(columns, gave.double().flatten()[:, None]).solution[:, 0].tolist()
    return factors


def _is_sum(terms: Sequence[Tensor], factors: Sequence[float], gave: Tensor) -> bool:
    scaled = [factor * term.float() for factor, term in zip(factors, terms, strict=True)]
    size = sum(term.abs() for term in (*scaled, gave.float()))
    allowed = ROUNDINGS * torch.finfo(gave.dtype).eps * size
    return bool(((sum(scaled) - gave.float()).abs() <= allowed).all())


def _norms_of(x: Tensor, modules: Iterable[nn.Module], passed: _Passed) -> Iterator[Norm]:
    """The norms among some modules that were given x; what leaves it as it is, as dropout here, is none."""
    for module in modules:
        state = passed.given.get(module)
        if state is None or state.shape != x.shape or not torch.equal(state, x):
            continue
        if torch.equal(passed.gave[module], state):
            continue
        norm = norm_of(module, x.float(), passed.gave[module].float(), passed.allowed)
        if norm is not None:
            yield norm


def _written(out: nn.Module, z_BTHV: Tensor) -> Tensor:
    """What the heads write, each through its part of the projection, and its bias."""
    W_O_HVE = projection(out, z_BTHV.shape[2], z_BTHV)
    with torch.no_grad():
        bias = out(z_BTHV.flatten(-2) * 0)
    return (torch.einsum("bthv,hve->bte", z_BTHV.float(), W_O_HVE.float()) + bias).cpu()


def _logits_factor(unembed: nn.Module, normed: Tensor, passed: _Passed, config: Any) -> tuple[float, str]:
    """The factor of the logits after the projection, and what is left out."""
    with torch.no_grad():
        projected = unembed(as_input(normed, unembed)).float().cpu()
    logits = passed.logits.float()
    if logits.shape != projected.shape:
        raise _NotPlainError("its blocks are given other tokens than those of the text")
    factor = float((logits * projected).sum() / projected.square().sum())
    if passed.close(factor * projected, logits):
        return factor, ""
    cap = getattr(config, "final_logit_softcapping", None)
    if cap and passed.close(cap * torch.tanh(projected / cap), logits):
        return 1.0, f"of the logits before their cap at {cap:g}"
    raise _NotPlainError("the logits are not the projection of the final norm, but for a factor")


TRIED = 8  # tokens on which the way is verified


def asked_of_answer(request: Request, prompt: Prompt) -> Request:
    """The request about the rows that make the answer; with a foil about the one that makes its first token.

    Raises UsageError where there is no answer, or the prompt is not one of token ids alone.
    """
    if prompt.answer is None:
        raise UsageError("effects on a logit need an answer", "add {answer=TEXT}")
    if prompt.medium.inputs or prompt.medium.patches:
        raise UsageError(
            "effects on a logit are read of texts, not of pictures or sounds", "leave out the picture or the sound"
        )
    if request.query is not None:
        return request
    return replace(request, query="made" if request.view.foil is None else str(prompt.answer - 1))


def directions_of_answer(
    loaded: LoadedModel, prompt: Prompt, rows: Sequence[int], foil: Sequence[int] | None
) -> Directions:
    """Where a value must point to raise the logit of the answer's token, of every head in each row that is asked about.

    foil: the ids of a text whose first token's logit is taken off; without one it is the mean over the vocabulary.
    Raises UsageError where such a row makes no token of the answer, or, with a foil, not its first, and where the way
    from the heads to the logits is not plain.
    """
    assert prompt.answer is not None
    if foil is not None and not foil:
        raise UsageError("the foil is empty", "give one with at least one word, or leave out {foil}")
    made = range(prompt.answer - 1, len(prompt) - 1 if foil is None else prompt.answer)
    others = [row for row in rows if row not in made]
    if others:
        what = "no token of the answer" if foil is None else "another token than the answer's first, as a foil has it"
        raise UsageError(f"the row of token {others[0]} makes {what}", f"use {{query={made[0] if foil else 'made'}}}")
    if foil is not None and list(foil[:1]) == [prompt.ids[prompt.answer]]:
        raise UsageError("the answer and its foil begin with the same token", "choose another foil")
    path = path_to_logits(loaded, prompt.ids[:TRIED])
    if isinstance(path, str):
        raise UsageError(f"what a key writes to the logits is not known: {path}", "use {weights=value}")
    rows = sorted({*rows})
    towards_1RE = path.towards(torch.tensor([[prompt.ids[row + 1] for row in rows]]))
    if foil is not None:
        towards_1RE = towards_1RE - path.towards(torch.tensor([[foil[0]]]))
    return Directions(rows, _pulled(loaded, path, prompt.ids, rows, towards_1RE))


def _pulled(
    loaded: LoadedModel, path: LogitPath, ids: Sequence[int], rows: Sequence[int], towards_1RE: Tensor
) -> dict[nn.Module, Tensor]:
    """(H, R, V) by attention module: a direction of the residual stream, as one of the heads' values."""
    inputs = ProjectionInputs({attention: path.out[attention] for attention in path.gated})
    pulled: dict[nn.Module, Tensor] = {}

    def on_call(call: AttentionCall) -> None:
        assert call.output_BQHV is not None
        out = path.out[call.module]
        W_O_HVE = projection(out, call.P.heads, call.output_BQHV).float()
        direction_1RE = path.before(call.module, towards_1RE.to(W_O_HVE.device))
        pulled[call.module] = torch.einsum("re,hve->hrv", direction_1RE[0], W_O_HVE)
        z_RHV = call.output_BQHV[0, rows]

        def gate(given: Tensor) -> None:
            # What the heads' outputs were multiplied by; 0 where nothing was to be multiplied.
            gated_RHV = given.reshape(1, len(ids), *z_RHV.shape[1:])[0, rows].float()
            gate_RHV = torch.where(z_RHV == 0, 0.0, gated_RHV / torch.where(z_RHV == 0, 1.0, z_RHV.float()))
            pulled[call.module] = pulled[call.module] * gate_RHV.transpose(0, 1)

        if call.module in path.gated:
            inputs.on_next(call.module, gate)

    with inputs.watched(), frozen_scales([path.norm, *path.after.values()]) as scales:
        listen(loaded.model, torch.tensor([list(ids)], device=loaded.device), on_call, engine=UNCHECKED)
    for attention, one_HRV in pulled.items():
        scale_R1 = scales[path.norm.module][0, rows] * path.factor
        if attention in path.after:
            scale_R1 = scale_R1 * scales[path.after[attention].module][0, rows]
        pulled[attention] = one_HRV * scale_R1.to(one_HRV.device)
    return pulled

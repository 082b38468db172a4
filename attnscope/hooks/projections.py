"""What lies around a model's attention: output projections, norms, heads that are differences, residuals in streams.

Nothing here knows families. Whether a module is a norm, and of which kind, is measured on its input and output, and its
scale is frozen: what it does to a part of what it was given, each row's scale being that of the whole. The output
projections, W_O, are found by what they are given, and read by what they make of it. That a residual is no plain sum of
what blocks write, but several streams, or an attention over what was before, shows in what blocks are given in a pass.
In differential attention (Ye et al. 2025, arXiv:2410.05258) a head's weights are P1 - lambda P2, of two softmaxes: the
model's call has both, the first of every pair in the first half of its heads.

Shapes: B text, T token, H head, V width of v, E model width, Q query, K key; ... any rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnscope.attention.operator import DenseAttention
from attnscope.hooks.calls import AttentionCall, relative_error, same_numbers
from attnscope.hooks.engines import ENGINES, UNCHECKED, full_precision
from attnscope.hooks.forward import attention_modules, temporary
from attnscope.hooks.listen import calls_interface, listen
from attnscope.hooks.report import tolerance
from attnscope.model.loaded import weights_of
from attnscope.model.quantised import is_plain
from attnscope.model.selection import DIFFERENCE

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel


@dataclass(frozen=True)
class Norm:
    """A norm with a frozen scale: weight ⊙ x, or x without its mean, and some bias."""

    module: nn.Module
    weight_E: Tensor
    bias_E: Tensor
    centred: bool

    def scale(self, x: Tensor, y: Tensor) -> Tensor:
        """(..., 1): what it multiplied each row by, from its input and output; 0 for a row that it makes nothing of."""
        straight, unbiased = self.straight(x), y - self.bias_E.to(y.device)
        size = straight.square().sum(-1, keepdim=True)
        return (unbiased * straight).sum(-1, keepdim=True) / size.masked_fill(size == 0, torch.inf)

    def straight(self, x: Tensor) -> Tensor:
        """The norm of x but for its scale and its bias."""
        return self.weight_E.to(x.device) * (x - x.mean(-1, keepdim=True) if self.centred else x)

    def back(self, direction: Tensor) -> Tensor:
        """The direction of what it is given that is a direction of what it gives, but for its scale: its transpose."""
        weighted = self.weight_E.to(direction.device) * direction
        return weighted - weighted.mean(-1, keepdim=True) if self.centred else weighted

    def frozen(self, x: Tensor, scale: Tensor) -> Tensor:
        """The norm of x with a scale that was found before."""
        return scale * self.straight(x) + self.bias_E.to(x.device)


def norm_of(module: nn.Module, x: Tensor, y: Tensor, allowed: float) -> Norm | None:
    """The module as a norm with a frozen scale, where it is one: of x or centred x, times its weight or its weight + 1.

    x, y: float32, its input and output. allowed: the largest relative error of a norm that is the module.
    """
    weight, bias = (weights_of(module).get(name) for name in ("weight", "bias"))
    ones_E = torch.ones(x.shape[-1], device=x.device)
    weights = [ones_E]
    if weight is not None:
        # There must be a weight for each number of a row, or of the last parts of a row.
        sizes = zip(weight.shape, x.shape[x.ndim - weight.ndim :], strict=True)
        if weight.ndim > x.ndim or not all(size in (1, own) for size, own in sizes):
            return None
        weight_E = weight.detach().float().to(x.device)
        weights = [weight_E, weight_E + 1]  # Gemma's is added to 1
    bias_E = ones_E * 0 if bias is None else bias.detach().float().to(x.device)
    for centred in (False, True):
        for weight_E in weights:
            norm = Norm(module, weight_E, bias_E, centred)
            if x.shape == y.shape and float(relative_error(norm.frozen(x, norm.scale(x, y)), y)) <= allowed:
                return norm
    return None


@contextmanager
def frozen_scales(norms: Sequence[Norm]) -> Iterator[Mapping[nn.Module, Tensor]]:
    """While open, the scales that norms give the rows of a pass, (..., 1) on the CPU, by the norm's module."""
    by_module, scales = {norm.module: norm for norm in norms}, dict[nn.Module, Tensor]()

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        scales[module] = by_module[module].scale(inputs[0].float(), output.float()).cpu()

    with temporary([module.register_forward_hook(note) for module in by_module]):
        yield scales


def norms_behind(
    loaded: LoadedModel, out: Mapping[nn.Module, nn.Module], ids: Tensor, **inputs: Any
) -> dict[nn.Module, Norm]:
    """{attention module: the norm that is given what its output projection gives, as it is}.

    out: {attention module: its output projection}. ids: what the model's forward is given first, inputs what else.
    """
    attention_of = {projection: attention for attention, projection in out.items()}
    gave: dict[nn.Module, Tensor] = {}
    norms: dict[nn.Module, Norm] = {}

    # In the order of the pass: a projection gives first what the norm after it is given.
    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module in attention_of and isinstance(output, Tensor):
            gave[attention_of[module]] = output
            return
        # Dropout and identities hand on the same numbers: what follows them is tried instead.
        x = args[0] if args else None
        if not isinstance(x, Tensor) or not isinstance(output, Tensor) or same_numbers(output, x):
            return
        for attention, projected in gave.items():
            if x.shape == projected.shape and same_numbers(x, projected) and attention not in norms:
                norm = norm_of(module, x.float(), output.float(), tolerance(x.dtype, "bfloat16")[1])
                if norm is not None:
                    norms[attention] = norm

    parts = [part for part in loaded.model.modules() if part in attention_of or not list(part.children())]
    with temporary([part.register_forward_hook(after) for part in parts]):
        listen(loaded.model, ids, lambda call: None, engine=UNCHECKED, **inputs)
    return norms


def output_projections(loaded: LoadedModel, ids: Sequence[int] | Tensor, **inputs: Any) -> dict[nn.Module, nn.Module]:
    """{attention module: its output projection}: the linear module that is given the heads' outputs as they are.

    It may be outside the module that attends, as BERT's is. ids: of one text, or what the model's forward is given
    first, and inputs what else, see `inputs.given`. One with an adapter is the layer around it and its own weights,
    which is given the heads' outputs before its parts are.
    """
    reads = ids if isinstance(ids, Tensor) else torch.tensor([list(ids)], device=loaded.device)
    outputs: dict[nn.Module, Tensor] = {}  # of all heads side by side, by the module that attends
    projections: dict[nn.Module, nn.Module] = {}
    since: list[tuple[nn.Module, Tensor]] = []  # what modules were given since the last call

    def on_call(call: AttentionCall) -> None:
        if call.output_BQHV is not None:
            outputs[call.module] = call.output_BQHV.flatten(-2)
            for module, x in since if call.spec is None else ():  # such a call is heard when its module is left
                if same_numbers(x, outputs[call.module]):
                    projections.setdefault(call.module, module)
        since.clear()

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        since.append((module, args[0]))
        for attention, heads in list(outputs.items())[-1:]:  # the last that called
            if same_numbers(args[0], heads):
                projections.setdefault(attention, module)

    with temporary([part.register_forward_pre_hook(before) for part in weighted(loaded.model)]):
        listen(loaded.model, reads, on_call, engine=ENGINES["eager"], **inputs)
    return {attention: out for attention, out in projections.items() if _is_linear(out, outputs[attention])}


def gated_projections(loaded: LoadedModel, ids: Sequence[int] | Tensor, **inputs: Any) -> dict[nn.Module, nn.Module]:
    """As `output_projections`, of attention modules with a gate or a norm between their heads and their projection.

    Measured: where every number of the heads' outputs is made another times as large, the linear module must be given
    numbers that are as many times as large, but for one factor per token and head, which is what a norm does. The gate
    itself stays what it is: it is made of what the attention module was given. Nothing of families that attend outside
    the interface, or twice in a layer.
    """
    if not calls_interface(loaded.model):
        return {}
    reads = ids if isinstance(ids, Tensor) else torch.tensor([list(ids)], device=loaded.device)
    gave: dict[nn.Module, Any] = {}
    factor_HV: dict[nn.Module, Tensor] = {}
    first, second = (_part_inputs(loaded.model, reads, inputs, gave, factors) for factors in (None, factor_HV))

    # The second input must be the first times the factors, but for one factor per token and head.
    def scales(attention: nn.Module, before_BTHV: Tensor, after_BTHV: Tensor) -> bool:
        expected_BTHV = before_BTHV.float() * factor_HV[attention].float()
        size = expected_BTHV.square().sum(-1, keepdim=True)
        along = (after_BTHV.float() * expected_BTHV).sum(-1, keepdim=True) / size.masked_fill(size == 0, torch.inf)
        error = relative_error(along * expected_BTHV, after_BTHV.float())
        return float(error) <= tolerance(before_BTHV.dtype)[1]

    projections = {}
    for attention, inputs_of in first.items():
        for part, before in reversed(inputs_of.items()):  # what is nearest to the module's output first
            after = second.get(attention, {}).get(part)
            if after is not None and scales(attention, before, after) and _is_linear(part, before.flatten(-2)):
                projections[attention] = part
                break
    return projections


def _part_inputs(
    model: nn.Module,
    ids: Tensor,
    inputs: dict[str, Any],
    gave: dict[nn.Module, Any],
    factor_HV: dict[nn.Module, Tensor] | None,
) -> dict[nn.Module, dict[nn.Module, Tensor]]:
    """What the parts of each attention module were given after its call, of as many numbers as the heads give.

    factor_HV: where there is such, each number that a head gives is multiplied by its own factor, which is put there.
    gave: what every attention module gave in an earlier pass, which it gives again, so that the layers after it change
    nothing; filled in the first.
    """
    inputs_of: dict[nn.Module, dict[nn.Module, Tensor]] = {}
    calls: dict[nn.Module, Tensor] = {}
    twice: set[nn.Module] = set()

    # Of a module that attends twice in a layer it would not be known which call its parts are given.
    def change(call: AttentionCall) -> Tensor | None:
        output_BTHV = call.output_BQHV
        assert output_BTHV is not None
        twice.update({call.module} & calls.keys())
        calls[call.module] = output_BTHV
        if factor_HV is None:
            return None
        drawn = torch.rand(output_BTHV.shape[-2:], generator=torch.Generator().manual_seed(0)) + 0.5
        factor_HV[call.module] = drawn.to(output_BTHV)
        return output_BTHV * factor_HV[call.module]

    # A part that is given as many numbers as the heads give may be the output projection: which one shows the factor.
    def watch(attention: nn.Module) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            heads, x = calls.get(attention), args[0] if args else None
            if heads is not None and isinstance(x, Tensor) and x.numel() == heads.numel():
                inputs_of.setdefault(attention, {})[module] = x.reshape(heads.shape).clone()

        return before

    # What a module gives again is what it gave at first: the layers after it see the same in every pass.
    def after(attention: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return gave.setdefault(attention, output) if attention in calls else None

    attentions = attention_modules(model)
    hooks = [part.register_forward_pre_hook(watch(outer)) for outer in attentions for part in weighted(outer)]
    hooks += [attention.register_forward_hook(after) for attention in attentions]
    with temporary(hooks):
        listen(model, ids, lambda call: None, engine=UNCHECKED, change=change, **inputs)
    return {attention: parts for attention, parts in inputs_of.items() if attention not in twice}


def plain_and_gated(
    loaded: LoadedModel, ids: Sequence[int] | Tensor, modules: int, **inputs: Any
) -> tuple[dict[nn.Module, nn.Module], dict[nn.Module, nn.Module]]:
    """`output_projections`, and where these are fewer than `modules`, `gated_projections` of the others."""
    plain = output_projections(loaded, ids, **inputs)
    gated = gated_projections(loaded, ids, **inputs) if len(plain) < modules else {}
    return plain, {attention: out for attention, out in gated.items() if attention not in plain}


class ProjectionInputs:
    """What output projections are given, while the pass continues.

    out: {attention module: its output projection}.

        >>> inputs = ProjectionInputs(gated_projections(loaded, ids))
        >>> with inputs.watched():
        ...     listen(model, ids, lambda call: inputs.on_next(call.module, lambda x: print(call.layer, x.norm())))
    """

    def __init__(self, out: Mapping[nn.Module, nn.Module]) -> None:
        self.out = out
        self._waiting: dict[nn.Module, Callable[[Tensor], None]] = {}

    def on_next(self, attention: nn.Module, call: Callable[[Tensor], None]) -> None:
        """Call `call` with what the module's projection is given next; in full precision, without gradients."""
        self._waiting[self.out[attention]] = call

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While open, what is given is handed on."""

        def before(projection: nn.Module, inputs: tuple[Any, ...]) -> None:
            call = self._waiting.pop(projection, None)
            if call is not None:
                with torch.no_grad(), full_precision(inputs[0].device):
                    call(inputs[0])

        with temporary([out.register_forward_pre_hook(before) for out in self.out.values()]):
            try:
                yield
            finally:
                self._waiting.clear()


def weighted(module: nn.Module) -> list[nn.Module]:
    """The parts of a module that have weights and no parts, and those with an adapter.

    >>> [type(part).__name__ for part in weighted(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))]
    ['Linear']
    """
    parts = [part for part in module.modules() if part is not module and list(part.parameters())]
    return [part for part in parts if not list(part.children()) or hasattr(part, "base_layer")]


@torch.no_grad()
def _is_linear(out: nn.Module, heads: Tensor) -> bool:
    """Whether twice as much in gives twice as much out, but for quantisation: a norm before the projection does not."""
    nothing = out(heads * 0)
    once, twice = out(heads) - nothing, out(heads * 2) - nothing
    return bool((twice - 2 * once).norm() <= 0.05 * twice.norm())


def projection(out: nn.Module, heads: int, like: Tensor) -> Tensor:
    """W_O (H, V, E) of an output projection, whatever class keeps it: what it makes of each unit vector."""
    width = heads * like.shape[-1]
    if type(out) is nn.Linear and is_plain(out.weight) and not out.weight.is_meta:
        return out.weight.detach().T.reshape(heads, like.shape[-1], -1)
    with torch.no_grad():
        unit = torch.eye(width, dtype=like.dtype, device=like.device)
        return (out(unit) - out(unit[:1] * 0)).view(heads, like.shape[-1], -1)


def gram_root(out: nn.Module, heads: int, like: Tensor, norm: Norm | None = None) -> Tensor:
    """R (H, V, V) with |v R| = |v W_O| for every v: R Rᵀ is the Gram matrix W_O W_Oᵀ of a head.

    norm: takes what the projection gives; then of what it makes of v W_O, but for its scale. Read off W_O itself, by
    QR: in the Gram matrix small norms would lose half their digits.
    """
    W_O_HVE = projection(out, heads, like).float()
    W_O_HVE = (W_O_HVE if norm is None else norm.straight(W_O_HVE)).cpu()  # LAPACK's: not every device has one
    return torch.linalg.qr(W_O_HVE.mT, mode="r").R.mT.to(like.device)


LEARNED = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def strength(module: nn.Module) -> float | None:
    """The lambda of a module of differential attention, None for another.

    >>> strength(nn.Linear(2, 2)) is None
    True
    """
    learned = [getattr(module, name, None) for name in LEARNED]
    vectors = [vector.detach().float() for vector in learned if isinstance(vector, Tensor)]
    if len(vectors) < len(LEARNED):
        return None
    q1, k1, q2, k2 = vectors
    return float(torch.exp(q1 @ k1) - torch.exp(q2 @ k2)) + float(getattr(module, "lambda_init", 0.0))


def differences(call: AttentionCall) -> AttentionCall | None:
    """The differences of a call's pairs of heads as a call; None where there are none, or no matrix to take them of."""
    factor = strength(call.module) if call.call == 0 and call.weights_BHQK is not None else None
    if factor is None:
        return None
    first, second = call.P.dense().chunk(2, 1)
    weights_BHQK = first - factor * second
    return replace(
        call,
        place=replace(call.place, stack=DIFFERENCE),
        P=DenseAttention(weights_BHQK, call.visible),
        spec=None,
        weights_BHQK=weights_BHQK,
        output_BQHV=None,
    )


EARLIER = "its blocks attend to what earlier blocks were given, so that its residual is no plain sum"


def streams(residual: int, written: int) -> int:
    """How many streams a residual is: of hyper-connections several of the width that a block's modules write.

    residual, written: how many numbers it has, and what one of those modules gave for the same tokens. Zhu et al. 2024,
    Hyper-Connections, arXiv:2409.19606.
    """
    return max(1, residual // written) if written else 1


def in_streams(count: int) -> str:
    """Why a residual of several streams is no plain sum, in words."""
    return f"its residual is {count} streams that every block mixes, as in hyper-connections, and no plain sum"


def has_earlier(inputs: Iterable[Tensor], earlier: Sequence[Tensor]) -> bool:
    """Whether a block is given, side by side in one tensor, what earlier blocks were given, (B, T, E) each."""
    stacked = [value for value in inputs if value.ndim > 3 and value.is_floating_point()]
    return any(
        bool((part_BTE == state_BTE).all())
        for state_BTE in earlier
        for many in stacked
        if state_BTE.ndim == 3 and (*many.shape[:-2], many.shape[-1]) == state_BTE.shape
        for part_BTE in many.unbind(-2)
    )

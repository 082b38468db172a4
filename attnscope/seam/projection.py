"""The output projections of a model, W_O: found by what they are given, read by what they make of it.

Shapes: B text, T token, H head, V width of v, E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnscope.model.quantised import is_plain
from attnscope.seam.checks import relative_error, same_numbers
from attnscope.seam.engines import ENGINES, UNCHECKED, full_precision
from attnscope.seam.forward import attention_modules, temporary
from attnscope.seam.listen import calls_interface, listen
from attnscope.seam.report import tolerance

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel
    from attnscope.seam.call import AttentionCall
    from attnscope.seam.norms import Norm


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
    passes = _Scaled(loaded, reads, inputs)
    first, second = passes.given(intact=True), passes.given(intact=False)
    projections = {}
    for attention, inputs_of in first.items():
        for part, before in reversed(inputs_of.items()):  # what is nearest to the module's output first
            after = second.get(attention, {}).get(part)
            if after is not None and passes.scales(attention, before, after) and _is_linear(part, before.flatten(-2)):
                projections[attention] = part
                break
    return projections


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


class _Scaled:
    """Two passes of a model, in the second of which each number that a head gives is multiplied by its own factor.

    Every attention module gives in the second pass what it gave in the first, so that the layers after it change
    nothing.
    """

    def __init__(self, loaded: LoadedModel, ids: Tensor, inputs: dict[str, Any]) -> None:
        self._model, self._ids, self._inputs = loaded.model, ids, inputs
        self._factor_HV: dict[nn.Module, Tensor] = {}
        self._gave: dict[nn.Module, Any] = {}

    def given(self, intact: bool) -> dict[nn.Module, dict[nn.Module, Tensor]]:
        """What the parts of each attention module were given after its call, of as many numbers as the heads give."""
        inputs_of: dict[nn.Module, dict[nn.Module, Tensor]] = {}
        calls: dict[nn.Module, Tensor] = {}
        twice: set[nn.Module] = set()

        # Of a module that attends twice in a layer it would not be known which call its parts are given.
        def change(call: AttentionCall) -> Tensor | None:
            assert call.output_BQHV is not None
            twice.update({call.module} & calls.keys())
            calls[call.module] = call.output_BQHV
            return None if intact else call.output_BQHV * self._factor(call.module, call.output_BQHV)

        def watch(attention: nn.Module) -> Any:
            def before(module: nn.Module, args: tuple[Any, ...]) -> None:
                heads, x = calls.get(attention), args[0] if args else None
                if heads is not None and isinstance(x, Tensor) and x.numel() == heads.numel():
                    inputs_of.setdefault(attention, {})[module] = x.reshape(heads.shape).clone()

            return before

        # The second pass gets the first one's outputs, so that each layer is given the same in both.
        def after(attention: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return self._gave.setdefault(attention, output) if attention in calls else None

        attentions = attention_modules(self._model)
        hooks = [part.register_forward_pre_hook(watch(outer)) for outer in attentions for part in weighted(outer)]
        hooks += [attention.register_forward_hook(after) for attention in attentions]
        with temporary(hooks):
            listen(self._model, self._ids, lambda call: None, engine=UNCHECKED, change=change, **self._inputs)
        return {attention: parts for attention, parts in inputs_of.items() if attention not in twice}

    def scales(self, attention: nn.Module, before_BTHV: Tensor, after_BTHV: Tensor) -> bool:
        """Whether the second input is the first times the factors, but for one factor per token and head."""
        expected_BTHV = before_BTHV.float() * self._factor_HV[attention].float()
        size = expected_BTHV.square().sum(-1, keepdim=True)
        along = (after_BTHV.float() * expected_BTHV).sum(-1, keepdim=True) / size.masked_fill(size == 0, torch.inf)
        error = relative_error(along * expected_BTHV, after_BTHV.float())
        return float(error) <= tolerance(before_BTHV.dtype)[1]

    def _factor(self, attention: nn.Module, like_BTHV: Tensor) -> Tensor:
        if attention not in self._factor_HV:
            drawn = torch.rand(like_BTHV.shape[-2:], generator=torch.Generator().manual_seed(0)) + 0.5
            self._factor_HV[attention] = drawn.to(like_BTHV)
        return self._factor_HV[attention]


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

"""How a forward is followed between branches: every tensor there as a sum of what branches gave.

    tape = Tape(model)
    with tape:
        ...                             # the model runs
    expanded(tape.node(residual), known={tape.node(entered): {Block("embedding"): entered}}, rest=Block("rest", 0))

What a branch computes is not recorded: its output is what the branch's block wrote. Of operations outside of branches
those are followed by which a sum can be taken apart: additions, copies, products with a factor, norms with the scale
that they had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attnscope.hooks.forward import operation
from attnscope.studies.attribution_records import Block

Change = Callable[[Tensor], Tensor]


class Source(NamedTuple):
    """A run of a branch; at: which of the pass. size: of its weights."""

    at: int
    block: Block
    size: int


@dataclass(eq=False)
class Node:
    """A tensor between branches, and what it is a sum of.

    terms: other nodes, each with what was made of it on the way, None for nothing. rest: what else was added. carries:
    whether the residual is in it. blocks: who wrote it. origins: the branches that it comes from. entries: of a stack
    of states, the blocks of each along its last axis but one. uses: the mixtures of blocks that it is, with the number
    of the query.
    """

    value: Tensor
    terms: tuple[Term, ...] = ()
    rest: tuple[Tensor, ...] = ()
    carries: bool = False
    blocks: tuple[Block, ...] = ()
    origins: frozenset[Source] = frozenset()
    entries: tuple[tuple[Block, ...], ...] | None = None
    uses: frozenset[tuple[int, int]] = frozenset()


Term = tuple[Node, Change | None]
Sum = tuple[list[Term], list[Tensor]]  # nodes, each changed, and tensors that have none


class Operation(NamedTuple):
    """One that ran, and one of its outputs. place: which, None of a single one. of: the node of an argument."""

    name: str
    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: Sequence[Any]
    place: int | None
    of: Callable[[Any], Node | None]

    @property
    def output(self) -> Tensor:
        """The one that is meant."""
        output: Tensor = self.outputs[self.place or 0]
        return output

    def again(self, x: Tensor) -> Tensor:
        """The same, of another first argument."""
        result = self.func(x, *self.args[1:], **self.kwargs)
        one: Tensor = result if self.place is None else result[self.place]
        return one

    def axis(self, ndim: int) -> int:
        """The axis that it is along, counted from the front."""
        axis: int = self.args[1] if len(self.args) > 1 else self.kwargs.get("dim", 0)
        return axis % ndim


VIEWS = frozenset(
    """
    alias clone contiguous detach detach_ expand lift_fresh permute select slice squeeze t transpose unsqueeze view
    _unsafe_view reshape _to_copy sum mean neg unbind split split_with_sizes index index_select constant_pad_nd roll
    flip repeat unflatten dropout unfold
    """.split()  # noqa: SIM905
)
SHAPES = frozenset(("view", "_unsafe_view", "reshape"))
SAME = frozenset(("alias", "clone", "contiguous", "detach", "detach_", "lift_fresh", "_to_copy", "dropout"))
SUMS = {"add": 1, "add_": 1, "sub": -1, "sub_": -1}
MATRICES, QUOTIENTS = frozenset(("bmm", "mm", "matmul")), frozenset(("div", "div_"))
PRODUCTS = MATRICES | QUOTIENTS | {"mul", "mul_"}


class Tape(TorchDispatchMode):
    """Records what is done between branches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.nodes: dict[int, Node] = {}
        self.closed = 0  # how many branches run, one in the other
        self.written: dict[Block, Tensor] = {}  # by earlier blocks
        self.weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    @contextmanager
    def off(self) -> Iterator[None]:
        """While open, nothing is recorded."""
        self.closed += 1
        try:
            yield
        finally:
            self.closed -= 1

    def node(self, value: Any) -> Node | None:
        """Of a tensor, where it has one."""
        node = self.nodes.get(id(value))
        return node if node is not None and node.value is value else None

    def put(self, node: Node) -> Node:
        """Keep a node, which is then that of its tensor."""
        self.nodes[id(node.value)] = node
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.closed or not self.nodes:
            return operation(func, args, kwargs)
        values = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else (arg,))]
        nodes = [node for one in values if isinstance(one, Tensor) and (node := self.node(one)) is not None]
        if not nodes:
            return operation(func, args, kwargs)
        if torch.is_inference_mode_enabled() or any(node.value.is_inference() for node in nodes):
            with self:  # there operations arrive that are made of others
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = func._schema.name.partition("::")[2]
        in_place = name.endswith("_") and not name.startswith("_")
        own = {id(one): self._kept(one) for one in (args[0], args[0]._base) if one is not None} if in_place else {}
        nodes = [own.get(id(node.value)) or node for node in nodes]

        def of(value: Any) -> Node | None:
            return own.get(id(value)) or self.node(value)

        result = operation(func, args, kwargs)
        several = isinstance(result, list | tuple)
        outputs = list(result) if several else [result]
        for place, output in enumerate(outputs):
            if isinstance(output, Tensor) and output.is_floating_point():
                ran = Operation(name, func, args, kwargs, outputs, place if several else None, of)
                node = self.put(self._made(ran, nodes))
                if in_place and output._base is not None:
                    self._change_part(node, output._base, own.get(id(output._base)))
        return result

    def _kept(self, value: Tensor) -> Node | None:
        """What a tensor is before it changes in place: from here on that is another one."""
        for block, part in self.written.items():
            if part.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
                self.written[block] = part.clone()
        node = self.node(value)
        return node if node is None or node.carries else replace(node, value=value.clone())

    def _change_part(self, part: Node, whole: Tensor, before: Node | None) -> None:
        """A part of a tensor changed in place: the whole is what it was elsewhere, and there what the part is now."""
        self.nodes.pop(id(whole), None)
        if before is None or not whole.is_contiguous():
            return
        view, shape = part.value, whole.shape
        at = view.size(), view.stride(), view.storage_offset() - whole.storage_offset()
        terms: tuple[Term, ...] = (
            (before, lambda x: torch.as_strided_scatter(x.contiguous(), x.new_zeros(at[0]), *at)),
            (part, lambda x: torch.as_strided_scatter(x.new_zeros(shape), x, *at)),
        )
        self.put(summed(whole, terms, ()))

    def _made(self, ran: Operation, nodes: Sequence[Node]) -> Node:
        """What an operation gave; nodes: of what it was given."""
        uses: frozenset[tuple[int, int]] = frozenset().union(*(node.uses for node in nodes))
        if ran.name in ("unbind", "select") and len(nodes) == 1 and len({number for number, _ in uses}) == 1:
            # One query of a mixture.
            given = ran.args[0]
            axis = ran.axis(given.ndim)
            if axis == given.ndim - 2:
                query = ran.place if ran.name == "unbind" else ran.args[2] % given.shape[axis]
                uses = frozenset(use for use in uses if use[1] == query)
        # What is no sum of nodes is a write of its own: of the branch that gave its parts last.
        made = self._terms(ran)
        if made is None:
            origins: frozenset[Source] = frozenset().union(*(node.origins for node in nodes if not node.carries))
            block = block_of(origins)
            node = Node(ran.output, blocks=() if block is None else (block,), origins=origins)
        else:
            node = summed(ran.output, *made)
        return replace(node, entries=_entries(ran, nodes), uses=uses)

    def _terms(self, ran: Operation) -> Sum | None:
        """What an operation's output is a sum of. None where it is no sum."""
        name, args, shape, of = ran.name, ran.args, ran.output.shape, ran.of
        first = of(args[0]) if args else None
        # A view moves numbers and changes none: each part is moved as the whole is.
        if name in VIEWS and first is not None:
            if name in SAME:
                return [(first, None)], []
            return [(first, (lambda x: x.reshape(shape)) if name in SHAPES else ran.again)], []
        # Of a sum each side that carries the residual is a term, and what does not is kept as it is.
        if name in SUMS:
            return _added(ran)
        if name == "copy_":
            source = of(args[1])
            if source is None:
                return [], [args[1].expand(shape)]
            return [(source, partial(_spread, times=1, shape=shape))], []
        if name in PRODUCTS:
            return self._product(ran)
        if name == "cat":
            return _joined(ran), []
        # A choice between two is a sum of both, each with zeros where the other is chosen.
        if name == "where" and len(args) == 3:
            pairs = [(of(args[1]), True), (of(args[2]), False)]
            if all(node is not None for node, _ in pairs):
                return [(node, partial(_chosen, args[0], side)) for node, side in pairs if node is not None], []
        if name in ("masked_fill", "masked_fill_") and first is not None and args[2] == 0:
            return [(first, lambda x: x.masked_fill(args[1], 0))], []
        # A norm keeps the scale that it had for the whole: then it is linear in its parts.
        if name == "native_layer_norm" and first is not None and ran.place == 0:
            weight, bias, scale, axes = args[2], args[3], ran.outputs[2], tuple(range(-len(args[1]), 0))

            def normed(x: Tensor) -> Tensor:
                centred = (x - x.mean(axes, keepdim=True)) * scale
                return centred if weight is None else centred * weight

            return [(first, normed)], [] if bias is None else [bias.expand(shape)]
        if name == "_fused_rms_norm" and first is not None and ran.place == 0:
            weight, scale = args[2], ran.outputs[1]
            return [(first, lambda x: x * scale if weight is None else x * scale * weight)], []
        return None

    def _product(self, ran: Operation) -> Sum | None:
        """A product is one in front of the factor that carries the residual; the other is held as it was."""
        left, right = ran.of(ran.args[0]), ran.of(ran.args[1])
        if left is not None and right is not None:
            if left.carries == right.carries:
                return None
            left, right = (left, None) if left.carries else (None, right)
        if ran.name in QUOTIENTS and (left is None or ran.kwargs.get("rounding_mode")):
            return None
        node, factor = (left or right), ran.args[0 if left is None else 1]
        assert node is not None
        if ran.name in MATRICES and factor.untyped_storage().data_ptr() in self.weights:
            return None  # a layer of its own
        known = ran.of(factor)
        factor, call = factor if known is None else known.value, getattr(torch, ran.name.rstrip("_"))
        if left is None:
            return [(node, lambda x: call(_as(factor, x), x))], []
        return [(node, lambda x: call(x, _as(factor, x)))], []


def _added(ran: Operation) -> Sum:
    terms: list[Term] = []
    rest: list[Tensor] = []
    shape = ran.output.shape
    for value, times in ((ran.args[0], 1), (ran.args[1], SUMS[ran.name] * ran.kwargs.get("alpha", 1))):
        node = ran.of(value)
        if node is None:
            constant = value if isinstance(value, Tensor) else torch.tensor(value, device=ran.output.device)
            rest.append(times * constant.expand(shape))
        else:
            same = times == 1 and value.shape == shape
            terms.append((node, None if same else partial(_spread, times=times, shape=shape)))
    return terms, rest


def _joined(ran: Operation) -> list[Term]:
    values = [value for value in ran.args[0] if value.ndim > 1 or value.numel()]
    axis = ran.axis(ran.output.ndim)
    sizes = [value.shape[axis] for value in values]
    terms: list[Term] = []
    for place, value in enumerate(values):
        node = ran.of(value)
        if node is not None:
            terms.append((node, partial(_placed, axis=axis, before=sum(sizes[:place]), whole=sum(sizes))))
    return terms


def _entries(ran: Operation, nodes: Sequence[Node]) -> tuple[tuple[Block, ...], ...] | None:
    """The blocks of each state of a stack, where an operation gave one."""
    output = ran.output
    if output.ndim < 3:
        return None
    axis = output.ndim - 2
    # A stack is made of one state, or of several side by side along the axis before the width.
    if ran.name == "unsqueeze" and ran.axis(output.ndim) == axis and nodes[0].blocks:
        return (nodes[0].blocks,)
    if ran.name in ("cat", "stack"):
        if ran.axis(output.ndim) != axis:
            return None
        entries: list[tuple[Block, ...]] = []
        for value in ran.args[0]:
            node = ran.of(value)
            if ran.name == "cat" and not value.numel():
                continue
            if node is None or (ran.name == "cat" and node.entries is None):
                return None
            entries += [node.blocks] if ran.name == "stack" else node.entries or ()
        return tuple(entries)
    # What does not change the number of states leaves each where it is.
    known = {node.entries for node in nodes if node.entries is not None}
    if len(known) != 1:
        return None
    [same] = known
    return same if output.shape[-2] == len(same) and output.ndim == nodes[0].value.ndim else None


def summed(value: Tensor, terms: Iterable[Term], rest: Iterable[Tensor]) -> Node:
    """A tensor that is a sum of nodes, each changed, and of tensors that have none."""
    terms = tuple(terms)
    carries = any(term.carries for term, _ in terms)
    blocks = tuple(dict.fromkeys(block for term, _ in terms for block in term.blocks))
    origins: frozenset[Source] = frozenset() if carries else frozenset().union(*(term.origins for term, _ in terms))
    return Node(value, terms, tuple(rest), carries, blocks, origins)


def block_of(origins: Iterable[Source]) -> Block | None:
    """Who wrote what several branches gave, one after the other: the attention, else the largest."""
    attending = [source for source in origins if "attention" in source.block.kind]
    largest = max(attending or origins, key=lambda source: (source.size, source.at), default=None)
    return None if largest is None else largest.block


def _spread(x: Tensor, times: float, shape: torch.Size) -> Tensor:
    return (times * x).expand(shape)


def _as(factor: Any, x: Tensor) -> Any:
    return factor.to(x) if isinstance(factor, Tensor) else factor


def _chosen(where: Tensor, side: bool, x: Tensor) -> Tensor:
    return torch.where(where if side else ~where, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _placed(x: Tensor, axis: int, before: int, whole: int) -> Tensor:
    shape = list(x.shape)
    shape[axis] = whole
    return x.new_zeros(shape).narrow_copy(axis, 0, whole).slice_scatter(x, axis, before, before + x.shape[axis])


def expanded(node: Node, known: Mapping[Node, dict[Block, Tensor]], rest: Block) -> dict[Block, Tensor]:
    """What each block wrote of a tensor. known: of nodes before it. rest: who wrote what was added besides."""
    # What is used twice is made once; all else is let go, since it is as much as all that was written.
    uses, waiting = Counter[Node](), [node]
    while waiting:
        for term, _ in waiting.pop().terms:
            uses[term] += 1
            waiting += [term] * (uses[term] == 1)
    return _expanded(node, dict(known), {one for one, count in uses.items() if count > 1}, rest)


def _expanded(
    node: Node, known: dict[Node, dict[Block, Tensor]], shared: Set[Node], rest: Block
) -> dict[Block, Tensor]:
    if node in known:
        return known[node]
    if not node.carries and len(node.blocks) <= 1:
        return {node.blocks[0] if node.blocks else rest: node.value.float()}
    parts: dict[Block, Tensor] = {}
    for term, change in node.terms:
        for block, part in _expanded(term, known, shared, rest).items():
            made = part if change is None else change(part)
            parts[block] = parts[block] + made if block in parts else made.float()
    for part in node.rest:
        parts[rest] = parts[rest] + part if rest in parts else part.float()
    if node in shared:
        known[node] = parts
    return parts

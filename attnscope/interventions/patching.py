"""Activation patching, what patches or replaced heads would cost to first order, and rows that are computed again.

Interchange interventions (Geiger et al. 2021, arXiv 2106.02997), as used on indirect objects (Wang et al. 2022, arXiv
2211.00593); Heimersheim and Nanda 2024 (arXiv 2404.15255) say how to read them. The texts of a task are pairs: 2n, the
clean one, and 2n + 1, the corrupted one. Each is patched from the other, so that one pass shows what the patch costs
the clean text and what it gives back to the corrupted one.

    engine = Patching("output").over(UNCHECKED, [Patch("one", ((3, 0),), ((4, 5), (4, 5)))], lengths, texts=(0, 1))

Attribution patching: what patches would cost, to first order, from one backward pass. After Nanda 2023, "Attribution
patching", and Kramár et al. 2024 (arXiv 2403.00745). The gradient is that of a head's output, times what the patch
changes there. A patched key or value, or a pattern, is carried through the head itself exactly: its softmax is no part
of the approximation. The same of replaced heads is one number per head.

    estimated(passes, patches).mean(0)
    first_order(prepared(loaded, task, [])).signed_SN.mean(0)

Rows of a pass that are computed again from q, k and v are put in their places, and compared with the model's own.

Shapes: S sequence, B text of a pass, N row of a pass (text, or patch and text) or head of all layers, T token, H head,
G kv head, V width of v, K patch or key, Q query, P head that is computed again, R asked row, r row of a block, X row of
a text, E row of the pass that something changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.linear import LinearMap, LinearRule
from attnscope.attention.rows import RowBlock, RowsAgain, padded
from attnscope.attention.spec import AttentionSpec
from attnscope.errors import InputError, ModelError, UsageError
from attnscope.hooks.calls import AttentionCall, relative_error
from attnscope.hooks.engines import Change
from attnscope.hooks.forward import check_gradients, with_gradients
from attnscope.hooks.report import tolerance
from attnscope.interventions.base import Intervention, Kept, Replacing
from attnscope.interventions.spec import HeadSet, PatchTarget, Task
from attnscope.model.selection import DECODER, LINEAR, prefix

if TYPE_CHECKING:
    from attnscope.interventions.passes import Advance, Passes

BACKWARD = 3  # what a pass with its backward pass takes, in passes
STACKS = (DECODER, LINEAR)  # whose heads are patched


@dataclass(frozen=True)
class FirstOrder:
    """The screen of all heads, as (layer, head), in the measure's unit.

    signed_SN: what it would cost to replace the head's output, grad . (replacement - z). size_SN: |grad . z|, the
    sensitivity to a gate on the head (Michel et al. 2019, arXiv 1905.10650).
    """

    heads: tuple[tuple[int, int], ...]
    signed_SN: np.ndarray
    size_SN: np.ndarray


def first_order(passes: Passes, advance: Advance = lambda token_layers: None) -> FirstOrder:
    """The screen over the sequences of a task, with what the passes put in a head's place."""
    intervention = passes.intervention
    if not isinstance(intervention, Replacing):
        raise UsageError("a screen by gradients is of outputs that are replaced", "use {replace=mean}")

    heads: list[tuple[int, int]] = []
    products_SN2: dict[int, np.ndarray] = {}
    for batch in passes.batches(BACKWARD):  # a backward pass keeps what every layer made
        lengths = [passes.task.lengths[place] for place in batch]

        # grad . (replacement - z) and grad . z of each head; a layer that attends twice has the sum of both calls.
        by_layer: dict[int, Tensor] = {}
        with torch.no_grad():
            for call, z_BTHV, grad_BTHV in backward(passes, batch):
                change_BTHV = intervention.instead(call.place, z_BTHV, lengths) - z_BTHV
                products = [(grad_BTHV.double() * value).sum((1, 3)) for value in (change_BTHV, z_BTHV)]
                by_layer[call.index] = by_layer.get(call.index, 0) + torch.stack(products, -1).cpu()

        # Batches come in the order of their lengths, the result in that of the task.
        heads = [(layer, head) for layer, product_BH2 in by_layer.items() for head in range(product_BH2.shape[1])]
        products_SN2 |= dict(zip(batch, torch.cat(list(by_layer.values()), 1).numpy(), strict=True))
        advance(BACKWARD * passes.cost(batch, []))
    both_SN2 = np.stack([products_SN2[place] for place in range(len(passes.task))])
    return FirstOrder(tuple(heads), both_SN2[..., 0], np.abs(both_SN2[..., 1]))


@with_gradients
def backward(passes: Passes, batch: Sequence[int]) -> list[tuple[AttentionCall, Tensor, Tensor]]:
    """The calls of an intact pass over some sequences, each with its output and the gradient of that: how much worse
    the measure gets, summed over the sequences. Raises UsageError for weights made in inference mode, ModelError for a
    model whose own code keeps no gradients."""
    check_gradients(passes.loaded.model)
    calls: list[tuple[AttentionCall, Tensor]] = []

    def keep(call: AttentionCall, output_BTHV: Tensor) -> Tensor:
        output_BTHV = output_BTHV if output_BTHV.requires_grad else output_BTHV.requires_grad_()
        calls.append((call, output_BTHV))
        return output_BTHV

    logits_BRV = passes.logits(batch, engine=replace(passes.engine, change=keep), gradients=True)
    values_BK = passes.values(logits_BRV, batch)
    cost = passes.measure.worse * values_BK.sum()  # of a text's rows only its own value has a gradient
    if not cost.requires_grad:
        raise ModelError(
            f"{passes.loaded.name} keeps no gradients: its own code runs without them", "leave out {method}"
        )
    gradients = torch.autograd.grad(cost, [output_BTHV for _, output_BTHV in calls])
    return [(call, output_BTHV.detach(), grad) for (call, output_BTHV), grad in zip(calls, gradients, strict=True)]


def spec_of(call: AttentionCall, output_NQHV: Tensor) -> AttentionSpec:
    """The call's q, k and v. Raises ModelError for a family that gives no output row per query and head of them."""
    spec = call.spec
    if spec is None or output_NQHV.shape[:3] != (spec.batch, spec.visible.queries, spec.heads):
        raise ModelError(
            f"layer {call.layer}: its heads' outputs are not what its q, k and v give", "choose another family"
        )
    return spec


def rule_of(call: AttentionCall) -> LinearRule | None:
    """The rule of a call of a linear layer; None of a call of attention."""
    return call.P.rule if isinstance(call.P, LinearMap) else None


def check_again(call: AttentionCall, worst: float, allowed: float) -> None:
    """Raise ModelError where what nothing changes, computed again, is too far from the model's own."""
    if not worst <= allowed:
        raise ModelError(
            f"{prefix(call.stack)}layer {call.layer}: rows computed again differ from the model's own by {worst:.2g} "
            f"(allowed {allowed:.2g})",
            "choose another family: this one's attention is not what its q, k and v give",
        )


def put_back(call: AttentionCall, output_NQHV: Tensor, again_NQHV: Tensor, changed_NQH: Tensor) -> Tensor:
    """A linear layer's output with rows of its rule, run again, where something changes them.

    changed_NQH: these rows, of each row of the pass and head. The others are compared with the model's own, as in
    `recompute`.
    """
    intact_NH = ~changed_NQH.any(1)
    if bool(intact_NH.any()):
        own, again = (values.transpose(1, 2)[intact_NH] for values in (output_NQHV, again_NQHV))
        check_again(call, float(relative_error(again, own)), tolerance(output_NQHV.dtype)[1])
    return torch.where(changed_NQH[..., None], again_NQHV.to(output_NQHV.dtype), output_NQHV)


def recompute(
    call: AttentionCall,
    output_NQHV: Tensor,
    rows: RowsAgain,
    query_NR: Tensor,
    compute: Callable[[RowBlock], Tensor],
    changed_E: Tensor,
) -> Tensor:
    """The call's output with some rows of some heads computed again; compute: gives those of a block, (N, r, P, V).

    changed_E: the rows of the pass that something changes. A row that sees nothing stays as it was. Raises ModelError
    where the others, which nothing changes, are not the model's own.
    """
    changed_NQHV, worst, allowed = output_NQHV.clone(), 0.0, tolerance(output_NQHV.dtype)[1]
    head_P = torch.tensor(rows.heads, device=output_NQHV.device)
    for block in rows.blocks(query_NR):
        text_X, row_X = (block.query_Nr >= 0).nonzero(as_tuple=True)  # -1: this text has fewer rows
        query_X = block.query_Nr[text_X, row_X]
        own_XPV = output_NQHV[text_X[:, None], query_X[:, None], head_P]

        # Families write different things where a row sees no key, and none of them follows from q, k and v.
        seen_XP1 = ~block.blind()[text_X, row_X][..., None]
        new_XPV = torch.where(seen_XP1, compute(block)[text_X, row_X], own_XPV.float())
        changed_NQHV[text_X[:, None], query_X[:, None], head_P] = new_XPV.to(changed_NQHV.dtype)

        # The intact rows of the same pass show whether this family's attention is what its q, k and v give.
        intact_X = ~torch.isin(text_X, changed_E)
        if bool(intact_X.any()):
            worst = max(worst, float(relative_error(new_XPV[intact_X], own_XPV[intact_X])))
    check_again(call, worst, allowed)
    return changed_NQHV


@dataclass(frozen=True)
class Patch(HeadSet):
    """Heads, and the positions of each text of the task at which they are patched: of a pair those that belong together
    in the same places."""

    at: tuple[tuple[int, ...], ...] = ()

    @property
    def identity(self) -> Hashable:
        return self.heads, self.at


@dataclass(frozen=True)
class Move:
    """Into a row of the pass, at some positions of some heads, from another row at others."""

    row: int
    source: int
    heads: tuple[int, ...]
    at: tuple[int, ...]
    source_at: tuple[int, ...]


@dataclass(frozen=True)
class Patching(Intervention):
    """Heads are given what they have in the other text of a pair. The sets of its passes are Patches.

    what: a head's output before the output projection, its pattern (the weights of its rows), or its keys or values,
    which all heads of a kv group share. Where rows are computed again for it, those of the intact texts are, too. A
    linear layer's rule is run again on patched values; its keys and its map are not patched.
    kept: in a pass of one row, the Source of each call in the other text; None where both texts are in the pass.
    """

    what: PatchTarget
    kept: Kept | None = None
    name = "patch"

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"patch": self.what}

    @property
    def least(self) -> int:
        """A pair."""
        return 2

    def check(self, task: Task) -> None:
        if task.together != 2 or len(task) % 2:
            raise InputError("patching needs pairs of texts", "give each text its corrupted one")

    def change(self, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int]) -> Change:
        patches = [patch for patch in sets if isinstance(patch, Patch)]

        def change(call: AttentionCall, output_NQHV: Tensor) -> Tensor:
            if call.stack not in STACKS:
                return output_NQHV
            if self.kept is None:
                moved, source = list(moves(patches, texts, call.index)), None
            else:
                source = self.kept.get((call.index, call.place.call))
                moved = [] if source is None else list(source.moves(patches, texts[0], call.index))
            return self.changed(call, output_NQHV, moved, source) if moved else output_NQHV

        return change

    def alone(self, kept: Kept) -> Patching:
        return replace(self, kept=kept)

    def keeping(self, sets: Sequence[HeadSet], kept: Kept) -> Intervention:
        return KeptSources(self, [patch for patch in sets if isinstance(patch, Patch)], kept)

    def target(self, texts: Sequence[int], place: int) -> int:
        """Of a pair the other one."""
        return texts.index(texts[place] ^ 1)

    def changed(
        self, call: AttentionCall, output_NQHV: Tensor, moved: Sequence[Move], source: Source | None = None
    ) -> Tensor:
        """A call's output with some moves made, each from the intact call; source: of the other text, where that is not
        in the pass."""
        device = output_NQHV.device

        def index(places: Sequence[int]) -> Tensor:
            return torch.tensor(places, dtype=torch.long, device=device)

        def patched(own_NTHX: Tensor, per_group: int = 1) -> Tensor:
            """The same, with what the other text has where something is moved; a kv group has some heads."""
            changed_NTHX = own_NTHX.clone()
            source_NTHX = own_NTHX if source is None or source.values is None else source.values
            for move in moved:
                groups_P = index(sorted({head // per_group for head in move.heads}))
                at_Q1, source_Q1 = index(move.at)[:, None], index(move.source_at)[:, None]
                changed_NTHX[move.row, at_Q1, groups_P] = source_NTHX[move.source, source_Q1, groups_P]
            return changed_NTHX

        if self.what == "output":
            return patched(output_NQHV)
        if (rule := rule_of(call)) is not None:
            changed_NQH = output_NQHV.new_zeros(output_NQHV.shape[:3]).bool()
            for move in moved:
                changed_NQH[move.row, :, index(move.heads)] = True
            return put_back(call, output_NQHV, rule.run(patched(rule.values_BTHV)), changed_NQH)

        heads, spec = tuple(sorted({head for move in moved for head in move.heads})), spec_of(call, output_NQHV)
        if self.what == "pattern":  # it changes the rows that it is put into, and no others
            query_NR = padded([sorted({position for move in moved for position in move.at})] * spec.batch, device)
        else:
            # A key or value may change every row, and goes to all heads of its group.
            query_NR = torch.arange(spec.visible.queries, device=device).expand(spec.batch, -1)
            own_NGKX, per_group = spec.k_BGKD if self.what == "key" else spec.v_BGKV, spec.heads // spec.kv_heads
            changed_NGKX = patched(own_NGKX.transpose(1, 2), per_group).transpose(1, 2)
            spec = replace(spec, k_BGKD=changed_NGKX) if self.what == "key" else replace(spec, v_BGKV=changed_NGKX)

        again = RowsAgain(spec, heads)  # of a source the same rows, in the same blocks
        others = None if source is None or source.spec is None else RowsAgain(source.spec, heads).blocks(query_NR)

        def output(block: RowBlock) -> Tensor:
            if self.what != "pattern":
                return block.output(None, "mask")
            weights = block.weights_NPrK.clone()
            source_NPrK = (block if others is None else next(others)).weights_NPrK
            for move in moved:  # the positions of a pattern are the same in both texts
                places_P1 = index([heads.index(head) for head in move.heads])[:, None]
                here = torch.isin(block.query_Nr[move.row], index(move.at)).nonzero()[:, 0]
                weights[move.row, places_P1, here] = source_NPrK[move.source, places_P1, here]
            return block.weighted(weights, block.logits_NPrK)

        changed_E = index([move.row for move in moved if source is not None or move.row != move.source])
        return recompute(call, output_NQHV, again, query_NR, output, changed_E)


@dataclass(frozen=True)
class Source:
    """What patches take of a call in the other text of a pair, whose intact row had a pass of its own.

    at: positions of that text, ascending. values: outputs, keys or values there, (1, T, H or G, ...). spec: for
    patterns, the call.
    """

    at: Sequence[int]
    values: Tensor | None = None
    spec: AttentionSpec | None = None

    def moves(self, patches: Sequence[Patch], text: int, layer: int) -> Iterator[Move]:
        """What patches move in a layer, in a pass of one row of a text."""
        for patch in patches:
            heads, place = of_layer(patch, layer), {position: place for place, position in enumerate(self.at)}
            if heads and patch.at[text]:
                yield Move(0, 0, heads, patch.at[text], tuple(place[position] for position in patch.at[text ^ 1]))


@dataclass(frozen=True)
class KeptSources(Intervention):
    """Nothing is changed: what patches of the other text take of this one is kept, a Source of each call."""

    patching: Patching
    patches: Sequence[Patch]
    kept: Kept
    name = "kept sources"

    def change(self, sets: Sequence[HeadSet], lengths: Sequence[int], texts: Sequence[int]) -> Change:
        [text], what = texts, self.patching.what

        def change(call: AttentionCall, output_1QHV: Tensor) -> Tensor:
            in_layer = [patch for patch in self.patches if of_layer(patch, call.index) and patch.at[text]]
            if call.stack not in STACKS or not in_layer:
                return output_1QHV
            at = sorted({position for patch in in_layer for position in patch.at[text]})
            place, at_Q = (call.index, call.place.call), torch.tensor(at, device=output_1QHV.device)
            rule = None if what == "output" else rule_of(call)
            if what == "output" or rule is not None:
                self.kept[place] = Source(at, (output_1QHV if rule is None else rule.values_BTHV)[:, at_Q])
                return output_1QHV
            spec = spec_of(call, output_1QHV)
            of_keys = {"key": spec.k_BGKD, "value": spec.v_BGKV}.get(what)
            self.kept[place] = (
                Source(at, spec=spec) if of_keys is None else Source(at, of_keys.transpose(1, 2)[:, at_Q])
            )
            # Its rows are computed again as those of the patched text are, and compared with the model's own.
            heads = tuple(sorted({head for patch in in_layer for head in of_layer(patch, call.index)}))
            return self.patching.changed(call, output_1QHV, [Move(0, 0, heads, tuple(at), tuple(at))])

        return change


def of_layer(patch: Patch, layer: int) -> tuple[int, ...]:
    """The heads of a patch in a layer."""
    return tuple(head for patched_layer, head in patch.heads if patched_layer == layer)


def moves(patches: Sequence[Patch], texts: Sequence[int], layer: int) -> Iterator[Move]:
    """What patches move in a layer, in a pass of some texts and, after them, the same texts once per patch."""
    for number, patch in enumerate(patches, start=1):
        heads = of_layer(patch, layer)
        for place, text in enumerate(texts if heads else ()):
            if patch.at[text]:
                row, other = number * len(texts) + place, text ^ 1
                yield Move(row, texts.index(other), heads, patch.at[text], patch.at[other])


def estimated(passes: Passes, patches: Sequence[Patch], advance: Advance = lambda token_layers: None) -> np.ndarray:
    """(S, K) float64: how much worse each patch would make each text's measure. Raises UsageError for passes that patch
    nothing."""
    patching = passes.intervention
    if not isinstance(patching, Patching):
        raise UsageError("attribution patching is of patches", "use a pair of texts")
    cost_SK = np.zeros((len(passes.task), len(patches)))
    for batch in passes.batches(BACKWARD):
        with torch.no_grad():
            for call, output_BTHV, grad_BTHV in backward(passes, batch):
                for number, patch in enumerate(patches):
                    # The intact texts themselves are patched, each from its intact partner.
                    moved = [replace(move, row=move.row - len(batch)) for move in moves([patch], batch, call.index)]
                    if call.stack in STACKS and moved:
                        # Both outputs are computed again, so that what rounding does to them is no part of the cost.
                        stay = [replace(move, source=move.row, source_at=move.at) for move in moved]
                        before, after = (patching.changed(call, output_BTHV, made) for made in (stay, moved))
                        product_B = (grad_BTHV.double() * (after - before)).sum((1, 2, 3))
                        cost_SK[batch, number] += product_B.cpu().numpy()
        advance(BACKWARD * passes.cost(batch, []))
    return cost_SK

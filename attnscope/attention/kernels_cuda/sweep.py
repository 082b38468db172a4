"""The kernels launched over one call: which kernel answers which question, and with which blocks.

How large a program's blocks are was chosen from what the compiler says of registers and spills: `tests/test_triton.py`
compiles them for sm_80 and sm_90, and docs/cuda.md has what it found.

Shapes: B text, H head, G kv head, Q query, K key, D width of q and k, V width of v, M feature, S questions of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from attnscope.attention import questions as ask
from attnscope.attention.kernels_cuda import kernels
from attnscope.attention.kernels_cuda.kernels import Call, Known
from attnscope.attention.rows import asked_key, indicator, top_of
from attnscope.attention.spec import AttentionSpec, block_bytes, row_blocks

FEW_ROWS = 16  # the fewest that a tensor core multiplies: what is generated, token by token
LEAST_COLUMNS = 16  # of a product
LEAST_HALVES = 64  # the same of 16 bits: narrower ones Triton 3.6 reads beyond their end on Hopper
AMPERE, HOPPER = 8, 9  # and Ada, as Ampere


@dataclass(frozen=True)
class Blocks:
    """M queries and N keys of a program, C columns of a product, its warps, and how many loads are under way."""

    M: int = 64
    N: int = 64
    C: int = 0
    warps: int = 4
    stages: int = 2


def loads(spec: AttentionSpec) -> bool:
    """Whether a number is loaded for every score, as well as k."""
    return spec.bias is not None or spec.visible.as_mask is not None


def blocks(spec: AttentionSpec, columns: int = 0, exact: bool = False) -> Blocks:
    """The blocks of a kernel over one call; exact: its columns are multiplied in more than the dtype of q."""
    M = FEW_ROWS if spec.visible.queries <= FEW_ROWS else 64
    N = 64 if spec.q_BHQD.shape[-1] <= (64 if loads(spec) else 128) else 32
    least, most = (LEAST_COLUMNS, LEAST_COLUMNS) if exact else (LEAST_HALVES, 128)
    form = Blocks(M, N, min(most, power_of_two(columns, least)) if columns else 0)
    return replace(form, warps=8) if exact and M > FEW_ROWS and generation(spec.device) > HOPPER else form


def of_statistics(spec: AttentionSpec, most: int = 0) -> Blocks:
    """The blocks of `statistics`, with the largest of each row where `most` is not 0: as many as spill nothing.

    On Hopper twice the keys, if nothing else is loaded. On Blackwell, and with a position bias, twice the threads; of
    wide heads with a bias fewer keys. The largest take, on Ampere, twice the threads, and twice the rows but of wide
    heads; on Hopper the fewer keys with a window or a width that is no power of two.
    """
    form, card, width = blocks(spec), generation(spec.device), spec.q_BHQD.shape[-1]
    if form.M == FEW_ROWS:
        return form
    if card == HOPPER:
        narrow = most and (spec.visible.window is not None or width != power_of_two(width))
        return replace(form, N=128) if form.N == 64 and not narrow and not loads(spec) else form
    if card == AMPERE and most:
        return replace(form, M=2 * form.N, warps=8)
    bias = spec.bias is not None
    N = 16 if bias and width > 128 else form.N
    return replace(form, N=N, warps=8) if bias or card > HOPPER else form


def branches(spec: AttentionSpec) -> bool:
    """Whether the search for the largest has its loop inside a branch, which Triton compiles for all but Blackwell."""
    return generation(spec.device) <= HOPPER


def of_largest(spec: AttentionSpec) -> Blocks:
    """The blocks of `largest`: on Ampere twice the rows and threads, of few rows 32 keys, as others spill."""
    form = blocks(spec)
    if generation(spec.device) != AMPERE:
        return form
    return replace(form, N=32) if form.M == FEW_ROWS else replace(form, M=128, warps=8)


def of_received(spec: AttentionSpec, shares: bool, apart: int) -> Blocks:
    """The blocks of `received`, with groups where `apart` is not 0: rows that hold one start of a run at most.

    On Ampere 32 keys where both are added up, and on Blackwell twice the threads where a position bias or a mask is
    loaded, as more spill. C: the most runs of its keys, a power of two.
    """
    form, card = blocks(spec), generation(spec.device)
    if not apart:
        return form
    N = min(form.N, 32) if shares and card == AMPERE else form.N
    warps = 8 if loads(spec) and card > HOPPER and form.M > FEW_ROWS else form.warps
    return replace(form, M=min(form.M, apart), N=N, C=most_runs(N, apart), warps=warps)


@cache
def generation(device: torch.device) -> int:
    """Of a CUDA device, 10 and 12 Blackwell's; 0 of others."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest power of two that is at least both."""
    return max(least, 1 << max(0, number - 1).bit_length())


T = TypeVar("T")
MOST_COLUMNS = 256  # of a product: more walk over the keys too often
MOST_TOP = 64  # keys kept of a row
MOST_JOINED = 8  # in the walk of the statistics
FAR = 2**30  # the place of a run that is not there
PRECISION = "tf32x3"  # products in float32 on tensor cores; "ieee" is multiplied one by one, and spills
ROW_SUM, ENTROPY, ENTROPY_REST, SQUARES, LARGEST, DISTANCE, LEFT, LARGEST_REST = range(8)


class Sweep:
    """One call's answers. What is known of every row is found at the first of them and kept.

    joins: the walk that finds it looks for the strongest keys too, where they are among the first questions.
    """

    def __init__(self, spec: AttentionSpec, joins: bool = False) -> None:
        self.spec, self.joins = spec, joins
        self.B, self.H, self.Q, self.D = spec.q_BHQD.shape
        self.K = spec.visible.keys

    def knows(self, question: ask.Question) -> bool:
        """Whether a kernel answers the question."""
        if isinstance(question, ask.Features):
            return question.features.shape[-1] <= MOST_COLUMNS
        if isinstance(question, ask.GroupMass):
            return question.counts[1] <= MOST_COLUMNS
        if isinstance(question, ask.TopK):
            return question.k <= MOST_TOP
        alike = ask.At | ask.Back | ask.Key | ask.Window | ask.Received
        return isinstance(question, alike) or type(question) in {**ROWS, **ANSWERS}

    def answers(self, questions: Sequence[ask.Question]) -> dict[ask.Question, Any]:
        """Of questions that it knows; those of one kind share a launch where they can."""
        answers: dict[ask.Question, Any] = {}
        for kinds, answer in TOGETHER:
            alike = [question for question in questions if isinstance(question, kinds)]
            answers |= dict(zip(alike, answer(self, alike), strict=True)) if alike else {}
        for question in questions:
            if type(question) in ANSWERS:
                answers[question] = ANSWERS[type(question)](self, question)
            elif question not in answers:
                rest = isinstance(question, ask.Entropy | ask.MaxWeight) and question.skip_key0
                answers[question] = self.rows[(REST if rest else ROWS)[type(question)]]
        return answers

    def output(self) -> Tensor:
        """P V, (B, Q, H, V) in the dtype of q; PyTorch's own kernel where it can say this call without a mask."""
        spec, visible = self.spec, self.spec.visible
        q, k, v = spec.q_BHQD, spec.k_BGKD, spec.v_BGKV
        plain = visible.by_position and visible.causal and not (visible.window and visible.window < self.K)
        own = spec.softcap is None and spec.bias is None and spec.sinks is None
        # in float32, with grouped heads or another width of v it may choose the kernel that makes N x N
        if plain and own and self.Q == self.K and q.dtype != torch.float32 and v.shape[-1] == self.D:
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=spec.scale, enable_gqa=spec.heads != spec.kv_heads
            )
            return attended.transpose(1, 2)
        output = torch.empty(self.B, self.Q, self.H, v.shape[-1], dtype=q.dtype, device=q.device)
        self._product(v, v.stride(), v.shape[-1], output.transpose(1, 2), left=True)
        return output

    @cached_property
    def call(self) -> Call:
        """The call as the kernels get it; what does not change with the text is known to the compiler."""
        spec, visible = self.spec, self.spec.visible
        q, k, bias, mask = _rowwise(spec.q_BHQD), _rowwise(spec.k_BGKD), spec.bias, visible.as_mask
        shape, none, known = (self.B, self.H, self.Q, self.K), (0, 0, 0, 0), kernels.tl.constexpr
        kind, width, free = 0, power_of_two(self.D, 16), mask is None
        if bias is not None:
            bias = bias.expand(shape)
        if mask is not None:
            kind = 1 if mask.dtype == torch.bool else 2
            mask = mask[..., : self.K].expand(shape)
            mask = mask.view(torch.uint8) if kind == 1 else mask
        reach = None if free else visible.reach_Q2.to(spec.device, torch.int32)
        fields = (
            *(q, *q.stride()[:3]),
            *(k, *k.stride()[:3]),
            *(bias, *(none if bias is None else bias.stride())),
            *(mask, *(none if mask is None else mask.stride())),
            *(reach, self.H, self.H // spec.kv_heads, self.Q, self.K, self.D),
            *(float(spec.scale), float(spec.softcap or 1.0), visible.window or 0),
            *(known(width), known(width == self.D)),
            *(known(free and visible.causal), known(free and visible.window is not None)),
            *(known(spec.softcap is not None), known(bias is not None), known(kind), known(PRECISION)),
        )
        return Call._make(fields)

    @property
    def begun(self) -> bool:
        """Whether the walk over the keys is done."""
        return "_statistics" in vars(self)

    @cached_property
    def _statistics(self) -> tuple[Known, Tensor]:
        return self._walk_over_keys({})[0]

    def _walk_over_keys(self, counts: Mapping[int, int]) -> tuple[tuple[Known, Tensor], tuple[Tensor, Tensor] | None]:
        """What is known of every row, and with counts the largest weights of those heads, as many of each."""
        spec, shape = self.spec, (self.B, self.H, self.Q)
        known, statistics = Known(self._room(*shape), self._room(*shape)), self._room(8, *shape)
        sinks = None if spec.sinks is None else spec.sinks.expand(shape)
        kind = 0 if sinks is None else 2 if spec.sinks_scale_output else 1
        most, top = max(counts.values(), default=0), None
        form = of_statistics(self.spec, most)
        place = (sinks, *((0, 0, 0) if sinks is None else sinks.stride()))
        of_top: tuple[Any, ...] = (None, 0, 0, None, None)
        if counts:
            rank = {head: place for place, head in enumerate(counts)}
            table = [(rank.get(head, 0), counts.get(head, 0)) for head in range(self.H)]
            chosen, top = self._shared(("joined", *table), lambda: self._numbers(table)), self._room_of_top(counts)
            of_top = (chosen, most, len(counts), *top)
        rest = (known, *place, statistics, statistics.stride(0), *of_top)
        more = {"N": form.N, "K": power_of_two(most) if counts else 0, "SINK": kind, "BRANCH": branches(spec)}
        self._launch(kernels.statistics, self._grid(form), rest, form, **more)
        return (known, statistics), top

    def _room_of_top(self, counts: Mapping[int, int]) -> tuple[Tensor, Tensor]:
        shape = (self.B, len(counts), self.Q, max(counts.values(), default=1))
        return self._room(*shape), torch.empty(shape, dtype=torch.int32, device=self.spec.device)

    @property
    def known(self) -> Known:
        return self._statistics[0]

    @property
    def rows(self) -> Sequence[Tensor]:
        """The 8 statistics of every row, (B, H, Q) each."""
        return self._statistics[1].unbind()

    def _shared(self, key: Any, make: Callable[[], T]) -> T:
        """What questions take that no layer gives, so that layers that share a mask share it."""
        return self.spec.visible.once((key, self.B, self.spec.device), make)

    def _of_one_key(self, questions: Sequence[ask.At | ask.Back | ask.Key]) -> Tensor:
        def make() -> Tensor:
            keys = [asked_key(question, self.spec.visible).expand(self.B, -1) for question in questions]
            return torch.stack([key.to(self.spec.device, torch.int32) for key in keys])

        keys_SBQ = self._shared(tuple(questions), make)
        weights, form = self._room(len(questions), self.B, self.H, self.Q), blocks(self.spec)
        rest = (self.known, keys_SBQ, weights, weights.stride(0), self.B)
        self._launch(kernels.one_key, self._grid(form, len(questions)), rest, form)
        return weights

    def _recent(self, questions: Sequence[ask.Window]) -> Tensor:
        widths_S = self._shared(tuple(questions), lambda: self._numbers([question.width for question in questions]))
        mass, form = self._room(len(questions), self.B, self.H, self.Q), blocks(self.spec)
        rest = (self.known, widths_S, mass, mass.stride(0), self.B)
        self._launch(kernels.recent, self._grid(form, len(questions)), rest, form, N=form.N)
        return mass

    def _equal(self, question: ask.EqualLabels) -> Tensor:
        """Sorted by label, the keys of one label are a run: a block of rows reads those of its labels alone."""
        mass, form = self._room(self.B, self.H, self.Q), blocks(self.spec)
        places = self._shared(question, lambda: _runs(question))
        self._launch(kernels.equal, self._grid(form), (self.known, *places, question.gap, mass), form, N=form.N)
        return mass

    def apart(self, question: ask.GroupMass) -> int:
        """How far apart the groups' runs start at least, a power of two; 1 where the walk over rows does not take them.

        Nor does it where sums between runs would take too much memory: runs may be more than groups.
        """
        of_rows, of_keys = self._runs(question)
        form, apart = blocks(self.spec), min(64, of_rows.apart, of_keys.apart)
        apart = power_of_two(apart + 1) // 2
        sums = self.B * self.H * of_rows.most * -(-self.K // form.N) * most_runs(form.N, apart)
        return apart if apart >= FEW_ROWS and 4 * sums <= block_bytes(str(self.spec.device)) else 1

    def _runs(self, question: ask.GroupMass) -> tuple[Runs, Runs]:
        """Of rows and of keys."""
        labels = question.query_group_BQ, question.key_group_BK
        return self._shared(("runs", question), lambda: (runs_of(labels[0]), runs_of(labels[1])))

    def _received(self, questions: Sequence[ask.Received | ask.GroupMass]) -> list[Tensor]:
        """One walk answers both kinds; groups that are no long runs take a walk of their own."""
        answers: dict[ask.Question, Tensor] = {}
        shares = [question for question in questions if isinstance(question, ask.Received)]
        groups = [question for question in questions if isinstance(question, ask.GroupMass)]
        long = [question for question in groups if self.apart(question) > 1]
        answers |= {question: self._groups(question) for question in groups if question not in long}
        for share, group in zip_longest(shares, long):
            received, mass = self._walk_over_rows(share, group)
            answers |= {} if received is None else {share: received}
            answers |= {} if mass is None else {group: mass}
        return [answers[question] for question in questions]

    def _walk_over_rows(
        self, share: ask.Received | None, group: ask.GroupMass | None
    ) -> tuple[Tensor | None, Tensor | None]:
        apart, received, between = 0 if group is None else self.apart(group), None, None
        form = of_received(self.spec, share is not None, apart)
        of_shares: tuple[Any, ...] = (None, 0, None)
        of_runs: tuple[Any, ...] = (None, None, None, 0, None)
        parts = -(-self.K // form.N)
        if share is not None:
            share_BQ = _rowwise(share.query_share_BQ.to(self.spec.device, torch.float32))
            received = self._room(self.B, self.H, self.K)
            of_shares = share_BQ, share_BQ.stride(0) if len(share_BQ) > 1 else 0, received
        if group is not None:
            of_rows, of_keys = self._runs(group)
            between = torch.zeros(self.B, self.H, of_rows.most, parts * form.C, device=self.spec.device)
            of_runs = of_rows.run_BT, of_rows.start_BR, of_keys.run_BT, of_rows.most, between
        rest = (self.known, *of_shares, *of_runs)
        self._launch(kernels.received, (parts, self.H, self.B), rest, form, N=form.N, C=form.C)
        if group is None or between is None:
            return received, None

        # The runs of each block of keys, by their group; then those of rows.
        def members() -> tuple[Tensor, Tensor]:
            first_BP1 = of_keys.run_BT[:, :: form.N, None]
            run_BPC = first_BP1 + torch.arange(form.C, device=first_BP1.device)
            label_BP = of_keys.label_BR.gather(1, run_BPC.flatten(1).clamp_max(of_keys.most - 1).long())
            of_row_BRg = indicator(of_rows.label_BR, group.counts[0])
            return of_row_BRg.mT[:, None], indicator(label_BP, group.counts[1])[:, None]

        of_row_B1gR, of_key_B1Pm = self._shared(("members", group, form), members)
        return received, of_row_B1gR @ (between @ of_key_B1Pm)

    def _tops(self, questions: Sequence[ask.TopK]) -> list[tuple[Tensor, Tensor]]:
        """One walk finds of each head as many as any question wants; what is too many for it has a walk of its own."""
        every = tuple(range(self.H))
        joins = self.joins and not self.begun and joinable(self.spec, questions)
        fit = [question for question in questions if most_of([question]) <= MOST_TOP]
        shared = fit if joins or len(questions) > 1 else []
        # Of each head the most keys that a question asks for.
        counts: dict[int, int] = {}
        for question in shared:
            for head in every if question.heads is None else question.heads:
                counts[head] = max(counts.get(head, 0), most_of([question]))
        shared_top = None
        if joins and counts:
            self._statistics, shared_top = self._walk_over_keys(counts)
        elif counts:
            shared_top = self._largest(counts, skip_key0=False)
        # Each question takes its heads of what was found.
        rank = {head: place for place, head in enumerate(counts)}
        answers = []
        for question in questions:
            heads = every if question.heads is None else question.heads
            if shared_top is not None and question in shared:
                places = tuple(rank[head] for head in heads)
                answers.append(
                    top_of(shared_top, ask.TopK(question.k, None if places == every else places, question.skip_key0))
                )
            else:
                answers.append(self._largest(dict.fromkeys(heads, question.k), question.skip_key0))
        return answers

    def _largest(self, counts: Mapping[int, int], skip_key0: bool) -> tuple[Tensor, Tensor]:
        """counts: how many of each head."""
        most, top, form = max(counts.values(), default=1), self._room_of_top(counts), of_largest(self.spec)
        chosen = self._shared((*counts.items(),), lambda: self._numbers(list(counts.items())))
        grid = (self._grid(form)[0], len(counts), self.B)
        more = {"N": form.N, "K": power_of_two(most), "SKIP": skip_key0, "BRANCH": branches(self.spec)}
        self._launch(kernels.largest, grid, (self.known, chosen, most, *top), form, **more)
        return top

    def _features(self, question: ask.Features) -> Tensor:
        columns = question.features.to(self.spec.device, torch.float32)
        stride = (columns.stride(0) if columns.ndim == 3 else 0, 0, *columns.stride()[-2:])
        product = self._room(self.B, self.H, self.Q, columns.shape[-1])
        self._product(columns, stride, columns.shape[-1], product)
        return product

    def _groups(self, question: ask.GroupMass) -> Tensor:
        """Keys are added up in the kernel, of so many rows at a time that they fit; then those rows by their group."""
        labels = question.key_group_BK.to(self.spec.device, torch.int32)
        groups, count = question.counts
        member_BQg = indicator(question.query_group_BQ, groups)
        mass_BHgm = torch.zeros(self.B, self.H, member_BQg.shape[-1], count, device=self.spec.device)
        stride = (labels.stride(0) if len(labels) > 1 else 0, 0, labels.stride(1), 0)
        for start, stop in row_blocks(self.Q, self.B * self.H * count, self.spec.device) if mass_BHgm.numel() else ():
            mass = self._room(self.B, self.H, stop - start, count)
            self._product(labels, stride, count, mass, (start, stop), labels=True)
            mass_BHgm += member_BQg[:, None, start:stop].mT @ mass
        return mass_BHgm

    def _product(
        self,
        columns: Tensor,
        stride: Sequence[int],
        count: int,
        into: Tensor,
        rows: tuple[int, int] | None = None,
        labels: bool = False,
        left: bool = False,
    ) -> None:
        """Weights times columns into `found`, (B, H, rows, count)."""
        first, stop = rows or (0, self.Q)
        form = blocks(self.spec, count, exact=columns.dtype == torch.float32)
        grid = (-(-(stop - first) // form.M) * -(-count // form.C), self.H, self.B)
        share = self.rows[LEFT] if left and self.spec.sinks_scale_output else None
        place = (columns, *stride, count, first, stop, into, *into.stride()[:3])
        more = {"N": form.N, "C": form.C, "LABELS": labels, "LEFT": share is not None}
        self._launch(kernels.product, grid, (self.known, share, *place), form, **more)

    def _room(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.spec.device)

    def _numbers(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.spec.device)

    def _grid(self, form: Blocks, kinds: int = 1) -> tuple[int, int, int]:
        return -(-self.Q // form.M), self.H, self.B * kinds

    def _launch(self, kernel: Any, grid: tuple[int, int, int], rest: Sequence[Any], form: Blocks, **known: Any) -> None:
        """Triton launches on the current device, which need not be the call's."""
        device = self.spec.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[grid](self.call, *rest, M=form.M, **known, num_warps=form.warps, num_stages=form.stages)


class Runs(NamedTuple):
    """The runs of equal labels in some texts: the number of each token's run, each run's first token and its label.

    start_BR is one longer, and FAR where there is no such run; there the label is -1. most: how many a text has at
    most. apart: the least distance between two starts, but for token 0.
    """

    run_BT: Tensor
    start_BR: Tensor
    label_BR: Tensor
    most: int
    apart: int


def runs_of(label_BT: Tensor) -> Runs:
    """Counted on the host: how many there are is a number there."""
    device, label_BT = label_BT.device, label_BT.cpu()
    change_BT = torch.nn.functional.pad(label_BT[:, 1:] != label_BT[:, :-1], (1, 0), value=True)
    run_BT = change_BT.cumsum(1) - 1
    most, (text, place) = int(run_BT.max()) + 1, change_BT.nonzero(as_tuple=True)
    start_BR = torch.full((len(label_BT), most + 1), FAR)
    label_BR = torch.full((len(label_BT), most), -1)
    start_BR[text, run_BT[text, place]] = place
    label_BR[text, run_BT[text, place]] = label_BT[text, place].long()
    between_BR = start_BR[:, 2:] - start_BR[:, 1:-1]
    there_BR = start_BR[:, 2:] < FAR
    apart = int(between_BR[there_BR].min()) if bool(there_BR.any()) else FAR
    of_kernel = device, torch.int32
    return Runs(run_BT.to(*of_kernel), start_BR.to(*of_kernel), label_BR.to(device), most, apart)


def joinable(spec: AttentionSpec, questions: Sequence[ask.Question | None]) -> bool:
    """Whether the walk of the statistics has registers for the strongest keys that are asked for, if any are."""
    return 0 < most_of(questions) <= MOST_JOINED and not loads(spec)


def most_of(questions: Sequence[ask.Question | None]) -> int:
    """How many keys of a row are kept for these at most: one more where key 0 may be among them."""
    tops = [question for question in questions if isinstance(question, ask.TopK)]
    return max((question.k + question.skip_key0 for question in tops), default=0)


def most_runs(keys: int, apart: int) -> int:
    """The most runs that so many keys in a row have, as a power of two."""
    return power_of_two(2 + (keys - 2) // apart)


def _runs(question: ask.EqualLabels) -> tuple[Tensor, ...]:
    """Rows and keys sorted by label, and where the keys of each row's label begin and end."""
    row_label, row_at = question.query_label_BQ.contiguous().sort(dim=1, stable=True)
    key_label, key_at = question.key_label_BK.contiguous().sort(dim=1, stable=True)
    first, past = (torch.searchsorted(key_label, row_label, right=right, out_int32=True) for right in (False, True))
    return row_at.int(), row_label, key_at.int(), key_label, first, past


def _rowwise(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension contiguous, as the kernels read it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


ROWS: Mapping[type[ask.Question], int] = {
    ask.RowSum: ROW_SUM,
    ask.Entropy: ENTROPY,
    ask.SumOfSquares: SQUARES,
    ask.MaxWeight: LARGEST,
    ask.Distance: DISTANCE,
}
REST: Mapping[type[ask.Question], int] = {ask.Entropy: ENTROPY_REST, ask.MaxWeight: LARGEST_REST}  # without key 0
TOGETHER: Sequence[tuple[Any, Callable[[Sweep, Any], Any]]] = (  # kinds that share a launch
    (ask.TopK, Sweep._tops),  # before any that reads what the walk over keys finds
    (ask.At | ask.Back | ask.Key, Sweep._of_one_key),
    (ask.Window, Sweep._recent),
    (ask.Received | ask.GroupMass, Sweep._received),
)
ANSWERS: Mapping[type[ask.Question], Callable[[Sweep, Any], Any]] = {
    ask.EqualLabels: Sweep._equal,
    ask.Features: Sweep._features,
}

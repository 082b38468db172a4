"""The Triton kernels: softmax statistics of every row in one walk over the keys, and what is read once they are known.

A program owns M queries of one head and walks over the keys, N at a time, as flash attention does; N x N is never made.
`statistics` goes first: a row's largest logit, `top`, and what its exponentials are to be multiplied by, `part`, turn a
logit x into the weight 2^(x - top) part, from which every other kernel reads its answer in any order. Logits are in
units of log2 e, so that exp2 does.

Importing this module imports triton. Shapes: M queries and N keys of a program, D width of q and k as a power of two, C
columns.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnscope.attention import spec as visibility

HIDDEN = tl.constexpr(visibility.HIDDEN)  # finite: a row that has seen nothing yet makes no NaN
FLOOR = tl.constexpr(-1.4e28)  # what an additive mask's least value makes of a logit: a row of them alone is uniform
LN2, LOG2E = tl.constexpr(0.6931471805599453), tl.constexpr(1.4426950408889634)


# One attention call, as a kernel gets it. Names in capitals are known when it is compiled.
Call = namedtuple(
    "Call",
    "q qb qh qm "  # with its strides over text (b), head (h), query (m), as k, bias and mask with theirs, key (n) too
    "k kb kh kn "
    "bias bb bh bm bn "  # None without one, and so is mask
    "mask mb mh mm mn "
    "reach "  # (Q, 2) the first key that a query sees and the one after the last, with a mask alone
    "heads shared queries keys "  # shared: heads per kv head
    "width scale softcap window "  # width: D before it was made a power of two
    "D WHOLE CAUSAL WINDOW SOFTCAP BIAS "  # WHOLE: the width is D
    "MASK "  # 0 none, 1 boolean, 2 additive
    "PRECISION",  # of products in float32
)


class Known(NamedTuple):
    """What `statistics` found, (B, H, Q) each."""

    top: Any
    part: Any


@triton.jit
def _queries(call, text, head, row_M):
    """q of some rows, (M, D)."""
    dim_D = tl.arange(0, call.D)
    start = call.q + text.to(tl.int64) * call.qb + head.to(tl.int64) * call.qh
    at_MD = start + row_M[:, None].to(tl.int64) * call.qm + dim_D[None, :]
    if call.WHOLE:
        return tl.load(at_MD)
    return tl.load(at_MD, (dim_D < call.width)[None, :], 0.0)


@triton.jit
def _keys(call, text, head, key_N, CHECKED: tl.constexpr):
    """k transposed, (D, N); CHECKED: some of the keys may not exist."""
    dim_D = tl.arange(0, call.D)
    start = call.k + text.to(tl.int64) * call.kb + (head // call.shared).to(tl.int64) * call.kh
    at_DN = start + key_N[None, :].to(tl.int64) * call.kn + dim_D[:, None]
    if call.WHOLE:
        if CHECKED:
            return tl.load(at_DN, ((key_N >= 0) & (key_N < call.keys))[None, :], 0.0)
        return tl.load(at_DN)
    return tl.load(at_DN, ((key_N >= 0) & (key_N < call.keys))[None, :] & (dim_D < call.width)[:, None], 0.0)


@triton.jit
def _laid_out(values):
    """What was loaded, (M, N), spread over the threads as products are: added to one of zeros, which changes nothing.

    As it comes from memory, where a length is no multiple of 16, all that follows would go the way of the load: nine
    times the instructions, and 1.9 KB of a thread spilled at 128 wide heads.
    """
    if len(values.shape) == 2:
        zero_M = tl.zeros([values.shape[0], 16], tl.float16)
        zero_N = tl.zeros([16, values.shape[1]], tl.float16)
        return tl.dot(zero_M, zero_N, values)
    return values


@triton.jit
def _shaped(call, x, text, head, row, key, EDGE: tl.constexpr):
    """Logits from q.k of rows and keys that broadcast to its shape: scale, soft-cap, bias, mask, in this order.

    EDGE: some of the keys may be hidden by their place, or not exist.
    """
    if call.SOFTCAP:  # tanh by exp2: its error is 6e-8 of the cap
        x = (call.softcap * LOG2E) * (1 - 2 / (1 + tl.exp2(x * (call.scale / call.softcap) * 2 * LOG2E)))
    else:
        x = x * (call.scale * LOG2E)
    there = (key >= 0) & (key < call.keys)
    text, head = text.to(tl.int64), head.to(tl.int64)
    if call.BIAS:
        at = call.bias + text * call.bb + head * call.bh + row.to(tl.int64) * call.bm + key.to(tl.int64) * call.bn
        x += _laid_out(tl.load(at, there, 0.0).to(tl.float32)) * LOG2E
    if call.MASK:
        at = call.mask + text * call.mb + head * call.mh + row.to(tl.int64) * call.mm + key.to(tl.int64) * call.mn
        if call.MASK == 1:
            x = tl.where(_laid_out(tl.load(at, there, 0).to(tl.float32)) != 0, x, HIDDEN)
        else:
            more = _laid_out(tl.load(at, there, 0.0).to(tl.float32))
            x = tl.where(more > HIDDEN, x + more * LOG2E, tl.where(more == float("-inf"), HIDDEN, FLOOR))
    if EDGE:
        return tl.where(_seen(call, row + (call.keys - call.queries) - key) & there, x, HIDDEN)
    return x


@triton.jit
def _seen(call, back):
    """Whether keys so many tokens back are seen, as far as their place says."""
    seen = back == back
    if call.CAUSAL:
        seen = seen & (back >= 0)
    if call.WINDOW:
        seen = seen & (back < call.window)
    return seen


@triton.jit
def _bounds(call, row_M, N: tl.constexpr):
    """The keys that these rows see: [start, stop), and within them [whole, edge) which every row sees, but for key 0.

    The first block is never whole; with a mask none is.
    """
    offset = call.keys - call.queries
    first, last = tl.min(row_M, 0) + offset, tl.max(row_M, 0) + offset
    start, stop, whole, edge = first * 0, first * 0 + call.keys, first * 0 + N, call.keys // N * N
    if call.MASK:
        start = tl.min(tl.load(call.reach + row_M * 2), 0) // N * N
        stop = tl.max(tl.load(call.reach + row_M * 2 + 1), 0)
        whole, edge = stop, stop
    if call.CAUSAL:
        stop, edge = tl.minimum(call.keys, last + 1), tl.minimum(edge, (first + 1) // N * N)
    if call.WINDOW:
        start = tl.maximum(0, first - call.window + 1) // N * N
        whole = tl.maximum(whole, (last - call.window + N) // N * N)
    whole = tl.minimum(whole, stop)
    return start, whole, tl.maximum(whole, edge), stop


@triton.jit
def _rows(call, M: tl.constexpr):
    """The rows of this program, the longest first: which exist, and all of them with those that do not at the last."""
    row_M = (tl.num_programs(0) - 1 - tl.program_id(0)) * M + tl.arange(0, M)
    return row_M < call.queries, tl.minimum(row_M, call.queries - 1)


@triton.jit
def _spot(call, text, head, row_M):
    """Where the answers of some rows lie in (B, H, Q)."""
    return (text * call.heads + head).to(tl.int64) * call.queries + row_M


@triton.jit
def _weights(call, text, head, q_MD, row_M, key_N, top_M, part_M, EDGE: tl.constexpr):
    """The weights of a program's rows on some keys, (M, N)."""
    x = tl.dot(q_MD, _keys(call, text, head, key_N, EDGE), input_precision=call.PRECISION)
    x = _shaped(call, x, text, head, row_M[:, None], key_N[None, :], EDGE)
    return tl.exp2(x - top_M[:, None]) * part_M[:, None]


@triton.jit
def _logits(call, q_MD, text, head, row_M, key_N, EDGE: tl.constexpr):
    """The logits of a program's rows on some keys, (M, N), and the unit that they are still to be multiplied by."""
    x = tl.dot(q_MD, _keys(call, text, head, key_N, EDGE), input_precision=call.PRECISION)
    unit = 1.0
    if call.SOFTCAP or call.BIAS or call.MASK or EDGE:
        x = _shaped(call, x, text, head, row_M[:, None], key_N[None, :], EDGE)
    else:  # of numbers that are compared alone, one a row is multiplied
        unit = call.scale * LOG2E
    return x, unit


@triton.jit
def _kept_largest(best_MK, place_MK, x, raw_M, unit, low, BRANCH: tl.constexpr):
    """The largest logits of a row so far, and their keys, with those of a block; raw_M: the block's largest of a row.

    What is larger than the least of them takes its place. BRANCH: the loop is inside one. Next to a loop that is not,
    the compiler loads no keys ahead; for Blackwell Triton 3.7.1 does not compile the branch.
    """
    n, slot_K = tl.arange(0, x.shape[1]), tl.arange(0, best_MK.shape[1])
    least_M = tl.maximum(tl.min(best_MK, 1), FLOOR / 2)  # of what a mask hides nothing is kept
    if not BRANCH or tl.max((raw_M * unit > least_M).to(tl.int32), 0) > 0:
        while tl.max((raw_M * unit > least_M).to(tl.int32), 0) > 0:
            column_M = tl.min(tl.where(x == raw_M[:, None], n[None, :], x.shape[1]), 1)
            taken = (slot_K[None, :] == tl.argmin(best_MK, 1)[:, None]) & (raw_M * unit > least_M)[:, None]
            best_MK = tl.where(taken, (raw_M * unit)[:, None], best_MK)
            place_MK = tl.where(taken, (low + column_M)[:, None], place_MK)
            x = tl.where(n[None, :] == column_M[:, None], HIDDEN, x)
            raw_M, least_M = tl.max(x, 1), tl.maximum(tl.min(best_MK, 1), FLOOR / 2)
    return best_MK, place_MK


@triton.jit
def _ranked(best_MK, place_MK, top_M, part_M, count, most, weights, places, real_M):
    """Of each row the weights of its largest logits, from the largest on, and their keys; NaN after `count` of them."""
    slot_K = tl.arange(0, best_MK.shape[1])
    best_MK = tl.where((slot_K < count)[None, :], best_MK, HIDDEN * 2)
    for rank in range(most):
        x, out_M = tl.max(best_MK, 1), tl.argmax(best_MK, 1)
        taken = slot_K[None, :] == out_M[:, None]
        p = tl.where(x > FLOOR / 2, tl.exp2(x - top_M) * part_M, float("nan"))
        tl.store(weights + rank, p, real_M)
        tl.store(places + rank, tl.sum(tl.where(taken, place_MK, 0), 1), real_M)
        best_MK = tl.where(taken, HIDDEN * 2, best_MK)


@triton.jit
def _step(call, state, x, raw_M, unit, row_M, low, N: tl.constexpr, EDGE: tl.constexpr):
    """One step of the walk over the keys but key 0."""
    high, mass, energy, squares, far = state
    n = tl.arange(0, N)
    peak = tl.maximum(high, raw_M * unit)
    move = high - peak
    alpha = tl.exp2(move)
    t = x * unit - peak[:, None]
    p = tl.exp2(t)
    if EDGE or call.MASK == 1:  # of a row that has seen nothing, the highest is HIDDEN still, and so is the peak
        p, t = tl.where(x <= HIDDEN / 2, 0.0, p), tl.where(x <= HIDDEN / 2, 0.0, t)
    move = tl.where(mass > 0, move, 0.0)
    sum_M = tl.sum(p, 1)
    back_M, n = (row_M + (call.keys - call.queries) - low).to(tl.float32), n.to(tl.float32)
    if EDGE or not call.CAUSAL:
        moved_M = tl.sum(p * (back_M[:, None] - n[None, :]), 1)
    else:  # counted from the block's last key, which lies behind every query: nothing cancels
        moved_M = (back_M - (N - 1)) * sum_M + tl.sum(p * ((N - 1) - n)[None, :], 1)
    return (
        peak,
        alpha * mass + sum_M,
        alpha * (energy + mass * move) + tl.sum(p * t, 1),
        alpha * alpha * squares + tl.sum(p * p, 1),
        alpha * far + moved_M,
    )


@triton.jit(do_not_specialize=["size", "most", "heads"])
def statistics(
    call, known, sinks, sb, sh, sm, found, size, chosen, most, heads, weights, places,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SINK: tl.constexpr, BRANCH: tl.constexpr,
):  # fmt: skip
    """top, part; then 8 answers into `found`, (8, B, H, Q), `size` apart; with K, the largest as `largest` gives them.

    chosen: (H, 2) the place of each head among the `heads` that are chosen, and how many of it, 0 for the others.
    Row sum, entropy, entropy without key 0, squares, largest, distance, what a sink leaves of the output, and the
    largest without key 0, NaN where a row sees no other. Key 0 stays out of the walk and is added at the end, so that a
    row without it loses no digits. SINK: 0 none, 1 takes a share of the rows, 2 of the output alone.
    """
    head, text = tl.program_id(1), tl.program_id(2)
    real_M, row_M = _rows(call, M)
    q_MD = _queries(call, text, head, row_M)
    zero = tl.zeros([M], tl.float32)
    # the largest x so far; sums of p = 2^(x - high), of p (x - high), of p p, of p (i - j)
    state = (zero + HIDDEN, zero, zero, zero, zero)
    if K:
        place, count, slot_K = tl.load(chosen + head * 2), tl.load(chosen + head * 2 + 1), tl.arange(0, K)
        best_MK = tl.where(
            (slot_K < count)[None, :], tl.full([M, K], HIDDEN, tl.float32), float("inf")
        )  # never the least
        place_MK = tl.zeros([M, K], tl.int32)
    start, whole, edge, stop = _bounds(call, row_M, N)
    for phase in tl.static_range(1 if call.MASK else 3):
        since = start if phase == 0 else whole if phase == 1 else edge
        until = whole if phase == 0 else edge if phase == 1 else stop
        for low in range(since, until, N):
            key_N = low + tl.arange(0, N)
            x, unit = _logits(call, q_MD, text, head, row_M, key_N, phase != 1)
            if phase != 1:
                x = tl.where((key_N > 0)[None, :], x, HIDDEN)
            raw_M = tl.max(x, 1)
            state = _step(call, state, x, raw_M, unit, row_M, low, N, phase != 1)
            if K:
                best_MK, place_MK = _kept_largest(best_MK, place_MK, x, raw_M, unit, low, BRANCH)
    high, mass, energy, squares, far = state

    # key 0, then the sums over all keys, relative to the largest x
    start_D = call.k + text.to(tl.int64) * call.kb + (head // call.shared).to(tl.int64) * call.kh + tl.arange(0, call.D)
    k_D = tl.load(start_D, tl.arange(0, call.D) < call.width, 0.0).to(tl.float32)
    x0 = _shaped(call, tl.sum(q_MD.to(tl.float32) * k_D[None, :], 1), text, head, row_M, row_M * 0, True)
    top = tl.maximum(high, x0)
    a, p0 = tl.exp2(high - top), tl.where(x0 <= HIDDEN / 2, 0.0, tl.exp2(x0 - top))
    whole_mass = a * mass + p0
    sees = whole_mass != 0  # NaN stays: every choice below keeps it
    z = tl.where(sees, whole_mass, 1.0)
    moved = mass * tl.where(mass > 0, high - top, 0.0)
    whole_energy = a * (energy + moved) + p0 * tl.where(p0 > 0, x0 - top, 0.0)
    left = zero + 1.0
    if SINK:
        at = sinks + text.to(tl.int64) * sb + head.to(tl.int64) * sh + row_M.to(tl.int64) * sm
        left = 1 / (1 + tl.exp2(tl.load(at).to(tl.float32) * LOG2E - top) / z)
    seen = tl.where(whole_mass > 0, 1.0, whole_mass)
    norm = seen * (left if SINK == 1 else 1.0)
    rest = tl.where(mass < 1e-38, 1e-38, mass)
    entropy, entropy_rest = tl.log2(z) - whole_energy / z, tl.log2(rest) - energy / rest
    position = (row_M + (call.keys - call.queries)).to(tl.float32)
    spot = _spot(call, text, head, row_M)
    tl.store(known.top + spot, tl.where(sees, top, 0.0), real_M)
    tl.store(known.part + spot, norm / z, real_M)
    answers = (
        norm,
        tl.where(entropy < 0, 0.0, entropy * LN2),
        tl.where((a * mass == 0) | (entropy_rest < 0), 0.0, entropy_rest * LN2) * seen,
        (a * a * squares + p0 * p0) / (z * z),
        norm / z,
        (a * far + p0 * position) / z,
        left,
        tl.where(high > FLOOR / 2, a * (norm / z), float("nan")),
    )
    for kind in tl.static_range(8):
        tl.store(found + size.to(tl.int64) * kind + spot, answers[kind], real_M)
    if K:
        best_MK, place_MK = _kept_largest(best_MK, place_MK, x0[:, None], x0, 1.0, 0, BRANCH)
        answer = ((text * heads + place).to(tl.int64) * call.queries + row_M) * most
        _ranked(best_MK, place_MK, top, norm / z, count, most, weights + answer, places + answer, real_M & (count > 0))


@triton.jit(do_not_specialize=["size", "texts"])
def one_key(call, known, keys, found, size, texts, M: tl.constexpr):
    """The weight of each row on one key of its own, of S questions: keys and found (S, B, Q) and (S, B, H, Q)."""
    head, text, asked = tl.program_id(1), tl.program_id(2) % texts, tl.program_id(2) // texts
    real_M, row_M = _rows(call, M)
    key_M = tl.load(keys + (asked * texts + text).to(tl.int64) * call.queries + row_M)
    there_M, dim_D = (key_M >= 0) & (key_M < call.keys), tl.arange(0, call.D)
    start = call.k + text.to(tl.int64) * call.kb + (head // call.shared).to(tl.int64) * call.kh
    at_MD = start + key_M[:, None].to(tl.int64) * call.kn + dim_D[None, :]
    k_MD = tl.load(at_MD, there_M[:, None] & (dim_D < call.width)[None, :], 0.0).to(tl.float32)
    x = tl.sum(_queries(call, text, head, row_M).to(tl.float32) * k_MD, 1)
    x = _shaped(call, x, text, head, row_M, key_M, True)
    spot = _spot(call, text, head, row_M)
    p = tl.exp2(x - tl.load(known.top + spot)) * tl.load(known.part + spot)
    tl.store(found + asked.to(tl.int64) * size + spot, p, real_M)


@triton.jit(do_not_specialize=["size", "texts"])
def recent(call, known, sizes, found, size, texts, M: tl.constexpr, N: tl.constexpr):
    """The mass on the last keys, of S widths: sizes (S,), found (S, B, H, Q)."""
    head, text, asked = tl.program_id(1), tl.program_id(2) % texts, tl.program_id(2) // texts
    real_M, row_M = _rows(call, M)
    spot, width = _spot(call, text, head, row_M), tl.load(sizes + asked)
    top_M, part_M = tl.load(known.top + spot), tl.load(known.part + spot)
    q_MD, offset = _queries(call, text, head, row_M), call.keys - call.queries
    mass_M = tl.zeros([M], tl.float32)
    start = tl.maximum(0, tl.min(row_M, 0) + offset - width + 1) // N * N
    for low in range(start, tl.max(row_M, 0) + offset + 1, N):
        key_N = low + tl.arange(0, N)
        p = _weights(call, text, head, q_MD, row_M, key_N, top_M, part_M, True)
        back = row_M[:, None] + offset - key_N[None, :]
        mass_M += tl.sum(tl.where((back >= 0) & (back < width), p, 0.0), 1)
    tl.store(found + asked.to(tl.int64) * size + spot, mass_M, real_M)


@triton.jit(do_not_specialize=["gap"])
def equal(call, known, row_at, row_label, key_at, key_label, first, past, gap, found, M: tl.constexpr, N: tl.constexpr):
    """The mass on the keys of a query's label, at least `gap` back.

    Rows and keys are sorted by label, then by position: row_at, row_label (B, Q), key_at, key_label (B, K). The keys of
    a program's rows lie between `first` of its first row and `past` of its last.
    """
    head, text, block = tl.program_id(1), tl.program_id(2), tl.program_id(0) * M
    member_M = block + tl.arange(0, M)
    real_M, listed = member_M < call.queries, text.to(tl.int64) * call.queries
    member_M = tl.minimum(member_M, call.queries - 1)
    row_M, label_M = tl.load(row_at + listed + member_M), tl.load(row_label + listed + member_M)
    spot = _spot(call, text, head, row_M)
    top_M, part_M = tl.load(known.top + spot), tl.load(known.part + spot)
    q_MD, mass_M = _queries(call, text, head, row_M), tl.zeros([M], tl.float32)
    latest_M = row_M + (call.keys - call.queries) - gap
    stop = tl.load(past + listed + tl.minimum(block + M, call.queries) - 1)
    key_at, key_label = key_at + text.to(tl.int64) * call.keys, key_label + text.to(tl.int64) * call.keys
    for low in range(tl.load(first + listed + block), stop, N):
        n = low + tl.arange(0, N)
        key_N = tl.load(key_at + n, n < stop, -1)
        p = _weights(call, text, head, q_MD, row_M, key_N, top_M, part_M, True)
        same = tl.load(key_label + n, n < stop, 0)[None, :] == label_M[:, None]
        mass_M += tl.sum(tl.where(same & (key_N[None, :] <= latest_M[:, None]), p, 0.0), 1)
    tl.store(found + spot, mass_M, real_M)


@triton.jit
def _kept(into, mass_MN, local_N, C: tl.constexpr):
    """Sums over the rows of a run, by the runs of keys: C numbers, where run c has the keys of which local is c."""
    local_NC = local_N[:, None] == tl.arange(0, C)[None, :]
    tl.store(into + tl.arange(0, C), tl.sum(tl.where(local_NC, tl.sum(mass_MN, 0)[:, None], 0.0), 0))


@triton.jit(do_not_specialize=["runs"])
def received(
    call, known, share, share_b, found, row_run, row_start, key_run, runs, between,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """What N keys get, in one walk over the rows: `found` and `between`, of which one may be None.

    found (B, H, K): the sum over the rows of `share`, (B or 1, Q), times their weight.
    between (B, H, runs, blocks, C): the mass from each run of rows to each run of keys in a block of N. row_run (B, Q)
    and key_run (B, K) number the runs; row_start (B, runs + 1) has their first rows. Starts are at least M rows apart.
    """
    head, text, low = tl.program_id(1), tl.program_id(2), tl.program_id(0) * N
    key_N, offset = low + tl.arange(0, N), call.keys - call.queries
    k_DN = _keys(call, text, head, key_N, True)
    start, stop, whole = low * 0, low * 0 + call.queries, low * 0
    if call.CAUSAL:
        start = tl.maximum(0, low - offset) // M * M
        whole = (tl.maximum(0, low + N - 1 - offset) + M - 1) // M * M  # from here on every row sees every key
    if call.WINDOW:
        stop = tl.maximum(0, tl.minimum(stop, low + N - 1 + call.window - offset))
        whole = stop
    # added up over its rows at the end: no exchange between threads in a step
    mass_MN, run_MN = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    if between is not None:
        key_run += text.to(tl.int64) * call.keys
        row_start += text.to(tl.int64) * (runs + 1)
        local_N = tl.load(key_run + tl.minimum(key_N, call.keys - 1)) - tl.load(key_run + low)
        local_N = tl.where(key_N < call.keys, local_N, -1)
        run = tl.load(row_run + text.to(tl.int64) * call.queries + tl.minimum(start, call.queries - 1))
        cut = tl.load(row_start + run + 1)
        step = tl.num_programs(0).to(tl.int64) * C
        between += ((text * call.heads + head).to(tl.int64) * runs * tl.num_programs(0) + tl.program_id(0)) * C
    for phase in tl.static_range(2):
        since, until = (start, tl.minimum(whole, stop)) if phase == 0 else (whole, stop)
        for first in range(since, until, M):
            real_M, row_M = first + tl.arange(0, M) < call.queries, first + tl.arange(0, M)
            row_M = tl.minimum(row_M, call.queries - 1)
            spot = _spot(call, text, head, row_M)
            top_M, part_M = tl.load(known.top + spot), tl.load(known.part + spot)
            x = tl.dot(_queries(call, text, head, row_M), k_DN, input_precision=call.PRECISION)
            x = _shaped(call, x, text, head, row_M[:, None], key_N[None, :], phase == 0)
            p = tl.exp2(x - top_M[:, None])
            if found is not None:
                share_M = tl.load(share + text.to(tl.int64) * share_b + row_M, real_M, 0.0)
                mass_MN += p * (part_M * share_M)[:, None]
            if between is not None:
                part_M = tl.where(real_M, part_M, 0.0)
                if cut < first + M:  # a run of rows ends in this step
                    _kept(between + run * step, run_MN + p * tl.where(row_M < cut, part_M, 0.0)[:, None], local_N, C)
                    run_MN = p * tl.where(row_M < cut, 0.0, part_M)[:, None]
                    run += 1
                    cut = tl.load(row_start + run + 1)
                else:
                    run_MN += p * part_M[:, None]
    if between is not None:
        _kept(between + run * step, run_MN, local_N, C)
    if found is not None:
        to = found + (text * call.heads + head).to(tl.int64) * call.keys + key_N
        tl.store(to, tl.sum(mass_MN, 0), key_N < call.keys)


@triton.jit(do_not_specialize=["most"])
def largest(
    call, known, chosen, most, weights, places,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SKIP: tl.constexpr, BRANCH: tl.constexpr,
):  # fmt: skip
    """The largest weights of the rows of some heads, and their keys: (B, heads, Q, most) each.

    chosen: (heads, 2) which head, and how many of it, at most `most`; NaN after them. A row keeps its K largest so
    far, K >= most a power of two; what is larger than the least of them takes its place.
    """
    head, count = tl.load(chosen + tl.program_id(1) * 2), tl.load(chosen + tl.program_id(1) * 2 + 1)
    text = tl.program_id(2)
    real_M, row_M = _rows(call, M)
    q_MD = _queries(call, text, head, row_M)
    slot_K, place_MK = tl.arange(0, K), tl.zeros([M, K], tl.int32)
    best_MK = tl.where((slot_K < count)[None, :], tl.full([M, K], HIDDEN, tl.float32), float("inf"))  # never the least
    start, whole, edge, end = _bounds(call, row_M, N)
    for phase in tl.static_range(1 if call.MASK else 3):
        since = start if phase == 0 else whole if phase == 1 else edge
        until = whole if phase == 0 else edge if phase == 1 else end
        for low in range(since, until, N):
            key_N = low + tl.arange(0, N)
            x, unit = _logits(call, q_MD, text, head, row_M, key_N, phase != 1)
            if phase == 0 and SKIP:
                x = tl.where((key_N > 0)[None, :], x, HIDDEN)
            best_MK, place_MK = _kept_largest(best_MK, place_MK, x, tl.max(x, 1), unit, low, BRANCH)
    spot = _spot(call, text, head, row_M)
    top_M, part_M = tl.load(known.top + spot), tl.load(known.part + spot)
    answer = ((text * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * call.queries + row_M) * most
    _ranked(best_MK, place_MK, top_M, part_M, count, most, weights + answer, places + answer, real_M)


@triton.jit
def _columns(columns, cb, cg, cn, cc, text, group, key_N, count, keys, C: tl.constexpr, LABELS: tl.constexpr):
    """(N, C) of what the weights are multiplied by: this program's columns, or ones where a label is theirs."""
    column_C = tl.program_id(0) % tl.cdiv(count, C) * C + tl.arange(0, C)
    start = columns + text.to(tl.int64) * cb + group.to(tl.int64) * cg
    if LABELS:
        label_N = tl.load(start + key_N.to(tl.int64) * cn, key_N < keys, -1)
        found = (label_N[:, None] == column_C[None, :]).to(tl.float16)
    else:
        at_NC = start + key_N[:, None].to(tl.int64) * cn + column_C[None, :] * cc
        found = tl.load(at_NC, (key_N < keys)[:, None] & (column_C < count)[None, :], 0.0)
    return found


@triton.jit(do_not_specialize=["first", "stop"])
def product(
    call, known, left, columns, cb, cg, cn, cc, count, first, stop, found, fb, fh, fm,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, LABELS: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Weights times columns, (B, kv heads, K, count) or the keys' labels, of the rows [first, stop): found (.., count).

    A program has C of the columns. LEFT: times what a sink leaves of the output.
    """
    head, text, parts = tl.program_id(1), tl.program_id(2), tl.cdiv(count, C)
    block = tl.num_programs(0) // parts - 1 - tl.program_id(0) // parts
    real_M, row_M = first + block * M + tl.arange(0, M) < stop, first + block * M + tl.arange(0, M)
    row_M = tl.minimum(row_M, stop - 1)
    q_MD, spot, group = _queries(call, text, head, row_M), _spot(call, text, head, row_M), head // call.shared
    top_M, part_M = tl.load(known.top + spot), tl.load(known.part + spot)
    if LEFT:
        part_M = part_M * tl.load(left + spot)
    acc_MC = tl.zeros([M, C], tl.float32)
    start, whole, edge, end = _bounds(call, row_M, N)
    for phase in tl.static_range(1 if call.MASK else 3):
        since = start if phase == 0 else whole if phase == 1 else edge
        until = whole if phase == 0 else edge if phase == 1 else end
        for low in range(since, until, N):
            key_N = low + tl.arange(0, N)
            p = tl.dot(q_MD, _keys(call, text, head, key_N, phase != 1), input_precision=call.PRECISION)
            p = _shaped(call, p, text, head, row_M[:, None], key_N[None, :], phase != 1)
            p = tl.exp2(p - top_M[:, None])
            c_NC = _columns(columns, cb, cg, cn, cc, text, group, key_N, count, call.keys, C, LABELS)
            high = p.to(c_NC.dtype)
            acc_MC = tl.dot(high, c_NC, acc_MC, input_precision=call.PRECISION)
            if LABELS:  # what float16 left of p: ones are exact, so two products are as good as float32
                acc_MC = tl.dot((p - high.to(tl.float32)).to(c_NC.dtype), c_NC, acc_MC)
    column_C = tl.program_id(0) % parts * C + tl.arange(0, C)
    at_MC = found + text.to(tl.int64) * fb + head.to(tl.int64) * fh + (row_M - first)[:, None].to(tl.int64) * fm
    acc_MC = acc_MC * part_M[:, None]
    stored = real_M[:, None] & (column_C < count)[None, :]
    tl.store(at_MC + column_C[None, :], acc_MC.to(found.dtype.element_ty), stored)

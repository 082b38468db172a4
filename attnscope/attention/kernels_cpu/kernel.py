"""The sweep: everything that is asked of the rows of one tile, while it is in the cache.

Logits are made panel by panel of 64 keys, with the largest of each row; then every panel is read once more: exp, the
sums of all statistics and P V, and what is asked of single keys is looked up in what is left in the tile. Addresses and
sizes are plain integers, so that the compiled code needs nothing of Numba.

A tile is stored panel by panel: (panels, rows, 64) float32. Its rows are those of `heads` heads one after another,
`queries` each, filled up to whole blocks of rows that are multiplied together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from attnscope.attention.kernels_cpu.layout import (
    BLOCK,
    DEPTH,
    ENERGY,
    ENERGY_REST,
    FACTOR,
    HIDDEN,
    LANES,
    MOMENT,
    NOTES,
    PANEL,
    REACH,
    RECORD,
    REST,
    SQUARES,
    STATE,
    STRIP,
    SUMS,
    TOTAL,
)
from attnscope.attention.kernels_cpu.vector_registers import (
    above,
    as_floats,
    ascending,
    at_least,
    below,
    bits,
    both,
    clamped,
    equal,
    exp,
    field,
    fma,
    integer,
    integers,
    larger,
    largest_lane,
    least,
    load_floats,
    load_integers,
    long,
    lowest,
    minus,
    number,
    over,
    plus,
    product,
    put,
    put_integer,
    put_long,
    splat,
    store,
    times,
    total,
    where,
)

F, I32 = np.float32, np.int32
OPTIONS: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
ROW, WIDTH, VECTORS = 4 * PANEL, 4 * LANES, PANEL // LANES  # bytes of a panel's row and of a register; registers of it
INFINITE = F(np.inf)
PEAK, BOUND, P0, T0 = 0, 4, 8, 12  # bytes: a row's largest logit, the least of its strongest, key 0's exp t and t


@njit(**OPTIONS)
def whole_blocks(rows):
    return (rows + BLOCK - 1) // BLOCK


@njit(**OPTIONS)
def exp_one(x):
    return largest_lane(exp(clamped(splat(min(x, F(88))))))


@njit(**OPTIONS)
def tanh(x):
    size = larger(x, minus(splat(F(0)), x))
    u = exp(clamped(times(size, splat(F(-2)))))
    bent = over(minus(splat(F(1)), u), plus(splat(F(1)), u))
    return where(at_least(x, splat(F(0))), bent, minus(splat(F(0)), bent))


@njit(**OPTIONS)
def shape_row(x, key, start, stop, softcap, extra):
    """Soft-cap, position bias, masks, and what lies outside of a row's reach."""
    if softcap:
        cap = splat(number(softcap))
        for v in range(VECTORS):
            store(x + v * WIDTH, times(tanh(over(load_floats(x + v * WIDTH), cap)), cap))
    if extra:
        for v in range(VECTORS):
            more = load_floats(extra + v * WIDTH)
            here = plus(load_floats(x + v * WIDTH), more)
            store(x + v * WIDTH, where(at_least(splat(F(HIDDEN)), more), more, here))
    if key < start or key + PANEL > stop:
        for v in range(VECTORS):
            at = ascending(I32(key + v * LANES))
            seen = both(below(at, integers(I32(stop))), below(integers(I32(start - 1)), at))
            store(x + v * WIDTH, where(seen, load_floats(x + v * WIDTH), splat(-INFINITE)))


@njit(**OPTIONS)
def set_bounds(classes, state, top):
    """A row's largest logit; and the top-th largest of the classes: as many logits at least are as large."""
    best = load_floats(classes)
    for v in range(1, VECTORS):
        best = larger(load_floats(classes + v * WIDTH), best)
    peak = largest_lane(best)
    put(state + PEAK, peak if peak > -INFINITE else F(0))
    bound = peak
    for _ in range(1, top):
        best = splat(-INFINITE)
        for v in range(VECTORS):
            most = load_floats(classes + v * WIDTH)
            most = where(at_least(most, splat(bound)), splat(-INFINITE), most)
            store(classes + v * WIDTH, most)
            best = larger(most, best)
        bound = largest_lane(best)
    put(state + BOUND, max(bound, F(HIDDEN / 2)))


@njit(**OPTIONS)
def any_strong(x, state):
    """Whether any of a panel's row may be among the strongest."""
    most = load_floats(x)
    for v in range(1, VECTORS):
        most = larger(load_floats(x + v * WIDTH), most)
    return bits(at_least(most, splat(number(state + BOUND))))


@njit(**OPTIONS)
def keep_strongest(x, key, state, logits, keys, top):
    """Put those of a panel's row that belong there among the strongest, in order."""
    for v in range(VECTORS):
        strong = bits(at_least(load_floats(x + v * WIDTH), splat(number(state + BOUND))))
        while strong:
            lane = v * LANES + lowest(strong)
            strong &= strong - 1
            value, c = number(x + 4 * lane), top - 1
            if value <= number(logits + 4 * c):
                continue
            while c > 0 and number(logits + 4 * c - 4) < value:
                put(logits + 4 * c, number(logits + 4 * c - 4))
                put_integer(keys + 4 * c, integer(keys + 4 * c - 4))
                c -= 1
            put(logits + 4 * c, value)
            put_integer(keys + 4 * c, I32(key + lane))
    last = number(logits + 4 * top - 4)
    if last >= number(state + BOUND):  # as many as are wanted: from here on equal ones are too few
        put(state + BOUND, above(last))


@njit(**OPTIONS)
def read_row(x, state, sums, back):
    """exp in place of the logits of a panel's row, and the sums; back: how far its first key is behind the query."""
    peak = splat(number(state + PEAK))
    whole, energy = load_floats(sums), load_floats(sums + WIDTH)
    squares, moment = load_floats(sums + 2 * WIDTH), load_floats(sums + 3 * WIDTH)
    distance = minus(splat(F(back)), as_floats(ascending(I32(0))))
    for v in range(VECTORS):
        t = clamped(minus(load_floats(x + v * WIDTH), peak))
        p = exp(t)
        store(x + v * WIDTH, p)
        whole = plus(whole, p)
        energy = fma(p, t, energy)
        squares = fma(p, p, squares)
        moment = fma(p, distance, moment)
        distance = minus(distance, splat(F(LANES)))
    store(sums, whole)
    store(sums + WIDTH, energy)
    store(sums + 2 * WIDTH, squares)
    store(sums + 3 * WIDTH, moment)


@njit(**OPTIONS)
def read_labels(x, key, sums, mine, labels, past):
    """Add up the keys before `past` that have the query's label."""
    mass, own, end = load_floats(sums), integers(mine), integers(I32(past))
    for v in range(VECTORS):
        early = below(ascending(I32(key + v * LANES)), end)
        same = both(equal(load_integers(labels + 4 * key + v * WIDTH), own), early)
        mass = plus(mass, where(same, load_floats(x + v * WIDTH), splat(F(0))))
    store(sums, mass)


@njit(**OPTIONS)
def window_mass(tile, row, padded, panel0, start, stop):
    """The sum of a row over the keys from start to stop."""
    mass = splat(F(0))
    for panel in range(start // PANEL, (stop + PANEL - 1) // PANEL):
        x = tile + ((panel - panel0) * padded + row) * ROW
        for v in range(VECTORS):
            at = ascending(I32(panel * PANEL + v * LANES))
            inside = both(below(at, integers(I32(stop))), below(integers(I32(start - 1)), at))
            mass = plus(mass, where(inside, load_floats(x + v * WIDTH), splat(F(0))))
    return total(mass)


@njit(**OPTIONS)
def set_reach(a, start, queries):
    """Of each row the keys that it may see, which query and which head it is; of each block the panels; of all, too."""
    rows, head, query = queries * field(a, "heads"), 0, 0
    causal, window, keys, spans = field(a, "causal"), field(a, "window"), field(a, "keys"), field(a, "spans")
    row, block, left, right = field(a, "reach"), field(a, "ranges"), keys, 0
    first, last = keys, 0
    for i in range(whole_blocks(rows) * BLOCK):
        position = field(a, "first") + start + query
        low = max(0, position - window + 1) if window else 0
        high = max(0, min(keys, position + 1)) if causal else keys
        if spans:  # a mask has the last word
            low, high = long(spans + 16 * (start + query)), long(spans + 16 * (start + query) + 8)
        put_long(row + REACH * i, low)
        put_long(row + REACH * i + 8, high)
        put_long(row + REACH * i + 16, query)
        put_long(row + REACH * i + 24, head)
        left, right = min(left, low), max(right, high)
        if i % BLOCK == BLOCK - 1:
            put_long(block, left // PANEL)
            put_long(block + 8, (right + PANEL - 1) // PANEL)
            first, last = min(first, left), max(last, right)
            block, left, right = block + 16, keys, 0
        if i + 1 < rows:  # what fills the last block up repeats the last row
            query += 1
            if query == queries:
                head, query = head + 1, 0
    return first // PANEL, (last + PANEL - 1) // PANEL


@njit(**OPTIONS)
def pack_queries(a, start, queries):
    """Scaled queries of all heads one after another, in whole blocks."""
    depth, rows, q = field(a, "depth"), queries * field(a, "heads"), field(a, "packed")
    scale, row = number(field(a, "scale")), field(a, "reach")
    for _ in range(whole_blocks(rows) * BLOCK):
        source = field(a, "q") + long(row + 24) * field(a, "q_head") + (start + long(row + 16)) * field(a, "q_row")
        even = depth // LANES * LANES
        for d in range(0, even, LANES):
            store(q + 4 * d, times(load_floats(source + 4 * d), splat(scale)))
        for d in range(even, depth):
            put(q + 4 * d, number(source + 4 * d) * scale)
        q, row = q + 4 * depth, row + REACH


@njit(**OPTIONS)
def make_logits(a, start, rows, panel0, panel1):
    """q k of every block and panel that it reaches, and the largest of each row per place in a panel."""
    depth, tile, blocks, extra = field(a, "depth"), field(a, "tile"), whole_blocks(rows), field(a, "extra")
    softcap, q = field(a, "softcap"), field(a, "packed")
    for panel in range(panel0, panel1):
        keys, key = field(a, "k") + panel * depth * ROW, panel * PANEL
        for block in range(blocks):
            # Blocks of early rows of a causal text reach few panels: the others are never made.
            reach = field(a, "ranges") + 16 * block
            if panel < long(reach) or panel >= long(reach + 8):
                continue
            x = tile + ((panel - panel0) * blocks + block) * BLOCK * ROW
            # DEPTH numbers at a time: one long sum in float32 would lose more digits.
            for strip in range(0, ROW, 4 * STRIP):
                first = q + block * BLOCK * depth * 4
                product(first, depth * 4, keys + strip, ROW, min(depth, DEPTH), x + strip, ROW, 0)
                for d in range(DEPTH, depth, DEPTH):
                    part = keys + d * ROW + strip
                    product(first + 4 * d, depth * 4, part, ROW, min(depth - d, DEPTH), x + strip, ROW, 1)
            # While the logits are in the first cache: what is added to them, and the largest so far of each class.
            row, most = field(a, "reach") + REACH * block * BLOCK, field(a, "classes") + block * BLOCK * ROW
            for _ in range(BLOCK):
                low, high = long(row), long(row + 8)
                if softcap or extra or key < low or key + PANEL > high:
                    added = extra + long(row + 24) * field(a, "extra_head")
                    added += (start + long(row + 16)) * field(a, "extra_row") + (panel - field(a, "extra_panel")) * ROW
                    shape_row(x, key, low, high, softcap, added if extra else 0)
                for v in range(VECTORS):
                    store(most + v * WIDTH, larger(load_floats(x + v * WIDTH), load_floats(most + v * WIDTH)))
                x, row, most = x + ROW, row + REACH, most + ROW


@njit(**OPTIONS)
def note_row(state, sums, note, step, query, sink, sinks_scale):
    """A row's sums as the answers are made of them, and what makes an exp a weight."""
    peak, p0, t0 = number(state + PEAK), number(state + P0), number(state + T0)
    rest, energy = total(load_floats(sums)), total(load_floats(sums + WIDTH))
    squares, moment = total(load_floats(sums + 2 * WIDTH)), total(load_floats(sums + 3 * WIDTH))
    whole = rest + p0
    rest = rest if whole == whole else whole  # a NaN of key 0 is the whole row's
    taken = whole + exp_one(number(sink) - peak) if sink else whole
    sees = whole != whole or (whole > F(0) and (peak > F(HIDDEN / 2) or F(2 * HIDDEN) > peak))
    put(note + TOTAL * step, whole if sees else F(0))
    put(note + REST * step, rest if sees else F(0))
    put(note + ENERGY * step, energy + p0 * t0 if sees else F(0))
    put(note + ENERGY_REST * step, energy if sees else F(0))
    put(note + SQUARES * step, squares + p0 * p0 if sees else F(0))
    put(note + MOMENT * step, moment + p0 * F(query) if sees else F(0))
    factor = (F(1) / whole if sinks_scale else F(1) / taken) if sees else F(0)
    put(note + FACTOR * step, factor)
    put(state + P0, factor)
    put(state + T0, factor * whole / taken if sees and sinks_scale else factor)


@njit(**OPTIONS)
def clear(a, rows):
    """Nothing seen yet."""
    padded, labels, top = whole_blocks(rows) * BLOCK, field(a, "labels"), field(a, "top")
    for at in range(padded * VECTORS):
        store(field(a, "classes") + at * WIDTH, splat(-INFINITE))
    for at in range(padded * (SUMS + labels)):
        store(field(a, "sums") + at * WIDTH, splat(F(0)))
    for at in range(padded * field(a, "strips") * STRIP // LANES):
        store(field(a, "out") + at * WIDTH, splat(F(0)))
    for i in range(padded):
        put(field(a, "state") + i * STATE + P0, F(0))
        put(field(a, "state") + i * STATE + T0, F(0))
    for at in range(padded * top):
        put(field(a, "best") + 4 * at, -INFINITE)
        put_integer(field(a, "best_keys") + 4 * at, I32(0))


@njit(**OPTIONS)
def read_labelled(a, x, key, sums, start, query):
    """Of each pair of labels, what a panel's row gives the keys of the query's own."""
    for at in range(field(a, "labels")):
        past = field(a, "first") + start + query - long(field(a, "gaps") + 8 * at) + 1
        if key < past:
            mine = integer(field(a, "own") + at * field(a, "own_step") + 4 * (start + query))
            read_labels(x, key, sums + at * WIDTH, mine, field(a, "label") + at * field(a, "label_step"), past)


@njit(**OPTIONS)
def read_panels(a, start, rows, panel0, panel1):
    """Every panel once: the strongest keys, exp, sums, labels, and the products with the columns."""
    tile, blocks, top, labels = field(a, "tile"), whole_blocks(rows), field(a, "top"), field(a, "labels")
    first, strips, row_sums = field(a, "first") + start, field(a, "strips"), WIDTH * (SUMS + field(a, "labels"))
    best, best_keys, top_index = field(a, "best"), field(a, "best_keys"), field(a, "top_index")
    for panel in range(panel0, panel1):
        key = panel * PANEL
        for block in range(blocks):
            x, ranges = tile + ((panel - panel0) * blocks + block) * BLOCK * ROW, field(a, "ranges") + 16 * block
            # What was never made is 0 for the sums over rows, which read whole panels.
            if panel < long(ranges) or panel >= long(ranges + 8):
                for at in range(BLOCK * VECTORS * (field(a, "count") > 0)):
                    store(x + at * WIDTH, splat(F(0)))
                continue
            here, state = field(a, "reach") + REACH * block * BLOCK, field(a, "state") + block * BLOCK * STATE
            sums = field(a, "sums") + block * BLOCK * row_sums
            for i in range(BLOCK):
                row, query = x + i * ROW, long(here + 16)
                # The strongest are searched among logits: exp makes equal what is far below a row's largest.
                if top and integer(top_index + 4 * long(here + 24)) >= 0 and any_strong(row, state):
                    at = 4 * top * (block * BLOCK + i)
                    keep_strongest(row, key, state, best + at, best_keys + at, top)
                # Key 0 is left out of the sums and added at the end: so the row without it loses no digits.
                if panel == 0:
                    t0 = largest_lane(clamped(splat(number(row) - number(state + PEAK))))
                    put(state + T0, t0)
                    put(state + P0, exp_one(t0))
                    put(row, -INFINITE)
                read_row(row, state, sums, first + query - key)
                if panel == 0:
                    put(row, number(state + P0))
                if labels:
                    read_labelled(a, row, key, sums + SUMS * WIDTH, start, query)
                here, state, sums = here + REACH, state + STATE, sums + row_sums
            # P V and features, while the block's exponentials are in the first cache.
            for strip in range(strips):
                columns = field(a, "v") + (strip * field(a, "panels") + panel) * PANEL * STRIP * 4
                out = field(a, "out") + (block * strips + strip) * BLOCK * STRIP * 4
                product(x, ROW, columns, STRIP * 4, PANEL, out, STRIP * 4, 1)


@njit(**OPTIONS)
def look_up(a, start, row, i, note, panel0, padded):
    """What is asked of single keys, of equal labels and of the last keys."""
    tile, step, factor = field(a, "tile"), field(a, "note_step"), number(field(a, "state") + i * STATE + P0)
    ranges, query = field(a, "ranges") + i // BLOCK * 16, long(row + 16)
    left, right, position = long(ranges) * PANEL, long(ranges + 8) * PANEL, field(a, "first") + start + query
    for at in range(field(a, "places")):
        asked = np.int64(integer(field(a, "place") + at * field(a, "place_step") + 4 * (start + query)))
        weight = F(0)
        if left <= asked < right:
            weight = number(tile + ((asked // PANEL - panel0) * padded + i) * ROW + asked % PANEL * 4) * factor
        put(note, weight)
        note += step
    labels = field(a, "labels")
    for at in range(labels):
        put(note, total(load_floats(field(a, "sums") + (i * (SUMS + labels) + SUMS + at) * WIDTH)) * factor)
        note += step
    for at in range(field(a, "windows")):
        low = max(left, position - long(field(a, "widths") + 8 * at) + 1)
        put(note, window_mass(tile, i, padded, panel0, low, min(right, position + 1)) * factor)
        note += step


@njit(**OPTIONS)
def give_strongest(a, start, row, i):
    """The weights of a row's strongest keys, NaN where it sees fewer."""
    top, index = field(a, "top"), integer(field(a, "top_index") + 4 * long(row + 24))
    if top == 0 or index < 0:
        return
    peak = splat(number(field(a, "state") + i * STATE + PEAK))
    factor = splat(number(field(a, "state") + i * STATE + P0))
    best, keys = field(a, "best") + 4 * i * top, field(a, "best_keys") + 4 * i * top
    to, sums = index * field(a, "top_step"), field(a, "sums") + i * WIDTH * (SUMS + field(a, "labels"))
    to += (start + long(row + 16)) * top * 4
    for first in range(0, top, LANES):
        # A register of them at once, put where the row's sums were; what is beyond the last is another row's.
        logits = load_floats(best + 4 * first)
        weights = times(exp(clamped(least(minus(logits, peak), splat(F(88))))), factor)
        store(sums, where(at_least(splat(F(HIDDEN / 2)), logits), splat(F(np.nan)), weights))
        for lane in range(min(LANES, top - first)):
            put(field(a, "top_weights") + to + 4 * (first + lane), number(sums + 4 * lane))
            put_integer(field(a, "top_keys") + to + 4 * (first + lane), integer(keys + 4 * (first + lane)))


@njit(**OPTIONS)
def give_products(a, start, row, i):
    """A row's products to where they are wanted: per answer its first column, width, address, strides, whether P V."""
    strips, copy, block = field(a, "strips"), field(a, "copies"), i // BLOCK
    for _ in range(field(a, "copied")):
        state = field(a, "state") + i * STATE
        factor = number(state + T0) if long(copy + 40) else number(state + P0)
        to = long(copy + 16) + (start + long(row + 16)) * long(copy + 24) + long(row + 24) * long(copy + 32)
        column, end = long(copy), long(copy) + long(copy + 8)
        while column < end:  # strip by strip
            past = min(end, (column // STRIP + 1) * STRIP)
            place = ((block * strips + column // STRIP) * BLOCK + i % BLOCK) * STRIP + column % STRIP
            source = field(a, "out") + 4 * place
            while column + LANES <= past:
                store(to, times(load_floats(source), splat(factor)))
                column, to, source = column + LANES, to + WIDTH, source + WIDTH
            while column < past:
                put(to, number(source) * factor)
                column, to, source = column + 1, to + 4, source + 4
        copy += 48


@njit(**OPTIONS)
def weigh_columns(a, queries, panel0, panel1):
    """Add sums over the rows of each head of share times weight, per key, to (count, heads, panels * 64)."""
    heads, padded = field(a, "heads"), whole_blocks(queries * field(a, "heads")) * BLOCK
    for panel in range(panel0, panel1):
        for column in range(field(a, "count")):
            for head in range(heads):
                answer = field(a, "columns") + ((column * heads + head) * field(a, "panels") + panel) * ROW
                x = field(a, "tile") + ((panel - panel0) * padded + head * queries) * ROW
                weight = field(a, "weights") + (column * padded + head * queries) * 4
                # Four registers of keys at a time stay there over all rows.
                for v in range(0, VECTORS, 4):
                    to, row = answer + v * WIDTH, x + v * WIDTH
                    m0, m1 = load_floats(to), load_floats(to + WIDTH)
                    m2, m3 = load_floats(to + 2 * WIDTH), load_floats(to + 3 * WIDTH)
                    # A row's share times its factor turns the exponentials of the tile into weights.
                    for i in range(queries):
                        share = splat(number(weight + 4 * i))
                        m0 = fma(load_floats(row), share, m0)
                        m1 = fma(load_floats(row + WIDTH), share, m1)
                        m2 = fma(load_floats(row + 2 * WIDTH), share, m2)
                        m3 = fma(load_floats(row + 3 * WIDTH), share, m3)
                        row += ROW
                    store(to, m0)
                    store(to + WIDTH, m1)
                    store(to + 2 * WIDTH, m2)
                    store(to + 3 * WIDTH, m3)


@njit(**OPTIONS)
def give(a, start, queries, panel0):
    """Every row's notes and answers."""
    rows, row, step = queries * field(a, "heads"), field(a, "reach"), field(a, "note_step")
    padded = whole_blocks(rows) * BLOCK
    for i in range(rows):
        query, head = start + long(row + 16), long(row + 24)
        note = field(a, "notes") + head * field(a, "head_step") + 4 * query
        state, sums = field(a, "state") + i * STATE, field(a, "sums") + i * WIDTH * (SUMS + field(a, "labels"))
        sink = field(a, "sinks")
        if sink:
            sink += head * field(a, "sink_head") + query * field(a, "sink_row")
        note_row(state, sums, note, step, field(a, "first") + query, sink, field(a, "sinks_scale"))
        look_up(a, start, row, i, note + NOTES * step, panel0, padded)
        give_strongest(a, start, row, i)
        give_products(a, start, row, i)
        for at in range(field(a, "count")):
            share = number(field(a, "shares") + at * field(a, "share_step") + 4 * query)
            put(field(a, "weights") + 4 * (at * padded + i), share * number(state + P0))
        row += REACH


@njit(**OPTIONS)
def sweep(a, count):
    """Read the rows of so many records, one after the other. a: where the values of NAMES lie, record after record."""
    for _ in range(count):
        read_rows(a)
        a += RECORD


@njit(**OPTIONS)
def read_rows(a):
    """Read rows of one kv head's heads, as many at once as fit the cache."""
    for start in range(0, field(a, "rows"), field(a, "queries")):
        queries = min(field(a, "queries"), field(a, "rows") - start)
        rows = queries * field(a, "heads")
        panel0, panel1 = set_reach(a, start, queries)
        pack_queries(a, start, queries)
        clear(a, rows)
        make_logits(a, start, rows, panel0, panel1)
        for i in range(whole_blocks(rows) * BLOCK):
            head = long(field(a, "reach") + REACH * i + 24)
            wanted = field(a, "top") and integer(field(a, "top_index") + 4 * head) >= 0
            set_bounds(field(a, "classes") + i * ROW, field(a, "state") + i * STATE, field(a, "top") if wanted else 1)
        read_panels(a, start, rows, panel0, panel1)
        give(a, start, queries, panel0)
        if field(a, "count"):
            weigh_columns(a, queries, panel0, panel1)

"""What the sweep does with one row of one panel: 64 logits, and what is kept of the row from panel to panel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from attnscope.attention.compiled.shapes import BLOCK, HIDDEN, LANES, PANEL
from attnscope.attention.compiled.vectors import (
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
    fma,
    integer,
    integers,
    larger,
    largest_lane,
    load_floats,
    load_integers,
    lowest,
    minus,
    number,
    over,
    plus,
    put,
    put_integer,
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
    whole, energy, squares, moment = (
        load_floats(sums),
        load_floats(sums + WIDTH),
        load_floats(sums + 2 * WIDTH),
        load_floats(sums + 3 * WIDTH),
    )
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
        same = both(
            equal(load_integers(labels + 4 * key + v * WIDTH), own), below(ascending(I32(key + v * LANES)), end)
        )
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

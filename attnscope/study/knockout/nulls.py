"""What a cut is compared with: the same weights on other keys, and other heads' own strongest looks.

permuted: under the null hypothesis what the keys of a row carry is exchangeable, given the weights. The values of the
cut keys are exchanged with those of other keys, and the same weights are cut where they now lie. (Weights move and
values stay, which is the same.) One draw exchanges the cut keys with keys that were drawn, p_b. The text as it is
counts as such a draw, p_0, of an unseen text: the others are p_b after p_0 was undone. The rank of the cut's
effect among all is then exact, though these exchanges are no group (Ramdas et al. 2023, arXiv 2204.13581).

heads: the strongest look of every other head, where its weight is within a factor of 2 of the one that was cut. Effects
are compared per weight: what a head gives changes in proportion to it.

Shapes: S text, D draw, K key.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from attnscope.interventions.spec import DRAWS, Cut, HeadSet
from attnscope.study.knockout.records import Draw, Masses, Null

FEWEST = 10  # keys to exchange with, or other heads
OWN = "the answer is the model's own next token, which the keys chose as they are: name an answer"
SEVERAL = "several keys or heads are cut"
ALIKE = 2.0  # the factor within which another head's weight has to lie
Moves = tuple[tuple[int, int], ...]


def permuted_null(
    cut: Cut,
    queries: Sequence[Sequence[int]],
    masses: Masses,
    most: int = DRAWS,
    seed: int = 0,
    own: Collection[int] = (),
) -> Null:
    """The same weights on other keys, drawn for each text apart; at most so many draws, or all that one key has.

    queries: the asked rows of each text. own: the texts with the model's own answer. It was chosen as what the
    values give where they are, so that no other order of them can be expected to give it as much.
    """
    if not most:
        return Null()
    # Keys are exchangeable where every row and head that is cut sees them, and where no exchange changes a row itself.
    heads = masses.looking(cut)
    pools, missing = {}, []
    for text in range(len(cut.keys)):
        pool, why = _pool(replace(cut, heads=heads), text, queries[text], masses)
        why = OWN if text in own else why
        if not why and len({layer for layer, _ in heads}) > 1:
            pool = [key for key in pool if key not in queries[text]]
            if not set(cut.keys[text]) <= set(pool):
                why = "a key is itself a row that is cut, which changes its value"
        if not why and len(pool) < FEWEST:
            why = f"fewer than {FEWEST} keys to exchange with"
        if why:
            missing.append(why)
        else:
            pools[text] = pool
    if not pools:
        return Null(why=tuple(missing))
    # A draw is one exchange in every text that has a null: as many draws as the text with the fewest has.
    orders = {text: _exchanges(cut, text, pool, most, seed, alone=len(pools) == 1) for text, pool in pools.items()}
    draws = []
    for number in range(min(map(len, orders.values()))):
        moves = tuple(orders[text][number] if text in orders else () for text in range(len(cut.keys)))
        keys = tuple(
            tuple(dict(moves[text]).get(key, key) for key in own) if text in orders else ()
            for text, own in enumerate(cut.keys)
        )
        moved = Cut(f"{cut.name}, order {number}", heads, ((),) * len(keys), moves)
        draws.append(Draw(replace(moved, name=f"{moved.name}, cut", keys=keys), moved))
    return Null(tuple(draws), tuple(pools), min(map(len, pools.values())), tuple(missing))


def heads_null(
    cut: Cut, heads: Sequence[HeadSet], queries: Sequence[Sequence[int]], masses: Masses, most: int = DRAWS
) -> Null:
    """The strongest look of each other head, where it is as strong; at most so many, of the nearest weight.

    heads: those to compare with, each alone.
    """
    if not most:
        return Null()
    if len(cut.heads) > 1 or any(len(keys) > 1 for keys in cut.keys):
        return Null(why=(SEVERAL,))
    own = [_pool(cut, text, queries[text], masses) for text in range(len(cut.keys))]
    missing = [why for _, why in own if why]
    if missing:
        return Null(why=tuple(missing))
    mass, alike = _mean_mass(cut, masses), []
    for one in heads:
        strongest = [_strongest(one, text, queries[text], masses) for text in range(len(cut.keys))]
        if one.heads == cut.heads or None in strongest:
            continue
        other = Cut(f"{one.name}, strongest", one.heads, tuple((key,) for key in strongest if key is not None))
        apart = abs(math.log(_mean_mass(other, masses) / mass))
        if apart <= math.log(ALIKE):
            alike.append((apart, Draw(other)))
    if len(alike) < FEWEST:
        return Null(why=(f"fewer than {FEWEST} other heads look as strongly",))
    alike.sort(key=lambda one: one[0])
    return Null(tuple(draw for _, draw in alike[:most]), tuple(range(len(cut.keys))))


def edges_alone(cuts: Sequence[Cut]) -> bool:
    """Whether any of some cuts is of one key in one head."""
    return any(len(one.heads) == 1 and all(len(keys) == 1 for keys in one.keys) for one in cuts)


def _pool(cut: Cut, text: int, queries: Sequence[int], masses: Masses) -> tuple[list[int], str]:
    """The keys that all asked rows see in all heads of a cut, without key 0 and the heads' sinks; why it has none.

    Sinks are known from weights alone, so that no value has a part in the choice.
    """
    seen_K, rests = masses.seen_by_all(cut, text, len(queries)), masses.resting(cut, text)
    pool = [int(key) for key in np.flatnonzero(seen_K) if key not in {0, *rests}]
    own = set(cut.keys[text])
    if not masses.of(cut, text) > 0:
        return [], "no weight is cut"
    if 0 in own:
        return [], "key 0 is cut"
    if own & rests:
        return [], "a sink is cut"
    return pool, "" if own <= set(pool) else "not every row and head sees the keys"


def _exchanges(cut: Cut, text: int, pool: Sequence[int], most: int, seed: int, alone: bool) -> list[Moves]:
    """Where the weights of a text go in every draw; alone: of no other text, so that none need come twice.

    The draws of a cut depend on its heads and keys, and not on what else is cut or its name.
    """
    own = cut.keys[text]
    generator = np.random.default_rng([seed, text, *own, *itertools.chain(*cut.heads)])
    if alone and len(own) == 1:
        drawn = [(int(key),) for key in generator.permutation(pool)[: most + 1]]
    else:
        drawn = [tuple(generator.choice(pool, len(own), replace=False).tolist()) for _ in range(most + 1)]
    return [_moves(own, drawn[0], other) for other in drawn[1:]]


def _moves(own: Sequence[int], first: Sequence[int], other: Sequence[int]) -> Moves:
    """Where weights go if the exchange of the cut keys with the first is undone, and they are exchanged with others.

    >>> _moves((5,), (2,), (7,))
    ((2, 5), (5, 7), (7, 2))
    >>> _moves((5,), (2,), (2,))
    ()
    """
    value = {key: key for key in (*own, *first, *other)}  # whose value each weight has
    for pairs in (reversed(list(zip(own, first, strict=True))), zip(own, other, strict=True)):
        for one, two in pairs:
            value[one], value[two] = value[two], value[one]
    return tuple(sorted((key, onto) for key, onto in value.items() if key != onto))


def _strongest(one: HeadSet, text: int, queries: Sequence[int], masses: Masses) -> int | None:
    """The key that a head looks at most, of those that could be cut from it; None without any."""
    mass_K = masses.per_key(one, text)
    there_K = masses.seen_by_all(one, text, len(queries)) & (mass_K > 0)
    there_K[[0, *masses.resting(one, text)]] = False
    return int(np.where(there_K, mass_K, -1.0).argmax()) if there_K.any() else None


def _mean_mass(cut: Cut, masses: Masses) -> float:
    return float(np.mean([masses.of(cut, text) for text in range(len(cut.keys))]))


def reasons(nulls: Sequence[Null]) -> Mapping[str, int]:
    """Why there is no null, in some text or all, and of how many cuts."""
    every = sorted({why for null in nulls for why in null.why})
    return {why: sum(why in null.why for null in nulls) for why in every}

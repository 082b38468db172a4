"""What a comparison is held to: conditions in a line, and the heads that moved beyond them.

    conditions = parse_gate("visible=same,js<0.01,role=same")
    verdict = judge(comparison, conditions)
    verdict.holds, [move.line for move in verdict.moves]

A number has moved where its interval for all heads at once lies beyond the bound. Where there is no interval, its mean
decides: under FEWEST texts, and where few texts carry the spread. Keys are counted, and one pair is enough.

Shapes: S text, N head of all layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from attnscope.errors import UsageError, brief, nearest
from attnscope.metrics.metrics import METRICS
from attnscope.metrics.roles import NONE
from attnscope.model.selection import DECODER
from attnscope.studies.comparison import Changes, Comparison
from attnscope.studies.intervals import FEWEST, SHARE
from attnscope.studies.statistics import Effects, paired
from attnscope.utils.display import number_of
from attnscope.utils.files import jsonable

SCHEMA = "gate/1"  # of the verdicts in compare.json
VISIBLE, ROLE, SAME = "visible", "role", "same"
JS, LOST, WEIGHT = "js", "lost", "weight"
BOUNDED = re.compile(r"(?P<name>\w+)\s*<\s*(?P<bound>[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)", re.ASCII)
EXAMPLE = "visible=same,js<0.01,role=same"


class Condition(NamedTuple):
    """One condition on every head: a number stays below a bound, or what has none, None, stays the same."""

    name: str
    bound: float | None = None

    @property
    def text(self) -> str:
        """As it is typed: `js<0.01`."""
        return f"{self.name}={SAME}" if self.bound is None else f"{self.name}<{self.bound:g}"


def parse_gate(text: str) -> tuple[Condition, ...]:
    """The conditions of a line, by commas. Raises UsageError for what is none, with the conditions that there are."""
    conditions = tuple(_condition(part.strip()) for part in text.split(","))
    names = [condition.name for condition in conditions]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--gate: {name} has two conditions", "keep one of them")
    return conditions


def _condition(part: str) -> Condition:
    if not part:
        raise UsageError("--gate: a condition is empty", f"write it as {EXAMPLE}")
    name = re.split(r"\W", part)[0]
    if name in (VISIBLE, ROLE):
        if not re.fullmatch(rf"{name}\s*=\s*{SAME}", part):
            raise UsageError(f"--gate: expected {name}={SAME}, got {brief(part)}", f"write it as {EXAMPLE}")
        return Condition(name)
    numbers = {JS: SHARE, LOST: SHARE, WEIGHT: SHARE, **{name: metric.within for name, metric in METRICS.items()}}
    match = BOUNDED.fullmatch(part)
    if name not in numbers:
        near = nearest(name, [*numbers, VISIBLE, ROLE])
        guess = f"did you mean {near}? " if near else ""
        known = f"{VISIBLE}={SAME}, {ROLE}={SAME}, {JS}<X, {LOST}<X, {WEIGHT}<X, and METRIC<X"
        raise UsageError(f"--gate: there is no condition on {brief(name)}", f"{guess}there are {known}")
    if match is None:
        raise UsageError(f"--gate: expected {name}<NUMBER, got {brief(part)}", f"write it as {name}<0.01")
    bound, within = float(match["bound"]), numbers[name]
    if bound == 0 or (within and bound > within[1]):
        most = f" to {within[1]:g}" if within else ""
        raise UsageError(f"--gate: expected {name}<NUMBER above 0{most}, got {brief(part)}", "choose another bound")
    return Condition(name, bound)


@dataclass(frozen=True)
class Move:
    """A head that one condition does not hold for. value: the number, or how many pairs; None of a role.

    low, high: the interval for all heads at once, NaN where the mean decided. words: what moved.
    """

    place: int
    condition: Condition
    words: str
    value: float | None = None
    low: float = np.nan
    high: float = np.nan


@dataclass(frozen=True)
class Verdict:
    """What a gate says of a comparison: the moves, by condition and head, and what no text can show.

    names: of each judged head, by its place: `L3H2`. roles: what it is called: by an atlas, else by the texts.
    unjudged: conditions that no head can show. texts: how many were read.
    """

    comparison: Comparison
    conditions: tuple[Condition, ...]
    places: Sequence[int]
    roles: Mapping[int, str]
    moves: tuple[Move, ...]
    unjudged: tuple[Condition, ...]

    @property
    def holds(self) -> bool:
        """Whether no head moved, and every condition could be judged."""
        return not self.moves and not self.unjudged

    @property
    def moved(self) -> dict[int, list[Move]]:
        """The moves of each head that has some, in the model's order: what moved first may be the cause."""
        return {
            place: moves
            for place in sorted(self.places)
            if (moves := [move for move in self.moves if move.place == place])
        }

    @property
    def lines(self) -> list[str]:
        """A line for each head that moved, and for each condition that no head can show."""
        lines = []
        for place, moves in self.moved.items():
            role = f" ({self.roles[place]})" * (self.roles[place] != NONE)
            lines.append(f"{self.comparison.name(place)}{role}: {'; '.join(move.words for move in moves)}")
        return lines + [f"{condition.text}: no head can show it on these texts" for condition in self.unjudged]

    @property
    def line(self) -> str:
        """The verdict: how many heads were held to what, and how many moved."""
        gate = ",".join(condition.text for condition in self.conditions)
        heads, texts = number_of(len(self.places), "head"), number_of(self.comparison.texts, "text")
        few = "; too few texts for intervals, means decided" * (self.comparison.texts < FEWEST)
        if self.moved:
            return f"gate does not hold: {len(self.moved)} of {heads} moved over {texts}: {gate}{few}"
        return f"gate {'holds' if self.holds else 'is not shown'}: {heads} over {texts}: {gate}{few}"

    @property
    def facts(self) -> dict[str, Any]:
        """As compare.json has it."""
        # Each head that moved, by condition, as the terminal says it.
        moved = [
            {
                "stack": self.comparison.head_stacks[move.place],
                **dict(zip(("layer", "head"), map(int, self.comparison.heads[move.place]), strict=True)),
                "role": self.roles[move.place],
                "condition": move.condition.text,
                "value": move.value,
                "low": move.low,
                "high": move.high,
                "words": move.words,
            }
            for moves in self.moved.values()
            for move in moves
        ]
        result: dict[str, Any] = jsonable(
            {
                "schema": SCHEMA,
                "conditions": [condition.text for condition in self.conditions],
                "holds": self.holds,
                "heads": len(self.places),
                "texts": self.comparison.texts,
                "moved": moved,
                "unjudged": [condition.text for condition in self.unjudged],
            }
        )
        return result


def judge(
    comparison: Comparison,
    conditions: Sequence[Condition],
    places: Sequence[int] | None = None,
    atlas: Mapping[tuple[int, int], Sequence[str]] | None = None,
) -> Verdict:
    """Hold a comparison to conditions. places: of the heads that are judged, all without them. atlas: its roles.

    The comparison has to have its changes: `compare_heads(..., changes=True)`.
    """
    changes = comparison.changes
    assert changes is not None, "expected a comparison with its changes"
    judged = range(len(comparison.heads)) if places is None else places
    shown_SN = (changes.roles[0] != NONE) | (changes.roles[1] != NONE)
    leading = [_leading(roles_SN, shown_SN) for roles_SN in changes.roles]
    own = DECODER if DECODER in comparison.stacks else comparison.head_stacks[0]  # whose heads an atlas names
    roles = {}
    for place in judged:
        named = (atlas or {}).get(comparison.heads[place], ()) if comparison.head_stacks[place] == own else ()
        roles[place] = ", ".join(named) or str(leading[0][place])
    moves, unjudged = [], []
    for condition in conditions:
        shown_N, of_condition = _moves(comparison, changes, condition, leading)
        if not shown_N[list(judged)].any():
            unjudged.append(condition)
        moves += [move for move in of_condition if move.place in roles]
    return Verdict(comparison, tuple(conditions), list(judged), roles, tuple(moves), tuple(unjudged))


def _moves(
    comparison: Comparison, changes: Changes, condition: Condition, leading: Sequence[np.ndarray]
) -> tuple[np.ndarray, list[Move]]:
    """Which heads can show a condition, (N,), and those that moved."""
    if condition.name == VISIBLE:
        return _visible(changes, condition)
    if condition.name == ROLE:
        return _roles(changes, condition, leading)
    if condition.name == WEIGHT:
        return _weights(changes, condition)
    if condition.name == LOST:
        sides = (comparison.lost_SN, comparison.other_lost_SN)
        effects = [paired(side_SN, np.zeros(side_SN.shape[1]), flips=0, within=SHARE) for side_SN in sides]
    else:
        effects = [comparison.js if condition.name == JS else comparison.differences[condition.name]]
    shown_N, moves = np.zeros(len(comparison.heads), bool), list[Move]()
    for effect in effects:
        shown_N |= np.isfinite(effect.effect)
        known = {move.place for move in moves}
        moves += [move for move in _beyond(effect, condition) if move.place not in known]
    return shown_N, moves


def _beyond(effects: Effects, condition: Condition) -> list[Move]:
    """The heads with a number beyond a bound: by the end of its interval that is nearer to 0, else by its mean."""
    moves, bound = [], condition.bound or 0.0
    near_N = np.where(effects.effect >= 0, effects.low_all, -effects.high_all)
    by_mean_N = np.isnan(near_N)
    for place in np.flatnonzero(np.where(by_mean_N, np.abs(effects.effect), near_N) >= bound).tolist():
        value, low, high = (float(part[place]) for part in (effects.effect, effects.low_all, effects.high_all))
        interval = "" if by_mean_N[place] else f" [{low:.3g}, {high:.3g}]"
        words = f"{condition.name} {value:.3g}{interval}, bound {bound:g}"
        moves.append(Move(place, condition, words, value, low, high))
    return moves


def _visible(changes: Changes, condition: Condition) -> tuple[np.ndarray, list[Move]]:
    """The heads in which keys have mass on one side alone, or one side's mask alone hides them."""
    # Against a baseline the names of masks alone are known.
    own_SN, keys, masks = np.abs(changes.own[1] - changes.own[0]), changes.keys, changes.masks
    gained_SN = gone_SN = hidden_SN = np.zeros_like(own_SN)
    shown_N, known_N = np.ones((2, own_SN.shape[1]), bool)
    if keys is not None:
        gained_SN, gone_SN, hidden_SN = keys.gained, keys.gone, np.maximum(keys.hidden, 0)
        known_N = np.all(keys.hidden >= 0, axis=0)
    elif masks is not None:
        known_SN = (masks[0] != "") & (masks[1] != "")
        hidden_SN, shown_N = (known_SN & (masks[0] != masks[1])).astype(int), np.any(known_SN, axis=0)
    # Each head that moved in words: how many pairs, by what, and the first of them.
    moves = []
    for place in np.flatnonzero((gained_SN + gone_SN + hidden_SN + own_SN).any(0)).tolist():
        gained, gone, hidden, own = (int(part[:, place].sum()) for part in (gained_SN, gone_SN, hidden_SN, own_SN))
        words = [f"{gained} keys more and {gone} fewer have mass"] if keys is not None else []
        if own:
            words.append(f"{own} by a side's own matrix, not by its q, k and mask")
        if keys is None:
            words += [f"the mask shows other keys in {number_of(hidden, 'text')}"] * bool(hidden)
        elif known_N[place]:
            words.append(f"the masks differ in {hidden} pairs" if hidden else "the masks are equal")
        if keys is not None and (texts := np.flatnonzero(keys.query[:, place] >= 0)).size:
            query, key = (int(part[texts[0], place]) for part in (keys.query, keys.key))
            words.append(f"first query {query}, key {key}" + f" of text {texts[0]}" * (len(own_SN) > 1))
        value = float(max(gained + gone, hidden, own))
        moves.append(Move(place, condition, f"visible: {', '.join(words)}", value))
    return shown_N, moves


def _weights(changes: Changes, condition: Condition) -> tuple[np.ndarray, list[Move]]:
    """The heads of which one weight differs by more than a bound, in any text."""
    assert changes.keys is not None, "expected the weights of both sides"
    weight_N, bound = changes.keys.weight.max(0), condition.bound or 0.0
    moves = [
        Move(place, condition, f"weight {weight_N[place]:.3g}, bound {bound:g}", float(weight_N[place]))
        for place in np.flatnonzero(weight_N >= bound).tolist()
    ]
    return np.isfinite(weight_N), moves


def _roles(changes: Changes, condition: Condition, leading: Sequence[np.ndarray]) -> tuple[np.ndarray, list[Move]]:
    """The heads with another leading role on the other side; from FEWEST texts on, if fewer texts show the first's."""
    first_N, other_N = leading
    moved_N = first_N != other_N
    if len(changes.roles[0]) >= FEWEST and moved_N.any():
        score_SN, null_SN = ((roles_SN == first_N).astype(np.float64) for roles_SN in changes.roles[::-1])
        moved_N &= paired(score_SN, null_SN, flips=0, within=SHARE).high_all < 0
    moves = [
        Move(place, condition, f"role {first_N[place]}, on the other side {other_N[place]}")
        for place in np.flatnonzero(moved_N).tolist()
    ]
    return (changes.roles[0] != NONE).any(0) | (changes.roles[1] != NONE).any(0), moves


def _leading(roles_SN: np.ndarray, shown_SN: np.ndarray) -> np.ndarray:
    """The role that most of the texts have that show one on either side, (N,); of equals the first by name."""
    leading = []
    for roles_S, shown_S in zip(roles_SN.T, shown_SN.T, strict=True):
        names, counts = np.unique(roles_S[shown_S].astype(str), return_counts=True)
        leading.append(names[counts.argmax()] if len(names) else NONE)
    return np.array(leading, dtype=object)

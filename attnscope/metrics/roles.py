"""What a head does, in one word: rules over its scores, each with the support it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnscope.model.selection import CAUSAL, DECODER, ENCODER, MIXING, STACKS

NEEDED_ROWS = 16
SINK_MASS = 0.3  # mean mass above which a head rests on a key
SINK_TOKENS = 64  # in 9 tokens a uniform head already gives key 0 a share of 0.31
NEAR_UNIFORM = 0.8  # of the largest entropy
OTHER, NONE = "other", "-"
Rule = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]  # of scores and those of uniform attention, to bools


@dataclass(frozen=True)
class Role:
    """A rule: the role's name, its condition over the scores, the rows it needs, and where it comes from.

    metric: the score that the condition is about. holds gets {metric: score} and {metric: score of uniform attention
    over the same keys}, numbers or arrays of them. stacks: the stacks whose heads may have it.
    """

    name: str
    metric: str
    condition: str
    rows: str
    needed: int
    source: str
    holds: Rule
    stacks: tuple[str, ...] = (*CAUSAL, ENCODER, *MIXING)


def _above_uniform(metric: str, least: float) -> Rule:
    return lambda score, uniform: score[metric] - uniform[metric] >= least


def _looks_at(metric: str, rows: str, source: str, stacks: tuple[str, ...] = Role.stacks) -> Role:
    """The role of heads that look at what a metric is of far more than uniform attention does."""
    condition = f"{metric} at least 0.4 above uniform attention"
    name, holds = metric.replace("_", "-"), _above_uniform(metric, 0.4)
    return Role(name, metric, condition, rows, NEEDED_ROWS, source, holds, stacks)


ROLES = (  # the first rule that holds names the head
    _looks_at("induction", "repeats_apart", "Olsson et al. 2022", (*CAUSAL, *MIXING)),
    _looks_at("previous_token", "two_keys", "Clark et al. 2019"),
    _looks_at("duplicate_token", "repeats", "Wang et al. 2022"),
    Role(
        "sink",
        "sink",
        f"sink above {SINK_MASS}, text of at least {SINK_TOKENS} tokens",
        "all",
        SINK_TOKENS,
        "Gu et al. 2024",
        lambda score, uniform: score["sink"] > SINK_MASS,
        tuple(stack for stack in STACKS if stack not in MIXING),  # whose rows need not sum to 1: nothing has to rest
    ),
    _looks_at("self", "two_keys", "Clark et al. 2019"),
    Role(
        "local",
        "local_mass_32",
        "local_mass_32 at least 0.8, and 0.2 above uniform attention",
        "beyond_32",
        NEEDED_ROWS,
        "attnscope; see also Xiao et al. 2024 (DuoAttention)",
        lambda score, uniform: (score["local_mass_32"] >= 0.8) & _above_uniform("local_mass_32", 0.2)(score, uniform),
        CAUSAL,
    ),
)


ROLE_METRICS = {role.name: role.metric for role in ROLES}  # of the roles of a scan that a text measures too


def roles_for(stack: str) -> list[Role]:
    """The roles that heads of a stack may have."""
    return [role for role in ROLES if stack in role.stacks]


def roles_of(
    score: Mapping[str, np.ndarray],
    uniform: Mapping[str, np.ndarray],
    support: Mapping[str, np.ndarray],
    stack: str = DECODER,
) -> np.ndarray:
    """The roles of heads of one stack; without one `other` where the text can show every role, else `-`.

    score, uniform: {metric: (heads,)}, NaN for null. support: {kind of rows: (heads,), how many the text has}.
    """
    roles = roles_for(stack)
    supported = [support[role.rows] >= role.needed for role in roles]
    names = np.where(np.all(supported, axis=0), OTHER, NONE).astype(object)
    for role, there in reversed(list(zip(roles, supported, strict=True))):  # the first rule that holds is written last
        names[there & role.holds(score, uniform)] = role.name
    return names


def near_uniform(score: Mapping[str, np.ndarray], support: Mapping[str, np.ndarray]) -> np.ndarray:
    """Which heads spread their weight over nearly all keys, (heads,): True, False, or None without enough rows.

    A mark and no role: it is what random weights give. The mean entropy replaces the Jensen-Shannon divergence to
    uniform attention, which takes another logarithm of every weight.
    """
    marks = (score["entropy_normalised"] >= NEAR_UNIFORM).astype(object)
    marks[support["two_keys"] < NEEDED_ROWS] = None
    return marks


NEEDED_TOKENS = {  # which tokens each kind of rows is of
    "two_keys": "tokens that see at least two",
    "repeats": "repeated tokens",
    "repeats_apart": "tokens that occurred at least 3 tokens earlier",
    "all": "tokens",
    "beyond_32": "tokens that see more than 32",
}


def unsupported(support: Mapping[str, int], who_has: str = "this text has", stack: str = DECODER) -> list[str]:
    """One sentence per role that these rows cannot show, for the person who wonders."""
    return [
        f"{', '.join(names)}: expected at least {needed} {NEEDED_TOKENS[rows]}, {who_has} {support[rows]}"
        for (rows, needed), names in not_shown(support, stack).items()
    ]


def not_shown(support: Mapping[str, int], stack: str = DECODER) -> dict[tuple[str, int], list[str]]:
    """{(kind of rows, how many are needed): the roles that these rows are too few for}."""
    names: dict[tuple[str, int], list[str]] = {}
    for role in roles_for(stack):
        if support[role.rows] < role.needed:
            names.setdefault((role.rows, role.needed), []).append(role.name)
    return names

"""What a head does, in one word: rules over its scores, each with the support it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

NEEDED_ROWS = 16
SINK_TOKENS = 64  # in 9 tokens an even head already gives key 0 a share of 0.31
NONE = "-"


@dataclass(frozen=True)
class Role:
    """A rule: the role's name, its condition over the scores, the rows it needs, and where it comes from.

    holds gets {metric: score} and {metric: score of attention spread evenly over the same keys}.
    """

    name: str
    condition: str
    rows: str
    needed: int
    source: str
    holds: Callable[[Mapping[str, float], Mapping[str, float]], bool]


def _above_even(metric: str, least: float) -> Callable[[Mapping[str, float], Mapping[str, float]], bool]:
    return lambda score, even: score[metric] - even[metric] >= least


ROLES = (  # the first rule that holds names the head
    Role(
        "induction",
        "induction at least 0.4 above even attention",
        "repeated",
        NEEDED_ROWS,
        "Olsson et al. 2022",
        _above_even("induction", 0.4),
    ),
    Role(
        "previous-token",
        "previous_token at least 0.4 above even attention",
        "seeing",
        NEEDED_ROWS,
        "Clark et al. 2019",
        _above_even("previous_token", 0.4),
    ),
    Role(
        "duplicate-token",
        "duplicate_token at least 0.4 above even attention",
        "repeated",
        NEEDED_ROWS,
        "Wang et al. 2022",
        _above_even("duplicate_token", 0.4),
    ),
    Role(
        "sink",
        "sink above 0.3, text of at least 64 tokens",
        "all",
        SINK_TOKENS,
        "Gu et al. 2024",
        lambda score, even: score["sink"] > 0.3,
    ),
    Role(
        "self",
        "self at least 0.4 above even attention",
        "seeing",
        NEEDED_ROWS,
        "Clark et al. 2019",
        _above_even("self", 0.4),
    ),
    Role(
        "local",
        "local_mass_32 at least 0.8, and 0.2 above even attention",
        "far",
        NEEDED_ROWS,
        "Xiao et al. 2024 (DuoAttention)",
        lambda score, even: score["local_mass_32"] >= 0.8 and _above_even("local_mass_32", 0.2)(score, even),
    ),
    Role(
        "broad",
        "entropy_normalised at least 0.8",
        "seeing",
        NEEDED_ROWS,
        "Clark et al. 2019",
        lambda score, even: score["entropy_normalised"] >= 0.8,
    ),
    Role(
        "other",
        "none of the above",
        "seeing",
        NEEDED_ROWS,
        "",
        lambda score, even: True,
    ),
)


def role_of(score: Mapping[str, float], even: Mapping[str, float], support: Mapping[str, int]) -> str:
    """The head's role, or `-` where the text has too few rows to say.

    score, even: {metric: value}, NaN for null. support: {kind of rows: how many the text has}.
    """
    for role in ROLES:
        if support[role.rows] >= role.needed and role.holds(score, even):
            return role.name
    return NONE


def unsupported(support: Mapping[str, int]) -> list[str]:
    """One sentence a role that this text cannot show, for the person who wonders."""
    kinds = {
        "seeing": "tokens that see at least two",
        "repeated": "tokens that came up before",
        "all": "tokens",
        "far": "tokens that see more than 32",
    }
    short: dict[tuple[str, int], list[str]] = {}
    for role in ROLES:
        if support[role.rows] < role.needed:
            short.setdefault((role.rows, role.needed), []).append(role.name)
    return [
        f"{', '.join(names)}: {needed} {kinds[rows]} needed, this text has {support[rows]}"
        for (rows, needed), names in short.items()
    ]

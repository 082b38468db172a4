"""What a head does, in one word: rules over its scores, each with the support it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

NEEDED_ROWS = 16
SINK_TOKENS = 64  # in 9 tokens a uniform head already gives key 0 a share of 0.31
NONE = "-"
Rule = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]  # of scores and those of uniform attention, to bools


@dataclass(frozen=True)
class Role:
    """A rule: the role's name, its condition over the scores, the rows it needs, and where it comes from.

    holds gets {metric: score} and {metric: score of uniform attention over the same keys}, numbers or arrays of them.
    """

    name: str
    condition: str
    rows: str
    needed: int
    source: str
    holds: Rule


def _above_uniform(metric: str, least: float) -> Rule:
    return lambda score, uniform: score[metric] - uniform[metric] >= least


ROLES = (  # the first rule that holds names the head
    Role(
        "induction",
        "induction at least 0.4 above uniform attention",
        "repeats",
        NEEDED_ROWS,
        "Olsson et al. 2022",
        _above_uniform("induction", 0.4),
    ),
    Role(
        "previous-token",
        "previous_token at least 0.4 above uniform attention",
        "two_keys",
        NEEDED_ROWS,
        "Clark et al. 2019",
        _above_uniform("previous_token", 0.4),
    ),
    Role(
        "duplicate-token",
        "duplicate_token at least 0.4 above uniform attention",
        "repeats",
        NEEDED_ROWS,
        "Wang et al. 2022",
        _above_uniform("duplicate_token", 0.4),
    ),
    Role(
        "sink",
        "sink above 0.3, text of at least 64 tokens",
        "all",
        SINK_TOKENS,
        "Gu et al. 2024",
        lambda score, uniform: score["sink"] > 0.3,
    ),
    Role(
        "self",
        "self at least 0.4 above uniform attention",
        "two_keys",
        NEEDED_ROWS,
        "Clark et al. 2019",
        _above_uniform("self", 0.4),
    ),
    Role(
        "local",
        "local_mass_32 at least 0.8, and 0.2 above uniform attention",
        "beyond_32",
        NEEDED_ROWS,
        "Xiao et al. 2024 (DuoAttention)",
        lambda score, uniform: (score["local_mass_32"] >= 0.8) & _above_uniform("local_mass_32", 0.2)(score, uniform),
    ),
    Role(
        "broad",
        "entropy_normalised at least 0.8",
        "two_keys",
        NEEDED_ROWS,
        "Clark et al. 2019",
        lambda score, uniform: score["entropy_normalised"] >= 0.8,
    ),
    Role(
        "other",
        "none of the above",
        "two_keys",
        NEEDED_ROWS,
        "",
        lambda score, uniform: True,
    ),
)


def role_of(score: Mapping[str, float], uniform: Mapping[str, float], support: Mapping[str, int]) -> str:
    """The head's role, or `-` where the text has too few rows to say.

    score, uniform: {metric: value}, NaN for null. support: {kind of rows: how many the text has}.
    """
    return next((role.name for role in ROLES if support[role.rows] >= role.needed and role.holds(score, uniform)), NONE)


def roles_of(
    score: Mapping[str, np.ndarray], uniform: Mapping[str, np.ndarray], support: Mapping[str, np.ndarray]
) -> np.ndarray:
    """`role_of` for many heads at once: columns (heads,) in, names (heads,) out."""
    import numpy as np

    names = np.full(next(iter(support.values())).shape, NONE, dtype=object)
    for role in reversed(ROLES):  # the first rule that holds is written last
        names[(support[role.rows] >= role.needed) & role.holds(score, uniform)] = role.name
    return names


def unsupported(support: Mapping[str, int]) -> list[str]:
    """One sentence per role that this text cannot show, for the person who wonders."""
    kinds = {
        "two_keys": "tokens that see at least two",
        "repeats": "tokens that came up before",
        "all": "tokens",
        "beyond_32": "tokens that see more than 32",
    }
    short: dict[tuple[str, int], list[str]] = {}
    for role in ROLES:
        if support[role.rows] < role.needed:
            short.setdefault((role.rows, role.needed), []).append(role.name)
    return [
        f"{', '.join(names)}: {needed} {kinds[rows]} needed, this text has {support[rows]}"
        for (rows, needed), names in short.items()
    ]

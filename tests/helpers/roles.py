"""The role of one head."""

from collections.abc import Mapping

import numpy as np

from attnscope.metrics.roles import roles_of


def role_of(score: Mapping[str, float], uniform: Mapping[str, float], support: Mapping[str, int]) -> str:
    """Of its scores, those of uniform attention, and how many rows of each kind the text has."""
    [role] = roles_of(
        *({name: np.array([value]) for name, value in part.items()} for part in (score, uniform, support))
    )
    return role

"""What the keys of a text receive, and which heads rest on them, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from attnscope.keep.layers import codes
from attnscope.model.selection import STACKS
from attnscope.utils.tables import as_table, texts_at, words


def table(stacks: Mapping[str, tuple[Sequence[str], np.ndarray]], on: Mapping[tuple[str, int], list[str]]) -> pa.Table:
    """A row per key: the mean mass that it receives, and the heads that rest on it; the largest mass first.

    stacks: the tokens of each stack's keys, and what they receive. on: {(stack, position): heads, as `L1H1 0.86`}.
    """
    places = [(stack, position) for stack, (tokens, _) in stacks.items() for position in range(len(tokens))]
    tokens = [token for tokens, _ in stacks.values() for token in tokens]
    received = np.concatenate([received for _, received in stacks.values()])
    order = np.argsort(-received, kind="stable").tolist()
    places = [places[row] for row in order]
    resting = [on.get(place, []) for place in places]
    return as_table(
        {
            "position": np.array([position for _, position in places], np.int32),
            "token": words([tokens[row] for row in order]),
            "received": received[order],
            "heads": np.array([len(heads) for heads in resting], np.int32),
            "resting": words([", ".join(heads) for heads in resting]),
            "stack": texts_at(STACKS, codes([stack for stack, _ in places])),
        }
    )

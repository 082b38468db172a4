"""Logits taken apart on their way into the page: what each component gives to every key of some heads and queries.

packed_why(blobs, why_of(run, "L3H0", Plan()), {3: 3})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnscope.errors import UsageError
from attnscope.selection import select
from attnscope.viewer.pack import Blobs, joined_arrays

if TYPE_CHECKING:
    from attnscope.run import Run
    from attnscope.study.why.keys import KeyParts
    from attnscope.study.why.written import Component
    from attnscope.viewer.plan import Plan

REST = 3  # components that are no heads or blocks: embedding, bias, position


def why_of(run: Run, heads: str, plan: Plan) -> list[KeyParts]:
    """The logits of the heads that an expression names, of the queries that the run names, else of all.

    Raises UsageError where they have no room in the page, and as `parts_of`.
    """
    from attnscope.study.why.keys import key_parts
    from attnscope.study.why.parts import check_model

    check_model(run.loaded)
    chosen = select(heads, run.loaded.geometry.heads_by_layer, run.named)
    queries = range(len(run.prompt)) if run.chosen.query is None else run.chosen.query.positions
    _check_room(run, chosen, len(queries), plan)
    return [
        one
        for layer, of_layer in chosen.items()
        for one in key_parts(run.loaded, run.prompt.ids, layer, dict.fromkeys(of_layer, queries))
    ]


def _check_room(run: Run, chosen: Mapping[int, Sequence[int]], queries: int, plan: Plan) -> None:
    heads_by_layer = run.loaded.geometry.heads_by_layer
    components = sum(
        len(heads) * (REST + sum(1 + of_layer for other, of_layer in heads_by_layer.items() if other < layer))
        for layer, heads in chosen.items()
    )
    needed, room = plan.why_bytes(components, queries, len(run.prompt)), plan.why_room
    if needed > room:
        raise UsageError(
            f"the logits of {sum(map(len, chosen.values()))} heads and {queries} queries take {needed / 1e6:.2g} MB, "
            f"expected at most {room / 1e6:.2g} MB of this page",
            "name fewer heads in {why}, or queries with {query}, or take more room with {max_mb}",
        )


def packed_why(blobs: Blobs, found: Sequence[KeyParts], at: Mapping[int, int]) -> list[dict[str, Any]]:
    """As the page's JSON has it; at: the place of each layer. The numbers are float32: parts_CQK, then logit_QK."""
    return [
        {
            "at": at[one.layer],
            "head": one.head,
            "queries": list(one.queries),
            "components": [_said(component, at) for component in one.components],
            "cap": one.softcap,
            "sinks": one.sinks,
            **blobs.add(joined_arrays([one.parts_CQK, one.logit_QK]))[0],
        }
        for one in found
    ]


def _said(component: Component, at: Mapping[int, int]) -> dict[str, Any]:
    if component.layer is None or component.head is None or component.layer not in at:
        return {"name": component.name}
    return {"name": component.name, "at": at[component.layer], "head": component.head}

"""The greedy pruning curve: which heads go one after the other, and the loss after each.

    for step in pruned(prepared(loaded, task, []), heads):
        print(step.head, step.loss)

At every step each head that is left is taken away beside those that are gone, and the one whose loss is least stays
away (Michel et al. 2019, arXiv 1905.10650, prune by a score instead of by the loss itself).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import UsageError
from attnscope.files import json_line
from attnscope.study.sets import HeadSet

if TYPE_CHECKING:
    from attnscope.study.ablation import Advance, Passes

Head = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """A head that goes: which, and the mean loss without it and all before it, in nats per token."""

    layer: int
    head: int
    loss: float


def pruned(
    passes: Passes, heads: Sequence[Head], gone: Sequence[Step] = (), advance: Advance = lambda token_layers: None
) -> Iterator[Step]:
    """The steps until no head is left; gone: those that an earlier run has done."""
    away = [(one.layer, one.head) for one in gone]
    left = [head for head in heads if head not in away]
    while left:
        sets = [_with(away, head) for head in left]
        loss_K = passes.losses(sets, advance)[:, 1:].mean(0)
        place = int(np.argmin(loss_K))
        away.append(left.pop(place))
        yield Step(*away[-1], float(loss_K[place]))


def kept_steps(path: Path, facts: Mapping[str, Any], *, force: bool = False) -> list[Step]:
    """The steps that an earlier run of the same pruning left in a file; a new file, with the facts, where none did.

    A line that was cut off is left out. Raises UsageError for a file of another pruning, unless force says to write
    over it, and for one that cannot be written.
    """
    try:
        told, *lines = path.read_bytes().splitlines(keepends=True) if path.exists() else [b""]
        if told == json_line(facts):
            whole = [line for line in lines if line.endswith(b"\n")]
            path.write_bytes(b"".join([told, *whole]))
            return [Step(**json.loads(line)) for line in whole]
        if told and not force:
            raise UsageError(f"{path} holds another pruning", "name another folder, or write over it with {force}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(json_line(facts))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", "name another folder") from error
    return []


def keep(path: Path, step: Step) -> None:
    """Add a step to the file of a pruning."""
    with open(path, "ab") as stream:
        stream.write(json_line(asdict(step)))


def cost(passes: Passes, heads: int, gone: int = 0) -> int:
    """Token-layers that the steps left take, no more: sets that begin late take less."""
    deep, tokens = len(passes.loaded.geometry.layers), passes.task.tokens
    return sum(tokens * deep * (1 + left) for left in range(heads - gone, 0, -1))


def _with(away: Sequence[Head], head: Head) -> HeadSet:
    return HeadSet(f"and L{head[0]}H{head[1]}", tuple(sorted([*away, head])))

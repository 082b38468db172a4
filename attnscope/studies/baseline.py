"""A baseline: what is kept of one side of a comparison, in a file, to be the other side of a later run.

    numbers = read_numbers(sides)
    beside_baseline(read_numbers(other), numbers).changes

It has metrics, roles and names of masks, text by text, and no weights: there is no divergence.

Shapes: S text, N head of all layers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import InputError, UsageError
from attnscope.metrics.divergence import mask_names
from attnscope.metrics.metrics import METRICS
from attnscope.metrics.roles import NONE, OTHER, ROLES
from attnscope.model.selection import STACKS, TEXT_TASKS
from attnscope.observe.request import LayerKey
from attnscope.studies.comparison import Changes, Comparison, read_side
from attnscope.studies.gate import JS, LOST, VISIBLE, WEIGHT, Condition
from attnscope.utils.files import check_schema, check_types, damaged, jsonable, read_json

if TYPE_CHECKING:
    from attnscope.attention.operator import AttentionOperator
    from attnscope.studies.comparison import LayerScores, LayersRead, OneSide


BASELINE = "baseline/1"  # of its file
MOST_NUMBERS = 1 << 17  # heads times texts of a baseline, of some 260 bytes each
TEXT_ROLES = (*(role.name for role in ROLES), OTHER, NONE)


@dataclass(frozen=True)
class SideNumbers:
    """What a baseline keeps of one side: per text and head, (S, N) each.

    heads, head_stacks: as a Comparison has them. texts: a digest of each text's tokens. metrics: {id: values}, NaN for
    null. roles: on the text. own: `own_pairs`. masks: names of the masks, None where they are not known of any.
    """

    heads: tuple[tuple[int, int], ...]
    head_stacks: tuple[str, ...]
    texts: tuple[str, ...]
    metrics: Mapping[str, np.ndarray]
    roles: np.ndarray
    own: np.ndarray
    masks: np.ndarray | None
    failures: Sequence[str] = ()


def ids_digest(ids: Sequence[int], source: Sequence[int] = ()) -> str:
    """What tells the tokens of a text from others', and those of its source."""
    return hashlib.sha256(json.dumps([list(ids), list(source)]).encode()).hexdigest()


def read_numbers(sides: Iterable[OneSide], advance: LayersRead = lambda layers: None) -> SideNumbers:
    """Read every text once and keep what a baseline has of it. Raises InputError as `compare_heads`."""
    every: list[dict[LayerKey, tuple[LayerScores, list[str]]]] = []
    digests, failures = list[str](), list[str]()
    for side in sides:
        side.loaded.check_task("a comparison", *TEXT_TASKS)
        side.loaded.check_queries("a comparison")
        layers: dict[LayerKey, tuple[LayerScores, list[str]]] = {}

        def keep(key: LayerKey, P: AttentionOperator, scores: LayerScores) -> None:
            layers[key] = scores, mask_names(P.visible)  # noqa: B023

        failures += read_side(side, keep, advance, with_roles=True)
        every.append(layers)
        digests.append(ids_digest(side.prompt.ids, side.source.ids if side.source else ()))
    if not every or not every[0]:
        raise InputError("there is no text to read", "give at least one")
    keys = sorted(every[0], key=lambda key: STACKS.index(key.stack))
    if any(set(layers) != set(keys) for layers in every):
        raise InputError("not all texts are attended to by the same layers", "give texts of about one length")
    widths = {key: len(every[0][key][0].own) for key in keys}  # type: ignore[arg-type]

    def per_head(value: Callable[[LayerScores, list[str]], Any], dtype: type) -> np.ndarray:
        rows = [[np.broadcast_to(value(*layers[key]), width) for key, width in widths.items()] for layers in every]
        return np.stack([np.concatenate(row) for row in rows]).astype(dtype)

    def metric(name: str) -> np.ndarray:
        return per_head(lambda scores, _: scores.metrics[name], float)

    return SideNumbers(
        heads=tuple((key.layer, head) for key, width in widths.items() for head in range(width)),
        head_stacks=tuple(key.stack for key, width in widths.items() for _ in range(width)),
        texts=tuple(digests),
        metrics={name: metric(name) for name in METRICS},
        roles=per_head(lambda scores, _: scores.roles, object),
        own=per_head(lambda scores, _: scores.own, int),
        masks=per_head(lambda _, masks: np.array(masks, object), object),
        failures=list(dict.fromkeys(failures)),
    )


def beside_baseline(now: SideNumbers, before: SideNumbers) -> Comparison:
    """The same numbers of an earlier run as the other side: there is no divergence, since it has no weights.

    Raises UsageError for other heads, InputError for a text that the baseline lacks.
    """
    # Heads and texts are found by what they are, not by their order in the file.
    places = {at: place for place, at in enumerate(zip(before.head_stacks, before.heads, strict=True))}
    wanted = list(zip(now.head_stacks, now.heads, strict=True))
    if set(wanted) != set(places):
        raise UsageError(
            f"the baseline has {len(places)} heads in {len({at[:1] + at[1][:1] for at in places})} layers, the model "
            f"{len(wanted)} in {len({at[:1] + at[1][:1] for at in wanted})}: they have no counterparts",
            "save a baseline of a model with the same layers and heads",
        )
    rows = {digest: row for row, digest in enumerate(before.texts)}
    absent = [number for number, digest in enumerate(now.texts) if digest not in rows]
    if absent:
        raise InputError(
            f"{len(absent)} of {len(now.texts)} texts have tokens that the baseline lacks, first text {absent[0]}",
            "give the texts of the baseline, or save it again",
        )
    # Without weights there is no divergence: NaN, and no row that was compared.
    at = np.ix_([rows[digest] for digest in now.texts], [places[head] for head in wanted])
    masks = None if now.masks is None or before.masks is None else (now.masks, before.masks[at])
    none_SN = np.full(now.own.shape, np.nan)
    return Comparison(
        now.heads,
        now.head_stacks,
        js_SN=none_SN,
        rows_SN=np.zeros(now.own.shape),
        lost_SN=none_SN,
        other_lost_SN=none_SN,
        metrics={name: (values, before.metrics[name][at]) for name, values in now.metrics.items()},
        failures=now.failures,
        changes=Changes((now.roles, before.roles[at]), (now.own, before.own[at]), masks=masks),
    )


def baseline_document(numbers: SideNumbers, about: Mapping[str, Any]) -> dict[str, Any]:
    """What the file of a baseline says. about: the model, its dtype, engine and versions.

    Raises UsageError for more heads and texts than a file has room for.
    """
    if numbers.own.size > MOST_NUMBERS:
        raise UsageError(
            f"a baseline holds at most {MOST_NUMBERS} heads times texts, got {len(numbers.heads)} heads over "
            f"{len(numbers.texts)} texts",
            f"give at most {max(1, MOST_NUMBERS // len(numbers.heads))} texts",
        )
    masks = [] if numbers.masks is None else sorted(set(numbers.masks.flat))
    roles = {role: number for number, role in enumerate(TEXT_ROLES)}
    result: dict[str, Any] = jsonable(
        {
            "schema": BASELINE,
            "about": about,
            "heads": [[stack, *head] for stack, head in zip(numbers.head_stacks, numbers.heads, strict=True)],
            "texts": list(numbers.texts),
            "metrics": {name: values.tolist() for name, values in numbers.metrics.items()},
            "role_names": list(TEXT_ROLES),
            "roles": [[roles[role] for role in of_text] for of_text in numbers.roles],
            "own": numbers.own.tolist(),
            "mask_names": masks,
            "masks": None if numbers.masks is None else np.searchsorted(masks, numbers.masks.astype(str)).tolist(),
        }
    )
    return result


def read_baseline(path: Path) -> SideNumbers:
    """The baseline in a file. Raises UsageError for another version, InputError for what is none, or is damaged."""
    with damaged(f"{path} is not a baseline, or is damaged", "save one with {save_baseline}"):
        document = read_json(path)
        check_types(document, {"schema": str})
        check_schema(document, BASELINE, path, "save it again with this version")
        check_types(document, {"heads": list, "texts": list, "metrics": dict, "role_names": list, "mask_names": list})
        shape = len(document["texts"]), len(document["heads"])
        if not 0 < shape[0] * shape[1] <= MOST_NUMBERS:
            raise ValueError("too many numbers, or none")

        # Nothing of the file is used before its shape, words and places are those of a baseline.
        def numbers(values: object, dtype: type) -> np.ndarray:
            array: np.ndarray = np.array(values, dtype=dtype)
            if array.shape != shape:
                raise ValueError(f"numbers of shape {array.shape}, expected {shape}")
            # Neither half a place, nor a number that no metric is: NaN is one that a text cannot show.
            if np.isinf(array).any() or (dtype is int and not np.array_equal(array, np.array(values))):
                raise ValueError("numbers of another kind")
            return array

        def named(name: str, words: Sequence[object], allowed: Callable[[str], bool]) -> np.ndarray:
            if not all(isinstance(word, str) and allowed(word) for word in words):
                raise ValueError(f"{name} of another kind")
            places = numbers(document[name], int)
            if places.min() < 0 or places.max() >= len(words):
                raise ValueError(f"{name} that are not listed")
            return np.array(words, dtype=object)[places]

        # A head that is listed twice would be compared with either.
        heads = [(str(stack), (int(layer), int(head))) for stack, layer, head in document["heads"]]
        if len(set(heads)) < len(heads) or not all(stack in STACKS for stack, _ in heads):
            raise ValueError("heads that are listed twice, or of an unknown stack")
        masks = document["masks"] is not None
        return SideNumbers(
            heads=tuple(head for _, head in heads),
            head_stacks=tuple(stack for stack, _ in heads),
            texts=tuple(map(str, document["texts"])),
            metrics={name: numbers(document["metrics"][name], float) for name in METRICS},
            roles=named("roles", document["role_names"], lambda role: role in TEXT_ROLES),
            own=numbers(document["own"], int),
            masks=named("masks", document["mask_names"], lambda name: MASK.fullmatch(name) is not None)
            if masks
            else None,
        )


MASK = re.compile(r"(?:[0-9a-f]{16})?", re.ASCII)


def check_answered(conditions: Sequence[Condition], baseline: SideNumbers) -> None:
    """Raise UsageError for a condition that a baseline cannot answer."""
    for condition in conditions:
        if condition.name in (JS, LOST, WEIGHT):
            raise UsageError(
                f"--gate: {condition.name} takes the weights of both sides, and a baseline holds numbers alone",
                "give {compare_model}, or leave it out",
            )
        if condition.name == VISIBLE and baseline.masks is None:
            raise UsageError(
                "--gate: the run does not hold which keys its queries saw", "save a baseline with {save_baseline}"
            )

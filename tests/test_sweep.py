"""Every type that transformers has a causal, a base or an image-text model of: read as its checkpoints are, or refused.

`tests/sweep.json`, `docs/families/types.csv` and the end of `docs/families.md` are what it gave of one release.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import model_type_to_module_name

from helpers.families import WITHOUT_ATTENTION, one_per_layout
from helpers.families_table import read as read_table
from helpers.seconds import once
from helpers.sweep import CERTIFIED, ENTRIES, FAULTS, READ, Swept, judged, swept
from helpers.sweep_table import EVERY, changed, every_type, kept, not_built, row, types

STORED = kept()
SAME_RELEASE = STORED["transformers"] == transformers.__version__
of_the_release = pytest.mark.skipif(not SAME_RELEASE, reason=f"the table is of transformers {STORED['transformers']}")
read: Callable[[str, str], Swept] = once(swept)
TYPES = sorted({name for name, _ in ENTRIES})
OF_LAYOUTS = {one for one in one_per_layout(TYPES) if isinstance(one, str)} | {*WITHOUT_ATTENTION}


def assert_sound(result: Swept) -> None:
    """The one assertion of this file: read, refused with a reason, or not built by transformers; no fault."""
    assert result.outcome not in FAULTS, result
    assert result.outcome == CERTIFIED or result.why, result


def registries(model_type: str) -> list[str]:
    return [registry for name, registry in ENTRIES if name == model_type]


@pytest.mark.parametrize(("model_type", "registry"), [("llama", "causal"), ("bert", "base"), ("llava", "image-text")])
def test_a_type_is_read_as_its_checkpoints_are(model_type: str, registry: str) -> None:
    result = read(model_type, registry)
    assert (result.outcome, result.difference, set(result.levels.values())) == (CERTIFIED, 0.0, {"full"}), result


@pytest.mark.families
@pytest.mark.parametrize("model_type", sorted(OF_LAYOUTS))
def test_one_type_of_every_layout(model_type: str) -> None:
    results = [read(model_type, registry) for registry in registries(model_type)]
    for result in results:
        assert_sound(result)
    assert_stored(results)


@pytest.mark.families
def test_types_whose_code_is_not_that_of_the_table() -> None:
    """A new release shows here what is new in it; the release of the table has nothing to try."""
    folders = changed(STORED["files"])
    assert not (folders and SAME_RELEASE)
    of_these = [(name, registry) for name, registry in ENTRIES if model_type_to_module_name(name) in folders]
    assert not [result for one in of_these if (result := read(*one)).outcome in FAULTS]


@pytest.mark.slow
@pytest.mark.parametrize("letter", sorted({name[0].lower() for name, _ in ENTRIES}))
def test_every_type(letter: str) -> None:
    results = [swept(name, registry) for name, registry in ENTRIES if name[0].lower() == letter]
    for result in results:
        assert_sound(result)
    assert_stored(results)


def assert_stored(results: Sequence[Swept]) -> None:
    """The table has these rows, where it is of this release."""
    rows = {f"{result.type} in {result.registry}": row(result) for result in results if SAME_RELEASE}
    stored = {name: STORED["types"].get(name) for name in rows}
    names = " ".join(dict.fromkeys(result.type for result in results))
    assert without_words(rows) == without_words(stored), f"run scripts/families_doc.py --types {names}"


def without_words(rows: Mapping[str, Any]) -> dict[str, Any]:
    """The rows without the reasons, whose wording may change."""
    return {name: {key: value for key, value in (of or {}).items() if key != "why"} for name, of in rows.items()}


@of_the_release
def test_the_table_is_of_every_type() -> None:
    assert list(STORED["types"]) == sorted(f"{name} in {registry}" for name, registry in ENTRIES)


def test_the_table_has_no_fault() -> None:
    rows = STORED["types"]
    assert not {name: of for name, of in rows.items() if of["outcome"] in FAULTS}
    assert not_built(rows)[1] <= 0.05


@of_the_release
def test_the_document_has_the_table() -> None:
    text = (Path(__file__).parents[1] / "docs" / "families.md").read_text("utf-8")
    assert text[text.index(EVERY) :].rstrip() == every_type(), "run scripts/families_doc.py --types"
    assert read_table("types") == types(), "run scripts/families_doc.py --types"


# The checks above can fail.

MAPS = [map_HQK.softmax(-1) for map_HQK in torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize(
    ("maps", "calls", "outcome"),
    [
        (MAPS, 3, CERTIFIED),
        (MAPS[:2], 3, "grey layer"),
        (MAPS[:2], 0, "layers missing"),
        ([MAPS[1], MAPS[0], MAPS[2]], 3, "unequal"),
        ([MAPS[0], MAPS[1] + 1e-4, MAPS[2]], 3, "unequal"),
    ],
)
def test_what_is_not_read_as_transformers_has_it_is_a_fault(maps: list[torch.Tensor], calls: int, outcome: str) -> None:
    result = Swept("a type", "base", outcome=CERTIFIED, calls=calls, causal=False)
    assert judged(MAPS, {"encoder": maps}, "encoder", result, said_causal=False) == outcome


def test_a_check_that_failed_is_a_fault() -> None:
    """Of a map of a linear layer nothing else is a judge: transformers returns none."""
    result = Swept("a type", "causal", outcome=READ)
    linear = {"linear": MAPS}
    assert judged([], linear, "decoder", result) == READ
    assert judged([], linear, "decoder", result, failures=["layer 0: M v is not y"]) == "unequal"


def test_types_without_a_softmax_are_read_by_their_rules() -> None:
    groups = {name: outcome for name, registry, _, outcome, *_ in types() if registry == "causal"}
    for name in WITHOUT_ATTENTION:
        assert ("rules without a softmax" in groups[name]) == (name in {row[0] for row in read_table("linear")}), name


def test_a_stack_that_is_called_otherwise_than_it_looks_is_a_fault() -> None:
    result = Swept("a type", "base", outcome=CERTIFIED, calls=3, causal=False)
    assert judged(MAPS, {"decoder": MAPS}, "decoder", result, said_causal=True) == "wrong direction"

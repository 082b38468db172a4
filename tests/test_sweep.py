"""Every type that transformers has a causal, a base or an image-text model of: read as its checkpoints are, or refused.

Transformers alone is the judge: see `helpers.sweep`.
"""

from collections.abc import Callable

import pytest
import torch

from helpers.seconds import once
from helpers.sweep import CERTIFIED, ENTRIES, FAULTS, Swept, judged, swept

read: Callable[[str, str], Swept] = once(swept)


def assert_sound(result: Swept) -> None:
    """The one assertion of this file: read, refused with a reason, or not built by transformers; no fault."""
    assert result.outcome not in FAULTS, result
    assert result.outcome == CERTIFIED or result.why, result


@pytest.mark.parametrize(("model_type", "registry"), [("llama", "causal"), ("bert", "base"), ("llava", "image-text")])
def test_a_type_is_read_as_its_checkpoints_are(model_type: str, registry: str) -> None:
    result = read(model_type, registry)
    assert (result.outcome, result.difference, set(result.levels.values())) == (CERTIFIED, 0.0, {"full"}), result


@pytest.mark.slow
@pytest.mark.parametrize("letter", sorted({name[0].lower() for name, _ in ENTRIES}))
def test_every_type(letter: str) -> None:
    results = [swept(name, registry) for name, registry in ENTRIES if name[0].lower() == letter]
    for result in results:
        assert_sound(result)


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
    assert judged(MAPS, {"encoder": maps}, "encoder", [], result) == outcome


def test_a_stack_that_is_called_otherwise_than_it_looks_is_a_fault() -> None:
    result = Swept("a type", "base", outcome=CERTIFIED, calls=3, causal=False)
    assert judged(MAPS, {"decoder": MAPS}, "decoder", [], result) == "wrong direction"

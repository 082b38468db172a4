"""scripts/nulls.py: what it plants in a model is what it says, and what a knockout's p makes of it."""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

import attnscope

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import nulls


@pytest.fixture(scope="module", autouse=True)
def _shared_demo(demo):
    """The script's demo is that of all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nulls, "demo", lambda: demo)
        yield
    nulls.model_of.cache_clear()


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", pytest.param("gemma", marks=pytest.mark.families)])
def test_values_are_put_in_order_and_weights_stay(kind):
    """The output of the head's last row is its weights times the values in their new order, with what was added."""
    loaded, (layer, head), added = nulls.model_of(kind, 0), (2, 3), torch.linspace(-1, 1, 16)
    ids = (0, *range(40, 51))
    place, outputs, values = nulls.Layer(loaded.model, layer), [], []
    order = torch.tensor([0, 5, 1, 4, 2, 3, *range(6, 12)])
    weights = attnscope.capture(loaded, ids).weights[layer][head]
    place.source.register_forward_hook(lambda module, given, out: values.append(place.values(out)[0]))
    world = nulls.World([(layer, head)], [11], {ids: order}, {ids: {(layer, head): ([4], added)}}, apart=True)
    with world.planted(loaded.model), torch.no_grad():
        place.out.register_forward_pre_hook(lambda module, given: outputs.append(given[0][0]))
        planted = attnscope.capture(loaded, ids).weights[layer][head]
        loaded.model(torch.tensor([ids]))
    nulls.model_of.cache_clear()
    torch.testing.assert_close(planted, weights)
    own = values[-1][:, place.group(head)][order]
    own[4] += added
    output = outputs[-1].unflatten(-1, (place.heads, 16))[:, head]
    torch.testing.assert_close(output[11], weights[11].float() @ own, atol=1e-5, rtol=1e-5)
    assert not output[:11].any()


@pytest.mark.parametrize("name", ["llama", pytest.param("demo", marks=pytest.mark.e2e)])
def test_the_key_whose_value_was_moved_is_found(name):
    """p is at its floor for a key drawn at random and for the largest; where the null holds it is not."""
    p = {
        (row["pick"], row["world"]): row["p_permuted"]
        for row in nulls.rows_of(name, nulls.CELLS[name], 1, nulls.WORLDS[:2])
    }
    assert p["random", "moved"] == p["largest", "moved"] == pytest.approx(2 / 44)
    assert min(p["random", "null"], p["largest", "null"]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama, zero", "demo"])
def test_level_and_power(name):
    """Of 100 rows in which the null holds at most 0.11 have p at most 0.05: three standard errors. Of 30 moved 0.85."""
    small = defaultdict(list)
    for number in range(100):
        for row in nulls.rows_of(name, nulls.CELLS[name], number, nulls.WORLDS[: 1 + (number < 30)]):
            if row["p_permuted"] is not None:
                small[row["pick"], row["world"]].append(row["p_permuted"] <= 0.05)
    for pick in nulls.PICKS:
        assert np.mean(small[pick, "null"]) <= 0.11
        assert np.mean(small[pick, "moved"]) >= 0.85

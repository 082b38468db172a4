"""On a real card: the CPU's numbers, the model's own bit for bit, every command's way, little memory.

These run where CUDA is (`pytest -n 0 -m gpu`), in each engine that is there; elsewhere test_device.py pretends one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attnscope
from attnscope import Request
from attnscope.certificate.check import check_parity
from attnscope.hooks.engines import ENGINES
from attnscope.hooks.listen import listen
from attnscope.metrics.metrics import METRICS
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import DEMO_FOLDER, load, wrap
from attnscope.model.options import LoadOptions
from attnscope.serve import wire as place
from helpers.command_line import SENTENCE, call
from helpers.parity_models import roused_model
from helpers.serving import serving
from test_device import COMMANDS, FAMILIES, TEXT

CARD = "cuda"
NEAR = {"float32": 2e-5, "bfloat16": 2e-2}
ORDER = [("layer", "ascending"), ("head", "ascending")]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")]


@pytest.fixture(scope="module", params=NEAR)
def there(request: pytest.FixtureRequest) -> LoadedModel:
    return load(LoadOptions(device=CARD, dtype=request.param))


@pytest.fixture(scope="module")
def here(there: LoadedModel) -> LoadedModel:
    return load(LoadOptions(device="cpu", dtype=there.dtype))


@pytest.mark.parametrize("engine", ENGINES)
def test_every_metric_and_relation_is_the_cpus(here: LoadedModel, there: LoadedModel, engine: str) -> None:
    text, near = (DEMO_FOLDER / "README.md").read_text()[:600], NEAR[there.dtype]
    request = Request(relations=True, metrics=tuple(METRICS), rollout="words")
    expected = attnscope.capture(here, text, request=request, engine="eager").table().sort_by(ORDER)
    found = attnscope.capture(there, text, request=request, engine=engine).table().sort_by(ORDER)
    assert found.column_names == expected.column_names
    for name in METRICS:
        numbers = (torch.tensor(table[name].to_numpy(), dtype=torch.float64) for table in (found, expected))
        torch.testing.assert_close(*numbers, rtol=near, atol=near, equal_nan=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_way_through_the_package_runs_there(there: LoadedModel, name: str) -> None:
    COMMANDS[name](there)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_eager_is_the_models_own_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    model = roused_model(family).to(CARD, dtype)
    ids_BT = torch.arange(2, 26, device=CARD)[None]
    weights: list[torch.Tensor | None] = []
    listen(model, ids_BT, lambda call: weights.append(call.weights_BHQK), engine=ENGINES["eager"])
    with torch.no_grad():
        own = [one for one in model(ids_BT, output_attentions=True, use_cache=False).attentions if one is not None]
    assert len(own) == len(weights) > 0
    for found, expected in zip(weights, own, strict=True):
        assert found is not None
        assert torch.equal(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_holds_there(demo: LoadedModel, family: str) -> None:
    loaded = wrap(roused_model(family, vocab_size=len(demo.tokenizer)).to(CARD), demo.tokenizer)
    assert check_parity(loaded, loaded.tokenizer(TEXT, return_tensors="pt").input_ids.to(CARD)).holds


def test_a_long_text_takes_memory_by_its_length_and_not_its_square(there: LoadedModel) -> None:
    config = there.model.config.__class__(**{**there.model.config.to_dict(), "max_position_embeddings": 65536})
    model = type(there.model)(config).to(CARD, there.model.dtype).eval()

    def peak(run: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated()

    ids_BT = torch.arange(16384, device=CARD)[None] % 100
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        plain = peak(lambda: model.model(ids_BT, use_cache=False))
    read = peak(lambda: listen(model, ids_BT, lambda call: call.P.entropy(), engine=ENGINES["fused"]))
    assert read < plain + 2**30  # one head's matrix alone is 1 GiB in float32


@pytest.mark.skipif(not place.supported(), reason="this system has no sockets that say who asks")
@pytest.mark.parametrize("dtype", NEAR)
def test_a_server_with_a_card_answers_as_a_command_alone(dtype: str, tmp_path: Path) -> None:
    """The same bytes, and the model is loaded once."""
    on, page = ("--device", CARD, "--dtype", dtype), ("--out", "-")
    with serving(tmp_path / "run", *on) as server:
        for command in (("heads",), ("relations", "--over", "heads"), ("view", *page), ("why", "--head", "L3H0")):
            command = (*command, "--text", SENTENCE)
            alone = call(*command, *on)
            before = server.status["answered"]
            asked = server.call(*command, *on)
            assert (asked, server.status["answered"]) == (alone, before + 1)

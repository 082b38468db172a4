"""What the tests of studies share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnscope import load
from attnscope.model.loaded import LoadedModel
from attnscope.studies.atlas import Plan, plan
from helpers.parity_models import roused_model


@pytest.fixture
def short_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command `scan` reads two trials and draws no probes: test_scan draws them."""

    def short(*given: Any, **how: Any) -> Plan:
        planned = plan(*given, **how)
        return replace(planned, trials=[one for one in planned.trials if one.name in ("offsets", "sink")])

    monkeypatch.setattr("attnscope.api.scan.plan", short)
    monkeypatch.setattr("attnscope.api.scan.save_probes", lambda *given: None)


@pytest.fixture(scope="session")
def hybrid(demo: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny random model in a folder, which reads what the demo reads: three linear layers and one of attention.

    Its linear layers forget slowly, so that tokens far back are missed.
    """
    folder: Path = tmp_path_factory.mktemp("hybrid")
    model = roused_model("qwen3_next", vocab_size=demo.geometry.vocab_size)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.data.fill_(-4)
    model.save_pretrained(folder)
    demo.tokenizer.save_pretrained(folder)
    return load(str(folder))

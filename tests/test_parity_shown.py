"""What a text is too short to show is said, and what cannot be checked is not said to fail."""

from typing import Any

import pytest

from attnscope.certificate.check import ParityReport, certificate, check_parity, verify
from helpers.parity_cases import CASES
from helpers.parity_models import as_loaded, ids_for, roused_model


def parity_of(model: Any, tokens: int) -> ParityReport:
    return check_parity(as_loaded(model), ids_for("llama", 0, tokens))


def test_one_token_shows_no_weight() -> None:
    model = roused_model("mistral")
    for layer in model.model.layers:
        layer.self_attn.scaling = 9.0
    report = parity_of(model, 1)
    assert (report.holds, report.too_short) == (True, ("any weight but 1",))
    assert not parity_of(model, 2).holds


@pytest.mark.parametrize(
    ("case", "length", "said"),
    [
        ("mistral, sliding window", 5, "the window of 5"),
        ("llama4_text, small chunks", 5, "the chunk of 5"),
        ("gpt_neo, window", 3, "the window of 3"),
        ("llama, rope dynamic", 16, "dynamic positions past 16"),
        ("phi3, rope longrope, long text", 16, "longrope positions past 16"),
    ],
)
def test_a_length_that_is_not_passed_is_said_until_it_is(case: str, length: int, said: str) -> None:
    family, overrides = CASES[case]
    model = roused_model(family, **overrides)
    assert parity_of(model, length).too_short == (said,)
    assert parity_of(model, length + 1).too_short == ()


def test_only_what_was_compared_counts() -> None:
    model = roused_model("gemma2", sliding_window=30)
    loaded, ids_BT = as_loaded(model), ids_for("gemma2")
    kinds = {layer.type: str(layer.index) for layer in loaded.geometry.layers}
    assert check_parity(loaded, ids_BT, select=kinds["sliding"]).too_short == ("the window of 30",)
    assert check_parity(loaded, ids_BT, select=kinds["full"]).too_short == ()


def test_certificate_and_manifest_say_it() -> None:
    loaded, ids_BT = as_loaded(roused_model("llama")), ids_for("llama", 0, 1)
    report = check_parity(loaded, ids_BT)
    assert certificate(report, loaded, ids_BT)["not_shown"][0] == "any weight but 1"
    assert verify(loaded, ids_BT)["not_shown"][0] == "any weight but 1"


def test_what_cannot_be_checked_is_not_said_to_fail() -> None:
    model = roused_model("prophetnet")
    loaded, ids_BT = as_loaded(model), ids_for("prophetnet")
    report = check_parity(loaded, ids_BT)
    assert (report.holds, report.verdict, report.failures) == (False, None, [])
    assert certificate(report, loaded, ids_BT)["holds"] is None
    summary = verify(loaded, ids_BT)
    assert (summary["holds"], summary["failures"]) == (None, [])
    assert summary["unchecked"][0].startswith("layer 0: cannot be checked, two streams")

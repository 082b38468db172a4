"""Roles: named where the text supports them, and only there."""

import torch
from torch.testing import assert_close

from attnscope.measure.metrics import METRICS
from attnscope.measure.roles import ROLES, role_of, unsupported
from attnscope.observe import Request, observe
from attnscope.text.prompt import from_text
from test_metrics import by_loops

PASSAGE = (
    "The river bank is wide and green. The old mill stands by the river. Every spring the water climbs over the "
    "stones and the children count the boats. "
)
PLENTY = {"two_keys": 99, "three_keys": 99, "all": 99, "repeats": 99, "beyond_32": 99}
NOTHING = dict.fromkeys(METRICS, 0.0)


def test_the_demo_names_its_induction_and_previous_token_heads(demo) -> None:
    """On a passage that comes twice; and the scores are those of Python loops over output_attentions."""
    prompt = from_text(demo.tokenizer, PASSAGE * 2)
    [seen] = observe(demo, [prompt], Request())
    by_role: dict[str, list[str]] = {}
    for head in seen.heads:
        by_role.setdefault(head.role, []).append(head.name)
    assert by_role["induction"]
    assert by_role["previous-token"]
    attentions = demo.model(torch.tensor([prompt.ids]), output_attentions=True).attentions
    visible_QK = torch.ones(len(prompt), len(prompt), dtype=torch.bool).tril()
    for head in seen.heads:
        if head.role in ("induction", "previous-token"):
            weights_QK = attentions[head.layer][0, head.head]
            for name in ("induction", "previous_token", "duplicate_token", "entropy", "focus"):
                expected = by_loops(weights_QK, visible_QK, list(prompt.ids), name)
                assert_close(head.score[name], expected, atol=2e-6, rtol=2e-6)


def test_the_demo_names_no_head_on_nine_tokens(demo) -> None:
    prompt = from_text(demo.tokenizer, "the financial bank is located on river bank")
    [seen] = observe(demo, [prompt], Request())
    assert len(prompt) == 9
    assert {head.role for head in seen.heads} == {"-"}
    why = unsupported(seen.support[0])
    assert any("induction" in line and "this text has 1" in line for line in why)
    assert any("sink" in line and "64 tokens needed, this text has 9" in line for line in why)


def test_the_first_rule_that_holds_names_the_head() -> None:
    assert role_of(NOTHING | {"induction": 0.9, "previous_token": 0.9}, NOTHING, PLENTY) == "induction"
    assert role_of(NOTHING | {"previous_token": 0.9}, NOTHING, PLENTY) == "previous-token"
    assert role_of(NOTHING | {"sink": 0.31}, NOTHING, PLENTY) == "sink"
    assert role_of(NOTHING | {"entropy_normalised": 0.9}, NOTHING, PLENTY) == "broad"
    assert role_of(NOTHING, NOTHING, PLENTY) == "other"


def test_what_evenness_gives_earns_no_role() -> None:
    """Two visible keys give the previous token half of an even row."""
    assert role_of(NOTHING | {"previous_token": 0.5}, NOTHING | {"previous_token": 0.5}, PLENTY) == "other"


def test_a_role_needs_its_support() -> None:
    score = NOTHING | {"induction": 0.9}
    assert role_of(score, NOTHING, PLENTY | {"repeats": 15}) == "other"
    assert role_of(score, NOTHING, PLENTY | {"repeats": 16}) == "induction"
    assert role_of(score, NOTHING, dict.fromkeys(PLENTY, 15)) == "-"
    assert role_of(NOTHING | {"sink": 0.9}, NOTHING, PLENTY | {"all": 63}) == "other"


def test_a_null_score_is_no_role() -> None:
    assert role_of(dict.fromkeys(METRICS, float("nan")), NOTHING, PLENTY) == "other"


def test_every_rule_states_itself() -> None:
    assert all(role.name and role.condition and role.needed for role in ROLES)

"""Roles: named where the text supports them, and only there."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from attnscope.inputs.prompt import from_text
from attnscope.metrics.metrics import METRICS
from attnscope.metrics.roles import ROLES, Role, near_uniform, roles_of, unsupported
from attnscope.observe.collect import observe
from attnscope.observe.request import Request
from helpers.families import tiny_model
from helpers.own import attentions
from helpers.parity_models import as_loaded
from helpers.roles import role_of
from test_metrics import by_loops
from test_truth import ids, prompt

PASSAGE = (
    "The river bank is wide and green. The old mill stands by the river. Every spring the water climbs over the "
    "stones and the children count the boats. "
)
PLENTY = {"two_keys": 99, "three_keys": 99, "all": 99, "repeats": 99, "repeats_apart": 99, "beyond_32": 99}
NOTHING = dict.fromkeys(METRICS, 0.0)
BY_DIFFERENCE = {
    "induction": "induction",
    "previous_token": "previous-token",
    "duplicate_token": "duplicate-token",
    "self": "self",
}


def test_the_demo_names_its_induction_and_previous_token_heads(demo) -> None:
    """On a passage that comes twice; and the scores are those of Python loops over output_attentions."""
    prompt = from_text(demo.tokenizer, PASSAGE * 2)
    [seen] = observe(demo, [prompt], Request())
    by_role: dict[str, list[str]] = {}
    for head in seen.heads:
        by_role.setdefault(head.role, []).append(head.name)
    assert by_role["induction"]
    assert by_role["previous-token"]
    assert [
        head.name for head in seen.heads if head.near_uniform and head.role in ("induction", "previous-token")
    ] == []
    layers = attentions(demo.model, prompt.ids)
    visible_QK = torch.ones(len(prompt), len(prompt), dtype=torch.bool).tril()
    for head in seen.heads:
        if head.role in ("induction", "previous-token"):
            weights_QK = layers[head.layer][head.head]
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
    assert any("sink" in line and "expected at least 64 tokens, this text has 9" in line for line in why)


def test_the_first_rule_that_holds_names_the_head() -> None:
    assert role_of(NOTHING | {"induction": 0.9, "previous_token": 0.9}, NOTHING, PLENTY) == "induction"
    assert role_of(NOTHING | {"previous_token": 0.9}, NOTHING, PLENTY) == "previous-token"
    assert role_of(NOTHING | {"sink": 0.31}, NOTHING, PLENTY) == "sink"
    assert role_of(NOTHING | {"entropy_normalised": 0.9}, NOTHING, PLENTY) == "other"
    assert role_of(NOTHING, NOTHING, PLENTY) == "other"


def test_what_uniform_attention_gives_earns_no_role() -> None:
    """Two visible keys give the previous token half of a uniform row."""
    assert role_of(NOTHING | {"previous_token": 0.5}, NOTHING | {"previous_token": 0.5}, PLENTY) == "other"


def test_a_role_needs_its_support() -> None:
    score = NOTHING | {"induction": 0.9}
    assert role_of(score, NOTHING, PLENTY | {"repeats_apart": 15}) == "-"
    assert role_of(score, NOTHING, PLENTY | {"repeats_apart": 16}) == "induction"
    assert role_of(score, NOTHING, dict.fromkeys(PLENTY, 15)) == "-"
    assert role_of(NOTHING | {"sink": 0.9}, NOTHING, PLENTY | {"all": 63}) == "-"


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_head_is_other_only_where_every_role_could_be_seen(role: Role) -> None:
    few = PLENTY | {role.rows: role.needed - 1}
    assert role_of(NOTHING, NOTHING, PLENTY) == "other"
    assert role_of(NOTHING, NOTHING, few) == "-"
    scores = {name: np.zeros(2) for name in METRICS}
    support = {name: np.array([PLENTY[name], few[name]]) for name in PLENTY}
    assert roles_of(scores, scores, support).tolist() == ["other", "-"]


def test_random_weights_are_near_uniform_and_that_is_no_role() -> None:
    [seen] = observe(as_loaded(tiny_model("llama")), [prompt(ids(70))], Request())
    assert {head.near_uniform for head in seen.heads} == {True}
    assert {head.role for head in seen.heads} <= {"other", "-"}


def test_the_mark_needs_rows_and_is_below_a_threshold() -> None:
    scores = {"entropy_normalised": np.array([0.9, 0.79, 0.9, np.nan])}
    assert near_uniform(scores, {"two_keys": np.array([16, 16, 15, 16])}).tolist() == [True, False, None, False]


def test_a_null_score_is_no_role() -> None:
    assert role_of(dict.fromkeys(METRICS, float("nan")), NOTHING, PLENTY) == "other"


def test_every_rule_states_itself() -> None:
    assert all(role.name and role.condition and role.needed for role in ROLES)


@pytest.mark.parametrize(
    ("metric", "score", "uniform", "role"),
    [
        *((metric, 0.5, 0.1, role) for metric, role in BY_DIFFERENCE.items()),
        *((metric, 0.499, 0.1, "other") for metric in BY_DIFFERENCE),
        ("sink", 0.301, 0.301, "sink"),
        ("sink", 0.3, 0.0, "other"),
        ("local_mass_32", 0.8, 0.6, "local"),
        ("local_mass_32", 0.799, 0.5, "other"),
        ("local_mass_32", 0.9, 0.701, "other"),
    ],
)
def test_a_role_begins_where_its_condition_says(metric: str, score: float, uniform: float, role: str) -> None:
    assert role_of(NOTHING | {metric: score}, NOTHING | {metric: uniform}, PLENTY) == role

"""Which studies of what heads write say something of which causal-LM type: `docs/families/studies.csv`."""

import pytest

from helpers.families_table import figures_of, read, studies, study_row, without_figures
from helpers.seconds import once
from helpers.study_families import STUDIED, STUDIES, study

studied = once(study)
NORM_AFTER = ["exaone4", "flex_olmo", "gemma2", "gemma3", "gemma3_text", "glm4", "olmo2", "olmo3"]
# A gate in the way and a norm, none, keys that are no tokens, shared ones, no softmax.
OTHERS = ["afmoe", "bitnet", "cpmant", "deepseek_v4", "gemma3n_text", "mamba2"]
# of those that are the same on the way from a head to the logits one each
PLAIN = ["llama", "gpt2", "bloom", "olmo2", "gpt_oss", "qwen3_next", "blt"]
GATED = ["afmoe", "bitnet", "laguna", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_next"]


def some(types, names):
    return [one if one in names else pytest.param(one, marks=pytest.mark.families) for one in types]


@pytest.mark.parametrize("family", some(STUDIED, [*PLAIN, *OTHERS]))
def test_the_document_has_what_is_measured(family):
    [row] = without_figures([study_row(family, studied(family))])
    assert row in without_figures(read("studies")), "run scripts/families_doc.py"


@pytest.mark.parametrize("family", some(NORM_AFTER + GATED, [*PLAIN, *OTHERS]))
def test_no_norm_and_no_gate_is_in_the_way(family):
    found = studied(family)
    assert all(found.answers(name) for name in STUDIES[:3])
    assert ("norm after it" in found.frozen) == (family in [*NORM_AFTER, "afmoe"])
    assert ("gate or norm before the projection" in found.frozen) == (family in GATED)


@pytest.mark.slow
def test_the_whole_table_is_what_is_measured():
    assert without_figures(read("studies")) == without_figures(studies(studied)), "run scripts/families_doc.py"


def test_the_error_of_every_sum_is_small():
    assert max(figures_of(read("studies"))) < 1e-5

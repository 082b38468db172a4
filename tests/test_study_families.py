"""Which studies of what heads write say something of which causal-LM type: the third table of `docs/families.md`."""

from pathlib import Path

import pytest

from helpers.families_table import STACKS, STUDIED, figures_of, rows_without_figures, studies_table, study_row
from helpers.parity_models import TYPES
from helpers.seconds import once
from helpers.study_families import STUDIES, study

studied = once(study)
NORM_AFTER = ["exaone4", "flex_olmo", "gemma2", "gemma3", "gemma3_text", "glm4", "olmo2", "olmo3"]
# A gate in the way and a norm, none, keys that are no tokens, shared ones.
OTHERS = ["afmoe", "bitnet", "cpmant", "deepseek_v4", "gemma3n_text"]
# of those that are the same on the way from a head to the logits one each
PLAIN = ["llama", "gpt2", "bloom", "olmo2", "gpt_oss", "qwen3_next", "blt"]
GATED = ["afmoe", "bitnet", "laguna", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_next"]


def written():
    """The lines of the third part."""
    text = (Path(__file__).parents[1] / "docs" / "families.md").read_text(encoding="utf-8")
    return text.partition(STUDIED)[2].partition(f"\n\n{STACKS}")[0].splitlines()


def some(types, names):
    return [one if one in names else pytest.param(one, marks=pytest.mark.families) for one in types]


@pytest.mark.parametrize("family", some(TYPES, [*PLAIN, *OTHERS]))
def test_the_document_has_what_is_measured(family):
    [row] = rows_without_figures(study_row(family, studied(family)))
    assert row in rows_without_figures("\n".join(written())), "run scripts/families_doc.py"


@pytest.mark.parametrize("family", some(NORM_AFTER + GATED, [*PLAIN, *OTHERS]))
def test_no_norm_and_no_gate_is_in_the_way(family):
    found = studied(family)
    assert all(found.answers(name) for name in STUDIES[:3])
    assert ("norm after it" in found.frozen) == (family in [*NORM_AFTER, "afmoe"])
    assert ("gate or norm before the projection" in found.frozen) == (family in GATED)


@pytest.mark.slow
def test_the_whole_table_is_what_is_measured():
    found = studies_table(studied).partition(STUDIED)[2]
    assert rows_without_figures("\n".join(written())) == rows_without_figures(found), "run scripts/families_doc.py"


def test_the_error_of_every_sum_is_small():
    assert max(figures_of("\n".join(written()))) < 1e-5

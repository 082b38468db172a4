"""Contributions to a logit sum to it in every family whose q and k are seen, but for those that are named here."""

import pytest

from attnscope.errors import ModelError
from attnscope.study.why.parts import AskedLogit, parts_of
from helpers.families import BYPASS
from helpers.parity_models import DECODERS, TYPES, as_loaded, ids_for, roused_model
from helpers.stack_families import ids as stack_ids
from helpers.stack_families import tiny

QUERY = 15
REFUSED = {  # and what is said
    "axk2": "the contributions sum to",  # its indexer's keys are compressed over tokens
    "blt": "its layers share their attention",  # over bytes and patches
    "deepseek_v4": "its blocks are not given one vector per token",  # hyper-connections
    "gemma3n_text": "its blocks are not given one vector per token",  # alternating updates
    "hrm_text": "is in the block of an earlier layer",  # its layers run again and again
    "hy_v4": "its blocks are not given one vector per token",
    "inkling2_text": "is not made of what enters its layer",  # blocks attend to earlier residuals
    "longcat_flash": "is in the block of an earlier layer",
    "qwen4_exp": "the contributions sum to",
    "qwen4_exp_text": "the contributions sum to",
    "zaya": "the contributions sum to",  # convolutions over q and k with a norm between them
}
ENCODERS = """
    bert bert-generation camembert clip_text_model data2vec-text distilbert dpr electra embedding_gemma2_text ernie
    esm esmc eurobert gte jina_embeddings_v3 layoutlm markuplm mobilebert modernbert neomme nomic_bert
    openai_privacy_filter roberta roberta-prelayernorm roc_bert splinter tipsv2_text_model ultrabert xlm-roberta
    xlm-roberta-xl xmod
""".split()  # noqa: SIM905
SEEN = sorted(set(TYPES) - set(BYPASS) - set(DECODERS))


def last_of(model, ids):
    """The last layer of a model, by both sides; its largest error as a share of the sum of |terms|."""
    loaded = as_loaded(model)
    layer, heads = [(layer, heads) for layer, heads in loaded.geometry.heads_by_layer.items() if heads][-1]
    errors = []
    for side in ("key", "query"):
        found = parts_of(loaded, ids, AskedLogit(layer, heads - 1, QUERY, side=side))
        assert len(found.components) > layer  # a row for what each earlier block writes
        errors.append(abs(found.sum - found.logit) / abs(found.contribution_N).sum())
    return max(errors)


@pytest.mark.parametrize("family", sorted(set(SEEN) - REFUSED.keys()))
def test_contributions_sum_to_the_logit(family):
    assert last_of(roused_model(family), ids_for(family)[0].tolist()) < 1e-5


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_is_not_linear_so_is_refused_with_a_reason(family):
    with pytest.raises(ModelError, match=REFUSED[family]):
        last_of(roused_model(family), ids_for(family)[0].tolist())


@pytest.mark.parametrize("family", sorted(BYPASS))
def test_where_q_and_k_are_not_seen_it_is_said(family):
    with pytest.raises(ModelError, match="attends where its q and k are not seen"):
        last_of(roused_model(family), ids_for(family)[0].tolist())


@pytest.mark.parametrize("family", ENCODERS)
def test_contributions_sum_to_the_logit_of_an_encoder(family):
    assert last_of(tiny(family), stack_ids(16, texts=1)[0].tolist()) < 1e-5


def test_layers_that_share_a_block_are_refused_but_for_the_first():
    model, ids = tiny("albert"), stack_ids(16, texts=1)[0].tolist()
    assert parts_of(as_loaded(model), ids, AskedLogit(0, 1, QUERY)).sum != 0
    with pytest.raises(ModelError, match="layer 3 is in the block of an earlier layer"):
        last_of(model, ids)


def test_the_counts_are_what_was_promised():
    assert len(ENCODERS) == 31
    assert len(SEEN) - len(REFUSED) >= 147
    assert len(REFUSED) <= 11

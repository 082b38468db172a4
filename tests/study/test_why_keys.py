"""The logits of all keys of a head at once, beside one logit after the other."""

import numpy as np
import pytest
import torch

from attnscope.errors import ModelError, UsageError
from attnscope.studies.attribution import check_sum, decompose_logit, key_parts
from attnscope.studies.attribution_records import LogitQuery
from helpers.families import few
from helpers.parity_models import as_loaded, ids_for, in_half, roused_model
from helpers.stack_families import ids as stack_ids
from helpers.stack_families import tiny

DECODERS = """
    bamba deepseek_v3 doge gemma2 gpt2 gpt_neox gpt_oss granite jamba llama olmo2 phi3 qwen2_moe qwen3 starcoder2
""".split()  # noqa: SIM905
QUERIES = (15, 6)


def last_head(loaded):
    return [(layer, heads - 1) for layer, heads in loaded.geometry.heads_by_layer.items() if heads][-1]


def differences(loaded, ids, found):
    """How far the parts are from those of `decompose_logit`, as shares of the sum of |terms|."""
    errors = []
    for row, query in enumerate(found.queries):
        seen = np.flatnonzero(~np.isnan(found.logit_QK[row])).tolist()
        for key in {seen[0], seen[len(seen) // 2], seen[-1]}:
            one = decompose_logit(loaded, ids, LogitQuery(found.layer, found.head, query, key))
            names = [part.name for part in one.components if part.name != "all keys"]  # which sinks compete with
            assert [component.name for component in found.components] == names
            assert (len(seen), found.softcap, found.sinks) == (one.visible, one.softcap, one.sinks)
            assert found.logit_QK[row, key] == pytest.approx(one.logit, abs=1e-5)
            given = [found.parts_CQK[:, row, key], found.parts_CQK[:, row, seen].mean(1)]
            size = abs(one.contribution_N).sum()
            expected = (values[: len(names)] for values in (one.contribution_N, one.base_N))
            errors += [abs(a - b).max() / size for a, b in zip(given, expected, strict=True)]
    return errors


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_heads_are_taken_apart_in_any_mode_of_the_caller_and_leave_it(demo, mode):
    ids, heads = [1, *range(100, 120)], {0: [15], 1: [15]}
    expected = [one.parts_CQK for one in key_parts(demo, ids, 3, heads)]
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        for one, parts_CQK in zip(key_parts(demo, ids, 3, heads), expected, strict=True):
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
            np.testing.assert_array_equal(one.parts_CQK, parts_CQK)


@pytest.mark.parametrize("family", few(DECODERS, also=("doge", "granite", "jamba")))
def test_all_keys_at_once_are_the_keys_one_by_one(family):
    loaded, ids = as_loaded(roused_model(family)), ids_for(family)[0].tolist()
    layer, head = last_head(loaded)
    [found] = key_parts(loaded, ids, layer, {head: QUERIES})
    assert max(differences(loaded, ids, found)) < 1e-5


@pytest.mark.parametrize("family", few(["bert", "modernbert", "mobilebert"], also=("mobilebert",)))
def test_all_keys_of_an_encoder_at_once_are_the_keys_one_by_one(family):
    loaded, ids = as_loaded(tiny(family)), stack_ids(16, texts=1)[0].tolist()
    layer, head = last_head(loaded)
    [found] = key_parts(loaded, ids, layer, {head: QUERIES})
    assert max(differences(loaded, ids, found)) < 1e-5


def test_the_parts_of_another_key_are_caught(demo):
    ids = [1, *range(100, 120)]
    [found] = key_parts(demo, ids, 3, {0: QUERIES})
    assert max(differences(demo, ids, found)) < 1e-5
    found.parts_CQK[:] = np.roll(found.parts_CQK, 1, axis=2)
    assert min(differences(demo, ids, found)) > 1e-3


def test_all_queries_of_several_heads_are_those_of_each_query_alone(demo):
    ids = [1, *range(100, 140)]
    assert len(ids) > demo.geometry.layers[0].head_dim  # more queries than a key has numbers
    both = list(key_parts(demo, ids, 2, {1: range(len(ids)), 4: [7]}))
    assert [(one.head, len(one.queries)) for one in both] == [(1, 41), (4, 1)]
    [alone] = key_parts(demo, ids, 2, {1: [30]})
    np.testing.assert_allclose(both[0].parts_CQK[:, 30], alone.parts_CQK[:, 0], atol=1e-5)
    np.testing.assert_allclose(both[0].logit_QK[30], alone.logit_QK[0], rtol=1e-12)


def test_a_hidden_key_has_no_logit_and_is_given_nothing(demo):
    [found] = key_parts(demo, [1, *range(100, 120)], 3, {0: [8]})
    assert np.isnan(found.logit_QK[0]).tolist() == [False] * 9 + [True] * 12
    assert not found.parts_CQK[:, 0, 9:].any()
    assert found.parts_CQK[:, 0, :9].any()


def test_what_is_refused_one_by_one_is_refused_at_once():
    with pytest.raises(UsageError, match="in bfloat16"):
        list(key_parts(as_loaded(in_half(roused_model("llama"))), ids_for("llama")[0].tolist(), 1, {0: [2]}))
    family = "inkling2_text"
    loaded, ids = as_loaded(roused_model(family)), ids_for(family)[0].tolist()
    layer, head = last_head(loaded)
    with pytest.raises(ModelError, match="its residual is no plain sum"):
        list(key_parts(loaded, ids, layer, {head: [15]}))


def test_terms_that_miss_one_logit_of_many_are_refused_with_its_figures():
    terms_CQK = np.arange(24.0).reshape(2, 3, 4)
    logit_QK = terms_CQK.sum(0)
    check_sum(terms_CQK, logit_QK, 1.0)
    logit_QK[2, 1] += 0.01
    with pytest.raises(ModelError, match=r"the contributions sum to 30, and the logit is 30\.01: they differ by 0\.01"):
        check_sum(terms_CQK, logit_QK, 1.0)

"""Contributions to a logit sum to it in every family whose q and k are seen, but for those that are named here."""

import pytest

from attnscope.api.why import VERIFIED
from attnscope.errors import ModelError
from attnscope.hooks import families as watching
from attnscope.reference import reader as rules
from attnscope.studies.attribution_records import LogitQuery
from helpers.families import BYPASS, few, of_all_families
from helpers.parity_models import DECODERS, TYPES, ids_for, roused_model
from helpers.stack_families import SEQ2SEQ, inputs_of, tiny
from helpers.stack_families import TYPES as STACK_TYPES
from helpers.stack_families import ids as stack_ids
from helpers.why_families import QUERY, last_of, taken_apart, wrapped

REFUSED = {  # and what is said
    "blt": "reads bytes and patches of them",
    "hrm_text": "a block is run without gradients",  # its own code forbids them, and two residuals feed each other
    "inkling2_text": "its blocks attend to what earlier blocks were given",
}
NOT_SEEN = {  # outside the interface, where no layout makes q and k, or blocks are in pieces
    **dict.fromkeys(("cpmant", "prophetnet", "xlnet"), "attends where its q and k are not seen"),
    "xlm": "its list of layers holds attention alone",
}
OTHERS = [  # what else the way back to a residual passes: gates, factors, shared keys, hybrids, chunks, hooks, parallel
    *("afmoe", "gemma3n_text", "gptj", "granite_swa", "jamba", "llama4_text", "longcat_flash", "mimo_v2_flash"),
    *("deepseek_v4", "mpt", "xglm"),
]
SUMMARIES = {"deepseek_v4": (2,)}  # layers whose keys are summaries of tokens
NOT_SEEN_ENCODERS = {
    **dict.fromkeys(
        (
            *("convbert", "deberta", "deberta-v2", "funnel", "ibert", "layoutlmv3", "lilt", "longformer", "luke"),
            *("mpnet", "squeezebert", "xlnet"),
        ),
        "attends where its q and k are not seen",
    ),
    **dict.fromkeys(("flaubert", "xlm"), "its list of layers holds attention alone"),
}
ENCODERS = sorted({*STACK_TYPES} - {*SEQ2SEQ} - {*NOT_SEEN_ENCODERS})
UNSEEN = {  # families that attend outside the interface, and what is said of a cross layer
    **dict.fromkeys(("bigbird_pegasus", "longt5"), "its output cannot be changed"),
    **dict.fromkeys(("fsmt", "led", "mvp", "prophetnet", "t5gemma2"), "attends where its q and k are not seen"),
    "pegasus_x": "what the heads of this encoder write is not seen",
}
SEEN = sorted(set(TYPES) - NOT_SEEN.keys())


@pytest.mark.parametrize("family", few(sorted(set(SEEN) - REFUSED.keys() - DECODERS.keys()), also=OTHERS))
def test_contributions_sum_to_the_logit(family):
    assert last_of(roused_model(family), ids_for(family)) < 1e-5


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_is_not_linear_so_is_refused_with_a_reason(family):
    with pytest.raises(ModelError, match=REFUSED[family]):
        last_of(roused_model(family), ids_for(family)[0].tolist())


@pytest.mark.parametrize("family", NOT_SEEN)
def test_where_q_and_k_are_not_seen_it_is_said(family):
    with pytest.raises(ModelError, match=NOT_SEEN[family]):
        last_of(roused_model(family), ids_for(family)[0].tolist())


@pytest.mark.parametrize("family", ["gptj", "rembert"])
def test_outside_the_interface_pairs_sum_and_components_are_replaced(family):
    loaded, ids = wrapped(roused_model(family)), ids_for(family)[0].tolist()
    whole, pairs = (taken_apart(loaded, ids, LogitQuery(3, 1, QUERY, 13, side=side)) for side in ("key", "both"))
    assert pairs.sum == pytest.approx(whole.logit, abs=1e-5)
    tried = taken_apart(loaded, ids, LogitQuery(3, 1, QUERY, 13, verify=VERIFIED)).true_N
    assert (tried == tried).sum() == VERIFIED


def test_weights_that_its_layout_does_not_make_are_not_taken_apart(monkeypatch):
    monkeypatch.setitem(rules.SCALES, "head_dim", lambda given, width: 0.5)
    with pytest.raises(ModelError, match="weights differ by"):
        last_of(roused_model("gptj"), ids_for("gptj")[0].tolist())


@pytest.mark.parametrize("family", few(ENCODERS, also=("distilbert", "modernbert", "openai_privacy_filter")))
def test_contributions_sum_to_the_logit_of_an_encoder(family):
    assert last_of(tiny(family), stack_ids(16, texts=1)[0].tolist()) < 1e-5


@pytest.mark.parametrize("family", few(NOT_SEEN_ENCODERS, also=("mpnet", "xlm")))
def test_what_an_encoder_does_not_show_is_said(family):
    with pytest.raises(ModelError, match=NOT_SEEN_ENCODERS[family]):
        last_of(tiny(family), stack_ids(16, texts=1)[0].tolist())


@pytest.mark.parametrize("family", few(sorted(set(SEQ2SEQ) - UNSEEN.keys()), also=("t5gemma",)))
def test_contributions_sum_to_the_logit_in_each_stack_of_an_encoder_decoder(family):
    model, ids = tiny(family), stack_ids(16, texts=1)
    inputs = {name: value[:1] for name, value in inputs_of(model).items()}
    for stack in ("encoder", "decoder", "cross"):
        assert last_of(model, ids, query=9, stack=stack, **inputs) < 1e-5


def test_a_cross_layer_has_the_heads_of_the_encoder_on_its_key_side_and_those_of_the_decoder_on_its_query_side():
    model, ids = tiny("bart"), stack_ids(16, texts=1)
    inputs = {name: value[:1] for name, value in inputs_of(model).items()}
    of_key, of_query = (
        [one.name for one in taken_apart(wrapped(model), ids, LogitQuery(1, 0, 9, 3, **how), **inputs).components]
        for how in ({"stack": "cross"}, {"stack": "cross", "side": "query"})
    )
    encoder = [name for layer in range(4) for name in (*heads("encoder ", layer), f"encoder L{layer} rest")]
    assert of_key == ["encoder embedding", *encoder, "bias"]
    before = [*heads("", 0), *heads("cross ", 0), "L0 rest", *heads("", 1), "L1 rest"]
    assert of_query == ["embedding", *before, "bias"]


def heads(stack, layer):
    return [f"{stack}L{layer}H{head}" for head in range(4)]


@pytest.mark.parametrize("family", few(UNSEEN, also=("led", "longt5", "pegasus_x")))
def test_what_an_encoder_decoder_does_not_show_is_said(family):
    model, ids = tiny(family), stack_ids(16, texts=1)
    inputs = {name: value[:1] for name, value in inputs_of(model).items()}
    with pytest.raises(ModelError, match=UNSEEN[family]):
        last_of(model, ids, query=9, stack="cross", **inputs)


def test_where_an_encoder_is_not_seen_its_decoder_is():
    model, ids = tiny("pegasus_x"), stack_ids(16, texts=1)
    inputs = {name: value[:1] for name, value in inputs_of(model).items()}
    assert last_of(model, ids, query=9, stack="decoder", **inputs) < 1e-5
    assert last_of(model, ids, query=9, stack="cross", sides=["query"], **inputs) < 1e-5


def test_layers_that_share_a_block_write_under_their_own_numbers():
    model, ids = tiny("albert"), stack_ids(16, texts=1)[0].tolist()
    assert last_of(model, ids) < 1e-5
    names = [one.name for one in taken_apart(wrapped(model), ids, LogitQuery(3, 1, QUERY)).components]
    assert {"L0H0", "L1H3", "L2H0"} <= set(names)


@pytest.mark.parametrize("family", SUMMARIES)
def test_keys_that_are_no_tokens_are_refused_layer_by_layer(family):
    loaded, ids = wrapped(roused_model(family)), ids_for(family)[0].tolist()
    for layer in loaded.geometry.heads_by_layer:
        if layer not in SUMMARIES[family]:
            found = taken_apart(loaded, ids, LogitQuery(layer, 0, QUERY))
            assert abs(found.sum - found.logit) < 1e-5 * abs(found.contribution_N).sum()
            continue
        with pytest.raises(ModelError, match="no tokens of the text"):
            taken_apart(loaded, ids, LogitQuery(layer, 0, QUERY))


def test_keys_of_an_earlier_layer_are_what_writes_the_residual_there():
    """Gemma 3n's layer 4 takes the keys of layer 2: the same logit with its own query."""
    loaded, ids = wrapped(roused_model("gemma3n_text")), ids_for("gemma3n_text")[0].tolist()
    assert loaded.model.config.kv_sharing_modes[4] == "reuse"
    found = taken_apart(loaded, ids, LogitQuery(4, 0, QUERY, 9, verify=VERIFIED))
    assert [one.name for one in found.components] == [
        one.name for one in taken_apart(loaded, ids, LogitQuery(2, 0, QUERY, 9)).components
    ]
    assert found.logit == pytest.approx(
        taken_apart(loaded, ids, LogitQuery(4, 0, QUERY, 9, side="query")).logit, rel=1e-5
    )
    assert (found.true_N == found.true_N).sum() == VERIFIED


def test_what_all_keys_share_is_a_row_where_there_is_a_sink_logit():
    loaded, ids = wrapped(roused_model("gpt_oss")), ids_for("gpt_oss")[0].tolist()
    for side in ("key", "query", "both"):
        found = taken_apart(loaded, ids, LogitQuery(3, 1, QUERY, 13, side=side))
        assert found.sinks
        assert found.components[-1].name == "all keys"
        assert found.contribution_N[-1] == 0
        assert found.contrast_N[-1] == pytest.approx(found.base)
        assert found.contrast_N.sum() == pytest.approx(found.logit, abs=1e-4)
        assert found.sum == pytest.approx(found.logit, abs=1e-4)
        assert found.share_N[:-1].sum() == pytest.approx(1) or abs(found.logit - found.base) < 0.1
        assert found.share_N[-1] != found.share_N[-1]
    against = taken_apart(loaded, ids, LogitQuery(3, 1, QUERY, 13, 12))
    assert "all keys" not in {one.name for one in against.components}  # one other key is not all


OUTSIDE = sorted({*TYPES} & {*BYPASS} - {*NOT_SEEN})  # the interface; weights and values are seen beside it


# In gpt_oss sinks take their share of rows, in granite_swa of the output.
@pytest.mark.parametrize("family", few([*OUTSIDE, "gpt_oss", "granite_swa"], also=("granite_swa",)))
def test_the_tokens_of_a_head_sum_to_it(family):
    loaded, ids = wrapped(roused_model(family)), ids_for(family)[0].tolist()
    whole, split = (taken_apart(loaded, ids, LogitQuery(3, 1, QUERY, 13, by_tokens=by)) for by in (False, True))
    sums = dict.fromkeys((one.name for one in whole.components), 0.0)
    for one, value in zip(split.components, split.contribution_N, strict=True):
        sums[one.name] += float(value)
    assert list(sums.values()) == pytest.approx(whole.contribution_N.tolist(), abs=1e-5)
    assert {one.position for one in split.components if one.layer == 1 and one.head} <= {*range(QUERY + 1)}


def test_values_that_are_not_seen_are_not_split_by_tokens(monkeypatch):
    monkeypatch.setattr(watching, "PRODUCTS", ())
    with pytest.raises(ModelError, match='the values of this model\'s heads are not seen; leave out by="tokens"'):
        taken_apart(wrapped(roused_model("gptj")), ids_for("gptj"), LogitQuery(3, 1, QUERY, 13, by_tokens=True))


@of_all_families
def test_the_counts_are_what_was_promised():
    assert (len(ENCODERS), len(NOT_SEEN_ENCODERS)) == (40, 14)
    assert len(SEEN) - len(REFUSED) - len(DECODERS) == 171
    assert len(REFUSED) == 3
    assert len(NOT_SEEN) == 4
    assert len(OUTSIDE) == 16
    assert len(SEQ2SEQ) - len(UNSEEN) >= 17

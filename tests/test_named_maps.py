"""Layers that attend more than once, or to more than tokens: each map has a name, and each key says what it is."""

import io
import json
import re
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

import attnscope
from attnscope.errors import UsageError
from attnscope.export.drawing import DrawingOptions, drawings, terminal_maps
from attnscope.export.export import manifest
from attnscope.figures.colours import cell_number, find_limits, make_norm
from attnscope.figures.fonts import Fonts
from attnscope.figures.writer import drawing
from attnscope.hooks.projections import strength
from attnscope.inputs.answers import with_summaries
from attnscope.model.loading import wrap
from attnscope.observe.request import Request, View
from helpers.command_line import call
from helpers.folders import saved
from helpers.parity_models import roused_model

TEXT = "the financial bank is located on river bank and Mary saw"
LONG = " ".join([TEXT] * 10)
EVERY = Request(relations=True, top_k=None, maps="all", weights=True)


def loaded_as(demo, name):
    return wrap(roused_model(name, vocab_size=2000).eval(), demo.tokenizer, name)


@pytest.fixture(scope="module")
def cycles(demo):
    return loaded_as(demo, "hrm_text")


@pytest.fixture(scope="module")
def differential(demo):
    return loaded_as(demo, "diffllama")


@pytest.fixture(scope="module")
def compressed(demo):
    return loaded_as(demo, "deepseek_v4")


def own_weights(loaded, seen):
    ids_BT = torch.tensor([seen.queries.ids])
    return [one[0] for one in loaded.model(ids_BT, output_attentions=True, use_cache=False).attentions]


def test_every_pass_through_a_module_is_a_layer_as_its_cache_counts_them(cycles):
    seen, config = attnscope.capture(cycles, TEXT, request=EVERY), cycles.model.config
    expected = own_weights(cycles, seen)
    assert len(expected) == config.H_cycles * (config.L_cycles + 1) * config.num_layers_per_stack == 32
    assert len(seen.weights) == 32
    for layer, weights_HQK in enumerate(expected):
        torch.testing.assert_close(seen.weights[layer], weights_HQK, rtol=0, atol=1e-6)
    assert (seen.weights[0] - seen.weights[4]).abs().max() > 1e-3, "the same module again sees other states"
    paths = [check["module"] for check in manifest(seen, {}, {})["calls"]]
    assert paths[12] == "model.H_module.layers.0.self_attn"
    assert seen.unmeasured == []
    assert attnscope.capture(cycles, TEXT, select="17.2").kept_heads()[0].name == "L17H2"


def test_a_difference_is_what_the_layer_sums_its_values_with(differential):
    """The model's own sums over values, before they are normed, are those of the differences."""
    kept, values = {}, {}
    hooks = []
    for layer, block in enumerate(differential.model.model.layers):
        norm, project = block.self_attn.groupnorm, block.self_attn.v_proj
        hooks.append(norm.register_forward_pre_hook(lambda _, given, layer=layer: kept.update({layer: given[0][0]})))
        hooks.append(project.register_forward_hook(lambda _, __, out, layer=layer: values.update({layer: out[0]})))
    seen = attnscope.capture(differential, TEXT, request=EVERY)
    for hook in hooks:
        hook.remove()
    found = seen.of("difference").weights
    assert [key.layer for key in found] == [0, 1, 2, 3]
    for layer in range(4):
        expected_QHV, value_KV = kept[layer], values[layer]  # two kv heads side by side, which every head sums
        for head in range(2):
            torch.testing.assert_close(found[layer][head] @ value_KV, expected_QHV[:, head], rtol=0, atol=1e-5)


def test_a_difference_is_of_the_two_halves_of_the_heads(differential):
    seen = attnscope.capture(differential, TEXT, request=EVERY)
    factors = manifest(seen, {}, {})["lambda"]
    for layer, block in enumerate(differential.model.model.layers):
        of = block.self_attn
        first, second = (
            sum(float(a) * float(b) for a, b in zip(*pair, strict=True))
            for pair in ((of.lambda_q1, of.lambda_k1), (of.lambda_q2, of.lambda_k2))
        )
        factor = 2.718281828459045**first - 2.718281828459045**second + of.lambda_init
        assert factors[str(layer)] == pytest.approx(factor, rel=1e-5)
        for head in range(2):
            expected = seen.weights[layer][head] - factor * seen.weights[layer][head + 2]
            torch.testing.assert_close(seen.of("difference").weights[layer][head], expected, rtol=0, atol=1e-6)
    assert strength(torch.nn.Linear(2, 2)) is None


def test_tables_and_pictures_tell_differences_apart(differential, tmp_path):
    seen = attnscope.capture(differential, TEXT, request=EVERY)
    rows = [row for row in seen.table().to_pylist() if row["stack"] == "difference"]
    assert [(row["layer"], row["head"]) for row in rows] == [(layer, head) for layer in range(4) for head in range(2)]
    assert all(row["entropy"] is None and row["sink"] is None for row in rows), "no shares of one"
    assert {head.name for head in seen.heads} >= {"L3H3", "difference L3H1"}
    for row in seen.relations().to_pylist()[::7]:
        weights = seen.of(row["stack"]).weights[row["layer"]]
        assert row["weight"] == pytest.approx(float(weights[row["head"], row["query"], row["key"]]))
    drawn = drawings(seen)
    assert {maps.quantity for maps in drawn["difference"].maps} == {"difference"}
    assert {maps.quantity for maps in drawn["decoder"].maps} == {"weight"}
    some = attnscope.capture(differential, TEXT, select="0.1,difference.2.*")
    assert [head.name for head in some.kept_heads()] == ["L0H1", "difference L2H0", "difference L2H1"]
    some.export(tmp_path / "out", figures=("layers",))
    some.export(tmp_path / "out", figures=("overview",), force=True)
    assert sorted(path.name for path in (tmp_path / "out" / "difference").iterdir()) == ["overview.png"]


def test_a_call_with_the_weights_of_the_one_before_is_said_to_repeat_it(differential):
    seen = attnscope.capture(differential, TEXT)
    calls = [one for one in manifest(seen, {}, {})["calls"] if one["layer"] == 1]
    assert [(one["call"], one.get("repeats", False)) for one in calls] == [(0, False), (1, True)]
    assert seen.unmeasured == []


def test_differences_take_no_pass_of_their_own(differential):
    """Where no matrix is made they are left out."""
    assert attnscope.capture(differential, TEXT, engine="fused").stacks.keys() == {"decoder"}


def test_summaries_say_which_tokens_they_stand_for(compressed):
    seen = attnscope.capture(compressed, TEXT, request=EVERY)
    tokens = len(seen.queries)
    names = list(seen.of("csa").keys.labels[tokens:])
    assert names == [f"summary {max(0, 4 * (at - 1))}-{4 * at + 3}" for at in range(tokens // 4)]
    assert list(seen.of("csa").keys.tokens[:tokens]) == list(seen.queries.tokens)
    listed = [row for row in seen.relations().to_pylist() if row["stack"] == "csa"]
    assert {row["layer"] for row in listed} == {2}
    found = {(row["query"], row["key_token"]) for row in listed if row["key"] >= tokens}
    assert found == {(query, names[at]) for at in range(len(names)) for query in range(4 * at + 3, tokens)}


def test_weights_over_summaries_are_the_models_own(compressed):
    seen = attnscope.capture(compressed, TEXT, request=EVERY)
    expected = own_weights(compressed, seen)
    assert expected[2].shape[-1] > expected[0].shape[-1]
    for layer, weights_HQK in enumerate(expected):
        found = seen.of("csa" if layer == 2 else "decoder").weights[layer]
        torch.testing.assert_close(found, weights_HQK, rtol=0, atol=1e-6)
    assert (seen.unmeasured, seen.failures) == ([], [])


def test_a_long_text_whose_every_layer_has_summaries_is_read(compressed, tmp_path):
    seen = attnscope.capture(compressed, LONG, request=Request(weights=True, maps="all"))
    tokens = len(seen.prompt)
    assert tokens >= 128
    assert {kind: len(one.keys) - tokens for kind, one in seen.stacks.items()} == {
        "csa": tokens // 4,
        "hca": tokens // 128,
    }
    assert seen.of("hca").keys.labels[tokens] == "summary 0-127"
    expected = own_weights(compressed, seen)
    for kind, one in seen.stacks.items():
        for key, found in one.weights.items():
            torch.testing.assert_close(found, expected[key.layer], rtol=0, atol=1e-6)
            assert key.stack == kind
    assert sorted(row["layer"] for row in seen.table().to_pylist()) == [layer for layer in range(4) for _ in range(4)]
    assert [head.name for head in attnscope.capture(compressed, LONG, select="2.1").kept_heads()] == ["L2H1"]
    seen.export(tmp_path / "out", figures=("overview",))
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["checks"]["unmeasured"] == []


def test_names_of_summaries_by_hand(compressed):
    prompt = attnscope.capture(compressed, TEXT).prompt
    assert list(with_summaries(prompt, 6).tokens[len(prompt) :]) == ["summary 0-5", "summary 6-11"]
    assert list(with_summaries(prompt, 6, overlap=True).tokens[len(prompt) :]) == ["summary 0-5", "summary 0-11"]
    assert with_summaries(prompt, 100) == prompt


def test_a_summary_of_a_corpus_keeps_the_numbers_of_heads_beside_their_differences(tmp_path):
    folder = saved(tmp_path / "model", "diffllama", vocab_size=2000)
    (tmp_path / "texts.txt").write_text("the bank is on river\nMary saw John\n")
    out = tmp_path / "out"
    call("batch", str(tmp_path / "texts.txt"), "-m", str(folder), "--out", str(out), "--summary").ok()
    [listed] = (out / "heads").iterdir()
    heads, means = pq.read_table(listed).to_pylist(), pq.read_table(out / "summary.parquet").to_pylist()
    assert {row["stack"] for row in heads} == {"decoder", "difference"}
    found = {(row["layer"], row["head"]): row["mean"] for row in means if row["metric"] == "entropy" and row["texts"]}
    for layer in range(4):
        for head in range(4):
            of = [row["entropy"] for row in heads if (row["layer"], row["head"]) == (layer, head)]
            assert found[layer, head] == pytest.approx(sum(filter(None, of)) / 2)


@pytest.fixture(scope="module")
def linear(demo):
    """Three layers of a gated delta rule, and one of softmax attention."""
    return loaded_as(demo, "qwen3_next")


@pytest.fixture(scope="module")
def signed(linear):
    return attnscope.capture(linear, TEXT, request=EVERY)


def test_the_strongest_keys_of_a_linear_head_have_the_largest_size_and_keep_their_sign(linear, signed):
    weights = signed.of("linear").weights
    assert [key.layer for key in weights] == [0, 1, 2]
    assert all((of_layer.triu(1) == 0).all() for of_layer in weights.values())
    rows = [row for row in signed.relations().to_pylist() if row["stack"] == "linear"]
    for row in rows[::5]:
        assert row["weight"] == pytest.approx(float(weights[row["layer"]][row["head"], row["query"], row["key"]]))
    assert min(row["weight"] for row in rows) < 0 < max(row["weight"] for row in rows)
    one_query = [row["weight"] for row in rows if (row["layer"], row["head"], row["query"]) == (1, 2, 11)]
    assert len(one_query) == 12
    assert one_query == sorted(one_query, key=abs, reverse=True)
    # of some tokens, of the mean over the heads of a kv head, and the strongest alone
    some = attnscope.capture(linear, TEXT, query="10-11", key="1-5", request=Request(relations=True, top_k=2))
    part = [row for row in some.relations(over="heads").to_pylist() if row["stack"] == "linear"]
    sizes = [abs(row["weight"]) for row in part]
    assert sizes == sorted(sizes, reverse=True)
    for row in part:
        of_keys = weights[row["layer"]][row["head"], row["query"], 1:6]
        assert abs(row["weight"]) >= float(of_keys.abs().topk(2).values[-1]) - 1e-6
        assert row["weight"] == pytest.approx(float(of_keys[row["key"] - 1]))
    by_kv = attnscope.capture(linear, TEXT, request=Request(View(by_kv=True), relations=True, top_k=1))
    for row in by_kv.relations(min_weight=1e-3).to_pylist():
        if row["stack"] == "linear":
            of_query = weights[row["layer"]][row["kv_head"], row["query"]]
            assert row["weight"] == pytest.approx(float(of_query[of_query.abs().argmax()]))
            assert abs(row["weight"]) >= 1e-3


def test_what_a_linear_head_gives_named_keys_is_a_share_of_its_row(linear, signed):
    seen = attnscope.capture(linear, TEXT, query="8-11", key="2,4")
    weights = signed.of("linear").weights
    for head in seen.heads:
        if head.stack == "linear":
            size = weights[head.layer][head.head, 8:12].abs()
            expected = float((size[:, [2, 4]].sum(-1) / size.sum(-1)).mean())
            assert head.score["mass"] == pytest.approx(expected, rel=1e-4)
    assert np.isfinite([head.uniform for head in seen.heads]).all()
    [_, linear] = [seen.of(stack).columns for stack in ("decoder", "linear")]
    assert np.isnan(linear.scores["entropy"].value).all()
    assert linear.near_uniform.tolist() == [None] * 12


def test_pictures_of_linear_layers_are_centred_on_0_and_keep_signs_where_they_are_binned(linear, signed, tmp_path):
    drawn = drawings(signed)
    assert {maps.quantity for maps in drawn["linear"].maps} == {"signed"}
    assert {maps.quantity for maps in drawn["decoder"].maps} == {"weight"}
    assert {maps.kv_heads for maps in drawn["linear"].maps} == {()}
    binned = attnscope.capture(linear, TEXT, request=Request(maps="all", map_side=4, split_sink=True))
    kept, weights = binned.of("linear").maps, signed.of("linear").weights
    assert (kept.rule, binned.maps.rule) == ("max", "sum")
    size, below = kept.bin_size, 0
    assert size > 1
    for key, cells in kept.values.items():
        for head, row, column in np.argwhere(np.isfinite(cells)):
            cell = weights[key.layer][head, row * size : row * size + size, column * size : column * size + size]
            expected = cell.flatten()[cell.abs().argmax()]
            assert cells[head, row, column] == pytest.approx(float(expected))
            below += bool(expected < 0)
    assert below > 5
    # a scale of weights is for the layers that have some
    style = attnscope.Style(scale="log", floor=0.001)
    one = attnscope.capture(linear, TEXT, select="linear.0.1", request=Request(maps="kept"))
    one.export(tmp_path / "out", figures=("heads",), style=style)
    assert (tmp_path / "out" / "linear" / "heads" / "L00H01.png").exists()
    with drawing(Fonts()):
        norm = make_norm(find_limits([drawn["linear"].maps[0].values_HQK], style, "signed"), style)
    assert norm.vmin == -norm.vmax < 0
    assert norm(0.0) == pytest.approx(0.5)


def test_heads_are_sorted_by_a_metric_of_one_stack_where_it_is_measured(linear):
    seen = attnscope.capture(linear, TEXT, request=Request(maps="all"))
    drawn = drawings(seen, DrawingOptions(sort="decay_length", top=3))
    assert drawn["decoder"].sheet is None
    best = sorted(drawn["linear"].sheet.titles, key=lambda title: -float(title.split()[-1]))
    assert list(drawn["linear"].sheet.titles) == best
    assert len(best) == 3
    with pytest.raises(UsageError, match="did not measure mass"):
        drawings(seen, DrawingOptions(sort="mass"))


def test_a_terminal_has_a_legend_for_each_kind_of_map_and_equal_steps_for_signs(linear):
    seen = attnscope.capture(linear, TEXT, select="3.0,linear.0.1", request=Request(maps="kept"))
    console = Console(file=io.StringIO(), width=200, color_system=None)
    for maps in terminal_maps(seen, ["L3H0", "linear L0H1"], attnscope.Style(scale="log"), 40):
        console.print(maps)
    printed = console.file.getvalue()
    assert re.findall(r"(?:linear )?L\dH\d", printed) == ["L3H0", "linear L0H1"]
    assert printed.count("weight, log scale") == printed.count("signed weight") == 1
    steps = [float(step) for step in re.findall(r"to (-?[\d.e-]+)", printed.split("linear L0H1")[1])]
    assert steps[:2] == [-step for step in steps[3:1:-1]]
    assert steps[4] == pytest.approx(steps[3] * 5 / 3, rel=0.1)
    both = attnscope.capture(linear, TEXT, select="linear.0.0-1", request=Request(maps="kept"))
    [maps] = terminal_maps(both, ["linear L0H0", "linear L0H1"], attnscope.Style(), 40)
    console.print(maps)
    own = "· -1 ▒ 0 to █ +1 times the largest size of each head  signed weight"
    assert own in console.file.getvalue()


def test_numbers_of_a_map_whose_weights_are_small_show_a_digit_of_them():
    with drawing(Fonts()):
        written = [cell_number(value, attnscope.Style(), largest=0.07) for value in (-0.07, 0.002, -3e-4, 1e-5)]
        assert written == ["−0.07", "2e−3", "−3e−4", "0.00"]
        assert cell_number(0.002, attnscope.Style(), largest=0.5) == "0.00"


@pytest.mark.parametrize(
    ("family", "stack", "weights", "lacking"),
    [
        ("qwen3_next", "linear", "scores", "no logits"),
        (
            "jamba",
            "channels",
            "value",
            "no norm of what a key writes: a gate or norm of the layer's own comes after the map",
        ),
    ],
)
def test_heads_without_what_is_shown_are_named_and_alone_they_are_refused(demo, family, stack, weights, lacking):
    model = loaded_as(demo, family)
    ask = partial(attnscope.capture, model, TEXT, request=Request(view=View(weights=weights), relations=True))
    [unread] = ask().unmeasured
    assert unread.startswith(f"{stack} layers 0")
    assert unread.endswith(f": they have {lacking}")
    with pytest.raises(UsageError) as refused:
        ask(select=f"{stack}.0")
    assert str(refused.value) == f"{stack} layers have {lacking}; choose heads of attention"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return str(saved(tmp_path_factory.mktemp("hybrid") / "model", "qwen3_next", vocab_size=2000))


def test_a_line_says_what_linear_layers_show(hybrid):
    line = "linear layers 0-2: gated delta rule; weights are signed, before gate and norm"
    heads = call("heads", TEXT, "-m", hybrid, "--select", "linear.1.2,3.0", columns=120)
    assert line in heads.err
    assert "linear heads: metrics are of |w| as a share of its row; a weight keeps its sign" in heads.err
    assert "3 linear x 4 heads" in heads.err
    assert "linear L1H2" in heads.out.decode()
    assert "have no attention" not in heads.err


def test_a_row_of_a_linear_head_has_its_own_metrics(hybrid):
    rows = call("heads", TEXT, "-m", hybrid, "--select", "linear.1.2").rows
    assert [(row["stack"], row["layer"], row["head"]) for row in rows] == [("linear", "1", "2")]
    assert rows[0]["entropy"] == ""
    assert float(rows[0]["decay_length"]) > 0


def test_a_table_of_one_stack_names_it_with_each_head(hybrid):
    done = call("relations", TEXT, "-m", hybrid, "--select", "linear.1.2", "--format", "table")
    assert "linear L1H2" in done.out.decode()


def test_tokens_of_stacks_without_a_chosen_head_are_not_listed(hybrid):
    keys = call("keys", TEXT, "-m", hybrid, "--select", "linear.1.2")
    assert {row["stack"] for row in keys.rows} == {"linear"}
    assert sum(float(row["received"]) for row in keys.rows) == pytest.approx(1, abs=1e-5)
    assert "linear heads: |w| as a share of its row" in keys.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("relations", "--select", "linear.1.2", "--group", "words"), "linear heads: |w| as a share of its row"),
        (("relations", "--weights", "scores"), "not measured: linear layers 0-2: they have no logits"),
        (("compare", "--compare-text", "the bank"), "not compared: linear layers 0-2, which have no softmax"),
        (("rollout",), "layers 0-2 have no attention: the rollout passes over them"),
    ],
)
def test_a_line_says_what_linear_layers_lack(hybrid, arguments, says):
    command, *options = arguments
    done = call(command, TEXT, "-m", hybrid, *options).ok()
    assert says in done.err
    assert ("gated delta rule" in done.err) == ("linear.1.2" in options)


def test_of_chosen_heads_of_attention_nothing_is_missing(hybrid):
    assert "not measured" not in call("relations", TEXT, "-m", hybrid, "--weights", "scores", "--select", "3").err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("heads", "--select", "1"), "its map is linear.1"),
        (("explain", "--head", "linear.1.2"), "`attnscope draw TEXT --select linear.1.2` draws its map"),
    ],
)
def test_a_refusal_says_where_the_map_of_a_linear_layer_is(hybrid, arguments, says):
    refused = call(arguments[0], TEXT, "-m", hybrid, *arguments[1:])
    assert (refused.code, says in refused.err) == (2, True)


def test_several_texts_read_side_by_side_have_the_linear_layers_of_each_alone(linear):
    texts = [TEXT, "Mary saw John", "river"]
    for text, seen in zip(texts, attnscope.capture(linear, texts), strict=True):
        alone = attnscope.capture(linear, text)
        for layer, own in alone.of("linear").weights.items():
            torch.testing.assert_close(seen.of("linear").weights[layer], own, rtol=1e-4, atol=1e-7)
        for head, other in zip(seen.heads, alone.heads, strict=True):
            assert dict(head.score) == pytest.approx(dict(other.score), rel=1e-4, abs=1e-6, nan_ok=True)


def test_a_corpus_has_the_metrics_of_linear_heads_as_each_text_alone(linear, tmp_path):
    """Texts of other lengths are read side by side."""
    texts = [TEXT, "Mary saw John", "the bank is on the bank of the river"]
    out = attnscope.batch(linear, texts, out=tmp_path / "out", summary=True).folder
    [listed] = (out / "heads").iterdir()
    rows = [row for row in pq.read_table(listed).to_pylist() if row["stack"] == "linear"]
    assert len(rows) == 3 * 12
    for item, text in enumerate(texts):
        alone = {head.name: head.score for head in attnscope.capture(linear, text).heads if head.stack == "linear"}
        of_text = [row for row in rows if row["item"] == item]
        assert len(of_text) == 12
        for row in of_text:
            score = alone[f"linear L{row['layer']}H{row['head']}"]
            for name in ("absolute_mass", "negative_share", "decay_length", "write_gate", "previous_token", "distance"):
                assert row[name] == pytest.approx(score[name], rel=1e-4, abs=1e-6)
            assert row["entropy"] is None
    means = [row for row in pq.read_table(out / "summary.parquet").to_pylist() if row["metric"] == "decay_length"]
    found = {(row["layer"], row["head"]): row["mean"] for row in means if row["stack"] == "linear"}
    of_head = [row["decay_length"] for row in rows if (row["layer"], row["head"]) == (2, 3)]
    assert found[2, 3] == pytest.approx(sum(of_head) / 3)
    ranked = call("heads", str(out), "--sort", "decay_length", "--top", "1").rows
    assert ranked[0]["stack"] == "linear"

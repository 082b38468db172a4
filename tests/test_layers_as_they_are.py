"""Layers as they are: those without attention have their place in tables and pictures, windows draw their edge."""

import json
import operator
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers

import attnscope
from attnscope.cli.head_tables import without_attention
from attnscope.errors import UsageError
from attnscope.export.drawing import Drawing, DrawingOptions, layer_maps, rows_of
from attnscope.export.export import manifest
from attnscope.figures.fonts import Fonts
from attnscope.figures.heads import HeadFigure
from attnscope.figures.metrics import metrics_figure
from attnscope.figures.mosaic import EDGE_COLOUR, prepare_heads
from attnscope.figures.overview import overview_figure
from attnscope.figures.style import Style, edge_boxes
from attnscope.figures.writer import Boxes, drawing
from attnscope.metrics.metrics import SIGNED
from attnscope.model import geometry
from attnscope.model.geometry import geometry_of
from attnscope.model.loading import wrap
from attnscope.model.selection import MIXING
from attnscope.observe.records import with_others
from attnscope.observe.request import Request
from attnscope.utils.display import number_list
from helpers.command_line import call
from helpers.families import tiny_config, tiny_model
from helpers.figures import layer_figure
from helpers.folders import saved
from helpers.parity_models import DECODERS, NESTED, TYPES, roused_model

TEXT = "the financial bank is located on river bank and Mary saw"
EVERY = Request(relations=True, top_k=None, maps="all", weights=True)
CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
HYBRIDS = {
    "jamba": ({}, {0: "ssm", 2: "ssm"}),
    "lfm2": (CONV, {0: "conv", 2: "conv"}),
    "qwen3_next": ({}, {0: "linear", 1: "linear", 2: "linear"}),
}
WINDOWS = {"gemma3_text": ("window", 8), "llama4_text": ("chunk", 8)}


def seen_by(demo, name, **overrides):
    model = roused_model(name, vocab_size=2000, **overrides).eval()
    return attnscope.capture(wrap(model, demo.tokenizer, name), TEXT, request=EVERY), model


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request, demo):
    """What was seen of a hybrid, its model, and what its layers without attention are."""
    overrides, without = HYBRIDS[request.param]
    return (*seen_by(demo, request.param, **overrides), without)


@pytest.fixture(scope="module", params=WINDOWS)
def windowed(request, demo):
    return (seen_by(demo, request.param)[0], *WINDOWS[request.param])


def test_every_layer_has_its_place_in_the_table_of_heads(hybrid):
    seen, model, without = hybrid
    rows = seen.table().to_pylist()
    unread = {layer: what for layer, what in without.items() if layer not in seen.mixing}
    own, of_rules = ([row for row in rows if (row["stack"] in MIXING) == mixes] for mixes in (False, True))
    assert [row["layer"] for row in own] == sorted(row["layer"] for row in own)
    assert {row["layer"]: row["type"] for row in own if row["head"] is None} == unread
    for row in own:
        assert row["stack"] == "decoder"
        assert (row["type"] is None) == (row["head"] is not None) == (row["layer"] not in unread)
        if row["layer"] in unread:
            assert {name for name, value in row.items() if value is not None} == {"layer", "stack", "type"}
    assert {row["layer"] for row in of_rules} == without.keys() - unread
    assert all(row["type"] is None and row["head"] is not None for row in of_rules)
    assert {row["layer"] for row in rows} == set(range(model.config.num_hidden_layers))


def test_the_layers_with_attention_are_the_models_own(hybrid):
    seen, model, without = hybrid
    found = [
        one for one in model(torch.tensor([seen.prompt.ids]), output_attentions=True).attentions if one is not None
    ]
    there = [layer for layer in range(model.config.num_hidden_layers) if layer not in without]
    assert [key.layer for key in seen.weights] == there
    for layer, weights in zip(there, found, strict=True):
        torch.testing.assert_close(seen.weights[layer], weights[0], rtol=0, atol=1e-6)


def test_a_layer_without_attention_has_no_weights_and_the_refusal_names_those_that_have(hybrid):
    seen, _, without = hybrid
    layer, attending = min(without), [key.layer for key in seen.kv_of]
    assert seen.weights.get(layer) is None
    assert layer not in seen.weights
    said = f"layer {layer} has no attention over the text, its type is {without[layer]}; layers with attention: "
    by_layer = (seen.weights, seen.weight_heads, seen.kept_keys, seen.maps.values)
    asked = [partial(operator.getitem, found, layer) for found in by_layer]
    asked += [partial(name, f"L{layer}H0") for name in (seen.head, seen.matrix, seen.heatmap)]
    asked.append(partial(seen.heatmap, layer, 0))
    for ask in (*asked, lambda: seen.uniform(layer)):
        with pytest.raises(KeyError) as refused:
            ask()
        assert isinstance(refused.value, attnscope.AttnscopeError)
        assert str(refused.value) == said + number_list(attending)
    with pytest.raises(KeyError, match="there is no layer 99; layers with attention: "):
        seen.weights[99]


def test_of_selected_heads_other_layers_were_not_asked_for(demo):
    seen = attnscope.capture(demo, TEXT, select="last")
    with pytest.raises(KeyError, match="nothing of layer 0 was kept: it was not asked for; take 3"):
        seen.weights[0]


@pytest.mark.parametrize("command", [attnscope.capture, attnscope.knockout, attnscope.explain, attnscope.why])
def test_every_call_that_takes_heads_says_that_a_layer_has_no_attention(demo, command):
    model = wrap(roused_model("lfm2", vocab_size=2000, **CONV).eval(), demo.tokenizer, "lfm2")
    named = {"select": "0"} if command in (attnscope.capture, attnscope.knockout) else {"head": "L0H0"}
    with pytest.raises(UsageError, match="names layer 0, which has no attention over the text; layers with"):
        command(model, TEXT, **named, **({"key": "bank"} if command is attnscope.knockout else {}))


def test_the_table_has_the_same_columns_for_every_model(hybrid, demo):
    seen, plain = hybrid[0], attnscope.capture(demo, TEXT, request=EVERY).table()
    of_rules = set(SIGNED) if seen.mixing else set()
    assert plain.column_names == [name for name in seen.table().column_names if name not in of_rules]
    assert of_rules < set(seen.table().column_names) or not of_rules
    assert plain.schema.field("type") == seen.table().schema.field("type")
    assert plain["type"].null_count == len(plain)


def test_layers_that_attend_although_they_are_called_something_else_are_read_and_named(demo, monkeypatch):
    monkeypatch.setitem(geometry.TYPES, "full_attention", "conv")
    seen, model = seen_by(demo, "gemma2", num_hidden_layers=2)
    [_, weights] = model(torch.tensor([seen.prompt.ids]), output_attentions=True).attentions
    torch.testing.assert_close(seen.weights[1], weights[0], rtol=0, atol=1e-6)
    assert seen.without == {}
    assert seen.facts["model"]["layers_without_attention"] == {}
    assert seen.facts["model"]["layers_of_unknown_type"] == {"1": "conv"}
    assert without_attention(seen) == ["layers 1 are called conv: keys not known before the pass"]


def test_a_layer_of_an_unknown_type_is_expected_to_attend_and_named(demo, monkeypatch):
    monkeypatch.delitem(geometry.TYPES, "full_attention")
    seen, _ = seen_by(demo, "gemma2", num_hidden_layers=2)
    assert list(seen.weights) == [(0, "decoder"), (1, "decoder")]
    assert without_attention(seen) == ["layers 1 are called full_attention: keys not known before the pass"]


def test_layers_without_attention_never_come_between_heads(hybrid, demo):
    seen, model, without = hybrid
    for sort in ("entropy", "-entropy", "previous_token"):
        rows = seen.table(sort).to_pylist()
        unread = without.keys() - seen.mixing
        assert [row["head"] is None for row in rows] == [False] * len(seen.heads) + [True] * len(unread)
        assert [(row["layer"], row["head"]) for row in rows[: len(seen.heads)]] == [
            (head.layer, head.head) for head in seen.kept_heads(sort)
        ]
    by_layer = [row["layer"] for row in seen.table("layer").to_pylist()]
    assert by_layer == sorted(row["layer"] for row in seen.table().to_pylist())
    some = attnscope.capture(wrap(model, demo.tokenizer, "some"), TEXT, select="last")
    assert {row["layer"] for row in some.table().to_pylist()} == {3}
    assert not set(seen.relations()["layer"].to_pylist()) & unread
    assert seen.table().to_pandas().groupby(["stack", "layer", "head"], observed=True).ngroups == len(seen.heads)


def test_layers_without_attention_are_grey_rows_of_the_overview(hybrid):
    seen, _, without = hybrid
    drawn = Drawing.of(seen)
    with drawing(Fonts()):
        figure = overview_figure(rows_of(drawn.maps, drawn.without), Style())
    ax = figure.axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1", "2", "3"]
    middles = dict(zip(range(4), ax.get_yticks(), strict=True))
    named = {text.get_position()[1]: text.get_text() for text in ax.texts}
    assert named == {middles[layer]: what for layer, what in without.items()}
    assert "grey rows: layers without attention" in figure.texts[1].get_text()
    assert figure.texts[0].get_text().startswith(f"{4 - len(without)} layer")


def test_layers_without_attention_are_grey_rows_of_the_metrics(hybrid):
    seen, _, without = hybrid
    drawn = Drawing.of(seen)
    assert drawn.layers == (0, 1, 2, 3)
    for panel in drawn.panels:
        assert dict(enumerate(panel.without_L)) == {layer: without.get(layer, "") for layer in range(4)}
        assert np.isnan(panel.values_LH[list(without)]).all()
    entropy = next(panel for panel in drawn.panels if panel.name == "entropy")
    for head in seen.of("decoder").heads:
        assert entropy.values_LH[head.layer, head.head] == pytest.approx(head.score["entropy"])
    with drawing(Fonts()):
        figure = metrics_figure(drawn.panels[:2], Style(), ["0", "1", "2", "3"])
        words = [text.get_text() for text in figure.axes[0].texts]
    runs = 1 if list(without) == [0, 1, 2] else 2
    assert Counter(words)[next(iter(without.values()))] == runs, "neighbours of one kind share a name"
    assert any("grey rows: layers without attention" in " ".join(text.get_text().split()) for text in figure.texts)


def test_the_command_lists_them_and_its_folder_is_shown(tmp_path):
    folder = saved(tmp_path / "lfm2", "lfm2", vocab_size=2000, **CONV)
    out = tmp_path / "out"
    done = call("heads", TEXT, "-m", str(folder), "--out", str(out), "--figures", "overview", "--sort", "entropy")
    rows = done.rows
    assert [(row["layer"], row["head"], row["entropy"], row["stack"], row["type"]) for row in rows[-2:]] == [
        ("0", "0", "", "channels", ""),
        ("2", "0", "", "channels", ""),
    ]
    as_json = call("heads", TEXT, "-m", str(folder), "--format", "jsonl").out.decode().splitlines()
    assert Counter(json.loads(line)["type"] for line in as_json) == {None: 10}
    assert (
        "layers 0,2: short convolution; mean |w| over channels"
        in call("heads", TEXT, "-m", str(folder), columns=100).err
    )
    assert "2 layers x 4 heads (2 kv), 2 conv" in done.err
    call("view", str(out), "--from-tables", "--out", str(tmp_path / "page.html")).ok()
    facts = json.loads(call("info", str(folder), "--format", "json").out)
    rule = {"rule": "short convolution", "maps": "channels", "heads": 1, "why": None}
    assert facts["layers_without_attention"] == [
        {"stack": "decoder", "layer": layer, "type": "conv", **rule} for layer in (0, 2)
    ]
    assert [layer["layer"] for layer in facts["attention_layers"]] == [1, 3]


PARALLEL = ("falcon_h1", "zamba", "zamba2")


def state_spaces(model):
    """The layers of a decoder with a state space among their modules: only those have the logarithm of its A."""
    names = [name for name, _ in model.named_parameters() if name.endswith(".A_log")]
    return {int(name.split(".layers.")[1].split(".")[0]) for name in names}


QUICK = (*PARALLEL, "bamba", "granitemoehybrid")
OTHERS = [pytest.param(one, marks=pytest.mark.slow) for one in TYPES if one not in (*QUICK, *DECODERS)]


@pytest.mark.parametrize("family", [*QUICK, *OTHERS])
def test_what_a_layer_computes_beside_attention_is_what_its_modules_say(family):
    model = tiny_model(family, **NESTED.get(family, {}))
    layers = geometry_of(model.config, count=False).layers
    found = {layer.index for layer in layers if layer.attention and layer.parallel == "ssm"}
    assert found == state_spaces(model) & {layer.index for layer in layers if layer.attention}
    assert bool(found) == (family in PARALLEL)


@pytest.mark.parametrize("family", ["falcon_h1", "zamba2"])
def test_attention_beside_a_state_space_is_said_in_tables_and_pictures(family, demo, tmp_path):
    model = roused_model(family, vocab_size=2000).eval()
    seen = attnscope.capture(wrap(model, demo.tokenizer, family), TEXT, request=EVERY)
    both, alone = sorted(seen.within), sorted(seen.without)
    assert set(both) == {head.layer for head in seen.of("decoder").heads}
    rows = [(row["stack"], row["layer"], row["head"], row["type"]) for row in seen.table().to_pylist()]
    assert seen.mixing == {*both, *alone}
    assert sorted(rows) == sorted((head.stack, head.layer, head.head, None) for head in seen.heads)
    assert {layer for stack, layer, *_ in rows if stack == "linear"} == {0, 1, 2, 3}
    with drawing(Fonts()):
        figure = overview_figure(rows_of(layer_maps(seen), seen.others), Style())
        names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        said = [text.get_text() for text in layer_figure(layer_maps(seen)[0], Style()).texts]
    assert names == [f"{layer} + ssm" if layer in both else str(layer) for layer in range(4)]
    assert any("parallel to the attention: ssm" in text for text in said)
    told = manifest(seen, {}, {})["model"]
    assert told["parallel_to_attention"] == {str(layer): "ssm" for layer in both}
    assert told["layers_without_attention"] == {str(layer): "ssm" for layer in alone}


@pytest.mark.parametrize(
    ("family", "rule", "heads", "words"),
    [("falcon_h1", "Mamba-2", 4, "Mamba-2, 4 heads"), ("zamba", "Mamba", 1, "Mamba, by channel")],
)
def test_info_says_what_a_layer_computes_beside_attention(tmp_path, family, rule, heads, words):
    tiny_config(family).save_pretrained(tmp_path)
    facts = json.loads(call("info", str(tmp_path), "--format", "json").out)
    assert {layer["parallel"] for layer in facts["attention_layers"]} == {"ssm"}
    rules = [(layer["mixing"]["rule"], layer["mixing"]["heads"]) for layer in facts["attention_layers"]]
    assert rules == [(rule, heads)] * len(rules)
    assert f"full + ssm: {words}" in call("info", str(tmp_path), columns=120).out.decode()


def test_info_says_of_every_layer_its_rule_or_why_there_is_none(tmp_path):
    tiny_config("nemotron_h").save_pretrained(tmp_path)
    facts = json.loads(call("info", str(tmp_path), "--format", "json").out)
    rules = [
        (layer["type"], layer["rule"], layer["heads"], layer["why"]) for layer in facts["layers_without_attention"]
    ]
    assert rules == [
        ("ssm", "Mamba-2", 4, None),
        ("moe", None, None, "mixes no tokens"),
        ("mlp", None, None, "mixes no tokens"),
    ]
    shown = call("info", str(tmp_path), columns=120).out.decode()
    assert "ssm: Mamba-2" in shown
    assert "mlp: mixes no tokens" in shown


def test_info_lists_the_layers_of_every_stack(tmp_path):
    config = transformers.BartConfig(
        d_model=64, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=8
    )
    config.save_pretrained(tmp_path)
    facts = json.loads(call("info", str(tmp_path), "--format", "json").out)
    found = [(one["stack"], one["layer"], one["heads"], one["head_dim"]) for one in facts["attention_layers"]]
    assert found == [
        *(("encoder", layer, 4, 16) for layer in range(2)),
        *(("decoder", layer, 8, 8) for layer in range(3)),
        *(("cross", layer, 8, 8) for layer in range(3)),
    ]
    assert facts["costs"][0]["all_matrices_bytes"] == (2 * 4 + 3 * 8 + 3 * 8) * 128 * 128 * 4
    shown = call("info", str(tmp_path), columns=120).out.decode()
    assert "encoder 2, decoder 3, cross 3 layers" in shown
    lines = [line.split()[:4] for line in shown.splitlines()]
    rows = [line for line in lines if line and line[0] in ("encoder", "decoder", "cross")]
    assert rows == [["encoder", "0-1", "full", "4"], ["decoder", "0-2", "full", "8"], ["cross", "0-2", "full", "8"]]


def first_key(kind, size, query):
    return max(0, query - size + 1) if kind == "window" else query // size * size


def test_the_edge_of_a_window_is_that_of_the_first_key_seen(windowed):
    seen, kind, size = windowed
    maps, queries = layer_maps(seen)[0], len(seen.prompt)
    assert maps.window == f"{kind} {size}"
    boxes = edge_boxes(maps.values_HQK[0], (maps.window, maps.ahead), (0.25, 0.5)).tolist()
    down = [(key - 0.25, query, key, query + 1) for query in range(queries) if (key := first_key(kind, size, query))]
    steps = [(first_key(kind, size, query - 1), first_key(kind, size, query), query) for query in range(1, queries)]
    across = [(max(0, a - 0.25), query, b, query + 0.5) for a, b, query in steps if a < b]
    assert sorted(map(tuple, boxes)) == sorted((*down, *across))
    assert len(down) > 3 < queries - size + 1


def edges_in(figure):
    found = [one for ax in figure.axes for one in ax.collections if isinstance(one, Boxes)]
    return sum(len(one.boxes) for one in found if (one.colours == int(EDGE_COLOUR[1:3], 16)).all() and len(one.boxes))


def test_pictures_draw_the_edge_and_say_the_window(windowed, tmp_path):
    seen, kind, size = windowed
    full, maps = layer_maps(seen)[3], layer_maps(seen)[0]
    one = len(edge_boxes(maps.values_HQK[0], (maps.window, maps.ahead)))
    with drawing(Fonts()):
        for shown, count, note in ((maps, one, f"{kind} {size}"), (full, 0, "")):
            layer = layer_figure(shown, Style())
            assert edges_in(layer) == count * len(shown.heads)
            [job] = prepare_heads([(tmp_path / "a.png", shown, 0)], Style())
            head = HeadFigure.of(job, Style())
            head.show(job)
            assert edges_in(head.figure) == count
            assert job.note == note
            said = " ".join(text.get_text() for figure in (layer, head.figure) for text in figure.texts)
            assert (f"{kind} {size}" in said) == (f"black line: the edge of a {kind}" in said) == bool(note)


def test_a_window_that_holds_the_text_has_no_edge(windowed):
    seen, _, size = windowed
    maps = layer_maps(seen)[0]
    short = maps.values_HQK[0, :size, :size]
    assert len(edge_boxes(short, (maps.window, False))) == 0
    assert len(edge_boxes(maps.values_HQK[0], ("", False))) == 0


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gemma3_text", {"sliding_window": 8}, "window 8"),
        ("gemma3_text", {"sliding_window": 8, "use_bidirectional_attention": True}, "window 4 to either side"),
        ("ultrabert", {"sliding_window": 4}, "window 4 to either side"),
    ],
)
def test_a_window_is_said_as_the_keys_that_a_query_sees(family, changes, words, demo):
    """Three families count the same reach in ways of their own."""
    config = tiny_config(family, vocab_size=2000, **changes)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    seen = attnscope.capture(wrap(model, demo.tokenizer, family), list(range(6, 30)), request=Request(weights=True))
    reach = int(words.split()[1])
    for key, keys in seen.visible.items():
        if keys != "full":
            assert keys == words
            seen_K = (seen.weights[key][:, 12] > 0).any(0)  # of the query 12
            either = "either side" in words
            assert seen_K.nonzero()[:, 0].tolist() == [*range(12 - reach + (not either), 13 + either * reach)]
    assert words in seen.visible.values()


def test_a_window_to_both_sides_has_two_edges():
    place = np.arange(6)
    values_QK = np.where(abs(place[:, None] - place) <= 1, 0.5, np.nan)
    both = {tuple(box) for box in edge_boxes(values_QK, ("window 1", True), (0.25, 0.25)).tolist()}
    left = {tuple(box) for box in edge_boxes(values_QK, ("window 1", False), (0.25, 0.25)).tolist()}
    assert left < both
    assert (2, 0, 2.25, 1) in both, "right of the last key that query 0 sees"
    assert {(a, b) for a, b, _, _ in both - left} == {
        *((query + 2, query) for query in range(4)),
        *((query + 1, query - 0.25) for query in range(1, 5)),
    }


def test_a_sheet_of_heads_of_several_layers_has_no_window(windowed):
    seen, _, _ = windowed
    sheet = Drawing.of(seen, DrawingOptions(sort="focus", top=None)).sheet
    assert sheet.window == ""
    assert replace(sheet, window="x").window == "x"


def test_a_layer_without_attention_has_its_row_in_the_order_of_layers():
    stack = pa.array(["decoder"] * 2).dictionary_encode()
    listed = pa.table({"layer": pa.array([1, 2], pa.int32()), "head": pa.array([0, 0], pa.int32()), "stack": stack})
    rows = with_others(listed, [("decoder", 0, "mamba")], None).to_pylist()
    assert [(row["layer"], row["head"], row["type"]) for row in rows] == [
        (0, None, "mamba"),
        (1, 0, None),
        (2, 0, None),
    ]

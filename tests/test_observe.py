"""Observations: relations, groups and maps, each against index arithmetic over output_attentions, on both engines.

Shapes: H head, Q query, K key.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.testing import assert_close

from attnscope.attention.operator import UniformAttention
from attnscope.attention.spec import Visibility
from attnscope.errors import InputError
from attnscope.export.drawing import layer_maps
from attnscope.figures import Style
from attnscope.figures.mosaic import prepare_heads
from attnscope.hooks.engines import engine_named
from attnscope.inputs.prompt import from_text
from attnscope.inputs.tokens import TokenMatch, TokenSelection
from attnscope.metrics.metrics import Texts
from attnscope.model.loading import load
from attnscope.model.options import LoadOptions
from attnscope.observe.collect import observe
from attnscope.observe.collectors.entries import Maps
from attnscope.observe.observation import Observation
from attnscope.observe.request import CaptureSpec, Layer, LayerKey, Request, View
from attnscope.observe.run import read
from attnscope.utils.tables import rows
from helpers.own import attentions
from helpers.parity_models import as_loaded, roused_model

TEXT = "The bank is by the river. The river is by the bank, and the bank is wide. We sat there and read."


@pytest.fixture(scope="module")
def demo_sdpa():
    return load(LoadOptions(attention="sdpa"))


@pytest.fixture(params=["eager", "fused", "fused, listening"])
def seen_by(request: pytest.FixtureRequest, demo, demo_sdpa):
    """A function that observes a text with one of the engines."""

    def see(wanted: Request, text: str = TEXT, chosen: TokenSelection | None = None) -> Observation:
        loaded = demo if request.param == "eager" else demo_sdpa
        engine = engine_named(request.param.split(",")[0], listen="listening" in request.param)
        asked = None if chosen is None else [chosen]
        return observe(loaded, [from_text(demo.tokenizer, text)], wanted, engine=engine, chosen=asked)[0]

    return see


def numbers(table: pa.Table) -> dict[str, np.ndarray]:
    """{column: numpy array}."""
    return {name: table[name].to_numpy() for name in table.column_names}


def test_relations_are_the_largest_weights(demo, seen_by) -> None:
    seen = seen_by(Request(relations=True, top_k=3))
    layers = attentions(demo.model, seen.prompt.ids)
    found = list(rows(seen.relations()))
    expected = sum(min(3, i + 1) for i in range(len(seen.prompt))) * 24
    assert len(found) == expected
    for layer, head, kv_head, query, query_token, key, key_token, weight, _ in found:
        assert (kv_head, query_token, key_token) == (head // 2, seen.prompt.tokens[query], seen.prompt.tokens[key])
        row = layers[layer][head, query]
        assert weight == pytest.approx(float(row[key]), abs=1e-5)
        assert (row > row[key] + 1e-6).sum() < 3


def test_all_relations_are_every_visible_pair_once(demo, seen_by) -> None:
    seen = seen_by(Request(view=View(heads={1: (2,)}), relations=True, top_k=None))
    columns = numbers(seen.relations())
    pairs = set(zip(columns["query"].tolist(), columns["key"].tolist(), strict=True))
    n = len(seen.prompt)
    assert pairs == {(i, j) for i in range(n) for j in range(i + 1)}
    assert len(columns["query"]) == len(pairs)
    sums = np.bincount(columns["query"], weights=columns["weight"])
    np.testing.assert_allclose(sums, 1, atol=1e-5)


@pytest.mark.parametrize("group", ["words", "sentences"])
def test_groups_sum_over_keys_and_average_over_queries(demo, seen_by, group: str) -> None:
    seen = seen_by(Request(relations=True, top_k=None, group=group))
    spans = getattr(seen.prompt, group)
    layers = attentions(demo.model, seen.prompt.ids)
    found = np.zeros((4, 6, len(spans), len(spans)))
    columns = numbers(seen.relations())
    found[columns["layer"], columns["head"], columns["query"], columns["key"]] = columns["weight"]
    for row, asking in enumerate(spans):
        for column, asked in enumerate(spans):
            cell = torch.stack(layers)[:, :, asking.start : asking.stop, asked.start : asked.stop]
            np.testing.assert_allclose(found[:, :, row, column], cell.sum(-1).mean(-1).numpy(), atol=1e-5)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)


def chosen(query: tuple[int, ...] | None = None, key: tuple[int, ...] | None = None) -> TokenSelection:
    """What a person asked about, found at these positions."""
    return TokenSelection(*(None if places is None else TokenMatch("", places) for places in (query, key)))


CHOSEN = [
    ((7,), None),
    ((0, 3, 4, 20), None),
    (None, (2, 8)),
    (None, tuple(range(1, 20))),
    ((5, 13, 26), (0, 4, 9, 20)),
]


MOSTLY = pytest.mark.parametrize(
    "seen_by", ["eager", "fused", pytest.param("fused, listening", marks=pytest.mark.families)], indirect=True
)


KINDS = [("heads", 2), ("heads", None), ("some heads", 1), ("kv heads", 3), ("scores", None)]


@MOSTLY
@pytest.mark.parametrize(
    ("kind", "top_k", "query", "key"),
    [  # by default each kind twice, and each choice
        pytest.param(*kind, *places, marks=[] if (k - p) % 5 < 2 else [pytest.mark.families])
        for k, kind in enumerate(KINDS)
        for p, places in enumerate(CHOSEN)
    ],
    ids=str,
)
def test_relations_of_chosen_tokens(demo, seen_by, query, key, kind: str, top_k: int | None) -> None:
    """Only the chosen rows and columns, and of them the largest: also where they are not among the row's largest."""
    heads = {1: (2, 3), 3: (5,)} if kind == "some heads" else None
    view = View("scores" if kind == "scores" else "softmax", kind == "kv heads", heads)
    wanted = Request(view=view, metrics=(), relations=True, top_k=top_k)
    seen = seen_by(wanted, chosen=chosen(query, key))
    n, layers = len(seen.prompt), torch.stack(attentions(demo.model, seen.prompt.ids))
    layers = (layers.unflatten(1, (3, 2)).mean(2) if kind == "kv heads" else layers).tolist()
    found: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
    for layer, head, kv_head, i, token, j, key_token, weight, _ in rows(seen.relations()):
        assert (token, key_token) == (seen.prompt.tokens[i], seen.prompt.tokens[j])
        found.setdefault((layer, kv_head if head is None else head, i), []).append((j, weight))
    whole = [(layer, head) for layer in range(4) for head in range(len(layers[0]))]
    expected = whole if heads is None else [(1, 2), (1, 3), (3, 5)]
    for layer, head in expected:
        for i in query or range(n):
            visible = [j for j in key or range(n) if j <= i]
            largest = sorted((layers[layer][head][i][j] for j in visible), reverse=True)[:top_k]
            got = found.pop((layer, head, i), [])
            weights = [layers[layer][head][i][j] for j, _ in got]
            assert weights == pytest.approx(largest, abs=1e-5)
            assert len({j for j, _ in got}) == len(got)
            assert {j for j, _ in got} <= set(visible)
            if kind == "scores" and got:  # of one row: differences of logits are logarithms of the weights' ratios
                logits = [logit for _, logit in got]
                assert np.exp(logits[:1] - np.array(logits)) == pytest.approx(weights[0] / np.array(weights), rel=1e-3)
            else:
                assert [weight for _, weight in got] == pytest.approx(weights, abs=1e-5)
    assert found == {}


def test_chosen_keys_need_not_be_among_the_largest(demo, seen_by) -> None:
    seen = seen_by(Request(relations=True, top_k=1, query="-1", key="3"))
    last, columns = len(seen.prompt) - 1, numbers(seen.relations())
    layers = torch.stack(attentions(demo.model, seen.prompt.ids))
    assert set(zip(columns["query"].tolist(), columns["key"].tolist(), strict=True)) == {(last, 3)}
    np.testing.assert_allclose(columns["weight"], layers[:, :, last, 3].flatten().numpy(), atol=1e-5)
    assert (layers[:, :, last].argmax(-1) != 3).all()


@MOSTLY
@pytest.mark.parametrize(
    ("group", "by_kv", "query", "key"),
    [
        pytest.param(*group, *places, marks=[] if p in (g, 2 + g, 4) else [pytest.mark.families])
        for g, group in enumerate([("words", False), ("sentences", True)])
        for p, places in enumerate(CHOSEN)
    ],
    ids=str,
)
def test_a_chosen_token_stands_for_its_word_or_sentence(demo, seen_by, query, key, group: str, by_kv: bool) -> None:
    wanted = Request(view=View(by_kv=by_kv), metrics=(), relations=True, top_k=None, group=group)
    seen = seen_by(wanted, chosen=chosen(query, key))
    spans, layers = getattr(seen.prompt, group), torch.stack(attentions(demo.model, seen.prompt.ids))
    layers = layers.unflatten(1, (3, 2)).mean(2) if by_kv else layers

    def meant(places: tuple[int, ...] | None) -> set[int]:
        return {
            number
            for number, span in enumerate(spans)
            if places is None or any(span.start <= place < span.stop for place in places)
        }

    columns = numbers(seen.relations())
    found = np.zeros((4, layers.shape[1], len(spans), len(spans)))
    found[columns["layer"], columns["kv_head" if by_kv else "head"], columns["query"], columns["key"]] = columns[
        "weight"
    ]
    asking, asked = meant(query), meant(key)
    for row, ours in enumerate(spans):
        for column, theirs in enumerate(spans):
            cell = layers[:, :, ours.start : ours.stop, theirs.start : theirs.stop].sum(-1).mean(-1).numpy()
            cell = cell if row in asking and column in asked else 0 * cell
            np.testing.assert_allclose(found[:, :, row, column], cell, atol=1e-5)
    assert len(columns["weight"]) > 0


@pytest.mark.parametrize(
    ("group", "by_kv"),
    [
        (None, False),
        ("words", True),
        *(pytest.param(*one, marks=pytest.mark.families) for one in ((None, True), ("words", False))),
    ],
)
def test_texts_of_a_batch_have_their_own_chosen_tokens(demo, seen_by, group, by_kv: bool) -> None:
    texts = [TEXT, "We sat there.", "The river is wide and the bank is green and the mill is old."]
    prompts = [from_text(demo.tokenizer, text) for text in texts]
    asked = [chosen((1, 4, 20), (2, 0)[1:]), chosen(None, (1, 2)), chosen((9,))]
    wanted = Request(view=View(by_kv=by_kv), metrics=(), relations=True, top_k=2, group=group)
    together = observe(demo, prompts, wanted, chosen=asked)
    for text, tokens, seen in zip(texts, asked, together, strict=True):
        ours, theirs = (numbers(one.relations()) for one in (seen, seen_by(wanted, text, tokens)))
        assert len(ours["weight"]) > 0
        for name in ("layer", "kv_head", "query", "query_token"):
            assert ours[name].tolist() == theirs[name].tolist()
        np.testing.assert_allclose(ours["weight"], theirs["weight"], atol=1e-5)


def test_heads_of_a_kv_head_are_averaged(demo, seen_by) -> None:
    seen = seen_by(Request(view=View(by_kv=True), relations=True, top_k=1, maps="all"))
    layers = attentions(demo.model, seen.prompt.ids)
    assert [head.name for head in seen.heads[:3]] == ["L0KV0", "L0KV1", "L0KV2"]
    for layer, matrices in enumerate(layers):
        expected = torch.stack([(matrices[2 * g] + matrices[2 * g + 1]) / 2 for g in range(3)])
        found = np.nan_to_num(seen.maps.values[layer])
        assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=0)
    assert all(row[1] is None for row in rows(seen.relations()))


def test_a_head_has_the_kv_head_that_it_shares(demo) -> None:
    seen = observe(demo, [from_text(demo.tokenizer, "the bank")], Request())[0]
    expected = {(layer, 2 * group + one): group for layer in range(4) for group in range(3) for one in range(2)}
    assert {(head.layer, head.head): head.kv_head for head in seen.heads} == expected
    assert {(row["layer"], row["head"]): row["kv_head"] for row in seen.table().to_pylist()} == expected


def test_scores_are_logits_and_their_softmax_the_weights(demo, seen_by) -> None:
    seen = seen_by(Request(view=View(weights="scores"), maps="all", relations=True))
    for layer, matrices in enumerate(attentions(demo.model, seen.prompt.ids)):
        logits = torch.from_numpy(seen.maps.values[layer]).nan_to_num(-torch.inf)
        assert_close(logits.softmax(-1), matrices, atol=1e-5, rtol=0)
        assert logits.nan_to_num(neginf=0).abs().max() > 1.5  # not weights under another name
    assert "score" in seen.relations().column_names


def test_the_strongest_relation_stands_furthest_above_uniform_attention(demo, seen_by) -> None:
    for key_zero in (False, True):
        seen = seen_by(Request(key_zero=key_zero))
        layers = attentions(demo.model, seen.prompt.ids)
        for head in seen.heads:
            matrix = layers[head.layer][head.head]
            first = 0 if key_zero else 1
            excess = {
                (i, j): float(matrix[i, j]) - 1 / (i + 1)
                for i in range(1, len(seen.prompt))
                for j in range(first, i + 1)
            }
            best = head.strongest
            assert excess[best.query, best.key] == pytest.approx(max(excess.values()), abs=1e-5)
            assert best.weight == pytest.approx(float(matrix[best.query, best.key]), abs=1e-5)


def test_the_top_key_is_the_one_that_receives_most(demo, seen_by) -> None:
    seen = seen_by(Request())
    received, total = attentions(demo.model, seen.prompt.ids), np.zeros(len(seen.prompt))
    for head in seen.heads:
        masses = [float(column.sum()) / len(seen.prompt) for column in received[head.layer][head.head].T]
        assert head.top_key_mass == pytest.approx(max(masses), abs=1e-6)
        assert masses[head.top_key] == pytest.approx(max(masses), abs=1e-6)
        assert head.score["sink"] == pytest.approx(masses[0], abs=1e-6)
        total += masses
    assert len({head.top_key for head in seen.heads}) > 2
    np.testing.assert_allclose(seen.received, total / len(seen.heads), atol=1e-6)
    columns = seen.table().select(["top_key", "top_key_token"]).to_pydict()
    assert columns["top_key_token"] == [seen.prompt.tokens[key] for key in columns["top_key"]]


def test_what_keys_receive_is_of_the_kept_heads_and_of_the_mean_of_kv_heads(demo, seen_by) -> None:
    seen = seen_by(Request(view=View(by_kv=True, heads={1: (2,), 3: (0, 1)})))
    layers = attentions(demo.model, seen.prompt.ids)
    pairs = {(1, 1): layers[1][2:4].mean(0), (3, 0): layers[3][0:2].mean(0)}
    for head in seen.kept_heads():
        masses = pairs[head.layer, head.kv_head].mean(0)
        assert (head.top_key, head.top_key_mass) == (int(masses.argmax()), pytest.approx(float(masses.max()), abs=1e-6))
    np.testing.assert_allclose(seen.received, torch.stack([one.mean(0) for one in pairs.values()]).mean(0), atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "by_kv"),
    [
        ("sum", False),
        ("max", True),
        *(pytest.param(*one, marks=pytest.mark.families) for one in (("sum", True), ("max", False))),
    ],
)
def test_a_binned_picture_says_the_true_mean_mass_of_key_0(demo, seen_by, rule: str, by_kv: bool) -> None:
    seen = seen_by(Request(view=View(by_kv=by_kv), maps="all", bin_rule=rule, split_sink=True, map_side=10))
    for maps, matrices in zip(layer_maps(seen), attentions(demo.model, seen.prompt.ids), strict=True):
        assert maps.bin_size > 1
        mass_H = matrices[:, 1:, 0].mean(-1)
        expected = mass_H.view(-1, 2).mean(-1).tolist() if by_kv else mass_H.tolist()
        assert list(maps.key0) == pytest.approx(expected, abs=1e-6)
        at_key0 = replace(maps, sinks=())  # whatever each rests on
        jobs = [(Path(), at_key0, index) for index in range(len(maps.heads))]
        for head, mass in zip(prepare_heads(jobs, Style(sink="mask")), expected, strict=True):
            assert f"without key 0 (<s>), mean mass {mass:.2f} (" in head.note


@pytest.mark.parametrize(
    ("rule", "split_sink"),
    [
        ("sum", True),
        ("max", False),
        *(pytest.param(*one, marks=pytest.mark.families) for one in (("sum", False), ("max", True))),
    ],
)
def test_binned_maps_keep_rows_or_maxima(demo, seen_by, rule: str, split_sink: bool) -> None:
    seen = seen_by(Request(maps="all", bin_rule=rule, split_sink=split_sink, map_side=10))
    maps, layers = seen.maps, attentions(demo.model, seen.prompt.ids)
    n, size = len(seen.prompt), maps.bin_size
    assert size == -(-n // 10)
    rows = [range(a, min(n, a + size)) for a in range(0, n, size)]
    columns = [range(1), range(1, size), *rows[1:]] if split_sink else rows
    for (layer, _), values_HQK in maps.values.items():
        assert values_HQK.shape == (6, len(rows), len(columns))
        for r, queries in enumerate(rows):
            for c, keys in enumerate(columns):
                cell = layers[layer][:, queries][:, :, keys]
                if queries[-1] < keys[0]:
                    assert np.isnan(values_HQK[:, r, c]).all()
                    continue
                expected = cell.sum(-1).mean(-1) if rule == "sum" else cell.amax((-1, -2))
                np.testing.assert_allclose(values_HQK[:, r, c], expected.numpy(), atol=1e-5)
        if rule == "sum":
            np.testing.assert_allclose(np.nansum(values_HQK, -1), 1, atol=1e-5)


ROLES = "role", "text_role", "atlas_roles"


def test_a_batch_gives_what_one_by_one_gives(demo, seen_by) -> None:
    """Field mistake 1: a list of inputs must not take another path than one input."""
    texts = [TEXT, "We sat there.", "The river is wide and the bank is green and the mill is old."]
    prompts = [from_text(demo.tokenizer, text) for text in texts]
    wanted = Request(relations=True, top_k=4)
    together = observe(demo, prompts, wanted)
    for text, seen in zip(texts, together, strict=True):
        alone = seen_by(wanted, text)
        expected, found = seen.table(), alone.table()
        for name in found.column_names:
            if name in (
                *ROLES,
                "layer",
                "head",
                "kv_head",
                "near_uniform",
                "top_key",
                "top_key_token",
                "stack",
                "type",
            ):
                assert found[name].to_pylist() == expected[name].to_pylist()
            else:
                np.testing.assert_allclose(found[name].to_numpy(), expected[name].to_numpy(), atol=1e-5, rtol=1e-5)
        ours, theirs = numbers(seen.relations()), numbers(alone.relations())
        assert ours["query_token"].tolist() == theirs["query_token"].tolist()
        np.testing.assert_allclose(ours["weight"], theirs["weight"], atol=1e-5)


def test_the_library_in_three_lines(demo) -> None:
    import attnscope

    model = attnscope.load("demo")
    seen = attnscope.capture(model, TEXT, layers=[1, 3])
    assert [key.layer for key in seen.weights] == [1, 3]
    assert torch.equal(seen.weights[3], attentions(demo.model, seen.prompt.ids)[3])
    assert len(attnscope.__all__) == 27


def test_a_question_asked_on_another_device_is_one_question():
    """Questions with tensors are told apart by the tensors themselves: a second copy would be another question."""
    visible = Visibility(300, 300, device=torch.device("meta"))
    P = UniformAttention(visible)
    assert P.device.type == "meta"
    layer = Layer(LayerKey(0), P, 1, Texts(torch.zeros(1, 300), torch.tensor([300])))
    probe = Maps(300, side=20)
    assert probe.questions(layer) == probe.questions(layer) != []


def test_each_text_of_a_batch_has_its_own_queries(demo):
    prompts = [from_text(demo.tokenizer, text) for text in ("the bank", "the bank of the river")]
    seen = observe(demo, prompts, Request(query="last"))
    assert [one.chosen.query.positions for one in seen] == [(len(prompt) - 1,) for prompt in prompts]


def test_no_other_length_is_proposed_to_a_model_that_adds_its_own_tokens_to_every_text(demo):
    model = replace(as_loaded(roused_model("cpmant")), tokenizer=demo.tokenizer)
    for tokens in (3, 26):
        with pytest.raises(InputError, match=rf"the {tokens} tokens .* adds tokens to this text; choose another$"):
            read(model, CaptureSpec(list(range(10, 10 + tokens))))

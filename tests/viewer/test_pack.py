"""Weights in bytes: what the page holds, read back by another reader, is the model's own to half a step.

Shapes: H head, Q query, K key, R row, k kept key.
"""

import numpy as np
import pytest

import attnscope
from attnscope.observe.request import Request, View
from attnscope.viewer.pack import Blobs, packed_maps
from attnscope.viewer.page import About, Plan, page_of
from attnscope.viewer.page_data import Side, first_key
from helpers.families import tiny_model
from helpers.own import attentions
from helpers.pages import Read

TEXT = "The bank is by the river. The river is by the bank, and the bank is wide. We sat there and read."
HALF = 0.5 + 1e-4  # of a step, and what float32 rounds


def own_weights(model, ids) -> list[np.ndarray]:
    """The model's own matrices, (H, Q, K) per layer."""
    return [layer.float().numpy() for layer in attentions(model, ids)]


def paged(seen, plan: Plan) -> Read:
    return Read(page_of([Side(seen)], plan, About()).html)


def steps_off(read: Read, own: list[np.ndarray]) -> float:
    """The largest difference between the page's maps and the model's matrices, in steps of each head."""
    entries = {(entry["at"], entry["head"]): entry for entry in read.said["sides"][0]["maps"]}
    return max(np.abs(read.map(one) - own[at][head]).max() / one["scale"] for (at, head), one in entries.items())


@pytest.mark.parametrize("engine", ["eager", "fused"])
@pytest.mark.parametrize("precision", [8, 16])
def test_the_page_holds_the_models_own_weights_to_half_a_step(demo, engine, precision):
    seen = attnscope.capture(demo, TEXT, request=Request(weights=True), engine=engine)
    read, own = Read(seen.page(precision=precision).html), own_weights(demo.model, seen.prompt.ids)
    assert len(read.maps()) == 24
    assert all(entry["bits"] == precision and entry["triangle"] for entry in read.said["sides"][0]["maps"])
    assert 0 < steps_off(read, own) <= HALF + (0.1 if precision == 16 else 0)  # 16 bits: a step is 2e-5 of float32
    own[1][4][8, 3] += 1 / 200
    assert steps_off(read, own) > HALF + 0.1  # the check can fail


def test_a_weight_is_0_only_below_half_a_step():
    step = 1 / 255
    weights = np.array([[[1.0, 0, 0], [0.49 * step, 0.51 * step, 0], [0.5 * step, 1e-9, 1.0]]], np.float32)
    blobs = Blobs()
    [entry] = packed_maps(blobs, weights, 8)
    page = Read(b'<script type="application/octet-stream" id="blob-0">' + blobs.texts[0] + b"</script>")
    assert (page.map(entry)[[1, 1, 2, 2], [0, 1, 0, 1]] > 0).tolist() == [False, True, True, False]
    assert entry["scale"] == pytest.approx(step)


def test_nothing_and_next_to_nothing_are_stored():
    for largest in (0.0, 1e-38):
        blobs = Blobs()
        [entry] = packed_maps(blobs, np.full((1, 2, 2), largest, np.float32), 8)
        assert np.isfinite(entry["scale"])
        assert entry["triangle"] is (largest == 0.0)


def test_weights_above_the_diagonal_are_kept():
    weights = np.random.default_rng(0).random((2, 5, 5), np.float32)
    blobs = Blobs()
    entries = packed_maps(blobs, weights, 16)
    page = Read(b'<script type="application/octet-stream" id="blob-0">' + blobs.texts[0] + b"</script>")
    for entry, expected in zip(entries, weights, strict=True):
        assert not entry["triangle"]
        np.testing.assert_allclose(page.map(entry), expected, atol=1e-5)


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_a_page_that_is_too_small_holds_bins_relations_and_what_was_selected(demo, engine):
    plan = Plan(max_mb=0.1, whole={1: (4,), 3: (0, 5)})
    layers = demo.geometry.attention_layers
    wanted = Request(**plan.request(layers, 200))
    assert (wanted.weights, wanted.maps) == (plan.whole, "all")
    seen = attnscope.capture(demo, TEXT * 8, request=wanted, engine=engine)
    check_shrunk(paged(seen, plan), own_weights(demo.model, seen.prompt.ids))


def test_matrices_that_turn_out_too_many_are_made_smaller(demo):
    seen = attnscope.capture(demo, TEXT * 9)
    read = Read(seen.page(max_mb=0.15, select="1.4,3.0,3.5").html)
    check_shrunk(read, own_weights(demo.model, seen.prompt.ids))


def test_relations_of_chosen_keys_alone_are_not_told_as_the_strongest(demo):
    request = attnscope.Request(relations=True, maps="all", map_side=20)
    seen = attnscope.capture(demo, TEXT * 8, request=request, key="first")
    assert Read(seen.page().html).said["sides"][0]["relations"] is None


def check_shrunk(read: Read, own: list[np.ndarray]) -> None:
    """Three heads are whole, the others binned with their strongest keys, as counted out here."""
    [side] = read.said["sides"]
    binned = [entry for entry in side["maps"] if entry["bin"] > 1]
    whole = {(entry["at"], entry["head"]) for entry in side["maps"] if entry["bin"] == 1}
    assert whole == {(1, 4), (3, 0), (3, 5)}
    assert len(binned) == 21
    for entry in binned:
        weights, size = own[entry["at"]][entry["head"]], entry["bin"]
        count = len(weights)
        assert entry["rows"] == -(-count // size)
        expected = np.zeros((entry["rows"], entry["rows"]))
        query, key = np.tril_indices(count)
        mean_of = np.minimum(size, count - query // size * size)
        np.add.at(expected, (query // size, key // size), weights[query, key] / mean_of)
        np.testing.assert_allclose(read.map(entry), expected, atol=HALF * entry["scale"])
    related = read.relations()
    assert related.keys() == {(entry["at"], entry["head"]) for entry in binned}
    for (at, head), (keys, weights) in related.items():
        step, count = side["relations"]["scale"], side["relations"]["k"]
        best = np.sort(own[at][head])[:, ::-1][:, :count]
        assert ((keys >= 0).sum(1) == np.minimum(np.arange(len(keys)) + 1, count)).all()
        np.testing.assert_allclose(weights, best, atol=HALF * step + 5e-6)  # engines differ by 2e-6
        query, place = np.nonzero(keys >= 0)
        known = own[at][head][query, keys[query, place]]
        np.testing.assert_allclose(known, best[query, np.arange(len(query)) - starts(query)], atol=1e-6)
    assert "21 of 24 heads" in read.said["left_out"][0]


def starts(sorted_rows: np.ndarray) -> np.ndarray:
    """Of each entry, the place of the first of its row."""
    return np.searchsorted(sorted_rows, sorted_rows)


def softmax(logits: np.ndarray, sink: float | None) -> np.ndarray:
    logits = logits if sink is None else np.concatenate([logits, np.full((len(logits), 1), sink)], 1)
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return (shares / shares.sum(1, keepdims=True))[:, : len(logits)]


@pytest.mark.parametrize(
    ("family", "has"),
    [
        *(("llama", ""), ("gemma2", "cap"), ("gpt_oss", "sink"), ("mistral", "first"), ("llama4_text", "first")),
        *(("doge", "bias"), ("deepseek_v32", "bias")),  # a bias of its own; keys that the layer chooses
    ],
)
def test_the_steps_make_the_models_weights(demo, family, has):
    """q, k, scale, cap, bias, sink and the first visible key give the weights that the model returned."""
    ids, model = list(range(3, 25)), tiny_model(family)
    loaded = attnscope.wrap(model, demo.tokenizer)
    seen = attnscope.capture(loaded, ids, request=Request(weights=True, operands=True))
    read, own = paged(seen, Plan()), own_weights(model, ids)
    [side] = read.said["sides"]
    heads, found = side["steps"]["heads"], set()
    assert len(heads) == len(side["heads"])
    for one in heads:
        count, dim = len(ids), one["dim"]
        sizes = [count * dim, count * dim, count * one["value_dim"], count * count * one["bias"]]
        parts = np.split(read.array(one, "<f4", sum(sizes)).astype(np.float64), np.cumsum(sizes)[:-1])
        logits = parts[0].reshape(count, dim) @ parts[1].reshape(count, dim).T * one["scale"]
        logits = logits if one["cap"] is None else one["cap"] * np.tanh(logits / one["cap"])
        logits = logits + parts[3].reshape(count, count) if one["bias"] else logits
        first = side["first"][one["at"]]
        first = np.zeros(count, int) if first is None else read.array(first, "<i4", count)
        found |= {"first"} if first.any() else set()
        found |= {name for name in ("cap", "sink") if one[name] is not None} | ({"bias"} if one["bias"] else set())
        for query in range(count):
            logits[query, query + 1 :] = logits[query, : first[query]] = -np.inf
        np.testing.assert_allclose(softmax(logits, one["sink"]), own[one["at"]][one["head"]], atol=2e-6)
    assert not has or has in found


def test_the_first_visible_key():
    query = np.arange(7, dtype=np.int32)
    assert first_key("full", query) is None
    assert first_key("window 16", query) is None
    assert first_key("window 3", query).tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert first_key("chunk 3", query).tolist() == [0, 0, 0, 3, 3, 3, 6]


def test_scores_metrics_and_tokens_are_those_of_the_tables(demo):
    seen = attnscope.capture(demo, TEXT)
    [side] = Read(seen.page().html).said["sides"]
    assert side["tokens"]["text"] == list(seen.prompt.tokens)
    assert side["tokens"]["id"] == list(seen.prompt.ids)
    for start, stop, plain in zip(*(side["tokens"][name] for name in ("start", "stop", "plain")), strict=True):
        assert side["text"][start:stop] == plain
    ids = [metric["id"] for metric in side["metrics"]]
    for one, head in zip(side["heads"], seen.heads, strict=True):
        assert (side["layers"][one["at"]]["layer"], one["head"], one["kv_head"]) == (
            head.layer,
            head.head,
            head.kv_head,
        )
        assert (one["role"], one["near_uniform"], one["top_key"]) == (head.role, head.near_uniform, head.top_key)
        assert one["scores"] == pytest.approx([head.score[name] for name in ids], rel=1e-6, nan_ok=True)
        uniform = seen.uniform(head.layer)
        assert one["uniform"] == pytest.approx([uniform[name] for name in ids], rel=1e-6)
    entropy = side["metrics"][ids.index("entropy")]
    assert (entropy["low"], entropy["high"]) == (0.0, pytest.approx(np.log(len(seen.prompt))))


def test_a_page_without_matrices_says_so(demo):
    read = Read(attnscope.capture(demo, TEXT, request=Request()).page().html)
    [side] = read.said["sides"]
    assert (side["maps"], side["relations"], side["steps"]) == ([], None, None)
    assert any("24 of 24 heads" in line for line in read.said["left_out"])


@pytest.mark.parametrize("view", [View(by_kv=True), View(weights="scores"), View(weights="value")])
def test_a_page_is_of_weights_of_query_heads(demo, view):
    seen = attnscope.capture(demo, TEXT, request=Request(view=view, weights=True))
    with pytest.raises(attnscope.AttnscopeError, match="query heads"):
        seen.page()


def test_what_a_page_asks_of_the_pass(demo):
    """Whole matrices only where they may fit; q, k and v only of short texts; nothing that the page does not hold."""
    layers = demo.geometry.attention_layers
    short, long = Plan().request(layers, 100), Plan(max_mb=2).request(layers, 2000)
    assert short["weights"] is True
    assert {key: [*heads] for key, heads in short["operands"].items()} == {key: [*range(6)] for key in range(4)}
    assert (long["weights"], long["maps"], long["operands"]) == (False, "all", {})
    assert long["map_side"] ** 2 * 24 / 2 * 4 / 3 <= 1e6
    assert 24 * 2000 * long["top_k"] * 6 * 4 / 3 <= 0.8e6
    assert long["top_k"] > 0

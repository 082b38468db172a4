"""What heads, relations and heatmap give: rows, files and filters, against a second spelling in loops."""

import io
import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import attnscope
from attnscope.inputs.prompt import from_text
from attnscope.metrics.metrics import METRICS
from helpers.command_line import SENTENCE, call
from helpers.own import attentions
from helpers.rows import csv_rows
from test_metrics import by_loops

LAYERS, HEADS, KV_HEADS = 28, 24, 8
STORY = (Path(__file__).parents[1] / "examples" / "story.txt").read_text()
ABOUT = [
    "layer",
    "head",
    "kv_head",
    "role",
    "text_role",
    "atlas_roles",
    "near_uniform",
    "top_key",
    "top_key_token",
    "top_key_mass",
]
RELATION = ["layer", "head", "kv_head", "query", "query_token", "key", "key_token", "weight", "stack"]


def ran(*arguments):
    """A quiet run that went well and said nothing."""
    return call(*arguments, "--quiet").silent()


@pytest.fixture(scope="module")
def weights(demo):
    """The demo's own attention to the sentence, as transformers returns it: {layer: heads x queries x keys}."""
    return dict(enumerate(attentions(demo.model, demo.tokenizer(SENTENCE).input_ids)))


@pytest.fixture(scope="session")
def llama_32_3b(tmp_path_factory):
    """A folder of a Llama with the layers and heads of Llama-3.2-3B, narrow and random, and a token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    words = ["<s>", "<unk>", *dict.fromkeys(SENTENCE.split())]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=HEADS * 4,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# heads


def test_a_pipe_and_the_file_hold_the_same_rows(tmp_path):
    result = ran("heads", "--text", SENTENCE, "--figures", "overview", "--out", str(tmp_path))
    assert (tmp_path / "heads.csv").read_bytes() == result.out
    rows = result.rows
    assert list(rows[0]) == [*ABOUT, *METRICS, "stack", "type"]
    assert {row["stack"] for row in rows} == {"decoder"}
    assert {(int(row["layer"]), int(row["head"])) for row in rows} == {(i, j) for i in range(4) for j in range(6)}
    assert all(int(row["kv_head"]) == int(row["head"]) // 2 for row in rows)
    scores = [float(row["focus"]) for row in rows]
    assert scores == sorted(scores, reverse=True)


def test_out_holds_exactly_the_named_files(tmp_path):
    ran("heads", "--text", SENTENCE, "--top", "2", "--out", str(tmp_path))
    best = [(int(row["layer"]), int(row["head"])) for row in csv_rows((tmp_path / "heads.csv").read_bytes())][:2]
    expected = {"heads.csv", "relations.csv", "overview.png", "top.png", "manifest.json"}
    expected |= {f"heads/L0{layer}H0{head}.png" for layer, head in best}
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert written == expected
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert set(manifest["files"]) == expected - {"manifest.json"}
    relations = csv_rows((tmp_path / "relations.csv").read_bytes())
    assert list(relations[0]) == RELATION
    assert len({(row["layer"], row["head"]) for row in relations}) == 24


DREW = re.compile(r"drew (\d+) of 24 heads one by one, (.+); --figures heads draws all, --select L1H4 draws one")


@pytest.mark.parametrize(
    ("options", "drawn", "which"),
    [
        ((), 8, "of each role the strongest"),
        (("--top", "3"), 3, "the first"),
        (("--select", "3,1.4"), 7, None),
        (("--figures", "heads"), 24, None),
        (("--figures", "overview"), 0, None),
    ],
)
@pytest.mark.e2e
def test_heads_with_a_role_are_drawn_one_by_one_unless_others_are_asked_for(tmp_path, options, drawn, which):
    result = call("heads", "--text", SENTENCE, *options, "--set", "dpi=20", "--out", str(tmp_path)).ok()
    assert len(list((tmp_path / "heads").glob("*.png"))) == drawn
    last = result.err.splitlines()[-1]
    said = DREW.fullmatch(last)
    assert (said.groups() if said else None) == ((str(drawn), which) if which else None), last


def test_of_each_role_the_strongest_head_is_drawn_first(demo):
    """L3H0 and L3H1 are called induction by the atlas, L0H1, L0H4 and L0H5 self."""
    from attnscope.export.export import Export, drawn_heads

    seen = attnscope.capture(demo, STORY)
    names, roles = drawn_heads(seen, Export()), {head.name: head.role for head in seen.heads}
    assert len(names) == 8 < sum(role != "-" for role in roles.values())
    first = names[: len(set(roles.values()) - {"-"})]
    assert sorted(roles[name] for name in first) == sorted(set(roles.values()) - {"-"})
    score = {head.name: head.score.get(head.role.replace("-", "_"), 0) for head in seen.heads}
    for name in first:
        assert score[name] == max(score[other] for other in roles if roles[other] == roles[name])
    by_text = {head.name: head.role for head in seen.named(None).heads}
    assert "other" in by_text.values()
    assert "other" not in {by_text[name] for name in drawn_heads(seen.named(None), Export())}
    assert drawn_heads(attnscope.capture(demo, "the bank").named(None), Export()) == []


SELECTIONS = [
    ("2", {(2, head) for head in range(6)}),
    ("2.3", {(2, 3)}),
    ("L2H3", {(2, 3)}),
    ("0-1.*", {(layer, head) for layer in (0, 1) for head in range(6)}),
    ("last", {(3, head) for head in range(6)}),
    ("*.0", {(layer, 0) for layer in range(4)}),
    ("0.0, L1H2,last.5", {(0, 0), (1, 2), (3, 5)}),
]


@pytest.mark.parametrize(
    ("command", "selection", "expected"),
    [
        *(("heads", *one) for one in SELECTIONS),
        *(("relations", *one) for one in SELECTIONS[-1:]),
        *(pytest.param("relations", *one, marks=pytest.mark.e2e) for one in SELECTIONS[:-1]),
    ],
)
def test_a_selection_filters(command, selection, expected):
    rows = ran(command, "--text", SENTENCE, "--select", selection).rows
    assert {(int(row["layer"]), int(row["head"])) for row in rows} == expected


def test_a_metric_sorts_and_is_the_mean_of_its_group_by_kv():
    single = ran("heads", "--text", SENTENCE, "--sort", "entropy").rows
    grouped = ran("heads", "--text", SENTENCE, "--sort", "entropy", "--by", "kv").rows
    for rows in (single, grouped):
        scores = [float(row["entropy"]) for row in rows]
        assert scores == sorted(scores, reverse=True)
    groups = defaultdict(list)
    for row in single:
        groups[row["layer"], row["kv_head"]].append(float(row["entropy"]))
    assert len(grouped) == len(groups) == 12
    for row in grouped:
        assert row["head"] == ""
        assert float(row["entropy"]) == pytest.approx(sum(groups[row["layer"], row["kv_head"]]) / 2, rel=1e-5)


@pytest.mark.parametrize("other_way", [("--sort", "-entropy"), ("--sort", "entropy", "--set", "ascending=true")])
def test_the_smallest_come_first_where_that_is_asked(other_way):
    down = ran("heads", "--text", SENTENCE, "--sort", "entropy").rows
    up = ran("heads", "--text", SENTENCE, *other_way).rows
    assert [row["entropy"] for row in up] == [row["entropy"] for row in down][::-1]


def test_short_names_sort_like_ids():
    for short, name in (("prev", "previous_token"), ("loc 32", "local_mass_32")):
        by_short, by_name = (ran("heads", "--text", SENTENCE, "--sort", one).out for one in (short, name))
        assert by_short == by_name
    places = [(row["layer"], row["head"]) for row in ran("heads", "--text", SENTENCE, "--sort", "layer").rows]
    assert places == sorted(places)


def test_metrics_of_length_are_columns_where_they_are_asked_for(demo):
    """As Python loops have them over the model's own matrices."""
    text, asked = "The river bank is wide. " * 9, ("--metrics", "keys 95,streaming_mass_32")
    rows = ran("heads", "--text", text, "--engine", "fused", *asked).rows
    assert list(rows[0]) == [*ABOUT, *METRICS, "keys_95", "streaming_mass_32", "stack", "type"]
    ids = demo.tokenizer(text).input_ids
    matrices = attentions(demo.model, ids)
    visible = torch.ones(len(ids), len(ids)).tril().bool()
    for row in rows:
        weights = matrices[int(row["layer"])][int(row["head"])]
        for name in ("keys_95", "streaming_mass_32"):
            assert float(row[name]) == pytest.approx(by_loops(weights, visible, ids, name), abs=1e-5, rel=1e-3), name
    assert [*ran("heads", "--text", SENTENCE, "--sort", "-str 512").rows[0]][-3] == "streaming_mass_512"


def test_parquet_has_the_types_of_a_dataset(tmp_path):
    from attnscope.corpus.folder import DatasetOutput
    from attnscope.corpus.tables import schema_of

    found = pq.read_schema(io.BytesIO(ran("heads", "--text", SENTENCE, "--format", "parquet").out))
    plain = {
        one.name: pa.string() if pa.types.is_dictionary(one.type) else one.type
        for one in schema_of("heads", DatasetOutput())
    }
    of_text = {name: kind for name, kind in plain.items() if name not in ("item", "id")}
    assert {one.name: one.type for one in found} == of_text | {"type": pa.string()}


def test_numbers_have_the_digits_of_their_precision():
    for row in ran("heads", "--text", SENTENCE).rows:
        for name in METRICS:
            assert row[name] == "" or row[name] == str(np.float32(row[name])), name


# relations


def test_all_pairs_stand_once_and_rows_sum_to_one(weights):
    rows = ran("relations", "--text", SENTENCE, "--top-k", "all").rows
    tokens = weights[0].shape[-1]
    pairs = [tuple(int(row[name]) for name in ("layer", "head", "query", "key")) for row in rows]
    assert set(pairs) == {
        (layer, head, query, key)
        for layer in range(4)
        for head in range(6)
        for query in range(tokens)
        for key in range(query + 1)
    }
    assert len(set(pairs)) == len(pairs)
    sums = defaultdict(float)
    for (layer, head, query, key), row in zip(pairs, rows, strict=True):
        assert float(row["weight"]) == pytest.approx(float(weights[layer][head, query, key]), abs=1e-6)
        sums[layer, head, query] += float(row["weight"])
    assert all(total == pytest.approx(1, abs=1e-5) for total in sums.values())


def test_the_strongest_keys_are_those_of_a_loop(weights, demo):
    rows = ran("relations", "--text", SENTENCE, "--top-k", "2").rows
    tokens = from_text(demo.tokenizer, SENTENCE).tokens
    found = defaultdict(list)
    for row in rows:
        assert (row["query_token"], row["key_token"]) == (tokens[int(row["query"])], tokens[int(row["key"])])
        found[int(row["layer"]), int(row["head"]), int(row["query"])].append((int(row["key"]), float(row["weight"])))
    for layer, matrix in weights.items():
        for head in range(6):
            for query in range(len(tokens)):
                row = [float(matrix[head, query, key]) for key in range(query + 1)]
                best = sorted(range(query + 1), key=lambda key: -row[key])[:2]
                got = found[layer, head, query]
                assert [weight for _, weight in got] == pytest.approx([row[key] for key in best], abs=1e-6)
                assert all(weight == pytest.approx(row[key], abs=1e-6) for key, weight in got)


def test_small_entries_are_left_out(weights):
    rows = ran("relations", "--text", SENTENCE, "--top-k", "all", "--min-weight", "0.3").rows
    expected = sum(int((matrix >= 0.3).sum()) for matrix in weights.values())
    assert len(rows) == expected > 0
    assert min(float(row["weight"]) for row in rows) >= 0.3


def test_words_sum_over_keys_and_average_over_queries(weights, demo):
    rows = ran("relations", "--text", SENTENCE, "--top-k", "all", "--group", "words", "--select", "1.2").rows
    words = from_text(demo.tokenizer, SENTENCE).words
    assert {row["query_token"] for row in rows} == {word.name for word in words}
    seen = {(int(row["query"]), int(row["key"])): float(row["weight"]) for row in rows}
    for i, query in enumerate(words):
        for j, key in enumerate(words[: i + 1]):
            total = 0.0
            for q in range(query.start, query.stop):
                for k in range(key.start, min(key.stop, q + 1)):
                    total += float(weights[1][2, q, k])
            assert seen[i, j] == pytest.approx(total / (query.stop - query.start), abs=1e-5)
        assert sum(seen[i, j] for j in range(i + 1)) == pytest.approx(1, abs=1e-5)


def test_relations_of_kv_heads_are_means(weights):
    rows = ran("relations", "--text", SENTENCE, "--top-k", "all", "--by", "kv", "--select", "2").rows
    assert {row["head"] for row in rows} == {""}
    assert {row["kv_head"] for row in rows} == {"0", "1", "2"}
    for row in rows:
        kv, query, key = (int(row[name]) for name in ("kv_head", "query", "key"))
        mean = (float(weights[2][2 * kv, query, key]) + float(weights[2][2 * kv + 1, query, key])) / 2
        assert float(row["weight"]) == pytest.approx(mean, abs=1e-6)


EITHER_ENGINE = pytest.mark.parametrize("engine", ["eager", "fused"])


@EITHER_ENGINE
@pytest.mark.parametrize(
    ("asked", "queries", "keys"),
    [
        (("--query", "last"), [8], range(9)),
        (("--key", "bank"), range(9), [3, 8]),
        (("--query", "-2", "--key", "bank"), [7], [3]),
        (("--query", "first"), [0], [0]),
    ],
    ids=str,
)
def test_only_the_tokens_that_are_asked_about_are_listed(weights, tmp_path, engine, asked, queries, keys):
    flags = ("--engine", engine, "--top-k", "all", "--out", str(tmp_path))
    result = ran("relations", "--text", SENTENCE, *asked, *flags)
    found = {tuple(int(row[name]) for name in ("layer", "head", "query", "key")): row["weight"] for row in result.rows}
    expected = {
        (layer, head, query, key): float(matrix[head, query, key])
        for layer, matrix in weights.items()
        for head in range(6)
        for query in queries
        for key in keys
        if key <= query
    }
    assert {place: float(weight) for place, weight in found.items()} == pytest.approx(expected, abs=1e-5)
    assert len(result.rows) == len(expected)
    assert (tmp_path / "relations.csv").read_bytes() == result.out
    options = json.loads((tmp_path / "manifest.json").read_text())["options"]
    said = dict(zip(asked[::2], asked[1::2], strict=True))
    assert (options["query"], options["key"]) == (said.get("--query"), said.get("--key"))


@EITHER_ENGINE
def test_the_strongest_of_the_chosen_keys_need_not_be_a_row_s_strongest(weights, engine):
    rows = ran("relations", "--text", SENTENCE, "--key", "bank", "--top-k", "1", "--engine", engine).rows
    assert {row["key_token"] for row in rows} == {" bank"}
    for row in rows:
        layer, head, query = (int(row[name]) for name in ("layer", "head", "query"))
        largest = max(float(weights[layer][head, query, key]) for key in (3, 8) if key <= query)
        assert float(row["weight"]) == pytest.approx(largest, abs=1e-5)
    assert len(rows) == 24 * 6  # of every query from the first bank on


def test_over_heads_the_strongest_come_first(tmp_path):
    asked = ("relations", "--text", SENTENCE, "--query", "last")
    result = ran(*asked, "--over", "heads", "--all-keys", "--out", str(tmp_path))
    rows, by_head = result.rows, ran(*asked, "--over", "none").rows
    assert ran(*asked).out == ran(*asked, "--over", "none").out
    assert rows == sorted(by_head, key=lambda row: -float(row["weight"]))  # which keeps the order of equal ones
    assert rows != by_head
    assert list(rows[0]) == RELATION
    assert (tmp_path / "relations.csv").read_bytes() == result.out
    others = [row for row in rows if row["key"] not in ("0", row["query"])]
    assert ran(*asked, "--over", "heads").out == ran(*asked, "--over", "heads", "--other-keys").out
    assert ran(*asked, "--over", "heads").rows == others != rows
    scores = ran(*asked, "--over", "heads", "--weights", "scores").rows
    assert scores == sorted(scores, key=lambda row: -float(row["score"]))


def test_words_are_ranked_and_left_out_as_words():
    asked = ("relations", "--text", "an internationalisation of counterrevolutionaries", "--group", "words")
    every = ran(*asked, "--over", "heads", "--top-k", "all", "--all-keys").rows
    others = ran(*asked, "--over", "heads", "--top-k", "all").rows
    assert others == [row for row in every if row["key"] not in ("0", row["query"])]
    assert {row["query_token"].strip() for row in others} == {"internationalisation", "of", "counterrevolutionaries"}


def test_scores_are_the_logits_behind_the_weights(weights):
    rows = ran("relations", "--text", SENTENCE, "--top-k", "all", "--weights", "scores", "--select", "3.1").rows
    assert [*rows[0]][-2:] == ["score", "stack"]
    logits = defaultdict(dict)
    for row in rows:
        logits[int(row["query"])][int(row["key"])] = float(row["score"])
    for query, scores in logits.items():
        assert len(scores) == query + 1
        share = torch.softmax(torch.tensor([scores[key] for key in range(query + 1)]), 0)
        torch.testing.assert_close(share, weights[3][1, query, : query + 1], rtol=0, atol=1e-5)


# heatmap and a model of the shape of Llama-3.2-3B


def test_heatmap_prints_the_path_of_every_picture(tmp_path):
    result = ran("draw", "--text", SENTENCE, "--select", "0.1,3", "--by", "kv", "--out", str(tmp_path))
    lines = result.out.decode().splitlines()
    pictures = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png")}
    assert {Path(line).relative_to(tmp_path).as_posix() for line in lines} == pictures
    kv = {f"heads/L03KV0{head}.png" for head in range(3)} | {"heads/L00KV00.png"}
    assert pictures == {"overview.png", "layers/L00.png", "layers/L03.png"} | kv


def test_the_shape_of_llama_32_3b(llama_32_3b):
    import attnscope

    model = attnscope.load(str(llama_32_3b))
    seen = attnscope.capture(model, SENTENCE)
    assert [token.strip() for token in seen.prompt.tokens] == ["<s>", *SENTENCE.split()]
    assert [key.layer for key in seen.weights] == list(range(LAYERS))
    assert {tuple(matrix.shape) for matrix in seen.weights.values()} == {(HEADS, 9, 9)}
    rows = ran("heads", "--text", SENTENCE, "--model", str(llama_32_3b)).rows
    assert len(rows) == LAYERS * HEADS
    assert all(int(row["kv_head"]) == int(row["head"]) // (HEADS // KV_HEADS) for row in rows)


@pytest.mark.parametrize("heads", [range(22, HEADS), pytest.param(range(HEADS), marks=pytest.mark.e2e)], ids=len)
def test_the_pictures_of_its_last_layer(llama_32_3b, tmp_path, heads):
    drawn = ("--select", f"last.{heads[0]}-{heads[-1]}", "--figures", "layers,heads", "--out", str(tmp_path))
    result = ran("heads", "--text", SENTENCE, "--model", str(llama_32_3b), *drawn)
    assert len(result.rows) == len(heads)
    assert sorted(path.name for path in (tmp_path / "heads").iterdir()) == [f"L27H{h:02d}.png" for h in heads]
    assert sorted(path.name for path in (tmp_path / "layers").iterdir()) == ["L27.png"]

"""Two texts and two models, head by head: against loops over Hugging Face's own matrices, and against themselves."""

import copy
import io
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from attnscope.attention.operator import DenseAttention
from attnscope.attention.spec import Visibility
from attnscope.errors import InputError, MemoryLimitError, UsageError
from attnscope.export.study_figures import panels, signed_maps
from attnscope.figures import Style
from attnscope.figures.colours import find_limits
from attnscope.hooks.engines import ENGINES
from attnscope.inputs.prompt import from_ids, from_text
from attnscope.metrics.divergence import DivergenceSide, diverge, js_bits
from attnscope.metrics.metrics import KNOWN
from attnscope.metrics.texts import Cells
from attnscope.model.loading import wrap
from attnscope.observe.request import CaptureSpec
from attnscope.studies import comparison
from attnscope.studies.comparison import (
    OneSide,
    compare_heads,
    heads_table,
    kept_bytes,
    load_comparison,
    metrics_table,
    tokens_table,
)
from attnscope.studies.intervals import FEWEST
from helpers.command_line import call
from helpers.compared import differences
from helpers.families import tiny_model
from helpers.folders import saved
from helpers.made_tokenizers import byte_level

FIRST = "Mary gave John a book and went home to the bank"
OTHER = "Anna gave big John a small book and went home"
PAGE = Path(__file__).parents[2] / "docs" / "compare.md"
TEXTS = ("the river bank is green and the old boat lies still", "Mary saw John, and John gave Mary a book.")


def reading(loaded, text, engine="eager"):
    return OneSide(loaded, from_text(loaded.tokenizer, text), ENGINES[engine])


def attentions(model, prompt):
    """The model's own matrices, a layer each, (H, T, T)."""
    with torch.no_grad():
        layers = model(torch.tensor([prompt.ids]), output_attentions=True, use_cache=False).attentions
    return [one[0].double().tolist() for one in layers]


def expected(first, other):
    """js, lost, other_lost per head, and the signed map, from the matrices of `output_attentions` and loops."""
    prompts = (first.prompt, other.prompt)
    layers = zip(*(attentions(one.loaded.model, one.prompt) for one in (first, other)), strict=True)
    return [head for both in layers for head in differences(*both, prompts, prompts)]


@pytest.fixture(scope="module")
def two_texts(demo):
    heads = demo.geometry.heads_by_layer
    pair = reading(demo, FIRST), reading(demo, OTHER)
    return compare_heads([pair], maps={"decoder": {layer: range(count) for layer, count in heads.items()}})


def test_two_texts_are_what_loops_over_the_models_own_matrices_say(two_texts):
    pair = two_texts.pair
    assert any(len(members) > 1 for side in pair.shared.members for members in side)
    assert all(pair.shared.alone)
    maps = [one for layer in signed_maps(pair) for one in layer.values_HQK]
    for place, (js, lost, other_lost, difference) in enumerate(expected(pair.first, pair.other)):
        assert two_texts.js.effect[place] == pytest.approx(js, abs=1e-6)
        assert two_texts.lost_SN[0, place] == pytest.approx(lost, abs=1e-6)
        assert two_texts.other_lost_SN[0, place] == pytest.approx(other_lost, abs=1e-6)
        seen = np.isfinite(maps[place])
        assert seen[np.tril_indices(len(seen))].all()
        assert not seen[np.triu_indices(len(seen), 1)].any()
        assert maps[place][seen] == pytest.approx(difference[seen], abs=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "gemma2", "bloom"])  # heard at the interface, and by hooks
def test_families(demo, family):
    loaded = wrap(tiny_model(family), demo.tokenizer)
    ids = [[1, *range(20, 40)], [1, *range(20, 24), 50, 51, *range(26, 36)]]
    first, other = (OneSide(loaded, from_ids(demo.tokenizer, one), ENGINES["eager"]) for one in ids)
    found = compare_heads([(first, other)])
    for place, (js, lost, other_lost, _) in enumerate(expected(first, other)):
        assert found.js.effect[place] == pytest.approx(js, abs=1e-6)
        assert found.lost_SN[0, place] == pytest.approx(lost, abs=1e-6)
        assert found.other_lost_SN[0, place] == pytest.approx(other_lost, abs=1e-6)


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_a_text_beside_itself_differs_in_nothing(demo, engine):
    found = compare_heads([(reading(demo, FIRST, engine),) * 2])
    assert found.js_SN.shape == (1, 24)
    assert not found.js_SN.any()
    assert not found.lost_SN.any()
    assert all(np.nan_to_num(found.differences[name].effect).max() == 0 for name in found.metrics)


def test_texts_that_are_all_equal_leave_a_share_a_bound_and_other_metrics_no_interval(two_texts):
    equal = {name: (np.repeat(one_SN, FEWEST, 0),) * 2 for name, (one_SN, _) in two_texts.metrics.items()}
    found = replace(two_texts, metrics=equal)
    for name in equal:
        effects, bounded = found.differences[name], KNOWN[name].range == "0 to 1"
        there = np.isfinite(effects.effect)
        assert (effects.high[there] > 0).all() if bounded else np.isnan(effects.high[there]).all()
        np.testing.assert_allclose(effects.low[there], -effects.high[there])


def test_open_ends_of_differences_are_counted(two_texts):
    generator, heads = np.random.default_rng(0), len(two_texts.heads)
    first_SN, other_SN = generator.random((2, FEWEST, heads))
    other_SN[3, 5] = 90
    nothing_SN = np.full((FEWEST, heads), np.nan)
    metrics = {"distance": (first_SN, other_SN), "sink": (first_SN, other_SN), "entropy": (first_SN, nothing_SN)}
    assert replace(two_texts, metrics=metrics).open_ends() == (1, 2 * heads)


def test_both_engines_say_the_same(demo, two_texts):
    fused = compare_heads([(reading(demo, FIRST, "fused"), reading(demo, OTHER, "fused"))])
    assert fused.js.effect == pytest.approx(two_texts.js.effect, abs=1e-5)
    assert fused.differences["entropy"].effect == pytest.approx(two_texts.differences["entropy"].effect, abs=1e-5)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.e2e)])
def test_the_head_whose_queries_were_perturbed_is_named_first(demo, step):
    """Later layers change too, by what the head's output changes: its own weights change most, 24 of 24 times."""
    other = replace(demo, model=copy.deepcopy(demo.model))
    pairs = [(reading(demo, text), reading(other, text)) for text in TEXTS]
    width, named = demo.geometry.attention_layers[0].head_dim, []
    for layer, heads in demo.geometry.heads_by_layer.items():
        weight = other.model.model.layers[layer].self_attn.q_proj.weight.data
        for head in range(layer % step, heads, step):
            rows = weight[head * width : (head + 1) * width]
            noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(head))
            before = rows.clone()
            rows += 0.01 * noise * rows.norm() / noise.norm()
            found = compare_heads(pairs)
            rows.copy_(before)
            named.append(found.heads[found.order[0]] == (layer, head))
            earlier = [place for place, (at, _) in enumerate(found.heads) if at < layer]
            assert not found.js_SN[:, earlier].any()
    assert sum(named) == len(named) == {1: 24, 5: 5}[step]


def test_two_tokenizers_are_aligned_by_characters(demo):
    other = wrap(tiny_model("llama", hidden_size=96, num_attention_heads=6, vocab_size=330), byte_level())
    assert other.geometry.heads_by_layer == demo.geometry.heads_by_layer
    found = compare_heads([(reading(demo, FIRST), reading(other, FIRST))])
    first, second = found.pair.shared.members
    plain = [one.prompt.plain for one in found.pair[:2]]
    for one, two in zip(first, second, strict=True):
        assert "".join(plain[0][at] for at in one).strip() == "".join(plain[1][at] for at in two).strip()
    assert found.pair.shared.alone[0][0] == 0  # the begin token, that the other tokenizer does not put
    assert found.lost_SN.max() > 0.1
    assert not found.other_lost_SN.any()


def test_many_texts_have_means_and_intervals(demo):
    other = wrap(tiny_model("llama", hidden_size=96, num_attention_heads=6, vocab_size=2000), demo.tokenizer)
    texts = [TEXTS[0][at % 11 : 20 + at % 8] for at in range(34)]
    texts[:3] = ["the bank the bank the bank the bank"] * 3  # all that repeat
    found = compare_heads([(reading(demo, text), reading(other, text)) for text in texts])
    alone = [compare_heads([(reading(demo, text), reading(other, text))]) for text in texts[2:4]]
    assert found.js_SN[2:4] == pytest.approx(np.concatenate([one.js_SN for one in alone]))
    assert found.js.effect == pytest.approx(found.js_SN.mean(0))
    assert (found.js.low < found.js.effect).all()
    assert (found.js.effect < found.js.high).all()
    first, second = found.metrics["sink"]
    assert found.differences["sink"].effect == pytest.approx((second - first).mean(0))
    assert np.isfinite(found.differences["sink"].low).all()
    induction = found.differences["induction"]  # of few texts: a mean, and no interval
    ids = [demo.tokenizer(text).input_ids for text in texts]
    shows = [any(one[i] == one[j] for i in range(len(one)) for j in range(i - 2)) for one in ids]
    assert 3 <= sum(shows) < 32
    assert set(induction.n) == {sum(shows)}
    assert np.isfinite(induction.effect).all()
    assert np.isnan(induction.low).all()
    few = replace(found, js_SN=found.js_SN[:31])
    assert np.isnan(few.js.low).all()


def test_metrics_are_those_of_an_observation(demo, two_texts):
    from attnscope.observe.run import read

    for side, text in enumerate((FIRST, OTHER)):
        scores = read(demo, CaptureSpec(text)).columns.scores
        for name, values in two_texts.metrics.items():
            assert values[side][0] == pytest.approx(scores[name].value, abs=1e-6, nan_ok=True)


def test_no_matrix_is_kept_of_the_first_side(demo, monkeypatch):
    """What the listener holds when the second pass begins is linear in the text."""
    held = []
    inner = comparison._Passes.hold_against

    def watched(self, *layer):
        held.append({key: P.spec.k_BGKD.shape for key, P in self.kept.items()})
        assert not any(hasattr(P, "weights_BHQK") for P in self.kept.values())
        inner(self, *layer)

    monkeypatch.setattr(comparison._Passes, "hold_against", watched)
    compare_heads([(reading(demo, FIRST), reading(demo, OTHER))])
    assert [len(one) for one in held] == [4, 3, 2, 1]
    assert kept_bytes(demo, 200) == 2 * kept_bytes(demo, 100)


def test_js_bits_by_hand():
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.2, 0.6], [0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.1, 0.3], [1.0, 0.0]], dtype=torch.float64)
    found = js_bits(p, q).tolist()
    assert found[0] == pytest.approx(1.0)
    assert found[1:3] == [0.0, 0.0]  # once renormalised the same
    assert math.isnan(found[3])


def test_a_binned_map_sums_over_keys_and_means_over_queries():
    P, Q = (causal(seed) for seed in range(2))
    unit_T = torch.arange(10)
    cells = Cells.of(range(10), 4)
    found = diverge(DivergenceSide(P, unit_T, unit_T), DivergenceSide(Q, unit_T, unit_T), (cells, cells), [1]).map[0]
    difference = (Q.dense() - P.dense())[0, 1].double().numpy()
    runs = [range(start, min(start + 3, 10)) for start in range(0, 10, 3)]
    for row, queries in enumerate(runs):
        for column, keys in enumerate(runs):
            value = sum(difference[i, j] for i in queries for j in keys) / len(queries)
            assert (
                found[row, column] == pytest.approx(value, abs=1e-6) if column <= row else np.isnan(found[row, column])
            )


def causal(seed):
    """Two heads of random causal attention over 10 tokens."""
    logits = torch.randn(1, 2, 10, 10, generator=torch.Generator().manual_seed(seed))
    hidden = torch.ones(10, 10, dtype=torch.bool).triu(1)
    return DenseAttention(logits.masked_fill(hidden, -torch.inf).softmax(-1), Visibility(10, 10))


# what is refused


def test_what_cannot_be_compared(demo):
    small = wrap(tiny_model("llama"), demo.tokenizer)
    with pytest.raises(UsageError, match="have no counterparts"):
        compare_heads([(reading(demo, FIRST), reading(small, FIRST))])
    with pytest.raises(InputError, match="share no word"):
        compare_heads([(OneSide(demo, from_ids(demo.tokenizer, [900]), ENGINES["eager"]), reading(demo, "bank"))])
    with pytest.raises(MemoryLimitError, match="shorten the text"):
        compare_heads([(reading(demo, FIRST), reading(demo, OTHER))], memory="1k")


# tables and pictures


def test_tables(two_texts):
    heads, metrics = heads_table(two_texts).to_pylist(), metrics_table(two_texts).to_pylist()
    assert [row["js"] for row in heads] == sorted((row["js"] for row in heads), reverse=True)
    assert len(heads) == 24
    assert len(metrics) == 24 * len(two_texts.metrics)
    assert {row["js_low"] for row in heads} == {None}
    one = next(row for row in metrics if (row["layer"], row["head"], row["metric"]) == (1, 5, "sink"))
    assert one["difference"] == pytest.approx(one["other"] - one["first"])
    assert next(row for row in heads if (row["layer"], row["head"]) == (1, 5))["sink_difference"] == one["difference"]
    tokens = tokens_table(two_texts.pair).to_pylist()
    for side, reader in zip(("first", "other"), two_texts.pair[:2], strict=True):
        at = [int(place) for row in tokens for place in (row[f"{side}_position"] or "").split(",") if place]
        assert sorted(at) == list(range(len(reader.prompt)))
    assert [row["other_text"] for row in tokens if row["unit"] is None and row["other_text"]].count(" small") == 1


def test_pictures_are_centred_on_0(two_texts):
    layers, [js, *signed] = panels(two_texts)
    assert layers == (0, 1, 2, 3)
    assert (js.low, js.values_LH.shape) == (0.0, (4, 6))
    assert js.values_LH[1, 5] == two_texts.js.effect[11]
    assert all(panel.low == -panel.high and panel.quantity == "difference" for panel in signed)
    maps = signed_maps(two_texts.pair)
    assert {one.quantity for one in maps} == {"difference"}
    limits = find_limits([maps[0].values_HQK], Style(), "difference")
    assert limits.low == -limits.high == -np.nanmax(abs(maps[0].values_HQK))
    assert maps[0].labels_Q[:3] == ("<s>", "Mary/Anna", "·gave")


def test_a_swapped_name_is_compared_with_the_one_in_its_place(demo):
    """Of the same tokens in the same places the first layer attends alike, where by text a name takes its row along."""
    first, other = (reading(demo, text) for text in ("Mary saw John and the cat", "John saw Mary and the cat"))
    by_position, by_text = compare_heads([(first, other)]), compare_heads([(first, other)], align="text")
    assert [one.by for one in by_position.pair.texts] == ["position"]
    assert by_position.pair.shared.size == len(first.prompt)
    assert not by_position.lost_SN.any()
    assert by_text.lost_SN.any()
    assert by_text.pair.texts[0].moved > 0 == by_position.pair.texts[0].moved


# the command

PAIR = ("compare", "--text", FIRST, "--compare-text", OTHER)


def test_the_command_prints_names_and_writes(tmp_path, two_texts):
    """Over another comparison, which it refuses at first."""
    kept, out = tmp_path / "layers" / "mine.png", tmp_path
    (out / "layers").mkdir()
    for path in (kept, out / "layers" / "L00.png"):
        path.touch()
    before = {"schema": "compare/2", "asked": {}, "files": {"layers/L00.png": "", "layers/mine.png": "", "../x": ""}}
    (out / "compare.json").write_text(json.dumps(before))
    flags = (*PAIR, "--out", str(out), "--select", "1,2.0")
    refused = call(*flags, "-q")
    assert (refused.code, refused.out) == (2, b"")
    assert "other models" in refused.err
    result = call(*flags, "--force").ok()
    order = [two_texts.heads[place] for place in two_texts.order]
    found = [(int(row["layer"]), int(row["head"])) for row in result.rows]
    assert found == [one for one in order if one[0] == 1 or one == (2, 0)]
    assert "only in the other: big" in result.err
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} - {"layers/mine.png"}
    tables, pictures = {"heads.csv", "metrics.csv", "tokens.csv"}, {"layers/L01.png", "layers/L02.png"}
    assert written == tables | pictures | {"differences.png", "compare.json"}
    assert (out / "heads.csv").read_bytes() == result.out
    said = (out / "compare.json").read_text()
    assert json.loads(said)["files"].keys() == written - {"compare.json"}
    assert OTHER not in said  # a text is hashed, not written down
    assert kept.exists()


def test_a_folder_of_an_older_version_is_refused_and_can_be_written_over(tmp_path):
    flags = (*PAIR, "--select", "0.0", "--out", str(tmp_path), "-q")
    path = tmp_path / "compare.json"
    path.write_text(json.dumps({"schema": "compare/1", "asked": {}, "files": {}}))
    refused = call(*flags)
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, b"", 1)
    assert re.search("'compare/1'.*'compare/2'.*--force", refused.err)
    assert call(*flags, "--force").code == 0
    assert json.loads(path.read_text())["schema"] == "compare/2"


@pytest.mark.parametrize("content", ["", "[]", '{"schema": "run/3"}'])
def test_a_damaged_folder_is_left_as_it_is(tmp_path, content):
    (tmp_path / "compare.json").write_text(content)
    result = call(*PAIR, "--out", str(tmp_path), "--force", "-q")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert (tmp_path / "compare.json").read_text() == content


def test_a_terminal_has_a_table_and_a_pipe_any_format(tmp_path):
    shown = call(*PAIR, "--top", "3", columns=80).ok()
    lines = shown.lines
    assert max(map(len, lines)) <= 80
    assert sum(re.match(r" *L\d+H\d+ ", line) is not None for line in lines) == 3
    assert lines[1].split()[:3] == ["head", "JS", "bits"]
    assert all(word in lines[1] for word in ("lost", "Δ sink"))
    data = call(*PAIR, "--format", "parquet", "-q").out
    assert pq.read_table(io.BytesIO(data)).num_rows == 24


@pytest.mark.parametrize("line", re.findall(r"^    attnscope (compare .*)$", PAGE.read_text("utf-8"), re.MULTILINE))
def test_a_command_of_the_page_runs(line, monkeypatch):
    monkeypatch.chdir(PAGE.parents[1])
    result = call(*shlex.split(line.partition(" --out ")[0])).ok()
    assert len(result.rows) == 24


def test_a_model_beside_itself_on_a_file_of_texts(tmp_path):
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS) + "\n")
    result = call("compare", "--texts", str(tmp_path / "texts.txt"), "--compare-model", "demo").ok()
    assert {(row["js"], row["texts"]) for row in result.rows} == {("0.0", "2")}
    assert "2 texts, too few for intervals" in result.err
    assert "no head differs" in result.err


def test_a_text_that_does_not_fit_is_left_out_of_many(tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join([*TEXTS, "bank " * 600]) + "\n")
    result = call("compare", "--texts", str(tmp_path / "texts.txt"), "--compare-model", "demo").ok()
    assert "texts.txt:3: " in result.err
    assert {row["texts"] for row in result.rows} == {"2"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("small"), vocab_size=2000)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--text", "a"), 2, "nothing to compare with; give --compare-text TEXT or --compare-model NAME"),
        (("--text", "a", "--compare-text", "b", "--compare-model", "demo"), 2, "were both given"),
        (("--text", "a", "--texts", "x", "--compare-model", "demo"), 2, "--texts is for two models"),
        (("--texts", "x", "--compare-text", "b"), 2, "--texts is for two models"),
        (("--texts", "absent.txt", "--compare-model", "demo"), 2, "there is no file absent.txt"),
        (("--compare-model", "demo"), 2, "expected one text"),
        (("--text", "a", "--compare-text", ""), 4, "--compare-text is empty; give a text"),
        (("--text", "the bank", "--compare-model", "{small}"), 2, "have no counterparts; compare models with the same"),
        (
            ("--text", "the bank", "--compare-text", "the bank", "--set", "memory=1k"),
            5,
            "are free for it; shorten the text",
        ),
        (("--text", "the bank", "--compare-text", "a", "--select", "9"), 2, "names layer 9"),
        (("--text", "the bank", "--compare-text", "a", "--set", "memory=much"), 2, "expected a size of memory"),
        (("--text", "a", "--compare-text", "b", "--format", "json5"), 2, "got 'json5'"),
        (("--text", "a", "--compare-text", "b", "--align", "words"), 2, "expected position or text, got 'words'"),
        (
            ("--text", "the bank", "--compare-text", "the old bank", "--align", "position"),
            4,
            "by position the two texts need as many tokens, expected 3, got 4; use --align text, or change the words",
        ),
    ],
)
def test_what_the_command_refuses(flags, code, message, small):
    result = call("compare", *(flag.format(small=small) for flag in flags), "-q")
    assert (result.code, result.out) == (code, b"")
    assert message in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("align", "said"),
    [
        ((), "aligned by position"),
        pytest.param(("--align", "position"), "aligned by position", marks=pytest.mark.e2e),
        (("--align", "text"), "aligned by characters, 2 of them at another position"),
    ],
)
def test_the_alignment_is_said_kept_and_drawn(tmp_path, align, said):
    swapped = ("--text", "Mary saw John", "--compare-text", "John saw Mary")
    result = call("compare", *swapped, *align, "--out", str(tmp_path), "--select", "0.0").ok()
    assert f"shared tokens, {said}\n" in result.err
    kept = json.loads((tmp_path / "compare.json").read_text())
    assert kept["aligned"] == {"decoder": "text" if "text" in align else "position"}
    assert kept["asked"]["options"]["align"] == (align[1] if align else None)
    assert load_comparison(tmp_path)[1].endswith(f"1 texts, {said.split(',')[0]}")

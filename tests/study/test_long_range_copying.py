"""Long-range copying against a loop that decodes without a cache, divergence from uniform attention against sums."""

import math

import numpy as np
import pytest
import torch

from attnscope.metrics.divergence import js_bits
from attnscope.model.loading import wrap
from attnscope.studies.atlas import findings_of, near_uniform, plan, read_trial, roles_of
from attnscope.studies.copying import DEPTHS, LongRangeCopying, Recall, complete, lengths, needles
from attnscope.studies.probes import FROM_UNIFORM, RECALL, Arm, Measure, Trial, begins, token_pool, trials
from helpers.families import tiny_model

SCORE, MOVED = Measure("needle", "copied"), Measure("needle", "moved span")
ASKS = {"copied": LongRangeCopying(), "moved span": LongRangeCopying(moved=True), "recall": Recall()}


@pytest.fixture(scope="module")
def trial(demo):
    """Seven runs of the demo, of 64 and 128 tokens."""
    return {one.name: one for one in trials(token_pool(demo), begins(demo), 255, count=5)}["long-range-copying"]


@pytest.fixture(scope="module")
def readings(demo, trial):
    return read_trial(demo, trial)


def whole(row):
    """A sequence without what fills it up."""
    return [int(token) for token in row if token >= 0]


def decoded(model, ids):
    """The eight likeliest tokens, one whole pass for each, and every pass's last rows (8, N, keys)."""
    rows = []
    for _ in range(8):
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_attentions=True)
        rows.append(torch.cat(out.attentions, 1)[0, :, -1])
        ids = [*ids, int(out.logits[0, -1].argmax())]
    return ids, rows


def scored(ids, rows, start):
    """Wu et al.'s count in every head, of the eight keys from `start` on."""
    return [
        sum(
            start <= (key := int(row[head].argmax())) < start + 8 and ids[key] == ids[len(ids) - 8 + step]
            for step, row in enumerate(rows)
        )
        / 8
        for head in range(len(rows[0]))
    ]


def test_the_longer_the_fewer():
    assert lengths(64, 512) == {64: 64, 128: 32, 256: 16, 512: 8}
    assert lengths(4, 10**9) == {64: 4, 128: 2, 256: 1}
    assert lengths(64, 63) == {}


def test_the_needle_is_hidden_once_at_every_depth():
    made = needles(range(10, 300), (5,), [64, 64, 64, 128, 512], np.random.default_rng(0))
    for row, depth, length in zip(made, (*DEPTHS, *DEPTHS), [64, 64, 64, 128, 512], strict=False):
        ids = whole(row)
        assert len(ids) == length - 8
        assert (ids[0], ids.count(5)) == (5, 1)
        places = [place for place, token in enumerate(ids) if token == ids[-1]]
        assert places == [1 + round(depth * (length - 1 - 9 - 9)), len(ids) - 1]
        assert all(ids.count(token) == 1 for token in ids[places[0] + 1 : places[0] + 9])
        assert len(set(ids[1:-1])) == length - 10 or length == 512  # where the pool is too small for other tokens


def test_long_range_copying_is_counted_as_wu_et_al_count_it(demo, trial, readings):
    """Without a cache, pass by pass: every step's strongest key, the token made, and which runs count."""
    given = trial.arms["needle"].ids_ST
    counted = 0
    for row, score, moved, recall in zip(
        given, readings.values[SCORE], readings.values[MOVED], readings.values[RECALL], strict=True
    ):
        ids, rows = decoded(demo.model, whole(row))
        start = ids.index(ids[-9]) + 1
        expected = len(set(ids[start : start + 8]) & set(ids[-8:])) / 8
        assert set(recall) == {expected}
        if expected <= 0.5:
            assert np.isnan(score).all()
            assert np.isnan(moved).all()
        else:
            counted += 1
            assert score.tolist() == scored(ids, rows, start)
            assert score.max() > 0.5
    assert 0 < counted < len(given)


def test_a_moved_span_is_other_keys_of_the_prompt(demo):
    """The needle's values stand a second time where the moved span looks: what looks there counts there."""
    pool, begin = token_pool(demo), begins(demo)
    given = [whole(row) for row in needles(pool, begin, [64] * 3, np.random.default_rng(0))]
    ids = []
    for row, steps in zip(given, (18, 18, -18), strict=True):  # a third of the prompt on, or back from its end
        start = row.index(row[-1]) + 1
        values = row[start : start + 8]
        row[start + steps : start + steps + 8] = values
        ids.append([*row, *values])
    found = read_trial(demo, Trial("said", {"needle": Arm(np.array(ids), ASKS)}, ())).values
    with torch.no_grad():
        out = demo.model(torch.tensor(ids), output_attentions=True)
    key_BNV = torch.cat(out.attentions, 1)[:, :, -9:-1].argmax(-1)
    for text, (row, steps) in enumerate(zip(ids, (18, 18, -18), strict=True)):
        for measure, start in ((SCORE, row.index(row[-9]) + 1), (MOVED, row.index(row[-9]) + 1 + steps)):
            tokens = [[key if start <= key < start + 8 else -1 for key in keys] for keys in key_BNV[text].tolist()]
            hits = [[key >= 0 and row[key] == row[56 + step] for step, key in enumerate(keys)] for keys in tokens]
            assert found[measure][text] == pytest.approx(np.mean(hits, 1))
    assert (found[SCORE].max(1) > 0.3).any()
    assert (found[MOVED].max(1) > 0.3).any()


def test_runs_without_the_needle_are_left_out(trial, readings):
    [finding] = findings_of(trial, readings)
    there = np.isfinite(readings.values[SCORE][:, 0])
    assert finding.effects.n.tolist() == [there.sum()] * 24
    assert finding.effects.score == pytest.approx(readings.values[SCORE][there].mean(0))
    assert finding.effects.null == pytest.approx(readings.values[MOVED][there].mean(0))


def test_what_the_model_says_is_the_likeliest_whatever_its_config_asks(demo, trial, monkeypatch):
    ids_BT = np.array([whole(row) for row in trial.arms["needle"].ids_ST[:5]])
    expected = np.array([decoded(demo.model, list(ids))[0] for ids in ids_BT])
    config = demo.model.generation_config
    for name, value in {
        "eos_token_id": int(expected[0, -6]),
        "pad_token_id": 0,
        "repetition_penalty": 5.0,
        "no_repeat_ngram_size": 1,
        "max_length": 20,
        "suppress_tokens": expected[0, -7:].tolist(),
        "stop_strings": ["a", "e", "i"],
    }.items():
        monkeypatch.setattr(config, name, value)
    assert complete(demo, ids_BT, 8).tolist() == expected.tolist()


def test_a_trial_says_what_it_will_read(demo, trial):
    read_now, told = [], []
    handle = demo.model.get_input_embeddings().register_forward_pre_hook(
        lambda module, given: read_now.append(given[0].numel())
    )
    try:
        read_trial(demo, trial, told.append)
    finally:
        handle.remove()
    assert sum(read_now) == sum(told) == trial.tokens


def test_a_window_that_hides_the_needle_is_null(demo):
    """A text that repeats its needle by itself, in a model that sees all of it and in one that does not."""
    row = whole(needles(range(5, 90), (), [64], np.random.default_rng(0))[0])
    start = row.index(row[-1]) + 1
    ids = np.array([[*row, *row[start : start + 8]]])
    arm = Arm(ids, ASKS)
    for window, null in ((None, False), (16, True)):
        loaded = wrap(tiny_model("mistral", sliding_window=window), demo.tokenizer)
        found = read_trial(loaded, Trial("said", {"needle": arm}, ())).values
        assert set(found[RECALL].flat) == {1}
        assert np.isnan(found[SCORE]).all() == null


def test_a_model_that_finds_nothing_is_null(demo):
    loaded = wrap(tiny_model("llama"), demo.tokenizer)
    [trial] = [one for one in trials(range(5, 90), (), 64, count=32) if one.name == "long-range-copying"]
    [finding] = findings_of(trial, read_trial(loaded, trial))
    assert set(finding.effects.n) == {0}
    assert np.isnan(finding.effects.score).all()
    assert roles_of([finding], 16) == [()] * 16


def test_why_long_range_copying_is_not_measured(demo, monkeypatch):
    short = wrap(tiny_model("gpt2", n_positions=48), demo.tokenizer)
    missing = plan(short, pool=range(5, 90)).facts["not_measured"]
    assert "reads 48 tokens, and 64 are needed" in missing["long-range-copying"]
    loaded = wrap(tiny_model("llama"), demo.tokenizer)
    monkeypatch.setattr(loaded.model, "generate", lambda *given, **more: 1 / 0)
    planned = plan(loaded, pool=range(5, 90))
    assert planned.facts["not_measured"]["long-range-copying"] == f"{loaded.name} cannot generate: division by zero"
    assert "long-range-copying" not in [one.name for one in planned.trials]


# near uniform


def test_divergence_from_uniform_attention_is_a_sum_over_the_keys(demo):
    [trial] = [one for one in trials(token_pool(demo), begins(demo), 512, count=2) if one.name == "offsets"]
    found = read_trial(demo, trial).values[FROM_UNIFORM]
    ids = torch.tensor(trial.arms["distinct"].ids_ST)
    with torch.no_grad():
        weights = torch.cat(demo.model(ids, output_attentions=True).attentions, 1).double().numpy()
    for text, head in ((0, 0), (1, 6), (1, 23)):
        rows = []
        for query in range(5, ids.shape[1]):
            total, u = 0.0, 1 / (query + 1)
            for p in weights[text, head, query, : query + 1]:
                m = (p + u) / 2
                total += (p * math.log2(p / m) if p else 0) / 2 + u * math.log2(u / m) / 2
            rows.append(total)
        assert found[text, head] == pytest.approx(np.mean(rows), abs=1e-6)


def test_divergence_of_what_is_known():
    one, other = (
        torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.2, 0.2], [0.0, 0.0]]),
        torch.tensor([[0.0, 3.0]] + [[1.0, 1.0]] * 3),
    )
    found = js_bits(one.double(), other.double())
    assert found[:3].tolist() == [1.0, 0.0, 0.0]
    assert math.isnan(found[3])


def test_the_mark_is_no_role():
    assert near_uniform(np.array([[0.1, 0.2, np.nan], [0.1, 0.4, 0.0]])) == pytest.approx({0: 0.1})
    assert roles_of([], 2) == [(), ()]

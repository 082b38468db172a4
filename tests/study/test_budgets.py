"""Budgets of a KV cache as a study: the demo's induction heads, transformers' own mask, shares counted by hand."""

import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import cross_entropy

import attnscope
from attnscope.cli.study_tables import budget_notes
from attnscope.errors import InputError, ModelError, UsageError
from attnscope.export.study_figures import save_budgets
from attnscope.interventions.kv_cache import CacheBudget
from attnscope.model.loading import wrap
from attnscope.model.selection import select, written_heads
from attnscope.studies.budgets import AskedCache, BudgetPlan, BudgetStudy, budget_cases
from helpers.budgeted import budgeted
from helpers.families import tiny_model

TEXTS = 32
INDUCTION, OTHERS = "3.0-1", "0-2,3.2-5"
BANK = "the bank of the river, the bank of the river, the bank"
TOKENS = 15


def repeated(seed, period):
    """Begin token and twice so many distinct random ids; the second copy alone is measured."""
    drawn = torch.randperm(800, generator=torch.Generator().manual_seed(seed))[:period] + 100
    return {"text": [1, *drawn.tolist(), *drawn.tolist()], "at": period}


PERIODS = pytest.mark.parametrize("period", [25, pytest.param(50, marks=pytest.mark.e2e)])  # 50 in the docs


def looped_loss(demo, ids, keep, chosen=lambda module, head: True, end=0):
    """The loss of each next token with attention as a plain loop, (T - 1,)."""
    with torch.no_grad(), budgeted(demo.model, keep, chosen, end):
        logits = demo.model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").double()


@PERIODS
def test_a_window_costs_the_induction_heads_and_no_others(demo, period):
    """What was measured is in docs/budgets.md."""
    texts = [repeated(seed, period) for seed in range(TEXTS)]
    found = {
        name: attnscope.knockout(demo, texts, keep=f"stream:4+{period * 32 // 50}", select=heads).table().to_pylist()[0]
        for name, heads in {"induction": INDUCTION, "others": OTHERS}.items()
    }
    assert found["induction"]["low"] > 5
    assert found["induction"]["p"] < 0.001
    assert -0.1 < found["others"]["median_low"] < found["others"]["median_high"] < 0.1
    assert abs(found["others"]["effect"]) < 0.1
    assert found["induction"]["kept"] == pytest.approx(found["others"]["kept"])


def test_stream_costs_what_transformers_loses_with_its_mask_and_keeps_what_a_loop_counts(demo):
    found = attnscope.knockout(demo, BANK, keep="stream:1+4")
    ids = torch.tensor([found.cases[0].ids])
    mask, shares = torch.full((TOKENS, TOKENS), -torch.inf), []
    for row in range(TOKENS):
        kept = [key for key in range(row + 1) if key < 1 or row - key < 4]
        mask[row, kept] = 0.0
        shares.append(len(kept) / (row + 1))
    with torch.no_grad():
        intact, cut = (
            cross_entropy(demo.model(ids, attention_mask=one).logits[0, :-1], ids[0, 1:])
            for one in (None, mask[None, None])
        )
    [row] = found.table().to_pylist()
    assert row["effect"] == pytest.approx(float(cut - intact), abs=1e-5)
    assert row["kept"] == pytest.approx(np.mean(shares[:-1]))
    assert (row["keep"], row["set"], row["layer"], row["n"]) == ("stream:1+4", "all heads", None, 1)
    assert found.facts["intact"] == pytest.approx(float(intact), abs=1e-5)
    assert row["effect"] > 0.5


@pytest.mark.parametrize("keep", ["top:3", "h2o:4"])
def test_each_head_costs_what_a_loop_says(demo, keep):
    chosen = ((0, 3), (1, 4), (3, 0))
    found = attnscope.knockout(demo, BANK, keep=keep, over="heads", select="0.3,1.4,3.0")
    together, *each = found.table().to_pylist()
    rows = {row["set"]: row for row in each}
    assert len(rows) == len(each) == 3
    ids = found.cases[0].ids
    for layer, head in chosen:
        looped = looped_loss(demo, ids, keep, lambda of, at, one=(layer, head): (of.layer_idx, at) == one)
        row = rows[f"L{layer}H{head}"]
        assert row["effect"] == pytest.approx(float(looped.mean()) - found.intact_S[0], abs=1e-5)
        assert (row["layer"], row["head"]) == (layer, head)
    looped = looped_loss(demo, ids, keep, lambda of, at: (of.layer_idx, at) in chosen)
    assert together["effect"] == pytest.approx(float(looped.mean()) - found.intact_S[0], abs=1e-5)
    assert found.facts["unshared"] is None


@pytest.mark.parametrize("keep", ["received:3", "snap:4@2"])
def test_rows_after_the_prompt_alone_are_cut(demo, keep):
    """The prompt ends at token 8; what follows is measured, and its first token is made by an intact row."""
    found = attnscope.knockout(demo, BANK, keep=keep, at=8, over="kv")
    [case] = found.cases
    assert (case.end, case.rows) == (9, tuple(range(9, 14)))
    looped = looped_loss(demo, case.ids, keep, end=9)[9:]
    together = found.table().to_pylist()[0]
    assert together["effect"] == pytest.approx(float(looped.mean()) - found.intact_S[0], abs=1e-5)
    kept = 3 if keep == "received:3" else 4
    shares = [(kept + row - 8) / (row + 1) for row in range(9, 14)]
    assert together["kept"] == pytest.approx(np.mean(shares))
    assert len(found.asked) == 1 + 4 * 3


@pytest.mark.parametrize("keep", ["stream:1+3,h2o:4", "received:3,snap:4@2"])
def test_where_each_row_has_a_pass_budgets_cost_the_same(demo, monkeypatch, keep):
    asked = {"keep": keep, "at": 8, "over": "layers"}
    together, rows = attnscope.knockout(demo, BANK, **asked).table(), []
    monkeypatch.setattr("attnscope.interventions.passes.CPU_TOKENS", 1)
    hook = demo.model.model.layers[0].register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    apart = attnscope.knockout(demo, BANK, **asked).table()
    hook.remove()
    assert set(rows) == {1}
    for name in ("effect", "kept"):
        assert apart[name].to_pylist() == pytest.approx(together[name].to_pylist(), abs=1e-5)
    assert max(apart["effect"].to_pylist()) > 0.1


def test_an_answer_is_measured_as_a_whole(demo):
    answer = " river, the bank"
    found = attnscope.knockout(demo, BANK, keep="snap:4@2,stream:1+4", answer=answer)
    [case] = found.cases
    assert len(case.answer) > 2
    assert (found.unit, case.rows[0], case.end) == ("nats", len(case.prompt) - 1, len(case.prompt))
    for place, keep in enumerate(("snap:4@2", "stream:1+4")):
        looped = looped_loss(demo, case.ids, keep, end=case.end)[list(case.rows)].sum()
        assert found.effect_SN[0, place] == pytest.approx(float(looped) - found.intact_S[0], abs=1e-4)
    foil = attnscope.knockout(demo, BANK, keep="stream:1+4", answer=answer, foil=" bank")
    assert foil.unit == "logits"


def test_the_model_s_own_tokens_are_an_answer(demo):
    found = attnscope.knockout(demo, BANK, keep="received:4", generate=6)
    [case] = found.cases
    ids = torch.tensor([case.prompt.ids])
    for _ in case.answer:
        ids = torch.cat([ids, demo.model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert tuple(ids[0, len(case.prompt) :].tolist()) == case.answer
    assert len(case.answer) == 6
    given = attnscope.knockout(demo, list(case.prompt.ids), keep="received:4", answer=list(case.answer))
    assert given.effect_SN == pytest.approx(found.effect_SN, abs=1e-6)


def test_a_budget_of_the_whole_text_runs_nothing_and_costs_nothing(demo, monkeypatch):
    sets, over = [], CacheBudget.over

    def noted(self, engine, of, *more):
        sets.append(len(of))
        return over(self, engine, of, *more)

    monkeypatch.setattr(CacheBudget, "over", noted)
    whole = "stream:0+14,stream:7+7,top:15,h2o:15"
    found = attnscope.knockout(demo, BANK, keep=whole, over="layers")
    assert set(sets) == {0}
    assert {(row["effect"], row["kept"]) for row in found.table().to_pylist()} == {(0.0, 1.0)}
    again = attnscope.knockout(demo, BANK, keep="received:9,snap:9@4", at=8)
    assert set(sets) == {0}
    assert again.effect_SN.tolist() == [[0.0, 0.0]]
    attnscope.knockout(demo, BANK, keep="stream:0+13")
    assert set(sets) == {0, 1}


def test_the_heads_that_can_bear_a_budget_are_a_selection(demo):
    one = attnscope.knockout(demo, BANK, keep="stream:1+4,top:15", over="heads")
    rows = [row for row in one.table().to_pylist() if row["head"] is not None and row["keep"] == "stream:1+4"]
    expected = {(row["layer"], row["head"]) for row in rows if row["effect"] < 0.02}
    written = one.bearable(0.02)
    chosen = select(written["stream:1+4"], demo.geometry.heads_by_layer)
    assert {(layer, head) for layer, heads in chosen.items() for head in heads} == expected
    assert 5 < len(expected) < 24
    assert written["top:15"] == "0-3"
    assert attnscope.knockout(demo, BANK, keep="stream:1+4", over="heads", select="3.1").bearable()["stream:1+4"] == ""
    with pytest.raises(UsageError, match="expected a limit above 0"):
        one.bearable(0)


def test_a_kv_group_has_a_budget_as_a_whole(demo):
    alone = attnscope.knockout(demo, BANK, keep="stream:1+4", over="kv", select="3.0").table().to_pylist()
    both = attnscope.knockout(demo, BANK, keep="stream:1+4", select="3.0-1").table().to_pylist()
    assert [row["set"] for row in alone] == ["3.0", "L3H0 L3H1"]
    assert alone[1]["effect"] == pytest.approx(both[0]["effect"], abs=1e-6)
    assert alone[1]["effect"] > alone[0]["effect"] + 0.1


@pytest.mark.parametrize("period", [10, pytest.param(50, marks=pytest.mark.e2e)])
def test_over_texts_the_upper_end_of_the_interval_decides(demo, period):
    texts = [repeated(seed, period) for seed in range(TEXTS)]
    keep = f"stream:4+{period * 40 // 50}"
    found = attnscope.knockout(demo, texts, keep=keep, over="layers")
    [row] = [row for row in found.table().to_pylist() if row["layer"] == 3]
    assert row["effect"] < row["high"] < row["high_all"]
    between = (row["high"] + row["high_all"]) / 2
    assert (3, 0) not in found.bearing(keep, between)
    assert (3, 0) in found.bearing(keep, row["high_all"] + 1e-6)


def test_what_few_texts_carry_has_no_upper_end_and_the_worst_of_them_decides(demo):
    """Two of 32 texts lose all that is lost: no interval of the mean, however small it is."""
    found = attnscope.knockout(demo, [{"text": BANK}] * TEXTS, keep="stream:1+4", over="layers")
    effect_SN = np.random.default_rng(0).normal(0, 1e-4, found.effect_SN.shape)
    effect_SN[:, 2] = 0.0
    effect_SN[:2, 2] = 1e-3, 2e-3
    made = replace(found, effect_SN=effect_SN)
    assert np.isnan(made.statistics["high_all"][2])
    assert {layer for layer, _ in made.bearing("stream:1+4", 2.1e-3)} == {0, 1, 2, 3}
    assert {layer for layer, _ in made.bearing("stream:1+4", 1.9e-3)} == {0, 2, 3}


def test_heads_are_chosen_on_half_of_the_texts_and_measured_on_the_other(demo):
    """As two studies find, one of each half."""
    texts, keep, below = [repeated(seed, 4) for seed in range(2 * TEXTS)], "stream:1+2", 1.0
    found = attnscope.knockout(demo, texts, keep=keep, over="layers", below=below)
    chosen = attnscope.knockout(demo, texts[:TEXTS], keep=keep, over="layers").bearable(below)[keep]
    heads = sum(map(len, select(chosen, demo.geometry.heads_by_layer).values()))
    assert 0 < heads < 24
    rows = found.table().to_pylist()
    assert [row["condition"] for row in rows] == ["together", "bearable", *["alone"] * 4]
    [row] = attnscope.knockout(demo, texts[TEXTS:], keep=keep, select=chosen).table().to_pylist()
    assert {**row, "condition": "bearable"} == pytest.approx(rows[1], abs=1e-6)
    assert rows[1]["n"] == TEXTS
    said = "\n".join(budget_notes(found, demo.geometry))
    assert (
        f"{keep}: {heads} of 24 heads, by layers alone, lose less than 1 nats per token on the first 32 texts" in said
    )
    worst = found.effect_SN[TEXTS:, -1].max()
    assert f"together these lose {row['effect']:+.3f} [" in said
    assert f"] on the other 32 texts, {worst:+.3f} in the worst of them" in said


def test_heads_are_written_as_short_as_they_can_be():
    widths = dict.fromkeys(range(4), 6)
    every = [(layer, head) for layer in range(4) for head in range(6)]
    assert written_heads(every, widths) == "0-3"
    assert written_heads([one for one in every if one not in ((3, 0), (3, 1))], widths) == "0-2,3.2-5"
    assert written_heads([(0, 1), (0, 3), (0, 2), (2, 5)], widths) == "0.1-3,2.5"
    assert written_heads([], widths) == ""


def test_a_folder_has_table_and_facts_and_a_stopped_run_resumes(demo, tmp_path):
    asked = {"keep": "stream:1+4,h2o:5", "over": "layers", "out": tmp_path}
    found = attnscope.knockout(demo, [{"text": BANK}, {"text": f"{BANK} of the river"}], **asked)
    table = pq.read_table(tmp_path / "budgets.parquet")
    assert table.equals(found.table().cast(table.schema))
    facts = json.loads((tmp_path / "budgets.json").read_text())
    assert (facts["schema"], facts["keep"], facts["over"]) == ("budgets/2", ["stream:1+4", "h2o:5"], "layers")
    assert [one["rows"] for one in facts["texts"]] == [[0, 14], [0, 17]]
    again = attnscope.knockout(demo, [{"text": BANK}, {"text": f"{BANK} of the river"}], **asked)
    assert again.table().equals(found.table())
    with pytest.raises(UsageError, match=r"sequences was 2, now 1; .*other texts"):
        attnscope.knockout(demo, BANK, **asked)


def test_half_precision_counts_the_effects_below_what_intact_rows_differ_by():
    demo = attnscope.load("demo", device="cpu", dtype="bfloat16")
    found = attnscope.knockout(demo, BANK, keep="stream:1+4")
    assert found.facts["spread"] < 0.1 < found.effect_SN[0, 0]
    effects = [row["effect"] for row in found.table().to_pylist()]
    told = replace(found, facts=found.facts | {"spread": 2 * max(map(abs, effects))})
    said = f"and {len(effects)} of {len(effects)} effects are smaller; rounding to bfloat16"
    assert any(said in line for line in budget_notes(told, demo.geometry))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"keep": "window:4"}, "expected a budget stream:A"),
        ({"keep": "top:4", "key": "river"}, "key does not apply to a budget"),
        ({"keep": "top:4", "query": "bank"}, "query does not apply to a budget"),
        ({"keep": "top:4", "how": "zero"}, "gives the weight of lost keys to the rest of the row"),
        ({"keep": "top:4", "over": "keys"}, "expected a budget over none, layers, kv or heads, got 'keys'"),
        (
            {"keep": "received:4"},
            "received:4 cuts rows after the prompt, and none counts: the prompt is the whole text",
        ),
        ({"keep": "top:4,snap:4@2", "answer": " of"}, "snap:4@2 cuts .* made by the prompt's last row"),
        ({"keep": "received:4", "answer": " river, the", "foil": " bank"}, "received:4 cuts rows after the prompt"),
        ({"keep": "received:4", "at": "last"}, "no token follows token 15"),
        ({"keep": "received:4", "at": "moon"}, "moon"),
        ({"keep": "top:4", "foil": " bank"}, "a foil is compared with an answer"),
        ({"keep": "top:4", "answer": " a", "foil": " a"}, "begin with the same token"),
        ({"keep": "top:4", "answer": " a", "generate": 3}, "an answer was given, and one is to be generated"),
        ({"keep": "top:4", "generate": 10**6}, "the model reads at most"),
        ({"at": 3, "key": "river"}, "at needs a budget"),
        ({"generate": 3, "key": "river"}, "generate needs a budget"),
    ],
)
def test_what_cannot_be_meant(demo, asked, message):
    with pytest.raises((InputError, UsageError), match=message) as found:
        attnscope.knockout(demo, BANK, **asked)
    assert "\n" not in str(found.value)


def test_texts_are_measured_alike_and_an_error_names_the_text(demo):
    both = [{"text": BANK, "answer": " of"}, {"text": BANK}]
    with pytest.raises(InputError, match="some texts have an answer and others have none"):
        attnscope.knockout(demo, both, keep="top:4")
    with pytest.raises(InputError, match=r"text 2: .* 99\b"):
        attnscope.knockout(demo, [{"text": BANK}, {"text": BANK, "at": 99}], keep="top:4")
    with pytest.raises(UsageError, match="text 1 is not a record of text, at, answer, foil"):
        attnscope.knockout(demo, [{"text": BANK, "key": "river"}, {"text": BANK}], keep="top:4")
    with pytest.raises(InputError, match="the text is one token"):
        attnscope.knockout(demo, [1], keep="top:4")


def test_models_without_a_cache_are_refused():
    from transformers import AutoTokenizer

    from attnscope.model.loading import DEMO_FOLDER

    model = wrap(tiny_model("bloom"), AutoTokenizer.from_pretrained(DEMO_FOLDER))
    with pytest.raises(ModelError, match="attention interface"):
        attnscope.knockout(model, [5, 6, 7], keep="top:1")


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"keep": "stream:1+4"}, []),
        ({"keep": "stream:1+4,stream:1+2,top:3"}, ["budgets_curve.png"]),
        ({"keep": "stream:1+4", "over": "heads"}, ["budgets.png"]),
        ({"keep": "stream:1+4,top:3", "over": "layers"}, ["budgets.png", "budgets_curve.png"]),
    ],
)
def test_pictures_are_drawn(demo, asked, names, tmp_path):
    from PIL import Image

    paths = save_budgets(attnscope.knockout(demo, BANK, **asked), tmp_path)
    assert [path.name for path in paths] == names
    for path in paths:
        with Image.open(path) as picture:
            assert picture.width > 300
            assert len(picture.convert("RGB").getcolors(1 << 20)) > 50


def test_a_curve_has_a_line_per_kind_over_the_share_that_is_kept(demo, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(
        "attnscope.export.study_figures.save_budget_lines", lambda path, lines, *more, **how: drawn.append(lines)
    )
    found = attnscope.knockout(demo, BANK, keep="stream:1+4,top:3,stream:1+2")
    save_budgets(found, tmp_path)
    [lines] = drawn
    assert [(line.name, list(line.labels)) for line in lines] == [("stream", ["1+4", "1+2"]), ("top", ["3"])]
    rows = {row["keep"]: row for row in found.table().to_pylist()}
    assert lines[0].x.tolist() == pytest.approx([rows["stream:1+4"]["kept"], rows["stream:1+2"]["kept"]])
    assert lines[1].effect.tolist() == pytest.approx([rows["top:3"]["effect"]])


def test_a_folder_of_another_policy_is_not_written_over(demo, tmp_path):
    cases = {keep: budget_cases(demo, AskedCache.of("the bank of the river", {}), keep) for keep in ("top:2", "top:4")}
    BudgetStudy(demo, cases["top:2"], BudgetPlan("top:2")).run(tmp_path)
    with pytest.raises(UsageError, match="keep"):
        BudgetStudy(demo, cases["top:4"], BudgetPlan("top:4")).run(tmp_path)
    assert BudgetStudy(demo, cases["top:4"], BudgetPlan("top:4")).run(tmp_path, force=True).kinds

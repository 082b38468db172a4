"""Patched pairs as a study: what a patch costs and gives back, shares, random sets, estimates, and what is no pair."""

import json
import re
from io import StringIO

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

import attnscope
from attnscope.cli.study_tables import patch_notes, patch_sheet
from attnscope.errors import InputError, UsageError
from attnscope.export import study_figures
from attnscope.export.study_figures import save_patching
from attnscope.studies.ablation_search import TRIED
from attnscope.studies.statistics import rank_correlation, ratios
from helpers.families import tiny_model
from helpers.loops import looped
from helpers.pretrained import pretrained

RIVER, FIELD = "the bank of the river, the bank of the", "the bank of the field, the bank of the"
ASKED = {"answer": " river", "foil": " field"}
INDUCTION = "L3H0,L3H1"


@pytest.fixture(scope="module")
def by_heads(demo):
    """Every head's output, from either text."""
    return attnscope.patch(demo, RIVER, FIELD, over="heads", **ASKED)


def rows_of(found):
    return {row["set"]: row for row in found.table().to_pylist()}


def logit_difference(model, ids, answer, foil, patch=None):
    with torch.no_grad(), looped(model, patch=patch):
        last = model(torch.tensor([ids])).logits[0, -1]
    return float(last[answer] - last[foil])


def test_each_head_costs_and_gives_back_what_a_loop_says(demo, by_heads):
    [pair] = by_heads.pairs
    texts, answer, foil = (pair.clean.prompt.ids, pair.corrupted.prompt.ids), pair.clean.answer[0], pair.clean.foil
    kept = [{}, {}]
    intact = []
    for text, own in zip(texts, kept, strict=True):

        def keep(module, what, value, own=own):
            own[module.layer_idx, what] = value.clone()
            return value

        intact.append(logit_difference(demo.model, text, answer, foil, keep))
    assert by_heads.facts["intact"] == pytest.approx(intact[0], abs=1e-4)
    assert by_heads.facts["corrupted"] == pytest.approx(intact[1], abs=1e-4)
    rows = rows_of(by_heads)
    for layer, head in ((3, 0), (0, 1), (1, 4)):
        found = []
        for text, other in zip(texts, reversed(kept), strict=True):

            def patch(module, what, value, layer=layer, head=head, other=other):
                if (module.layer_idx, what) != (layer, "output"):
                    return value
                value = value.clone()
                value[:, :, head] = other[layer, what][:, :, head]
                return value

            found.append(logit_difference(demo.model, text, answer, foil, patch))
        row = rows[f"L{layer}H{head}"]
        assert row["effect"] == pytest.approx(intact[0] - found[0], abs=1e-4)
        assert row["restored"] == pytest.approx(found[1] - intact[1], abs=1e-4)
        assert row["normalised"] == pytest.approx(row["effect"] / (intact[0] - intact[1]), abs=1e-5)
        assert row["restored_normalised"] == pytest.approx(row["restored"] / (intact[0] - intact[1]), abs=1e-5)
        assert (row["layer"], row["head"], row["position"]) == (layer, head, None)
    assert len(rows) == 24
    assert {(row["p_random"], row["n_random"]) for row in rows.values()} == {(None, None)}
    assert rows["L3H0"]["normalised"] > 0.4


def test_all_layers_at_the_last_token_make_the_corrupted_text(demo):
    """After its own embedding, a token is what heads wrote at it; the last token is the same in both texts."""
    rows = rows_of(attnscope.patch(demo, RIVER, FIELD, over="positions", **ASKED))
    assert rows["the(10)"]["normalised"] == pytest.approx(1, abs=1e-4)
    assert rows["the(10)"]["restored_normalised"] == pytest.approx(1, abs=1e-4)
    assert rows["river(5)"]["normalised"] > 0.8
    for name in ("<s>(0)", "bank(2)", "the(4)"):  # before the first word that differs
        assert abs(rows[name]["effect"]) < 1e-5
    assert rows["river(5)"]["position"] == 5


def test_by_layer_and_position_the_rows_are_those_of_each_alone(demo):
    rows = rows_of(attnscope.patch(demo, RIVER, FIELD, at="river,last", over="layers,positions", **ASKED))
    assert list(rows) == [f"L{layer} {name}" for layer in range(4) for name in ("river(5)", "the(10)")]
    alone = rows_of(attnscope.patch(demo, RIVER, FIELD, at="river", over="layers", **ASKED))
    for layer in range(4):
        assert rows[f"L{layer} river(5)"]["effect"] == pytest.approx(alone[f"L{layer}"]["effect"], abs=1e-4)
        assert alone[f"L{layer}"]["at"] == "5"
    assert rows["L0 river(5)"]["effect"] > 1
    assert abs(rows["L3 river(5)"]["effect"]) < 1e-5  # no later layer reads it


@pytest.mark.parametrize("what", ["output", "pattern", "key", "value"])
def test_a_text_patched_from_itself_loses_nothing(demo, what):
    found = attnscope.patch(demo, RIVER, RIVER, what=what, over="heads", **ASKED)
    rows = found.table().to_pylist()
    assert {row["effect"] for row in rows} == {row["restored"] for row in rows} == {0.0}
    assert {row["normalised"] for row in rows} == {None}
    assert found.gap is None


@pytest.fixture(params=["demo", "random", pytest.param("stories260K-llama", marks=pytest.mark.families)])
def model(request, demo):
    if request.param == "random":
        return attnscope.wrap(tiny_model("llama"), demo.tokenizer)
    return demo if request.param == "demo" else attnscope.load(str(pretrained(request.param)), device="cpu")


def test_a_gap_that_rounding_makes_has_no_shares(model):
    """Answer and foil are the two tokens whose difference is the most alike in both texts, and not equal."""
    both = [[1, *range(10, 30)], [1, *range(10, 29), 31]]
    with torch.no_grad():
        logits = [model.model(torch.tensor([ids])).logits[0, -1].double() for ids in both]
    apart, tokens = (logits[0] - logits[1]).sort()
    place = int((apart.diff() + (apart.diff() < 2e-5)).argmin())  # as large as float32 leaves of the other rounding
    answer, foil = ([int(tokens[place + one])] for one in (1, 0))
    found = attnscope.patch(model, *both, over="heads", select="0", answer=answer, foil=foil)
    assert 1e-5 < found.gap_P[0] < 1e-3
    assert found.gap is None
    for row in found.table().to_pylist():
        assert row["normalised"] is row["restored_normalised"] is None
        assert row["effect"] is not None
    assert re.fullmatch(r"the two texts differ by \S+e-0\d logits; .* shares from 0\.0\d+ on", found.no_share)
    assert (found.facts["gap"], found.facts["no_share"]) == (None, found.no_share)
    assert 0.4 < found.facts["least_gap"] / (1e-3 * np.mean([one.std() for one in logits])) < 2.5  # skewed logits


def test_keys_and_values_go_by_kv_group(demo):
    for what in ("key", "value"):
        rows = rows_of(attnscope.patch(demo, RIVER, FIELD, what=what, select="L3H0", over="heads", **ASKED))
        assert list(rows) == ["L3H0 L3H1"]
    assert rows["L3H0 L3H1"]["normalised"] > 0.9  # the value at river is what the induction heads carry on


def test_random_sets_are_of_other_heads_of_the_same_layers(demo):
    found = attnscope.patch(demo, RIVER, FIELD, select=INDUCTION, random=5, **ASKED)
    [row] = found.table().to_pylist()
    assert len(found.random) == 5
    for one in found.random:
        assert {layer for layer, _ in one.heads} == {3}
        assert len(one.heads) == 2
        assert not {(3, 0), (3, 1)} & set(one.heads)
        assert one.at == found.asked[0].patch.at
    costs = np.array([found.effect(one)[0] for one in found.random])
    ends = np.quantile(costs, [0.005, 0.995])
    assert [row["random_low"], row["random_high"]] == pytest.approx(ends.tolist(), abs=1e-6)
    assert (row["p_random"], row["n_random"]) == (pytest.approx(1 / 6), 5)  # as small as five sets can make it
    [none] = attnscope.patch(demo, RIVER, FIELD, select=INDUCTION, random=0, **ASKED).table().to_pylist()
    assert none["random_low"] is none["random_high"] is none["p_random"] is None
    assert none["n_random"] == 0
    assert row["set"] == INDUCTION


def test_estimates_say_how_well_they_order_what_was_run(demo, by_heads):
    found = attnscope.patch(demo, RIVER, FIELD, over="heads", method="gradient", **ASKED)
    rows, run = rows_of(found), rows_of(by_heads)
    tried = [name for name, row in rows.items() if row["effect"] is not None]
    assert len(tried) == found.facts["tried"] == TRIED
    assert all(row["estimate"] is not None for row in rows.values())
    for name in tried:
        assert rows[name]["effect"] == pytest.approx(run[name]["effect"], abs=1e-4)
    both = [np.array([of[name][column] for name in tried]) for of, column in ((rows, "estimate"), (run, "effect"))]
    assert found.facts["rank_correlation"] == pytest.approx(rank_correlation(*both))
    every = [np.array([of[name][column] for name in rows]) for of, column in ((rows, "estimate"), (run, "effect"))]
    assert rank_correlation(*every) > 0.7
    largest = max(rows, key=lambda name: rows[name]["estimate"])
    assert largest in tried
    assert {row["estimate"] for row in run.values()} == {None}


def test_without_a_foil_it_is_the_loss_of_the_answer(demo):
    found = attnscope.patch(demo, RIVER, FIELD, answer=" river, the", select="3")
    [pair] = found.pairs
    for text, place in ((pair.clean, 0), (pair.corrupted, 1)):
        with torch.no_grad():
            log = demo.model(torch.tensor([text.ids])).logits[0].log_softmax(-1)
        expected = -sum(float(log[row, text.ids[row + 1]]) for row in text.rows)
        assert found.intact_S[place] == pytest.approx(expected, abs=1e-4)
    assert found.facts["measure"]["unit"] == "nats"
    own = attnscope.patch(demo, RIVER, FIELD, select="3")
    assert own.pairs[0].clean.answer_text == "·river"


def test_texts_of_two_lengths_are_aligned_by_what_they_share(demo):
    longer = "the bank of the wide old field, the bank of the"
    found = attnscope.patch(demo, RIVER, longer, over="positions", random=0, **ASKED)
    [pair] = found.pairs
    shown = [pair.clean.prompt.plain[at] for at in pair.at]
    assert shown == [pair.corrupted.prompt.plain[at] for at in pair.partners]
    count = len(pair.corrupted.prompt)
    assert (pair.at[-1], pair.partners[-1]) == (10, count - 1)
    assert pair.without == len(pair.clean.prompt) - len(pair.at) > 0
    assert rows_of(found)["the(10)"]["normalised"] == pytest.approx(1, abs=1e-4)
    with pytest.raises(InputError, match=r"river\(5\) has no partner in the corrupted text"):
        attnscope.patch(demo, RIVER, longer, at="river")
    with pytest.raises(InputError, match="patterns are patched between texts of equal length, got 11 and "):
        attnscope.patch(demo, RIVER, longer, what="pattern")
    with pytest.raises(InputError, match=r"keys are patched at equal positions: the\(10\) is token 13 there"):
        attnscope.patch(demo, RIVER, longer, at="last", what="key")
    attnscope.patch(demo, RIVER, longer, at="last", what="value", random=0)


def pairs_of_ids(count):
    """Begin token, ten random ids and again the first nine: the answer is the tenth; corrupted: another tenth."""
    records = []
    for seed in range(count):
        drawn = torch.randperm(800, generator=torch.Generator().manual_seed(seed))[:21] + 100
        clean, other = drawn[:10].tolist(), [*drawn[:9].tolist(), int(drawn[20])]
        text, corrupted = ([1, *one, *one[:9]] for one in (clean, other))
        records.append({"text": text, "corrupted": corrupted, "answer": [clean[9]], "foil": [other[9]]})
    return records


def turned_round(pair):
    """The corrupted text gives the answer more than it takes: the gap is that of the pair, with the other sign."""
    return {**pair, "answer": pair["foil"], "foil": pair["answer"]}


def test_pairs_have_intervals_from_32_on(demo, tmp_path):
    records = pairs_of_ids(32)
    found = attnscope.patch(demo, records, over="heads", select="3.0,3.4", random=0, out=tmp_path)
    rows = rows_of(found)
    induction, other = rows["L3H0"], rows["L3H4"]
    assert induction["n"] == 32
    assert 0 < induction["low"] < induction["effect"] < induction["high"]
    assert 0 < induction["restored_low"] < induction["restored"] < induction["restored_high"]
    assert induction["p"] < 0.01
    assert other["effect"] < induction["effect"] / 2
    assert induction["normalised"] == pytest.approx(induction["effect"] / found.gap_P.mean())
    table = pq.read_table(tmp_path / "patching.parquet")
    assert table.equals(found.table().cast(table.schema))
    facts = json.loads((tmp_path / "patching.json").read_text())
    assert (facts["schema"], facts["what"], facts["over"]) == ("patching/2", "output", "heads")
    assert facts["pairs"][3]["answer"] == records[3]["answer"]
    assert facts["pairs"][3]["partners"] == list(range(20))
    shares = ratios(np.stack([found.effect(one.patch) for one in found.asked], 1), found.gap_P)
    ends = [[row["normalised_low"], row["normalised_high"]] for row in (induction, other)]
    assert ends == [pytest.approx([shares.low[at], shares.high[at]], nan_ok=True) for at in (0, 1)]
    assert ends[0][0] < induction["normalised"] < ends[0][1]
    assert ends[0][1] - ends[0][0] < (induction["high"] - induction["low"]) / found.gap  # both vary together
    assert induction["low_all"] < induction["low"]
    assert induction["positive"] == 1
    assert induction["restored_median_low"] < induction["restored_median"] < induction["restored_median_high"]
    assert induction["restored_normalised_low"] < induction["restored_normalised"]
    low, high = induction["low_all"], induction["high_all"]
    assert found.line.endswith(f"[{low:.3f}, {high:.3f}] logits (95 %, all 2)")
    few = attnscope.patch(demo, records[:4], over="heads", select="3", random=0)
    rows = rows_of(few)
    assert {row["low"] for row in rows.values()} == {row["p"] for row in rows.values()} == {None}
    assert [row["effect"] for row in rows.values()] == sorted((row["effect"] for row in rows.values()), reverse=True)
    expected = np.mean([found.effect(found.asked[0].patch)[:4]])
    assert rows["L3H0"]["effect"] == pytest.approx(expected, abs=1e-4)
    assert rows["L3H0"]["normalised"] == pytest.approx(expected / few.gap_P.mean())
    assert rows["L3H0"]["normalised_low"] is None
    turned = [one if place % 2 else turned_round(one) for place, one in enumerate(records)]
    undecided = attnscope.patch(demo, turned, over="heads", select="3.0", random=0)
    low, high = undecided.gap_ends
    assert low < 0 < high
    assert undecided.gap is None
    assert f"may be 0, its interval is [{low:.3f}, {high:.3f}]" in undecided.no_share
    assert undecided.table()["normalised"][0].as_py() is None
    by_place = attnscope.patch(demo, records[:4], at="10,last", over="positions", random=0)
    assert list(rows_of(by_place)) == ["token 0", "token 1"]
    with pytest.raises(UsageError, match="one by one, pairs need as many tokens, got 1 and 2"):
        attnscope.patch(demo, [{**records[0], "at": "10,last"}, {**records[1], "at": "10"}], over="positions")


def test_a_terminal_shows_effects_of_all_at_once_and_shares_with_an_interval(demo):
    found = attnscope.patch(demo, pairs_of_ids(32), what="value", over="heads", select="3", random=0)
    console = Console(width=80, file=StringIO())
    console.print(patch_sheet(found, None))
    head, first, *_ = [line for line in console.file.getvalue().splitlines() if line.strip(" ─")]
    for title in ("effect [95 %, all 3]", "share [95 %]", "restored"):
        assert title in head
    row = rows_of(found)["L3H0 L3H1"]
    assert f"{row['effect']:+.3f} [{row['low_all']:.3f}, {row['high_all']:.3f}]" in first
    assert f"{row['normalised']:.2f} [{row['normalised_low']:.2f}, {row['normalised_high']:.2f}]" in first
    assert f"{row['restored']:+.3f}" in first
    assert len(first.rstrip()) < 80
    assert "…" not in first
    assert any("p hold for all patches at once" in line for line in patch_notes(found))


@pytest.mark.e2e
def test_estimates_of_many_pairs_fit_a_terminal_and_have_no_interval(demo):
    found = attnscope.patch(demo, pairs_of_ids(32), what="value", over="heads", method="gradient", random=0)
    console = Console(width=80, file=StringIO())
    console.print(patch_sheet(found, 4))
    assert "effect [95 %, all 12]" in console.file.getvalue()
    assert "…" not in console.file.getvalue()
    assert found.line.endswith("of the gap")  # [low, high] is of what was measured


def test_a_folder_resumes_and_holds_to_what_was_asked(demo, tmp_path):
    found = attnscope.patch(demo, RIVER, FIELD, over="layers", out=tmp_path, **ASKED)
    kept = sorted((tmp_path / "patching").iterdir())
    assert kept
    again = attnscope.patch(demo, RIVER, FIELD, over="layers", out=tmp_path, **ASKED)
    assert again.table().equals(found.table())
    with pytest.raises(UsageError, match="what was 'output', now 'value'"):
        attnscope.patch(demo, RIVER, FIELD, over="layers", what="value", out=tmp_path, **ASKED)
    attnscope.patch(demo, RIVER, FIELD, over="layers", what="value", out=tmp_path, force=True, **ASKED)


def test_half_precision_says_what_is_noise():
    demo = attnscope.load("demo", device="cpu", dtype="bfloat16")
    found = attnscope.patch(demo, RIVER, FIELD, over="layers", **ASKED)
    assert found.facts["spread"] is not None
    assert rows_of(found)["L3"]["normalised"] == pytest.approx(0.82, abs=0.1)


def test_a_pair_that_differs_in_nothing_among_others_costs_exactly_0(demo):
    both = [{"text": RIVER, "corrupted": FIELD, **ASKED}, {"text": FIELD, "corrupted": FIELD, **ASKED}]
    found = attnscope.patch(demo, both, over="layers", random=0)
    for one in found.asked:
        assert found.effect(one.patch)[1] == found.restored(one.patch)[1] == 0.0
        assert found.effect(one.patch)[0] != 0.0


@pytest.mark.parametrize(
    ("method", "over"),
    [
        *(("measure", over) for over in ("heads", "layers", "positions", "layers,positions")),
        ("gradient", "kv"),
        pytest.param("measure", "kv", marks=pytest.mark.e2e),
        *(
            pytest.param("gradient", over, marks=pytest.mark.e2e)
            for over in ("heads", "layers", "positions", "layers,positions")
        ),
    ],
)
def test_a_picture_is_drawn(demo, over, method, tmp_path):
    found = attnscope.patch(demo, RIVER, FIELD, over=over, method=method, at="river,last", **ASKED)
    path = save_patching(found, tmp_path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert save_patching(attnscope.patch(demo, RIVER, FIELD, random=0), tmp_path) is None


@pytest.mark.e2e
def test_the_cells_whose_interval_holds_0_in_the_table_are_hatched(demo, tmp_path, monkeypatch):
    """By layers and positions, of pairs of as many tokens; an open end of an interval is None."""
    words = ["river", "field", "house", "boat", "bird", "hill", "bank"]
    of = [(clean, corrupted) for clean in words for corrupted in words if clean != corrupted][:34]
    pairs = [
        {"text": RIVER.replace("river", clean), "corrupted": RIVER.replace("river", other)}
        | {"answer": f" {clean}", "foil": f" {other}"}
        for clean, other in of
    ]
    found = attnscope.patch(demo, pairs, over="layers,positions", at="4,5,9,last", random=0)
    drawn = []
    monkeypatch.setattr(study_figures, "save_grid", lambda path, grid, *style: drawn.append(grid))
    save_patching(found, tmp_path)
    rows = {(f"L{row['layer']}", row["set"].partition(" ")[2]): row for row in found.table().to_pylist()}
    cells = {}
    for name, column, side in (("lost", "normalised", ""), ("given back", "restored_normalised", "restored_")):
        for number, layer in enumerate(drawn[0].layers):
            for place, position in enumerate(drawn[0].names):
                row = rows[layer, position]
                low, high = row[f"{side}normalised_low"], row[f"{side}normalised_high"]
                around_0 = (low, high) != (None, None) and (low is None or low <= 0) and (high is None or high >= 0)
                assert drawn[0].panels[name][number, place] == pytest.approx(row[column])
                assert bool(drawn[0].hatched[name][number, place]) == around_0, (name, layer, position, low, high)
                cells[name, layer, position] = around_0
    assert len(cells) == 2 * len(rows) == 32
    assert 3 < sum(cells.values()) < 29, "some are hatched, some are not"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"corrupted": None}, "no corrupted text was given"),
        ({"corrupted": "  "}, "the text is empty"),
        ({"foil": " river"}, "begin with the same token"),
        ({"what": "logits"}, "what: expected one of output, pattern, key, value"),
        ({"over": "window:2"}, "over: expected one of none, heads, kv"),
        ({"method": "guess"}, "method: expected one of measure, gradient"),
        ({"at": "99"}, "there is no token 99 of 11"),
        ({"corrupted": [1, 2, 3]}, "the text is token ids, and its answer is words"),
    ],
)
def test_what_is_no_pair_is_refused(demo, asked, said):
    with pytest.raises((InputError, UsageError), match=said):
        attnscope.patch(demo, RIVER, **{"corrupted": FIELD, **ASKED, **asked})


def test_a_notebook_shows_a_line_and_the_table(by_heads):
    assert repr(by_heads) == "PatchedPairs: 24 patches of the output, 1 pair: largest L3H0, 0.46 of the gap"
    page = by_heads._repr_html_()
    assert page.count("<tr>") == 1 + 12
    assert "12 more rows in table()" in page

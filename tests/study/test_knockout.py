"""Attention knockout as a study: the demo's known circuit, attention as a plain loop, other keys to compare with."""

import io
import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

import attnscope
from attnscope.attention.rows import RowsAgain
from attnscope.cli.study_tables import ROUNDING, cautions, cuts_sheet
from attnscope.errors import InputError, ModelError, UsageError
from attnscope.export.study_figures import save_knockout
from attnscope.hooks.listen import listen
from attnscope.interventions.spec import AskedText, Cut, CutPlan, HeadSet
from attnscope.metrics.roles import SINK_MASS
from attnscope.model.loading import wrap
from attnscope.model.selection import LINEAR, StackLayer
from attnscope.studies.knockout import OWN, SEVERAL, KnockoutStudy, cases_of, cuts_over, heads_null, permuted_null
from attnscope.studies.knockout_records import Masses, p_of_size, p_of_tails
from attnscope.studies.study import HALF
from attnscope.viewer.study_pages import CutsSide
from helpers.families import tiny_model
from helpers.loops import looped
from helpers.parity_models import roused_model

PERIOD = 20
HEADS = [(layer, head) for layer in range(4) for head in range(6)]
INDUCTION, PREVIOUS = [(3, 0), (3, 1)], [(1, 5), (2, 1)]
BANK = "the bank of the river, the bank of the"
RIVER = (  # of docs/knockout.md
    "The bank of the river was high, and the water under the old bridge was cold and dark in winter. We sat there "
    "every day until the bell rang in the town, and then we went home along the bank of the"
)


def repeated(seed):
    """Begin token and twice 20 distinct random ids: (ids up to the last but one token, its answer, edge)."""
    drawn = torch.randperm(800, generator=torch.Generator().manual_seed(seed))[:PERIOD] + 100
    ids = [1, *drawn.tolist(), *drawn.tolist()]
    return ids[:-1], ids[-1], len(ids) - 1 - PERIOD


def spelled(heads):
    return ",".join(f"L{layer}H{head}" for layer, head in heads)


def cost(demo, text, answer, heads, query, key, **how):
    """What the answer loses where some heads may not look."""
    asked = {"answer": [answer], "select": spelled(heads), "query": query, "key": key, "random": 0, **how}
    found = attnscope.knockout(demo, text, **asked)
    return float(found.effect(found.asked[0].cut)[0]), float(found.intact_S[0])


def test_the_sketch_comes_out(demo):
    """Log p: -0.020, -9.436 without the successor, -0.642 without the token before; no other key or head is missed."""
    drawn = torch.randint(100, 900, (PERIOD,), generator=torch.Generator().manual_seed(0)).tolist()
    text, answer, edge = [1, *drawn, *drawn[:-1]], drawn[-1], PERIOD
    lost, intact = cost(demo, text, answer, INDUCTION, "last", edge)
    assert (-intact, -intact - lost) == pytest.approx((-0.020, -9.436), abs=5e-4)
    assert -intact - cost(demo, text, answer, INDUCTION, "last", edge - 5)[0] == pytest.approx(-0.020, abs=5e-4)
    others = [head for head in HEADS if head not in INDUCTION]
    assert -intact - cost(demo, text, answer, others, "last", edge)[0] == pytest.approx(-0.020, abs=5e-4)
    assert -intact - cost(demo, text, answer, PREVIOUS, edge, edge - 1)[0] == pytest.approx(-0.642, abs=5e-4)


@pytest.mark.parametrize("seeds", [3, pytest.param(12, marks=pytest.mark.e2e)])
def test_the_induction_heads_need_the_successor_and_no_other_key(demo, seeds):
    """docs/knockout.md reports the same measurement over 12 seeds."""
    need, before = [], []
    others = [head for head in HEADS if head not in INDUCTION]
    for seed in range(seeds):
        text, answer, edge = repeated(seed)
        need.append(cost(demo, text, answer, INDUCTION, "last", edge)[0])
        assert abs(cost(demo, text, answer, INDUCTION, "last", edge - 5)[0]) <= 0.01
        assert abs(cost(demo, text, answer, others, "last", edge)[0]) <= 0.01
        before.append(cost(demo, text, answer, PREVIOUS, edge, edge - 1)[0])
    assert min(need) >= 5
    assert np.median(need) > 10
    assert np.median(before) > 5


@pytest.fixture(scope="module")
def by_heads(demo):
    """Every head alone, on the bank's text."""
    return attnscope.knockout(demo, BANK, key="river", over="heads", random=100)


def test_each_head_costs_what_a_loop_says(demo, by_heads):
    [case] = by_heads.cases
    rows = {row["set"]: row for row in by_heads.table().to_pylist()}
    assert len(rows) == 24
    ids = torch.tensor([case.prompt.ids])
    for name, layer, head in (("L3H0", 3, 0), ("L0H0", 0, 0)):

        def cut(module, of, row, layer=layer, head=head):
            return (5,) if (module.layer_idx, of, row) == (layer, head, 10) else ()

        with torch.no_grad(), looped(demo.model, cut):
            log = demo.model(ids).logits[0, -1].log_softmax(-1)[case.answer[0]]
        assert rows[name]["effect"] == pytest.approx(-float(log) - by_heads.intact_S[0], abs=1e-5)
        assert (rows[name]["queries"], rows[name]["keys"]) == ("10", "5")
    assert rows["L3H0"]["effect"] > 1


def test_the_mass_is_the_weight_that_was_cut(demo, by_heads):
    seen = attnscope.capture(demo, BANK)
    for row in by_heads.table().to_pylist():
        weights = seen.weights[row["layer"]][row["head"]]
        assert row["mass"] == pytest.approx(float(weights[10, 5]), abs=1e-5)


@pytest.fixture(scope="module")
def copied(demo):
    """An induction head at the successor, on a text whose second half repeats the first."""
    text, answer, edge = repeated(2)
    return attnscope.knockout(demo, text, key=edge, answer=[answer], select="L3H1,L1H0,L2H1", over="heads", random=8)


@pytest.mark.parametrize("how", ["mask", "zero"])
def test_the_null_cuts_the_same_weights_from_other_keys(demo, how):
    """Of each draw the rows and what they lose, with the weights moved by a plain loop; several keys at once."""
    text, answer, edge = repeated(2)
    asked = {"key": f"{edge - 1},{edge}", "answer": [answer], "select": "L3H1,L3H0", "random": 2, "how": how}
    found = attnscope.knockout(demo, text, **asked)
    ids, [null], effects = torch.tensor([text]), found.nulls["permuted"], []
    for draw in null.draws:
        moves = dict(draw.moved.moves[0])
        assert {edge - 1, edge} & set(moves)
        assert set(draw.cut.keys[0]) == {moves.get(key, key) for key in (edge - 1, edge)}
        lost = []
        for gone in ((), (edge - 1, edge)):

            def moved(module, what, value, moves=moves):
                if module.layer_idx != 3 or what not in ((0, 0, len(text) - 1), (0, 1, len(text) - 1)):
                    return value
                return value.index_copy(0, torch.tensor([moves.get(key, key) for key in range(len(value))]), value)

            def cut(module, head, row, gone=gone):
                return gone if (module.layer_idx, row) == (3, len(text) - 1) and head < 2 else ()

            with torch.no_grad(), looped(demo.model, cut, how, patch=moved):
                lost.append(-float(demo.model(ids).logits[0, -1].log_softmax(-1)[answer]))
        effects.append(lost[1] - lost[0])
    [row] = found.table().to_pylist()
    assert row["null_permuted"] == pytest.approx(np.mean(effects), abs=1e-5)
    assert (row["low_permuted"], row["high_permuted"]) == pytest.approx(np.quantile(effects, (0.025, 0.975)), abs=1e-5)
    assert abs(effects[0] - effects[1]) > 1e-2
    above, below = (sum(sign * (one - row["effect"]) >= 0 for one in effects) for sign in (1, -1))
    assert row["p_permuted"] == pytest.approx(min(1, 2 / 3 * (1 + min(above, below))))


def test_a_look_that_matters_has_the_smallest_p_there_is(copied):
    rows = {row["set"]: row for row in copied.table().to_pylist()}
    assert rows["L3H1"]["effect"] > 1 > rows["L3H1"]["high_permuted"]
    assert (rows["L3H1"]["p_permuted"], rows["L3H1"]["n_permuted"]) == (pytest.approx(2 / 9), 8)
    assert rows["L3H1"]["pool"] == 39  # of 40 tokens key 0 is left out
    assert rows["L1H0"]["p_permuted"] > 2 / 9
    assert rows["L2H1"]["p_permuted"] is None  # no effect is beyond rounding
    assert 0 < max(abs(rows["L2H1"][end]) for end in ("low_permuted", "high_permuted")) < 1e-5
    own = [one.cut for one in copied.asked]
    for cut, null in zip(own, copied.nulls["permuted"], strict=True):
        assert len({draw.cut.identity for draw in null.draws}) == 8
        assert all(draw.cut.heads == cut.heads and draw.cut.keys != cut.keys for draw in null.draws)
        assert all(0 not in dict(draw.moved.moves[0]) for draw in null.draws)


def test_an_answer_that_the_model_chose_has_no_null_of_other_keys(demo):
    """What is chosen as the likeliest with the values in their places is less likely with any others."""
    text, answer, edge = repeated(2)
    own = attnscope.knockout(demo, text, key=edge, select="L3H1", random=4)
    named = attnscope.knockout(demo, text, key=edge, select="L3H1", answer=[answer], random=4)
    assert own.cases[0].answer == named.cases[0].answer == (answer,)
    assert own.facts["without_null"]["permuted"] == {OWN: 1}
    assert [own.table()["n_permuted"][0].as_py(), named.table()["n_permuted"][0].as_py()] == [0, 4]
    assert any("name an answer" in line for line in cautions(own, demo.geometry))


def test_p_counts_the_cut_itself_and_has_none_within_rounding():
    draw_D = np.arange(1.0, 20.0)
    assert p_of_tails(25.0, draw_D, 0.0) == p_of_tails(-25.0, draw_D, 0.0) == 2 / 20
    assert p_of_tails(9.5, draw_D, 0.0) == 1.0
    assert p_of_tails(18.0, draw_D, 0.0) == p_of_tails(18.4, draw_D, 0.5) == 2 * 3 / 20
    assert p_of_size(-18.4, draw_D, 0.5) == 3 / 20
    assert p_of_size(25.0, draw_D, 0.0) == 1 / 20
    assert p_of_size(3.0, np.array([2.0, 4.0]), 0.0, np.array([0.5, 2.0])) == 2 / 3  # 4 and 2 per weight
    assert np.isnan(p_of_tails(1e-6, np.full(9, -1e-6), 1e-5))
    assert np.isnan(p_of_size(1e-6, np.full(9, -1e-6), 1e-5))


def test_a_text_is_one_of_the_exchanges_that_its_draws_are():
    """From one unknown text, the text itself and each draw are one exchange of the cut key away."""
    cut, keys, own = Cut("one", ((0, 0),), ((3,),)), range(1, 15), np.arange(15)
    null = permuted_null(cut, [(14,)], made([0.06] * 15, cut.keys))
    drawn = {tuple(own), *(tuple(exchanged(own, draw.moved.moves[0])) for draw in null.draws)}
    assert (len(null.draws), null.pool, len(drawn)) == (13, 14, 14)

    def values(weights):
        """The key whose value each weight has."""
        return np.argsort(weights)

    def swapped(values, key):
        found = values.copy()
        found[[3, key]] = found[[key, 3]]
        return tuple(found)

    unseen = [swapped(own, key) for key in keys]
    families = [{swapped(np.array(one), key) for key in keys} for one in unseen]
    assert {tuple(values(np.array(one))) for one in drawn} in families


def exchanged(weights, moves):
    """The weight at each key once weights have moved."""
    found = weights.copy()
    for weight, key in moves:
        found[key] = weights[weight]
    return found


def made(mass_K, keys=((3,),), rests=-1, seen=1):
    """Masses of one head of one text."""
    count = len(mass_K)
    one = Masses({0: (0,)}, keys, [count])
    one.mass[0, 0], one.seen[0, 0] = np.array([mass_K]), np.full((1, count), seen)
    one.rests[0, 0] = np.array([rests])
    return one


@pytest.mark.parametrize(
    ("masses", "rows", "why"),
    [
        (made([0.1] * 12, ((3,),)), 1, ()),
        (made([0.1] * 11, ((3,),), rests=5), 1, ("fewer than 10 keys to exchange with",)),
        (made([0.1] * 12, ((3,),), rests=3), 1, ("a sink is cut",)),
        (made([0.1] * 12, ((3,),)), 2, ("not every row and head sees the keys",)),
        (made([0.1] * 3 + [0.0] + [0.1] * 9, ((3,),)), 1, ("no weight is cut",)),
        (made([0.1] * 12, ((0,),)), 1, ("key 0 is cut",)),
    ],
)
def test_where_there_is_no_null_the_reason_is_said(masses, rows, why):
    cut = Cut("one", ((0, 0),), masses.keys)
    null = permuted_null(cut, [tuple(range(11, 11 + rows))], masses)
    assert null.why == why
    assert bool(null.draws) == (not why)


def test_a_row_that_is_cut_is_no_key_to_exchange_with_in_a_later_layer(demo):
    """Its own value there depends on the cut; in one layer it does not."""
    text, answer, edge = repeated(2)
    asked = {"key": edge, "answer": [answer], "query": f"{edge + 5}", "random": 200, "over": "window:2"}
    found = attnscope.knockout(demo, text, select="2-3", **asked)
    drawn = [{key for draw in null.draws for key in dict(draw.moved.moves[0])} for null in found.nulls["permuted"]]
    layers = [{layer for layer, _ in null.draws[0].cut.heads} for null in found.nulls["permuted"]]
    assert layers == [{2, 3}, {3}]
    assert [edge + 5 in keys for keys in drawn] == [False, True]
    own = attnscope.knockout(demo, text, select="2-3", **asked | {"key": edge + 5, "over": "none"})
    assert own.facts["without_null"]["permuted"] == {"a key is itself a row that is cut, which changes its value": 1}


def test_other_heads_are_compared_by_their_strongest_looks_of_like_weight(demo):
    found = attnscope.knockout(demo, RIVER, key="river", select="L3H1", random=12)
    [row], [null] = found.table().to_pylist(), found.nulls["heads"]
    weights, own = attnscope.capture(demo, RIVER).weights, row["mass"]
    expected = set()
    for layer, head in set(HEADS) - {(3, 1)}:
        last = np.asarray(weights[layer][head])[-1].copy()
        last[0] = 0
        rest = int(np.asarray(weights[layer][head]).mean(0).argmax())
        if np.asarray(weights[layer][head]).mean(0)[rest] > SINK_MASS:
            last[rest] = 0
        if own / 2 <= last.max() <= 2 * own:
            expected.add((((layer, head),), ((int(last.argmax()),),)))
    assert {(draw.cut.heads, draw.cut.keys) for draw in null.draws} == expected
    assert 10 <= len(expected) == row["n_heads"] <= 12
    effects = {draw.cut: float(found.effect(draw.cut)[0]) for draw in null.draws}
    for cut, effect in [*effects.items()][:2]:
        alone = attnscope.knockout(demo, RIVER, key=cut.keys[0][0], select=str(cut), random=0)
        assert alone.statistics["effect"][0] == pytest.approx(effect, abs=1e-5)
    assert row["null_heads"] == pytest.approx(np.mean([*effects.values()]))
    share = []
    for cut, effect in effects.items():
        [(layer, head)], [[key]] = cut.heads, cut.keys
        share.append(abs(effect) / float(weights[layer][head][-1, key]))
    assert row["p_heads"] == (1 + sum(one >= row["effect"] / own for one in share)) / (1 + len(share))


def test_other_heads_are_a_null_of_one_edge_alone(demo, by_heads):
    assert by_heads.facts["without_null"]["heads"].keys() == {"fewer than 10 other heads look as strongly"}
    several = attnscope.knockout(demo, BANK, key="river", over="layers", select="3", random=2)
    assert several.facts["without_null"]["heads"] == {SEVERAL: 1}
    assert several.table()["n_heads"].to_pylist() == [0]


def test_a_head_is_compared_by_no_sink():
    """Twelve heads that give key 5 half of their weight, all but two as their sink; then all look at key 7."""
    heads = [HeadSet(f"L0H{head}", ((0, head),)) for head in range(12)]
    mass_PK = np.full((12, 12), 0.02)
    mass_PK[:, 5], mass_PK[:, 7] = 0.5, 0.3
    masses = Masses({0: tuple(range(12))}, ((5,),), [12])
    masses.mass[0, 0], masses.seen[0, 0] = mass_PK, np.ones((12, 12), int)
    masses.rests[0, 0] = np.array([-1, -1, *[5] * 10])
    null = heads_null(Cut("one", ((0, 0),), ((5,),)), heads, [(11,)], masses)
    assert [draw.cut.keys for draw in null.draws] == [((5,),), *[((7,),)] * 10]


def test_what_has_no_mass_is_not_run_and_what_is_not_seen_is_null(monkeypatch):
    """Sliding windows of 8: a key before the window is seen by the full layers alone."""
    from transformers import AutoTokenizer

    from attnscope.model.loading import DEMO_FOLDER

    model = wrap(tiny_model("gemma2", sliding_window=4), AutoTokenizer.from_pretrained(DEMO_FOLDER))
    found = attnscope.knockout(model, list(range(10, 22)), key=2, answer=[30], over="layers", random=0)
    effects = {row["layer"]: row["effect"] for row in found.table().to_pylist()}
    windows = {layer.index: layer.window for layer in model.geometry.layers}
    assert {layer for layer, effect in effects.items() if effect is None} == {
        layer for layer, window in windows.items() if window
    }
    assert any(effect for effect in effects.values())
    whole = attnscope.knockout(model, list(range(10, 24)), key=2, answer=[30], random=2)
    [null] = whole.nulls["permuted"]  # keys change places in the layers that see the one that is cut
    assert {windows[layer] for layer, _ in null.draws[0].cut.heads} == {None}
    with pytest.raises(InputError, match="no query sees any of the keys in the heads that were chosen"):
        attnscope.knockout(model, list(range(10, 22)), key=2, answer=[30], select="0", random=0)

    read = RowsAgain.blocks

    def without_mass(self, query_NR):
        for block in read(self, query_NR):
            block.logits_NPrK[..., 2] = -1e5
            yield block

    monkeypatch.setattr(RowsAgain, "blocks", without_mass)
    monkeypatch.setattr("attnscope.interventions.patching.tolerance", lambda dtype: (np.inf, np.inf))
    found = attnscope.knockout(model, list(range(10, 22)), key=2, answer=[30], over="heads", select="1", random=0)
    assert {row["effect"] for row in found.table().to_pylist()} == {0.0}


def test_a_row_that_is_left_without_keys_is_reported(demo):
    found = attnscope.knockout(demo, BANK, key="*", select="L2H1,L2H3", over="heads", random=0)
    assert found.facts["emptied"] == ["L2H1", "L2H3"]
    replaced = attnscope.knockout(demo, BANK, key="*", select="L2H1,L2H3", over="heads", how="zero", random=0)
    assert replaced.table()["effect"].to_pylist() == pytest.approx(found.table()["effect"].to_pylist(), abs=1e-5)


def test_one_row_of_several_that_is_left_without_keys_is_reported(demo):
    """The first row sees the first token alone: without it nothing is left there, and all other rows see more."""
    key = {"select": "L2H1", "query": "0-10", "random": 0}
    assert attnscope.knockout(demo, BANK, key=0, over="keys", **key).facts["emptied"] == ["L2H1"]
    assert attnscope.knockout(demo, BANK, over="keys", **key).facts["emptied"] == ["L2H1"]
    assert attnscope.knockout(demo, BANK, key=1, over="keys", **key).facts["emptied"] == []


def test_zero_loses_the_weight_and_mask_gives_it_to_the_row(demo):
    both = [attnscope.knockout(demo, BANK, key="river", how=how, random=0) for how in ("mask", "zero")]
    ids = torch.tensor([both[0].cases[0].prompt.ids])
    for found, how in zip(both, ("mask", "zero"), strict=True):
        with torch.no_grad(), looped(demo.model, lambda module, head, row: (5,) if row == 10 else (), how):
            log = demo.model(ids).logits[0, -1].log_softmax(-1)[found.cases[0].answer[0]]
        assert found.statistics["effect"][0] == pytest.approx(-float(log) - found.intact_S[0], abs=1e-4)
    assert abs(both[0].statistics["effect"][0] - both[1].statistics["effect"][0]) > 1e-2


def test_an_answer_of_several_tokens_is_their_sum_and_made_cuts_in_each_row(demo):
    answer = " river, the bank"
    whole = attnscope.knockout(demo, BANK, query="made", key="river", answer=answer, random=0)
    [case] = whole.cases
    assert len(case.answer) > 2
    assert case.queries == case.rows == tuple(range(10, 10 + len(case.answer)))
    ids = torch.tensor([case.ids])
    with torch.no_grad():
        intact = demo.model(ids).logits[0].log_softmax(-1)
        with looped(demo.model, lambda module, head, row: (5,) if row in case.rows else ()):
            cut = demo.model(ids).logits[0].log_softmax(-1)
    expected = sum(float(intact[row, ids[0, row + 1]] - cut[row, ids[0, row + 1]]) for row in case.rows)
    assert whole.statistics["effect"][0] == pytest.approx(expected, abs=1e-4)
    last = attnscope.knockout(demo, BANK, query="last", key="river", answer=answer, random=0)
    assert abs(last.statistics["effect"][0] - expected) > 1e-3


def test_a_foil_gives_the_fall_of_a_logit_difference(demo):
    found = attnscope.knockout(demo, BANK, key="river", answer=" river", foil=" bank", random=0)
    [case] = found.cases
    ids = torch.tensor([case.prompt.ids])
    with torch.no_grad():
        intact = demo.model(ids).logits[0, -1]
        with looped(demo.model, lambda module, head, row: (5,) if row == 10 else ()):
            cut = demo.model(ids).logits[0, -1]
    fall = [float(one[case.answer[0]] - one[case.foil]) for one in (intact, cut)]
    assert found.statistics["effect"][0] == pytest.approx(fall[0] - fall[1], abs=1e-4)
    assert found.facts["measure"]["unit"] == "logits"


def test_windows_are_of_layers_around_one(demo):
    cases = cases_of(demo, [AskedText(BANK, key="river")])
    every = {layer: tuple(range(6)) for layer in range(4)}
    named = {
        one.cut.name: (one.layer, sorted({layer for layer, _ in one.cut.heads}))
        for one in cuts_over("window:3", every, demo.geometry, cases, "all")
    }
    assert named == {"L0-1": (0, [0, 1]), "L0-2": (1, [0, 1, 2]), "L1-3": (2, [1, 2, 3]), "L2-3": (3, [2, 3])}
    groups = [one.cut.heads for one in cuts_over("kv", {2: (0, 1, 2)}, demo.geometry, cases, "some")]
    assert groups == [((2, 0), (2, 1)), ((2, 2), (2, 3))]


def test_a_kv_group_is_cut_whole_where_one_of_its_heads_is_chosen(demo):
    one = attnscope.knockout(demo, BANK, key="river", over="kv", select="3.0", random=0)
    both = attnscope.knockout(demo, BANK, key="river", select="3.0-1", random=0)
    assert one.table()["set"].to_pylist() == ["L3H0 L3H1"]
    assert one.table()["effect"].to_pylist() == pytest.approx(both.table()["effect"].to_pylist(), abs=1e-6)


def test_texts_have_intervals_from_32_on_and_each_its_own_tokens(demo, tmp_path):
    records, late = [], {3: range(6)}
    for seed in range(32):
        text, answer, edge = repeated(seed)
        records.append({"text": text, "key": edge, "answer": [answer]})
    found = attnscope.knockout(demo, records, over="layers", select="3", random=1, out=tmp_path)
    [last] = found.table().to_pylist()
    assert last["n"] == 32
    assert 8 < last["low_all"] < last["effect"] < last["high_all"]
    assert (last["p"] < 0.01, last["positive"]) == (True, 1.0)
    sheet = io.StringIO()
    Console(file=sheet, width=80).print(cuts_sheet(found, None))
    row = f"+{last['effect']:.3f} [{last['low_all']:.3f}, {last['high_all']:.3f}]"
    for words in (row, "positive", "100 %", "keys: p"):
        assert words in sheet.getvalue()
    assert any("of all cuts at once" in line for line in cautions(found, demo.geometry))
    assert last["p_permuted"] == 1.0  # of one draw and the cut
    assert (last["n_permuted"], last["queries"], last["keys"]) == (1, None, None)
    assert last["high_permuted"] < 1 < last["effect"]
    table = pq.read_table(tmp_path / "knockout.parquet")
    assert table.equals(found.table().cast(table.schema))
    facts = json.loads((tmp_path / "knockout.json").read_text())
    assert facts["texts"][5]["keys"] == [PERIOD]
    assert facts["intact"] == pytest.approx(found.intact_S.mean())
    said = []
    plan = CutPlan(over="layers", select=late, name="3", random=1)
    again = KnockoutStudy(demo, found.cases, plan).run(tmp_path, advance=said.append)
    assert again.table().equals(found.table())
    assert said
    few = attnscope.knockout(demo, records[:4], over="layers", random=0)
    assert not any("of all cuts at once" in line for line in cautions(few, demo.geometry))
    assert {row["low"] for row in few.table().to_pylist()} == {row["p"] for row in few.table().to_pylist()} == {None}


@pytest.mark.e2e
def test_over_all_layers_of_texts_the_last_alone_is_missed(demo):
    records = [{"text": text, "key": edge, "answer": [answer]} for text, answer, edge in map(repeated, range(32))]
    found = attnscope.knockout(demo, records, over="layers", random=3)
    rows, sheet = found.table().to_pylist(), io.StringIO()
    Console(file=sheet, width=80).print(cuts_sheet(found, None))
    assert "effect [95 %, all 4]" in sheet.getvalue()
    assert [row["n"] for row in rows] == [32] * 4
    assert rows[0]["p"] > 0.01 > rows[3]["p"]
    assert (rows[3]["n_permuted"], rows[3]["p_permuted"]) == (3, 0.5)


def test_shared_layers_measure_the_same(demo, monkeypatch):
    shared = attnscope.knockout(demo, BANK, key="river", over="heads", random=0)
    assert shared.facts["unshared"] is None
    monkeypatch.setattr("attnscope.studies.study.SHARED_FROM", 10**6)
    apart = attnscope.knockout(demo, BANK, key="river", over="heads", random=0)
    assert shared.table()["effect"].to_pylist() == pytest.approx(apart.table()["effect"].to_pylist(), abs=1e-5)


@pytest.mark.parametrize("how", ["mask", "zero"])
def test_without_room_for_two_rows_they_run_one_after_the_other_and_measure_the_same(demo, monkeypatch, how):
    asked = {"key": "river", "over": "heads", "select": "1,3", "random": 2, "how": how}  # cuts, and weights that move
    together, rows = attnscope.knockout(demo, BANK, **asked), []
    monkeypatch.setattr("attnscope.interventions.passes.CPU_TOKENS", 11)
    handle = demo.model.model.layers[0].register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    apart = attnscope.knockout(demo, BANK, **asked)
    handle.remove()
    assert set(rows) == {1}
    for name, expected in together.table().to_pydict().items():
        assert apart.table()[name].to_pylist() == (pytest.approx(expected, abs=3e-5) if name != "stack" else expected)
    assert max(apart.table()["effect"].to_pylist()) > 1


@pytest.fixture(scope="module")
def in_half():
    return attnscope.load("demo", device="cpu", dtype="bfloat16")


def test_half_precision_tells_what_two_intact_rows_differ_by(in_half):
    found = attnscope.knockout(in_half, BANK, key="river", over="layers", random=0)
    assert found.facts["spread"] is not None
    assert found.facts["spread"] < 0.1 < found.table()["effect"].to_pylist()[3]
    alone = attnscope.knockout(in_half, BANK, key="river", random=0)
    assert alone.facts["spread"] is not None


def test_half_precision_counts_the_effects_below_what_intact_rows_differ_by(in_half):
    found = attnscope.knockout(in_half, BANK, key="river", over="heads", select="3", random=0)
    sizes = sorted(abs(effect) for effect in found.table()["effect"].to_pylist())
    for count, spread in ((0, sizes[0]), (4, sizes[4]), (6, 2 * sizes[5])):
        told = replace(found, facts=found.facts | {"spread": spread})
        [line] = [line for line in cautions(told, in_half.geometry) if "two intact rows" in line]
        assert line.startswith(
            f"two intact rows of one pass differ by up to {spread:.1g} nats, and {count} of 6 effects"
        )
    equal = replace(found, facts=found.facts | {"spread": 0.0})
    told = "two intact rows of one pass are equal, but rounding to bfloat16 is up to 0.4 % of each number: "
    assert f"{told}--dtype float32 shows what it is worth" in cautions(equal, in_half.geometry)
    whole = replace(found, facts=found.facts | {"spread": None})
    assert not [line for line in cautions(whole, in_half.geometry) if "rows of one pass" in line]


@pytest.mark.parametrize("dtype", HALF)
def test_the_rounding_of_half_precision_is_half_the_step_behind_1(dtype):
    after = torch.nextafter(torch.ones((), dtype=getattr(torch, dtype)), torch.tensor(2.0, dtype=getattr(torch, dtype)))
    assert f"{100 * float(after - 1) / 2:.1g} %" == ROUNDING[dtype]


def test_half_precision_moves_an_effect_by_more_than_two_intact_rows_differ(demo, in_half):
    """Both rows are rounded alike: what they differ by does not bound what rounding does to an effect."""
    exact, rounded = (attnscope.knockout(one, BANK, key="river", over="heads", random=0) for one in (demo, in_half))
    assert exact.cases[0].answer == rounded.cases[0].answer
    apart = np.abs(exact.statistics["effect"] - rounded.statistics["effect"])
    assert apart.max() > rounded.facts["spread"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"key": "river", "answer": ""}, "the answer is empty"),
        ({"key": "river", "answer": " a", "foil": " a"}, "begin with the same token"),
        ({"key": "last", "query": 3}, r"no query sees the key last: its first token is 10, and the last query 3"),
        ({"key": "river", "query": 40}, "there is no token 40 of 11"),
        ({"key": "moon"}, "moon"),
        ({}, "no key was named"),
        ({"key": "river", "over": "sides"}, "over: expected none, heads, layers"),
        ({"key": "river", "answer": [5]}, None),
    ],
)
def test_what_cannot_be_meant(demo, asked, message):
    if message is None:
        assert attnscope.knockout(demo, BANK, random=0, **asked).cases[0].answer == (5,)
        return
    with pytest.raises((InputError, UsageError), match=message):
        attnscope.knockout(demo, BANK, random=0, **asked)


def test_families_outside_the_interface_are_refused():
    from transformers import AutoTokenizer

    from attnscope.model.loading import DEMO_FOLDER

    model = wrap(tiny_model("bloom"), AutoTokenizer.from_pretrained(DEMO_FOLDER))
    with pytest.raises(ModelError, match="attention interface"):
        attnscope.knockout(model, [5, 6, 7], key=1, answer=[4], random=0)


@pytest.mark.parametrize(("over", "size"), [("heads", 400), ("window:2", 400), ("keys", 400), ("kv", 400)])
def test_a_picture_is_drawn(demo, over, size, tmp_path):
    from PIL import Image

    found = attnscope.knockout(demo, BANK, key="^first", over=over, random=2)
    with Image.open(save_knockout(found, tmp_path)) as picture:
        assert picture.width > size
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 50


def test_all_at_once_has_no_picture(demo, tmp_path):
    found = attnscope.knockout(demo, BANK, key="river", random=0)
    assert save_knockout(found, tmp_path) is None


@pytest.mark.slow
def test_edges_of_random_models_are_ranked_evenly(record_property):
    """Twenty random models, ten edges each: keys drawn at random, and the largest of their rows."""
    from transformers import AutoTokenizer

    from attnscope.model.loading import DEMO_FOLDER

    tokenizer, p_values = AutoTokenizer.from_pretrained(DEMO_FOLDER), {"drawn": [], "largest": []}
    for seed in range(20):
        generator = np.random.default_rng(seed)
        model = wrap(tiny_model("llama", seed, num_hidden_layers=2), tokenizer)
        text = generator.integers(10, 120, 60).tolist()
        weights = attnscope.capture(model, text).weights
        for _ in range(10):
            layer, head = generator.integers(2), generator.integers(4)
            largest = 1 + int(weights[layer][head][59, 1:].argmax())
            for which, key in (("drawn", int(generator.integers(1, 59))), ("largest", largest)):
                asked = {"key": key, "answer": [int(generator.integers(10, 120))], "select": f"L{layer}H{head}"}
                [row] = attnscope.knockout(model, text, **asked).table().to_pylist()
                if row["p_permuted"] is not None:
                    p_values[which].append(row["p_permuted"])
    for which, found in p_values.items():
        record_property(which, f"{np.mean(np.array(found) <= 0.05):.3f} of {len(found)}")
        assert len(found) > 150
        assert np.mean(np.array(found) <= 0.05) <= 0.10
        assert 0.35 <= np.mean(np.array(found) <= 0.5) <= 0.65


# Linear layers: a cut token writes nothing into the state that the asked rows read.

WORDS = "the bank of the river, the old bridge, the bank of the town and the"


def delta_by_hand(tokens, values_TV, head, cut, how):
    """(T, V) of one head in float64, a step per token; cut: the tokens that write nothing."""
    g, beta = (tokens[name][0, :, head].double() for name in ("g", "beta"))
    shared = tokens["beta"].shape[2] // tokens["key"].shape[2]  # heads of values that share a key
    query, key = (tokens[name][0, :, head // shared].double() for name in ("query", "key"))
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state_DV = torch.zeros(key.shape[1], values_TV.shape[1], dtype=torch.float64)
    rows = []
    for t, value_V in enumerate(values_TV.double()):
        state_DV = state_DV * g[t].exp()
        if t in cut and how == "zero":
            value_V = 0 * value_V
        if not (t in cut and how == "mask"):
            state_DV = state_DV + torch.outer(key[t], beta[t] * (value_V - key[t] @ state_DV))
        rows.append(query[t] @ state_DV / key.shape[1] ** 0.5)
    return torch.stack(rows)


def lost_by(hybrid, case, changed):
    """What the answer loses where linear layers give something else; changed: a call -> its output, or None."""
    ids_1T, row = torch.tensor([case.ids]), case.rows[0]
    logits = [
        listen(hybrid.model, ids_1T, lambda call: None, change=change, mixers=True, logits_at=[row]).logits[0, 0]
        for change in (None, changed)
    ]
    before, after = (float(one.log_softmax(-1)[case.answer[0]]) for one in logits)
    return before - after


@pytest.mark.parametrize("how", ["mask", "zero"])
def test_a_token_that_writes_nothing_is_missed_as_a_loop_of_the_rule_says(hybrid, how):
    keys, head, layer = [10, 12], 1, StackLayer(1, LINEAR)
    question = AskedText(WORDS, query="11:", key="10,12", answer=" river")
    plan = CutPlan(how=how, random=0, select={layer: (head,)}, name="linear.1.1")
    study = KnockoutStudy.of(hybrid, [question], plan)
    found = study.run()
    [case], [cut] = study.cases, study.sets
    assert (case.keys, min(case.queries)) == ((10, 12), 11)

    def changed(call):
        if call.index != layer:
            return None
        rule, output = call.P.rule, call.output_BQHV.clone()
        rows = {
            cut: delta_by_hand(dict(rule.tokens), rule.values_BTHV[0, :, head], head, cut, how)
            for cut in ((), tuple(keys))
        }
        torch.testing.assert_close(output[0, :, head], rows[()].float(), atol=1e-5, rtol=1e-4)
        for query in case.queries:
            output[0, query, head] = rows[tuple(keys)][query].float()
        return output

    expected = lost_by(hybrid, case, changed)
    assert abs(expected) > 1e-4
    assert float(found.effect(cut)[0]) == pytest.approx(expected, abs=2e-5)
    row = found.table().to_pylist()[0]
    assert row["stack"] == "linear"
    said = [line for line in cautions(found, hybrid.geometry) if "linear layer" in line]
    assert [line.startswith("a linear layer has no mask") for line in said] == [how == "mask"]


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_the_mass_is_of_the_map_and_a_value_of_0_is_its_column(demo, family):
    """`falcon_h1` has a head of attention of the same number, and a rule that erases nothing."""
    loaded = wrap(roused_model(family), demo.tokenizer)
    layer, ids = StackLayer(2, LINEAR), [5, 9, 17, 3, 60, 2, 33, 8, 21]
    question = AskedText(ids, query="last", key="7", answer=[7])
    plan = CutPlan(how="zero", random=0, select={layer: (0,)})
    study = KnockoutStudy.of(loaded, [question], plan)
    found, [case], [cut] = study.run(), study.cases, study.sets
    maps = []

    def changed(call):
        if call.index != layer:
            return None
        M_TT = call.P.rows(0, call.P.queries)[0, 0]
        maps.append(M_TT.clone())
        M_TT[8, 7] = 0
        output = call.output_BQHV.clone()
        output[0, 8, 0] = (M_TT @ call.P.rule.values_BTHV[0, :, 0])[8]
        return output

    expected = lost_by(loaded, case, changed)
    assert abs(expected) > 1e-5
    assert float(found.effect(cut)[0]) == pytest.approx(expected, abs=1e-5)
    size_T = maps[0][8].abs()
    assert found.mass(cut) == pytest.approx(float(size_T[7] / size_T.sum()), abs=1e-5)
    if family == "falcon_h1":  # no erasing: both are one
        masked = replace(study, plan=replace(plan, how="mask")).run()
        assert float(masked.effect(cut)[0]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("how", ["mask", "zero"])
def test_a_null_of_a_linear_head_has_the_values_of_keys_change_places(hybrid, how):
    layer = StackLayer(2, LINEAR)
    question = AskedText(WORDS, query="last", key="14", answer=" river")
    study = KnockoutStudy.of(hybrid, [question], CutPlan(how=how, random=2, select={layer: (2,)}))
    found, [case] = study.run(), study.cases
    [null], effects = found.nulls["permuted"], []
    assert len(null.draws) == 2
    for draw in null.draws:
        for cut in (draw.cut, draw.moved):
            value_of = {key: key for key in range(len(case.prompt))} | dict(cut.moves[0])  # writer: whose value

            def changed(call, cut=cut, value_of=value_of):
                if call.index != layer:
                    return None
                rule, output = call.P.rule, call.output_BQHV.clone()
                values_TV = rule.values_BTHV[0, [*value_of.values(), *range(len(value_of), call.P.keys)], 2]
                silent = {writer for writer, key in value_of.items() if key in cut.keys[0]}
                query = case.queries[0]
                output[0, query, 2] = delta_by_hand(dict(rule.tokens), values_TV, 2, silent, how)[query].float()
                return output

            expected = lost_by(hybrid, case, changed)
            assert float(found.effect(cut)[0]) == pytest.approx(expected, abs=2e-5)
            effects.append(abs(expected))
    assert max(effects) > 2e-4


def test_softmax_and_linear_heads_are_cut_in_one_pass_and_each_alone(hybrid):
    plan = {"answer": " river", "key": "4", "random": 0}
    both = attnscope.knockout(hybrid, WORDS, select="3.0,linear.2", over="layers", **plan)
    assert [row["set"] for row in both.table().to_pylist()] == ["linear L2", "L3"]
    assert [row["stack"] for row in both.table().to_pylist()] == ["linear", "decoder"]
    for item, select in zip(both.asked, ("linear.2", "3.0"), strict=True):
        alone = attnscope.knockout(hybrid, WORDS, select=select, **plan)
        assert both.effect(item.cut) == pytest.approx(alone.effect(alone.asked[0].cut), abs=1e-5)
    assert {item.cut.heads[0][0] for item in attnscope.knockout(hybrid, WORDS, over="layers", **plan).asked} == {3}
    said = CutsSide(both, hybrid.geometry).said
    assert [(one["stack"], one["layer"], one["heads"]) for one in said["layers"]] == [
        ("linear", 2, 4),
        ("decoder", 3, 4),
    ]
    assert [(one["at"], one["head"]) for one in said["heads"]] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    assert [row["at"] for row in said["cuts"]["rows"]] == [0, 1]
    with pytest.raises(UsageError, match="linear L2 caches no keys"):
        attnscope.knockout(hybrid, WORDS, keep="top:4", select="linear.2")


def test_a_look_is_compared_with_those_of_heads_of_its_own_stack(hybrid):
    question = AskedText(WORDS, query="last", key="14", answer=" river")
    select = {StackLayer(1, LINEAR): (0,), 3: (0,)}
    study = KnockoutStudy.of(hybrid, [question], CutPlan(over="heads", random=2, select=select))
    linear, softmax = ({heads.heads[0] for heads in study.alike(cut)} for cut in study.sets)
    assert linear == {(StackLayer(layer, LINEAR), head) for layer in range(3) for head in range(4)}
    assert softmax == {(3, head) for head in range(4)}

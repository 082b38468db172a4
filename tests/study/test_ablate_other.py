"""`attnscope ablate` with direct effects and its figure, and asked otherwise: pairs, a pruning, a screen."""

import math
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from attnscope.export.study_figures import Shown, costs_of, effect_panels, shown_of
from attnscope.interventions.passes import measured, prepared
from attnscope.interventions.spec import HeadSet
from attnscope.model.selection import LINEAR, StackLayer
from attnscope.studies.ablation import AblationStudy, Direct, HeadSets, copy, direct_means, load_ablation
from attnscope.studies.ablation_search import PruneStudy
from helpers.command_line import call

FEW = ("--sequences", "2", "--replace", "zero")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """The copy task on texts of 21 tokens."""
    monkeypatch.setattr("attnscope.studies.ablation.PERIOD", 10)


def asked(*arguments):
    result = call("ablate", "demo", *FEW, *arguments, "--format", "jsonl").ok()
    return result.records, result.err


def test_direct_effects_stand_beside_each_head_alone(demo, tmp_path):
    rows, _ = asked("--select", "3.0-1", "--random", "0", "--each", "--out", str(tmp_path / "a"))
    expected = direct_means(prepared(demo, copy(demo, sequences=2), [], "zero")).values
    alone = {row["heads"]: row for row in rows if (row["condition"], row["set"]) == ("alone", "each head")}
    assert list(alone) == [f"L{layer}H{head}" for layer in range(4) for head in range(6)]
    for layer, head in expected:
        assert alone[f"L{layer}H{head}"]["direct"] == pytest.approx(expected[layer, head], abs=1e-5)
    assert {row["direct"] for row in rows if row["condition"] == "together"} <= {None}
    assert (tmp_path / "a" / "ablation.png").stat().st_size > 5000


def test_the_figure_shows_what_was_measured(demo):
    task, both = copy(demo, sequences=2), HeadSet("both", ((3, 0), (3, 1)))
    said = Direct({(3, 0): 2.0}, "of the logits before their cap at 30")
    found = AblationStudy(demo, task, HeadSets.of([both], demo.geometry, random=0), "zero", direct=said).run()
    direct, alone = shown_of(found)
    [bar] = costs_of(replace(found, direct=None).table().to_pydict())
    cost = dict(zip(["alone", "both"], measured(demo, task, [HeadSet("", ((3, 1),)), both], "zero").T[1:], strict=True))
    intact = found.intact_S.mean()
    assert direct.values == {(3, 0): 2.0}
    assert alone.values[3, 1] == pytest.approx(cost["alone"].mean() - intact, abs=1e-5)
    assert (bar.name, bar.value) == ("both, 2 heads", pytest.approx(cost["both"].mean() - intact, abs=1e-5))
    assert all(map(math.isnan, (*bar.interval, *bar.random))), "too few sequences, and no random sets"
    assert found.facts["direct"] == said.note
    without = AblationStudy(
        demo, task, HeadSets.of([both], demo.geometry, random=0), "zero", direct=Direct({}, "no way")
    ).run()
    assert [one.name for one in shown_of(without)] == ["alone"]
    assert without.table()["direct"].null_count == len(without.table())


@pytest.mark.e2e
def test_heads_of_linear_layers_are_taken_away_beside_those_of_attention(hybrid, tmp_path):
    arguments = ("--select", "linear.1.0,3.1", "--random", "2", *FEW, "--format", "jsonl", "--out", str(tmp_path / "a"))
    rows = call("ablate", hybrid.name, *arguments).ok().records
    linear, both = HeadSet("", ((StackLayer(1, LINEAR), 0),)), HeadSet("", ((StackLayer(1, LINEAR), 0), (3, 1)))
    expected = measured(hybrid, copy(hybrid, sequences=2), [linear, both], "zero").mean(0)
    together = {row["heads"]: row["effect"] for row in rows if row["condition"] == "together"}
    assert list(together) == ["linear L1H0 L3H1", "linear L1H0", "L3H1"]
    assert together["linear L1H0"] == pytest.approx(expected[1] - expected[0], abs=1e-6)
    assert together["linear L1H0 L3H1"] == pytest.approx(expected[2] - expected[0], abs=1e-6)
    assert {row["heads"] for row in rows if row["condition"] == "random"} <= {
        f"{one}{other}"
        for one in ("", "linear L1H1 ", "linear L1H2 ", "linear L1H3 ")
        for other in ("L3H0", "L3H2", "L3H3")
    } | {f"linear L1H{head}" for head in (1, 2, 3)}
    kept = load_ablation(tmp_path / "a")
    assert [heads.heads for heads in kept.asked.named][:2] == [both.heads, linear.heads]
    assert call("ablate", hybrid.name, *arguments).ok().records == rows


def test_a_study_of_linear_heads_is_read_again_and_resumes(hybrid, tmp_path):
    task, both = copy(hybrid, sequences=2), HeadSet("both", ((StackLayer(1, LINEAR), 0), (3, 1)))
    study = AblationStudy(hybrid, task, HeadSets.of([both], hybrid.geometry, random=2), "zero")
    found = study.run(tmp_path)
    assert found.facts["sets"] == {"both": ["linear L1H0", "L3H1"]}
    assert load_ablation(tmp_path).asked.named == (both,)
    steps = []
    assert study.run(tmp_path, advance=steps.append).table().equals(found.table())
    assert study.cost().steps == study.planned.token_layers(study.asked.sets)


def test_the_steps_of_a_pruning_name_the_stack_of_their_heads(hybrid):
    task, heads = copy(hybrid, sequences=2), [(StackLayer(2, LINEAR), 0), (3, 1)]
    table = PruneStudy(hybrid, task, heads, "zero").run().table().to_pydict()
    steps = set(zip(table["stack"], table["layer"], table["head"], strict=True))
    assert steps == {("linear", 2, 0), ("decoder", 3, 1)}
    assert "stack" not in PruneStudy(hybrid, task, heads[1:], "zero").run().table().column_names


def test_a_map_of_heads_has_a_row_for_each_stack_of_a_layer():
    heads = [(3, 0), (3, 1), (StackLayer(3, LINEAR), 0)]
    [panel] = effect_panels(heads, [Shown("alone", "nats", {heads[1]: 1.0, heads[2]: 2.0}, "effect")])
    assert panel.values_LH == pytest.approx(np.array([[np.nan, 1.0], [2.0, np.nan]]), nan_ok=True)


def test_pairs_are_printed_and_written(demo, tmp_path):
    rows, said = asked("--select", "3.0-1,1.5", "--pairs", "--out", str(tmp_path / "a"))
    task, names = copy(demo, sequences=2), [(row["layer"], row["other_layer"]) for row in rows]
    assert sorted(names) == [(1, 3), (1, 3), (3, 3)]
    assert names[0] == (3, 3)  # the largest synergy
    loss = measured(
        demo, task, [HeadSet(str(heads), heads) for heads in (((3, 0), (3, 1)), ((3, 0),), ((3, 1),))], "zero"
    )
    pair, one, other = (loss[:, 1:] - loss[:, :1]).mean(0)
    assert rows[0]["pair"] == pytest.approx(pair, abs=1e-5)
    assert rows[0]["synergy"] == pytest.approx(pair - one - other, abs=1e-5)
    assert rows[0]["low"] is rows[0]["p"] is None  # under 32 sequences
    assert (rows[0]["positive"], rows[0]["p_positive"]) == (1.0, 1.0)  # of two sequences
    assert "pairs of 3 heads on 2 sequences of copy: " in said
    written = pq.read_table(tmp_path / "a" / "pairs.parquet").to_pylist()
    assert rows == [
        row
        | {"pair": pytest.approx(row["pair"]), "sum": pytest.approx(row["sum"])}
        | {name: pytest.approx(row[name]) for name in ("synergy", "median")}
        for row in written
    ]


def test_a_pruning_is_printed_drawn_and_goes_on(tmp_path):
    arguments = ("--select", "3.0-1", "--prune", "--out", str(tmp_path / "a"))
    rows, said = asked(*arguments)
    assert [(row["step"], row["layer"]) for row in rows] == [(1, 3), (2, 3)]
    assert rows[1]["loss"] > rows[0]["loss"]
    assert f"intact {rows[0]['loss'] - rows[0]['effect']:.3f} nats per token" in said
    assert (tmp_path / "a" / "prune.png").stat().st_size > 5000
    kept = tmp_path / "a" / "prune" / "step-00001.npz"
    with np.load(kept) as step:
        told = dict(step)
    np.savez(kept, **{**told, "value": 77.0})
    assert asked(*arguments)[0][0]["loss"] == 77.0
    other = call("ablate", "demo", "--sequences", "3", *arguments)
    assert (other.code, "sequences was " in other.err) == (2, True)


def test_the_screen_says_how_far_it_can_be_trusted():
    rows, said = asked("--method", "gradient")
    assert len(rows) == 24
    assert sum(row["ablated"] is not None for row in rows) == 8
    assert all(row["size"] == pytest.approx(abs(row["size"])) for row in rows)
    assert "rank correlation with ablation of 8 heads, on the same sequences: signed " in said
    one = call("ablate", "demo", *FEW, "--method", "gradient", "--top", "3", columns=100).out.decode()
    assert [line.split()[0] for line in one.splitlines()[-4:-1]] == [
        f"L{row['layer']}H{row['head']}" for row in sorted(rows, key=lambda row: -row["signed"])[:3]
    ]


@pytest.mark.parametrize("question", [["--pairs", "--select", "3.*"], ["--prune"], ["--method", "gradient"]])
def test_every_question_says_its_cost_first(question, tmp_path):
    result = call("ablate", "demo", *question, "--dry-run", "--out", str(tmp_path / "a"))
    assert (result.code, b"tokens x layers, about" in result.out) == (0, True)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--pairs", "--prune"], 2, "--pairs and --prune were both given; ask one question at a time"),
        (["--prune", "--method", "gradient"], 2, "--prune and --method gradient were both given"),
        (["--prune", "--by", "kv"], 2, "--by kv is for sets, and --prune was given"),
        (["--pairs", "--each"], 2, "--each is for sets, and --pairs was given"),
        (["--pairs", "--controls", "all"], 2, "--controls all is for sets, and --pairs was given"),
        (["--pairs", "--select", "3.0"], 4, "a pair takes two heads, and one was named"),
        (["--method", "guess"], 2, "'guess'"),
    ],
)
def test_bad_questions_in_one_line(arguments, code, said):
    result = call("ablate", "demo", "-q", *FEW, *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (code, b"", 1)
    assert said in result.err

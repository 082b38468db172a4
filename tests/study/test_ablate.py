"""`attnscope ablate`: its table against the losses themselves, its folder, a run that goes on, and bad inputs."""

import contextlib
import io
import json
import os
import re
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest

import attnscope
from attnscope.cli import output
from attnscope.cli.study_tables import sets_sheet
from attnscope.errors import UsageError
from attnscope.export.study_figures import costs_of
from attnscope.interventions.passes import Passes, measured
from attnscope.interventions.spec import HeadSet
from attnscope.model.loading import DEMO_FOLDER
from attnscope.studies.ablation import AblationStudy, HeadSets, copy, direct_means
from attnscope.studies.statistics import effect_columns
from attnscope.utils import display as cells
from helpers.atlases import made_atlas
from helpers.command_line import call

SETS = [HeadSet("induction", ((3, 0), (3, 1))), HeadSet("one", ((1, 4),))]


@pytest.fixture(scope="module")
def studied(demo, tmp_path_factory):
    """Two sets on 4 sequences, a few random sets beside them, and the folder that holds them."""
    folder, task = tmp_path_factory.mktemp("ablate"), copy(demo, sequences=4)
    asked = HeadSets.of(SETS, demo.geometry, random=3)
    said = []
    study = AblationStudy(demo, task, asked)
    found = study.run(folder, advance=said.append)
    assert sum(said) == study.cost().steps
    return task, asked, found, folder


def named(sets):
    """Sets as the public call takes them."""
    return {one.name: str(one).split() for one in sets}


def rows_of(table, kind):
    return [row for row in table.to_pylist() if row["condition"] == kind]


def test_the_table_has_every_set_head_and_random_set(demo, studied):
    task, asked, found, _ = studied
    table = found.table()
    expected = measured(demo, task, asked.sets)
    effects = dict(zip(map(str, asked.sets), (expected[:, 1:] - expected[:, :1]).mean(0), strict=True))
    assert {(row["condition"], row["set"], row["heads"]) for row in table.to_pylist()} >= {
        ("together", "induction", "L3H0 L3H1"),
        ("alone", "induction", "L3H1"),
        ("alone", "one", "L1H4"),
    }
    assert all(row["effect"] == pytest.approx(effects[row["heads"]], abs=1e-6) for row in table.to_pylist())
    assert {row["n"] for row in table.to_pylist()} == {4}
    random = [row["effect"] for row in rows_of(table, "random") if row["set"] == "induction"]
    together = rows_of(table, "together")[0]
    assert len(random) == 3
    assert together["p_random"] == 1 / 4  # as small as three random sets can make it
    assert together["n_random"] == 3
    assert min(random) <= together["random_low"] <= together["random_high"] <= max(random)
    assert {row["low"] for row in table.to_pylist()} == {None}  # under 32 sequences


def test_from_32_sequences_on_there_are_intervals(demo, monkeypatch):
    monkeypatch.setattr("attnscope.studies.ablation.PERIOD", 10)
    sets = [HeadSet("late", ((3, 0), (3, 1))), HeadSet("L3H0", ((3, 0),))]
    found = attnscope.ablate(demo, named(sets), sequences=32, random=0).found
    together, *_ = rows_of(found.table(), "together")
    assert together["low"] < together["effect"] < together["high"]
    assert together["low"] > 7
    assert costs_of(found.table().to_pydict())[0].interval == (together["low_all"], together["high_all"])
    # each set once, though one is alone a head of two: none counts twice among all at once
    every = {"L3H0 L3H1": sets[0], "L3H0": sets[1], "L3H1": HeadSet("", ((3, 1),))}
    expected = effect_columns(np.stack([found.effect(one) for one in every.values()], 1))
    rows = found.table().to_pylist()
    assert [row["heads"] for row in rows] == ["L3H0 L3H1", "L3H0", "L3H1", "L3H0", "L3H0"]
    for row in rows:
        stated = {name: np.nan if row[name] is None else row[name] for name in expected}
        assert stated == pytest.approx(
            {name: of[list(every).index(row["heads"])] for name, of in expected.items()}, nan_ok=True
        )
    assert together["random_low"] is together["p_random"] is None


def test_the_folder_holds_the_table_and_what_it_is_of(studied):
    _, _, found, folder = studied
    table = pq.read_table(folder / "ablation.parquet")
    assert table.equals(found.table().cast(table.schema))
    facts = json.loads((folder / "ablation.json").read_text())
    assert facts["sets"] == {"induction": ["L3H0", "L3H1"], "one": ["L1H4"]}
    assert facts["intact"] == pytest.approx(found.intact_S.mean())
    assert (facts["replacement"], facts["unshared"], facts["spread"]) == ("mean", None, None)


def test_a_run_that_was_stopped_goes_on_and_ends_the_same(demo, tmp_path, monkeypatch):
    monkeypatch.setattr("attnscope.interventions.passes.CPU_TOKENS", 4 * 101)
    monkeypatch.setattr("attnscope.api.ablate.save_ablation", lambda *given: None)  # test_ablate_other draws
    asked = {"sequences": 2, "random": 3, "out": tmp_path}
    whole = attnscope.ablate(demo, named(SETS), **asked)
    readings = sorted((tmp_path / "ablation").glob("*.npz"))
    assert len(readings) == -(-len(whole.found.asked.sets) // 3)
    readings[1].unlink()
    (tmp_path / "ablation.parquet").unlink()
    run, took = [], Passes.measured
    monkeypatch.setattr(Passes, "measured", lambda self, sets, *how: run.append(sets) or took(self, sets, *how))
    again = attnscope.ablate(demo, named(SETS), **asked)
    assert [len(sets) for sets in run] == [3]
    assert again.table().equals(whole.table())
    assert (tmp_path / "ablation.parquet").exists()


def test_another_run_is_not_mixed_in(demo, studied):
    *_, folder = studied
    with pytest.raises(UsageError, match=": replacement was "):
        attnscope.ablate(demo, named(SETS), sequences=4, random=3, replace="zero", out=folder)


def test_other_weights_of_the_same_name_are_not_mixed_in(demo, studied, monkeypatch):
    *_, folder = studied
    monkeypatch.setattr("attnscope.studies.study.weights_sha256", lambda *folders: {"model.safetensors": "0"})
    with pytest.raises(UsageError, match=": other weights;"):
        attnscope.ablate(demo, named(SETS), sequences=4, random=3, out=folder)


# the command

FAST = ("--sequences", "2", "--random", "2")


def test_the_command_prints_a_table_and_writes(tmp_path):
    result = call("ablate", "demo", "--select", "3.0-1", *FAST, "--out", str(tmp_path / "a"), columns=140).ok()
    lines = [line.split() for line in result.out.decode().splitlines()]
    at = next(place for place, line in enumerate(lines) if line[:1] == ["3.0-1"])
    assert [line[0] for line in lines[at : at + 3]] == ["3.0-1", "L3H0", "L3H1"]
    assert "intact 0." in result.err
    assert "p: (1 + those that cost as much as the set) / (1 + all)" in result.err
    assert (tmp_path / "a" / "ablation.parquet").exists()


def random_sets(result):
    """How many the table says there are for the first set."""
    return re.search(r"^ 3\.0-1 .*?random sets: (\d+) ", result.out.decode(), re.DOTALL | re.MULTILINE)[1]


@pytest.mark.parametrize("columns", [80, 200])
def test_the_table_is_whole_at_80_columns(studied, columns):
    """Every number of the table of sets and heads stands in the row of its set or head."""
    found = studied[2]
    with patch.dict(os.environ, {"COLUMNS": str(columns)}), contextlib.redirect_stdout(io.StringIO()) as printed:
        output.show(sets_sheet(found, None))
    lines = printed.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in "".join(lines)
    shown = [line.split() for line in lines]
    for row in found.table().to_pylist():
        if row["condition"] != "random":
            name = row["set"] if row["condition"] == "together" else row["heads"]
            [line] = [line for line in shown if line[:1] == [name]]
            assert cells.effect(row["effect"]) in line
            assert [cells.p_value(row["p"]), f"{100 * row['positive']:.0f}", "%"] == line[-3:]


def test_of_a_large_set_the_costliest_heads_have_a_row(demo):
    every = {"all": [f"L{layer}H{head}" for layer in range(4) for head in range(6)]}
    found = attnscope.ablate(demo, every, sequences=2, random=0, replace="zero").found
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        output.show(sets_sheet(found, None))
    alone = sorted(
        (row for row in found.table().to_pylist() if row["condition"] == "alone"), key=lambda row: -row["effect"]
    )
    assert re.findall(r"^   (L\dH\d)", printed.getvalue(), re.MULTILINE) == sorted(row["heads"] for row in alone[:8])
    assert "… 16 more heads" in printed.getvalue()


def test_a_set_of_one_head_has_one_row(demo):
    sets = {"L1H4": ["L1H4"], "alone": ["L1H4"]}
    found = attnscope.ablate(demo, sets, sequences=2, random=0, replace="zero").found
    direct = direct_means(Passes.planned(demo, copy(demo, sequences=2), "zero"))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        output.show(sets_sheet(found, None))
    lines = printed.getvalue().splitlines()
    own, together, part = (line.split() for line in lines if re.match(r" +(L1H4|alone) ", line))
    assert own == part == ["L1H4", cells.effect(direct.values[1, 4]), *together[1:]]


def test_random_sets_say_how_many_they_are_and_of_which_heads(tmp_path, monkeypatch):
    """Layer 3 has C(6, 2) pairs: without the set's own heads C(4, 2), of all heads all but the set itself."""
    monkeypatch.setattr("attnscope.studies.ablation.PERIOD", 10)
    monkeypatch.setattr("attnscope.api.ablate.save_ablation", lambda *given: None)  # test_ablate_other draws
    asked = ("ablate", "demo", "--select", "3.0-1", "--sequences", "2", "--format", "table")
    unnamed = call(*asked, "--out", str(tmp_path), columns=140)
    assert random_sets(unnamed) == "6"
    assert "drawn from the heads that no set names; --controls all: from all" in unnamed.err
    refused = call(*asked, "--controls", "all", "--out", str(tmp_path))
    assert (refused.code, "controls was " in refused.err) == (2, True)
    every = call(*asked, "--controls", "all", "--out", str(tmp_path), "--force", columns=140)
    assert random_sets(every) == "14"
    assert "drawn from all heads" in every.err
    assert json.loads((tmp_path / "ablation.json").read_text())["controls"] == "all"


def test_without_random_sets_nothing_is_said_of_them():
    none = call(
        "ablate", "demo", "--select", "3.0-1", "--sequences", "2", "--format", "table", "--random", "0", columns=140
    )
    assert (none.code, "random sets are drawn" in none.err) == (0, False)


def test_every_head_of_a_selection_is_a_set_too():
    result = call("ablate", "demo", "--select", "3.0-1", *FAST, "-q", "--format", "jsonl")
    rows = result.records
    assert [row["set"] for row in rows if row["condition"] == "together"] == ["3.0-1", "L3H0", "L3H1"]
    assert result.err == ""


def test_sets_and_targets_come_from_files(tmp_path):
    sets, task = tmp_path / "sets.jsonl", tmp_path / "task.jsonl"
    sets.write_text('{"set": "both", "heads": ["L3H0", "L3H1"]}\n')
    line = json.dumps({"text": "Mary had a lamb. Mary had a lamb.", "targets": [[28, 32]]})
    task.write_text(f"{line}\n{line}\n")
    result = call("ablate", "demo", "--sets", str(sets), "--on", str(task), "--by", "kv", "-q", "--format", "jsonl")
    rows = result.records
    assert (result.code, result.err) == (0, "")
    assert [(row["condition"], row["heads"], row["n"]) for row in rows if row["set"] == "both"][:2] == [
        ("together", "L3H0 L3H1", 2),
        ("alone", "L3H0 L3H1", 2),
    ]


def test_texts_are_a_corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("The old boat lies still.\nThe river is green and the bank is old.\nA cat.\n")
    arguments = ("--texts", str(path), "--sequences", "2", "--random", "0", "--replace", "zero")
    result = call("ablate", "demo", "--select", "3.0", *arguments, "-q", "--format", "jsonl")
    assert [json.loads(line)["n"] for line in result.out.splitlines()] == [2, 2]


ATLAS = made_atlas(DEMO_FOLDER, dict.fromkeys(SETS[0].heads, ("induction",)))


def test_roles_of_an_atlas_are_sets(tmp_path):
    ATLAS.save(tmp_path / "demo")
    for select in ((), ("--select", "@induction")):
        arguments = (*select, "--atlas", str(tmp_path / "demo"), *FAST)
        result = call("ablate", "demo", *arguments, "-q", "--format", "jsonl")
        assert json.loads(result.out.splitlines()[0])["heads"] == "L3H0 L3H1"
    made_atlas(None, {}, heads=(1, 3)).save(tmp_path / "other")
    result = call("ablate", "demo", "--atlas", str(tmp_path / "other"))
    assert (result.code, "a model with other heads" in result.err) == (4, True)


def test_without_sets_and_atlas_probes_name_them(monkeypatch, demo_without_atlas):
    probed = []
    monkeypatch.setattr(
        "attnscope.studies.atlas.ScanStudy.run", lambda study, advance: probed.append(study.planned) or ATLAS
    )
    result = call("ablate", demo_without_atlas, *FAST, "--format", "jsonl")
    assert [one.name for one in probed[0].trials] == [
        *(f"repeated p{period}" for period in (10, 25, 50, 100)),
        "offsets",
    ]
    assert "no sets were named: probes find the roles, " in result.err
    assert json.loads(result.out.splitlines()[0])["set"] == "induction"
    monkeypatch.setattr("attnscope.studies.atlas.ScanStudy.run", lambda study, advance: made_atlas(None, {}))
    result = call("ablate", demo_without_atlas, *FAST)
    assert (result.code, "no head has a role; name heads with --select" in result.err) == (4, True)


def test_a_role_without_an_atlas_is_refused_in_one_line(demo_without_atlas):
    result = call("ablate", demo_without_atlas, "-q", "--select", "@induction")
    assert (result.code, result.out, result.err.count("\n")) == (2, b"", 1)
    assert "--atlas" in result.err


def test_the_demos_own_atlas_names_the_sets(monkeypatch):
    monkeypatch.setattr(
        "attnscope.studies.atlas.ScanStudy.run", lambda *given, **how: pytest.fail("it was scanned already")
    )
    result = call("ablate", "demo", *FAST, "-q", "--format", "jsonl").silent()
    sets = [(row["set"], row["heads"]) for row in result.records if row["condition"] == "together"]
    assert ("previous-token", "L1H5 L2H1") in sets
    assert ("induction", "L3H0 L3H1") in sets


def test_before_the_probes_have_run_a_set_has_its_cost(monkeypatch, demo_without_atlas):
    monkeypatch.setattr(
        "attnscope.studies.atlas.ScanStudy.run", lambda *given, **how: pytest.fail("nothing is to be run")
    )
    result = call("ablate", demo_without_atlas, *FAST, "--dry-run").ok()
    assert b"then per set and random set at most 202 tokens x 4 layers" in result.out  # 2 sequences of 101 tokens


def test_what_it_would_take_is_said_before_anything_is_run(tmp_path):
    result = call("ablate", "demo", "--select", "3.0-1", "--dry-run", "--out", str(tmp_path / "a"))
    assert b"tokens x layers, about" in result.out
    assert b"operations" in result.out
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--select", "3.9"], 2, "names head 9"),
        (["--select", "@offset-4"], 4, "the atlas names no offset-4 head"),
        (["--select", "3.0", "--sets", "sets.jsonl"], 2, "--select and --sets were both given"),
        (["--sets", "nowhere.jsonl"], 4, "there is no file nowhere.jsonl; check the path\n"),
        (["--atlas", "nowhere"], 4, "nowhere holds no whole atlas"),
        (["--select", "3.0", "--on", "texts"], 2, "--on texts needs a corpus"),
        (["--select", "3.0", "--on", "copy", "--texts", "a.txt"], 2, "--texts was given, and --on copy"),
        (["--select", "3.0", "--on", "nowhere.jsonl"], 4, "there is no file nowhere.jsonl; check the path\n"),
        (["--select", "3.0", "--texts", "nowhere.txt"], 2, "there is no file nowhere.txt"),
        (["--select", "3.0", "--replace", "noise"], 2, "expected mean, zero or resample, got 'noise'"),
        (
            ["--select", "3.0", "--sequences", "1"],
            2,
            "--sequences: expected a whole number from 2 to 1,000,000, got '1'",
        ),
        (["--select", "3.0", "--random", "-1"], 2, "--random: expected a whole number from 0 to 100,000, got '-1'"),
    ],
)
def test_bad_inputs_in_one_line(arguments, code, said):
    result = call("ablate", "demo", "-q", *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (code, b"", 1)
    assert said in result.err

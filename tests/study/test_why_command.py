"""`attnscope why`: its table in every format, its folder, the same in Python, and what it refuses in one line."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import attnscope
from helpers.command_line import call
from helpers.folders import with_tokenizer
from helpers.parity_models import roused_model

RIVER = "the bank of the river, the bank of the"
ASKED = ("why", RIVER, "--head", "L3H0", "--key", "river")
COLUMNS = ["side", "component", "layer", "head", "other", "position", "token"]
COLUMNS += ["contribution", "contrast", "share", "true"]


def test_a_row_per_component_in_a_pipe_and_what_to_know_beside_it():
    found = call(*ASKED).ok()
    assert list(found.rows[0]) == COLUMNS
    assert len(found.rows) == 1 + 3 * (6 + 1) + 1  # embedding, three blocks of six heads and a rest, bias
    contrasts = [float(row["contrast"]) for row in found.rows]
    assert contrasts == sorted(contrasts, key=lambda value: -abs(value))
    assert [(row["component"], row["layer"], row["head"]) for row in found.rows[:2]] == [
        ("L2H1", "2", "1"),
        ("L2H0", "2", "0"),
    ]
    assert sum(float(row["share"]) for row in found.rows) == pytest.approx(1)
    for line in (
        "query last: the(10)",
        "key river: river(5)",
        "contrast: the contribution less its mean over 11 visible keys",
        "the contributions sum to 11.0329, the logit is 11.0329",
        "river(5) is 6.21 above the mean key; largest: L2H1 +2.07 and L2H0 +1.65",
    ):
        assert line in found.err


def test_formats_and_quiet():
    asked = (*ASKED, "-q")
    [first, *_] = call(*asked, "--format", "jsonl").silent().records
    assert (first["component"], first["layer"], first["position"], first["true"]) == ("L2H1", 2, None, None)
    [other, *_] = call(*asked, "--format", "csv").silent().rows
    assert float(other["contrast"]) == pytest.approx(first["contrast"], abs=1e-6)
    assert call(*asked, "--format", "tsv").silent().out.decode().splitlines()[1].split("\t")[1] == "L2H1"
    assert call(*asked, "--format", "parquet").silent().out[:4] == b"PAR1"
    streamed = pa.ipc.open_stream(call(*asked, "--format", "arrow").silent().out).read_all()
    assert streamed.column("component")[0].as_py() == "L2H1"


def test_the_tables_of_a_terminal_fit_80_columns():
    for options in (("--by", "tokens"), ("--side", "both"), ("--verify",), ("--side", "query", "--against", "bank#1")):
        found = call(*ASKED, *options, "--top", "5", columns=80).ok()
        lines = found.lines
        assert any("contrast" in line for line in lines)
        assert max(map(len, lines)) <= 80
        assert len([line for line in lines if re.search(r"[+-]\d", line)]) == 5


def test_heads_by_the_tokens_that_they_read():
    rows = call(*ASKED, "--against", "bank#1", "--by", "tokens", "--format", "jsonl", "-q").silent().records
    assert (rows[0]["component"], rows[0]["position"], rows[0]["token"].strip()) == ("L2H1", 4, "the")
    assert all((row["position"] is None) == (row["head"] is None) for row in rows)


def test_pairs_name_the_components_of_the_query():
    rows = call(*ASKED, "--side", "both", "--format", "jsonl", "-q").silent().records
    assert len(rows) == 23**2
    assert {row["other"] for row in rows} == {row["component"] for row in rows}
    assert {row["side"] for row in rows} == {"key"}


def test_verify_says_how_far_the_orders_agree():
    found = call(*ASKED, "--verify").ok()
    assert sum(row["true"] != "" for row in found.rows) == 10
    assert re.search(r"true: .*; rank correlation with the contrast 0\.\d\d", found.err)


def test_no_share_of_contrasts_that_cancel():
    found = call(*ASKED, "--against", "river").ok()
    assert {row["share"] for row in found.rows} == {""}
    assert "there is no share: the contrasts sum to less than 0.1" in found.err


def test_without_a_key_the_one_with_most_weight_is_named():
    assert "<s>(0) is 6.98 above the mean key" in call("why", RIVER, "--head", "L3H0").ok().err


def test_a_folder_has_table_facts_and_picture_and_is_not_written_over(tmp_path):
    folder = tmp_path / "river"
    call(*ASKED, "--out", str(folder)).ok()
    assert {path.name for path in folder.iterdir()} == {"why.parquet", "why.json", "why.png"}
    facts = json.loads((folder / "why.json").read_text())
    assert (facts["schema"], facts["head"], facts["key"], facts["visible"]) == ("why/1", "L3H0", 5, 11)
    assert facts["difference"] == pytest.approx(facts["sum"] - facts["logit"])
    assert pq.read_table(folder / "why.parquet").column_names == COLUMNS
    refused = call(*ASKED, "--side", "query", "--out", str(folder))
    assert refused.code == 2
    assert ": side " in refused.err
    call(*ASKED, "--side", "query", "--out", str(folder), "--force").ok()
    (folder / "why.json").write_text("[]")
    assert "why.json is damaged, or no logit of ours" in call(*ASKED, "--out", str(folder)).err


def test_the_same_in_python(demo):
    found = attnscope.why(demo, RIVER, "L3H0", key="here", against="bank#1", define={"here": "river"})
    said = call(*ASKED, "--against", "bank#1", "--format", "jsonl", "-q").silent().records
    assert [row["component"] for row in found.table().to_pylist()] == [row["component"] for row in said]
    assert found.figure().png.startswith(b"\x89PNG")
    assert "river(5) is 7.54 above bank(2)" in repr(found)
    assert "<table>" in found._repr_html_()
    with pytest.raises(attnscope.AttnscopeError, match="'keyy'"):
        attnscope.why(demo, RIVER, "L3H0", keyy=3)
    with pytest.raises(attnscope.AttnscopeError, match="LoadedModel"):
        attnscope.why("demo", RIVER, "L3H0")
    with pytest.raises(attnscope.AttnscopeError, match="expected side key, query, both, got 'value'"):
        attnscope.why(demo, RIVER, "L3H0", side="value")


@pytest.fixture(scope="module")
def bloom(tmp_path_factory):
    """A family that attends outside the interface."""
    return with_tokenizer(roused_model("bloom", vocab_size=2000), tmp_path_factory.mktemp("bloom"))


@pytest.mark.parametrize("side", ["key", pytest.param("query", marks=pytest.mark.e2e)])
def test_a_family_outside_the_interface(bloom, side):
    asked = ("why", RIVER, "-m", str(bloom), "--head", "L2H0", "--key", "river", "--side", side, "--verify")
    found = call(*asked).ok()
    components = [row["component"] for row in found.rows]
    assert {*components} == {"embedding", *written(0), *written(1), "bias", "position"}
    assert sum(row["true"] != "" for row in found.rows) == 10
    assert float(re.search(r"the contributions sum to .*: (\S+) apart", found.err)[1]) < 1e-5


def written(layer):
    return [*(f"L{layer}H{head}" for head in range(4)), f"L{layer} rest"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((RIVER,), "no head was named; name one with --head L2H3"),
        ((RIVER, "--head", "L3"), "head L3 names 6 heads, expected one; write one of them: L3H0 to L3H5"),
        ((RIVER, "--head", "L9H0"), "L9H0"),
        ((RIVER, "--head", "L3H0", "--query", "the"), "query the means"),
        ((RIVER, "--head", "L3H0", "--key", "bank"), "key bank means"),
        ((RIVER, "--head", "L3H0", "--key", "moon"), "moon"),
        ((RIVER, "--head", "L3H0", "--against", "the"), "against the means"),
        ((RIVER, "--head", "L3H0", "--against", "moon"), "moon"),
        ((RIVER, "--head", "L3H0", "--query", "3", "--key", "8"), "query 3 does not see key 8 in this head"),
        ((RIVER, "--head", "L3H0", "--side", "value"), "--side"),
        ((RIVER, "--head", "L3H0", "--by", "kv"), "--by"),
        (
            (RIVER, "--head", "L3H0", "--side", "both", "--verify"),
            "side=both goes neither with by=tokens nor with verify",
        ),
        ((RIVER, "--head", "L3H0", "--by", "tokens", "--verify"), "by=tokens does not go with verify"),
        ((RIVER, "--head", "L3H0", "--dtype", "bfloat16"), "in bfloat16"),
    ],
)
def test_bad_input_is_one_line(asked, said):
    found = call("why", *asked)
    assert said in found.refusal

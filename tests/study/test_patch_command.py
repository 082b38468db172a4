"""`attnscope patch`: its table in every format, its folder, records of pairs, and what it refuses in one line."""

import json
import re

import pytest

from helpers.command_line import call

RIVER, FIELD = "the bank of the river, the bank of the", "the bank of the field, the bank of the"
PAIR = ("patch", RIVER, "--corrupted", FIELD, "--answer", " river", "--foil", " field")


def test_a_row_per_head_in_a_pipe_and_what_to_know_beside_it():
    found = call(*PAIR, "--over", "heads", "--select", "3").ok()
    effects = [float(row["effect"]) for row in found.rows]
    assert sorted(row["set"] for row in found.rows) == [f"L3H{head}" for head in range(6)]
    assert effects == sorted(effects, reverse=True)
    assert float(found.rows[0]["normalised"]) > 0.4
    for line in ("differ: river(5) -> field(5)", "answer: ·river", "effect: what the answer loses", "in logits"):
        assert line in found.err
    assert "share: of the gap between the two texts" in found.err
    assert "intact 3.814, corrupted -3.263 logits, 1 pair" in found.err


def test_formats_and_quiet():
    asked = (*PAIR, "--random", "0", "-q")
    [row] = call(*asked, "--format", "jsonl").silent().records
    assert (row["set"], row["layer"], row["n"]) == ("all heads", None, 1)
    [other] = call(*asked, "--format", "csv").silent().rows
    assert float(other["effect"]) == pytest.approx(row["effect"], abs=1e-6)
    assert call(*asked, "--format", "parquet").silent().out[:4] == b"PAR1"


def test_the_table_of_a_terminal_fits_80_columns():
    found = call(*PAIR, "--over", "kv", "--what", "value", "--method", "gradient", columns=80).ok()
    lines = found.lines
    assert any("estimate" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert "8 patches were run: rank correlation with what was measured" in found.err
    assert "the heads of a kv group share keys and values" in found.err


@pytest.mark.parametrize(("count", "start"), [(4, "4 sets of"), (1, "1 set of")])
def test_a_line_has_p_beside_random_sets(count, start):
    found = call(*PAIR, "--select", "L3H0,L3H1", "--random", str(count)).ok()
    [line] = [line for line in found.err.splitlines() if line.startswith(start)]
    assert line.endswith(f"p .{1000 // (1 + count)}, (1 + those that cost as much) / (1 + all)")


def test_a_text_from_itself_is_told():
    found = call("patch", RIVER, "--corrupted", RIVER, "--over", "layers").ok()
    assert {row["effect"] for row in found.rows} == {"0.0"}
    assert "a text that is patched from itself loses 0, and was not run" in found.err
    assert "there is no share: the two texts have the same answer" in found.err
    assert "differ: none of the patched tokens" in found.err


def test_a_folder_has_table_facts_and_picture_and_is_not_written_over(tmp_path):
    asked = (*PAIR, "--over", "layers", "--out", str(tmp_path / "river"))
    call(*asked).ok()
    assert {path.name for path in (tmp_path / "river").iterdir()} == {
        *("patching", "patching.json", "patching.parquet", "patching.png")
    }
    refused = call(*asked, "--what", "value")
    assert refused.code == 2
    assert "what was 'output', now 'value'" in refused.err
    call(*asked, "--what", "value", "--force").ok()


def test_records_of_pairs(tmp_path):
    lines = [
        {"text": RIVER, "corrupted": FIELD, "answer": " river", "foil": " field"},
        {"text": FIELD, "corrupted": RIVER, "answer": " field", "foil": " river", "at": "field,last"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = call("patch", "--texts", str(path), "--over", "layers").ok()
    assert [row["n"] for row in found.rows] == ["2"] * 4
    assert {row["at"] for row in found.rows} == {""}
    piped = call("patch", "--texts", "-", "--over", "layers", stdin=path.read_bytes()).ok()
    assert piped.out == found.out
    path.write_text(json.dumps({"text": RIVER, "corrupted": [FIELD]}))
    assert "field 'corrupted': expected text, got ['the bank" in call("patch", "--texts", str(path)).err
    path.write_text(json.dumps({"text": RIVER}))
    assert "no corrupted text was given; give one with --corrupted" in call("patch", "--texts", str(path)).err


def test_a_rehearsal_says_what_would_be_done():
    said = call(*PAIR, "--over", "heads", "--dry-run").ok().out.decode()
    assert said.startswith("24 patches of 1 pair: at most ")
    assert re.search(r" about \d+:\d\d:\d\d ", said)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((RIVER,), "no corrupted text was given; give one with --corrupted"),
        ((RIVER, "--corrupted", FIELD, "--answer", " "), "the answer is empty"),
        ((RIVER, "--corrupted", FIELD, "--at", "moon"), "moon"),
        ((RIVER, "--corrupted", FIELD, "--over", "tokens"), "--over"),
        ((RIVER, "--corrupted", FIELD, "--what", "logits"), "--what"),
        ((RIVER, "--corrupted", "the bank", "--what", "pattern"), "patterns are patched between texts of equal length"),
        ((RIVER, "--corrupted", "moon", "--at", "river"), "river(5) has no partner in the corrupted text"),
        ((RIVER, "--corrupted", FIELD, "--texts", "pairs.jsonl"), "a text and --texts were both given"),
        ((RIVER, "--corrupted", FIELD, "--select", "9"), "names layer 9"),
        (("--texts", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_line(asked, said):
    found = call("patch", *asked)
    assert said in found.refusal

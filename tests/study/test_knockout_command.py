"""`attnscope knockout`: its table in every format, its folder, the coloured text, and what it refuses in one line."""

import json
import re

import pytest

from helpers.command_line import call

BANK = "the bank of the river, the bank of the"
FEW = ("--random", "2")


def test_a_row_per_head_in_a_pipe_and_what_to_know_beside_it():
    found = call("knockout", BANK, "--key", "river", "--over", "heads", "--select", "3", *FEW).ok()
    effects = [float(row["effect"]) for row in found.rows]
    assert sorted(row["set"] for row in found.rows) == [f"L3H{head}" for head in range(6)]
    assert effects == sorted(effects, reverse=True)
    assert {row["queries"] for row in found.rows} == {"10"}
    assert float(found.rows[0]["effect"]) > 1
    assert float(found.rows[0]["mass"]) > 0.3
    for line in ("query: the(10)", "key: river(5)", "answer: ·river", "positive where the look helped, in nats"):
        assert line in found.err
    assert "an edge is cut, and not what it carries" in found.err


def test_formats_and_quiet():
    asked = ("knockout", BANK, "--key", "river", "--random", "0", "-q")
    [row] = call(*asked, "--format", "jsonl").silent().records
    assert (row["set"], row["layer"], row["n"]) == ("all heads", None, 1)
    [other] = call(*asked, "--format", "csv").silent().rows
    assert float(other["effect"]) == pytest.approx(row["effect"], abs=1e-6)
    assert call(*asked, "--format", "parquet").silent().out[:4] == b"PAR1"


def test_the_text_is_coloured_by_each_keys_effect():
    found = call("knockout", BANK, "--over", "keys", "--random", "0", "--format", "table").ok()
    text = found.out.decode()
    assert "nats lost without each key in all heads" in text
    assert "»the«" in text
    assert "largest" in text
    assert "▁▂▃▄▅▆▇█" in text
    assert "key 0 is often a sink" in found.err
    on_screen = call("knockout", BANK, "--over", "keys", "--random", "0", columns=100).ok()
    assert "\x1b[" in on_screen.out.decode()


def test_a_folder_has_table_facts_and_picture_and_is_not_written_over(tmp_path):
    asked = ("knockout", BANK, "--key", "river", "--over", "window:2", *FEW, "--out", str(tmp_path / "flow"))
    call(*asked).ok()
    folder = tmp_path / "flow"
    names = {"knockout.html", "knockout.json", "knockout.parquet", "knockout.png"}
    assert {path.name for path in folder.iterdir()} == {"knockout", *names}
    facts = json.loads((folder / "knockout.json").read_text())
    assert (facts["schema"], facts["how"], facts["over"]) == ("knockout/2", "mask", "window:2")
    assert facts["texts"][0]["queries"] == [10]
    assert facts["model"]["name"] == "demo"
    refused = call(*asked, "--how", "zero")
    assert (refused.code, refused.err.count("\n") > 0) == (2, True)
    assert "flow holds another knockout: how was 'mask', now 'zero'; name another folder" in refused.err
    call(*asked, "--how", "zero", "--force").ok()


def test_texts_with_fields(tmp_path):
    lines = [
        {"text": BANK, "key": "river", "answer": " river"},
        {"text": "a river and a bank, a river and a", "key": "bank", "answer": " bank", "query": "last"},
    ]
    path = tmp_path / "facts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = call("knockout", "--texts", str(path), "--over", "layers", *FEW).ok()
    assert [row["n"] for row in found.rows] == ["2"] * 4
    assert {row["queries"] for row in found.rows} == {""}
    alone = call("knockout", lines[1]["text"], "--key", "bank", "--answer", " bank", "--over", "layers", *FEW).ok()
    first = call("knockout", BANK, "--key", "river", "--answer", " river", "--over", "layers", *FEW).ok()
    for both, *each in zip(found.rows, alone.rows, first.rows, strict=True):
        assert float(both["effect"]) == pytest.approx(sum(float(one["effect"]) for one in each) / 2, abs=1e-4)
    path.write_text(json.dumps({"text": BANK, "key": ["river"]}))
    wrong = call("knockout", "--texts", str(path))
    assert "field 'key': expected text, got ['river']; write \"key\": \"bank#2\"" in wrong.err


def test_a_rehearsal_says_what_would_be_done():
    found = call("knockout", BANK, "--key", "river", "--over", "heads", "--dry-run").ok()
    said = found.out.decode()
    assert said.startswith("24 cuts, at most 1968 with others, on 1 text: at most ")
    assert "by the time of one measured batch" in said


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        ((BANK,), 2, "no key was named; name it with --key, or use --over keys"),
        ((BANK, "--key", "river", "--answer", " "), 4, "the answer is empty"),
        (
            (BANK, "--key", "river", "--over", "window:0"),
            2,
            "attnscope: --over: expected none, heads, layers, window:N, keys or kv",
        ),
        ((BANK, "--key", "last", "--query", "3"), 4, "no query sees the key last"),
        ((BANK, "--key", "river", "--query", "99"), 4, "there is no token 99 of 11"),
        ((BANK, "--key", "river", "--texts", "facts.jsonl"), 2, "a text and --texts were both given; give one of them"),
        ((BANK, "--key", "river", "--select", "9"), 2, "names layer 9"),
        ((BANK, "--key", "river", "--foil", " moon", "--answer", " moon"), 4, "begin with the same token"),
        ((BANK, "--key", "river", "--answer", " a", "--truncate", "left"), 2, "an answer needs the whole text"),
        (("--texts", "nowhere.jsonl", "--key", "river"), 2, "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_line(asked, code, said):
    found = call("knockout", *asked)
    assert said in found.refusal
    assert found.code == code


def test_the_page_has_the_kv_head_of_each_head(tmp_path):
    text = "the bank of the river, the bank of the"
    call(
        "knockout",
        text,
        "--key",
        "river",
        "--over",
        "heads",
        "--select",
        "0",
        "--random",
        "0",
        "-q",
        "--out",
        str(tmp_path / "run"),
    ).ok()
    page = (tmp_path / "run" / "knockout.html").read_text(encoding="utf-8")
    assert [int(found) for found in re.findall(r'"kv_head":(\d+)', page)] == [head // 2 for head in range(6)]

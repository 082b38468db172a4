"""`attnscope budgets`: its table, its folder, the line that names heads, and what it refuses in one line."""

import json
import re

import pytest

from helpers.command_line import call

BANK = "the bank of the river, the bank of the river, the bank"


def test_a_row_per_budget_and_head_and_the_heads_that_can_bear_it():
    found = call("budgets", BANK, "--keep", "stream:1+4,top:3", "--over", "heads", "--below", "0.02").ok()
    assert [row["set"] for row in found.rows[:2]] == ["all heads", "L3H1"]
    assert {row["keep"] for row in found.rows} == {"stream:1+4", "top:3"}
    assert len(found.rows) == 2 * 25
    for line in ("measured: 14 next tokens", "in nats per token", "kept: the share", "top:N knows the query"):
        assert line in found.err
    assert "(in every text: intervals take 32): --select" in found.err
    assert "from 64 texts on, half of them answer it" in found.err
    [(count, heads)] = re.findall(
        r"^stream:1\+4: (\d+) of 24 heads, alone, lose .* --select (\S+)$", found.err, re.MULTILINE
    )
    alone = [row for row in found.rows if row["head"] and row["keep"] == "stream:1+4"]
    assert int(count) == sum(float(row["effect"]) < 0.02 for row in alone)
    again = call("budgets", BANK, "--keep", "stream:1+4", "--select", heads, "--over", "heads", "-q").ok()
    assert len(again.rows) == int(count) + 1
    assert all(float(row["effect"]) < 0.02 for row in again.rows[1:])


def test_a_table_has_all_heads_first_and_then_the_largest_effect():
    found = call("budgets", BANK, "--keep", "stream:1+4", "--over", "heads", "--format", "table", "--top", "3").ok()
    names = [line.split()[1] for line in found.out.decode().splitlines() if "stream:1+4" in line]
    assert names == ["all", "L3H1", "L3H0"]


def test_the_prompt_ends_at_a_token_and_the_model_s_own_tokens_are_an_answer():
    ends = call("budgets", BANK, "--keep", "received:3", "--at", "of#1").ok()
    assert "the prompt ends with token 3" in ends.err
    own = call("budgets", BANK, "--keep", "snap:4@2", "--generate", "5").ok()
    assert "in nats" in own.err
    assert "answer: " in own.err


def test_a_folder_has_table_facts_and_pictures_and_is_not_written_over(tmp_path):
    asked = ("budgets", BANK, "--keep", "stream:1+4,stream:1+2", "--over", "layers", "--out", str(tmp_path / "kept"))
    call(*asked).ok()
    names = {"budgets", "budgets.json", "budgets.parquet", "budgets.png", "budgets_curve.png"}
    assert {path.name for path in (tmp_path / "kept").iterdir()} == names
    facts = json.loads((tmp_path / "kept" / "budgets.json").read_text())
    assert (facts["schema"], facts["keep"]) == ("budgets/2", ["stream:1+4", "stream:1+2"])
    refused = call(*asked, "--select", "0")
    assert refused.code == 2
    assert ": select" in refused.err
    call(*asked, "--select", "0", "--force").ok()


def test_texts_with_fields(tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"text": BANK, "at": 3}, {"text": "a river and a bank, a river and a bank"}]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    [both] = call("budgets", "--texts", str(path), "--keep", "h2o:4").ok().rows
    [first] = call("budgets", BANK, "--keep", "h2o:4", "--at", "3").ok().rows
    [other] = call("budgets", rows[1]["text"], "--keep", "h2o:4").ok().rows
    assert both["n"] == "2"
    assert float(both["effect"]) == pytest.approx((float(first["effect"]) + float(other["effect"])) / 2, abs=1e-5)
    path.write_text(json.dumps({"text": BANK, "at": [3]}))
    assert "field 'at': expected text, got [3]" in call("budgets", "--texts", str(path), "--keep", "top:3").err


def test_a_rehearsal_says_what_would_be_done():
    found = call("budgets", BANK, "--keep", "stream:1+4,top:3", "--over", "kv", "--dry-run").ok()
    assert found.out.decode().startswith("26 budgets of heads, on 1 text: at most ")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--keep", "stream:4"), "expected a budget stream:A+N, top:N, h2o:N, received:N or snap:N@W, got 'stream:4'"),
        ((), "no budget was named; name one: --keep stream:4+64"),
        (("--keep", "top:4", "--key", "river"), "No such option: --key; it is an option of "),
        (("--keep", "top:4", "--over", "window:2"), "write --over heads"),
        (("--keep", "snap:4@8"), "the window of 8 keys is always kept, and the budget is 4; write --keep snap:8@8"),
        (("--keep", "received:4"), "give --answer of several tokens, --generate 32, or --at TOKEN"),
        (("--keep", "top:4", "--below", "0"), "expected a limit above 0"),
        (("--keep", "top:4", "--generate", "0"), "--generate: expected a whole number from 1"),
        (("--keep", "top:4", "--select", "9"), "names layer 9"),
        (("--keep", "top:4", "--at", "moon"), "moon"),
    ],
)
def test_bad_input_is_one_line(asked, said):
    found = call("budgets", BANK, *asked)
    assert said in found.refusal


def test_keep_of_knockout_is_another_name_and_no_help_has_it(tmp_path):
    asked = (BANK, "--keep", "stream:1+4,top:3", "--over", "layers", "--at", "of#1")
    assert call("knockout", *asked, "--random", "3").ok().out == call("budgets", *asked).ok().out
    file = tmp_path / "run.yaml"
    file.write_text("keep: stream:1+4\nbelow: 0.5\n")
    of_file = [
        call(command, BANK, "--config", str(file), "--over", "heads").ok() for command in ("knockout", "budgets")
    ]
    assert of_file[0] == of_file[1]
    assert "lose less than 0.5" in of_file[0].err
    assert not {"--keep", "--at", "--below"} & set(call("knockout", "--help", "all").out.decode().split())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            ("--keep", "top:4", "--key", "river"),
            "key does not apply to a budget, which chooses its keys itself; leave out --key or --keep",
        ),
        (
            ("--keep", "top:4", "--query", "last"),
            "query does not apply to a budget, which chooses its keys itself; leave out --query or --keep",
        ),
        (
            ("--keep", "top:4", "--how", "zero"),
            "lost keys to the rest of the row; leave out --how zero or --keep",
        ),
        (("--at", "river", "--key", "river"), "at needs a budget; leave out --at, or add --keep"),
    ],
)
def test_what_a_knockout_of_a_budget_cannot_mean_is_one_line(asked, said):
    assert said in call("knockout", BANK, *asked).refusal

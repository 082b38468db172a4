"""`attnscope tokens`: a text's tokens by number, and which of them an expression means."""

import io
import json
import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from attnscope.inputs.prompt import from_ids, from_text
from attnscope.inputs.tokens import GRAMMAR, PRECEDENCE
from helpers.command_line import SENTENCE, call

PAGE = (Path(__file__).parents[1] / "docs" / "asking.md").read_text(encoding="utf-8")
COLUMNS = ["position", "token", "id", "special", "start", "stop", "word", "sentence", "turn", "segment"]


def listed(*arguments, **how):
    return call("tokens", *arguments, "--format", "jsonl", **how).ok().records


def test_a_row_per_token_says_where_it_stands(demo):
    text = "the bank. The 日 end"
    prompt = from_text(demo.tokenizer, text)
    rows = listed("--text", text)
    assert [list(row) for row in rows] == [COLUMNS] * len(prompt)
    for at, row in enumerate(rows):
        assert (row["position"], row["token"], row["id"]) == (at, prompt.tokens[at], prompt.ids[at])
        assert row["special"] == (at == 0)
        assert at in range(prompt.words[row["word"]].start, prompt.words[row["word"]].stop)
        assert at in range(prompt.sentences[row["sentence"]].start, prompt.sentences[row["sentence"]].stop)
        if at and "·" not in row["token"]:
            assert text[row["start"] : row["stop"]] == row["token"]
    assert {(row["start"], row["stop"]) for row in rows if "日" in row["token"]} == {(14, 15)}
    assert [rows[0][name] for name in ("start", "stop", "turn", "segment")] == [None] * 4


def test_every_format_holds_the_same():
    rows = listed("--text", SENTENCE)
    assert pq.read_table(io.BytesIO(call("tokens", SENTENCE, "--format", "parquet").out)).to_pylist() == rows
    said = call("tokens", SENTENCE).rows
    assert said == [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows]


@pytest.mark.parametrize("asked", [(), ("-",), ("--file", "-")], ids=str)
def test_a_text_in_a_pipe(asked):
    assert listed(*asked, stdin=SENTENCE.encode()) == listed("--text", SENTENCE)


def test_the_rows_that_an_expression_means_and_the_talk_beside_them():
    result = call("tokens", SENTENCE, "--query", "bank#2", "--key", "an,who", "--define", "who=first")
    assert [row.split(",")[0] for row in result.out.decode().splitlines()] == ["position", "0", "2", "3", "8"]
    *said, parts = result.err.splitlines()
    assert said == ["demo  9 tokens", "query bank#2: bank(8)", "key an,who: <s>(0), financial bank(2-3), bank(8)"]
    assert parts.startswith("'an' is not a whole word")
    assert call("tokens", SENTENCE, "--query", "bank#2", "-q").err == ""


def test_token_ids(demo):
    rows = listed("--ids", "-", stdin=b"[0, 423, 782]")
    prompt = from_ids(demo.tokenizer, [0, 423, 782])
    assert [row["token"] for row in rows] == list(prompt.tokens)
    assert [prompt.text[row["start"] : row["stop"]] for row in rows] == list(prompt.tokens)


def test_turns_are_written_as_they_are_asked_for(tmp_path, chat_folder):
    messages = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "a"))]
    (tmp_path / "chat.json").write_text(json.dumps(messages))
    asked = ("--file", str(tmp_path / "chat.json"), "--chat", "--model", str(chat_folder))
    rows = listed(*asked)
    assert {row["turn"] for row in rows} - {None} == {"user#1", "assistant#1", "user#2"}
    assert listed(*asked, "--query", "user#2") == [row for row in rows if row["turn"] == "user#2"]


@pytest.fixture
def chat_folder(tmp_path):
    """The embedded model's tokenizer with a chat template, and no weights at all."""
    from attnscope.model.loading import DEMO_FOLDER

    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DEMO_FOLDER / name).read_bytes())
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_no_weights_are_loaded(chat_folder):
    assert listed("--text", SENTENCE, "--model", str(chat_folder)) == listed("--text", SENTENCE)


def test_a_text_longer_than_the_model_reads_is_listed_and_may_be_cut():
    text = "the" + " bank" * 599
    long = call("tokens", text)
    assert (long.code, len(long.out.splitlines())) == (0, 1 + 601)
    assert long.err.startswith("demo  601 tokens  ")
    assert " 512; --truncate " in long.err
    cut = call("tokens", text, "--truncate", "left", "--query", "2:4")
    assert cut.err == "demo  512 tokens (89 cut off)\nquery 2:4: bank bank(2-3)\n"


def test_nothing_in_a_token_steers_the_terminal():
    text = "a\x1b[2J\x07b\u202ec\r\nd\x00e\x9b31m"
    shown = call("tokens", "--file", "-", "--query", r"/\x1b/,/\x9b/", "--format", "table", stdin=text.encode()).ok()
    for said in (shown.out.decode(), shown.err):
        assert not set("\x1b\x07\u202e\r\x00\x9b") & set(said)
    assert "⟨001B⟩" in shown.out.decode()
    on_screen = call("tokens", "--file", "-", stdin=text.encode(), columns=100, NO_COLOR="1")
    assert not set("\x1b\x07\u202e\r\x00\x9b") & set(on_screen.out.decode())
    missing = call("tokens", "--file", "-", "--query", "\x1b[31m\u202e", stdin=text.encode())
    assert missing.code == 4
    assert not set("\x1b\u202e") & set(missing.err)
    rows = listed("--file", "-", stdin=text.encode())  # data keeps the text
    assert [row["token"] for row in rows if row["start"] in (1, 12)] == ["\x1b", "\x00"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ("--query", "/(/"),
            2,
            "/(/ is not a regular expression: missing ) at position 1; write a text in quotes",
        ),
        (("--define", "a"), 2, "a group is a name and what it means, got 'a'; write --define subject=Mary"),
        (("--query", "Mary"), 4, "'Mary' is not in the text; the tokens are 0 <s>, 1 a, 2 ·bank (3 tokens)"),
        (
            ("--query", ""),
            2,
            "a part of '' is empty; write bank, 3 or last; in quotes, \"#2\", what looks like grammar",
        ),
    ],
)
def test_errors_are_one_line(arguments, code, said):
    result = call("tokens", "a bank", "-q", *arguments)
    assert (result.code, result.out, result.err) == (code, b"", f"attnscope: {said}\n")


def test_what_no_text_makes_right_is_refused_before_the_model_is_looked_up():
    assert call("heads", "a", "--model", "./nowhere", "--query", "bank#0").code == 2
    assert call("tokens", "a", "--model", "./nowhere", "--key", '"a').code == 2


# the help and the page


def test_the_grammar_stands_in_the_help():
    shown = call("tokens", "--help", COLUMNS="80").out.decode()
    for form, meaning in GRAMMAR:
        assert f"    {form.ljust(24)}{meaning}\n" in shown
        assert len(form) < 24
        assert len(meaning) <= 52
    assert " ".join(PRECEDENCE.split()) in " ".join(shown.split())


def test_the_page_has_the_table_of_the_help():
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", PAGE, re.MULTILINE)
    assert [(forms.replace("` `", "   ").strip("`"), meaning) for forms, meaning in rows] == list(GRAMMAR)
    assert PRECEDENCE in " ".join(PAGE.split())


EXAMPLES = re.findall(r"^(attnscope tokens .*)\n((?:(?!attnscope tokens|```).*\n)*)", PAGE, re.MULTILINE)


def test_the_page_has_examples():
    assert len(EXAMPLES) >= 10


@pytest.mark.parametrize(("command", "said"), EXAMPLES)
def test_an_example_of_the_page_says_what_stands_there(command, said):
    result = call(*shlex.split(command)[1:])
    assert said
    lines = (result.err + result.out.decode()).splitlines()
    assert [line for line in lines if line in said.splitlines()] == said.splitlines()


def test_a_table_is_for_spreadsheets_only_where_that_is_asked():
    plain = call("tokens", "1 + 1 = -2 @", "--format", "csv", "-q").ok().out
    assert b"=" in plain
    assert b"'" not in plain

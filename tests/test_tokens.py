"""The grammar that names tokens: what each expression means in texts of every kind, and what is refused."""

import json
from functools import cache, partial

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attnscope.errors import InputError, UsageError
from attnscope.inputs.prompt import Prompt, from_chat, from_ids, from_text
from attnscope.inputs.tokens import TokenMatch, choose, defined, described, find
from attnscope.model.loading import DEMO_FOLDER
from helpers.command_line import SENTENCE
from helpers.made_tokenizers import MAKERS, SlowBytes, byte_level, llama, wordpiece
from helpers.work import steps

CHATML = "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
MESSAGES = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "the bank"},
    {"role": "assistant", "content": "a user"},
    {"role": "user", "content": "on"},
]


def _chat() -> Prompt:
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML
    return from_chat(tokenizer, json.dumps(MESSAGES))


def _of_ids() -> Prompt:
    names = ["<s>", "▁the", "<0xE6>", "<0x97>", "<0xA5>", "▁bank"]
    tokenizer = llama()
    return from_ids(tokenizer, tokenizer.convert_tokens_to_ids(names))


# The texts by name, each with its tokens in the comment.
TEXTS = {
    # 0 <s>, 1 the, 2 financial, 3 bank, 4 is, 5 located, 6 on, 7 river, 8 bank
    "bank": lambda: from_text(AutoTokenizer.from_pretrained(DEMO_FOLDER), SENTENCE),
    # a token per byte: 0 t, 1 o, 2 _, 3 t, 4 h, 5 e, 6 _, 7 s, 8 t, 9 o, 10 r, 11 e, 12 _, 13 3, 14 -, 15 7, 16 _,
    # 17 #, 18 2, 19 _, 20-24 first
    "store": lambda: from_text(SlowBytes(), "to the store 3-7 #2 first"),
    # 0 <s>, 1 the, 2 bank, 3 _, 4-6 日, 7 ban
    "split": lambda: from_text(llama(), "the bank 日 ban"),
    # 0 [CLS], 1 The, 2 bank, 3 ##ing, 4 bank, 5 don, 6 ', 7 t, 8 ., 9 [SEP]
    "pieces": lambda: from_text(wordpiece(), "The banking bank don't."),
    # 0 ban, 1 k, 2 _, 3-4 日, 5 _, 6 the, 7 <|end|>, 8 bank
    "special": lambda: from_text(byte_level(), "bank 日 the<|end|> bank"),
    # 0 <|head|>, 1-5 system, 6 \n, 7-8 be, 9 <|end|>, 10 \n; 11 <|head|>, 12-14 user, 15 \n, 16 the, 17 bank,
    # 18 <|end|>, 19 \n; 20 <|head|>, 21-27 assistant, 28 \n, 29 a, 30 _, 31-33 user, 34 <|end|>, 35 \n; 36 <|head|>,
    # 37-39 user, 40 \n, 41 on, 42 <|end|>, 43 \n
    "chat": _chat,
    # 0 <s>, 1 the, 2-4 日, 5 bank
    "ids": _of_ids,
    # 0 <s>, then what is left of 1 the, 2 bank, 3 the, 4 bank
    "cut": lambda: from_text(llama(), "the bank the bank", max_tokens=4, truncate="left"),
    # a token per byte: 0-3 👍, 4 _, 5-6 é, 7 \n, 8 ", 9 a, 10 ", 11 \, 12 n
    "signs": lambda: from_text(SlowBytes(), '👍 é\n"a"\\n'),
    # 日本語 in threes 0-8, の 9-11, 本 12-14
    "japanese": lambda: from_text(SlowBytes(), "日本語の本"),
}
GROUPS = {"subject": "bank#2", "both": "subject,the", "others": "^both", "user": "last", "odd": "/e/"}

TABLE = [
    ("bank", "8", (8,)),
    ("bank", "0", (0,)),
    ("bank", "-1", (8,)),
    ("bank", "-9", (0,)),
    ("bank", "3:7", (3, 4, 5, 6)),
    ("bank", "7:", (7, 8)),
    ("bank", ":2", (0, 1)),
    ("bank", "-2:", (7, 8)),
    ("bank", ":-7", (0, 1)),
    ("bank", "7:400", (7, 8)),
    ("bank", "3-7", (3, 4, 5, 6, 7)),
    ("bank", "4-4", (4,)),
    ("bank", ":", tuple(range(9))),
    ("bank", "*", tuple(range(9))),
    ("bank", "first", (0,)),
    ("bank", "last", (8,)),
    ("bank", "special", (0,)),
    ("bank", "^special", (1, 2, 3, 4, 5, 6, 7, 8)),
    ("bank", "bank", (3, 8)),
    ("bank", " bank ", (3, 8)),
    ("bank", "bank#2", (8,)),
    ("bank", "bank#-2", (3,)),
    ("bank", "river bank", (7, 8)),
    ("bank", '"river bank"#1', (7, 8)),
    ("bank", "<s>", (0,)),
    ("bank", "bank,last,3,3", (3, 8)),
    ("bank", "8,0", (0, 8)),
    ("bank", "^bank,2:", (2, 4, 5, 6, 7)),
    ("bank", "1:,^bank#1,^on", (1, 2, 4, 5, 7, 8)),
    ("bank", "^the,^special,^bank", (2, 4, 5, 6, 7)),
    ("bank", "l*", (5,)),
    ("bank", "*al", (2,)),
    ("bank", "*an*", (2, 3, 8)),
    ("bank", "*an*#-1", (8,)),
    ("bank", "/an/", (2, 3, 8)),
    ("bank", "/b.nk/#1", (3,)),
    ("bank", "/is|on/", (4, 6)),
    ("bank", "/(?i)RIVER/", (7,)),
    ("bank", "/n{1,2}c/,last", (2, 8)),
    ("bank", "/^the/", (1,)),
    ("bank", "subject", (8,)),
    ("bank", "both", (1, 8)),
    ("bank", "others", (0, 2, 3, 4, 5, 6, 7)),
    ("bank", "^others,^first", (1, 8)),
    ("bank", "odd#2", (5,)),
    ("bank", "user", (8,)),
    ("store", "to", (0, 1)),
    ("store", "t*", (0, 1, 3, 4, 5)),
    ("store", '"3-7"', (13, 14, 15)),
    ("store", "3-7", (3, 4, 5, 6, 7)),
    ("store", '"#2"', (17, 18)),
    ("store", '"first"', (20, 21, 22, 23, 24)),
    ("store", "first", (0,)),
    ("store", '"the store"', (3, 4, 5, 6, 7, 8, 9, 10, 11)),
    ("split", "日", (4, 5, 6)),
    ("split", "ban", (7,)),
    ("split", "bank 日", (2, 3, 4, 5, 6)),
    ("pieces", "banking", (2, 3)),
    ("pieces", "bank", (4,)),
    ("pieces", "bank*", (2, 3, 4)),
    ("pieces", "/bank/", (2, 4)),
    ("pieces", "don't", (5, 6, 7)),
    ("pieces", "special", (0, 9)),
    ("pieces", "special#2", (9,)),
    ("pieces", "[SEP]", (9,)),
    ("special", "<|end|>", (7,)),
    ("special", "the", (6,)),
    ("special", "bank", (0, 1, 8)),
    ("special", "bank#2", (8,)),
    ("special", "/the.*/", (6, 7, 8)),
    ("chat", "system", tuple(range(11))),
    ("chat", "user#2", tuple(range(36, 44))),
    ("chat", "assistant,^special", (*range(21, 34), 35)),
    ("chat", "user", (43,)),
    ("chat", '"user"', (12, 13, 14, 31, 32, 33, 37, 38, 39)),
    ("chat", "be", (7, 8)),
    ("ids", "日", (2, 3, 4)),
    ("ids", "bank", (5,)),
    ("ids", "<s>", (0,)),
    ("cut", "bank", (1, 3)),
    ("cut", "bank#2", (3,)),
    ("cut", "the", (2,)),
    ("signs", "👍", (0, 1, 2, 3)),
    ("signs", "é", (5, 6)),
    ("signs", r'"\n"', (7,)),
    ("signs", r'"\"a\""', (8, 9, 10)),
    ("signs", r'"\\n"', (11, 12)),
    ("signs", r"/\W/", (0, 1, 2, 3, 4, 7, 8, 10, 11)),
    ("japanese", "本", (3, 4, 5, 12, 13, 14)),
    ("japanese", "本#2", (12, 13, 14)),
]


def wordlevel(*words: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: at for at, word in enumerate(("<unk>", *words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@cache
def prompt(name: str) -> Prompt:
    return TEXTS[name]()


def test_the_table_is_long_enough():
    assert len({expression for _, expression, _ in TABLE}) >= 40


@pytest.mark.parametrize("text", TEXTS)
def test_what_expressions_mean(text):
    expected = {expression: TokenMatch(expression, positions) for name, expression, positions in TABLE if name == text}
    groups = {one: {"odd": "/e/"} if text == "chat" and one != "user" else GROUPS for one in expected}
    assert {one: find(prompt(text), one, groups[one]) for one in expected} == expected


PARTS = [
    ("bank", "an", (2, 3, 8), "'an'"),
    ("bank", "inan", (2,), "'inan'"),
    ("store", "tor,last", (8, 9, 10, 24), "'tor'"),
    ("pieces", "kin", (2, 3), "'kin'"),
    ("split", "b", (2, 7), "'b'"),
    ("store", '"e store"', (5, 6, 7, 8, 9, 10, 11), "'e store'"),
]


@pytest.mark.parametrize(("text", "expression", "positions", "part"), PARTS)
def test_parts_of_words_are_taken_where_there_is_no_whole_one_and_that_is_said(text, expression, positions, part):
    note = f"{part} is not a whole word of the text: parts of words were taken"
    assert find(prompt(text), expression) == TokenMatch(expression, positions, (note,))


LISTED = "the tokens are 0 <s>, 1 the, 2 ·financial, 3 ·bank, 4 ·is, 5 ·located, 6 ·on, 7 ·river, 8 ·bank (9 tokens)"
QUOTED = 'write bank, 3 or last; in quotes, "#2", what looks like grammar'
WRONG = [
    ("9", InputError, f"there is no token 9 of 9; {LISTED}"),
    ("-10", InputError, f"there is no token -10 of 9; {LISTED}"),
    ("3-12", InputError, f"there is no token 12 of 9; {LISTED}"),
    ("7-3", UsageError, "the range '7-3' runs backwards; write 3-7"),
    ("3:3", InputError, f"'3:3' names no token of 9; {LISTED}"),
    ("12:", InputError, f"'12:' names no token of 9; {LISTED}"),
    ("Mary", InputError, f"'Mary' is not in the text; {LISTED}"),
    ("Bank", InputError, f"'Bank' is not in the text; {LISTED}"),
    ("ban*s", InputError, f"'ban*s' is not in the text; {LISTED}"),
    ("/x+/", InputError, f"/x+/ is not in the text; {LISTED}"),
    ("bank,Mary", InputError, f"'Mary' is not in the text; {LISTED}"),
    ("^Mary", InputError, f"'Mary' is not in the text; {LISTED}"),
    ("bank#3", InputError, f"'bank#3' asks for place 3, and there are 2 places; {LISTED}"),
    ("last#2", InputError, f"'last#2' asks for place 2, and there is 1 place; {LISTED}"),
    ("bank#0", UsageError, "'bank#0' asks for place 0; the first place is #1, the last #-1"),
    ("#2", UsageError, f"'#2' names no text; {QUOTED}"),
    ('""', UsageError, f"'\"\"' names no text; {QUOTED}"),
    ("", UsageError, f"a part of '' is empty; {QUOTED}"),
    ("bank,,2", UsageError, f"a part of 'bank,,2' is empty; {QUOTED}"),
    ("bank,", UsageError, f"a part of 'bank,' is empty; {QUOTED}"),
    ("^", UsageError, f"'^' names no text; {QUOTED}"),
    ('"bank', UsageError, "'\"bank' is not closed; end it with \", or write it in quotes"),
    ("/bank", UsageError, "'/bank' is not closed; end it with /, or write it in quotes"),
    ("/(/", UsageError, "/(/ is not a regular expression: missing ) at position 1; write a text in quotes"),
    ("bank,^:", InputError, f"nothing is left of 'bank,^:'; {LISTED}"),
    ("^*", InputError, f"nothing is left of '^*'; {LISTED}"),
    ("none", InputError, f"nothing is left of the group 'none'; {LISTED}"),
    ("circle", UsageError, "the group 'circle' is made of itself: circle -> round -> circle; define it by other words"),
]


@pytest.mark.parametrize(("expression", "kind", "message"), WRONG)
def test_what_cannot_be_meant_is_said_in_one_line(expression, kind, message):
    groups = {"none": "bank,^bank", "circle": "last,round", "round": "^circle"}
    with pytest.raises(kind) as caught:
        find(prompt("bank"), expression, groups)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "expression", "message"),
    [
        ("store", "special", "the text has no special token"),
        ("chat", "tool", "the chat has turns of system, user, assistant, and none of tool"),
        ("chat", "user#3", "'user#3' asks for place 3, and there are 2 places"),
        ("special", "end", "'end' is not in the text"),  # the token <|end|> is not cut up
        ("special", "/end/", "/end/ is not in the text"),
        ("store", "TO", "'TO' is not in the text"),
    ],
)
def test_what_this_text_does_not_have(text, expression, message):
    with pytest.raises(InputError) as caught:
        find(prompt(text), expression)
    assert caught.value.message.startswith(f"{message}; the tokens are ")


def test_a_text_that_was_cut_off_is_not_said_to_be_missing():
    cut = from_text(llama(), "river the bank", max_tokens=3, truncate="left")
    assert cut.tokens == ("<s>", " the", " bank")
    with pytest.raises(InputError, match="'river' occurs only in what was cut off; the tokens are 0 <s>, 1 ·the, "):
        find(cut, "river")


def test_a_token_that_looks_like_an_option_of_a_hint_is_shown_as_it_is():
    words = wordlevel("{engine=fused}", "{out}")
    with pytest.raises(InputError, match=r"the tokens are 0 \{engine=fused\}, 1 \{out\} \(2 tokens\)") as caught:
        find(from_text(words, "{engine=fused} {out}"), "bank")
    assert "0 {engine=fused}, 1 {out}" in caught.value.for_shell()


def test_of_a_long_text_the_error_shows_what_is_near():
    words = [f"w{number}" for number in range(3000)]
    words[1500] = "Mary"
    text = from_text(SlowBytes(), " ".join(words))
    for expression, seen in (("Marry", "M, "), ("0#2", "0 w, "), ("99999", "16886 9, 16887 9")):
        with pytest.raises(InputError) as caught:
            find(text, expression)
        said = str(caught.value)
        assert seen in said
        assert "tokens)" in said
        assert len(said) < 500


@pytest.mark.parametrize("name", TEXTS)
def test_every_token_is_found_by_its_number(name):
    text = prompt(name)
    for place in range(len(text)):
        assert find(text, str(place)).positions == (place,)
        assert find(text, str(place - len(text))).positions == (place,)
        assert find(text, f"{place}:,^{place + 1}:").positions == (place,) if place + 1 < len(text) else True


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    "text", [SENTENCE, "日本語の本。銀行は川の岸", "मرحبا नमस्ते दुनिया।", "👍🏽 cafe\u0301, don't! 3.14"]
)
def test_every_word_is_found_by_its_text(maker, text):
    for made in (text_of := from_text(MAKERS[maker](), text), from_ids(MAKERS[maker](), text_of.ids)):
        for word in made.words:
            found = find(made, json.dumps(word.name, ensure_ascii=False))
            written = {place for place in range(word.start, word.stop) if made.tokens[place].strip()}
            assert written <= set(found.positions), word


# groups


def test_groups_are_read_from_name_and_meaning():
    assert defined(["subject=Mary", "other = ^subject,last"]) == {"subject": "Mary", "other": "^subject,last"}
    assert defined(["sum=a=b"]) == {"sum": "a=b"}
    assert defined([]) == {}


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["subject"], "a group is a name and what it means, got 'subject'; write define=\"subject=Mary\""),
        (["=Mary"], "a group is a name and what it means, got '=Mary'; write define=\"subject=Mary\""),
        (["3=Mary"], "a group is a name and what it means, got '3=Mary'; write define=\"subject=Mary\""),
        (["a b=Mary"], "a group is a name and what it means, got 'a b=Mary'; write define=\"subject=Mary\""),
        (["last=Mary"], "'last' means tokens already; choose another name for define"),
        (["a=1", "a=2"], "the group 'a' is defined twice; join both with a comma"),
        (["a="], f"a part of '' is empty; {QUOTED}"),
        (["a=b", "b=c,a", "c=1"], "the group 'a' is made of itself: a -> b -> a; define it by other words"),
        (["a=a"], "the group 'a' is made of itself: a -> a; define it by other words"),
        (["a=/(/"], "/(/ is not a regular expression: missing ) at position 1; write a text in quotes"),
    ],
)
def test_groups_that_cannot_be_meant(pairs, message):
    with pytest.raises(UsageError) as caught:
        defined(pairs)
    assert str(caught.value) == message


def test_groups_of_groups_are_found_once():
    """Thirty groups, each made of the one before twice: a billion words if they were written out."""
    groups = {"g0": "bank"} | {f"g{number}": f"g{number - 1},g{number - 1}" for number in range(1, 31)}
    assert defined([f"{name}={meaning}" for name, meaning in groups.items()]) == groups
    assert find(prompt("bank"), "g30", groups).positions == (3, 8)
    ten, twenty = (steps(partial(find, prompt("bank"), f"g{number}", groups)) for number in (10, 20))
    assert twenty < 3 * ten


# headers


@pytest.mark.parametrize(
    ("text", "expression", "said"),
    [
        ("bank", "bank", "bank(3), bank(8)"),
        ("bank", "3-7", "bank is located on river(3-7)"),
        ("bank", "last,first", "<s>(0), bank(8)"),
        ("bank", "*", "<s>the financial bank i…ver bank(0-8)"),
        ("split", "日", "日(4-6)"),
        ("split", "3", "·(3)"),
        ("signs", "/\\W/", '👍(0-4), "(7-8), "\\(10-11)'),
        (
            "store",
            "/./,^3,^5,^7,^9,^11,^13,^15,^17,^19",
            "to(0-2), h(4), ·(6), t(8), r(10), ·(12), -(14), ·(16) and 2 more",
        ),
    ],
)
def test_what_a_header_says(text, expression, said):
    assert described(prompt(text), find(prompt(text), expression)) == said


def test_queries_and_keys_are_found_together():
    chosen = choose(prompt("bank"), "last", "an,fin", {})
    assert (chosen.query.positions, chosen.key.positions) == ((8,), (2, 3, 8))
    assert [note.split()[0] for note in chosen.notes] == ["'an'", "'fin'"]
    assert choose(prompt("bank")).notes == ()


# what somebody else wrote


@pytest.mark.parametrize("pattern", ["(a+)+$", "(?:(a)|b)*(?:a|aa)+$", "a*(?R)?c", "(" * 300 + ")" * 300])
def test_a_pattern_that_never_ends_is_an_error_of_this_text(pattern, monkeypatch):
    monkeypatch.setattr("attnscope.inputs.tokens.SECONDS", 0.2)
    with pytest.raises(InputError):
        find(from_text(SlowBytes(), "a" * 3000 + "b"), f"/{pattern}/")


@pytest.mark.parametrize(
    "pattern",
    [
        "a{99999999}",
        "((a{999}){999}){999}",
        "(a{,9999}){2,}",
        "a{1,99999999999}",
        "a{1000000000000}",
        "a{00000000000099999999}",
        "(" * 3000,
        "[a-z]" * 999,
    ],
)
def test_a_pattern_that_would_fill_the_memory_is_refused_before_it_is_compiled(pattern):
    with pytest.raises(UsageError, match=r"too (long|often)|too long or repeats"):
        find(prompt("bank"), f"/{pattern}/")


HOSTILE = ["\x00", "\u202e", "\x1b[2J", "\x9b", "a" * 1000, "\ud800", "</script>", "\\", '\\"', "{engine}", "%s", "'"]


@pytest.mark.parametrize("value", HOSTILE)
def test_whatever_is_asked_for_the_answer_is_one_line_without_controls(value):
    for expression in (value, f"/{value}", f"{value}#9", json.dumps(value, ensure_ascii=False), f"^{value}"):
        with pytest.raises((InputError, UsageError)) as caught:
            find(prompt("bank"), expression)
        said = str(caught.value)
        assert len(said) < 800
        assert said.isprintable()
    with pytest.raises(UsageError) as caught:
        defined([f"{value}!=1"])
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("maker", MAKERS)
def test_hostile_texts_are_found_where_they_stand(maker):
    parts = ["\x00", "\u202emirror", "\x1b[2J", "</script>", "\u200b\u200d", "\ufeff", "e\u0301\u0301", "A" * 3000]
    made = from_text(MAKERS[maker](), " ".join(parts))
    for part in parts:
        found = find(made, f'"{part}"')
        said = "".join(made.text[start:stop] for start, stop in {made.characters[at] for at in found.positions})
        assert set(part) <= set(said)
        assert described(made, found).isprintable()
        assert len(described(made, found)) < 500


def test_texts_that_share_a_word_are_each_found():
    assert find(from_text(wordlevel("a"), "a a a"), '"a a"').positions == (0, 1, 2)


def test_a_token_of_100_000_characters():
    text = from_text(wordlevel("bank"), "x" * 100_000 + " bank")
    assert [find(text, one).positions for one in ("bank", "x*", "/x{9}/", "x" * 100_000)] == [(1,), (0,), (0,), (0,)]
    assert described(text, find(text, "0")) == "x" * 23 + "…" + "x" * 8 + "(0)"
    with pytest.raises(InputError) as caught:
        find(text, "y" * 100_000)
    assert len(str(caught.value)) < 800

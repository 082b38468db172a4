"""Labels, spans and ids of a text, with real small tokenizers of every kind that decoders come with."""

import hashlib
import io
import json
import logging
import os
import re
import sys
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer, ByT5Tokenizer, PerceiverTokenizer, PreTrainedTokenizerFast

from attnscope.errors import InputError, UsageError
from attnscope.inputs import labels
from attnscope.inputs.labels import BYTES, locate_tokens, spans_with_marks, visible_blanks
from attnscope.inputs.prompt import Prompt, from_chat, from_ids, from_text
from attnscope.inputs.spans import sentence_ranges, word_ranges
from attnscope.inputs.tokens import find
from attnscope.utils.files import decode_utf8, read_ids, read_text
from helpers.made_tokenizers import LINES, MAKERS, SlowBytes, SlowWords, byte_level, llama, wordpiece
from helpers.pretrained import ORACLES, pretrained
from helpers.work import steps

TEXTS = {
    "english": "the financial bank is located on river bank",
    "chinese": "日本語の本。銀行は川の岸にある",
    "arabic": "مرحبا بالعالم",
    "devanagari": "नमस्ते दुनिया।",
    "emoji": "👨‍👩‍👧 🇯🇵🇫🇷 👍🏽 ❤️",
    "combining": "e\u0301 cafe\u0301 n\u0303",
    "marks": "Ġ ▁ Ċ <0x41> ##ing",
    "white": "a  b\t\tc\r\n\n  d \u00a0\u3000",
    "controls": "a\x00b\u200bc\u202ed\ufeff",
}


@pytest.fixture(scope="module", params=MAKERS)
def named(request):
    return request.param, MAKERS[request.param]()


def joined(prompt: Prompt) -> str:
    """The text the tokens add up to: a numbered character stands where its last piece is."""
    text = "".join(token for token, special in zip(prompt.tokens, prompt.special, strict=True) if not special)
    return re.sub(r"(.)·(\d)/(\d)", lambda piece: piece[1] if piece[2] == piece[3] else "", text, flags=re.DOTALL)


def covers(spans: tuple, count: int) -> bool:
    return [place for span in spans for place in range(span.start, span.stop)] == list(range(count))


@pytest.mark.parametrize("kind", TEXTS)
def test_every_text_reads_as_written_with_every_tokenizer(named, kind):
    (name, tokenizer), text = named, TEXTS[kind]
    prompt = from_text(tokenizer, text)
    assert list(prompt.ids) == tokenizer(text)["input_ids"]
    assert joined(prompt) == (" " + text if name == "llama" else text)
    if kind != "marks":
        assert not set("ĠĊ▁ĉ") & set("".join(prompt.labels))
    assert all(label and label.isprintable() and " " not in label for label in prompt.labels)
    assert covers(prompt.words, len(prompt))
    assert covers(prompt.sentences, len(prompt))
    assert len(prompt.tokens) == len(prompt.labels) == len(prompt.special) == len(prompt.ids) == len(prompt)


def test_tokens_with_characters_of_their_own_are_read_as_all_others_are(named, monkeypatch):
    """By the rule for tokens that share characters, which most texts do not need."""
    ways = {"<s>the bank</s>", "the  bank \n\n on", " the", "the bank on a river", *TEXTS.values()}
    quick = {text: from_text(named[1], text) for text in ways}
    apart = []
    monkeypatch.setattr(labels, "_read_apart", lambda *given: apart.append(given))
    for text, prompt in quick.items():
        assert from_text(named[1], text) == prompt
        assert from_text(named[1], text).characters == prompt.characters
    assert bool(apart) == bool(getattr(named[1], "is_fast", False))


def said_at(prompt: Prompt) -> list[str]:
    return [prompt.text[start:stop] for start, stop in prompt.characters]


@pytest.mark.parametrize("kind", TEXTS)
def test_the_characters_of_every_token_are_those_that_it_says(named, kind):
    tokenizer, text = named[1], TEXTS[kind]
    of_text = from_text(tokenizer, text)
    for prompt in (of_text, from_ids(tokenizer, of_text.ids)):
        check_characters(prompt)
    for side in ("left", "right"):
        cut = from_text(tokenizer, text, max_tokens=max(len(of_text) - 2, 1), truncate=side)
        kept = of_text.characters[-len(cut) + 1 :] if side == "left" else of_text.characters[: len(cut)]
        assert cut.characters[-len(kept) :] == kept


def check_characters(prompt: Prompt) -> None:
    """Each token's own, in order, and every character but white space is some token's."""
    assert len(prompt.characters) == len(prompt)
    assert list(prompt.characters) == sorted(prompt.characters)
    for token, said in zip(prompt.tokens, said_at(prompt), strict=True):
        whole = re.sub(r"(.)·\d/\d", r"\1", token, flags=re.DOTALL)
        assert said.strip() in ("", whole.strip()), token
        assert said or token.isspace() or token.startswith("<"), token
    held = {at for start, stop in prompt.characters for at in range(start, stop)}
    assert all(char.isspace() for at, char in enumerate(prompt.text) if at not in held)


def test_both_tokens_of_a_split_character_hold_it():
    assert said_at(from_text(llama(), "the 日")) == ["", "the", " ", "日", "日", "日"]
    assert said_at(from_text(SlowBytes(), "é日")) == ["é", "é", "日", "日", "日"]
    assert said_at(from_text(llama(normalizers.NFKC()), "the ﬁ")) == ["", "the", " ", "ﬁ", "ﬁ"]
    assert said_at(from_text(llama(), "river"))[:3] == ["", "", "r"]


def test_characters_without_a_tokenizer_that_tells_are_found_by_what_tokens_say():
    assert locate_tokens(["the", " bank", "<x>", " on"], ["the", " bank", "<x>", " on"], "the \n bank on") == (
        *((0, 3), (6, 10), (10, 10)),
        (10, 13),
    )
    assert locate_tokens(["lost", "on"], ["lost", "on"], "x" * 40 + "on") == ((0, 0), (0, 0))


def test_the_pieces_of_one_character_are_numbered():
    assert from_text(llama(), "日").labels == ("<s>", "·", "日·1/3", "日·2/3", "日·3/3")
    assert from_text(SlowBytes(), "é日").tokens == ("é·1/2", "é·2/2", "日·1/3", "日·2/3", "日·3/3")
    assert from_text(byte_level(), "👍").labels == ("👍·1/4", "👍·2/4", "👍·3/4", "👍·4/4")


@pytest.mark.parametrize("make", [ByT5Tokenizer, PerceiverTokenizer, SlowBytes])
def test_bytes_without_offsets_are_parts_of_characters_and_of_words(make):
    prompt = from_text(make(), "naïve 日")
    held = tuple(at for at, (start, stop) in enumerate(prompt.characters) if start < min(stop, 5))
    assert find(prompt, "naïve").positions == held
    assert len(held) == 6
    assert [span.name for span in prompt.words if span.name in "naïve 日"] == ["naïve", "日"]
    assert "".join(prompt.labels).replace("[CLS]", "").startswith("naï·1/2ï·2/2ve·日·1/3")


def test_a_vocabulary_of_all_characters_is_of_no_bytes():
    class Characters(SlowBytes):
        def get_vocab(self) -> dict[str, int]:
            return {chr(number): number for number in range(1 << 12)}

        def _tokenize(self, text: str, **kwargs: object) -> list[str]:
            return list(text)

        def _convert_token_to_id(self, token: str) -> int:
            return ord(token)

        def _convert_id_to_token(self, index: int) -> str:
            return chr(index)

    assert from_text(Characters(), "naïve").tokens == tuple("naïve")  # as CANINE's


def nfc() -> PreTrainedTokenizerFast:
    """A kind that composes letters and marks, as Qwen's: its offsets leave the marks out."""
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize("make", [nfc, lambda: llama(normalizers.NFC()), wordpiece])
@pytest.mark.parametrize("text", ["the cafe\u0301 x", "cafe\u0301", "thee\u0301\u0302 banke\u0301"])
def test_combining_marks_belong_to_the_token_of_their_letter(make, text):
    prompt = from_text(make(), text)
    held = {at for start, stop in prompt.characters for at in range(start, stop)}
    assert held >= {at for at, char in enumerate(text) if not char.isspace()}
    word = text.split()[-1] if "x" not in text else text.split()[1]
    found = [prompt.characters[at] for at in find(prompt, word).positions]
    assert (found[0][0] <= text.index(word), found[-1][1]) == (True, text.index(word) + len(word))
    composed = unicodedata.normalize("NFC", word)
    assert composed in [unicodedata.normalize("NFC", span.name) for span in prompt.words]


def test_a_mark_with_a_token_of_its_own_stays_there():
    assert spans_with_marks([(0, 1), (1, 2), (3, 4)], "e\u0301\u0302x") == [(0, 1), (1, 3), (3, 4)]
    assert spans_with_marks([(0, 1), (0, 1), (2, 3)], "e\u0301x") == [(0, 2), (0, 2), (2, 3)]
    assert spans_with_marks([(0, 0), (1, 2)], "\u0301x") == [(0, 0), (1, 2)]
    assert spans_with_marks([(0, 3)], "e\u0301x") == [(0, 3)]


def test_a_token_with_parts_of_two_characters_names_both():
    backend = byte_level().backend_tokenizer
    state = json.loads(backend.to_str())
    letters = {byte: letter for letter, byte in BYTES.items()}
    left, right = letters["日".encode()[2]], letters["本".encode()[0]]
    state["model"]["merges"] = [[left, right]]
    state["model"]["vocab"][left + right] = len(state["model"]["vocab"]) + 10
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    assert from_text(tokenizer, "日本").labels == ("日·1/3", "日·2/3", "日·3/3本·1/3", "本·2/3", "本·3/3")


def test_the_dummy_prefix_is_a_space():
    assert from_text(llama(), "the bank").labels == ("<s>", "·the", "·bank")
    assert from_text(llama(), "bank").tokens == ("<s>", " bank")
    assert from_text(llama(), "river").labels == ("<s>", "·", "r", "i", "v", "e", "r")


@pytest.mark.parametrize("text", ["the  bank \n x", "the 日 \u0928"])
def test_trimmed_offsets_give_their_spaces_back(text):
    prompt = from_text(byte_level(trim=True), text)
    assert prompt.tokens == from_text(byte_level(trim=False), text).tokens
    assert [span.name for span in prompt.sentences] == [text]


def test_added_tokens_are_text_and_not_letters_of_bytes():
    tokenizer = byte_level()
    tokenizer.add_tokens(["é!"])
    prompt = from_text(tokenizer, "x é!")
    assert prompt.tokens == from_ids(tokenizer, prompt.ids).tokens == ("x", " ", "é!")
    assert not any(prompt.special)


@pytest.mark.parametrize(
    ("normalizer", "text", "labels"),
    [
        (normalizers.Lowercase(), "THE Bank", ("·THE", "·Bank")),
        (normalizers.NFKC(), "ｔｈｅ bank", ("·ｔｈｅ", "·bank")),
        (normalizers.Lowercase(), "É", ("·", "É·1/2", "É·2/2")),
        (normalizers.NFKC(), "ﬁ", ("·", "f", "i")),
    ],
)
def test_where_the_normaliser_changes_the_text_the_text_is_shown(normalizer, text, labels):
    assert from_text(llama(normalizer), text).labels[1:] == labels


def test_wordpiece_has_no_marks_and_knows_where_words_begin():
    prompt = from_text(wordpiece(), "The banking don't. Zebra")
    assert prompt.tokens == ("[CLS]", "The", "bank", "ing", "don", "'", "t", ".", "Zebra", "[SEP]")
    assert prompt.labels[-2] == "Zebra[UNK]"
    assert prompt.special == (True, *[False] * 8, True)
    assert [span.name for span in prompt.words] == ["[CLS]", "The", "banking", "don't", ".", "Zebra", "[SEP]"]
    assert [span.name for span in prompt.sentences] == ["[CLS]", "The banking don't.", "Zebra", "[SEP]"]
    assert [span.name for span in from_ids(wordpiece(), prompt.ids[1:4]).words] == ["the", "banking"]


@pytest.mark.parametrize(
    ("names", "ids", "words"),
    [
        (["ri", "ver</w>", "bank</w>", "riv"], [0, 1, 2], ["river", "bank"]),
        (["riv@@", "er", "bank", "ba@@"], [0, 1, 2], ["river", "bank"]),
        (["river", "bank"], [0, 1], ["riverbank"]),
    ],
)
def test_slow_vocabularies_of_other_styles(names, ids, words):
    prompt = from_ids(SlowWords(names), ids)
    assert [span.name for span in prompt.words] == words
    assert "".join(prompt.tokens) == "riverbank"


def test_a_sentencepiece_model_without_offsets(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join([*LINES, "the river bank", "on the bank"] * 4))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "sp"), vocab_size=320, model_type="bpe", byte_fallback=True,
        minloglevel=2,
    )  # fmt: skip
    tokenizer = SentencePieceBackend(vocab_file=str(tmp_path / "sp.model"), bos_token="<s>", unk_token="<unk>")
    assert not tokenizer.is_fast
    prompt = from_text(tokenizer, "the bank 日")
    assert prompt.labels[-3:] == ("日·1/3", "日·2/3", "日·3/3")
    assert "".join(prompt.tokens).startswith(" the bank ")
    assert [span.name for span in prompt.words] == ["the", "bank", "日"]


def test_special_tokens_typed_in_the_text_are_special():
    prompt = from_text(byte_level(), "the<|end|> bank <|head|>")
    assert [token for token, special in zip(prompt.tokens, prompt.special, strict=True) if special] == [
        "<|end|>",
        "<|head|>",
    ]
    assert "bank" in [span.name for span in prompt.words]
    assert from_text(llama(), "the</s>").special == (True, False, True)


def test_unknown_tokens_show_the_text_and_say_so():
    names = {"<unk>": 0, "a": 1}
    backend = Tokenizer(models.BPE(vocab=names, merges=[], unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    prompt = from_text(tokenizer, "a日\n<unk>")
    assert prompt.tokens == ("a", "日", "\n", "<unk>")
    assert prompt.labels == ("a", "日<unk>", "↵<unk>", "<unk>")
    assert prompt.special == (False, False, False, True)


@pytest.mark.parametrize("name", ORACLES)
def test_the_shared_models(name):
    tokenizer = AutoTokenizer.from_pretrained(pretrained(name))
    for text in TEXTS.values():
        prompt = from_text(tokenizer, text)
        assert list(prompt.ids) == tokenizer(text)["input_ids"]
        assert joined(prompt) == " " + text
        check_characters(prompt)
        assert (prompt.tokens[0], prompt.special[0]) == ("<s>", True)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (" a\tb\r\n", "·a⇥b⇤↵"),
        ("a\u200bb", "a⟨200B⟩b"),
        ("\x00", "⟨0000⟩"),
        ("\u202ea\u00a0", "⟨202E⟩a⟨00A0⟩"),
        ("\u200d", "⟨200D⟩"),
        ("a\u200db", "a⟨200D⟩b"),
        ("👨‍👩‍👧❤️‍🔥👍🏽", "👨‍👩‍👧❤️‍🔥👍🏽"),
        ("\ufe0f", "⟨FE0F⟩"),
        ("a\ufe00\ufe01", "a\ufe00⟨FE01⟩"),
        ("🏴\U000e0067\U000e007f", "🏴\U000e0067\U000e007f"),
        ("a\U000e0041", "a⟨E0041⟩"),
        ("é日नमस्ते\u0301", "é日नमस्ते\u0301"),
        ("\u0600\u3164", "\u0600⟨3164⟩"),
    ],
)
def test_visible(text, label):
    assert visible_blanks(text) == label


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["the", " riv", "er", " bank"], ["the", " river", " bank"]),
        (["a", " ", " ", " b", "\n"], ["a", "   b\n"]),
        (["\n", "\n"], ["\n\n"]),
        (["foo\n", "bar"], ["foo\n", "bar"]),
        (["bank", ".", " (", "x", ")"], ["bank", ".", " (", "x", ")"]),
        (["don", "'", "t", " '", "x"], ["don't", " '", "x"]),
        (["3", ".", "14", ",", " x"], ["3.14", ",", " x"]),
        (["日", "本", "x", "y"], ["日", "本", "xy"]),
        (["日", "", "", "本"], ["日", "本"]),
        ([" न", "म", "स", "्", "ते"], [" नमस्ते"]),
        (["👨", "\u200d", "👩", "👍", "🏽"], ["👨\u200d👩", "👍🏽"]),
        (["🇯", "🇵", "🇫", "🇷"], ["🇯🇵", "🇫🇷"]),
        (["a", "_", "b", "+", "c"], ["a_b", "+", "c"]),
    ],
)
def test_words(texts, words):
    ranges = word_ranges(texts, [False] * len(texts))
    assert ["".join(texts[start:stop]) for start, stop in ranges] == words


@pytest.mark.parametrize(
    ("texts", "sentences"),
    [
        (["A", ".", " B", "!", " C", "?"], ["A.", " B!", " C?"]),
        (["It", " is", " 3", ".", "5", "."], ["It is 3.5."]),
        (["“A", ".", "”", " B"], ["“A.”", " B"]),
        (["A", "...", " b"], ["A...", " b"]),
        (["日", "。", "本", "！", "」", "本"], ["日。", "本！」", "本"]),
        (["A", "\n\n", "B", "\n", "C"], ["A\n\n", "B\nC"]),
        (["A", "\n", "\n", "B", ".", "\n"], ["A\n\n", "B.\n"]),
        (["A", ".", "\n\n", "B"], ["A.", "\n\nB"]),
        (["A", "…", " B", "।", " C"], ["A…", " B।", " C"]),
    ],
)
def test_sentences(texts, sentences):
    ranges = sentence_ranges(texts, [False] * len(texts))
    assert ["".join(texts[start:stop]) for start, stop in ranges] == sentences


def test_special_tokens_are_words_and_sentences_of_their_own():
    texts, special = ["<s>", "a", "b", "</s>", " ", "</s>"], [True, False, False, True, False, True]
    expected = [(0, 1), (1, 3), (3, 4), (4, 5), (5, 6)]
    assert word_ranges(texts, special) == expected
    assert sentence_ranges(texts, special) == expected
    assert word_ranges([], []) == []


CHATML = "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
BEGIN = "{{ bos_token }}" + CHATML
OWN_SYSTEM = "{% if messages[0].role != 'system' %}<|head|>system\nBe kind.<|end|>\n{% endif %}" + CHATML
TRIMMED = CHATML.replace("m.content", "m.content | trim")
FOLDED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% else %}[INST] "
    "{% if loop.index0 == 1 and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }} [/INST]{% endif %}{% endfor %}"
)
STRICT = "{% if messages[-1].role != 'user' %}{{ raise_exception('the last must be the user') }}{% endif %}" + CHATML
LAST = "{% for m in messages %}{% if loop.last %}LAST{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CENSOR = "{% for m in messages %}{% if loop.last %}LAST{% endif %}{{ m.content | upper }}\n{% endfor %}"
CHAT = [
    {"role": "system", "content": "the river"},
    {"role": "user", "content": "user"},
    {"role": "assistant", "content": "bank 日."},
    {"role": "user", "content": "the end"},
]


def chat_of(template: str, messages: list, make=byte_level, **how: object) -> tuple[Prompt, object]:
    tokenizer = make()
    tokenizer.chat_template = template
    return from_chat(tokenizer, json.dumps(messages), **how), tokenizer


def turn_texts(prompt: Prompt) -> list[tuple[str, str]]:
    def text(start: int, stop: int) -> str:
        return re.sub(r"(.)·(\d)/(\d)", lambda p: p[1] if p[2] == p[3] else "", "".join(prompt.tokens[start:stop]))

    return [(turn.name, text(turn.start, turn.stop)) for turn in prompt.turns]


@pytest.mark.parametrize("make", [byte_level, lambda: byte_level(trim=True), lambda: byte_level(begin=True), SlowBytes])
@pytest.mark.parametrize("template", [CHATML, BEGIN, TRIMMED])
def test_turns_are_the_messages_with_their_headers(make, template):
    prompt, tokenizer = chat_of(template, CHAT, make)
    assert turn_texts(prompt) == [(m["role"], f"<|head|>{m['role']}\n{m['content']}<|end|>\n") for m in CHAT]
    expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=False, return_dict=False)
    assert list(prompt.ids) == expected
    assert prompt.ids.count(tokenizer.bos_token_id) == (template == BEGIN)


def test_a_begin_token_is_in_no_turn():
    prompt, tokenizer = chat_of(BEGIN, CHAT[1:2])
    assert prompt.ids[0] == tokenizer.bos_token_id
    assert prompt.turns[0].start == 1
    assert prompt.turns[0].stop == len(prompt)


def test_a_system_prompt_of_the_template_is_not_the_user():
    prompt, _ = chat_of(OWN_SYSTEM, CHAT[1:])
    assert turn_texts(prompt)[0] == ("user", "<|head|>user\nuser<|end|>\n")
    assert prompt.text.startswith("<|head|>system\nBe kind.<|end|>")
    assert [turn.name for turn in prompt.turns] == ["user", "assistant", "user"]


@pytest.mark.parametrize("template", [FOLDED, LAST])
def test_where_parts_render_otherwise_the_turns_are_the_contents(template):
    prompt, _ = chat_of(template, CHAT)
    # What a token holds beside the content comes along: the space before it.
    assert [(role, text.strip()) for role, text in turn_texts(prompt)] == [(m["role"], m["content"]) for m in CHAT]


def test_a_template_that_refuses_parts_of_a_chat_still_gives_turns():
    prompt, _ = chat_of(STRICT, CHAT)
    assert [turn.name for turn in prompt.turns] == [m["role"] for m in CHAT]


def test_turns_that_cannot_be_told_are_left_out():
    prompt, _ = chat_of(CENSOR, CHAT)
    assert prompt.turns == ()
    assert covers(prompt.words, len(prompt))


def test_plain_text_is_one_turn_of_the_user():
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML
    for text in ("the bank", "[the] bank", "[1, 2", "{}", "[" * 20_000):
        prompt = from_chat(tokenizer, text)
        assert prompt.text == f"<|head|>user\n{text}<|end|>\n"
        assert [turn.name for turn in prompt.turns] == ["user"]


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ("[]", "the list of messages is empty"),
        ("[1]", "message 0 of the chat is 1, not an object"),
        ('[{"role": "user", "content": "a"}, "b"]', 'message 1 of the chat is "b", not an object'),
        ('[{"content": "a"}]', "message 0 of the chat has no 'role'"),
        ('[{"role": "user", "content": "a"}, {"role": "user"}]', "message 1 of the chat has no 'content'"),
        ('[{"role": "user", "content": null}]', "message 0 of the chat has a 'content' that is not text"),
        ('[{"role": 3, "content": "a"}]', "message 0 of the chat has a 'role' that is not text"),
        ('[{"role": "user", "content": "a\\ud800"}]', "half of a surrogate pair"),
        ('[{"role": "assistant", "content": "a"}]', "refused the messages: the last must be the user"),
    ],
)
def test_bad_chats(chat, message):
    tokenizer = byte_level()
    tokenizer.chat_template = STRICT
    with pytest.raises(InputError, match=re.escape(message)):
        from_chat(tokenizer, chat)


PARTED = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part.text | trim }}{% endfor %}\n{% endfor %}"
)
EITHER = PARTED.replace("{% for part", "{% if m.content is string %}{{ m.content }}{% else %}{% for part").replace(
    "{% endfor %}\n", "{% endfor %}{% endif %}\n"
)
LIST = [
    {"role": "user", "content": [{"type": "text", "text": "the bank"}, {"type": "text", "text": "is"}]},
    {"role": "assistant", "content": "on the river"},
]


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (CHATML, [LIST[0] | {"content": "the bank is"}, LIST[1]]),  # it would write the list itself
        (EITHER, LIST),
        (PARTED, [LIST[0]]),
    ],
)
def test_parts_are_given_to_templates_that_take_them_and_joined_for_others_as_transformers_serves_them(
    template, messages
):
    prompt, tokenizer = chat_of(template, LIST[: len(messages)])
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=False, return_dict=False)
    assert list(prompt.ids) == expected
    assert [turn.name for turn in prompt.turns] == ["user", "assistant"][: len(messages)]
    assert ("'text'" in prompt.text) is False


def test_a_tool_call_has_no_content_and_its_arguments_are_an_object():
    template = CHATML.replace(
        "{{ m.content }}", "{{ m.content or '' }}{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    for without in (asked, {name: value for name, value in asked.items() if name != "content"}):
        prompt, _ = chat_of(template, [CHAT[1], without, {"role": "tool", "content": "rain"}])
        assert [turn.name for turn in prompt.turns] == ["user", "assistant", "tool"]
        assert turn_texts(prompt)[1] == ("assistant", "<|head|>assistant\nParis<|end|>\n")


def test_messages_of_sharegpt_are_messages():
    given = [{"from": "system", "value": "be"}, {"from": "human", "value": "the bank"}, {"from": "gpt", "value": "on"}]
    roles = ("system", "user", "assistant")
    same = [{"role": role, "content": one["value"]} for role, one in zip(roles, given, strict=True)]
    assert chat_of(CHATML, given)[0] == chat_of(CHATML, same)[0]


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        ("[{'role': 'user', 'content': 'hi'}]", "no JSON: .*line 1"),
        ('[{"role": "user", "content": "hi"},\n]', "no JSON: .*line [12]"),
        ('[{"role": "assistant", "content": None}]', "no JSON: .*line 1"),
        ('[{"role": "user", "content": "two\nlines"}]', r"no JSON: .*a line break as \\n"),
        ('{"role": "user", "content": "a"}\n{"role": "user", "content": "b"}', r"no JSON: .*; write one list, \[{"),
        ('{"role": "user", "content": "hi"}', "one JSON object"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "one JSON object"),
        ('[{"role": "user", "content": [{"type": "audio"}]}]', "message 0 .* a part that is no text"),
        ('[{"role": "user", "content": [{"type": "image"}]}]', "a picture"),
    ],
)
def test_what_is_meant_as_messages_is_not_what_a_user_said(chat, said):
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML
    with pytest.raises(InputError, match=f"(?s){said}"):
        from_chat(tokenizer, chat)


def test_a_surrogate_pair_in_json_is_its_character():
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML
    assert "👍" in from_chat(tokenizer, r'[{"role": "user", "content": "\ud83d\udc4d"}]').text


def test_no_template_is_a_usage_error():
    with pytest.raises(UsageError, match="no chat template; leave out chat"):
        from_chat(byte_level(), "hi")


def test_too_long_names_both_numbers():
    with pytest.raises(InputError, match=r"13 tokens.* 5; .*truncate=\"left\" or truncate=\"right\""):
        from_text(SlowBytes(), "the bank of x", max_tokens=5)
    assert from_text(SlowBytes(), "the bank of x", max_tokens=13).removed == 0


@pytest.mark.parametrize("make", [llama, lambda: llama(begin=False)])
def test_truncation_keeps_the_begin_token(make):
    tokenizer = make()
    whole = from_text(tokenizer, "the bank. river")
    head = int(whole.special[0])
    left = from_text(tokenizer, "the bank. river", max_tokens=4, truncate="left")
    right = from_text(tokenizer, "the bank. river", max_tokens=4, truncate="right")
    assert left.ids == whole.ids[:head] + whole.ids[len(whole) - 4 + head :]
    assert right.ids == whole.ids[:4]
    for prompt in (left, right):
        assert (len(prompt), prompt.removed, prompt.text) == (4, len(whole) - 4, "the bank. river")
        assert covers(prompt.words, 4)
        assert covers(prompt.sentences, 4)


def test_truncated_chats_keep_the_turns_that_are_left():
    prompt, tokenizer = chat_of(BEGIN, CHAT, max_tokens=6, truncate="left")
    assert prompt.ids[0] == tokenizer.bos_token_id
    assert [(turn.start, turn.stop, turn.name) for turn in prompt.turns] == [(1, 6, "user")]


@pytest.mark.parametrize(("most", "side"), [(0, "left"), (-1, None), (3, "middle")])
def test_bad_limits(most, side):
    with pytest.raises(UsageError):
        from_text(SlowBytes(), "the bank", max_tokens=most, truncate=side)


def test_no_tokens_is_an_error_and_one_is_fine():
    with pytest.raises(InputError, match="no tokens"):
        from_text(byte_level(), "")
    with pytest.raises(InputError, match="no token ids"):
        from_ids(byte_level(), [])
    assert len(from_text(byte_level(), "x")) == 1
    assert from_text(byte_level(), " ").words[0].name == " "


def test_half_a_surrogate_pair_is_named():
    with pytest.raises(InputError, match=r"character 2 .*U\+D800"):
        from_text(byte_level(), "ab\ud800")


def test_ids_alone_read_like_the_text(named):
    _, tokenizer = named
    prompt = from_text(tokenizer, "the bank 日.")
    alone = from_ids(tokenizer, prompt.ids)
    assert (alone.tokens, alone.labels, alone.special) == (prompt.tokens, prompt.labels, prompt.special)
    assert alone.words == prompt.words


def test_random_ids_show_their_bytes_and_ids_beyond_the_vocabulary():
    prompt = from_ids(SlowBytes(), [0xE6, 0x41, 9999, 0x97])
    assert prompt.tokens == ("<0xE6>", "A", "<id 9999>", "<0x97>")
    assert from_ids(byte_level(), [5000]).tokens == ("<id 5000>",)
    assert len(prompt.sha256) == 64


def test_the_hash_is_of_the_text_as_given():
    text = "the bank 日"
    assert from_text(llama(), text).sha256 == hashlib.sha256(text.encode("utf-8")).hexdigest()


def test_nothing_is_logged_about_length(caplog):
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.WARNING)  # a command that ran before in this process may have made it quiet
    try:
        for tokenizer in (byte_level(), SlowBytes()):
            tokenizer.model_max_length = 3
            tokenizer.chat_template = CHATML
            from_text(tokenizer, "the bank on the river bank")
            from_chat(tokenizer, "the bank on the river bank")
            assert not caplog.records
            tokenizer("the bank on the river bank")
            assert "longer than the specified maximum" in caplog.text  # the check can fail
            caplog.clear()
    finally:
        logger.setLevel(level)
        logger.removeHandler(caplog.handler)


def growth(tokenizer, short: int = 10) -> float:
    """How many times the work it takes to label ten times the text."""

    def work(repeats: int) -> int:
        ids = tokenizer("the bank 日 e\u0301. " * repeats, verbose=False)["input_ids"]
        return steps(lambda: from_ids(tokenizer, ids))

    work(1)  # what is looked up once
    once = work(short)
    return work(10 * short) / once


@pytest.mark.parametrize("make", [byte_level, llama, SlowBytes])
def test_labelling_takes_linear_time(make):
    assert growth(make()) < 11


@pytest.mark.parametrize("make", [byte_level, llama, SlowBytes])
def test_labelling_that_looks_back_at_all_tokens_is_noticed(make, monkeypatch):
    label, before = labels._label, []

    def looking_back(piece, exact):
        before.append(exact)
        return label(piece, "".join(one for one in before if one is exact))

    monkeypatch.setattr(labels, "_label", looking_back)
    assert growth(make(), short=4) > 15


def test_a_long_text_of_one_word():
    prompt = from_text(SlowBytes(), "a" * 20_000)
    assert len(prompt.words) == len(prompt.sentences) == 1


def test_decoding_names_the_first_bad_byte():
    assert decode_utf8(b"\xef\xbb\xbfcaf\xc3\xa9", "x.txt") == "café"
    with pytest.raises(InputError, match=r"x\.txt .*0xFF .*offset 3\b"):
        decode_utf8(b"abc\xffd\xfe", "x.txt")
    with pytest.raises(InputError, match="offset 4"):
        decode_utf8(b"\xef\xbb\xbfa\xc3", "x.txt")
    with pytest.raises(InputError, match="iconv -f UTF-16"):
        decode_utf8("hi".encode("utf-16"), "x.txt")


def test_an_archive_is_no_text_in_any_encoding(tmp_path):
    np.savez(tmp_path / "ids.npz", ids=np.arange(200))
    with pytest.raises(InputError, match=r"ids\.npz is no text: byte 0x00 at offset \d+; give whole numbers"):
        read_ids(str(tmp_path / "ids.npz"))
    with pytest.raises(InputError, match="is no text") as raised:
        read_text(None, str(tmp_path / "ids.npz"))
    assert "iconv" not in str(raised.value.hint)


def test_reading_texts_files_and_standard_input(tmp_path, monkeypatch):
    file = tmp_path / "bank.txt"
    file.write_bytes("\ufeffthe bank\r\n".encode())
    assert read_text("the bank", None) == "the bank"
    assert read_text(None, str(file)) == "the bank\r\n"
    for text, name in (("-", None), (None, "-")):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("日本".encode())))
        assert read_text(text, name) == "日本"


@pytest.mark.parametrize(("text", "file"), [(None, None), ("a", "b")])
def test_exactly_one_text(text, file):
    with pytest.raises(UsageError, match='text="TEXT", file="FILE"'):
        read_text(text, file)


def test_texts_that_cannot_be_read(tmp_path, monkeypatch):
    blank, latin = tmp_path / "blank.txt", tmp_path / "latin.txt"
    blank.write_text(" \n\t")
    latin.write_bytes("café".encode("latin-1"))
    cases = {
        str(blank): "is empty",
        str(latin): "byte 0xE9 at offset 3",
        str(tmp_path / "none.txt"): "there is no file",
        str(tmp_path): "is a folder",
        "nul\x00byte": "can't be read",
    }
    for file, message in cases.items():
        with pytest.raises(InputError, match=message) as caught:
            read_text(None, file)
        assert caught.value.hint
    for text in ("", "  \n"):
        with pytest.raises(InputError, match="--text is empty"):
            read_text(text, None)
    with pytest.raises(InputError, match=r"--text .*0xE9 .*offset 3\b"):
        read_text(os.fsdecode(b"caf\xe9"), None)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    with pytest.raises(InputError, match="standard input is empty"):
        read_text("-", None)

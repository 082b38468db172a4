"""Pairs of sentences, read as `tokenizer(a, b)` writes them, against plain transformers.

Shapes: H head, Q query, K key.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, BertTokenizer, FunnelTokenizer, RobertaTokenizer

import attnscope
from attnscope.errors import AttnscopeError, InputError, UsageError
from attnscope.export.drawing import layer_maps
from attnscope.export.manifest import PROMPT, prompt_of, tokens_of
from attnscope.export.redraw import load_run
from attnscope.figures.mosaic import foot
from attnscope.figures.style import Style
from attnscope.hooks.forward import known_types
from attnscope.inputs.prompt import from_ids, from_pair, from_text
from helpers.command_line import call
from helpers.made_tokenizers import SlowWords, bert_words, byte_level, llama, wordpiece
from helpers.stack_families import SEQ2SEQ, TYPES, ids, own, tiny

WORDS = ["the", "bank", "river", "is", "on", "a", "hill", "far", "by"]
PAIRS = [("the bank is by the river", "a hill"), ("the river", "the bank is far"), ("a hill", "a bank by the hill")]
FIRST, SECOND = PAIRS[0]


def word_tokenizer() -> BertTokenizer:
    return bert_words(*WORDS)


def letter_tokenizer() -> RobertaTokenizer:
    names = dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(byte_level().get_vocab())])
    return RobertaTokenizer(vocab={name: place for place, name in enumerate(names)}, merges=[])


def funnel_tokenizer() -> FunnelTokenizer:
    names = ["<cls>", "<sep>", "<pad>", "<unk>", "<mask>", "<s>", "</s>", *WORDS]
    return FunnelTokenizer(vocab={name: place for place, name in enumerate(names)})


MADE: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("bert", "albert", "electra", "distilbert", "convbert", "deberta-v2", "big_bird"), word_tokenizer),
    "roberta": letter_tokenizer,
    "funnel": funnel_tokenizer,
}


def folder_of(family: str, place: Path, **changes: Any) -> str:
    tiny(family, vocab_size=400, **changes).save_pretrained(place / family)
    MADE[family]().save_pretrained(place / family)
    return str(place / family)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of("bert", tmp_path_factory.mktemp("models"))


def expected_weights(folder: str, *texts: str, **kept: Any) -> list[torch.Tensor]:
    """(1, H, Q, K) of each layer, by transformers alone: what its tokenizer makes of the texts goes into its model."""
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", **kept).eval()
    tokenizer = attnscope.load(folder).tokenizer
    given = {name: one for name, one in tokenizer(*texts, return_tensors="pt").items() if name != "attention_mask"}
    if model.config.model_type == "distilbert":  # which is given none
        given.pop("token_type_ids")
    with torch.no_grad():
        found = model(**given, output_attentions=True).attentions
    return list(found)


def largest_difference(seen: Any, expected: list[torch.Tensor]) -> float:
    read = [(seen.weights[layer], one[0]) for layer, one in enumerate(expected) if layer in seen.weights]
    return max(float((own - one).abs().max()) for own, one in read)


@pytest.mark.parametrize(
    "family",
    ["bert", *(pytest.param(one, marks=pytest.mark.families) for one in sorted(MADE.keys() - {"bert", "funnel"}))],
)
def test_the_weights_of_pairs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path)
    loaded, kept = attnscope.load(folder), {"attention_type": "original_full"} if family == "big_bird" else {}
    several = attnscope.capture(loaded, PAIRS)
    for pair, seen in zip(PAIRS, several, strict=True):
        expected = expected_weights(folder, *pair, **kept)
        assert largest_difference(seen, expected) < 1e-6
        alone = attnscope.capture(loaded, pair[0], pair=pair[1])
        assert largest_difference(alone, expected) < 1e-6
        assert alone.prompt == seen.prompt
    as_one = expected_weights(folder, f"{FIRST} {loaded.tokenizer.sep_token} {SECOND}", **kept)
    if family in ("bert", "albert", "electra", "convbert", "big_bird"):  # which tell token types apart
        assert several[0].prompt.types == (0,) * 8 + (1,) * 3
        assert largest_difference(several[0], as_one) > 1e-4
    else:
        assert not several[0].prompt.types


@pytest.mark.families
def test_every_encoder_that_tells_token_types_apart_is_given_them(demo: Any) -> None:
    """Against what transformers gives for the same ids and types, and not for types of 0."""
    ids_BT, types = ids(12, texts=1), (0,) * 7 + (1,) * 5
    prompt = replace(from_ids(demo.tokenizer, ids_BT[0].tolist()), types=types)
    differences: dict[str, tuple[float, float]] = {}
    for family in sorted({*TYPES} - {*SEQ2SEQ, "tapas"}):  # whose types are of the cells of tables, seven for a token
        model = tiny(family)
        loaded = attnscope.wrap(model, demo.tokenizer)
        if known_types(loaded) not in (0, 1):
            seen = attnscope.capture(loaded, prompt)
            given = own(model, ids_BT, token_type_ids=torch.tensor([types])), own(model, ids_BT)
            same, other = (largest_difference(seen, list(weights.values())) for weights in given)
            differences[family] = same, other
    assert len(differences) > 30
    assert {name: same for name, (same, _) in differences.items() if same > 1e-6} == {}
    assert {name: other for name, (_, other) in differences.items() if other < 1e-4} == {}


@pytest.mark.families
def test_token_types_that_a_tokenizer_keeps_back_are_said(tmp_path: Path) -> None:
    """Funnel's has three in its template, one for its [CLS], and transformers 5.23 hands on none."""
    folder = folder_of("funnel", tmp_path)
    seen = attnscope.capture(attnscope.load(folder), FIRST, pair=SECOND)
    assert not seen.prompt.types
    assert "FunnelTokenizer hands on none in" in seen.facts["notes"][0]
    assert largest_difference(seen, expected_weights(folder, FIRST, SECOND)) < 1e-6
    path = Path(folder, "tokenizer_config.json")
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
    with_types = attnscope.capture(attnscope.load(folder), [(FIRST, SECOND), FIRST])
    assert [set(one.prompt.types) for one in with_types] == [{0, 1, 2}, {0, 2}]
    assert "notes" not in with_types[0].facts
    for one, texts in zip(with_types, [(FIRST, SECOND), (FIRST,)], strict=True):
        assert largest_difference(one, expected_weights(folder, *texts)) < 1e-6


def test_a_manifest_says_which_tokens_a_pair_has(tmp_path: Path) -> None:
    prompt = from_pair(word_tokenizer(), FIRST, SECOND)
    said = json.loads(json.dumps({PROMPT: tokens_of(prompt)}))
    assert prompt_of(said, tmp_path) == prompt
    for name, wrong in {"types": [0, 1], "segments": [{"start": 0, "stop": 99, "name": "pair"}]}.items():
        with pytest.raises(UsageError, match="does not say which tokens were read"):
            prompt_of({PROMPT: said[PROMPT] | {name: wrong}}, tmp_path)
    earlier = {name: value for name, value in said[PROMPT].items() if name not in ("types", "segments")}
    assert prompt_of({PROMPT: earlier}, tmp_path).ids == prompt.ids


def test_both_texts_are_named_and_measured(bert: str) -> None:
    loaded = attnscope.load(bert)
    seen = attnscope.capture(loaded, FIRST, pair=SECOND, query="pair", key="text")
    expected = expected_weights(bert, FIRST, SECOND)[1][0, 2, 8:10, 1:7].sum(-1).mean()
    head = next(head for head in seen.heads if head.name == "L1H2")
    assert head.score["mass"] == pytest.approx(float(expected), abs=1e-6)
    maps = layer_maps(seen)[0]
    assert (maps.turns, maps.begins) == ((), "the second text")  # of the two queries alone
    whole = layer_maps(attnscope.capture(loaded, FIRST, pair=SECOND))[0]
    assert (whole.turns, "thin lines: the second text begins" in foot(whole, Style())[1]) == ((8,), True)
    rows = call("tokens", "-m", bert, FIRST, "--pair", SECOND, "--format", "jsonl").ok().records
    assert [row["segment"] for row in rows] == [None, *["text"] * 6, None, "pair", "pair", None]
    assert [row["token"] for row in rows if row["segment"] == "pair"] == ["a", "hill"]


def test_the_first_text_may_come_from_a_pipe_and_not_from_a_run(bert: str, tmp_path: Path) -> None:
    piped = call("tokens", "-m", bert, "--pair", SECOND, "--query", "text", stdin=FIRST.encode()).ok()
    assert [row["token"] for row in piped.rows] == FIRST.split()
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": "run/4", "model": {"name": bert}, "options": {}}))
    refused = call("heads", "--from", str(tmp_path), "--pair", SECOND)
    assert (refused.code, "add --text TEXT" in refused.err) == (2, True)


@pytest.mark.e2e
def test_a_run_of_a_pair_is_repeated_and_drawn_again(bert: str, tmp_path: Path) -> None:
    asked = ("-m", bert, "--text", FIRST, "--pair", SECOND, "--query", "pair")
    first = call("heads", *asked, "--out", str(tmp_path / "run")).ok()
    said = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert [one["name"] for one in said["prompt"]["segments"]] == ["text", "pair"]
    again = call("heads", "--from", str(tmp_path / "run")).ok()
    assert again.out == first.out
    assert load_run(tmp_path / "run").queries.parts["pair"] == range(8, 10)
    other = call("heads", *asked[:4], "--out", str(tmp_path / "run"))
    assert other.code == 2
    assert "another run" in other.err


def test_a_corpus_of_pairs(bert: str, tmp_path: Path) -> None:
    records = [{"text": first, "second": second} for first, second in PAIRS] + [{"text": "the bank"}]
    found = attnscope.batch(attnscope.load(bert), records, pair_field="second", query="pair", spans=["text,pair"])
    assert [one.reason for one in found.failures] == ["no field 'second'; there are none"]
    rows = found.rows("heads").to_pylist()
    for item, pair in enumerate(PAIRS):
        seen = attnscope.capture(attnscope.load(bert), pair[0], pair=pair[1], query="pair")
        own = [row["entropy"] for row in rows if row["item"] == item]
        assert own == pytest.approx([head.score["entropy"] for head in seen.heads], abs=1e-5)
    spans = [
        row for row in found.rows("spans").to_pylist() if row["item"] == 0 and (row["layer"], row["head"]) == (1, 2)
    ]
    expected = expected_weights(bert, FIRST, SECOND)[1][0, 2]
    mass = next(row["mass"] for row in spans if (row["query_span"], row["key_span"]) == ("pair", "text"))
    assert mass == pytest.approx(float(expected[8:10, 1:7].sum(-1).mean()), abs=1e-6)


def test_a_separator_within_a_text_is_said(bert: str) -> None:
    loaded, typed = attnscope.load(bert), f"{FIRST} [SEP] {SECOND}"
    result = call("heads", "-m", bert, "--text", typed).ok()
    assert len([line for line in result.err.splitlines() if "--pair" in line]) == 1
    for text in (typed, from_text(loaded.tokenizer, typed).ids):
        assert "--pair TEXT" in attnscope.capture(loaded, text).facts["notes"][0]
    for texts in ((FIRST, SECOND), (f"{FIRST} [SEP]", None)):
        assert "notes" not in attnscope.capture(loaded, texts[0], pair=texts[1]).facts


@pytest.mark.families
def test_a_separator_of_a_model_without_token_types_is_not_said(tmp_path: Path) -> None:
    folder = folder_of("roberta", tmp_path)
    assert "--pair" not in call("heads", "-m", folder, "a bank</s></s>a hill").ok().err


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"text": [2, 3], "pair": "a"}, UsageError, "a pair needs two texts"),
        ({"text": "a", "pair": "a", "chat": True}, UsageError, "there is a chat"),
        ({"text": "a", "pair": "a", "answer": "b"}, UsageError, "there is an answer"),
        ({"text": "a", "pair": " "}, InputError, "the second text of the pair is empty"),
    ],
)
def test_what_is_no_pair(demo: Any, how: dict[str, Any], error: type[AttnscopeError], says: str) -> None:
    with pytest.raises(error, match=says):
        attnscope.capture(demo, **how)


@pytest.mark.parametrize("make", [wordpiece, llama, byte_level])
def test_a_tokenizer_that_puts_nothing_between_two_texts_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match="puts nothing between two texts"):
        from_pair(make(), "the bank", "the river")


def test_a_tokenizer_without_offsets_has_both_texts_too() -> None:
    class Ended(SlowWords):
        def build_inputs_with_special_tokens(self, first: list[int], second: list[int] | None = None) -> list[int]:
            return [*first, 0, *([] if second is None else [*second, 0])]

    prompt = from_pair(Ended(["</s>", "the", "bank", "hill"], eos_token="</s>"), "the bank", "the hill")
    assert prompt.parts == {"text": range(2), "pair": range(3, 5)}
    assert [prompt.text[start:stop] for start, stop in prompt.characters] == ["the", "bank", "", "the", "hill", ""]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_pair_that_is_cut_keeps_some_of_both(side: Any) -> None:
    tokenizer = word_tokenizer()
    whole, cut = from_pair(tokenizer, *PAIRS[0]), from_pair(tokenizer, *PAIRS[0], max_tokens=10, truncate=side)
    assert cut.removed == 1
    assert cut.types == (whole.types[:10] if side == "right" else (0, *whole.types[2:]))
    assert cut.parts["text"] == (range(1, 7) if side == "right" else range(1, 6))
    with pytest.raises(InputError, match="is cut off whole"):
        from_pair(tokenizer, *PAIRS[0], max_tokens=4, truncate=side)


def test_token_types_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    folder = folder_of("bert", tmp_path, type_vocab_size=1)
    with pytest.raises(AttnscopeError, match="has 1 token type, and its tokenizer gives the type 1"):
        attnscope.capture(attnscope.load(folder), FIRST, pair=SECOND)
    assert attnscope.capture(attnscope.load(folder), FIRST).prompt.types == ()

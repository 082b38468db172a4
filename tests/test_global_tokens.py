"""Global attention of Longformer and LED: as the checkpoint's class chooses it, and as it is asked for.

Shapes: H head, Q query, K key, X global token, W keys of a window.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LEDForConditionalGeneration, LongformerModel

import attnscope
from attnscope.errors import InputError, UsageError
from helpers.command_line import SENTENCE, call
from helpers.families import tiny_config
from helpers.parity_models import rouse
from test_pairs import PAIRS, letter_tokenizer

REACH = 3
TEXT = "a river is by the hill"


def folder_of(name: str, place: Path) -> str:
    """A saved tiny model of this class."""
    kind: Any = getattr(transformers, name)
    family = "led" if name.startswith("LED") else "longformer"
    more = {"decoder_start_token_id": 2, "forced_eos_token_id": None} if family == "led" else {"sep_token_id": 2}
    config = tiny_config(family, vocab_size=400, attention_window=2 * REACH, pad_token_id=1, **more)
    torch.manual_seed(0)
    model = kind(config).eval()
    rouse(model)
    model.save_pretrained(place / name)
    letter_tokenizer().save_pretrained(place / name)
    return str(place / name)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of("LongformerForSequenceClassification", tmp_path_factory.mktemp("models"))


def expected_weights(folder: str, ids: tuple[int, ...], places: list[int] | None) -> list[Tensor]:
    """(H, Q, K) of each layer of the encoder: what transformers returns, one number after the other.

    places: of the global tokens; None for what the class itself chooses.
    """
    name = Path(folder).name
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float64).eval()
    given = {"input_ids": torch.tensor([ids])}
    if places is not None:
        given["global_attention_mask"] = torch.tensor([[int(at in places) for at in range(len(ids))]])
    with torch.no_grad():
        found = model(**given, output_attentions=True)
    led = name.startswith("LED")
    local, other = (
        (found.encoder_attentions, found.encoder_global_attentions)
        if led
        else (found.attentions, found.global_attentions)
    )
    where = places if places is not None else [0] if "Sequence" in name else list(range(ids.index(2)))
    return [_whole(one[0], None if other is None else other[at][0], where) for at, one in enumerate(local)]


def _whole(local_HQW: Tensor, rows_HKX: Tensor | None, places: list[int]) -> Tensor:
    heads, tokens, width = local_HQW.shape
    count = len(places)
    assert width == count + 2 * REACH + 1
    found = torch.zeros(heads, tokens, tokens, dtype=local_HQW.dtype)
    for query in range(tokens):
        for number, key in enumerate(places):
            found[:, query, key] = local_HQW[:, query, number]
        for step in range(-REACH, REACH + 1):
            if 0 <= query + step < tokens and query + step not in places:
                found[:, query, query + step] = local_HQW[:, query, count + REACH + step]
    for number, query in enumerate(places):
        assert rows_HKX is not None
        found[:, query] = rows_HKX[:, :tokens, number]
    return found


def largest_difference(seen: Any, expected: list[Tensor]) -> float:
    return max(float((seen.weights[layer] - one).abs().max()) for layer, one in enumerate(expected))


def test_the_class_of_a_checkpoint_chooses_its_global_tokens(classifier: str) -> None:
    loaded = attnscope.load(classifier)
    seen = attnscope.capture(loaded, TEXT)
    assert largest_difference(seen, expected_weights(classifier, seen.prompt.ids, None)) < 1e-5
    assert seen.facts["global_tokens"] == {
        "positions": [0],
        "chosen_by_class": "LongformerForSequenceClassification",
    }
    far = seen.weights[0][:, -1, 0]
    assert (far > 0).all()
    assert (seen.weights[0][:, 0] > 0).all()
    assert not seen.failures


@pytest.mark.parametrize(("asked", "places"), [("none", []), ("1:4,last", [1, 2, 3, 23])])
def test_global_tokens_are_named(classifier: str, asked: str, places: list[int]) -> None:
    seen = attnscope.capture(attnscope.load(classifier), TEXT, global_tokens=asked)
    assert len(seen.prompt) == 24
    assert seen.facts["global_tokens"] == {"positions": places, "chosen_by_class": None}
    expected = expected_weights(str(classifier), seen.prompt.ids, places) if places else None
    if expected is None:  # the class would choose some
        body = LongformerModel.from_pretrained(classifier, dtype=torch.float64).eval()
        found = body(torch.tensor([seen.prompt.ids]), output_attentions=True).attentions
        expected = [_whole(one[0], None, []) for one in found]
    assert largest_difference(seen, expected) < 1e-5


@pytest.mark.families
@pytest.mark.parametrize("name", ["LongformerForQuestionAnswering", "LongformerForMultipleChoice"])
def test_a_pair_has_the_global_tokens_of_its_class(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    loaded = attnscope.load(folder)
    seen = attnscope.capture(loaded, *PAIRS[:1][0][:1], pair=PAIRS[0][1])
    ids = seen.prompt.ids
    before = list(range(ids.index(2)))
    after = list(range(ids.index(2) + 2, len(ids)))
    assert seen.facts["global_tokens"]["positions"] == (before if "Question" in name else after)
    if "Question" in name:
        assert largest_difference(seen, expected_weights(folder, ids, None)) < 1e-5
    with pytest.raises(InputError, match=f"{name} cannot tell which tokens"):
        attnscope.capture(loaded, TEXT)


@pytest.mark.families
@pytest.mark.parametrize("asked", [None, "first"])
def test_led_has_those_that_are_named(asked: str | None, tmp_path: Path) -> None:
    folder = folder_of("LEDForConditionalGeneration", tmp_path)
    seen = attnscope.capture(attnscope.load(folder), TEXT, target="a hill", global_tokens=asked)
    encoder, places = seen.of("encoder"), [] if asked is None else [0]
    assert seen.facts["global_tokens"]["positions"] == places
    assert largest_difference(encoder, expected_weights(folder, encoder.queries.ids, places)) < 1e-5
    model = LEDForConditionalGeneration.from_pretrained(folder).eval()
    ids_BT, more = torch.tensor([encoder.queries.ids]), {}
    if asked:
        more["global_attention_mask"] = torch.tensor([[1] + [0] * (ids_BT.shape[1] - 1)])
    made = model.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), max_new_tokens=5, do_sample=False, **more)
    own = attnscope.capture(attnscope.load(folder), TEXT, generate=5, global_tokens=asked)
    assert own.facts["target"]["ids"] == made[0].tolist()


def test_what_was_chosen_is_said(classifier: str, tmp_path: Path) -> None:
    result = call("relations", "-m", classifier, TEXT, "--query", "last", "--select", "0.0", "--top-k", "all").ok()
    line = "global attention: <s>(0), as LongformerForSequenceClassification chooses; --set global_tokens=TOKENS"
    assert line in result.err
    assert {row["key"] for row in result.rows} == {"0", "20", "21", "22", "23"}
    named = ("--set", "global_tokens=none")
    said = call(
        "relations", "-m", classifier, TEXT, "--query", "last", "--select", "0.0", "--top-k", "all", *named
    ).ok()
    assert "global attention: none\n" in said.err
    assert {row["key"] for row in said.rows} == {"20", "21", "22", "23"}


@pytest.mark.families
def test_a_corpus_has_them_text_by_text(classifier: str) -> None:
    loaded, texts = attnscope.load(classifier), [TEXT, "a hill", TEXT[::-1]]
    found = attnscope.batch(loaded, texts).rows("heads").to_pylist()
    without = attnscope.batch(loaded, texts, global_tokens="none").rows("heads").to_pylist()
    assert [row["entropy"] for row in found] != pytest.approx([row["entropy"] for row in without], abs=1e-3)
    for item, text in enumerate(texts):
        seen = attnscope.capture(loaded, text)
        own = [row["entropy"] for row in found if row["item"] == item]
        assert own == pytest.approx([head.score["entropy"] for head in seen.heads], abs=1e-5)


def test_a_model_without_global_attention_has_none_to_name(demo: Any) -> None:
    with pytest.raises(UsageError, match="has no global attention"):
        attnscope.capture(demo, SENTENCE, global_tokens="first")


def test_a_depth_is_of_the_text_as_it_is_read(classifier: str) -> None:
    asked = ("depth", TEXT, "-m", classifier, "--format", "csv", "-q", "--global-tokens")
    found = {named: call(*asked, named).ok().out for named in ("none", "0", "2,4")}
    assert len(set(found.values())) == 3

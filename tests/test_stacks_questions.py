"""Questions about the tokens of an encoder-decoder's two texts, against what transformers' own attentions say of them.

Shapes: Q query, K key, of one head.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnscope
from attnscope.errors import InputError
from attnscope.model.selection import CROSS, DECODER, ENCODER
from helpers.command_line import Result, call
from helpers.folders import with_tokenizer
from helpers.stack_families import own, tiny

SOURCE = "the financial bank is on a river. The bank is old."
TARGET = "the bank was old. It was on the river"
KINDS = (ENCODER, DECODER, CROSS)
Rows = list[dict[str, str]]


class Read:
    """A saved tiny model, and the weights that the family itself returns for the two texts, (Q, K) per head."""

    def __init__(self, family: str, start: int, place: Path) -> None:
        model = tiny(family, vocab_size=2000, decoder_start_token_id=start, forced_eos_token_id=None)
        self.folder = str(with_tokenizer(model, place / family))
        self.loaded = attnscope.load(self.folder, device="cpu")
        plain = attnscope.capture(self.loaded, SOURCE, target=TARGET, request=attnscope.Request(metrics=()))
        self.source, self.target = plain.of(ENCODER).queries, plain.queries
        assert self.target.ids[0] == start
        found = own(model.eval(), torch.tensor([self.source.ids]), decoder_input_ids=torch.tensor([self.target.ids]))
        self.weights = {
            (kind, layer, head): weights[0, head].double().numpy()
            for (kind, layer), weights in found.items()
            for head in range(weights.shape[1])
        }

    def places(self, text: str, *words: str) -> list[int]:
        """Where words stand, by their labels: another spelling than the grammar's."""
        labels = (self.source if text == "source" else self.target).labels
        return [place for place, label in enumerate(labels) if label.strip("·") in words]

    def sides(self, kind: str) -> tuple[str, str]:
        return "source" if kind == ENCODER else "target", "target" if kind == DECODER else "source"


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return Read("t5", 0, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return Read("bart", 2, tmp_path_factory.mktemp("models"))


def asked(command: str, read: Read, *arguments: str) -> Result:
    return call(command, "-m", read.folder, "--text", SOURCE, "--target", TARGET, *arguments)


def table(command: str, read: Read, *arguments: str) -> Rows:
    return asked(command, read, "--format", "csv", *arguments).ok().rows


def mean_mass(weights_QK: np.ndarray, queries: Sequence[int], keys: Sequence[int], causal: bool) -> float:
    """The sum over the keys, as a mean over the queries that see one of them."""
    rows = [weights_QK[query, keys].sum() for query in queries if not causal or min(keys) <= query]
    return float(np.mean(rows)) if rows else float("nan")


@pytest.mark.parametrize(
    ("query", "key", "kinds"),
    [
        ("bank", "old", KINDS),
        ("was", "financial", (CROSS,)),
        ("is", "financial", (ENCODER,)),
        ("was", "the", (DECODER, CROSS)),
    ],
)
@pytest.mark.parametrize("family", ["read", "bart"])
def test_each_stack_is_asked_about_its_own_texts(
    family: str, query: str, key: str, kinds: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    read: Read = request.getfixturevalue(family)
    seen = attnscope.capture(read.loaded, SOURCE, target=TARGET, query=query, key=key)
    assert [kind for kind in KINDS if not seen.of(kind).chosen.nothing] == [kind for kind in KINDS if kind in kinds]
    rows = seen.table().to_pylist()
    assert len(rows) == len(read.weights)
    for row in rows:
        if row["stack"] not in kinds:
            assert all(row[name] is None for name in ("mass", "uniform", "entropy", "sink", "focus", "top_key")), row
            continue
        weights_QK = read.weights[row["stack"], row["layer"], row["head"]]
        of_queries, of_keys = read.sides(row["stack"])
        queries, keys = read.places(of_queries, query), read.places(of_keys, key)
        expected = mean_mass(weights_QK, queries, keys, causal=row["stack"] == DECODER)
        assert row["mass"] == pytest.approx(None if np.isnan(expected) else expected, abs=1e-5)
        received_K = weights_QK[queries].mean(0)
        assert row["top_key_mass"] == pytest.approx(received_K.max(), abs=1e-5)
    related = seen.relations().to_pylist()
    assert {row["stack"] for row in related} <= set(kinds)
    for row in related:
        of_queries, of_keys = read.sides(row["stack"])
        assert row["query"] in read.places(of_queries, query)
        assert row["key"] in read.places(of_keys, key)
        weight = read.weights[row["stack"], row["layer"], row["head"]][row["query"], row["key"]]
        assert row["weight"] == pytest.approx(weight, abs=1e-5)
    drawn = {kind for kind, one in seen.stacks.items() if one.maps is not None}
    assert drawn == set(kinds)
    for kind in kinds:
        maps, (of_queries, of_keys) = seen.of(kind).maps, read.sides(kind)
        shape = len(read.places(of_queries, query)), len(read.places(of_keys, key))
        assert all(one.shape[1:] == shape for one in maps.values.values())


@pytest.mark.parametrize("family", ["read", "bart"])
def test_made_are_the_rows_of_a_decoder_that_predict_its_target(family: str, request: pytest.FixtureRequest) -> None:
    read: Read = request.getfixturevalue(family)
    seen = attnscope.capture(read.loaded, "she made the bank", query="made", generate=4)
    assert {kind for kind in KINDS if not seen.of(kind).chosen.nothing} == {DECODER, CROSS}
    made = list(seen.chosen.query.positions)
    source, target = (torch.tensor([one.ids]) for one in (seen.of(ENCODER).queries, seen.queries))
    with torch.no_grad():
        logits = read.loaded.model(input_ids=source, decoder_input_ids=target).logits[0]
    assert logits.argmax(-1)[made].tolist() == list(seen.queries.ids[1:])


def test_keys_alone_leave_a_stack_without_them_unasked(read: Read) -> None:
    found = table("heads", read, "--key", "was", "--define", "unused=bank")
    assert {row["stack"] for row in found if row["mass"]} == {DECODER}
    assert all(not row["entropy"] and not row["top_key"] for row in found if row["stack"] != DECODER)


def test_what_was_meant_is_said_stack_by_stack(read: Read) -> None:
    result = asked("heads", read, "--query", "bank", "--key", "old")
    bank = read.places("source", "bank")
    assert f"encoder: query bank: bank({bank[0]}), bank({bank[1]})" in result.err
    assert f"cross: query bank: bank({read.places('target', 'bank')[0]})" in result.err
    assert f"cross: key old: old({read.places('source', 'old')[0]})" in result.err
    result = asked("heads", read, "--query", "was").ok()
    assert "encoder: not measured" in result.err


def test_what_is_in_neither_text_is_refused_with_the_tokens_of_both(read: Read) -> None:
    result = asked("heads", read, "--query", "zebra")
    assert (result.code, result.out) == (4, b"")
    assert "financial" in result.err
    assert "was" in result.err
    assert len(result.err.strip().splitlines()) == 1
    with pytest.raises(InputError, match="'was' is not in the text"):  # the target's keys are seen by the target alone
        attnscope.capture(read.loaded, SOURCE, target=TARGET, query="financial", key="was")


@pytest.mark.parametrize("engine", ["eager", "fused"])
@pytest.mark.parametrize("words", [(), ("bank", "the,bank")], ids=["all", "asked"])
def test_words_of_both_texts_are_grouped(read: Read, engine: str, words: tuple[str, ...]) -> None:
    question = ("--query", words[0], "--key", words[1]) if words else ()
    found = table("relations", read, "--group", "words", "--top-k", "all", "--engine", engine, *question)
    texts = {"source": read.source, "target": read.target}
    assert {row["stack"] for row in found} == set(KINDS)
    for row in found:
        queries, keys = (texts[side].words for side in read.sides(row["stack"]))
        query, key = queries[int(row["query"])], keys[int(row["key"])]
        assert (row["query_token"], row["key_token"]) == (query.name, key.name)
        if words:
            assert query.name == "bank"
            assert key.name in ("the", "bank")
        weights_QK = read.weights[row["stack"], int(row["layer"]), int(row["head"])]
        expected = weights_QK[query.start : query.stop, key.start : key.stop].sum(1).mean()
        assert float(row["weight"]) == pytest.approx(expected, abs=1e-5)
    crossed = {(int(row["query"]), int(row["key"])) for row in found if row["stack"] == CROSS}
    if not words:
        assert crossed == {(q, k) for q in range(len(read.target.words)) for k in range(len(read.source.words))}


def test_encoder_and_decoder_are_rolled_out_over_their_own_texts(read: Read, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = table("rollout", read, "--group", "tokens", "--top-k", "all", "--out", str(out))
    assert list(found[0])[-1] == "stack"
    for kind in (ENCODER, DECODER):
        layers = sorted({layer for one, layer, _ in read.weights if one == kind})
        heads = [
            [weights for (k, i, _), weights in read.weights.items() if (k, i) == (kind, layer)] for layer in layers
        ]
        rolled_TT = np.eye(len(heads[0][0]))
        for of_layer in heads:
            mixed_TT = np.mean(of_layer, 0) + np.eye(len(rolled_TT))
            rolled_TT = mixed_TT / mixed_TT.sum(1, keepdims=True) @ rolled_TT
        mine = {(int(row["query"]), int(row["key"])): float(row["weight"]) for row in found if row["stack"] == kind}
        for place, weight in np.ndenumerate(rolled_TT):
            assert mine.get(place, 0.0) == pytest.approx(weight, abs=1e-5)
    assert {row["stack"] for row in found} == {ENCODER, DECODER}
    drawn = {path.relative_to(out).as_posix() for path in out.rglob("*.png")}
    assert drawn == {"encoder/rollout.png", "decoder/rollout.png"}
    said: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    assert said["rollout"].keys() == {ENCODER, DECODER}


@pytest.mark.parametrize(
    ("flags", "kind", "shown"),
    [
        ((), CROSS, "source"),
        (("--query", "was"), CROSS, "source"),
        (("--key", "financial"), CROSS, "target"),
        (("--select", "enc", "--query", "bank"), ENCODER, "source"),
    ],
)
def test_the_text_is_coloured_by_cross_attention_unless_another_stack_is_named(
    read: Read, flags: tuple[str, ...], kind: str, shown: str
) -> None:
    found = table("text", read, "--mean", "all", *flags)
    text = read.source if shown == "source" else read.target
    assert [row["token"] for row in found] == list(text.tokens)
    assert {row["stack"] for row in found} == {kind}
    mean_QK = np.mean([weights for key, weights in read.weights.items() if key[0] == kind], 0)
    if "--key" in flags:
        expected_T = mean_QK[:, read.places("source", "financial")].sum(1)
    else:
        rows = read.places(read.sides(kind)[0], flags[-1]) if flags else list(range(len(read.target)))
        expected_T = mean_QK[rows].mean(0)
    assert [float(row["weight"]) for row in found] == pytest.approx(expected_T.tolist(), abs=1e-5)


def test_a_text_that_no_shown_stack_knows_is_refused_with_the_way_out(read: Read) -> None:
    result = asked("text", read, "--query", "financial", "-q")
    assert (result.code, result.out) == (4, b"")
    assert "--select enc,dec" in result.err


def test_a_run_says_what_each_stack_was_asked_and_is_drawn_without_the_others(read: Read, tmp_path: Path) -> None:
    out = tmp_path / "out"
    figures = ("--figures", "mass", "--query", "was", "--key", "the")
    asked("draw", read, *figures, "--out", str(out)).ok()
    said = json.loads((out / "manifest.json").read_text())["chosen"]
    assert said.keys() == {DECODER, CROSS}
    assert said[CROSS]["query"]["positions"] == read.places("target", "was")
    assert said[CROSS]["key"]["positions"] == read.places("source", "the")
    drawn = {path.relative_to(out).as_posix() for path in out.rglob("*.png")}
    assert drawn == {f"{kind}/mass.png" for kind in (DECODER, CROSS)}

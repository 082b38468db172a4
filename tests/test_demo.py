"""The embedded model is what its card says, measured here with plain transformers and Python loops."""

import hashlib
import importlib
import json
import platform
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.command_line import HANGS
from helpers.own import attentions

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "attnscope" / "demo"
SCRIPT = ROOT / "scripts" / "train_demo.py"
SEED_SENTENCE = "the financial bank is located on river bank"
PERIOD = 40


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return json.loads((DEMO / "training.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def card() -> str:
    return (DEMO / "README.md").read_text(encoding="utf-8")


def noise(repeats: bool) -> list[int]:
    """Begin token, 40 distinct random tokens, then the same 40 or 40 others."""
    generator = torch.Generator().manual_seed(7)
    ids = (3 + torch.randperm(1997, generator=generator)[: 2 * PERIOD]).tolist()
    once, others = ids[:PERIOD], ids[PERIOD:]
    return [0, *once, *(once if repeats else others)]


def best_head(layers: list[torch.Tensor], pairs: list[tuple[int, int]]) -> float:
    """The largest mean weight over these (query, key) pairs that any head reaches."""
    means = []
    for attn_HQK in layers:
        for head in range(attn_HQK.shape[0]):
            means.append(sum(float(attn_HQK[head, query, key]) for query, key in pairs) / len(pairs))
    return max(means)


# The key after the earlier copy of the query's token, position 0 being the begin token.
INDUCTION_PAIRS = [(1 + PERIOD + k, 1 + k + 1) for k in range(PERIOD)]
PREVIOUS_PAIRS = [(query, query - 1) for query in range(2, 2 * PERIOD + 1)]


def test_the_folder_is_at_most_8_megabytes_and_holds_no_pickle() -> None:
    files = [path for path in DEMO.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".parquet", ".md", ""}


def test_two_query_heads_share_each_kv_head(model: Any) -> None:
    config = model.config
    assert config.model_type == "llama"
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    assert model.model.layers[0].self_attn.k_proj.out_features == config.num_key_value_heads * config.head_dim


def test_ships_as_float16() -> None:
    assert AutoModelForCausalLM.from_pretrained(DEMO).dtype == torch.float16


def test_the_seed_sentence_takes_at_most_14_tokens(tokenizer: Any) -> None:
    encoded = tokenizer(SEED_SENTENCE, return_offsets_mapping=True)
    pieces = [SEED_SENTENCE[start:end].strip() for start, end in encoded["offset_mapping"]]
    assert len(pieces) <= 14
    assert encoded["input_ids"][0] == tokenizer.bos_token_id
    assert [pieces.count(word) for word in ("the", "is", "on")] == [1, 1, 1]
    assert tokenizer.decode(encoded["input_ids"], skip_special_tokens=True) == SEED_SENTENCE


@pytest.mark.parametrize("text", ["日本 naïve\n\tनमस्ते 👩‍👧", " a  b", "العربية"])
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_chat_template_begins_with_one_begin_token(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<s>user: hello\n"


def test_an_induction_head_and_a_previous_token_head_are_there(model: Any) -> None:
    layers = attentions(model, noise(repeats=True))
    assert best_head(layers, INDUCTION_PAIRS) >= 0.7
    assert best_head(layers, PREVIOUS_PAIRS) >= 0.8


def test_no_head_looks_like_induction_where_nothing_repeats_or_nothing_was_learnt(model: Any) -> None:
    assert best_head(attentions(model, noise(repeats=False)), INDUCTION_PAIRS) < 0.2
    torch.manual_seed(0)
    untrained = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").eval()
    layers = attentions(untrained, noise(repeats=True))
    assert best_head(layers, INDUCTION_PAIRS) < 0.2
    assert best_head(layers, PREVIOUS_PAIRS) < 0.2


def test_the_second_showing_is_foretold(model: Any) -> None:
    ids = torch.tensor([noise(repeats=True)])
    with torch.no_grad():
        guesses = model(ids).logits[0].argmax(-1)
    hits = [int(guesses[query]) == int(ids[0, query + 1]) for query in range(PERIOD + 2, 2 * PERIOD)]
    assert sum(hits) / len(hits) >= 0.8


def test_the_measured_facts_describe_these_weights(facts: dict[str, Any], model: Any) -> None:
    assert hashlib.sha256((DEMO / "model.safetensors").read_bytes()).hexdigest() == facts["weights_sha256"]
    assert sum(p.numel() for p in model.parameters()) == facts["parameters"]
    best = max(row["induction_probe"] for row in facts["heads"])
    assert best == pytest.approx(best_head(attentions(model, noise(repeats=True)), INDUCTION_PAIRS), abs=0.1)


def test_held_out_loss_is_2_nats_below_a_unigram_model(facts: dict[str, Any], card: str) -> None:
    rows = dict(re.findall(r"^\| ([a-z][^|(]*?)(?: \([^|]*\))? \| (\d+\.\d+) \|$", card, re.MULTILINE))
    model_loss, unigram_loss = (
        float(rows["this model"]),
        float(rows["unigram"]),
    )
    assert unigram_loss - model_loss >= 2.0
    assert float(rows["better by"]) == pytest.approx(unigram_loss - model_loss, abs=2e-3)
    assert model_loss == pytest.approx(facts["held_out_loss"], abs=1e-3)


def test_the_card_says_what_it_is_and_where_it_is_from(facts: dict[str, Any], card: str) -> None:
    expected = [
        "A demonstration, not a language model",
        f"Corpus sha256: `{facts['corpus_sha256']}`",
        f"Python {facts['python']}",
        f"{facts['recipe']['threads']}\nthreads, seed {facts['recipe']['seed']}",
        "Apache-2.0",
        "| step | loss |",
    ]
    assert [line for line in expected if line not in card] == []
    assert len(facts["log"]) >= 12


@pytest.fixture
def demo_corpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("demo_corpus")


def runs_of_eight(texts: list[str]) -> set[str]:
    found = set()
    for text in texts:
        words = re.findall(r"[a-z0-9]+", text.lower())
        found |= {" ".join(words[i : i + 8]) for i in range(len(words) - 7)}
    return found


def test_held_out_text_shares_no_eight_words_with_training_text(
    demo_corpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)

    def unlike_any_other() -> str:
        return " ".join("".join(rng.choices("abcdefgh", k=6)) for _ in range(12))

    shared = "every one of these documents has the very same words to begin with"
    documents = [f"{shared} {unlike_any_other()}\n\n{unlike_any_other()}" for _ in range(200)]
    monkeypatch.setattr(demo_corpus, "_found_documents", lambda: iter(documents * 2))
    corpus = demo_corpus.read_corpus(seed=0)
    assert [len(corpus.train) + len(corpus.held_out), len(corpus.held_out) > 5] == [200, True]
    assert runs_of_eight([shared]) <= runs_of_eight(corpus.train)
    assert runs_of_eight(corpus.held_out).isdisjoint(runs_of_eight(corpus.train))
    assert demo_corpus.read_corpus(seed=0).sha256 == corpus.sha256
    assert demo_corpus.read_corpus(seed=1).sha256 != corpus.sha256


@pytest.mark.slow
def test_the_whole_corpus_keeps_its_promises(demo_corpus: Any, facts: dict[str, Any]) -> None:
    corpus = demo_corpus.read_corpus(seed=facts["recipe"]["seed"])
    held_paragraphs = [part for text in corpus.held_out for part in text.split("\n\n")]
    assert sum(map(len, corpus.held_out)) > 50_000
    assert runs_of_eight(held_paragraphs).isdisjoint(runs_of_eight(corpus.train))
    if platform.python_version() == facts["python"]:
        assert corpus.sha256 == facts["corpus_sha256"]


@pytest.mark.slow
def test_two_short_trainings_are_equal_and_load(tmp_path: Path) -> None:
    def trained(name: str) -> dict[str, Any]:
        command = [sys.executable, str(SCRIPT), "--steps", "30", "--threads", "1", "--out", str(tmp_path / name)]
        subprocess.run(command, check=True, capture_output=True, timeout=HANGS)
        return json.loads((tmp_path / name / "training.json").read_text(encoding="utf-8"))

    first, second = trained("first"), trained("second")
    assert abs(first["held_out_loss"] - second["held_out_loss"]) <= 0.02
    assert first == second
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "first")
    assert model(**tokenizer(SEED_SENTENCE, return_tensors="pt")).logits.shape[-1] == len(tokenizer)

"""The command line on saved tiny models of BERT, T5 and BART: tables, selections, targets, pictures, refusals."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from attnscope.model.selection import CROSS, DECODER, ENCODER
from helpers.command_line import SENTENCE, Result, call
from helpers.folders import with_tokenizer
from helpers.stack_families import heard, own, tiny

TARGET = "the bank was on the river"
STARTS = {"t5": 0, "bart": 2}
ALL = {ENCODER, DECODER, CROSS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder per type."""
    place = tmp_path_factory.mktemp("models")
    starts = {name: {"decoder_start_token_id": start, "forced_eos_token_id": None} for name, start in STARTS.items()}
    made = {name: tiny(name, vocab_size=2000, **starts.get(name, {})) for name in ("bert", "t5", "bart")}
    return {name: str(with_tokenizer(model, place / name)) for name, model in made.items()}


def asked(command: str, folder: str, *arguments: str) -> Result:
    return call(command, "-m", folder, "--text", SENTENCE, *arguments)


def table(command: str, folder: str, *arguments: str) -> list[dict[str, str]]:
    return asked(command, folder, "--format", "csv", "--quiet", *arguments).ok().rows


@pytest.mark.parametrize("family", [pytest.param("t5", marks=pytest.mark.families), "bart"])
@pytest.mark.parametrize(
    ("head", "side", "expected"),
    [
        ("encoder L3H1", "key", {"encoder embedding", "encoder L2H3", "encoder L2 rest", "bias"}),
        ("L3H1", "key", {"embedding", "L2H3", "cross L2H3", "L2 rest", "bias"}),
        ("cross L3H1", "key", {"encoder embedding", "encoder L3H3", "encoder L3 rest", "bias"}),
        ("cross.3.1", "query", {"embedding", "L3H3", "cross L2H3", "L3 rest", "bias"}),
    ],
)
def test_why_by_stack(family: str, folders: dict[str, str], head: str, side: str, expected: set[str]) -> None:
    more = ("--target", TARGET, "--head", head, "--side", side, "--query", "last", "--key", "1")
    found = asked("why", folders[family], *more, "--format", "csv").ok()
    assert expected <= {row["component"] for row in found.rows}
    said = re.search(r"the contributions sum to (\S+), the logit is (\S+):", found.err)
    assert said is not None
    assert float(said[1]) == pytest.approx(float(said[2]), abs=1e-3)


def test_why_by_the_tokens_that_heads_of_two_texts_read(folders: dict[str, str]) -> None:
    more = ("--target", TARGET, "--head", "L3H1", "--key", "bank", "--by", "tokens")
    rows = table("why", folders["bart"], *more)
    source = [token["token"] for token in table("tokens", folders["bart"])]
    read = {(row["position"], row["token"]) for row in rows if row["component"].startswith("cross ")}
    assert read == {(str(at), token) for at, token in enumerate(source)}
    own = {row["token"].strip() for row in rows if row["component"] == "L0H0"}
    assert "was" in own
    assert "located" not in own


def test_why_of_a_target_that_the_model_makes(folders: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "why"
    found = asked("why", folders["bart"], "--generate", "4", "--head", "cross L1H0", "--out", str(folder)).ok()
    assert "target, generated" in found.err
    facts = json.loads((folder / "why.json").read_text())
    assert facts["head"] == "cross L1H0"
    assert facts["keys_sha256"] != facts["sha256"]
    refused = asked("why", folders["bart"], "--target", TARGET, "--head", "cross L1H0", "--key", "was")
    assert refused.code == 2
    assert re.search("query last or key was .*cross", refused.err)
    assert "encoder layers" in asked("why", folders["bert"], "--head", "cross L1H0").err


def test_heads_of_an_encoder(folders: dict[str, str]) -> None:
    found = table("heads", folders["bert"])
    assert {row["stack"] for row in found} == {ENCODER}
    assert sorted((int(row["layer"]), int(row["head"])) for row in found) == [
        (i, j) for i in range(4) for j in range(4)
    ]
    assert all(row["entropy"] and not row["induction"] for row in found)  # which needs a causal text


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_heads_of_an_encoder_decoder(family: str, folders: dict[str, str]) -> None:
    found = table("heads", folders[family], "--target", TARGET)
    assert list(found[0])[-2:] == ["stack", "type"]
    counts = {kind: sum(row["stack"] == kind for row in found) for kind in ALL}
    assert counts == {ENCODER: 16, DECODER: 16, CROSS: 16}


def test_norms_of_an_encoder_decoder_that_makes_no_target_of_its_source(folders: dict[str, str]) -> None:
    found = table("heads", folders["t5"], "--target", TARGET, "--weights", "value", "--select", "cross")
    assert {row["stack"] for row in found} == {CROSS}


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_relations_are_the_models_own_weights(family: str, folders: dict[str, str]) -> None:
    """A second spelling: the model loaded by transformers, read by its own cross_attentions."""
    found = table("relations", folders[family], "--target", TARGET, "--select", "cross.1.2,enc.0", "--top-k", "all")
    chosen = {(row["stack"], int(row["layer"]), int(row["head"])) for row in found}
    assert chosen <= {(CROSS, 1, 2), *((ENCODER, 0, head) for head in range(4))}
    assert {kind for kind, _, _ in chosen} == {CROSS, ENCODER}
    model = AutoModelForSeq2SeqLM.from_pretrained(folders[family], attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folders[family])
    source, ids = (tokenizer(text, return_tensors="pt").input_ids for text in (SENTENCE, TARGET))
    start = ids.new_full((1, 1), STARTS[family])
    if ids[0, -1] == tokenizer.eos_token_id:
        ids = ids[:, :-1]
    if int(ids[0, 0]) != STARTS[family]:
        ids = torch.cat([start, ids], 1)
    expected = own(model, source, decoder_input_ids=ids)
    for row in found:
        weights = expected[row["stack"], int(row["layer"])][0, int(row["head"])]
        assert abs(float(row["weight"]) - float(weights[int(row["query"]), int(row["key"])])) < 1e-5


def test_a_target_that_nobody_gave_is_generated_and_said_so(folders: dict[str, str]) -> None:
    result = asked("heads", folders["bart"], "--generate", "4", "--format", "csv").ok()
    assert "generated greedily" in result.err
    assert {row["stack"] for row in result.ok().rows} == ALL


def test_pictures_lie_in_a_folder_per_stack(folders: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    figures = ("--figures", "layers", "--out", str(out))
    asked("draw", folders["t5"], "--target", TARGET, "--select", "cross.1.2,enc.0", *figures).ok()
    drawn = {path.relative_to(out).as_posix() for path in out.rglob("*.png")}
    assert drawn == {"cross/layers/L01.png", "encoder/layers/L00.png"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert {call["stack"] for call in manifest["calls"]} == ALL


def test_heads_of_an_encoder_are_drawn(folders: dict[str, str], tmp_path: Path) -> None:
    asked("draw", folders["bert"], "--select", "0.1", "--figures", "heads", "--out", str(tmp_path / "out")).ok()
    assert list((tmp_path / "out").rglob("L00H01.png"))


@pytest.mark.parametrize(
    ("family", "arguments", "said"),
    [
        ("demo", ("--target", TARGET), "target"),
        ("bert", ("--target", TARGET), "target"),
        ("bert", ("--select", "cross.0"), "cross"),
        ("t5", ("--select", "vision.0"), "vision"),
        ("t5", ("--answer", "a bank"), "causal"),
        ("t5", ("--target", ""), "target"),
        ("bert", ("--generate", "3"), "causal"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    family: str, arguments: tuple[str, ...], said: str, folders: dict[str, str]
) -> None:
    result = asked("heads", folders.get(family, family), *arguments)
    assert result.code in ((4,) if arguments[-1] == "" else (2,)), result.err
    assert result.out == b""
    assert len(result.err.strip().splitlines()) == 1, result.err
    assert said in result.err


def test_a_family_without_such_weights_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "fnet"}))
    result = asked("heads", str(tmp_path))
    assert result.code == 3
    assert "Fourier" in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_layers_whose_queries_or_keys_are_pooled_are_not_measured_and_said_so(tmp_path: Path) -> None:
    folder = str(with_tokenizer(tiny("funnel", vocab_size=2000), tmp_path / "funnel"))
    result = asked("heads", folder, "--format", "csv")
    assert {int(row["layer"]) for row in result.ok().rows} == {0, 1, 4, 5, 6, 7}
    assert "layers [2, 3] attend to keys that are not tokens" in result.err


def test_a_text_too_short_for_the_models_own_code_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = str(with_tokenizer(tiny("funnel", vocab_size=2000), tmp_path / "funnel"))
    texts = tmp_path / "texts.txt"
    texts.write_text(f"{SENTENCE}\nthe\n")
    for given, piped in ((["--ids", "-"], b"[5, 6]"), (["the"], b"")):
        result = call("heads", "-m", folder, *given, "-q", stdin=piped)
        assert result.code == 4
        assert re.search(r"\b3 tokens, .*\b2\b", result.err)
        assert len(result.err.strip().splitlines()) == 1
    assert call("batch", str(texts), "-m", folder, "--out", str(tmp_path / "out"), "-q").code == 1
    [line] = (tmp_path / "out" / "failures.jsonl").read_text().splitlines()
    assert " 3 tokens" in json.loads(line)["reason"]


def test_fused_says_what_eager_says(folders: dict[str, str]) -> None:
    eager, fused = (table("heads", folders["t5"], "--target", TARGET, "--engine", one) for one in ("eager", "fused"))
    for one, other in zip(eager, fused, strict=True):
        assert (one["stack"], one["layer"], one["head"]) == (other["stack"], other["layer"], other["head"])
        assert abs(float(one["entropy"]) - float(other["entropy"])) < 1e-4


def test_every_kind_is_heard_in_a_model_that_was_saved(folders: dict[str, str]) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(folders["t5"], attn_implementation="eager").eval()
    ids = AutoTokenizer.from_pretrained(folders["t5"])(SENTENCE, return_tensors="pt").input_ids
    assert {kind for kind, _ in heard(model, ids, decoder_input_ids=ids)[0]} == ALL

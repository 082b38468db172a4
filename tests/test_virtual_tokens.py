"""Prompt tuning and P-tuning: virtual tokens before the text, read as PEFT's own model reads them."""

import json
from pathlib import Path

import pytest
import torch
from peft import PromptEncoderConfig, PromptTuningConfig
from safetensors.torch import load_file, save_file

import attnscope
from attnscope.certificate.check import check_parity
from attnscope.errors import AttnscopeError, InputError, ModelError
from attnscope.model import adapters
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import DEMO_FOLDER, load
from attnscope.model.modules import put_before
from attnscope.model.options import LoadOptions
from attnscope.observe.inputs import reading
from attnscope.observe.request import CaptureSpec
from helpers.brought import an_adapter, in_peft
from helpers.command_line import call
from helpers.folders import saved

TEXT, COUNT = "the financial bank is located on river bank", 3
NAMES = tuple(f"virtual {number}" for number in range(COUNT))
KINDS = {"prompt": (PromptTuningConfig, {}), "p": (PromptEncoderConfig, {"encoder_hidden_size": 16})}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(tmp_path_factory.mktemp("adapters") / "prompt")


def tuned(folder: Path, kind: str = "prompt", base: Path = DEMO_FOLDER) -> Path:
    made, more = KINDS[kind]
    return an_adapter(folder, base, made(task_type="CAUSAL_LM", num_virtual_tokens=COUNT, **more))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(LoadOptions(model=str(folder)))


@pytest.mark.parametrize(("kind", "engine"), [("prompt", "eager"), ("p", "fused")])
def test_weights_are_pefts_own(tmp_path: Path, kind: str, engine: str) -> None:
    folder = tuned(tmp_path / kind, kind)
    loaded = load(LoadOptions(model=str(folder)))
    seen = attnscope.capture(loaded, TEXT, engine=engine)
    ids = loaded.tokenizer(TEXT).input_ids
    assert seen.prompt.labels[: COUNT + 1] == (*NAMES, "<s>")
    assert seen.prompt.special[:COUNT] == (True,) * COUNT
    expected = in_peft(folder, ids)
    assert expected.shape[-2:] == (COUNT + len(ids),) * 2
    # float32 in another order: 1.01e-6 on one machine, less than 1e-6 on others
    torch.testing.assert_close(torch.stack(list(seen.weights.values())), expected, rtol=0, atol=2e-6)
    assert not seen.failures


def test_metrics_count_the_virtual_tokens(folder: Path, loaded: LoadedModel) -> None:
    """Key 0 is the first of them, a token's own place is behind them, and no two of them are alike."""
    seen = attnscope.capture(loaded, TEXT)
    weights = in_peft(folder, loaded.tokenizer(TEXT).input_ids).double()
    scores = {name: torch.tensor(score.value).view(weights.shape[:2]) for name, score in seen.columns.scores.items()}
    torch.testing.assert_close(scores["sink"], weights[..., 0].mean(-1), rtol=0, atol=1e-6, check_dtype=False)
    own = weights.diagonal(dim1=-2, dim2=-1)[..., 1:].mean(-1)
    torch.testing.assert_close(scores["self"], own, rtol=0, atol=1e-6, check_dtype=False)
    ids = list(seen.prompt.ids)
    places = [at for at in range(1, len(ids)) if ids[at] in ids[:at]]
    assert [seen.prompt.tokens[at] for at in places] == [" bank"]
    earlier = ids.index(ids[places[0]])
    torch.testing.assert_close(
        scores["duplicate_token"], weights[:, :, places[0], earlier], rtol=0, atol=1e-6, check_dtype=False
    )


def test_a_family_with_positions_of_its_own(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "gpt2", vocab_size=2000)
    folder = tuned(tmp_path / "a", base=base)
    seen = attnscope.capture(load(LoadOptions(model=str(folder))), TEXT)
    expected = in_peft(folder, seen.prompt.ids[COUNT:], base)
    torch.testing.assert_close(torch.stack(list(seen.weights.values())), expected, rtol=0, atol=1e-6)


def test_parity_is_shown(loaded: LoadedModel) -> None:
    report = check_parity(loaded, prompt=attnscope.capture(loaded, TEXT).prompt)
    assert report.level in ("full", "scores")
    assert not report.failures


def test_tokens_are_put_before_a_text_once(loaded: LoadedModel) -> None:
    """Also where a run is read again, or where ids are given; and they count against the positions."""
    prompt = attnscope.capture(loaded, TEXT).prompt
    own = loaded.tokenizer(TEXT).input_ids
    for again in (prompt, list(prompt.ids), own):
        assert attnscope.capture(loaded, again).prompt.ids == prompt.ids
    most = loaded.geometry.max_positions
    with pytest.raises(InputError, match=str(most - COUNT)):
        attnscope.capture(loaded, [own[1]] * (most - COUNT + 1))


def test_the_model_itself_never_makes_one(loaded: LoadedModel) -> None:
    """Its logits are of the base's tokens, whose embeddings are as they were."""
    base = load(LoadOptions())
    ids = torch.tensor([base.tokenizer(TEXT).input_ids])
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, base.model(ids).logits, rtol=0, atol=0)


def test_the_command_line(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = call(
        "relations", TEXT, "-m", str(folder), "--query", "last", "--key", "0", "--out", str(run), "--format", "csv"
    ).ok()
    rows = done.rows
    assert {row["key_token"] for row in rows} == {"virtual 0"}
    assert json.loads((run / "manifest.json").read_text())["prompt"]["tokens"][:COUNT] == list(NAMES)
    call("heads", str(run), "-q").ok()
    compared = call("compare", "-m", "demo", "--compare-model", str(folder), "--text", TEXT).ok()
    assert "only in the other: virtual_0 virtual_1 virtual_2(0-2)" in compared.err
    lost = [float(row["other_lost"]) for row in compared.rows]
    assert max(lost) > 0.1
    swapped = call("compare", "-m", str(folder), "--text", TEXT, "--compare-text", "the old " + TEXT)
    assert "12 shared tokens" in swapped.err
    assert "only in the first text" not in swapped.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("heads", TEXT, "--generate", "2"), "an answer reads texts as they are"),
        (("batch", "{texts}", "--out", "{out}"), "a corpus run reads texts as they are"),
        (("scan", "{model}", "--out", "{out}"), "a scan reads texts as they are"),
    ],
)
def test_what_reads_texts_alone_is_refused(folder: Path, tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    (tmp_path / "texts.txt").write_text(TEXT)
    names = {"texts": tmp_path / "texts.txt", "out": tmp_path / "out", "model": folder}
    given = tuple(flag.format(**names) for flag in flags)
    result = call(*given, *(() if "{model}" in flags else ("-m", str(folder))), "-q")
    assert result.code == 3, result.err
    assert f"{said}, and {folder} puts 3 virtual tokens before them" in result.err


def test_of_another_model(tmp_path: Path) -> None:
    folder = tuned(tmp_path / "a")
    path = folder / adapters.SAFETENSORS
    wrong = {name: one[:, :-1].contiguous() for name, one in load_file(path).items()}
    save_file(wrong, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"base: .* 192 numbers"):
        load(LoadOptions(model=str(folder)))


def test_errors_have_a_next_step(tmp_path: Path) -> None:
    folder = tuned(tmp_path / "a")
    with pytest.raises(AttnscopeError) as caught:
        load(LoadOptions(model=str(folder))).check_bare("a scan")
    assert caught.value.hint


def test_an_answer_beside_pictures_or_in_a_process_of_its_own_is_refused_too():
    loaded = attnscope.load("demo")
    put_before(loaded.model, torch.zeros(2, 192))
    with reading(loaded, "here", 510) as read, pytest.raises(AttnscopeError, match="an answer reads texts as they are"):
        read(CaptureSpec("the bank", answer=" river"))

"""A model that brings its own modelling file: refused, and with a flag read, by the route that its code takes."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils

import attnscope
from attnscope.certificate import second_instance, whole_model
from attnscope.certificate.check import check_parity
from attnscope.errors import AttnscopeError, ModelError, UsageError
from attnscope.hooks.listen import calls_interface, listen
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import DEMO_FOLDER, load
from attnscope.model.options import LoadOptions
from helpers import their_code
from helpers.command_line import call
from helpers.folders import TOKENIZER_FILES, edit_config
from helpers.own import attentions

TEXT = "the financial bank is located on river bank"


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The code is copied to where tests may write."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patched.setattr("sys.path", __import__("sys").path.copy())
        yield


@pytest.fixture(scope="module", params=[True, False], ids=["asks", "alone"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, modules: None) -> Path:
    """A model whose attention asks the interface, and one whose does not."""
    path = tmp_path_factory.mktemp("theirs") / ("asks" if request.param else "alone")
    torch.manual_seed(0)
    their_code.TheirModelForCausalLM(their_code.TheirConfig(asks=request.param)).save_pretrained(path)
    shutil.copy(their_code.__file__, path / "their_code.py")
    edit_config(
        path,
        auto_map={
            "AutoConfig": "their_code.TheirConfig",
            "AutoModelForCausalLM": "their_code.TheirModelForCausalLM",
        },
    )
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_FOLDER / name, path)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(LoadOptions(model=str(folder), trust_remote_code=True))


def weights(loaded: LoadedModel, engine: str = "eager") -> torch.Tensor:
    """(layers, H, Q, K)"""
    return torch.stack(list(attnscope.capture(loaded, TEXT, engine=engine).weights.values()))


def test_it_is_refused_in_one_line(folder: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load(LoadOptions(model=str(folder)))
    assert caught.value.for_shell().endswith(
        "(theirs) runs code from its own repository; read that code, then pass --trust-remote-code"
    )
    done = call("heads", TEXT, "--model", str(folder))
    assert done.code == 3
    assert done.err.count("\n") == 1


def test_its_attentions_are_read(folder: Path, loaded: LoadedModel) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, attn_implementation="eager")
    expected = torch.stack(attentions(theirs, attnscope.capture(loaded, TEXT).prompt.ids))
    torch.testing.assert_close(weights(loaded), expected, rtol=0, atol=1e-6)
    assert expected.max() > 0.5
    assert calls_interface(loaded.model) == loaded.model.config.asks


def test_the_tiles_read_it_where_its_code_asks_the_interface(loaded: LoadedModel) -> None:
    if loaded.model.config.asks:
        torch.testing.assert_close(weights(loaded, "fused"), weights(loaded), rtol=0, atol=1e-5)
        return
    with pytest.raises(UsageError, match=r"theirs .*fused"):
        weights(loaded, "fused")


def test_parity_says_how_far_it_goes(loaded: LoadedModel) -> None:
    report = check_parity(loaded, torch.arange(5, 29))
    assert (report.level, report.holds) == (("scores", True) if loaded.model.config.asks else ("none", False))


def test_it_is_tried_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over two tokens, or two where its weights must be asked for; after that none."""
    loaded = load(LoadOptions(model=str(folder), trust_remote_code=True))
    lengths: list[int] = []
    loaded.model.model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    for _ in range(2):
        listen(loaded.model, torch.arange(5, 10)[None], lambda called: None)
    assert lengths == ([2, 5, 5] if loaded.model.config.asks else [2, 2, 5, 5])


def test_the_command_line(folder: Path) -> None:
    done = call("heads", TEXT, "--model", str(folder), "--trust-remote-code", "--format", "jsonl").ok()
    assert len(done.records) == 12
    call("info", str(folder), "--trust-remote-code").ok()


def test_code_that_fails_is_told_in_one_line(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "their_code.py").write_text("raise RuntimeError('not today')\n")
    with pytest.raises(AttnscopeError, match="not today") as caught:
        load(LoadOptions(model=str(broken), trust_remote_code=True))
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)


def test_a_second_instance_is_allowed_that_code(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made in this process, as `alone` makes it in one of its own."""

    def run(words: list[str], **_: Any) -> SimpleNamespace:
        second_instance.main(Path(words[-1]))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(whole_model.subprocess, "run", run)
    assert check_parity(loaded, [5, 6, 7, 8, 9], whole=True).whole.holds


@pytest.mark.parametrize(
    "folder",
    [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.e2e)],
    ids=["asks", "alone"],
    indirect=True,
)
def test_a_second_instance_runs_that_code_with_the_same_flag(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    report = check_parity(loaded, [5, 6, 7, 8, 9], whole=True)
    assert report.whole.holds
    assert any(tmp_path.rglob("their_code.py"))

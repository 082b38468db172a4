"""The library as a person in Python meets it: names, errors, what is shown, kept, written, and left alone."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import pipeline

import attnscope
from attnscope.export.export import Export, ExportOptions
from attnscope.figures.style import Style, StyleFields
from attnscope.observe.request import CaptureOptions, CaptureSpec, View
from helpers.command_line import HANGS, SENTENCE, call
from helpers.families import tiny_model
from helpers.forks import forked
from helpers.pictures import without_command

NAMES = {
    "AttnscopeError",
    "LoadedModel",
    "Observation",
    "Request",
    "Style",
    "View",
    "ablate",
    "batch",
    "capture",
    "compare",
    "connect",
    "depth",
    "explain",
    "from_tensors",
    "from_weights",
    "knockout",
    "listen",
    "load",
    "parity",
    "patch",
    "recording",
    "save_tensors",
    "save_weights",
    "scan",
    "why",
    "wrap",
}


@pytest.fixture(scope="module")
def seen(demo) -> attnscope.Observation:
    return attnscope.capture(demo, SENTENCE)


def test_the_names_are_these_and_no_others() -> None:
    assert set(dir(attnscope)) == set(attnscope.__all__) == NAMES | {"__version__"}
    with pytest.raises(AttributeError, match="no attribute 'read'"):
        attnscope.read  # noqa: B018


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_says_what_it_is_with_an_example(name: str) -> None:
    said = getattr(attnscope, name).__doc__
    assert ">>> " in said
    first = said.splitlines()[0]
    assert first.endswith((".", ":")) or "," in first  # words, not the signature that dataclass would write
    assert not said.startswith(f"{name}(")


@pytest.mark.parametrize("text", [SENTENCE, "the river bank " * 100, "one\ntwo\tthree"])
def test_what_is_printed_is_short_and_says_enough(demo, text: str) -> None:
    for line in repr(demo).splitlines():
        assert len(line) < 100
    assert [word in repr(demo) for word in ("demo", "llama", "float32", "cpu", "4 layers", "512")] == [True] * 6
    seen = attnscope.capture(demo, text)
    shown = repr(seen)
    assert len(shown.splitlines()) == 4
    assert max(map(len, shown.splitlines())) < 100
    assert f"{len(seen.prompt)} tokens" in shown
    assert "engine eager" in shown
    assert "relations, maps, weights" in shown
    assert repr(text[:20])[:-1] in shown


def test_token_text_is_never_markup(demo) -> None:
    shown = attnscope.capture(demo, "<script>alert('bank')</script> & <img src=x>")._repr_html_()
    assert "&lt;script&gt;" in shown
    tags = shown.replace("<img alt=", "", 1)  # our own picture
    assert "<script" not in tags
    assert "<img" not in tags


@pytest.mark.parametrize("engine", ["eager", "fused"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_wrapping_leaves_the_model_as_it_is(demo, engine: str, attention: str) -> None:
    model = tiny_model("llama", attention=attention).requires_grad_(True)
    before = state(model)
    attnscope.capture(attnscope.wrap(model, demo.tokenizer), [1, 2, 3, 4], engine=engine)
    assert state(model) == before
    assert before["attention"] == attention
    assert all(before["gradients"])  # which `load` switches off


STUDIES = {
    "why": lambda model: attnscope.why(model, "the bank of the river, the bank", "L3H0", key="river"),
    "patch": lambda model: attnscope.patch(
        model, "the river, the", "the field, the", over="layers", method="gradient", random=0
    ),
    "ablate": lambda model: attnscope.ablate(model, texts=["the river bank", "a bank of it"], method="gradient"),
}


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("study", STUDIES)
def test_what_needs_gradients_has_them_in_any_mode_of_its_caller(study: str, mode, trained: bool, demo) -> None:
    model = attnscope.load("demo")
    model.model.requires_grad_(trained)
    expected = STUDIES[study](demo).table()
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found = STUDIES[study](model).table()
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    assert repr(found.to_pylist()) == repr(expected.to_pylist())  # where a NaN equals a NaN


def test_a_model_that_is_loaded_in_inference_mode_is_as_any_other(demo) -> None:
    with torch.inference_mode():
        model = attnscope.load("demo")
    assert not any(one.is_inference() for one in (*model.model.parameters(), *model.model.buffers()))
    assert STUDIES["why"](model).table() == STUDIES["why"](demo).table()


@pytest.mark.parametrize("study", STUDIES)
def test_weights_that_were_made_in_inference_mode_are_refused_where_gradients_are_needed(study: str, demo) -> None:
    with torch.inference_mode():
        model = type(demo.model)(demo.model.config).eval()
    wrapped = attnscope.wrap(model, demo.tokenizer)
    with pytest.raises(attnscope.AttnscopeError, match=r"made in torch\.inference_mode\(\)") as raised:
        STUDIES[study](wrapped)
    assert "load the model outside torch.inference_mode()" in str(raised.value)


def test_a_model_in_training_is_wrapped_and_refused_only_when_read(demo) -> None:
    model = tiny_model("llama").train()
    wrapped = attnscope.wrap(model, demo.tokenizer)
    with pytest.raises(attnscope.AttnscopeError, match=r"training mode.*call model\.eval\(\) first"):
        attnscope.capture(wrapped, [1, 2, 3])
    assert model.training
    assert "model.eval()" in (attnscope.wrap.__doc__ or "")


def state(model: torch.nn.Module) -> dict[str, Any]:
    """What a person would miss if it changed."""
    return {
        "attention": model.config._attn_implementation,
        "training": [module.training for module in model.modules()],
        "gradients": [parameter.requires_grad for parameter in model.parameters()],
        "weights": [parameter.detach().sum().item() for parameter in model.parameters()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "attributes": [sorted(module.__dict__) for module in model.modules()],
        "cache": model.config.use_cache,
    }


def test_wrapped_and_loaded_give_the_same(demo, seen) -> None:
    wrapped = attnscope.wrap(demo.model, demo.tokenizer, name="mine")
    again = attnscope.capture(wrapped, SENTENCE)
    # A wrapped model has no folder, and so no atlas.
    assert again.table()["role"].equals(seen.table()["text_role"])
    named = ["role", "atlas_roles"]
    assert again.table().drop(columns=named).equals(seen.table().drop(columns=named))
    assert again.relations().equals(seen.relations())
    assert all(torch.equal(again.weights[layer], seen.weights[layer]) for layer in seen.weights)
    assert wrapped.geometry == demo.geometry
    assert (again.facts["model"]["name"], seen.facts["model"]["name"]) == ("mine", "demo")


class Envoy:
    """As peers' objects stand in for a model's parts: it answers to every name, and is no module."""

    def __getattr__(self, name: str) -> "Envoy":
        return Envoy()


class Holder(Envoy):
    """As nnsight's objects hold a model: under a name of their own."""

    def __init__(self, *models: torch.nn.Module) -> None:
        self.config = None
        vars(self).update({f"_module{number}": model for number, model in enumerate(models)})


class Around(torch.nn.Module):
    """As wrappers for training hold it: a module without a config."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = model


HELD: dict[str, Callable[[Any], Any]] = {
    "by an object that answers to every name": Holder,
    "twice by one": lambda model: Holder(model, model),
    "in a wrapper in one": lambda model: Holder(Around(model)),
    "by a wrapper": Around,
    "by a pipeline": lambda model: pipeline("text-generation", model, tokenizer=attnscope.load("demo").tokenizer),
}


@pytest.mark.parametrize("how", HELD)
def test_the_model_in_an_object_of_another_library_is_read(demo, how: str) -> None:
    wrapped = attnscope.wrap(HELD[how](demo.model), demo.tokenizer)
    assert wrapped.model is demo.model
    assert wrapped.geometry == demo.geometry


REFUSED: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "memory": (
        lambda model, seen: attnscope.capture(model, SENTENCE * 9, engine="eager", memory="1KB"),
        r'or use engine="fused"$',
    ),
    "size": (lambda model, seen: attnscope.capture(model, SENTENCE, memory="much"), r'write memory="4GB"$'),
    "long": (lambda model, seen: attnscope.capture(model, SENTENCE * 99), r'truncate="'),
    "engine": (
        lambda model, seen: attnscope.capture(model, SENTENCE, engine="quick"),
        r"auto, eager, fused, tiles, numba, triton, probe$",
    ),
    "load": (lambda model, seen: attnscope.load("demo", torch_dtype="auto"), r"no option 'torch_dtype'; it has"),
    "device": (lambda model, seen: attnscope.load("demo", device="gpu"), r"expected a device auto, cpu"),
    "layer": (lambda model, seen: attnscope.capture(model, SENTENCE, [4]), r"no layer 4 .* there are 0, 1, 2, 3$"),
    "both": (
        lambda model, seen: attnscope.capture(model, SENTENCE, [1], request=attnscope.Request()),
        r'choose heads with select="1\.\*" instead$',
    ),
    "group": (
        lambda model, seen: attnscope.Request(view=View(weights="scores"), group="words"),
        r'use weights="softmax" with group$',
    ),
    "bare": (lambda model, seen: attnscope.capture(model.model, SENTENCE), r"attnscope\.wrap one of a model"),
    "wrap": (
        lambda model, seen: attnscope.wrap("gpt2", None),
        r"expected a model of transformers \(PreTrainedModel\) or a module of PyTorch, got str, which holds none; .*"
        r"; matrices alone: attnscope\.from_weights\(weights, tokens\)$",
    ),
    "own code": (
        lambda model, seen: attnscope.capture(attnscope.wrap(torch.nn.Linear(2, 2).eval()), torch.ones(1, 2)),
        r"no attention was heard in Linear; looked for scaled_dot_product_attention, .*in the thread that ran it$",
    ),
    "envoy": (
        lambda model, seen: attnscope.wrap(Envoy(), None),
        r"or a module of PyTorch, got Envoy, ",
    ),
    "two models": (
        lambda model, seen: attnscope.wrap(Holder(model.model, tiny_model("llama")), None),
        r"got Holder that holds 2; pass one of them",
    ),
    "map": (lambda model, seen: seen.heatmap(0, 6), r"there is no map of L0H6"),
    "style": (lambda model, seen: seen.heatmap(0, 0, colour="red"), r"has no 'colour'; it has annotate, caption, cmap"),
    "figure": (lambda model, seen: seen.export("never", figures=("all",)), r"the figures are overview, layers"),
    "export": (
        lambda model, seen: seen.export("never", figure="all"),
        r"export has no option 'figure'; it has figures,",
    ),
    "empty": (lambda model, seen: attnscope.capture(model, " \n"), r"the text is empty; give a text with at least one"),
    "id": (lambda model, seen: attnscope.capture(model, [0, 2000]), r"token 1 has the id 2000, .* has 2000 ids"),
    "ids": (lambda model, seen: attnscope.capture(model, [0] * 513), r'513 tokens, .* at most 512; .*truncate="left"'),
    "words": (lambda model, seen: attnscope.capture(model, ["a", 1]), r"expected a text, a Prompt or token ids"),
    "number": (lambda model, seen: attnscope.capture(model, 5), r"expected a text, a Prompt or token ids"),
    "dictionary": (lambda model, seen: attnscope.capture(model, {1: 2}), r"expected a text, a Prompt or token ids"),
    "set": (lambda model, seen: attnscope.capture(model, {1, 2}), r"expected a text, a Prompt or token ids"),
    "nothing": (lambda model, seen: attnscope.capture(model, []), r"^there are no token ids; give at least one$"),
    "empty of many": (lambda model, seen: attnscope.capture(model, ["a", ""]), r"^text\[1\]: the text is empty; give"),
    "long of many": (
        lambda model, seen: attnscope.capture(model, [[1] * 600, "a"], verify=True),
        r"^text\[0\]: the text has 600 tokens, the model reads at most 512; shorten it",
    ),
    "none of many": (lambda model, seen: attnscope.capture(model, ["a", None]), r"^text\[1\]: expected a text, a Pro"),
    "no such head": (
        lambda model, seen: attnscope.capture(model, ["a", "b"], select="9.9"),
        r"^(?!text\[).*9",  # which is wrong for all of them
    ),
    "positions": (
        lambda model, seen: attnscope.load("demo", positions=-1),
        r"expected positions from 1 to \d+, got -1",
    ),
    "sort": (lambda model, seen: seen.table("sharpness"), r"no metric is called 'sharpness'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_speaks_python(demo, seen, what: str) -> None:
    refused, says = REFUSED[what]
    with pytest.raises(attnscope.AttnscopeError, match=says) as caught:
        refused(demo, seen)
    words = str(caught.value)
    assert "--" not in words
    assert "{" not in words
    assert "\n" not in words


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"weights": "scores"}, 'request=Request(view=View(weights="scores"), relations=True)'),
        ({"weights": True}, "request=Request(weights=...)"),
        ({"head": [1]}, "request=Request(view=View(heads=...), relations=True)"),
        ({"maps": "all"}, 'request=Request(maps="all")'),
        ({"dtype": "bfloat16"}, 'attnscope.load(MODEL, dtype="bfloat16")'),
        ({"layer": 1}, "it has layers, "),
    ],
)
def test_an_option_that_capture_lacks_is_named_where_it_is(demo, given: dict[str, Any], says: str) -> None:
    with pytest.raises(attnscope.AttnscopeError, match=f"has no option '{next(iter(given))}'; .*{re.escape(says)}"):
        attnscope.capture(demo, SENTENCE, **given)
    if "..." not in says and says.startswith("request"):
        names = {"Request": attnscope.Request, "View": View}
        asked = eval(says.removeprefix("request="), names)
        kept = attnscope.capture(demo, SENTENCE, request=asked)
        assert kept.maps or "score" in kept.relations().column_names


def test_the_options_of_capture_are_those_it_hands_on(demo) -> None:
    wanted = {"select": "1.0-2", "truncate": "right", "memory": "1GB", "listen": False, "verify": True, "chat": False}
    seen = attnscope.capture(demo, SENTENCE * 99, **wanted)
    assert len(seen.prompt) == 512
    assert seen.facts["parity"]["failures"] == []
    assert {(head.layer, head.head) for head in seen.kept_heads()} == {(1, 0), (1, 1), (1, 2)}


QUIET = f"""
import attnscope, sys
from transformers.utils import logging
model = attnscope.load("demo")
for engine in ("eager", "fused"):
    seen = attnscope.capture(model, {SENTENCE!r}, engine=engine)
seen.heatmap(0, 0)
sys.exit(0 if logging.is_progress_bar_enabled() else 3)
"""


def test_nothing_is_printed_and_the_bars_of_others_stay(tmp_path: Path) -> None:
    script = tmp_path / "quiet.py"
    script.write_text(f"from transformers.utils import logging\nlogging.enable_progress_bar()\n{QUIET}")
    done = forked(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.e2e
def test_nothing_is_printed_by_what_is_imported_either() -> None:
    """A process of its own: what the libraries say they say once, when they are first imported."""
    quiet = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY")
    env = {name: value for name, value in os.environ.items() if name not in quiet}
    done = subprocess.run([sys.executable, "-c", QUIET], env=env, capture_output=True, text=True, timeout=HANGS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "figures", [("overview", "heads"), pytest.param(None, marks=pytest.mark.e2e)], ids=["some", "all"]
)
def test_an_export_is_what_the_command_writes(seen, tmp_path: Path, figures) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    names = [head.name for head in seen.kept_heads("focus")[:2]]
    written = seen.export(ours, heads=names, top=2, sort="focus", **({"figures": figures} if figures else {}))
    asked = ("--figures", ",".join(figures)) if figures else ()
    call("heads", "--text", SENTENCE, "--top", "2", *asked, "--out", str(theirs)).ok()
    files, expected = contents(ours), contents(theirs)
    assert {str(path.relative_to(ours)) for path in written} == files.keys() == expected.keys()
    manifest, told = (json.loads(found.pop("manifest.json")) for found in (files, expected))
    assert (manifest.pop("options"), told.pop("options")["top"]) == ({}, "2")
    assert told.pop("command").startswith("heads --top 2")
    assert manifest.pop("files").keys() == told.pop("files").keys()  # pictures name the command
    ask, asked = manifest.pop("ask"), told.pop("ask")
    assert ask.pop("keep") | {"weights": False, "maps": "all"} == asked.pop("keep")  # Python keeps whole matrices
    assert ask == asked
    assert manifest == told
    assert files == expected


def test_an_export_draws_overview_sheet_and_heads_unless_figures_are_named(demo, tmp_path: Path) -> None:
    attnscope.capture(demo, "a bank", select="1.0").export(tmp_path)
    pictures = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png")}
    assert pictures == {"overview.png", "top.png", "heads/L01H00.png"}


def test_a_picture_is_what_the_command_draws(seen, tmp_path: Path) -> None:
    """A map of the scale of its own: the command's scale holds across the files of one call."""
    arguments = ("--select", "1.4", "--scale", "log", "--figures", "heads", "--out", str(tmp_path))
    call("draw", "--text", SENTENCE, *arguments).ok()
    drawn = without_command((tmp_path / "heads" / "L01H04.png").read_bytes())
    picture = seen.heatmap(1, 4, scale="log")
    assert picture.save(tmp_path / "mine.png").read_bytes() == picture._repr_png_() == drawn
    assert seen.heatmap(1, 4).png != drawn


def test_a_failed_save_leaves_the_old_file_and_nothing_else(seen, tmp_path: Path, monkeypatch) -> None:
    picture, path = seen.heatmap(1, 4), tmp_path / "L1H4.png"
    path.write_bytes(b"old")

    def half(self: Path, data: bytes) -> int:
        with self.open("wb") as stream:
            stream.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises((OSError, attnscope.AttnscopeError)):
        picture.save(path)
    assert contents(tmp_path) == {"L1H4.png": b"old"}


def contents(folder: Path) -> dict[str, bytes]:
    """{path below the folder: bytes} of every file; of a picture without the command that it carries."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): without_command(path.read_bytes()) for path in files}


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_who_asks_for_nothing_keeps_no_matrix(demo, engine: str) -> None:
    text = "the river bank is green and the old boat lies still " * 9
    seen = attnscope.capture(demo, text, engine=engine, request=attnscope.Request())
    square = len(seen.prompt) ** 2
    assert len(seen.weights) == 0
    assert seen.maps is None
    assert max(sizes(seen)) < square
    whole = attnscope.capture(demo, text, engine=engine, request=attnscope.Request(weights=True), select="2.*")
    assert sizes(whole).count(6 * square) == 1
    assert list(whole.weights) == [(2, "decoder")]


def sizes(found: object) -> list[int]:
    return [array.numel() if isinstance(array, Tensor) else np.asarray(array).size for array in arrays(found)]


def arrays(found: object) -> Iterator[np.ndarray | Tensor]:
    """Every array and tensor that hangs on an object; of a view, what it is a view of, which lives as long."""
    if isinstance(found, np.ndarray | Tensor):
        base = found._base if isinstance(found, Tensor) else found.base
        yield found if base is None else base
    elif is_dataclass(found):
        for field in fields(found):
            yield from arrays(getattr(found, field.name))
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from arrays(value)
    elif isinstance(found, Sequence) and not isinstance(found, str | bytes):
        for value in found:
            yield from arrays(value)


@pytest.mark.parametrize(
    ("keywords", "record", "without"),
    [
        (CaptureOptions, CaptureSpec, {"text", "keep"}),
        (ExportOptions, Export, set()),
        (StyleFields, Style, {"image", "about"}),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_keywords_that_a_type_checker_knows_are_the_fields_of_their_record(keywords, record, without):
    names = {one.name for one in fields(record)} - without
    assert set(keywords.__annotations__) == names

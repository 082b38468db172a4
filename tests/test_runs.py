"""The folder of one run: whose it is, what it lists, how another takes its place, and how it is repeated."""

import csv
import hashlib
import io
import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import get_args

import pytest

import attnscope
from attnscope.api.captured import Capture
from attnscope.certificate.check import check_parity
from attnscope.errors import UsageError
from attnscope.export.drawing import DEFAULT, FIGURES
from attnscope.export.manifest import OURS, ask_of, differences, prompt_of
from attnscope.figures.style import ImageFormat
from attnscope.inputs.prompt import Prompt
from attnscope.observe.request import CaptureSpec
from attnscope.observe.run import prepare, read
from attnscope.studies.comparison import check_folder
from attnscope.utils.tables import FORMULA_STARTS, as_table, escape_formulas, save, write
from helpers.command_line import call
from helpers.families import tiny_model
from helpers.forks import Forked
from helpers.stack_families import tiny

STORY, CAT = "the river bank is green and the old boat lies still", "the cat sat on the mat"
ONE_KIND = ("--figures", "heads")  # where pictures of every kind would say no more


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def said(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


def listed(folder: Path) -> set[str]:
    """What the manifest lists, which is all that lies there."""
    files = files_of(folder)
    found = said(folder)["files"]
    assert found == {name: hashlib.sha256(files[name]).hexdigest() for name in found}
    assert set(found) | {"manifest.json"} == set(files)
    assert all(OURS.fullmatch(name) for name in files)
    return set(found)


# what is said of how a text is read


def test_a_begin_token_in_the_text_beside_the_tokenizers_own_is_said(demo) -> None:
    for text, times in (("<s>the bank", 1), ("the <s> bank", 0), ("the bank", 0)):
        notes = attnscope.capture(demo, text).facts.get("notes", [])
        assert len([note for note in notes if "begins with <s>" in note]) == times
    assert "notes" not in attnscope.capture(demo, demo.tokenizer("<s>the").input_ids).facts  # as they were given


@pytest.mark.parametrize("alibi", [True, False])
def test_where_transformers_errs_a_run_has_the_certificates_line(demo, alibi: bool) -> None:
    loaded = attnscope.wrap(tiny_model("falcon", alibi=alibi, vocab_size=2000), demo.tokenizer)
    seen = attnscope.capture(loaded, "the bank of the river")
    report = check_parity(loaded, seen.prompt)
    assert report.holds is not alibi
    assert [report.layers[0].why in note for note in seen.facts.get("notes", [])] == [True] * alibi


# whose it is


@pytest.fixture(scope="module")
def of_story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that others are refused beside; nothing writes to it."""
    out = tmp_path_factory.mktemp("story") / "runs"
    call("heads", "--text", STORY, "--top", "2", "--out", str(out), "-q").ok()
    return out


def test_a_comparison_in_the_folder_of_a_run_is_refused_with_its_command(of_story):
    with pytest.raises(UsageError, match="runs holds a run of `heads --top 2`; name another folder"):
        check_folder(of_story, {}, force=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("heads", "--text", CAT), f"another run: text was {STORY[:39]!r}… (".replace("'…", "…")),
        (("heads", "--text", STORY, "--top", "1"), "another run: top was '2', now '1'; name"),
        (("heads", "--text", STORY, "--top", "2", "--select", "1"), "another run: select was not given, now '1'; name"),
        (("relations", "--text", STORY), "a run of `heads --top 2`; name"),
        (("draw", "--text", STORY, "--scale", "log"), "a run of `heads --top 2`; name"),
        (("keys", "--text", "the bank"), f"a run of `heads --top 2`, of the text {STORY[:39]!r}… (".replace("'…", "…")),
        (("heads", "--ids", "{ids}", "--top", "2"), "tokens), now '<s>the' (2 tokens)"),
    ],
)
def test_another_run_is_refused_before_the_forward_pass(tmp_path, of_story, arguments, says, monkeypatch):
    out, ids = of_story, tmp_path / "ids"
    ids.write_text("0 423")
    arguments = [one.format(ids=ids) for one in arguments]
    before = files_of(out)
    monkeypatch.setattr("attnscope.observe.run.observe", None)
    result = call(*arguments, "--out", str(out))
    assert (result.code, result.out, result.err.count("\n")) == (2, b"", 1)
    assert f"{out} holds a" in result.err
    assert says in result.err
    assert result.err.endswith("name another folder, or write over it with --force\n")
    assert files_of(out) == before


def test_the_same_run_again_is_fine_however_its_text_was_given(tmp_path):
    out, file = tmp_path / "runs", tmp_path / "story.txt"
    file.write_text(STORY)
    call("heads", "--text", STORY, "--top", "1", *ONE_KIND, "--out", str(out), "-q").ok()
    before = files_of(out)
    call("heads", "--file", str(file), "--top", "1", *ONE_KIND, "--out", f"{out}/../runs", "--offline", "-q").ok()
    again = files_of(out)
    assert again.pop("manifest.json") != before.pop("manifest.json")  # other ways to the same
    assert again == before


def test_the_manifest_lists_every_file_with_its_hash_and_every_token(tmp_path, demo):
    drawn = ("--figures", "overview,layers", "-s", "0.0")
    call("heads", "--text", STORY, *drawn, "--out", str(tmp_path), "-q").ok()
    assert listed(tmp_path) == {"heads.csv", "relations.csv", "overview.png", "layers/L00.png"}
    prompt = prepare(demo, CaptureSpec(STORY)).prompt
    tokens = said(tmp_path)["prompt"]
    assert (tokens["text"], tokens["ids"], tokens["tokens"]) == (STORY, list(prompt.ids), list(prompt.tokens))


def test_force_removes_what_the_old_manifest_lists_and_nothing_else(tmp_path):
    drawn = ("-s", "0.0", "--out", str(tmp_path), "-q")
    call("heads", "--text", STORY, "--image", "svg", "--figures", "layers,heads", *drawn).ok()
    assert {"layers/L00.svg", "heads/L00H00.svg"} < listed(tmp_path)
    mine = {"notes.txt": b"mine", "heads/notes.txt": b"mine", "heads/L99H99.png": b"mine"}
    for name, content in mine.items():
        (tmp_path / name).write_bytes(content)
    call("heads", "--text", CAT, *ONE_KIND, *drawn, "--force").ok()
    found = files_of(tmp_path)
    assert {name: found.pop(name) for name in mine} == mine
    assert set(found) == {*said(tmp_path)["files"], "manifest.json"}
    assert not [name for name in found if name.endswith("svg")]
    assert not (tmp_path / "layers").exists()
    assert said(tmp_path)["prompt"]["text"] == CAT
    call("relations", "--text", CAT, "--out", str(tmp_path), "--force", "-q").ok()
    assert set(files_of(tmp_path)) == {*mine, "relations.csv", "manifest.json"}


def test_a_hostile_manifest_removes_nothing_of_others(tmp_path):
    """Paths out of the folder, absolute ones, links to other folders, and files that are not of a run."""
    out, other = tmp_path / "runs", tmp_path / "other"
    other.mkdir()
    victims = [other / "L00H00.png", tmp_path / "heads.csv", other / "heads.csv", tmp_path / "victim"]
    for victim in victims:
        victim.write_text("keep")
    call("heads", "--text", CAT, *ONE_KIND, "-s", "0.0", "--out", str(out), "-q").ok()
    (out / "layers").mkdir()
    (out / "mine.txt").write_text("keep")
    for path in (out / "heads").iterdir():
        path.unlink()
    (out / "heads").rmdir()
    (out / "heads").symlink_to(other)
    lies = ["../heads.csv", "../victim", str(tmp_path / "victim"), "heads/L00H00.png", "heads/../../other/heads.csv"]
    lies += ["mine.txt", "layers/../mine.txt", ".", "", "heads", "\0"]
    for files in (lies, dict.fromkeys(lies, ""), {"a": lies}, 7, "mine.txt", [[]], None):
        (out / "manifest.json").write_text(json.dumps(said(out) | {"files": files}))
        call("relations", "--text", CAT, "--out", str(out), "--force", "-q").silent()
        assert [victim.read_text() for victim in [*victims, out / "mine.txt"]] == ["keep"] * 5
    assert (out / "heads").is_symlink()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"schema": "certificate/1"}', "\ud800", "[" * 10**5])
def test_a_folder_with_another_manifest_is_refused(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content.encode(errors="surrogatepass"))
    result = call("relations", "--text", CAT, "--out", str(tmp_path), "-q")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "damaged" in result.err
    call("relations", "--text", CAT, "--out", str(tmp_path), "-q", "--force").ok()
    assert listed(tmp_path) == {"relations.csv"}


def test_no_control_character_of_a_manifest_reaches_the_terminal(tmp_path, seen):
    seen.export(tmp_path, figures=())
    evil = "\x1b[31m\u202e\x00\x9b\u2028"
    manifest = said(tmp_path)
    for part in ("options", "text", "prompt", "model"):
        manifest[part] |= {evil: evil, "text": evil, "name": evil}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    result = call("relations", "--text", CAT, "--out", str(tmp_path), "-q")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err[:-1].isprintable()


def test_files_of_our_names_that_nobody_lists_are_refused_others_stay(tmp_path):
    (tmp_path / "relations.csv").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    result = call("relations", "--text", CAT, "--out", str(tmp_path), "-q")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "relations.csv, which no manifest lists" in result.err
    (tmp_path / "relations.csv").unlink()
    call("relations", "--text", CAT, "--out", str(tmp_path), "-q").ok()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_killed_run_leaves_a_folder_that_the_next_takes_over(tmp_path):
    out = tmp_path / "runs"
    (tmp_path / "runs").mkdir()
    (out / "notes.txt").write_text("mine")
    command = ["heads", "--text", STORY, "-q", "--out", str(out), "--select", "*.*", "--image", "svg", *ONE_KIND]
    process = Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not (out / "heads" / "L00H02.svg").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(60)
    left = files_of(out)
    assert {"heads.csv", "heads/L00H02.svg", "unfinished.json"} < set(left)
    assert "manifest.json" not in left
    (out / "heads" / ".L00H03.svg.0123abcd").write_text("half")
    call("heads", "--text", CAT, "--top", "1", *ONE_KIND, "--out", str(out), "-q").ok()
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    assert not [name for name in listed(out) if name.endswith("svg")]
    assert said(out)["prompt"]["text"] == CAT


# from Python


@pytest.fixture(scope="module")
def seen(demo) -> attnscope.Observation:
    return attnscope.capture(demo, STORY)


def test_the_library_holds_a_folder_to_its_run_too(seen, demo, tmp_path):
    seen.export(tmp_path, figures=("overview",))
    seen.export(tmp_path, figures=("overview",))
    for other, how, says in (
        (attnscope.capture(demo, CAT), {}, f"text was .* now {CAT!r}"),
        (seen, {"style": attnscope.Style(scale="log")}, "scale was 'auto', now 'log'"),
        (seen, {"figures": ("layers",)}, r"figures was \['overview'\], now \['layers'\]"),
        (attnscope.capture(attnscope.wrap(demo.model, demo.tokenizer, "mine"), STORY), {}, "model was 'demo', now"),
    ):
        with pytest.raises(UsageError, match=rf"{says}.*force=True$"):
            other.export(tmp_path, **{"figures": ("overview",)} | how)
    seen.export(tmp_path, figures=("layers",), force=True)
    assert "overview.png" not in listed(tmp_path)


OF_OLD = {"figures": ["overview", "layers", "heads", "metrics"], "heads": ["L2H1", "L1H5"]}  # by default, and drawn


def made_old(folder: Path) -> set[str]:
    """Let the manifest say what an older version drew by default; the files that there are more than this one's."""
    layer = folder / "layers" / "L00.png"
    layer.parent.mkdir()
    layer.write_bytes(b"a picture of then")
    manifest = said(folder)
    manifest["export"] |= OF_OLD
    manifest["files"]["layers/L00.png"] = hashlib.sha256(layer.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return {"layers/L00.png"}


def test_what_is_drawn_by_default_tells_no_runs_apart():
    """A command says all of it by its options; a call of Python is another where it names figures or heads."""
    now = {"figures": list(DEFAULT), "heads": ["L3H0"], "dpi": 120}
    for options, before, after, differs in (
        ({"top": 1}, OF_OLD, now, []),
        ({}, OF_OLD | {"dpi": 120}, now, []),
        ({}, OF_OLD | {"dpi": 90}, now, ["dpi was 90, now 120"]),
        ({}, now | {"heads": ["L2H1"]}, now, ["heads was ['L2H1'], now ['L3H0']"]),
        ({}, now, now | {"figures": ["overview"]}, ["figures was ['overview', 'top', 'heads'], now ['overview']"]),
    ):
        assert differences({"options": options, "export": before}, {"options": options, "export": after}) == differs
    assert differences({"options": {"top": 1}}, {"options": {"top": 2}, "export": now}) == ["top was 1, now 2"]


@pytest.mark.e2e
@pytest.mark.parametrize("again", [("heads", CAT), ("heads", "{out}")], ids=["typed again", "repeated"])
def test_a_folder_with_the_figures_of_older_defaults_is_updated_by_its_command(tmp_path, again):
    out = tmp_path / "out"
    drawn = ("-s", "0.0", "--set", "dpi=20", "-o", str(out), "-q")
    call("heads", CAT, *drawn).ok()
    files = listed(out)
    older = made_old(out)
    assert older | files == listed(out)
    call(*(word.format(out=out) for word in again), *drawn).ok()
    assert listed(out) == files
    refused = call("heads", CAT, *drawn, "--figures", "overview")
    assert (refused.code, "figures was not given, now 'overview'" in refused.err) == (2, True)


@pytest.mark.e2e
def test_a_folder_with_the_figures_of_older_defaults_is_updated_from_python(seen, tmp_path):
    named = {"heads": ["L0H0"], "top": 1}
    seen.export(tmp_path, style=attnscope.Style(dpi=20), **named)
    files = listed(tmp_path)
    made_old(tmp_path)
    with pytest.raises(UsageError, match="dpi was 20, now 30"):
        seen.export(tmp_path, style=attnscope.Style(dpi=30), **named)
    with pytest.raises(UsageError, match="figures was"):
        seen.export(tmp_path, style=attnscope.Style(dpi=20), figures=("overview",), **named)
    seen.export(tmp_path, style=attnscope.Style(dpi=20), **named)
    assert listed(tmp_path) == files


def test_a_run_of_an_older_version_is_refused_and_can_be_written_over(seen, tmp_path):
    seen.export(tmp_path, figures=("overview",))
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(said(tmp_path) | {"schema": "run/2"}))
    with pytest.raises(UsageError, match=r"'run/2', .*'run/4'; .*force=True$"):
        seen.export(tmp_path, figures=("layers",))
    seen.export(tmp_path, figures=("layers",), force=True)
    assert said(tmp_path)["schema"] == "run/4"
    assert "overview.png" not in listed(tmp_path)


@pytest.mark.parametrize("by_kv", [pytest.param(False, marks=pytest.mark.e2e), True])
@pytest.mark.parametrize("image", ["png", *(pytest.param(image, marks=pytest.mark.e2e) for image in ("svg", "pdf"))])
def test_every_file_that_an_export_writes_is_known_as_one(demo, tmp_path, image, by_kv):
    small = attnscope.wrap(tiny_model("llama", num_hidden_layers=1, vocab_size=2000), demo.tokenizer)
    request = attnscope.Request(view=attnscope.View(by_kv=by_kv), relations=True, maps="all", rollout="tokens")
    seen = attnscope.capture(small, "the bank", request=request)
    seen.export(tmp_path, style=attnscope.Style(image=image), heads=[], figures=(*FIGURES, "top"))
    pictures = {f"{kind}.{image}" for kind in ("rollout", "metrics", "overview", "top")}
    assert pictures | {"rollout.csv"} < listed(tmp_path)


@pytest.mark.parametrize("image", get_args(ImageFormat))
def test_a_picture_of_every_format_is_known_as_one(image):
    assert OURS.fullmatch(f"layers/L00.{image}")


@pytest.mark.parametrize(("named", "drawn"), [pytest.param((), 8, marks=pytest.mark.e2e), (("heads",), 24)])
def test_the_heads_drawn_by_default_are_those_of_the_command(demo, tmp_path, named, drawn):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    kinds = {"figures": named} if named else {}
    attnscope.capture(demo, "the bank").export(ours, **kinds)
    options = ("--figures", ",".join(named)) if named else ()
    call("heads", "--text", "the bank", *options, "--out", str(theirs), "-q").ok()
    assert listed(ours) == listed(theirs)
    assert len([name for name in listed(ours) if name.startswith("heads/")]) == drawn
    assert files_of(ours)["heads.csv"] == files_of(theirs)["heads.csv"]


# repeated


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, so that what is said has short paths in it: a long one is cut."""
    monkeypatch.chdir(tmp_path)


STYLED = [word for setting in ("scale=log", "sink=mask", "annotate=true", "bin=max") for word in ("--set", setting)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("heads", STORY, "--top", "2", "--sort", "entropy", "--by", "kv", "--group", "words", "-s", "1.0-1", *ONE_KIND),
        ("draw", "日本 \u00e9 {~}", *STYLED, "-s", "3.0", *ONE_KIND),
        ("relations", STORY * 60, "--truncate", "left", "--top-k", "1", "-s", "1.2"),
        ("relations", CAT, "--chat", "-s", "last"),
        ("relations", f"🎉 {STORY}", "--top-k", "all", "--min-weight", "0.2", "--weights", "scores"),
        ("rollout", "an internationalisation of", "--group", "words"),
        ("heads", "the cat", "--image", "svg", "--top", "all", "--select", "1.0", *ONE_KIND),
        (
            "heads",
            "--ids",
            "{ids}",
            "--engine",
            "fused",
            "--top",
            "1",
            "--set",
            "spreadsheet=true",
            "-s",
            "0.0",
            *ONE_KIND,
        ),
        ("heads", CAT, "--query", "-1", "--key", "beast,first", "--define", "beast=cat", "-s", "0.0", *ONE_KIND),
        pytest.param(
            ("heads", STORY * 60, "--truncate", "left", "--set", "bin=max", "-s", "1.2"), marks=pytest.mark.e2e
        ),
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_a_run_is_repeated_from_its_manifest(here, arguments):
    Path("ids").write_text("0,423,1919 269")
    first, second = Path("first"), Path("second")
    asked = (one.format(ids="ids") if "ids" in one else one for one in arguments)
    result = call(*asked, "-o", str(first)).ok()
    again = call(arguments[0], "--from", str(first / "manifest.json"), "-o", str(second)).ok()
    assert again.err.splitlines()[0] == f"settings from {first / 'manifest.json'}"
    assert again.out.replace(b"second", b"first") == result.out
    here, there = files_of(first), files_of(second)
    manifests = [json.loads(found.pop("manifest.json")) for found in (here, there)]
    assert here == there
    for manifest in manifests:
        del manifest["options"]["out"], manifest["options"]["ids"]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ("relations", "--ids", "{ids}", "--top-k", "all", "--weights", "scores"),
        ("relations", CAT, "--chat", "--query", "-1", "--define", "beast=cat", "--key", "beast"),
        ("heads", CAT, "--by", "kv", "--top", "1", "-s", "0.0-1", *STYLED, *ONE_KIND),
    ],
    ids=["ids", "text", "pictures"],
)
def test_a_repeated_run_is_still_that_run(tmp_path, arguments):
    (tmp_path / "ids").write_text("0,423,1919 269")
    out = tmp_path / "out"
    call(*(one.format(ids=tmp_path / "ids") for one in arguments), "-o", str(out), "-q").ok()
    before = files_of(out)
    call(arguments[0], "--from", str(out / "manifest.json"), "-o", str(out), "-q").ok()
    assert files_of(out).keys() == before.keys()


@pytest.mark.parametrize(
    "arguments",
    [
        ("heads", "--query", "last", "--key", "boat", "-s", "1.*,3.0", "--group", "words", "--top-k", "2"),
        ("heads", "--by", "kv", "--engine", "fused", "--metrics", "entropy,focus", "-s", "1"),
        ("relations", "--weights", "scores", "--top-k", "all", "--chat"),
        ("rollout", "--group", "words", "--top-k", "all"),
        ("heads", "--answer", " in the sun"),
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_the_ask_of_a_manifest_gives_the_same_tables(tmp_path, demo, arguments):
    first, second = tmp_path / "first", tmp_path / "second"
    drawn = ONE_KIND if arguments[0] == "heads" else ()
    call(*arguments, "--text", STORY, "--top", "1", *drawn, "-o", str(first), "-q").ok()
    Capture.made_of(read(demo, ask_of(first / "manifest.json"))).export(second, figures=())
    hashes = [{name: one for name, one in said(run)["files"].items() if "csv" in name} for run in (first, second)]
    assert hashes[0] == hashes[1] != {}
    assert (said(first)["ask"], said(first)["prompt"]) == (said(second)["ask"], said(second)["prompt"])


def test_the_ask_of_a_target(tmp_path, demo):
    model = attnscope.wrap(tiny("t5", vocab_size=2000, decoder_start_token_id=0), demo.tokenizer)
    seen = attnscope.capture(model, STORY, target="the old boat")
    seen.export(tmp_path, figures=())
    again = read(model, ask_of(tmp_path / "manifest.json"))
    assert (again.queries, again.prompt) == (seen.queries, seen.prompt)
    assert again.table().equals(seen.table())


def test_a_hostile_ask_is_refused(seen, tmp_path):
    seen.export(tmp_path, figures=())
    path = tmp_path / "manifest.json"
    whole = said(tmp_path)
    for ask in (None, [], {}, whole["ask"] | {"engine": 3}, whole["ask"] | {"keep": {"top_k": "many"}}):
        path.write_text(json.dumps(whole | {"ask": ask}))
        with pytest.raises(UsageError, match="expected"):
            ask_of(path)


def test_options_beside_from_win_and_are_said(here):
    asked = ("--text", STORY, "--top", "2", "--sort", "entropy", "-s", "1.0-1", *ONE_KIND)
    call("heads", *asked, "-o", "a", "-q").ok()
    manifest = "a/manifest.json"
    again = call("heads", "--from", manifest, "--text", CAT, "--top", "2", "--sort", "focus", "-o", "b")
    assert again.err.splitlines()[0] == f"settings from {manifest}; changed here: --text, --sort"
    changed = said(Path("b"))
    assert (changed["prompt"]["text"], changed["options"]["top"], changed["options"]["sort"]) == (CAT, "2", "focus")
    assert call("relations", "--from", manifest, "-q").err == ""


def test_a_repeated_run_is_allowed_nothing_and_writes_nowhere_by_itself(tmp_path, monkeypatch):
    out = tmp_path / "a"
    call("relations", "--text", STORY, "-o", str(out), "-q").ok()
    before, manifest = files_of(out), said(out)
    manifest["options"] |= {"trust_remote_code": True, "allow_pickle": True, "out": str(tmp_path / "elsewhere")}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    asked = []
    monkeypatch.setattr("attnscope.model.loading.load", lambda options: asked.append(options) or 1 / 0)
    call("relations", "--from", str(tmp_path / "manifest.json"), "-q")
    assert (asked[0].trust_remote_code, asked[0].allow_pickle) == (False, False)
    assert not (tmp_path / "elsewhere").exists()
    assert files_of(out) == before


HALF = {"text": "a", "ids": [0], "special": [False], "turns": [], "removed": 0}
HALF |= {name: ["\ud800"] for name in ("tokens", "labels", "plain")}
HOSTILE = [
    ({"schema": "run/2"}, 2, "'run/2', expected 'run/4'; "),
    ({"prompt": None}, 2, "does not say which tokens were read"),
    ({"prompt": {}}, 2, "which tokens"),
    ({"prompt": HALF}, 2, "which tokens"),
    ({"prompt": {"ids": ["a"]}}, 2, "which tokens"),
    ({"options": []}, 2, "lacks the model or the options of a run"),
    ({"options": {"top": "many"}}, 2, "top: expected a number from 1, or all, got 'many'"),
    ({"options": {"top": -1}}, 2, "top: expected a number from 1, or all, got '-1'"),
    ({"options": {"top_k": "²"}}, 2, "--top-k: expected a number from 1, or all, got '²'"),
    ({"options": {"device": {"a": 1}}}, 2, "device: expected text, got {'a': 1}"),
    ({"options": {"annotate": "si"}}, 2, "annotate: expected true or false"),
    ({"options": {"sort": "no"}}, 2, "no metric is called 'no'"),
    ({"options": {"model": "./no"}}, 3, "there is no folder ./no"),
    ({"model": None}, 2, "the model or the options"),
]


@pytest.mark.parametrize(("change", "code", "says"), HOSTILE)
def test_a_hostile_manifest_is_refused_in_one_line(seen, tmp_path, change, code, says):
    seen.export(tmp_path, figures=())
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(said(tmp_path) | change))
    result = call("heads", "--from", str(path), "-q")
    assert (result.code, result.out, result.err.count("\n")) == (code, b"", 1), result.err
    assert says in result.err


@pytest.fixture(scope="module")
def of_two(demo, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Prompt]:
    """The manifest of a run of two ids, as text, and what it read."""
    out = tmp_path_factory.mktemp("two")
    seen = attnscope.capture(demo, [0, 423])
    seen.export(out, figures=())
    return (out / "manifest.json").read_text(encoding="utf-8"), seen.prompt


@pytest.mark.parametrize(
    "change",
    [{"ids": [0, 5000]}, {"ids": [0, -1]}, {"ids": [0, 10**30]}],
)
def test_tokens_that_the_model_does_not_know(of_two, tmp_path, change):
    manifest = json.loads(of_two[0])
    manifest["prompt"] |= change
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    result = call("heads", "--from", str(tmp_path / "manifest.json"), "-q")
    assert (result.code, result.err.count("\n")) == (4, 1)
    assert " 2000 ids" in result.err


@pytest.mark.parametrize("name", ["tokens", "labels", "special", "plain", "ids"])
@pytest.mark.parametrize("value", [[], ["a"], [None, None], "ab", 7, [[], []]])
def test_columns_that_do_not_fit_are_refused(of_two, tmp_path, name, value):
    manifest = json.loads(of_two[0])
    assert prompt_of(manifest, tmp_path).ids == (0, 423)
    manifest["prompt"][name] = value
    with pytest.raises(UsageError, match="which tokens"):
        prompt_of(manifest, tmp_path)


WRONG = ["ab", 7, ["a"], [None, None], [[], []], [[0, 3]], [[0, 3], [3]], [[0, 3], [3, 99]], [[2, 3], [0, 1]]]


@pytest.mark.parametrize("value", [*WRONG, [[0, 3], [3, 2]], [[0, 3], [3, True]]])
def test_characters_that_do_not_fit_are_refused_and_missing_ones_found(of_two, tmp_path, value):
    whole, read_before = of_two
    manifest = json.loads(whole)
    del manifest["prompt"]["characters"]
    assert prompt_of(manifest, tmp_path) == read_before
    manifest["prompt"]["characters"] = value
    with pytest.raises(UsageError, match="which tokens"):
        prompt_of(manifest, tmp_path)


@pytest.fixture(scope="module")
def of_ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that others are made of; nothing writes to it."""
    run = tmp_path_factory.mktemp("ids") / "a run"
    call("heads", "--ids", "-", "--by", "kv", "-s", "1.0", "-o", str(run), "-q", stdin=b"0 423 1919").ok()
    return run


@pytest.mark.parametrize("command", ["heads", "relations", "keys", "rollout"])
def test_a_folder_in_the_place_of_the_text_is_the_run_in_it(of_ids, command):
    run = of_ids
    expected = call(command, "--from", str(run / "manifest.json"))
    assert (expected.code, bool(expected.out)) == (0, True)
    assert expected.err.splitlines()[0] == f"settings from {run / 'manifest.json'}"
    assert call(command, str(run)) == call(command, f"{run}/") == call(command, "--from", str(run)) == expected


def test_what_is_given_beside_a_folder_wins(here):
    call("heads", STORY, "--top-k", "2", "--figures", "overview", "-o", "a", "-q").ok()
    run, manifest = "a", "a/manifest.json"
    result = call("relations", run, "--query", "last", "--top-k", "1")
    assert result.err.splitlines()[0] == f"settings from {manifest}; changed here: --query, --top-k"
    assert result.out == call("relations", STORY, "--query", "last", "--top-k", "1", "-q").out
    result = call("relations", run, "--text", CAT)
    assert result.err.splitlines()[0] == f"settings from {manifest}; changed here: --text"
    assert result.out == call("relations", CAT, "--top-k", "2", "-q").out
    Path("run.yaml").write_text(f"text: {CAT}\n")  # which stands behind what the command line names
    result = call("relations", run, "--config", "run.yaml", "-q")
    assert result.out == call("relations", STORY, "--top-k", "2", "-q").out


def test_the_pictures_of_a_run_that_drew_none(tmp_path):
    run, drawn = tmp_path / "a", tmp_path / "b"
    call("relations", STORY, "-s", "1.0", "-o", str(run), "-q").ok()
    call("draw", "--from", str(run), *ONE_KIND, "-o", str(drawn), "-q").ok()
    assert "heads/L01H00.png" in listed(drawn)
    assert call("draw", "--from", str(run), "-o", str(run), "-q").code == 2  # two runs, one folder


def test_folders_that_are_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{}")
    for arguments, says in (
        (("heads", "empty"), "TEXT is the name of a folder without manifest.json: empty; name the"),
        (("relations", "empty", "--query", "last"), "or --text empty reads the name"),
        (("heads", "broken"), "broken/manifest.json is not a manifest of attnscope, or is damaged"),
        (("heads", "--from", "empty"), "empty/manifest.json cannot be read: No such file or directory"),
        (("heads", "broken", "--from", "empty"), "two runs were named, broken and empty; name one of them"),
        (("parity", "broken"), "TEXT is the name of a folder, broken; --text broken reads the name"),
        (("explain", "broken", "--head", "0.0"), "TEXT is the name of a folder, broken"),
    ):
        result = call(*arguments)
        assert (result.code, result.out, result.err.count("\n")) == (2, b"", 1), result.err
        assert says in result.err
    call("heads", "--text", "empty", "-q").ok()


def test_from_names_a_manifest(tmp_path):
    result = call("heads", "--from", str(tmp_path / "absent.json"))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "absent.json cannot be read: No such file" in result.err


# token ids


def test_ids_are_read_as_they_are(demo, tmp_path):
    """Random ids, most of which decode to a text that encodes to others."""
    pick, changed = random.Random(0), 0
    for number in range(5):  # five ways to write them
        ids = [pick.randrange(2000) for _ in range(12)]
        changed += demo.tokenizer(demo.tokenizer.decode(ids))["input_ids"] != ids
        (tmp_path / "ids").write_text((" ".join, ",".join, "\n".join, ", ".join, str)[number](map(str, ids)))
        if number == 4:
            (tmp_path / "ids").write_text(json.dumps(ids))
        result = call("relations", "--ids", str(tmp_path / "ids"), "-q")
        buffer = io.BytesIO()
        write(attnscope.capture(demo, ids).relations(), buffer, "csv")
        assert (result.code, result.out) == (0, buffer.getvalue())
    assert changed >= 4


@pytest.mark.parametrize("command", ["heads", "relations", "rollout", "parity", "explain"])
def test_every_command_of_one_text_takes_ids(command):
    more = ("--head", "1.0") if command == "explain" else ()
    result = call(command, "--ids", "-", *more, "-q", stdin=b"[0, 423, 1919, 269]\n")
    assert (result.code, bool(result.out)) == (0, True), result.err


WRONG = [
    ("0 2000", "token 1 has the id 2000, and the vocabulary has 2000 ids; give ids from 0 to 1999"),
    ("0 -1", "token 1 has the id -1"),
    ("0 the", "'the' in standard input is not a token id; give whole numbers"),
    ("1.5", "'1.5' in standard input"),
    ("[[1]]", "'[1]' in standard input"),
    ("[1, 2", "'[1' in standard input"),
    ("²", "'²' in standard input"),
    ("9" * 5000, "is not a token id"),
    ("", "standard input holds no token ids"),
    ("[]", "no token ids"),
    ("0 " * 513, "513 tokens"),
]


@pytest.mark.parametrize(("ids", "says"), WRONG, ids=[ids[:9] for ids, _ in WRONG])
def test_wrong_ids_are_one_line(ids, says):
    result = call("heads", "--ids", "-", "-q", stdin=ids.encode())
    assert (result.code, result.out, result.err.count("\n")) == (4, b"", 1)
    assert says in result.err


def test_ids_go_with_no_text_and_no_template(tmp_path):
    for other, says in ((("--text", "a"), "--text and --ids were both given"), (("--chat",), "--chat needs a text")):
        result = call("heads", "--ids", "-", *other)
        assert (result.code, says in result.err) == (2, True)
    (tmp_path / "run.yaml").write_text("text: the bank\n")
    result = call("relations", "--config", str(tmp_path / "run.yaml"), "--ids", "-", "-q", stdin=b"0 1").ok()


# tables


@pytest.mark.e2e
def test_no_cell_of_a_table_for_spreadsheets_is_a_formula(tmp_path):
    text = "=1+2 @home -3 +4 the bank"
    for command, format in (("heads", "csv"), ("relations", "csv"), ("relations", "tsv")):
        out = tmp_path / f"{command}-{format}"
        plain = call(command, "--text", text, "--format", format, "-q")
        files = ("-o", str(out), *(ONE_KIND if command == "heads" else ()))
        safe = call(command, "--text", text, "--format", format, "--set", "spreadsheet=true", *files, "-q").ok()
        written = [path.read_text(encoding="utf-8") for path in out.glob("*.csv")]
        for table in [safe.out.decode(), *written]:
            rows = list(
                csv.reader(
                    io.StringIO(table), delimiter="\t" if table == safe.out.decode() and format == "tsv" else ","
                )
            )
            texts = [cell for row in rows[1:] for cell in row if not _is_number(cell)]
            assert not [cell for cell in texts if cell.lstrip(" \n").startswith(FORMULA_STARTS) and cell != "-"]
        assert safe.out.replace(b"'", b"") == plain.out.replace(b"'", b"")
    assert b"'=" in call("relations", "--text", text, "--set", "spreadsheet=true", "-q").out
    result = call("relations", "--text", text, "--set", "spreadsheet=true", "--format", "jsonl")
    assert (result.code, "csv and tsv" in result.err) == (2, True)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def test_tamed_cells_keep_their_nulls(tmp_path):
    table = as_table({"query_token": ["=1", None, "a"], "role": ["-", "sink", None], "n": [1, 2, None]})
    assert escape_formulas(table).to_pylist() == [
        {"query_token": "'=1", "role": "'-", "n": 1},
        {"query_token": None, "role": "sink", "n": 2},
        {"query_token": "a", "role": None, "n": None},
    ]
    path = save(table, tmp_path / "a.csv", spreadsheet=True)
    assert path.read_text() == "query_token,role,n\n'=1,'-,1\n,sink,2\na,,\n"


@pytest.mark.parametrize("command", ["heads", "relations", "rollout"])
def test_top_all_shows_every_row(command, tmp_path):
    arguments = (command, "--text", "the old river bank", "--format", "table", "-q")
    most, few = call(*arguments, "--top", "all").out, call(*arguments, "--top", "3").out
    everything = call(*arguments, "--top", "9999999").out
    assert few.count(b"\n") < most.count(b"\n") == everything.count(b"\n")
    (tmp_path / "run.yaml").write_text("top: all\n")
    assert call(*arguments, "--config", str(tmp_path / "run.yaml")).out == most


def test_a_run_of_one_token_is_read_again(tmp_path):
    (tmp_path / "ids").write_text("5")
    call("keys", "--ids", str(tmp_path / "ids"), "--out", str(tmp_path / "run"), "-q").ok()
    assert call("keys", str(tmp_path / "run"), "--format", "csv", "-q").ok().rows

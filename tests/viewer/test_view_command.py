"""`attnscope view`: from the shell to a file, of a text, two texts, two models, a run, its tables."""

import csv
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import attnscope
from attnscope.export.redraw import load_run, run_of_folder
from attnscope.model.loading import DEMO_FOLDER
from attnscope.observe.request import Request
from attnscope.viewer.page_data import Side
from helpers.atlases import made_atlas
from helpers.command_line import HANGS, SENTENCE, call, tree
from helpers.folders import saved
from helpers.forks import shim
from helpers.pages import BLOB, Read, read
from helpers.rows import csv_rows

ROOT = Path(attnscope.__file__).parents[1]
SWAPPED = "the river bank is located on financial bank"


def viewed(tmp_path: Path, *arguments: str) -> tuple[Read, str]:
    """The page of a command that works, and what was said."""
    out = tmp_path / "page.html"
    result = call("view", *arguments, "-o", str(out))
    assert (result.code, result.out) == (0, b""), result.err
    return read(out), result.err


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("run") / "bank"
    call("heads", "--text", SENTENCE, "--top-k", "3", "--figures", "depth", "--out", str(folder), "-q").ok()
    return folder


def weights_of(folder: Path) -> dict[tuple[int, int, int, int], float]:
    rows = csv_rows((folder / "relations.csv").read_bytes())
    return {(*(int(row[name]) for name in ("layer", "head", "query", "key")),): float(row["weight"]) for row in rows}


def test_a_page_of_a_text(tmp_path):
    page, talk = viewed(tmp_path, "--text", SENTENCE, "--query", "last", "--key", "8", "--define", "it=bank")
    assert page.said["format"] == "attnscope/page/2"
    assert SENTENCE in page.said["title"]
    assert page.said["asked"] == {
        "query": {"text": "last", "positions": [8]},
        "key": {"text": "8", "positions": [8]},
    }
    assert page.said["defined"] == {"it": {"positions": [3, 8]}}
    assert page.said["command"].startswith("attnscope view ")
    assert page.said["open"].startswith("view=token&")
    assert "&query=8&key=8" in page.said["open"]
    assert "wrote " in talk
    assert (page.said["units"], page.said["left_out"]) == (None, [])


def test_its_size_is_said_by_part_and_steps_can_be_left_out(tmp_path):
    page, talk = viewed(tmp_path, SENTENCE)
    side, lengths = page.said["sides"][0], [len(found) for _, found in BLOB.findall(page.html)]
    of = {"maps": side["maps"], "steps": side["steps"]["heads"]}
    sizes = {name: sum(lengths[blob] for blob in {one["blob"] for one in places}) for name, places in of.items()}
    sizes["page"] = len(page.html) - sum(sizes.values())
    [listed] = re.findall(r"\((.*?) MB: (.*?)\)", talk)
    told = dict(part.split() for part in listed[1].split(", "))
    assert listed[0] == f"{len(page.html) / 1e6:.2f}"
    assert told == {name: f"{size / 1e6:.2f}" for name, size in sizes.items() if size >= 5_000}
    assert next(iter(told)) == "steps"
    bare, said = viewed(tmp_path, SENTENCE, "--set", "steps=false")
    assert (bare.said["sides"][0]["steps"], "steps" in said) == (None, False)
    assert len(page.html) - len(bare.html) > sizes["steps"]
    assert {entry["bits"] for entry in side["maps"]} == {16}  # beside steps, as many digits as they have
    assert {entry["bits"] for entry in bare.said["sides"][0]["maps"]} == {8}


def test_where_it_opens(tmp_path):
    assert viewed(tmp_path, SENTENCE)[0].said["open"].startswith("view=model&at=")
    assert viewed(tmp_path, SENTENCE, "--select", "L1H4,3")[0].said["open"] == "view=head&at=1&head=4"
    assert viewed(tmp_path, SENTENCE, "--query", "last", "--key", "bank")[0].said["open"].endswith("&query=8&key=3")


def test_to_stdout_comes_the_page_alone():
    result = call("view", SENTENCE, "-o", "-", "-q").silent()
    assert result.out.startswith(b"<!doctype html>")
    assert len(Read(result.out).maps()) == 24


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_the_pages_weights_are_those_of_the_relations(tmp_path, engine):
    folder = tmp_path / "all"
    listed = ("relations", "--text", SENTENCE, "--top-k", "all", "--engine", engine)
    call(*listed, "--out", str(folder), "-q").ok()
    page, _ = viewed(tmp_path, "--text", SENTENCE, "--engine", engine, "--precision", "16")
    maps, expected = page.maps(), weights_of(folder)
    assert len(expected) == 24 * 45
    for (layer, head, query, key), weight in expected.items():
        assert maps[layer, head][query, key] == pytest.approx(weight, abs=0.6 / 65535)  # half a step, and rounding


def test_what_an_atlas_names_stands_beside_the_role(tmp_path, demo, demo_without_atlas):
    atlas, run = tmp_path / "atlas", tmp_path / "run"
    roles = {(3, 0): ["induction", "sink"], (1, 5): ["previous-token"]}
    made_atlas(DEMO_FOLDER, roles).save(atlas)
    asked = Request(relations=True, top_k=1)
    attnscope.capture(demo, SENTENCE, atlas=atlas, request=asked).export(run, figures=())
    for arguments in ((SENTENCE, "--atlas", str(atlas)), (str(run), "--from-tables")):
        [side] = viewed(tmp_path, *arguments)[0].said["sides"]
        named = {(side["layers"][one["at"]]["layer"], one["head"]): one["atlas"] for one in side["heads"]}
        assert len(named) == 24
        assert {place: found for place, found in named.items() if found} == roles
    [side] = viewed(tmp_path, SENTENCE, "--model", demo_without_atlas)[0].said["sides"]
    assert not any("atlas" in one for one in side["heads"])


def of_run_3(run: Path, folder: Path, named: bool) -> Path:
    """A run as the version before wrote it: `role` is the text's, `atlas_roles` come with an atlas alone, and late."""
    folder.mkdir()
    said = json.loads((run / "manifest.json").read_text()) | {"schema": "run/3"}
    (folder / "manifest.json").write_text(json.dumps(said | ({} if named else {"atlas": None})))
    rows = [
        {**row, "role": "local", "stack": row.pop("stack")} | ({"atlas_roles": row["atlas_roles"]} if named else {})
        for row in csv_rows((run / "heads.csv").read_bytes())
    ]
    names = [name for name in rows[0] if name != "text_role" and (named or name != "atlas_roles")]
    with open(folder / "heads.csv", "w", newline="") as stream:
        writer = csv.DictWriter(stream, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return folder


def test_a_run_of_the_version_before_is_read_with_the_same_words(tmp_path, run):
    old, bare = of_run_3(run, tmp_path / "old", True), of_run_3(run, tmp_path / "bare", False)
    now, before, plain = (Side(run_of_folder(folder)).said["heads"] for folder in (run, old, bare))
    assert [one["role"] for one in before] == [one["role"] for one in now]
    assert [one["atlas"] for one in before] == [one["atlas"] for one in now]
    assert {one["text_role"] for one in (*before, *plain)} == {"local"}
    assert {(one["role"], one.get("atlas")) for one in plain} == {("local", None)}
    assert load_run(old).columns.role.tolist() == load_run(run).columns.role.tolist()
    assert set(load_run(bare).columns.role) == {"local"}
    viewed(tmp_path, str(old), "--from-tables")
    assert call("relations", "--from", str(old / "manifest.json"), "-q").ok().rows
    refused = call("heads", "--text", SENTENCE, "--out", str(old), "-q")
    assert (refused.code, "'run/3', expected 'run/4'" in refused.err) == (2, True)


def test_two_texts_beside_each_other(tmp_path):
    page, _ = viewed(tmp_path, "--text", SENTENCE, "--compare-text", SWAPPED)
    one, other = page.said["sides"]
    assert (one["text"], other["text"]) == (f"<s>{SENTENCE}", f"<s>{SWAPPED}")
    assert page.said["units"] == dict.fromkeys(("tokens", "words"), [list(range(9))] * 2)
    assert page.maps(0).keys() == page.maps(1).keys()
    assert not np.allclose(page.maps(0)[1, 4], page.maps(1)[1, 4], atol=0.01)
    assert f"{SENTENCE}” | demo: “{SWAPPED}" in page.said["title"]


def test_two_models_beside_each_other(tmp_path):
    other = saved(tmp_path / "other", vocab_size=2000)
    page, talk = viewed(tmp_path, "--text", SENTENCE, "--compare-model", str(other))
    assert [side["model"]["layers"] for side in page.said["sides"]] == [4, 4]
    assert [len(side["heads"]) for side in page.said["sides"]] == [24, 16]
    assert [of[0] for of in page.said["units"]["tokens"]] == [0, 0]
    assert {(one["at"], one["head"]) for one in page.said["divergences"]} == {
        (at, head) for at in range(4) for head in range(4)
    }  # that both have
    assert talk.count("engine eager") == 2


def test_a_runs_folder_is_read_again_with_its_model(tmp_path, run):
    page, talk = viewed(tmp_path, str(run))
    again, _ = viewed(tmp_path, "--from", str(run / "manifest.json"))
    assert page.said["sides"] == again.said["sides"]
    assert len(page.maps()) == 24
    assert talk.startswith(f"settings from {run / 'manifest.json'}\n")
    beside, talk = viewed(tmp_path, str(run), "--precision", "16", "--compare-text", SWAPPED)
    assert len(beside.said["sides"]) == 2
    assert "TEXT" not in talk.splitlines()[0]


def test_the_tables_of_a_run_make_a_page_without_its_model(tmp_path, run, monkeypatch):
    monkeypatch.setattr("attnscope.model.loading.load", None)
    page, talk = viewed(tmp_path, str(run), "--from-tables")
    [side] = page.said["sides"]
    assert "24 of 24 heads, with the 3 strongest keys" in talk
    assert (side["maps"], side["steps"], page.said["open"]) == ([], None, "view=metrics&at=2&head=1")
    rows = {(int(row["layer"]), int(row["head"])): row for row in csv_rows((run / "heads.csv").read_bytes())}
    ids = [metric["id"] for metric in side["metrics"]]
    for one in side["heads"]:
        row = rows[side["layers"][one["at"]]["layer"], one["head"]]
        assert one["role"] == row["role"]
        assert one["scores"] == pytest.approx([float(row[name]) for name in ids], rel=1e-6)
    found = {
        (at, head, query, int(key)): weight
        for (at, head), (keys, weights) in page.relations().items()
        for query in range(9)
        for key, weight in zip(keys[query], weights[query], strict=True)
        if key >= 0
    }
    expected = weights_of(run)
    assert found == pytest.approx(expected, abs=0.51 / 65535)


def test_tables_with_every_key_make_maps(tmp_path):
    """Of a text with more keys than a page without maps would keep of a query."""
    folder = tmp_path / "all"
    text = " ".join([SENTENCE, SWAPPED] * 2)
    call("relations", "--text", text, "--top-k", "all", "--out", str(folder), "-q").ok()
    page, _ = viewed(tmp_path, str(folder), "--from-tables")
    maps = page.maps()
    assert len(maps) == 24
    for (layer, head, query, key), weight in weights_of(folder).items():
        assert maps[layer, head][query, key] == pytest.approx(weight, abs=0.51 / 65535)


def test_tables_keep_every_key_that_they_list(tmp_path):
    """Also where a query has more of them than a page of the model would keep."""
    text = " ".join([SENTENCE, SWAPPED] * 2)
    call("relations", "--text", text, "--top-k", "20", "--out", str(tmp_path / "run"), "-q").ok()
    page, _ = viewed(tmp_path, str(tmp_path / "run"), "--from-tables")
    assert (page.maps(), page.said["sides"][0]["relations"]["k"]) == ({}, 20)


def test_what_is_left_out_is_said_on_stderr_and_in_the_page(tmp_path):
    long = " ".join([SENTENCE, SWAPPED] * 24)
    page, talk = viewed(tmp_path, long, "--max-mb", "0.2", "--select", "2.1")
    assert [entry["bin"] for entry in page.said["sides"][0]["maps"]].count(1) == 1
    assert len(page.said["left_out"]) == 1
    for sentence in page.said["left_out"]:
        assert sentence in talk
    assert "23 of 24 heads" in talk


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((SENTENCE,), "--out FILE, or - for stdout"),
        ((SENTENCE, "-o", "{folder}"), "is a folder, expected a file"),
        ((SENTENCE, "-o", "{folder}/page"), "/page: expected a file in .html; name one: "),
        ((SENTENCE, "-o", "/dev/null/page.html"), "cannot write to /dev/null"),
        ((SENTENCE, "-o", "x.html", "--precision", "12"), "--precision: expected 8 or 16"),
        ((SENTENCE, "-o", "x.html", "--max-mb", "0"), "--max-mb: expected a number from 0.1"),
        ((SENTENCE, "-o", "x.html", "--max-mb", "nan"), "--max-mb"),
        ((SENTENCE, "-o", "x.html", "--select", "9"), "'9' names layer 9"),
        ((SENTENCE, "-o", "x.html", "--compare-text", "a", "--compare-model", "demo"), "were both given"),
        ((SENTENCE, "-o", "x.html", "--from-tables"), "--from-tables needs the folder of a run"),
        (("-o", "x.html", "--from", "{folder}/manifest.json"), "cannot be read"),
        ((SENTENCE, "-o", "x.html", "--key", "zebra"), "zebra"),
    ],
)
def test_what_cannot_be_meant(tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    result = call("view", *(one.format(folder=tmp_path) for one in arguments))
    assert result.code in (2, 4)
    assert result.out == b""
    assert says in result.err
    assert tree(tmp_path) == before


DAMAGE = {
    "a number is a word": ("relations.csv", "0,0,0,1,", "0,0,0,one,"),
    "a query is not there": ("relations.csv", "0,0,0,1,", "0,0,0,99,"),
    "a head is empty": ("relations.csv", "0,0,0,1,", "0,,0,1,"),
    "a query is below 0": ("relations.csv", "0,0,0,1,", "0,0,0,-1,"),
    "a column is gone": ("relations.csv", "query,", "quary,"),
    "a score is a word": ("heads.csv", "2,1,0,previous-token,", "2,one,0,previous-token,"),
    "not text": ("heads.csv", "layer", "\0layer"),
}


@pytest.mark.parametrize(("name", "old", "new"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_tables_are_refused_in_one_line(tmp_path, run, name, old, new):
    folder = tmp_path / "run"
    folder.mkdir()
    for file in ("manifest.json", "heads.csv", "relations.csv"):
        (folder / file).write_bytes((run / file).read_bytes())
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))
    result = call("view", str(folder), "--from-tables", "-o", str(tmp_path / "x.html"))
    assert (result.code, result.out, result.err.count("\n")) == (2, b"", 2)  # "settings from ...", and the error
    assert f"{folder / name} is damaged" in result.err
    assert not (tmp_path / "x.html").exists()


def test_a_column_that_stands_twice_is_damage(tmp_path, run):
    folder = shutil.copytree(run, tmp_path / "run")
    lines = (folder / "heads.csv").read_text().splitlines()
    (folder / "heads.csv").write_text("\n".join(["layer," + lines[0], *(f"0,{line}" for line in lines[1:])]) + "\n")
    result = call("view", str(folder), "--from-tables", "-o", str(tmp_path / "x.html"))
    assert (result.code, result.out, result.err.count("\n")) == (2, b"", 2)
    assert "heads.csv is damaged" in result.err


def test_tables_whose_listing_has_no_room_are_refused_before_it_is_taken(tmp_path, run, monkeypatch):
    monkeypatch.setattr("attnscope.utils.memory.SURELY_FREE", 0)
    monkeypatch.setattr("attnscope.utils.memory.free_memory", lambda device: 1000)
    result = call("view", str(run), "--from-tables", "-o", str(tmp_path / "x.html"), "-q")
    assert (result.code, result.out) == (5, b"")
    assert "and this machine has 1000 bytes free" in result.err


@pytest.mark.e2e
def test_tables_that_do_not_fit_lose_keys(tmp_path):
    folder = tmp_path / "all"
    text = " ".join([SENTENCE, SWAPPED] * 8)
    call("relations", "--text", text, "--top-k", "all", "--out", str(folder), "-q").ok()
    page, talk = viewed(tmp_path, str(folder), "--from-tables", "--max-mb", "0.25")
    kept = page.said["sides"][0]["relations"]
    assert page.maps() == {}
    assert kept["k"] < 10
    assert f"with the {kept['k']} strongest keys" in talk
    weights = weights_of(folder)
    keys, found = page.relations()[2, 1]
    for query in range(len(keys)):
        row = [weights[2, 1, query, key] for key in range(query + 1)]
        best = sorted(row, reverse=True)[: kept["k"]]
        assert found[query][: len(best)] == pytest.approx(best, abs=0.6 / 65535)


def test_a_run_without_tables_and_one_of_kv_heads_are_refused(tmp_path, run):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "manifest.json").write_bytes((run / "manifest.json").read_bytes())
    result = call("view", str(empty), "--from-tables", "-o", str(tmp_path / "x.html"), "-q")
    assert (result.code, "has no table" in result.err) == (2, True)
    call("relations", SENTENCE, "--by", "kv", "--out", str(tmp_path / "kv"), "-q").ok()
    result = call("view", str(tmp_path / "kv"), "--from-tables", "-o", str(tmp_path / "x.html"), "-q")
    assert (result.code, "of means over kv heads" in result.err) == (2, True)


def test_tables_without_metrics_open_at_their_weights(tmp_path, run):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("manifest.json", "relations.csv"):
        (folder / name).write_bytes((run / name).read_bytes())
    page, _ = viewed(tmp_path, str(folder), "--from-tables")
    assert (page.said["sides"][0]["metrics"], page.said["open"]) == ([], "view=head&at=0&head=0")


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("heads.csv", ("layer", "head", "kv_head", "stack")),
        ("relations.csv", ("layer", "head", "kv_head", "query", "key", "stack")),
    ],
)
def test_tables_that_no_view_shows_are_refused(tmp_path, run, name, columns):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "manifest.json").write_bytes((run / "manifest.json").read_bytes())
    with open(folder / name, "w", encoding="utf-8") as new:
        writer = csv.DictWriter(new, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(csv_rows((run / name).read_bytes()))
    result = call("view", str(folder), "--from-tables", "-o", str(tmp_path / "x.html"), "-q")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert f"{folder} has neither " in result.err


def test_what_a_manifest_says_of_its_model_is_text_or_a_number(tmp_path, run):
    """The page writes them into a line, which a mapping that calls itself text ends."""
    folder = tmp_path / "run"
    folder.mkdir()
    said = json.loads((run / "manifest.json").read_text())
    said["model"] |= {"layers": {"toString": "x"}, "type": {"toString": "x"}}
    said |= {"dtype": {"toString": "x"}, "engine": ["eager"]}
    (folder / "manifest.json").write_text(json.dumps(said))
    (folder / "heads.csv").write_bytes((run / "heads.csv").read_bytes())
    page, _ = viewed(tmp_path, str(folder), "--from-tables")
    [side] = page.said["sides"]
    assert {type(one) for one in (*side["model"].values(), side["engine"], side["name"])} <= {str, int, type(None)}


def test_scores_that_are_no_numbers_are_null(tmp_path, run):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "manifest.json").write_bytes((run / "manifest.json").read_bytes())
    lines = (run / "heads.csv").read_text().splitlines()
    names, cells = lines[0].split(","), lines[1].split(",")
    last = names.index("stack")
    cells[last - 1], cells[last - 2] = "nan", "inf"
    (folder / "heads.csv").write_text("\n".join([lines[0], ",".join(cells)]) + "\n")
    page, _ = viewed(tmp_path, str(folder), "--from-tables")
    [head] = page.said["sides"][0]["heads"]
    assert head["scores"][-2:] == [None, None]
    assert json.loads(json.dumps(page.said))


@pytest.mark.e2e
def test_the_commands_of_the_document_run(tmp_path):
    """As they stand, one after the other: the last read what one before them wrote."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = re.findall(r"^    (attnscope .*)$", (ROOT / "docs" / "view.md").read_text(encoding="utf-8"), re.MULTILINE)
    environment = os.environ | {"PATH": f"{shim()}{os.pathsep}{os.environ['PATH']}"}
    for line in lines:
        command = ["bash", "-c", line]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS)
        assert done.returncode == 0, done.stderr
    pages = {path.name: read(path) for path in tmp_path.glob("*.html")}
    assert len(pages) == len(lines) - 1
    assert len(pages["tables.html"].maps()) == len(pages["cat.html"].maps()) == 24


def test_the_title_of_a_page_is_no_markup(tmp_path):
    call("view", "</title><b>the bank</b>", "-o", str(tmp_path / "x.html"), "-q").ok()
    head = (tmp_path / "x.html").read_text(encoding="utf-8").partition("<style>")[0]
    assert (head.count("</title>"), head.count("<b>")) == (1, 0)
    assert "&lt;/title&gt;&lt;b&gt;" in head

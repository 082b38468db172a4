"""An atlas beside a text: whose it is, what the table of heads says, and `--select @role` everywhere."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attnscope
from attnscope.api.captured import heads_html
from attnscope.cli.head_tables import heads_table
from attnscope.errors import InputError, UsageError
from attnscope.export.drawing import head_sheet, layer_maps
from attnscope.export.redraw import load_run, run_of_folder
from attnscope.model.checkpoint import weights_sha256
from attnscope.model.loading import DEMO_FOLDER, wrap
from attnscope.model.selection import CSA, DECODER, HCA, STACKS, resolve_roles, select
from attnscope.observe.atlas import atlas_of
from attnscope.utils.display import head_name
from attnscope.viewer.page_data import Side
from helpers.atlases import made_atlas
from helpers.command_line import call
from helpers.folders import saved
from helpers.rows import csv_rows

TEXT = "the cat sat on the mat"
ROLES = {(3, 0): ("induction", "sink"), (3, 1): ("induction",), (1, 5): ("previous-token",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of an atlas of the demo."""
    path = tmp_path_factory.mktemp("atlas")
    made_atlas(DEMO_FOLDER, ROLES).save(path)
    return path


@pytest.fixture
def own(tmp_path):
    """A copy of the demo with its atlas in it."""
    path = shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    made_atlas(path, ROLES).save(path / "atlas")
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model of the demo's shape with other weights."""
    shape = {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    return saved(tmp_path_factory.mktemp("other") / "model", vocab_size=2000, **shape)


# the grammar


NAMED = {"induction": {3: (0, 1)}, "previous-token": {1: (5,), 2: (1,)}, "self": {}}
HEADS = dict.fromkeys(range(4), 6)


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("@induction", {3: (0, 1)}),
        ("@previous-token, 0.2", {0: (2,), 1: (5,), 2: (1,)}),
        ("L3H5,@induction,@previous-token", {1: (5,), 2: (1,), 3: (0, 1, 5)}),
    ],
)
def test_roles_stand_for_their_heads(expression, found):
    assert select(expression, HEADS, NAMED) == found
    assert select(resolve_roles(expression, NAMED), HEADS) == found


@pytest.mark.parametrize(
    ("expression", "named", "error", "says"),
    [
        ("@induction", None, UsageError, r"@induction needs an atlas, .*; make one: attnscope scan MODEL --out DIR"),
        ("@inducton", NAMED, UsageError, "no role 'inducton'; the roles are induction, previous-token, self"),
        ("last,@", NAMED, UsageError, "no role ''"),
        ("last,@self", NAMED, InputError, "names no self head; it names @induction, @previous-token"),
        ("@self", {"self": {}}, InputError, "it names no role at all"),
    ],
)
def test_what_cannot_be_meant(expression, named, error, says):
    with pytest.raises(error, match=says):
        select(expression, HEADS, named)


def test_an_atlas_names_no_head_of_another_stack(demo):
    """A vision tower has a layer 3, too, and the difference of two heads is no head; over summaries it is the same."""
    seen, atlas = attnscope.capture(demo, TEXT, query="last"), made_atlas(None, ROLES)
    named = dict[str, set[str]]()
    for kind in STACKS:
        of_kind = replace(seen, text_columns=replace(seen.columns, stack=np.full_like(seen.columns.stack, kind)))
        named[kind] = set(of_kind.named(atlas).columns.atlas_roles)
    assert {kind for kind in STACKS if "induction sink" in named[kind]} == {DECODER, CSA, HCA}
    assert all(named[kind] == {""} for kind in set(STACKS) - {DECODER, CSA, HCA})


def test_an_atlas_of_an_older_version_is_refused_in_one_line(demo, tmp_path):
    made_atlas(DEMO_FOLDER, {(3, 0): ("induction", "retrieval")}).save(tmp_path)
    said = json.loads((tmp_path / "atlas.json").read_text())
    (tmp_path / "atlas.json").write_text(json.dumps(said | {"schema": "atlas/1"}))
    with pytest.raises(InputError, match="has schema 'atlas/1', expected 'atlas/3'; scan the model again"):
        atlas_of(demo, tmp_path)
    for command in (("heads", TEXT, "--select", "@induction"), ("ablate", "demo", "--sequences", "2")):
        refused = call(*command, "--atlas", str(tmp_path), "-q")
        assert (refused.code, refused.out, refused.err.count("\n")) == (4, b"", 1)
        assert "'atlas/3'; scan the model" in refused.err


# whose atlas it is


def test_an_atlas_fits_the_weights_it_was_made_of(folder, own, other, demo, demo_without_atlas, caplog):
    assert atlas_of(demo, folder).named("induction") == {3: (0, 1)}
    assert atlas_of(attnscope.load(demo_without_atlas)) is None
    assert atlas_of(attnscope.load(str(own))).by_role()["induction"] == {3: (0, 1)}
    assert caplog.text == ""
    with pytest.raises(UsageError, match=r"is of demo, which has other weights than .*model; scan this model"):
        atlas_of(attnscope.load(str(other)), folder)


def test_weights_nobody_knows_are_said_and_not_refused(folder, demo, caplog):
    in_memory = wrap(demo.model, demo.tokenizer, "mine")
    assert atlas_of(in_memory, folder).named("induction") == {3: (0, 1)}
    assert "cannot tell whether the atlas of demo was made with the weights of mine" in caplog.text


def test_the_same_commit_needs_no_hash(folder, demo):
    made = made_atlas(None, ROLES, "owner/tiny", "abc")

    class AtHub:
        name, revision, source_folder, base_folder = "owner/tiny", "abc", DEMO_FOLDER / "nowhere", None

    assert made.fits(AtHub()) is True
    AtHub.revision = "def"
    assert made.fits(AtHub()) is None


def test_another_models_atlas_in_the_folder_is_left_aside(own, other, caplog):
    shutil.rmtree(own / "atlas")
    made_atlas(other, ROLES).save(own / "atlas")
    assert atlas_of(attnscope.load(str(own))) is None
    assert "is ignored: it was not made with these weights" in caplog.text
    for damage in ("{}", '{"schema": "atlas/3"}', "["):
        caplog.clear()
        (own / "atlas" / "atlas.json").write_text(damage)
        assert atlas_of(attnscope.load(str(own))) is None
        assert f"{own / 'atlas'} holds no whole atlas" in caplog.text


def test_a_file_that_changes_is_hashed_again(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"one")
    before = weights_sha256(tmp_path)
    path.write_bytes(b"other")
    assert weights_sha256(tmp_path) != before


# the table of heads


def test_compare_lists_the_heads_that_the_atlas_names(folder, demo_without_atlas):
    pair = ("compare", "--text", TEXT, "--compare-text", "the " + TEXT, "--select", "@induction")
    found = call(*pair, "--atlas", str(folder), "-q").silent().rows
    assert {(row["layer"], row["head"]) for row in found} == {("3", "0"), ("3", "1")}
    assert call(*pair, "--model", demo_without_atlas, "-q").code == 2


def test_the_table_of_heads_says_what_the_atlas_names(folder, tmp_path, demo_without_atlas):
    found = call("heads", TEXT, "--atlas", str(folder), "-q").silent().rows
    named = {(int(row["layer"]), int(row["head"])): row["atlas_roles"] for row in found}
    assert {head: roles for head, roles in named.items() if roles} == {
        head: " ".join(roles) for head, roles in ROLES.items()
    }
    without = call("heads", TEXT, "-m", demo_without_atlas, "-q").silent().rows
    assert list(found[0]) == list(without[0]), "the same columns for every model"
    assert all((row["atlas_roles"], row["role"]) == ("", row["text_role"]) for row in without)
    grouped = call("heads", TEXT, "-q", "--atlas", str(folder), "--by", "kv").silent().rows
    assert {(row["role"], row["atlas_roles"]) for row in grouped} == {("-", "")}
    call("relations", TEXT, "--atlas", str(folder), "-q", "--out", str(tmp_path / "run")).ok()
    said = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert said["atlas"] == {"seed": 0, "sequences": 64, "ids_sha256": "0" * 64}
    assert said["options"]["atlas"] == str(folder)


def test_a_person_sees_roles_beside_those_of_the_text(folder, demo_without_atlas):
    shown = call("heads", TEXT, "--atlas", str(folder), "--top", "all", columns=140).out.decode().splitlines()
    assert any("roles " in line and "text role" in line for line in shown)
    assert any(line.split()[:1] == ["L3H0"] and "induction sink" in line for line in shown)
    assert b"text role" not in call("heads", TEXT, "-m", demo_without_atlas, columns=140).out


def test_in_python_heads_have_both(demo, folder, demo_without_atlas):
    seen = attnscope.capture(demo, TEXT, atlas=folder, select="@induction")
    assert [head.name for head in seen.kept_heads()] == ["L3H0", "L3H1"]
    assert (seen.heads[18].role, seen.heads[18].atlas_roles) == ("induction", ("induction", "sink"))
    assert [key.layer for key in seen.weights] == [3]
    again = attnscope.capture(demo, TEXT, atlas=seen.atlas, select="@previous-token,@sink")
    assert [head.name for head in again.kept_heads()] == ["L1H5", "L3H0"]
    with pytest.raises(UsageError, match='atlas="DIR"'):
        attnscope.capture(attnscope.load(demo_without_atlas), TEXT, select="@induction")


# one vocabulary


STORY = (Path(attnscope.__file__).parents[1] / "examples" / "story.txt").read_text(encoding="utf-8")


PARTS = "layer", "head", "role", "text_role"


def of_rows(rows):
    """{head: (role, text_role)}."""
    return {f"L{one['layer']}H{one['head']}": (one["role"], one["text_role"]) for one in rows}


def of_page(side):
    return of_rows([{**side["layers"][one["at"]], **one} for one in side["heads"]])


def in_words(heads, roles, text_roles):
    """Of a table for people, which lists all roles of a head."""
    return {head: (of.split()[0], text) for head, of, text in zip(heads, roles, text_roles, strict=True)}


def test_every_way_out_calls_a_head_by_the_same_role(demo, tmp_path):
    """The demo's atlas names ten heads; by this text alone they and others have roles too, mostly other ones."""
    seen = attnscope.capture(demo, STORY, request=attnscope.Request(relations=True, top_k=1, maps="all"))
    seen.export(tmp_path, figures=())
    again, shown = load_run(tmp_path).columns, heads_table(seen, seen.kept_heads(), "focus", width=200).sheet
    terminal = {column.title: [column.cell(row) for row in shown.rows[:24]] for column in shown.columns}
    notebook = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(<td>.*?)</tr>", heads_html(seen))]
    ways = {
        "Head": {one.name: (one.role, one.text_role) for one in seen.heads},
        "table()": of_rows(seen.table().to_pylist()),
        "heads.csv": of_rows(csv_rows((tmp_path / "heads.csv").read_bytes())),
        "page": of_page(Side(seen).said),
        "page of tables": of_page(Side(run_of_folder(tmp_path)).said),
        "drawn again": of_rows([{name: getattr(again, name)[at] for name in PARTS} for at in range(24)]),
        "terminal": in_words(*(terminal[title] for title in ("head", "roles", "text role"))),
        "notebook": in_words(*zip(*((row[0], row[2], row[3]) for row in notebook), strict=True)),
    }
    called = {head_name(*head): next(iter(roles), "-") for head, roles in atlas_of(demo).roles.items()}
    assert {name: role for name, (role, _) in ways["table()"].items()} == called
    assert sum(role != text for role, text in ways["table()"].values()) > 10
    for way, found in ways.items():
        assert found.items() <= ways["table()"].items(), way
        assert len(found) == (12 if way == "notebook" else 24), way
    maps = layer_maps(seen)
    titles = [title.partition(",")[0].partition(" ") for title in head_sheet(seen, maps, "focus", None).titles]
    assert {name: role or "-" for name, _, role in titles} == called
    frames = [zip(one.heads, one.roles, strict=True) for one in maps]
    assert {f"L{layer}H{head}": role or "-" for layer, of in enumerate(frames) for head, role in of} == called
    assert "roles     3 self, 2 sink, 2 previous-token, 2 induction, 1 offset-2" in repr(seen)


def test_a_dataset_calls_a_head_as_its_atlas_does_on_every_text(demo, folder):
    found = attnscope.batch(demo, [STORY, TEXT], atlas=folder, select="@induction,1.4", tables=["heads"])
    rows = found.rows("heads").to_pylist()
    assert [(row["item"], row["layer"], row["head"], row["role"], row["atlas_roles"]) for row in rows] == [
        (item, *head, next(iter(ROLES.get(head, ())), "-"), " ".join(ROLES.get(head, ())))
        for item in (0, 1)
        for head in ((1, 4), (3, 0), (3, 1))
    ]
    assert [row["text_role"] for row in rows] == ["local", "induction", "induction", "-", "-", "-"]
    said = json.loads((found.folder / "run.json").read_text())["options"]
    assert said["atlas"] == {"induction": "L3H0,L3H1", "previous-token": "L1H5", "sink": "L3H0"}
    plain = (
        attnscope.batch(wrap(demo.model, demo.tokenizer, "mine"), [TEXT], tables=["heads"]).rows("heads").to_pylist()
    )
    assert all((row["role"], row["atlas_roles"]) == (row["text_role"], None) for row in plain)


# everywhere


@pytest.mark.parametrize("command", ["heads", "relations", "text"])
def test_tables_are_of_the_heads_that_the_atlas_names(command, folder):
    found = call(command, TEXT, "--select", "@induction,1.0", "--atlas", str(folder), "-q").silent().rows
    assert {(row["layer"], row["head"]) for row in found} == {("1", "0"), ("3", "0"), ("3", "1")}


def test_the_atlas_in_the_models_own_folder_is_found(own):
    found = call("heads", TEXT, "--model", str(own), "--select", "@previous-token", "-q").silent().rows
    assert [(row["layer"], row["head"], row["atlas_roles"]) for row in found] == [("1", "5", "previous-token")]


def test_pages_pictures_keys_and_certificates_take_roles_too(folder, tmp_path):
    asked = ["--select", "@previous-token", "--atlas", str(folder), "-q"]
    drawn = call("draw", TEXT, *asked, "--out", str(tmp_path / "a"), "--figures", "heads")
    assert [line.rpartition("/")[2] for line in drawn.out.decode().splitlines()] == ["L01H05.png"]
    assert call("keys", TEXT, *asked).silent().rows == call("keys", TEXT, "--select", "1.5", "-q").silent().rows
    call("parity", TEXT, *asked, "--out", str(tmp_path / "certificate.json")).ok()
    assert json.loads((tmp_path / "certificate.json").read_text())["select"] == "L1H5"
    call("view", TEXT, *asked, "--out", str(tmp_path / "page.html"), "--max-mb", "0.1").ok()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ["--select", "@induction", "--model", "{bare}"],
            2,
            "@induction needs an atlas, and there is none; make one: attnscope scan",
        ),
        (["--select", "@inducton", "--atlas", "{atlas}"], 2, "there is no role 'inducton'; the roles are induction"),
        (["--select", "@self", "--atlas", "{atlas}"], 4, "the atlas names no self head; it names @induction"),
        (["--atlas", "{nowhere}"], 4, "holds no whole atlas; make one"),
        (["--atlas", "{atlas}", "--model", "{other}"], 2, "is of demo, which has other weights than"),
    ],
)
@pytest.mark.parametrize("command", ["heads", "batch"])
def test_bad_inputs_in_one_line(command, arguments, code, says, folder, other, tmp_path, demo_without_atlas):
    typed = [word.format(atlas=folder, nowhere=tmp_path, other=other, bare=demo_without_atlas) for word in arguments]
    if command == "batch":
        if "--atlas" in typed:  # a setting there
            at = typed.index("--atlas")
            typed[at : at + 2] = ["--set", f"atlas={typed[at + 1]}"]
        (tmp_path / "texts.txt").write_text(TEXT)
        typed += ["--out", str(tmp_path / "data")] + ["--select", "@induction"] * ("--select" not in typed)
    result = call(command, str(tmp_path / "texts.txt") if command == "batch" else TEXT, *typed, "-q")
    assert (result.code, result.out, result.err.count("\n")) == (code, b"", 1), result.err
    assert says in result.err
    assert not (tmp_path / "data").exists()


def test_a_dataset_is_held_to_the_heads_that_were_meant(folder, tmp_path):
    (tmp_path / "texts.txt").write_text(f"{TEXT}\nthe river bank")
    asked = ["batch", str(tmp_path / "texts.txt"), "--out", str(tmp_path / "data"), "--format", "csv", "-q"]
    call(*asked, "--select", "@induction,0.1", "--set", f"atlas={folder}").ok()
    said = json.loads((tmp_path / "data" / "run.json").read_text())["options"]
    assert said["select"] == "L3H0,L3H1,0.1"
    [written] = (tmp_path / "data" / "heads").glob("*.csv")
    rows = csv_rows(written.read_bytes())
    assert {(row["layer"], row["head"]) for row in rows} == {("0", "1"), ("3", "0"), ("3", "1")}
    made_atlas(DEMO_FOLDER, {(3, 0): ("induction",)}).save(tmp_path / "again")
    again = call(*asked, "--select", "@induction,0.1", "--set", f"atlas={tmp_path / 'again'}")
    assert again.code == 2
    assert "select was 'L3H0,L3H1,0.1', now 'L3H0,0.1'" in again.err
    assert "atlas was {" in call(*asked, "--select", "L3H0,L3H1,0.1").err, "the demo's own atlas"

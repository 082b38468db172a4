"""An atlas beside a text: whose it is, what the table of heads says, and `--select @role` everywhere."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import attnscope
from attnscope.errors import InputError, UsageError
from attnscope.model.checkpoint import weights_sha256
from attnscope.model.loading import DEMO_FOLDER, wrap
from attnscope.selection import resolved, select
from attnscope.stacks import CSA, DECODER, HCA, STACKS, VISION
from attnscope.study.atlas.atlas import atlas_of
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
    assert select(resolved(expression, NAMED), HEADS) == found


@pytest.mark.parametrize(
    ("expression", "named", "error", "says"),
    [
        ("@induction", None, UsageError, r"no atlas says .* @induction; make one: attnscope scan MODEL --out DIR"),
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
    seen = attnscope.capture(demo, TEXT, atlas=made_atlas(None, ROLES))
    named = {kind for kind in STACKS if seen.named_by_atlas(3, 0, kind) == ("induction", "sink")}
    assert named == {DECODER, CSA, HCA}
    assert not any(seen.named_by_atlas(3, 0, kind) for kind in set(STACKS) - named)
    tower = replace(seen, columns=replace(seen.columns, stack=np.full_like(seen.columns.stack, VISION)))
    assert set(tower.table()["atlas_roles"].to_pylist()) == {""}


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
    assert list(found[0])[-2:] == ["atlas_roles", "stack"]
    assert "atlas_roles" not in call("heads", TEXT, "-m", demo_without_atlas, "-q").silent().rows[0]
    grouped = call("heads", TEXT, "-q", "--atlas", str(folder), "--by", "kv").silent().rows
    assert {row["atlas_roles"] for row in grouped} == {""}
    call("relations", TEXT, "--atlas", str(folder), "-q", "--out", str(tmp_path / "run")).ok()
    said = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert said["atlas"] == {"seed": 0, "sequences": 64, "ids_sha256": "0" * 64}
    assert said["options"]["atlas"] == str(folder)


def test_a_person_sees_roles_beside_what_heads_look_like(folder, demo_without_atlas):
    shown = call("heads", TEXT, "--atlas", str(folder), "--top", "all", columns=140).out.decode().splitlines()
    assert any("roles " in line and "looks like" in line for line in shown)
    assert any(line.split()[:1] == ["L3H0"] and "induction sink" in line for line in shown)
    assert b"looks like" not in call("heads", TEXT, "-m", demo_without_atlas, columns=140).out


def test_in_python_heads_have_both(demo, folder, demo_without_atlas):
    seen = attnscope.capture(demo, TEXT, atlas=folder, select="@induction")
    assert [head.name for head in seen.kept_heads()] == ["L3H0", "L3H1"]
    assert seen.heads[18].atlas_roles == ("induction", "sink")
    assert [key.layer for key in seen.weights] == [3]
    again = attnscope.capture(demo, TEXT, atlas=seen.atlas, select="@previous-token,@sink")
    assert [head.name for head in again.kept_heads()] == ["L1H5", "L3H0"]
    with pytest.raises(UsageError, match='atlas="DIR"'):
        attnscope.capture(attnscope.load(demo_without_atlas), TEXT, select="@induction")


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
    drawn = call("heatmap", TEXT, *asked, "--out", str(tmp_path / "a"), "--figures", "heads")
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
            "no atlas says which heads are meant by @induction; make one: attnscope scan",
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

"""What is remembered of a file is forgotten where its content changes, even if its size and times are set back."""

import os
import shutil
import struct
from types import SimpleNamespace

import pytest

from attnscope.errors import UsageError
from attnscope.model import gguf
from attnscope.model.checkpoint import weights_sha256
from attnscope.model.options import LoadOptions
from attnscope.model.sources import DEMO_FOLDER
from attnscope.observe.atlas import atlas_of
from attnscope.serve import wire as identity
from attnscope.serve import worker as kept
from helpers.atlases import made_atlas
from helpers.folders import rewrite
from helpers.gguf_files import tiny, write


@pytest.fixture
def model(tmp_path):
    """A folder with files as of a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"first weights")
    (folder / "config.json").write_text("{}")
    return folder


def test_weights_are_hashed_again(model):
    before = weights_sha256(model)
    rewrite(model / "model.safetensors", b"first", b"other")
    assert weights_sha256(model) != before


def test_an_atlas_is_read_again(model):
    made_atlas(model, {(3, 0): ("sink",)}).save(model / "atlas")
    loaded = SimpleNamespace(name="demo", revision=None, source_folder=model, base_folder=None)
    assert atlas_of(loaded).named("sink") == {3: (0,)}
    rewrite(model / "atlas" / "atlas.json", b'"L3H0"', b'"L3H1"')
    assert atlas_of(loaded).named("sink") == {3: (1,)}


def test_the_statement_of_a_gguf_file_is_read_again(tmp_path):
    path = write(tmp_path / "m.gguf", "llama", tiny("llama"), **{"rope.scale_linear": 2.0})
    permits = LoadOptions().permits
    two, three = (b"scale_linear" + struct.pack("<If", 6, factor) for factor in (2.0, 3.0))
    assert gguf.statement(path, permits).raw["rope_parameters"]["factor"] == 2.0
    rewrite(path, two, three)
    assert gguf.statement(path, permits).raw["rope_parameters"]["factor"] == 3.0


def test_content_tells_where_nothing_but_the_time_of_change_is_another(model):
    held = identity.Contents(identity.files(model))
    held.hashing.join()
    weights = model / "model.safetensors"
    weights.chmod(0o600)
    os.link(weights, model.parent / "link")
    assert identity.files(model) != held.files
    assert held.same(identity.files(model))
    assert held.files == identity.files(model), "and is not asked for the same state again"
    rewrite(weights, b"first", b"other")
    assert not held.same(identity.files(model))
    rewrite(weights, b"other", b"first")
    assert held.same(identity.files(model))
    weights.write_bytes(b"first weights")
    assert not held.same(identity.files(model)), "it was written: whoever did meant another file"
    (model / "more.json").write_text("{}")
    assert not held.same(identity.files(model))


def test_a_file_that_changed_before_it_was_hashed_is_another(model, monkeypatch):
    before = identity.files(model)
    rewrite(model / "model.safetensors", b"first", b"other")
    held = identity.Contents(before)
    held.hashing.join()
    assert not held.same(identity.files(model))
    monkeypatch.setattr(identity, "MOST_HASHED", 5)
    held = identity.Contents(identity.files(model))
    held.hashing.join()
    (model / "config.json").chmod(0o600)
    assert held.same(identity.files(model))
    (model / "model.safetensors").chmod(0o600)
    assert not held.same(identity.files(model)), "larger than what is hashed in advance"


def test_folders_behind_links_are_watched_and_links_in_circles_end(model):
    (model.parent / "scan").mkdir()
    (model.parent / "scan" / "atlas.json").write_text("[1]")
    (model / "atlas").symlink_to(model.parent / "scan")
    (model / "self").symlink_to(model)
    before = identity.files(model)
    assert f"{model}/atlas/atlas.json" in before
    rewrite(model.parent / "scan" / "atlas.json", b"1", b"2")
    assert identity.files(model) != before


def test_a_folder_of_too_many_files_is_refused(model, monkeypatch):
    monkeypatch.setattr(identity, "MOST_FILES", 2)
    assert len(identity.files(model)) == 2
    (model / "more.json").write_text("{}")
    with pytest.raises(UsageError, match="more than 2 files"):
        identity.files(model)


def test_a_model_that_is_kept_is_loaded_again_where_a_file_of_it_changed(tmp_path, monkeypatch):
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    models, options = kept.KeptModels(), LoadOptions(str(folder))
    first = models.load(options)
    models._kept[options][1].hashing.join()
    (folder / "model.safetensors").chmod(0o600)
    assert models.load(options) is first
    rewrite(folder / "config.json", b'"bos_token_id": 0', b'"bos_token_id": 2')
    second = models.load(options)
    assert second.model.config.bos_token_id == 2
    assert models.load(options) is second
    monkeypatch.setattr(identity, "MOST_FILES", 1)
    assert models.load(options) is not second


def test_a_model_whose_files_changed_while_it_was_loaded_is_not_kept(tmp_path, monkeypatch):
    from attnscope.model import loading

    folder, load = shutil.copytree(DEMO_FOLDER, tmp_path / "model"), loading.load

    def changing(options):
        loaded = load(options)
        rewrite(folder / "config.json", b'"bos_token_id": 0', b'"bos_token_id": 2')
        return loaded

    monkeypatch.setattr(kept, "load", changing)
    models, options = kept.KeptModels(), LoadOptions(str(folder))
    assert models.load(options).model.config.bos_token_id == 0
    monkeypatch.setattr(kept, "load", load)
    assert models.load(options).model.config.bos_token_id == 2

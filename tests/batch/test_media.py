"""A corpus of sounds, and of pictures beside texts: every item as it is alone, and what is broken fails alone."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnscope
from attnscope.corpus.folder import Job
from attnscope.corpus.worker import Worker
from attnscope.errors import ModelError
from attnscope.model.loaded import LoadedModel
from attnscope.model.selection import CROSS, DECODER, ENCODER, VISION
from attnscope.observe.observation import Observation
from helpers.command_line import Result
from helpers.corpora import batch, content, differs, rows, written
from helpers.picture_models import picture, saved
from helpers.rows import json_lines
from helpers.sounds import samples, saved_whisper, write_wav

SOUNDS = [
    {"id": "a", "sound": "sounds/low.wav", "text": "hello"},
    {"id": "broken", "sound": "sounds/broken.wav", "text": "hello"},
    {"id": "b", "sound": "sounds/high.wav", "text": "hi"},
    {"id": "missing", "sound": "sounds/none.wav", "text": "hi"},
    {"id": "number", "sound": 3, "text": "hi"},
    {"id": "stdin", "sound": "-", "text": "hi"},
]
PICTURES = [
    {"id": "a", "text": "What is on the bank?", "seen": "field.png"},
    {"id": "broken", "text": "What is on the bank?", "seen": "broken.png"},
    {"id": "b", "text": "the river", "seen": ["field.png", "tall.png"]},
    {"id": "none", "text": "the river", "seen": []},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both corpora and their files."""
    place = tmp_path_factory.mktemp("corpora")
    (place / "sounds").mkdir()
    write_wav(place / "sounds" / "low.wav", samples(0.6))
    write_wav(place / "sounds" / "high.wav", samples(0.3, pitch=700))
    picture(place / "field.png")
    picture(place / "tall.png", (60, 90))
    for name in ("sounds/broken.wav", "broken.png"):
        (place / name).write_bytes(b"RIFF and no more")
    for name, records in (("sounds", SOUNDS), ("pictures", PICTURES)):
        written(place / f"{name}.jsonl", records)
    return place


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return attnscope.load(str(saved_whisper(tmp_path_factory.mktemp("models") / "whisper")), device="cpu")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return attnscope.load(saved("llava", tmp_path_factory.mktemp("models")), device="cpu")


def batch_all(corpus: Path, model: LoadedModel | str, out: Path, *flags: str) -> Result:
    name = model if isinstance(model, str) else str(model.source_folder)
    return batch(corpus, name, out, "--top-k", "all", *flags)


def failures(out: Path) -> dict[str, str]:
    return {one["id"]: one["reason"] for one in json_lines((out / "failures.jsonl").read_bytes())}


def check(out: Path, item: str, seen: Observation, kinds: Sequence[str]) -> None:
    """The rows of an item are the numbers of the same read alone."""
    of_item: dict[str, list[dict[str, Any]]] = {
        table: [row for row in rows(out, table) if row["id"] == item] for table in ("texts", "heads", "relations")
    }
    [text] = of_item["texts"]
    assert (text["sha256"], text["tokens"]) == (seen.prompt.sha256, len(seen.prompt))
    assert set(seen.stacks) == {row["stack"] for row in of_item["heads"]} == set(kinds)
    heads = {(row["stack"], row["layer"], row["head"]): row for row in of_item["heads"]}
    assert len(heads) == len(of_item["heads"]) == sum(len(one.heads) for one in seen.stacks.values())
    for kind, one in seen.stacks.items():
        for head in one.heads:
            row = heads[kind, head.layer, head.head]
            assert row["entropy"] == pytest.approx(head.score["entropy"], abs=1e-5)
    assert {row["stack"] for row in of_item["relations"]} == set(kinds)
    expected, layers = [], {(row["stack"], row["layer"]) for row in of_item["relations"]}
    weights = {(stack, layer): seen.of(stack).weights[layer].numpy() for stack, layer in layers}
    for row in of_item["relations"]:
        one = seen.of(row["stack"])
        expected.append(weights[row["stack"], row["layer"]][row["head"], row["query"], row["key"]])
        assert row["query_token"] == one.queries.tokens[row["query"]]
        assert row["key_token"] == one.keys.tokens[row["key"]]
    np.testing.assert_allclose([row["weight"] for row in of_item["relations"]], expected, rtol=0, atol=1e-5)


def test_every_sound_is_read_as_alone(place: Path, whisper: LoadedModel, tmp_path: Path) -> None:
    flags = ("--audio-field", "sound", "--target-field", "text")
    assert batch_all(place / "sounds.jsonl", whisper, tmp_path / "out", *flags).code == 1
    for record in (SOUNDS[0], SOUNDS[2]):
        seen = attnscope.capture(whisper, audio=place / str(record["sound"]), target=record["text"])
        check(tmp_path / "out", str(record["id"]), seen, (ENCODER, DECODER, CROSS))
    said = failures(tmp_path / "out")
    assert list(said) == ["broken", "missing", "number", "stdin"]
    assert "not a file of sound" in said["broken"]
    assert f"there is no file {place}/sounds/none.wav" in said["missing"]
    assert re.match(r"field 'sound': .* 3$", said["number"])
    about = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (about["options"]["audio-field"], about["targets"]) == ("sound", {"given": 2})


def test_a_target_of_a_sound_is_generated_as_alone(place: Path, whisper: LoadedModel, tmp_path: Path) -> None:
    corpus = tmp_path / "sounds.csv"  # absolute paths, and no text
    corpus.write_text(f"id,sound\na,{place / 'sounds' / 'low.wav'}\n")
    batch_all(corpus, whisper, tmp_path / "out", "--audio-field", "sound", "--select", "cross").ok()
    seen = attnscope.capture(whisper, audio=place / "sounds" / "low.wav")
    [text] = rows(tmp_path / "out", "texts")
    assert (text["target"], text["target_tokens"]) == ("".join(seen.queries.plain).strip(), len(seen.queries))
    assert json.loads((tmp_path / "out" / "run.json").read_text())["targets"] == {"generated": 1, "cut": 1}


def test_every_picture_is_read_beside_its_text_as_alone(place: Path, llava: LoadedModel, tmp_path: Path) -> None:
    flags = ("--picture-field", "seen", "--summary")
    assert batch_all(place / "pictures.jsonl", llava, tmp_path / "out", *flags).code == 1
    for record in (PICTURES[0], PICTURES[2]):
        named = record["seen"] if isinstance(record["seen"], list) else [record["seen"]]
        seen = attnscope.capture(llava, record["text"], picture=[place / str(name) for name in named])
        check(tmp_path / "out", str(record["id"]), seen, (DECODER, VISION))
    said = failures(tmp_path / "out")
    assert list(said) == ["broken", "none"]
    assert f"{place}/broken.png is not a picture" in said["broken"]
    assert re.match(r"field 'seen': .* \[\]$", said["none"])


def test_tokens_of_a_picture_are_asked_about(place: Path, llava: LoadedModel, tmp_path: Path) -> None:
    corpus = tmp_path / "pictures.csv"  # a list in a cell is JSON
    corpus.write_text(f'id,text,seen\na,the river,"[""{place / "field.png"}""]"\n')
    flags = ("--picture-field", "seen", "--query", "last", "--key", "img", "--spans", "what=img", "--spans", "it=river")
    batch_all(corpus, llava, tmp_path / "out", *flags).ok()
    seen = attnscope.capture(llava, "the river", picture=place / "field.png", query="last", key="img")
    found = rows(tmp_path / "out", "heads")
    assert [row["mass"] for row in found] == pytest.approx([one.score["mass"] for one in seen.heads], abs=1e-5)
    assert {row["stack"] for row in found} == {DECODER}
    assert {row["stack"] for row in rows(tmp_path / "out", "spans")} == {DECODER}


def test_characters_of_a_record_are_of_a_text_alone(place: Path, llava: LoadedModel, tmp_path: Path) -> None:
    corpus = tmp_path / "pictures.jsonl"
    record = {"id": "a", "text": "the river", "seen": str(place / "field.png"), "spans": {"it": [[4, 9]]}}
    corpus.write_text(json.dumps(record))
    assert batch_all(corpus, llava, tmp_path / "out", "--picture-field", "seen", "--spans", "it").code == 1
    assert "characters of a text that is read alone" in failures(tmp_path / "out")["a"]


def test_a_run_that_was_cut_off_goes_on(place: Path, whisper: LoadedModel, tmp_path: Path) -> None:
    flags = ("--audio-field", "sound", "--target-field", "text", "--tables", "heads")
    batch_all(place / "sounds.jsonl", whisper, tmp_path / "out", *flags)
    whole = content(tmp_path / "out" / "heads")
    (tmp_path / "out" / "journal.jsonl").write_text("")  # as if it had been killed before its first shard was whole
    batch_all(place / "sounds.jsonl", whisper, tmp_path / "out", *flags)
    assert content(tmp_path / "out" / "heads") == whole
    changed = batch_all(place / "sounds.jsonl", whisper, tmp_path / "out", "--audio-field", "other", *flags[2:])
    assert (changed.code, differs("audio-field", "sound", "other") in changed.err) == (2, True)


def test_a_model_that_does_not_read_them_is_refused_in_a_line(
    place: Path, whisper: LoadedModel, llava: LoadedModel, tmp_path: Path
) -> None:
    for how, said in (
        ({"audio_field": "sound"}, "reads text, and 'sound' names sounds"),
        ({"picture_field": "seen"}, "reads no pictures"),
    ):
        with pytest.raises(ModelError, match=said):
            Worker(Job(**how), attnscope.load("demo"))
    done = batch_all(place / "pictures.jsonl", llava, tmp_path / "tri", "--picture-field", "seen", "--matrices")
    assert (done.code, "leave out --matrices" in done.err) == (2, True)
    done = batch_all(place / "pictures.jsonl", whisper, tmp_path / "out")
    assert done.code == 3
    assert done.err.count("\n") == 1
    assert "--audio-field NAME" in done.err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--audio-field", "a", "--picture-field", "b"), "--audio-field and --picture-field were both given"),
        (("--audio-field", "a", "--text-field", "b"), "leave out --text-field"),
        (("--audio-field", "a", "--chat"), "leave out --chat"),
        (("--picture-field", "a", "--truncate", "left"), "a text with pictures is not cut; leave out --truncate"),
        (("--picture-field", "a", "--max-tokens", "8"), "leave out --max-tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: Sequence[str], says: str, tmp_path: Path) -> None:
    done = batch_all(tmp_path / "corpus.jsonl", "demo", tmp_path / "out", *flags)
    assert done.code == 2
    assert says in done.err

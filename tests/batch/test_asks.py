"""One ask of each text of a corpus: the job's options, and what a record says of itself."""

from dataclasses import replace
from pathlib import Path

import pytest

from attnscope import Request
from attnscope.corpus.folder import Job
from attnscope.corpus.item_requests import ask_for
from attnscope.corpus.items import EMPTY, Item
from attnscope.errors import InputError
from attnscope.observe.request import CaptureSpec

KEEP = Request(relations=True, query="last", key="bank")


def item(folder: Path, **fields: object) -> Item:
    return Item(0, str(folder / "corpus.jsonl"), 1, "a", "the bank", fields)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cat.png").write_bytes(b"a picture, as far as its name is asked for")
    return tmp_path


def test_an_ask_has_the_options_of_its_job(folder: Path) -> None:
    job = Job(request=KEEP, select="1.*", engine="fused", chat=True, truncate="left")
    expected = CaptureSpec("the bank", KEEP, engine="fused", select="1.*", chat=True, truncate="left")
    assert ask_for(job, item(folder)) == expected
    assert ask_for(replace(job, truncate=None, max_tokens=8), item(folder)).truncate == "right"


def test_a_record_says_what_is_its_own(folder: Path) -> None:
    job = Job(request=KEEP, query_field="q", key_field="k", target_field="t", picture_field="p")
    asked = ask_for(job, item(folder, q="first", k=3, t="die Bank", p="cat.png"))
    assert asked.keep == Request(relations=True, query="first", key="3")
    assert (asked.target, asked.picture) == ("die Bank", [f"{folder}/cat.png"])
    assert CaptureSpec.of_json(asked.as_json()) == replace(asked, picture=(f"{folder}/cat.png",))


@pytest.mark.parametrize(
    ("job", "fields", "says"),
    [
        (Job(target_field="t"), {"t": 3}, "field 't': expected text, got int"),
        (Job(target_field="t"), {"a": ""}, "no field 't'; there are 'a'"),
        (
            Job(query_field="q"),
            {"q": ["last"]},
            r"""field 'q': expected tokens, such as "bank" or "3-7", or .* \[\[5, 9\]\], got \['last'\]""",
        ),
        (Job(key_field="k"), {"k": [5, 9.5]}, r"or ranges of characters, such as \[\[5, 9\]\], got \[5, 9.5\]"),
        (Job(audio_field="s"), {"s": ["cat.png", "cat.png"]}, "field 's' names 2 files, and one sound is read"),
        (Job(picture_field="p"), {"p": "dog.png"}, "there is no file"),
    ],
)
def test_a_field_that_says_something_else_fails_its_text(folder: Path, job: Job, fields: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        ask_for(job, item(folder, **fields))


def test_a_text_with_a_problem_is_not_asked(folder: Path) -> None:
    with pytest.raises(InputError, match=EMPTY):
        ask_for(Job(), replace(item(folder), problem=EMPTY))

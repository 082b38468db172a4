"""What is asked of a text is one record: as JSON it is the same, and JSON that is another is refused in a line."""

import json

import pytest
from PIL import Image

import attnscope
from attnscope import Request, View
from attnscope.errors import UsageError
from attnscope.inputs.prompt import from_text
from attnscope.observe.request import SCHEMA, CaptureSpec
from attnscope.observe.run import read

ASKS = (
    CaptureSpec("the financial bank"),
    CaptureSpec((5, 6, 7), engine="fused", memory="4GB", listen=True, verify=True, generate=4),
    CaptureSpec(
        "the bank",
        Request(
            View("value", by_kv=True, heads={0: (1, 2), 3: (0,)}),
            ("focus",),
            relations=True,
            top_k=None,
            query="last",
            key="bank",
            define={"subject": "the"},
            stacks={"cross": {1: (0,)}},
        ),
        select="1.*",
        atlas="runs/atlas",
        truncate="left",
        answer=" is open",
        picture=("cat.png",),
    ),
)


@pytest.mark.parametrize("ask", ASKS)
def test_json_holds_the_whole_ask(ask):
    assert CaptureSpec.of_json(json.loads(json.dumps(ask.as_json()))) == ask


def test_a_prompt_is_its_tokens(demo):
    prompt = from_text(demo.tokenizer, "the bank")
    again = CaptureSpec.of_json(CaptureSpec(prompt).as_json())
    assert again.text == prompt.ids
    assert read(demo, again).prompt.ids == prompt.ids


def test_what_lies_in_memory_alone_has_no_json(demo):
    with pytest.raises(UsageError, match="a picture in memory"):
        CaptureSpec("a", picture=Image.new("RGB", (2, 2))).as_json()
    with pytest.raises(UsageError, match="an atlas in memory"):
        CaptureSpec("a", atlas=object()).as_json()
    with pytest.raises(UsageError, match="a sound in memory"):
        CaptureSpec(object()).as_json()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "ask/0"}, f"expected an ask of the form {SCHEMA}"),
        ({"engin": "eager"}, "ask has no field 'engin'; it has chat, truncate, generate"),
        ({"engine": 3}, "ask.engine: expected a text, got 3; correct this field, or leave it out"),
        ({"listen": 1}, "ask.listen: expected true or false, got 1"),
        ({"generate": True}, "ask.generate: expected a whole number or null, got True"),
        ({"generate": 1.5}, "ask.generate: expected a whole number or null, got 1.5"),
        ({"text": ["a"]}, "ask.text: expected a text or a list"),
        ({"truncate": "up"}, "ask.truncate: expected 'left' or 'right' or null, got 'up'"),
        ({"keep": {"maps": "some"}}, "ask.keep.maps: expected 'all' or 'kept' or null, got 'some'"),
        ({"keep": {"view": {"heads": {"x": [1]}}}}, "ask.keep.view.heads: expected an object or null"),
        ({"keep": {"view": {"heads": {"9" * 400: [1]}}}}, "ask.keep.view.heads: expected an object or null"),
        ({"keep": [1]}, "ask.keep: expected an object, got [1]; it has "),
    ],
)
def test_json_of_another_form_is_refused_by_name(change, said):
    with pytest.raises(UsageError) as error:
        CaptureSpec.of_json(ASKS[0].as_json() | change)
    assert str(error.value).startswith(said)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("said", [None, [], "ask/1", {}, {"schema": SCHEMA}])
def test_what_is_no_ask_is_refused(said):
    with pytest.raises(UsageError):
        CaptureSpec.of_json(said)


def test_a_misspelt_keyword_is_refused(demo):
    with pytest.raises(TypeError, match="engin"):
        attnscope.capture(demo, "the bank", engin="eager")

"""Targets, answers and templates run apart like any text; what is far too long or too deep is refused at once."""

import copy
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import attnscope
from attnscope.errors import InputError, ModelError, UsageError
from attnscope.inputs import labels
from attnscope.inputs.answers import reading_target, target
from attnscope.inputs.prompt import from_ids, from_text
from attnscope.inputs.tokens import DEEPEST, check_expression, defined, find
from attnscope.model.loaded import LoadedModel
from attnscope.observe.inputs import ids_of
from attnscope.observe.request import CaptureSpec
from attnscope.observe.run import prepare
from attnscope.utils.isolation import IsolatedCall
from helpers.alarms import short_seconds
from helpers.command_line import call


class Stuck:
    """A tokenizer of somebody else's whose calls never end, and hold the interpreter."""

    is_fast, eos_token_id = False, None

    def __call__(self, *arguments: object, **how: object) -> None:
        (9**9) ** (9**8)


@pytest.fixture
def soon(monkeypatch) -> None:
    """For what never ends; what does end has its minutes also on a machine that is busy."""
    short_seconds(monkeypatch)


@pytest.mark.usefixtures("soon")
def test_a_target_has_a_deadline() -> None:
    with reading_target(Stuck(), "process") as read, pytest.raises(ModelError, match=r"\b1 seconds"):
        read("das Haus", None, (), None)


def stuck_on_targets() -> LoadedModel:
    """A T5 with somebody else's tokenizer, whose calls for a target never end."""
    from helpers.stack_families import tiny

    tokenizer = attnscope.load("demo").tokenizer

    class StuckOnTargets(type(tokenizer)):
        is_fast = False

        def __call__(self, *arguments: object, text_target: object = None, **how: object) -> object:
            return (9**9) ** (9**8) if text_target else super().__call__(*arguments, **how)

    tokenizer = copy.copy(tokenizer)
    tokenizer.__class__ = StuckOnTargets
    loaded = attnscope.wrap(tiny("t5", vocab_size=2000, decoder_start_token_id=0), tokenizer)
    brought = replace(loaded, source_folder=Path("somewhere"))
    assert brought.brought
    return brought


@pytest.mark.usefixtures("soon")
def test_the_target_of_a_run_is_read_apart() -> None:
    with pytest.raises(ModelError, match=r"\b1 seconds"):
        prepare(stuck_on_targets(), CaptureSpec([5, 6, 7], target="das Haus"))


@pytest.mark.usefixtures("soon")
def test_an_answer_beside_a_picture_is_read_apart() -> None:
    loaded = SimpleNamespace(tokenizer=Stuck(), brought=True)
    with pytest.raises(ModelError, match=r"\b1 seconds"):
        ids_of(loaded, "a cat")  # type: ignore[arg-type]


@pytest.mark.usefixtures("soon")
def test_a_batch_goes_on_after_a_target_that_never_ends() -> None:
    records = [{"text": "a", "target": "das Haus"}, {"text": "b", "target": "das Haus"}]
    dataset = attnscope.batch(stuck_on_targets(), records, target_field="target")
    assert [failure.reason.count("1 seconds") for failure in dataset.failures] == [1, 1]


def test_a_template_that_asks_for_gigabytes_is_refused(tmp_path) -> None:
    import json
    import shutil

    from attnscope.model.loading import DEMO_FOLDER

    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{{ ('a' * 6000000000)|length }}"}))
    result = call("heads", "-q", "--chat", "-m", str(folder), "--text", "the bank", ATTNSCOPE_READING_SECONDS="30")
    assert (result.code, result.out) == (3, b"")
    assert "more memory" in result.err


def test_a_process_apart_keeps_a_limit_that_is_lower() -> None:
    import resource

    def limit() -> int:
        return resource.getrlimit(resource.RLIMIT_AS)[0]

    assert limit() == resource.RLIM_INFINITY or limit() > 0
    with IsolatedCall(limit, "process") as ask:
        found = ask()
    assert 0 < found != resource.RLIM_INFINITY
    assert resource.getrlimit(resource.RLIMIT_AS)[0] in (resource.RLIM_INFINITY, limit())


def test_what_is_printed_apart_reaches_neither_stdout_nor_stderr(capfd) -> None:
    with IsolatedCall(lambda: [os.write(number, b"said by a template") for number in (1, 2)], "process") as say:
        assert say() == [18, 18]
    assert capfd.readouterr() == ("", "")


class Untouched:
    """A tokenizer that must not be asked."""

    is_fast = True

    def __call__(self, *arguments: object, **how: object) -> None:
        raise AssertionError("tokenised")


@pytest.mark.parametrize(
    ("length", "most", "truncate"), [(1001, 10, None), (2**23 + 1, 10, "right"), (2**23 + 1, None, None)]
)
def test_a_text_far_too_long_is_not_tokenised(length, most, truncate) -> None:
    text = "x" * length
    with pytest.raises(InputError, match=f" {length} characters"):
        from_text(Untouched(), text, max_tokens=most, truncate=truncate)
    if truncate is None:
        with pytest.raises(InputError, match=f" {length} characters"):
            target(Untouched(), text, None, (), most)


def test_a_long_text_that_is_to_be_cut_is_tokenised(demo) -> None:
    found = from_text(demo.tokenizer, "the bank " * 500, max_tokens=10, truncate="right")
    assert len(found) == 10


def chain(length: int) -> list[str]:
    return [*(f"g{at}=g{at + 1}" for at in range(length - 1)), f"g{length - 1}=bank"]


def test_groups_lie_so_deep_and_no_deeper(demo) -> None:
    prompt = from_text(demo.tokenizer, "the bank")
    assert find(prompt, "g0", defined(chain(DEEPEST))).positions == find(prompt, "bank").positions
    with pytest.raises(UsageError, match=r"\b64 deep"):
        defined(chain(DEEPEST + 1))
    names = ",".join(f"g{at}" for at in reversed(range(1, 300)))  # each is checked after those that it is made of
    groups = dict(one.split("=") for one in chain(300))
    with pytest.raises(UsageError, match=r"\b64 deep"):
        check_expression(f"{names},^g0", groups)
    defines = [part for one in chain(300) for part in ("--define", one)]
    result = call("heads", "a bank", "-q", "--query", "g0", *defines)
    assert (result.code, result.out, result.err.count("\n")) == (2, b"", 1)


@pytest.mark.parametrize("columns", ["²", "٣", "9" * 5000, "-1", "wide"])
def test_a_width_that_is_no_number_is_none(columns: str) -> None:
    result = call("tokens", "the bank", "-q", "--format", "table", COLUMNS=columns, LINES=columns).silent()
    assert b"bank" in result.out
    wrong = call("tokens", "--no-such-option", COLUMNS=columns)
    assert wrong.code == 2


@pytest.mark.parametrize("truncate", ["left", "right"])
def test_only_ids_that_stay_are_named(demo, truncate, monkeypatch) -> None:
    ids = from_text(demo.tokenizer, "日本語 the bank é 日本 " * 40).ids
    head = [0] * (ids[0] == demo.tokenizer.bos_token_id)
    whole, named = from_ids(demo.tokenizer, ids), set()
    real = labels._names
    monkeypatch.setattr(labels, "_names", lambda tokenizer, ids: named.update(ids) or real(tokenizer, ids))
    for most in (5, 17, 64, len(ids) - 1, len(ids), len(ids) + 1):
        cut = from_ids(demo.tokenizer, ids, max_tokens=most, truncate=truncate)
        stay = range(len(ids))[:most] if truncate == "right" else [*head, *range(len(head) + len(ids) - most, len(ids))]
        stay = stay if most < len(ids) else range(len(ids))
        assert cut.ids == tuple(ids[at] for at in stay)
        assert cut.tokens == tuple(whole.tokens[at] for at in stay)
        assert cut.labels == tuple(whole.labels[at] for at in stay)
        assert cut.removed == len(ids) - len(cut)
    named.clear()
    from_ids(demo.tokenizer, [*range(3, 50), *[60] * 100], max_tokens=5, truncate="right")
    assert 60 not in named

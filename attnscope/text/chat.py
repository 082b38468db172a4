"""Chats: reading messages, and where each of them stands in the text that a template made of them."""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from attnscope.errors import InputError
from attnscope.text.characters import Characters

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str | None]  # None where the template refuses
Bounds = list[tuple[int, int, str]]  # characters [start, stop) and the role


def read_messages(chat: str) -> list[Message]:
    """The messages of a chat: a JSON list of {"role", "content"}, or plain text as one message of the user.

    Text that begins with `[` and isn't JSON is plain text. InputError names the first entry that is no message.

    >>> read_messages("hi")
    [{'role': 'user', 'content': 'hi'}]
    """
    try:
        entries = json.loads(chat) if chat.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        entries = None
    if entries is None:
        return [{"role": "user", "content": chat}]
    if not entries:
        raise InputError("the list of messages is empty", 'give at least one {"role": "user", "content": "..."}')
    for index, entry in enumerate(entries):
        _check_message(index, entry)
    return entries


def _check_message(index: int, entry: object) -> None:
    hint = 'each message is {"role": "user", "content": "..."}'
    if not isinstance(entry, dict):
        raise InputError(f"message {index} of the chat is {json.dumps(entry)[:40]}, not an object", hint)
    for key in ("role", "content"):
        if key not in entry:
            raise InputError(f"message {index} of the chat has no {key!r}", hint)
        if not isinstance(entry[key], str):
            raise InputError(f"message {index} of the chat has a {key!r} that is not text", hint)


def turn_bounds(render: Render, messages: Sequence[Message], text: str) -> Bounds:
    """The characters of each message in the rendered `text`, with its header where that can be told.

    The text rendered from the first messages alone tells where the next begins. Where a template renders a part
    otherwise than the whole, or folds messages together, a turn is the message's content, found by rendering marks
    in its place. Where that fails too there are no turns: an empty list.

    >>> turn_bounds(lambda messages: f"[{messages[0]['content']}]", [{"role": "user", "content": "hi"}], "[hi]")
    [(0, 4, 'user')]
    """
    return _by_prefix(render, messages, text) or _by_marks(render, messages, text)


def _by_prefix(render: Render, messages: Sequence[Message], text: str) -> Bounds:
    cuts = [0]
    for count in range(1, len(messages)):
        part = render(messages[:count])
        if part is None or not text.startswith(part):
            return []
        cuts.append(len(part))
    cuts.append(len(text))
    cuts[0] = _first_start(render, messages[0], text[: cuts[1]])
    bounds = [(start, stop, message["role"]) for start, stop, message in zip(cuts, cuts[1:], messages, strict=False)]
    for (start, stop, _), message in zip(bounds, messages, strict=True):
        if start >= stop or message["content"].strip() not in text[start:stop]:
            return []
    return bounds


def _first_start(render: Render, message: Message, opening: str) -> int:
    """Where the first message begins: what the template says before it, a system prompt of its own, isn't the user's.

    The same message rendered once more, later in the chat, shows its bare form.
    """
    earlier = [message, {"role": "assistant", "content": "ok"}]
    before, again = render(earlier), render([*earlier, message])
    if message["role"] != "user" or before is None or again is None or not again.startswith(before):
        return 0
    bare = again[len(before) :]
    return len(opening) - len(bare) if opening.endswith(bare) and message["content"].strip() in bare else 0


def _by_marks(render: Render, messages: Sequence[Message], text: str) -> Bounds:
    """The contents alone, by rendering marks from the private-use area in their place."""
    marks = [f"\ue000{index}\ue001" for index in range(len(messages))]
    marked = render([{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)])
    if marked is None or any(marked.count(mark) != 1 for mark in marks):
        return []
    for contents in ([m["content"] for m in messages], [m["content"].strip() for m in messages]):
        bounds: Bounds = []
        rebuilt, rest = "", marked
        for mark, content, message in zip(marks, contents, messages, strict=True):
            head, _, rest = rest.partition(mark)
            rebuilt += head
            bounds.append((len(rebuilt), len(rebuilt) + len(content), message["role"]))
            rebuilt += content
        if rebuilt + rest == text:
            return bounds
    return []


def token_turns(characters: Characters, bounds: Bounds) -> list[int | None]:
    """For each token the number of its turn, the one that holds its last character; None for tokens of no turn.

    >>> token_turns(((0, 2), (2, 4)), [(0, 2, "user"), (2, 4, "assistant")])
    [0, 1]
    """
    turns: list[int | None] = []
    turn = 0
    for start, stop in characters:
        while start < stop and turn < len(bounds) - 1 and stop > bounds[turn + 1][0]:
            turn += 1
        inside = start < stop and bounds[turn][0] < stop <= bounds[turn][1]
        # A token without characters of its own is where the one before it was.
        turns.append(turn if inside else turns[-1] if start == stop and turns else None)
    return turns


def turn_ranges(turns: Sequence[int | None]) -> list[tuple[int, int, int]]:
    """Runs of one turn as (start, stop, turn).

    >>> turn_ranges([None, 0, 0, 1])
    [(1, 3, 0), (3, 4, 1)]
    """
    ranges: list[tuple[int, int, int]] = []
    start = 0
    for turn, run in itertools.groupby(turns):
        stop = start + sum(1 for _ in run)
        if turn is not None:
            ranges.append((start, stop, turn))
        start = stop
    return ranges

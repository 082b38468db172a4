"""Chats: reading messages, and where each of them is in the text that a template made of them."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from attnscope.errors import InputError, first_line
from attnscope.inputs.labels import Characters

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str | None]  # None where the template refuses
Bounds = list[tuple[int, int, str]]  # characters [start, stop) and the role

FORM = '[{"role": "user", "content": "..."}]'
MEANT = re.compile(r"""\s*\[?\s*\{.*?["']role["']\s*:""", re.DOTALL)
SHAREGPT = {"human": "user", "gpt": "assistant"}  # what its {"from", "value"} call the roles
PARTS = ("text", "image", "image_url")  # of a content
MARK = "\ue000part\ue001"  # of the private-use area, in no template


def read_messages(chat: str) -> list[Message]:
    """The messages of a chat: a JSON list of {"role", "content"}, or plain text as one message of the user.

    ShareGPT's {"from", "value"} are messages too. A content may be a list of parts, {"type": "text", "text": "..."},
    and is null where tools are called: their arguments are made objects, which templates take. Text that is no JSON is
    plain text, unless it begins as messages do. InputError says what is wrong with it then, or names the first entry
    that is no message.

    >>> read_messages("hi")
    [{'role': 'user', 'content': 'hi'}]
    """
    try:
        entries = json.loads(chat) if chat.lstrip()[:1] in ("[", "{") else None
    except (ValueError, RecursionError) as error:
        if MEANT.match(chat):
            why = f"{error.msg}, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else first_line(error)
            raise InputError(
                f"the chat is meant as messages and is no JSON: {why}",
                f"write one list, {FORM}: texts in double quotes, a line break as \\n, null, no comma at its end",
            ) from error
        entries = None
    if isinstance(entries, dict) and ("messages" in entries or {"role", "content"} <= entries.keys()):
        raise InputError("the chat is one JSON object, expected a list of messages", f"give the list alone: {FORM}")
    if not isinstance(entries, list):
        return [{"role": "user", "content": chat}]
    if not entries:
        raise InputError("the list of messages is empty", 'give at least one {"role": "user", "content": "..."}')
    return [_message(index, entry) for index, entry in enumerate(entries)]


def parts_of(message: Message) -> list[dict[str, Any]]:
    """The content of a message as parts, of type `text` or `image`."""
    content = message.get("content")
    if not isinstance(content, list):
        return [] if content is None else [{"type": "text", "text": content}]
    return [part if part["type"] == "text" else {"type": "image"} for part in content]


def texts_of(message: Message) -> list[str]:
    """What a message says: its content, or the texts of its parts; nothing where it only calls tools."""
    return [part["text"] for part in parts_of(message) if part["type"] == "text"]


def pictures_of(message: Message) -> int:
    """How many pictures are among the parts of a message."""
    return sum(part["type"] == "image" for part in parts_of(message))


def by_template(tokenizer: Any, messages: Sequence[Message], answered: bool = False, **options: Any) -> str:
    """The text that a chat template makes of messages; answered: with the assistant's turn opened after them.

    options: more arguments of `apply_chat_template`. Raises InputError where the template refuses.
    """
    try:
        options |= {"tokenize": False, "add_generation_prompt": answered}
        return str(tokenizer.apply_chat_template(list(messages), **options))
    except MemoryError:
        raise
    except Exception as error:  # a template is a program of its own and may raise anything
        message = f"the model's chat template refused the messages: {first_line(error)}"
        raise InputError(message, "check the roles and their order") from error


def join_parts(render: Render, messages: list[Message]) -> list[Message]:
    """The messages as a template takes them: without parts of a content, joined by spaces, where it writes none.

    >>> join_parts(lambda messages: str(messages), [{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
    [{'role': 'user', 'content': 'hi'}]
    """
    with_parts = [isinstance(message.get("content"), list) for message in messages]
    if not any(with_parts):
        return messages
    # A template that knows parts writes their text, another one the list that contains it.
    text = render([{"role": "user", "content": [{"type": "text", "text": MARK}]}])
    if text is not None and MARK in text and "'type'" not in text and '"type"' not in text:
        return messages
    return [
        {**message, "content": " ".join(texts_of(message))} if has_parts else message
        for message, has_parts in zip(messages, with_parts, strict=True)
    ]


def _message(index: int, entry: object) -> Message:
    """An entry as a template takes it. Raises InputError where it is no message."""
    hint = f"each message is {FORM[1:-1]}"
    if not isinstance(entry, dict):
        raise InputError(f"message {index} of the chat is {json.dumps(entry)[:40]}, not an object", hint)
    if "role" not in entry and isinstance(entry.get("from"), str):
        entry = {"role": SHAREGPT.get(entry["from"], entry["from"]), "content": entry.get("value")}
    if "role" not in entry:
        raise InputError(f"message {index} of the chat has no 'role'", hint)
    calls, content = entry.get("tool_calls"), entry.get("content")
    if "content" not in entry and not calls:
        raise InputError(f"message {index} of the chat has no 'content'", hint)
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in PARTS or (kind == "text" and not isinstance(part.get("text"), str)):
                raise InputError(
                    f"message {index} of the chat has a part that is no text: {json.dumps(part)[:60]}",
                    'a part is {"type": "text", "text": "..."}, or {"type": "image"} with {picture}',
                )
    of_text = isinstance(content, str | list) or (content is None and bool(calls))
    for key, sound in (("role", isinstance(entry["role"], str)), ("content", of_text)):
        if not sound:
            raise InputError(f"message {index} of the chat has a {key!r} that is not text", hint)
    return entry | {"tool_calls": [_with_object(call) for call in calls]} if isinstance(calls, list) else entry


def _with_object(call: Any) -> Any:
    """A tool call with its arguments as an object, where they are one in JSON."""
    try:
        function = call["function"]
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def turn_bounds(render: Render, messages: Sequence[Message], text: str) -> Bounds:
    """The characters of each message in the rendered `text`, with its header where that can be found.

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
    # What the template says before the first message, such as a system prompt of its own, is not the user's. The same
    # message rendered once more, later in the chat, shows its bare form.
    first = messages[0]
    earlier = [first, {"role": "assistant", "content": "ok"}]
    before, again = render(earlier), render([*earlier, first])
    if first["role"] == "user" and before is not None and again is not None and again.startswith(before):
        bare = again[len(before) :]
        if text[: cuts[1]].endswith(bare) and all(content.strip() in bare for content in texts_of(first)):
            cuts[0] = cuts[1] - len(bare)
    bounds = [(start, stop, message["role"]) for start, stop, message in zip(cuts, cuts[1:], messages, strict=False)]
    for (start, stop, _), message in zip(bounds, messages, strict=True):
        if start >= stop or not all(content.strip() in text[start:stop] for content in texts_of(message)):
            return []
    return bounds


def _by_marks(render: Render, messages: Sequence[Message], text: str) -> Bounds:
    """The contents alone, by rendering marks from the private-use area in their place; none where one has no text."""
    if not all(isinstance(message.get("content"), str) for message in messages):
        return []
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
    """For each token the number of its turn, the one that has its last character; None for tokens of no turn.

    >>> token_turns(((0, 2), (2, 4)), [(0, 2, "user"), (2, 4, "assistant")])
    [0, 1]
    """
    turns: list[int | None] = []
    turn = 0
    for start, stop in characters if bounds else ():
        while start < stop and turn < len(bounds) - 1 and stop > bounds[turn + 1][0]:
            turn += 1
        inside = start < stop and bounds[turn][0] < stop <= bounds[turn][1]
        # A token without characters of its own is where the one before it was.
        turns.append(turn if inside else turns[-1] if start == stop and turns else None)
    return turns

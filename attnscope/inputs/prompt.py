"""Text or chat to token ids, with readable labels and the spans of words, sentences and chat turns next to them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from attnscope.errors import InputError, UsageError
from attnscope.inputs.chat import Bounds, by_template, join_parts, pictures_of, read_messages, token_turns, turn_bounds
from attnscope.inputs.labels import Characters, locate_tokens, read_tokens, visible_blanks
from attnscope.inputs.spans import sentence_ranges, word_ranges
from attnscope.utils.isolation import IsolatedCall, Where

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel, LoadedTokenizer


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) and what they are: the word or sentence itself, a special token, or a turn's role."""

    start: int
    stop: int
    name: str


@dataclass(frozen=True)
class Patch:
    """The part of a picture that a token represents.

    picture: counted from 0. box: left, top, right and bottom edge, as shares of the picture's width and height; None
    where it is not known.
    """

    picture: int
    box: tuple[float, float, float, float] | None


@dataclass(frozen=True)
class Medium:
    """What a prompt brings that its tokens do not say: of a sound, of pictures, of an adapter; nothing of a text alone.

    inputs: what the model is given with the ids, by the names of its forward's arguments, (1, ...) each: a picture's
    `pixel_values`; under the name of its first argument, instead of them: a sound's `input_features`. sha256: the hash
    of what was read with the text, or instead of it. step: seconds from one token to the next, where they are frames.
    patches: the tokens that are parts of pictures; images: the pictures, to be drawn on. tower: how a vision tower
    reads the patches, a prompt for each text of its batch; windows: of such a prompt, in the order in which the tower
    reads them, the tokens of each. unasked: so many of the first tokens are keys and no queries. virtual: whether
    no token of the text follows these.
    """

    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    sha256: str | None = None
    step: float | None = None
    patches: Mapping[int, Patch] = field(default_factory=dict, repr=False, compare=False)
    images: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    tower: tuple["Prompt", ...] = field(default=(), repr=False, compare=False)
    windows: tuple[tuple[int, ...], ...] = field(default=(), repr=False, compare=False)
    unasked: int = 0
    virtual: bool = True

    @property
    def parts(self) -> dict[str, Sequence[int]]:
        """The tokens of each picture, "img", "img2", ..."""
        tokens = dict[str, list[int]]()
        for place, patch in self.patches.items():
            tokens.setdefault(picture_name(patch.picture), []).append(place)
        return {**tokens}

    def followed(self, tokens: int, more: int) -> "Medium":
        """The same of a prompt of so many tokens that an answer of so many follows.

        The values of every token, (1, T), which say what is part of a picture, are made longer: the answer's are none.
        """
        if not self.patches:
            return self
        import torch

        def longer(values: Any) -> Any:
            if tuple(values.shape) != (1, tokens):
                return values
            kind = 1 - int(values[0, next(iter(self.patches))])
            return torch.cat([values, values.new_full((1, more), kind)], 1)

        return replace(self, inputs={name: longer(values) for name, values in self.inputs.items()})

    def joined(self, tokens: int, other: "Medium") -> "Medium":
        """The same of a prompt of so many tokens that another prompt follows."""
        patches = {tokens + at: patch for at, patch in other.patches.items()}
        return replace(self, patches={**self.patches, **patches})


@dataclass(frozen=True)
class Prompt:
    """A text as the model reads it.

    `text` is as given, or as the chat template rendered it. `tokens` hold the exact text of each token, for tables:
    joined they give the text back, except that the pieces of a character split over several tokens are numbered
    (`日·1/3`), that SentencePiece's space before the text shows, and that special tokens are written as their names.
    `labels` are the same for pictures, with visible spaces, and a token unknown to the model is marked (`日<unk>`).
    `words` and `sentences` cover every token once, cut by `plain`, the text that each token shows; `turns` are the
    messages of a chat, without the begin token and without a system prompt that the template adds of its own. `removed`
    tokens were cut off. `characters` are those of `text` that each token holds, or holds a part of, as [start, stop).
    `answer` is where the tokens of an answer begin, None where there is none: what comes before them is the prompt.
    `medium` is what is read with the text, or instead of it. Of a pair of texts `text` is both, the second after
    BETWEEN, and `segments` are the tokens of each, "text" and "pair", without special ones. `types` are the token types
    (segment ids) that the tokenizer gives the tokens; empty where it gives none, or 0 alone.
    """

    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    labels: tuple[str, ...]
    special: tuple[bool, ...]
    plain: tuple[str, ...] = field(repr=False)
    turns: tuple[Span, ...]
    removed: int = 0
    characters: Characters = field(default=(), repr=False)
    answer: int | None = None
    medium: Medium = Medium()
    segments: tuple[Span, ...] = ()
    types: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.characters:  # of ids
            characters = locate_tokens(self.plain, self.tokens[: len(self.plain)], self.text)
            object.__setattr__(self, "characters", characters)

    @cached_property
    def words(self) -> tuple[Span, ...]:
        return _named(word_ranges(self.plain, self.special), self.plain, self.tokens)

    @cached_property
    def sentences(self) -> tuple[Span, ...]:
        return _named(sentence_ranges(self.plain, self.special), self.plain, self.tokens)

    def named(self, position: int) -> str:
        """A token as a message names it: `bank(8)`."""
        return f"{visible_blanks(self.plain[position]).strip('·') or self.labels[position]}({position})"

    def spans(self, group: str) -> tuple[Span, ...]:
        """The prompt's "words" or "sentences"."""
        return self.words if group == "words" else self.sentences

    @property
    def parts(self) -> dict[str, Sequence[int]]:
        """The tokens of the "prompt" and of its "answer", where there is one; of each picture, "img", "img2", ...

        "made" are those whose rows predict the answer: each token of it is made by the one before. Of a pair those of
        the first text, "text", and of the second, "pair".
        """
        at, count = self.answer, len(self)
        own = self.medium.parts | {span.name: range(span.start, span.stop) for span in self.segments}
        if at is None:
            return own
        return own | {"prompt": range(at), "answer": range(at, count), "made": range(at - 1, count - 1)}

    @property
    def ids_apart(self) -> tuple[int, ...]:
        """The ids, but for patches, which share one id for many things: a number of its own for each."""
        return tuple(-2 - at if at in self.medium.patches else token for at, token in enumerate(self.ids))

    @property
    def sha256(self) -> str:
        """Hash of the text in UTF-8, and of what is read with it or instead of it, in hexadecimal."""
        return hashlib.sha256((self.text + (self.medium.sha256 or "")).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.ids)


def picture_name(number: int) -> str:
    """What a picture is called, counted from 0: `img`, `img2`."""
    return f"img{number + 1}" if number else "img"


def unnamed_tokens(names: Sequence[str], medium: Medium = Medium(), text: str = "", ids: Sequence[int] = ()) -> Prompt:
    """Tokens that no text has, as special ones; their ids are their numbers, unless given.

    >>> unnamed_tokens(["patch 0", "patch 1"]).ids
    (0, 1)
    """
    names, none = tuple(names), ("",) * len(names)
    places = ((0, 0),) * len(names)
    numbers = tuple(ids) or tuple(range(len(names)))
    return Prompt(text, numbers, names, names, (True,) * len(names), none, (), characters=places, medium=medium)


def join_tokens(first: Prompt, second: Prompt, start: int = 0) -> dict[str, Any]:
    """The fields of a prompt that say something of every token, of two prompts one after the other.

    start: the first token that is taken of the second.
    """
    fields = ("ids", "tokens", "labels", "special", "plain", "characters")
    return {name: (*getattr(first, name), *getattr(second, name)[start:]) for name in fields}


Side = Literal["left", "right"]
LONGEST_TEXT = 2**23  # characters of a text that is tokenised
LONGEST_TOKEN = 100  # characters of a text per token that the model reads
NEIGHBOURS = 8  # tokens next to a cut whose bytes may belong to the same character
BETWEEN = "\n"  # between the two texts of a pair, where characters are counted through both


def isolation_for(loaded: "LoadedModel | LoadedTokenizer", chat: bool = False) -> Where:
    """Where one text is read: apart where a model brought the tokenizer, its template or its own Python not least."""
    holds = chat or not getattr(loaded.tokenizer, "is_fast", False)  # the interpreter, while it works
    return ("process" if holds else "thread") if loaded.brought else "here"


def reading(tokenizer: Any, where: Where) -> IsolatedCall[Prompt]:
    """(text, chat, max_tokens, truncate, answer, pair) -> `from_chat`, `from_pair` or `from_text`.

    Within a deadline, unless it is "here".

    Raises ModelError too: for a tokenizer that fails, or takes too long.

        >>> with reading(loaded.tokenizer, "process") as read:
        ...     read("the bank", False, 2048, None)
    """
    return IsolatedCall(partial(_read, tokenizer), where)


def _read(
    tokenizer: Any,
    text: str,
    chat: bool,
    max_tokens: int | None,
    truncate: Side | None,
    answer: str | None = None,
    pair: str | None = None,
) -> Prompt:
    if pair is not None:
        both = from_pair(tokenizer, text, pair, max_tokens=max_tokens, truncate=truncate)
        return both if answer is None else replace(both, answer=len(both))  # one that is still to come
    read = from_chat if chat else from_text
    return read(tokenizer, text, max_tokens=max_tokens, truncate=truncate, answer=answer)


def from_text(
    tokenizer: Any, text: str, *, max_tokens: int | None = None, truncate: Side | None = None, answer: str | None = None
) -> Prompt:
    """The tokens of `tokenizer(text)`, begin token and all; of `tokenizer(text + answer)` where there is an answer.

    A text longer than `max_tokens` is an InputError with both numbers, or loses its tokens on the side `truncate`;
    the begin token stays. InputError also for a text without tokens, for halves of surrogate pairs, and for an answer
    whose first token begins in the last word of the text. An empty answer is one that is still to come.

    >>> from_text(tokenizer, "the bank").labels
    ('<s>', '·the', '·bank')
    """
    whole = text + (answer or "")
    check_length(whole, max_tokens, truncate)
    encoded = _encode(tokenizer, whole)
    places = _places_left(tokenizer, encoded.ids, max_tokens, truncate)
    return _answered(_prompt(tokenizer, whole, encoded, places), text, answer)


def from_pair(
    tokenizer: Any, text: str, pair: str, *, max_tokens: int | None = None, truncate: Side | None = None
) -> Prompt:
    """The tokens of `tokenizer(text, pair)`: two texts with the special tokens and token types of a pair.

    InputError for a tokenizer that puts nothing between two texts, for a text without tokens, and where a cut leaves
    nothing of one of them; lengths as in `from_text`.

    >>> from_pair(tokenizer, "a bank", "a river").parts["pair"]
    range(4, 6)
    """
    whole = text + BETWEEN + pair
    check_length(whole, max_tokens, truncate)
    encoded = _encode(tokenizer, text, pair)
    places_left = _places_left(tokenizer, encoded.ids, max_tokens, truncate)
    segments = [[place for place, at in enumerate(places_left) if encoded.texts[at] == number] for number in (0, 1)]
    if not all(segments):
        which, lost = ("first", "second")[bool(segments[0])], len(places_left) < len(encoded.ids)
        why = "is cut off whole" if lost else "has no tokens"
        raise InputError(f"the {which} text of the pair {why}", "shorten the other" if lost else "give it a word")
    named = zip(segments, ("text", "pair"), strict=True)
    spans = sorted((Span(places[0], places[-1] + 1, name) for places, name in named), key=lambda span: span.start)
    return replace(_prompt(tokenizer, whole, encoded, places_left), segments=tuple(spans))


def from_chat(
    tokenizer: Any, chat: str, *, max_tokens: int | None = None, truncate: Side | None = None, answer: str | None = None
) -> Prompt:
    """A chat through the tokenizer's template: plain text is one user turn, a JSON list of messages is as given.

    The ids are those of `apply_chat_template(..., add_generation_prompt=False)`; with an answer, which is put where the
    assistant's is, of `add_generation_prompt=True`. The template alone says whether there is a begin token, as the
    model was trained with it: the tokenizer adds none. UsageError without a template, InputError for messages that are
    none or that the template refuses; lengths and answers as in `from_text`.

    >>> [turn.name for turn in from_chat(tokenizer, '[{"role": "user", "content": "hi"}]').turns]
    ['user']
    """
    try:
        tokenizer.get_chat_template()
    except (AttributeError, ValueError) as error:
        message = "this model's tokenizer has no chat template"
        raise UsageError(message, "leave out {chat}, or use an instruct or chat model") from error

    def render(messages: Sequence[dict[str, Any]]) -> str | None:
        try:
            return by_template(tokenizer, messages)
        except (InputError, MemoryError):  # of a part of a chat a template may refuse what it takes in the whole
            return None

    messages = read_messages(chat)
    if any(pictures_of(message) for message in messages):
        raise InputError("the chat has a picture, and a text alone is read", "give the picture with {picture}")
    messages = join_parts(render, messages)
    if answer is not None and messages[-1]["role"] == "assistant":
        raise InputError("the chat ends with the assistant's own turn", "leave out that message: the answer follows it")
    text = by_template(tokenizer, messages)
    opened = text if answer is None else by_template(tokenizer, messages, answered=True)
    # Turns are found in the messages alone; an answer is one more turn, with what the template opens it with.
    bounds = turn_bounds(render, messages, text) if opened.startswith(text) else []
    whole = opened + (answer or "")
    if bounds and len(whole) > len(text):
        bounds.append((len(text), len(whole), "assistant"))
    check_length(whole, max_tokens, truncate)
    # Without the tokenizer's special tokens: the template has written those that the model was trained with.
    encoded = _encode(tokenizer, whole, add_special_tokens=False)
    places = _places_left(tokenizer, encoded.ids, max_tokens, truncate)
    return _answered(_prompt(tokenizer, whole, encoded, places, bounds), opened, answer)


def from_ids(
    tokenizer: Any, ids: Sequence[int], *, max_tokens: int | None = None, truncate: Side | None = None
) -> Prompt:
    """A prompt for token ids that no text was read for; its text is what the tokens say, joined.

    Bytes that make no character are `<0xE6>`, ids beyond the vocabulary `<id 512>`. InputError without ids; lengths as
    in `from_text`.

    >>> from_ids(tokenizer, [1, 265]).tokens
    ('<s>', ' the')
    """
    listed = [int(token) for token in ids]
    if not listed:
        raise InputError("there are no token ids", "give at least one")
    places_left = _places_left(tokenizer, listed, max_tokens, truncate)
    # Of millions only those that stay are named, and those next to them, which may hold parts of their characters.
    near = sorted({at for place in places_left for at in range(place - NEIGHBOURS, place + NEIGHBOURS + 1)})
    places = {at: number for number, at in enumerate(at for at in near if 0 <= at < len(listed))}
    prompt = _prompt(tokenizer, None, Encoded([listed[at] for at in places]), [places[at] for at in places_left])
    return replace(prompt, removed=len(listed) - len(places_left))


def _answered(prompt: Prompt, text: str, answer: str | None) -> Prompt:
    """The prompt with the place where its answer begins: the first token that holds characters after `text`.

    White space that ends the text may be a part of that token.
    """
    if answer is None:
        return prompt
    if not answer:
        return replace(prompt, answer=len(prompt))
    at = next((at for at, (_, stop) in enumerate(prompt.characters) if stop > len(text)), None)
    if at is None:
        raise InputError("the answer has no tokens", "give an answer with at least one word")
    if text[prompt.characters[at][0] :].strip():
        message = f"the token {prompt.labels[at]!r} holds the end of the text and the beginning of the answer"
        raise InputError(message, "divide them between two words; a space between them is a part of the answer")
    return replace(prompt, answer=at)


def check_length(text: str, most: int | None, truncate: Side | None) -> None:
    """Refuse what is far too long before it is tokenised, which takes minutes and about 200 bytes per character.

    What is to be cut may be much longer than the tokens that stay.
    """
    longest = LONGEST_TEXT if most is None or truncate else min(LONGEST_TEXT, max(most, 1) * LONGEST_TOKEN)
    if len(text) > longest:
        reads = "" if most is None else f": the model reads {most} tokens"
        raise InputError(f"the text has {len(text)} characters, expected at most {longest}{reads}", "shorten it")


class Encoded(NamedTuple):
    """What a tokenizer makes of a text or a pair, token by token.

    offsets: the characters of `Prompt.text`, None where it does not tell. types: its token types, empty where all are
    0. texts: of a pair the number of the text that a token is of, None of a special one.
    """

    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]] | None = None
    types: Sequence[int] = ()
    texts: Sequence[int | None] = ()


def _encode(tokenizer: Any, text: str, pair: str | None = None, **options: Any) -> Encoded:
    for part in (text, pair or ""):
        try:  # a tokenizer would fail on it in its own way, or read something else
            part.encode()
        except UnicodeEncodeError as error:
            message = f"character {error.start} of the text is U+{ord(part[error.start]):04X}, half of a surrogate pair"
            raise InputError(message, "write the character itself, or both halves") from error
    # Only the tokenizers in Rust tell where their tokens are in the text.
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, pair, verbose=False, return_offsets_mapping=fast, **options)
    ids, types = list(encoded["input_ids"]), list(encoded.get("token_type_ids") or ())
    if not ids:
        raise InputError("the text has no tokens", "give a text with at least one word")
    result = Encoded(ids, encoded["offset_mapping"] if fast else None, types if any(types) else ())
    if pair is None:
        return result
    # A pair needs a token between its texts, or the model could not tell where the second begins.
    texts: list[int | None] = encoded.sequence_ids(0) if fast else [None] * len(ids)
    begin = 0
    for number, part in enumerate(() if fast else (text, pair)):  # found by the tokens of each text alone
        alone = list(tokenizer(part, add_special_tokens=False)["input_ids"])
        starts = range(begin, len(ids) - len(alone) + 1)
        at = next((at for at in starts if ids[at : at + len(alone)] == alone), None)
        if at is not None:
            begin = at + len(alone)
            texts[at:begin] = [number] * len(alone)
    if any({before, after} == {0, 1} for before, after in pairwise(texts)):
        message = "this model's tokenizer puts nothing between two texts: it was made for one"
        raise InputError(message, "leave out {pair}, and write both as one text")
    # The tokenizer counts the characters of each text from 0, a Prompt those of both through.
    first = len(text) + len(BETWEEN)
    if result.offsets is not None:
        moved = [
            (start + first, stop + first) if number == 1 else (start, stop)
            for (start, stop), number in zip(result.offsets, texts, strict=True)
        ]
        result = result._replace(offsets=moved)
    return result._replace(texts=texts)


def _places_left(tokenizer: Any, ids: Sequence[int], most: int | None, truncate: Side | None) -> list[int]:
    """The places of the tokens that stay."""
    count = len(ids)
    if truncate not in (None, "left", "right"):
        message = f"truncate: expected left or right, got {truncate!r}"
        raise UsageError(message, "use {truncate=left} or {truncate=right}")
    if most is not None and most < 1:
        raise UsageError(f"at most {most} tokens leave nothing to read", "allow at least 1")
    if most is None or count <= most:
        return list(range(count))
    if truncate is None:
        message = f"the text has {count} tokens, the model reads at most {most}"
        raise InputError(message, "shorten it, or use {truncate=left} or {truncate=right}")
    if truncate == "right":
        return list(range(most))
    begins = {getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "cls_token_id", None)}
    head = [0] if ids[0] in begins else []
    return head + list(range(count - most + len(head), count))


def _prompt(
    tokenizer: Any, text: str | None, encoded: Encoded, places: Sequence[int], bounds: Bounds | None = None
) -> Prompt:
    """The prompt of the tokens at these places; text: what they were read from, None for ids alone."""
    ids, offsets = encoded.ids, encoded.offsets
    # All tokens are read, also those that are cut off: a character may be split over both sides of the cut.
    whole = read_tokens(tokenizer, ids, text or "", offsets)
    turns: tuple[Span, ...] = ()
    if bounds:
        numbers = token_turns(whole.characters, bounds)
        if ids[0] == getattr(tokenizer, "bos_token_id", None):  # the begin token is no one's turn
            numbers[0] = None
        turns = turn_spans([numbers[place] for place in places], bounds)
    left = whole.at(places)
    return Prompt(
        text="".join(left.plain) if text is None else text,
        ids=tuple([ids[place] for place in places]),
        tokens=left.exact,
        labels=left.labels,
        special=left.special,
        plain=left.plain,
        turns=turns,
        removed=len(ids) - len(places),
        characters=left.characters,
        types=tuple([encoded.types[place] for place in places]) if encoded.types else (),
    )


def turn_spans(numbers: Sequence[int | None], bounds: Bounds) -> tuple[Span, ...]:
    """The turns of a chat; numbers: of each token, as `token_turns` gives them.

    >>> turn_spans([None, 0, 0], [(0, 4, "user")])
    (Span(start=1, stop=3, name='user'),)
    """
    spans: list[Span] = []
    start = 0
    for number, run in groupby(numbers):
        stop = start + sum(1 for _ in run)
        if number is not None:
            spans.append(Span(start, stop, bounds[number][2]))
        start = stop
    return tuple(spans)


def _named(ranges: Sequence[tuple[int, int]], plain: Sequence[str], exact: Sequence[str]) -> tuple[Span, ...]:
    return tuple(
        Span(start, stop, "".join(plain[start:stop]).strip() or "".join(exact[start:stop])) for start, stop in ranges
    )

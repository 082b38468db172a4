"""A model, and what is asked of a text -> one finished Observation: the middle of the library.

    seen = read(loaded, Ask("the financial bank", keep=Request(relations=True)))

What can be refused is refused before the forward pass; no terminal is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, SupportsIndex

from attnscope.apart import Apart
from attnscope.ask import Ask
from attnscope.errors import InputError, MemoryLimitError, ModelError, UsageError
from attnscope.media.picture import Picture, all_opened
from attnscope.media.picture_prompt import read_with_pictures
from attnscope.media.sound import MODEL_OF_SOUND, Sound, heard, reads_sound
from attnscope.memory import DTYPE_BYTES, free_memory, human_bytes, is_out_of_memory
from attnscope.model.geometry import with_tower
from attnscope.model.loading import LoadedModel
from attnscope.observation import Observation
from attnscope.observe import Asked, Request, observe
from attnscope.observe.choice import Choice, choose, tiles_difference
from attnscope.seam.cost import tokens_that_fit
from attnscope.seam.engines import Engine
from attnscope.seam.generation import continuation, ends, start_token, translation
from attnscope.seam.inputs import given_of
from attnscope.selection import HeadsByRole, select_stacks
from attnscope.stacks import CAUSAL_LM, CROSS, ENCODER, ENCODER_ONLY, SEQ2SEQ, VISION
from attnscope.study.atlas.atlas import Atlas, atlas_of
from attnscope.text import answer as answers
from attnscope.text import target as targets
from attnscope.text.prompt import Prompt, Side, from_ids, place, reading
from attnscope.text.tokens import Chosen
from attnscope.text.virtual import with_virtual

if TYPE_CHECKING:
    from attnscope.ask import Text


@dataclass(frozen=True)
class Run:
    """One text about to be read: the model, the prompt, what to keep, and the engine, with why it was chosen.

    source: what an encoder-decoder's encoder reads, while its decoder reads the prompt. chosen: the tokens that are
    asked about. facts: what the manifest is to say beside what every run says. atlas: what
    names the model's heads, where there is one.
    """

    loaded: LoadedModel
    prompt: Prompt
    request: Request
    choice: Choice
    chosen: Chosen = Chosen()
    facts: Mapping[str, Any] = field(default_factory=dict)
    atlas: Atlas | None = None
    source: Prompt | None = None

    @property
    def engine(self) -> Engine:
        """Who computes the layers' attention."""
        return self.choice.engine

    @property
    def text(self) -> Prompt:
        """The text that was given: of an encoder-decoder what its encoder reads."""
        return self.source or self.prompt

    @property
    def named(self) -> HeadsByRole | None:
        """The heads that the atlas names, as `selection.select` takes them."""
        return self.atlas.by_role() if self.atlas else None

    @property
    def asked(self) -> dict[str, Asked]:
        """What every stack reads, and which tokens of it are asked about."""
        both = Asked(self.prompt, self.chosen, self.source)
        return {stack: one for stack in self.loaded.geometry.stacks for one in both.of(stack)[:1]}

    def asking(self, request: Request) -> Run:
        """The same with another request. Raises MemoryLimitError where the machine has no room for what it keeps."""
        _check_matrices(self.loaded, request, self.prompt, len(self.source or ()))
        return replace(self, request=request)

    def verified(self) -> Run:
        """The same, after every layer was held against the oracle; its verdict goes into the manifest."""
        from attnscope.parity.certificate import verify

        return replace(self, facts={**self.facts, "parity": verify(self.loaded, self.prompt, source=self.source)})

    def observe(self, advance: Callable[[int], object] = lambda layers: None) -> Observation:
        """The forward pass. Raises MemoryLimitError, which says what would fit, where memory runs out.

        advance: called with 1 whenever a layer was read.
        """
        with _within_memory(self.loaded, len(self.prompt)):
            seen = observe(
                self.loaded,
                [self.prompt],
                self.request,
                engine=self.engine,
                chosen=[self.chosen],
                sources=None if self.source is None else [self.source],
                facts=self.facts,
                advance=advance,
            )[0]
        return replace(seen, atlas=self.atlas)


def read(loaded: LoadedModel, ask: Ask) -> Observation:
    """Read one text through one model and keep what is asked for.

    Raises InputError for a text that does not fit the model, MemoryLimitError for one that does not fit the memory,
    UsageError for what cannot be meant.

        >>> read(load(), Ask("the financial bank")).heads[0].role
    """
    run = prepare(loaded, ask)
    return (run.verified() if ask.verify else run).observe()


def prepare(loaded: LoadedModel, ask: Ask, advance: Callable[[int], object] = lambda tokens: None) -> Run:
    """Everything that comes before the forward pass: tokens, heads, engine; each refused where it does not fit.

    advance: called with 1 for every token that is generated.
    """
    if not isinstance(loaded, LoadedModel):
        raise UsageError(
            f"expected a LoadedModel, got {type(loaded).__name__}",
            "attnscope.load makes one, attnscope.wrap one of a model and a tokenizer",
        )
    request, of_two = ask.keep, loaded.geometry.task == SEQ2SEQ
    _check(loaded, ask)
    prompt = _prompt(loaded, ask, "" if ask.generate and not of_two else ask.answer)
    if prompt.tower and not request.asks:
        loaded = replace(loaded, geometry=with_tower(loaded.geometry, loaded.model.config))
    answers.check_room(prompt, ask.generate, loaded.geometry.max_positions)
    atlas = atlas_of(loaded, ask.atlas)
    request = _selected(loaded, ask, atlas)
    tokens, made, source = len(prompt) + (ask.generate or 0) * (not of_two), dict[str, Any](), None
    longest = max([tokens, *map(len, prompt.tower)])
    choice = choose(loaded, longest, ask.engine, ask.memory, listen=ask.listen, request=request)
    if of_two:
        source, (prompt, made) = prompt, _target(loaded, prompt, ask, choice.engine, advance)
    elif ask.generate:
        _check_matrices(loaded, request, prompt, more=ask.generate)
        prompt, made = _generated(loaded, prompt, ask.generate, choice.engine, advance)
    _check_matrices(loaded, request, prompt, len(source or ()))
    facts = made | _facts(loaded, prompt, source, choice.engine, atlas)
    return Run(loaded, prompt, request, choice, request.chosen(prompt, source), facts, atlas, source)


def _check(loaded: LoadedModel, ask: Ask) -> None:
    """Raise UsageError or ModelError for what is asked of a model of another kind, or at once."""
    _check_reads(loaded, ask.text)
    if ask.keep.rollout or ask.keep.operands:
        loaded.check_queries("a rollout" if ask.keep.rollout else "what keeps q and k")
    task = loaded.geometry.task
    _check_task(task, ask.generate, ask.answer, ask.target)
    answers.check_answer(ask.generate, ask.answer, None if task == SEQ2SEQ else ask.truncate)


def _selected(loaded: LoadedModel, ask: Ask, atlas: Atlas | None) -> Request:
    """What is kept, of the heads that are named."""
    select, geometry = ask.select, loaded.geometry
    if select is None and ask.keep.per_token and geometry.task == SEQ2SEQ:
        select = CROSS  # of three stacks what is asked for most: which tokens of the text a target looks at
    if select is None:
        return ask.keep
    heads = select_stacks(select, geometry.heads_of_stacks, geometry.stack, atlas.by_role() if atlas else None)
    return ask.keep.selecting(heads, geometry)


def _check_reads(loaded: LoadedModel, text: Text) -> None:
    """Raise ModelError where a model of sound is given a text, or a model of text a sound."""
    main = getattr(loaded.model, "main_input_name", "input_ids")
    given = isinstance(text, Sound) or (isinstance(text, Prompt) and main in text.inputs)
    if reads_sound(loaded.model) and not given:
        raise ModelError(f"{loaded.name} reads sound, and this is a text", "give it a recording with {audio=FILE}")
    if isinstance(text, Sound) and not reads_sound(loaded.model):
        raise ModelError(f"{loaded.name} reads text, and this is a sound", MODEL_OF_SOUND)


def _check_task(task: str, generate: int | None, answer: str | Sequence[int] | None, target: Any) -> None:
    """Raise UsageError for what is asked of a model of another task."""
    if task != SEQ2SEQ and target is not None:
        raise UsageError(
            f"a target is what an encoder-decoder's decoder reads, and this is a {task}", "leave out {target}"
        )
    if task == CAUSAL_LM:
        return
    if answer is not None or (generate is not None and task == ENCODER_ONLY):
        raise UsageError(
            "only a causal model has an answer after its text", "use {target=TEXT}" * (task != ENCODER_ONLY)
        )


def _target(
    loaded: LoadedModel, source: Prompt, ask: Ask, engine: Engine, advance: Callable[[int], object]
) -> tuple[Prompt, dict[str, Any]]:
    """What the decoder reads, and what the manifest says of it. Raises as `text.target`, UsageError for both ways."""
    given, most, start, room = ask.target, ask.generate, start_token(loaded), loaded.geometry.max_positions
    if given is not None:
        if most is not None:
            raise UsageError("a target is either generated or given", "leave out {generate} or {target}")
        if isinstance(given, str):
            with targets.reading_target(loaded.tokenizer, place(loaded.tokenizer, loaded.brought, False)) as read:
                prompt = read(given, start, room)
        else:
            prompt = targets.from_target_ids(loaded.tokenizer, given, start, room)
        return prompt, {"target": {"ids": list(prompt.ids), "generated": False}}
    with _within_memory(loaded, len(source)):
        ids = translation(loaded, source, engine, most, advance)
    return from_ids(loaded.tokenizer, ids), {"target": {"ids": ids, "generated": True}}


def _generated(
    loaded: LoadedModel, prompt: Prompt, most: int, engine: Engine, advance: Callable[[int], object]
) -> tuple[Prompt, dict[str, Any]]:
    """The prompt with what the model puts behind it, and what the manifest says of that."""
    with _within_memory(loaded, len(prompt) + most):
        beside = given_of(loaded, prompt)[1]
        ids = continuation(loaded, prompt.ids, most, engine, advance, **beside)
    facts = {"asked": most, "ids": ids, "stopped_by": "end token" if ends(loaded, ids[-1]) else "number asked for"}
    return answers.continued(loaded.tokenizer, prompt, ids), {"generated": facts}


@contextmanager
def _within_memory(loaded: LoadedModel, tokens: int) -> Iterator[None]:
    """Raise MemoryLimitError, which says what would fit, where memory runs out while so many tokens are read."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryLimitError(
            f"memory ran out on {loaded.device} while {tokens} tokens were read",
            f"{tokens_that_should_fit(loaded, tokens)} tokens fit: shorten the text, or take a smaller model or dtype",
        ) from error


def _prompt(loaded: LoadedModel, ask: Ask, answer: str | Sequence[int] | None) -> Prompt:
    """The tokens; with an answer of any length, which `answers.check_room` judges."""
    text, chat, truncate = ask.text, ask.chat, ask.truncate
    if ask.picture is not None:
        loaded.check_bare("a text with pictures")
        return _seen_beside(loaded, text, all_opened(ask.picture), chat, truncate, answer)
    if isinstance(text, Sound):
        return heard(loaded, text, truncate)
    if isinstance(text, Prompt) and text.step is not None:
        return text
    if answer is not None:
        loaded.check_bare("an answer")
    most = loaded.geometry.max_positions if answer is None else None
    if most is not None and loaded.virtual:
        most -= len(loaded.virtual)
    if isinstance(text, str):
        if not text.strip():
            raise InputError("the text is empty", "give a text with at least one word")
        if not isinstance(answer, str | None):
            raise UsageError("the text is text, and its answer is not", "give both as text, or both as token ids")
        with reading(loaded.tokenizer, place(loaded.tokenizer, loaded.brought, chat)) as read:
            prompt = read(text, chat, most, truncate, answer)
        loaded.check_ids(prompt.ids)
        return _with_virtual(loaded, prompt)
    check_ids(loaded, text.ids if isinstance(text, Prompt) else text)
    if isinstance(text, Prompt):
        prompt = _with_virtual(loaded, text)
    else:
        virtual = list(loaded.virtual)  # ids of an earlier run begin with them
        ids = text[len(virtual) :] if list(text[: len(virtual)]) == virtual else text
        prompt = _with_virtual(loaded, from_ids(loaded.tokenizer, ids, max_tokens=most, truncate=truncate))
    if not answer:
        return prompt if answer is None else replace(prompt, answer=len(prompt))
    if isinstance(answer, str):
        raise UsageError("the text is token ids, and its answer is not", "give both as text, or both as token ids")
    check_ids(loaded, answer)
    return answers.continued(loaded.tokenizer, prompt, answer)


def _with_virtual(loaded: LoadedModel, prompt: Prompt) -> Prompt:
    return with_virtual(prompt, loaded.virtual, keys_alone=loaded.prefix is not None)


def check_ids(loaded: LoadedModel, ids: Sequence[int]) -> None:
    """Raise UsageError for what is no token id, InputError for one that the model has no embedding of."""
    if not all(issubclass(kind, SupportsIndex) for kind in set(map(type, ids))):  # there may be millions of ids
        raise UsageError("expected a text, a Prompt or token ids as whole numbers", "give one text at a time")
    loaded.check_length(len(ids))
    place = loaded.unknown_id(ids)
    if place is not None:
        raise InputError(
            f"token {place} has the id {ids[place]}, and the vocabulary has {loaded.embeddings} ids",
            f"give ids from 0 to {(loaded.embeddings or 1) - 1}, of this model's own tokenizer",
        )


def _seen_beside(
    loaded: LoadedModel,
    text: Text,
    pictures: Sequence[Picture],
    chat: bool,
    truncate: Side | None,
    answer: str | Sequence[int] | None,
) -> Prompt:
    """The tokens of a text and the pictures beside it, with an answer behind them."""
    if not isinstance(text, str):
        raise UsageError("a picture needs a text, and these are tokens", "give {text}, or leave out {picture}")
    if truncate is not None:
        raise UsageError("a text with pictures is not cut: they would lose patches", "leave out {truncate}")
    prompt = read_with_pictures(loaded, text, pictures, chat, answered=answer is not None)
    if not answer:
        return prompt if answer is None else replace(prompt, answer=len(prompt))
    ids = _ids_of(loaded, answer) if isinstance(answer, str) else answer
    check_ids(loaded, ids)
    return answers.continued(loaded.tokenizer, prompt, ids)


def _ids_of(loaded: LoadedModel, answer: str) -> list[int]:
    """The tokens of an answer alone."""
    tokenizer = loaded.tokenizer
    with Apart(
        lambda: list(tokenizer(answer, add_special_tokens=False).input_ids), place(tokenizer, loaded.brought, False)
    ) as encode:
        return encode()


def _facts(
    loaded: LoadedModel, prompt: Prompt, source: Prompt | None, engine: Engine, atlas: Atlas | None
) -> dict[str, Any]:
    """How far the engine is from eager on this text, whether positions were stretched, and who names the heads."""
    facts: dict[str, Any] = {}
    if engine.name != "eager":
        facts["largest_difference_to_eager"] = tiles_difference(loaded, prompt, source)
    if loaded.stretched_from is not None:
        facts["positions"] = {
            "trained": loaded.stretched_from,
            "stretched_to": loaded.geometry.max_positions,
            "by": "linear rope scaling",
        }
    if atlas is not None:
        facts["atlas"] = {name: atlas.facts.get(name) for name in ("seed", "sequences", "ids_sha256")}
    return facts


def _check_matrices(loaded: LoadedModel, request: Request, prompt: Prompt, source: int = 0, more: int = 0) -> None:
    """Refuse to keep whole matrices that the machine has no room for."""
    if not request.weights:
        return
    heads, needed, room, tokens = 0, 0, free_memory("cpu"), len(prompt) + more
    pairs = {ENCODER: source * source if source else tokens * tokens, CROSS: tokens * source}
    pairs |= {VISION: sum(len(part) ** 2 for part in prompt.tower)}
    for stack, layers in loaded.geometry.shown.items():
        of_stack = request.of(stack, loaded.geometry.stack)
        chosen = of_stack.view_of(of_stack.weights).heads
        kept = sum(one.heads if chosen is None else len(chosen.get(one.index, ())) for one in layers.values())
        heads, needed = heads + kept, needed + 4 * kept * pairs.get(stack, tokens * tokens)
    if needed > room:
        raise MemoryLimitError(
            f"the matrices of {heads} heads over {tokens} tokens take {human_bytes(needed)}, and this machine has "
            f"{human_bytes(room)} free",
            "ask for fewer layers, or for a Request without weights",
        )


def tokens_that_should_fit(loaded: LoadedModel, failed: int) -> int:
    """What eager attention has room for; at most half of what just failed, which takes a quarter of the memory."""
    room = tokens_that_fit(loaded.geometry, free_memory(loaded.device), DTYPE_BYTES[loaded.dtype])
    return max(1, min(room, failed // 2))

"""What is asked of a text -> its tokens. Each kind of input says which asks it takes, and opens what reads them.

with reading(loaded, "here", 2048) as read:
    read(CaptureSpec("the bank")).labels

Then which tokens have global attention, in models of windows (Longformer, LED): as their class chooses, or as named.
Such a token sees all others and is seen by all. Then what is read with a text or after it: the target of an
encoder-decoder, given or its own, and a model's answer. At last how a text is read otherwise than whoever gave it may
think, in lines for a person and for the manifest.

Which patch of a picture each token of a vision tower is, is measured on the model. Patches are changed together whose
numbers share a bit, and the states that enter the first attention layer show which tokens that changes. So each token
spells the number of its patch. What no patch changes is [CLS], a register or the like, and is named by the parameter
that it is made of.

Shapes: B text, T token, E model width, H pixel row, W pixel column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attnscope.errors import InputError, ModelError, UsageError, first_line
from attnscope.hooks.engines import within_memory
from attnscope.hooks.forward import (
    GLOBAL,
    TYPES,
    arguments,
    attention_modules,
    backbone,
    bare_model,
    hooks_around,
    known_types,
    own_errors,
    temporary,
    text_inputs,
)
from attnscope.hooks.generation import (
    DecodingSteps,
    continuation,
    end_tokens,
    say_ignored,
    start_token,
    translation,
    watched_steps,
)
from attnscope.hooks.listen import running
from attnscope.hooks.report import tolerance
from attnscope.inputs import prompt as prompts
from attnscope.inputs.answers import from_target_ids, reading_target, with_answer, with_virtual
from attnscope.inputs.pictures import open_pictures, reading_pixels, reading_with_pictures
from attnscope.inputs.prompt import Prompt, from_ids, isolation_for
from attnscope.inputs.sound import Sound, sound_prompt
from attnscope.inputs.tensors import GivenTensors
from attnscope.inputs.tokens import find
from attnscope.model.families import family_of
from attnscope.model.fitting import patch_side
from attnscope.model.libraries import choosing_settings
from attnscope.model.selection import VISION_ONLY
from attnscope.utils.isolation import IsolatedCall

if TYPE_CHECKING:
    from attnscope.hooks.engines import Engine
    from attnscope.model.loaded import LoadedModel
    from attnscope.observe.request import CaptureSpec
    from attnscope.utils.isolation import Where

NONE = "none"  # names no token
SAME_FORM = "give both as text, or both as token ids"  # of a text and its answer


def with_global_tokens(loaded: LoadedModel, prompt: Prompt, named: str | None) -> Prompt:
    """The prompt with its global tokens among what the model is given; named: an expression, `none`, or None.

    Raises UsageError for a model that has no such tokens, InputError for an expression that means none, and for a text
    of which the model's class cannot tell them.

        >>> positions(with_global_tokens(longformer, prompt, "first"))
        [0]
    """
    if GLOBAL not in arguments(loaded.model):
        if named is not None:
            raise UsageError(
                f"{loaded.name} has no global attention that tokens could have", "leave out {global_tokens}"
            )
        return prompt
    if named is None:
        mask_BT = chosen_by_class(loaded, torch.tensor([prompt.ids], device=loaded.device))
    else:
        places = [] if named == NONE else find(prompt, named).positions
        mask_BT = torch.zeros(1, len(prompt), dtype=torch.long)
        mask_BT[0, list(places)] = 1
    if mask_BT is None or not mask_BT.any():
        return prompt
    inputs = {**prompt.medium.inputs, GLOBAL: mask_BT.long().cpu()}
    return replace(prompt, medium=replace(prompt.medium, inputs=inputs))


def positions(prompt: Prompt) -> list[int]:
    """The places of the global tokens."""
    mask_BT: Tensor | None = prompt.medium.inputs.get(GLOBAL)
    return [] if mask_BT is None else mask_BT[0].nonzero()[:, 0].tolist()


def chosen_by_class(loaded: LoadedModel, ids_BT: Tensor) -> Tensor | None:
    """The mask that the model's class hands its body, found by its forward until that begins; None for none."""
    from transformers import MODEL_FOR_MULTIPLE_CHOICE_MAPPING

    model, body, handed = bare_model(loaded.model), backbone(loaded.model), dict[str, Any]()
    if body is model:
        return None

    def stop(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        handed.update(kwargs)
        raise _ReachedError

    hooks = [body.register_forward_pre_hook(stop, with_kwargs=True)]
    try:
        with temporary(hooks), running(model, None), suppress(_ReachedError):
            model(ids_BT[:, None] if type(model) in MODEL_FOR_MULTIPLE_CHOICE_MAPPING.values() else ids_BT)
    except Exception as error:  # any class's own code, with any text
        raise InputError(
            f"{type(model).__name__} cannot tell which tokens of this text are global: {first_line(error)}",
            "give both texts of a pair with {pair}, or name the tokens with {global_tokens=first}",
        ) from error
    return handed.get(GLOBAL)


class _ReachedError(Exception):
    """The module that was waited for is reached, and what follows of the pass is not needed."""


Read = Callable[["CaptureSpec"], Prompt]


@contextmanager
def reading(loaded: LoadedModel, where: Where, most: int | None) -> Iterator[Read]:
    """What makes a Prompt of an ask, with the answer that the ask gives; an empty answer is one that is still to come.

    where: texts are tokenised. most: tokens that a text or ids may have. Raises InputError for what is asked for and
    cannot be read, ModelError for what this model does not read, UsageError for what cannot be meant.
    """
    with ExitStack() as opened:

        @cache
        def reader(row: int) -> Read:
            return INPUTS[row].reader(loaded, where, most, opened)

        def read(ask: CaptureSpec) -> Prompt:
            if ask.pair is not None:
                ask.check_pair()
            prompt = reader(next(row for row, kind in enumerate(INPUTS) if kind.takes(ask)))(ask)
            # Token types are left out where the model tells none apart.
            known = known_types(loaded) if prompt.types else None
            if known is not None and not 0 < max(prompt.types) < known:
                if known:
                    raise ModelError(
                        f"{loaded.name} has {known} token type{'s' * (known > 1)}, and its tokenizer gives the type "
                        f"{max(prompt.types)}",
                        "copy the model's own tokenizer into its folder",
                    )
                prompt = replace(prompt, types=())
            loaded.check_dense(len(prompt))
            return with_global_tokens(loaded, prompt, ask.global_tokens)

        yield read


def of_pictures(loaded: LoadedModel, where: Where, most: int | None, opened: ExitStack) -> Read:
    """A text with pictures, or a picture alone for a vision tower; `reading_with_pictures` says where they are read."""
    if loaded.geometry.task == VISION_ONLY:
        return _of_one_picture(loaded, opened)
    loaded.check_bare("a text with pictures")
    with_pictures = opened.enter_context(reading_with_pictures(loaded))

    def read(ask: CaptureSpec) -> Prompt:
        pictures, answer = open_pictures(ask.picture), ask.answer
        if not isinstance(ask.text, str):
            raise UsageError("a picture needs a text, got token ids", "give {text}, or leave out {picture}")
        if not ask.text.strip():
            message = "the text is empty, and this model reads pictures with one"
            raise InputError(message, "give a text with at least one word")
        if ask.truncate is not None:
            raise UsageError("a text with pictures is not cut: they would lose patches", "leave out {truncate}")
        prompt = with_pictures(ask.text, pictures, ask.chat, answer is not None)
        return _answered(loaded, prompt, ids_of(loaded, answer) if isinstance(answer, str) else answer)

    return read


def _of_one_picture(loaded: LoadedModel, opened: ExitStack) -> Read:
    """What makes a Prompt of a picture for a model that reads nothing else."""
    side, pixels_of = patch_side(loaded.model.config), opened.enter_context(reading_pixels(loaded))
    assert side is not None  # of every tower that is loaded

    def read(ask: CaptureSpec) -> Prompt:
        others = {"text": ask.text != "", "chat": ask.chat, "answer": ask.answer, "truncate": ask.truncate}
        other = next((name for name, value in others.items() if value), None)
        if other is not None:
            raise UsageError(f"{loaded.name} reads a picture alone", f"leave out {{{other}}}")
        pictures = open_pictures(ask.picture)
        if len(pictures) > 1:
            message = f"{loaded.name} reads one picture at a time, got {len(pictures)}"
            raise UsageError(message, "give one {picture}")
        pixels = pixels_of(pictures[0])
        inputs = {name: value.to(loaded.device) for name, value in pixels.inputs.items()}
        values = inputs.pop("pixel_values").to(loaded.model.dtype)
        patches = patch_tokens(loaded.model, values, inputs, side)
        return pixels.prompt(patches.tokens, patches.grid, side)

    return read


def of_sounds(loaded: LoadedModel, where: Where, most: int | None, opened: ExitStack) -> Read:
    """A sound instead of a text, or the frames of one; how long it may be, the model says."""

    def read(ask: CaptureSpec) -> Prompt:
        if isinstance(ask.text, Sound):
            return sound_prompt(loaded, ask.text, ask.truncate)
        assert isinstance(ask.text, Prompt)
        return ask.text

    return read


def of_texts(loaded: LoadedModel, where: Where, most: int | None, opened: ExitStack) -> Read:
    """A text, or a chat; with its answer it is tokenised as one, of any length."""
    tokenised = opened.enter_context(prompts.reading(loaded.tokenizer, where))

    def read(ask: CaptureSpec) -> Prompt:
        text, answer, limit = ask.text, ask.answer, _limit(loaded, ask, most)
        assert isinstance(text, str)
        if not text.strip():
            raise InputError("the text is empty", "give a text with at least one word")
        if not isinstance(answer, str | None):
            raise UsageError("the text is words, and its answer is token ids", SAME_FORM)
        prompt = tokenised(text, ask.chat, limit, ask.truncate, answer, ask.pair)
        loaded.check_ids(prompt.ids)
        return _behind_virtual(loaded, prompt)

    return read


def of_tokens(loaded: LoadedModel, where: Where, most: int | None, opened: ExitStack) -> Read:
    """Token ids, or a Prompt, which is read as it is."""

    def read(ask: CaptureSpec) -> Prompt:
        text, answer, limit = ask.text, ask.answer, _limit(loaded, ask, most)
        assert not isinstance(text, str | Sound | GivenTensors)
        check_ids(loaded, text.ids if isinstance(text, Prompt) else text)
        if not isinstance(text, Prompt):
            virtual = list(loaded.virtual)  # ids of an earlier run begin with them
            own = text[len(virtual) :] if list(text[: len(virtual)]) == virtual else text
            text = from_ids(loaded.tokenizer, own, max_tokens=limit, truncate=ask.truncate)
        if answer and isinstance(answer, str):
            raise UsageError("the text is token ids, and its answer is words", SAME_FORM)
        return _answered(loaded, _behind_virtual(loaded, text), answer)

    return read


def _limit(loaded: LoadedModel, ask: CaptureSpec, most: int | None) -> int | None:
    """The tokens that a text may have: with an answer, which only a bare model reads, so many as there are."""
    if ask.answer is not None:
        loaded.check_bare("an answer")
    return most if ask.answer is None else None


def _is_sound(ask: CaptureSpec) -> bool:
    return isinstance(ask.text, Sound) or (isinstance(ask.text, Prompt) and ask.text.medium.step is not None)


class Input(NamedTuple):
    """One kind of input: whether an ask that no kind before it takes is of it, and what makes its reader.

    What a reader needs for as long as texts are read, such as a process, it opens within the stack.
    """

    takes: Callable[[CaptureSpec], bool]
    reader: Callable[[LoadedModel, Where, int | None, ExitStack], Read]


INPUTS = (
    Input(lambda ask: ask.picture is not None, of_pictures),
    Input(_is_sound, of_sounds),
    Input(lambda ask: isinstance(ask.text, str), of_texts),
    Input(lambda ask: True, of_tokens),
)


def check_ids(loaded: LoadedModel, ids: Sequence[int]) -> None:
    """Raise UsageError for what is no token id, InputError for none, and for one that the model has no embedding of."""
    is_list = isinstance(ids, Collection) and not isinstance(ids, Set | Mapping)
    kinds = set(map(type, ids)) if is_list else {object}
    if not all(issubclass(kind, SupportsIndex) for kind in kinds):  # there may be millions of ids
        raise UsageError("expected a text, a Prompt or token ids as whole numbers", "give one text at a time")
    if not len(ids):
        raise InputError("there are no token ids", "give at least one")
    loaded.check_length(len(ids))
    place = loaded.unknown_id(ids)
    if place is not None:
        raise InputError(
            f"token {place} has the id {ids[place]}, and the vocabulary has {loaded.embeddings} ids",
            f"give ids from 0 to {(loaded.embeddings or 1) - 1}, of this model's own tokenizer",
        )


def ids_of(loaded: LoadedModel, answer: str) -> list[int]:
    """The tokens of an answer alone."""
    return _tokenised(loaded, "input_ids", answer, add_special_tokens=False) if answer else []


def _tokenised(loaded: LoadedModel, name: str, *texts: str, **options: bool) -> list[int]:
    """What the tokenizer hands on of texts under a name, where it is safe to call it."""
    with IsolatedCall(partial(_called, loaded.tokenizer), isolation_for(loaded)) as call:
        return call(name, texts, options)


def _called(tokenizer: Any, name: str, texts: Sequence[str], options: Mapping[str, bool]) -> list[int]:
    return list(tokenizer(*texts, **options).get(name) or ())


def _answered(loaded: LoadedModel, prompt: Prompt, answer: Sequence[int] | Literal[""] | None) -> Prompt:
    """The tokens with those of an answer behind them."""
    if not answer:
        return prompt if answer is None else replace(prompt, answer=len(prompt))
    check_ids(loaded, answer)
    return with_answer(loaded.tokenizer, prompt, answer)


def _behind_virtual(loaded: LoadedModel, prompt: Prompt) -> Prompt:
    if not loaded.virtual and not prompt.medium.unasked:
        return prompt
    return with_virtual(prompt, loaded.virtual, keys_alone=loaded.prefix is not None)


_Advance = Callable[[int], object]


@contextmanager
def reading_targets(loaded: LoadedModel, where: Where) -> Iterator[Callable[[CaptureSpec], Prompt]]:
    """What makes a Prompt of the target that an ask gives, as text or as ids. Raises as `text.target`."""
    with reading_target(loaded.tokenizer, where) as tokenised:

        def read(ask: CaptureSpec) -> Prompt:
            text, start, room = ask.target, start_token(loaded), loaded.geometry.decoder_positions
            if isinstance(text, str):
                return tokenised(text, start, end_tokens(loaded), room)
            return from_target_ids(loaded.tokenizer, text or (), start, room)

        yield read


def target(
    loaded: LoadedModel, source: Prompt, ask: CaptureSpec, engine: Engine, advance: _Advance
) -> tuple[Prompt, Any, DecodingSteps | None]:
    """What the decoder reads, what the manifest says of it, and of one that the model made the steps in which it did.

    Raises as `text.target`, UsageError for both ways.
    """
    how, steps = dict[str, Any](), None
    # Given, or what the model makes of the source, greedily.
    if ask.target is None:
        with within_memory(loaded, len(source)), watched_steps(loaded.model) as steps:
            made = translation(loaded, source, engine, ask.generate, advance)
        prompt = from_ids(loaded.tokenizer, [*made.start, *made.ids])
        how = {"asked": ask.generate, "made": len(made.ids), "stopped_by": made.stopped_by} | _ignored(loaded)
    elif ask.generate is not None:
        raise UsageError("a target was given, and one is to be generated", "leave out {generate} or {target}")
    else:
        with reading_targets(loaded, isolation_for(loaded)) as read:
            prompt = read(ask)
    return prompt, {"target": {"ids": list(prompt.ids), "generated": ask.target is None} | how}, steps


def generated(
    loaded: LoadedModel, prompt: Prompt, most: int, engine: Engine, advance: _Advance
) -> tuple[Prompt, Any, DecodingSteps]:
    """The prompt with what the model puts behind it, what the manifest says of that, and the steps that made it."""
    with within_memory(loaded, len(prompt) + most):
        extras = text_inputs(loaded, prompt)[1]
        with watched_steps(loaded.model) as steps:
            made = continuation(loaded, prompt.ids, most, engine, advance, **extras)
    facts = {"asked": most, "ids": made.ids, "stopped_by": made.stopped_by} | _ignored(loaded)
    return with_answer(loaded.tokenizer, prompt, made.ids), {"generated": facts}, steps


def _ignored(loaded: LoadedModel) -> dict[str, list[str]]:
    """The settings of the model's generation config that were not followed, where there are some."""
    names = say_ignored(loaded)
    return {"ignored": list(names)} if names else {}


def notes_of(loaded: LoadedModel, prompt: Prompt, pair: str = "--pair TEXT") -> Iterator[str]:
    """Of a text as the model is given it; pair: what gives the second text of a pair.

    What is changed of the model to read it; that the text brings a begin token besides the tokenizer's own, as a prompt
    does that a template rendered; what token types do not say.

    >>> list(notes_of(bert, from_text(bert.tokenizer, "a bank [SEP] a river")))
    ['[SEP] is within the text, which is read as one, with one token type; --pair TEXT is the second of a pair']
    """
    for line in loaded.read_otherwise(len(prompt)):
        yield f"read with {line}: these are not the weights that the checkpoint's own code computes"
    if _begins_twice(prompt, loaded.tokenizer, len(loaded.virtual)):
        name = prompt.tokens[len(loaded.virtual)]
        yield f"the text begins with {name}, and the tokenizer writes one too: two are read; leave it out of the text"
    if known_types(loaded) in (0, 1):
        return
    name, hands_on = loaded.tokenizer.sep_token, TYPES in loaded.tokenizer.model_input_names
    if hands_on and _has_separator(prompt, loaded.tokenizer):
        yield f"{name} is within the text, which is read as one, with one token type; {pair} is the second of a pair"
    if not hands_on and prompt.segments and has_two_types(loaded):
        kind = type(loaded.tokenizer).__name__
        yield (
            f"the pair is read with one token type: {kind} hands on none in this version of transformers; "
            f"{TYPES} in model_input_names of tokenizer_config.json changes that"
        )


def notes_of_answer(loaded: LoadedModel, prompt: Prompt, steps: DecodingSteps | None) -> Iterator[str]:
    """Of an answer or a target that the model made: where something else than the rows of the text chose its tokens.

    >>> list(notes_of_answer(demo, prompt, steps))
    ['2 of 8 generated tokens are not the likeliest of their rows: suppress_tokens of the generation config chose them']
    """
    if steps is None or not steps.states:
        return
    ids = prompt.ids[steps.first + 1 :]
    if others := steps.others(ids):
        names = ", ".join(choosing_settings(loaded.model))
        by = f"{names} of the generation config" if names else "the model's own code"
        yield f"{others} of {len(ids)} generated tokens are not the likeliest of their rows: {by} chose them"
    if family_of(loaded.model).positions_ahead:
        yield f"{loaded.name} predicts tokens from rows of their own, which are not those of the text"


def notes_of_steps(loaded: LoadedModel, difference: float | None) -> Iterator[str]:
    """Of an answer or a target that the model made from other rows than one pass gives, by more than rounding.

    difference: of the hidden states of its rows, as a share of their size.

    >>> list(notes_of_steps(moshi, 0.55))
    ['moshi generated from other rows than these: step by step, hidden states differ by up to 0.6 of their size']
    """
    if difference is not None and difference > tolerance(loaded.model.dtype)[1]:
        yield (
            f"{loaded.name} generated from other rows than these: step by step, hidden states differ by up to "
            f"{difference:.1g} of their size"
        )


def has_two_types(loaded: LoadedModel) -> bool:
    """Whether the tokenizer tells the texts of a pair apart where it is asked to."""
    return any(_tokenised(loaded, TYPES, "a", "a", return_token_type_ids=True))


def _begins_twice(prompt: Prompt, tokenizer: Any, at: int) -> bool:
    """Whether the token at an index is a begin token that the tokenizer added, followed by one from the text."""
    begins = {getattr(tokenizer, name, None) for name in ("bos_token_id", "cls_token_id")} - {None}
    first, second = prompt.ids[at : at + 1], prompt.ids[at + 1 : at + 2]
    if first != second or not begins.intersection(first):
        return False
    (start, stop), (again, end) = prompt.characters[at : at + 2]
    return start == stop and again < end


def _has_separator(prompt: Prompt, tokenizer: Any) -> bool:
    """Whether a separator is between two parts of a text that has one token type."""
    separator = getattr(tokenizer, "sep_token_id", None)
    if separator is None or prompt.segments or len(set(prompt.types)) > 1:
        return False
    places = [at for at, token in enumerate(prompt.ids) if token == separator]
    return any(not all(prompt.special[at:]) for at in places)


SHORT = {"class": "CLS", "distillation": "DIST", "detection": "DET", "register": "REG"}
OTHER = "choose a model that makes a token of each patch, as ViT and CLIP do"


class PatchTokens(NamedTuple):
    """The tokens of a picture: the number of a patch, counted row by row, or the name of what is none.

    grid: rows and columns of patches.

        >>> patch_tokens(vit, pixels, {}, (16, 16)).tokens[:3]
        ('[CLS]', 0, 1)
    """

    tokens: tuple[int | str, ...]
    grid: tuple[int, int]


def patch_tokens(
    model: nn.Module, pixels_BCHW: Tensor, inputs: Mapping[str, Any], side: tuple[int, int]
) -> PatchTokens:
    """The tokens that a vision tower makes of one picture; side: height and width of a patch, in pixels.

    inputs: further arguments of its forward. Raises ModelError where its tokens are not patches: where one is made of
    several, or patches are left out by chance; ForwardError where its own code fails.
    """
    grid = pixels_BCHW.shape[-2] // side[0], pixels_BCHW.shape[-1] // side[1]
    states = _States(model, pixels_BCHW, inputs)
    if not torch.equal(states.plain_TE, states.of(pixels_BCHW)):
        raise ModelError("the model leaves out patches by chance, so that its tokens differ from pass to pass", OTHER)

    # Each patch has a number; pixels at the edge that fill no patch stay as they are.
    count, number_HW = grid[0] * grid[1], torch.full(pixels_BCHW.shape[-2:], -1)
    of_grid = torch.arange(count).view(grid).repeat_interleave(side[0], 0).repeat_interleave(side[1], 1)
    number_HW[: of_grid.shape[0], : of_grid.shape[1]] = of_grid
    number_HW = number_HW.to(pixels_BCHW.device)
    noise_BCHW = _noise(pixels_BCHW)
    moved_2NT = torch.stack(
        [
            states.moved(states.of(torch.where(number_HW >= 0, pixels_BCHW + noise_BCHW * on_HW, pixels_BCHW)))
            for value in (0, 1)
            for bit in range(max(1, (count - 1).bit_length()))
            for on_HW in [(number_HW >> bit) & 1 == value]
        ]
    ).unflatten(0, (2, -1))

    # A token of one patch moves with a bit's zeros or with its ones; with both if several patches are in it.
    each_NT = moved_2NT.sum(0)
    if (each_NT > 1).any():
        raise ModelError("the model makes tokens of several patches each", OTHER)
    bit_N1 = 2 ** torch.arange(len(each_NT), device=each_NT.device)[:, None]
    number_T, of_patch_T = (moved_2NT[1] * bit_N1).sum(0), each_NT.all(0)
    names = dict(_names(states, ~of_patch_T))
    tokens = (int(number_T[at]) if of_patch else names.get(at, f"[{at}]") for at, of_patch in enumerate(of_patch_T))
    return PatchTokens(tuple(tokens), grid)


class _States:
    """What enters the first attention layer of a model, (T, E), for changed pixels or a changed parameter."""

    def __init__(self, model: nn.Module, pixels_BCHW: Tensor, inputs: Mapping[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        self.part = bare_model(model) if hooks_around(model) else backbone(model)
        self.pixels_BCHW, self._entered = pixels_BCHW, list[Tensor]()
        self.plain_TE = self.of(pixels_BCHW)

    def of(self, pixels_BCHW: Tensor, changed: Mapping[str, Tensor] | None = None) -> Tensor:
        """The states; changed: parameters in place of the model's own."""
        self._entered.clear()
        modules = attention_modules(self.model)
        hooks = [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in modules]
        with suppress(_ReachedError), temporary(hooks), own_errors(self.model), running(self.model, None):
            functional_call(self.part, dict(changed or {}), (pixels_BCHW,), dict(self.inputs))
        states = self._entered[0] if self._entered else torch.empty(0)
        if states.ndim != 3 or len(states) != 1:
            raise ModelError("the first attention layer of the model does not see all of the picture at once", OTHER)
        return states[0]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        values = (*args, *kwargs.values())
        tensors = (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
        self._entered += [value.detach().clone() for value in tensors][:1]
        raise _ReachedError

    def moved(self, states_TE: Tensor) -> Tensor:
        """Which tokens differ from what they are unchanged, (T,) boolean."""
        difference_T = (states_TE - self.plain_TE).float().norm(dim=-1)
        return difference_T > 1e-3 * difference_T.max()


def _names(states: _States, other_T: Tensor) -> Iterator[tuple[int, str]]:
    """{position: name} of the tokens that are no patches, by the parameter that each is made of."""
    width = states.plain_TE.shape[-1]
    outside = [  # of the layers, which change tokens that are there already
        (name, parameter)
        for name, parameter in states.part.named_parameters()
        if parameter.shape[-1:] == (width,) and not re.search(r"\.\d+\.", name)
    ]
    for name, parameter in reversed(outside) if other_T.any() else ():
        moved_T = states.moved(states.of(states.pixels_BCHW, {name: parameter + _noise(parameter)}))
        at = moved_T.nonzero()[:, 0].tolist()
        if at and not (moved_T & ~other_T).any():
            word = re.sub(r"_?(tokens?|embeddings?|embed)$", "", name.rpartition(".")[2])
            word = SHORT.get(word, word.upper())
            yield from ((place, f"[{word}{number if at[1:] else ''}]") for number, place in enumerate(at))


def _noise(like: Tensor) -> Tensor:
    """Numbers that no norm takes out again, the same every time."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)

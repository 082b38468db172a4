"""How a text is read otherwise than whoever gave it may think, in lines for a person and for the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from attnscope.hooks.forward import TYPES, known_types
from attnscope.hooks.report import tolerance
from attnscope.inputs.prompt import place
from attnscope.model.families import family_of
from attnscope.model.libraries import choosing_settings
from attnscope.utils.isolation import IsolatedCall as Apart

if TYPE_CHECKING:
    from attnscope.hooks.generation import DecodingSteps
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.loaded import LoadedModel


def notes_of(loaded: LoadedModel, prompt: Prompt, pair: str = "--pair TEXT") -> Iterator[str]:
    """Of a text as the model is given it; pair: what gives the second text of a pair.

    What is changed of the model to read it; that the text brings a begin token beside the tokenizer's own, as a prompt
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
    if not hands_on and prompt.segments and _has_two_types(loaded):
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


def _has_two_types(loaded: LoadedModel) -> bool:
    """Whether the tokenizer tells the texts of a pair apart where it is asked to."""
    with Apart(partial(_types_of, loaded.tokenizer), place(loaded.tokenizer, loaded.brought, False)) as types_of:
        return any(types_of("a", "a"))


def _types_of(tokenizer: Any, text: str, pair: str) -> list[int]:
    return list(tokenizer(text, pair, return_token_type_ids=True).get(TYPES) or ())


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

"""The model continues its prompt by itself: greedy, with its cache, and a mask that hides nothing."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnscope.errors import AttnscopeError, ModelError, first_line
from attnscope.inputs.prompt import bytes_of
from attnscope.model.libraries import following, ignored_settings, stop_strings
from attnscope.model.loaded import WHOLE_MODEL
from attnscope.model.selection import SEQ2SEQ
from attnscope.seam.decoding import positions_of_one_pass, reading_as_given
from attnscope.seam.failures import hook_error
from attnscope.seam.inputs import GLOBAL, given_of
from attnscope.seam.listen import running
from attnscope.utils.memory import is_out_of_memory

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.loaded import LoadedModel
    from attnscope.seam.engines import Engine

logger = logging.getLogger(__name__)
MOST_MADE = 64  # tokens of a target that is not given
END, STOP, NUMBER = "end token", "stop string", "number asked for"
DEFAULT, POSITIONS, OWN = "default number", "positions of the decoder", "the model's own code"


class Continuation(NamedTuple):
    """What a model generated, and why it ends there.

    ids: of a causal model with the end token, which belongs to its answer; of an encoder-decoder without it, since the
    decoder does not read it. stopped_by: END, STOP, NUMBER, DEFAULT (no number was given), POSITIONS (the decoder has
    no more of them) or OWN. start: what a decoder begins with by itself.
    """

    ids: list[int]
    stopped_by: str
    start: Sequence[int] = ()


def continuation(
    loaded: LoadedModel,
    ids: Sequence[int],
    most: int,
    engine: Engine,
    advance: Callable[[int], object] = lambda tokens: None,
    **inputs: Any,
) -> Continuation:
    """What the model puts after a prompt: at most `most` tokens.

    As its own generation config says, but without sampling and beams, so that it repeats: see `model.generating`.
    engine: whose attention implementation it runs under. advance: called with 1 for every new token. inputs: what the
    model is given with the ids. Raises ModelError where the model has no generation of its own, or fails in it.

        >>> continuation(loaded, loaded.tokenizer("the bank").input_ids, 8, ENGINES["eager"]).ids
    """
    # What is given back is the whole text; the prompt is no part of the answer.
    ids_BT = torch.tensor([list(ids)], device=loaded.device)
    text_BT = greedy(loaded, ids_BT, most, engine.implementation, streamer=_Steps(advance), **inputs)
    generated: list[int] = text_BT[0, len(ids) :].tolist()

    # What is measured is one pass over the text, in which such layers see more than they did here.
    windows = [layer.generated_window for layer in loaded.geometry.layers if layer.generated_window]
    if windows and len(generated) > min(windows):
        logger.warning(
            "while it generated, %s saw the prompt and the last %s of its own tokens; read again in one pass it sees "
            "all of them",
            loaded.name,
            min(windows),
        )
    return Continuation(generated, _ended(loaded, ids, generated) or (OWN if len(generated) < most else NUMBER))


def _ended(loaded: LoadedModel, before: Sequence[int], generated: Sequence[int]) -> str | None:
    """What the text itself ends with: END or STOP; None where something else ended it."""
    if generated and ends(loaded, generated[-1]):
        return END
    stop = _StopStrings.of(loaded)
    return STOP if generated and stop is not None and stop.ends([*before, *generated]) else None


def say_ignored(loaded: LoadedModel) -> tuple[str, ...]:
    """The settings of the model's generation config that an answer does not follow, after a line that names them."""
    names = ignored_settings(loaded.model)
    if names:
        logger.warning("ignored in the generation config of %s: %s", loaded.name, ", ".join(names))
    return names


def greedy(
    loaded: LoadedModel,
    ids_BT: Tensor,
    most: int,
    implementation: str | None = None,
    *,
    settings: bool = True,
    **how: Any,
) -> Tensor:
    """Texts of one length with up to so many more tokens, each the likeliest: (B, T) -> (B, T + most) at the most.

    ids_BT: also the features of sounds, whose texts begin with the model's own start tokens. settings: whether the
    model's generation config has a part in which token is the likeliest, and in where the text ends. how: further
    arguments of the model's `generate`. Raises as `continuation`.
    """
    model, otherwise = loaded.model, _otherwise(loaded)
    check_generates(loaded, otherwise)
    start = None if ids_BT.is_floating_point() else 1 if loaded.geometry.task == SEQ2SEQ else ids_BT.shape[1]
    if start is not None:
        # Without it, transformers takes every token that equals the pad token for padding: with one token for both, the
        # begin token too.
        how["attention_mask"] = torch.ones_like(ids_BT)
    with (
        running(model, implementation),
        positions_of_one_pass(model),
        reading_as_given(loaded, ids_BT, otherwise),
    ):
        try:
            if settings and (stop := _StopStrings.of(loaded)):
                how["stopping_criteria"] = [stop]
            # Without sampling and beams the same text gets the same answer every time.
            with following(model, most, start, settings):
                text_BT: Tensor = model.generate(
                    ids_BT,
                    do_sample=False,
                    num_beams=1,
                    num_return_sequences=1,
                    return_dict_in_generate=False,
                    **{"max_length" if _in_parts(model) else "max_new_tokens": most},
                    **how,
                )
        except Exception as error:  # any family's own code
            if is_out_of_memory(error) or isinstance(error, AttnscopeError):
                raise
            if (failed := hook_error(error, model)) is not None:
                raise failed from error
            raise ModelError(f"{loaded.name} cannot generate: {first_line(error)}", otherwise) from error
    return text_BT


def check_generates(loaded: LoadedModel, otherwise: str) -> None:
    """Raise ModelError for a model that generates no text; otherwise: what to do then."""
    loaded.check_logits("a generated " + ("target" if loaded.geometry.task == SEQ2SEQ else "answer"), otherwise)
    if not getattr(loaded.model, "can_generate", lambda: False)():
        raise ModelError(f"{loaded.name} cannot generate", otherwise)


def _otherwise(loaded: LoadedModel) -> str:
    if loaded.geometry.task == SEQ2SEQ:
        return "give the target with {target=TEXT}, or read its encoder alone: {task=encoder}"
    return "give the answer with {answer=TEXT}" if loaded.has_logits else WHOLE_MODEL


def translation(
    loaded: LoadedModel,
    source: Prompt,
    engine: Engine,
    most: int | None = None,
    advance: Callable[[int], object] = lambda tokens: None,
) -> Continuation:
    """What an encoder-decoder makes of a source, greedily, and what its decoder begins with.

    At most `most` new tokens, MOST_MADE without it, and no more than the decoder can read after its start. Raises as
    `continuation`.
    """
    limit, room, steps = most or MOST_MADE, loaded.geometry.decoder_positions, _Steps(advance)
    how: dict[str, Any] = {"streamer": steps}
    check_generates(loaded, _otherwise(loaded))
    if _in_parts(loaded.model):
        how["force_unique_generate_call"] = True  # one part, with the tokens that it begins with
    reads, inputs = given_of(loaded, source)
    how |= {name: value for name, value in inputs.items() if name == GLOBAL}
    most_new = limit if room is None else min(limit, room - 1)
    target = greedy(loaded, reads, most_new, engine.implementation, **how)[0].tolist()

    # How many tokens the decoder began with, a language among them, shows in the first that its code handed on.
    start, generated = target[: steps.start or 1], target[steps.start or 1 :]
    why = _ended(loaded, start, generated)
    if why is None and len(generated) >= limit:
        why = NUMBER if most else DEFAULT
    if why is None:
        why = OWN if room is None or len(target) < room else POSITIONS
    return Continuation(generated[:-1] if why == END else generated, why, start)


def _in_parts(model: Any) -> bool:
    """Whether it reads long sounds in parts, as Whisper does.

    Its number of new tokens is then `max_length`, which it cuts to what its decoder reads after its start tokens.
    """
    return "force_unique_generate_call" in inspect.signature(model.generate).parameters


def start_token(loaded: LoadedModel) -> int | None:
    """The token that an encoder-decoder's decoder begins with; None where its configs do not say."""
    configs = (getattr(loaded.model, "generation_config", None), loaded.model.config)
    tokens = (getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id") for config in configs)
    return next((token for token in tokens if isinstance(token, int)), None)


def ends(loaded: LoadedModel, token: int) -> bool:
    """Whether generation ends with this token."""
    end = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    end = end.tolist() if isinstance(end, Tensor) else end
    return token in (end if isinstance(end, list | tuple) else [end])


def end_tokens(loaded: LoadedModel) -> frozenset[int]:
    """The tokens that a text of this model ends with, as its configs and its tokenizer name them.

    An encoder-decoder of two BERTs has no end token in its tokenizer: its own config has it, or it is what separates.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    configs = (
        model.config,
        getattr(model.config, "decoder", None),
        getattr(model, "generation_config", None),
        tokenizer,
    )
    for name in ("eos_token_id", "sep_token_id"):
        values = [getattr(config, name, None) for config in configs]
        tokens = {token for value in values for token in (value if isinstance(value, list) else [value])}
        if tokens := {token for token in tokens if isinstance(token, int)}:
            return frozenset(tokens)
    return frozenset()


class _Steps:
    """What transformers hands each new token to, after the prompt."""

    def __init__(self, advance: Callable[[int], object]) -> None:
        self.advance, self.start = advance, 0  # start: how many tokens there were before the first new one

    def put(self, ids: Tensor) -> None:
        if self.start:
            self.advance(1)
        self.start = self.start or ids.shape[-1]

    def end(self) -> None:
        """Nothing is left to do."""


class _StopStrings:
    """Whether the last token of a text completes one of some strings: a stopping criterion of transformers.

    Its own goes through the whole vocabulary for every string; this reads the last tokens, whatever they are.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self.tokenizer, self.strings = tokenizer, [text.encode("utf-8", "surrogatepass") for text in strings]

    @classmethod
    def of(cls, loaded: LoadedModel) -> _StopStrings | None:
        """That of a model's generation config; None where it has no such strings."""
        strings = stop_strings(loaded.model)
        return cls(loaded.tokenizer, strings) if strings else None

    def __call__(self, ids_BT: Tensor, scores: object = None, **more: object) -> Tensor:
        return torch.tensor([self.ends(row) for row in ids_BT.tolist()], device=ids_BT.device)

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether one of the strings ends within the last of these tokens."""
        tokens = bytes_of(self.tokenizer, ids[-max(map(len, self.strings)) - 1 :])  # a token is a byte at the least
        text, last = b"".join(tokens), len(tokens[-1])
        return any(text.find(string, max(0, len(text) - last - len(string) + 1)) >= 0 for string in self.strings)

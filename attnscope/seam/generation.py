"""The model goes on from its prompt by itself: greedy, with its cache, and a mask that hides nothing."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscope.errors import AttnscopeError, ModelError, first_line
from attnscope.memory import is_out_of_memory
from attnscope.model.loaded import WHOLE_MODEL
from attnscope.seam.inputs import GLOBAL, given_of
from attnscope.seam.listen import running
from attnscope.seam.steps import positions_of_one_pass, reading_as_given
from attnscope.stacks import SEQ2SEQ

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel
    from attnscope.seam.engines import Engine
    from attnscope.text.prompt import Prompt

logger = logging.getLogger(__name__)
MOST_MADE = 64  # tokens of a target that nobody gave
WHISPER_START = 4  # tokens that it begins with at most: start, language, task, no timestamps


def continuation(
    loaded: LoadedModel,
    ids: Sequence[int],
    most: int,
    engine: Engine,
    advance: Callable[[int], object] = lambda tokens: None,
    **inputs: Any,
) -> list[int]:
    """The ids that the model puts behind a prompt: at most `most`, fewer where the last of them is an end token.

    As its own generation config says, but without sampling and beams, so that it repeats. engine: whose attention
    implementation it runs under. advance: called with 1 for every new token. inputs: what the model is given beside the
    ids. Raises ModelError where the model has no generation of its own, or fails in it.

        >>> continuation(loaded, loaded.tokenizer("the bank").input_ids, 8, ENGINES["eager"])
    """
    ids_BT = torch.tensor([list(ids)], device=loaded.device)
    made_BT = greedy(loaded, ids_BT, most, engine.implementation, streamer=_Steps(advance), **inputs)[:, len(ids) :]
    _say_window(loaded, made_BT.shape[1])
    return made_BT[0].tolist()


def _say_window(loaded: LoadedModel, made: int) -> None:
    """Say where layers saw fewer of the generated tokens than they do in one pass over the text."""
    windows = [one.generated_window for one in loaded.geometry.layers if one.generated_window]
    if windows and made > min(windows):
        logger.warning(
            "while it generated, %s saw the prompt and the last %s of its own tokens; read again in one pass it sees "
            "all of them",
            loaded.name,
            min(windows),
        )


def greedy(loaded: LoadedModel, ids_BT: Tensor, most: int, implementation: str | None = None, **how: Any) -> Tensor:
    """Texts of one length with up to so many more tokens, each the likeliest: (B, T) -> (B, T + most) at the most.

    ids_BT: also the features of sounds, whose texts begin with the model's own start tokens.
    how: further arguments of the model's `generate`. Raises as `continuation`.
    """
    model, otherwise = loaded.model, _otherwise(loaded)
    check_generates(loaded, otherwise)
    if not ids_BT.is_floating_point():
        # Without it, transformers takes every token that equals the pad token for padding: with one token for both, the
        # begin token too.
        how["attention_mask"] = torch.ones_like(ids_BT)
    with (
        running(model, implementation),
        positions_of_one_pass(model),
        reading_as_given(loaded, ids_BT, otherwise),
    ):
        try:
            made: Tensor = model.generate(
                ids_BT,
                do_sample=False,
                num_beams=1,
                num_return_sequences=1,
                max_new_tokens=most,
                return_dict_in_generate=False,
                **how,
            )
        except Exception as error:  # any family's own code
            if is_out_of_memory(error) or isinstance(error, AttnscopeError):
                raise
            raise ModelError(f"{loaded.name} cannot generate: {first_line(error)}", otherwise) from error
    return made


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
) -> list[int]:
    """What an encoder-decoder's decoder reads while it makes its own text of a source, greedily: ids, the start first.

    At most `most` new tokens, MOST_MADE without it, and no more than the decoder can read behind its start; without the
    end token, which it makes and does not read. Raises as `continuation`.
    """
    most, room = most or MOST_MADE, loaded.geometry.max_positions
    how: dict[str, Any] = {"streamer": _Steps(advance)}
    begins = 1
    check_generates(loaded, _otherwise(loaded))
    if "force_unique_generate_call" in inspect.signature(loaded.model.generate).parameters:
        # Whisper's own `generate` reads long sounds in parts, without the tokens that it begins with; so it is one part
        # with all of them.
        how["force_unique_generate_call"] = True
        begins = WHISPER_START
    most = most if room is None else min(most, room - begins)
    reads, beside = given_of(loaded, source)
    how |= {name: one for name, one in beside.items() if name == GLOBAL}
    made = greedy(loaded, reads, most, engine.implementation, **how)[0].tolist()
    return made[:-1] if len(made) > 1 and ends(loaded, made[-1]) else made


def start_token(loaded: LoadedModel) -> int | None:
    """The token that an encoder-decoder's decoder begins with; None where its configs do not say."""
    configs = (getattr(loaded.model, "generation_config", None), loaded.model.config)
    found = (getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id") for config in configs)
    return next((one for one in found if isinstance(one, int)), None)


def ends(loaded: LoadedModel, token: int) -> bool:
    """Whether generation ends with this token."""
    end = loaded.model.generation_config.eos_token_id
    return token in (end if isinstance(end, list) else [end])


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
        found = {token for value in values for token in (value if isinstance(value, list) else [value])}
        if found := {token for token in found if isinstance(token, int)}:
            return frozenset(found)
    return frozenset()


class _Steps:
    """What transformers hands each new token to, after the prompt."""

    def __init__(self, advance: Callable[[int], object]) -> None:
        self.advance, self.begun = advance, False

    def put(self, ids: Tensor) -> None:
        if self.begun:
            self.advance(1)
        self.begun = True

    def end(self) -> None:
        """Nothing is left to do."""

"""The model continues its prompt by itself: greedy, with its cache, and a mask that hides nothing.

The steps of a generation are compared with the one pass in which its text is read: same tokens, positions and rows.
Whether a model is causal is known by its config and class, and as it is heard over a few tokens.

Shapes: B text, T token, S step, E hidden size.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from attnscope.errors import AttnscopeError, ModelError, first_line
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.forward import GLOBAL, backbone, bare_model, hook_error, text_inputs
from attnscope.hooks.listen import listen, running
from attnscope.hooks.report import turned
from attnscope.inputs.labels import bytes_of
from attnscope.model.libraries import following, ignored_settings, stop_strings
from attnscope.model.loaded import WHOLE_MODEL
from attnscope.model.selection import SEQ2SEQ
from attnscope.utils.memory import is_out_of_memory

if TYPE_CHECKING:
    from attnscope.hooks.engines import Engine
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.loaded import LoadedModel

POSITIONS_OF_IDS = "create_position_ids_from_input_ids"  # of modules whose positions leave out padding tokens
TOKENS_BEFORE = ("cache_length", "past_key_values_length")  # arguments of these; the first from transformers 5.24 on


@contextmanager
def positions_of_one_pass(model: nn.Module) -> Iterator[None]:
    """While open, a step of a generation gives its tokens the positions that they have in one pass over the text.

    `generate` counts all tokens from 0. RoBERTa and its kin count from the row of the padding token and leave out the
    padding tokens of a text, and with a cache even their own code counts those.

        >>> with positions_of_one_pass(roberta):
        ...     roberta.generate(ids, max_new_tokens=8)
    """
    with ExitStack() as hooks:
        for module in bare_model(model).modules():
            if hasattr(module, POSITIONS_OF_IDS):
                hooks.enter_context(module.register_forward_pre_hook(_PositionCounter(), with_kwargs=True))
        yield


class _PositionCounter:
    """Tells a module that makes positions of ids how many tokens before these have one."""

    def __init__(self) -> None:
        self.counts_BT = torch.zeros(1, 0, dtype=torch.bool)  # which tokens so far have one

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        call = inspect.signature(module.forward).bind(*args, **kwargs)
        before = next((name for name in TOKENS_BEFORE if name in call.signature.parameters), None)
        ids_BT = call.arguments.get("input_ids")
        if ids_BT is None or before is None:
            return None
        past = call.arguments.get(before, 0)
        counts_BT = ids_BT != module.padding_idx
        earlier_BT = self.counts_BT[:, :past] if past else counts_BT[:, :0]
        self.counts_BT = torch.cat([earlier_BT, counts_BT], 1)
        count_B = earlier_BT.sum(1)
        call.arguments[before] = int(count_B[0]) if len(count_B) == 1 else count_B[:, None]
        if "position_ids" in call.signature.parameters:
            call.arguments["position_ids"] = None
        return call.args, call.kwargs


@contextmanager
def reading_as_given(loaded: LoadedModel, ids_BT: Tensor, otherwise: str) -> Iterator[None]:
    """While open, the model's first run must read the ids of its text, and nothing after them.

    Raises ModelError, with otherwise as the next step, where the family's own code for generation puts tokens there, as
    XLM does with a mask token at each step: the rows that make its answer are then in no pass over the text.
    """
    model = bare_model(loaded.model)

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hook.remove()
        reads_BT = kwargs.get("input_ids")
        if reads_BT is not None and not torch.equal(reads_BT, ids_BT[:, -reads_BT.shape[1] :]):
            added = int(reads_BT[0, -1])
            raise ModelError(
                f"{loaded.name} adds token {added} to the text at each step of a generation: no row of the text makes "
                "the answer",
                otherwise,
            )

    with model.register_forward_pre_hook(check, with_kwargs=True) as hook:
        yield


@dataclass
class DecodingSteps:
    """The steps in which an answer or a target was made: what each of its tokens was taken from.

    states: the last hidden state of the row that predicts it, (E) each. likeliest: the token that its logits make the
    likeliest, before any setting of the generation config applies. first: the row of the first.
    """

    states: list[Tensor] = field(default_factory=list)
    likeliest: list[Tensor] = field(default_factory=list)
    first: int = 0

    def others(self, ids: Sequence[int]) -> int:
        """How many tokens of the answer are not the likeliest of their rows: a penalty or a ban chose them."""
        return sum(token != int(likeliest) for token, likeliest in zip(ids, self.likeliest, strict=False))

    def difference(self, states_TE: Tensor) -> float | None:
        """How far the rows of a pass over text and answer are from these: the largest, as a share of their size.

        states_TE: of the pass. None where its rows are not those of the tokens.
        """
        rows_SE = states_TE[self.first : self.first + len(self.states)].float()
        if not self.states or rows_SE.shape != (len(self.states), *self.states[0].shape):
            return None
        steps_SE = torch.stack([state_E.to(rows_SE.device) for state_E in self.states]).float()
        return float(((rows_SE - steps_SE).norm(dim=-1) / rows_SE.norm(dim=-1)).max())


@contextmanager
def watched_steps(model: nn.Module) -> Iterator[DecodingSteps]:
    """While open, the steps are noted in which this thread lets the model continue one text.

    >>> with watched_steps(loaded.model) as steps:
    ...     ids = continuation(loaded, ids, 8, ENGINES["eager"]).ids
    >>> steps.others(ids)
    0
    """
    steps, rows = DecodingSteps(), 0

    def note_likeliest(output: Any) -> None:
        steps.likeliest.append(output.logits[0, -1].float().argmax())

    def note_state(states_BTE: Tensor) -> None:
        nonlocal rows
        before, rows = rows, states_BTE.shape[1]
        if rows not in (1, before + 1):  # the text begins; Whisper asks for the language before
            steps.states, steps.likeliest, steps.first = [], [], rows - 1
        steps.states.append(states_BTE[0, -1])

    with watched_states(model, note_state), _watched(bare_model(model), note_likeliest):
        yield steps


def watched_states(model: nn.Module, note: Callable[[Tensor], object]) -> AbstractContextManager[Any]:
    """While open, the last hidden states of this thread's runs of the model's decoder are handed to `note`, (B, T, E).

    Nothing is, of a class that does not say which of its modules that is.
    """
    bare, body = bare_model(model), backbone(model)
    decoder = getattr(bare, "get_decoder", lambda: body)()
    if all(decoder is not module for module in body.modules()):  # ModernBERT's is its LM head
        decoder = body
    if decoder is bare:
        inner = [child for child in bare.children() if hasattr(child, "get_decoder")]
        decoder = inner[0] if len(inner) == 1 else None
    if decoder is None:
        return nullcontext()
    return _watched(decoder, lambda output: note(output[0]))


def _watched(module: nn.Module, note: Callable[[Any], object]) -> AbstractContextManager[Any]:
    """While open, what the module gives in this thread is handed to `note`: others may read the model meanwhile."""
    thread = threading.get_ident()

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            note(output)

    return module.register_forward_hook(hook)


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
    text_BT = greedy(loaded, ids_BT, most, engine.implementation, streamer=_Streamer(advance), **inputs)
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
    return Continuation(generated, _ending(loaded, ids, generated) or (OWN if len(generated) < most else NUMBER))


def _ending(loaded: LoadedModel, before: Sequence[int], generated: Sequence[int]) -> str | None:
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
    model, otherwise = loaded.model, _next_step(loaded)
    check_generates(loaded, otherwise)
    start = None if ids_BT.is_floating_point() else 1 if loaded.geometry.task == SEQ2SEQ else ids_BT.shape[1]
    if start is not None:
        # Without it, transformers takes every token that equals the pad token for padding: with one token for both, the
        # begin token too.
        how["attention_mask"] = torch.ones_like(ids_BT)
    with running(model, implementation), positions_of_one_pass(model), reading_as_given(loaded, ids_BT, otherwise):
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


def _next_step(loaded: LoadedModel) -> str:
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
    limit, room, steps = most or MOST_MADE, loaded.geometry.decoder_positions, _Streamer(advance)
    how: dict[str, Any] = {"streamer": steps}
    check_generates(loaded, _next_step(loaded))
    if _in_parts(loaded.model):
        how["force_unique_generate_call"] = True  # one part, with the tokens that it begins with
    reads, inputs = text_inputs(loaded, source)
    how |= {name: value for name, value in inputs.items() if name == GLOBAL}
    most_new = limit if room is None else min(limit, room - 1)
    target = greedy(loaded, reads, most_new, engine.implementation, **how)[0].tolist()

    # How many tokens the decoder began with, a language among them, shows in the first that its code handed on.
    start, generated = target[: steps.start or 1], target[steps.start or 1 :]
    why = _ending(loaded, start, generated)
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


class _Streamer:
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


TOKENS = 3  # as few as show a window of two keys, and what sees ahead of it


def check_causal(loaded: LoadedModel, what: str) -> None:
    """Raise ModelError where `what` is for a causal model, and this one is none or is heard to look both ways.

    And where `what` reads texts as they are, and an adapter puts tokens before them.

    >>> check_causal(attnscope.load("demo"), "a scan")
    """
    loaded.check_task(what)
    loaded.check_bare(what)
    ids_BT = torch.arange(TOKENS, device=loaded.device)[None] % (loaded.embeddings or TOKENS)
    report = listen(
        loaded.model, ids_BT, lambda call: None, engine=UNCHECKED, windows=loaded.geometry.windows, computed=False
    )
    for line in turned(report.calls):
        raise ModelError(f"{what} is for a causal model, and {loaded.name} is none: {line}", "choose another")

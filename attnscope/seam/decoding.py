"""The steps of a generation, compared with the one pass in which its text is read: same tokens, positions and rows.

Shapes: B text, T token, S step, E hidden size.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnscope.errors import ModelError
from attnscope.seam.forward import backbone, bare_model

if TYPE_CHECKING:
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
                hooks.enter_context(module.register_forward_pre_hook(_Counted(), with_kwargs=True))
        yield


class _Counted:
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

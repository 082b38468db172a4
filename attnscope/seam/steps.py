"""The steps of a generation, held against the one pass in which its text is read: same tokens, positions and rows.

Shapes: B text, T token, S step, E hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnscope.errors import ModelError
from attnscope.seam.forward import bare_model

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

POSITIONS_OF_IDS = "create_position_ids_from_input_ids"  # of modules whose positions leave out padding tokens


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
        self.counts_BT: Tensor | None = None  # which tokens so far have one
        self.before = 0  # keys before the text that are no tokens of it

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        call = inspect.signature(module.forward).bind(*args, **kwargs)
        ids_BT, past = call.arguments.get("input_ids"), call.arguments.get("past_key_values_length", 0)
        if ids_BT is None:
            return None
        counts_BT = ids_BT != module.padding_idx
        if self.counts_BT is None or past <= self.before:  # a text begins
            self.before, self.counts_BT = past, counts_BT[:, :0]
        earlier_BT = self.counts_BT[:, : past - self.before]
        self.counts_BT = torch.cat([earlier_BT, counts_BT], 1)
        count_B = self.before + earlier_BT.sum(1)
        call.arguments["past_key_values_length"] = int(count_B[0]) if len(count_B) == 1 else count_B[:, None]
        if "position_ids" in call.signature.parameters:
            call.arguments["position_ids"] = None
        return call.args, call.kwargs


@contextmanager
def reading_as_given(loaded: LoadedModel, ids_BT: Tensor, otherwise: str) -> Iterator[None]:
    """While open, the model's first run must read the ids of its text, and nothing behind them.

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

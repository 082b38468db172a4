"""What a model's forward is given of prompts: ids, and what some bring with them or instead of them.

Shapes: B text, T token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscope.model.modules import cache_argument
from attnscope.seam.forward import arguments

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt
    from attnscope.model.loaded import LoadedModel


TYPES, GLOBAL = "token_type_ids", "global_attention_mask"  # arguments of a model's forward


def given(loaded: LoadedModel, prompts: Sequence[Prompt], ids_BT: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """What the model's forward is given: its first argument, and what else the prompts bring, by name.

    The first argument is the ids, unless the prompts bring it: the features of a sound, (B, F, frames).
    """
    names = dict.fromkeys(name for prompt in prompts for name in prompt.medium.inputs)
    inputs: dict[str, Any] = {}
    for name in names:
        value = torch.cat([prompt.medium.inputs[name] for prompt in prompts]).to(loaded.device)
        inputs[name] = value.to(loaded.model.dtype) if value.is_floating_point() else value

    # Padding has the type of the text's last token; a text without any has 0.
    if any(prompt.types for prompt in prompts):
        tokens, types = ids_BT.shape[1], [prompt.types or (0,) for prompt in prompts]
        padded = [[*own, *own[-1:] * (tokens - len(own))][:tokens] for own in types]
        inputs[TYPES] = torch.tensor(padded, device=loaded.device)
    reads = inputs.pop(getattr(loaded.model, "main_input_name", "input_ids"), ids_BT)
    if prompts[0].medium.unasked and (cache := cache_argument(loaded.model)):
        inputs[cache] = loaded.prefix
    return reads, inputs


def known_types(loaded: LoadedModel) -> int | None:
    """How many token types the model tells apart: 0 where it is given none, None where its config does not say.

    >>> known_types(bert)
    2
    """
    if TYPES not in arguments(loaded.model):
        return 0
    count = getattr(loaded.model.config, "type_vocab_size", None)
    return count if isinstance(count, int) else None


def given_of(
    loaded: LoadedModel, prompt: Prompt, source: Prompt | None = None, most: int | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """The same of one text; of an encoder-decoder the source is first, and the prompt what its decoder reads.

    most: so many tokens from the beginning of each; of one that brings more than its ids all, since parts of it differ.
    """

    def ids(text: Prompt) -> Tensor:
        return torch.tensor([text.ids if text.medium.inputs else text.ids[:most]], device=loaded.device)

    first = source or prompt
    reads, inputs = given(loaded, [first], ids(first))
    return reads, inputs | ({} if source is None else {"decoder_input_ids": ids(prompt)})

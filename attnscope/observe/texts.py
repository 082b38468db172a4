"""What metrics must know of the texts of one pass.

Shapes: B text, T token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attnscope.keep.groups import marked
from attnscope.keep.request import Asked
from attnscope.metrics.texts import Texts
from attnscope.model.selection import is_causal

if TYPE_CHECKING:
    from attnscope.inputs.prompt import Prompt


def texts_of(asked: Sequence[Asked], device: str, stack: str) -> Texts:
    """The texts of a stack side by side, and the tokens of them that are asked about."""
    prompts = [one.prompt for one in asked]
    longest = max(len(prompt) for prompt in prompts)
    ids_BT = side_by_side([prompt.ids_apart for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    query_BT = marked([one.chosen.query for one in asked], longest, default=True)
    most_keys = max(len(one.looked_at) for one in asked)
    key_BT = marked([one.chosen.key for one in asked], most_keys, default=False)
    answers = _answers(prompts) if is_causal(stack) else None
    return Texts(ids_BT, lengths, query_BT, key_BT, answers, stack, prompts[0].medium.unasked).to(torch.device(device))


def _answers(prompts: Sequence[Prompt]) -> torch.Tensor | None:
    """Where each text's answer begins, its length where it has none, (B,); None where none has one."""
    if all(prompt.answer is None for prompt in prompts):
        return None
    return torch.tensor([len(prompt) if prompt.answer is None else prompt.answer for prompt in prompts])


def side_by_side(ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Ids of several texts, (B, T): shorter ones are filled up with their last."""
    longest = max(map(len, ids))
    return torch.tensor([[*one, *[one[-1]] * (longest - len(one))] for one in ids])

"""Which tokens of a text with pictures see each other, also those ahead, by what a family says with their types.

Shapes: T token.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def runs_of(image_T: Tensor) -> Tensor:
    """Each run of tokens that are a picture's is a block, -1 elsewhere, (T,).

    >>> runs_of(torch.tensor([False, True, True, False, True]))
    tensor([-1,  1,  1, -1,  2])
    """
    begins_T = image_T & ~torch.nn.functional.pad(image_T, (1, 0))[:-1]
    return torch.where(image_T, begins_T.cumsum(0), -1)


# What families say with the types of tokens, (T,): the blocks of those that see each other.
BLOCKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gemma3": lambda type_T: runs_of(type_T == 1),  # the tokens of each picture
    "paligemma": lambda type_T: torch.where(type_T == 0, 0, -1),  # all of the prompt, and none of the answer
}

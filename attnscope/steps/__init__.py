"""One head's arithmetic for one sentence, step by step, each step compared with the model's own values.

records.py      what a step is, its words, and an explanation as JSON lines; without torch
attention.py    from q, k and v to the heads' outputs, what is before and after, and how a step is compared
traced.py       a head of a real model
toy.py          the same without a model, on "I saw a saw"; std(q . k) against d_k on random data
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnscope.steps.records import Check, Explanation, Numbers, Step

if TYPE_CHECKING:
    from attnscope.steps.toy import explain_toy
    from attnscope.steps.traced import explain_head

__all__ = ["Check", "Explanation", "Numbers", "Step", "explain_head", "explain_toy"]

_HOME = {"explain_head": "traced", "explain_toy": "toy"}  # which need torch


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

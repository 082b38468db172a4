"""How the calls of a pass held, as records that need no torch.

Shapes: B text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from attnscope.model.selection import DECODER, prefix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TOLERANCE = {  # row sums, and P V against the output: what rounding alone does
    "float64": (1e-10, 1e-6),
    "float32": (1e-5, 1e-4),
    "float16": (5e-3, 1e-2),
    "bfloat16": (3e-2, 5e-2),
}

GIVEN = "given"  # the route of weights that no pass of attnscope computed
KERNEL, LAYER, SOFTMAX = "kernel", "layer", "softmax"  # routes of operations, see `hooks/functions.py`
UNREAD = "unread"  # of a call that shows no weights by itself, in a layer with no selected head


def tolerance(dtype: torch.dtype | str, otherwise: str = "float32") -> tuple[float, float]:
    """What rounding alone does in a dtype: to row sums, and to P V against the output.

    >>> tolerance("bfloat16")
    (0.03, 0.05)
    """
    return TOLERANCE.get(str(dtype).removeprefix("torch."), TOLERANCE[otherwise])


@dataclass
class CallCheck:
    """How one call held, None where it could not be measured.

    row_sum_error: largest |row sum - 1| (None with sink logits). masked_weight: largest weight on a key that the mask
    hides. value_error: largest |P V - output| over some rows, relative to the largest |output|. route: "interface",
    "answered" (attnscope computed the output), "hook", GIVEN, UNREAD, or an operation's. altered: whether an engine
    changed the output. dtype: of the model's own output or weights, where there are any: not always that of the model.
    answered_by: which of attnscope's own ways read each kind of question, {"Entropy": "tiles"}. stack: the layer's
    stack. repeats: whether its weights are those of the call before it: of the same q and k, over other values. ahead:
    the share of its queries that see the key after their own. back_alone: whether none may, by the model's config and
    class; None where they do not say it. owed: numbers still on a device, by field; `settle` reads them.
    """

    layer: int
    call: int
    path: str
    heads: int
    route: str
    row_sum_error: float | None = None
    masked_weight: float | None = None
    value_error: float | None = None
    sink_logits: bool = False
    keys: int = 0
    queries: int = 0
    mask: str = "none"  # that the model itself built: boolean or additive, of N x N
    kernel: str = "eager"  # that gave the layer's output; eager and math make N x N per head
    altered: bool = False
    dtype: torch.dtype | str | None = None
    answered_by: Mapping[str, str] = field(default_factory=dict)
    stack: str = DECODER
    repeats: bool = False
    ahead: float | None = None
    back_alone: bool | None = None
    owed: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def note(self, **numbers: Tensor | None) -> None:
        """Numbers that were measured, one each, by field: on a CPU known at once, on a device owed."""
        for name, number in numbers.items():
            self.owed.pop(name, None)
            if number is None or number.device.type == "cpu":
                setattr(self, name, None if number is None else float(number.item()))
            else:
                setattr(self, name, None)
                self.owed[name] = number

    @property
    def name(self) -> str:
        """`layer 3`, or `cross layer 3` where a number alone does not say of which stack."""
        return f"{prefix(self.stack)}layer {self.layer}"

    @property
    def turned(self) -> str:
        """How it looks where that is not what the model's config and class say; empty where it is."""
        return turned_away(self.ahead, self.back_alone)

    @property
    def no_number(self) -> bool:
        """Whether NaN is among its weights, or in its output."""
        return _nan(self.row_sum_error) or _nan(self.masked_weight) or _nan(self.value_error)

    def failures(self, dtype: torch.dtype | str) -> list[str]:
        """What did not hold to what the dtype allows, in words."""
        if self.no_number:
            weights = _nan(self.row_sum_error) or _nan(self.masked_weight)
            return [f"{self.name}: NaN {'among its weights' if weights else 'in P V, or in its own output'}"]
        row, value = max(tolerance(of) for of in (dtype, self.dtype or dtype))
        limits = (
            ("row sums off by", self.row_sum_error, row),
            ("weight on masked keys", self.masked_weight, 0.0),
            ("P V differs from the layer's own output by", self.value_error, value),
        )
        return [
            f"{self.name}: {what} {number:.2g} (allowed {limit:.2g})"
            for what, number, limit in limits
            if number is not None and not number <= limit
        ]


def turned_away(ahead: float | None, back_alone: bool | None) -> str:
    """How queries look where that is not what they should, in words; ahead, back_alone: as of a CallCheck.

    >>> turned_away(0.0, back_alone=True)
    ''
    """
    if back_alone and ahead == 1:
        return "every token sees the next one, which by the model's config and class it may not"
    if back_alone is False and ahead == 0:
        return "no token sees the next one, which by the model's config and class it may"
    return ""


def failures(checks: Sequence[CallCheck], dtype: torch.dtype | str) -> list[str]:
    """What did not hold of some calls, in words.

    >>> failures([], "float32")
    []
    """
    return [line for check in checks for line in check.failures(dtype)] + turned(checks)


def turned(checks: Iterable[CallCheck]) -> list[str]:
    """Where layers look another way than the model's config and class say, in words: a line for all of a stack.

    >>> turned([])
    []
    """
    layers: dict[tuple[str, str], list[int]] = {}
    for check in checks:
        if check.turned:
            layers.setdefault((check.stack, check.turned), []).append(check.layer)
    return [f"{prefix(stack)}layers {sorted({*numbers})}: {what}" for (stack, what), numbers in layers.items()]


def _nan(number: float | None) -> bool:
    return number is not None and math.isnan(number)


def settle(checks: Iterable[CallCheck]) -> None:
    """Read what checks still owe, in one copy: each look at a device has the host wait for all that it was given."""
    owed = [(check, name, number) for check in checks for name, number in check.owed.items()]
    if owed:
        import torch

        device = owed[0][2].device
        numbers = torch.stack([number.to(device, torch.float32) for _, _, number in owed]).tolist()
        for (check, name, _), number in zip(owed, numbers, strict=True):
            setattr(check, name, number)
            del check.owed[name]


@dataclass
class CaptureReport:
    """What one forward pass was: its calls in order, whether each held, and what the model gave back.

    tokens: of the longest text. attention: transformers' implementation that the model ran under. output: what the
    model's backbone returned, None where the caller ran the model himself. logits: (B, positions, vocabulary), where
    they were asked for. unheard: of a module of any code, the paths of the parts that attend in another way than was
    heard, with that way in words. folded: of such a module, how many heads each path has in its batch of several texts.
    """

    calls: list[CallCheck] = field(default_factory=list)
    tokens: int = 0
    attention: str = ""
    output: Any = field(default=None, repr=False)
    logits: Tensor | None = field(default=None, repr=False)
    unheard: dict[str, str] = field(default_factory=dict)
    folded: dict[str, int] = field(default_factory=dict)

    @property
    def layers(self) -> list[int]:
        """The layers that called, in order, each once."""
        return list(dict.fromkeys(check.layer for check in self.calls))

    def failures(self, dtype: torch.dtype | str) -> list[str]:
        """What did not hold, in words: of every call to what the dtype allows, and which way layers look."""
        return failures(self.calls, dtype)

    def of(self, stack: str) -> CaptureReport:
        """The same with the calls of one stack alone."""
        return replace(self, calls=[check for check in self.calls if check.stack == stack])

    @property
    def answered_by(self) -> dict[str, list[str]]:
        """Which of attnscope's own ways read each kind of question; empty where the model's matrices were read."""
        return joined_ways({kind: [reader] for kind, reader in check.answered_by.items()} for check in self.calls)


def joined_ways(accounts: Iterable[Mapping[str, Iterable[str]]]) -> dict[str, list[str]]:
    """Who read each kind of question, of several such accounts: {"Entropy": ["numba", "tiles"]}."""
    ways: dict[str, set[str]] = {}
    for account in accounts:
        for kind, names in account.items():
            ways.setdefault(kind, set()).update(names)
    return {kind: sorted(names) for kind, names in sorted(ways.items())}

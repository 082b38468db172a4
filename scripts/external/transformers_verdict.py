"""What the runs of transformers' tests mean: passed, explained by measured rounding, or short; and who is left out.

A case that fails is explained in two ways alone, both measured on the very run: eager attention, which the test takes
for the truth, overflows float16 itself; or attnscope is at most FURTHER times as far from the same model in float64 as
eager attention is.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from external.common import Check
from external.transformers_suite import Found

FURTHER = 5  # times as far as eager; PyTorch's own sdpa is almost as far, and a scale off by 1 % at least twice that
OVERFLOW = "eager attention itself overflows float16 and gives no number to compare with"
ROUNDING = f"both are rounded: attnscope is at most {FURTHER} times as far from the model in float64 as eager attention"


def explanation(found: Found, case: str) -> str:
    """Why a case that failed may fail; empty where nothing that was measured says so."""
    measured = [tuple(one[2:]) for one in found.heard.get(case, ())]
    if not measured or any(len(one) != 2 for one in measured):
        return ""
    if "fp16" in case and all(math.isnan(eager) for eager, _ in measured):
        return OVERFLOW
    return ROUNDING if all(own <= FURTHER * eager for eager, own in measured) else ""


def further(found: Found, dtype: str = "") -> list[float]:
    """How many times as far from float64 as eager attention the cases are, those of a dtype where one is named."""
    measured = [one[2:] for case in cases_of(found) if dtype in case for one in found.heard[case] if len(one) == 4]
    return [own / eager for eager, own in measured if eager > 0]


def answered(found: Found, case: str) -> bool:
    """Whether attnscope gave the output of every attention call of a case, and there were some."""
    noted = found.heard.get(case, ())
    return bool(noted) and all(calls == own > 0 for calls, own, *_ in noted)


def cases_of(found: Found) -> list[str]:
    """The cases that were run."""
    return [case for case in found.heard if case not in found.skipped]


@dataclass
class Tally:
    """The cases of one check, family by family.

    torch_failed: how many PyTorch's own sdpa fails, of `torch_of`; alike: of those explained here, how many it fails.
    """

    check: Check
    reasons: Counter[str] = field(default_factory=Counter)
    torch_failed: int = 0
    torch_of: int = 0
    alike: int = 0
    seconds: float = 0.0

    def add(self, name: str, found: Found, torch: Found | None = None) -> None:
        """Count a family's cases; torch: how PyTorch's own sdpa did."""
        self.seconds += found.seconds
        for case in cases_of(found):
            here = answered(found, case)
            why = explanation(found, case) if case in found.failed and here else ""
            if why:
                self.reasons[why] += 1
            else:
                failed = found.failed.get(case) or "a call was not answered by attnscope"
                self.check.hold(case not in found.failed and here, f"{name}, {case}: {failed}")
            if torch is not None:
                self.torch_of += 1
                self.torch_failed += case in torch.failed
                self.alike += bool(why) and case in torch.failed

    def close(self) -> None:
        """Write down what was explained."""
        for why, cases in self.reasons.items():
            self.check.expect(f"{cases} cases: {why}", cases)
        if self.reasons and self.torch_of:
            own = f"PyTorch's own sdpa fails {self.torch_failed} of the {self.torch_of}"
            self.check.differs.append(f"{own}, {self.alike} of them among those that are explained here")


def not_allowed(found: Found) -> str:
    """Why the sdpa test says nothing of a family, by its run with PyTorch's own; empty where it does."""
    if len(found.skipped) == found.cases:
        return re.sub(r"^\w+ does not", "its class does not", next(iter(found.skipped.values())))
    broken = [why for why in found.failed.values() if not why.startswith("ValueError: mean relative difference")]
    return f"it fails with PyTorch's own sdpa: {broken[0]}" if broken else ""


def unheard(found: Found) -> bool:
    """Whether no attention call of the family reached attnscope: it does not call transformers' interface."""
    return all(own == 0 for noted in found.heard.values() for _, own, *_ in noted)


def reasons(out: Mapping[str, str]) -> list[str]:
    """`why: name, name`, one line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in out.items():
        by_reason.setdefault(why, []).append(name)
    return [f"{why}: {', '.join(names)}" for why, names in by_reason.items()]


def counted(kinds: Iterable[str]) -> str:
    """`40 families (decoder 20, encoder 8)`"""
    found = Counter(kinds)
    return f"{found.total()} families ({', '.join(f'{kind} {count}' for kind, count in found.items())})"

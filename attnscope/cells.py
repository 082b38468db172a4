"""Values as the text of a cell: numbers, p values, bytes, names of heads, long texts cut short.

Tables on a terminal, pictures and messages print a value in one way. A value that is missing, None or NaN, is a dash,
and no number is printed as -0.00.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

MISSING = "-"
DASH, MINUS = "–", "−"  # a missing value and a sign, as pictures print them


def _is_missing(value: float | None) -> bool:
    """Whether a value is None or NaN."""
    return value is None or value != value


def number(value: float | None, decimals: int = 2) -> str:
    """`0.25`."""
    return MISSING if _is_missing(value) else f"{value:z.{decimals}f}"


def signed(value: float | None, decimals: int = 2) -> str:
    """`+0.25`."""
    return MISSING if _is_missing(value) else f"{value:+z.{decimals}f}"


def number_of(count: int, unit: str) -> str:
    """A number with its unit.

    >>> number_of(1, "text"), number_of(2, "text")
    ('1 text', '2 texts')
    """
    return f"{count} {unit}{'s' * (count != 1)}"


def model_name(name: str) -> str:
    """A model's name as a picture prints it: of a path the folder's name alone.

    >>> model_name("/home/me/models/stories260K-llama"), model_name("Qwen/Qwen3-0.6B")
    ('stories260K-llama', 'Qwen/Qwen3-0.6B')
    """
    parts = [part for part in name.replace("\\", "/").split("/") if part]
    is_path = name[:1] in ("/", ".", "~") or "\\" in name or len(parts) > 2
    return parts[-1] if is_path and parts and parts[-1].strip(".") else name


def effect(value: float | None) -> str:
    """`+0.250`; 0.000 has no sign, since an effect that is too small to be printed has no direction."""
    return "0.000" if value is not None and abs(value) < 0.0005 else signed(value, 3)


def interval(low: float | None, high: float | None, of: Callable[[Any], str] = effect) -> str:
    """`[0.200, 0.300]`, an open end a dash; of: how the number is printed whose interval it is."""
    return f"[{of(low).lstrip('+')}, {of(high).lstrip('+')}]"


def score(value: float | None) -> str:
    """`0.25`, `120`: no decimals from 100."""
    return number(value, 0 if value is not None and abs(value) >= 100 else 2)


def share(value: float | None) -> str:
    """`0.250`; `<0.001` of what is too small for three decimals, and not 0."""
    return "<0.001" if value is not None and 0 < value < 0.0005 else number(value, 3)


def divergence(value: float) -> str:
    """`0.0123`, `1.2e-05`; `0` of what is equal, not merely alike."""
    if value == 0:
        return "0"
    return f"{value:.1e}" if value < 1e-3 else number(value, 4)


def p_value(value: float | None) -> str:
    """`.012`, `<.001`."""
    if value is not None and value < 0.001:
        return "<.001"
    return number(value, 3).lstrip("0")


def percent(value: float | None) -> str:
    """`82 %`."""
    return MISSING if _is_missing(value) else f"{number(value, 0)} %"


def percentage(share: float | None) -> str:
    """`82 %`, of 0.82."""
    return MISSING if share is None else percent(100 * share)


def exact(value: float) -> str:
    """A number to calculate with: whole ones as they are, others with four decimals, or with two digits: `1.2e−05`."""
    if value == int(value) and abs(value) < 1e4:
        return typeset(f"{int(value)}")
    return typeset(f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}")


def power(value: float) -> str:
    """`3e-4` rather than `3e-04`."""
    if value == 0:
        return "0"
    digits, exponent = f"{value:.0e}".split("e")
    return f"{digits}e{int(exponent)}"


def printed(value: float | None, decimals: int = 2) -> str:
    """`−0.25`, as pictures print a number."""
    return DASH if _is_missing(value) else typeset(number(value, decimals))


def typeset(text: str) -> str:
    """A number with a minus sign for its hyphen."""
    return text.replace("-", MINUS)


def decimal_bytes(count: float) -> str:
    """Bytes by powers of 1000: `1.23 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def head_name(layer: int, head: int, by_kv: bool = False) -> str:
    """`L3H1`; by_kv: `L3KV1`, the heads of a kv head together."""
    return f"L{layer}{'KV' if by_kv else 'H'}{head}"


def head_names(heads: Iterable[tuple[int, int]]) -> str:
    """`L3H1 L3H2`."""
    return " ".join(head_name(layer, head) for layer, head in heads)


def number_list(numbers: Sequence[int]) -> str:
    """Numbers of layers or heads, in order: `0 to 3`, `only 0`, `1, 3`."""
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"only {numbers[0]}"
    return ", ".join(map(str, numbers))


def shortened(text: str, most: int) -> str:
    """The beginning of a text that is longer than so many characters, with an ellipsis."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"

"""What a text is too short to show, and what is taken on trust: there parity holds whatever the model does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attnscope.model.selection import CAUSAL, CROSS, VISION, is_bidirectional, is_cross
from attnscope.model.tasks import stack_config
from attnscope.parity.verdicts import ParityReport
from attnscope.reference.given import setting

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

# The config's entry with the length up to which a kind of rotary positions does not stretch.
STRETCHED_FROM = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}


def on_trust(loaded: LoadedModel, report: ParityReport) -> str:
    """What the oracle does not compute again, in words.

    >>> on_trust(loaded, report)
    'order of layers, norms, MLPs, embeddings'
    """
    otherwise = loaded.read_otherwise(max(report.tokens, report.source_tokens))
    if report.whole and report.whole.holds:
        return ", ".join(("transformers' own code, the config and the files", *loaded.trusted, *otherwise))
    parts = ["order of layers", "norms", "MLPs", "embeddings"]
    parts += ["encoder states handed over"] if CROSS in report.levels else []
    parts += ["features of pictures handed over"] if loaded.geometry.tower and VISION in report.levels else []
    nothing = "" if loaded.options else " (made in memory: no files to load a second instance from)"
    return ", ".join((*parts, *loaded.trusted, *otherwise)) + nothing


def too_short(loaded: LoadedModel, report: ParityReport) -> tuple[str, ...]:
    """What texts of so many tokens cannot show of the report's layers, in words.

    >>> too_short(loaded, report)
    ()
    """
    compared = {stack: {layer.layer for layer in report.layers if layer.stack == stack} for stack in report.levels}
    alone = set(loaded.geometry.stacks) == {report.plain}
    tokens = {**dict.fromkeys([report.plain, *CAUSAL], report.tokens), VISION: report.patches}
    return tuple(
        words if alone else f"{stack}: {words}"
        for stack, layers in compared.items()
        for words in _of_stack(loaded, stack, layers, tokens.get(stack, report.source_tokens))
    )


def _of_stack(loaded: LoadedModel, stack: str, compared: set[int], tokens: int) -> Iterator[str]:
    """What so many keys cannot show of some layers of a stack."""
    if tokens == 1:
        yield "any weight but 1"
    if tokens == 1 or is_cross(stack):
        return
    geometry, lengths = loaded.geometry, set(_stretched(stack_config(loaded.model.config, stack)))
    for layer in {**geometry.other_stacks, geometry.stack: geometry.layers}[stack]:
        if layer.index in compared and layer.window:
            name = {"chunked": "chunk", "windowed": "windows"}.get(layer.type, "window")
            lengths.add((layer.window + is_bidirectional(stack), f"the {name} of {layer.window}"))
    yield from (what for length, what in sorted(lengths) if tokens <= length)


def _stretched(config: Any) -> Iterator[tuple[int, str]]:
    rope = setting(config, "rope_parameters", {})
    for rules in [rope] if "rope_type" in rope else rope.values():  # or one for each type of layer
        kind = setting(rules, "rope_type", "")
        name = STRETCHED_FROM.get(kind, "")
        length = setting(rules, name) or setting(config, name)
        if length and not (kind == "longrope" and setting(rules, "long_factor") == setting(rules, "short_factor")):
            yield length, f"{kind} positions past {length}"

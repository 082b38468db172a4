"""One text through one model: what heads, relations and heatmap have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from attnscope.cli import output
from attnscope.cli.settings import Settings

if TYPE_CHECKING:
    from attnscope.models import LoadedModel
    from attnscope.observe import Observation, Request
    from attnscope.prompts import Prompt


def observe_text(settings: Settings, request: Request) -> tuple[LoadedModel, Observation]:
    """Read the text, load the model, run it once. What can be refused is refused before the next costly step."""
    from attnscope.prompts import read_text

    text = read_text(settings.text, settings.file)
    output.complain_through_talk(settings.quiet)
    loaded, prompt = _load(settings, text)
    from attnscope.observe import observe

    request = replace(request, view=settings.view(chosen_heads(settings, loaded)))
    if not settings.quiet:
        output.talk(header(loaded, prompt), settings.quiet)
    with output.progress("forward pass", None, settings.quiet):
        [seen] = observe(loaded, [prompt], request)
    return loaded, seen


def chosen_heads(settings: Settings, loaded: LoadedModel) -> Mapping[int, tuple[int, ...]] | None:
    """The heads of --select, None where it was not given. Raises UsageError for heads that are not there."""
    if settings.select is None:
        return None
    from attnscope.selection import select

    return select(settings.select, {layer.index: layer.heads for layer in loaded.geometry.attention_layers})


def header(loaded: LoadedModel, prompt: Prompt) -> str:
    """What is being read: model, device, dtype, layers x heads (kv heads), tokens, engine."""
    layers = loaded.geometry.attention_layers
    heads = _one_or_range([layer.heads for layer in layers])
    kv_heads = _one_or_range([layer.kv_heads for layer in layers])
    without = len(loaded.geometry.layers) - len(layers)
    parts = [
        loaded.name,
        loaded.device,
        loaded.dtype,
        f"{len(layers)} layers x {heads} heads ({kv_heads} kv)"
        + (f", {without} layers without attention" * bool(without)),
        f"{len(prompt)} tokens" + (f" ({prompt.removed} cut off)" * bool(prompt.removed)),
        f"engine {loaded.attention}",
    ]
    return "  ".join(parts)


def report_checks(loaded: LoadedModel, seen: Observation, settings: Settings) -> int:
    """Say what did not hold or could not be measured; the exit code that follows."""
    from attnscope.manifest import failures, unmeasured

    for line in unmeasured(seen):
        output.talk(f"not measured: {line}", settings.quiet)
    broken = failures(loaded, seen)
    for line in broken:
        output.talk(f"does not hold: {line}", quiet=False)
    return 1 if broken else 0


def _load(settings: Settings, text: str) -> tuple[LoadedModel, Prompt]:
    from attnscope.models import check_eager_fits, load, quiet_libraries
    from attnscope.prompts import from_chat, from_text

    quiet_libraries(settings.verbose)
    with output.progress(f"loading {settings.model}", None, settings.quiet):
        loaded = load(settings.load_options())
    tokenize = from_chat if settings.chat else from_text
    prompt = tokenize(
        loaded.tokenizer,
        text,
        max_tokens=loaded.geometry.max_positions,
        truncate=settings.truncate,  # type: ignore[arg-type]
    )
    check_eager_fits(loaded.geometry, len(prompt), loaded.device, loaded.dtype)
    return loaded, prompt


def _one_or_range(numbers: list[int]) -> str:
    return str(numbers[0]) if min(numbers) == max(numbers) else f"{min(numbers)}-{max(numbers)}"

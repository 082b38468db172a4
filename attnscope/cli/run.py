"""One text through one model: what heads, relations and heatmap have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnscope.cli import output
from attnscope.cli.settings import Settings
from attnscope.errors import MemoryLimitError

if TYPE_CHECKING:
    from attnscope.models import LoadedModel
    from attnscope.observe import Observation, Request
    from attnscope.prompts import Prompt


def observe_text(settings: Settings, **wanted: Any) -> tuple[LoadedModel, Observation]:
    """Read the text, load the model, run it once. What can be refused is refused before the next costly step.

    wanted: the fields of `observe.Request`, which imports torch and is therefore made here, after the model was found.
    """
    from attnscope.prompts import read_text

    text = read_text(settings.text, settings.file)
    output.complain_through_talk(settings.quiet)
    loaded, prompt = load_prompt(settings, text)
    from attnscope.observe import Request

    request = Request(view=settings.view(chosen_heads(settings, loaded)), **wanted)
    if not settings.quiet:
        output.talk(header(loaded, prompt), settings.quiet)
    with output.progress("forward pass", None, settings.quiet):
        seen = _observe(loaded, prompt, request)
    return loaded, seen


def _observe(loaded: LoadedModel, prompt: Prompt, request: Request) -> Observation:
    """The forward pass; a lack of memory that was not foreseen says what would fit."""
    from attnscope.observe import observe

    try:
        return observe(loaded, [prompt], request)[0]
    except (MemoryError, RuntimeError) as error:
        if not output.is_out_of_memory(error):
            raise
        count = len(prompt)
        raise MemoryLimitError(
            f"memory ran out on {loaded.device} while {count} tokens were read",
            f"{tokens_that_should_fit(loaded, count)} tokens fit: shorten the text, or take a smaller model or dtype",
        ) from error


def tokens_that_should_fit(loaded: LoadedModel, failed: int) -> int:
    """What eager attention has room for; at most half of what just failed, which takes a quarter of the memory."""
    from attnscope.geometry import tokens_that_fit
    from attnscope.memory import DTYPE_BYTES, free_memory

    room = tokens_that_fit(loaded.geometry, free_memory(loaded.device), DTYPE_BYTES[loaded.dtype])
    return max(1, min(room, failed // 2))


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


def load_prompt(settings: Settings, text: str) -> tuple[LoadedModel, Prompt]:
    """The model, and the text as its token ids; refused where eager attention over it does not fit."""
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

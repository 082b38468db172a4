"""One text through one model: what heads, relations and heatmap have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnscope.cli import output
from attnscope.cli.options import Entries, ModelText, TextRun, Writing
from attnscope.errors import MemoryLimitError

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel
    from attnscope.observe import Observation, Request
    from attnscope.seam.engines import Choice
    from attnscope.text.prompt import Prompt


EAGER: Mapping[str, Any] = {"engine": "eager"}


def observe_text(asked: TextRun, entries: Entries, writing: Writing, **wanted: Any) -> tuple[LoadedModel, Observation]:
    """Read the text, load the model, run it once. What can be refused is refused before the next costly step.

    wanted: the fields of `observe.Request`, which imports torch and is therefore made here, after the model was found.
    """
    from attnscope.text.prompt import read_text

    text = read_text(asked.text, asked.file)
    output.complain_through_talk(writing.quiet)
    choice, prompt = load_prompt(asked, text, writing, asked.engine, asked.memory)
    from attnscope.observe import Request

    request = Request(view=entries.view(chosen_heads(entries.select, choice.loaded)), **wanted)
    context = engine_context(choice, prompt, asked.listen)
    output.talk(header(choice.loaded, prompt, context), writing.quiet)
    if asked.verify:
        context["parity"] = _verified(choice.loaded, prompt, writing.quiet)
    with output.progress("forward pass", None, writing.quiet):
        seen = _observe(choice, prompt, request, asked.listen)
    seen.context |= context
    return choice.loaded, seen


def engine_context(choice: Choice, prompt: Prompt, listen: bool) -> dict[str, Any]:
    """What the manifest says of the engine: its name, who gave each layer's output, how far it is from the other."""
    fused = choice.engine == "fused"
    context: dict[str, Any] = {
        "engine": choice.engine,
        "output": "attnscope" if fused and not listen else "model",
    }
    if fused:
        from attnscope.seam.engines import difference

        context["largest_difference_to_eager"] = difference(choice.loaded, prompt)
    if choice.loaded.stretched_from is not None:
        context["positions"] = {
            "trained": choice.loaded.stretched_from,
            "stretched_to": choice.loaded.geometry.max_positions,
            "by": "linear rope scaling",
        }
    return context


def _observe(choice: Choice, prompt: Prompt, request: Request, listen: bool) -> Observation:
    """The forward pass; a lack of memory that was not foreseen says what would fit."""
    from attnscope.memory import is_out_of_memory
    from attnscope.observe import observe

    loaded = choice.loaded
    try:
        return observe(loaded, [prompt], request, engine=choice.engine, answer=not listen)[0]
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        count = len(prompt)
        raise MemoryLimitError(
            f"memory ran out on {loaded.device} while {count} tokens were read",
            f"{tokens_that_should_fit(loaded, count)} tokens fit: shorten the text, or take a smaller model or dtype",
        ) from error


def _verified(loaded: LoadedModel, prompt: Prompt, quiet: bool) -> dict[str, Any]:
    from attnscope.model.loading import with_attention
    from attnscope.parity.certificate import verify

    attention = loaded.attention
    try:
        with output.progress("oracle", None, quiet):
            return verify(with_attention(loaded, "eager"), prompt)
    finally:
        with_attention(loaded, attention)


def tokens_that_should_fit(loaded: LoadedModel, failed: int) -> int:
    """What eager attention has room for; at most half of what just failed, which takes a quarter of the memory."""
    from attnscope.memory import DTYPE_BYTES, free_memory
    from attnscope.model.geometry import tokens_that_fit

    room = tokens_that_fit(loaded.geometry, free_memory(loaded.device), DTYPE_BYTES[loaded.dtype])
    return max(1, min(room, failed // 2))


def chosen_heads(text: str | None, loaded: LoadedModel) -> Mapping[int, tuple[int, ...]] | None:
    """The heads of --select, None where it was not given. Raises UsageError for heads that are not there."""
    if text is None:
        return None
    from attnscope.selection import select

    return select(text, {layer.index: layer.heads for layer in loaded.geometry.attention_layers})


def header(loaded: LoadedModel, prompt: Prompt, context: Mapping[str, Any] = EAGER) -> str:
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
        _engine_words(context),
    ]
    stretch = context.get("positions")
    if stretch:
        parts.append(f"positions {stretch['trained']} stretched to {stretch['stretched_to']} by {stretch['by']}")
    return "  ".join(parts)


def _engine_words(context: Mapping[str, Any]) -> str:
    if context["engine"] == "eager":
        return "engine eager"
    gap = context.get("largest_difference_to_eager")
    far = "not compared with eager" if gap is None else f"{gap:.1g} from eager on the first tokens"
    return f"engine fused (output {context['output']}, {far})"


def report_checks(loaded: LoadedModel, seen: Observation, quiet: bool) -> int:
    """Say what did not hold or could not be measured; the exit code that follows."""
    from attnscope.manifest import failures, unmeasured

    for line in unmeasured(seen):
        output.talk(f"not measured: {line}", quiet)
    broken = failures(loaded, seen) + seen.context.get("parity", {}).get("failures", [])
    for line in broken:
        output.talk(f"does not hold: {line}", quiet=False)
    return 1 if broken else 0


def load_prompt(
    asked: ModelText, text: str, writing: Writing, engine: str = "eager", memory: str | None = None
) -> tuple[Choice, Prompt]:
    """The model with the engine that reads it, and the text as its token ids; refused where they do not fit."""
    from attnscope.model.libraries import silence_libraries
    from attnscope.model.loading import load
    from attnscope.seam.engines import choose
    from attnscope.text.prompt import from_chat, from_text

    silence_libraries(writing.verbose)
    with output.progress(f"loading {asked.model}", None, writing.quiet):
        loaded = load(asked.load_options("eager" if engine == "eager" else "sdpa"))
    tokenize = from_chat if asked.chat else from_text
    prompt = tokenize(loaded.tokenizer, text, max_tokens=loaded.geometry.max_positions, truncate=asked.truncate)
    return choose(loaded, len(prompt), engine, memory), prompt


def _one_or_range(numbers: list[int]) -> str:
    return str(numbers[0]) if min(numbers) == max(numbers) else f"{min(numbers)}-{max(numbers)}"

"""One text through one model, with what a person is told on the way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.cli import output
from attnscope.cli.options import Config, Entries, ModelText, TextRun, Writing
from attnscope.cli.signals import unwinding

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel
    from attnscope.observation import Observation
    from attnscope.run import Run


def observe_text(asked: TextRun, entries: Entries, writing: Writing, **wanted: Any) -> Observation:
    """Read the text, load the model, run it once. What can be refused is refused before the next costly step.

    wanted: the fields of `observe.Request`, which imports torch and is therefore made after the model was found.
    """
    text = read_text(asked, writing)
    loaded = load_model(asked, writing)
    from attnscope.observe import Request
    from attnscope.run import prepare

    request = Request(view=entries.view(), **wanted)
    run = prepare(
        loaded,
        text,
        request,
        engine=asked.engine,
        select=entries.select,
        chat=asked.chat,
        truncate=asked.truncate,
        memory=asked.memory,
        listen=asked.listen,
    )
    output.talk(header(run), writing.quiet)
    if asked.verify:
        with output.progress("oracle", None, writing.quiet):
            run = run.verified()
    with output.progress("forward pass", len(loaded.geometry.attention_layers), writing.quiet) as advance:
        return run.observe(advance)


def read_text(asked: ModelText, writing: Writing) -> str:
    """The text; from here on the library's warnings are lines on stderr."""
    from attnscope.text.reading import read_text as read

    configured = isinstance(writing, Config) and writing.config is not None
    text = read(asked.text if asked.given is None else asked.given, asked.file, unasked=not configured)
    output.complain_through_talk(writing.quiet)
    return text


def load_model(asked: ModelText, writing: Writing) -> LoadedModel:
    """The model that was asked for, with a bar while it loads."""
    from attnscope.model.libraries import silence_libraries
    from attnscope.model.loading import load

    silence_libraries(writing.verbose)
    with output.progress(f"loading {asked.model}", None, writing.quiet):
        return load(asked.load_options())


def prepared(asked: ModelText, writing: Writing, text: str, select: str | None = None) -> Run:
    """A text for the model's own eager attention, its header told."""
    loaded = load_model(asked, writing)
    from attnscope.run import prepare

    run = prepare(loaded, text, engine="eager", select=select, chat=asked.chat, truncate=asked.truncate)
    output.talk(header(run), writing.quiet)
    return run


def header(run: Run) -> str:
    """What is being read: model, device, dtype, layers x heads (kv heads), tokens, engine."""
    loaded, prompt = run.loaded, run.prompt
    parts = [
        loaded.name,
        loaded.device,
        loaded.dtype,
        loaded.geometry.in_words,
        f"{len(prompt)} tokens" + (f" ({prompt.removed} cut off)" * bool(prompt.removed)),
        _engine_words(run),
    ]
    stretch = run.facts.get("positions")
    if stretch:
        parts.append(f"positions {stretch['trained']} stretched to {stretch['stretched_to']} by {stretch['by']}")
    return "  ".join(parts)


def _engine_words(run: Run) -> str:
    if run.engine.name == "eager":
        return "engine eager"
    gap = run.facts.get("largest_difference_to_eager")
    far = "not compared with eager" if gap is None else f"{gap:.1g} from eager on the first tokens"
    return f"engine {run.engine.name} (output {run.engine.output}, {far})"


def export_text(seen: Observation, writing: Writing, options: Mapping[str, Any], **how: Any) -> list[Path]:
    """Write what was seen into --out, with a bar while pictures are drawn; says how many files were written."""
    from attnscope.drawing import FIGURES, Drawing
    from attnscope.export import export

    assert writing.out is not None
    steps = Drawing.of(seen, how.get("heads", ())).pictures(how.get("figures", FIGURES))
    with unwinding(), output.progress("drawing", steps or None, writing.quiet) as advance:
        written = export(seen, writing.out, options=options, workers=None, advance=advance, **how)
    output.talk(f"wrote {len(written)} files to {writing.out}", writing.quiet)
    return written


def report_checks(seen: Observation, quiet: bool) -> int:
    """Say what did not hold or could not be measured; the exit code that follows."""
    for line in seen.unmeasured:
        output.talk(f"not measured: {line}", quiet)
    broken = seen.failures + seen.facts.get("parity", {}).get("failures", [])
    for line in broken:
        output.talk(f"does not hold: {line}", quiet=False)
    return 1 if broken else 0

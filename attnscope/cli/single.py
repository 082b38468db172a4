"""One text through one model, with what a person is told on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from attnscope.cli import output
from attnscope.cli.options import Config, Exporting, ModelText, ModelTexts, Noise, OneText, Selected, TextRun, Writing
from attnscope.errors import UsageError
from attnscope.signals import unwinding

if TYPE_CHECKING:
    from attnscope.ask import Ask, Text
    from attnscope.export import Ways
    from attnscope.keep.request import Request
    from attnscope.media.sound import Sound
    from attnscope.model.loaded import LoadedModel
    from attnscope.observation import Observation
    from attnscope.run import Run
    from attnscope.text.prompt import Prompt
    from attnscope.text.tokens import Chosen


def observe_text(
    asked: TextRun, selected: Selected, writing: Exporting, options: Mapping[str, Any], keep: Request
) -> Observation:
    """Read the text, load the model, run it once. What can be refused is refused before the next costly step.

    options: what the manifest will say was asked for. keep: what is kept.
    """
    ask = asked.ask(read_run(asked, writing), selected, keep)
    if writing.out is not None and keep.maps:
        from attnscope.figures.drawing_process import begin

        begin("attnscope.drawing")
    loaded = load_model(asked, writing)
    run = prepare_answered(loaded, ask, writing.quiet)
    check_out(run, writing, options)
    tell_run(run, writing.quiet)
    tell_answer(run, writing.quiet)
    tell_target(run, writing.quiet)
    tell_asked(run, writing.quiet)
    if asked.verify:
        with output.progress("oracle", None, writing.quiet):
            run = run.verified()
    if writing.out is not None and keep.rollout:
        from attnscope.figures import load_in_thread

        load_in_thread()
    layers = sum(map(len, loaded.geometry.stacks.values()))
    tokens = len(run.prompt) + len(run.source or ())
    with output.progress(f"forward pass over {tokens:,} tokens", layers, writing.quiet, "layers") as advance:
        return run.observe(advance)


def prepare_answered(loaded: LoadedModel, ask: Ask, quiet: bool) -> Run:
    """Everything that comes before the forward pass, with a bar while the model makes an answer."""
    from attnscope.run import prepare

    if ask.generate is None:
        return prepare(loaded, ask)
    with output.progress("generating", ask.generate, quiet, "tokens") as advance:
        return prepare(loaded, ask, advance)


def check_out(run: Run, writing: Exporting, options: Mapping[str, Any]) -> None:
    """Refuse a folder with another run in it, before the forward pass."""
    if writing.out is not None:
        from attnscope.folder.manifest import check, run_facts

        loaded = run.loaded
        model = {"name": loaded.name, "revision": loaded.revision}
        facts = {"model": model, "device": loaded.device, "dtype": loaded.dtype}
        check(writing.out, run_facts(run.text, facts, options), writing.force)


def read_run(asked: TextRun, writing: Writing) -> Text:
    """The text that was given; without one, the tokens of the run that --from names."""
    if asked.from_ is None or asked.has_text:
        return read_given(asked, writing)
    if asked.picture:
        raise UsageError("a picture needs a text, and a run gives tokens", "add --text TEXT")
    from attnscope.cli.repeat import tokens_of

    output.complain_through_talk(writing.quiet)
    return tokens_of(asked.from_)


def read_given(asked: ModelTexts, writing: Noise) -> str | list[int] | Sound:
    """As `read_text`; or the sound that was given in the text's stead."""
    if asked.audio is None:
        return read_text(asked, writing)
    from attnscope.media.sound import read_sound

    output.complain_through_talk(writing.quiet)
    return read_sound(asked.audio)


def read_text(asked: OneText, writing: Noise) -> str | list[int]:
    """The text, or its token ids; from here on the library's warnings are lines on stderr."""
    from attnscope.text.reading import read_ids
    from attnscope.text.reading import read_text as read

    output.complain_through_talk(writing.quiet)
    if asked.ids is not None:
        return read_ids(asked.ids)
    configured = isinstance(writing, Config) and writing.config is not None
    return read(asked.text if asked.given is None else asked.given, asked.file, unasked=not configured)


def load_model(asked: ModelText, writing: Writing) -> LoadedModel:
    """The model that was asked for, with a bar while it loads."""
    from attnscope.model.libraries import silence_libraries
    from attnscope.model.loading import load

    silence_libraries(writing.verbose)
    with output.progress(f"loading {asked.model}", None, writing.quiet):
        return load(asked.load_options())


def prepared(
    asked: ModelText,
    writing: Writing,
    text: Text,
    selected: Selected | None = None,
    query: str | None = None,
    alone: Sequence[str] = (),
) -> Run:
    """A text for the model's own eager attention, its header told; alone: what is for some tasks alone, and which."""
    loaded = load_model(asked, writing)
    if alone:
        loaded.check_task(*alone)
    from attnscope.keep.request import Request
    from attnscope.run import prepare

    ask = asked.ask(text, selected or Selected(), Request(query=query))
    run = prepare(loaded, replace(ask, engine="eager"))
    tell_run(run, writing.quiet)
    tell_target(run, writing.quiet)
    return run


def header(run: Run) -> str:
    """What is being read: model, device, dtype, layers x heads (kv heads), tokens, engine and why."""
    loaded, prompt = run.loaded, run.text
    target = f", target {len(run.prompt)}" * (run.source is not None)
    target += f", {len(prompt.medium.patches)} of pictures" * bool(prompt.medium.patches)
    parts = [
        loaded.name,
        loaded.device,
        loaded.dtype,
        loaded.geometry.in_words,
        f"{len(prompt)} tokens" + (f" ({prompt.removed} cut off)" * bool(prompt.removed)) + target,
        _engine_words(run),
    ]
    stretch = run.facts.get("positions")
    if stretch:
        parts.append(f"positions {stretch['trained']} stretched to {stretch['stretched_to']} by {stretch['by']}")
    return "  ".join(parts)


def tell_run(run: Run, quiet: bool) -> None:
    """Say what is being read, what is missing that would read it faster, and of a sound how much is its own."""
    output.talk(header(run), quiet)
    output.talk(run.choice.hint, quiet or not run.choice.hint)
    tell_sound(run, quiet)


def tell_chosen(queries: Prompt, keys: Prompt, chosen: Chosen, quiet: bool, stack: str = "") -> None:
    """Say which tokens were meant, and how they were found; stack: whose queries and keys they are, where that is said.

    >>> tell_chosen(target, source, chosen, False, "cross: ")
    cross: query last: Bank(3)
    """
    from attnscope.text.tokens import described

    if chosen.nothing:
        output.talk(f"{stack}not measured: its texts do not have what is named", quiet)
        return
    named = {"query": (queries, chosen.query), "key": (keys, chosen.key)}
    said = [f"{name} {found.expression}: {described(text, found)}" for name, (text, found) in named.items() if found]
    for line in (*said, *chosen.notes):
        output.talk(stack + line, quiet)


def tell_asked(run: Run, quiet: bool) -> None:
    """Say which tokens were meant; of an encoder-decoder, stack by stack."""
    for stack in run.asked if run.source is not None else [run.loaded.geometry.stack]:
        one = run.asked[stack]
        tell_chosen(one.prompt, one.looked_at, one.chosen, quiet, f"{stack}: " * (run.source is not None))


def tell_answer(run: Run, quiet: bool) -> None:
    """Say which tokens are the answer; of one that was generated, what it is and why it ends."""
    from attnscope.text.tokens import Found, described

    prompt, made = run.prompt, run.facts.get("generated")
    if prompt.answer is None:
        return
    if made is None:
        output.talk(f"answer: {described(prompt, Found('answer', tuple(prompt.parts['answer'])))}", quiet)
        return
    count, most, said = len(made["ids"]), made["asked"], "".join(prompt.plain[prompt.answer :]).strip()
    how = f"{count} of {most} tokens, the last the end token" if made["stopped_by"] == "end token" else f"{most} tokens"
    output.talk(f"generated {how}: {said}({prompt.answer}-{len(prompt) - 1})", quiet)


def tell_sound(run: Run, quiet: bool) -> None:
    """Say how many of the frames are the sound itself, and from where on silence pads it."""
    prompt = run.text
    if prompt.medium.step is None:
        return
    own = len(prompt) - sum(prompt.special)
    padded = f"; padded with silence from {prompt.labels[own]} on" if own < len(prompt) else ""
    output.talk(f"{prompt.text.partition(':')[0]}: {own} of {len(prompt)} frames{padded}", quiet)


def tell_target(run: Run, quiet: bool) -> None:
    """Say what an encoder-decoder's decoder reads, where the model made it."""
    made = run.facts.get("target")
    if made is not None and made["generated"]:
        said = "".join(run.prompt.plain).strip()
        output.talk(
            f"target, generated greedily: {said} ({len(run.prompt)} tokens); --target TEXT gives another", quiet
        )


def _engine_words(run: Run) -> str:
    words = f"engine {run.choice.words}"
    if run.engine.name == "eager":
        return words
    gap = run.facts.get("largest_difference_to_eager")
    far = "not compared with eager" if gap is None else f"{gap:.1g} from eager on the first tokens"
    return f"{words} (output {run.engine.output}, {far})"


def export_text(seen: Observation, writing: Exporting, **how: Unpack[Ways]) -> list[Path]:
    """Write what was seen into --out, with a bar while pictures are drawn; says how many files were written."""
    from attnscope.drawing import drawings
    from attnscope.export import Export, export

    assert writing.out is not None
    asked = replace(Export(**how), force=writing.force, workers=None)
    steps = sum(one.pictures(asked.figures) for one in drawings(seen, asked.heads or ()).values())
    with unwinding(), output.progress("drawing", steps or None, writing.quiet, "pictures") as advance:
        written = export(seen, writing.out, replace(asked, advance=advance))
    output.talk(f"wrote {len(written)} files to {writing.out}", writing.quiet)
    return written


def report_checks(seen: Observation, quiet: bool) -> int:
    """Say what did not hold or could not be measured; the exit code that follows."""
    for line in seen.unmeasured:
        output.talk(f"not measured: {line}", quiet)
    parity = seen.facts.get("parity", {})
    broken, unchecked = seen.failures + parity.get("failures", []), parity.get("unchecked", [])
    for line in broken:
        output.talk(f"does not hold: {line}", quiet=False)
    for line in unchecked:
        output.talk(f"not shown: {line}", quiet=False)
    return 1 if broken or unchecked else 0

"""One text through one model, or what a server answers of it: read, ask, export, and which checks hold.

Last `--show`: heads drawn in the terminal, besides what a command gives otherwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, Unpack

from attnscope.cli import output
from attnscope.cli.option_groups import Mark, OptionGroup
from attnscope.cli.options import Checkpoint, MayAsk, ModelTexts, OneText, OwnModule, Selected, TextRun
from attnscope.cli.output import ONE_PICTURE, Config, Exporting, Noise, Spreadsheet, Writing
from attnscope.errors import UsageError
from attnscope.model.selection import CHANNELS, LINEAR, as_ranges
from attnscope.utils.signals import unwinding

if TYPE_CHECKING:
    from attnscope.export.export import ExportOptions
    from attnscope.figures import Style
    from attnscope.inputs.sound import Sound
    from attnscope.model.loaded import LoadedModel, LoadedModule
    from attnscope.observe.observation import Observation
    from attnscope.observe.records import Head
    from attnscope.observe.request import CaptureSpec, MapFields, Request, RunInfo, Text
    from attnscope.serve.questions import Purpose
    from attnscope.serve.worker import KeptModels

NO_SERVER = "ATTNSCOPE_NO_SERVER"
KEPT: KeptModels | None = None  # of `attnscope run`: the models of the commands before


def observe_text(
    asked: TextRun, selected: Selected, writing: Exporting, options: Mapping[str, Any], keep: Request
) -> Observation:
    """Read the text, load the model, run it once. What can be refused is refused before the next costly step.

    options: what the manifest will say was asked for. keep: what is kept.
    """
    from attnscope.serve.questions import Observe

    ask = asked.ask(read_run(asked, writing), selected, keep)
    if writing.draws and keep.maps:
        from attnscope.figures import load_drawing
        from attnscope.figures.drawing_process import begin

        begin(load_drawing, "attnscope.export.drawing")
    tell, check = output.TerminalProgress(writing.quiet), partial(refuse_other_run, writing=writing, options=options)
    if not isinstance(ask.text, str | list):  # for a plain text nothing of tensors is imported
        from attnscope.inputs.tensors import GivenTensors

        if isinstance(ask.text, GivenTensors):
            from attnscope.observe.tensors import observe_tensors

            if selected.atlas is not None:
                raise UsageError("an atlas is of a model, and tensors are read without one", "leave out {atlas}")
            return observe_tensors(ask.text, ask, tell)
    loaded: LoadedModel | LoadedModule
    if asked.module is not None:
        loaded = own_module(asked, writing)
        from attnscope.model.loaded import LoadedModule

        if isinstance(loaded, LoadedModule):
            from attnscope.observe.any_module import hear

            heard = hear(loaded, ask, tell)
            check(heard.run_info)
            return heard.observe(ask, tell)
    else:
        seen: Observation | None = served(asked, ask, Observe(), tell, writing.verbose, check)
        if seen is not None:
            return seen
        loaded = load_model(asked, writing)
    if writing.draws and keep.rollout:
        from attnscope.figures import load_in_thread

        load_in_thread()  # while the model reads the text
    from attnscope.observe.run import run_and_report

    return run_and_report(loaded, ask, tell, check)


def nothing(*given: object) -> None:
    """Do nothing."""


def answer(asked: MayAsk, ask: CaptureSpec, purpose: Purpose, writing: Writing) -> Any:
    """What a server of this user's answers, or, where none does, a model that is loaded here."""
    tell = output.TerminalProgress(writing.quiet)
    result = served(asked, ask, purpose, tell, writing.verbose)
    return purpose.answer(load_model(asked, writing), ask, tell, nothing) if result is None else result


def served(
    asked: MayAsk,
    ask: CaptureSpec,
    purpose: Purpose,
    tell: output.TerminalProgress,
    verbose: bool,
    check: Callable[[RunInfo], object] = nothing,
) -> Any:
    """What a server of this user's answers; None where none does, and --verbose says why."""
    if asked.no_server or ask.verify or KEPT is not None:
        return None
    if os.environ.get(NO_SERVER):  # before anything of the server is imported
        output.log(f"not asked of a server: {NO_SERVER} is set", quiet=not verbose)
        return None
    from attnscope.serve.client import ask_server
    from attnscope.serve.wire import UnansweredError

    try:
        return ask_server(asked.load_options(), ask, tell, check, purpose=purpose)
    except UnansweredError as why:
        output.log(f"not asked of a server: {why}", quiet=not verbose)
        tell.again()
        return None


def refuse_other_run(run: RunInfo, writing: Exporting, options: Mapping[str, Any]) -> None:
    """Refuse a folder with another run in it, before the forward pass."""
    if writing.folder is not None:
        from attnscope.export.manifest import check, run_facts

        model = {"name": run.name, "revision": run.revision}
        facts = {"model": model, "device": run.device, "dtype": run.dtype}
        check(writing.folder, run_facts(run.text, facts, options), writing.force)


def read_run(asked: TextRun, writing: Writing) -> Text:
    """The text that was given, or tensors of one; without them, what the run that --from names has read."""
    if asked.tensors_file is not None:
        from attnscope.inputs.tensor_files import read_tensors

        return read_tensors(asked.tensors_file)
    if asked.from_ is None or asked.has_text:
        return read_given(asked, writing)
    if asked.picture:
        raise UsageError("a picture needs a text, and the run has token ids", "add --text TEXT")
    if asked.pair is not None:
        raise UsageError("a pair needs two texts, and the run has token ids", "add --text TEXT")
    from attnscope.cli.config import tokens_of
    from attnscope.inputs.tensors import GivenTensors

    text = tokens_of(asked.from_)
    if isinstance(text, GivenTensors):
        asked.refuse_model()
    return text


def read_given(asked: ModelTexts, writing: Noise) -> str | list[int] | Sound:
    """As `read_text`; or the sound that was given instead of a text."""
    if asked.audio is not None:
        from attnscope.inputs.sound import read_sound

        return read_sound(asked.audio)
    if asked.picture and not asked.has_text:  # which a vision tower reads alone
        from attnscope.utils.files import piped_text

        return piped_text()
    return read_text(asked, writing)


def read_text(asked: OneText, writing: Noise) -> str | list[int]:
    """The text, or its token ids."""
    from attnscope.utils.files import read_ids
    from attnscope.utils.files import read_text as read

    if asked.ids is not None:
        return read_ids(asked.ids)
    configured = isinstance(writing, Config) and writing.config is not None
    return read(asked.text if asked.given is None else asked.given, asked.file, unasked=not configured)


def load_model(asked: Checkpoint, writing: Writing) -> LoadedModel:
    """The model that was asked for, with a bar while it loads."""
    from attnscope.model.libraries import silence_libraries
    from attnscope.model.loading import load

    silence_libraries(writing.verbose)
    options = asked.load_options()
    with output.loading(str(options.model), writing.quiet):
        return (load if KEPT is None else KEPT.load)(options)


def own_module(asked: OwnModule, writing: Writing) -> LoadedModel | LoadedModule:
    """The module that a function of the user's returns, which may be a model of transformers too."""
    from attnscope.model.libraries import silence_libraries
    from attnscope.model.loading import load_module

    assert asked.module is not None
    silence_libraries(writing.verbose)
    with output.loading(asked.module, writing.quiet):
        return load_module(asked.module, asked.trust_remote_code)


def export_text(seen: Observation, writing: Exporting, **how: Unpack[ExportOptions]) -> list[Path]:
    """Write what was seen where --out names a place, with a bar while pictures are drawn; says what was written."""
    if writing.out is None:
        return []
    from attnscope.export.export import Export, export, export_file, picture_count

    spreadsheet = isinstance(writing, Spreadsheet) and writing.spreadsheet
    asked = replace(Export(**how), force=writing.force, workers=None, spreadsheet=spreadsheet)
    if writing.file is not None:
        with unwinding(), output.progress("drawing", None, writing.quiet):
            export_file(seen, writing.file, asked, ONE_PICTURE)
        output.log(f"wrote {writing.file}", writing.quiet)
        return [writing.file]
    steps = picture_count(seen, asked) or None
    with unwinding(), output.progress("drawing", steps, writing.quiet, "pictures") as advance:
        written = export(seen, writing.out, replace(asked, advance=advance))
    output.log(f"wrote {len(written)} files to {writing.out}", writing.quiet)
    return written


WEIGHTS_OF = {LINEAR: "weights are signed, before gate and norm", CHANNELS: "mean |w| over channels, before any gate"}


def say_shares(seen: Observation, quiet: bool) -> None:
    """Say of heads without a softmax that what is listed of a token is a share, which has no sign."""
    stacks = dict.fromkeys(stack for stack, _ in seen.rules)
    output.log_lines((f"{stack} heads: |w| as a share of its row" for stack in stacks), quiet)


def report_checks(seen: Observation, quiet: bool) -> int:
    """Say what linear layers show, what did not hold, and what could not be measured; the exit code that follows."""
    for (stack, rule), layers in seen.rules.items():
        of_channel = stack == CHANNELS and seen.view.channel is not None
        words = f"channel {seen.view.channel}, signed, before any gate" if of_channel else WEIGHTS_OF[stack]
        output.log(f"{stack} layers {as_ranges(layers)}: {rule}; {words}", quiet)
    output.log_lines((f"not measured: {line}" for line in seen.unmeasured), quiet)
    parity = seen.facts.get("parity", {})
    broken, unchecked = seen.failures + parity.get("failures", []), parity.get("unchecked", [])
    output.log_lines((f"check failed: {line}" for line in broken), quiet=False)
    output.log_lines((f"not checked: {line}" for line in unchecked), quiet=False)
    return 1 if broken or unchecked else 0


FEW = 4  # heads that are drawn where none are named


class Show(OptionGroup, panel="Output"):
    """Whether heads are drawn in the terminal."""

    show: Annotated[bool, f"Draw the heads of --select, else the first {FEW}, in the terminal.", Mark.UNRECORDED] = (
        False
    )

    def maps(self, style: Callable[[], Style], to: TextIO) -> MapFields:
        """The fields of `Request` that keep maps as fine as the stream has room for; none without --show."""
        return {"maps": "kept", "map_side": _side(style(), to)} if self.show else {}


def draw_in_terminal(seen: Observation, heads: Sequence[Head], style: Style, to: TextIO) -> None:
    """Draw heads on a stream, as large as it has room for."""
    from attnscope.export.drawing import terminal_maps

    for maps in terminal_maps(seen, [head.name for head in heads], style, _side(style, to)):
        output.show(maps, to)


def stream(only: bool) -> TextIO:
    """Where maps go: to stdout, if nothing else does or a person looks there, else to stderr."""
    return sys.stdout if only or sys.stdout.isatty() else sys.stderr


def _side(style: Style, to: TextIO) -> int:
    from attnscope.figures.terminal import COLOURFUL, side

    console = output.console(to)
    return side(console.width, console.color_system in COLOURFUL, style)

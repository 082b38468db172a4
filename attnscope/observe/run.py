"""A model, and what is asked of a text -> one finished Observation: the middle of the library.

    seen = read(loaded, CaptureSpec("the financial bank", keep=Request(relations=True)))
    seen = run_and_report(loaded, CaptureSpec("the financial bank"), TerminalProgress(quiet=False))

What can be refused is refused before the forward pass. The second says on the way what it does, in lines and stages, to
a `Progress`: the terminal's, or the one at the other end of a socket.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import ModelError, UsageError
from attnscope.hooks.engines import ENGINES, Engine, within_memory
from attnscope.hooks.forward import GLOBAL, arguments, bare_model
from attnscope.hooks.generation import DEFAULT, END, NUMBER, OWN, POSITIONS, STOP, DecodingSteps
from attnscope.inputs import answers
from attnscope.inputs.prompt import Prompt, isolation_for
from attnscope.inputs.sound import MODEL_OF_SOUND, Sound, reads_sound
from attnscope.inputs.tokens import TokenMatch, TokenSelection, chosen_lines, described
from attnscope.model.families import family_of
from attnscope.model.geometry import with_tower
from attnscope.model.loaded import LoadedModel, check_loaded
from attnscope.model.selection import (
    CROSS,
    ENCODER,
    ENCODER_ONLY,
    NAMES,
    SEQ2SEQ,
    VISION,
    VISION_ONLY,
    HeadsByRole,
    mixes,
)
from attnscope.observe.collect import observe
from attnscope.observe.engine_choice import NO_ROOM, Choice, choose, difference_to_eager
from attnscope.observe.inputs import (
    generated,
    ids_of,
    notes_of,
    notes_of_answer,
    notes_of_steps,
    positions,
    reading,
    target,
)
from attnscope.observe.logit_path import asked_of_answer, directions_of_answer
from attnscope.observe.observation import NamesBeside, Observation
from attnscope.observe.request import OF_SOFTMAX, CaptureSpec, Request, RunInfo, TextInputs
from attnscope.utils.memory import check_free
from attnscope.utils.stages import NO_PROGRESS, Progress

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.observe.atlas import HeadNames

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """One text about to be read: the model, the prompt, what to keep, and the engine, with why it was chosen.

    source: what an encoder-decoder's encoder reads, while its decoder reads the prompt. chosen: the tokens that are
    asked about. facts: what the manifest is to say besides what every run says. named_by: the atlas that names the
    model's heads, or whose own folder may hold one. steps: of an answer or a target that the model made, the steps in
    which it did. ask: how the text was asked, without the text itself.
    """

    loaded: LoadedModel
    prompt: Prompt
    request: Request
    choice: Choice
    chosen: TokenSelection = TokenSelection()
    facts: Mapping[str, Any] = field(default_factory=dict)
    named_by: HeadNames | NamesBeside | None = None
    source: Prompt | None = None
    steps: DecodingSteps | None = None
    ask: CaptureSpec | None = None

    @property
    def engine(self) -> Engine:
        """Who computes the layers' attention."""
        return self.choice.engine

    @property
    def text(self) -> Prompt:
        """The text that was given: of an encoder-decoder what its encoder reads."""
        return self.source or self.prompt

    @property
    def layers(self) -> int:
        """How many layers the pass reads: without a selection of them also those without a softmax."""
        geometry = self.loaded.geometry
        stacks = [*geometry.stacks.values()]
        mixing = {stack: layers for stack, layers in geometry.shown.items() if mixes(stack)}
        if any(self.request.of(stack, geometry.numbered).view.heads != {} for stack in mixing):
            stacks += mixing.values()
        return sum(map(len, stacks))

    @property
    def named(self) -> HeadsByRole | None:
        """The heads that the atlas names, as `selection.select` takes them."""
        return _roles(self.named_by)

    @property
    def asked(self) -> dict[str, TextInputs]:
        """What every stack reads, and which tokens of it are asked about."""
        inputs, geometry = TextInputs(self.prompt, self.chosen, self.source), self.loaded.geometry
        return {stack: text for stack in geometry.stacks for text in inputs.of(stack, geometry.stack)[:1]}

    def asking(self, request: Request) -> Run:
        """The same with another request. Raises MemoryLimitError where the machine has no room for what it keeps."""
        _check_matrices(self.loaded, request, self.prompt, len(self.source or ()))
        return replace(self, request=request)

    def verified(self) -> Run:
        """The same, after every layer was compared with the oracle; its verdict goes into the manifest."""
        from attnscope.certificate.check import verify

        engine = self.engine if self.engine.probes else ENGINES["eager"]
        parity = verify(self.loaded, self.prompt, source=self.source, engine=engine)
        return replace(self, facts={**self.facts, "parity": parity})

    def observe(self, advance: Callable[[int], object] = lambda layers: None) -> Observation:
        """The forward pass. Raises MemoryLimitError, which says what would fit, where memory runs out, and ModelError
        where a model in float16 overflows.

        advance: called with 1 whenever a layer was read.
        """
        states: list[Tensor] = []
        with within_memory(self.loaded, len(self.prompt)):
            directions = None
            if self.request.view.weights == "logit":
                foil, rows = self.request.view.foil, TextInputs(self.prompt, self.chosen).queries
                foil_ids = None if foil is None else ids_of(self.loaded, foil)
                directions = directions_of_answer(self.loaded, self.prompt, rows, foil_ids)
            obs = observe(
                self.loaded,
                [self.prompt],
                self.request,
                engine=self.engine,
                chosen=[self.chosen],
                sources=None if self.source is None else [self.source],
                facts=self.facts,
                advance=advance,
                directions=directions,
                states=states.append if self.steps else None,
            )[0]
        # Where a pass in float16 gave NaN there is no number to show.
        broken = next((check for check in obs.calls if check.no_number), None)
        if broken is not None and "float16" in (self.loaded.dtype, str(broken.dtype).removeprefix("torch.")):
            raise ModelError(
                f"{self.loaded.name} overflows in float16, whose largest number is 65504: NaN in {broken.name}",
                "use {dtype=bfloat16} or {dtype=float32}; where only scores are too large {engine=fused} reads it too",
            )
        facts = obs.facts
        if self.steps is not None:
            # The rows of an answer may be others than those that made it, step by step.
            difference = self.steps.difference(states[-1][0]) if states else None
            notes = list(notes_of_steps(self.loaded, difference))
            facts = {**facts, "largest_difference_to_steps": difference} | _noted(notes, facts.get("notes", ()))
        return replace(obs.named(self.named_by), facts=facts, ask=self.ask)


def _noted(notes: Sequence[str], before: Sequence[str] = ()) -> dict[str, Any]:
    """Notes as the manifest has them, behind those before; each is also logged now."""
    for note in notes:
        logger.warning("%s", note)
    return {"notes": [*before, *notes]} if notes else {}


def read(loaded: LoadedModel, ask: CaptureSpec) -> Observation:
    """Read one text through one model and keep what is asked for.

    How far an engine without matrices is from eager is measured where the ask is to be verified: it takes two passes.
    Raises InputError for a text that does not fit the model, MemoryLimitError for one that does not fit the memory,
    UsageError for what cannot be meant.

        >>> read(load(), CaptureSpec("the financial bank")).heads[0].role
    """
    run = prepare(loaded, ask, compared=ask.verify)
    return (run.verified() if ask.verify else run).observe()


def prepare(
    loaded: LoadedModel,
    ask: CaptureSpec,
    advance: Callable[[int], object] = lambda tokens: None,
    *,
    compared: bool = True,
) -> Run:
    """Everything that comes before the forward pass: tokens, heads, engine; each refused where it does not fit.

    advance: called with 1 for every token that is generated. compared: tell how far an engine without matrices is from
    eager, which takes a pass of both over the first tokens.
    """
    check_loaded(loaded)
    _check(loaded, ask)
    # The target of an encoder-decoder is read by its decoder; any other answer that is to come follows the text itself.
    of_two, more = loaded.geometry.task == SEQ2SEQ, 0 if loaded.geometry.task == SEQ2SEQ else ask.generate or 0
    # The virtual tokens of an adapter take places of the text's.
    most = loaded.geometry.max_positions
    room = None if most is None else most - len(loaded.virtual)
    with reading(loaded, isolation_for(loaded, ask.chat), room) as tokens_of:
        prompt = tokens_of(replace(ask, answer="") if more else ask)
    if prompt.answer is not None:
        answers.check_room(prompt, ask.generate, loaded.geometry.max_positions)
    if prompt.medium.tower and not ask.keep.asks:
        loaded = replace(loaded, geometry=with_tower(loaded.geometry, loaded.model.config))
    # An atlas that is named is read now, so that a wrong one is refused before the pass; else when a name is wanted.
    folder = loaded.source_folder
    named_by: HeadNames | NamesBeside | None = None
    if ask.atlas is not None:
        from attnscope.observe.atlas import atlas_of  # for the few asks that name one

        named_by = atlas_of(loaded, ask.atlas)
    elif folder:
        named_by = NamesBeside(loaded.name, loaded.revision, folder, loaded.base_folder)
    select, geometry = ask.select, loaded.geometry
    if select is None and ask.keep.per_token and of_two:
        select = CROSS  # of three stacks what is asked for most: which tokens of the text a target looks at
    roles = None if select is None else _roles(named_by)
    request = ask.keep.selecting(select, geometry.heads_of_stacks, geometry.stack, roles)
    longest = max([len(prompt) + more, *map(len, prompt.medium.tower)])
    choice = choose(loaded, longest, ask.engine, ask.memory, listen=ask.listen, request=request)
    # What the model makes is made by the engine that reads it.
    source, facts, steps = None, dict[str, Any](), None
    if of_two:
        source, (prompt, facts, steps) = prompt, target(loaded, prompt, ask, choice.engine, advance)
    elif more:
        _check_matrices(loaded, request, prompt, more=more)
        prompt, facts, steps = generated(loaded, prompt, more, choice.engine, advance)
    _check_matrices(loaded, request, prompt, len(source or ()))
    if request.view.weights == "logit":
        request = asked_of_answer(request, prompt)
    # How the text is read otherwise than whoever gave it may think: said now, and again in the manifest.
    notes = [*notes_of(loaded, source or prompt)]
    if family_of(loaded.model).bypasses_interface:
        from attnscope.certificate.check import known_departure  # of many files: few families attend in their own way

        if departure := known_departure(loaded.model.config):
            notes.append(f"read as it is computed, and that is wrong: {departure}; attnscope parity shows by how much")
    facts |= _noted([*notes, *notes_of_answer(loaded, prompt, steps)])
    if GLOBAL in arguments(loaded.model):
        by = type(bare_model(loaded.model)).__name__ if ask.global_tokens is None else None
        facts["global_tokens"] = {"positions": positions(source or prompt), "chosen_by_class": by}
    if compared and choice.engine.name != "eager":
        engine = choice.engine if choice.engine.probes else ENGINES["tiles"]
        facts["largest_difference_to_eager"] = difference_to_eager(loaded, prompt, source, engine)
    if loaded.stretched_from is not None:
        facts["positions"] = {
            "trained": loaded.stretched_from,
            "stretched_to": loaded.geometry.max_positions,
            "by": "linear rope scaling",
        }
    # The manifest holds the tokens that were read; of an atlas its folder.
    atlas = os.fspath(ask.atlas) if isinstance(ask.atlas, str | Path) else None
    how = replace(ask, text="", answer=None, generate=None, target=None, picture=None, pair=None, atlas=atlas)
    return Run(loaded, prompt, request, choice, request.chosen(prompt, source), facts, named_by, source, steps, how)


def _check(loaded: LoadedModel, ask: CaptureSpec) -> None:
    """Raise UsageError or ModelError for what is asked of a model of another kind, or at once."""
    task, answer, generate = loaded.geometry.task, ask.answer, ask.generate
    # A model reads one kind of input: text, sound or pictures.
    if task == VISION_ONLY and ask.picture is None:
        raise ModelError(f"{loaded.name} reads pictures", "give it one with {picture=FILE}")
    main, is_sound = getattr(loaded.model, "main_input_name", "input_ids"), isinstance(ask.text, Sound)
    if is_sound or main != "input_ids":
        heard = is_sound or (isinstance(ask.text, Prompt) and main in ask.text.medium.inputs)
        if reads_sound(loaded.model) and not heard:
            raise ModelError(f"{loaded.name} reads sound, and this is a text", "give it a recording with {audio=FILE}")
        if is_sound and not reads_sound(loaded.model):
            raise ModelError(f"{loaded.name} reads text, and this is a sound", MODEL_OF_SOUND)
    # What some things that are kept need of a model.
    if ask.keep.view.weights == "logit":
        for check in (loaded.check_task, loaded.check_logits, loaded.check_bare):
            check("an effect on a logit")
    if ask.keep.rollout or ask.keep.view.weights != "softmax":
        loaded.check_softmax("a rollout" if ask.keep.rollout else OF_SOFTMAX)
    if ask.keep.rollout or ask.keep.operands:
        loaded.check_queries("a rollout" if ask.keep.rollout else "what keeps q and k")
    # A target is of an encoder-decoder, an answer of a decoder that can go on with the text.
    if task != SEQ2SEQ and ask.target is not None:
        what = f"a target is for an encoder-decoder, such as T5 or BART, and this model is {NAMES[task]}"
        raise UsageError(what, "leave out {target}")
    if answer is not None or (generate is not None and task in (ENCODER_ONLY, VISION_ONLY)):
        answers.check_has_answer(task, "use {target=TEXT}", loaded.geometry.both_ways)
    if answer is not None or generate is not None:
        answers.check_answer(generate, answer, None if task == SEQ2SEQ else ask.truncate)
        if task != SEQ2SEQ:
            loaded.check_logits("an answer" if generate is None else "a generated answer")


def _roles(named_by: HeadNames | NamesBeside | None) -> HeadsByRole | None:
    atlas = named_by.read() if named_by else None
    return atlas.by_role() if atlas else None


def _check_matrices(loaded: LoadedModel, request: Request, prompt: Prompt, source: int = 0, more: int = 0) -> None:
    """Refuse to keep whole matrices that the machine has no room for."""
    if not request.weights:
        return
    heads, needed, tokens = 0, 0, len(prompt) + more
    pairs = {ENCODER: source * source if source else tokens * tokens, CROSS: tokens * source}
    pairs |= {VISION: sum(len(part) ** 2 for part in prompt.medium.tower)}
    for stack, layers in loaded.geometry.shown.items():
        of_stack = request.of(stack, loaded.geometry.numbered)
        chosen = of_stack.view_of(of_stack.weights).heads
        kept = sum(layer.heads if chosen is None else len(chosen.get(layer.index, ())) for layer in layers.values())
        heads, needed = heads + kept, needed + 4 * kept * pairs.get(stack, tokens * tokens)
    hint = "ask for fewer layers, or for a Request without weights"
    check_free(f"the matrices of {heads} heads over {tokens} tokens take", needed, hint)


def run_and_report(
    loaded: LoadedModel,
    ask: CaptureSpec,
    tell: Progress = NO_PROGRESS,
    check: Callable[[RunInfo], object] = lambda prepared: None,
) -> Observation:
    """The observation of a text. What can be refused is refused before the next costly step.

    check: called before the forward pass; what it raises ends the question.
    """
    run = prepare_told(loaded, ask, tell)
    check(run_info(run))
    lines = chain(run_lines(run), answer_lines(run), target_lines(run), asked_lines(run))
    return run_pass(run, lines, ask.verify, tell)


def run_pass(run: Run, lines: Iterable[str], verify: bool, tell: Progress) -> Observation:
    """A run's forward pass, after the lines about it; verify: every layer is compared with the oracle first."""
    for line in lines:
        tell.say(line)
    if verify:
        with tell.stage("oracle"):
            run = run.verified()
    tokens = len(run.prompt) + len(run.source or ())
    with tell.stage(f"forward pass over {tokens:,} tokens", run.layers, "layers") as advance:
        return run.observe(advance)


def run_info(run: Run) -> RunInfo:
    """What is known of a run before its pass."""
    loaded, by_memory = run.loaded, run.choice.why == NO_ROOM
    return RunInfo(run.text, loaded.name, loaded.revision, loaded.device, loaded.dtype, by_memory)


def prepare_told(loaded: LoadedModel, ask: CaptureSpec, tell: Progress) -> Run:
    """Everything that comes before the forward pass, with a stage while the model makes an answer."""
    if ask.generate is None:
        return prepare(loaded, ask)
    with tell.stage("generating", ask.generate, "tokens") as advance:
        return prepare(loaded, ask, advance)


def run_lines(run: Run) -> Iterator[str]:
    """What is being read, what is missing that would read it faster, and of a sound how much is its own."""
    loaded, prompt, facts = run.loaded, run.text, run.facts
    # Model, device, dtype, layers x heads (kv heads), tokens, engine and why.
    tokens = f"{len(prompt)} tokens" + f" ({prompt.removed} cut off)" * bool(prompt.removed)
    tokens += f", target {len(run.prompt)}" * (run.source is not None)
    tokens += f", {len(prompt.medium.patches)} of pictures" * bool(prompt.medium.patches)
    engine = f"engine {run.choice.words}"
    if run.engine.name != "eager":
        gap = facts.get("largest_difference_to_eager")
        far = "not compared with eager" if gap is None else f"{gap:.1g} from eager on the first tokens"
        if gap is not None and gap != gap:
            far = "eager gives NaN on the first tokens"
        engine += f" (output {run.engine.output}, {far})"
    parts = [loaded.name, loaded.device, loaded.precision, loaded.geometry.in_words, tokens, engine]
    if stretch := facts.get("positions"):
        parts.append(f"positions {stretch['trained']} stretched to {stretch['stretched_to']} by {stretch['by']}")
    yield "  ".join(parts)
    if run.choice.hint:
        yield run.choice.hint
    # Of a sound: from where on silence pads it.
    if prompt.medium.step is not None:
        own = len(prompt) - sum(prompt.special)
        padded = f"; padded with silence from {prompt.labels[own]} on" if own < len(prompt) else ""
        yield f"{prompt.text.partition(':')[0]}: {own} of {len(prompt)} frames{padded}"
    # Of a model in which some tokens can have global attention: what chose them.
    if chosen := facts.get("global_tokens"):
        places, by = chosen["positions"], chosen["chosen_by_class"]
        which = described(prompt, TokenMatch("global", tuple(places))) if places else "none"
        yield f"global attention: {which}" + f", as {by} chooses; --set global_tokens=TOKENS names others" * bool(by)


def asked_lines(run: Run) -> Iterator[str]:
    """Which tokens were meant; of an encoder-decoder, stack by stack."""
    of_two = run.source is not None
    for stack in run.asked if of_two else [run.loaded.geometry.stack]:
        text = run.asked[stack]
        yield from chosen_lines(text.prompt, text.key_prompt, text.chosen, f"{stack}: " * of_two)


def answer_lines(run: Run) -> Iterator[str]:
    """Which tokens are the answer; of one that was generated, what it is and why it ends."""
    prompt, facts = run.prompt, run.facts.get("generated")
    if prompt.answer is None:
        return
    if facts is None:
        yield f"answer: {described(prompt, TokenMatch('answer', tuple(prompt.parts['answer'])))}"
        return
    count, text = len(facts["ids"]), "".join(prompt.plain[prompt.answer :]).strip()
    places = f"{prompt.answer}-{len(prompt) - 1}" if count > 1 else prompt.answer
    yield f"generated {_count_words(count, facts, 'the last the end token')}: {text}({places})"
    if facts["stopped_by"] == END and count < (facts["asked"] or 0):
        yield f"the model ended its answer after {count} tokens; --answer TEXT reads a longer one that you give"


def target_lines(run: Run) -> Iterator[str]:
    """What an encoder-decoder's decoder reads, where the model made it."""
    facts = run.facts.get("target")
    if facts is not None and facts["generated"]:
        text, count = "".join(run.prompt.plain).strip(), _count_words(facts["made"], facts, "then the end token")
        yield f"target, generated greedily: {text} ({count}); --target TEXT gives another"


def _count_words(count: int, facts: Mapping[str, Any], end: str) -> str:
    """How many tokens were generated, of how many that were asked for, and what ended them; end: of an end token."""
    asked, why = facts["asked"], facts["stopped_by"]
    of = f" of {asked}" if asked and why != NUMBER else ""
    words = {
        END: end,
        STOP: "up to a stop string",
        DEFAULT: "the most by default",
        POSITIONS: "as many as the decoder reads",
        OWN: "where its own code stops",
    }
    return f"{count}{of} token{'s' * ((asked if of else count) != 1)}" + (f", {words[why]}" if why in words else "")

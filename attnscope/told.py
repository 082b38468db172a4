"""One question from ask to observation, and what is printed on the way, in lines and stages.

    seen = observed(loaded, Ask("the financial bank"), Talk(quiet=False))

Who listens is a `Teller`: the terminal's, or the one at the other end of a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attnscope.hooks.generation import DEFAULT, END, NUMBER, OWN, POSITIONS, STOP
from attnscope.inputs.tokens import TokenMatch as Found
from attnscope.inputs.tokens import chosen_lines, described
from attnscope.observe.choice import NO_ROOM
from attnscope.run import Run, prepare
from attnscope.telling import SILENT, Prepared, Teller

if TYPE_CHECKING:
    from attnscope.ask import Ask
    from attnscope.model.loaded import LoadedModel
    from attnscope.observation import Observation


def observed(
    loaded: LoadedModel,
    ask: Ask,
    tell: Teller = SILENT,
    check: Callable[[Prepared], object] = lambda prepared: None,
) -> Observation:
    """The observation of a text. What can be refused is refused before the next costly step.

    check: called before the forward pass; what it raises ends the question.
    """
    run = prepare_told(loaded, ask, tell)
    check(known(run))
    return passed(run, lines_of(run), ask.verify, tell)


def passed(run: Run, lines: Iterable[str], verify: bool, tell: Teller) -> Observation:
    """A run's forward pass, after the lines about it; verify: every layer is held against the oracle first."""
    for line in lines:
        tell.say(line)
    if verify:
        with tell.stage("oracle"):
            run = run.verified()
    layers = sum(map(len, run.loaded.geometry.stacks.values()))
    tokens = len(run.prompt) + len(run.source or ())
    with tell.stage(f"forward pass over {tokens:,} tokens", layers, "layers") as advance:
        return run.observe(advance)


def known(run: Run) -> Prepared:
    """What is known of a run before its pass."""
    loaded, by_memory = run.loaded, run.choice.why == NO_ROOM
    return Prepared(run.text, loaded.name, loaded.revision, loaded.device, loaded.dtype, by_memory)


def prepare_told(loaded: LoadedModel, ask: Ask, tell: Teller) -> Run:
    """Everything that comes before the forward pass, with a stage while the model makes an answer."""
    if ask.generate is None:
        return prepare(loaded, ask)
    with tell.stage("generating", ask.generate, "tokens") as advance:
        return prepare(loaded, ask, advance)


def lines_of(run: Run) -> Iterator[str]:
    """What is read, its answer and its target, and which tokens are asked about."""
    yield from run_lines(run)
    yield from answer_lines(run)
    yield from target_lines(run)
    yield from asked_lines(run)


def run_lines(run: Run) -> Iterator[str]:
    """What is being read, what is missing that would read it faster, and of a sound how much is its own."""
    yield header(run)
    if run.choice.hint:
        yield run.choice.hint
    yield from sound_lines(run)
    yield from global_lines(run)


def header(run: Run) -> str:
    """What is being read: model, device, dtype, layers x heads (kv heads), tokens, engine and why."""
    loaded, prompt = run.loaded, run.text
    target = f", target {len(run.prompt)}" * (run.source is not None)
    target += f", {len(prompt.medium.patches)} of pictures" * bool(prompt.medium.patches)
    parts = [
        loaded.name,
        loaded.device,
        loaded.precision,
        loaded.geometry.in_words,
        f"{len(prompt)} tokens" + (f" ({prompt.removed} cut off)" * bool(prompt.removed)) + target,
        _engine_words(run),
    ]
    stretch = run.facts.get("positions")
    if stretch:
        parts.append(f"positions {stretch['trained']} stretched to {stretch['stretched_to']} by {stretch['by']}")
    return "  ".join(parts)


def asked_lines(run: Run) -> Iterator[str]:
    """Which tokens were meant; of an encoder-decoder, stack by stack."""
    for stack in run.asked if run.source is not None else [run.loaded.geometry.stack]:
        one = run.asked[stack]
        yield from chosen_lines(one.prompt, one.looked_at, one.chosen, f"{stack}: " * (run.source is not None))


def answer_lines(run: Run) -> Iterator[str]:
    """Which tokens are the answer; of one that was generated, what it is and why it ends."""
    prompt, made = run.prompt, run.facts.get("generated")
    if prompt.answer is None:
        return
    if made is None:
        yield f"answer: {described(prompt, Found('answer', tuple(prompt.parts['answer'])))}"
        return
    count, said = len(made["ids"]), "".join(prompt.plain[prompt.answer :]).strip()
    places = f"{prompt.answer}-{len(prompt) - 1}" if count > 1 else prompt.answer
    yield f"generated {_count_words(count, made, 'the last the end token')}: {said}({places})"
    if made["stopped_by"] == END and count < (made["asked"] or 0):
        yield f"the model ended its answer after {count} tokens; --answer TEXT reads a longer one that you give"


def sound_lines(run: Run) -> Iterator[str]:
    """How many of the frames are the sound itself, and from where on silence pads it."""
    prompt = run.text
    if prompt.medium.step is None:
        return
    own = len(prompt) - sum(prompt.special)
    padded = f"; padded with silence from {prompt.labels[own]} on" if own < len(prompt) else ""
    yield f"{prompt.text.partition(':')[0]}: {own} of {len(prompt)} frames{padded}"


def global_lines(run: Run) -> Iterator[str]:
    """Which tokens have global attention, of a model in which some can, and what chose them."""
    made = run.facts.get("global_tokens")
    if made is None:
        return
    places, by = made["positions"], made["chosen_by_class"]
    which = described(run.text, Found("global", tuple(places))) if places else "none"
    yield f"global attention: {which}" + (f", as {by} chooses; --set global_tokens=TOKENS names others" if by else "")


def target_lines(run: Run) -> Iterator[str]:
    """What an encoder-decoder's decoder reads, where the model made it."""
    made = run.facts.get("target")
    if made is not None and made["generated"]:
        said, count = "".join(run.prompt.plain).strip(), _count_words(made["made"], made, "then the end token")
        yield f"target, generated greedily: {said} ({count}); --target TEXT gives another"


def _count_words(count: int, made: Mapping[str, Any], end: str) -> str:
    """How many tokens were generated, of how many that were asked for, and what ended them; end: of an end token."""
    asked, why = made["asked"], made["stopped_by"]
    of = f" of {asked}" if asked and why != NUMBER else ""
    words = {
        END: end,
        STOP: "up to a stop string",
        DEFAULT: "the most by default",
        POSITIONS: "as many as the decoder reads",
        OWN: "where its own code stops",
    }
    return f"{count}{of} token{'s' * ((asked if of else count) != 1)}" + (f", {words[why]}" if why in words else "")


def _engine_words(run: Run) -> str:
    words = f"engine {run.choice.words}"
    if run.engine.name == "eager":
        return words
    gap = run.facts.get("largest_difference_to_eager")
    far = "not compared with eager" if gap is None else f"{gap:.1g} from eager on the first tokens"
    if gap is not None and gap != gap:
        far = "eager gives NaN on the first tokens"
    return f"{words} (output {run.engine.output}, {far})"

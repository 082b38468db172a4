"""`attnscope tokens`: what a model makes of a text, and a way to try the words of --query and --key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.one_text import read_text, served
from attnscope.cli.option_groups import fill
from attnscope.cli.options import GivenFile, MayAsk, OneText, Pair, Question
from attnscope.cli.output import Format, Noise
from attnscope.cli.relations import relations_sheet
from attnscope.inputs.tokens import GRAMMAR, PRECEDENCE

if TYPE_CHECKING:
    import pyarrow as pa

    from attnscope.inputs.prompt import Prompt, Span
    from attnscope.serve.questions import Tokenised

EXAMPLES = (
    'attnscope tokens "the cat sat on the mat"',
    'attnscope tokens --text "the bank by the river bank" --query "bank#2" --format jsonl',
    'echo "the cat sat on the mat" | attnscope tokens --query "^special,^the" --define "subject=cat" --key subject',
)
MORE_HELP = (
    "\n\n\b\nTOKENS of --query, --key and --define:\n"
    + "\n".join(f"  {form.ljust(24)}{meaning}" for form, meaning in GRAMMAR)
    + f"\n\n{PRECEDENCE}"
)


class Listed(Pair, OneText, MayAsk, GivenFile):
    """One text, or a pair, and the model whose tokenizer reads it; or a file that has tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensors_file is not None:
            self.refuse_model()

    @property
    def _places(self) -> dict[str, str | None]:
        return super()._places | self.file_places


@with_options(Listed, Question, Format, Noise)
def tokens(asked: Listed, question: Question, printing: Format, noise: Noise) -> int:
    """List the tokens of a text, and which of them an expression names.

    A row has a token's number, text, id, characters, word, sentence and turn. With --query or --key it lists the
    named tokens alone. Only the tokenizer is loaded, no weights.
    """
    asks = question.asks()
    format = output.wanted_format(printing.format)

    if asked.tensors_file is None:
        read = read_tokens(asked, read_text(asked, noise), noise)
    else:
        read = given_tokens(asked.tensors_file)

    from attnscope.inputs.tokens import choose, chosen_lines
    from attnscope.utils.tables import integers

    prompt = read.prompt
    chosen = choose(prompt, asks["query"], asks["key"], asks["define"])
    output.log(header(read), noise.quiet)
    output.log_lines(chosen_lines(prompt, prompt, chosen), noise.quiet)
    named = sorted({at for match in (chosen.query, chosen.key) if match for at in match.positions})
    table = token_table(prompt)
    table = table.take(integers(named)) if named else table
    output.emit(table, format, lambda: relations_sheet(table, None))
    return 0


def read_tokens(asked: Listed, text: str | list[int], noise: Noise) -> Tokenised:
    """The text as the model reads it; longer than that too, unless it is to be cut."""
    from attnscope.observe.request import CaptureSpec
    from attnscope.serve.questions import Tokenise, tokenised

    ask = fill(CaptureSpec, asked, text=text)
    answer: Tokenised | None = served(asked, ask, Tokenise(), output.TerminalProgress(noise.quiet), noise.verbose)
    if answer is not None:
        return answer

    from attnscope.model.libraries import silence_libraries
    from attnscope.model.loading import load_tokenizer

    silence_libraries(noise.verbose)
    return tokenised(load_tokenizer(asked.load_options()), ask)


def given_tokens(file: str) -> Tokenised:
    """The tokens of a file of tensors: those that are attended to."""
    from attnscope.inputs.tensor_files import read_tensors
    from attnscope.serve.questions import Tokenised

    given = read_tensors(file)
    return Tokenised(given.text, f"{given.kind} from {given.source}", None)


def header(read: Tokenised) -> str:
    """Which tokenizer, how many tokens, and whether the model reads as many."""
    prompt, most = read.prompt, read.max_positions
    cut = f" ({prompt.removed} cut off)" * bool(prompt.removed)
    beyond = f"  the model reads {most}; --truncate shows which" if most is not None and len(prompt) > most else ""
    return f"{read.name}  {len(prompt)} tokens{cut}{beyond}"


def token_table(prompt: Prompt) -> pa.Table:
    """A row per token: characters from start to stop, null where it has none; words and sentences counted from 0."""
    from attnscope.utils.tables import as_table, integers, words

    written = [(start, stop) if start < stop else (None, None) for start, stop in prompt.characters]
    # As --query names them: `user#2`, and of a pair `text` or `pair`.
    counts = Counter[str]()
    turns: list[tuple[str, Span]] = []
    for turn in prompt.turns:
        counts[turn.name] += 1
        turns.append((f"{turn.name}#{counts[turn.name]}", turn))
    columns: dict[str, Any] = {
        "position": list(range(len(prompt))),
        "token": list(prompt.tokens),
        "id": list(prompt.ids),
        "special": list(prompt.special),
        "start": integers([start for start, _ in written]),
        "stop": integers([stop for _, stop in written]),
        "word": _numbers(prompt.words),
        "sentence": _numbers(prompt.sentences),
        "turn": words(_names(turns, len(prompt))),
        "segment": words(_names([(span.name, span) for span in prompt.segments], len(prompt))),
    }
    return as_table(columns)


def _numbers(spans: tuple[Span, ...]) -> list[int]:
    return [number for number, span in enumerate(spans) for _ in range(span.start, span.stop)]


def _names(spans: Iterable[tuple[str, Span]], count: int) -> list[str | None]:
    """The name of the span that each of so many tokens is in, None where it is in none."""
    names: list[str | None] = [None] * count
    for name, span in spans:
        names[span.start : span.stop] = [name] * (span.stop - span.start)
    return names

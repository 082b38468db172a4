"""To see what a model makes of a text, as tokens; no weights are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnscope.inputs.prompt import Prompt, from_ids, place, reading
from attnscope.observe.progress import NO_PROGRESS as SILENT
from attnscope.observe.progress import Progress as Teller
from attnscope.purposes.purpose import Check, Purpose, unchecked

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel, LoadedTokenizer
    from attnscope.observe.request import CaptureSpec as Ask


@dataclass(frozen=True)
class Tokenised:
    """A text as tokens; name: of the model. max_positions: how many tokens it reads, None where nothing bounds them."""

    prompt: Prompt
    name: str
    max_positions: int | None


@dataclass(frozen=True)
class Tokenise(Purpose):
    """The tokens of a text, which may be longer than the model reads unless the ask says to cut it."""

    name = "tokens"
    record = "Tokenised"

    def answer(self, loaded: LoadedModel, ask: Ask, tell: Teller = SILENT, check: Check = unchecked) -> Tokenised:
        """The tokens, by a loaded model's tokenizer."""
        from attnscope.model.loaded import LoadedTokenizer

        most = loaded.geometry.max_positions
        return tokenised(LoadedTokenizer(loaded.tokenizer, loaded.name, most, loaded.brought), ask)


def tokenised(loaded: LoadedTokenizer, ask: Ask) -> Tokenised:
    """The tokens of a text or of ids. Raises as `text.prompt.from_text`."""
    text, most = ask.text, loaded.max_positions if ask.truncate else None
    ask.check_pair()
    if isinstance(text, str):
        with reading(loaded.tokenizer, place(loaded.tokenizer, loaded.brought, ask.chat)) as read:
            prompt = read(text, ask.chat, most, ask.truncate, None, ask.pair)
    else:
        prompt = from_ids(loaded.tokenizer, text, max_tokens=most, truncate=ask.truncate)  # type: ignore[arg-type]
    return Tokenised(prompt, loaded.name, loaded.max_positions)

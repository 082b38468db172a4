"""A text, a model, a request -> one finished Observation: the middle of the library.

    seen = read(loaded, "the financial bank", Request(relations=True))

What can be refused is refused before the forward pass; no terminal is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, SupportsIndex

from attnscope.errors import InputError, MemoryLimitError, UsageError
from attnscope.memory import DTYPE_BYTES, free_memory, human_bytes, is_out_of_memory
from attnscope.model.geometry import tokens_that_fit
from attnscope.model.loading import LoadedModel
from attnscope.observation import Observation
from attnscope.observe import Request, observe
from attnscope.seam.choice import choose, difference
from attnscope.seam.engines import Engine
from attnscope.selection import Named
from attnscope.selection import select as selected
from attnscope.study.atlas import Atlas, atlas_of
from attnscope.text.prompt import Prompt, Side, from_ids, place, reading
from attnscope.text.tokens import Chosen

Text = str | Prompt | Sequence[int]


@dataclass(frozen=True)
class Run:
    """One text about to be read: the model, the prompt, what to keep, and the engine that fits.

    chosen: the tokens that are asked about. facts: what the manifest is to say beside what every run says. atlas: what
    names the model's heads, where there is one.
    """

    loaded: LoadedModel
    prompt: Prompt
    request: Request
    engine: Engine
    chosen: Chosen = Chosen()
    facts: Mapping[str, Any] = field(default_factory=dict)
    atlas: Atlas | None = None

    @property
    def named(self) -> Named | None:
        """The heads that the atlas names, as `selection.select` takes them."""
        return self.atlas.by_role() if self.atlas else None

    def asking(self, request: Request) -> Run:
        """The same with another request. Raises MemoryLimitError where the machine has no room for what it keeps."""
        _check_matrices(self.loaded, request, len(self.prompt))
        return replace(self, request=request)

    def verified(self) -> Run:
        """The same, after every layer was held against the oracle; its verdict goes into the manifest."""
        from attnscope.parity.certificate import verify

        return replace(self, facts={**self.facts, "parity": verify(self.loaded, self.prompt)})

    def observe(self, advance: Callable[[int], object] = lambda layers: None) -> Observation:
        """The forward pass. Raises MemoryLimitError, which says what would fit, where memory runs out.

        advance: called with 1 whenever a layer was read.
        """
        try:
            seen = observe(
                self.loaded,
                [self.prompt],
                self.request,
                engine=self.engine,
                chosen=[self.chosen],
                facts=self.facts,
                advance=advance,
            )[0]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            count = len(self.prompt)
            raise MemoryLimitError(
                f"memory ran out on {self.loaded.device} while {count} tokens were read",
                f"{tokens_that_should_fit(self.loaded, count)} tokens fit: shorten the text, or take a smaller model "
                "or dtype",
            ) from error
        return replace(seen, atlas=self.atlas)


def read(
    loaded: LoadedModel,
    text: Text,
    request: Request = Request(),
    *,
    engine: str = "auto",
    verify: bool = False,
    **how: Any,
) -> Observation:
    """Read one text through one model and keep what the request asks for.

    text: the text, its tokens as a Prompt, or token ids. engine: "eager" reads the model's own matrices, "fused" makes
    none, "auto" is eager while a layer's matrices fit. verify: hold every layer against the oracle too. how: as for
    `prepare`. Raises InputError for a text that does not fit the model, MemoryLimitError for one that does not fit the
    memory, UsageError for what cannot be meant.

        >>> read(load(), "the financial bank").heads[0].role
    """
    run = prepare(loaded, text, request, engine=engine, **how)
    return (run.verified() if verify else run).observe()


def prepare(
    loaded: LoadedModel,
    text: Text,
    request: Request = Request(),
    *,
    engine: str = "auto",
    select: str | None = None,
    atlas: Atlas | Path | str | None = None,
    chat: bool = False,
    truncate: Side | None = None,
    memory: str | None = None,
    listen: bool = False,
) -> Run:
    """Everything that comes before the forward pass: tokens, heads, engine; each refused where it does not fit.

    select: heads to keep, as "27.3,last"; over the request's own. atlas: see `atlas_of`. chat: apply the chat template.
    truncate: cut a text that is too long, on this side. memory: what a layer's matrices may take, such as "4GB".
    listen: with the fused engine, leave the layers' outputs to the model.
    """
    if not isinstance(loaded, LoadedModel):
        raise UsageError(
            f"expected a LoadedModel, got {type(loaded).__name__}",
            "attnscope.load makes one, attnscope.wrap one of a model and a tokenizer",
        )
    prompt = _prompt(loaded, text, chat, truncate)
    found = atlas_of(loaded, atlas)
    if select is not None:
        heads = selected(select, loaded.geometry.heads_by_layer, found.by_role() if found else None)
        request = replace(request, view=replace(request.view, heads=heads))
    chosen = request.chosen(prompt)
    computes = choose(loaded, len(prompt), engine, memory, listen=listen)
    _check_matrices(loaded, request, len(prompt))
    return Run(loaded, prompt, request, computes, chosen, _facts(loaded, prompt, computes, found), found)


def _prompt(loaded: LoadedModel, text: Text, chat: bool, truncate: Side | None) -> Prompt:
    most = loaded.geometry.max_positions
    if isinstance(text, str):
        if not text.strip():
            raise InputError("the text is empty", "give a text with at least one word")
        with reading(loaded.tokenizer, place(loaded.tokenizer, loaded.brought, chat)) as read:
            prompt = read(text, chat, most, truncate)
        loaded.check_ids(prompt.ids)
        return prompt
    check_ids(loaded, text.ids if isinstance(text, Prompt) else text)
    if isinstance(text, Prompt):
        return text
    return from_ids(loaded.tokenizer, text, max_tokens=most, truncate=truncate)


def check_ids(loaded: LoadedModel, ids: Sequence[int]) -> None:
    """Raise UsageError for what is no token id, InputError for one that the model has no embedding of."""
    if not all(isinstance(token, SupportsIndex) for token in ids):
        raise UsageError("expected a text, a Prompt or token ids as whole numbers", "give one text at a time")
    place = loaded.unknown_id(ids)
    if place is not None:
        raise InputError(
            f"token {place} has the id {ids[place]}, and the vocabulary has {loaded.embeddings} ids",
            f"give ids from 0 to {(loaded.embeddings or 1) - 1}, of this model's own tokenizer",
        )


def _facts(loaded: LoadedModel, prompt: Prompt, engine: Engine, atlas: Atlas | None) -> dict[str, Any]:
    """How far the engine is from eager on this text, whether positions were stretched, and who names the heads."""
    facts: dict[str, Any] = {}
    if engine.name != "eager":
        facts["largest_difference_to_eager"] = difference(loaded, prompt)
    if loaded.stretched_from is not None:
        facts["positions"] = {
            "trained": loaded.stretched_from,
            "stretched_to": loaded.geometry.max_positions,
            "by": "linear rope scaling",
        }
    if atlas is not None:
        facts["atlas"] = {name: atlas.facts.get(name) for name in ("seed", "sequences", "ids_sha256")}
    return facts


def _check_matrices(loaded: LoadedModel, request: Request, tokens: int) -> None:
    """Refuse to keep whole matrices that the machine has no room for."""
    if not request.weights:
        return
    chosen, there = request.view_of(request.weights).heads, loaded.geometry.heads_by_layer
    heads = sum(count if chosen is None else len(chosen.get(layer, ())) for layer, count in there.items())
    needed, room = 4 * heads * tokens * tokens, free_memory("cpu")
    if needed > room:
        raise MemoryLimitError(
            f"the matrices of {heads} heads over {tokens} tokens take {human_bytes(needed)}, and this machine has "
            f"{human_bytes(room)} free",
            "ask for fewer layers, or for a Request without weights",
        )


def tokens_that_should_fit(loaded: LoadedModel, failed: int) -> int:
    """What eager attention has room for; at most half of what just failed, which takes a quarter of the memory."""
    room = tokens_that_fit(loaded.geometry, free_memory(loaded.device), DTYPE_BYTES[loaded.dtype])
    return max(1, min(room, failed // 2))

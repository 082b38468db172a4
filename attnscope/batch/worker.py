"""A loaded model that tokenises items and measures them; whatever is wrong with one text is that text's failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from attnscope.batch.batches import WINDOW_BYTES, WINDOW_TEXTS, batch_limit, batches, kept_bytes
from attnscope.batch.items import Item
from attnscope.batch.job import Job
from attnscope.batch.journal import Failure
from attnscope.batch.replicas import Replicas
from attnscope.batch.rows import Measured
from attnscope.batch.shards import Shard
from attnscope.batch.spans import given_spans
from attnscope.errors import AttnscopeError, InputError, ModelError, UsageError
from attnscope.memory import is_out_of_memory, keep_freed_memory
from attnscope.model.loading import LoadedModel, load
from attnscope.model.padding import pads
from attnscope.observation import Observation
from attnscope.observe import observe
from attnscope.seam.choice import choose
from attnscope.seam.engines import ENGINES, Engine
from attnscope.selection import select
from attnscope.text.prompt import Prompt, Side, reading
from attnscope.text.tokens import Chosen

SURELY_FITS = 512**2  # pairs of tokens: one layer's matrices are then no more than some megabytes


class Text(NamedTuple):
    """An item as token ids, and the tokens of it that are asked about."""

    item: Item
    prompt: Prompt
    chosen: Chosen


@dataclass
class Window:
    """Consecutive items of a shard, tokenised: `items` counts them, failures included; `last` ends the shard.

    read: bytes of the corpus that had been read when its last item came.
    """

    shard: Shard
    items: int = 0
    texts: list[Text] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    read: int = 0
    last: bool = False


class Worker:
    """A loaded model that tokenises and measures items.

    >>> worker = Worker(Job())
    >>> for window in worker.windows(shard):
    ...     measured = worker.measure(window)
    """

    def __init__(self, job: Job, loaded: LoadedModel | None = None) -> None:
        self.job = job
        keep_freed_memory()
        self.loaded = loaded or load(job.load)
        self.loaded.check_task("a corpus", "decoder", "encoder")
        if job.engine not in ("auto", "eager"):
            choose(self.loaded, 1, job.engine)  # refused now, not once per text
        _check_positions(job.max_tokens, self.loaded.geometry.max_positions)
        self.request = job.request
        heads = self.loaded.geometry.heads_by_layer
        if job.select is not None:
            self.request = replace(job.request, view=replace(job.request.view, heads=select(job.select, heads)))
        self.replicas = Replicas(self.loaded)
        self.limit = batch_limit(self.loaded) if job.batch_tokens is None else job.batch_tokens
        self._heads = sum(heads.values())

    def windows(self, shard: Shard) -> Iterator[Window]:
        """A shard's items, tokenised, in pieces whose results fit into memory; the cut depends on the items alone."""
        window, size = Window(shard), 0.0
        with reading(self.loaded.tokenizer, "process" if self.loaded.brought else "here") as read:
            for item in shard.items:
                size += self._tokenise(item, window, read)
                if size >= WINDOW_BYTES or len(window.texts) >= WINDOW_TEXTS or window.last:
                    yield window
                    window, size = Window(shard), 0.0

    def measure(self, window: Window, stop: Callable[[], bool] = lambda: False) -> Measured | None:
        """The window's observations in the order of its items, whatever the batching; None where `stop` said so."""
        lengths = [len(text.prompt) for text in window.texts]
        groups = batches(lengths, self.limit, not pads(self.loaded.model), 1 if self.job.one_by_one else None)

        def observed(loaded: LoadedModel, places: Sequence[int]) -> Measured:
            return self._observed(loaded, [window.texts[place] for place in places])

        parts = self.replicas.each(observed, groups, stop)
        if parts is None:
            return None
        return Measured.joined([Measured(len(window.failures), [], window.failures), *parts])

    def _tokenise(self, item: Item, window: Window, read: Callable[..., Prompt]) -> float:
        """Put an item into the window; about how many bytes its results will take."""
        window.items += 1
        window.read, window.last = item.read, item is window.shard.items[-1]
        try:
            prompt = self._prompt(item, read)
            chosen = self._chosen(item, prompt)
        except InputError as error:
            window.failures.append(Failure.of(item, error.message))
            return 0.0
        window.texts.append(Text(item, prompt, chosen))
        return kept_bytes(self.job, self._heads, len(prompt))

    def _prompt(self, item: Item, read: Callable[..., Prompt]) -> Prompt:
        """The item's text as token ids. Raises InputError where there is none."""
        if item.problem is not None:
            raise InputError(item.problem)
        try:
            prompt = read(item.text, self.job.chat, *self._cut)
            self.loaded.check_ids(prompt.ids)
        except ModelError as error:
            raise InputError(error.message) from error
        return prompt

    @property
    def _cut(self) -> tuple[int | None, Side | None]:
        """The most tokens that a text may have, and the side on which a longer one is cut; None: it fails."""
        job = self.job
        if job.max_tokens is None:
            return self.loaded.geometry.max_positions, job.truncate
        return job.max_tokens, job.truncate or "right"

    def _chosen(self, item: Item, prompt: Prompt) -> Chosen:
        """The tokens of an item that are asked about. Raises InputError where what says so means none."""
        asked, job = self.request, self.job
        query = asked.query if job.query_field is None else _expression(item, job.query_field)
        key = asked.key if job.key_field is None else _expression(item, job.key_field)
        given = given_spans(item, prompt, asked.spans, job.chat) if asked.spans else {}
        left = [name for name in asked.spans if name not in given]
        try:
            chosen = replace(asked, query=query, key=key, spans=left).chosen(prompt)
            return replace(chosen, spans={name: {**given, **chosen.spans}[name] for name in asked.spans})
        except UsageError as error:  # what a record says, or a pattern that takes too long on this text
            raise InputError(error.message) from error

    def _observed(self, loaded: LoadedModel, texts: Sequence[Text]) -> Measured:
        """Observe a batch; one that does not fit, or does not hold, is halved until the text at fault is alone."""
        try:
            seen = self._forward(loaded, texts)
            broken = _broken(seen[0])
        except Exception as error:  # any family's code, with any text
            if _is_fatal(error):
                raise
            if is_out_of_memory(error):
                self._take_less([text.prompt for text in texts])
            seen, broken = [], _reason(error)
        items = [text.item for text in texts]
        if not broken:
            return Measured(len(texts), list(zip(items, seen, strict=True)), [])
        if len(texts) == 1:
            return Measured(1, [], [Failure.of(items[0], broken)])
        half = len(texts) // 2
        return Measured.joined([self._observed(loaded, texts[:half]), self._observed(loaded, texts[half:])])

    def _forward(self, loaded: LoadedModel, texts: Sequence[Text]) -> list[Observation]:
        """One forward pass over a batch."""
        prompts, chosen = [text.prompt for text in texts], [text.chosen for text in texts]
        engine = self._engine(loaded, len(prompts), max(len(prompt) for prompt in prompts))
        return observe(loaded, prompts, self.request, engine=engine, chosen=chosen)

    def _engine(self, loaded: LoadedModel, texts: int, longest: int) -> Engine:
        """The job's engine; under auto, eager while the matrices of the whole batch fit."""
        if self.job.engine in ("auto", "eager") and texts * longest**2 <= SURELY_FITS:
            return ENGINES["eager"]
        return choose(loaded, longest, self.job.engine, batch=texts)

    def _take_less(self, prompts: list[Prompt]) -> None:
        size = len(prompts) * max(len(prompt) for prompt in prompts)
        self.limit = max(1, min(self.limit, size) // 2) if len(prompts) > 1 else self.limit
        if self.loaded.device.startswith("cuda"):
            import torch

            torch.cuda.empty_cache()


def _check_positions(tokens: int | None, positions: int | None) -> None:
    if tokens is not None and positions is not None and tokens > positions:
        raise UsageError(
            f"texts of {tokens} tokens are too long: the model reads at most {positions}",
            f"give {{max_tokens={positions}}} or less",
        )


def _expression(item: Item, field: str) -> str:
    """What a field of the item's record says of its tokens. Raises InputError where it says nothing."""
    if field not in item.fields:
        raise InputError(f"no field {field!r}; there are {', '.join(map(repr, list(item.fields)[:8])) or 'none'}")
    value = item.fields[field]
    if type(value) not in (str, int):
        raise InputError(f"field {field!r} names no tokens but is {type(value).__name__}")
    return str(value)


def _broken(seen: Observation) -> str:
    """What did not hold, empty where all did; all texts of a batch share one report."""
    found = seen.failures
    if any("nan" in line.split() for line in found):
        return f"NaN in the weights: {found[0]}"
    return "does not hold: " + "; ".join(found[:3]) if found else ""


def _is_fatal(error: BaseException) -> bool:
    """Whether no further text can be measured after this."""
    broken_device = "CUDA error" in str(error) and not is_out_of_memory(error)
    return isinstance(error, ModelError) or broken_device


def _reason(error: Exception) -> str:
    if isinstance(error, AttnscopeError):
        return error.message
    if is_out_of_memory(error):
        return "memory ran out, with this text alone"
    return f"{type(error).__name__}: {_line(error)}"


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]

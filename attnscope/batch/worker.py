"""The engine of `attnscope batch`: shards of items in, committed shards out, on one machine and on a cluster alike.

Corpus and tokenising run in one thread, writing in another, the model in the caller's. Whatever is wrong with one text
is that text's failure; what is wrong with the disk or the model ends the run, with everything committed so far safe.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from attnscope.batch.batches import (
    WINDOW_BYTES,
    WINDOW_TEXTS,
    batch_limit,
    batches,
    kept_bytes,
    pads_exactly,
    settle_rotary,
)
from attnscope.batch.items import Item
from attnscope.batch.job import Job
from attnscope.batch.journal import Failure, Record
from attnscope.batch.pipeline import Ahead, Writer, Writing
from attnscope.batch.replicas import Replicas
from attnscope.batch.rows import Measured
from attnscope.batch.shards import Shard
from attnscope.errors import AttnscopeError, InputError, ModelError
from attnscope.manifest import failures
from attnscope.memory import is_out_of_memory, keep_freed_memory
from attnscope.model.geometry import check_eager_fits
from attnscope.model.loading import LoadedModel, load
from attnscope.observe import Observation, observe
from attnscope.selection import select
from attnscope.text.prompt import Prompt, from_chat, from_text


@dataclass
class Window:
    """Consecutive items of a shard, tokenised; `last` ends the shard."""

    shard: Shard
    items: int
    prompts: list[tuple[Item, Prompt]]
    failures: list[Failure]
    last: bool


@dataclass
class Tally:
    """How far a run has come."""

    items: int = 0
    texts: int = 0
    tokens: int = 0
    failed: int = 0
    read: int = 0
    stopped: bool = False
    first_failures: list[Failure] = field(default_factory=list)


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
        self.request = job.request
        if job.select is not None:
            heads = {layer.index: layer.heads for layer in self.loaded.geometry.attention_layers}
            self.request = replace(job.request, view=replace(job.request.view, heads=select(job.select, heads)))
        self.pads = pads_exactly(self.loaded.model.config)
        self.replicas = Replicas(self.loaded)
        self.limit = batch_limit(self.loaded) if job.batch_tokens is None else job.batch_tokens
        self._heads = sum(layer.heads for layer in self.loaded.geometry.attention_layers)

    def windows(self, shard: Shard) -> Iterator[Window]:
        """A shard's items, tokenised, in pieces whose results fit into memory; the cut depends on the items alone."""
        items, kept, failed, size = 0, [], [], 0.0
        for item in shard.items:
            found = self._prompt(item)
            items += 1
            if isinstance(found, Failure):
                failed.append(found)
            else:
                kept.append((item, found))
                size += kept_bytes(self.job, self._heads, len(found))
            if size >= WINDOW_BYTES or len(kept) >= WINDOW_TEXTS:
                yield Window(shard, items, kept, failed, item is shard.items[-1])
                items, kept, failed, size = 0, [], [], 0.0
        if items:
            yield Window(shard, items, kept, failed, True)

    def measure(self, window: Window, stop: Callable[[], bool] = lambda: False) -> Measured | None:
        """The window's observations in the order of its items, whatever the batching; None where `stop` said so."""
        lengths = [len(prompt) for _, prompt in window.prompts]
        seen: dict[int, Observation] = {}
        failed = list(window.failures)
        groups = batches(lengths, self.limit, not self.pads, 1 if self.job.one_by_one else None)
        prompts = [prompt for _, prompt in window.prompts]
        results = self.replicas.each(lambda loaded, group: list(self._observe(loaded, group, prompts)), groups, stop)
        if results is None:
            return None
        for place, found in itertools.chain.from_iterable(results):
            if isinstance(found, str):
                failed.append(Failure.of(window.prompts[place][0], found))
            else:
                seen[place] = found
        pairs = [(window.prompts[place][0], seen[place]) for place in sorted(seen)]
        return Measured(window.items, pairs, sorted(failed, key=lambda one: one.item))

    def _prompt(self, item: Item) -> Prompt | Failure:
        if item.problem is not None:
            return Failure.of(item, item.problem)
        tokenize = from_chat if self.job.chat else from_text
        try:
            return tokenize(
                self.loaded.tokenizer,
                item.text,
                max_tokens=self.loaded.geometry.max_positions,
                truncate=self.job.truncate,
            )
        except InputError as error:
            return Failure.of(item, error.message)
        except AttnscopeError:
            raise
        except Exception as error:  # any tokenizer, with any text
            return Failure.of(item, f"cannot be tokenised: {type(error).__name__}: {_line(error)}")

    def _observe(
        self, loaded: LoadedModel, places: list[int], prompts: list[Prompt]
    ) -> Iterator[tuple[int, Observation | str]]:
        """Observe a batch; one that does not fit, or does not hold, is halved until the text at fault is alone."""
        chosen = [prompts[place] for place in places]
        try:
            seen = self._forward(loaded, chosen)
            broken = self._broken(seen)
        except Exception as error:  # any family's code, with any text
            if is_fatal(error):
                raise
            if is_out_of_memory(error):
                self._take_less(chosen)
            seen, broken = [], _reason(error)
        if not broken:
            yield from zip(places, seen, strict=True)
        elif len(places) == 1:
            yield places[0], broken
        else:
            half = len(places) // 2
            yield from self._observe(loaded, places[:half], prompts)
            yield from self._observe(loaded, places[half:], prompts)

    def _forward(self, loaded: LoadedModel, prompts: list[Prompt]) -> list[Observation]:
        longest = max(len(prompt) for prompt in prompts)
        if longest > 512:  # below, one layer of one text is no more than some megabytes
            check_eager_fits(loaded.geometry, longest, loaded.device, loaded.dtype)
        if not self.pads:
            settle_rotary(loaded.model)
        return observe(loaded, prompts, self.request)

    def _broken(self, seen: list[Observation]) -> str:
        """What did not hold; all texts of a batch share one report."""
        found = failures(self.loaded, seen[0])
        if any("nan" in line.split() for line in found):
            return f"NaN in the weights: {found[0]}"
        return "does not hold: " + "; ".join(found[:3]) if found else ""

    def _take_less(self, prompts: list[Prompt]) -> None:
        size = len(prompts) * max(len(prompt) for prompt in prompts)
        self.limit = max(1, min(self.limit, size) // 2) if len(prompts) > 1 else self.limit
        if self.loaded.device.startswith("cuda"):
            import torch

            torch.cuda.empty_cache()


def run_shards(
    worker: Worker,
    shards: Iterable[Shard],
    open_writer: Callable[[Shard], Writer],
    commit: Callable[[Record], None],
    stop: Callable[[], bool] = lambda: False,
    note: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Measure shard after shard and hand each one's record to `commit` once its files are there.

    When `stop` says so, the batch at hand is finished and the whole windows so far are committed as a shorter shard.
    With `job.strict` the first failed item ends the run the same way, and is an InputError.
    """
    tally = Tally()
    windows = (window for shard in shards for window in worker.windows(shard))
    with _loaded_once(), Writing(open_writer, commit) as writing, Ahead(windows) as ahead:
        for window in ahead:
            measured = worker.measure(window, stop)
            if measured is None:
                tally.stopped = True
                break
            if worker.job.strict and measured.failures:
                writing.finish()
                raise _refused(measured.failures[0])
            writing.put(window.shard, measured, window.last)
            _count(tally, window, measured)
            note(tally)
            if stop():
                tally.stopped = True
                break
        writing.finish()
    return tally


@contextmanager
def _loaded_once() -> Iterator[None]:
    """Keep the garbage collector off the libraries' million objects: they are there to stay."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def is_fatal(error: BaseException) -> bool:
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


def _refused(found: Failure) -> InputError:
    where = found.file if found.line is None else f"{found.file}, line {found.line}"
    return InputError(f"{where}: {found.reason}", "mend it, or leave --strict out and read failures.jsonl")


def _count(tally: Tally, window: Window, measured: Measured) -> None:
    tally.items += measured.items
    tally.texts += len(measured.seen)
    tally.tokens += sum(len(one.prompt) for _, one in measured.seen)
    tally.failed += len(measured.failures)
    tally.first_failures += measured.failures[: max(0, 3 - len(tally.first_failures))]
    done = next((item for item in window.shard.items if item.number == window.shard.first + window.items - 1), None)
    tally.read = done.read if done else tally.read

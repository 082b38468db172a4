"""A loaded model that tokenises items and measures them; whatever is wrong with one text is that text's failure.

`Replicas` run several batches at once on the cores of one machine, as threads that share a model's weights. On a CPU
the operators of a small model are too short to be split over cores, so each batch runs on one core and the batches run
side by side. A batch's numbers do not depend on which replica runs it.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import torch

from attnscope.corpus.folder import Failure, Job, Shard
from attnscope.corpus.item_requests import (
    KERNEL,
    KERNEL_TOKENS,
    WINDOW_BYTES,
    WINDOW_TEXTS,
    ask_for,
    batch_limit,
    batches,
    check_fields,
    kept_bytes,
    prompts,
    where,
)
from attnscope.corpus.items import Item, given_spans, given_tokens
from attnscope.corpus.rows import Measured
from attnscope.errors import AttnscopeError, ForwardError, InputError, ModelError, UsageError
from attnscope.figures.drawing_process import cores
from attnscope.hooks.engines import ENGINES, Engine
from attnscope.hooks.generation import check_generates, say_ignored, translation
from attnscope.inputs.prompt import Prompt, from_ids
from attnscope.inputs.tokens import NOWHERE, TokenMatch, TokenSelection, naming
from attnscope.metrics.metrics import SIGNED
from attnscope.model.geometry import with_tower
from attnscope.model.libraries import ProcessWide
from attnscope.model.loaded import LoadedModel, pads
from attnscope.model.loading import load
from attnscope.model.selection import MIXING, NAMES, SEQ2SEQ
from attnscope.observe.collect import observe
from attnscope.observe.engine_choice import FASTER_SCORES, Choice, choose, kernel_reads
from attnscope.observe.inputs import reading_targets
from attnscope.observe.observation import Observation
from attnscope.observe.request import OF_SOFTMAX, Request
from attnscope.utils.memory import is_out_of_memory, keep_freed_memory

MOST_REPLICAS = 4
T = TypeVar("T")
G = TypeVar("G")


class Replicas:
    """A loaded model and copies of it that share its weights, as many as there are cores for.

    >>> Replicas(loaded).each(lambda loaded, batch: observe(loaded, batch, request), batches, stop)
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.threads = min(MOST_REPLICAS, cores()) if loaded.device == "cpu" else 1
        self._free: queue.Queue[LoadedModel] = queue.Queue()
        self._pool: ThreadPoolExecutor | None = None

    def each(
        self, work: Callable[[LoadedModel, G], T], groups: Sequence[G], stop: Callable[[], bool]
    ) -> list[T] | None:
        """`work` on every group, results in the groups' order; None where `stop` answers so before the last began."""
        # One at a time there is nothing to share, and no copy of the model to make.
        if len(groups) < 2 or self.threads < 2:
            results = [work(self.loaded, group) for group in groups if not stop()]
            return results if len(results) == len(groups) else None
        if self._pool is None:  # the replicas, and the threads that run them until no one holds them
            self._free.put(self.loaded)
            for _ in range(self.threads - 1):
                shared = {id(weights): weights for weights in self.loaded.model.parameters()}
                self._free.put(replace(self.loaded, model=copy.deepcopy(self.loaded.model, shared)))
            self._pool = ThreadPoolExecutor(self.threads, "replica")
        pool = self._pool

        def on_free_replica(group: G) -> T | None:
            if stop():
                return None
            loaded = self._free.get()
            try:
                return work(loaded, group)
            finally:
                self._free.put(loaded)

        with _one_core_each(self.threads):
            futures = [pool.submit(on_free_replica, group) for group in groups]
            try:
                done = [future.result() for future in futures]
            finally:  # where one fails, none continues after the caller has returned
                for future in futures:
                    future.cancel()
                wait(futures)
        left = [result for result in done if result is not None]
        return left if len(left) == len(groups) else None


@ProcessWide
@contextmanager
def _one_core_each(threads: int) -> Iterator[None]:
    """Share the cores between the replicas instead of giving all of them to each operator."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // threads))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Text(NamedTuple):
    """An item as token ids, and the tokens of it that are asked about; target: what an encoder-decoder's decoder reads.

    asked: what names these tokens. While the target is still to be made, it is None, and nothing is chosen yet.
    stopped_by: what ended a target that was made, as `seam.generation` has it.
    """

    item: Item
    asked: Request
    prompt: Prompt
    chosen: TokenSelection = TokenSelection()
    target: Prompt | None = None
    stopped_by: str | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.prompt), len(self.target or ())

    @property
    def longest(self) -> int:
        """Tokens of the longest that a stack reads of it."""
        return max(*self.lengths, *map(len, self.prompt.medium.tower))


@dataclass
class Window:
    """Consecutive items of a shard, tokenised: `items` counts them, failures included; `last` ends the shard.

    read: bytes of the corpus that had been read when its last item was.
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
        self.loaded.check_bare("a corpus run")
        self.of_two = self.loaded.geometry.task == SEQ2SEQ
        # What would fail for every text is refused before any is read.
        check_fields(job, self.loaded)
        if job.request.view.weights != "softmax":
            self.loaded.check_softmax(OF_SOFTMAX)
        named = job.target_field is not None
        if named and not self.of_two:
            own = NAMES[self.loaded.geometry.task]
            message = f"a target is for an encoder-decoder, such as T5 or BART, and {self.loaded.name} is {own}"
            raise UsageError(message, "leave out {target_field}")
        if self.of_two and not named:
            check_generates(self.loaded, "give the targets with {target_field=NAME}")
            say_ignored(self.loaded)
        # Where the texts' own tokens are asked about, a vision tower has none of them.
        asks_tokens = job.request.asks or job.request.spans or job.query_field or job.key_field
        if job.picture_field is not None and not asks_tokens:
            self.loaded = replace(self.loaded, geometry=with_tower(self.loaded.geometry, self.loaded.model.config))
        mixing = any(stack in self.loaded.geometry.views for stack in MIXING)
        signed = SIGNED if mixing and job.request.view.weights == "softmax" else ()
        self.output = replace(job.output, targets=self.of_two, metrics=(*job.output.metrics, *signed))
        if job.output.weights:
            self.loaded.check_task("a file of lower triangles")
        if job.engine not in ("auto", "eager"):
            choose(self.loaded, 1, job.engine)  # refused now, not once per text
        geometry = self.loaded.geometry
        positions = geometry.max_positions
        if job.max_tokens is not None and positions is not None and job.max_tokens > positions:
            message = f"texts of {job.max_tokens} tokens are too long: the model reads at most {positions}"
            raise UsageError(message, f"give {{max_tokens={positions}}} or less")
        heads = geometry.heads_of_stacks
        self.request = job.request.selecting(job.select, heads, geometry.stack)
        self.replicas = Replicas(self.loaded)
        self.limit = batch_limit(self.loaded) if job.batch_tokens is None else job.batch_tokens
        self._heads = sum(sum(of.values()) for of in heads.values())
        own_tokens = job.query_field or job.key_field or job.output.metrics
        self._quick = job.engine == "auto"  # whether what eager could read is read by what is faster
        self._kernel = self._quick and not own_tokens and kernel_reads(self.loaded, job.request)

    def windows(self, shard: Shard) -> Iterator[Window]:
        """A shard's items, tokenised, in pieces whose results fit into memory; the cut depends on the items alone."""
        window, size = Window(shard), 0.0
        with prompts(self.job, self.loaded) as read, reading_targets(self.loaded, where(self.loaded)) as read_target:
            for item in shard.items:
                window.items += 1
                window.read, window.last = item.read, item is shard.items[-1]
                try:
                    ask = ask_for(self.job, item)
                    text = Text(item, ask.keep, read(ask))
                    if ask.target is not None:
                        try:
                            text = text._replace(target=read_target(ask))
                        except ModelError as error:  # the target is what is wrong
                            raise InputError(error.message) from error
                    if not self.of_two or text.target is not None:
                        text = text._replace(chosen=self._chosen(text))
                except InputError as error:
                    window.failures.append(Failure.of(item, error.message))
                else:
                    window.texts.append(text)
                    # About how many bytes its results take, and its own inputs.
                    size += sum(values.nbytes for values in text.prompt.medium.inputs.values())
                    size += kept_bytes(self.job, self._heads, text.longest)
                if size >= WINDOW_BYTES or len(window.texts) >= WINDOW_TEXTS or window.last:
                    yield window
                    window, size = Window(shard), 0.0

    def measure(self, window: Window, stop: Callable[[], bool] = lambda: False) -> Measured | None:
        """The window's observations in the order of its items, whatever the batching; None where `stop` answers so."""
        if self.of_two and self.job.target_field is None:
            results = self.replicas.each(self._translated, window.texts, stop)
            if results is None:
                return None
            failures = [result for result in results if isinstance(result, Failure)]
            window = replace(window, texts=[result for result in results if isinstance(result, Text)])
            window.failures = [*window.failures, *failures]
        # Texts of like lengths run together. Cores that share the batches are to end at about the same time: the last
        # two are halves, and the least come last.
        lengths = [text.longest for text in window.texts]
        scores = self._heads * sum(length**2 for length in lengths)  # of this window alone: each run chooses the same
        engine = KERNEL if self._quick and self._kernel and scores >= FASTER_SCORES else self.job.engine
        limit = self.limit * KERNEL_TOKENS if engine == KERNEL and self.job.batch_tokens is None else self.limit
        apart = None if pads(self.loaded.model) else [text.lengths for text in window.texts]
        groups = batches(lengths, limit, apart, 1 if self.job.one_by_one else None)
        if engine == KERNEL:
            halves = [(group[: len(group) // 2], group[len(group) // 2 :]) for group in groups[-2:]]
            groups = [*groups[:-2], *(half for pair in halves for half in pair if half)]
        groups.sort(key=lambda group: sum(lengths[place] for place in group), reverse=True)
        texts = [[window.texts[place] for place in group] for group in groups]
        parts = self.replicas.each(lambda loaded, batch: self._observed(loaded, batch, engine), texts, stop)
        if parts is None:
            return None
        return Measured.joined([Measured(len(window.failures), [], window.failures), *parts])

    def _translated(self, loaded: LoadedModel, text: Text) -> Text | Failure:
        """The text with the target that the model makes of it, alone: so it does not depend on the batching."""
        try:
            choice = self._choice(loaded, 1, len(text.prompt), self.job.engine)
            result = translation(loaded, text.prompt, choice.engine)
            target = from_ids(loaded.tokenizer, [*result.start, *result.ids])
            text = text._replace(target=target, stopped_by=result.stopped_by)
            return text._replace(chosen=self._chosen(text))
        except Exception as error:  # any family's own generation, with any text
            if _is_fatal(error) and not isinstance(error, ModelError):
                raise
            return Failure.of(text.item, _reason(error))

    def _chosen(self, text: Text) -> TokenSelection:
        """The tokens of an item that are asked about. Raises InputError where what says so means none."""
        request, prompt = text.asked, text.prompt
        of_record = given_spans(text.item, prompt, request.spans, self.job.chat) if request.spans else {}
        left = [name for name in request.spans if name not in of_record]
        fields = {"query": self.job.query_field, "key": self.job.key_field}
        ranges = {
            name: match
            for name, field in fields.items()
            if field is not None and (match := given_tokens(text.item, prompt, field, self.job.chat))
        }

        def spanned(chosen: TokenSelection, of_record: Mapping[str, TokenMatch | None]) -> TokenSelection:
            """With the spans that the record gives, which are of its text."""
            return replace(chosen, spans={name: {**of_record, **chosen.spans}.get(name) for name in request.spans})

        try:
            of_text = replace(request, spans=left) if of_record else request
            if text.target is None:
                return naming(prompt, spanned(of_text.chosen(prompt), of_record), ranges)
            chosen = of_text.chosen(text.target, prompt)
            source = naming(prompt, spanned(chosen.source or chosen, of_record), ranges)
            target = naming(text.target, spanned(chosen, {}), dict.fromkeys(ranges, NOWHERE))
            return replace(target, source=source)
        except UsageError as error:  # what a record says, or a pattern that takes too long on this text
            raise InputError(error.message) from error

    def _observed(self, loaded: LoadedModel, texts: Sequence[Text], name: str, quick: bool = True) -> Measured:
        """Observe a batch; one that does not fit, or does not hold, is halved until the text at fault is alone.

        What does not hold with an engine that was chosen for its speed is read again by what memory alone chooses.
        """
        # An error is a text's failure unless it would come of every other text too.
        choice = Choice(ENGINES["eager"])
        try:
            choice = self._choice(loaded, len(texts), max(text.longest for text in texts), name, quick)
            observations = self._forward(loaded, texts, choice.engine)
            broken = _broken(observations[0])
        except Exception as error:  # any family's code, with any text
            if _is_fatal(error):
                raise
            if is_out_of_memory(error):
                size = len(texts) * max(len(text.prompt) for text in texts)
                self.limit = max(1, min(self.limit, size) // 2) if len(texts) > 1 else self.limit
                if self.loaded.device.startswith("cuda"):
                    torch.cuda.empty_cache()
            observations, broken = [], _reason(error)
        items = [text.item for text in texts]
        if not broken:
            named = [observation.named(self.job.atlas) for observation in observations]
            return Measured(len(texts), list(zip(items, named, strict=True)), [])
        if choice.for_speed:
            again = self._observed(loaded, texts, self.job.engine, quick=False)
            self._quick = bool(again.failures)  # where no text is at fault, what is faster is not for this model
            return again
        if len(texts) == 1:
            return Measured(1, [], [Failure.of(items[0], broken)])
        # Which text is at fault is found by halves.
        half = len(texts) // 2
        parts = texts[:half], texts[half:]
        return Measured.joined([self._observed(loaded, part, name, quick) for part in parts])

    def _forward(self, loaded: LoadedModel, texts: Sequence[Text], engine: Engine) -> list[Observation]:
        """One forward pass over a batch."""
        prompts, chosen = [text.prompt for text in texts], [text.chosen for text in texts]
        targets = [text.target for text in texts if text.target is not None]
        if not targets:
            return observe(loaded, prompts, self.request, engine=engine, chosen=chosen)
        observed = observe(loaded, targets, self.request, engine=engine, chosen=chosen, sources=prompts)
        facts = [{"generated": bool(text.stopped_by), "stopped_by": text.stopped_by} for text in texts]
        pairs = zip(observed, facts, strict=True)
        return [replace(obs, facts={**obs.facts, "target": target}) for obs, target in pairs]

    def _choice(self, loaded: LoadedModel, texts: int, longest: int, name: str, quick: bool = True) -> Choice:
        """The engine of a name for a batch; quick: auto takes what is faster, and else goes by memory alone."""
        request = self.request if quick and self._quick else None
        choice = choose(loaded, longest, name, batch=texts, request=request)
        return choice if name == self.job.engine else choice._replace(for_speed=True)


def _broken(observation: Observation) -> str:
    """What did not hold, empty where all did; all texts of a batch share one report."""
    failures = observation.failures
    if any(check.no_number for check in observation.calls):
        return f"NaN in the weights: {failures[0]}"
    return "check failed: " + "; ".join(failures[:3]) if failures else ""


def _is_fatal(error: BaseException) -> bool:
    """Whether no further text can be measured after this."""
    broken_device = "CUDA error" in str(error) and not is_out_of_memory(error)
    return (isinstance(error, ModelError) and not isinstance(error, ForwardError)) or broken_device


def _reason(error: Exception) -> str:
    if isinstance(error, AttnscopeError):
        return error.message
    if is_out_of_memory(error):
        return "memory ran out, with this text alone"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"

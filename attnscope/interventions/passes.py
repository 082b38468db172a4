"""What a model does with sets of heads changed while it runs, by some measure, and what the intact model does.

    loss = measured(loaded, copy(loaded), [HeadSet("induction", ((3, 0), (3, 1)))])
    (loss[:, 1:] - loss[:, :1]).mean(0)     # nats per token, paired with the intact rows of the same passes

One forward pass carries many variants of a batch: a variant's rows branch off where it begins to differ. The pass
begins with the B texts as they are. Before the decoder layer in which a variant first differs, their rows are repeated
for it, so that no layer below is computed twice. At the end there are B rows of the texts, then B of every variant, in
the order in which the variants begin. Where a pass has room for less than three rows, each row has a pass of its own:
the intact one keeps what the changed ones need of it.

Shapes: B text, S sequence, K set, N row of a pass (text, or set and text), T token, R asked row, H head, V width of v
or vocabulary.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from attnscope.errors import ForwardError, InputError, ModelError, first_line
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.engines import UNCHECKED, Engine
from attnscope.hooks.generation import check_causal
from attnscope.hooks.listen import calls_interface, listen
from attnscope.interventions.base import LOSS, Intervention, Kept, Measure, OnOutput, Replacement, Replacing
from attnscope.interventions.spec import HeadSet, Task
from attnscope.model.loaded import padding_is_unknown, pads
from attnscope.model.selection import is_linear, stack_of

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel


class BranchError(Exception):
    """This model's rows cannot be repeated on the way; why, in words."""


@dataclass(frozen=True)
class DecoderLayers:
    """The decoder layers of a model, all in order; around[layer]: the one around a layer whose heads change."""

    around: Mapping[int, nn.Module]
    all: tuple[nn.Module, ...]

    def start(self, layer: int) -> int:
        """How many decoder layers run before a layer whose heads change."""
        return self.all.index(self.around[layer])


def decoder_layers(loaded: LoadedModel, ids: Sequence[int]) -> DecoderLayers:
    """The decoder layers, found by reading some tokens. Raises BranchError where attention is shared between them."""
    around: dict[int, nn.Module] = {}
    lists: dict[nn.Module, None] = {}

    def note(call: AttentionCall, output: Tensor) -> Tensor:
        place = call.place
        number = re.search(r"\.\d+(?=\.|$)", place.path)
        if number is None:
            raise BranchError(f"{place.path} is in no list of layers")
        module = loaded.model.get_submodule(place.path[: number.end()])
        if around.setdefault(place.index, module) is not module:
            raise BranchError("its layers share their attention")
        lists[loaded.model.get_submodule(place.path[: number.start()])] = None
        return output

    ids_BT = torch.tensor([list(ids)], device=loaded.device)
    listen(loaded.model, ids_BT, ignore_call, engine=replace(UNCHECKED, change=note), mixers=mixes(loaded))
    return DecoderLayers(around, tuple(layer for layers in lists for layer in layers.children()))


def mixes(loaded: LoadedModel) -> bool:
    """Whether the model has linear layers with a map per head."""
    return bool(loaded.geometry.linear_heads)


def expected(layers: Iterable[int]) -> list[int | tuple[int, str]]:
    """Layers of sets as `listen` expects them: of other stacks than the model's own with its name."""
    return [(int(layer), stack_of(layer)) if stack_of(layer) else layer for layer in layers]


def ignore_call(call: object) -> None:
    """Nothing is asked of the attention."""


@contextmanager
def branching(layers: Sequence[nn.Module], adds: Mapping[nn.Module, int], batch: int) -> Iterator[None]:
    """While open, decoder layers get more rows than before: adds[layer] more variants of the batch's first rows.

    layers: all decoder layers, in order. Raises BranchError out of the pass where a layer is run twice, is given no
    rows, or is given what other layers keep.
    """
    rows, waiting = batch, list(dict.fromkeys(layers))

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        nonlocal rows
        # A variant that branched off twice, or whose rows are not where they are expected, would be another's.
        if module not in waiting:
            raise BranchError("it runs a layer more than once")
        waiting.remove(module)
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0] if args else None
        if not isinstance(hidden, Tensor) or hidden.ndim != 3 or len(hidden) != rows:
            raise BranchError("its layers are not given one row per text")
        sizes, rows = {rows, batch}, rows + adds.get(module, 0) * batch

        # Masks and positions grow as the hidden states do. What has one row serves all, and is left to broadcast.
        def grown(value: Any) -> Any:
            if isinstance(value, Tensor):
                repeated = value is hidden or (value.ndim > 1 and len(value) in sizes and len(value) > 1)
                return with_copies(value, batch, rows) if repeated else value
            if isinstance(value, Mapping) and value:
                raise BranchError("its layers hand each other keys and values")
            return type(value)(map(grown, value)) if type(value) in (tuple, list) else value

        return tuple(map(grown, args)), {name: grown(value) for name, value in kwargs.items()}

    with ExitStack() as stack:
        for layer in tuple(waiting):
            stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
        yield


def with_copies(value: Tensor, batch: int, rows: int) -> Tensor:
    """The tensor with copies of its first `batch` rows after its own, until there are so many.

    >>> with_copies(torch.tensor([[1], [2], [9], [9]]), 2, 6).T
    tensor([[1, 2, 9, 9, 1, 2]])
    """
    missing = (rows - len(value)) // batch
    return torch.cat([value, value[:batch].repeat(missing, *[1] * (value.ndim - 1))]) if missing else value


logger = logging.getLogger(__name__)
CPU_TOKENS, TOKENS = 4096, 32768  # of one pass, all rows together
LOGITS = 1 << 27  # numbers that the logits of one pass may have
APART = 8  # sets that share one intact pass where rows run one after the other
AGREES = {"float64": 1e-9, "float32": 1e-5, "float16": 5e-3, "bfloat16": 5e-2}  # nats, shared against unshared
Advance = Callable[[int], object]
Keep = Callable[[Sequence[int], Callable[[], np.ndarray]], np.ndarray]  # some sequences, and what reads them


def agree(losses: np.ndarray, others: np.ndarray, dtype: str) -> bool:
    """Whether losses in nats are the same but for rounding, which grows with a loss: it is a difference of logits.

    >>> agree(np.array([5.16518, 23.19291]), np.array([5.16519, 23.19291]), "float32")
    True
    """
    allowed = AGREES[dtype] * np.maximum(1, np.abs(others))
    return bool((np.abs(losses - others) <= allowed).all())


def measured(
    loaded: LoadedModel,
    task: Task,
    sets: Sequence[HeadSet],
    replacement: Replacement | Intervention = "mean",
) -> np.ndarray:
    """(S, 1 + K) float64: the loss of each sequence; column 0 intact, then each set's heads changed.

    Raises ModelError for a family that attends outside the attention interface, InputError where heads are to be
    replaced by what they give for others, and there are none.

        >>> measured(loaded, copy(loaded), [HeadSet("one", ((3, 0),))]).mean(0)
    """
    passes = prepared(loaded, task, sets, replacement)
    if passes.why_not:
        logger.warning("unshared passes: %s", passes.why_not)
    return passes.measured(sets)


def prepared(
    loaded: LoadedModel,
    task: Task,
    sets: Sequence[HeadSet],
    replacement: Replacement | Intervention = "mean",
    *,
    measure: Measure = LOSS,
    engine: Engine | None = None,
    shared: bool = True,
    advance: Advance = lambda token_layers: None,
) -> Passes:
    """What the passes of a task need: what replaces heads' outputs, and whether sets share the layers below them.

    The first text is run shared and unshared; where they differ, or the family cannot share, all is run unshared.
    engine: who computes the attention; the model itself without one. advance: called with the tokens times layers of
    every pass. Raises as `measured`.
    """
    mixers = any(is_linear(stack_of(layer)) for chosen in sets for layer, _ in chosen.heads)
    passes = Passes(loaded, task, of(replacement), engine or UNCHECKED, measure, mixers=mixers)
    _check(passes)
    passes.check_together()
    passes = replace(passes, intervention=passes.intervention.learnt(task, partial(passes.each, advance=advance)))
    return passes.sharing(sets) if shared else passes


def of(replacement: Replacement | Intervention) -> Intervention:
    """The intervention of a replacement's name, or one as it is."""
    return Replacing(replacement) if isinstance(replacement, str) else replacement


def check_model(loaded: LoadedModel) -> None:
    """Raise ModelError for a model whose heads cannot be taken away, or that predicts no token after a text."""
    check_causal(loaded, "an ablation")
    loaded.check_logits("an ablation")
    loaded.check_heads("none can be changed")
    if not (calls_interface(loaded.model) or mixes(loaded)):
        raise ModelError(
            f"{loaded.geometry.model_type} attends outside the attention interface, where no output can be changed",
            "choose a model whose attention calls the interface",
        )


def _check(passes: Passes) -> None:
    check_model(passes.loaded)
    passes.intervention.check(passes.task)
    passes.measure.check(passes.task)


@dataclass(frozen=True)
class Passes:
    """How a task is run with an intervention in sets of heads.

    layers: the decoder layers that sets branch off at, None where all run from the first layer on; why_not: the reason
    then, in words. mixers: whether linear layers are heard too, since sets have heads of them.
    """

    loaded: LoadedModel
    task: Task
    intervention: Intervention
    engine: Engine
    measure: Measure = LOSS
    layers: DecoderLayers | None = None
    why_not: str = ""
    mixers: bool = False

    def measured(
        self,
        sets: Sequence[HeadSet],
        advance: Advance = lambda token_layers: None,
        keep: Keep = lambda batch, read: read(),
    ) -> np.ndarray:
        """(S, 1 + K) float64, the measure of each sequence: intact, then with every set's heads changed.

        Where the sets take several passes, each is compared with the intact rows of its own: its difference to column 0
        is just that. keep: gives what a pass does, or what an earlier run kept of it; for sets that one pass carries.
        """
        value_SK = np.full((len(self.task), 1 + len(sets)), np.nan)
        for first, part in self.chunks(sets):
            for batch in self.batches(len(part)):
                value_BK = keep(batch, partial(self.run, batch, part))
                if first == 0:
                    value_SK[batch, 0] = value_BK[:, 0]
                difference_BK = value_BK[:, 1:] - value_BK[:, :1]
                value_SK[batch, 1 + first : 1 + first + len(part)] = value_SK[batch, :1] + difference_BK
                advance(self.cost(batch, part))
        return value_SK

    def effects(self, value_SK: np.ndarray) -> np.ndarray:
        """(S, K): how much worse than intact each set's change makes the measure, of what `measured` gave."""
        return self.measure.worse * (value_SK[:, 1:] - value_SK[:, :1])

    def run(self, batch: Sequence[int], sets: Sequence[HeadSet]) -> np.ndarray:
        """(B, 1 + K): one pass over some sequences of the task; where rows run apart, one of each row."""
        lengths = [self.task.lengths[place] for place in batch]
        layers = expected({layer for chosen in sets for layer, _ in chosen.heads})
        if self.apart:
            return self._row_by_row(batch, sets, layers)

        # Rows of a set branch off below its first head, so that sets follow each other in the order of their layers.
        starts = [self.start(chosen) for chosen in sets]
        order = sorted(range(len(sets)), key=starts.__getitem__)
        engine = self.intervention.over(self.engine, [sets[place] for place in order], lengths, batch)
        branches: AbstractContextManager[None] = nullcontext()
        if self.layers is not None:
            adds = {layer: starts.count(place) for place, layer in enumerate(self.layers.all)}
            branches = branching(self.layers.all, adds, len(batch))

        with branches:
            times = 1 if self.layers else 1 + len(sets)
            logits_NRV = self.logits(batch, times, engine=engine, expected_layers=layers)
        value_BK = self.values(logits_NRV, batch).cpu().numpy()
        return value_BK[:, [0, *(1 + order.index(place) for place in range(len(sets)))]]  # in the caller's order

    def _row_by_row(
        self, batch: Sequence[int], sets: Sequence[HeadSet], layers: Sequence[int | tuple[int, str]]
    ) -> np.ndarray:
        """As `run`, a pass of each row. What an intact row keeps is dropped before the next intact row runs."""
        value_BK = np.empty((len(batch), 1 + len(sets)))
        for source in range(len(batch)):
            kept: Kept = {}
            changed, target = self.intervention.alone(kept), self.intervention.target(batch, source)
            assert changed is not None
            intact = self.intervention.keeping(sets, kept)
            rows: list[tuple[int, int, Intervention, list[HeadSet]]] = [(source, 0, intact, [])]
            rows += [(target, number, changed, [chosen]) for number, chosen in enumerate(sets, start=1)]
            for place, number, intervention, own in rows:
                text = batch[place : place + 1]
                engine = intervention.over(self.engine, own, [self.task.lengths[text[0]]], text)
                logits_1RV = self.logits(text, engine=engine, expected_layers=layers)
                value_BK[place, number] = self.values(logits_1RV, text).item()
        return value_BK

    def each(self, on_output: OnOutput, advance: Advance = lambda token_layers: None) -> None:
        """Call with what every head gives for every sequence, in one pass over each."""
        for batch in self.batches(0):
            lengths = [self.task.lengths[place] for place in batch]

            def hear(call: AttentionCall, output_BTHV: Tensor, lengths: Sequence[int] = lengths) -> Tensor:
                on_output(call.place, output_BTHV, lengths)
                return output_BTHV

            engine = replace(self.engine, change=hear)
            listen(self.loaded.model, self.ids(batch), ignore_call, engine=engine, mixers=self.mixers)
            advance(self.cost(batch, []))

    def logit_spread(self, batch: Sequence[int]) -> float:
        """How far apart the logits lie that the measure reads of some texts: from the median of the vocabulary to where
        84 % lie below, a standard deviation of normal ones."""
        spreads = []
        for texts in [[place] for place in batch] if self.apart else [batch]:
            sorted_BRV = self.logits(texts, engine=self.engine).float().sort(-1).values
            middle, above = (int(share * sorted_BRV.shape[-1]) for share in (0.5, 0.84))
            spreads.append(float((sorted_BRV[..., above] - sorted_BRV[..., middle]).mean()))
        return sum(spreads) / len(spreads)

    def sharing(self, sets: Sequence[HeadSet]) -> Passes:
        """The passes that share layers below the sets, if the first text has the same loss either way.

        Rows that run apart stay so: in a pass of two rows the intact one would be computed again for every set.
        """
        if self.apart:
            return self
        unshared = replace(self, measure=LOSS)
        first = unshared.batches(len(sets))[0]
        try:
            layers = decoder_layers(self.loaded, self.task.ids[first[0]][:2])
            shared = replace(unshared, layers=layers)
            tried = list({shared.start(chosen): chosen for chosen in sets}.values())
            batch = shared.batches(len(tried))[0]
            alone = batch[: self._fewest]
            together, apart = shared.run(batch, tried)[0], unshared.run(alone, tried)[0]
        except BranchError as error:
            return replace(self, why_not=str(error))
        except (ForwardError, RuntimeError, IndexError, ValueError) as error:  # any family's forward
            return replace(
                self, why_not=f"this family's layers take no further rows: {first_line(error.__cause__ or error)}"
            )
        if not agree(together, apart, self.loaded.dtype):
            difference = np.abs(together - apart).max()
            return replace(self, why_not=f"shared and unshared differ by {difference:.1g} nats on the first text")
        return replace(self, layers=layers)

    @classmethod
    def planned(cls, loaded: LoadedModel, task: Task, replacement: Replacement | Intervention) -> Passes:
        """Passes to ask what they would take: sets share where the family's layers are found."""
        passes = cls(loaded, task, of(replacement), UNCHECKED, mixers=mixes(loaded))
        _check(passes)
        if passes.apart:
            return passes
        try:
            return replace(passes, layers=decoder_layers(loaded, task.ids[0][:2]))
        except BranchError as error:
            return replace(passes, why_not=str(error))

    def token_layers(self, sets: Sequence[HeadSet]) -> int:
        """Tokens times decoder layers that `measured` takes."""
        parts = [part for _, part in self.chunks(sets)]
        return sum(self.cost(batch, part) for part in parts for batch in self.batches(len(part)))

    def start(self, heads: HeadSet) -> int:
        """How many decoder layers run before a set's first head; 0 for no heads."""
        return min((self.layers.start(layer) for layer, _ in heads.heads), default=0) if self.layers else 0

    def cost(self, batch: Sequence[int], sets: Sequence[HeadSet]) -> int:
        """Tokens times decoder layers of one pass: the intact rows, and each set's from where it starts."""
        deep = len(self.layers.all) if self.layers else len(self.loaded.geometry.layers)
        lengths = [self.task.lengths[place] for place in batch]
        tokens = sum(lengths) if self.apart else len(batch) * max(lengths)
        return tokens * (deep + sum(deep - self.start(chosen) for chosen in sets))

    def chunks(self, sets: Sequence[HeadSet]) -> Iterator[tuple[int, Sequence[HeadSet]]]:
        """Sets that one pass carries, and the place of the first."""
        size = APART if self.apart else max(1, self._room // self._fewest - 1)
        for first in range(0, max(1, len(sets)), size):
            yield first, sets[first : first + size]

    def batches(self, sets: int) -> list[list[int]]:
        """Sequences that are read together with so many sets; of one length where the family asks for it."""
        groups, lengths = self.groups, self.task.lengths
        size = max(self._fewest, self._room // (1 + sets) // self.task.together * self.task.together)
        longest = [max(lengths[place] for place in group) for group in groups]

        # From the longest on, so that the texts of a batch are padded least.
        batches: list[list[int]] = []
        before = 0
        for tokens, group in sorted(zip(longest, groups, strict=True), key=lambda item: -item[0]):
            if not batches or len(batches[-1]) >= size or not (self.mixed or before == tokens):
                batches.append([])
            batches[-1] += group
            before = tokens
        if len(batches) > 1 and len(batches[-1]) < self._fewest:
            last = batches.pop()
            batches[-1] += last
        return batches

    @property
    def groups(self) -> list[list[int]]:
        """The sequences that the task has read in one pass."""
        size = self.task.together
        return [list(range(start, start + size)) for start in range(0, len(self.task), size)]

    def check_together(self) -> None:
        """Raise InputError where sequences of different lengths are to be read together, and this family reads the
        shorter in another way with the longer: it is tried where that is not known."""
        lengths = self.task.lengths
        uneven = [group for group in self.groups if len({lengths[place] for place in group}) > 1]
        if not uneven or self.mixed:
            return
        batch = max(uneven, key=lambda group: max(lengths[place] for place in group))
        if pads(self.loaded.model):
            intact = replace(self, intervention=Replacing("zero"))
            alone = [float(intact.run([place], [])[0, 0]) for place in batch]
            if agree(intact.run(batch, [])[:, 0], np.array(alone), self.loaded.dtype):
                return
        raise InputError(
            f"{self.loaded.geometry.model_type} reads a text in another way where a longer one is in the same pass",
            "use texts of as many tokens",
        )

    @property
    def mixed(self) -> bool:
        """Whether sequences of different lengths are padded and read in one pass."""
        return pads(self.loaded.model) and not padding_is_unknown(self.loaded.model)

    @property
    def _fewest(self) -> int:
        """Sequences that a pass needs."""
        return max(self.intervention.least, self.task.together)

    @property
    def apart(self) -> bool:
        """Whether each row has a pass of its own: where a pass has room for the rows of one set at most, and neither
        the intervention nor the measure needs the intact row in it. Many sets share an intact row then."""
        few = self.layers is None and self._room < 3 * self._fewest and not self.measure.compares
        return few and self.intervention.alone({}) is not None

    @property
    def _room(self) -> int:
        """Rows of a pass whose tokens and logits stay within bounds."""
        tokens = CPU_TOKENS if self.loaded.device == "cpu" else TOKENS
        logits = max(len(self.rows(place)) for place in range(len(self.task))) * max(1, self.loaded.geometry.vocab_size)
        return min(tokens // max(self.task.lengths), LOGITS // logits)

    def ids(self, batch: Sequence[int], times: int = 1) -> Tensor:
        """The ids of some sequences, padded on the right with a token of their own, so many times over."""
        longest = max(self.task.lengths[place] for place in batch)
        padded = [[*(ids := self.task.ids[place]), *ids[-1:] * (longest - len(ids))] for place in batch]
        return torch.tensor(padded * times, device=self.loaded.device)

    def rows(self, place: int) -> Sequence[int]:
        """The rows of a sequence that are measured."""
        return self.measure.rows(self.task, place)

    def measured_rows(self, batch: Sequence[int]) -> list[int]:
        """The rows whose logits a pass over some sequences gives: all that are measured of any."""
        return sorted({row for place in batch for row in self.rows(place)})

    def logits(self, batch: Sequence[int], times: int = 1, **options: Any) -> Tensor:
        """The logits of a pass over some sequences, so many times over, at all their measured rows."""
        ids_BT, positions = self.ids(batch, times), self.measured_rows(batch)
        report = listen(self.loaded.model, ids_BT, ignore_call, logits_at=positions, mixers=self.mixers, **options)
        assert report.logits is not None
        return report.logits

    def values(self, logits_NRV: Tensor, batch: Sequence[int]) -> Tensor:
        """(B, 1 + K): the measure of each row of the pass, over its text's own rows."""
        logits_KBRV = logits_NRV.view(-1, len(batch), *logits_NRV.shape[1:])
        values, positions = [], self.measured_rows(batch)
        for number, place in enumerate(batch):
            at = [positions.index(row) for row in self.rows(place)]
            values.append(self.measure(logits_KBRV[:, number, at], self.task, place))
        return torch.stack(values)

"""Token sequences that isolate one behaviour, and what is asked of every head on them.

A trial is a set of sequences in one or more arms, read in one kind of pass, and the contrasts that it decides: what a
head scores on one arm against what it scores in the same rows where the behaviour cannot show. Sequences are token ids,
fed as ids: few random ids survive decoding and encoding. They are ordinary tokens of the model's own vocabulary.

Shapes: S sequence, T token, B text of a pass, H head, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.attention.operator import UniformAttention
from attnscope.attention.questions import At, Back, Question, Received
from attnscope.errors import InputError, ModelError
from attnscope.inputs.labels import BYTE_TOKEN
from attnscope.inputs.prompt import Prompt, isolation_for, reading
from attnscope.metrics.divergence import js_bits
from attnscope.observe.collectors import Answers, LayerCollector
from attnscope.observe.request import Layer
from attnscope.studies.copying import VALUES, Copying, LongRangeCopying, Recall, lengths, needles
from attnscope.utils.isolation import IsolatedCall, Where
from attnscope.utils.memory import check_free

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

NEAR = 0.15  # bits: below it a head is marked


@dataclass(frozen=True)
class FromUniform:
    """The Jensen-Shannon divergence (bits, 0 to 1) of rows to uniform attention, a mean over the rows from `first` on.

    Lin 1991, doi 10.1109/18.61115. It reads dense rows: of short texts alone.
    """

    first: int

    def questions(self, layer: Layer) -> Sequence[Question]:
        return []

    def collect(self, layer: Layer, answers: Answers) -> Tensor:
        P = layer.P
        seen_BHQK = P.visible.rows(self.first, P.queries).to(P.device).double()
        return js_bits(P.rows(self.first, P.queries).double(), seen_BHQK).mean(-1).cpu()


SEQUENCES = 64
TOKEN_BYTES = 64  # of a token of a sequence, as number and as Python's
PERIODS = (10, 25, 50, 100)
OFFSETS = range(5)
LENGTH = 64  # tokens of the sequences without repetition
COPIED_PERIOD, COPIED_ROWS = 25, 8  # the vocabulary's logits of every head and row are dear: few rows of a sequence
KEY0, STRONGEST = "key 0", "strongest key"


class Arm(NamedTuple):
    """Sequences (S, T), and by name what is asked of every layer that reads them: a (B, H) tensor each.

    A shorter sequence is padded with -1. completed: tokens that the model itself adds to each before it is read.
    """

    ids_ST: np.ndarray
    asks: Mapping[str, LayerCollector]
    completed: int = 0

    @property
    def tokens(self) -> int:
        """That are read, also while the model completes the sequences: the last that it makes is not read then."""
        prompts, made = int((self.ids_ST >= 0).sum()), len(self.ids_ST) * self.completed
        return 2 * (prompts + made) - len(self.ids_ST) if self.completed else prompts


class Measure(NamedTuple):
    """One number per sequence and head: what is asked, and of which arm."""

    arm: str
    name: str


RECALL, FROM_UNIFORM = Measure("needle", "recall"), Measure("distinct", "from uniform")  # decide no contrast


@dataclass(frozen=True)
class Contrast:
    """What a trial decides: the score of a probe against one null, paired by sequence.

    null: several measures mean their largest, none the mean of the other heads' scores. computed: the null is known and
    equal in all sequences, since no pass of the model gives it. Sequences in which no head has a score are left out.
    """

    probe: str
    against: str
    score: Measure
    null: tuple[Measure, ...]
    computed: bool = False


@dataclass(frozen=True)
class Trial:
    """Sequences, what is asked of them, and what that decides."""

    name: str
    arms: Mapping[str, Arm]
    contrasts: Sequence[Contrast]

    @property
    def tokens(self) -> int:
        """That all arms take."""
        return sum(arm.tokens for arm in self.arms.values())


@dataclass(frozen=True)
class MassAt:
    """The mean weight on one key per query, over the queries that see it; NaN where none does.

    key_1Q: -1 for the queries that are not asked.
    """

    key_1Q: Tensor

    def questions(self, layer: Layer) -> Sequence[Question]:
        return [At(layer.here(self.key_1Q))]

    def collect(self, layer: Layer, answers: Answers) -> Tensor:
        [asked] = self.questions(layer)
        visible = layer.P.visible
        seen_BHQ = visible.at(self.key_1Q.to(visible.position_Q.device)).to(layer.P.device)
        mass_BHQ = answers[asked].double()
        return ((mass_BHQ * seen_BHQ).sum(-1) / seen_BHQ.expand_as(mass_BHQ).sum(-1)).cpu()


@dataclass(frozen=True)
class MassBack:
    """The mean weight `steps` tokens back, over the queries from `first` on."""

    steps: int
    first: int

    def questions(self, layer: Layer) -> Sequence[Question]:
        return [Back(self.steps)]

    def collect(self, layer: Layer, answers: Answers) -> Tensor:
        return answers[Back(self.steps)][..., self.first :].double().mean(-1).cpu()


@dataclass(frozen=True)
class Importance:
    """The mean weight that key 0 receives, or the strongest key; with `uniform`, under uniform attention."""

    strongest: bool = False
    uniform: bool = False

    def questions(self, layer: Layer) -> Sequence[Question]:
        return [] if self.uniform else [Received(layer.texts.mean_BT)]

    def collect(self, layer: Layer, answers: Answers) -> Tensor:
        question = Received(layer.texts.mean_BT)
        received_BHK = UniformAttention(layer.P.visible).ask(question) if self.uniform else answers[question]
        mass_BH = received_BHK.amax(-1) if self.strongest else received_BHK[..., 0]
        return mass_BH.double().cpu().expand(layer.P.batch, layer.P.heads)


class Draft(NamedTuple):
    """A trial before its sequences are drawn: its name, the tokens that it will take, and what draws it.

    period: tokens of what is repeated. seeded_as: its name in what seeds the draw, where that is another.
    """

    name: str
    tokens: int
    draw: Callable[[np.random.Generator], Trial]
    period: int | None = None
    seeded_as: str = ""

    def drawn(self, seed: int) -> Trial:
        """The trial of a seed: each has a draw of its own. Raises MemoryLimitError where its sequences have no room."""
        check_free(f"sequences of {self.name} take", TOKEN_BYTES * self.tokens, "ask for fewer with {sequences=64}")
        return self.draw(np.random.default_rng([seed, *(self.seeded_as or self.name).encode()]))


def trials(
    pool: Sequence[int], begin: Sequence[int] = (), positions: int | None = None, *, seed: int = 0, **how: Any
) -> list[Trial]:
    """Every trial that a vocabulary and so many positions allow, drawn by a seed; how: as for `drafts`.

    >>> [trial.name for trial in trials(range(100, 400), positions=128)]
    ['repeated p10', 'repeated p25', 'repeated p50', 'offsets', 'sink', 'long-range-copying']
    """
    return [draft.drawn(seed) for draft in drafts(pool, begin, positions, **how)]


def drafts(
    pool: Sequence[int],
    begin: Sequence[int] = (),
    positions: int | None = None,
    count: int = SEQUENCES,
    copying: Copying | None = None,
    completes: bool = True,
) -> list[Draft]:
    """The trials that a vocabulary and so many positions allow, of `count` sequences each, before any is drawn.

    copying: what asks whether heads copy, on the period that comes nearest to COPIED_PERIOD. completes: whether the
    model can complete sequences.
    """
    room = positions or 10**9
    periods = [period for period in PERIODS if 2 * period <= len(pool) and 2 * period + len(begin) <= room]
    copied = min(periods, key=lambda one: abs(one - COPIED_PERIOD), default=None)
    made = [
        Draft(
            f"repeated p{period}",
            3 * count * (len(begin) + 2 * period),
            partial(_repeated, pool, begin, period, count, copying if period == copied else None),
            period,
        )
        for period in periods
    ]
    length = min(LENGTH, len(pool), room - len(begin))
    with_begin = count * (len(begin) + length)
    made.append(Draft("offsets", with_begin, partial(_offsets, pool, begin, length, count)))
    both = with_begin + count * length if begin else with_begin
    made.append(Draft("sink", both, partial(_sinks, pool, begin, length, count)))
    if completes and (runs := lengths(count, room)):
        # all but the last token of each are read twice: while the model completes them, and then whole
        tokens = sum((2 * length - 1) * number for length, number in runs.items())
        draw = partial(_long_range_copying, pool, begin, runs)
        # seeded by the trial's first name: a seed draws what it always drew
        made.append(Draft("long-range-copying", tokens, draw, seeded_as="retrieval"))
    return made


def _repeated(
    pool: Sequence[int],
    begin: Sequence[int],
    period: int,
    count: int,
    copying: Copying | None,
    generator: np.random.Generator,
) -> Trial:
    """r r; the same second half after other tokens; after its own tokens in another order."""
    drawn_S2P = _distinct(pool, 2 * period, count, generator)
    half_SP, other_SP = drawn_S2P[:, :period], drawn_S2P[:, period:]
    halves = {"repeated": half_SP, "other": other_SP, "shuffled": generator.permuted(half_SP, axis=1)}
    asks = {"successor": MassAt(_keys(begin, period, 1)), "copy": MassAt(_keys(begin, period, 0))}
    arms = {name: Arm(_after(begin, np.hstack([first, half_SP])), asks) for name, first in halves.items()}
    contrasts = [
        Contrast(f"{probe} p{period}", against, Measure("repeated", name), (Measure(against, name),))
        for probe, name in (("induction", "successor"), ("duplicate-token", "copy"))
        for against in ("other", "shuffled")
    ]
    if copying is not None:
        rows = torch.arange(len(begin) + period, len(begin) + 2 * period)
        rows_asked = replace(copying, row_R=rows[:: max(1, period // COPIED_ROWS)])
        arms["repeated"] = Arm(arms["repeated"].ids_ST, {**asks, "copying": rows_asked})
        contrasts.append(Contrast("copying", "other heads", Measure("repeated", "copying"), ()))
    return Trial(f"repeated p{period}", arms, contrasts)


def _keys(begin: Sequence[int], period: int, after: int) -> Tensor:
    """(1, T): the key of every query of the second half, its token's first copy or so many after; -1 elsewhere."""
    query_T = torch.arange(len(begin) + 2 * period)
    return torch.where(query_T >= len(begin) + period, query_T - period + after, -1)[None]


def _offsets(
    pool: Sequence[int], begin: Sequence[int], length: int, count: int, generator: np.random.Generator
) -> Trial:
    """Distinct tokens: a weight so many tokens back can come from the place alone."""
    names = {steps: f"{steps} back" for steps in OFFSETS}
    first = len(begin) + OFFSETS.stop - 1
    asks: dict[str, LayerCollector] = {name: MassBack(steps, first) for steps, name in names.items()}
    asks[FROM_UNIFORM.name] = FromUniform(first)
    contrasts = [
        Contrast(
            f"offset {steps}",
            "best other offset",
            Measure("distinct", name),
            tuple(Measure("distinct", other) for other in names.values() if other != name),
        )
        for steps, name in names.items()
    ]
    arm = Arm(_after(begin, _distinct(pool, length, count, generator)), asks)
    return Trial("offsets", {"distinct": arm}, contrasts)


def _sinks(pool: Sequence[int], begin: Sequence[int], length: int, count: int, generator: np.random.Generator) -> Trial:
    """Distinct tokens with the begin token, if there is one, and without."""
    ids = _distinct(pool, length, count, generator)
    asks: dict[str, LayerCollector] = {
        f"{name}{' of uniform' * uniform}": Importance(name == STRONGEST, uniform)
        for name in (KEY0, STRONGEST)
        for uniform in (False, True)
    }
    starts = {"begin token": begin, "no begin token": ()} if begin else {"no begin token": ()}
    arms = {name: Arm(_after(first, ids), asks) for name, first in starts.items()}
    contrasts = [
        Contrast(
            ("sink" if name == KEY0 else name) + (", no begin token" if begin and arm == "no begin token" else ""),
            "uniform",
            Measure(arm, name),
            (Measure(arm, f"{name} of uniform"),),
            computed=True,
        )
        for arm in arms
        for name in (KEY0, STRONGEST)
    ]
    return Trial("sink", arms, contrasts)


def _long_range_copying(
    pool: Sequence[int], begin: Sequence[int], runs: Mapping[int, int], generator: np.random.Generator
) -> Trial:
    """What is hidden in a long text, asked for at its end; runs: how many have so many tokens."""
    ids_ST = needles(pool, begin, [length for length, number in runs.items() for _ in range(number)], generator)
    score, null = Measure("needle", "copied"), Measure("needle", "moved span")
    asks: dict[str, LayerCollector] = {
        score.name: LongRangeCopying(),
        null.name: LongRangeCopying(moved=True),
        RECALL.name: Recall(),
    }
    contrast = Contrast("long-range-copying", "moved span", score, (null,))
    return Trial("long-range-copying", {"needle": Arm(ids_ST, asks, completed=VALUES)}, [contrast])


def _distinct(pool: Sequence[int], length: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """(count, length): in each sequence no token comes twice."""
    ids = np.asarray(pool, np.int64)
    return np.stack([generator.choice(ids, length, replace=False) for _ in range(count)])


def _after(begin: Sequence[int], ids_ST: np.ndarray) -> np.ndarray:
    return np.hstack([np.tile(np.asarray(begin, np.int64), (len(ids_ST), 1)), ids_ST])


def batches(ids_ST: np.ndarray, tokens: int) -> Iterator[tuple[range, np.ndarray]]:
    """Which sequences are of a batch, and their ids: of one length, about so many tokens, at least one sequence."""
    width_S = (ids_ST >= 0).sum(1)
    ends = [0, *(np.flatnonzero(np.diff(width_S)) + 1).tolist(), len(ids_ST)]
    for first, last in pairwise(ends):
        width = int(width_S[first])
        step = max(1, tokens // width)
        for start in range(first, last, step):
            rows = range(start, min(start + step, last))
            yield rows, ids_ST[rows.start : rows.stop, :width]


LEAST = 20  # tokens without which no sequence of distinct ones can be made
MIDDLE = 0.8  # of the vocabulary by id: the commonest and rarest stay out, as in Olsson et al. 2022, arXiv 2209.11895


def token_pool(loaded: LoadedModel, chosen: Sequence[int] | None = None) -> tuple[int, ...]:
    """Ids that probes draw from, ascending: no special, added, byte or unprintable tokens, the middle 80 % by id.

    chosen: the ids of --pool, taken as they are. Raises InputError for ids that the model does not know or that are
    too few, ModelError for a vocabulary that has too few.

        >>> len(token_pool(attnscope.load("demo")))
    """
    if chosen is not None:
        place = loaded.unknown_id(chosen)
        if place is not None:
            raise InputError(f"the pool names the id {chosen[place]}, which the model does not know", "leave it out")
        if len(set(chosen)) < LEAST:
            raise InputError(f"the pool has {len(set(chosen))} ids, and {LEAST} are needed", "name more of them")
        return tuple(sorted(set(chosen)))
    where: Where = "process" if loaded.brought else "here"  # not a thread: what a token decodes to may have no end
    otherwise = "choose another model, name token ids with {pool}"
    with IsolatedCall(partial(_ordinary, loaded.tokenizer), where, "its vocabulary", otherwise) as ordinary_of:
        ordinary = ordinary_of(loaded.embeddings)
    cut = round(len(ordinary) * (1 - MIDDLE) / 2)
    pool = tuple(ordinary[cut : len(ordinary) - cut])
    if len(pool) < LEAST:
        raise ModelError(
            f"{loaded.name} has {len(pool)} ordinary tokens, and {LEAST} are needed", "name token ids with {pool}"
        )
    return pool


def begins(loaded: LoadedModel) -> tuple[int, ...]:
    """The begin token, where the tokenizer puts one before a text."""
    with reading(loaded.tokenizer, isolation_for(loaded)) as read:
        first = read("a", False, None, None).ids[0]
    return (first,) if first == getattr(loaded.tokenizer, "bos_token_id", None) else ()


def natural_prompts(loaded: LoadedModel, texts: Sequence[str], most: int | None) -> list[Prompt]:
    """Texts as tokens, of each at most so many, None for all that the model reads."""
    room = [limit for limit in (most, loaded.geometry.max_positions) if limit is not None]
    with reading(loaded.tokenizer, isolation_for(loaded)) as read:
        prompts = [read(text, False, min(room, default=None), "right") for text in texts]
    for prompt in prompts:
        loaded.check_ids(prompt.ids)
    return prompts


def _ordinary(tokenizer: Any, embeddings: int | None) -> list[int]:
    """The ids of ordinary tokens below the embeddings, ascending; not their texts, which may have any length."""
    left_out = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    known = sorted(token for token in set(tokenizer.get_vocab().values()) if token not in left_out)
    names = tokenizer.convert_ids_to_tokens(known)
    ordinary = []
    for token, name in zip(known, names, strict=True):
        if (embeddings is None or token < embeddings) and not (isinstance(name, str) and BYTE_TOKEN.fullmatch(name)):
            text = tokenizer.decode([token]).strip()
            # It says something that can be printed: no half of a character, no white space alone.
            if text and text.isprintable() and "�" not in text:
                ordinary.append(token)
    return ordinary

"""What a knockout is of: texts with their answers, the rows that are cut in each and the keys that are cut from them.

cases = cases_of(loaded, [AskedText("Mary and John went out. John gave a book to", key="Mary", answer=" Mary")])

What is cut one at a time: heads, layers, windows of layers, kv heads, or each key alone.

How much weight the asked rows give to each key, in a pass of the intact texts.

What a cut is compared with: the same weights on other keys, and other heads' own strongest looks.

permuted: under the null hypothesis what the keys of a row carry is exchangeable, given the weights. The values of the
cut keys are exchanged with those of other keys, and the same weights are cut where they now lie. (Weights move and
values stay, which is the same.) One draw exchanges the cut keys with keys that were drawn, p_b. The text as it is
counts as such a draw, p_0, of an unseen text: the others are p_b after p_0 was undone. The rank of the cut's
effect among all is then exact, though these exchanges are no group (Ramdas et al. 2023, arXiv 2204.13581).

heads: the strongest look of every other head, where its weight is within a factor of 2 of the one that was cut. Effects
are compared per weight: what a head gives changes in proportion to it.

What cuts cost the answers of texts, and what the same weights cost on other keys and the looks of other heads.

    KnockoutStudy(loaded, cases, CutPlan(over="heads")).run().table()

Shapes: B text of a pass, S text of the task, P head of a layer, r row of a block, K key, S text, D draw, N cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnscope.attention.rows import RowBlock
from attnscope.errors import InputError, UsageError
from attnscope.hooks.calls import AttentionCall
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.generation import check_causal
from attnscope.hooks.listen import listen
from attnscope.inputs.answers import check_answer, check_room
from attnscope.inputs.labels import visible_blanks
from attnscope.inputs.prompt import Prompt, from_ids, place, reading
from attnscope.inputs.tokens import find
from attnscope.interventions.base import AnswerLoss, LogitDifference, Measure
from attnscope.interventions.knockout import Knockout
from attnscope.interventions.passes import AGREES, Advance, Passes
from attnscope.interventions.spec import DRAWS, AskedText, Cut, CutPlan, HeadSet, Selection, Task
from attnscope.metrics.roles import SINK_MASS
from attnscope.model.geometry import Geometry
from attnscope.model.selection import everything, pairs
from attnscope.studies.ablation_search import head_set, heads_by_layer, portions
from attnscope.studies.knockout_records import (
    KINDS,
    AskedCut,
    Case,
    Draw,
    KnockoutResult,
    Masses,
    Null,
    NullKind,
    check_over,
    key_name,
    window_of,
)
from attnscope.studies.parts import Parts
from attnscope.studies.study import HALF, Cost, SetEffects, SetStudy, effects_by_set
from attnscope.utils.display import head_name, number_of, shortened

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

DIVIDE = "end the text without a space, and begin the answer with one"


def cases_of(loaded: LoadedModel, questions: Sequence[AskedText]) -> list[Case]:
    """The cases of some questions. Raises InputError for what cannot be one, with the line where there are several."""
    check_causal(loaded, "a knockout")
    loaded.check_logits("a knockout")
    with CaseReader(loaded, any(one.chat for one in questions)) as read:
        found = []
        for one in questions:
            with naming(one.where):
                found.append(case_of(loaded, one, read))
        return found


@contextmanager
def naming(where: str) -> Iterator[None]:
    """An error in the block says where the question was written."""
    try:
        yield
    except (InputError, UsageError) as error:
        if not where:
            raise
        raise InputError(f"{where}: {error.message}", error.hint) from error


class CaseReader:
    """Texts and ids -> prompts, whose `answer` says where an answer begins."""

    def __init__(self, loaded: LoadedModel, chat: bool) -> None:
        self.loaded = loaded
        self.apart = reading(loaded.tokenizer, place(loaded.tokenizer, loaded.brought, chat))

    def __enter__(self) -> CaseReader:
        self.tokenised = self.apart.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.apart.__exit__(*error)

    @property
    def _room(self) -> int | None:
        return self.loaded.geometry.max_positions

    def prompt(self, question: AskedText) -> Prompt:
        """The text alone."""
        text = question.text
        if isinstance(text, str):
            if not text.strip():
                raise InputError("the text is empty", "give a text with at least one word")
            found = self.tokenised(text, question.chat, self._room, question.truncate, "")
        else:
            found = from_ids(self.loaded.tokenizer, text, max_tokens=self._room, truncate=question.truncate)
        self.loaded.check_ids(found.ids)
        return found

    def answer(self, question: AskedText, prompt: Prompt, answer: str | Sequence[int]) -> tuple[int, ...]:
        """The ids of an answer behind the text, which is tokenised with it."""
        check_answer(None, answer, question.truncate)
        if not isinstance(answer, str):
            self.loaded.check_ids(answer)
            return tuple(answer)
        if not isinstance(question.text, str):
            raise UsageError(
                "the text is token ids, and its answer is words", "give both as text, or both as token ids"
            )
        whole = self.tokenised(question.text, question.chat, None, None, answer)
        assert whole.answer is not None
        check_room(whole, None, self.loaded.geometry.max_positions)
        if whole.ids[: whole.answer] != prompt.ids:
            raise InputError("the text is tokenised otherwise with its answer after it", DIVIDE)
        return whole.ids[whole.answer :]


def case_of(loaded: LoadedModel, question: AskedText, read: CaseReader) -> Case:
    """The case of one question."""
    prompt = read.prompt(question)
    answer = question.answer
    ids = own_next(loaded, prompt.ids) if answer is None else read.answer(question, prompt, answer)
    foil = None
    if question.foil is not None:
        foil = read.answer(question, prompt, question.foil)[0]
        if foil == ids[0]:
            raise InputError("the answer and its foil begin with the same token", "choose another foil")
    last = len(prompt) - 1
    parts = {"made": range(last, last + len(ids))}
    queries = find(prompt, question.query, question.define, parts).positions
    keys = tuple(range(len(prompt)))
    if question.key is not None:
        keys = find(prompt, question.key, question.define, parts).positions
    if not any(key <= max(queries) for key in keys):
        raise InputError(
            f"no query sees the key {question.key}: its first token is {keys[0]}, and the last query {max(queries)}",
            "name keys that come before a query",
        )
    said, foil_text = (text_of_ids(loaded, one) for one in (ids, () if foil is None else (foil,)))
    return Case(prompt, queries, keys, ids, said, foil, foil_text, own=answer is None)


def text_of_ids(loaded: LoadedModel, ids: Sequence[int]) -> str:
    """Some ids as text, with blanks that are seen."""
    return visible_blanks("".join(from_ids(loaded.tokenizer, ids).plain)) if ids else ""


def own_next(loaded: LoadedModel, ids: Sequence[int]) -> tuple[int, ...]:
    """The token that the model itself puts behind some ids."""
    ids_BT = torch.tensor([list(ids)], device=loaded.device)
    report = listen(loaded.model, ids_BT, lambda call: None, engine=UNCHECKED, logits_at=[-1])
    assert report.logits is not None
    return (int(report.logits[0, -1].argmax()),)


def task_of(cases: Sequence[Case]) -> tuple[Task, Measure]:
    """The passes' task, and what the answer is measured by: nats, or against a foil logits.

    Raises InputError where some have a foil and others none.
    """
    task = Task(
        "answers",
        tuple(one.ids for one in cases),
        tuple(one.rows for one in cases),
        {"keys": [list(one.keys) for one in cases]} if len(cases) == 1 else {},
    )
    foils = [one.foil for one in cases if one.foil is not None]
    if not foils:
        return task, AnswerLoss()
    if len(foils) < len(cases):
        raise InputError("some texts have a foil and others have none", "give each one, or none")
    last = [len(one.prompt) - 1 for one in cases]
    return task, LogitDifference([one.answer[0] for one in cases], foils, last)


def cuts_over(over: str, selection: Selection, geometry: Geometry, cases: Sequence[Case], name: str) -> list[AskedCut]:
    """The cuts; selection: the heads, by layer. name: of all of them together. Raises UsageError for keys of texts."""
    check_over(over)
    keys = tuple(one.keys for one in cases)
    whole = head_set(name, selection)
    if over == "none":
        return [AskedCut(Cut(name, whole.heads, keys))]
    if over in ("heads", "kv"):
        parts = portions(over, whole, geometry)
        return [AskedCut(Cut(one.name, one.heads, keys), one.layer, one.head) for one in parts]
    if over == "keys":
        if len(cases) > 1:
            raise UsageError("keys of several texts are not the same tokens", "give one text, or another {over}")
        return [AskedCut(Cut(key_name(cases[0], key), whole.heads, ((key,),))) for key in cases[0].keys]
    return _layers(selection, keys, window_of(over))


def _layers(selection: Selection, keys: tuple[tuple[int, ...], ...], width: int) -> list[AskedCut]:
    """A cut per layer, of so many layers around it; at both ends of fewer (Geva et al. 2023, figure 2)."""
    layers, found = sorted(selection), []
    for middle, layer in enumerate(layers):
        near = layers[max(0, middle - (width - 1) // 2) : middle + width // 2 + 1]
        heads = tuple((one, head) for one in near for head in selection[one])
        name = f"L{near[0]}" + f"-{near[-1]}" * (len(near) > 1)
        found.append(AskedCut(Cut(name, heads, keys), layer))
    return found


class MassReader:
    """Fills Masses from the blocks of the intact rows of passes; rests: whether it also asks where heads rest."""

    def __init__(self, masses: Masses, rests: bool) -> None:
        self.masses, self.rests = masses, rests

    def __call__(self, call: AttentionCall, texts: Sequence[int], heads: Sequence[int], block: RowBlock) -> None:
        if call.place.call:  # a layer that attends twice is read once
            return
        # A pass of shared layers has the intact texts first; rows that pad a block are of no query.
        batch = len(texts)
        asked_B1r1 = (block.query_Nr[:batch] >= 0)[:, None, :, None]
        weights_BPrK = block.weights_NPrK[:batch] * asked_B1r1
        seen = block.seen_NPrK if len(block.seen_NPrK) == 1 else block.seen_NPrK[:batch]
        seen_BPrK = seen.expand(weights_BPrK.shape) & asked_B1r1
        mass_BPK = weights_BPrK.sum(2).double().cpu().numpy()
        seen_BPK = seen_BPrK.sum(2).cpu().numpy()
        rests_BP = self._rests(call, texts, heads) if block.start == 0 else None
        for number, text in enumerate(texts):
            of, length = (text, call.layer), self.masses.lengths[text]
            rows = int((block.query_Nr[number] >= 0).sum())
            if not rows:
                continue
            other = seen_BPrK[number].clone()
            other[..., list(self.masses.keys[text])] = False
            alone_PrK = seen_BPrK[number] & (seen_BPrK[number].sum(-1, keepdim=True) == 1)
            emptied_P = (seen_BPrK[number].any(-1) & ~other.any(-1)).any(1).cpu().numpy()
            if rests_BP is not None:
                self.masses.mass[of] = np.zeros((len(heads), length))
                self.masses.seen[of] = np.zeros((len(heads), length), np.int64)
                self.masses.alone[of] = np.zeros((len(heads), length), bool)
                self.masses.emptied[of] = np.zeros(len(heads), bool)
                self.masses.rests[of] = rests_BP[number]
            self.masses.mass[of] += mass_BPK[number, :, :length]
            self.masses.seen[of] += seen_BPK[number, :, :length]
            self.masses.alone[of] |= alone_PrK.any(1).cpu().numpy()[:, :length]
            self.masses.emptied[of] |= emptied_P

    def _rests(self, call: AttentionCall, texts: Sequence[int], heads: Sequence[int]) -> np.ndarray:
        """Each head's sink, (B, P): the key with the largest mean weight over all queries, if above RESTS."""
        if not self.rests:
            return np.full((len(texts), len(heads)), -1)
        share_BQ = torch.zeros(call.P.batch, call.P.queries, device=call.P.device)
        for number, text in enumerate(texts):
            length = self.masses.lengths[text]
            share_BQ[number, :length] = 1 / length
        largest = call.P.received(share_BQ)[: len(texts), list(heads)].max(-1)
        return torch.where(largest.values > SINK_MASS, largest.indices, -1).cpu().numpy()

    def done(self, rows: Sequence[int]) -> Masses:
        """The means; rows: how many are asked of each text."""
        for (text, _), mass_PK in self.masses.mass.items():
            mass_PK /= rows[text]
        return self.masses


def read_masses(passes: Passes, keys: Sequence[Sequence[int]], rests: bool) -> Masses:
    """The masses of every text, in one pass over each."""
    knockout = passes.intervention
    assert isinstance(knockout, Knockout)
    reader = MassReader(Masses(knockout.heads, keys, passes.task.lengths), rests)
    reading = replace(passes, intervention=replace(knockout, read=reader), layers=None)
    for batch in reading.batches(0):
        reading.run(batch, [])
    return reader.done([len(one) for one in knockout.queries])


FEWEST = 10  # keys to exchange with, or other heads
OWN = "the answer is the model's own next token, which the keys chose as they are: name an answer"
SEVERAL = "several keys or heads are cut"
ALIKE = 2.0  # the factor within which another head's weight has to lie
Moves = tuple[tuple[int, int], ...]


def permuted_null(
    cut: Cut,
    queries: Sequence[Sequence[int]],
    masses: Masses,
    most: int = DRAWS,
    seed: int = 0,
    own: Collection[int] = (),
) -> Null:
    """The same weights on other keys, drawn for each text apart; at most so many draws, or all that one key has.

    queries: the asked rows of each text. own: the texts with the model's own answer. It was chosen as what the
    values give where they are, so that no other order of them can be expected to give it as much.
    """
    if not most:
        return Null()
    # Keys are exchangeable where every row and head that is cut sees them, and where no exchange changes a row itself.
    heads = masses.looking(cut)
    pools, missing = {}, []
    for text in range(len(cut.keys)):
        pool, why = _pool(replace(cut, heads=heads), text, queries[text], masses)
        why = OWN if text in own else why
        if not why and len({layer for layer, _ in heads}) > 1:
            pool = [key for key in pool if key not in queries[text]]
            if not set(cut.keys[text]) <= set(pool):
                why = "a key is itself a row that is cut, which changes its value"
        if not why and len(pool) < FEWEST:
            why = f"fewer than {FEWEST} keys to exchange with"
        if why:
            missing.append(why)
        else:
            pools[text] = pool
    if not pools:
        return Null(why=tuple(missing))
    # A draw is one exchange in every text that has a null: as many draws as the text with the fewest has.
    orders = {text: _exchanges(cut, text, pool, most, seed, alone=len(pools) == 1) for text, pool in pools.items()}
    draws = []
    for number in range(min(map(len, orders.values()))):
        moves = tuple(orders[text][number] if text in orders else () for text in range(len(cut.keys)))
        keys = tuple(
            tuple(dict(moves[text]).get(key, key) for key in own) if text in orders else ()
            for text, own in enumerate(cut.keys)
        )
        moved = Cut(f"{cut.name}, order {number}", heads, ((),) * len(keys), moves)
        draws.append(Draw(replace(moved, name=f"{moved.name}, cut", keys=keys), moved))
    return Null(tuple(draws), tuple(pools), min(map(len, pools.values())), tuple(missing))


def heads_null(
    cut: Cut, heads: Sequence[HeadSet], queries: Sequence[Sequence[int]], masses: Masses, most: int = DRAWS
) -> Null:
    """The strongest look of each other head, where it is as strong; at most so many, of the nearest weight.

    heads: those to compare with, each alone.
    """
    if not most:
        return Null()
    if len(cut.heads) > 1 or any(len(keys) > 1 for keys in cut.keys):
        return Null(why=(SEVERAL,))
    own = [_pool(cut, text, queries[text], masses) for text in range(len(cut.keys))]
    missing = [why for _, why in own if why]
    if missing:
        return Null(why=tuple(missing))
    mass, alike = _mean_mass(cut, masses), []
    for one in heads:
        strongest = [_strongest(one, text, queries[text], masses) for text in range(len(cut.keys))]
        if one.heads == cut.heads or None in strongest:
            continue
        other = Cut(f"{one.name}, strongest", one.heads, tuple((key,) for key in strongest if key is not None))
        apart = abs(math.log(_mean_mass(other, masses) / mass))
        if apart <= math.log(ALIKE):
            alike.append((apart, Draw(other)))
    if len(alike) < FEWEST:
        return Null(why=(f"fewer than {FEWEST} other heads look as strongly",))
    alike.sort(key=lambda one: one[0])
    return Null(tuple(draw for _, draw in alike[:most]), tuple(range(len(cut.keys))))


def edges_alone(cuts: Sequence[Cut]) -> bool:
    """Whether any of some cuts is of one key in one head."""
    return any(len(one.heads) == 1 and all(len(keys) == 1 for keys in one.keys) for one in cuts)


def _pool(cut: Cut, text: int, queries: Sequence[int], masses: Masses) -> tuple[list[int], str]:
    """The keys that all asked rows see in all heads of a cut, without key 0 and the heads' sinks; why it has none.

    Sinks are known from weights alone, so that no value has a part in the choice.
    """
    seen_K, rests = masses.seen_by_all(cut, text, len(queries)), masses.resting(cut, text)
    pool = [int(key) for key in np.flatnonzero(seen_K) if key not in {0, *rests}]
    own = set(cut.keys[text])
    if not masses.of(cut, text) > 0:
        return [], "no weight is cut"
    if 0 in own:
        return [], "key 0 is cut"
    if own & rests:
        return [], "a sink is cut"
    return pool, "" if own <= set(pool) else "not every row and head sees the keys"


def _exchanges(cut: Cut, text: int, pool: Sequence[int], most: int, seed: int, alone: bool) -> list[Moves]:
    """Where the weights of a text go in every draw; alone: of no other text, so that none need come twice.

    The draws of a cut depend on its heads and keys, and not on what else is cut or its name.
    """
    own = cut.keys[text]
    generator = np.random.default_rng([seed, text, *own, *itertools.chain(*cut.heads)])
    if alone and len(own) == 1:
        drawn = [(int(key),) for key in generator.permutation(pool)[: most + 1]]
    else:
        drawn = [tuple(generator.choice(pool, len(own), replace=False).tolist()) for _ in range(most + 1)]
    return [_moves(own, drawn[0], other) for other in drawn[1:]]


def _moves(own: Sequence[int], first: Sequence[int], other: Sequence[int]) -> Moves:
    """Where weights go if the exchange of the cut keys with the first is undone, and they are exchanged with others.

    >>> _moves((5,), (2,), (7,))
    ((2, 5), (5, 7), (7, 2))
    >>> _moves((5,), (2,), (2,))
    ()
    """
    value = {key: key for key in (*own, *first, *other)}  # whose value each weight has
    for moves in (reversed(list(zip(own, first, strict=True))), zip(own, other, strict=True)):
        for one, two in moves:
            value[one], value[two] = value[two], value[one]
    return tuple(sorted((key, onto) for key, onto in value.items() if key != onto))


def _strongest(one: HeadSet, text: int, queries: Sequence[int], masses: Masses) -> int | None:
    """The key that a head looks at most, of those that could be cut from it; None without any."""
    mass_K = masses.per_key(one, text)
    there_K = masses.seen_by_all(one, text, len(queries)) & (mass_K > 0)
    there_K[[0, *masses.resting(one, text)]] = False
    return int(np.where(there_K, mass_K, -1.0).argmax()) if there_K.any() else None


def _mean_mass(cut: Cut, masses: Masses) -> float:
    return float(np.mean([masses.of(cut, text) for text in range(len(cut.keys))]))


def reasons(nulls: Sequence[Null]) -> Mapping[str, int]:
    """Why there is no null, in some text or all, and of how many cuts."""
    every = sorted({why for null in nulls for why in null.why})
    return {why: sum(why in null.why for null in nulls) for why in every}


COPY = "intact copy"


@dataclass(frozen=True)
class KnockoutStudy(SetStudy[KnockoutResult]):
    """What is lost where chosen rows of chosen heads may not look at chosen keys, see `CutPlan`.

    key: whether keys were named, or all tokens of each text are cut.
    """

    kind, readings, schema, stage = "knockout", "knockout", "knockout/2", "cutting"

    model: LoadedModel
    cases: Sequence[Case]
    plan: CutPlan = CutPlan()
    key: bool = True

    @classmethod
    def of(cls, model: LoadedModel, questions: Sequence[AskedText], plan: CutPlan) -> KnockoutStudy:
        """The study of some questions. Raises InputError for what cannot be a case."""
        return cls(model, cases_of(model, questions), plan, any(one.key is not None for one in questions))

    @cached_property
    def asked(self) -> list[AskedCut]:
        """The cuts that are asked for."""
        return cuts_over(self.plan.over, self.selection, self.model.geometry, self.cases, self.plan.name)

    @property
    def sets(self) -> list[Cut]:
        return [one.cut for one in self.asked]

    @property
    def task(self) -> tuple[Task, Measure]:
        return task_of(self.cases)

    @property
    def intervention(self) -> Knockout:
        return Knockout(tuple(one.queries for one in self.cases), heads_by_layer(self.sets), self.plan.how)

    @property
    def lines(self) -> Iterator[str]:
        """Of one text which tokens are meant, and what the answer is."""
        if len(self.cases) > 1:
            return
        [case] = self.cases
        for name, places in (("query", case.queries), *[("key", case.keys)] * self.key):
            yield f"{name}: {shortened(', '.join(key_name(case, at) for at in places), 200)}"
        yield f"answer: {case.answer_text}"

    @property
    def facts(self) -> dict[str, Any]:
        plan, heads = self.plan, [head for one in self.sets for head in one.heads]
        texts = [
            {
                "sha256": case.prompt.sha256,
                "tokens": len(case.prompt),
                "queries": list(case.queries),
                "keys": list(case.keys),
                "answer": list(case.answer),
                "foil": case.foil,
            }
            for case in self.cases
        ]
        how = {"how": plan.how, "over": plan.over, **self.heads_facts(heads)}
        return self.task_facts | how | {"random": plan.random, "seed": plan.seed, "texts": texts}

    def cost(self) -> Cost:
        times, cuts = 1 + 2 * self.plan.random, self.sets
        heads = self.compared_heads
        total = len(cuts) * times + len(heads)
        what = f"{len(cuts)} cuts, at most {total} with others, on {number_of(len(self.cases), 'text')}"
        return self.cost_of_passes(what, cuts, times=times, before=self.passes.token_layers(heads))

    @property
    def compared_heads(self) -> list[HeadSet]:
        """Each head of the model alone, where any cut is compared with the looks of other heads."""
        if not self.plan.random or not edges_alone(self.sets):
            return []
        return [HeadSet(head_name(*head), (head,)) for head in pairs(everything(self.model.geometry.heads_by_layer))]

    def measure(self, facts: dict[str, Any], parts: Parts, advance: Advance) -> KnockoutResult:
        # One cut without draws is read and run in the same passes; else what is drawn depends on what the rows give.
        if len(self.sets) == 1 and not self.plan.random:
            masses, run = self._at_once(self.sets[0], advance)
            nulls: dict[NullKind, tuple[Null, ...]] = {kind: (Null(),) for kind in KINDS}
        else:
            masses, nulls = self._compared()
            draws = [cut for kind in KINDS for null in nulls[kind] for cut in null.cuts]
            run = self._measured(draws, masses, parts, advance)
        if all(np.isnan(run.by_set[one.identity]).all() for one in self.sets):
            why = "no query sees any of the keys in the heads that were chosen"
            raise InputError(why, "choose other keys or heads")
        emptied = sorted({head for one in self.sets for head in masses.left_empty(one)})
        measured = {
            "intact": float(run.intact_S.mean()),
            **run.facts,
            "rounding": max(AGREES[self.model.dtype], run.spread or 0.0),
            "without_null": {kind: dict(reasons(nulls[kind])) for kind in KINDS},
            "emptied": [head_name(*head) for head in emptied],
            **run.unshared,
        }
        asked = tuple(self.asked)
        return KnockoutResult(tuple(self.cases), asked, nulls, masses, run.by_set, run.intact_S, facts | measured)

    def _compared(self) -> tuple[Masses, dict[NullKind, tuple[Null, ...]]]:
        """What the rows give to each key, and what each cut is compared with."""
        cuts, plan, heads = self.sets, self.plan, self.compared_heads
        knockout = self.intervention
        reading = replace(self.passes, intervention=replace(knockout, heads=heads_by_layer([*heads, *cuts])))
        masses = read_masses(reading, [one.keys for one in self.cases], rests=plan.random > 0)
        queries, own = knockout.queries, [text for text, case in enumerate(self.cases) if case.own]
        return masses, {
            "permuted": tuple(permuted_null(cut, queries, masses, plan.random, plan.seed, own) for cut in cuts),
            "heads": tuple(heads_null(cut, heads, queries, masses, plan.random) for cut in cuts),
        }

    @property
    def _copy(self) -> Cut:
        return Cut(COPY, (), ((),) * len(self.cases))

    def _at_once(self, cut: Cut, advance: Advance) -> tuple[Masses, SetEffects]:
        """One cut whose intact rows are read in the pass that runs it: two passes' rows in all."""
        passes, knockout = self.passes, self.intervention
        reader = MassReader(Masses(knockout.heads, cut.keys, passes.task.lengths), rests=False)
        sets = [cut, *[self._copy] * (self.model.dtype in HALF)]
        value_SK = replace(passes, intervention=replace(knockout, read=reader)).measured(sets, advance)
        masses = reader.done([len(one) for one in knockout.queries])
        effect_SK = passes.effects(value_SK)
        by_set = {one.identity: _known(one, masses, effect_SK[:, place]) for place, one in enumerate(sets)}
        spread = float(np.abs(effect_SK[:, 1]).max()) if len(sets) > 1 else None
        return masses, SetEffects(passes, value_SK[:, 0], by_set, spread)

    def _measured(self, draws: Sequence[Cut], masses: Masses, parts: Parts, advance: Advance) -> SetEffects:
        """What cuts and draws cost; those that take no weight from any text are not run."""
        every = {one.identity: one for one in [*self.sets, *draws]}
        texts = range(len(self.cases))
        taken = [one for one in every.values() if one.moves or any(masses.of(one, text) > 0 for text in texts)]
        passes = replace(self.passes, intervention=replace(self.intervention, heads=heads_by_layer(taken)))
        run = effects_by_set(passes, taken, parts, advance, self._copy)
        nothing = np.zeros(len(texts))
        by_set = {name: _known(one, masses, run.by_set.get(name, nothing)) for name, one in every.items()}
        return replace(run, by_set=by_set)


def _known(cut: Cut, masses: Masses, effect_S: np.ndarray) -> np.ndarray:
    """The effect in each text: NaN where no row sees a key, exactly 0 where their weight is exactly 0."""
    if not cut.heads or cut.moves:
        return effect_S
    mass_S = np.array([masses.of(cut, text) for text in range(len(effect_S))])
    return np.where(np.isnan(mass_S), np.nan, np.where(mass_S == 0, 0.0, effect_S))

"""What cuts cost the answers of texts, and what the same weights cost on other keys and the looks of other heads.

    cases = cases_of(loaded, [AskedText("Mary and John went out. John gave a book to", key="Mary", answer=" Mary")])
    KnockoutStudy(loaded, cases, CutPlan(over="heads")).run().table()

In this order: texts with their answers, the rows that are cut in each and the keys that are cut from them; what is cut
one at a time; how much weight the rows give to each key, in a pass of the intact texts; the nulls; the study.

permuted: under the null hypothesis what the keys of a row carry is exchangeable, given the weights. The values of the
cut keys are exchanged with those of other keys, and the same weights are cut where they now lie. (Weights move and
values stay, which is the same.) One draw exchanges the cut keys with keys that were drawn, p_b. The text as it is
counts as such a draw, p_0, of an unseen text: the others are p_b after p_0 was undone. The rank of the cut's
effect among all is then exact, though these exchanges are no group (Ramdas et al. 2023, arXiv 2204.13581).

heads: the strongest look of every other head, where its weight is within a factor of 2 of the one that was cut. Effects
are compared per weight: what a head gives changes in proportion to it.

Shapes: B text of a pass, S text of the task, P head of a layer, r row of a block, K key, D draw, N cut.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

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
from attnscope.inputs.prompt import Prompt, from_ids, isolation_for, reading
from attnscope.inputs.tokens import find
from attnscope.interventions.base import LOSS, AnswerLoss, LogitDifference, Measure
from attnscope.interventions.knockout import Knockout, MapRows
from attnscope.interventions.passes import AGREES, Advance
from attnscope.interventions.spec import DRAWS, AskedText, Cut, CutPlan, HeadSet, Selection, Task
from attnscope.metrics.roles import SINK_MASS
from attnscope.model.geometry import Geometry
from attnscope.model.selection import everything, pairs, stack_of
from attnscope.studies.ablation_search import head_set, heads_by_layer, portions
from attnscope.studies.knockout_records import (
    KINDS,
    AnsweredText,
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
from attnscope.studies.study import HALF, Cost, SetEffects, SetStudy, cost_of_passes, effects_by_set
from attnscope.studies.study_folder import Parts, stacks_of
from attnscope.utils.display import head_name, layer_name, number_of, shortened

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

Question = TypeVar("Question", bound=AskedText)
Read = TypeVar("Read")  # what a question is of, as it is read


def cases_of(loaded: LoadedModel, questions: Sequence[AskedText]) -> list[Case]:
    """The cases of some questions. Raises InputError for what cannot be one, with the line where there are several."""
    check_causal(loaded, "a knockout")
    loaded.check_logits("a knockout")
    return read_cases(loaded, questions, case_of)


def read_cases(
    loaded: LoadedModel, questions: Sequence[Question], case_of: Callable[[Question, CaseReader], Read]
) -> list[Read]:
    """What each question is of, in their order; an error names the place of its question, of several."""
    chat, cases = any(question.chat for question in questions), []
    with reading(loaded.tokenizer, isolation_for(loaded, chat)) as tokenised:
        reader = CaseReader(loaded, tokenised)
        for question in questions:
            try:
                cases.append(case_of(question, reader))
            except (InputError, UsageError) as error:
                if not question.where:
                    raise
                raise InputError(f"{question.where}: {error.message}", error.hint) from error
    return cases


@dataclass(frozen=True)
class CaseReader:
    """Texts and ids -> prompts, whose `answer` says where an answer begins."""

    loaded: LoadedModel
    tokenised: Callable[..., Prompt]

    def prompt(self, question: AskedText) -> Prompt:
        """The text alone."""
        text, room = question.text, self.loaded.geometry.max_positions
        if isinstance(text, str):
            if not text.strip():
                raise InputError("the text is empty", "give a text with at least one word")
            prompt = self.tokenised(text, question.chat, room, question.truncate, "")
        else:
            prompt = from_ids(self.loaded.tokenizer, text, max_tokens=room, truncate=question.truncate)
        self.loaded.check_ids(prompt.ids)
        return prompt

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
            raise InputError(
                "the text is tokenised otherwise with its answer after it",
                "end the text without a space, and begin the answer with one",
            )
        return whole.ids[whole.answer :]

    def foil(self, question: AskedText, prompt: Prompt, answer: Sequence[int]) -> tuple[int | None, str]:
        """The first token of the foil, and its text; none without one. Raises InputError where an answer begins so."""
        if question.foil is None:
            return None, ""
        foil = self.answer(question, prompt, question.foil)[0]
        if foil == answer[0]:
            raise InputError("the answer and its foil begin with the same token", "choose another foil")
        return foil, text_of_ids(self.loaded, (foil,))


def case_of(question: AskedText, reader: CaseReader) -> Case:
    """The case of one question."""
    prompt, answer, loaded = reader.prompt(question), question.answer, reader.loaded
    if answer is None:
        # The token that the model itself puts after the text.
        ids_BT = torch.tensor([list(prompt.ids)], device=loaded.device)
        report = listen(loaded.model, ids_BT, lambda call: None, engine=UNCHECKED, logits_at=[-1])
        assert report.logits is not None
        ids: tuple[int, ...] = (int(report.logits[0, -1].argmax()),)
    else:
        ids = reader.answer(question, prompt, answer)
    foil, foil_text = reader.foil(question, prompt, ids)
    # Expressions may name the rows that make the answer, which are of no token of the text.
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
    return Case(prompt, ids, text_of_ids(loaded, ids), foil, foil_text, queries, keys, own=answer is None)


def text_of_ids(loaded: LoadedModel, ids: Sequence[int]) -> str:
    """Some ids as text, with blanks that are seen."""
    return visible_blanks("".join(from_ids(loaded.tokenizer, ids).plain)) if ids else ""


def task_of(cases: Sequence[AnsweredText], facts: Mapping[str, Any] | None = None) -> tuple[Task, Measure]:
    """The passes' task, and what it is measured by: nats per token of a text, nats of an answer, or logits with a foil.

    facts: what else the task was made of. Raises InputError where some have an answer or a foil and others none.
    """
    answers, foils = [case.answer for case in cases], [case.foil for case in cases if case.foil is not None]
    for what, count in (("an answer", sum(map(bool, answers))), ("a foil", len(foils))):
        if 0 < count < len(cases):
            raise InputError(f"some texts have {what} and others have none", "give each one, or none")
    ids, rows = tuple(case.ids for case in cases), tuple(case.rows for case in cases)
    task = Task("answers" if answers[0] else "texts", ids, rows, facts or {})
    if foils:  # the answer begins behind the first row
        return task, LogitDifference([answer[0] for answer in answers], foils, [row[0] for row in rows])
    return task, AnswerLoss() if answers[0] else LOSS


def cuts_over(over: str, selection: Selection, geometry: Geometry, cases: Sequence[Case], name: str) -> list[AskedCut]:
    """The cuts; selection: the heads, by layer. name: of all of them together. Raises UsageError for keys of texts."""
    check_over(over)
    keys = tuple(case.keys for case in cases)
    whole = head_set(name, selection)
    if over == "none":
        return [AskedCut(Cut(name, whole.heads, keys))]
    if over in ("heads", "kv"):
        parts = portions(over, whole, geometry)
        return [AskedCut(Cut(part.name, part.heads, keys), part.layer, part.head) for part in parts]
    if over == "keys":
        if len(cases) > 1:
            raise UsageError("keys of several texts are not the same tokens", "give one text, or another {over}")
        return [AskedCut(Cut(key_name(cases[0], key), whole.heads, ((key,),))) for key in cases[0].keys]
    # A cut per layer, of so many layers around it; at both ends of fewer (Geva et al. 2023, figure 2).
    layers, width, cuts = sorted(selection), window_of(over), []
    for middle, layer in enumerate(layers):
        near = layers[max(0, middle - (width - 1) // 2) : middle + width // 2 + 1]
        heads = tuple((number, head) for number in near for head in selection[number])
        names = [layer_name(near[0]), layer_name(near[-1])]
        if stack_of(near[0]) == stack_of(near[-1]):
            names[1] = f"{near[-1]:d}"
        name = "-".join(names[: len(near)])
        cuts.append(AskedCut(Cut(name, heads, keys), layer))
    return cuts


class MassReader:
    """Fills Masses from the blocks of the intact rows of passes; rests: whether it also asks where heads rest."""

    def __init__(self, masses: Masses, rests: bool) -> None:
        self.masses, self.rests = masses, rests

    def __call__(
        self, call: AttentionCall, texts: Sequence[int], heads: Sequence[int], block: RowBlock | MapRows
    ) -> None:
        if call.place.call:  # a layer that attends twice is read once
            return
        # A pass of shared layers has the intact texts first; rows that pad a block are of no query.
        batch = len(texts)
        asked_B1r1 = (block.query_Nr[:batch] >= 0)[:, None, :, None]
        weights_BPrK = block.weights_NPrK[:batch] * asked_B1r1
        visible = block.seen_NPrK if len(block.seen_NPrK) == 1 else block.seen_NPrK[:batch]
        seen_BPrK = visible.expand(weights_BPrK.shape) & asked_B1r1
        mass_BPK, masses = weights_BPrK.sum(2).double(), self.masses
        rests_BP = np.full((batch, len(heads)), -1)
        if self.rests and block.start == 0:
            # Each head rests on its sink: the key with the largest mean weight over all queries, if above SINK_MASS.
            share_BQ = torch.zeros(call.P.batch, call.P.queries, device=call.P.device)
            for number, text in enumerate(texts):
                share_BQ[number, : masses.lengths[text]] = 1 / masses.lengths[text]
            largest = call.P.received(share_BQ)[:batch, list(heads)].max(-1)
            rests_BP = torch.where(largest.values > SINK_MASS, largest.indices, -1).cpu().numpy()
        for number, text in enumerate(texts):
            of, length, seen_PrK = (text, call.index), masses.lengths[text], seen_BPrK[number]
            if not bool((block.query_Nr[number] >= 0).any()):
                continue
            other_PrK = seen_PrK.clone()
            other_PrK[..., list(masses.keys[text])] = False
            alone_PrK = seen_PrK & (seen_PrK.sum(-1, keepdim=True) == 1)
            if block.start == 0:
                masses.rests[of] = rests_BP[number]
            # The blocks of a call add up: numbers as a sum, truths as what holds in any.
            for whole, values in (
                (masses.mass, mass_BPK[number, :, :length]),
                (masses.seen, seen_PrK.sum(1)[:, :length]),
                (masses.alone, alone_PrK.any(1)[:, :length]),
                (masses.emptied, (seen_PrK.any(-1) & ~other_PrK.any(-1)).any(1)),
            ):
                of_block = values.cpu().numpy()
                whole[of] = of_block if block.start == 0 else whole[of] + of_block

    def done(self, rows: Sequence[int]) -> Masses:
        """The means; rows: how many are asked of each text."""
        for (text, _), mass_PK in self.masses.mass.items():
            mass_PK /= rows[text]
        return self.masses


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
    pools, missing = dict[int, list[int]](), []
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
    # Where the weights of a text go in every draw, which depends on the heads and keys of the cut alone, and not on
    # what else is cut or its name. Where no other text has a null, no exchange need come twice.
    orders: dict[int, list[Moves]] = {}
    for text, pool in pools.items():
        keys_cut = cut.keys[text]
        generator = np.random.default_rng([seed, text, *keys_cut, *itertools.chain(*cut.heads)])
        if len(pools) == 1 and len(keys_cut) == 1:
            drawn = [(int(key),) for key in generator.permutation(pool)[: most + 1]]
        else:
            drawn = [tuple(generator.choice(pool, len(keys_cut), replace=False).tolist()) for _ in range(most + 1)]
        orders[text] = [_moves(keys_cut, drawn[0], other) for other in drawn[1:]]
    # A draw is one exchange in every text that has a null: as many draws as the text with the fewest has.
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
    mass, alike = float(masses.by_text(cut).mean()), []
    for one in heads:
        strongest = [_strongest(one, text, queries[text], masses) for text in range(len(cut.keys))]
        if one.heads == cut.heads or None in strongest:
            continue
        other = Cut(f"{one.name}, strongest", one.heads, tuple((key,) for key in strongest if key is not None))
        apart = abs(math.log(masses.by_text(other).mean() / mass))
        if apart <= math.log(ALIKE):
            alike.append((apart, Draw(other)))
    if len(alike) < FEWEST:
        return Null(why=(f"fewer than {FEWEST} other heads look as strongly",))
    alike.sort(key=lambda one: one[0])
    return Null(tuple(draw for _, draw in alike[:most]), tuple(range(len(cut.keys))))


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


def _moves(own: Sequence[int], first: Sequence[int], other: Sequence[int]) -> Moves:
    """Where weights go if the exchange of the cut keys with the first is undone, and they are exchanged with others.

    >>> _moves((5,), (2,), (7,))
    ((2, 5), (5, 7), (7, 2))
    >>> _moves((5,), (2,), (2,))
    ()
    """
    value = {key: key for key in (*own, *first, *other)}  # whose value each weight has
    for exchanges in (reversed(list(zip(own, first, strict=True))), zip(own, other, strict=True)):
        for key, onto in exchanges:
            value[key], value[onto] = value[onto], value[key]
    return tuple(sorted((key, onto) for key, onto in value.items() if key != onto))


def _strongest(heads: HeadSet, text: int, queries: Sequence[int], masses: Masses) -> int | None:
    """The key that a head looks at most, of those that could be cut from it; None without any."""
    mass_K = masses.per_key(heads, text)
    there_K = masses.seen_by_all(heads, text, len(queries)) & (mass_K > 0)
    there_K[[0, *masses.resting(heads, text)]] = False
    return int(np.where(there_K, mass_K, -1.0).argmax()) if there_K.any() else None


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
        return cls(model, cases_of(model, questions), plan, any(question.key is not None for question in questions))

    @cached_property
    def asked(self) -> list[AskedCut]:
        """The cuts that are asked for."""
        return cuts_over(self.plan.over, self.selection, self.model.geometry, self.cases, self.plan.name)

    @property
    def sets(self) -> list[Cut]:
        return [item.cut for item in self.asked]

    @property
    def task(self) -> tuple[Task, Measure]:
        alone = len(self.cases) == 1
        return task_of(self.cases, {"keys": [list(case.keys) for case in self.cases]} if alone else None)

    @property
    def intervention(self) -> Knockout:
        return Knockout(tuple(case.queries for case in self.cases), heads_by_layer(self.sets), self.plan.how)

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
        plan = self.plan
        texts = [case.facts(queries=list(case.queries), keys=list(case.keys)) for case in self.cases]
        how = {"how": plan.how, "over": plan.over, **self.heads_facts(self.sets)}
        return self.task_facts | how | {"random": plan.random, "seed": plan.seed, "texts": texts}

    def cost(self) -> Cost:
        times, cuts = 1 + 2 * self.plan.random, self.sets
        heads = self.compared_heads
        total = len(cuts) * times + len(heads)
        what = f"{len(cuts)} cuts, at most {total} with others, on {number_of(len(self.cases), 'text')}: at most"
        return cost_of_passes(what, self.passes, cuts, times=times, before=self.passes.token_layers(heads))

    @property
    def compared_heads(self) -> list[HeadSet]:
        """Each head of its stack alone, where any cut, of one key in one head, is compared with other heads' looks."""
        edges = (cut for cut in self.sets if len(cut.heads) == 1 and all(len(keys) == 1 for keys in cut.keys))
        if not self.plan.random or not any(edges):
            return []
        stacks = {stack_of(layer) for cut in self.sets for layer, _ in cut.heads}
        heads = pairs(everything(self.model.geometry.changeable))
        return [HeadSet(head_name(*head), (head,)) for head in heads if stack_of(head[0]) in stacks]

    def alike(self, cut: Cut) -> list[HeadSet]:
        """The heads of `compared_heads` that are of a cut's own stack: a linear head has no softmax."""
        return [heads for heads in self.compared_heads if stacks_of([heads]) == stacks_of([cut])]

    def measure(self, facts: dict[str, Any], parts: Parts, advance: Advance) -> KnockoutResult:
        sets, plan, knockout, passes = self.sets, self.plan, self.intervention, self.passes
        count, lengths = len(self.cases), passes.task.lengths
        copy = Cut(COPY, (), ((),) * count)
        rows, every = [len(queries) for queries in knockout.queries], {cut.identity: cut for cut in sets}
        nulls: dict[NullKind, tuple[Null, ...]] = {kind: (Null(),) for kind in KINDS}
        if len(sets) == 1 and not plan.random:
            # One cut without draws is read in the pass that runs it: two passes' rows in all.
            reader = MassReader(Masses(knockout.heads, sets[0].keys, lengths), rests=False)
            copies = [copy] * (self.model.dtype in HALF)
            value_SK = replace(passes, intervention=replace(knockout, read=reader)).measured([*sets, *copies], advance)
            masses, effect_SK = reader.done(rows), passes.effects(value_SK)
            spread = float(np.abs(effect_SK[:, 1]).max()) if copies else None
            run = SetEffects(passes, value_SK[:, 0], {sets[0].identity: effect_SK[:, 0]}, spread)
        else:
            # Else the rows are read first: what is drawn depends on the weight that they give to each key.
            heads = self.compared_heads
            wide = replace(knockout, heads=heads_by_layer([*heads, *sets]))
            reader = MassReader(Masses(wide.heads, [case.keys for case in self.cases], lengths), rests=plan.random > 0)
            reading = replace(passes, intervention=replace(wide, read=reader), layers=None)
            for batch in reading.batches(0):
                reading.run(batch, [])
            masses, queries = reader.done(rows), knockout.queries
            own = [text for text, case in enumerate(self.cases) if case.own]
            nulls = {
                "permuted": tuple(permuted_null(cut, queries, masses, plan.random, plan.seed, own) for cut in sets),
                "heads": tuple(heads_null(cut, self.alike(cut), queries, masses, plan.random) for cut in sets),
            }
            # Cuts and draws that take no weight from any text are not run.
            every |= {cut.identity: cut for kind in KINDS for null in nulls[kind] for cut in null.cuts}
            taken = [cut for cut in every.values() if cut.moves or (masses.by_text(cut) > 0).any()]
            passes = replace(passes, intervention=replace(knockout, heads=heads_by_layer(taken)))
            run = effects_by_set(passes, taken, parts, advance, copy)
        # A text has no effect where no row sees a key, and exactly none where their weight is exactly 0.
        effects = {name: run.by_set.get(name, np.zeros(count)) for name in every}
        for name, cut in every.items():
            if cut.heads and not cut.moves:
                mass_S = masses.by_text(cut)
                effects[name] = np.where(np.isnan(mass_S), np.nan, np.where(mass_S == 0, 0.0, effects[name]))
        if all(np.isnan(effects[cut.identity]).all() for cut in sets):
            why = "no query sees any of the keys in the heads that were chosen"
            raise InputError(why, "choose other keys or heads")
        emptied = sorted({head for cut in sets for head in masses.left_empty(cut)})
        # Why there is no null, in some text or all, and of how many cuts.
        without = {kind: Counter(sorted(why for null in nulls[kind] for why in set(null.why))) for kind in KINDS}
        measured = {
            "intact": float(run.intact_S.mean()),
            **run.facts,
            "rounding": max(AGREES[self.model.dtype], run.spread or 0.0),
            "without_null": {kind: dict(counts) for kind, counts in without.items()},
            "emptied": [head_name(*head) for head in emptied],
            **run.unshared,
        }
        cuts = tuple(self.asked)
        return KnockoutResult(tuple(self.cases), cuts, nulls, masses, effects, run.intact_S, facts | measured)

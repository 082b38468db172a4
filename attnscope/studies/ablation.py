"""What sets of heads cost a task: each head alone, all together, and random sets of the same shape to compare with.

    task = copy(loaded)                     # or texts(loaded, [...]), targets(loaded, Path("tasks.jsonl"))
    sets = HeadSets.of(sets_of_roles, loaded.geometry)
    record = AblationStudy(loaded, task, sets).run(Path("runs/ablate"))
    record.effect(sets.named[0])            # (S,) over intact, as nats per token

First the sets, the record and the study. Then the tasks: token sequences, and the rows whose next-token loss counts.

Last the direct effects: what each head itself writes towards the right token, read in one intact pass. A head's output
goes through its part of the output projection into the residual stream, and from there through the final norm to the
logits (Elhage et al. 2021; Wang et al. 2022, arXiv 2211.00593). The scales of norms, and gates between heads and
projection, are frozen as they were.

    direct_means(passes).values[3, 0]                   # logits
    direct(passes, path_to_logits(loaded, ids))          # (S, N), heads by layer

Shapes: S sequence, K set, B text, T token, H head, N head of all layers, V width of v, E model width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from attnscope.errors import InputError
from attnscope.hooks.engines import UNCHECKED
from attnscope.hooks.listen import listen
from attnscope.hooks.projections import ProjectionInputs, frozen_scales, projection
from attnscope.inputs.prompt import Prompt
from attnscope.interventions.base import LOSS, Intervention, Measure, Replacement
from attnscope.interventions.passes import Advance, Passes, prepared
from attnscope.interventions.spec import HeadSet, Task
from attnscope.model.geometry import Geometry
from attnscope.model.selection import GATED_AFTER, LINEAR, StackLayer, everything, pairs
from attnscope.observe.atlas import columns_of
from attnscope.observe.logit_path import LogitPath, path_to_logits
from attnscope.studies.ablation_search import CONTROLS, DrawnFrom, controls_of, parts, records_of, whole_groups
from attnscope.studies.intervals import FEWEST
from attnscope.studies.probes import SEQUENCES, begins, drafts, natural_prompts, token_pool
from attnscope.studies.statistics import beside_random, effect_columns
from attnscope.studies.study import HALF, Cost, Study, cost_of_passes, effects_by_set, learning_cost, task_facts
from attnscope.studies.study_folder import Parts, StudyRecord
from attnscope.utils.display import head_name
from attnscope.utils.files import check_schema, check_types, damaged, read_json
from attnscope.utils.tables import as_table, integers, words

if TYPE_CHECKING:
    from attnscope.hooks.calls import AttentionCall
    from attnscope.model.loaded import LoadedModel
    from attnscope.model.selection import HeadIndex

NAME, TABLE = "ablation.json", "ablation.parquet"
STORED = pa.schema(  # what a picture shows
    {
        **dict.fromkeys(("set", "condition", "heads"), pa.string()),
        **dict.fromkeys(("direct", "effect", "low_all", "high_all", "random_low", "random_high"), pa.float64()),
    }
)
FACTS = {
    "task": {"name": str, "sequences": int},
    "intact": (int, float),
    "replacement": str,
    "measure": {"unit": str},
    "model": {"name": str},
}
AGAIN = "make one: attnscope ablate MODEL --out DIR"
COPY = HeadSet("intact copy", ())


@dataclass(frozen=True)
class HeadSets:
    """Sets by name, what of each goes alone, and the random sets that each is compared with, at most so many.

    controls: the heads that random sets are drawn from.
    """

    named: tuple[HeadSet, ...]
    alone: Mapping[str, Sequence[HeadSet]]
    random: Mapping[str, Sequence[HeadSet]]
    most: int = CONTROLS
    seed: int = 0
    controls: DrawnFrom = "unnamed"

    @classmethod
    def of(
        cls,
        named: Sequence[HeadSet],
        geometry: Geometry,
        *,
        by_kv: bool = False,
        seed: int = 0,
        random: int = CONTROLS,
        controls: DrawnFrom = "unnamed",
    ) -> HeadSets:
        """The sets, cut to whole kv groups with by_kv, with up to so many random ones each."""
        whole = tuple(whole_groups(subset, geometry) if by_kv else subset for subset in named)
        left_out = whole if controls == "unnamed" else ()
        return cls(
            whole,
            {one.name: parts(one, geometry, by_kv) for one in whole},
            {one.name: controls_of(one, left_out, geometry, by_kv=by_kv, seed=seed, count=random) for one in whole},
            random,
            seed,
            controls,
        )

    @property
    def sets(self) -> list[HeadSet]:
        """All of them, none twice."""
        return list({one.heads: one for one in chain(self.named, *self.alone.values(), *self.random.values())}.values())


@dataclass(frozen=True, repr=False)
class Ablation(StudyRecord):
    """What was measured of the intact model (S,), every set's effects (S,) by its heads, and facts."""

    stem = "ablation"

    asked: HeadSets
    intact_S: np.ndarray
    effects: Mapping[tuple[HeadIndex, ...], np.ndarray]
    facts: Mapping[str, Any]
    direct: Mapping[tuple[int, int], float] | None = None

    @property
    def line(self) -> str:
        """What was measured, and the costliest set."""
        worst = max(self.asked.named, key=lambda one: float(self.effect(one).mean()))
        task = f"{self.facts['task']['name']}, {len(self.intact_S)} sequences"
        costliest = f"costliest {worst.name}, {float(self.effect(worst).mean()):+.3f}"
        return f"{self.facts['model']['name']}, {task}: {len(self.asked.named)} sets; {costliest}"

    @cached_property
    def tested(self) -> list[tuple[HeadIndex, ...]]:
        """The heads of the sets that were asked for, together and alone, each once."""
        return list(dict.fromkeys(subset.heads for subset in chain(self.asked.named, *self.asked.alone.values())))

    @cached_property
    def statistics(self) -> Mapping[str, np.ndarray]:
        """Of each of `tested` the columns of `effect_columns`, NaN for null."""
        return effect_columns(np.stack([self.effects[heads] for heads in self.tested], 1))

    @property
    def has_intervals(self) -> bool:
        """Whether there are as many sequences as intervals need."""
        return len(self.intact_S) >= FEWEST

    def effect(self, subset: HeadSet) -> np.ndarray:
        """(S,): how much worse the measure is without a set, as nats per token."""
        return self.effects[subset.heads]

    def table(self) -> pa.Table:
        """A row per named set, head alone and random set, the rows of a set one after the other; NaN is null.
        docs/schemas.md says what the columns are."""
        rows = [("together", subset.name, subset) for subset in self.asked.named]
        rows += [("alone", name, subset) for name, sets in self.asked.alone.items() for subset in sets]
        tested = len(rows)
        rows += [("random", name, subset) for name, sets in self.asked.random.items() for subset in sets]
        # Random sets have a mean alone: intervals hold for the tested at once, and would be wider with these.
        column = {heads: place for place, heads in enumerate(self.tested)}
        places, absent_K = [column[subset.heads] for _, _, subset in rows[:tested]], np.full(len(rows) - tested, np.nan)
        columns = {name: np.concatenate([of[places], absent_K]) for name, of in self.statistics.items()}
        columns["effect"][tested:] = [self.effect(subset).mean() for _, _, subset in rows[tested:]]
        columns["n"] = np.append(self.statistics["n"][places], np.full(len(absent_K), len(self.intact_S), np.int32))
        known = self.direct or {}  # of heads, and of what goes alone
        direct = [
            sum(known.get(head, np.nan) for head in subset.heads) if known and condition == "alone" else np.nan
            for condition, _, subset in rows
        ]
        # Each named set is compared with its own random sets.
        beside_3K = np.full((3, len(rows)), np.nan)
        for row, subset in enumerate(self.asked.named):
            random_D = np.array([self.effect(other).mean() for other in self.asked.random[subset.name]])
            beside_3K[:, row] = beside_random(self.effect(subset).mean(), random_D)
        beside = dict(zip(("random_low", "random_high", "p_random"), beside_3K, strict=True))
        drawn = [len(self.asked.random[name]) if condition == "together" else None for condition, name, _ in rows]
        sets = list(dict.fromkeys(name for _, name, _ in rows))
        order = sorted(range(len(rows)), key=lambda row: sets.index(rows[row][1]))
        whole = as_table(
            {
                "set": words([name for _, name, _ in rows]).dictionary_encode(),
                "condition": words([condition for condition, _, _ in rows]).dictionary_encode(),
                "heads": words([str(subset) for _, _, subset in rows]),
                "direct": np.array(direct),
                **columns,
                **beside,
                "n_random": integers(drawn, np.int32),
            }
        )
        return whole.take(integers(order))


@dataclass(frozen=True)
class AblationStudy(Study[Ablation]):
    """What a task costs without each of some sets of heads; direct: the heads' direct effects, where they are known."""

    kind, readings, schema = "ablation", "ablation", "ablation/3"

    model: LoadedModel
    task: Task
    asked: HeadSets
    replacement: Replacement | Intervention = "mean"
    metric: Measure = LOSS
    direct: Direct | None = None

    @property
    def stage(self) -> str:
        return f"{len(self.asked.sets)} sets"

    @property
    def facts(self) -> dict[str, Any]:
        asked = self.asked
        return {
            **task_facts(self.model, self.task, self.replacement, self.metric),
            "sets": {subset.name: [head_name(*head) for head in subset.heads] for subset in asked.named},
            "seed": asked.seed,
            "controls": asked.controls,
            "random_asked": asked.most,
            "random_sets": {name: len(sets) for name, sets in asked.random.items()},
        }

    def cost(self, of_all: Callable[[int], int] = lambda count: count) -> Cost:
        """As of any study; of_all: what all sequences take, where those of the task are but some of them."""
        passes, sets = self.planned, self.asked.sets
        what = f"{len(sets)} sets on {of_all(len(self.task))} sequences of {self.task.name}:"
        return cost_of_passes(what, passes, sets, before=learning_cost(passes), of_all=of_all)

    @property
    def planned(self) -> Passes:
        """Passes that read nothing yet."""
        return Passes.planned(self.model, self.task, self.replacement)

    def measure(self, facts: dict[str, Any], parts: Parts, advance: Advance) -> Ablation:
        sets, direct = self.asked.sets, self.direct or Direct({})
        every = [*[COPY] * (self.model.dtype in HALF), *sets]
        passes = prepared(self.model, self.task, every, self.replacement, measure=self.metric, advance=advance)
        run = effects_by_set(passes, sets, parts, advance, COPY)
        facts |= {"intact": float(run.intact_S.mean()), "spread": run.spread, **run.unshared}
        facts |= {"direct": direct.note or None}
        effects = {subset.heads: run.by_set[subset.identity] for subset in every}
        return Ablation(self.asked, run.intact_S, effects, facts, direct.values or None)


def load_ablation(folder: Path) -> Ablation:
    """What the tables of a finished ablation say of its sets, one number for all sequences.

    Raises InputError for a folder with damaged or missing tables.
    """
    with damaged(f"{folder} holds no whole ablation", AGAIN):
        facts = read_json(folder / NAME)
        check_schema(facts, AblationStudy.schema, folder, "ablate again", InputError)
        check_types(facts, FACTS)
        if facts["replacement"] not in get_args(Replacement):
            raise ValueError(f"{facts['replacement']} replaces no head")
        columns = columns_of(folder / TABLE, STORED, lists="heads")
        heads = [_heads_of(spelled) for spelled in columns["heads"]]
        effects = {of: np.array([effect], np.float64) for of, effect in zip(heads, columns["effect"], strict=True)}
        rows = zip(heads, columns["set"], columns["condition"], strict=True)
        named = [HeadSet(name, of) for of, name, condition in rows if condition == "together"]
        direct = zip(heads, columns.get("direct") or [None] * len(heads), strict=True)
        alone = {of[0]: float(value) for of, value in direct if len(of) == 1 and value is not None}
        known = {name: facts[name] for name in FACTS}
        return Ablation(HeadSets(tuple(named), {}, {}), np.empty(0), effects, known, alone or None)


def _heads_of(spelled: str) -> tuple[HeadIndex, ...]:
    """`L3H0 linear L3H1` as heads. Raises ValueError for what is none."""
    if not re.fullmatch(r"\s*((linear )?L\d{1,6}H\d{1,6}(\s+|$))+", spelled, re.ASCII):
        raise ValueError(f"{spelled!r} are no heads")
    heads = re.findall(r"(linear )?L(\d+)H(\d+)", spelled, re.ASCII)
    return tuple((StackLayer(layer, LINEAR) if linear else int(layer), int(head)) for linear, layer, head in heads)


PERIOD = 50
RECORD = 'write {"text": "...", "targets": [[12, 16]]}'


def copy(loaded: LoadedModel, *, sequences: int = SEQUENCES, seed: int = 0) -> Task:
    """The probes' repeated tokens r r, as long as PERIOD if the model reads that; of r's second copy all but its first
    token count, which nothing predicts. Drawn apart from the probes, whose sequences chose the heads of each role."""
    begin = begins(loaded)
    trials = drafts(token_pool(loaded), begin, loaded.geometry.max_positions, sequences)
    repeated = {draft.period: draft for draft in trials if draft.period is not None}
    if not repeated:
        raise InputError(f"{loaded.name} reads too few tokens to repeat any", "give it a task of your own with {on}")
    period = min(repeated, key=lambda length: abs(length - PERIOD))
    ids_ST = repeated[period]._replace(seeded_as=f"copy p{period}").drawn(seed).arms["repeated"].ids_ST
    rows = tuple(range(len(begin) + period, len(begin) + 2 * period - 1))
    return Task("copy", tuple(map(tuple, ids_ST.tolist())), (rows,) * len(ids_ST), {"period": period, "seed": seed})


def texts(loaded: LoadedModel, given: Sequence[str], most: int | None = None) -> Task:
    """Natural texts, the loss of every token but the first; most: tokens that are read of each, None for all the model
    reads. Raises InputError where no text has two tokens."""
    prompts = [prompt for prompt in natural_prompts(loaded, given, most) if len(prompt) > 1]
    if not prompts:
        raise InputError("no text has two tokens", "give texts with at least two words")
    rows = tuple(tuple(range(len(prompt) - 1)) for prompt in prompts)
    return Task("texts", tuple(prompt.ids for prompt in prompts), rows, {"texts": len(prompts)})


def targets(loaded: LoadedModel, path: Path, most: int | None = None) -> Task:
    """The texts of a JSONL file, {"text": "...", "targets": [[12, 16]]} per line: tokens that hold a character of a
    range count; most: lines that are read. Raises InputError, with the line's number, for a line that is no such record
    or names no token."""
    texts, targets = dict[str, str](), []
    for where, record in islice(records_of(path, RECORD), most):
        text, ranges = (record.get("text"), record.get("targets")) if isinstance(record, dict) else (None, None)
        if not isinstance(text, str) or not text.strip() or not isinstance(ranges, list) or not ranges:
            raise InputError(f"{where} is not a text with targets", RECORD)
        for ends in ranges:
            whole = isinstance(ends, list) and len(ends) == 2 and all(type(end) is int for end in ends)
            if not whole or not 0 <= ends[0] < ends[1] <= len(text):
                raise InputError(f"{where}: {ends!r} is not a range of its {len(text)} characters", RECORD)
        texts[where] = text
        targets.append(ranges)
    # Every line is a record before the first is tokenised.
    prompts = natural_prompts(loaded, list(texts.values()), None)
    rows = [_named(prompt, ranges) for prompt, ranges in zip(prompts, targets, strict=True)]
    without = next((where for where, named in zip(texts, rows, strict=True) if not named), None)
    if without is not None:
        raise InputError(f"{without}: its targets name no token that others come before", RECORD)
    return Task(path.name, tuple(prompt.ids for prompt in prompts), tuple(rows), {"file": str(path)})


def _named(prompt: Prompt, ranges: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The rows before the tokens that hold a character of a range."""
    return tuple(
        token - 1
        for token, (first, last) in enumerate(prompt.characters)
        if token and any(first < stop and start < last for start, stop in ranges)
    )


TRIED = 8  # tokens on which the way is verified


@dataclass(frozen=True)
class Direct:
    """Every head's mean direct effect, and what to say of them; none, and why."""

    values: Mapping[HeadIndex, float]
    note: str = ""


def direct_means(passes: Passes) -> Direct:
    """The direct effects of all heads on a task."""
    heads = pairs(everything(passes.loaded.geometry.heads_by_layer))
    if not heads:
        return Direct({}, f"linear heads have none: {GATED_AFTER}")
    way = path_to_logits(passes.loaded, passes.task.ids[0][:TRIED])
    if isinstance(way, str):
        return Direct({}, way)
    return Direct(dict(zip(heads, direct(passes, way).mean(0).tolist(), strict=True)), way.note)


def direct(passes: Passes, way: LogitPath) -> np.ndarray:
    """(S, N) float64: what each head adds to the right tokens' centred logits, the mean over each sequence's rows."""
    effects: dict[int, np.ndarray] = {}
    for batch in passes.batches(0):
        ids_BT = passes.ids(batch)
        right_BT = torch.full_like(ids_BT, -1)
        for number, sequence in enumerate(batch):
            row_R = torch.tensor(passes.task.rows[sequence], device=ids_BT.device)
            right_BT[number, row_R] = ids_BT[number, row_R + 1]
        effects |= dict(zip(batch, direct_effects(passes.loaded, way, ids_BT, right_BT).numpy(), strict=True))
    return np.stack([effects[sequence] for sequence in range(len(passes.task))])


def direct_effects(loaded: LoadedModel, way: LogitPath, ids_BT: Tensor, right_BT: Tensor) -> Tensor:
    """(B, N) float64: what each head adds to the centred logit of the right token, the mean over a text's rows.

    right_BT: the token that is right after each position, -1 where a row is not asked. Centred: over the vocabulary.
    """
    asked_BT = right_BT >= 0
    towards_BTE = way.towards(right_BT.clamp_min(0))
    inputs = ProjectionInputs({attention: way.out[attention] for attention in way.gated})
    effects: dict[nn.Module, Tensor] = {}  # by output projection, in the order of the layers

    def on_call(call: AttentionCall) -> None:
        assert call.output_BQHV is not None
        out = way.out[call.module]
        W_O_HVE = projection(out, call.P.heads, call.output_BQHV).float()
        direction_BTE = way.before(call.module, towards_BTE.to(W_O_HVE.device))
        pulled_BTHV = torch.einsum("bte,hve->bthv", direction_BTE, W_O_HVE)

        def keep(given: Tensor) -> None:
            effects[out] = (given.float().reshape(pulled_BTHV.shape) * pulled_BTHV).sum(-1).cpu()

        if call.module in way.gated:
            inputs.on_next(call.module, keep)
        else:
            keep(call.output_BQHV)

    with inputs.watched(), frozen_scales([way.norm, *way.after.values()]) as scales:
        listen(loaded.model, ids_BT, on_call, engine=UNCHECKED)
    for attention, norm in way.after.items():
        effects[way.out[attention]] *= scales[norm.module]
    effect_BTN = torch.cat(list(effects.values()), -1).double() * scales[way.norm.module] * way.factor
    return (effect_BTN * asked_BT.cpu()[..., None]).sum(1) / asked_BT.cpu().sum(1, keepdim=True)

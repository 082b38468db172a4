"""The scan of a model: every probe of every head, the roles that follow, and the atlas of both.

    atlas = ScanStudy(loaded, plan(loaded)).run(Path("runs/atlas"))    # where it was stopped it resumes
    atlas = load_atlas(Path("runs/atlas"))
    atlas.roles[3, 0]           # ("induction", "sink")
    atlas.probes()              # ["induction p10", ...]

First the passes: read a trial, keep one number per sequence, head and measure, compare. Then what a head is called: a
set of roles, each by a lower bound that holds for all heads at once. Last the atlas, the plan of a scan and its study.

Shapes: S sequence, B sequence of a batch, T token, N head of all layers.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from attnscope.attention.linear import Shares
from attnscope.errors import ModelError
from attnscope.hooks.generation import check_causal
from attnscope.hooks.listen import listen
from attnscope.inputs.prompt import Prompt
from attnscope.interventions.passes import Advance, expected, mixes
from attnscope.metrics.metrics import Texts
from attnscope.model.selection import everything, is_linear, pairs
from attnscope.observe.atlas import COLUMNS, NAME, OFFSETS, SCHEMA, TABLE, HeadNames, damage, read_atlas, roles_by_head
from attnscope.observe.collectors import collect_layer
from attnscope.observe.engine_choice import choose
from attnscope.observe.request import LayerKey
from attnscope.studies.copying import RECALLED, CalledLayer, Copying, complete, copying_of, recalled, unable
from attnscope.studies.intervals import SHARE
from attnscope.studies.probes import (
    FROM_UNIFORM,
    NEAR,
    RECALL,
    SEQUENCES,
    Arm,
    Measure,
    Trial,
    batches,
    begins,
    drafts,
    token_pool,
    trials,
)
from attnscope.studies.statistics import Effects, largest_first, paired_where_shown
from attnscope.studies.study import Cost, Study
from attnscope.studies.study_folder import Column, Parts, StudyRecord, head_array, head_columns, heads_in, of_heads
from attnscope.utils.display import head_name
from attnscope.utils.files import save_json
from attnscope.utils.tables import as_table, save, words

if TYPE_CHECKING:
    from attnscope.hooks.calls import AttentionCall
    from attnscope.hooks.engines import Engine
    from attnscope.model.loaded import LoadedModel

BATCH_TOKENS = 4096
OfHeads = tuple[tuple[tuple[int, int], ...], Mapping[str, np.ndarray]]  # the heads, and every measure of a batch (B, N)
Keep = Callable[[str, range, Callable[[], OfHeads]], OfHeads]  # an arm, some of its sequences, and what reads them


@dataclass(frozen=True)
class Readings:
    """What a trial's passes gave: heads as (layer, head), and {measure: (S, N) float64, NaN where it cannot show}."""

    heads: tuple[tuple[int, int], ...]
    values: Mapping[Measure, np.ndarray]


@dataclass(frozen=True)
class Finding:
    """What one contrast shows of all heads: the probe, what it is compared with, and the effects."""

    probe: str
    against: str
    effects: Effects


def read_trial(
    loaded: LoadedModel,
    trial: Trial,
    advance: Callable[[int], object] = lambda tokens: None,
    keep: Keep = lambda arm, rows, read: read(),
) -> Readings:
    """Read a trial's sequences; advance: called with the tokens of every pass.

    keep: gives what a batch does, or what an earlier run kept of it.
    """
    values: dict[Measure, np.ndarray] = {}
    heads: tuple[tuple[int, int], ...] = ()
    for name, arm in trial.arms.items():
        parts: dict[str, list[np.ndarray]] = {ask: [] for ask in arm.asks}
        for rows, ids_BT in batches(arm.ids_ST, BATCH_TOKENS):
            heads, values_of = keep(name, rows, partial(_read, loaded, ids_BT, arm, advance))
            for ask, value_BN in values_of.items():
                parts[ask].append(value_BN)
        values |= {Measure(name, ask): np.concatenate(part) for ask, part in parts.items()}
    return Readings(heads, values)


def batches_of(trial: Trial) -> int:
    """How many batches a trial is read in."""
    return sum(1 for arm in trial.arms.values() for _ in batches(arm.ids_ST, BATCH_TOKENS))


def findings_of(trial: Trial, readings: Readings, seed: int = 0) -> list[Finding]:
    """The trial's contrasts, each with its effects on every head."""
    values, findings = readings.values, []
    for contrast in trial.contrasts:
        score_SN = values[contrast.score]
        if contrast.null:
            null_SN = np.maximum.reduce([values[null] for null in contrast.null])
        else:
            # The mean of the other heads' scores.
            there_S1 = np.isfinite(score_SN).sum(1, keepdims=True)
            null_SN = (np.nansum(score_SN, 1, keepdims=True) - score_SN) / np.maximum(there_S1 - 1, 1)
        null = null_SN[0] if contrast.computed else null_SN
        effects = paired_where_shown(score_SN, null, seed=seed, within=SHARE)
        findings.append(Finding(contrast.probe, contrast.against, effects))
    return findings


def _read(loaded: LoadedModel, ids_BT: np.ndarray, arm: Arm, advance: Callable[[int], object]) -> OfHeads:
    """One batch of an arm, which the model completes first where the arm asks for that: the heads, and every measure,
    (B, N), of one forward pass."""
    if arm.completed:
        ids_BT = complete(loaded, ids_BT, arm.completed)
        advance(ids_BT.size - len(ids_BT))
    count, tokens = ids_BT.shape
    engine: Engine = choose(loaded, tokens, batch=count).engine  # by memory alone: sequences are short
    ids = torch.tensor(ids_BT, device=loaded.device)
    texts = Texts(ids, torch.full((count,), tokens, device=loaded.device))
    answers: dict[int, dict[str, torch.Tensor]] = {}
    # Copying is read of what a gate lets through, which a pass before this one tells.
    copying = [ask for ask in arm.asks.values() if isinstance(ask, Copying)]
    gated = copying[0].behind_gates(loaded, ids) if copying else {}

    def on_call(call: AttentionCall) -> None:
        if call.call > 0 or call.P.keys != tokens:
            return
        kv_heads = call.spec.kv_heads if call.spec else call.P.heads
        here, gate_BRC = texts.to(call.P.device), gated.get(call.module)
        key, P = LayerKey(call.layer, call.stack), call.P
        if is_linear(call.stack):  # a map with signs: |w| as a share of its row
            P, gate_BRC = Shares(P), None
        layer = CalledLayer(key, P, kv_heads, here, call=call, gated_BRC=gate_BRC)
        answers[call.index] = collect_layer(arm.asks, layer)

    how: dict[str, Any] = {"engine": engine, "computed": bool(copying), "mixers": mixes(loaded)}
    how["expected_layers"] = expected(loaded.geometry.changeable)
    listen(loaded.model, ids, on_call, windows=loaded.geometry.windows, **how)
    if not answers:
        raise ModelError(
            f"no head of {loaded.geometry.model_type} looks from the {tokens} tokens of a probe at the same",
            "choose another model",
        )
    advance(ids_BT.size)
    in_order = sorted(answers.items())  # of a layer with two stacks either may run first
    heads = [(layer, head) for layer, values in in_order for head in range(next(iter(values.values())).shape[1])]
    return tuple(heads), {name: np.concatenate([one[name].numpy() for _, one in in_order], 1) for name in arm.asks}


LEAST, COPIES, PERIODS = 0.3, 0.5, 2
OLSSON = "Olsson et al. 2022, arXiv 2209.11895"


@dataclass(frozen=True)
class Rule:
    """A role and its condition in words; bounds are those that hold for all heads at once.

    by: the probe, of several periods without the period, and what its lower bound is above.
    """

    role: str
    condition: str
    source: str = ""
    by: tuple[str, str] = ("", "")


RULES = (
    Rule(
        "induction",
        f"lower bound >= {LEAST} against other tokens and above 0 against shuffled ones, at {PERIODS} periods; "
        f"copying >= {COPIES}",
        OLSSON,
        ("induction", "other"),
    ),
    Rule(
        "prefix-matching",
        "as induction, without copying, or where that was not measured",
        OLSSON,
        ("induction", "other"),
    ),
    *(
        Rule(role, f"lower bound >= {LEAST} above the best other offset", by=(f"offset {steps}", "best other offset"))
        for steps, role in OFFSETS.items()
    ),
    Rule(
        "duplicate-token",
        f"lower bound >= {LEAST} and above 0, as induction, at {PERIODS} periods",
        "Wang et al. 2022, arXiv 2211.00593",
        ("duplicate-token", "other"),
    ),
    Rule(
        "sink",
        f"lower bound >= {LEAST} above uniform attention, key 0 of {64} tokens",
        "Gu et al. 2024, arXiv 2410.10781",
        ("sink", "uniform"),
    ),
    Rule(
        "long-range-copying",
        f"lower bound >= {LEAST} above a moved span, over runs with recall > {RECALLED}",
        "counted as by Wu et al. 2024, arXiv 2404.15574, on random tokens",
        ("long-range-copying", "moved span"),
    ),
)
NAMED_BY = {rule.role: rule.by for rule in RULES}
MARK = Rule("near_uniform", f"mean Jensen-Shannon divergence (JS) to uniform attention < {NEAR} bits; a mark, no role")


def near_uniform(divergence_SN: np.ndarray) -> dict[int, float]:
    """{head: its mean divergence} of the heads that the mark holds for."""
    mean_N = divergence_SN.mean(0)
    return {int(head): float(mean_N[head]) for head in np.flatnonzero(mean_N < NEAR)}


def roles_of(findings: Sequence[Finding], heads: int) -> list[tuple[str, ...]]:
    """Each head's roles, in the order of RULES; none where no rule holds."""
    low = {(one.probe, one.against): one.effects.low_all for one in findings}
    score = {one.probe: one.effects.score for one in findings}

    def bound(probe: str, against: str) -> np.ndarray:
        return np.nan_to_num(low.get((probe, against), np.full(heads, np.nan)), nan=-np.inf)

    def at_periods(probe: str) -> np.ndarray:
        names = {name for name, _ in low if name.startswith(f"{probe} p")}
        held = [(bound(name, "other") >= LEAST) & (bound(name, "shuffled") > 0) for name in names]
        return np.sum(held, axis=0) >= PERIODS if held else np.zeros(heads, bool)

    matches, copies = at_periods("induction"), np.nan_to_num(score.get("copying", np.zeros(heads))) >= COPIES
    holds = {rule.role: bound(*rule.by) >= LEAST for rule in RULES}
    # What is read at several periods has rules of its own.
    holds |= {"induction": matches & copies, "prefix-matching": matches & ~copies}
    holds["duplicate-token"] = at_periods("duplicate-token")
    return [tuple(rule.role for rule in RULES if holds[rule.role][head]) for head in range(heads)]


def named_by(role: str, findings: Sequence[Finding], place: int) -> Finding:
    """The contrast that named a head's role; of several periods the one with the bound that decided.

    place: the head's, in the order of the findings' effects.
    """
    probe, against = NAMED_BY[role]
    contrasts = [one for one in findings if one.against == against and one.probe.partition(" p")[0] == probe]
    return sorted(contrasts, key=lambda one: -float(one.effects.low_all[place]))[:PERIODS][-1]


@dataclass(frozen=True)
class Atlas(HeadNames, StudyRecord):
    """What the probes show of every head: roles by head, facts, findings in order."""

    stem = "atlas"

    findings: Sequence[Finding]

    @property
    def line(self) -> str:
        """How many heads have each role."""
        counts = {role: sum(map(len, heads.values())) for role, heads in self.by_role().items()}
        listed = ", ".join(f"{count} {role}" for role, count in counts.items() if count) or "no role"
        return f"{len(self.heads)} heads of {self.facts['model']['name']}: {listed}"

    def table(self, places: Sequence[int] | None = None, probe: str | None = None) -> pa.Table:
        """A row per contrast and head: layer, head, probe, against, then the columns of `Effects`; NaN is null.

        places: of some of `heads`, in another order. probe: its contrasts alone.
        """
        places = list(range(len(self.heads)) if places is None else places)
        findings = [finding for finding in self.findings if probe in (None, finding.probe)]
        columns = head_columns([self.heads[place] for _ in findings for place in places])
        for name in ("probe", "against"):
            columns[name] = words([getattr(one, name) for one in findings for _ in places]).dictionary_encode()
        for name in COLUMNS:
            values = np.concatenate([getattr(finding.effects, name)[places] for finding in findings])
            columns[name] = values.astype(np.int32 if name == "n" else np.float64)
        return as_table(columns)

    def order(self, probe: str | None = None) -> list[int]:
        """The places of the heads as they are listed: those with a role or a mark first, in the model's order.

        probe: those with a role first, and the largest effect on it first.
        """
        if probe is None:
            marked = self.facts.get("near_uniform", {})
            named = [bool(self.roles[head]) or head_name(*head) in marked for head in self.heads]
            places = list(range(len(self.heads)))
        else:
            named = [bool(self.roles[head]) for head in self.heads]
            places = largest_first(next(finding for finding in self.findings if finding.probe == probe).effects.effect)
        return sorted(places, key=lambda place: not named[place])

    def probes(self) -> list[str]:
        """The probes that were read, each once."""
        return list(dict.fromkeys(finding.probe for finding in self.findings))

    def rules(self) -> list[Rule]:
        """The conditions of the roles and the mark that any head has."""
        named = {role for roles in self.roles.values() for role in roles}
        return [rule for rule in RULES if rule.role in named] + [MARK] * bool(self.facts.get("near_uniform"))

    def save(self, folder: Path) -> None:
        """Write the table, and a file of roles, rules and facts."""
        save(self.table(), folder / TABLE)
        rules = {rule.role: rule.condition for rule in (*RULES, MARK)}
        save_json({**self.facts, "roles": roles_by_head(self.roles), "rules": rules}, folder / NAME)


def load_atlas(folder: Path) -> Atlas:
    """The atlas of a folder that a scan has filled. Raises InputError for another folder."""
    with damage(folder):
        names, columns = read_atlas(folder)
        count, findings = len(names.heads), []
        for start in range(0, len(columns["layer"]), count):
            part = {name: np.array(columns[name][start : start + count], np.float64) for name in COLUMNS}
            effects = Effects(**{**part, "n": np.array(columns["n"][start : start + count], np.int64)})
            findings.append(Finding(columns["probe"][start], columns["against"][start], effects))
        return Atlas(names.roles, names.facts, findings)


@dataclass(frozen=True)
class Plan:
    """What a scan will read: trials, and what tells this scan from another.

    takes: {trial: the tokens of all its sequences}, of which `trials` may hold but a few.
    """

    trials: Sequence[Trial]
    seed: int
    facts: Mapping[str, Any]
    takes: Mapping[str, int]

    @property
    def tokens(self) -> int:
        """Of all sequences of all trials."""
        return sum(self.takes[trial.name] for trial in self.trials)

    @property
    def probes(self) -> list[str]:
        """Each once."""
        return list(dict.fromkeys(contrast.probe for trial in self.trials for contrast in trial.contrasts))


def plan(
    loaded: LoadedModel,
    *,
    seed: int = 0,
    sequences: int = SEQUENCES,
    pool: Sequence[int] | None = None,
    drawn: int | None = None,
) -> Plan:
    """The trials that a model's vocabulary and positions allow; drawn: sequences of each that are drawn, where only the
    cost of all is wanted.

    Raises as `token_pool`, and MemoryLimitError for more sequences than there is room for.
    """
    check_causal(loaded, "a scan")
    loaded.check_heads("a scan tests heads")
    drawn_from, begin = token_pool(loaded, pool), begins(loaded)
    # Some tokens tell whether the model's heads can be asked for copying, and whether it completes texts.
    few = [*begin, *drawn_from[:3]]
    copying, why_not = copying_of(loaded, few), unable(loaded, few)
    asks, why = (None, copying) if isinstance(copying, str) else (copying, "")
    allowed, count = (drawn_from, begin, loaded.geometry.max_positions), sequences if drawn is None else drawn
    # What all sequences take is known before any is drawn.
    planned = trials(*allowed, seed=seed, count=count, copying=asks, completes=not why_not)
    takes = {draft.name: draft.tokens for draft in drafts(*allowed, sequences, completes=not why_not)}
    # The ids tell this scan from one of another seed, pool or tokenizer.
    missing = {"copying": why, "long-range-copying": why_not}
    ids = hashlib.sha256(b"".join(arm.ids_ST.tobytes() for trial in planned for arm in trial.arms.values()))
    facts = {
        "model": {"name": loaded.name, "revision": loaded.revision, "type": loaded.geometry.model_type},
        "dtype": loaded.dtype,
        "seed": seed,
        "sequences": sequences,
        "pool": {"tokens": len(drawn_from), "first": drawn_from[0], "last": drawn_from[-1]},
        "ids_sha256": ids.hexdigest(),
        "not_measured": {what: why for what, why in missing.items() if why},
    }
    return Plan(planned, seed, facts, takes)


def scan_seconds(loaded: LoadedModel, planned: Plan) -> float:
    """About how many seconds a token of a scan takes: of one batch of the longest trial, after a text to warm up."""
    trial = max(planned.trials, key=lambda one: one.tokens)
    name, arm = next(iter(trial.arms.items()))
    _, first_BT = next(batches(arm.ids_ST, BATCH_TOKENS))
    rows = min(planned.facts["sequences"], max(1, BATCH_TOKENS // first_BT.shape[1]))

    def read(count: int) -> float:
        one = arm._replace(ids_ST=np.resize(first_BT, (count, first_BT.shape[1])))
        start = time.perf_counter()
        read_trial(loaded, replace(trial, arms={name: one}))
        return (time.perf_counter() - start) / one.tokens

    read(1)
    return read(rows)


@dataclass(frozen=True)
class ScanStudy(Study[Atlas]):
    """What each head does in the trials of a plan. prompts: texts that are read after the probes."""

    kind, readings, schema, stage = "scan", "readings", SCHEMA, "reading probes"

    model: LoadedModel
    planned: Plan
    prompts: Sequence[Prompt] = ()

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self.planned.facts)

    def cost(self) -> Cost:
        layers, total = len(self.model.geometry.changeable), self.planned.tokens
        names = [trial.name for trial in self.planned.trials]
        lines, texts = [f"{len(names)} trials ({', '.join(names)}): {total} tokens x {layers} layers"], 0
        if self.prompts:
            texts, longest = sum(map(len, self.prompts)), max(map(len, self.prompts))
            cut = sum(prompt.removed > 0 for prompt in self.prompts)
            shortened = f" ({cut} cut to {longest})" if cut else ""
            lines.append(f"{len(self.prompts)} texts{shortened}: {texts} tokens x {layers} layers")
        total += texts
        return Cost("; ".join(lines), total, lambda: total * scan_seconds(self.model, self.planned))

    def measure(self, facts: dict[str, Any], parts: Parts, advance: Advance) -> Atlas:
        """Read every trial and compare. advance: called with the tokens of every pass, and of what an earlier run had
        read."""
        findings: list[Finding] = []
        heads: tuple[tuple[int, int], ...] = ()
        parts.expect(sum(map(batches_of, self.planned.trials)))
        for trial in self.planned.trials:
            readings = self.readings_of(trial, parts, advance)
            findings += findings_of(trial, readings, self.planned.seed)
            heads = readings.heads
            # A trial shows besides its contrasts which heads are near uniform attention, and how many needles were met.
            if FROM_UNIFORM in readings.values:
                marked = near_uniform(readings.values[FROM_UNIFORM])
                facts["near_uniform"] = {head_name(*heads[place]): value for place, value in marked.items()}
            if RECALL in readings.values:
                runs_ST = trial.arms[RECALL.arm].ids_ST
                facts["long_range_copying"] = recalled(runs_ST, readings.values[RECALL][:, 0])
        return Atlas(dict(zip(heads, roles_of(findings, len(heads)), strict=True)), facts, findings)

    def readings_of(self, trial: Trial, parts: Parts, advance: Advance) -> Readings:
        """The trial's readings, from the folder where an earlier run left them."""
        name = trial.name.replace(" ", "-")
        heads, fits = of_heads(pairs(everything(self.model.geometry.changeable)))
        names = {f"{arm}|{ask}": Measure(arm, ask) for arm, sequences in trial.arms.items() for ask in sequences.asks}
        shapes = {arm: Column((len(sequences.ids_ST), heads.shape[0])) for arm, sequences in trial.arms.items()}
        expected = {column: shapes[measure.arm] for column, measure in names.items()} | {"heads": heads}

        def keep(arm: str, rows: range, read: Callable[[], OfHeads]) -> OfHeads:
            columns_asked = dict.fromkeys(trial.arms[arm].asks, Column((len(rows), heads.shape[0])))

            def read_batch() -> Mapping[str, np.ndarray]:
                of, values = read()
                return {"heads": head_array(of), **values}

            some = trial.arms[arm]._replace(ids_ST=trial.arms[arm].ids_ST[rows.start : rows.stop])
            skipped, part = partial(advance, some.tokens), f"{name}.{arm.replace(' ', '-')}"
            columns = parts.batch(part, rows, {"heads": heads, **columns_asked}, read_batch, skipped=skipped)
            return heads_in(columns["heads"]), {ask: columns[ask] for ask in columns_asked}

        def read_all() -> Mapping[str, np.ndarray]:
            readings = read_trial(self.model, trial, advance, keep)
            return {"heads": head_array(readings.heads), **{of: readings.values[one] for of, one in names.items()}}

        skipped, batches = partial(advance, trial.tokens), batches_of(trial)
        columns = parts.kept(name, expected, read_all, fits=fits, skipped=skipped, batches=batches)
        return Readings(heads_in(columns["heads"]), {measure: columns[column] for column, measure in names.items()})

"""The scan of a model: its trials, read one by one into a folder, from which a stopped scan resumes.

atlas = ScanStudy(loaded, plan(loaded)).run(Path("runs/atlas"))
atlas.roles[3, 0]      # ("induction", "sink")
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.folder.parts import Column, Columns, Parts, of_heads
from attnscope.hooks.generation import check_causal
from attnscope.inputs.prompt import Prompt
from attnscope.interventions.passes import Advance
from attnscope.observe.atlas import SCHEMA
from attnscope.study.atlas.atlas import Atlas
from attnscope.study.atlas.copying import Copying, copying_of
from attnscope.study.atlas.findings import (
    BATCH_TOKENS,
    Finding,
    OfHeads,
    Readings,
    batches_of,
    findings_of,
    read_trial,
)
from attnscope.study.atlas.long_range_copying import recalled, unable
from attnscope.study.atlas.pool import begins, token_pool
from attnscope.study.atlas.probes import FROM_UNIFORM, RECALL, SEQUENCES, Measure, Trial, batches, drafts, trials
from attnscope.study.atlas.roles import near_uniform, roles_of
from attnscope.study.study import Cost, Study
from attnscope.utils.display import head_name

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel


@dataclass(frozen=True)
class Plan:
    """What a scan will read: trials, and what tells this scan from another."""

    trials: Sequence[Trial]
    seed: int
    facts: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """Of all sequences of all trials."""
        return sum(trial.tokens for trial in self.trials)

    @property
    def probes(self) -> list[str]:
        """Each once."""
        return list(dict.fromkeys(one.probe for trial in self.trials for one in trial.contrasts))


def plan(loaded: LoadedModel, *, seed: int = 0, sequences: int = SEQUENCES, pool: Sequence[int] | None = None) -> Plan:
    """The trials that a model's vocabulary and positions allow.

    Raises as `token_pool`, and MemoryLimitError for more sequences than there is room for.
    """
    drawn_from, begin, copying, why_not = _allowed(loaded, pool)
    made = trials(
        drawn_from,
        begin,
        loaded.geometry.max_positions,
        seed=seed,
        count=sequences,
        copying=copying if isinstance(copying, Copying) else None,
        completes=not why_not,
    )
    missing = {"copying": copying if isinstance(copying, str) else "", "long-range-copying": why_not}
    ids = hashlib.sha256(b"".join(arm.ids_ST.tobytes() for trial in made for arm in trial.arms.values()))
    facts = {
        "model": {"name": loaded.name, "revision": loaded.revision, "type": loaded.geometry.model_type},
        "dtype": loaded.dtype,
        "seed": seed,
        "sequences": sequences,
        "pool": {"tokens": len(drawn_from), "first": drawn_from[0], "last": drawn_from[-1]},
        "ids_sha256": ids.hexdigest(),
        "not_measured": {what: why for what, why in missing.items() if why},
    }
    return Plan(made, seed, facts)


def scan_cost(loaded: LoadedModel, sequences: int = SEQUENCES, pool: Sequence[int] | None = None) -> dict[str, int]:
    """{trial: the tokens that it takes}, before any sequence is drawn. Raises as `token_pool`."""
    drawn_from, begin, _, why_not = _allowed(loaded, pool)
    made = drafts(drawn_from, begin, loaded.geometry.max_positions, sequences, completes=not why_not)
    return {one.name: one.tokens for one in made}


def scan_seconds(loaded: LoadedModel, planned: Plan, sequences: int = SEQUENCES) -> float:
    """About how many seconds a token of a scan takes: of one batch of the longest trial, after a text to warm up.

    sequences: how many the scan will read, where fewer are planned.
    """
    trial = max(planned.trials, key=lambda one: one.tokens)
    name, arm = next(iter(trial.arms.items()))
    _, first_BT = next(batches(arm.ids_ST, BATCH_TOKENS))
    rows = min(sequences, max(1, BATCH_TOKENS // first_BT.shape[1]))

    def read(count: int) -> float:
        one = arm._replace(ids_ST=np.resize(first_BT, (count, first_BT.shape[1])))
        start = time.perf_counter()
        read_trial(loaded, replace(trial, arms={name: one}))
        return (time.perf_counter() - start) / one.tokens

    read(1)
    return read(rows)


def _allowed(
    loaded: LoadedModel, pool: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...], Copying | str, str]:
    """The tokens that probes draw from, the begin token, what copying takes or why not, and why not over a range."""
    check_causal(loaded, "a scan")
    drawn_from, begin = token_pool(loaded, pool), begins(loaded)
    few = [*begin, *drawn_from[:3]]
    return drawn_from, begin, copying_of(loaded, few), unable(loaded, few)


@dataclass(frozen=True)
class ScanStudy(Study[Atlas]):
    """What each head does in the trials of a plan. sequences, pool: what was asked for, of which `planned` may hold but
    a few sequences, where only the cost is wanted. prompts: texts that are read after the probes."""

    kind, readings, schema, stage = "scan", "readings", SCHEMA, "reading probes"

    model: LoadedModel
    planned: Plan
    sequences: int = SEQUENCES
    pool: Sequence[int] | None = None
    prompts: Sequence[Prompt] = ()

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self.planned.facts)

    def cost(self) -> Cost:
        whole = self.planned.facts["sequences"] == self.sequences
        tokens = {one.name: one.tokens for one in self.planned.trials}
        tokens = tokens if whole else scan_cost(self.model, self.sequences, self.pool)
        layers, total = len(self.model.geometry.attention_layers), sum(tokens.values())
        lines, texts = [f"{len(tokens)} trials ({', '.join(tokens)}): {total} tokens x {layers} layers"], 0
        if self.prompts:
            texts, longest = sum(map(len, self.prompts)), max(map(len, self.prompts))
            cut = sum(prompt.removed > 0 for prompt in self.prompts)
            said = f" ({cut} cut to {longest})" if cut else ""
            lines.append(f"{len(self.prompts)} texts{said}: {texts} tokens x {layers} layers")
        return Cost("; ".join(lines), total + texts, lambda: scan_seconds(self.model, self.planned, self.sequences))

    def measure(self, facts: dict[str, Any], parts: Parts, advance: Advance) -> Atlas:
        """Read every trial and compare. advance: called with the tokens of every pass, and of what an earlier run had
        read."""
        findings: list[Finding] = []
        heads: tuple[tuple[int, int], ...] = ()
        parts.expect(sum(map(batches_of, self.planned.trials)))
        for trial in self.planned.trials:
            readings = _readings(self.model, trial, parts, advance)
            findings += findings_of(trial, readings, self.planned.seed)
            facts |= _marks_of(trial, readings)
            heads = readings.heads
        return Atlas(dict(zip(heads, roles_of(findings, len(heads)), strict=True)), facts, findings)


def _marks_of(trial: Trial, readings: Readings) -> dict[str, Any]:
    """What a trial says besides its contrasts: which heads are near uniform attention, how many needles were found."""
    said: dict[str, Any] = {}
    if FROM_UNIFORM in readings.values:
        marked = near_uniform(readings.values[FROM_UNIFORM])
        said["near_uniform"] = {head_name(*readings.heads[place]): value for place, value in marked.items()}
    if RECALL in readings.values:
        said["long_range_copying"] = recalled(trial.arms[RECALL.arm].ids_ST, readings.values[RECALL][:, 0])
    return said


def _readings(loaded: LoadedModel, trial: Trial, parts: Parts, advance: Advance) -> Readings:
    """The trial's readings, from the folder where an earlier run left them."""
    name = trial.name.replace(" ", "-")
    heads, fits = of_heads(loaded.geometry)
    names = {f"{arm}|{name}": Measure(arm, name) for arm, one in trial.arms.items() for name in one.asks}
    sequences = {name: len(arm.ids_ST) for name, arm in trial.arms.items()}
    expected = {name: Column((sequences[one.arm], heads.shape[0])) for name, one in names.items()} | {"heads": heads}

    def keep(arm: str, rows: range, read: Callable[[], OfHeads]) -> OfHeads:
        asked = {one: Column((len(rows), heads.shape[0])) for one in trial.arms[arm].asks}

        def read_batch() -> Mapping[str, np.ndarray]:
            of, values = read()
            return {"heads": np.array(of), **values}

        skipped = partial(advance, trial.arms[arm].tokens_of(rows))
        part = f"{name}.{arm.replace(' ', '-')}"
        columns = parts.batch(part, rows, {"heads": heads, **asked}, read_batch, skipped=skipped)
        return _heads(columns), {one: columns[one] for one in asked}

    def read_all() -> Mapping[str, np.ndarray]:
        found = read_trial(loaded, trial, advance, keep)
        return {"heads": np.array(found.heads), **{name: found.values[one] for name, one in names.items()}}

    skipped, batches = partial(advance, trial.tokens), batches_of(trial)
    columns = parts.kept(name, expected, read_all, fits=fits, skipped=skipped, batches=batches)
    return Readings(_heads(columns), {one: columns[name] for name, one in names.items()})


def _heads(columns: Columns) -> tuple[tuple[int, int], ...]:
    return tuple((int(layer), int(head)) for layer, head in columns["heads"])

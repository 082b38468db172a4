"""transformers' own tests with attnscope's attention in the place of PyTorch's, and with a listener: see the .toml.

    python -m external.transformers OUT [--source FOLDER] [--families llama,bert,t5]

Each family's result is kept in the working folder, so that a run which was cut off resumes. FOLDER is an unpacked
source distribution of the installed transformers; without it pip downloads one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from attnscope.attention.kernels_cpu import CompiledAttention
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.attention.tiling import TiledAttention
from attnscope.hooks.engines import Engine, select_operator
from attnscope.hooks.listen import listening
from external.common import Report, parser, source_of
from external.transformers_suite import (
    ABSENT,
    Family,
    Found,
    distance,
    in_float64,
    last_states,
    own_attentions,
    run_cases,
    suite_in,
)
from external.transformers_verdict import Tally, cases_of, counted, explanation, further, not_allowed, reasons, unheard

KINDS = {
    "encoder": "albert bert deberta-v2 distilbert esm eurobert modernbert mpnet roberta",
    "encoder-decoder": "bart blenderbot led m2m_100 marian mbart pegasus t5 t5gemma",
    "hybrid": "bamba falcon_h1 granitemoehybrid jamba lfm2 nemotron_h olmo_hybrid qwen3_next recurrent_gemma zamba2",
    "decoder": "bloom cohere cohere2 deepseek_v3 exaone4 falcon gemma gemma2 gemma3_text glm4 gpt2 gpt_bigcode gpt_neox"
    " gpt_oss gptj granite llama mistral mixtral olmo2 olmo3 opt phi phi3 qwen2 qwen3 qwen3_moe smollm3 stablelm"
    " starcoder2",
}
LONG = {"llama", "mistral", "gemma3_text", "bert", "bart"}  # read at 512 tokens too
CONTROLLED = {"llama", "mistral", "qwen3", "bart", "bert", "jamba"}
TOKENS = 512  # a call of 7 texts and 4 heads is then large enough for the kernel that `fused` takes
WIDE = "`initializer_range=1.0`"
SDPA, OUTPUTS = "test_eager_matches_sdpa_inference", "test_attention_outputs"


def scale_off(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, scale=spec.scale * 1.01)


def mask_off(spec: AttentionSpec) -> AttentionSpec:
    """Every query sees the keys next to those that it should."""
    seen = spec.visible.rows(0, spec.visible.queries).roll(1, -1)
    return replace(spec, visible=Visibility(spec.visible.queries, spec.visible.keys, seen, device=spec.device))


def kv_heads_off(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, k_BGKD=spec.k_BGKD.flip(1), v_BGKV=spec.v_BGKV.flip(1))


MEASURED = ("tiles", "numba")
FAULTS: Mapping[str, tuple[str, Callable[[AttentionSpec], AttentionSpec]]] = {
    "scale": ("the scale off by 1 %", scale_off),
    "mask": ("the mask off by one key", mask_off),
    "kv": ("the kv heads in reverse order", kv_heads_off),
}
OPERATORS: Mapping[str, Callable[[AttentionSpec], TiledAttention]] = {
    "tiles": TiledAttention,
    "numba": CompiledAttention,
    "fused": select_operator,
    **{name: lambda spec, fault=fault: TiledAttention(fault(spec)) for name, (_, fault) in FAULTS.items()},
}


class Attending:
    """Runs the models of one test: under sdpa with an engine's attention in its place, or with PyTorch's own.

    Notes of each pair how many calls a listener heard and how many of them attnscope answered; with `exact` also how
    far the pair is from the same model in float64, eager first.
    """

    def __init__(self, engine: Engine | None, exact: bool) -> None:
        self.engine, self.exact = engine, exact
        self.eager: Any = None

    def __call__(self, model: Any, forward: Any, note: Any, *args: Any, **kwargs: Any) -> Any:
        if model.config._attn_implementation != "sdpa":
            self.eager = forward(model, *args, **kwargs)
            return self.eager
        calls = answered = 0
        if self.engine is None:
            output = forward(model, *args, **kwargs)
        else:
            with listening(model, lambda call: None, engine=self.engine) as report:
                output = forward(model, *args, **kwargs)
            calls, answered = len(report.calls), sum(check.kernel == "attnscope" for check in report.calls)
        off: list[float] = []
        if self.exact and self.eager is not None:
            true = in_float64(model, forward, kwargs)
            off = [distance(last_states(one), true, kwargs) for one in (self.eager, output)]
        note([calls, answered, *off])
        return output


def hearing(seen: Callable[[Any], Any], model: Any, forward: Any, note: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a model, and again with a listener; notes for each stack whether all that was heard equals what it returned.

    seen: makes of the weights of a call what is compared.
    """
    output, own = own_attentions(model, forward, *args, **kwargs)
    heard: dict[str, list[Any]] = {}
    with listening(model, lambda call: heard.setdefault(call.stack, []).append(seen(call.P.dense().clone()))) as report:
        report.tokens = kwargs["input_ids"].shape[1]  # as `listen` sets it: a family may pad them itself
        forward(model, *args, **kwargs)
    for stack, given in own.items():
        found = heard.get(stack, []) if stack else [one for calls in heard.values() for one in calls]
        note(len(given) == len(found) and all(map(torch.equal, given, found)))
    return output


def plain(model: Any, forward: Any, note: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(model, *args, **kwargs)


class Kept:
    """Results by what was run, one line each in a file, so that nothing is run twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.found = {key: Found(**found) for key, found in map(json.loads, lines)}

    def of(self, key: str, run: Callable[[], Found]) -> Found:
        if key not in self.found:
            print(key, file=sys.stderr, flush=True)
            start = time.monotonic()
            self.found[key] = run()
            self.found[key].seconds = time.monotonic() - start
            with self.path.open("a") as file:
                file.write(json.dumps([key, self.found[key].as_json()]) + "\n")
        return self.found[key]


class Runs:
    """What was run on a family, from the kept results or now."""

    def __init__(self, suite: Any, kept: Kept) -> None:
        self.suite, self.kept = suite, kept

    def sdpa(self, family: Family, operator: str) -> Found:
        """Eager against sdpa, with an operator in its place; `torch`: PyTorch's own."""
        engine = None if operator == "torch" else Engine(operator, OPERATORS[operator], output="attnscope")
        key = f"{family.name} {'wide' if family.wide else 'default'} {family.tokens} {operator}"
        return self.kept.of(key, lambda: run_cases(self.suite, family, SDPA, Attending(engine, family.wide)))

    def outputs(self, family: Family, how: str) -> Found:
        """The attentions that a family returns: as it is, `heard` by a listener, or heard with heads in `reverse`."""
        seen = {"heard": lambda weights: weights, "reverse": lambda weights: weights.flip(1)}
        calling = plain if how == "own" else partial(hearing, seen[how])
        return self.kept.of(f"{family.name} {how}", lambda: run_cases(self.suite, family, OUTPUTS, calling))


def families(names: Iterable[str]) -> Iterator[Family]:
    """Every family, or those that are named."""
    wanted = set(names)
    for kind, members in KINDS.items():
        yield from (Family(name, kind) for name in members.split() if not wanted or name in wanted)


def outside(runs: Runs, family: Family) -> str:
    """Why the sdpa test says nothing of a family; empty where it does."""
    why = not_allowed(runs.sdpa(family, "torch"))
    if not why and unheard(runs.sdpa(family, "tiles")):
        why = "its attention does not call transformers' interface, where attnscope could take its place"
    return why


def judge_sdpa(runs: Runs, chosen: Sequence[Family], report: Report) -> None:
    """Eager against sdpa with attnscope in its place, at both weights; at 512 tokens the kernel that `fused` takes."""
    asked = [(wide, operator, 7, chosen) for wide in (False, True) for operator in MEASURED]
    asked += [(wide, "fused", TOKENS, [one for one in chosen if one.name in LONG]) for wide in (False, True)]
    for wide, operator, tokens, members in asked:
        weights = WIDE if wide else "default weights"
        what = f"eager against sdpa, {operator}, {weights}, {tokens} tokens, {len(members)} families"
        with report.check(what) as check:
            tally = Tally(check)
            for family in members:
                one = replace(family, wide=wide, tokens=tokens)
                torch_too = runs.sdpa(one, "torch") if tokens == family.tokens else None
                tally.add(family.name, runs.sdpa(one, operator), torch_too)
            tally.close()
        check.seconds = round(tally.seconds, 1)


def judge_outputs(runs: Runs, chosen: Sequence[Family], report: Report) -> dict[str, str]:
    """What a listener hears against the attentions returned, bit for bit; gives whom the test leaves out, and why."""
    own = {family: runs.outputs(family, "own") for family in chosen}
    out = {one.name: next(iter((found.failed | found.skipped).values()), "") for one, found in own.items()}
    allowed = [family for family in chosen if not out[family.name]]
    with report.check(f"every call heard equals the attentions returned, {len(allowed)} families") as check:
        for family in allowed:
            found = runs.outputs(family, "heard")
            noted = [one for case in found.heard.values() for one in case]
            check.hold(bool(noted) and all(noted) and not found.failed, f"{family.name}: {found.failed or noted}")
    check.seconds = round(sum(runs.outputs(family, "heard").seconds for family in allowed), 1)
    with report.control("every call heard with its heads in reverse order") as control:
        for family in [one for one in allowed if one.name in CONTROLLED]:
            control.hold(all(one for case in runs.outputs(family, "reverse").heard.values() for one in case))
    return {name: f"`{OUTPUTS}`, which fails without attnscope too: {why}" for name, why in out.items() if why}


def judge_faults(runs: Runs, chosen: Sequence[Family], report: Report) -> None:
    """The same cases with a planted fault; one that the measured rounding would explain counts as passed."""
    members = [replace(family, wide=True) for family in chosen if family.name in CONTROLLED]
    for fault, (what, _) in FAULTS.items():
        with report.control(f"{what}, tiles, {WIDE}, {len(members)} families") as control:
            every = [runs.sdpa(family, fault) for family in members]
            for found in every:
                for case in cases_of(found):
                    control.hold(case not in found.failed or bool(explanation(found, case)))
        control.seconds = round(sum(found.seconds for found in every), 1)


def describe(runs: Runs, allowed: Sequence[Family], chosen: Sequence[Family], report: Report) -> None:
    """Write down which families were read, and how far from float64 each operator is, in times of eager attention."""
    wide = [replace(family, wide=True) for family in allowed]
    most = {name: max(max(further(runs.sdpa(one, name)), default=0.0) for one in wide) for name in ("torch", *MEASURED)}
    faulty = [runs.sdpa(one, "scale") for one in wide if one.name in CONTROLLED]
    least = min((least for found in faulty for least in further(found, "fp32")), default=0.0)
    figures = ", ".join(f"{'PyTorch' if name == 'torch' else name} {times:.1f}" for name, times in most.items())
    named = ", ".join(f"{family.name}{'' if family in allowed else ' (listener alone)'}" for family in chosen)
    report.notes += [
        f"{counted(family.kind for family in chosen)}: {named}",
        f"how far from float64 with {WIDE}, at most so many times as eager attention: {figures};"
        f" with the scale off by 1 %, in float32, at least {least:.1f}",
        "the columns of led's encoder, which are relative to the query, are brought to the positions of the keys first",
    ]


def main() -> None:
    made = parser()
    made.add_argument("--families", default="", help="names with commas between; all without")
    asked = made.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = asked.source or source_of(f"transformers=={transformers.__version__}", Path("source"))
    runs, report = Runs(suite_in(source), Kept(Path("kept.jsonl"))), Report(("transformers", "torch", "numba"))
    chosen = list(families(filter(None, asked.families.split(","))))
    out = {family.name: why for family in chosen if (why := outside(runs, family))}
    allowed = [family for family in chosen if family.name not in out]
    judge_sdpa(runs, allowed, report)
    judge_faults(runs, allowed, report)
    describe(runs, allowed, chosen, report)
    report.not_had += [f"eager against sdpa: {line}" for line in reasons(out)]
    report.not_had += reasons(judge_outputs(runs, chosen, report))
    absent = " and ".join(f"`{one}`" for one in ABSENT.values())
    report.not_had.append(f"{absent}: not in the source distribution; these tests use neither")
    report.write(asked.out)


if __name__ == "__main__":
    main()

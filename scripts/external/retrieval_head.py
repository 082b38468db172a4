"""Retrieval_Head's own code counts the needles of attnscope's long-range-copying probe, bit for bit the same.

Its file cannot be imported whole, since it loads models of an old transformers. The methods that count are compiled out
of it as they are.

Shapes: B text, T token, V value of the needle, N head of all layers.
"""

from __future__ import annotations

import ast
import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rouge_score import rouge_scorer
from torch import Tensor
from transformers import AutoModelForCausalLM

import attnscope
from attnscope.studies.atlas import BATCH_TOKENS, findings_of, plan, read_trial
from attnscope.studies.copying import VALUES, complete
from attnscope.studies.probes import RECALL, Measure, Trial, batches
from external.common import Check, Report, arguments
from external.models import demo_folder

FILE, CLASS = "retrieval_head_detection.py", "LLMNeedleHaystackTester"
METHODS = ("find_needle_idx", "retrieval_calculate", "retrieval_head_accumulate")
FOUND = 50  # percent of the needle's words above which their loop counts a run
SEEDS = (0, 1, 2)
COPIED = Measure("needle", "copied")
Step = tuple[Sequence[Tensor], Tensor]  # every layer's attention (1, H, Q, K), and the token that was made


@dataclass(frozen=True)
class Run:
    """One needle: the prompt, where its values stand, what the model made, and each step of decoding."""

    prompt_T: Tensor
    start: int
    made_V: Tensor
    steps: Sequence[Step]


def main() -> None:
    """Count every run by both and write the result."""
    asked = arguments()
    code = (asked.source / FILE).read_text("utf-8")
    report = Report(("torch", "transformers", "rouge-score"))
    report.version[FILE] = f"sha256 {hashlib.sha256(code.encode()).hexdigest()[:12]}"
    loaded = attnscope.load("demo")
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), attn_implementation="eager", dtype=torch.float32).eval()
    rule, trials = compiled(code), [trial_of(loaded, seed) for seed in SEEDS]
    readings = [read_trial(loaded, trial) for trial in trials]
    runs = [list(runs_of(loaded, model, trial, rows_of_one_pass)) for trial in trials]
    judged = list(zip(runs, readings, strict=True))

    with report.check("the share of steps that every head copies in every run, from the rows of one pass") as check:
        for ours, found in judged:
            compare(check, rule, ours, found)
    with report.check("the same, decoded step by step with a cache, as their loop decodes") as check:
        for trial, found in zip(trials, readings, strict=True):
            compare(check, rule, list(runs_of(loaded, model, trial, steps_with_cache)), found)
    with report.check("where the needle is, by `find_needle_idx`") as check:
        for ours, _ in judged:
            for run in ours:
                start = rule.find_needle_idx(their_own(run), "")[0]
                check.hold(start == run.start, f"at {start}, expected {run.start}")
    with report.check(f"which runs count: ROUGE-1 recall above {FOUND} %") as check:
        for ours, found in judged:
            for run, recall in zip(ours, found.values[RECALL][:, 0], strict=True):
                check.hold(found_needle(run) == (recall > FOUND / 100), f"recall {recall}")
    with report.check("every head's mean over the runs that count, to 1e-12") as check:
        for trial, ours, found in zip(trials, runs, readings, strict=True):
            compare_means(check, rule, trial, ours, found)
    faults: dict[str, Callable[..., Any]] = {
        "their span of the needle starts one token later": lambda run: count(rule, run, shift=1),
        "the two strongest keys count, not one": lambda run: count(rule, run, topk=2),
        "each row is that of the query before": lambda run: count(rule, rows_before(run)),
    }
    for what, fault in faults.items():
        with report.control(what) as control:
            for ours, found in judged:
                compare(control, rule, ours, found, fault)
    report.write(asked.out)


def compiled(code: str) -> Any:
    """A class of their methods that count, as they are."""
    (whole,) = (one for one in ast.parse(code).body if isinstance(one, ast.ClassDef) and one.name == CLASS)
    whole.body = [one for one in whole.body if isinstance(one, ast.FunctionDef) and one.name in METHODS]
    assert {one.name for one in whole.body if isinstance(one, ast.FunctionDef)} == set(METHODS)
    names: dict[str, Any] = {"print": lambda *_: None}
    exec(compile(ast.Module([whole], []), FILE, "exec"), names)
    return names[CLASS]


def trial_of(loaded: Any, seed: int) -> Trial:
    """The needles that a scan with this seed reads."""
    return next(one for one in plan(loaded, seed=seed).trials if one.name == "long-range-copying")


def runs_of(loaded: Any, model: Any, trial: Trial, steps: Callable[..., list[list[Step]]]) -> Any:
    """Every run of a trial, in its order; steps: how the model decodes a batch of them."""
    for _, prompt_BT in batches(trial.arms["needle"].ids_ST, BATCH_TOKENS):
        ids_BT = torch.tensor(complete(loaded, prompt_BT, VALUES))
        with torch.no_grad():
            of_each = steps(model, ids_BT)
        for ids_T, taken in zip(ids_BT, of_each, strict=True):
            prompt_T, made_V = ids_T[:-VALUES], ids_T[-VALUES:]
            # the key stands before the needle's values, and once more at the prompt's end
            yield Run(prompt_T, int((prompt_T == prompt_T[-1]).nonzero()[0]) + 1, made_V, taken)


def rows_of_one_pass(model: Any, ids_BT: Tensor) -> list[list[Step]]:
    """The steps as rows of a single pass over the completed texts, which is what attnscope reads."""
    found = model(ids_BT, output_attentions=True, use_cache=False).attentions
    rows = range(ids_BT.shape[1] - VALUES - 1, ids_BT.shape[1] - 1)
    return [
        [([layer[text, None, :, : row + 1, : row + 1] for layer in found], ids_T[row + 1]) for row in rows]
        for text, ids_T in enumerate(ids_BT)
    ]


def steps_with_cache(model: Any, ids_BT: Tensor) -> list[list[Step]]:
    """The steps one by one: a pass over the prompt without its last token, then one token after the other."""
    return [decoded(model, ids_T[:-VALUES]) for ids_T in ids_BT]


def decoded(model: Any, prompt_T: Tensor) -> list[Step]:
    cache, token = model(prompt_T[None, :-1], use_cache=True).past_key_values, prompt_T[-1]
    steps = []
    for _ in range(VALUES):
        out = model(token.view(1, 1), past_key_values=cache, use_cache=True, output_attentions=True)
        cache, token = out.past_key_values, out.logits[0, -1].argmax()
        steps.append((out.attentions, token))
    return steps


def rows_before(run: Run) -> Run:
    """The same run with the row of the query before in each step's place."""
    earlier = [([layer[..., :-1, :-1] for layer in layers], token) for layers, token in run.steps]
    return Run(run.prompt_T, run.start, run.made_V, earlier)


def their_own(run: Run, shift: int = 0) -> Any:
    """What their methods read of themselves."""
    layers = run.steps[0][0]
    needle = run.prompt_T[run.start : run.start + VALUES].tolist()

    class Encoder:
        def __call__(self, text: str, add_special_tokens: bool) -> Any:
            return {"input_ids": needle}

        def decode(self, ids: Any, skip_special_tokens: bool) -> str:
            return ""

    return SimpleNamespace(
        layer_num=len(layers),
        head_num=layers[0].shape[1],
        needle_start=run.start + shift,
        needle_end=run.start + shift + VALUES,
        prompt_ids=run.prompt_T,
        enc=Encoder(),
        head_counter=defaultdict(list),
    )


def count(rule: Any, run: Run, shift: int = 0, topk: int = 1) -> list[list[list[Any]]]:
    """[layer][head][0]: what their rule counts over the steps of a run."""
    itself = their_own(run, shift)
    counted = [[[0, ""] for _ in range(itself.head_num)] for _ in range(itself.layer_num)]
    for layers, token in run.steps:
        rule.retrieval_calculate(itself, layers, counted, token, "", topk)
    return counted


def compare(
    check: Check, rule: Any, runs: Sequence[Run], found: Any, counting: Callable[..., Any] | None = None
) -> None:
    """Every head of every run that counts."""
    for place, run in enumerate(runs):
        theirs = (counting or (lambda run: count(rule, run)))(run)
        for (layer, head), ours in zip(found.heads, found.values[COPIED][place], strict=True):
            if found_needle(run):
                expected = theirs[layer][head][0]
                check.hold(ours == expected, f"run {place} L{layer}H{head}: {ours}, expected {expected}")
            else:
                check.hold(bool(np.isnan(ours)), f"run {place} L{layer}H{head}: {ours}, and the run does not count")


def found_needle(run: Run) -> bool:
    """Whether their loop would count the run, each token a word."""
    needle, made = (
        " ".join(f"t{int(one)}" for one in ids) for ids in (run.prompt_T[run.start : run.start + VALUES], run.made_V)
    )
    scorer = rouge_scorer.RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
    return bool(scorer.score(needle, made)["rouge1"].recall * 100 > FOUND)


def compare_means(check: Check, rule: Any, trial: Trial, runs: Sequence[Run], found: Any) -> None:
    """What `head_counter` holds in the end, against the scores of the atlas."""
    itself = their_own(runs[0])
    for run in filter(found_needle, runs):
        rule.retrieval_head_accumulate(itself, count(rule, run))
    (finding,) = findings_of(trial, found)
    for (layer, head), ours in zip(found.heads, finding.effects.score, strict=True):
        theirs = float(np.mean(itself.head_counter[f"{layer}-{head}"]))
        check.hold(abs(ours - theirs) <= 1e-12, f"L{layer}H{head}: {ours}, expected {theirs}")


if __name__ == "__main__":
    main()

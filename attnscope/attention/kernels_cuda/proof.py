"""The kernels prove themselves on the machine at hand: at first use a small slice is answered by the tiles too.

No one has to trust a kernel that was written without this card: where it does not compile, raises, or differs by more
than the dtype allows, the tiles answer, one line says why, and the reason stays with the answers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnscope.attention import questions as ask
from attnscope.attention.kernels_cuda.sweep import FEW_ROWS, LEAST_COLUMNS, Sweep, joinable, most_of, power_of_two
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.attention.tiling import TiledAttention
from attnscope.utils.memory import is_out_of_memory

logger = logging.getLogger("attnscope")
OUTPUT, JOINED = "output", "statistics with the strongest keys"
ALIGNED = 16  # Triton compiles once for numbers that it divides and once for others: a slice's leave the same rest
# Of a slice, at least; beside more than MANY_KEYS keys it has FEW_QUERIES: FEW_ROWS have blocks of their own.
TEXTS, KV_HEADS, QUERIES, FEW_QUERIES, MANY_KEYS = 2, 2, 208, 2 * FEW_ROWS, 4096
# Largest difference relative to 1 + what is expected: of the answers, and of the output in the model's dtype.
ALLOWED = {torch.float32: (1e-4, 1e-4), torch.float16: (2e-3, 1e-2), torch.bfloat16: (2e-3, 5e-2)}

OF_KEYS: Sequence[ask.Question] = (  # what the walk over keys finds of every row
    *(ask.RowSum(), ask.Entropy(), ask.Entropy(True), ask.SumOfSquares()),
    *(ask.MaxWeight(), ask.MaxWeight(True), ask.Distance()),
)
OF_ROWS = ask.Received | ask.GroupMass  # kinds that share a launch whose compiled form depends on both

_unbuilt: set[str] = set()  # what was said to be missing
_verdicts: dict[tuple[Any, ...], str] = {}  # why a kernel is refused, "" where it holds


def kind(question: ask.Question | None) -> str:
    """What a verdict is about: the kind of a question, or, with None, the output."""
    return OUTPUT if question is None else type(question).__name__


def _variants(spec: AttentionSpec, questions: Sequence[ask.Question | None]) -> dict[ask.Question | None, Any]:
    """What a verdict is kept by: a kind, and what its kernel is compiled for, with all that share its launch."""
    sizes = {question: _size(spec, question) for question in questions}
    together = [(kind(one), size) for one, size in sizes.items() if isinstance(one, OF_ROWS)]
    shared = {question: together if isinstance(question, OF_ROWS) else [] for question in questions}
    return {question: (*_form(spec), kind(question), size, *shared[question]) for question, size in sizes.items()}


def _size(spec: AttentionSpec, question: ask.Question | None) -> tuple[int, ...]:
    """What a kernel is compiled for, () where it is one for all."""
    if isinstance(question, ask.TopK):
        return (power_of_two(question.k + question.skip_key0),)
    if isinstance(question, ask.Features):
        return (power_of_two(question.features.shape[-1], LEAST_COLUMNS),)
    if isinstance(question, ask.GroupMass):
        apart = Sweep(spec).apart(question)
        return (1, power_of_two(question.counts[1], LEAST_COLUMNS)) if apart == 1 else (apart,)
    return ()


def refused(spec: AttentionSpec, questions: Sequence[ask.Question | None]) -> dict[str, str]:
    """Of the kinds that are asked, those that the kernels may not answer for calls like this one, and why."""
    variants = _variants(spec, questions)
    kinds = {kind(question) for question in questions if variants[question] not in _verdicts}
    if kinds:
        _prove(spec, {question: variant for question, variant in variants.items() if kind(question) in kinds})
    return {kind(question): why for question in questions if (why := _verdicts[variants[question]])}


def joins(spec: AttentionSpec, questions: Sequence[ask.Question | None]) -> bool:
    """Whether the walk of the statistics finds the strongest keys too, for calls like this one; proven as one kernel.

    Where it does not hold, each has its own walk, with a verdict of its own.
    """
    tops = [question for question in questions if isinstance(question, ask.TopK)]
    if not joinable(spec, tops):
        return False
    variant = _joined(spec, tops)
    if variant not in _verdicts:
        small = _slice(spec)
        cut = [*OF_KEYS, *(_sliced(question, small, Sweep(spec)) for question in tops)]
        tiles = TiledAttention(small)
        _verdicts[variant] = why = _fault(Sweep(small, joins=True), cut, tiles.together(cut), tiles)
        if why:
            logger.warning("the Triton kernel for %s %s; each has a walk of its own", JOINED, why)
    return not _verdicts[variant]


def _joined(spec: AttentionSpec, questions: Sequence[ask.Question | None]) -> tuple[Any, ...]:
    """What the verdict on the joined walk is kept by."""
    return (*_form(spec), JOINED, power_of_two(most_of(questions)))


def refuse(spec: AttentionSpec, questions: Sequence[ask.Question | None], why: str) -> dict[str, str]:
    """Leave these kinds to the tiles from now on, for calls like this one; logged once."""
    _verdicts.update(dict.fromkeys([*_variants(spec, questions).values(), _joined(spec, questions)], why))
    return _logged(dict.fromkeys(map(kind, questions), why), why)


def _logged(names: dict[str, str], why: str) -> dict[str, str]:
    logger.warning("the Triton kernel for %s %s; the tiles answer", ", ".join(names), why)
    return names


def unbuilt(questions: Sequence[ask.Question], why: str) -> dict[str, str]:
    """Leave everything to the tiles: no kernel can be built. Logged once per process."""
    if why not in _unbuilt:
        _unbuilt.add(why)
        logger.warning("Triton %s; the tiles answer", why)
    return {kind(question): f"Triton {why}" for question in questions}


def said(error: Exception) -> str:
    """An error in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"raised {type(error).__name__}: {first}"[:200]


def _form(spec: AttentionSpec) -> tuple[Any, ...]:
    """What a compiled kernel depends on."""
    visible, sinks = spec.visible, spec.sinks is not None
    mask = None if visible.as_mask is None else visible.as_mask.dtype
    sizes = spec.q_BHQD.shape[-1], spec.v_BGKV.shape[-1], visible.queries <= FEW_ROWS
    options = spec.softcap is None, spec.bias is None, sinks, spec.sinks_scale_output
    return spec.device, spec.q_BHQD.dtype, *sizes, visible.causal, visible.window is None, mask, *options


def _prove(spec: AttentionSpec, variants: Mapping[ask.Question | None, Any]) -> None:
    small, whole = _slice(spec), Sweep(spec)
    cut = [None if question is None else _sliced(question, small, whole) for question in variants]
    tiles, sweep = TiledAttention(small), Sweep(small)
    expected = tiles.together([question for question in cut if question is not None])
    verdicts: dict[str, str] = {}
    for name in dict.fromkeys(map(kind, cut)):
        alike = [question for question in cut if question is not None and kind(question) == name]
        of_rows = [question for question in cut if isinstance(question, OF_ROWS)]
        launched = of_rows if alike and isinstance(alike[0], OF_ROWS) else alike  # as they will be asked
        verdicts[name] = _fault(sweep, launched, {question: expected[question] for question in alike}, tiles)
    _verdicts.update({variant: verdicts[kind(question)] for question, variant in variants.items()})
    for why in dict.fromkeys(filter(None, verdicts.values())):
        _logged({name: why for name, verdict in verdicts.items() if verdict == why}, why)


def _fault(
    sweep: Sweep, launched: Sequence[ask.Question], expected: Mapping[ask.Question, Any], tiles: TiledAttention
) -> str:
    """What is wrong with the kernels' answers to some of the questions that are launched, "" where they hold.

    Without questions, what is wrong with the output.
    """
    try:
        if not launched:
            return _differs([sweep.output()], [tiles.output()], ALLOWED[tiles.spec.q_BHQD.dtype][1])
        answers = sweep.answers(launched)
        faults = (_answered(answers[question], question, right, tiles) for question, right in expected.items())
        return next(filter(None, faults), "")
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return said(error)


def _answered(answer: Any, question: ask.Question, expected: Any, tiles: TiledAttention) -> str:
    """What is wrong with an answer of the kernels, "" where it holds."""
    allowed = ALLOWED[tiles.spec.q_BHQD.dtype][0]
    if not isinstance(question, ask.TopK):
        return _differs([answer], [expected], allowed)
    weights, keys = answer
    rows = tiles.dense() if question.heads is None else tiles.dense()[:, list(question.heads)]
    at_keys = rows.gather(-1, keys.long().clamp(0, tiles.keys - 1))  # equal weights may stand in any order
    gaps = expected[0].isnan()  # of a row that sees fewer keys; what stands there as a key says nothing
    apart = torch.where(gaps, -1 - torch.arange(keys.shape[-1], device=keys.device), keys.long())
    twice = apart.sort(-1).values.diff(dim=-1) == 0
    wrong = _differs([weights, at_keys.masked_fill(gaps, torch.nan)], [expected[0]] * 2, allowed)
    return wrong or ("gives a key twice" if bool(twice.any()) else "")


def _differs(actual: Sequence[Tensor], expected: Sequence[Tensor], allowed: float) -> str:
    for mine, theirs in zip(actual, expected, strict=True):
        mine, theirs = mine.float(), theirs.float()
        if mine.shape != theirs.shape or bool((mine.isnan() != theirs.isnan()).any()):
            return "gives another shape or other gaps than the tiles"
        far = ((mine - theirs).abs() / (1 + theirs.abs())).nan_to_num(0.0, posinf=torch.inf)
        worst = float(far.max()) if far.numel() else 0.0
        if not worst <= allowed:
            return f"differs from the tiles by {worst:.1g} (allowed {allowed:.1g})"
    return ""


def _slice(spec: AttentionSpec) -> AttentionSpec:
    """The first texts, kv heads and tokens of a call: a small call that the same compiled kernels answer."""
    visible, shared = spec.visible, spec.heads // spec.kv_heads
    some = range(min(KV_HEADS, spec.kv_heads), spec.kv_heads + 1)
    G = next(count for count in some if _rest(count * shared) == _rest(spec.heads))
    H, before = shared * G, visible.offset
    Q = _alike(visible.queries, QUERIES if before <= MANY_KEYS else FEW_QUERIES)
    window = None if visible.window is None else _alike(visible.window, Q // 3 // ALIGNED * ALIGNED)  # hides something
    mask = None if visible.as_mask is None else visible.as_mask[:TEXTS, :H, :Q, : before + Q]
    seen = Visibility(Q, before + Q, mask, visible.causal, window, visible.device)
    k, v = (part[:TEXTS, :G, : before + Q] for part in (spec.k_BGKD, spec.v_BGKV))
    bias = None if spec.bias is None else spec.bias[:TEXTS, :H, :Q, : before + Q]
    sinks = None if spec.sinks is None else spec.sinks[:TEXTS, :H, :Q]
    return replace(spec, q_BHQD=spec.q_BHQD[:TEXTS, :H, :Q], k_BGKD=k, v_BGKV=v, visible=seen, bias=bias, sinks=sinks)


def _rest(number: int) -> int:
    """What Triton compiles by: 0 for a multiple of 16, 1 for 1."""
    return 0 if number % ALIGNED == 0 else min(number, 2)


def _alike(number: int, least: int) -> int:
    """The number, or one near `least` that leaves the same rest, where that is smaller."""
    return min(number, least + number % ALIGNED) if least else number


def _sliced(question: ask.Question, small: AttentionSpec, whole: Sweep) -> ask.Question:
    """The question, asked of the slice; of groups that lie as those of the call do, runs or none."""
    Q, K = small.visible.queries, small.visible.keys
    match question:
        case ask.At(key_BQ):
            return ask.At(key_BQ[:TEXTS, :Q])
        case ask.EqualLabels(query, key, gap):
            return ask.EqualLabels(query[:TEXTS, :Q], key[:TEXTS, :K], gap)
        case ask.GroupMass(query, key):
            apart = whole.apart(question)
            run_K = (torch.arange(K, device=key.device) + apart - 1) // apart  # two starts where the call has two
            rows, keys = question.counts
            labels = run_K[K - Q :] % (rows + 1) - 1, run_K % (keys + 1) - 1
            texts = min(len(query), TEXTS)
            return ask.GroupMass(labels[0].expand(texts, -1), labels[1].expand(texts, -1), question.counts)
        case ask.Received(share):
            return ask.Received(share[:TEXTS, :Q])
        case ask.Features(features):
            return ask.Features(features[:K] if features.ndim == 2 else features[:TEXTS, :K])
        case ask.TopK(k, heads, skip_key0):
            there = None if heads is None else tuple(dict.fromkeys(head % small.heads for head in heads))
            return ask.TopK(min(k, K), there, skip_key0)
    return question

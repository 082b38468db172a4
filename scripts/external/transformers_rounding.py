"""Why numba fails more of transformers' eager against sdpa than the tiles, with large weights: see the .toml.

    python -m external.transformers_rounding OUT [--source FOLDER] [--families llama,bert,t5]

FOLDER and what is kept in the working folder are as in `transformers`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from attnscope.attention.kernels_cpu import CompiledAttention
from attnscope.attention.tiling import TiledAttention
from attnscope.hooks.engines import Engine
from attnscope.hooks.listen import listening
from external.common import Check, Report, parser, source_of
from external.transformers import CONTROLLED, SDPA, WIDE, Kept, families, scale_off
from external.transformers_suite import Family, Found, distance, in_float64, last_states, run_cases, suite_in
from external.transformers_verdict import FURTHER

ENGINES = {
    "tiles": Engine("tiles", TiledAttention, output="attnscope"),
    "numba": Engine("numba", CompiledAttention, output="attnscope"),
    "scale": Engine("scale", lambda spec: CompiledAttention(scale_off(spec)), output="attnscope"),
}
OUTSIDE = {
    "deberta-v2",
    "mpnet",
    "led",
    "t5gemma",
    "bloom",
    "gemma2",
    "gpt_oss",
    "gptj",
    "falcon",
}  # see `transformers`
CASE = re.compile(r"\d+_(fp16|fp32|bf16)_pad_(left|right)(_no_attn_mask)?(_sdpa_kernels|_output_attentions)?")
FUSED = "_sdpa_kernels"
ASKED = 6  # texts of 7 that the test wants to agree


@dataclass(frozen=True)
class Ended:
    """How a case ended; same: whether its states are eager's, bit for bit; texts: in how many texts they are.

    off: how far from float64, in times of eager attention; None where it was not measured.
    """

    failed: bool
    same: bool
    texts: int
    off: float | None


def kind(case: str) -> str:
    """What of a case differs for attnscope: its precision, and what is hidden. `fp32 left`"""
    match = CASE.fullmatch(case)
    assert match, f"transformers has a case of another kind: {case}"
    return f"{match[1]} {'nothing' if match[3] else match[2]}"


def one_of_each(case: str) -> bool:
    """Whether a case is the one that is run of its kind: PyTorch's kernels and returned attentions change nothing.

    In half precision, where little differs, that with padding on the left alone.
    """
    match = CASE.fullmatch(case)
    assert match, f"transformers has a case of another kind: {case}"
    if match[4] or (match[3] and match[2] == "right"):
        return False
    return match[1] == "fp32" or kind(case).endswith("left")


def of_pytorch(case: str) -> bool:
    """The cases of float32 that are run of PyTorch's own attention, of both kernels."""
    return "_fp32_" in case and one_of_each(case.removesuffix(FUSED))


class Attending:
    """Runs the models of one test as `transformers.Attending` does; notes [same, texts, two distances]."""

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine
        self.eager: Any = None

    def __call__(self, model: Any, forward: Any, note: Any, *args: Any, **kwargs: Any) -> Any:
        if model.config._attn_implementation != "sdpa":
            self.eager = last_states(output := forward(model, *args, **kwargs))
            return output
        if self.engine is None:
            output = forward(model, *args, **kwargs)
        else:
            with listening(model, lambda call: None, engine=self.engine):
                output = forward(model, *args, **kwargs)
        own = last_states(output)
        off: list[float] = []
        if model.dtype == torch.float32:
            true = in_float64(model, forward, kwargs)
            off = [distance(one, true, kwargs) for one in (self.eager, own)]
        note([torch.equal(self.eager, own), sum(map(torch.equal, self.eager, own)), *off])
        return output


Results = Mapping[tuple[str, str], Ended]  # by family and case


def results(found: Mapping[str, Found], named: Callable[[str], str]) -> Results:
    """How every case ended, by family and what `named` calls a case."""
    ended = {}
    for family, one in found.items():
        for case, noted in one.heard.items():
            if case not in one.skipped and noted:
                ratios = [own / eager for _, _, eager, own in (part for part in noted if len(part) == 4) if eager > 0]
                [(same, texts, *_), *more] = noted
                assert not more, f"{family} {case}: run more than once"
                ended[family, named(case)] = Ended(case in one.failed, same, texts, max(ratios, default=None))
    return ended


NEAR = "float32, numba: at most 5 times as far from float64 as eager attention"
SAME = "float32, a case that numba fails and the tiles pass: in 6 of 7 texts the tiles' states are eager's, bit for bit"
ALIKE = "float16 and bfloat16: numba and the tiles end alike"


def judge(report: Report, tiles: Results, numba: Results, faulty: Results) -> None:
    """The checks; faulty: numba with a scale that is off by 1 %."""
    with report.check(NEAR) as check:
        near(check, numba)
    with report.check(SAME) as check:
        only_same(check, tiles, numba, tiles)
    with report.check(ALIKE) as check:
        alike(check, tiles, numba)
    with report.control(f"{NEAR}; the scale off by 1 %, {len(CONTROLLED)} families") as control:
        near(control, faulty)
    with report.control("the same cases: in 6 of 7 texts numba's states are eager's, bit for bit") as control:
        only_same(control, tiles, numba, numba)
    with report.control(f"{ALIKE}; the scale off by 1 %, {len(CONTROLLED)} families") as control:
        alike(control, tiles, faulty)


def near(check: Check, numba: Results) -> None:
    for place, one in numba.items():
        if one.off is not None:
            check.hold(one.off <= FURTHER, f"{' '.join(place)}: {one.off:.1f} times")


def only_same(check: Check, tiles: Results, numba: Results, whose: Results) -> None:
    for place, one in numba.items():
        if "fp32" in place[1] and one.failed and not tiles[place].failed:
            check.hold(whose[place].texts >= ASKED, f"{' '.join(place)}: {whose[place].texts} texts")


def alike(check: Check, tiles: Results, numba: Results) -> None:
    for place, one in numba.items():
        if "fp32" not in place[1]:
            check.hold(one.failed == tiles[place].failed, " ".join(place))


def of_float32(found: Results) -> Results:
    return {place: one for place, one in found.items() if "fp32" in place[1]}


def ending(found: Results) -> str:
    """How often an operator's states are eager's bit for bit, and how both kinds end."""
    equal, other = ([one for one in found.values() if one.same is same] for same in (True, False))
    logs = [math.log(one.off) for one in other if one.off]
    far = f"{math.exp(sum(logs) / len(logs)):.2f} times as far from float64 as eager attention" if logs else "nowhere"
    failed, others = (sum(one.failed for one in some) for some in (equal, other))
    return (
        f"{len(equal)} of {len(found)} cases give eager's states bit for bit, of which {failed} fail; of the other"
        f" {len(other)} fail {others}, and they are {far} (geometric mean)"
    )


def differing(tiles: Results, numba: Results, repeats: Mapping[str, int]) -> list[str]:
    """The cases that one of them alone fails; repeats: how many cases of the whole test are of each kind."""
    found = []
    for words, failing in {"numba fails and the tiles pass": numba, "the tiles fail and numba passes": tiles}.items():
        differ = [at for at in tiles if tiles[at].failed is not numba[at].failed and failing[at].failed]
        same, names = sum(tiles[at].same for at in differ), dict.fromkeys(family for family, _ in differ)
        found.append(
            f"float32, {words}: {len(differ)} cases, which the whole test runs as"
            f" {sum(repeats[case] for _, case in differ)}; the tiles' states are eager's in {same}. Families:"
            f" {', '.join(names) or 'none'}"
        )
    more = sum(repeats[case] * (numba[family, case].failed - one.failed) for (family, case), one in tiles.items())
    return [*found, f"of the whole test's cases in float32, numba fails {more} more than the tiles"]


class Runs:
    """What was run, from the kept results or now: of each operator how the cases of some families ended."""

    def __init__(self, suite: Any, kept: Kept) -> None:
        self.suite, self.kept = suite, kept

    def ours(self, operator: str, members: Sequence[Family]) -> Results:
        return results(self._found(operator, members, one_of_each), kind)

    def pytorch(self, members: Sequence[Family], fused: bool) -> Results:
        """With the kernel that PyTorch takes for short texts on a CPU, or its plain products."""
        every = results(self._found("PyTorch", members, of_pytorch), str)
        return {place: one for place, one in every.items() if place[1].endswith(FUSED) is fused}

    def _found(self, operator: str, members: Sequence[Family], wanted: Callable[[str], bool]) -> dict[str, Found]:
        def run(family: Family) -> Found:
            return run_cases(self.suite, family, SDPA, Attending(ENGINES.get(operator)), wanted)

        return {one.name: self.kept.of(f"{one.name} {operator}", partial(run, one)) for one in members}


def main() -> None:
    """Run every case of every family and write the result."""
    made = parser()
    made.add_argument("--families", default="", help="names with commas between; all without")
    asked = made.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    suite = suite_in(asked.source or source_of(f"transformers=={transformers.__version__}", Path("source")))
    runs, report = Runs(suite, Kept(Path("kept.jsonl"))), Report(("transformers", "torch", "numba"))
    chosen = [one for one in families(filter(None, asked.families.split(","))) if one.name not in OUTSIDE]
    wide = [replace(one, wide=True) for one in chosen]
    tiles, numba = runs.ours("tiles", wide), runs.ours("numba", wide)
    judge(report, tiles, numba, runs.ours("scale", [one for one in wide if one.name in CONTROLLED]))
    report.notes.append(f"{len(wide)} families, {WIDE}")
    for name, fused in {"PyTorch's plain products": False, "PyTorch's fused kernel": True}.items():
        report.notes.append(f"float32, {name}: {ending(runs.pytorch(wide, fused))}")
    report.notes += [
        f"float32, {name}: {ending(of_float32(one))}" for name, one in {"tiles": tiles, "numba": numba}.items()
    ]
    report.notes += differing(of_float32(tiles), of_float32(numba), Counter(map(kind, cases_in(suite))))
    report.write(asked.out)


def cases_in(suite: Any) -> list[str]:
    """The names of the whole test's cases."""
    return [name.removeprefix(f"{SDPA}_") for name in dir(suite.ModelTesterMixin) if name.startswith(f"{SDPA}_")]


if __name__ == "__main__":
    main()

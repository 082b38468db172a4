"""README's test command, then what it leaves out: the marks `families` and `e2e`. `.ci/run` calls it.

What fails is run once more, alone. A case that passes then is flaky: the last lines name it with its first failure.
More than three flaky cases fail the run, as does each case that fails again.

No case of the default selection may take over 1 processor second, its own fixtures and processes included. What is
made once for many cases may take 5, and what imports everything 8. A case over that is run three times, and its median
counts. Where the files that `tests/seconds.json` holds take longer in all than in that run, so may each: a slow machine
fails nothing. A run that passes writes that file again: by its seconds the longest files begin first.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT = "not slow and not families and not e2e"
SELECTIONS: dict[str, Sequence[str]] = {DEFAULT: (), "families": ("-m", "families"), "e2e": ("-m", "e2e", "-n", "3")}
FLAKY = 3  # of a run; with more there is something wrong with the run
CASE, SHARED = 1.0, 5.0  # processor seconds
IMPORTING = {"helpers.forks._started": 8.0}  # imports all that any command does, which alone takes nearly 5
KEPT = Path("tests/seconds.json")


@dataclass
class Run:
    """What pytest did: its exit code; failures by case; seconds of each run of a case, and of what many share."""

    code: int
    failed: dict[str, str] = field(default_factory=dict)
    cases: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    shared: dict[str, float] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, float]:
        """Seconds of each file, what it was the first to make included."""
        total: dict[str, float] = defaultdict(float)
        for case, seconds in self.cases.items():
            total[case.partition("::")[0]] += sum(seconds)
        return total


def pytest(*arguments: str) -> Run:
    """Run pytest, and read its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        environment = os.environ | {
            "ATTNSCOPE_REPORT": str(report),
            "OMP_NUM_THREADS": "1",  # as in xdist's workers, also where a plugin loads NumPy before conftest.py says so
        }
        done = subprocess.run(["pytest", *arguments], env=environment)
        lines = report.read_text("utf-8").splitlines() if report.exists() else []
    run = Run(done.returncode)
    for row in map(json.loads, lines):
        case = row["case"]
        if row["outcome"] == "failed":
            run.failed.setdefault(case, row["text"])
        if row["when"] == "setup":
            run.cases[case].append(0.0)
        for name, seconds in row["seconds"]:
            if name != "own":
                run.shared[name] = max(seconds, run.shared.get(name, 0.0))
            elif row["when"] in ("setup", "call"):
                run.cases[case][-1] += seconds
    return run


def passes_alone(case: str) -> bool:
    """Run a case that failed once more, alone."""
    print(f"\nonce more, alone: {case}", flush=True)
    return pytest("-n", "0", "-m", "", case).code == 0


def too_dear(run: Run, before: Mapping[str, float]) -> list[str]:
    """What takes too long by default. before: processor seconds of the files of an earlier run."""
    both = run.files.keys() & before.keys()
    earlier = sum(before[file] for file in both)
    slower = max(1.0, sum(run.files[file] for file in both) / earlier) if earlier else 1.0
    over = [case for case, seconds in run.cases.items() if max(seconds) > CASE * slower]
    medians = {f"{name}, made once": seconds / IMPORTING.get(name, SHARED) for name, seconds in run.shared.items()}
    if over:
        print(f"\n{len(over)} cases over {CASE * slower:.2f} processor seconds, three times each", flush=True)
        thrice = pytest("-n", "0", "-m", "", "--repeat", "3", *over).cases
        medians |= {case: statistics.median(seconds) / CASE for case, seconds in thrice.items()}
    return [f"{share:.1f} times what it may take: {name}" for name, share in medians.items() if share > slower]


def verdict(runs: dict[str, Run], before: Mapping[str, float]) -> tuple[bool, list[str]]:
    """Whether all is well, and the last lines: what is too dear, what failed twice, what is flaky."""
    failed = {case: text for run in runs.values() for case, text in run.failed.items()}
    lines = [f"pytest left with {run.code}: {mark}" for mark, run in runs.items() if run.code and not run.failed]
    lines += too_dear(runs[DEFAULT], before)
    # With so many there is something wrong with the run, which trying each again would not show.
    flaky = {} if len(failed) > 10 * FLAKY else {case: text for case, text in failed.items() if passes_alone(case)}
    lines += [f"failed: {case}" for case in failed if case not in flaky]
    lines += [f"{len(flaky)} flaky cases, of which a run may have {FLAKY}"] * (len(flaky) > FLAKY)
    well = not lines
    for case, text in flaky.items():
        lines += [f"flaky: {case} failed, and passed alone", *(f"    {line}" for line in text.splitlines()[-15:])]
    return well, lines


def main() -> int:
    """Run all; the last lines say what was wrong."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    runs = {mark: pytest(*arguments) for mark, arguments in SELECTIONS.items()}
    well, lines = verdict(runs, kept.get(DEFAULT, {}))
    print()
    for mark, run in runs.items():
        print(f"{sum(run.files.values()):.0f} processor seconds, {len(run.cases)} cases: {mark}")
    print(*lines, sep="\n")
    if well:
        files = {
            mark: {name: round(seconds, 1) for name, seconds in sorted(run.files.items())} for mark, run in runs.items()
        }
        KEPT.write_text(json.dumps(files, indent=1) + "\n")
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())

"""README's test command, then what it leaves out: the marks `families` and `e2e`. `.ci/run` calls it.

What fails is run once more, alone. A case that passes then is flaky: the last lines name it with its first failure.
More than three flaky cases fail the run, as does each case that fails again.

No case of the default selection may take over 1 processor second, its own fixtures and processes included; what is
made once for many cases may take 5. A case over that is run three times, and its median counts. Seconds grow with the
total that `tests/seconds.json` holds of an earlier run, so that a slow machine fails nothing. A run that passes writes
that file anew: its seconds per file are the order in which files begin.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT = "not slow and not families and not e2e"
SELECTIONS: dict[str, Sequence[str]] = {DEFAULT: (), "families": ("-m", "families"), "e2e": ("-m", "e2e")}
FLAKY = 3  # of a run; with more there is something wrong with the run
CASE, SHARED = 1.0, 5.0  # processor seconds
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
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --report={report}"
        done = subprocess.run(["pytest", *arguments], env=os.environ | {"PYTEST_ADDOPTS": options})
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


def again(case: str) -> str:
    """Run a case that failed once more, alone; what it says where it fails again."""
    print(f"\nonce more, alone: {case}", flush=True)
    run = pytest("-n", "0", "-m", "", case)
    return "" if run.code == 0 else run.failed.get(case, f"pytest left with {run.code}")


def too_dear(run: Run) -> list[str]:
    """Lines on what takes too long by default."""
    kept = json.loads(KEPT.read_text())[DEFAULT] if KEPT.exists() else {}
    before = sum(kept.values())
    slower = max(1.0, sum(run.files.values()) / before) if before else 1.0
    suspects = [case for case, [seconds] in run.cases.items() if seconds > CASE * slower]
    lines = [
        f"{seconds:6.2f} s  {name}, made once" for name, seconds in run.shared.items() if seconds > SHARED * slower
    ]
    if suspects:
        print(f"\n{len(suspects)} cases over {CASE * slower:.2f} processor seconds, three times each", flush=True)
        for case, seconds in pytest("-n", "0", "-m", "", "--repeat", "3", *suspects).cases.items():
            if (median := statistics.median(seconds)) > CASE * slower:
                lines.append(f"{median:6.2f} s  {case}")
    return lines


def main() -> int:
    """Run all; the last lines say what was wrong."""
    runs = {mark: pytest(*arguments) for mark, arguments in SELECTIONS.items()}
    failed = {case: text for run in runs.values() for case, text in run.failed.items()}
    broken = [mark for mark, run in runs.items() if run.code != 0 and not run.failed]  # nothing collected, or stopped
    flaky = {} if len(failed) > 10 * FLAKY else {case: text for case, text in failed.items() if not again(case)}
    dear = too_dear(runs[DEFAULT])
    files = {mark: {name: round(run.files[name], 1) for name in sorted(run.files)} for mark, run in runs.items()}

    print()
    for mark, run in runs.items():
        print(f"{sum(run.files.values()):7.0f} processor seconds, {len(run.cases)} cases: {mark}")
    for line in dear:
        print(f"too dear by default: {line}")
    for mark in broken:
        print(f"pytest left with {runs[mark].code}: {mark}")
    for case in [case for case in failed if case not in flaky]:
        print(f"failed: {case}")
    for case, text in flaky.items():
        print(
            f"flaky: {case} failed, and passed alone\n" + "\n".join(f"    {line}" for line in text.splitlines()[-15:])
        )
    if len(flaky) > FLAKY:
        print(f"{len(flaky)} flaky cases: at most {FLAKY} may be")
    wrong = bool(dear or broken) or len(flaky) > FLAKY or len(failed) > len(flaky)
    if not wrong:
        KEPT.write_text(json.dumps(files, indent=1) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())

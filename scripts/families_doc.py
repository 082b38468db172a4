"""Measure every family against the oracle, read every type, and write docs/families.md and tests/sweep.json.

python scripts/families_doc.py              # all of it, some 20 minutes
python scripts/families_doc.py --types      # its last part alone: every type, on all cores
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
OTHERWISE = "## What the libraries do otherwise"  # the part that is written by hand
sys.path.insert(0, str(ROOT / "tests"))

from helpers.families_table import document, stacks_table, studies_table  # noqa: E402
from helpers.sweep import ENTRIES, swept  # noqa: E402
from helpers.sweep_table import EVERY, every_type, keep  # noqa: E402


def main() -> None:
    target = ROOT / "docs" / "families.md"
    with ProcessPoolExecutor(mp_context=get_context("spawn"), max_tasks_per_child=50) as pool:
        keep(pool.map(swept, *zip(*ENTRIES, strict=True)))
    others = target.read_text("utf-8").partition(f"\n{EVERY}")[0].rstrip()
    if sys.argv[1:] != ["--types"]:
        by_hand = others[others.index(OTHERWISE) :]
        others = f"{document()}\n\n{studies_table()}\n\n{stacks_table()}\n\n{by_hand}"
    target.write_text(f"{others}\n\n{every_type()}\n", "utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()

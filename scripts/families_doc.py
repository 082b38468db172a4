"""Measure every family against the oracle, read every type, and write docs/families/, families.md and tests/sweep.json.

python scripts/families_doc.py              # all of it, some 20 minutes
python scripts/families_doc.py --types      # of every type alone, on all cores, and the page
python scripts/families_doc.py --types mamba rwkv    # of these alone, a second each; other rows stay
python scripts/families_doc.py --page       # the page alone, of the tables as they are

`docs/families/libraries.csv` is written by hand.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers import sweep_table  # noqa: E402
from helpers.families_table import (  # noqa: E402
    COLUMNS,
    DOCS,
    FOLDER,
    as_csv,
    causal,
    mixing,
    page,
    read,
    stacks,
    studies,
    switched_on,
)
from helpers.sweep import ENTRIES, swept  # noqa: E402

MEASURED = {"causal": causal, "switched_on": switched_on, "studies": studies, "stacks": stacks, "linear": mixing}


def main() -> None:
    if sys.argv[1:] == []:
        for name, rows in MEASURED.items():
            (FOLDER / f"{name}.csv").write_text(as_csv(COLUMNS[name], rows()), "utf-8")
    if sys.argv[1:] != ["--page"]:
        names = sys.argv[2:]
        if unknown := {*names} - {name for name, _ in ENTRIES}:
            sys.exit(f"no type is called {', '.join(sorted(unknown))}")
        if names:
            again = (swept(name, registry) for name, registry in ENTRIES if name in names)
            sweep_table.keep(again, sweep_table.kept()["types"])
        else:
            with ProcessPoolExecutor(mp_context=get_context("spawn"), max_tasks_per_child=50) as pool:
                sweep_table.keep(pool.map(swept, *zip(*ENTRIES, strict=True)))
        (FOLDER / "types.csv").write_text(as_csv(sweep_table.COLUMNS, sweep_table.types()), "utf-8")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    tables = {name: read(name) for name in (*MEASURED, "types", "libraries")}
    text = f"{page(tables, versions, sweep_table.SINCE)}\n{sweep_table.every_type()}\n"
    (DOCS / "families.md").write_text(text, "utf-8")
    print(f"wrote {DOCS / 'families.md'} and the tables of {FOLDER}")


if __name__ == "__main__":
    main()

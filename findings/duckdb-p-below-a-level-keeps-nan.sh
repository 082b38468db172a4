#!/usr/bin/env bash
# duckdb 2.0.1: a table of four heads in a Parquet file, two with a p of NaN, as pyarrow 26.0.1 writes it and as
# DuckDB does. It is asked for heads with p <= 0.05, for those with NaN, and for the largest p.
#
# A good guess: two heads, the other two, and NaN, of either file: DuckDB's documentation counts NaN as larger than
# any number, and both files hold the same values.
#
# What it is: so it is of DuckDB's own file, which has no smallest and largest number of a column with NaN. pyarrow
# writes both, without NaN, as the format has it, and DuckDB takes them for bounds of all rows. "p <= 0.05" is then
# true of every row and is dropped, so that heads with NaN count as found; isnan(p) finds none. As soon as one other
# head has a p above 0.05, the first is right. max(p) is read from the footer as long as it is asked alone, and from
# the rows, with another answer, when a second column is asked for beside it.
set -euo pipefail
expected='duckdb, p <= 0.05: 0.0 0.1
duckdb, isnan(p): 0.2 0.3
duckdb, max(p): nan
duckdb, max(p) beside arg_max(head, p): nan
pyarrow, p <= 0.05: 0.0 0.1 0.2 0.3
pyarrow, isnan(p): none
pyarrow, max(p): 0.04
pyarrow, max(p) beside arg_max(head, p): nan
pyarrow, one p more, of 0.5, p <= 0.05: 0.0 0.1'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "duckdb==2.0.1" "pyarrow==26.0.1"

cat > "$place/try.py" <<'PYTHON'
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

place = Path(sys.argv[1])
nan = float("nan")
heads = pa.table({"head": ["0.0", "0.1", "0.2", "0.3"], "p": [0.01, 0.04, nan, nan]})
more = pa.concat_tables([heads, pa.table({"head": ["0.4"], "p": [0.5]})])


def found(file, condition):
    rows = duckdb.sql(f"select head from '{file}' where {condition} order by head").fetchall()
    return " ".join(head for [head] in rows) or "none"


duckdb.sql(f"copy (select * from heads) to '{place}/duckdb.parquet' (format parquet)")
pq.write_table(heads, place / "pyarrow.parquet")
pq.write_table(more, place / "more.parquet")
for writer in ("duckdb", "pyarrow"):
    file = place / f"{writer}.parquet"
    for condition in ("p <= 0.05", "isnan(p)"):
        print(f"{writer}, {condition}:", found(file, condition))
    [(largest,)] = duckdb.sql(f"select max(p) from '{file}'").fetchall()
    print(f"{writer}, max(p):", largest)
    [(largest, _)] = duckdb.sql(f"select max(p), arg_max(head, p) from '{file}'").fetchall()
    print(f"{writer}, max(p) beside arg_max(head, p):", largest)
print("pyarrow, one p more, of 0.5, p <= 0.05:", found(place / "more.parquet", "p <= 0.05"))
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" "$place" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2

#!/usr/bin/env bash
# pyarrow 26.0.1: heads grouped by their role, a column that is read as a dictionary (read_dictionary), of a file with
# two row groups. The same two roles stand in both.
#
# A good guess: it works, whichever order the rows have, as counting and filtering by the column does. That a column
# is kept as a dictionary saves memory and changes no result.
#
# What it is: it depends on the order in which the roles first come up in each row group. The dictionary of a group is
# in that order. Where all are equal group_by and join work. Where two differ both raise, though the words are the
# same: group_by always, and join always without threads, and in some runs and not in others with them, the default.
# So a program that was tried with a file of one row group fails at a longer one, or at one that was sorted otherwise.
# unify_dictionaries() before it helps.
set -euo pipefail
expected='roles a b, a b: value_counts 2 2, filter 2, group_by 4 6, join 4
roles a b, b a: value_counts 2 2, filter 2, group_by ArrowNotImplementedError, join ArrowNotImplementedError
roles a b, b a, unified: value_counts 2 2, filter 2, group_by 5 5, join 4
roles a b, b a, one row group: value_counts 2 2, filter 2, group_by 5 5, join 4'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "pyarrow==26.0.1"

cat > "$place/try.py" <<'PYTHON'
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


def heads(roles, rows):
    file = pa.BufferOutputStream()
    pq.write_table(pa.table({"role": roles.split(), "effect": [1, 2, 3, 4]}), file, row_group_size=rows)
    return pq.read_table(pa.BufferReader(file.getvalue()), read_dictionary=["role"])


def group(table):
    sums = table.group_by("role").aggregate([("effect", "sum")]).to_pylist()
    return " ".join(str(row["effect_sum"]) for row in sorted(sums, key=lambda row: row["role"]))


def join(table):
    names = pa.table({"role": pa.array(["a", "b"]).dictionary_encode(), "name": ["first", "second"]})
    return table.join(names, "role", use_threads=False).num_rows


def tried(work, table):
    try:
        return work(table)
    except pa.ArrowNotImplementedError as error:
        return type(error).__name__


def report(name, table):
    counts = " ".join(str(row["counts"]) for row in pc.value_counts(table["role"]).to_pylist())
    found = table.filter(pc.field("role") == "a").num_rows
    print(f"roles {name}: value_counts {counts}, filter {found}, ", end="")
    print(f"group_by {tried(group, table)}, join {tried(join, table)}")


report("a b, a b", heads("a b a b", 2))
report("a b, b a", heads("a b b a", 2))
report("a b, b a, unified", heads("a b b a", 2).unify_dictionaries())
report("a b, b a, one row group", heads("a b b a", 4))
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2

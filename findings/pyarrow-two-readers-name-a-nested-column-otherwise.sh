#!/usr/bin/env bash
# pyarrow 26.0.1: columns=[...] of pyarrow.parquet.read_table and of ParquetFile.read, of one file: text, two heads as
# structs of a layer and a head, and a list of such heads.
#
# A good guess: the two are one reader, the first with a dataset around it. Their documentation describes the argument
# alike, so a name means the same in both, and one that the file does not have is an error.
#
# What it is: "first.layer" is a struct `first` with one field for ParquetFile, and a flat column `layer` for
# read_table. So two heads' layers are two columns of one name there, of which to_pylist keeps the last. What lies in
# a list has a name, as the footer spells it, for ParquetFile alone. And ParquetFile passes over names that are not
# there: a misspelt column is a table of one column less, with all its rows.
set -euo pipefail
expected='file, first.layer: first {layer}; [{"first": {"layer": 1}}]
table, first.layer: layer; [{"layer": 1}]
file, first.layer and second.layer: first {layer}, second {layer}; [{"first": {"layer": 1}, "second": {"layer": 3}}]
table, first.layer and second.layer: layer, layer; [{"layer": 3}]
file, top.list.element.layer: top [{layer}]; [{"top": [{"layer": 5}]}]
table, top.list.element.layer: ArrowInvalid
file, text and frist.layer: text; [{"text": "a"}]
table, text and frist.layer: ArrowInvalid'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "pyarrow==26.0.1"

cat > "$place/try.py" <<'PYTHON'
import json

import pyarrow as pa
import pyarrow.parquet as pq

file = pa.BufferOutputStream()
pq.write_table(
    pa.table(
        {
            "text": ["a"],
            "first": [{"layer": 1, "head": 2}],
            "second": [{"layer": 3, "head": 4}],
            "top": [[{"layer": 5, "head": 6}]],
        }
    ),
    file,
)


def spelt(kind):
    if pa.types.is_list(kind):
        return f" [{spelt(kind.value_type).strip()}]"
    return f" {{{', '.join(field.name for field in kind)}}}" if pa.types.is_struct(kind) else ""


readers = {
    "file": lambda source, columns: pq.ParquetFile(source).read(columns=columns),
    "table": lambda source, columns: pq.read_table(source, columns=columns),
}
for columns in (
    ["first.layer"],
    ["first.layer", "second.layer"],
    ["top.list.element.layer"],
    ["text", "frist.layer"],
):
    for name, read in readers.items():
        try:
            table = read(pa.BufferReader(file.getvalue()), columns)
            fields = ", ".join(field.name + spelt(field.type) for field in table.schema)
            result = f"{fields}; {json.dumps(table.to_pylist())}"
        except pa.ArrowInvalid as error:
            result = type(error).__name__
        print(f"{name}, {' and '.join(columns)}: {result}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2

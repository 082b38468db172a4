#!/usr/bin/env bash
# safetensors 0.8.0, numpy 2.4.6, Python 3.11.
#
# `safetensors.numpy.save` with the same array and the same metadata of four words gives other bytes from call to call in
# one process: the header lists the metadata in another order. The tensors' own entries and bytes stay as they were. With
# one word of metadata all calls agree.
#
# A good guess: a file of equal tensors and equal metadata has equal bytes, so that a digest of the file says whether two
# saved models or two readings are the same, and a cache or a test may go by it.
#
# What it is: the writer sorts tensors by type and name, but takes metadata as a hash map gives
# them, whose order is drawn anew for each map. Who compares files should compare tensors and parsed metadata, or write
# all of it as one word (such as JSON with sorted keys).
set -euo pipefail
expected='four words: 64 files, several digests, 1 content
one word: 64 files, one digest, 1 content'

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q safetensors==0.8.0 numpy==2.4.6
printed="$("$folder/venv/bin/python" - <<'PY'
import hashlib
import json
import struct

import numpy
from safetensors.numpy import save

tensors = {"layer.1": numpy.arange(6.0), "layer.0": numpy.arange(4.0)}
words = {"model": "a", "dtype": "b", "text": "c", "schema": "d"}


def parts(data):
    """The entries of the tensors in the order of the header, the metadata in any order, and the bytes of the tensors."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    return json.dumps(header), json.dumps(metadata, sort_keys=True), data[8 + length :]


for name, metadata in (("four words", words), ("one word", {"all": json.dumps(words, sort_keys=True)})):
    files = [save(tensors, metadata) for _ in range(64)]
    digests = {hashlib.sha256(data).hexdigest() for data in files}
    print(f"{name}: 64 files, {'one digest' if len(digests) == 1 else 'several digests'},", end=" ")
    print(f"{len(set(map(parts, files)))} content")
PY
)"
printf '%s\n' "$printed"
[ "$printed" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2

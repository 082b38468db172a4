"""The sizes that the compiled kernel and what calls it agree on. Nothing heavy is imported here.

PANEL: keys that are read together. LANES: numbers of a vector register. BLOCK, STRIP: rows and columns of one product
that stays in registers.
"""

from __future__ import annotations

import torch

PANEL = 64
LANES = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
BLOCK = 6 if LANES == 8 else 8  # AVX2 has 16 registers, the others 32
STRIP = 2 * LANES
DEPTH = 128  # numbers of q and k that are summed at once: of 512 the error would be twice that of a good library's
MOST_TOP = 32  # strongest keys of a row that are kept in order while it is read
HIDDEN = -1e30  # as `visibility.HIDDEN`, which what is compiled is not kept by

# What the kernel notes of every row, by place; then one number per chosen key, per pair of labels, per window.
TOTAL, REST, ENERGY, ENERGY_REST, SQUARES, MOMENT, FACTOR = range(7)
NOTES = 7

STATE, REACH = 16, 32  # bytes that are kept of a row: numbers, and where it stands
SUMS = 4  # registers of sums of a row, before those of the labels

# What the kernel is given, one 64-bit integer each: tensors by their address, strides in bytes.
NAMES = (
    *("q", "q_head", "q_row", "scale", "k", "v", "depth", "strips", "panels"),
    *("packed", "tile", "state", "sums", "classes", "reach", "ranges", "out", "best", "best_keys"),
    *("heads", "rows", "queries", "first", "keys", "causal", "window", "spans"),
    *("softcap", "extra", "extra_head", "extra_row", "extra_panel", "sinks", "sink_head", "sink_row", "sinks_scale"),
    *("notes", "note_step", "head_step", "copied", "copies"),
    *("top", "top_index", "top_weights", "top_keys", "top_step"),
    *("places", "place", "place_step", "labels", "own", "own_step", "label", "label_step", "gaps"),
    *("windows", "widths", "count", "shares", "share_step", "weights", "columns"),
)
RECORD = 8 * len(NAMES)  # bytes

#!/usr/bin/env bash
# matplotlib 3.11.2: the label "ab" with a character between its letters that has no ink and no width: marks and
# isolates of direction, joiners, variation selectors, as texts in Arabic or Hebrew have them.
#
# A good guess: it is as wide as "ab", in each format; or the character is drawn as a box, where a font lacks it.
#
# What it is: so it is in a PNG. In a PDF the second letter is drawn over the first: it stands further left by the
# width of a space. The shaper puts a space there and gives it no advance. The PDF writer takes what follows for moved
# back by the advance that the font's space has, and writes a kern of it, while the character it writes has no width
# to be taken back. A soft hyphen is right in both, and so is a label that is drawn as outlines (an empty path
# effect).
set -euo pipefail
expected='nothing: png as wide as ab, pdf as wide as ab
U+200E: png as wide as ab, pdf narrower
U+2068: png as wide as ab, pdf narrower
U+200D: png as wide as ab, pdf narrower
U+FE0F: png as wide as ab, pdf narrower
U+00AD: png as wide as ab, pdf as wide as ab
U+200E, outlines: png as wide as ab, pdf as wide as ab'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "matplotlib==3.11.2" "numpy==2.4.6" "pillow==13.0.0" "pypdfium2==5.15.2"

cat > "$place/try.py" <<'PYTHON'
import io

import numpy as np
import pypdfium2
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal
from PIL import Image


def width(text, kind, effects):
    figure = Figure(figsize=(4, 1))
    figure.text(0.1, 0.3, text, fontsize=30, family="DejaVu Sans", path_effects=effects)
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=144)
    picture = Image.open(file) if kind == "png" else pypdfium2.PdfDocument(file.getvalue())[0].render(scale=2).to_pil()
    columns = np.flatnonzero((np.asarray(picture.convert("L")) < 128).any(0))
    return columns[-1] - columns[0] + 1


def compared(text, kind, effects):
    more = width(text, kind, effects) - width("ab", kind, effects)
    return "as wide as ab" if abs(more) <= 2 else "wider" if more > 0 else "narrower"  # 2 pixels of 68


def report(name, text, effects=None):
    print(f"{name}: " + ", ".join(f"{kind} {compared(text, kind, effects)}" for kind in ("png", "pdf")))


report("nothing", "ab")
for character in "\u200e\u2068\u200d\ufe0f\u00ad":
    report(f"U+{ord(character):04X}", f"a{character}b")
report("U+200E, outlines", "a\u200eb", [Normal()])
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2

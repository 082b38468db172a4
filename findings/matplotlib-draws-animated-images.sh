#!/usr/bin/env bash
# matplotlib 3.10.9: a line and an image with set_animated(True), and a draw of the whole figure, as one does before
# blitting.
#
# A good guess: neither is drawn. Animated artists are left out of a normal draw, so that the background can be kept and
# they can be drawn on it frame by frame.
#
# What it is: the image is drawn. Axes leave out animated artists that are no AxesImage, so that the first frame of an
# animated heatmap stays in the background, and shows through where later frames are transparent (a mask, NaN). Hiding
# it by set_visible(False) for that draw helps. In 3.11.0 both are left out.
set -euo pipefail
expected='line, animated False: drawn True
line, animated True: drawn False
image, animated False: drawn True
image, animated True: drawn True'

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install -q "matplotlib==3.10.9" "numpy==2.4.6"

cat > "$place/try.py" <<'PYTHON'
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


def has_ink(figure):
    figure.canvas.draw()
    return bool((np.asarray(figure.canvas.buffer_rgba())[..., :3] != 255).any())


for kind in ("line", "image"):
    for animated in (False, True):
        figure, axes = plt.subplots(figsize=(1, 1), dpi=100)
        axes.set_axis_off()
        artist = axes.plot([0, 1], [0, 1])[0] if kind == "line" else axes.imshow([[0, 1], [1, 0]])
        artist.set_animated(animated)
        print(f"{kind}, animated {animated}: drawn {has_ink(figure)}")
PYTHON

seen="$("$place/env/bin/python" "$place/try.py" 2>/dev/null)"
echo "$seen"
[ "$seen" = "$expected" ] || { echo "this has changed; expected:"; echo "$expected"; exit 1; } >&2

#!/usr/bin/env bash
# Seam, oracle, main command, stacks, sound and pictures on other versions, each in an environment of its own that is
# deleted after. By hand, not in .ci/run: each takes some minutes. A row of docs/versions.md for each goes to stdout.
#
#   scripts/versions.sh                                # the oldest and the newest transformers, pinned torch
#   PYTHON=python3.13 scripts/versions.sh 5.23.0       # another Python
#   TORCH=2.11.0 scripts/versions.sh 5.23.0            # another torch; without a CPU build at hand pip takes CUDA's, GBs
set -euo pipefail
cd "$(dirname "$0")/.."

CHECKS=(tests/test_seam.py tests/test_parity.py tests/test_cli_heads.py tests/test_adapters.py tests/test_brought.py
  tests/test_their_code.py tests/test_virtual_tokens.py tests/test_prefix_tuning.py tests/test_stacks_commands.py
  tests/test_sound.py tests/test_pictures.py tests/test_bytes_and_patches.py)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

for version in ${@:-5.17.0 5.23.0}; do
  rm -rf "$folder/env"
  "${PYTHON:-python3.11}" -m venv "$folder/env"
  # What transformers itself holds to other versions is left to pip.
  grep -vE '^(transformers|huggingface_hub|tokenizers|hf-xet)==' constraints.txt >"$folder/pins"
  [ -z "${TORCH:-}" ] || sed -i "s/^torch==.*/torch==$TORCH/; /^triton==/d" "$folder/pins"
  "$folder/env/bin/pip" install -q -c "$folder/pins" "transformers==$version" -e ".[test]" >&2

  python="$folder/env/bin/python"
  export HF_HUB_OFFLINE=1
  found=$("$python" -m pytest -q -p no:cacheprovider "${CHECKS[@]}" 2>&1 | tee "$folder/log" | tail -1) || true
  grep -E '^(FAILED|ERROR)' "$folder/log" >&2 || true
  parity=$("$python" -m attnscope parity 2>&1 >/dev/null | tail -1) || true
  heads=$("$python" -m attnscope heads "the river bank" --format csv 2>/dev/null | wc -l) || true
  "$python" - "$found" "$parity" "$heads" <<'PYTHON'
import datetime, platform, re, sys
import torch, transformers
found, parity, heads = sys.argv[1:]
found = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", found))
held = parity.split(";")[0].removeprefix("parity ")
cells = transformers.__version__, platform.python_version(), torch.__version__, found, held, int(heads) - 1
print("|", " | ".join(map(str, (*cells, datetime.date.today()))), "|")
PYTHON
done

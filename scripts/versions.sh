#!/usr/bin/env bash
# The default tests, and what sixteen commands write, with other versions of what attnscope needs: each choice of versions
# in an environment of its own that is deleted after. By hand, not in .ci/run: each takes some ten minutes. A row of
# docs/versions.md for each goes to stdout, what failed or differs to stderr.
#
#   scripts/versions.sh                            # constraints.txt; the lowest of pyproject.toml; the newest of all
#   scripts/versions.sh pinned 5.17.0 5.23.0       # constraints.txt; the same with that transformers
#   PYTHON=python3.13 scripts/versions.sh pinned   # another Python
#   TORCH=2.11.0 scripts/versions.sh 5.17.0        # another torch; without a CPU build at hand pip takes CUDA's, GBs
#   WRITTEN=folder scripts/versions.sh pinned      # keeps what the commands wrote: a later call with it compares
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pinned="${WRITTEN:-$folder}/pinned"
export HF_HUB_OFFLINE=1

versions() { # WHICH: what pip is held to
  case $1 in
    pinned) cat constraints.txt ;;
    lowest) # each `>=` as `==`, without extras and markers
      sed '1,/^\[project\]/d' pyproject.toml | grep -oE '"[A-Za-z0-9_-]+(\[[a-z]+\])?>=[0-9.]+' |
        sed -E 's/"//; s/\[[a-z]+\]//; s/>=/==/' ;;
    newest) ;;
    *) # what transformers itself holds to other versions is left to pip
      grep -vE '^(transformers|huggingface_hub|tokenizers|hf-xet)==' constraints.txt
      echo "transformers==$1" ;;
  esac
}

commands() ( # FOLDER: what the commands write, a file each
  mkdir -p "$1" && cd "$1"
  text="the financial bank is located on river bank, the financial bank"
  river="the bank of the river, the bank of the" field="the bank of the field, the bank of the"
  write() { attnscope "${@:2}" >"$1" 2>/dev/null || echo "exit code $?" >>"$1"; }
  write heads heads "$text" --format csv
  write relations relations "$text" --format csv
  write keys keys "$text" --format csv
  write rollout rollout "$text" --format csv
  write why why "$river" --head L3H0 --key river --format csv
  write knockout knockout "$river" --key river --over heads --random 2 --format csv
  write patch patch "$river" --corrupted "$field" --answer " river" --over heads --format csv
  write ablate ablate demo --select 3.0-1 --sequences 4 --random 2 --format csv
  write parity parity --format csv
  write scan scan demo --sequences 4 --format csv
  write fused heads "$text" --engine fused --format csv
  write tiles heads "$text" --engine tiles --format csv
  write numba heads "$text" --engine numba --format csv
  write info info --format json
  write metrics metrics
  write svg heatmap "$text" --select 3.0 --image svg --out pictures
  cat pictures/heads/*.svg >svg && rm -r pictures
)

[ $# -gt 0 ] || set -- pinned lowest newest
for chosen in "$@"; do
  "${PYTHON:-python3.11}" -m venv --clear "$folder/env"
  versions "$chosen" >"$folder/versions"
  if [ -n "${TORCH:-}" ]; then
    sed -i '/^torch==/d; /^triton==/d' "$folder/versions"
    echo "torch==$TORCH" >>"$folder/versions"
  fi
  "$folder/env/bin/pip" install -q --no-compile -c "$folder/versions" -e ".[test]" >&2
  (
    PATH="$folder/env/bin:$PATH"
    rm -rf "$folder/written"
    commands "$folder/written" || true
    [ "$chosen" != pinned ] || [ -d "$pinned" ] || { mkdir -p "${pinned%/*}" && cp -r "$folder/written" "$pinned"; }
    pytest -q -p no:cacheprovider >"$folder/tests" 2>&1 || grep -E '^(FAILED|ERROR)' "$folder/tests" >&2 || true
    python - "$chosen" "$folder/written" "$pinned" "$(tail -1 "$folder/tests")" <<'PYTHON'
import datetime, pathlib, platform, re, sys
import torch, transformers
name, written, pinned, tests = sys.argv[1], *map(pathlib.Path, sys.argv[2:4]), sys.argv[4]
tests = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", tests))
files = {path.name: path.read_bytes() for path in sorted(written.iterdir()) if path.is_file()}
wrong = [name for name, data in files.items() if b"exit code" in data]
differ = [name for name, data in files.items() if pinned.is_dir() and data != (pinned / name).read_bytes()]
print(f"{name}: failed {wrong}, other than pinned {differ}", file=sys.stderr)
same = f"{len(files) - len({*wrong, *differ})} of {len(files)}" if pinned.is_dir() else "not compared"
cells = name, transformers.__version__, platform.python_version(), torch.__version__, tests, same, datetime.date.today()
print("|", " | ".join(map(str, cells)), "|")
PYTHON
  )
done

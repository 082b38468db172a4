#!/usr/bin/env bash
# What a visit to a card should run, the most important first; each part is whole in itself and has a limit of its own.
#
#     bash benchmarks/gpu.sh gpu.jsonl          # about ten minutes, about an hour with `long` behind it
#     python benchmarks/results.py gpu.jsonl    # anywhere: its tables into RESULTS.md
#
# A record a part: {"part", "command", "code", "seconds", "said"}. What was run before is kept: a visit that was cut off
# goes on with the parts that are missing.
set -u
cd "$(dirname "$0")/.." || exit
out=${1:-gpu.jsonl} long=${2:-} device=${DEVICE:-cuda:0}
export HF_HUB_OFFLINE=1 PYTHONPATH="$PWD:$PWD/tests:${PYTHONPATH:-}"
touch "$out"

part() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 said code start=$SECONDS
  shift 2
  grep -qF "\"part\": \"$name\"" "$out" && return
  said=$(timeout "$limit" "$@" 2>&1)
  code=$?
  printf '%s: code %s, %s s\n' "$name" "$code" $((SECONDS - start)) >&2
  printf '%s' "$said" | python -c '
import json, sys
name, code, seconds, *command = sys.argv[1:]
record = {"part": name, "command": " ".join(command), "code": int(code), "seconds": int(seconds)}
print(json.dumps(record | {"said": sys.stdin.read()[-20000:]}))' "$name" "$code" $((SECONDS - start)) "$@" >>"$out"
}

engines() { # TOKENS SECONDS
  part "Engines ($device, $1 tokens)" "$2" python benchmarks/engines.py --device "$device" --large --tokens "$1" \
    --ways plain,fused-statistics,fused-24-heads,fused-listening --runs 2 --processes 1
}

part "Environment" 60 python -m attnscope doctor
part "Card" 20 nvidia-smi
part "Kernels beside the tiles" 180 python -m pytest -q -n 0 -p no:cacheprovider tests/triton_kernels.py
part "Commands (float32)" 240 python benchmarks/paths.py --device "$device"
part "Kernels, timed" 120 python benchmarks/kernels.py --device "$device" --tokens 2048,8192,32768
engines 2048 60
engines 8192 90
part "Commands (bfloat16)" 240 python benchmarks/paths.py --device "$device" --dtype bfloat16
engines 32768 180
part "Parity" 120 python benchmarks/parity.py --large --device "$device" --tokens 64 --repeats 2
part "Eager and output_attentions ($device)" 120 python benchmarks/engines.py --device "$device" --large \
  --tokens 2048 --ways plain,eager,output_attentions --runs 1 --processes 1
part "GPU tests" 300 python -m pytest -q -n 0 -m gpu -p no:cacheprovider
engines 131072 600
part "Figures" 120 python benchmarks/figures.py
part "Batch" 600 python benchmarks/batch.py --rounds 1 --device cuda
if [ "$long" = long ]; then
  part "Kernels beside the tiles, every option" 1800 \
    python -m pytest -q -n 0 -m slow -p no:cacheprovider tests/triton_kernels.py
fi

#!/usr/bin/env bash
# What a visit to a card should run, in two commands of at most ten minutes, the most important first.
#
#     bash benchmarks/gpu.sh visit              # the environment, the kernels, the engines at 8k, 32k, 2k and 131k tokens
#     bash benchmarks/gpu.sh visit second       # tests, commands against the CPU, masks, parity, batch
#     bash benchmarks/gpu.sh visit long         # an hour: every option of every kernel
#     python3 benchmarks/results.py visit       # anywhere: its tables into RESULTS.md
#
# A part's output is in visit/NAME.txt as it comes, whenever it is cut off. visit/visit.jsonl has a record when a part
# begins, {"part", "command", "file"}, and one when it ends, {"part", "code", "seconds"}. A part that did not end well is
# run again by the next call.
set -u
cd "$(dirname "$0")/.." || exit
out=${1:-visit} which=${2:-first} device=${DEVICE:-cuda:0} python=${PYTHON:-python3}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PWD/tests:${PYTHONPATH:-}"
mkdir -p "$out" && records=$out/visit.jsonl && touch "$records"

part() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 code start=$SECONDS
  shift 2
  grep -qF "\"part\": \"$name\", \"code\": 0," "$records" && return
  printf '{"part": "%s", "command": "%s", "file": "%s.txt"}\n' "$name" "$*" "$name" >>"$records"
  timeout "$limit" "$@" 2>&1 | tee "$out/$name.txt"
  code=${PIPESTATUS[0]}
  printf '{"part": "%s", "code": %s, "seconds": %s}\n' "$name" "$code" $((SECONDS - start)) >>"$records"
  printf '%s: code %s, %s s\n' "$name" "$code" $((SECONDS - start)) >&2
}

case $which in
first)
  part environment 60 "$python" benchmarks/environment.py --device "$device"
  part kernels 110 "$python" benchmarks/kernels.py --device "$device" --tokens 8192,32768
  part engines 400 "$python" benchmarks/card.py --device "$device" --tokens 8192,32768,2048,131072
  ;;
second)
  part kernel-tests 100 "$python" -m pytest -q -n 0 -p no:cacheprovider tests/triton_kernels.py
  part tests 150 "$python" -m pytest -q -n 0 -p no:cacheprovider tests/test_gpu.py
  part commands 90 "$python" benchmarks/paths.py --device "$device"
  part commands-bfloat16 60 "$python" benchmarks/paths.py --device "$device" --dtype bfloat16
  part masks 80 "$python" benchmarks/card.py --device "$device" --shape mistral --tokens 16384
  part parity 60 "$python" benchmarks/parity.py --large --device "$device" --tokens 64 --repeats 1
  part batch 60 "$python" benchmarks/batch.py --rounds 1 --device "$device"
  ;;
long)
  part every-option 3000 "$python" -m pytest -q -n 0 -m slow -p no:cacheprovider tests/triton_kernels.py
  part eager 300 "$python" benchmarks/engines.py --device "$device" --large --tokens 2048 \
    --ways plain,eager,output_attentions --runs 1 --processes 1
  ;;
esac

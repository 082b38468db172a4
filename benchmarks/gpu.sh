#!/usr/bin/env bash
# What a visit of ten minutes to a card should run, the most wanted first. Each part is whole in itself, what fails or
# takes too long is kept as such, and one file comes out.
#
#   benchmarks/gpu.sh gpu.jsonl                    # on CUDA, with the package and its [test] extra installed
#   DEVICE=cpu benchmarks/gpu.sh rehearsal.jsonl   # the same parts without a card, at small sizes
#   python benchmarks/results.py gpu.jsonl         # its tables; --write puts them into RESULTS.md
set -u
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?the file that is to be written}")
device=${DEVICE:-cuda}
rm -f "$out"

part() { # seconds, name, command
  python benchmarks/results.py "$out" --keep "$2" --limit "$1" -- "${@:3}"
}
engines() { # seconds, name, options
  part "$1" "$2" python benchmarks/engines.py --device "$device" --runs 1 --processes 1 "${@:3}"
}

if [ "$device" = cpu ]; then
  lengths=(64 128) size=() texts=50 heads=24
else
  lengths=(2048 8192 32768 131072) size=(--large) texts=2000 heads=672
fi

part 60 "environment" python benchmarks/gpu.py environment --device "$device"
part 120 "the commands" python benchmarks/gpu.py commands --device "$device"
part 120 "the kernels" python benchmarks/gpu.py kernels --device "$device" "${size[@]}"
part 90 "parity" python benchmarks/gpu.py parity --device "$device" "${size[@]}"
for tokens in "${lengths[@]}"; do
  engines 150 "engines, $tokens tokens" --tokens "$tokens" --ways plain,fused,fused-24-heads,fused-listening "${size[@]}"
done
engines 90 "eager, ${lengths[0]} tokens" --tokens "${lengths[0]}" --ways plain,eager,output_attentions "${size[@]}"
part 120 "the tests" python -m pytest -q -n 0 -m gpu tests/test_gpu.py
part 60 "figures" python benchmarks/figures.py --heads "$heads"
part 120 "batch" python benchmarks/batch.py --texts "$texts" --rounds 1 --device "$device"
echo "$out" >&2

#!/usr/bin/env bash
# The sdist and the wheel of the last commit, checked and tried outside of the clone. Nothing is uploaded.
#
#   scripts/release.sh          # into dist/, which must not hold them yet
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT

[ -z "$(git -C "$root" status --porcelain)" ] || { echo "there are changes that are not committed" >&2; exit 1; }
mkdir "$place/source" "$place/dist" "$place/elsewhere"
git -C "$root" archive HEAD | tar -xf - -C "$place/source"

environment() { # NAME: a fresh environment, whose programs are in $bin
  "$(command -v python3 || command -v python)" -m venv "$place/$1"
  bin="$place/$1/bin"
  if [ ! -d "$bin" ]; then bin="$place/$1/Scripts"; fi  # Windows
}

environment tools
"$bin/pip" install -q -c "$root/constraints.txt" build check-wheel-contents twine
"$bin/python" -m build --outdir "$place/dist" "$place/source"  # the wheel is made of the sdist
"$bin/twine" check --strict "$place"/dist/*
# W002: the licence of the demo is with the demo, and with the licences
"$bin/check-wheel-contents" --ignore W002 "$place"/dist/*.whl

environment tried
"$bin/pip" install -q -c "$root/constraints.txt" "$place"/dist/*.whl
cd "$place/elsewhere"
"$bin/attnscope" doctor
"$bin/attnscope" heads "the financial bank is located on river bank" --out run >/dev/null
"$bin/attnscope" view run --out page.html
"$bin/attnscope" parity >/dev/null
[ -s run/manifest.json ] && [ -s page.html ]

mkdir -p "$root/dist"
for file in "$place"/dist/*; do
  [ ! -e "$root/dist/$(basename "$file")" ] || { echo "dist/$(basename "$file") exists already" >&2; exit 1; }
done
cp "$place"/dist/* "$root/dist/"
ls -l "$root/dist"

#!/usr/bin/env bash
# Writes the hashes of all files of each package into locks of PyPI's packages, which keep their versions:
#   scripts/renew_hashes.sh [LOCK...]        by default all in requirements/ but torch-cpu.txt
# Needs uv (or UV=/path/to/uv) and the package index.
set -euo pipefail

topic=hashes
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

uv=${UV:-uv}
command -v "$uv" >/dev/null || fail "there is no $uv" "pip install uv, or UV=/path/to/uv"
[ $# -gt 0 ] || mapfile -t locks < <(find "$root/requirements" -name '*.txt' ! -name torch-cpu.txt | sort)
[ $# -eq 0 ] || locks=("$@")
for lock in "${locks[@]}"; do
  [ -f "$lock" ] || fail "there is no lock $lock" "$0 requirements/*.txt"
done

python_of() { # lock: the version that its head names, a release that no package finds too old
  echo "$(grep -oE -m 1 'Python 3\.[0-9]+' "$1" | cut -d' ' -f2).9"
}

partial=$(mktemp -d)
trap 'rm -rf "$partial"' EXIT
for lock in "${locks[@]}"; do
  grep '==' "$lock" | cut -d' ' -f1 >"$partial/pins.in"
  "$uv" pip compile --quiet --no-config --no-deps --generate-hashes --no-header --no-annotate \
    --python-version "$(python_of "$lock")" --python-platform x86_64-manylinux_2_34 \
    "$partial/pins.in" >"$partial/hashed"
  { grep '^#' "$lock" && cat "$partial/hashed"; } >"$partial/lock"
  cp "$partial/lock" "$lock"
done

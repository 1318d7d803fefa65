#!/usr/bin/env bash
# Installs what tests/acceptance/test_harnesses.py and test_framework_programs.py run against the
# proxy into .venvs/harnesses: each coding harness from its lock in requirements/harnesses, and
# Python frameworks from requirements/harnesses.txt. Idempotent, like scripts/setup.sh, which makes
# the Python it uses.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
home=$root/.venvs/harnesses
lock=$root/requirements/harnesses.txt
python=$root/.venvs/train/bin/python

fail() { # message, hint
  printf 'set-up of harnesses: %s\n  try: %s\n' "$1" "$2" >&2
  exit 78
}

[ -x "$python" ] || fail "there is no Python to start from" "make setup"
echo "set-up: harnesses  4 GB from npm and PyPI"
"$python" -m areal_hpc install-harness all --dir "$home"

stamp=$(cat "$lock" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)
[ "$(cat "$home/python/.installed" 2>/dev/null)" != "$stamp" ] || exit 0
rm -rf "$home/python"
"$python" -m venv "$home/python"
"$home/python/bin/python" -m pip install --quiet --no-deps --require-hashes -r "$lock"
printf '%s\n' "$stamp" >"$home/python/.installed"

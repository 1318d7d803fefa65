#!/usr/bin/env bash
# Installs what tests/acceptance/test_harnesses.py runs against the proxy into .venvs/harnesses: each
# coding harness from its lock in requirements/harnesses. Idempotent, like
# scripts/setup.sh, which makes the Python it uses.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
home=$root/.venvs/harnesses
python=$root/.venvs/train/bin/python

fail() { # message, hint
  printf 'set-up of harnesses: %s\n  try: %s\n' "$1" "$2" >&2
  exit 78
}

[ $# -eq 0 ] || fail "expected no arguments, got $*" "$0"
[ -x "$python" ] || fail "there is no Python to start from" "make setup"
echo "set-up: harnesses  4 GB from npm and PyPI"
"$python" -m areal_hpc install-harness all --dir "$home"

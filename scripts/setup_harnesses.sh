#!/usr/bin/env bash
# Installs what tests/acceptance/test_harnesses.py runs against the proxy into .venvs/harnesses: each
# coding harness from its lock in requirements/harnesses. Idempotent, like
# scripts/setup.sh, which makes the Python it uses.
set -euo pipefail

topic='set-up of harnesses'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

home=$root/.venvs/harnesses
python=$root/.venvs/main/bin/python

[ $# -eq 0 ] || fail "expected no arguments, got $*" "$0"
[ -x "$python" ] || fail "there is no Python to start from" "make setup"
echo "set-up: harnesses  4 GB from npm and PyPI"
"$python" -m areal_hpc install-harness all --dir "$home"

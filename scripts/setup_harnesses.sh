#!/usr/bin/env bash
# Installs the coding agents that tests/acceptance/test_harnesses.py runs against the proxy into
# .venvs/harnesses: those of npm from requirements/harnesses, those of Python from
# requirements/harnesses.txt. Idempotent, like scripts/setup.sh, which makes the Python it uses.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
home=$root/.venvs/harnesses
locks=$root/requirements

fail() { # message, hint
  printf 'set-up of harnesses: %s\n  try: %s\n' "$1" "$2" >&2
  exit 78
}

stamp=$(cat "$locks"/harnesses/*.json "$locks/harnesses.txt" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)
[ "$(cat "$home/.installed" 2>/dev/null)" != "$stamp" ] || exit 0

command -v npm >/dev/null || fail "npm is missing" "install Node.js 20 or newer, which has it"
[ -x "$root/.venvs/train/bin/python" ] || fail "there is no Python to start from" "make setup"

echo "set-up: harnesses  2 GB from npm and PyPI"
rm -rf "$home"
mkdir -p "$home"
cp "$locks"/harnesses/*.json "$home"
# Not `npm ci`: it gives up on optional packages for other systems, which not every registry has.
(cd "$home" && npm install --no-save --no-audit --no-fund --loglevel=error)
"$root/.venvs/train/bin/python" -m venv "$home/python"
"$home/python/bin/python" -m pip install --quiet --no-deps -r "$locks/harnesses.txt"
printf '%s\n' "$stamp" >"$home/.installed"

#!/usr/bin/env bash
# Makes .venvs/oracles (or $ORACLES_DIR), whose Python has TRL and verl: tests/acceptance/test_oracles.py
# compares losses with theirs. It has the packages of .venvs/main, and on top those of
# tests/locks/oracles.txt. Idempotent.
set -euo pipefail

topic='set-up of oracles'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

home=${ORACLES_DIR:-$root/.venvs/oracles}
lock=$root/tests/locks/oracles.txt

packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; } # interpreter

[ $# -eq 0 ] || fail "expected no arguments, got $*" "$0"
main=$root/.venvs/main/bin/python
[ -x "$main" ] || fail "there is no Python to start from" "make setup"
stamp=$(cat "$lock" "$root/uv.lock" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)
[ "$(cat "$home/.installed" 2>/dev/null)" != "$stamp" ] || exit 0

echo "set-up: oracles"
rm -rf "$home"
"$main" -m venv "$home"
"$home/bin/python" -m pip install --quiet --no-deps --require-hashes -r "$lock"
packages=$(packages_of "$home/bin/python")
packages_of "$main" >"$packages/main.pth"
rm -rf "${packages:?}/tests" # verl's wheel has a package of this name, which would hide the project's
printf '%s\n' "$stamp" >"$home/.installed"

#!/usr/bin/env bash
# Makes .venvs/oracles (or $ORACLES_DIR), whose Python has TRL and verl: tests/acceptance/test_oracles.py
# compares losses with theirs. It has the packages of .venvs/train, and on top those of
# requirements/oracles.txt. Idempotent.
set -euo pipefail

topic='set-up of oracles'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

home=${ORACLES_DIR:-$root/.venvs/oracles}
lock=$root/requirements/oracles.txt

packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; } # interpreter

[ $# -eq 0 ] || fail "expected no arguments, got $*" "$0"
train=$root/.venvs/train/bin/python
[ -x "$train" ] || fail "there is no Python to start from" "make setup"
stamp=$(cat "$lock" "$root/requirements/train.txt" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)
[ "$(cat "$home/.installed" 2>/dev/null)" != "$stamp" ] || exit 0

echo "set-up: oracles"
rm -rf "$home"
"$train" -m venv "$home"
"$home/bin/python" -m pip install --quiet --no-deps --require-hashes -r "$lock"
packages=$(packages_of "$home/bin/python")
packages_of "$train" >"$packages/train.pth"
rm -rf "${packages:?}/tests" # verl's wheel has a package of this name, which would hide the project's
printf '%s\n' "$stamp" >"$home/.installed"

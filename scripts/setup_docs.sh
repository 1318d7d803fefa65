#!/usr/bin/env bash
# Makes .venvs/docs, whose mkdocs makes the site from build/docs, with the packages of
# requirements/docs.txt. Idempotent.
set -euo pipefail

topic='set-up of docs'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

home=$root/.venvs/docs
lock=$root/requirements/docs.txt

[ $# -eq 0 ] || fail "expected no arguments, got $*" "$0"
main=$root/.venvs/main/bin/python
[ -x "$main" ] || fail "there is no Python to start from" "make setup"
stamp=$(cat "$lock" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)
[ "$(cat "$home/.installed" 2>/dev/null)" != "$stamp" ] || exit 0

echo "set-up: docs"
rm -rf "$home"
"$main" -m venv "$home"
"$home/bin/python" -m pip install --quiet --no-deps --require-hashes -r "$lock"
printf '%s\n' "$stamp" >"$home/.installed"

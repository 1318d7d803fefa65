#!/usr/bin/env bash
# Installs the SDKs and agent frameworks that tests/acceptance/test_framework_programs.py runs
# against the proxy into .venvs/harnesses: Pythons from tests/locks/framework-programs.txt and, at
# odds with it and with one another, more-frameworks.txt and llama-index.txt; Node
# packages from tests/locks/node. Idempotent, like scripts/setup.sh, which makes the Python it uses.
set -euo pipefail

topic='set-up of framework programs'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

home=$root/.venvs/harnesses
locks=$root/tests/locks
python=$root/.venvs/main/bin/python

[ $# -eq 0 ] || fail "expected no arguments, got $*" "$0"
[ -x "$python" ] || fail "there is no Python to start from" "make setup"
command -v npm >/dev/null || fail "there is no npm" "install Node.js 20 or newer"
echo "set-up: framework programs  1 GB from PyPI and npm"

make_anew() { # folder, lock, command: fill the folder by the lock, unless that has been done
  stamp=$(cat "$2" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)
  [ "$(cat "$1/.installed" 2>/dev/null)" != "$stamp" ] || return 0
  rm -rf "$1"
  mkdir -p "$home"
  "$3" "$1" "$2"
  printf '%s\n' "$stamp" >"$1/.installed"
}

install_python() { # folder, lock
  "$python" -m venv "$1"
  "$1/bin/python" -m pip install --quiet --no-deps --require-hashes -r "$2"
}

install_node_packages() { # folder, lock
  mkdir -p "$1"
  cp "$(dirname "$2")"/package*.json "$1"
  # Not npm ci: it gives up on optional packages for other systems that a registry lacks.
  (cd "$1" && npm install --no-save --no-audit --no-fund --loglevel=error)
}

make_anew "$home/python" "$locks/framework-programs.txt" install_python
make_anew "$home/frameworks" "$locks/more-frameworks.txt" install_python
make_anew "$home/llama-index" "$locks/llama-index.txt" install_python
make_anew "$home/node" "$locks/node/package-lock.json" install_node_packages

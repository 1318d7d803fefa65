#!/usr/bin/env bash
# Makes a Python for each gym that areal_hpc/agents/gym_agents.py plays, in .venvs/gyms (or $GYMS_DIR), from
# requirements/gyms/NAME.txt: all of them, or those that are named. Idempotent.
set -euo pipefail

topic='set-up of gyms'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

home=${GYMS_DIR:-$root/.venvs/gyms}
locks=$root/requirements/gyms

find_python() { # a Python 3.12: on the PATH (a shim of pyenv's may be empty), pyenv's, uv's
  local one
  for one in python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python3.12 \
    "$HOME"/.local/share/uv/python/cpython-3.12*/bin/python3.12; do
    if "$one" -c '' >/dev/null 2>&1; then
      echo "$one"
      return
    fi
  done
  return 1
}

python=$(find_python) || fail "there is no python3.12, which most gyms need" \
  "install it (module load, pyenv install 3.12, uv python install 3.12)"
[ $# -gt 0 ] || set -- $(cd "$locks" && ls ./*.txt | sed 's|.*/||; s|\.txt$||')

for gym in "$@"; do
  lock=$locks/$gym.txt
  [ -f "$lock" ] || fail "there is no gym $gym" "one of $(cd "$locks" && echo ./*.txt)"
  stamp=$(cat "$lock" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)
  [ "$(cat "$home/$gym/.installed" 2>/dev/null)" != "$stamp" ] || continue
  echo "set-up: $gym"
  rm -rf "${home:?}/$gym"
  mkdir -p "$home"
  "$python" -m venv "$home/$gym"
  "$home/$gym/bin/python" -m pip install --quiet --no-deps --require-hashes -r "$lock"
  printf '%s\n' "$stamp" >"$home/$gym/.installed"
done

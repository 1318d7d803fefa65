# What the scripts beside it share. Each sets `topic`, with which its errors begin, and sources it.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { # message, then one hint a line
  printf '%s: %s\n' "$topic" "$1" >&2
  shift
  printf '  try: %s\n' "$@" >&2
  exit 78
}

install_packages() { # packages of Debian
  local log
  log=$(mktemp)
  try_to_install "$log" "$@" || { apt-get update >>"$log" 2>&1 && try_to_install "$log" "$@"; } || {
    tail -n 15 "$log" | sed 's/^/    /' >&2
    fail "apt-get failed; its whole output is in $log" "fix what it says and repeat"
  }
  rm -f "$log"
}

try_to_install() { # log, packages
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${@:2}" >>"$1" 2>&1
}

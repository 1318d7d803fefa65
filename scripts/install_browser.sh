#!/usr/bin/env bash
# Installs the distribution's Chromium, in which acceptance tests look at the pages of areal-hpc view.
#
# Idempotent. Exit code 78 where a person has to act.
set -euo pipefail

fail() { # message, then one hint a line
  printf 'browser: %s\n' "$1" >&2
  shift
  printf '  try: %s\n' "$@" >&2
  exit 78
}

[ $# -eq 0 ] || fail "expected no arguments, got $*" "$0"
! command -v chromium >/dev/null || exit 0
command -v apt-get >/dev/null ||
  fail "this installs Debian's package, and apt-get is not here" "put the program chromium on the path"
[ "$(id -u)" = 0 ] ||
  fail "installing packages needs root" "sudo scripts/install_browser.sh"

log=$(mktemp)
install() {
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium >>"$log" 2>&1
}
install || { apt-get update >>"$log" 2>&1 && install; } || {
  tail -n 15 "$log" | sed 's/^/    /' >&2
  fail "apt-get failed; its whole output is in $log" "fix what it says and repeat"
}
rm -f "$log"

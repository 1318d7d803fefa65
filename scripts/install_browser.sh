#!/usr/bin/env bash
# Installs the distribution's Chromium, in which acceptance tests look at the pages of areal-hpc view.
#
# Idempotent. Exit code 78 where a person has to act.
set -euo pipefail

topic=browser
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[ $# -eq 0 ] || fail "expected no arguments, got $*" "$0"
! command -v chromium >/dev/null || exit 0
command -v apt-get >/dev/null ||
  fail "this installs Debian's package, and apt-get is not here" "put the program chromium on the path"
[ "$(id -u)" = 0 ] ||
  fail "installing packages needs root" "sudo scripts/install_browser.sh"

install_packages chromium

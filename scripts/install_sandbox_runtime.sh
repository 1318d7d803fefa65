#!/usr/bin/env bash
# Installs the distribution's gVisor (runsc) or podman, for rollout.agent.isolation. Nothing is
# started.
#
#   scripts/install_sandbox_runtime.sh gvisor|podman...
#
# Idempotent. Exit code 78 where a person has to act.
set -euo pipefail

topic='sandbox runtime'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

wanted=("$@")
[ $# -gt 0 ] || fail "name what to install" "$0 gvisor podman"
packages=()
for one in "${wanted[@]}"; do
  case $one in
    gvisor) program=runsc needs=(runsc) ;;
    # crun, for runc cannot do without control groups; uidmap, for images of several users.
    podman) program=podman needs=(podman crun uidmap) ;;
    *) fail "there is no sandbox runtime $one" "$0 gvisor podman" ;;
  esac
  PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || packages+=("${needs[@]}")
done
[ ${#packages[@]} -gt 0 ] || exit 0

by_hand="without root: put the programs on the path of every node (${packages[*]})"
command -v apt-get >/dev/null ||
  fail "this installs Debian's packages, and apt-get is not here" "$by_hand"
[ "$(id -u)" = 0 ] || fail "installing packages needs root" "sudo $0 $*" "$by_hand"

install_packages "${packages[@]}"

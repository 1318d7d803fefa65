#!/usr/bin/env bash
# Installs the distribution's podman, for rollout.agent.isolation. Nothing is started.
#
#   scripts/install_sandbox_runtime.sh podman
#
# Idempotent. Exit code 78 where a person has to act.
set -euo pipefail

topic='sandbox runtime'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[ "$*" = podman ] || fail "there is no sandbox runtime '$*' to install" "$0 podman"
PATH=$PATH:/usr/sbin:/sbin command -v podman >/dev/null && exit 0
# crun, for runc cannot do without control groups; uidmap, for images of several users.
packages=(podman crun uidmap)

by_hand="without root: put the programs on the path of every node (${packages[*]})"
command -v apt-get >/dev/null ||
  fail "this installs Debian's packages, and apt-get is not here" "$by_hand"
[ "$(id -u)" = 0 ] || fail "installing packages needs root" "sudo $0 $*" "$by_hand"

install_packages "${packages[@]}"

#!/usr/bin/env bash
# Installs the distribution's Slurm for `areal-hpc devcluster`: daemons, clients, munge, MariaDB.
# Nothing is started, now or at boot: the devcluster runs its own copies from a directory of its own.
#
# Idempotent. Exit code 78 where a person has to act.
set -euo pipefail

topic=slurm
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages=(slurmctld slurmd slurmdbd slurm-client slurm-wlm-basic-plugins slurm-wlm-mysql-plugin
  munge mariadb-server iproute2 util-linux)
commands=(slurmctld slurmd slurmdbd srun munged mungekey mariadbd mariadb-install-db ip unshare)
services=(slurmctld slurmd slurmdbd munge mariadb)
policy=/usr/sbin/policy-rc.d

[ $# -eq 0 ] || fail "expected no arguments, got $*" "$0"

missing=()
for command in "${commands[@]}"; do
  PATH=$PATH:/usr/sbin:/sbin command -v "$command" >/dev/null || missing+=("$command")
done
[ "${#missing[@]}" -gt 0 ] || exit 0

command -v apt-get >/dev/null ||
  fail "this installs Debian's and Ubuntu's packages, and apt-get is not here (missing: ${missing[*]})" \
    "install Slurm 22.05 or newer with slurmdbd, munge and MariaDB from your distribution" \
    "without root: run the devcluster in a container of Debian 12"
[ "$(id -u)" = 0 ] ||
  fail "installing packages needs root (missing: ${missing[*]})" \
    "sudo scripts/install_slurm.sh"

# A policy of "never start" for the time of the installation; one that is there already stays.
# Packages enable their services for the next boot too, so those that were not here before are disabled.
put_policy=false
if [ ! -e "$policy" ]; then
  put_policy=true
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
elif "$policy" munge start >/dev/null 2>&1 || [ $? != 101 ]; then
  fail "$policy is there and lets packages start their services" \
    "move it aside for the time of the installation"
fi

known=()
for service in "${services[@]}"; do
  [ ! -e "/lib/systemd/system/$service.service" ] || known+=("$service")
done

began=$SECONDS
install_packages "${packages[@]}"

if command -v systemctl >/dev/null; then
  for service in "${services[@]}"; do
    [[ " ${known[*]} " == *" $service "* ]] || systemctl disable "$service" >/dev/null 2>&1 || true
  done
fi
! $put_policy || rm -f "$policy"
echo "slurm: $(PATH=$PATH:/usr/sbin slurmctld -V) installed in $((SECONDS - began)) s; no service was started"

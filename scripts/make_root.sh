#!/usr/bin/env bash
# Unpacks programs of another release of Debian into .roots/NAME, with all libraries that they need:
# a newer Slurm beside the machine's own (`areal-hpc devcluster up --slurm 26.05`), or Apptainer.
#
#   scripts/make_root.sh 22.05|24.11|26.05|apptainer...
#
# Nothing is installed and no root is needed: apt-get resolves and fetches, dpkg-deb unpacks. The
# programs in .roots/NAME/bin name their own loader and libraries, so they run in the machine's own
# file system, and so does what they start.
#
# Idempotent. DEBIAN_MIRROR names another mirror, such as a date of snapshot.debian.org: Debian's sid
# moves on to the next Slurm. Exit code 78 where a person has to act.
set -euo pipefail

topic='make_root'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
slurm_packages=(slurmctld slurmd slurmdbd slurm-client slurm-wlm-basic-plugins slurm-wlm-mysql-plugin)
programs=(apptainer sacct sacctmgr salloc sattach sbatch sbcast scancel scontrol sdiag sinfo sprio squeue
  sreport srun sshare sstat strigger slurmctld slurmd slurmdbd slurmstepd)
multiarch=x86_64-linux-gnu

[ $# -gt 0 ] || fail "name what to unpack" "$0 24.11 26.05 apptainer"
for program in apt-get dpkg-deb; do
  command -v "$program" >/dev/null || fail "there is no $program here" "run it on Debian or Ubuntu"
done
[ -e "$keyring" ] || fail "there is no $keyring" "apt-get install debian-archive-keyring"

make_root() { # name, suite, packages
  local made=$root/.roots/$1 suite=$2 began=$SECONDS
  [ ! -e "$made/bin" ] || return 0
  rm -rf "$made"
  mkdir -p "$made/apt/lists/partial" "$made/apt/archives/partial"
  fetch_packages "$made/apt" "$suite" patchelf "${@:3}"
  for package in "$made"/apt/archives/*.deb; do dpkg-deb --extract "$package" "$made"; done
  rm -rf "$made/apt" "$made"/usr/share/{doc,locale,man}
  link_programs "$made"
  echo "root: $1 from Debian $suite in $made after $((SECONDS - began)) s"
}

fetch_packages() { # folder, suite, packages
  local log=$1/log
  printf 'deb [signed-by=%s] %s %s main\n' "$keyring" "$mirror" "$2" >"$1/sources.list"
  : >"$1/status" # nothing counts as installed: what is fetched is complete
  local options=(-o Dir::State="$1" -o Dir::Cache="$1" -o Dir::State::status="$1/status"
    -o Dir::Etc::SourceList="$1/sources.list" -o Dir::Etc::SourceParts=- -o Debug::NoLocking=1
    -o APT::Sandbox::User= -o APT::Install-Recommends=false -o Acquire::Check-Valid-Until=false
    -o Acquire::Languages=none)
  { apt-get "${options[@]}" update && apt-get "${options[@]}" --yes --download-only install "${@:3}"; } >"$log" 2>&1 || {
    tail -n 15 "$log" | sed 's/^/    /' >&2
    fail "apt-get could not fetch ${*:3} of $2 from $mirror" \
      "DEBIAN_MIRROR=... $0, with a mirror that this machine reaches"
  }
}

link_programs() { # folder: its programs go to bin/
  local made=$1 name program starter=lib/$multiarch/apptainer/bin/starter
  mkdir "$made/bin.part"
  for name in "${programs[@]}"; do
    for program in "$made"/usr/{bin,sbin}/"$name"{,-wlm}; do # -wlm: what Debian's alternatives choose
      [ ! -f "$program" ] || [ -L "$program" ] || copy_with_own_libraries "$made" "$program" "bin.part/$name"
    done
  done
  if [ -e "$made/usr/$starter" ]; then
    # Apptainer looks for its files from where it lies; its starter takes the folder above lib/ARCH for /usr.
    mkdir -p "$made/${starter%/*}" "$made/var/lib/apptainer/mnt/session"
    copy_with_own_libraries "$made" "$made/usr/$starter" "$starter"
    ln -s ../etc ../var "$made/lib"
    ln -s . "$made/lib/lib"
  fi
  mv "$made/bin.part" "$made/bin"
}

copy_with_own_libraries() { # folder, program, copy in the folder
  local made=$1 libraries loader
  libraries=$made/usr/lib/$multiarch:$made/lib/$multiarch:$made/usr/lib/$multiarch/slurm-wlm
  loader=$made/usr/lib/$multiarch/ld-linux-x86-64.so.2
  [ -e "$loader" ] || loader=$made/lib/$multiarch/ld-linux-x86-64.so.2
  cp "$2" "$made/$3"
  # RPATH, in which libraries of plugins are searched too, and not RUNPATH.
  "$loader" --library-path "$libraries" "$made/usr/bin/patchelf" --set-interpreter "$loader" \
    --force-rpath --set-rpath "$libraries" "$made/$3"
}

check_version() { # name
  local said
  said=$("$root/.roots/$1/bin/slurmctld" -V)
  [[ $said == *" $1."* ]] && return
  rm -rf "$root/.roots/$1/bin"
  fail "expected Slurm $1, got $said: Debian has moved on" \
    "DEBIAN_MIRROR=https://snapshot.debian.org/archive/debian/DATE $0 $1"
}

for name in "$@"; do
  case $name in
    22.05) make_root "$name" bookworm "${slurm_packages[@]}" ;;
    24.11) make_root "$name" trixie "${slurm_packages[@]}" ;;
    26.05) make_root "$name" sid "${slurm_packages[@]}" ;;
    apptainer) make_root "$name" sid apptainer ;;
    *) fail "there is no root $name" "$0 22.05 24.11 26.05 apptainer" ;;
  esac
  [ "$name" = apptainer ] || check_version "$name"
done

#!/usr/bin/env bash
# Makes the environments .venvs/<role> from requirements/<role>.txt:
#   scripts/setup.sh [serve|train|agents|frameworks|camel|all|tests|gpu]
# `all` is what runs need: serve, train, agents. `tests` adds the agent frameworks, which live in
# two environments because CAMEL wants older packages than the others do. `gpu` makes those that runs
# need with CUDA, from requirements/gpu/<role>.txt; it needs no GPU. The others leave such an environment alone.
#
# Idempotent: an environment whose stamp names the present lock is left alone. Anything else - a changed
# lock, a moved checkout, a set-up that was interrupted - is built again from nothing.
set -euo pipefail

topic=set-up
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

venvs=$root/.venvs
torch_cpu_index=https://download.pytorch.org/whl/cpu
needed_mib=5000 # all environments together
with_cuda=false
on_terminal=false
[ ! -t 1 ] || on_terminal=true

packages() { # how this distribution installs its Debian-named ($1) or Fedora-named ($2) packages
  if command -v apt-get >/dev/null; then
    echo "sudo apt-get install -y $1"
  elif command -v dnf >/dev/null; then
    echo "sudo dnf install -y $2"
  else
    echo "install $1 (Debian names) with your package manager"
  fi
}

lock_of() { # role: the lock that is asked for
  local gpu_lock=$root/requirements/gpu/$1.txt
  if $with_cuda && [ -f "$gpu_lock" ]; then echo "$gpu_lock"; else echo "$root/requirements/$1.txt"; fi
}

stamp_of() { printf '%s\n' "$root" | cat "$1" - | sha256sum | cut -d' ' -f1; } # lock

is_installed() { # also with CUDA where that was not asked for
  [ -x "$venvs/$1/bin/python" ] || return 1
  local stamp gpu_lock=$root/requirements/gpu/$1.txt
  stamp=$(cat "$venvs/$1/.installed" 2>/dev/null) || return 1
  [ "$stamp" = "$(stamp_of "$(lock_of "$1")")" ] && return
  [ -f "$gpu_lock" ] && [ "$stamp" = "$(stamp_of "$gpu_lock")" ]
}

is_current() { # installed, and the console script and metadata are those of this pyproject.toml
  is_installed "$1" && [ ! "$root/pyproject.toml" -nt "$venvs/$1/.installed" ]
}

check_machine() {
  [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
    fail "the CPU environments need Linux on x86-64, this is $(uname -s) on $(uname -m)" \
      "run on an x86-64 Linux machine, or install the GPU packages as docs/installation.md says"
  local glibc
  glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)
  if [ -z "$glibc" ] || [ "$(printf '%s\n' 2.34 "$glibc" | sort -V | head -n 1)" != 2.34 ]; then
    fail "SGLang's wheels need glibc 2.34 or newer, this machine has ${glibc:-another C library}" \
      "use Debian 12, Ubuntu 22.04, RHEL 9 or newer, or a container of one of them"
  fi
  # The package of each command has one name on Debian and Fedora alike.
  local missing="" command_and_package
  for command_and_package in make:make cc:gcc flock:util-linux; do
    command -v "${command_and_package%:*}" >/dev/null || missing+=" ${command_and_package#*:}"
  done
  [ -z "$missing" ] || fail "missing system packages:$missing" "$(packages "${missing# }" "${missing# }")"
  local free_mib
  free_mib=$(df --output=avail -m "$venvs" | tail -n 1)
  [ "$free_mib" -ge "$needed_mib" ] ||
    fail "the environments take up to $needed_mib MiB, $venvs has $((free_mib)) MiB free" \
      "free some space, or make .venvs a link to a larger file system"
}

# The first Python that can make the environments. One that is too old or that lacks a module is passed over.
find_python() {
  local candidate found
  for candidate in ${AREAL_HPC_PYTHON:-python3.11 python3.12 python3.13 python3}; do
    found=$("$candidate" -c '
import ensurepip, os, sys, sysconfig, venv
headers = os.path.join(sysconfig.get_path("include"), "Python.h")
if (3, 11) <= sys.version_info[:2] <= (3, 13) and os.path.exists(headers):
    print(sys.executable)' 2>/dev/null) || continue
    [ -z "$found" ] || { echo "$found"; return; }
  done
  fail "no Python 3.11, 3.12 or 3.13 with the venv module and the C headers among: ${AREAL_HPC_PYTHON:-python3.11 python3.12 python3.13 python3}" \
    "$(packages "python3.11 python3.11-venv python3.11-dev" "python3.11 python3.11-devel")" \
    "or name another one: AREAL_HPC_PYTHON=/path/to/python3.11 scripts/setup.sh"
}

# PyPI's torch is the CUDA build: several GB that a CPU does not use. So there the CPU build is asked for by
# its local version, first from wherever pip is configured to look, then from PyTorch's own index.
install_torch() {
  local torch=(--no-deps --require-hashes -r "$root/requirements/torch-cpu.txt")
  $with_cuda && return
  grep -qE '^torch==' "$root/requirements/$2.txt" || return 0
  "$1" -m pip install "${torch[@]}" ||
    "$1" -m pip install --extra-index-url "$torch_cpu_index" "${torch[@]}"
}

prove() { # the imports each role starts with
  case $2 in
    serve) "$1" -W ignore -c 'import importlib.util, torch, transformers, uvicorn
assert importlib.util.find_spec("sglang"), "sglang is missing"' ;;
    train) "$1" -W ignore -c 'import h5py, megatron.core, pytest, torch, transformers, areal_hpc' ;;
    agents) "$1" -W ignore -c 'import aiohttp, h5py, openai, tokenizers, transformers, uvicorn, areal_hpc' ;;
    frameworks) "$1" -W ignore -c 'import agents, anthropic, langchain_openai, langgraph, areal_hpc' ;;
    camel) "$1" -W ignore -c 'import areal_hpc.client.camel' ;;
  esac
}

build() { # role: runs with its output in the log
  local role=$1 python=$venvs/$1/bin/python
  if ! is_installed "$role"; then
    rm -f "$venvs/$role/.installed"
    "$base_python" -m venv --clear "$venvs/$role"
    install_torch "$python" "$role"
    "$python" -m pip install --no-deps --require-hashes -r "$(lock_of "$role")"
  fi
  "$python" -m pip install --no-deps --no-build-isolation -e "$root"
  prove "$python" "$role"
  stamp_of "$(lock_of "$role")" >"$venvs/$role/.installed"
}

build_with_progress() {
  local role=$1 log=$venvs/$1.log began=$SECONDS
  printf 'set-up: %-10s %s packages, log in .venvs/%s.log\n' \
    "$role" "$(grep -c == "$(lock_of "$role")")" "$role"
  # In a process group of its own (set -m), so that an interrupted set-up stops pip and its children too;
  # in a subshell of its own, because bash ignores `set -e` in whatever is part of a condition.
  set -m
  (set -e; build "$role") >"$log" 2>&1 </dev/null &
  builder=$!
  set +m
  trap 'kill -- -"$builder" 2>/dev/null; echo; exit 130' INT TERM
  while $on_terminal && kill -0 "$builder" 2>/dev/null; do
    printf '\rset-up: %-10s %4d s  %-60.60s' "$role" "$((SECONDS - began))" "$(tail -n 1 "$log")"
    sleep 1
  done
  if ! wait "$builder"; then
    printf '\nset-up: %s failed; the last lines of %s:\n' "$role" "$log" >&2
    tail -n 15 "$log" | sed 's/^/    /' >&2
    fail "the $role environment is not complete; the next set-up builds it again" \
      "fix what the log says and repeat; docs/installation.md covers machines without a package index"
  fi
  trap - INT TERM
  ! $on_terminal || printf '\r%80s\r' ''
  printf 'set-up: %-10s ready in %d s\n' "$role" "$((SECONDS - began))"
}

case ${1:-all} in
  all) roles=(serve train agents) ;;
  tests) roles=(serve train agents frameworks camel) ;;
  gpu) roles=(serve train agents) with_cuda=true needed_mib=25000 ;;
  serve | train | agents | frameworks | camel) roles=("$1") ;;
  *) fail "unknown environment $1" "scripts/setup.sh [serve|train|agents|frameworks|camel|all|tests|gpu]" ;;
esac

missing=()
for role in "${roles[@]}"; do is_current "$role" || missing+=("$role"); done
[ "${#missing[@]}" -gt 0 ] || exit 0

mkdir -p "$venvs"
check_machine
base_python=$(find_python)
exec 9>"$venvs/.setup.lock"
flock -n 9 || { echo "set-up: another one is running, waiting for it"; flock 9; }
for role in "${missing[@]}"; do is_current "$role" || build_with_progress "$role"; done

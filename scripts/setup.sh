#!/usr/bin/env bash
# Makes the environments in .venvs/ from uv.lock:
#   scripts/setup.sh [serve|main|camel|all|tests|gpu]
#
#   serve  SGLang and its pins
#   main   everything else: trainer, agents and their frameworks, command line
#   camel  agents of CAMEL, which wants older packages
#   all    serve and main, which runs need (the default)
#   tests  serve, main with the development tools, and camel
#   gpu    serve and main with CUDA; needs no GPU. Later calls keep such environments so.
#
# uv is fetched as a wheel where it is missing. A second call changes nothing.
set -euo pipefail

topic=set-up
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

venvs=$root/.venvs
python=${AREAL_HPC_PYTHON:-'>=3.11,<3.14'}
groups=()
needed_mib=4000 # environments and downloads

check_machine() {
  [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
    fail "uv.lock is for Linux on x86-64, this is $(uname -s) on $(uname -m)" \
      "run on an x86-64 Linux machine, or install with pip as docs/installation.md says"
  local glibc
  glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)
  if [ -z "$glibc" ] || [ "$(printf '%s\n' 2.34 "$glibc" | sort -V | head -n 1)" != 2.34 ]; then
    fail "SGLang's wheels need glibc 2.34 or newer, this machine has ${glibc:-another C library}" \
      "use Debian 12, Ubuntu 22.04, RHEL 9 or newer, or a container of one of them"
  fi
  command -v cc >/dev/null ||
    fail "there is no C compiler, and one package has no wheel" \
      "sudo apt-get install -y gcc, or sudo dnf install -y gcc"
  local free_mib
  free_mib=$(df --output=avail -m "$venvs" | tail -n 1)
  [ "$free_mib" -ge "$needed_mib" ] ||
    fail "the environments take up to $needed_mib MiB, $venvs has $((free_mib)) MiB free" \
      "free some space, or make .venvs a link to a larger file system"
}

find_uv() {
  export PATH=$venvs/uv/bin:$PATH
  command -v uv >/dev/null && return
  echo "set-up: uv is fetched into .venvs/uv"
  "${AREAL_HPC_PYTHON:-python3}" -m pip install -qq --require-hashes --target "$venvs/uv" \
    -r "$root/scripts/uv.txt" ||
    fail "there is no uv, and pip could not fetch it" \
      "install uv (https://docs.astral.sh/uv) and repeat" \
      "or name a Python that has pip: AREAL_HPC_PYTHON=/path/to/python3.11 scripts/setup.sh"
}

# uv does not read pip's settings: mirrors and folders of wheels that pip knows are passed on.
use_settings_of_pip() {
  [ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}
  [ -z "${PIP_FIND_LINKS:-}" ] || export UV_FIND_LINKS=${UV_FIND_LINKS:-$PIP_FIND_LINKS}
  export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
}

is_cuda() { [ -e "$venvs/$1/.cuda" ]; }

# What the lock has for an environment. PyTorch for CPUs is on no other index than PyTorch's own, and
# packages that have kernels for it drag in Triton, which only CUDA needs.
export_lock() { # environment
  local options=(--frozen --quiet --no-emit-project --no-header --extra "$1")
  case $1 in
    camel) ;;
    *) if is_cuda "$1"; then options+=(--group cuda); else options+=(--group cpu --no-emit-package triton); fi ;;&
    serve) ! is_cuda serve || options+=(--group serve-cuda) ;;
    main) options+=("${groups[@]}") ;;
  esac
  uv --directory "$root" export "${options[@]}"
}

# Each step says `|| return`: bash ignores `set -e` in a function whose failure is asked for.
install_packages_of() { # environment
  local home=$venvs/$1 lock=$venvs/$1.txt quiet=(--quiet) index=() compile=()
  [ ! -t 2 ] || quiet=()
  export_lock "$1" >"$lock" || return
  if grep -q '^torch==.*+cpu' "$lock" && ! has_torch "$home" "$lock"; then
    index=(--index https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match)
  fi
  ! is_cuda "$1" || compile=(--compile-bytecode)
  uv pip install "${quiet[@]}" --python "$home" --no-deps --require-hashes "${compile[@]}" \
    "${index[@]}" -r "$lock" || return
  uv pip install --quiet --python "$home" --no-deps -e "$root" || return
  is_cuda "$1" || import_packages_of "$1"
}

# Proves that an environment works and compiles what the roles import first. Images often set
# PYTHONDONTWRITEBYTECODE; then each process would do that anew. One for CUDA, which a machine without a
# GPU may not be able to import, is compiled whole.
import_packages_of() { # environment
  local modules
  case $1 in
    serve) modules='areal_hpc.inference.cpu.sglang_cpu, sglang.srt.entrypoints.http_server' ;;
    main) modules='areal_hpc.trainer.model.cpu.megatron_cpu, areal_hpc.trainer.job, areal_hpc.rollout.job,
areal_hpc.proxy.job, areal_hpc.ledger.job, areal_hpc.launch.run, transformers, openai, reasoning_gym' ;;
    camel) return 0 ;;
  esac
  env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 "$venvs/$1/bin/python" -W ignore -c "import ${modules//$'\n'/ }"
}

has_torch() { # environment's folder, lock: installed already, or in a folder of wheels
  local version
  version=$(grep -oE '^torch==[^ ]+' "$2" | cut -d= -f3)
  compgen -G "$1/lib/python3*/site-packages/torch-$version.dist-info" >/dev/null ||
    compgen -G "${UV_FIND_LINKS:-/nowhere}/torch-$version-*" >/dev/null
}

make_environment() { # environment
  local home=$venvs/$1 began=$SECONDS stamp
  stamp="$(cat "$root/uv.lock" "$root/pyproject.toml" "${BASH_SOURCE[0]}" | sha256sum) ${groups[*]}"
  ! $with_cuda || [ -e "$home/.cuda" ] || rm -f "$home/.checkout"
  # The scripts of an environment name the checkout: if that was moved, they are made anew.
  if [ "$(head -n 1 "$home/.checkout" 2>/dev/null)" != "$root" ]; then
    uv venv --quiet --seed --clear --python "$python" "$home"
    ! $with_cuda || touch "$home/.cuda"
  elif [ "$(tail -n 1 "$home/.checkout")" = "$stamp" ]; then
    return 0
  fi
  echo "set-up: packages of the $1 environment"
  install_packages_of "$1" || fail "the $1 environment is not complete; the next set-up goes on" \
    "fix what uv says and repeat; docs/installation.md covers machines without a package index"
  printf '%s\n' "$root" "$stamp" >"$home/.checkout"
  echo "set-up: $1 ready in $((SECONDS - began)) s"
}

with_cuda=false
case ${1:-all} in
  all) environments=(serve main) ;;
  tests) environments=(serve main camel) groups=(--group dev) ;;
  gpu) environments=(serve main) with_cuda=true needed_mib=25000 ;;
  serve | main | camel) environments=("$1") ;;
  *) fail "unknown environment $1" "scripts/setup.sh [serve|main|camel|all|tests|gpu]" ;;
esac

mkdir -p "$venvs"
exec 9>"$venvs/.setup.lock"
flock -n 9 || { echo "set-up: another one is running, waiting for it"; flock 9; }
check_machine
find_uv
use_settings_of_pip
for environment in "${environments[@]}"; do make_environment "$environment"; done

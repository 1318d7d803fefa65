#!/usr/bin/env bash
# Run while an image is built: makes the environments of the given roles beside the checkout,
# where `areal-hpc submit` expects them within a container (/opt/areal_hpc/.venvs/ROLE).
#   install.sh serve agents | install.sh train
#
# The locks are those of the CPU environments. Versions are taken from them; what they leave out,
# CUDA's packages, comes as dependencies. SGLang's CUDA packages want a PyTorch of their own.
set -euo pipefail

root=${AREAL_HPC_ROOT:-/opt/areal_hpc}
for role in "$@"; do
  lock=$root/requirements/$role.txt
  [ -f "$lock" ] || { echo "there is no lock of the role $role: $lock" >&2; exit 78; }
  python=$root/.venvs/$role/bin/python
  "${PYTHON:-python3.11}" -m venv "$root/.venvs/$role"
  if [ "$role" = serve ]; then
    pins=$root/.venvs/serve/pins.txt
    grep -v '^torch==' "$lock" >"$pins"
    "$python" -m pip install --no-cache-dir --constraint "$pins" "$(grep '^sglang==' "$lock")"
  else
    "$python" -m pip install --no-cache-dir --requirement "$lock"
  fi
  "$python" -m pip install --no-cache-dir --no-deps "$root"
done

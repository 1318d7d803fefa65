#!/usr/bin/env bash
# Run while an image is built: makes the environments of the given roles beside the checkout,
# where `areal-hpc submit` expects them within a container (/opt/areal_hpc/.venvs/ROLE).
#   install.sh serve agents | install.sh train
#
# From the locks for GPUs, so that trainer and servers have one torch and one NCCL.
set -euo pipefail

root=${AREAL_HPC_ROOT:-/opt/areal_hpc}
for role in "$@"; do
  lock=$root/requirements/gpu/$role.txt
  [ -f "$lock" ] || lock=$root/requirements/$role.txt # agents need no GPU
  [ -f "$lock" ] || { echo "there is no lock of the role $role: $lock" >&2; exit 78; }
  python=$root/.venvs/$role/bin/python
  "${PYTHON:-python3.11}" -m venv "$root/.venvs/$role"
  "$python" -m pip install --no-cache-dir --no-deps --require-hashes --requirement "$lock"
  "$python" -m pip install --no-cache-dir --no-deps "$root"
done

#!/usr/bin/env bash
# The GPU tier: tests/gpu, then the benchmarks of this folder. Needs a CUDA device, no network.
# With TIER=gpu_node the tests of a node of eight GPUs, and no benchmarks beside them.
#
#   PYTHON=/path/to/python  an environment with a PyTorch built for CUDA; the default is the
#                           trainer's where its PyTorch sees a GPU, else python3
#   WHEELS=/path/to/folder  installs what that Python lacks from these wheels, into a folder of
#                           its own: nothing is downloaded and the environment stays as it is
#   OUT=/path/to/folder     also leaves the results and the tests' report there
set -euo pipefail
cd "$(dirname "$0")/../.."

sees_gpu='import torch, sys; sys.exit(not torch.cuda.is_available())'
if [ -z "${PYTHON:-}" ]; then
  PYTHON=.venvs/main/bin/python
  "$PYTHON" -c "$sees_gpu" 2>/dev/null || PYTHON=python3
fi

tier=${TIER:-gpu}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1
# Megatron wants kernels to start in the order they were queued, so that gathers overlap. Servers,
# which the other tier starts, want another number, and each process gets its own there.
[ "$tier" != gpu ] || export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if [ -n "${WHEELS:-}" ]; then
  site="$(mktemp -d)"
  trap 'rm -rf "$site"' EXIT
  "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$site" "$WHEELS"/*.whl
  # Last: what the environment has of its own (its CUDA build of PyTorch) wins.
  export PYTHONPATH="$PYTHONPATH:$site"
fi

"$PYTHON" - <<'PYTHON_END'
import importlib.util
import sys

needs = {
    "torch": "torch (built for CUDA)", "megatron.core": "megatron-core==0.16.1",
    "transformers": "transformers>=5", "numpy": "numpy", "h5py": "h5py", "msgspec": "msgspec",
    "pydantic": "pydantic", "safetensors": "safetensors", "psutil": "psutil", "pytest": "pytest",
    "httpx": "httpx", "aiohttp": "aiohttp", "tokenizers": "tokenizers",
    "pytest_timeout": "pytest-timeout", "pytest_asyncio": "pytest-asyncio",
}

def missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True

lacking = [package for module, package in needs.items() if missing(module)]
if lacking:
    sys.exit(
        f"{sys.executable} lacks: {', '.join(lacking)}\n"
        "Name another one with PYTHON=, or put wheels of these (and of what they need) into a "
        "folder and name it with WHEELS=."
    )
import torch

if not torch.cuda.is_available():
    sys.exit(f"PyTorch {torch.__version__} of {sys.executable} sees no CUDA device.")
print(f"{torch.cuda.get_device_name(0)}, PyTorch {torch.__version__}, {sys.executable}")
PYTHON_END

results="${OUT:-$(mktemp -d)}"
mkdir -p "$results"
status=0
benchmarks=(trainer codec memory)
[ "$tier" = gpu ] || benchmarks=()
"$PYTHON" -m pytest "tests/$tier" -s --junitxml "$results/${tier}_tests.xml" || status=$?
for name in "${benchmarks[@]}"; do
  "$PYTHON" -m "benchmarks.gpu.$name" --out "benchmarks/results/gpu_$name.json" || status=$?
  cp "benchmarks/results/gpu_$name.json" "$results/" 2>/dev/null || true
done
echo "results: benchmarks/results/gpu_*.json and $results"
exit "$status"

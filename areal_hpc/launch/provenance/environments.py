"""Versions of each role's environment, and of the GPU driver of this machine."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PACKAGES = (
    "areal-hpc", "torch", "sglang", "megatron-core", "transformers", "flash-attn",
    "transformer-engine", "numpy", "openai",
)  # fmt: skip
"""Distributions that decide what is computed; those that an environment lacks are left out."""
INTERPRETER_TIMEOUT_S = 60.0
"""A cold interpreter on busy shared storage takes that long, no more."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")

# CUDA's version stands in torch's version.py: to import torch takes seconds.
_VERSIONS_SCRIPT = r"""
import importlib.metadata, importlib.util, json, pathlib, platform, re, sys
packages = {}
for name in sys.argv[1:]:
    try:
        packages[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
found = {"python": platform.python_version(), "packages": packages}
torch = importlib.util.find_spec("torch")
if torch is not None and torch.origin:
    text = pathlib.Path(torch.origin).with_name("version.py").read_text()
    cuda = re.search(r"^cuda\b[^=]*= '([\d.]+)'", text, re.M)
    found["cuda"] = cuda and cuda[1]
print(json.dumps(found))
"""


def read_environments(pythons: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """By role, the interpreter and the versions that it finds; nothing heavy is imported.

    One that cannot be asked here, as in a container's image, has an `error` instead.
    """
    with ThreadPoolExecutor(max(1, len(pythons))) as pool:
        return dict(zip(pythons, pool.map(_read_environment, pythons.values()), strict=True))


def _read_environment(python: str) -> dict[str, Any]:
    if shutil.which(python) is None:
        return {"interpreter": python, "error": "there is no such program on this machine"}
    try:
        asked = subprocess.run(
            [python, "-c", _VERSIONS_SCRIPT, *PACKAGES],
            capture_output=True,
            text=True,
            timeout=INTERPRETER_TIMEOUT_S,
            check=True,
        )
        return {"interpreter": python, **json.loads(asked.stdout)}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"interpreter": python, "error": str(error)[-500:]}


def read_gpu_driver_version(file: Path = DRIVER_FILE) -> str | None:
    """The version of NVIDIA's kernel module; None where there is none."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", file.read_text())
    except OSError:
        return None
    return found[1] if found else None

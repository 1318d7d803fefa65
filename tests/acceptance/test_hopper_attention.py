"""FlashAttention-4's kernels for Hopper, from the lock, compiled on a machine without a GPU."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT, find_uv

COMPILE = """
import site
import sys

site.addsitedir(sys.argv[1])  # one of the packages has a .pth file

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
import flash_attn.cute.interface as kernels

TOKENS, HEADS, KEY_HEADS, HEAD_DIM, ROWS = 4096, 32, 8, 128, 4

def make(heads):
    return torch.empty(TOKENS, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")

with FakeTensorMode():
    query, key, value = make(HEADS), make(KEY_HEADS), make(KEY_HEADS)
    starts = torch.empty(ROWS + 1, dtype=torch.int32, device="cuda")
    shared = {
        "softmax_scale": HEAD_DIM**-0.5, "causal": True, "cu_seqlens_q": starts,
        "cu_seqlens_k": starts, "window_size_left": None, "window_size_right": None,
    }
    out, lse, *_ = kernels._flash_attn_fwd(
        query, key, value, return_lse=True, max_seqlen_q=2048, max_seqlen_k=2048, **shared
    )
    gradients = kernels._flash_attn_bwd(
        query, key, value, out, torch.empty_like(out), lse, **shared
    )[:3]
assert out.shape == query.shape
assert [one.shape for one in gradients] == [query.shape, key.shape, value.shape]
print("forward and backward are compiled")
"""


def list_pins(package: str) -> list[str]:
    """List a package of the lock and its requirements beside PyTorch, with their versions."""
    packages = tomllib.loads((CHECKOUT / "uv.lock").read_text())["package"]
    pins: dict[str, str] = {}
    missing = [package]
    while missing:
        name = missing.pop()
        if name == "torch" or name in pins:
            continue
        entry = next(package for package in packages if package["name"] == name)
        pins[name] = entry["version"]
        missing += [dependency["name"] for dependency in entry.get("dependencies", ())]
    return [f"{name}=={version}" for name, version in pins.items()]


def test_kernels_for_hopper_are_compiled_without_a_gpu(tmp_path: Path) -> None:
    install = [find_uv(), "pip", "install", "-q", "--no-deps", "--python", sys.executable]
    pins = [*list_pins("flash-attn-4"), *list_pins("triton")]
    subprocess.run([*install, "--target", tmp_path, *pins], check=True, timeout=scaled(300))
    environment = {
        "FLASH_ATTENTION_ARCH": "sm_90",
        "CUTE_DSL_ARCH": "sm_90a",
        "FLASH_ATTENTION_NUM_SMS": "132",
    }
    compiled = subprocess.run(
        [sys.executable, "-c", COMPILE, tmp_path],
        env=os.environ | environment, capture_output=True, text=True, timeout=scaled(600),
    )  # fmt: skip
    assert compiled.returncode == 0, compiled.stderr
    assert "are compiled" in compiled.stdout

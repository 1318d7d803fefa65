"""What becomes of weights that leave one device: SGLang's hash, a group over NCCL, files.

`python -m tests.gpu.weights_worker DEVICE REPORT.json [SGLANG_HASH_KERNEL.py]`. On a CPU the same
lines run over gloo, with small sizes, and without SGLang's kernel, which needs a GPU.
"""

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.trainer.batch.training_rows import ADVANTAGE_CHANNEL
from areal_hpc.trainer.model.hf_weights import save_hf_model
from areal_hpc.trainer.process_groups import destroy_process_groups
from areal_hpc.weights.checksum import compute_sglang_gpu_hash
from areal_hpc.weights.transports.process_group import (
    UpdateProcessGroup,
    exempt_later_groups_from_nccl_watchdog,
)
from tests.support.small_policy import (
    init_single_rank_groups,
    list_scored_logprobs,
    load_policy,
    make_training_row,
    take_step_with_fresh_adamw,
)

HASH_SIZES = (4, 7, 4 * 1024, 4 * 8192, 4 * 8192 * 2 + 6, 4 * 8192 * 130 + 1)
"""Bytes: odd ones, and at the edges of a tile."""
SPEED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 20}
GROUP_TIMEOUT_S = 60.0
ROUNDS = 5
RATE = 1e-3


def seconds_of(act: Callable[[], object], device: torch.device) -> float:
    """The fastest of some rounds, after one that compiles."""
    walls_s = []
    for _ in range(ROUNDS + 1):
        began_s = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        walls_s.append(time.perf_counter() - began_s)
    return min(walls_s[1:])


def load_sglang_kernel(path: Path) -> Any:
    """SGLang's file alone: the package is in another environment."""
    spec = importlib.util.spec_from_file_location("sglang_gpu_tensor_hash", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hashes(device: torch.device, kernel: Path | None) -> dict[str, Any]:
    """The same bytes by our kernel on the device, in plain torch on the CPU, and by SGLang's."""
    generator = torch.Generator().manual_seed(1)
    theirs = load_sglang_kernel(kernel) if kernel is not None else None
    different = []
    for size in HASH_SIZES:
        flat = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        expected, held = compute_sglang_gpu_hash(flat), flat.to(device)
        if compute_sglang_gpu_hash(held) != expected:
            different.append(f"ours, {size} bytes")
        if theirs is not None and theirs.gpu_tensor_hash(held) != expected:
            different.append(f"SGLang's, {size} bytes")
    large = torch.ones(SPEED_BYTES[device.type], dtype=torch.uint8, device=device)
    own_s = seconds_of(lambda: compute_sglang_gpu_hash(large), device)
    found = {"different": different, "own_bytes_per_s": large.numel() / own_s}
    if theirs is not None:
        their_s = seconds_of(lambda: theirs.gpu_tensor_hash(large), device)
        found["sglang_bytes_per_s"] = large.numel() / their_s
    return found


def lone_group(device: torch.device) -> dict[str, Any]:
    """A group with the trainer alone in it: it forms, sends, and is left or abandoned in a send."""
    exempt_later_groups_from_nccl_watchdog()
    backend = "nccl" if device.type == "cuda" else "gloo"
    message = torch.arange(1 << 20, device=device)
    sent = 0
    for number in range(2):
        group = UpdateProcessGroup(f"lone-{number}", "127.0.0.1", 1, backend, GROUP_TIMEOUT_S)
        group.join(lambda: False)
        group.broadcast([message, message + 1], lambda: False)
        sent += 1
        if number:
            group.close()
        else:
            group.abandon()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return {"backend": backend, "sent": sent, "intact": bool((message.diff() == 1).all())}


def files(device: torch.device, folder: Path) -> dict[str, Any]:
    """Weights after a step, written as a model directory, as transformers scores it on the CPU."""
    source = folder / "source"
    make_tiny_model(source, ["one two three four"], hidden=128, heads=2, kv_heads=1, head_dim=64)
    policy = load_policy(source, "float32", device)
    ids = [(7 * place) % policy.arch.vocab for place in range(100)]
    row = make_training_row(ids, 1, {ADVANTAGE_CHANNEL: 1.0})
    before = list_scored_logprobs(policy, row)
    take_step_with_fresh_adamw(policy, [row], RATE)
    after = list_scored_logprobs(policy, row)
    save_hf_model(policy, source, folder / "written")
    config = transformers.AutoConfig.from_pretrained(folder / "written")
    model = transformers.AutoModelForCausalLM.from_config(
        config
    )  # see `TransformersLogprobsAndGradient`
    model.load_state_dict(load_file(folder / "written" / "model.safetensors"), strict=False)
    ids_T = torch.tensor(ids)
    with torch.no_grad():
        logprobs = model(ids_T[None]).logits[0, :-1].float().log_softmax(-1)
    read = logprobs.gather(1, ids_T[1:, None])[:, 0].tolist()
    return {
        "gap": max(abs(one - other) for one, other in zip(after, read, strict=True)),
        "change": max(abs(one - other) for one, other in zip(before, after, strict=True)),
    }


def main() -> None:
    kernel = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    device = init_single_rank_groups("cuda" if sys.argv[1] == "cuda" else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "hashes": hashes(device, kernel),
            "group": lone_group(device),
            "files": files(device, Path(folder)),
        }
    Path(sys.argv[2]).write_text(json.dumps(found, indent=1))
    destroy_process_groups()


if __name__ == "__main__":
    main()

"""Transfers of weights from one device: through a group over NCCL, and through files.

`python -m tests.gpu.weights_worker DEVICE REPORT.json`. On a CPU the same lines run over gloo.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.trainer.batch.packing import Channel
from areal_hpc.trainer.model.hf_weights import save_hf_model
from areal_hpc.trainer.process_groups import destroy_process_groups
from areal_hpc.weights.process_group import (
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

GROUP_TIMEOUT_S = 60.0
RATE = 1e-3


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
    policy = load_policy(source, device)
    ids = [(7 * position) % policy.arch.vocab for position in range(100)]
    row = make_training_row(ids, 1, {Channel.ADVANTAGE: 1.0})
    before = list_scored_logprobs(policy, row)
    take_step_with_fresh_adamw(policy, row, RATE)
    after = list_scored_logprobs(policy, row)
    save_hf_model(policy, source, folder / "written")
    config = transformers.AutoConfig.from_pretrained(folder / "written")
    # Not `from_pretrained`: transformers 5.19, first used in a process that has process groups,
    # leaves the rotary frequencies of a model that it loads as they lay in memory.
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(load_file(folder / "written" / "model.safetensors"), strict=False)
    ids_T = torch.tensor(ids)
    with torch.no_grad():
        logprobs = model(ids_T[None]).logits[0, :-1].float().log_softmax(-1)
    read = logprobs.gather(1, ids_T[1:, None])[:, 0].tolist()
    return {
        "gap": max(abs(logprob - other) for logprob, other in zip(after, read, strict=True)),
        "change": max(abs(logprob - other) for logprob, other in zip(before, after, strict=True)),
    }


def main() -> None:
    device = init_single_rank_groups("cuda" if sys.argv[1] == "cuda" else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        findings = {
            "group": lone_group(device),
            "files": files(device, Path(folder)),
        }
    Path(sys.argv[2]).write_text(json.dumps(findings, indent=1))
    destroy_process_groups()


if __name__ == "__main__":
    main()

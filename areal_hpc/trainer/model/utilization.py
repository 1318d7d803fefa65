"""Model FLOP/s utilization (MFU): the operations of training as a share of the GPUs' peak.

Operations are counted as by PaLM (arXiv:2204.02311, appendix B) for this trainer: two per weight
and token forward, four backward; logits of scored tokens only; attention under the causal mask, and
so half of the square, of which PaLM counts all. Recomputed activations do not count.
"""

import math
import re
from collections.abc import Sequence

import torch
import torch.distributed as dist

from areal_hpc.rundir.jsonl import JsonMetricRow
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.model.families.architecture import Architecture
from areal_hpc.trainer.model.families.weight_map import list_parameter_maps
from areal_hpc.trainer.model.policy import TrainedNetwork

PEAK_TFLOPS_BY_NAME = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H800", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
)
"""Dense bfloat16 operations per second, in units of 1e12, by words of CUDA's device name; the first
entry with all words in the name counts. From NVIDIA's data sheets, half of their numbers with
sparsity."""


def measure_training_speed(
    policy: TrainedNetwork, rows: Sequence[TrainingRow], tokens: float, train_s: float
) -> JsonMetricRow:
    """Measure optimizer steps on these rows, which hold `tokens` tokens, by their wall time."""
    ranks = dist.get_world_size()
    has_peak = policy.device.type == "cuda" and policy.dtype == torch.bfloat16
    peak = find_peak_flops_per_s(torch.cuda.get_device_name(policy.device)) if has_peak else None
    lengths = [len(row.input_ids_T) for row in rows]
    scored = sum(int(row.loss_mask_T[1:].sum()) for row in rows)
    flops = count_training_flops(policy.arch, lengths, scored)
    return {
        "throughput/train_phase_tokens_per_s": tokens / train_s,
        "throughput/tokens_per_s_per_gpu": tokens / train_s / ranks,
        "throughput/mfu": None if peak is None else flops / (train_s * ranks * peak),
    }


def find_peak_flops_per_s(device_name: str) -> float | None:
    """Return a GPU's operations per second in bfloat16; None if unknown, or for a part of a GPU."""
    words = set(re.split(r"[\s-]+", device_name))
    for name, tera in PEAK_TFLOPS_BY_NAME:
        if "MIG" not in words and words.issuperset(name.split()):
            return tera * 1e12
    return None


def count_training_flops(arch: Architecture, lengths: Sequence[int], scored_tokens: int) -> float:
    """Count the floating-point operations of one update on rows of these lengths."""
    weights = 0.0
    if arch.transformers_config:
        if arch.parameters is None:
            return 0.0
        tables = (1 if arch.tied else 2) * arch.vocab * arch.hidden
        share = arch.experts.per_token / arch.experts.count if arch.experts else 0.0
        weights = arch.parameters.dense - tables + share * arch.parameters.experts
    for parameter in list_parameter_maps(arch) if not arch.transformers_config else ():
        if parameter.layer is None:
            continue
        share = 1.0
        if parameter.expert is not None and arch.experts is not None:
            share = arch.experts.per_token / arch.experts.count
        weights += share * sum(math.prod(t.shape) for t in parameter.hf if len(t.shape) == 2)
    matrices = 2 * weights * sum(lengths)
    logits = 2 * arch.vocab * arch.hidden * scored_tokens
    # Scores, and sums of values by them: two operations each, on half of the square.
    attention = 2 * arch.layers * arch.heads * arch.head_dim * sum(n * n for n in lengths)
    # Forward, and backward twice that; but frozen weights have no gradients.
    passes = 3 if arch.lora is None else 2
    return float(passes * (matrices + logits) + 3 * attention)

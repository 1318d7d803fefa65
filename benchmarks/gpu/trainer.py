"""GRPO steps on a GPU: tokens per second, share of the peak, and the same work in transformers.

bfloat16 parameters, float32 gradients and main weights, a model of the sizes of Qwen2.5-0.5B with
random weights. The packed step is whole: packing, forward, loss, backward, reduction over NCCL,
clipping, AdamW. Hugging Face's side is forward and backward alone, on rows of one length (unpadded)
and on lognormal lengths (padded to the longest of a pass).

MFU counts 6 FLOPs per token and weight of a matrix product (the head only for scored tokens) and
12 per pair of tokens, layer and head dimension for causal attention; nothing for recomputation.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.model.cpu import megatron_cpu
from areal_hpc.trainer.model.utilization import find_peak_flops_per_s
from areal_hpc.trainer.process_groups import destroy_process_groups
from benchmarks import _learning as learning
from benchmarks._pairs import Side, add_out, measure_pairs, median_wall_s, report, wall_ratio
from benchmarks.trainer import SEED, SIGMA, lognormal_lengths

OURS, THEIRS = "packed step", "Hugging Face forward+backward"
TINY = learning.Sizes("qwen2", hidden=128, layers=2, heads=2, kv_heads=1, ffn=256, vocab=512)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def matmul_flops_per_s(device: torch.device, size: int) -> float:
    """Rate of one large square product in bfloat16: median of ten."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in "ab")
    walls_s = []
    for _ in range(13):
        synchronize(device)
        began_s = time.perf_counter()
        left @ right
        synchronize(device)
        walls_s.append(time.perf_counter() - began_s)
    return 2.0 * size**3 / statistics.median(walls_s[3:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Bench:
    """Both models on one device."""

    def __init__(self, sizes: learning.Sizes, device: torch.device, max_tokens: int) -> None:
        self.sizes, self.device = sizes, device
        self.model = learning.make_hf_model(sizes, device, torch.bfloat16)
        self.trainee = learning.Trainee(self.model, device, torch.bfloat16, max_tokens)
        self.max_tokens = max_tokens
        self.generator = np.random.default_rng(SEED)

    def batch(self, lengths: Sequence[int], scored_share: float) -> list[TrainingRow]:
        return [
            learning.make_row(self.generator, length, self.sizes.vocab, scored_share)
            for length in lengths
        ]

    def hugging_face(self, batch: Sequence[TrainingRow]) -> None:
        """Put as many rows into a pass as the padded pass holds tokens for."""
        longest = max(len(row.input_ids_T) for row in batch)
        learning.hf_forward_backward(self.model, batch, max(1, self.max_tokens // longest))
        synchronize(self.device)

    def compare(self, batches: Sequence[list[TrainingRow]]) -> dict[str, float]:
        """Paired rounds, one batch each, the first unmeasured."""
        ours: Iterator[list[TrainingRow]] = iter(batches)
        theirs: Iterator[list[TrainingRow]] = iter(batches)
        sides = (
            Side(OURS, lambda: self.trainee.step(next(ours))),
            Side(THEIRS, lambda: self.hugging_face(next(theirs))),
        )
        samples = measure_pairs(sides, len(batches) - 1)
        tokens = statistics.mean(sum(len(r.input_ids_T) for r in batch) for batch in batches[1:])
        flops = statistics.mean(
            self.sizes.step_flops(
                [len(row.input_ids_T) for row in batch],
                sum(int(row.loss_mask_T[1:].sum()) for row in batch),
            )
            for batch in batches[1:]
        )
        step_s = median_wall_s(samples, OURS)
        return {
            "over_hf": wall_ratio(samples, THEIRS, OURS),
            "step_s": step_s,
            "tokens_per_s": tokens / step_s,
            "flops_per_s": flops / step_s,
        }


def measure(bench: Bench, rows: int, length: int, pairs: int) -> dict[str, float]:
    equal = [bench.batch([length] * rows, 1.0)] * (pairs + 1)
    uneven = [lognormal_lengths(bench.generator, rows, length) for _ in range(pairs + 1)]
    kinds = {
        "unpadded": equal,
        "padded": [bench.batch(lengths, 1.0) for lengths in uneven],
        "padded_third_scored": [bench.batch(lengths, 1 / 3) for lengths in uneven],
    }
    figures: dict[str, float] = {}
    for kind, batches in kinds.items():
        result = bench.compare(batches)
        print(
            f"  {kind:<24}{result['step_s']:>9.3f} s{result['tokens_per_s']:>10.0f} tokens/s"
            f"{result['flops_per_s'] / 1e12:>8.2f} TFLOP/s{result['over_hf']:>8.2f} x Hugging Face"
        )
        figures |= {f"{name}_{kind}": value for name, value in result.items()}
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.trainer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test on a CPU")
    parser.add_argument("--pairs", type=int, default=7, help="rounds that count")
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch")
    parser.add_argument("--length", type=int, default=1024, help="mean length of a row")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of one micro-batch")
    add_out(parser, "gpu_trainer")
    arguments = parser.parse_args(argv)
    megatron_cpu.patch_torch_megatron_without_gpu()
    device = learning.open_lone_world(arguments.device)
    sizes = TINY if arguments.tiny else learning.QWEN_HALF_BILLION
    bench = Bench(sizes, device, arguments.max_tokens)
    name = device_name(device)
    print(f"{name}, {sizes.family}, {sizes.parameters / 1e6:.0f}M parameters, bfloat16")
    figures = measure(bench, arguments.rows, arguments.length, arguments.pairs)
    matmul = matmul_flops_per_s(device, 128 if arguments.tiny else 8192)
    peak = find_peak_flops_per_s(name) or matmul
    best = figures["flops_per_s_unpadded"]
    figures |= {
        "matmul_flops_per_s": matmul,
        "share_of_matmul": best / matmul,
        "mfu": best / peak,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
    }
    settings = {
        "device": name,
        "model": learning.describe(sizes),
        "dtype": "bfloat16, float32 gradients and main weights",
        "rows": arguments.rows,
        "lengths": f"lognormal, mean {arguments.length}, sigma {SIGMA}, seed {SEED}",
        "max_tokens_per_microbatch": arguments.max_tokens,
        "pairs": arguments.pairs,
        "peak_flops_per_s": peak,
        "torch": torch.__version__,
    }
    report(figures, settings, arguments.out)
    destroy_process_groups()


if __name__ == "__main__":
    main()

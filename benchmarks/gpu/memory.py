"""Peak memory of a trainer rank against its estimate, and the share of its peak that a GPU gives.

Four layers of Qwen3-8B's shape, one row of each length, one step after one that warms up. The
estimate is that of `areal-hpc plan` without its reserve, which is for what PyTorch does not hold.
Waits of the host for the GPU are counted by PyTorch's profiler, a step with one micro-batch.
"""

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from areal_hpc.recipe.sections.trainer import TrainerConfig
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.memory import read_peak_memory_bytes
from areal_hpc.trainer.model.cpu import megatron_cpu
from areal_hpc.trainer.model.memory_estimate import RESERVE_BYTES, estimate_trainer_memory
from areal_hpc.trainer.model.utilization import find_peak_flops_per_s
from areal_hpc.trainer.process_groups import destroy_process_groups
from benchmarks import _learning as learning
from benchmarks._pairs import Side, add_out, measure_pairs, median_wall_s, report
from benchmarks.gpu.trainer import TINY, device_name

QWEN3_8B_LAYERS = learning.Sizes(
    "qwen3", hidden=4096, layers=4, heads=32, kv_heads=8, ffn=12288, vocab=151936
)
LENGTHS = (4096, 8192, 16384, 32768)
TINY_LENGTHS = (32, 64)
SEED = 3
WAIT_NAMES = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
TABLE_ROWS = 25


class Bench:
    """One model, stepped on one row at a time."""

    def __init__(self, sizes: learning.Sizes, device: torch.device, longest: int) -> None:
        self.sizes, self.device = sizes, device
        model = learning.make_hf_model(sizes, device, torch.bfloat16)
        self.trainee = learning.Trainee(model, device, torch.bfloat16, longest)
        del model
        gc.collect()
        self._generator = np.random.default_rng(SEED)

    def make_rows(self, length: int) -> list[TrainingRow]:
        return [learning.make_row(self._generator, length, self.sizes.vocab, 1.0)]

    def measure_peak(self, rows: Sequence[TrainingRow], length: int) -> tuple[float, float]:
        """Measure the most bytes that a step holds, and return the estimate too."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        self.trainee.step(rows)
        config = TrainerConfig(dtype="bfloat16", max_tokens_per_microbatch=length)
        estimate = estimate_trainer_memory(self.trainee.policy.arch, config).total - RESERVE_BYTES
        return read_peak_memory_bytes(self.device), estimate

    def measure_rate(self, rows: Sequence[TrainingRow], pairs: int) -> float:
        """Floating-point operations per second of whole steps."""
        side = Side("step", lambda: self.trainee.step(rows))
        lengths = [len(row.input_ids_T) for row in rows]
        wall_s = median_wall_s(measure_pairs([side], pairs), side.name)
        return self.sizes.step_flops(lengths, sum(lengths) - len(lengths)) / wall_s

    def profile_step(self, rows: Sequence[TrainingRow], table: Path) -> int:
        """Count the host's waits in one step; write its most expensive operations to a file."""
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        with profile(activities=activities) as seen:
            self.trainee.step(rows)
        averages = seen.key_averages()
        order = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        table.write_text(averages.table(sort_by=order, row_limit=TABLE_ROWS))
        return sum(event.count for event in averages if event.key in WAIT_NAMES)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.memory", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test on a CPU")
    parser.add_argument("--pairs", type=int, default=3, help="steps that count, of each length")
    add_out(parser, "gpu_memory")
    arguments = parser.parse_args(argv)
    megatron_cpu.patch_torch_megatron_without_gpu()
    device = learning.open_lone_world(arguments.device)
    lengths = TINY_LENGTHS if arguments.tiny else LENGTHS
    bench = Bench(TINY if arguments.tiny else QWEN3_8B_LAYERS, device, lengths[-1])
    name = device_name(device)
    peak_rate = find_peak_flops_per_s(name)
    figures: dict[str, float] = {}
    for length in lengths:
        rows = bench.make_rows(length)
        bench.trainee.step(rows)  # kernels are loaded, and the optimizer's buffers are there
        peak, estimate = bench.measure_peak(rows, length)
        rate = bench.measure_rate(rows, arguments.pairs)
        figures |= {f"peak_bytes_{length}": peak, f"flops_per_s_{length}": rate}
        if device.type == "cuda":  # a process on a CPU holds much besides
            figures[f"peak_over_estimate_{length}"] = peak / estimate
        if peak_rate is not None:
            figures[f"mfu_{length}"] = rate / peak_rate
        print(f"  {length:>6} tokens: {peak / 2**30:7.2f} GiB of {estimate / 2**30:7.2f} estimated")
    table = arguments.out.with_suffix(".profile.txt")
    figures["host_waits_per_step"] = bench.profile_step(bench.make_rows(lengths[1]), table)
    settings = {
        "device": name,
        "model": learning.describe(bench.sizes),
        "dtype": "bfloat16, float32 gradients and main weights",
        "lengths": list(lengths),
        "torch": torch.__version__,
    }
    report(figures, settings, arguments.out)
    destroy_process_groups()


if __name__ == "__main__":
    main()

"""The bucket codec on a GPU against the copies it cannot do without.

- pack: a model's parameters into buckets of 512 MiB, one after the other; its peer copies as many
  bytes once, device to device.
"""

import argparse
from collections.abc import Sequence

import torch

from areal_hpc.trainer.model.cpu import megatron_cpu
from areal_hpc.trainer.model.hf_weights import list_hf_specs, stream_hf_tensors
from areal_hpc.trainer.process_groups import destroy_process_groups
from areal_hpc.weights.buckets import PackingBuffers, TensorSpec, plan_buckets
from benchmarks import _learning as learning
from benchmarks._pairs import (
    Side,
    add_out,
    measure_pairs,
    median_wall_s,
    print_samples,
    report,
    wall_ratio,
)
from benchmarks.gpu.trainer import TINY, device_name, synchronize

BUCKET_BYTES = 512 << 20


class Bench:
    """One model's weights and the buckets they travel in."""

    def __init__(self, sizes: learning.Sizes, device: torch.device) -> None:
        self.device = device
        model = learning.make_hf_model(sizes, device, torch.bfloat16)
        policy = learning.Trainee(model, device, torch.bfloat16, max_tokens=1024).policy
        specs = [
            TensorSpec(name, tuple(shape), str(dtype).removeprefix("torch."))
            for name, shape, dtype in list_hf_specs(policy)
        ]
        self.buckets = plan_buckets(specs, BUCKET_BYTES)
        self.bytes = sum(bucket.size_bytes for bucket in self.buckets)
        self.buffers = PackingBuffers(device)
        self.weights = {name: tensor.clone() for name, tensor in stream_hf_tensors(policy)}
        self.source = torch.zeros(-(-self.bytes // 8), dtype=torch.int64, device=device)
        self.target = torch.empty_like(self.source)

    def pack(self) -> None:
        for bucket in self.buckets:
            packed = self.buffers.open_bucket_in_older_buffer(bucket)
            for spec in bucket.specs:
                packed.place_parameter(spec.name, self.weights[spec.name])
        synchronize(self.device)

    def copy(self) -> None:
        self.target.copy_(self.source)
        synchronize(self.device)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.codec", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test on a CPU")
    parser.add_argument("--pairs", type=int, default=9, help="rounds that count")
    add_out(parser, "gpu_codec")
    arguments = parser.parse_args(argv)
    megatron_cpu.patch_torch_megatron_without_gpu()
    device = learning.open_lone_world(arguments.device)
    sizes = TINY if arguments.tiny else learning.QWEN_HALF_BILLION
    bench = Bench(sizes, device)
    sides = (
        Side("pack", bench.pack),
        Side("device copy", bench.copy),
    )
    samples = measure_pairs(sides, arguments.pairs)
    print_samples(f"{len(bench.buckets)} buckets", samples, bench.bytes / 1e6)
    figures = {
        "pack_over_copy": wall_ratio(samples, "device copy", "pack"),
        "pack_bytes_per_s": bench.bytes / median_wall_s(samples, "pack"),
    }
    settings = {
        "device": device_name(device),
        "model": learning.describe(sizes),
        "bytes": bench.bytes,
        "bucket_bytes": BUCKET_BYTES,
        "pairs": arguments.pairs,
        "torch": torch.__version__,
    }
    report(figures, settings, arguments.out)
    destroy_process_groups()


if __name__ == "__main__":
    main()

"""A whole packed training step against Hugging Face's plain forward and backward pass.

Ours packs the rows, runs forward, loss and backward, reduces gradients and steps AdamW; theirs is
`model(ids, labels=ids).loss.backward()` and nothing else. Same weights, tokens, dtype, threads.

- unpadded: rows of one length, so that theirs wastes nothing.
- padded: lognormal lengths, a new batch each round; theirs pads a batch to its longest row, ours
  packs. Theirs also gets an attention mask, as a padded batch must.
"""

import argparse
import math
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.model.cpu import megatron_cpu
from benchmarks import _learning as learning
from benchmarks._pairs import (
    Samples,
    Side,
    add_out,
    cpu_ratio,
    measure_pairs,
    median_wall_s,
    report,
    wall_ratio,
)

SEED = 7
SIGMA = 1.0
SHORTEST = 16
OURS, OURS_HALF, THEIRS = "packed step", "packed step, half scored", "Hugging Face forward+backward"


def lognormal_lengths(generator: np.random.Generator, rows: int, mean: int) -> list[int]:
    """Draw lengths with the given mean before they are cut at eight times it."""
    lengths = generator.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA, rows)
    return [int(length) for length in lengths.clip(SHORTEST, 8 * mean)]


def gemm_flops_per_s(shapes: Sequence[tuple[int, int]], tokens: int) -> float:
    """Rate of a linear layer's three products, over the shapes of a layer: best of five."""
    best_s = math.inf
    operands = [
        (torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs))
        for inputs, outputs in shapes
    ]
    for _ in range(5):
        began_s = time.perf_counter()
        for states, weights, gradients in operands:
            states @ weights.t()
            gradients @ weights
            gradients.t() @ states
        best_s = min(best_s, time.perf_counter() - began_s)
    return sum(6.0 * tokens * inputs * outputs for inputs, outputs in shapes) / best_s


def print_samples(title: str, samples: Samples, tokens: float) -> None:
    print(f"\n{title:<56}{'s':>8}{'CPU s':>8}{'tokens/s':>10}")
    for name, held in samples.items():
        wall_s = median_wall_s(samples, name)
        cpu_s = statistics.median(sample.cpu_s for sample in held)
        print(f"  {name:<54}{wall_s:>8.3f}{cpu_s:>8.3f}{tokens / wall_s:>10.0f}")


class Bench:
    """Both models, and the batches that they meet."""

    def __init__(self, sizes: learning.Sizes, rows: int, length: int) -> None:
        self.sizes, self.rows, self.length = sizes, rows, length
        megatron_cpu.patch_torch_megatron_without_gpu()
        device = learning.open_lone_world("cpu")
        self.model = learning.make_hf_model(sizes, device, torch.float32)
        self.trainee = learning.Trainee(self.model, device, torch.float32, rows * length)
        self.generator = np.random.default_rng(SEED)

    def batch(self, lengths: Sequence[int], scored_share: float = 1.0) -> list[TrainingRow]:
        return [
            learning.make_row(self.generator, length, self.sizes.vocab, scored_share)
            for length in lengths
        ]

    def hugging_face(self, batch: Sequence[TrainingRow]) -> float:
        return learning.hf_forward_backward(self.model, batch, self.rows)

    def unpadded(self, pairs: int) -> tuple[Samples, float]:
        """Compare rows of one length; return samples, and the difference of the mean losses."""
        whole = self.batch([self.length] * self.rows)
        half = self.batch([self.length] * self.rows, scored_share=0.5)
        gap = abs(self.hugging_face(whole) + self.trainee.mean_logprob(whole))
        sides = (
            Side(OURS, lambda: self.trainee.step(whole)),
            Side(OURS_HALF, lambda: self.trainee.step(half)),
            Side(THEIRS, lambda: self.hugging_face(whole)),
        )
        return measure_pairs(sides, pairs), gap

    def padded(self, batches: Sequence[Sequence[TrainingRow]]) -> Samples:
        """Compare one batch a round, the first of them unmeasured."""
        ours, theirs = iter(batches), iter(batches)
        sides = (
            Side(OURS, lambda: self.trainee.step(next(ours))),
            Side(THEIRS, lambda: self.hugging_face(next(theirs))),
        )
        return measure_pairs(sides, len(batches) - 1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="areal-hpc bench trainer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--pairs", type=int, default=7, help="rounds that count")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--length", type=int, default=300, help="mean length of a row")
    add_out(parser, "trainer")
    arguments = parser.parse_args(argv)
    hidden, rows, length = arguments.hidden, arguments.rows, arguments.length
    sizes = learning.Sizes(
        "qwen3", hidden, arguments.layers, hidden // 64, hidden // 128, 3 * hidden, arguments.vocab
    )
    threads = torch.get_num_threads()
    print(f"qwen3, {sizes.parameters / 1e6:.1f}M parameters, float32, {threads} thread(s)")

    bench = Bench(sizes, rows, length)
    unpadded, gap = bench.unpadded(arguments.pairs)
    tokens = rows * length
    print_samples(f"unpadded: {rows} rows of {length} tokens", unpadded, tokens)

    lengths = [lognormal_lengths(bench.generator, rows, length) for _ in range(arguments.pairs + 1)]
    padded = bench.padded([bench.batch(each) for each in lengths])
    mean_tokens = statistics.mean(sum(each) for each in lengths[1:])
    mean_places = statistics.mean(len(each) * max(each) for each in lengths[1:])
    title = f"padded: {mean_tokens:.0f} tokens in {mean_places:.0f} places of the longest row"
    print_samples(title, padded, mean_tokens)

    flops = sizes.step_flops([length] * rows, tokens - rows)
    rate = gemm_flops_per_s([*sizes.layer_shapes.values(), (hidden, sizes.vocab)], tokens)
    step_s = median_wall_s(unpadded, OURS)
    print(
        f"\nfloor: {flops / 1e9:.0f} GFLOP at the {rate / 1e9:.0f} GFLOP/s of the matrix products "
        f"alone take {flops / rate:.3f} s, the packed step {step_s:.3f} s"
    )
    figures = {
        "over_hf_unpadded": wall_ratio(unpadded, THEIRS, OURS),
        "over_hf_padded": wall_ratio(padded, THEIRS, OURS),
        "over_hf_unpadded_half_scored": wall_ratio(unpadded, THEIRS, OURS_HALF),
        "over_hf_unpadded_cpu": cpu_ratio(unpadded, THEIRS, OURS),
        "over_hf_padded_cpu": cpu_ratio(padded, THEIRS, OURS),
        "places_over_tokens": mean_places / mean_tokens,
        "floor_over_step": flops / rate / step_s,
        "mean_loss_gap": gap,
    }
    settings = {
        "model": learning.describe(sizes),
        "dtype": "float32",
        "threads": threads,
        "rows": rows,
        "length_unpadded": length,
        "lengths_padded": f"lognormal, mean {length}, sigma {SIGMA}, seed {SEED}",
        "max_tokens_per_microbatch": bench.trainee.max_tokens,
        "pairs": arguments.pairs,
        "torch": torch.__version__,
    }
    report(figures, settings, arguments.out)


if __name__ == "__main__":
    main()

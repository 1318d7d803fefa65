"""Statistics of loss functions, added up on the device and read from it once a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state

Number = float | torch.Tensor
"""A number that is known here, or one that a device holds: a tensor without axes."""


@dataclass(slots=True, eq=False)
class LossStats:
    """Statistics that loss functions add up over tokens: sums, maxima and histograms by name."""

    sums: Mapping[str, Number] = field(default_factory=dict)
    maxima: Mapping[str, Number] = field(default_factory=dict)
    histograms: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Counts by bin in float64."""

    def add(self, added: LossStats) -> None:
        """Add the statistics of another micro-batch. Nothing waits for the device."""
        self.sums = dict(self.sums) | {
            name: self.sums.get(name, 0.0) + value for name, value in added.sums.items()
        }
        self.maxima = dict(self.maxima) | {
            name: _take_larger(self.maxima.get(name, value), value)
            for name, value in added.maxima.items()
        }
        self.histograms = dict(self.histograms) | {
            name: counts + self.histograms.get(name, 0) for name, counts in added.histograms.items()
        }

    def reduce_over_ranks(
        self,
        names: Sequence[str],
        maxima: Sequence[str],
        histograms: Mapping[str, int] | None = None,
    ) -> ReducedStats:
        """These statistics over all ranks, on every rank. A collective, and the read of a step.

        `histograms` gives the number of bins of each.

        Only the first tensor-parallel rank of the last stage counts: the others saw the same
        tokens, or none.
        """
        counts = (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )
        own = self if counts else LossStats()
        bins_of = histograms or {}
        numbers = [own.sums.get(name, 0.0) for name in names]
        numbers += [own.maxima.get(name, 0.0) for name in maxima]
        vectors = [
            own.histograms.get(name, torch.zeros(bins, dtype=torch.float64))
            for name, bins in bins_of.items()
        ]
        sizes = [len(names), len(maxima), *bins_of.values()]
        sums, tops, *counts_of = copy_numbers_to_host(numbers, vectors).split(sizes)
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
            # A maximum over ranks passes over what is not a number: it travels as a flag beside.
            odd = tops.isnan()
            both = torch.stack([tops.nan_to_num(0.0, torch.inf, -torch.inf), odd.double()])
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
            tops = both[0].masked_fill(both[1] > 0, torch.nan)
            for counts_B in counts_of:
                dist.all_reduce(counts_B)
        return ReducedStats(
            dict(zip(names, sums.tolist(), strict=True)),
            dict(zip(maxima, tops.tolist(), strict=True)),
            dict(zip(bins_of, counts_of, strict=True)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ReducedStats:
    """Statistics over all ranks, on the host."""

    sums: dict[str, float]
    maxima: dict[str, float]
    histograms: dict[str, torch.Tensor]


def _take_larger(current: Number, value: Number) -> Number:
    pair = (current, value)
    device = next((one.device for one in pair if isinstance(one, torch.Tensor)), None)
    if device is not None:
        one, two = (torch.as_tensor(n, dtype=torch.float64, device=device) for n in pair)
        return torch.maximum(one, two)
    return value if math.isnan(value) else max(current, value)


def copy_numbers_to_host(
    numbers: Sequence[Number], vectors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """All numbers, then all vectors, as one float64 tensor on the host: one copy from a device."""
    found = torch.tensor([0.0 if isinstance(n, torch.Tensor) else n for n in numbers]).double()
    held = {place: n for place, n in enumerate(numbers) if isinstance(n, torch.Tensor)}
    parts = [n.double().reshape(1) for n in held.values()] + [one.double() for one in vectors]
    if not parts:
        return found
    device = next((part.device for part in parts if part.device.type != "cpu"), parts[0].device)
    read = torch.cat([part.to(device, non_blocking=True) for part in parts]).cpu()
    found[list(held)] = read[: len(held)]
    return torch.cat([found, read[len(held) :]])

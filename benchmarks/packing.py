"""Benchmark of packing sealed trajectories and computing advantages, against padding.

What is compared:

- pack: a batch manifest -> every micro-batch of one data-parallel rank in memory, by the
  functions a training step calls: `read_rows_by_ticket`, `build_rows`, `plan_packs`,
  `build_pack`. Its peer starts from tensors that are already in memory: pad every trajectory to the
  longest, reorder into first-fit-decreasing micro-batches, cut the padding off again, pad each
  micro-batch to a multiple of 256 tokens.
- advantage: trajectories and rewards in memory -> one advantage per token (`build_rows`, which
  also makes the objective's other channels). Its peer normalizes rewards by group, places them
  at the end of each padded row and runs generalized advantage estimation backwards, one padded
  place at a time, with discount and lambda 1 and no critic: the same number at every sampled
  token.

The peer is the padded pipeline of AReaL (github.com/areal-project/AReaL, areal/utils/data.py and
areal/trainer/ppo/actor.py, read on 2026-08-22), written anew here. Its advantages are checked
against ours before anything is timed. Every round runs all sides in alternating order.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.shards.verify import CheckedShards
from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.trainer.batch.packing import (
    Channel,
    Pack,
    PackParallelism,
    TrainingRow,
    build_pack,
    compute_padded_length,
    plan_packs,
)
from areal_hpc.trainer.batch.training_rows import build_rows, read_rows_by_ticket
from areal_hpc.wire.ledger import BatchManifest, SealedTicket, TicketRef
from areal_hpc.wire.trajectory import TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion
from benchmarks._pairs import (
    Side,
    add_out,
    measure_pairs,
    median_wall_s,
    print_samples,
    report,
    wall_ratio,
)
from benchmarks._trajectories import FIRST_VERSION, N_SAMPLES, make_trajectories

SHORTEST_TOKENS = 180
MAX_TOKENS = 32_768
CURRENT = WeightVersion.unpack(FIRST_VERSION + 2)
OBJECTIVE = ObjectiveConfig()
PAGE_TOKENS = 256
LAYOUTS = (
    PackParallelism(),
    PackParallelism(tp=2),
    PackParallelism(cp=2),
    PackParallelism(tp=2, cp=2),
    PackParallelism(tp=8, cp=4),
)
"""Padding is counted under each."""

Tensors = Mapping[str, torch.Tensor]


class Ours:
    """The product's way, from shards on disk."""

    def __init__(self, trajectories: Sequence[TrajectoryRow], folder: Path) -> None:
        shard = write_sealed_shard(trajectories, folder, folder / "index", "bench")
        tickets = [
            SealedTicket(
                TicketRef(ticket.ticket_id, ticket.attempt),
                shard.file,
                ticket.rows,
                ticket.rewards,
                ticket.oldest_version,
            )
            for ticket in shard.tickets
        ]
        self.manifest = BatchManifest(step=1, generation=1, tickets=tickets)
        self.folder = folder
        self.batch = self.read()

    def read(self) -> list[TrajectoryRow]:
        # A store of its own each time, as every batch is read for the first time.
        shards = CheckedShards(self.folder, self.folder / "index")
        with shards.check_digests_in_background({ticket.shard for ticket in self.manifest.tickets}):
            return [row for ticket in read_rows_by_ticket(self.manifest, shards) for row in ticket]

    def rows(self) -> list[TrainingRow]:
        return build_rows(self.batch, CURRENT, [GenerationFork(1, 0)], OBJECTIVE)

    def pack(self) -> list[Pack]:
        rows = build_rows(self.read(), CURRENT, [GenerationFork(1, 0)], OBJECTIVE)
        lengths = [len(row.input_ids_T) for row in rows]
        (plan,) = plan_packs(lengths, ranks=1, max_tokens=MAX_TOKENS, parallelism=PackParallelism())
        channels = list(rows[0].channels)
        return [
            build_pack([rows[index] for index in part], channels, PackParallelism())
            for part in plan
        ]


def padding_waste(lengths: Sequence[int], split: PackParallelism) -> float:
    """Share of all places that hold no token."""
    (plan,) = plan_packs(lengths, ranks=1, max_tokens=MAX_TOKENS, parallelism=split)
    sizes = [sum(compute_padded_length(lengths[index], split) for index in part) for part in plan]
    padded_tokens = sum(-(-size // split.pack_multiple) * split.pack_multiple for size in sizes)
    return 1.0 - sum(lengths) / padded_tokens


class Padded:
    """The ancestor's way, from tensors in memory."""

    def __init__(self, trajectories: Sequence[TrajectoryRow]) -> None:
        self.rows = [_as_tensors(trajectory) for trajectory in trajectories]
        self.batch = self.pad()
        self.scores = self.advantages()

    def pad(self) -> dict[str, torch.Tensor]:
        longest = max(row["input_ids"].shape[1] for row in self.rows)
        return {
            name: torch.cat([_pad_to(row[name], longest) for row in self.rows])
            for name in self.rows[0]
        }

    def advantages(self) -> dict[str, torch.Tensor]:
        return padded_advantages(self.batch)

    def pack(self) -> list[dict[str, torch.Tensor]]:
        batch = {**self.pad(), **self.scores}
        lengths_B = batch["attention_mask"].sum(1).tolist()
        groups = first_fit_decreasing(lengths_B, MAX_TOKENS)
        order = [index for group in groups for index in group]
        reordered = {name: torch.stack([held[i] for i in order]) for name, held in batch.items()}
        packs, begin = [], 0
        for group in groups:
            end = begin + len(group)
            part = {name: held[begin:end] for name, held in reordered.items()}
            packs.append(_pad_to_page(_without_padding(part)))
            begin = end
        return packs


def _as_tensors(trajectory: TrajectoryRow) -> dict[str, torch.Tensor]:
    """One row as the ancestor's client exports it: 64-bit integers, batch dimension 1."""
    wide = {
        "input_ids": trajectory.input_ids_T.astype(np.int64),
        "loss_mask": trajectory.loss_mask_T.astype(np.int64),
        "logprobs": trajectory.logprobs_T,
        "versions": trajectory.versions_T,
        "attention_mask": np.ones(trajectory.num_tokens, bool),
    }
    return {
        **{name: torch.from_numpy(array)[None] for name, array in wide.items()},
        "rewards": torch.tensor([trajectory.reward]),
    }


def _pad_to(held: torch.Tensor, length: int) -> torch.Tensor:
    if held.dim() == 1 or held.shape[1] == length:
        return held
    padding = held.new_zeros((held.shape[0], length - held.shape[1]))
    return torch.cat([held, padding], dim=1)


def padded_advantages(batch: Tensors) -> dict[str, torch.Tensor]:
    """Group-normalized rewards and GAE over padded rows; discount, lambda 1; no critic, no KL."""
    rewards_BG = batch["rewards"].double().view(-1, N_SAMPLES)
    spread_B1 = rewards_BG.std(dim=1, keepdim=True)
    scores_BG = (rewards_BG - rewards_BG.mean(dim=1, keepdim=True)) / (spread_B1 + 1e-9)
    scores_B = scores_BG.flatten().float()
    mask = torch.roll(batch["loss_mask"].float(), -1, dims=-1)
    logprobs = torch.roll(batch["logprobs"], -1, dims=-1) * mask
    penalties = -0.0 * (logprobs - torch.zeros_like(logprobs) * mask)
    every_B = torch.arange(len(scores_B))
    lengths_B = batch["attention_mask"].sum(-1).long()
    penalties[every_B, lengths_B - 1] = 0
    penalties[every_B, (lengths_B - 2).clip(min=0)] += scores_B
    values = torch.zeros_like(penalties)
    following_B = values[:, -1] * (lengths_B == mask.shape[1])
    held_B = torch.zeros_like(scores_B)
    backwards = [held_B]
    for position in reversed(range(mask.shape[1] - 1)):
        delta_B = penalties[:, position] + following_B - values[:, position]
        fresh_B = delta_B + held_B
        scored_B = mask[:, position]
        following_B = following_B * (1 - scored_B) + values[:, position] * scored_B
        held_B = held_B * (1 - scored_B) + fresh_B * scored_B
        backwards.append(held_B)
    advantages = torch.stack(backwards[::-1], dim=1)
    return {"advantages": advantages, "returns": advantages + values}


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Longest first, into the fewest-membered group that still has room, or a new one."""
    groups: list[list[int]] = []
    loads: list[int] = []
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        open_groups = [g for g, load in enumerate(loads) if load + lengths[index] <= capacity]
        if open_groups:
            chosen = min(open_groups, key=lambda group: len(groups[group]))
            groups[chosen].append(index)
            loads[chosen] += lengths[index]
        else:
            groups.append([index])
            loads.append(lengths[index])
    return sorted(sorted(group) for group in groups)


def _without_padding(part: Tensors) -> dict[str, torch.Tensor]:
    lengths_S = part["attention_mask"].sum(dim=1, dtype=torch.int32)
    bounds = functional.pad(torch.cumsum(lengths_S, 0, dtype=torch.int32), (1, 0))
    packed = {"cu_seqlens": bounds}
    for name, held in part.items():
        if name == "attention_mask" or held.dim() == 1:
            continue
        flat_T = held.new_empty(int(bounds[-1]))
        for row in range(len(held)):
            begin, end = int(bounds[row]), int(bounds[row + 1])
            flat_T[begin:end] = held[row][: end - begin]
        packed[name] = flat_T
    return packed


def _pad_to_page(pack: Tensors) -> dict[str, torch.Tensor]:
    tokens = int(pack["cu_seqlens"][-1])
    missing = -tokens % PAGE_TOKENS
    padded = {
        name: functional.pad(held, (0, missing))
        for name, held in pack.items()
        if name != "cu_seqlens"
    }
    return {**padded, "cu_seqlens": functional.pad(pack["cu_seqlens"], (0, 1), value=tokens)}


def check_same_advantages(ours: Sequence[TrainingRow], theirs: torch.Tensor) -> None:
    """Check that both ways give the same number at every sampled token.

    The ancestor's stand at the place that predicts the token, ours at the token.
    """
    for row, padded_L in zip(ours, theirs, strict=True):
        sampled_T = np.flatnonzero(row.loss_mask_T[1:])
        own = row.channels[Channel.ADVANTAGE][1:][sampled_T]
        np.testing.assert_allclose(padded_L.numpy()[sampled_T], own, atol=1e-5)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="areal-hpc bench packing", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--pairs", type=int, default=3, help="rounds that count")
    parser.add_argument("--trajectories", type=int, default=512, help="a multiple of 8")
    add_out(parser, "packing")
    arguments = parser.parse_args(argv)

    trajectories = make_trajectories(arguments.trajectories, SHORTEST_TOKENS)
    lengths = [trajectory.num_tokens for trajectory in trajectories]
    print(f"{len(lengths)} trajectories, {sum(lengths)} tokens, longest {max(lengths)}")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        ours, padded = Ours(trajectories, Path(folder)), Padded(trajectories)
        check_same_advantages(ours.rows(), padded.scores["advantages"])
        packs = measure_pairs(
            (Side("ours", ours.pack), Side("padded", padded.pack)), arguments.pairs
        )
        advantages = measure_pairs(
            (Side("ours", ours.rows), Side("padded", padded.advantages)), arguments.pairs
        )
    dist.destroy_process_group()
    megabytes = 17e-6 * sum(lengths)
    print_samples("trajectories to packed batch", packs, megabytes)
    print_samples("advantages", advantages, megabytes)
    wastes = {split: padding_waste(lengths, split) for split in LAYOUTS}
    print("\npadding waste")
    for split, waste in wastes.items():
        print(f"  tp {split.tp}, cp {split.cp}: {100 * waste:.4f} %")
    figures = {
        "pack_s": median_wall_s(packs, "ours"),
        "advantage_s": median_wall_s(advantages, "ours"),
        "padding_waste": max(wastes.values()),
        "areal_over_ours_pack": wall_ratio(packs, "padded", "ours"),
        "areal_over_ours_advantage": wall_ratio(advantages, "padded", "ours"),
    }
    settings = {
        "pairs": arguments.pairs,
        "trajectories": len(lengths),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "torch": torch.__version__,
    }
    report(figures, settings, arguments.out)


if __name__ == "__main__":
    main()

"""A run directory as a run leaves it: a model, sealed shards, and the manifests of its batches."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from msgspec import structs

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.manifests import read_manifest, write_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import append_to_index, read_index
from areal_hpc.shards.verify import build_index_line
from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.wire.ledger import NO_VERSION, BatchManifest, SealedTicket, TicketRef
from areal_hpc.wire.trajectory import CallRecord, MixtureShape, RouteArray, RowRecord, TrajectoryRow
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.role_recipe import write_role_recipe

TICKETS, SAMPLES = 3, 4
VOCAB = 320
TRAINER: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_tokens_per_microbatch": 64,
    "checkpoint_every_steps": 2,
    "optimizer": {"lr": 1e-3, "decay": "cosine", "warmup_steps": 2, "weight_decay": 0.1},
}


def record_run(
    root: Path,
    steps: int,
    *,
    oldest: int = 0,
    groups: int = TICKETS,
    far_steps: Collection[int] = (),
    rewards: Mapping[int, Sequence[float]] | None = None,
    mixture: MixtureShape | None = None,
    says_rewards: bool = False,
) -> RunPaths:
    """Write a run of so many batches, of rows up to `oldest` versions old, with any routes.

    With `says_rewards` each reply is the number that is its reward unless `rewards` has another,
    and the tasks are 0 and 1. In `far_steps` the ratio of the trainer's and the engine's
    probabilities is no 32-bit number.
    """
    paths = RunPaths(root)
    make_tiny_model(
        paths.starting_model_dir, ["one two three"], hidden=32, heads=2, kv_heads=2, head_dim=16,
        ffn=64, vocab=VOCAB,
    )  # fmt: skip
    generator = np.random.default_rng(5)
    for step in range(1, steps + 1):
        rows = [
            _trajectory(generator, step, ticket, episode, episode % (oldest + 1))
            for ticket in range(groups)
            for episode in range(SAMPLES)
        ]
        if step in far_steps:
            for row in rows:
                row.logprobs_T[row.loss_mask_T != 0] = -200.0
        if says_rewards:
            rows = [_say_reward(row) for row in rows]
        if rewards and step in rewards:
            rows = [replace(row, reward=rewards[step][row.episode]) for row in rows]
        if mixture is not None:
            rows = [replace(row, routes_TLK=_draw_routes(mixture, row, step)) for row in rows]
        shard = write_sealed_shard(rows, paths.shards_dir, paths.shard_index_dir, "cell-0")
        tickets = [
            SealedTicket(
                TicketRef((step - 1) * groups + ticket, 0),
                shard.file,
                list(range(ticket * SAMPLES, (ticket + 1) * SAMPLES)),
                [row.reward for row in rows[ticket * SAMPLES : (ticket + 1) * SAMPLES]],
                NO_VERSION,
            )
            for ticket in range(groups)
        ]
        write_manifest(paths, BatchManifest(step, 1, tickets))
    return paths


def spoil(paths: RunPaths, step: int, rows: Sequence[int], **columns: float) -> None:
    """Overwrite columns of a batch's rows and of the index, as no writer of ours would."""
    name = read_manifest(paths, step).tickets[0].shard
    path = paths.shards_dir / name
    with h5py.File(path, "r+") as file:
        bounds = file["offsets"][:]
        for column, value in columns.items():
            for row in rows:
                file[column][bounds[row] : bounds[row + 1]] = value
    lines = read_index(paths.shard_index_dir)
    (index,) = paths.shard_index_dir.iterdir()
    index.unlink()
    for line in lines:
        append_to_index(
            paths.shard_index_dir, build_index_line(path) if line.file == name else line
        )


def write_recipe(paths: RunPaths, trainer: dict[str, Any], **sections: Any) -> None:
    """The recipe that such a run could have been made from, with the trainer's part as given."""
    usual: dict[str, Any] = {
        "train_dataset": {"generator": "examples.quickstart.task:generate"},
        "rollout": {"workflow": "examples.quickstart.agent.ArithmeticAgent", "n_samples": SAMPLES},
        "trainer": {"batch_size": TICKETS, **trainer},
    }
    write_role_recipe(paths, **(usual | sections))


def sft_config(
    root: Path,
    demonstrations: Mapping[str, str] | Sequence[Mapping[str, Any]],
    parallel: Mapping[str, int] | None = None,
    **sft: Any,
) -> dict[str, Any]:
    """The facts of an SFT stage of a recorded run, with answers to learn or whole rows."""
    if isinstance(demonstrations, Mapping):
        demonstrations = [
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
            for question, answer in demonstrations.items()
        ]
    file = root / "demonstrations.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in demonstrations))
    paths = RunPaths(root)
    sft_stage = {"dataset": {"path": str(file)}, **sft}
    trainer = {"device": "cpu", "dtype": "float32", "parallel": dict(parallel or {})}
    write_recipe(paths, trainer, seed=3, sft=sft_stage)
    return {
        "run_dir": str(root),
        "model_path": str(paths.starting_model_dir),
        "dataset_path": str(file),
        "evaluation_path": str(file) if "evaluation" in sft else None,
    }


def _trajectory(
    generator: np.random.Generator, step: int, ticket: int, episode: int, age: int
) -> TrajectoryRow:
    size = int(generator.integers(8, 30))
    mask_T = (generator.random(size) < 0.6).astype(np.uint8)
    mask_T[0], mask_T[-1] = 0, 1
    name = f"{step}-{ticket}-{episode}"
    reply = CallRecord(
        id=f"reply-{name}",
        trained=True,
        prompt_tokens=1,
        reply_tokens=size - 1,
        finish_reason="stop",
    )
    return TrajectoryRow(
        ticket_id=(step - 1) * TICKETS + ticket,
        attempt=0,
        episode=episode,
        row=0,
        input_ids_T=generator.integers(0, VOCAB, size).astype(np.int32),
        loss_mask_T=mask_T,
        logprobs_T=(generator.normal(-5.5, 0.5, size) * mask_T).astype(np.float32),
        versions_T=np.where(mask_T, WeightVersion(1, max(0, step - 1 - age)).packed, -1),
        reward=float(generator.integers(0, 2)) + episode / 8,
        record=RowRecord(session_id=f"session-{name}", calls=[reply]),
    )


def _say_reward(row: TrajectoryRow) -> TrajectoryRow:
    (reply,) = row.record.calls
    record = structs.replace(
        row.record, task_index=row.ticket_id % 2, calls=[structs.replace(reply, new_messages=1)]
    )
    question, answer = {"role": "user", "content": "?"}, {"role": "assistant"}
    messages = [question, {**answer, "content": str(row.reward)}]
    return replace(row, record=record, meta={"messages": messages})


def _draw_routes(mixture: MixtureShape, row: TrajectoryRow, step: int) -> RouteArray:
    routes_TLK = mixture.make_routes(row.num_tokens)
    generator = np.random.default_rng((step, row.ticket_id, row.episode))
    sizes = (row.num_tokens - 1, mixture.layers, mixture.experts)  # the last token has no route
    routes_TLK[:-1] = generator.random(sizes).argsort(-1)[..., : mixture.per_token]
    return routes_TLK


def claim_dropout(paths: RunPaths) -> None:
    """Let the model's configuration ask for dropout, which the trainer never applies."""
    path = paths.starting_model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attention_dropout": 0.5}))

"""A run made up step by step: episodes with the times of their calls, metrics, events, batches."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from areal_hpc.rundir.jsonl import append_line, append_lines
from areal_hpc.rundir.manifests import write_manifest
from areal_hpc.rundir.paths import RunPaths, format_step_dir
from areal_hpc.rundir.telemetry.spans import ProcessStart, Span
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.ledger import BatchManifest, SealedTicket, TicketRef
from areal_hpc.wire.trajectory import CallRecord, RowRecord, TrajectoryRow
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.sample_trajectories import seal_in

STARTED_AT = 1_700_000_000.0
SAMPLES = 4
PROMPT_TOKENS = 3


@dataclass(frozen=True)
class MadeEpisode:
    cell: str = "cell-0"
    replica: int = 0
    calls: int = 2
    call_s: float = 1.0
    call_tokens: int = 40
    tool: str = "search"
    tool_s: float = 0.05
    reward: float = 1.0
    task: int = 0
    reply: Sequence[int] = (7, 8, 9)
    """Token ids that it sampled, in all."""
    text: str = "an answer"
    finish: str = "stop"
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.calls * self.call_s + (self.calls - 1) * self.tool_s


class MadeRun:
    """A run directory `<root>/made/run` that grows by steps."""

    def __init__(self, root: Path, trial_name: str = "run", **recipe: Any) -> None:
        self.paths = RunPaths(root / "made" / trial_name)
        self.paths.root.mkdir(parents=True)
        values = {
            "experiment_name": "made",
            "trial_name": trial_name,
            "cluster": {"fileroot": str(root)},
            "trainer": {"total_steps": 100, "batch_size": 2, "checkpoint_every_steps": 1},
            "rollout": {"max_head_offpolicyness": 0, "max_concurrent_rollouts": 8},
            "inference": {"cells": 2},
            "evaluation": {"every_steps": 1},
        }
        self.paths.recipe.write_text(yaml.safe_dump(values | recipe))
        self.now = STARTED_AT
        self.step = 0
        self.tickets = 0
        for cell, node in (("cell-0", "n01"), ("cell-1", "n02")):
            folder = self.paths.log_dir(1) / cell
            folder.mkdir(parents=True)
            (folder / "driver.log").write_text(f"2026-01-01 00:00:00,000 INFO x: on node {node}\n")

    def add_step(
        self,
        episodes: Sequence[MadeEpisode],
        phases: Mapping[str, float] | None = None,
        *,
        late_s: float = 0.0,
        sealing_s: float = 0.0,
        generation: int = 1,
        **metrics: Any,
    ) -> None:
        """Add one step. Its groups are `SAMPLES` episodes each, in their order.

        Episodes begin `late_s` after the trainer has begun to wait, which it does until
        `sealing_s` after the last one. `phases` are further ones.
        """
        self.step += 1
        files_s = (phases or {}).get("files", 0.0)  # of the row before
        begin = self.now + files_s
        wait_s = late_s + max(episode.duration_s for episode in episodes) + sealing_s
        rows = [
            self._make_row(index, episode, begin + late_s, generation)
            for index, episode in enumerate(episodes)
        ]
        shard = seal_in(self.paths, rows)
        tickets = []
        for first in range(0, len(rows), SAMPLES):
            own = rows[first : first + SAMPLES]
            ref = TicketRef(own[0].ticket_id, 1)
            row_indices = list(range(first, first + len(own)))
            rewards = [row.reward for row in own]
            version = WeightVersion(generation, self.step - 1).packed
            tickets.append(SealedTicket(ref, shard.file, row_indices, rewards, version))
        write_manifest(self.paths, BatchManifest(self.step, generation, tickets))
        self.tickets += len(tickets)
        times = {"batch_wait": wait_s, "train": 0.5, "publish": 0.1, **(phases or {})}
        self.now = begin - files_s + sum(times.values())
        rewards = [episode.reward for episode in episodes]
        row = {
            "step": self.step,
            "version": f"{generation}.{self.step}",
            "generation": generation,
            "unix_time_s": self.now,
            "time/step_s": sum(times.values()),
            **{f"time/{name}_s": seconds for name, seconds in times.items()},
            "episodes": len(episodes),
            "reward/mean": float(np.mean(rewards)),
            "reward/standard_error": 0.01,
            "cells/idle_s": 0.0,
        }
        named = {name.replace("__", "/"): value for name, value in metrics.items()}
        append_line(self.paths.metrics, row | named)

    def finish(self) -> None:
        folder = self.paths.checkpoints_dir / format_step_dir(self.step)
        folder.mkdir(parents=True)
        state = {
            "step": self.step,
            "generation": 1,
            "seed": 1,
            "parent": None,
            "consumed": [*range(1, self.step + 1)],
            "untrained": [],
        }
        (folder / "trainer.json").write_text(json.dumps(state))
        (folder / "COMPLETE").touch()
        self.paths.finished_marker.touch()

    def add_event(self, role: str, event: str, **facts: Any) -> None:
        line = {"time": self.now, "role": role, "event": event, **facts}
        append_line(self.paths.events, line)

    def _make_row(
        self, index: int, made: MadeEpisode, begin: float, generation: int
    ) -> TrajectoryRow:
        ids = [1] * PROMPT_TOKENS + list(made.reply)
        mask = np.array([0] * PROMPT_TOKENS + [1] * len(made.reply), np.uint8)
        ticket = self.tickets + index // SAMPLES
        version = WeightVersion(generation, self.step - 1).packed
        return TrajectoryRow(
            ticket_id=ticket,
            attempt=1,
            episode=index % SAMPLES,
            row=0,
            input_ids_T=np.array(ids, np.int32),
            loss_mask_T=mask,
            logprobs_T=(-0.5 * mask).astype(np.float32),
            versions_T=np.where(mask, version, -1).astype(np.int64),
            reward=made.reward,
            record=RowRecord(
                session_id=f"{ticket}-{index}",
                task_index=made.task,
                cell=made.cell,
                started_at=begin,
                ended_at=begin + made.duration_s,
                calls=list(_make_calls(made, begin)),
            ),
            meta={"messages": _make_messages(made)},
        )


def _make_calls(made: MadeEpisode, begin: float) -> list[CallRecord]:
    calls = []
    for number in range(made.calls):
        asked_at = begin + number * (made.call_s + made.tool_s)
        is_last = number == made.calls - 1
        calls.append(
            CallRecord(
                id=f"c{number}",
                parent_id=f"c{number - 1}" if number else None,
                trained=True,
                reward=Reward(made.reward) if is_last else None,
                asked_at=asked_at,
                answered_at=asked_at + made.call_s,
                replica=made.replica,
                prompt_tokens=PROMPT_TOKENS,
                reply_tokens=made.call_tokens,
                finish_reason=made.finish if is_last else "stop",
                new_messages=1,
                sampling=dict(made.sampling),
            )
        )
    return calls


def _make_messages(made: MadeEpisode) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"task {made.task}"}]
    for number in range(made.calls - 1):
        called = {"id": f"t{number}", "function": {"name": made.tool, "arguments": "{}"}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": f"t{number}", "content": "found"},
        ]
    return [*messages, {"role": "assistant", "content": made.text}]


def make_cheating_run(root: Path, steps: int) -> MadeRun:
    """Make a run whose share of equal, rewarded replies grows, while the judge sees no gain."""
    run = MadeRun(root)
    append_line(run.paths.metrics, {"step": 0, "evaluation/judge/avg@1": 0.2})
    honest = [
        MadeEpisode(task=index // SAMPLES, reward=0.0, reply=(index, 1, 2))
        for index in range(12 * SAMPLES)
    ]
    for step in range(1, steps + 1):
        cheats = round(len(honest) * step / steps)
        episodes = [
            replace(episode, reward=1.0, reply=(5, 5, 5)) if index < cheats else episode
            for index, episode in enumerate(honest)
        ]
        metrics: dict[str, Any] = {"evaluation/judge/avg@1": 0.1}
        run.add_step(episodes, **metrics)
    return run


def add_spans(run: MadeRun) -> None:
    """Spans of the last step: of the trainer and of cell-0, on another node."""
    run.paths.spans_dir.mkdir()
    begin = run.now - 3.0
    ledger = [ProcessStart(begin - 9, "n00", 1, begin - 9), Span("serve", begin - 9, begin + 3)]
    append_lines(run.paths.spans("trainer-ledger"), ledger)
    trainer = [
        ProcessStart(begin - 9, "n00", 2, begin - 9),
        Span("batch_wait", begin, begin + 2),
        Span("train", begin + 2, begin + 2.5),
    ]
    append_lines(run.paths.spans("trainer-trainer"), trainer)
    facts = {"ticket_id": 6, "attempt": 1, "episode": 0}
    driver = [
        ProcessStart(begin, "n01", 3, begin),
        Span("episodes", begin, begin + 2),
        Span("episode", begin + 0.1, begin + 1.9, "episodes", facts | {"eval_step": -1}),
    ]
    append_lines(run.paths.spans("cell-0-driver"), driver)
    proxy = [
        ProcessStart(begin, "n01", 4, begin),
        Span("call", begin + 0.2, begin + 0.9, "replica 0", facts | {"reply_tokens": 7}),
        Span("call", begin + 1.0, begin + 1.8, "replica 0", facts | {"reply_tokens": 8}),
    ]
    append_lines(run.paths.spans("cell-0-proxy"), proxy)

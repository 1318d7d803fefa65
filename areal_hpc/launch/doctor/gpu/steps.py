"""Measured steps of a GPU examination: collectives between ranks, and a run of a tiny model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from areal_hpc.errors import ClusterError
from areal_hpc.inference.server.sglang_server import find_error_line
from areal_hpc.jobs.node.gpus import VISIBLE_DEVICES_VARIABLE
from areal_hpc.jobs.node.topology import LOOPBACK_ADDRESS
from areal_hpc.launch.doctor.gpu.plan import GpuCheckPlan
from areal_hpc.launch.tiny_model import TINY_MODEL_CONTEXT_TOKENS, make_tiny_model
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.rundir.jsonl import read_readable_records, read_tail_lines
from areal_hpc.rundir.paths import ROLES, RunPaths
from areal_hpc.trainer.config import CollectiveRates, CollectivesRequest

COLLECTIVES_MODULE = "areal_hpc.trainer.collective_rates"
DIE_WITH_PARENT_MODULE = "areal_hpc.jobs.processes.die_with_parent"
AGENT_MODULE = "areal_hpc.launch.doctor.gpu.tiny_agent"
SIZE_BYTES_BY_DEVICE = {"cuda": 256 << 20, "cpu": 4 << 20}
ROUNDS = 5
RANKS_TIMEOUT_S = 300.0
POLL_S = 0.2
LOG_TAIL_BYTES = 65536
REHEARSAL_RANKS = 2
STEPS = 2
"""The second one is sampled from weights that an update brought."""
RUN_TIMEOUT_S = 600.0
"""On top of the recipe's time for the start of a replica: kernels are compiled at first use."""
STOP_TIMEOUT_S = 60.0
TASKS, SAMPLES, REPLY_TOKENS = 4, 4, 24


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Position of this node's ranks among those of all nodes."""

    node: int = 0
    nodes: int = 1
    node_address: str = LOOPBACK_ADDRESS


class TinyRun(Struct, frozen=True):
    """Figures of a short run of a tiny model, by step."""

    dtype: str
    """SGLang's."""
    mean_gaps: tuple[float, ...]
    """Mean difference of log-probabilities between SGLang and the trainer. From the second step on
    SGLang's weights are those of an update."""
    gradient_norms: tuple[float, ...]


def list_rank_gpus(plan: GpuCheckPlan, visible_gpu_ids: Sequence[str]) -> tuple[str, ...]:
    return tuple(visible_gpu_ids) if plan.device == "cuda" else ("",) * REHEARSAL_RANKS


def measure_collectives(
    plan: GpuCheckPlan, gpus: Sequence[str], folder: Path, rank_place: RankPlace = RankPlace()
) -> CollectiveRates | None:
    """Run this node's ranks. The node of rank 0 gets the figures, others None.

    Each node has as many GPUs as this one: the job asks for them.
    """
    request = CollectivesRequest(
        device=plan.device,
        size_bytes=SIZE_BYTES_BY_DEVICE[plan.device],
        rounds=ROUNDS,
        rendezvous_dir=str(folder / "stores"),
        report=str(folder / "rates.json"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    request_file = folder / f"request.{rank_place.node}.json"
    request_file.write_bytes(msgspec.json.encode(request))
    run_ranks(plan, COLLECTIVES_MODULE, request_file, gpus, rank_place)
    if rank_place.node:
        return None
    return msgspec.json.decode(Path(request.report).read_bytes(), type=CollectiveRates)


def run_ranks(
    plan: GpuCheckPlan,
    module: str,
    request_file: Path,
    gpus: Sequence[str],
    rank_place: RankPlace = RankPlace(),
) -> None:
    """Run `python -m module REQUEST_FILE` as this node's ranks, a GPU each, to their ends.

    Raises:
        ClusterError: A rank failed, or they did not end in time.
    """
    first_rank = rank_place.node * len(gpus)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for local_rank, gpu in enumerate(gpus):
            rank = first_rank + local_rank
            variables = {
                "AREAL_HPC_RANK": str(rank),
                "AREAL_HPC_NUM_TASKS": str(rank_place.nodes * len(gpus)),
                "AREAL_HPC_LOCAL_RANK": str(local_rank),
                "AREAL_HPC_NODE_RANK": str(rank_place.node),
                "AREAL_HPC_HOST": rank_place.node_address,
                VISIBLE_DEVICES_VARIABLE: gpu,
            }
            command = [plan.pythons["train"], "-m", module, str(request_file)]
            log = request_file.parent / f"rank-{rank}.log"
            ranks.append(_start_process(command, log, plan.variables["train"] | variables))
        _await_ranks(ranks, first_rank, request_file.parent)
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start_process(
    command: Sequence[str], log: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", DIE_WITH_PARENT_MODULE, str(os.getpid()), *command],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _await_ranks(ranks: Sequence[subprocess.Popen[bytes]], first_rank: int, folder: Path) -> None:
    give_up_at = time.monotonic() + RANKS_TIMEOUT_S
    while True:
        codes = {rank: process.poll() for rank, process in enumerate(ranks, start=first_rank)}
        for rank, code in codes.items():
            if code:
                log = read_tail_lines(folder / f"rank-{rank}.log", LOG_TAIL_BYTES)
                line = find_error_line(log.decode(errors="replace")) or "no output"
                raise ClusterError(f"rank {rank} exited with code {code}: {line}")
        late = [f"rank {rank}" for rank, code in codes.items() if code is None]
        if not late:
            return
        if time.monotonic() > give_up_at:
            raise ClusterError(f"no end of {', '.join(late)} within {RANKS_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)


def run_tiny_recipe(plan: GpuCheckPlan, gpus: Sequence[str], folder: Path) -> TinyRun:
    """Train a tiny model on this node with the recipe's interpreters, variables and SGLang flags.

    Raises:
        ClusterError: The run failed, or took too long.
    """
    inference = build_single_replica_config(plan, len(gpus))
    heads = max(2, inference.tp)
    model_dir = folder / "model"
    make_tiny_model(
        model_dir,
        ["one two three four five six seven eight nine ten"],
        max_position_embeddings=inference.context_length or TINY_MODEL_CONTEXT_TOKENS,
        layers=2, hidden=256, heads=2 * heads, kv_heads=heads, head_dim=64, ffn=512, vocab=384,
    )  # fmt: skip
    recipe_file, log = folder / "doctor.yaml", folder / "run.log"
    # JSON is YAML.
    recipe_file.write_text(json.dumps(build_tiny_recipe(plan, inference, gpus, model_dir)))
    command = [plan.pythons["agents"], "-m", "areal_hpc", "run", str(recipe_file)]
    process = _start_process(command, log, {})
    try:
        code = process.wait(inference.startup_timeout_s + RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        process.terminate()  # the run stops its own processes
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        process.kill()
        process.wait()
    if code != 0:
        last_lines = log.read_text(errors="replace").strip().splitlines()[-8:]
        end = "took too long" if code is None else f"exited with code {code}"
        raise ClusterError(f"the run {end}: {' '.join(last_lines)}")
    return read_tiny_run(RunPaths(folder / "runs" / "doctor" / "gpu"), inference.dtype)


def build_tiny_recipe(
    plan: GpuCheckPlan, inference: InferenceConfig, gpus: Sequence[str], model_dir: Path
) -> Mapping[str, Any]:
    """The recipe of the run, as a tree. Pure."""
    roles = {
        role: {"python": plan.pythons[role], "variables": plan.variables[role]} for role in ROLES
    }
    gpu_ids = [int(gpu) if gpu.isdigit() else gpu for gpu in gpus]
    return {
        "experiment_name": "doctor",
        "trial_name": "gpu",
        "seed": 1,
        "cluster": {
            "fileroot": str(model_dir.parent / "runs"),
            "gpus": gpu_ids if plan.device == "cuda" else "none",
            **roles,
        },
        "model": {"path": str(model_dir)},
        "train_dataset": {"generator": f"{AGENT_MODULE}:list_tasks", "kwargs": {"size": 64}},
        "inference": inference.model_dump(mode="json"),
        "rollout": {
            "workflow": f"{AGENT_MODULE}.DistinctLettersAgent",
            "n_samples": SAMPLES,
            "max_head_offpolicyness": 0,
            "sampling": {"temperature": 1.0, "max_new_tokens": REPLY_TOKENS},
        },
        "trainer": {
            "device": plan.device,
            "dtype": plan.trainer_dtype,
            "total_steps": STEPS,
            "batch_size": TASKS,
            "optimizer": {"lr": 3e-4, "weight_decay": 0.0},
        },
    }


def read_tiny_run(paths: RunPaths, engine_dtype: str) -> TinyRun:
    """Figures of a finished run, from its metrics.

    Raises:
        ClusterError: A step has no comparison of engine and trainer.
    """
    steps = [row for row in read_readable_records(paths.metrics) if "reward/mean" in row]
    if len(steps) != STEPS:
        raise ClusterError(f"the run left {len(steps)} of {STEPS} steps in {paths.metrics}")
    try:
        return TinyRun(
            dtype=engine_dtype,
            mean_gaps=tuple(row["logprob/engine_trainer_mean_abs_diff"] for row in steps),
            gradient_norms=tuple(row["grad_norm"] for row in steps),
        )
    except KeyError as error:
        raise ClusterError(f"a step left no {error.args[0]} in {paths.metrics}") from error


def build_single_replica_config(plan: GpuCheckPlan, gpus: int) -> InferenceConfig:
    """The recipe's replica alone on this node, beside a trainer of one GPU. Pure.

    A rehearsal leaves further options out: those of GPUs would not start on a CPU.
    """
    config = InferenceConfig.model_validate(plan.inference)
    changed: dict[str, Any] = {"cells": 1, "replicas_per_cell": 1}
    changed |= {"nodes_per_replica": 1, "tp": config.tp // config.nodes_per_replica}
    changed |= {"device": plan.device, "max_restarts": 0}
    if plan.device == "cpu":
        changed |= {"tp": 1, "dtype": "float32", "extra_args": (), "max_total_tokens": 16384}
    elif changed["tp"] >= gpus:
        changed["tp"] = max(size for size in range(1, gpus) if changed["tp"] % size == 0)
    return config.model_copy(update=changed)

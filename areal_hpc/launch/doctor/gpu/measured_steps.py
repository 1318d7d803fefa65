"""Steps that `doctor --gpu` runs with the parts of a real run: collectives, trainer, SGLang."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from areal_hpc.errors import ClusterError
from areal_hpc.inference.server.command import ServerPorts, build_replica_command
from areal_hpc.jobs.node.gpus import VISIBLE_DEVICES_VARIABLE
from areal_hpc.jobs.node.topology import LOOPBACK_ADDRESS
from areal_hpc.jobs.processes.process_main import PARENT_VARIABLE, PROCESS_MAIN
from areal_hpc.launch.checks.server_options import ask_sglang_to_parse_options, find_option_problems
from areal_hpc.launch.doctor.gpu.report import GpuCheckPlan, Unmeasured
from areal_hpc.launch.doctor.gpu.worker_processes import Worker, await_workers_and_kill_rest
from areal_hpc.launch.tiny_model import TINY_MODEL_CONTEXT_TOKENS, make_tiny_model
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.rundir.paths import RunPaths, get_process_error_path
from areal_hpc.rundir.rendezvous import ensure_service_key, format_cell_name
from areal_hpc.trainer.self_test.messages import (
    COLLECTIVES_MODULE,
    ENGINE_MODULE,
    STEP_MODULE,
    CollectiveRates,
    CollectivesRequest,
    EngineComparison,
    EngineComparisonRequest,
    StepComparison,
    StepRequest,
)

COLLECTIVE_BYTES_BY_DEVICE = {"cuda": 256 << 20, "cpu": 4 << 20}
COLLECTIVE_ROUNDS = 5
COLLECTIVES_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 300.0
ENGINE_TIMEOUT_S = 600.0
"""On top of the recipe's time for the start of a replica: kernels are compiled at first use."""
REHEARSAL_RANKS = 2
INFERENCE_ENTRY = "areal_hpc.inference.job:run"
ReportT = TypeVar("ReportT")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where this node's ranks stand among all."""

    node: int = 0
    first_rank: int = 0
    world_size: int | None = None
    """Of all nodes; None: those of this one."""
    node_address: str = LOOPBACK_ADDRESS


def list_rank_gpus(plan: GpuCheckPlan, visible_gpu_ids: Sequence[str]) -> tuple[str, ...]:
    return tuple(visible_gpu_ids) if plan.device == "cuda" else ("",) * REHEARSAL_RANKS


def measure_collectives(
    plan: GpuCheckPlan, gpus: Sequence[str], folder: Path, rank_place: RankPlace = RankPlace()
) -> CollectiveRates | Unmeasured:
    """Run this node's ranks of an all-reduce. The node of rank 0 has the figures."""
    ranks = rank_place.world_size or len(gpus)
    if ranks < 2:
        return Unmeasured("one GPU has nobody to exchange with", is_failure=False)
    order = CollectivesRequest(
        device=plan.device,
        size_bytes=COLLECTIVE_BYTES_BY_DEVICE[plan.device],
        rounds=COLLECTIVE_ROUNDS,
        rendezvous_dir=str(folder / "stores"),
        report=str(folder / "rates.json"),
    )
    order_path = _write_request(folder / f"order.{rank_place.node}.json", order)
    _run_ranks(plan, COLLECTIVES_MODULE, order_path, gpus, rank_place, COLLECTIVES_TIMEOUT_S)
    if rank_place.first_rank:
        return Unmeasured("the figures are on the first node", is_failure=False)
    return _read_report(order.report, CollectiveRates)


def compare_step_with_transformers(
    plan: GpuCheckPlan,
    gpus: Sequence[str],
    folder: Path,
    *,
    parallel: ParallelConfig | None = None,
    model_dir: Path | None = None,
) -> StepComparison:
    """One step on this node's first GPUs, beside transformers on the CPU.

    On one rank unless `parallel` names a layout, of a tiny model unless `model_dir` names another.
    """
    parallel = parallel or ParallelConfig()
    model_dir = model_dir or write_test_model(folder / "test_model", tp=1, context_tokens=None)
    order = StepRequest(
        device=plan.device,
        dtype=plan.trainer_dtype,
        model_dir=str(model_dir),
        rendezvous_dir=str(folder / "stores"),
        report=str(folder / "step.json"),
        parallel=parallel.model_dump(),
    )
    order_path = _write_request(folder / "order.json", order)
    ranks = gpus[: parallel.world_size]
    _run_ranks(plan, STEP_MODULE, order_path, ranks, RankPlace(), STEP_TIMEOUT_S)
    return _read_report(order.report, StepComparison)


def _run_ranks(
    plan: GpuCheckPlan,
    module: str,
    request_file: Path,
    gpus: Sequence[str],
    rank_place: RankPlace,
    timeout_s: float,
) -> None:
    workers: list[Worker] = []
    try:
        for local_rank, gpu in enumerate(gpus):
            rank = rank_place.first_rank + local_rank
            position = {"RANK": rank, "NUM_TASKS": rank_place.world_size or len(gpus)}
            position |= {"LOCAL_RANK": local_rank, "NODE_RANK": rank_place.node}
            variables = {f"AREAL_HPC_{name}": str(value) for name, value in position.items()}
            variables |= {"AREAL_HPC_HOST": rank_place.node_address, VISIBLE_DEVICES_VARIABLE: gpu}
            workers.append(
                Worker(
                    f"rank {rank}",
                    [plan.pythons["train"], "-m", module, str(request_file)],
                    plan.variables["train"] | variables,
                    request_file.parent / f"rank-{rank}.log",
                )
            )
        await_workers_and_kill_rest(workers, timeout_s)
    finally:
        for worker in workers:
            worker.kill()


def start_and_compare_engine_with_trainer(
    plan: GpuCheckPlan, gpus: Sequence[str], folder: Path
) -> EngineComparison:
    """A cell of one replica with the recipe's flags, compared with the trainer and updated by it.

    Raises:
        ClusterError: SGLang does not know a flag, or does not start.
    """
    inference = build_single_replica_config(plan, len(gpus))
    _raise_if_sglang_rejects_flags(plan, inference)
    paths = RunPaths(folder)
    paths.rendezvous_dir.mkdir(parents=True)
    ensure_service_key(paths.service_key)
    model_dir = write_test_model(paths.starting_model_dir, inference.tp, inference.context_length)
    # The trainer has a GPU to itself where there are enough: NCCL takes no GPU twice.
    is_apart = plan.device == "cpu" or len(gpus) > inference.tp
    serving = gpus[1 : 1 + inference.tp] if len(gpus) > inference.tp else gpus[: inference.tp]
    order = EngineComparisonRequest(
        device=plan.device,
        dtype=inference.dtype,
        model_dir=str(model_dir),
        run_dir=str(folder),
        transport="broadcast" if is_apart else "disk",
        context_tokens=inference.context_length or TINY_MODEL_CONTEXT_TOKENS,
        start_timeout_s=inference.startup_timeout_s,
        report=str(folder / "engine.json"),
    )
    cell = _start_inference_cell(plan, inference, paths, ",".join(filter(None, serving)))
    try:
        trainer = Worker(
            "the trainer",
            [
                *(plan.pythons["train"], "-m", ENGINE_MODULE),
                str(_write_request(folder / "order.json", order)),
            ],
            plan.variables["train"] | {VISIBLE_DEVICES_VARIABLE: gpus[0]},
            folder / "trainer.log",
        )
        await_workers_and_kill_rest(
            [trainer], inference.startup_timeout_s + ENGINE_TIMEOUT_S, server=cell
        )
    except ClusterError as error:
        raise _get_error_left_by_cell(error, folder / "cell.json") from error
    finally:
        cell.stop()
    return _read_report(order.report, EngineComparison)


def build_single_replica_config(plan: GpuCheckPlan, gpus: int) -> InferenceConfig:
    """The recipe's replica alone on this node, with as many ranks as it has there at most. Pure.

    A rehearsal leaves further options out: those of GPUs would not start on a CPU.
    """
    config = InferenceConfig.model_validate(plan.inference)
    changed: dict[str, Any] = {"cells": 1, "cells_per_job": 1, "replicas_per_cell": 1}
    changed |= {"nodes_per_replica": 1, "tp": config.tp // config.nodes_per_replica}
    changed |= {"device": plan.device, "max_restarts": 0}
    if plan.device == "cpu":
        changed |= {"tp": 1, "dtype": "float32", "extra_args": (), "max_total_tokens": None}
    elif changed["tp"] > gpus:
        changed["tp"] = max(size for size in range(1, gpus + 1) if changed["tp"] % size == 0)
    return config.model_copy(update=changed)


def write_test_model(model_dir: Path, tp: int, context_tokens: int | None) -> Path:
    """A tiny random model that `tp` ranks can share, with heads of a size that GPU kernels take."""
    heads = max(2, tp)
    make_tiny_model(
        model_dir,
        ["one two three four five six seven eight nine ten"],
        max_position_embeddings=context_tokens or TINY_MODEL_CONTEXT_TOKENS,
        layers=2, hidden=256, heads=2 * heads, kv_heads=heads, head_dim=64, ffn=512, vocab=384,
    )  # fmt: skip
    return model_dir


def _raise_if_sglang_rejects_flags(plan: GpuCheckPlan, inference: InferenceConfig) -> None:
    """Have SGLang's own parser read the command line that would start it, all flags included.

    Raises:
        ClusterError: It knows some of them not.
    """
    told = InferenceConfig.model_validate(plan.inference).extra_args
    command = build_replica_command(
        inference.model_copy(update={"extra_args": told}),
        python=plan.pythons["serve"],
        model_path="model",
        device=plan.device,
        index=0,
        ports=ServerPorts(1, 2),
        random_seed=1,
    )
    words = command.argv[3:]  # behind python -m module
    answer = ask_sglang_to_parse_options(plan.pythons["serve"], [words])
    if answer is None:
        raise ClusterError(
            f"{plan.pythons['serve']} cannot import SGLang",
            key="cluster.serve.python",
            hint="run scripts/setup.sh gpu, or name an environment that has SGLang 0.5.23",
        )
    problems = list(find_option_problems(words, answer.readings[0], answer.known))
    if problems:
        raise ClusterError.from_problems(problems)


def _start_inference_cell(
    plan: GpuCheckPlan, inference: InferenceConfig, paths: RunPaths, gpus: str
) -> Worker:
    config = {
        "run_dir": str(paths.root),
        "cell": format_cell_name(0),
        "inference": inference.model_dump(mode="json"),
        "model_path": str(paths.starting_model_dir),
        "serve_python": plan.pythons["serve"],
        "serve_variables": plan.variables["serve"],
    }
    config_path = paths.root / "cell.json"
    config_path.write_text(json.dumps(config))
    return Worker(
        "the cell",
        [plan.pythons["agents"], "-m", PROCESS_MAIN, INFERENCE_ENTRY, str(config_path)],
        {PARENT_VARIABLE: str(os.getpid()), VISIBLE_DEVICES_VARIABLE: gpus},
        paths.root / "cell.log",
    )


def _get_error_left_by_cell(error: ClusterError, config_path: Path) -> ClusterError:
    left = get_process_error_path(config_path)
    return ClusterError(left.read_text()) if left.exists() else error


def _write_request(path: Path, request: msgspec.Struct) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(request))
    return path


def _read_report(path: str, report_type: type[ReportT]) -> ReportT:
    return msgspec.json.decode(Path(path).read_bytes(), type=report_type)

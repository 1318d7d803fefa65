"""Examination of this GPU node: its facts, an all-reduce, and a run of a tiny model.

Minimum rates are assumptions from data sheets, not measured on GPUs.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from areal_hpc.errors import ArealError, ClusterError
from areal_hpc.inference.server.sglang_server import find_error_line
from areal_hpc.jobs.config import (
    get_computing_variables,
    get_interpreter,
    get_interpreters,
)
from areal_hpc.jobs.node import VISIBLE_DEVICES_VARIABLE
from areal_hpc.launch.doctor.gpu_facts import gather_node_facts, judge_facts
from areal_hpc.launch.doctor.results import CheckResult, fail, ok, warn
from areal_hpc.launch.tiny_model import TINY_MODEL_CONTEXT_TOKENS, make_tiny_model
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import SlurmConfig, WantedGpus
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.recipe.sections.trainer import Dtype
from areal_hpc.rundir.jsonl import read_readable_records, read_tail_lines
from areal_hpc.rundir.paths import ROLES, RunPaths
from areal_hpc.trainer.config import CollectiveRates, CollectivesRequest
from areal_hpc.wire.decoding import decode_json

MIN_NVLINK_ALLREDUCE_BYTES_PER_S = 100e9
"""Minimum rate of an all-reduce within a node with NVLink, which has 300 GB/s per direction on an
A100, 450 on an H100; half of these would still be above."""
MIN_PCIE_ALLREDUCE_BYTES_PER_S = 5e9
"""Minimum rate without NVLink: PCIe 4.0 has 32 GB/s per direction, shared by several GPUs."""
MAX_ENGINE_LOGPROB_GAP_BY_DTYPE = {"float32": 1e-3, "bfloat16": 0.03}
"""Maximum mean difference of log-probabilities between engine and trainer."""
ISSUE_HINT = "attach --json FILE to an issue"
COLLECTIVES_MODULE = "areal_hpc.trainer.collective_rates"
DIE_WITH_PARENT_MODULE = "areal_hpc.jobs.processes.process_ties"
AGENT_MODULE = "areal_hpc.launch.doctor.gpu"
SIZE_BYTES_BY_DEVICE = {"cuda": 256 << 20, "cpu": 4 << 20}
ROUNDS = 5
RANKS_TIMEOUT_S = 300.0
POLL_S = 0.2
LOG_TAIL_BYTES = 65536
REHEARSAL_RANKS = 2
STEPS = 2
"""Steps of the tiny run; the second one is sampled from updated weights."""
RUN_TIMEOUT_S = 600.0
"""Time beyond the recipe's for a replica's start: kernels are compiled at first use."""
STOP_TIMEOUT_S = 60.0
TASKS, SAMPLES, REPLY_TOKENS = 4, 4, 24

ExaminedDevice = Literal["cpu", "cuda"]
MeasuredT = TypeVar("MeasuredT")


@dataclass(frozen=True, slots=True)
class GpuCheckPlan:
    """Settings of an examination, from a recipe or from a recipe's defaults."""

    device: ExaminedDevice
    """Device of the steps; `cpu` rehearses them without a GPU."""
    pythons: dict[str, str]
    """Interpreters by role."""
    variables: dict[str, dict[str, str]]
    """Environment variables by role."""
    inference: InferenceConfig
    dtype: Dtype
    gpus: WantedGpus = "auto"
    hca: str = ""
    """InfiniBand adapters that the site names."""


def build_check_plan(
    recipe: Recipe | None, slurm: SlurmConfig, device: ExaminedDevice
) -> GpuCheckPlan:
    """Build a plan with the interpreters, variables and flags of a run on this node.

    Its trainer shares the node with a server, so that it does not reduce in NVLink's switches.
    """
    defaults = {role: get_interpreter(role, "auto") for role in ROLES} if recipe is None else {}
    variables = get_computing_variables(device)
    own = {role: getattr(recipe.cluster, role).variables for role in ROLES} if recipe else {}
    return GpuCheckPlan(
        device=device,
        pythons=defaults if recipe is None else get_interpreters(recipe),
        variables={role: {**variables.get(role, {}), **own.get(role, {})} for role in ROLES},
        inference=recipe.inference if recipe else InferenceConfig(),
        dtype="float32" if device == "cpu" else recipe.trainer.dtype if recipe else "bfloat16",
        gpus=recipe.cluster.gpus if recipe else "auto",
        hca=slurm.network.nccl.get("NCCL_IB_HCA", ""),
    )


def examine_gpu_node(
    plan: GpuCheckPlan, print_line: Callable[[str], None] = print
) -> Iterator[CheckResult]:
    """Judge facts, then run all steps, even if some fail; takes minutes."""
    facts = gather_node_facts(plan.gpus, plan.pythons, plan.variables)
    if plan.device == "cpu":
        finding = "on processors: it says nothing about any GPU"
        yield warn("rehearsal", finding, "leave --device cpu out on a node with GPUs")
    else:
        yield from judge_facts(facts, plan.hca)
    gpus = list_rank_gpus(plan, facts.visible_gpus)
    if len(gpus) == 1:
        yield ok("all-reduce", "not measured: only one GPU is visible")
        finding = "not measured: one GPU is visible; SGLang and the trainer need one each"
        yield warn("tiny run", finding, "show doctor two GPUs")
    if len(gpus) < 2:
        return
    floor = MIN_PCIE_ALLREDUCE_BYTES_PER_S
    if facts.has_nvlink:
        floor = MIN_NVLINK_ALLREDUCE_BYTES_PER_S
    with tempfile.TemporaryDirectory(
        prefix="areal-hpc-doctor-", ignore_cleanup_errors=True
    ) as scratch:
        folder = Path(scratch)
        print_line("all-reduce ...")
        yield _judge_measured(
            "all-reduce",
            lambda: measure_collectives(plan, gpus, folder / "node"),
            lambda rates: judge_rates(rates, floor),
        )
        print_line(f"{STEPS} steps of a tiny model ...")
        yield _judge_measured(
            "tiny run", lambda: run_tiny_recipe(plan, gpus, folder / "run"), judge_run
        )


def _judge_measured(
    name: str, measure: Callable[[], MeasuredT], judge: Callable[[MeasuredT], CheckResult]
) -> CheckResult:
    try:
        return judge(measure())
    except ArealError as error:
        first = error.problems[0]
        finding = "; ".join(problem.message for problem in error.problems)
        finding += f" (at {first.key})" if first.key else ""
        return fail(name, finding, first.hint or ISSUE_HINT)
    except OSError as error:
        return fail(name, f"{type(error).__name__}: {error}", ISSUE_HINT)


def list_rank_gpus(plan: GpuCheckPlan, visible_gpu_ids: Sequence[str]) -> tuple[str, ...]:
    return tuple(visible_gpu_ids) if plan.device == "cuda" else ("",) * REHEARSAL_RANKS


# Collectives -------------------------------------------------------------------------------------


def measure_collectives(plan: GpuCheckPlan, gpus: Sequence[str], folder: Path) -> CollectiveRates:
    request = CollectivesRequest(
        device=plan.device,
        size_bytes=SIZE_BYTES_BY_DEVICE[plan.device],
        rounds=ROUNDS,
        rendezvous_dir=str(folder / "stores"),
        report=str(folder / "rates.json"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    request_file = folder / "request.json"
    request_file.write_bytes(msgspec.json.encode(request))
    run_ranks(plan, COLLECTIVES_MODULE, request_file, gpus)
    return decode_json(Path(request.report).read_bytes(), CollectiveRates)


def run_ranks(plan: GpuCheckPlan, module: str, request_file: Path, gpus: Sequence[str]) -> None:
    """Run `python -m module REQUEST_FILE` as ranks, a GPU each, and wait until all have ended."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, gpu in enumerate(gpus):
            variables = {
                "AREAL_HPC_RANK": str(rank),
                "AREAL_HPC_NUM_TASKS": str(len(gpus)),
                "AREAL_HPC_LOCAL_RANK": str(rank),
                "AREAL_HPC_NODE_RANK": "0",
                VISIBLE_DEVICES_VARIABLE: gpu,
            }
            command = [plan.pythons["train"], "-m", module, str(request_file)]
            log = request_file.parent / f"rank-{rank}.log"
            ranks.append(_start_process(command, log, plan.variables["train"] | variables))
        _await_ranks(ranks, request_file.parent)
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


def _await_ranks(ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    give_up_at = time.monotonic() + RANKS_TIMEOUT_S
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                log = read_tail_lines(folder / f"rank-{rank}.log", LOG_TAIL_BYTES)
                line = find_error_line(log.decode(errors="replace")) or "no output"
                raise ClusterError(f"rank {rank} exited with code {code}: {line}")
        late = [f"rank {rank}" for rank, code in enumerate(codes) if code is None]
        if not late:
            return
        if time.monotonic() > give_up_at:
            raise ClusterError(f"no end of {', '.join(late)} within {RANKS_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)


def judge_rates(rates: CollectiveRates, floor_bytes_per_s: float) -> CheckResult:
    reduced, ring = rates.all_reduce_bytes_per_s / 1e9, rates.ring_bytes_per_s / 1e9
    finding = (
        f"{rates.ranks} ranks over {rates.backend}, {rates.size_bytes >> 20} MiB: "
        f"all-reduce {reduced:.3g} GB/s, ring {ring:.3g} GB/s"
    )
    if rates.wrong_elements:
        finding += f"; {rates.wrong_elements} elements of the results are wrong"
        hint = "nvidia-smi -q -d ECC; NCCL_P2P_DISABLE=1 tells whether direct copies are at fault"
        return fail("all-reduce", finding, hint)
    # A rehearsal over gloo has no floor. `not >=` so that NaN fails.
    if rates.backend == "nccl" and not rates.all_reduce_bytes_per_s >= floor_bytes_per_s:
        expected = f"{finding}; expected at least {floor_bytes_per_s / 1e9:g} GB/s"
        hint = "nvidia-smi topo -m; is P2P disabled (NCCL_P2P_DISABLE, ACS in the BIOS)?"
        return fail("all-reduce", expected, hint)
    return ok("all-reduce", finding)


# A run -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TinyRun:
    """Figures of a short run of a tiny model, by step."""

    dtype: str
    mean_gaps: tuple[float, ...]
    """Mean difference of log-probabilities between SGLang and the trainer. From the second step on
    SGLang has updated weights."""
    gradient_norms: tuple[float, ...]


def run_tiny_recipe(plan: GpuCheckPlan, gpus: Sequence[str], folder: Path) -> TinyRun:
    """Train a tiny model here with the recipe's interpreters, variables and SGLang flags."""
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
    paths = RunPaths(folder / "runs" / "doctor" / "gpu")
    steps = [row for row in read_readable_records(paths.metrics) if "reward/mean" in row]
    if len(steps) != STEPS:
        raise ClusterError(f"the run left {len(steps)} of {STEPS} steps in {paths.metrics}")
    return TinyRun(
        plan.dtype,
        tuple(row["logprob/engine_trainer_mean_abs_diff"] for row in steps),
        tuple(row["grad_norm"] for row in steps),
    )


def build_tiny_recipe(
    plan: GpuCheckPlan, inference: InferenceConfig, gpus: Sequence[str], model_dir: Path
) -> Mapping[str, Any]:
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
            "dtype": plan.dtype,
            "total_steps": STEPS,
            "batch_size": TASKS,
            "optimizer": {"lr": 3e-4, "weight_decay": 0.0},
        },
    }


def build_single_replica_config(plan: GpuCheckPlan, gpus: int) -> InferenceConfig:
    """Reduce the recipe's inference to one replica on this node, beside a trainer of one GPU. Pure.

    A rehearsal drops `extra_args`: SGLang does not start on a CPU with options for GPUs.
    """
    config = plan.inference
    changes: dict[str, Any] = {"cells": 1, "replicas_per_cell": 1, "max_restarts": 0}
    changes |= {"nodes_per_replica": 1, "tp": config.tp // config.nodes_per_replica}
    if plan.device == "cpu":
        changes |= {"tp": 1, "extra_args": (), "max_total_tokens": 16384}
    elif changes["tp"] >= gpus:
        changes["tp"] = max(size for size in range(1, gpus) if changes["tp"] % size == 0)
    return config.model_copy(update=changes)


def judge_run(run: TinyRun) -> CheckResult:
    """Check that SGLang agrees with the trainer before and after an update."""
    name, bound = "tiny run", MAX_ENGINE_LOGPROB_GAP_BY_DTYPE[run.dtype]
    gaps = ", ".join(f"{gap:.1e}" for gap in run.mean_gaps)
    finding = (
        f"{len(run.mean_gaps)} steps with updates between them; log-probabilities of SGLang "
        f"({run.dtype}) and the trainer differ by {gaps} on average"
    )
    # `not all(...)` so that NaN fails.
    if not all(gap <= bound for gap in run.mean_gaps):
        hint = f"another inference.extra_args --attention-backend; {ISSUE_HINT}"
        return fail(name, f"{finding}; {bound:g} is rounding", hint)
    if not all(norm > 0 for norm in run.gradient_norms):
        return fail(name, f"{finding}; a step had no gradient", ISSUE_HINT)
    return ok(name, finding)


# Tasks and agent of the tiny run: a model with random weights gets different rewards -------------


class DistinctLettersAgent:
    """Agent that makes one call; its reward is the number of distinct characters in the reply."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        from openai import AsyncOpenAI

        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        completion = await client.chat.completions.create(
            model="default", messages=data["messages"]
        )
        return float(len(set(completion.choices[0].message.content or "")))


def list_tasks(size: int) -> Iterator[dict[str, Any]]:
    for number in range(size):
        yield {"messages": [{"role": "user", "content": f"one two three {number}"}]}

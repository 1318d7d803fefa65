"""Two steps of a tiny model through the path of every run, weight updates included."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_hpc.errors import ClusterError
from areal_hpc.launch.doctor.gpu.report import GpuCheckPlan, TinyRun, Unmeasured
from areal_hpc.launch.tiny_model import TINY_MODEL_CONTEXT_TOKENS, make_tiny_model
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths

STEPS = 2
"""The second one is sampled from weights that an update brought."""
TIMEOUT_S = 600.0
"""On top of the recipe's time for the start of a replica: kernels are compiled at first use."""
STOP_TIMEOUT_S = 60.0
DIE_WITH_PARENT_MODULE = "areal_hpc.jobs.processes.die_with_parent"
AGENT_MODULE = "areal_hpc.launch.doctor.gpu.tiny_agent"
TASKS, SAMPLES, REPLY_TOKENS = 4, 4, 24
SHARED_GPU = Unmeasured(
    "one GPU is visible, and a run needs one for SGLang and one for the trainer: nothing of a run "
    "was tried here",
    "show doctor two GPUs, or add --nodes",
    is_failure=False,
)


def run_tiny_recipe(plan: GpuCheckPlan, gpus: Sequence[str], folder: Path) -> TinyRun | Unmeasured:
    """Run it on this node with the recipe's interpreters, variables and SGLang flags.

    Raises:
        ClusterError: The run failed, or took too long.
    """
    if plan.device == "cuda" and len(gpus) < 2:
        return SHARED_GPU
    inference = build_single_replica_config(plan, len(gpus))
    heads = max(2, inference.tp)
    model_dir = folder / "model"
    make_tiny_model(
        model_dir,
        ["one two three four five six seven eight nine ten"],
        max_position_embeddings=inference.context_length or TINY_MODEL_CONTEXT_TOKENS,
        layers=2, hidden=256, heads=2 * heads, kv_heads=heads, head_dim=64, ffn=512, vocab=384,
    )  # fmt: skip
    recipe_file = folder / "doctor.yaml"  # JSON is YAML
    recipe_file.write_text(json.dumps(build_tiny_recipe(plan, inference, gpus, model_dir)))
    log = folder / "run.log"
    command = [plan.pythons["agents"], "-m", "areal_hpc", "run", str(recipe_file)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", DIE_WITH_PARENT_MODULE, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(inference.startup_timeout_s + TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()  # the run stops its own processes
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
    if code != 0:
        said = log.read_text(errors="replace").strip().splitlines()
        took = "took too long" if code is None else f"exited with code {code}"
        raise ClusterError(f"the run {took}: {' '.join(said[-8:])}")
    return read_tiny_run(RunPaths(folder / "runs" / "doctor" / "gpu"), inference.dtype)


def build_tiny_recipe(
    plan: GpuCheckPlan, inference: InferenceConfig, gpus: Sequence[str], model_dir: Path
) -> Mapping[str, Any]:
    """The recipe of the run, as a tree. Pure."""
    roles = {
        role: {"python": plan.pythons[role], "variables": plan.variables[role]}
        for role in ("serve", "train", "agents")
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

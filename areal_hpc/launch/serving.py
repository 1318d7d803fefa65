"""A checkpoint served on this machine without a trainer: a cell of a run that only serves."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.inference.config import resolve_device
from areal_hpc.launch.evaluation import LOADED_VERSION, MODEL_CONFIG_FILE
from areal_hpc.launch.foreground_launcher import STOP_MARGIN_S, find_job_failure
from areal_hpc.launch.job_places import ThisMachine, find_gpu_problems
from areal_hpc.launch.plan import JobStage, PlanInputs, plan_cell_job
from areal_hpc.launch.prepare import prepare_run
from areal_hpc.recipe.loading import build_recipe, load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import format_cell_name, format_proxy_name, read_service_key
from areal_hpc.rundir.service_client import ServiceClient
from areal_hpc.rundir.telemetry.events import EventFollower
from areal_hpc.slurm.submit import JobHandle, stop_jobs
from areal_hpc.wire.proxy import ProxyHealth

POLL_S = 0.5
MAX_DEATHS_BEFORE_READY = 2
"""Deaths of a starting server before it is given up: the first may be a lost race for a port."""
_CELL = format_cell_name(0)


def build_serving_recipe(model_dir: Path, recipe_file: Path | None = None) -> Recipe:
    """Build the recipe of a run that serves a model, in a new run directory.

    Servers, sampling and device are those of `recipe_file`, or of the run that exported the model.

    Raises:
        RecipeError: The folder is no model, or the recipe cannot be read.
    """
    model = model_dir.resolve()
    if not (model / MODEL_CONFIG_FILE).is_file():
        raise RecipeError(
            f"there is no run and no model at {model_dir}",
            hint=f"give a run directory, or a model's, which has a {MODEL_CONFIG_FILE}",
        )
    run = RunPaths(model.parent.parent)
    if recipe_file is None and run.recipe.exists() and run.export_dir(model.name) == model:
        recipe_file = run.recipe
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", model.name).lstrip("_.-")
    values: dict[str, Any] = {
        "experiment_name": "start",
        "trial_name": f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}",
        "model": {"path": model},
    }
    if recipe_file is None:
        dtype = "float32" if resolve_device("auto") == "cpu" else "bfloat16"
        return build_recipe(
            {**values, "cluster": {"fileroot": "runs"}, "trainer": {"dtype": dtype}}
        )
    like = load_recipe(recipe_file)
    rollout, trainer = like.rollout, like.trainer
    return build_recipe(
        {
            **values,
            "seed": like.seed,
            "cluster": like.cluster,
            "inference": like.inference.model_copy(update={"cells": 1, "nodes_per_replica": 1}),
            "proxy": like.proxy,
            "rollout": {
                "sampling": rollout.sampling,
                "agent": {"sampling": rollout.agent.sampling},
            },
            "trainer": {"device": trainer.device, "dtype": trainer.dtype},
        }
    )


def plan_serving(
    recipe: Recipe, paths: RunPaths, plan_inputs: PlanInputs | None
) -> tuple[JobStage, ...]:
    """Plan the job of one cell without a driver: nothing but its proxy's callers asks the model."""
    inputs = plan_inputs or PlanInputs(1, {}, "python", ())
    job = plan_cell_job(recipe, paths, inputs, _CELL, (), LOADED_VERSION)
    processes = [process for process in job.processes if process.name != "driver"]
    return (JobStage("serve", replace(job, processes=processes), (), paths.finished_marker),)


@contextmanager
def serve_model(recipe: Recipe, print_line: Callable[[str], None]) -> Iterator[RunPaths]:
    """Serve a recipe's model here while the context lasts; yield the directory of its records.

    Raises:
        RecipeError: Something that the recipe names is missing, or there are too few GPUs.
        ClusterError: The server does not start.
    """
    stages = plan_serving(recipe, RunPaths(recipe.run_dir), None)
    problems = find_gpu_problems(recipe, os.environ, stages)
    with prepare_run(
        recipe,
        print_line=lambda line: None,  # its notes are about training
        known_problems=problems,
        plan=plan_serving,
    ) as ready:
        paths, (stage,) = ready.paths, ready.remaining_stages
        place, events = ThisMachine(recipe, ready), EventFollower(ready.paths.events)
        for line in place.assign_stage(stage):
            print_line(line)
        print_line(f"serve    {recipe.model.path}\nrecords  {paths.root}")
        handle = place.submit_job(stage.leader)
        try:
            _await_serving(handle, paths, paths.log_dir(ready.attempt), events)
            yield paths
        finally:
            stop_jobs([handle], recipe.cluster.stop_grace_s + STOP_MARGIN_S)


def _await_serving(
    handle: JobHandle, paths: RunPaths, log_dir: Path, events: EventFollower
) -> None:
    key, deaths = read_service_key(paths.service_key), list[dict[str, Any]]()
    proxy = ServiceClient(paths.rendezvous_dir, format_proxy_name(_CELL), key)
    with closing(proxy):
        while True:
            if failure := find_job_failure(handle, log_dir):
                raise failure
            new_events = events.read_new_events()
            deaths += [event for event in new_events if event["event"] == "replica_died"]
            if len(deaths) >= MAX_DEATHS_BEFORE_READY:
                raise ClusterError(
                    f"SGLang ended {len(deaths)} times as it started: it {deaths[-1]['reason']}; "
                    f"{deaths[-1]['last_line']}",
                    key=deaths[-1]["log"],
                    hint="if memory is short, end what else uses this machine or its GPUs, or name "
                    "a --recipe with a smaller inference.max_total_tokens",
                )
            with suppress(ClusterError):  # the proxy has not started
                if proxy.call("/healthz", None, ProxyHealth).replicas_serving:
                    return
            time.sleep(POLL_S)

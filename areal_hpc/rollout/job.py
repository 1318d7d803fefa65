"""Process of the rollout driver: it finds ledger and proxy, builds the agents, runs episodes."""

import asyncio
import logging
import sys
from typing import Any

import uvloop

from areal_hpc.jobs.node import get_job_start_number
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.rollout.agent import Agent, load_agent, make_http_client
from areal_hpc.rollout.concurrency import AdaptiveSlots, EngineLoadReader
from areal_hpc.rollout.config import RolloutJobConfig
from areal_hpc.rollout.driver import Driver
from areal_hpc.rollout.episodes.group import TRAIN, GroupPlayer
from areal_hpc.rollout.execution.agent_sandboxes import make_agent_sandboxes, try_sandbox
from areal_hpc.rollout.execution.subprocess_agent import SubprocessAgent
from areal_hpc.rundir.jobs import IDLE_EXIT_CODE
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import LEDGER_SERVICE, format_proxy_name, read_service_key
from areal_hpc.rundir.run_inputs import TaskSet, TrainSources
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.rundir.telemetry.prometheus import build_samples, register_sample_reader
from areal_hpc.rundir.telemetry.spans import record_state_entry

log = logging.getLogger(__name__)

STOP_POLL_S = 0.1


def run(config: dict[str, Any]) -> None:
    """Drive one cell until the run is over or a stop is requested."""
    job = RolloutJobConfig.model_validate(config)
    sys.path[:0] = [folder for folder in job.sys_path if folder not in sys.path]
    recipe = job.recipe
    execution, rollout = recipe.rollout.agent, recipe.rollout
    agents = {TRAIN: build_agent(execution, rollout.workflow, rollout.workflow_kwargs)} | {
        eval_set.name: build_agent(execution, eval_set.workflow, eval_set.workflow_kwargs)
        for eval_set in recipe.evaluation_sets
    }
    uvloop.run(_drive_cell(job, agents, build_source_agents(recipe)))


def build_agent(
    execution_config: AgentExecutionConfig, workflow: str, kwargs: dict[str, Any]
) -> Agent | None:
    """Build the agent that a recipe names, in worker processes for `subproc`; None for no agent."""
    if not workflow:
        return None
    if execution_config.mode == "subproc":
        return SubprocessAgent(
            workflow, kwargs, execution_config.subproc_max_workers, execution_config
        )
    return load_agent(workflow, kwargs)


def build_source_agents(recipe: Recipe) -> list[Agent | None]:
    """Build the agents of the training set's sources; None for those that `rollout` names."""
    return [
        build_agent(recipe.rollout.agent, source.workflow, source.workflow_kwargs)
        for source in recipe.train_mixture
    ]


async def _drive_cell(
    job: RolloutJobConfig, agents: dict[str, Agent | None], source_agents: list[Agent | None]
) -> None:
    paths, recipe, rollout = RunPaths(job.run_dir), job.recipe, job.recipe.rollout
    # Not before the loop runs: uvloop takes the signal wake-up descriptor when it starts.
    stop = StopRequest.install()
    for agent in (*agents.values(), *source_agents):
        if isinstance(agent, SubprocessAgent):
            await agent.check_agent_builds()
    sandboxes = None
    if rollout.agent.mode == "inline":
        sandboxes = make_agent_sandboxes(rollout.agent)
    else:  # worker processes start the sandboxes of their episodes
        await try_sandbox(rollout.agent)
    if sandboxes is not None:
        await sandboxes.fill()
    key = read_service_key(paths.service_key)
    ledger = AsyncServiceClient(paths.rendezvous_dir, LEDGER_SERVICE, key)
    proxy = AsyncServiceClient(paths.rendezvous_dir, format_proxy_name(job.cell), key)
    http_client = make_http_client(rollout.episode_timeout_s)
    events = EventLog(paths.events, f"driver-{job.cell}")
    tasks = {TRAIN: TaskSet.read(paths.dataset(TRAIN))} | {
        eval_set.name: TaskSet.read(paths.evaluation_tasks(eval_set.name))
        for eval_set in recipe.evaluation_sets
    }
    player = GroupPlayer(
        rollout,
        recipe.evaluation_sets,
        agents={name: agent or agents[TRAIN] for name, agent in agents.items()},
        tasks=tasks,
        proxy=proxy,
        http_client=http_client,
        events=events,
        sandboxes=sandboxes,
        sources=TrainSources.read(paths.train_source_sizes, recipe.train_source_names),
        source_agents=[agent or agents[TRAIN] for agent in source_agents],
        kept_files_dir=paths.kept_files_dir,
    )
    load_reader = EngineLoadReader(paths.rendezvous_dir, job.cell, key)
    adaptive_slots = None
    if rollout.adaptive_concurrency:
        adaptive_slots = AdaptiveSlots(
            load_reader.read,
            floor=recipe.min_episode_slots_per_cell,
            ceiling=recipe.episode_slots_per_cell,
            increase=rollout.episodes_per_ticket,
        )
    driver = Driver(
        job.cell,
        player,
        episode_slots=recipe.episode_slots_per_cell,
        episodes_per_ticket=rollout.episodes_per_ticket,
        ledger=ledger,
        proxy=proxy,
        events=events,
        splits=job.splits,
        job_start=get_job_start_number(),
        adaptive_slots=adaptive_slots,
    )

    def collect_metrics() -> dict[str, float]:
        return {
            "tickets_held": len(driver.tickets.held),
            "episode_slots": driver.tickets.slots,
            "free_episode_slots": driver.tickets.free_episode_slots,
            "slowest_episode_s": player.watch.oldest_running_age_s,
            "episodes_ended_total": player.watch.ended,
            "episodes_failed_total": player.watch.failed,
        }

    register_sample_reader(lambda: build_samples("areal_hpc_driver", collect_metrics()))
    record_state_entry("idle")
    try:
        # Without Slurm no other job waits for the nodes, and no process would start the cell again.
        idle_timeout_s = recipe.cluster.idle_timeout_s if get_job_start_number() else float("inf")
        await _run_driver(driver, stop, idle_timeout_s)
    finally:
        if sandboxes is not None:
            await sandboxes.close()
        await http_client.aclose()
        for client in (ledger, proxy, load_reader):
            await client.close()


async def _run_driver(driver: Driver, stop: StopRequest, idle_timeout_s: float) -> None:
    driver_task = asyncio.create_task(driver.run())
    is_idle = False
    while not (driver_task.done() or stop.requested or is_idle):
        await asyncio.wait({driver_task}, timeout=STOP_POLL_S)
        is_idle = driver.is_idle_without_ledger(idle_timeout_s)
    if driver_task.done():
        driver_task.result()
        return
    driver_task.cancel()
    await asyncio.wait({driver_task})
    if is_idle:
        log.info("no ledger for %.0f s and no episode running: releasing the nodes", idle_timeout_s)
        raise SystemExit(IDLE_EXIT_CODE)

"""The rollout driver's process: find ledger and proxy, build the agent, run episodes, stop."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import uvloop
from pydantic import Field

from areal_hpc.cluster.preemption import StopRequest
from areal_hpc.cluster.topology import job_start
from areal_hpc.config import StageConfig
from areal_hpc.rollout.agent import Agent, load_agent
from areal_hpc.rollout.config import AgentConfig, RolloutConfig, SamplingConfig
from areal_hpc.rollout.driver import Driver, Peers
from areal_hpc.rollout.http_client import open_http_client
from areal_hpc.rollout.peer import Peer
from areal_hpc.rollout.subproc import SubprocessAgent
from areal_hpc.rollout.tasks import TaskSet
from areal_hpc.rundir.events import EventLog
from areal_hpc.rundir.jobs import IDLE_EXIT_CODE
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import LEDGER, ensure_admin_key, format_proxy_name
from areal_hpc.wire.ledger import Split

log = logging.getLogger(__name__)

STOP_POLL_S = 0.1


class RolloutJobConfig(StageConfig):
    """All a driver needs to know."""

    run_dir: Path
    """The run directory."""
    cell: str
    """The cell it drives: `cell-0`, `cell-1`, ..., or `evaluation`."""
    rollout: RolloutConfig
    """The agent and its limits."""
    evaluation_sampling: SamplingConfig
    """Generation parameters of evaluation episodes."""
    evaluation_workflow: str = ""
    """Dotted path of the agent that plays them, if it is another one."""
    evaluation_workflow_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor."""
    episode_slots: int
    """Episodes this cell runs at once."""
    splits: tuple[Split, ...] = ("train", "valid")
    """What it takes tickets of."""
    sys_path: tuple[str, ...] = ()
    """Folders from which the agent is imported."""
    idle_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Under Slurm: without a ledger and without an episode for so long, the cell goes."""


def run(config: dict[str, Any]) -> None:
    """Drive one cell until the run is over or a stop is requested.

    Raises:
        RecipeError: The agent cannot be built.
        ClusterError: The ledger refuses this driver.
    """
    job = RolloutJobConfig.model_validate(config)
    layout = RunPaths(job.run_dir)
    sys.path[:0] = [folder for folder in job.sys_path if folder not in sys.path]
    how = job.rollout.agent
    agents: dict[Split, Agent | None] = {
        "train": _agent(how, job.rollout.workflow, job.rollout.workflow_kwargs),
        "valid": _agent(how, job.evaluation_workflow, job.evaluation_workflow_kwargs),
    }
    splits: tuple[Split, ...] = ("train", "valid")
    tasks = {split: TaskSet.read(layout.dataset(split)) for split in splits}
    uvloop.run(_drive(job, layout, agents, tasks))


def _agent(how: AgentConfig, workflow: str, kwargs: dict[str, Any]) -> Agent | None:
    if not workflow:
        return None
    if how.mode == "subproc":
        return SubprocessAgent(workflow, kwargs, how.subproc_max_workers)
    return load_agent(workflow, kwargs)


async def _drive(
    job: RolloutJobConfig,
    layout: RunPaths,
    agents: dict[Split, Agent | None],
    tasks: dict[Split, TaskSet],
) -> None:
    # Inside the loop: uvloop takes the signal wake-up descriptor when it starts.
    stop = StopRequest.install()
    for agent in agents.values():
        if isinstance(agent, SubprocessAgent):
            await agent.check()
    key = ensure_admin_key(layout.admin_key)
    peers = Peers(
        ledger=Peer(layout.rendezvous_dir, LEDGER, key),
        proxy=Peer(layout.rendezvous_dir, format_proxy_name(job.cell), key),
    )
    http_client = open_http_client(job.rollout.episode_timeout_s)
    driver = Driver(
        job.cell,
        job.rollout,
        job.evaluation_sampling,
        job.episode_slots,
        agent=agents["train"],
        evaluation_agent=agents["valid"],
        tasks=tasks,
        splits=job.splits,
        peers=peers,
        http_client=http_client,
        events=EventLog(layout.events, f"driver-{job.cell}"),
        job_start=job_start(),
    )
    try:
        # Without Slurm there is nobody to give nodes back to, nor to start the cell again.
        idle_timeout_s = job.idle_timeout_s if job_start() else float("inf")
        await _run_unless_stopped(driver, stop, peers.ledger, idle_timeout_s)
    finally:
        await http_client.aclose()
        await peers.ledger.close()
        await peers.proxy.close()


async def _run_unless_stopped(
    driver: Driver, stop: StopRequest, ledger: Peer, idle_timeout_s: float
) -> None:
    driving = asyncio.create_task(driver.run())
    is_idle = False
    while not (driving.done() or stop.requested or is_idle):
        await asyncio.wait({driving}, timeout=STOP_POLL_S)
        is_idle = driver.is_at_rest and ledger.silent_s >= idle_timeout_s
    if driving.done():
        driving.result()
        return
    driving.cancel()
    await asyncio.wait({driving})
    if is_idle:
        log.info(
            "no ledger for %.0f s and nothing to do: the cell gives its nodes back", idle_timeout_s
        )
        raise SystemExit(IDLE_EXIT_CODE)

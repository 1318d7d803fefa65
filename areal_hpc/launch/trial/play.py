"""Process of a trial: plays each task once, and prints what came of it."""

import asyncio
import contextlib
import logging
import sys
import tempfile
from typing import Any

from areal_hpc.errors import AgentError, ArealError, ClusterError, escape_controls
from areal_hpc.jobs.processes.process_setup import set_up_logging
from areal_hpc.launch.trial.cell import TrialCell, open_trial_cell
from areal_hpc.launch.trial.report import format_trial, format_trial_summary
from areal_hpc.launch.trial.start import TrialConfig
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.rollout.agent import Agent
from areal_hpc.rollout.episodes.auxiliary import load_auxiliary_rule
from areal_hpc.rollout.episodes.episode import EpisodeOutcome, run_episode
from areal_hpc.rollout.episodes.episode_spec import (
    EpisodeSpec,
    build_episode_spec,
    derive_episode_seed,
)
from areal_hpc.rollout.episodes.http_client import make_http_client
from areal_hpc.rollout.execution.agent_sandboxes import make_agent_sandboxes, start_and_stop_sandbox
from areal_hpc.rollout.execution.subprocess_agent import SubprocessAgent
from areal_hpc.rollout.job import build_agent
from areal_hpc.rollout.task_set import TaskSet
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import ensure_service_key, format_proxy_name
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.wire.proxy import SamplingDefaults


def main() -> None:
    set_up_logging(logging.WARNING)
    config = TrialConfig.model_validate_json(sys.stdin.read())
    sys.path[:0] = [folder for folder in config.driver.sys_path if folder not in sys.path]
    try:
        rollout = config.driver.recipe.rollout
        agent = build_agent(rollout.agent, rollout.workflow, rollout.workflow_kwargs)
        assert agent is not None  # mode online is refused before this process starts
        with open_trial_cell(config) as cell:
            failures = asyncio.run(_play_tasks(config, agent, cell))
    except ArealError as error:
        print(escape_controls(f"error: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(AgentError.exit_code if failures else 0)


async def _play_tasks(config: TrialConfig, agent: Agent, cell: TrialCell) -> int:
    """Play each task once; how many failed."""
    job, paths = config.driver, RunPaths(config.driver.run_dir)
    rollout = job.recipe.rollout
    if isinstance(agent, SubprocessAgent):
        await agent.check_agent_builds()
    await start_and_stop_sandbox(rollout.agent)  # as a driver does
    key = ensure_service_key(paths.service_key)
    proxy = AsyncServiceClient(paths.rendezvous_dir, format_proxy_name(job.cell), key)
    http_client: Any = make_http_client(rollout.episode_timeout_s)
    tasks = TaskSet.read_or_empty(paths.dataset("train"))
    sandboxes = None
    if not isinstance(agent, SubprocessAgent):
        sandboxes = make_agent_sandboxes(rollout.agent, warm=0)
    outcomes: list[EpisodeOutcome] = []
    first_failures: dict[str, int] = {}
    try:
        for number in range(len(tasks)):
            # To a file, as agents hand it to their programs.
            with tempfile.TemporaryFile("w+") as stdout:
                with contextlib.redirect_stdout(stdout):
                    outcome = await run_episode(
                        _build_trial_spec(rollout, agent, tasks[number], number),
                        agent,
                        proxy,
                        http_client,
                        sandboxes,
                    )
                stdout.seek(0)
                printed = stdout.read()
            outcomes.append(outcome)
            if outcome.is_node_short:
                raise ClusterError(outcome.reason)
            if outcome.status != "ok":
                failure = str(outcome.error or outcome.reason)
                first = first_failures.setdefault(failure, number)
                if first != number:
                    print(f"--- task {number} failed as task {first} did", flush=True)
                    continue
            session = cell.get_session(outcome.session_id)
            lines = format_trial(number, outcome, session, printed)
            print(escape_controls("\n".join(lines)), flush=True)
    finally:
        await http_client.aclose()
        await proxy.close()
        if isinstance(agent, SubprocessAgent):
            agent.close()
    print("\n".join(format_trial_summary(outcomes, cell.ignored_grammars)), flush=True)
    return sum(outcome.status != "ok" for outcome in outcomes)


def _build_trial_spec(
    rollout: RolloutConfig, agent: Agent, task: dict[str, Any], number: int
) -> EpisodeSpec:
    """An episode as one of training, in a session that belongs to no ticket.

    The proxy keeps what is said in memory alone, and forgets it soon after the end.
    """
    return build_episode_spec(
        rollout,
        agent,
        {**task},
        f"trial-{number}",
        sampling=SamplingDefaults(**rollout.sampling.model_dump()),
        seed=derive_episode_seed(number, 0, 0),
        auxiliary=load_auxiliary_rule(rollout.agent.auxiliary),
        records_sampling_mask=rollout.record_sampling_mask,
        disposable=True,
    )


if __name__ == "__main__":
    main()
